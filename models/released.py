"""The names of weights in the authors' released code, and ours: TRM, HRM, FPRM and EqR share one set of names.

A released name starts with wrappers: `_orig_mod.` (torch.compile), `model.` (the loss head) and `inner.` (the halting
wrapper). They may be there or not; `_orig_mod.` may stand at any place.

Read in the released code: EqR has no puzzle table and keeps no initial states (it draws them), FPRM keeps one,
`L_optimizer.init_vec`, unless it draws them. Released InfiLoop names are not known: query and decay have our own names here,
behind the wrappers, and a file with other names needs a map (scripts/import_checkpoint.py).
"""

import re

COMPILED = "_orig_mod."
WRAPPERS = "_orig_mod.model.inner."
"""What a released training run puts in front of every name."""
IGNORED = (".mask", "puzzle_emb.local_weights", "puzzle_emb.local_ids")
"""Ends of names without knowledge: dropout masks (FPRM), the batch's copy of puzzle rows."""

_NAMES = {
    "embed_tokens.embedding_weight": "token_embedding.weight",
    "embed_pos.embedding_weight": "position_embedding",
    "puzzle_emb.weights": "puzzle_table",
    "lm_head.weight": "lm_head.weight",
    "q_head.weight": "halting.head.weight",
    "q_head.bias": "halting.head.bias",
    "H_init": "H_init",
    "L_init": "L_init",
    "L_optimizer.init_vec": "H_init",  # FPRM's one stream is our outer axis
    "L_level.conv.weight": "block.conv.weight",
    "L_level.alpha_1_param": "block.raw_alpha_1",
    "L_level.alpha_2_param": "block.raw_alpha_2",
    **{name: name for a in ("inner", "outer") for name in (f"{a}.query", f"{a}.raw_decay", f"{a}.raw_step")},
}
_LEVELS = {"L_level": "block", "H_level": "outer_block"}
_LAYER = {
    "self_attn.qkv_proj": "attention.qkv",
    "self_attn.o_proj": "attention.out",
    "mlp_t.gate_up_proj": "token_mlp.gate_up",
    "mlp_t.down_proj": "token_mlp.down",
    "mlp.gate_up_proj": "mlp.gate_up",
    "mlp.down_proj": "mlp.down",
}
_IN_LAYER = re.compile(r"(\w+)\.layers\.(0|[1-9]\d*)\.([\w.]+)\.weight")


def without_wrappers(name: str) -> str:
    """The name behind `_orig_mod.`, `model.` and `inner.`."""
    return name.replace(COMPILED, "").removeprefix("model.").removeprefix("inner.")


def our_name(name: str) -> str | None:
    """Our name of a released weight, with any wrappers; None for one we do not know."""
    bare = without_wrappers(name)
    if match := _IN_LAYER.fullmatch(bare):
        level, index, part = match.groups()
        return f"{_LEVELS[level]}.layers.{index}.{_LAYER[part]}.weight" if level in _LEVELS and part in _LAYER else None
    # `inner.query` without wrappers is the inner axis' query, not `query` in a wrapper.
    return _NAMES.get(bare) or _NAMES.get(name.replace(COMPILED, "").removeprefix("model."))


def released_name(ours: str, fprm: bool = False) -> str | None:
    """The released name, without wrappers, of a weight of ours (fprm: in FPRM); None where the released code has none."""
    if match := _IN_LAYER.fullmatch(ours):
        level, index, part = match.groups()
        theirs = {v: k for k, v in (_LEVELS | _LAYER).items()}
        return f"{theirs[level]}.layers.{index}.{theirs[part]}.weight" if level in theirs and part in theirs else None
    if ours == "H_init":
        return "L_optimizer.init_vec" if fprm else "H_init"
    return {v: k for k, v in _NAMES.items()}.get(ours)

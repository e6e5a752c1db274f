"""Settings of a released checkpoint: what its tensors show, what its all_config.yaml says, and presets for the rest."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from data.sudoku import Box
from models.released import released_name
from trainer.compose import compose_launch, parse_overrides
from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.mistakes import full_key

# The presets of each family: what a state_dict cannot tell, unless a configuration file or the user does.
FAMILIES: dict[str, dict[str, Any]] = {
    "trm": {"model": "trm", "schedule.segments": 16},
    "hrm": {"model": "hrm", "schedule.H_cycles": 2, "schedule.L_cycles": 2, "schedule.segments": 16},
    "infiloop": {"model": "infiloop"},
    "fprm": {"model": "fprm", "schedule.H_cycles": 1, "schedule.L_cycles": 6, "schedule.segments": 12},
    "fprm, Maze": {"model.block.norm": "output", "schedule.segments": 24},  # told by its convolution, beside the above
    "eqr": {"model": "eqr", "model.positions": "rope", "schedule.segments": 16},  # rope with attention alone
}
CELLS = {11: 81, 8: 36, 6: 900, 12: 900}
"""Cells by vocabulary: Sudoku 9x9 and 6x6, Maze 30x30, ARC 30x30."""
SUDOKU_DATA = {81: "sudoku", 36: "sudoku6", 16: "sudoku4"}

# all_config.yaml: keys below `arch` and the settings they are. Keys in none of these tables are ignored.
_PLAIN = {
    "hidden_size": "model.hidden_size",
    "num_heads": "model.num_heads",
    "L_layers": "model.layers",
    "expansion": "model.expansion",
    "puzzle_emb_ndim": "model.puzzle_emb_dim",
    "rms_norm_eps": "model.rms_norm_eps",
    "rope_theta": "model.rope_theta",
    "H_init_std": "model.initial_std",
}
_NESTED = {
    "H_cycles": "schedule.H_cycles",
    "L_cycles": "schedule.L_cycles",
    "halt_max_steps": "schedule.segments",
    "halt_exploration_prob": "schedule.halt_exploration",
}
_OF_FAMILY = {
    "fprm": {
        "max_iter": "schedule.segments",
        "n_backwards_L": "schedule.L_cycles",
        "init_std": "model.initial_std",
        "alpha_1_init": "model.block.alpha_1",
        "alpha_2_init": "model.block.alpha_2",
        "conv_kernel_size": "model.block.kernel",
        "norm_placement": "model.block.norm",
        "stepsize": "model.connection.step",
        "decay_patience": "model.connection.patience",
        "stepsize_decay_train": "model.connection.decay_train",
        "stepsize_decay_eval": "model.connection.decay_eval",
        "fp_thresh": "model.connection.threshold",
    },
    "eqr": {**_NESTED, "lambda_": "model.connection.step", "noise_scale": "model.connection.noise"},
}
# What there is no setting for: the value that is built in here.
_BUILT_IN = {
    "causal": False,
    "softmax_temp": 1.0,
    "conv_bias": False,
    "outer_only": False,
    "normalize_input_injection": False,
    "additive_noise_std": 0.0,
    "norm_type": "pre-norm",
    "residual_scale": "input-independent",
    "halting_mechanism": "fixed_point",
}
_CONVOLUTIONS = {"conv1d": "causal", "conv2d": "grid", "none": "none"}


@dataclass
class Settled:
    """The composed settings, and where each comes from."""

    config: TrainConfig
    family: str
    seq_len: int
    origin: dict[str, str] = field(default_factory=dict)
    """By full key; what is missing here is the family's preset."""


def family_of(weights: dict[str, Tensor]) -> str:
    """The family that the weights' names belong to."""
    if "block.raw_alpha_1" in weights:
        return "fprm"
    if any(name.startswith("outer_block.") for name in weights):
        return "hrm"
    if any(name.endswith((".query", ".raw_decay")) for name in weights):
        return "infiloop"
    return "trm" if "H_init" in weights else "eqr"


def shown_by(path: Path, weights: dict[str, Tensor], family: str) -> dict[str, Any]:
    """Settings that the tensors' names and shapes leave no choice about."""
    layers = {name.split(".")[2] for name in weights if name.startswith("block.layers.")}
    embedding, _ = (_matrix(path, weights, n) for n in ("token_embedding.weight", "block.layers.0.mlp.down.weight"))
    mlp = "block.layers.0.token_mlp.down.weight" in weights
    settings: dict[str, Any] = {
        "model.hidden_size": embedding.shape[1],
        "model.layers": len(layers),
        "model.mixer": "mlp" if mlp else "attention",
        "model.initial_state": "fixed" if "H_init" in weights else "noise",
        "model.levels": "untied" if any(n.startswith("outer_block.") for n in weights) else "shared",
    }
    if "position_embedding" in weights:
        settings["model.positions"] = "learned"
    elif mlp:
        settings["model.positions"] = "none"  # rotary positions have no effect on the token mixer
    table = weights.get("puzzle_table")
    settings["model.puzzle_emb_dim"] = 0 if table is None else table.shape[-1]
    if table is None:
        settings["model.puzzle_tokens"] = 0
    if family == "fprm":
        kernel = weights.get("block.conv.weight")
        dims = 0 if kernel is None else kernel.dim()
        settings["model.block.convolution"] = {3: "causal", 4: "grid"}.get(dims, "none")
        if kernel is not None:
            settings["model.block.kernel"] = kernel.shape[-1]
    if family == "infiloop":
        axes = {name.partition(".")[0] for name in weights if name.endswith((".query", ".raw_decay"))}
        settings["model.axes"] = "both" if len(axes) == 2 else axes.pop()
        settings["model.connection.content_score"] = any(name.endswith(".query") for name in weights)
        settings["model.connection.beta"] = "learned" if any(n.endswith(".raw_decay") for n in weights) else "fixed"
    return settings


def told_by(path: Path, family: str) -> dict[str, tuple[Any, str]]:
    """Settings that a released all_config.yaml holds, with its words for each; and `seq_len` where it is there."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable as YAML ({str(error).splitlines()[0]})") from error
    arch = content.get("arch", content) if isinstance(content, dict) else None
    if not isinstance(arch, dict):
        raise UserError(f"{path}: expected the all_config.yaml that a released run writes, with a section `arch`")
    built_in = _BUILT_IN if family == "fprm" else {"causal": False}
    if family == "eqr" and "H_init_std" in arch:
        built_in = built_in | {"L_init_std": arch["H_init_std"]}
    for key, value in built_in.items():
        if key in arch and arch[key] != value:
            raise UserError(f"{path}: {key}={arch[key]}: only {key}={value} can be imported")
    told: dict[str, tuple[Any, str]] = {}

    def tell(ours: str, theirs: str, value: Any) -> None:
        told[ours] = (value, f"{theirs}={arch.get(theirs)}")

    for theirs, ours in (_PLAIN | _OF_FAMILY.get(family, _NESTED)).items():
        if arch.get(theirs) is not None:
            tell(ours, theirs, arch[theirs])
    if "mlp_t" in arch:
        tell("model.mixer", "mlp_t", "mlp" if arch["mlp_t"] else "attention")
    if "pos_encodings" in arch and not arch.get("mlp_t"):  # with the token mixer they have no effect
        tell("model.positions", "pos_encodings", arch["pos_encodings"] or "none")
        if told["model.positions"][0] not in ("rope", "learned", "none"):
            raise UserError(
                f"{path}: pos_encodings={arch['pos_encodings']}: only rope, learned and none can be imported"
            )
    dim, width, tokens = (arch.get(key) or 0 for key in ("puzzle_emb_ndim", "hidden_size", "puzzle_emb_len"))
    if type(dim) is int and type(width) is int and width > 0 and "puzzle_emb_ndim" in arch:
        tell("model.puzzle_tokens", "puzzle_emb_len", tokens or -(-dim // width))
    if family == "fprm" and "fixed_init" in arch:
        tell("model.initial_state", "fixed_init", "fixed" if arch["fixed_init"] else "noise")
    if family == "fprm" and "conv_type" in arch:
        tell("model.block.convolution", "conv_type", _CONVOLUTIONS.get(str(arch["conv_type"])))
    if type(arch.get("seq_len")) is int:
        tell("seq_len", "seq_len", arch["seq_len"])
    if type(content.get("seed")) is int:
        told["seed"] = (content["seed"], f"seed={content['seed']}")
    return told


def settle(
    path: Path, weights: dict[str, Tensor], told_in: Path | None, lines: list[str], seq_len: int | None
) -> Settled:
    """The settings: yours (`lines`, as train.py reads them), then the weights', the file's, the preset's.

    Raises UserError where yours or the file's contradict the weights.
    """
    given = {full_key(o): line for o, line in zip(parse_overrides(lines, TrainConfig, sweep=False), lines, strict=True)}
    family = family_of(weights)
    if family in ("fprm", "infiloop") and given.get("model", f"model={family}") != f"model={family}":
        raise UserError(f"{given['model']}: the weights of {path} have the names of model={family}; leave it out")
    shown = shown_by(path, weights, family)
    told = {} if told_in is None else told_by(told_in, family)
    for key, (value, theirs) in told.items():
        if key in shown and shown[key] != value:
            raise UserError(f"{told_in}: {theirs}, but the weights of {path} say {key}={shown[key]}")
    preset = FAMILIES[family] | (FAMILIES["fprm, Maze"] if shown.get("model.block.convolution") == "causal" else {})
    chosen = preset | {key: value for key, (value, _) in told.items() if key != "seq_len"} | shown
    origin = {key: f"{told_in and told_in.name}: {theirs}" for key, (_, theirs) in told.items()}
    origin |= dict.fromkeys(shown, "weights")
    config = _compose(chosen, given)
    if seq_len is not None:
        if seq_len <= 0:
            raise UserError(f"--seq-len={seq_len}: expected a number of cells, above 0")
        origin["seq_len"] = "you"
    elif "seq_len" in told:
        seq_len = told["seq_len"][0]
    known = "model.puzzle_tokens" in {*given, *told, *shown}
    seq_len, tokens = _lengths(path, weights, seq_len, config.model.puzzle_tokens if known else None)
    if tokens is not None and "model.puzzle_tokens" not in given:
        chosen["model.puzzle_tokens"] = tokens
        origin["model.puzzle_tokens"] = "weights"
    origin.setdefault("seq_len", "weights" if _positions(weights) else "vocabulary")
    multiples = {"model.expansion", "model.ffn_multiple"}
    if not multiples & given.keys():
        widths = _widths(path, weights)
        expansion, multiple = _expansion(path, widths, (config.model.expansion, config.model.ffn_multiple))
        if (expansion, multiple) != (config.model.expansion, config.model.ffn_multiple):
            chosen |= {"model.expansion": expansion, "model.ffn_multiple": multiple}
            if "model.expansion" in told and told["model.expansion"][0] != expansion:
                raise UserError(
                    f"{told_in}: {told['model.expansion'][1]}, but the weights of {path} have inner widths {widths} by width"
                )
        origin |= dict.fromkeys(multiples, "weights")
    if "data" not in given:  # which puzzles to evaluate on is yours to choose; evaluate.py checks that they fit
        chosen |= _data_for(weights["token_embedding.weight"].shape[0], seq_len)
    config = _compose(chosen, given)
    flat = flattened(config)
    for key, value in shown.items():
        if flat.get(key) != value:
            raise UserError(f"{given.get(key, key)}: the weights of {path} say {key}={value}")
    return Settled(config, family, seq_len, origin | dict.fromkeys(given, "you"))


def flattened(config: TrainConfig) -> dict[str, Any]:
    """Settings by full key."""

    def leaves(prefix: str, value: Any) -> Iterable[tuple[str, Any]]:
        if isinstance(value, dict):
            for name, below in value.items():
                yield from leaves(f"{prefix}.{name}" if prefix else name, below)
        else:
            yield prefix, value

    return dict(leaves("", config.model_dump(mode="json")))


def sudoku_box(vocabulary: int, seq_len: int) -> Box | None:
    """The Sudoku with this many tokens and cells, the box as square as it gets and lying; None where there is none."""
    digits = math.isqrt(seq_len)
    if digits**2 != seq_len or vocabulary != digits + 2 or digits > 25:
        return None
    rows = max(r for r in range(1, math.isqrt(digits) + 1) if digits % r == 0)
    return Box(rows, digits // rows) if rows > 1 else None


def _data_for(vocabulary: int, seq_len: int) -> dict[str, Any]:
    """Settings of puzzles that the model reads; none where it reads no Sudoku."""
    box = sudoku_box(vocabulary, seq_len)
    if box is None:
        return {}
    settings = {"data": SUDOKU_DATA.get(seq_len, "sudoku9"), "data.box_rows": box.rows, "data.box_cols": box.cols}
    return settings if seq_len in SUDOKU_DATA else settings | {"data.name": f"sudoku{box.digits}"}


def _compose(chosen: dict[str, Any], given: dict[str, str]) -> TrainConfig:
    lines = [f"{key}={json.dumps(value)}" for key, value in chosen.items() if key not in given]
    return compose_launch("config", [*lines, *given.values()], TrainConfig).jobs[0]


def _matrix(path: Path, weights: dict[str, Tensor], name: str) -> Tensor:
    """A weight without which nothing can be said."""
    if name not in weights or weights[name].dim() != 2:
        theirs = released_name(name)
        raise UserError(f"{path}: has no matrix {theirs}; expected the state_dict of a TRM, HRM, FPRM, EqR or InfiLoop")
    return weights[name]


def _positions(weights: dict[str, Tensor]) -> int | None:
    """T, puzzle tokens and cells, where a weight has that many rows."""
    for name in ("block.layers.0.token_mlp.down.weight", "position_embedding"):
        if name in weights:
            return weights[name].shape[0]
    return None


def _lengths(path: Path, weights: dict[str, Tensor], seq_len: int | None, tokens: int | None) -> tuple[int, int | None]:
    """Cells and (where only the weights tell) puzzle tokens, from what is known of them and the positions T."""
    vocabulary, total = weights["token_embedding.weight"].shape[0], _positions(weights)
    if total is None:
        seq_len = CELLS.get(vocabulary) if seq_len is None else seq_len
        if seq_len is None:
            raise UserError(f"{path}: a vocabulary of {vocabulary} does not tell the number of cells; give --seq-len")
        return seq_len, None
    if seq_len is None:
        seq_len = CELLS.get(vocabulary, 0) if tokens is None else total - tokens
    tokens = total - seq_len if tokens is None else tokens
    if seq_len <= 0 or tokens < 0 or seq_len + tokens != total:
        raise UserError(
            f"{path}: its weights have {total} positions, not {seq_len} cells and {tokens} puzzle tokens; give --seq-len, "
            "model.puzzle_tokens, or both"
        )
    return seq_len, tokens


def _widths(path: Path, weights: dict[str, Tensor]) -> dict[int, int]:
    """Inner width of the SwiGLUs by width."""
    down = [_matrix(path, weights, "block.layers.0.mlp.down.weight")]
    if "block.layers.0.token_mlp.down.weight" in weights:
        down.append(weights["block.layers.0.token_mlp.down.weight"])
    return {matrix.shape[0]: matrix.shape[1] for matrix in down}


def _expansion(path: Path, widths: dict[int, int], preset: tuple[float, int]) -> tuple[float, int]:
    """Expansion and multiple that give these inner widths: the preset where it does, else simple ones."""
    simple = [1.0, 4 / 3, 1.5, 2.0, 8 / 3, 3.0, 4.0, 5.0, 6.0, 8.0]
    exact = [1.5 * inner / width for width, inner in widths.items()]
    multiples = sorted({preset[1], 256, 128, 64, 32, 16, 8, 1}, key=lambda m: (m != preset[1], -m))
    for expansion in (preset[0], *simple, *exact):
        for multiple in multiples:
            if all(-(-round(expansion * w * 2 / 3) // multiple) * multiple == inner for w, inner in widths.items()):
                return expansion, multiple
    raise UserError(f"{path}: no expansion gives the inner widths {widths} (width: inner width) of its SwiGLUs")

"""Released weights under our names, and back, bit for bit.

What a file held besides the numbers (its names, dtypes, shapes) is kept as the record of an imported checkpoint:
{their name: {"ours": our name or null, "dtype": ..., "shape": [...]}}, null for a dropout mask, which comes back as ones.
"""

import json
import math
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import softplus_inverse
from models.released import IGNORED, WRAPPERS, our_name, released_name, without_wrappers
from trainer.checkpoint import Checkpoint
from trainer.errors import UserError
from trainer.state_file import some

Names = dict[str, str | None]
"""Their names to ours; null leaves a weight out."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What fits into float32."""
AXES = ("inner", "outer")
DECAYS = {f"{axis}.{kind}": f"{axis}.raw_decay" for axis in AXES for kind in ("lambda", "beta")}
"""Names a map may give a decay that is not stored raw; beta = exp(-lambda), lambda = softplus(raw)."""
TARGETS = {f"{axis}.{leaf}" for axis in AXES for leaf in ("query", "raw_decay")}


def read_names(path: Path) -> Names:
    """A map of names: JSON, {"their name": "our name"}."""
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(names, dict) or not all(v is None or isinstance(v, str) for v in names.values()):
        raise UserError(f'{path}: expected {{"their name": "our name"}}, null for a weight to leave out')
    return names


def named_weights(path: Path, state: dict[str, Tensor], names: Names) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights of the file in float32 by our names, and their record.

    Raises UserError on names that neither we nor `names` know, on two names for one weight, on other dtypes than float32,
    bfloat16 and float16, and on numbers that are not finite.
    """
    targets = {theirs: names[theirs] if theirs in names else our_name(theirs) for theirs in state}
    masks = [t for t in state if t.endswith(IGNORED) and t not in names]
    chosen = {theirs: ours for theirs, ours in targets.items() if theirs not in masks and ours is not None}
    if absent := sorted(names.keys() - state.keys()):
        raise UserError(f"{path}: the map of names has names that the file does not hold: {some(absent)}")
    if unknown := [theirs for theirs in state if theirs not in {*chosen, *masks, *names}]:
        raise UserError(f"{path}: unknown weights: {some(unknown)}; a map of names (--names) can say what they are")
    if wrong := [t for t in chosen if state[t].dtype not in DTYPES]:
        raise UserError(f"{path}: {wrong[0]} is {state[wrong[0]].dtype}; expected float32, bfloat16 or float16")
    if wrong := [t for t in chosen if not state[t].isfinite().all()]:
        raise UserError(f"{path}: holds numbers that are not finite: {some(wrong)}")
    weights: dict[str, Tensor] = {}
    source: dict[str, str] = {}
    record: dict[str, Any] = {}
    for theirs, tensor in state.items():
        entry = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        if theirs.endswith(".mask") and theirs in masks:
            record[theirs] = {"ours": None, **entry}
        if theirs not in chosen:
            continue
        ours, value = chosen[theirs], tensor.to(torch.float32, copy=True).contiguous()
        if ours in DECAYS:
            entry |= {"given": ours.partition(".")[2], "value": tensor.double().flatten().tolist()}
            ours, value = DECAYS[ours], _raw_decay(path, theirs, entry)
        elif ours in TARGETS:  # [1, 1, D] and [1] are as good as [D] and []
            value = value.squeeze()
        if ours in source:
            raise UserError(f"{path}: {source[ours]} and {theirs} are the same weight, {ours}")
        weights[ours], source[ours], record[theirs] = value, theirs, {"ours": ours, **entry}
    return weights, record


def _raw_decay(path: Path, theirs: str, entry: dict[str, Any]) -> Tensor:
    value = entry["value"][0] if len(entry["value"]) == 1 else math.nan
    lam = -math.log(value) if entry["given"] == "beta" and value > 0 else value
    if not lam > 0:
        raise UserError(
            f"{path}: {theirs} = {entry['value']} is no {entry['given']} of an axis; expected one number, "
            + ("between 0 and 1" if entry["given"] == "beta" else "above 0")
        )
    return torch.tensor(softplus_inverse(lam))


def released_state(
    checkpoint: Checkpoint, which: Literal["ema", "raw"], prefix: str | None, names: Names
) -> dict[str, Tensor]:
    """The checkpoint's weights as a released state_dict.

    An imported checkpoint gives the tensors that it was made from, but for what was ignored; `prefix` replaces the wrappers
    of all names (null: as they were). One of our own gets the released names behind `prefix` (null: as a released run writes
    them), FPRM's dropout masks, and `names` for what the released code has no name for.
    """
    weights = checkpoint.build_model(which).state_dict()
    if checkpoint.imported is not None:
        if names:
            raise UserError(f"{checkpoint.path}: imported, so its names are known; leave the map of names out")
        restored = {theirs: _restored(entry, weights) for theirs, entry in checkpoint.imported["tensors"].items()}
        if prefix is None:
            return restored
        return {prefix + without_wrappers(theirs): tensor for theirs, tensor in restored.items()}
    config = checkpoint.config.model
    if config.initial_state == "noise":  # drawn, so that the buffers mean nothing and the released code keeps none
        weights = {name: t for name, t in weights.items() if name not in ("H_init", "L_init")}
    if config.puzzle_emb_dim == 0:
        del weights["puzzle_table"]
        if config.puzzle_tokens:  # which enter as zeros; the released code has them from a table alone
            weights["puzzle_table"] = torch.zeros(1, config.hidden_size)
    mapped = {ours: theirs for theirs, ours in names.items() if ours is not None}
    lead = WRAPPERS if prefix is None else prefix
    state: dict[str, Tensor] = {}
    for ours, tensor in weights.items():
        theirs = mapped.pop(ours, None)
        for kind in ("lambda", "beta"):
            if ours.endswith(".raw_decay") and (given := mapped.pop(ours.replace("raw_decay", kind), None)):
                lam = F.softplus(tensor)
                theirs, tensor = given, torch.exp(-lam) if kind == "beta" else lam
        bare = released_name(ours, fprm=config.block.kind == "tied")
        if theirs is None and bare is None:
            raise UserError(
                f"{checkpoint.path}: the released code has no weight like {ours}; --names can give it a name"
            )
        state[theirs or f"{lead}{bare}"] = tensor
    if mapped:
        raise UserError(f"{checkpoint.path}: has no weights {some(sorted(mapped))}, which the map names")
    if config.block.kind == "tied":
        state |= {
            f"{name.removesuffix('weight')}mask": torch.ones_like(t)
            for name, t in state.items()
            if t.dim() == 2 and name.endswith(".weight")
        }
    return state


def _restored(entry: dict[str, Any], weights: dict[str, Tensor]) -> Tensor:
    """A tensor of the file that a checkpoint was imported from."""
    dtype, shape = getattr(torch, entry["dtype"]), entry["shape"]
    if entry["ours"] is None:
        return torch.ones(shape, dtype=dtype)
    if "value" in entry:
        return torch.tensor(entry["value"], dtype=dtype).reshape(shape)
    return weights[entry["ours"]].to(dtype).reshape(shape)

"""State dicts of other projects: read without running anything in the file, written so that they can load them."""

import io
import pickle
import re
import struct
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from models.released import COMPILED
from trainer.errors import UserError
from trainer.files import write_atomically

HOLDERS = ("model", "state_dict", "model_state_dict")
"""Keys under which training programs keep the weights in a larger file."""
SHOWN = 4
"""Names told in one line."""
DAMAGE = (
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    EOFError,
    OSError,
    struct.error,
)
"""What torch.load makes of a cut or damaged file."""


def some(names: list[str]) -> str:
    """The first few names, and how many more."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def read_state(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors by name, and lines about what was unwrapped; a .safetensors file, or what torch.save wrote.

    Only the restricted unpickler is used: anything but tensors, containers and plain values is refused. A training file
    with the weights under "model" (or "state_dict") is unwrapped, and the rest of it left out; where it holds averaged
    weights under "ema" (as EqR's do), those stand for the raw ones.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give a released checkpoint file") from error
    if path.suffix == ".safetensors":
        try:
            held: Any = load_safetensors(content)
        except SafetensorError as error:
            raise UserError(f"{path}: not a readable safetensors file ({error}); get it again") from error
    else:
        held = _unpickled(path, content)
    if not isinstance(held, dict):
        raise UserError(f"{path}: holds a {type(held).__name__}; expected a state_dict, names and tensors")
    if "state" in held and "param_groups" in held:
        raise UserError(f"{path}: is the state of an optimizer (state, param_groups); give the model's state_dict")
    outer = next((key for key in HOLDERS if isinstance(held.get(key), dict)), None)
    if outer is None:
        return _only_tensors(path, held), []
    state = _only_tensors(path, held[outer])
    rest = sorted(str(key) for key in held if key not in (outer, "ema"))
    lines = [f"weights under {outer!r} of a larger file" + (f"; left out: {some(rest)}" if rest else "")]
    if "ema" in held:
        state |= _averaged(path, held["ema"], state)
        lines.append("averaged weights under 'ema' taken instead of the raw ones")
    return state, lines


def _unpickled(path: Path, content: bytes) -> Any:
    try:
        with (
            warnings.catch_warnings()
        ):  # of a foreign pickle torch warns in lines of its own; the error below says enough
            warnings.simplefilter("ignore")
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        if asked is None:
            raise UserError(f"{path}: not a readable torch.save file; get it again") from error
        raise UserError(
            f"{path}: refused, unpickling it would call {asked[1]}; only tensors are read: where the file comes from, save "
            "its model's state_dict alone"
        ) from error
    except DAMAGE as error:
        raise UserError(f"{path}: not a readable torch.save file, or damaged; get it again") from error


def _only_tensors(path: Path, held: dict[Any, Any]) -> dict[str, Tensor]:
    """The dictionary, when it holds names and plain, finite floating-point tensors and nothing else."""
    if not held:
        raise UserError(f"{path}: holds no weights")
    if others := [str(k) for k, v in held.items() if not isinstance(k, str) or not isinstance(v, Tensor)]:
        raise UserError(f"{path}: expected names and tensors alone; these are something else: {some(others)}")
    for name, tensor in held.items():
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise UserError(f"{path}: {name} is no plain tensor ({tensor.layout}, {tensor.device.type})")
    return dict(held)


def _averaged(path: Path, held: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Averaged weights (EqR: {"mu": rate, "shadow": weights without `_orig_mod.`}) under the names of the raw ones."""
    shadow = held.get("shadow") if isinstance(held, dict) else None
    if not isinstance(shadow, dict):
        raise UserError(f"{path}: 'ema' holds no 'shadow' with weights; save the model's state_dict alone")
    names = {name.replace(COMPILED, ""): name for name in state}
    averaged = _only_tensors(path, shadow)
    if unknown := [name for name in averaged if name.replace(COMPILED, "") not in names]:
        raise UserError(f"{path}: 'ema' averages weights that the model does not have: {some(unknown)}")
    return {names[name.replace(COMPILED, "")]: tensor for name, tensor in averaged.items()}


def write_state(path: Path, state: dict[str, Tensor]) -> None:
    """A new file with the state_dict as torch.save writes it, or as safetensors, by the file's ending."""
    if path.suffix == ".safetensors":
        return write_new(path, save_safetensors(state))
    content = io.BytesIO()
    torch.save(state, content)
    return write_new(path, content.getvalue())


def write_new(path: Path, content: bytes) -> None:
    """Write a file that is not there yet, and the folder it belongs to."""
    refuse_existing(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent}: cannot be made ({error.strerror}); choose another place") from error
    write_atomically(path, content)


def refuse_existing(path: Path) -> None:
    if path.exists():
        raise UserError(f"{path}: exists; choose another name or remove it")

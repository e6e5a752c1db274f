"""A checkpoint is one safetensors file: averaged and raw weights, with its settings and data identity in the header.

Tensors are named `ema.<name>` and `raw.<name>`; buffers (initial states, puzzle table) are stored once, as `buffer.<name>`.
The header holds one JSON object under "longloop". Files are written under a temporary name, synced and renamed, so a
reader sees the old file or the new one.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from data.arrays import DataMeta
from models.core import LoopedReasoner
from trainer.config import TrainConfig
from trainer.errors import UserError

FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A loaded file: where it came from, what it says of itself, and its tensors on the CPU."""

    path: Path
    config: TrainConfig
    step: int
    data_meta: dict[str, Any]
    validation: dict[str, Any] | None
    tensors: dict[str, Tensor]

    def build_model(self, weights: Literal["ema", "raw"]) -> LoopedReasoner:
        """The model with the chosen weights, in float32 on the CPU."""
        if not any(name.startswith(f"{weights}.") for name in self.tensors):
            raise UserError(
                f"{self.path}: holds no {weights} weights; use eval.weights={'ema' if weights == 'raw' else 'raw'}"
            )
        meta = self.data_meta
        model = LoopedReasoner(self.config.model, meta["vocab_size"], meta["seq_len"], meta["num_puzzle_ids"])
        chosen = {
            name.split(".", 1)[1]: tensor
            for name, tensor in self.tensors.items()
            if name.startswith((f"{weights}.", "buffer."))
        }
        expected = model.state_dict()
        for name in sorted(expected.keys() ^ chosen.keys()):
            what = "lacks" if name in expected else "has an unknown tensor"
            raise UserError(f"{self.path}: {what} {name}; the file does not belong to this model's settings")
        for name, tensor in chosen.items():
            if tensor.shape != expected[name].shape:
                raise UserError(
                    f"{self.path}: {name} has shape {list(tensor.shape)}, its settings ask for {list(expected[name].shape)}"
                )
        model.load_state_dict(chosen)
        return model


def write_atomically(path: Path, content: bytes) -> None:
    """Write, sync, rename; on a full disk or a read-only folder, one clear line and no half-written file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); free space or choose another run_dir"
        ) from error


def save_checkpoint(
    path: Path,
    model: LoopedReasoner,
    averaged: list[Tensor] | None,
    config: TrainConfig,
    step: int,
    data_meta: dict[str, Any],
    validation: dict[str, Any] | None = None,
) -> None:
    """Write raw weights (the model's present ones) and averaged ones (in parameter order; None: leave raw out, too)."""
    tensors = {f"buffer.{name}": t for name, t in model.named_buffers() if name in model.state_dict()}
    for name, parameter in model.named_parameters():
        tensors[f"raw.{name}"] = parameter.detach()
    if averaged is not None:
        for (name, _), shadow in zip(model.named_parameters(), averaged, strict=True):
            tensors[f"ema.{name}"] = shadow
    header = {
        "format": FORMAT,
        "step": step,
        "config": config.model_dump(mode="json"),
        "data": data_meta,
        "validation": validation,
    }
    content = save({k: t.contiguous().cpu() for k, t in tensors.items()}, metadata={"longloop": json.dumps(header)})
    write_atomically(path, content)


def export_ema(source: Path, target: Path) -> None:
    """Copy a checkpoint without its raw weights (bundled checkpoints)."""
    loaded = load_checkpoint(source)
    kept = {name: t for name, t in loaded.tensors.items() if not name.startswith("raw.")}
    with safe_open(source, "pt") as file:
        metadata = file.metadata()
    write_atomically(target, save(kept, metadata=metadata))


def find_checkpoint(place: Path, which: str = "best") -> Path:
    """The file meant by `checkpoint=`: a file itself, or a run directory's best (or last) one."""
    if place.is_dir():
        order = [which, "last"] if which == "best" else [which]
        for name in order:
            if (place / f"{name}.safetensors").is_file():
                return place / f"{name}.safetensors"
        raise UserError(
            f"checkpoint={place}: no {which}.safetensors in it; give a run directory or a .safetensors file"
        )
    if not place.is_file():
        raise UserError(f"checkpoint={place}: no such file or directory; give a run directory or a .safetensors file")
    return place


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a file back; whatever is wrong with it becomes one line that names it."""
    try:
        with safe_open(path, "pt") as file:
            header = (file.metadata() or {}).get("longloop")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error}); copy or train it again") from error
    if header is None:
        raise UserError(f"{path}: has no longloop header; checkpoints of other projects must be imported first")
    try:
        fields = json.loads(header)
        config = TrainConfig.model_validate(fields["config"])
        DataMeta(**fields["data"])
        return Checkpoint(path, config, fields["step"], fields["data"], fields["validation"], tensors)
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise UserError(
            f"{path}: header not understood ({str(error).splitlines()[0]}); written by another version?"
        ) from error

"""A checkpoint is one safetensors file: averaged and raw weights, with its settings and data identity in the header.

Tensors are named `ema.<name>` and `raw.<name>`; buffers (initial states, puzzle table) are stored once, as `buffer.<name>`.
The header holds one JSON object under "longloop".
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from data.arrays import DataMeta
from data.sudoku import Box
from models.core import LoopedReasoner
from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.files import write_atomically

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
    sha256: str
    """Digest of the tensors when they were written."""
    imported: dict[str, Any] | None = None
    """Of a released file: its name, and the record of its tensors (trainer/released_weights.py)."""

    @property
    def box(self) -> Box:
        """The Sudoku that the model reads; a released model of other puzzles has none."""
        meta = self.data_meta
        if meta["box_rows"] == 0:
            raise UserError(
                f"{self.path}: its model reads {meta['seq_len']} cells with {meta['vocab_size']} tokens, which is no "
                "Sudoku; only Sudoku can be solved, or evaluated from a CSV"
            )
        return Box(meta["box_rows"], meta["box_cols"])

    def build_model(self, weights: Literal["ema", "raw"]) -> LoopedReasoner:
        """The model with the chosen weights, in float32 on the CPU."""
        if not any(name.startswith(f"{weights}.") for name in self.tensors):
            raise UserError(
                f"{self.path}: holds no {weights} weights; ask for {'ema' if weights == 'raw' else 'raw'} ones"
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
            if tensor.dtype != expected[name].dtype or not torch.isfinite(tensor).all():
                what = (
                    f"is {tensor.dtype}"
                    if tensor.dtype != expected[name].dtype
                    else "holds numbers that are not finite"
                )
                raise UserError(f"{self.path}: {name} {what}, finite {expected[name].dtype} expected; train it again")
        if digest(self.tensors) != self.sha256:
            raise UserError(
                f"{self.path}: damaged, its weights are not those that were written; copy or train it again"
            )
        model.load_state_dict(chosen)
        return model


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
    write_atomically(path, packed({k: t.contiguous().cpu() for k, t in tensors.items()}, header))


def packed(tensors: dict[str, Tensor], header: dict[str, Any]) -> bytes:
    """A checkpoint file's content; the header gets the tensors' digest, by which a damaged copy is told."""
    return save(tensors, metadata={"longloop": json.dumps({**header, "sha256": digest(tensors)})})


def digest(tensors: dict[str, Tensor]) -> str:
    """sha256 over names and bytes of all tensors."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(name.encode())
        total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def export_ema(source: Path, target: Path) -> None:
    """Copy a checkpoint without its raw weights (bundled checkpoints)."""
    loaded = load_checkpoint(source)
    kept = {name: t for name, t in loaded.tensors.items() if not name.startswith("raw.")}
    with safe_open(source, "pt") as file:
        header = json.loads(file.metadata()["longloop"])
    write_atomically(target, packed(kept, header))


def find_checkpoint(place: Path, which: str = "best") -> Path:
    """The file meant by `checkpoint=`: a file itself, or a run directory's best (or last) one."""
    if place.is_dir():
        order = [which, "last"] if which == "best" else [which]
        for name in order:
            if (place / f"{name}.safetensors").is_file():
                return place / f"{name}.safetensors"
        raise UserError(
            f"checkpoint={place}: no {' or '.join(f'{name}.safetensors' for name in order)} in it; give a run directory or "
            "a .safetensors file"
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
        raise UserError(
            f"{path}: has no longloop header; checkpoints of other projects must be imported first "
            "(scripts/import_checkpoint.py)"
        )
    try:
        fields = json.loads(header)
        if fields["format"] != FORMAT:
            raise ValueError(f"format {fields['format']}, {FORMAT} expected")
        config = TrainConfig.model_validate(fields["config"])
        meta = DataMeta(**fields["data"])
        for name in ("vocab_size", "seq_len", "num_puzzle_ids", "box_rows", "box_cols"):
            if type(getattr(meta, name)) is not int:
                raise ValueError(f"data.{name} is no integer")
        return Checkpoint(
            path,
            config,
            fields["step"],
            fields["data"],
            fields["validation"],
            tensors,
            fields["sha256"],
            fields.get("imported"),
        )
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise UserError(
            f"{path}: header not understood ({str(error).splitlines()[0]}); written by another version?"
        ) from error

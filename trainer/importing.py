"""From a released state_dict to a checkpoint of ours: read, name, infer the settings, check every tensor, write.

The weights are kept as averaged ones (`ema.`): released TRM, HRM and FPRM files hold averaged weights, and of an EqR file
those are taken. The training settings in the header (learning rate, batch, ...) are the preset's and say nothing about
the file; its training data is unknown, and its data identity says so with the source `imported:<file>`.
"""

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.arrays import DataMeta
from models.core import LoopedReasoner
from models.released import released_name
from trainer.checkpoint import FORMAT, packed
from trainer.errors import UserError
from trainer.import_settings import Settled, flattened, settle, sudoku_box
from trainer.released_weights import Names, named_weights
from trainer.state_file import read_state, refuse_existing, some, write_new


def import_checkpoint(
    source: Path,
    target: Path,
    lines: list[str],
    told_in: Path | None = None,
    names: Names | None = None,
    seq_len: int | None = None,
    say: Callable[[str], None] = print,
) -> LoopedReasoner:
    """Write `target`, a checkpoint, from `source`, a released file; `lines` are settings as train.py reads them.

    Raises UserError, with nothing written, on whatever is not understood. Returns the model with its weights.
    """
    refuse_existing(target)
    state, notes = read_state(source)
    weights, record = named_weights(source, state, names or {})
    settled = settle(source, weights, told_in, lines, seq_len)
    model = fitted(source, weights, record, settled)
    meta = data_identity(source, model, settled)
    for line in (*notes, *told(settled, model, meta)):
        say(line)
    dtypes = sorted({entry["dtype"] for entry in record.values() if entry["ours"] is not None})
    masks = [name for name, entry in record.items() if entry["ours"] is None]
    dropping = sum(not bool((state[name] == 1).all()) for name in masks)
    say(f"{source}: {len(weights)} weights in {' and '.join(dtypes)}, kept in float32")
    if masks:
        say(
            f"{source}: {len(masks)} dropout masks ignored" + (f", {dropping} of them not all ones" if dropping else "")
        )
    buffers = {name for name, _ in model.named_buffers()}
    header = {
        "format": FORMAT,
        "step": int(step[1]) if (step := re.match(r"step_(\d+)", source.name)) else 0,
        "config": settled.config.model_copy(update={"run_dir": target.parent}).model_dump(mode="json"),
        "data": asdict(meta),
        "validation": None,
        "imported": {"file": source.name, "family": settled.family, "tensors": record},
    }
    tensors = {
        f"{'buffer' if name in buffers else 'ema'}.{name}": t.contiguous() for name, t in model.state_dict().items()
    }
    write_new(target, packed(tensors, header))
    say(f"written: {target}")
    return model


def fitted(source: Path, weights: dict[str, Tensor], record: dict[str, Any], settled: Settled) -> LoopedReasoner:
    """The model of the settings with the weights in it; names and shapes must be exactly its own."""
    table = weights.get("puzzle_table")
    ids = 1 if table is None or table.dim() != 2 else table.shape[0]
    config = settled.config.model
    model = LoopedReasoner(config, weights["token_embedding.weight"].shape[0], settled.seq_len, ids)
    theirs = {entry["ours"]: name for name, entry in record.items()}
    expected = model.state_dict()
    if unknown := [theirs[name] for name in weights if name not in expected]:
        raise UserError(
            f"{source}: model={config.name} has no place for {some(unknown)}; choose another model, or leave them out with "
            "a map of names (--names)"
        )
    if missing := [name for name in expected if name not in weights and not _optional(name, settled)]:
        named = [released_name(name, fprm=config.block.kind == "tied") or name for name in missing]
        raise UserError(f"{source}: lacks {some(named)}; model={config.name} needs them")
    misshapen = [
        f"{theirs[name]} has shape {list(t.shape)}, its settings ask for {list(expected[name].shape)}"
        for name, t in weights.items()
        if t.shape != expected[name].shape
    ]
    if misshapen:
        raise UserError(f"{source}: {some(misshapen)}")
    for name in expected.keys() - weights.keys():
        weights[name] = torch.zeros_like(expected[name])
    model.load_state_dict(weights)
    return model


def _optional(name: str, settled: Settled) -> bool:
    """Whether the released code keeps none: initial states that are drawn, a puzzle table without numbers."""
    config = settled.config.model
    drawn = config.initial_state == "noise" and name in ("H_init", "L_init")
    return drawn or (name == "puzzle_table" and config.puzzle_emb_dim == 0)


def data_identity(source: Path, model: LoopedReasoner, settled: Settled) -> DataMeta:
    """What is known of the data: the shape of its puzzles."""
    box = sudoku_box(model.vocab_size, model.seq_len)
    return DataMeta(
        name="unknown",
        box_rows=box.rows if box else 0,
        box_cols=box.cols if box else 0,
        vocab_size=model.vocab_size,
        seq_len=model.seq_len,
        num_puzzle_ids=len(model.puzzle_table),
        source=f"imported:{source.name}",
        revision=None,
        seed=settled.config.data.seed,
        train_puzzles=0,
        num_aug=None,
        rows={},
        difficulty=None,
        fingerprint="",
        split_fingerprints={},
        checks={},
    )


def told(settled: Settled, model: LoopedReasoner, meta: DataMeta) -> list[str]:
    """Every setting of the model and of its depth, and where it comes from."""
    kept = ("H_cycles", "L_cycles", "segments")
    rows = [
        (key, value)
        for key, value in flattened(settled.config).items()
        if key.startswith("model.") or key in {f"schedule.{name}" for name in kept}
    ]
    rows += [("seq_len", model.seq_len)]
    width = max(len(key) for key, _ in rows)
    puzzles = f"Sudoku {meta.box.size_name}" if meta.box_rows else "no Sudoku"
    return [
        f"family: {settled.family}; vocabulary {model.vocab_size}, {meta.num_puzzle_ids} puzzle ids: {puzzles}",
        *(f"  {key:<{width}}  {value!s:<20}  {settled.origin.get(key, 'preset')}" for key, value in rows),
    ]

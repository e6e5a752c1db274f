"""The on-disk data format of HRM, TRM and EqR: read, checked, written, and batched in the released order.

    <folder>/identifiers.json                 list: name of each puzzle identifier; entry 0 is "<blank>"
    <folder>/<split>/dataset.json             vocab_size, seq_len, ... and the names of the split's sets
    <folder>/<split>/<set>__inputs.npy        integers [examples, S]
    <folder>/<split>/<set>__labels.npy        integers [examples, S]; ignore_label_id marks cells without a label
    <folder>/<split>/<set>__puzzle_identifiers.npy   [puzzles]
    <folder>/<split>/<set>__puzzle_indices.npy       [puzzles + 1], first example of each puzzle
    <folder>/<split>/<set>__group_indices.npy        [groups + 1], first puzzle of each group

A group is a puzzle with its augmented copies; an ARC puzzle is a task with several examples. Follows the released TRM's
loader (parity README, section 4).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data.arrays import Groups
from models.losses import IGNORE
from trainer.errors import UserError

ARRAYS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
COUNTS = ("vocab_size", "seq_len", "num_puzzle_identifiers", "pad_id", "blank_identifier_id")


@dataclass(frozen=True)
class PuzzleSet:
    """One set of a split. Arrays are memory-mapped: an augmented ARC set is larger than most machines' memory."""

    inputs: np.ndarray
    """integers [examples, S]"""
    labels: np.ndarray
    """integers [examples, S]"""
    puzzle_identifiers: np.ndarray
    """integers [puzzles]"""
    puzzle_indices: np.ndarray
    """integers [puzzles + 1]"""
    group_indices: np.ndarray
    """integers [groups + 1]"""


@dataclass(frozen=True)
class FolderMeta:
    """What dataset.json says about the tokens."""

    vocab_size: int
    seq_len: int
    num_puzzle_identifiers: int
    pad_id: int
    """Token of padding rows' inputs."""
    ignore_label_id: int | None
    """Label of cells that are not supervised; null: every cell is."""
    blank_identifier_id: int
    """Identifier of padding rows."""
    sets: tuple[str, ...]


@dataclass(frozen=True)
class PuzzleSplit:
    """The sets of `train` or `test`, by name."""

    meta: FolderMeta
    sets: dict[str, PuzzleSet]


@dataclass(frozen=True)
class FolderBatch:
    """A batch as the released loader yields it."""

    inputs: np.ndarray
    """int32 [B, S]"""
    labels: np.ndarray
    """int32 [B, S], IGNORE where there is no label"""
    puzzle_identifiers: np.ndarray
    """int32 [B]"""
    real: int
    """Rows of the whole global batch that are examples; the others are padding, at the end."""
    set_name: str


class Choice(Protocol):
    """What draws the examples within a puzzle: numpy's Generator, or the older RandomState of the released loader."""

    def choice(self, a: int, size: int, replace: bool) -> np.ndarray: ...


# --- reading ---------------------------------------------------------------------------------------------------------


def read_identifiers(folder: Path) -> list[str]:
    """Names of the puzzle identifiers. UserError when the file is missing or no list of texts."""
    path = folder / "identifiers.json"
    names = _json(path)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path}: a list of texts expected; write the data set again")
    return names


def read_split(folder: Path, split: str) -> PuzzleSplit:
    """`train` or `test` of a folder, checked. UserError naming the file and what is wrong with it."""
    meta = _read_meta(folder / split / "dataset.json")
    return PuzzleSplit(meta, {name: _read_set(folder / split, name, meta) for name in meta.sets})


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; give the folder of a data set in the format of the HRM and TRM repositories"
        ) from error
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); write the data set again") from error


def _read_meta(path: Path) -> FolderMeta:
    record = _json(path)
    if not isinstance(record, dict):
        raise UserError(f"{path}: an object with vocab_size, seq_len, ... expected; write the data set again")
    for name in COUNTS:
        if type(record.get(name)) is not int or record[name] < (name != "pad_id" and name != "blank_identifier_id"):
            least = int(name not in ("pad_id", "blank_identifier_id"))
            raise UserError(
                f"{path}: {name}={record.get(name)!r}, a whole number of at least {least} expected; write the data set again"
            )
    ignore, sets = record.get("ignore_label_id"), record.get("sets")
    if not (ignore is None or type(ignore) is int):
        raise UserError(f"{path}: ignore_label_id={ignore}, a whole number or null expected; write the data set again")
    if not isinstance(sets, list) or not sets or not all(isinstance(name, str) for name in sets):
        raise UserError(f"{path}: sets={sets}, a list of names expected; write the data set again")
    if len(set(sets)) != len(sets):
        raise UserError(f"{path}: sets={sets}, each name once expected; write the data set again")
    return FolderMeta(**{name: record[name] for name in COUNTS}, ignore_label_id=ignore, sets=tuple(sets))


def _read_set(folder: Path, name: str, meta: FolderMeta) -> PuzzleSet:
    arrays = {part: _read_array(folder / f"{name}__{part}.npy") for part in ARRAYS}
    found = PuzzleSet(**arrays)

    def refuse(part: str, problem: str) -> UserError:
        return UserError(f"{folder / f'{name}__{part}.npy'}: {problem}; write the data set again")

    examples, puzzles = len(found.inputs), len(found.puzzle_identifiers)
    for part in ("inputs", "labels"):
        shape = arrays[part].shape
        if len(shape) != 2 or shape[1] != meta.seq_len or shape[0] != examples:
            raise refuse(part, f"shape {shape}, ({examples}, {meta.seq_len}) expected from dataset.json and the inputs")
    for part, count, total in (("puzzle_indices", puzzles, examples), ("group_indices", None, puzzles)):
        starts = arrays[part]
        if starts.ndim != 1 or len(starts) < 2 or (count is not None and len(starts) != count + 1):
            raise refuse(part, f"shape {starts.shape}, one more than there are puzzles or groups expected")
        if starts[0] != 0 or starts[-1] != total or (np.diff(starts) < 1).any():
            raise refuse(part, f"offsets must rise from 0 to {total}, each by at least 1")
    ids = found.puzzle_identifiers
    if ids.ndim != 1 or ids.min() < 0 or ids.max() >= meta.num_puzzle_identifiers:
        raise refuse("puzzle_identifiers", f"identifiers must lie in 0 .. {meta.num_puzzle_identifiers - 1}")
    for part, least in (("inputs", 0), ("labels", min(0, meta.ignore_label_id or 0))):
        for first in range(0, examples, 65_536):  # in pieces, because the file may be larger than the memory
            piece = arrays[part][first : first + 65_536]
            if piece.min() < least or piece.max() >= meta.vocab_size:
                row = first + int(np.flatnonzero(((piece < least) | (piece >= meta.vocab_size)).any(1))[0])
                raise refuse(part, f"row {row} has a token outside 0 .. {meta.vocab_size - 1}")
    return found


def _read_array(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; write the data set again") from error
    except (ValueError, EOFError) as error:
        raise UserError(f"{path}: not a readable array ({error}); write the data set again") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
        raise UserError(f"{path}: integers expected; write the data set again")
    return array


# --- the released order ----------------------------------------------------------------------------------------------


def training_rows(
    source: Groups | PuzzleSet, batch: int, seed: int, number: int, passes: int = 1, within: Choice | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of one iteration over the groups: example numbers int64 [batch] and their puzzles' numbers int64 [batch].

    Iteration `number` (0, 1, ...) has a generator of its own, seeded seed + number + 1. It orders the groups `passes`
    times, and draws one puzzle of each group; that puzzle's examples, or as many as still fit, drawn without
    replacement, join the batch. A last batch that is not full is dropped. `within` draws the examples; the released code
    takes numpy's global generator for it, which differs between its processes, ours one that depends on seed and number.
    """
    rng = np.random.Generator(np.random.Philox(seed=seed + number + 1))
    within = np.random.Generator(np.random.Philox(key=[seed, number])) if within is None else within
    order = np.concatenate([rng.permutation(len(source.group_indices) - 1) for _ in range(passes)])
    at = 0
    while True:
        rows, puzzles, filled = [], [], 0
        while at < len(order) and filled < batch:
            group = order[at]
            puzzle = int(rng.integers(source.group_indices[group], source.group_indices[group + 1]))
            first, end = int(source.puzzle_indices[puzzle]), int(source.puzzle_indices[puzzle + 1])
            taken = min(end - first, batch - filled)
            rows.append(first + within.choice(end - first, taken, replace=False))
            puzzles.append(np.full(taken, puzzle))
            filled += taken
            at += 1
        if filled < batch:
            return
        yield np.concatenate(rows), np.concatenate(puzzles)


def collate(
    source: PuzzleSet, meta: FolderMeta, rows: np.ndarray, puzzles: np.ndarray, size: int, name: str, real: int
) -> FolderBatch:
    """The rows as a batch of `size`, filled up with padding."""
    missing = size - len(rows)
    inputs, labels = (np.asarray(a[rows]).astype(np.int32) for a in (source.inputs, source.labels))
    if meta.ignore_label_id is not None:
        labels[labels == meta.ignore_label_id] = IGNORE
    ids = source.puzzle_identifiers[puzzles].astype(np.int32)
    if missing:
        inputs = np.pad(inputs, ((0, missing), (0, 0)), constant_values=meta.pad_id)
        labels = np.pad(labels, ((0, missing), (0, 0)), constant_values=IGNORE)
        ids = np.pad(ids, (0, missing), constant_values=meta.blank_identifier_id)
    return FolderBatch(inputs, labels, ids, real, name)


def training_batches(
    split: PuzzleSplit,
    batch: int,
    seed: int,
    number: int,
    passes: int = 1,
    rank: int = 0,
    ranks: int = 1,
    within: Choice | None = None,
) -> Iterator[FolderBatch]:
    """Rank's share of each training batch of iteration `number`; `batch` counts the puzzles of all ranks."""
    share = batch // ranks
    for name, source in split.sets.items():
        for rows, puzzles in training_rows(source, batch, seed, number, passes, within):
            mine = slice(rank * share, (rank + 1) * share)
            yield collate(source, split.meta, rows[mine], puzzles[mine], share, name, batch)


def evaluation_batches(split: PuzzleSplit, batch: int, rank: int = 0, ranks: int = 1) -> Iterator[FolderBatch]:
    """Every example once, in order; the last batch is padded. Rank's share of each."""
    share = batch // ranks
    for name, source in split.sets.items():
        total = len(source.inputs)
        for first in range(0, total, batch):
            end = min(first + batch, total)
            rows = np.arange(first + rank * share, max(first + rank * share, min(end, first + (rank + 1) * share)))
            puzzles = np.searchsorted(source.puzzle_indices, rows, side="right") - 1
            yield collate(source, split.meta, rows, puzzles, share, name, end - first)


# --- writing ---------------------------------------------------------------------------------------------------------


def write_split(folder: Path, split: str, source: PuzzleSet, meta: FolderMeta) -> None:
    """Write one split with its only set, `all`, into an existing folder of the format."""
    place = folder / split
    place.mkdir()
    for part in ARRAYS:
        array = getattr(source, part)
        np.save(place / f"all__{part}.npy", array if part in ("inputs", "labels") else array.astype(np.int32))
    record = {name: getattr(meta, name) for name in (*COUNTS, "ignore_label_id")} | {
        "total_groups": len(source.group_indices) - 1,
        "mean_puzzle_examples": len(source.inputs) / len(source.puzzle_identifiers),
        "total_puzzles": len(source.puzzle_identifiers),
        "sets": ["all"],
    }
    (place / "dataset.json").write_text(json.dumps(record) + "\n")

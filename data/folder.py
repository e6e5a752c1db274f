"""A folder in the released format (data/puzzle_dir.py) as a data set to train and evaluate on, and the way back."""

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from data.arrays import SPLITS, DataMeta, Groups, PuzzleData, Split, data_fingerprint, split_fingerprint
from data.puzzle_dir import FolderMeta, PuzzleSet, PuzzleSplit, read_identifiers, read_split, write_split
from data.sudoku import Box, digits_from_tokens
from data.symmetry import augment, puzzles_symmetric_to, row_key
from trainer.config import PuzzleDirConfig
from trainer.errors import UserError

_CHUNK = 65_536


def load_puzzle_dir(config: PuzzleDirConfig, say: Callable[[str], None]) -> PuzzleData:
    """The data set in `config.path`. UserError naming the file when something there is missing or wrong.

    Where every label is a complete Sudoku that keeps its puzzle, the rules are Sudoku's: empty cells are scored, answers
    recognised.
    """
    folder = config.path
    parts = {name: read_split(folder, name) for name in ("train", "test")}
    own_validation = (folder / "validation").is_dir()
    if own_validation:
        parts["validation"] = read_split(folder, "validation")
    meta = parts["train"].meta
    for name, part in parts.items():
        path = folder / name / "dataset.json"
        if len(part.sets) != 1:
            raise UserError(f"{path}: sets {', '.join(part.sets)}; folders with one set can be read")
        for field in ("vocab_size", "seq_len", "num_puzzle_identifiers", "ignore_label_id"):
            if getattr(part.meta, field) != getattr(meta, field):
                raise UserError(
                    f"{path}: {field}={getattr(part.meta, field)}, but train has {getattr(meta, field)}; the parts of a data "
                    "set must agree"
                )
        if part.meta.vocab_size > 256:
            raise UserError(f"{path}: vocab_size={part.meta.vocab_size}: at most 256 tokens are supported")
    names = read_identifiers(folder)
    if len(names) != meta.num_puzzle_identifiers:
        raise UserError(
            f"{folder / 'identifiers.json'}: {len(names)} names, but dataset.json has num_puzzle_identifiers="
            f"{meta.num_puzzle_identifiers}"
        )
    train_set = next(iter(parts["train"].sets.values()))
    if own_validation:
        validation = _split(parts["validation"], folder / "validation")
    else:
        train_set, held_out = _hold_out(train_set, config.validation_groups, folder)
        validation = _split(PuzzleSplit(meta, {"held out": held_out}), folder / "train")
    splits = {
        "train": _split(PuzzleSplit(meta, {"all": train_set}), folder / "train"),
        "validation": validation,
        "test": _first(_split(parts["test"], folder / "test"), config.test_puzzles, folder),
    }
    box = _sudoku_box(meta, splits)
    fingerprints = {name: split_fingerprint(splits[name]) for name in SPLITS}
    groups = Groups(train_set.puzzle_indices, train_set.group_indices)
    checks: dict[str, int | str] = {
        "rules": "not known"
        if box is None
        else f"{box.size_name} Sudoku: every label is complete and keeps its puzzle",
        "validation": "the folder's own" if own_validation else f"the last {config.validation_groups} training groups",
    }
    if box is not None:
        firsts = _rows(splits["train"], groups.puzzle_indices[groups.group_indices[:-1]])
        checks["test_puzzles_symmetric_to_train"] = _symmetric(splits["test"], firsts, box)
    name = config.name or folder.name
    data = PuzzleData(
        splits["train"],
        splits["validation"],
        splits["test"],
        DataMeta(
            name=name,
            box_rows=box.rows if box else 0,
            box_cols=box.cols if box else 0,
            vocab_size=meta.vocab_size,
            seq_len=meta.seq_len,
            num_puzzle_ids=meta.num_puzzle_identifiers,
            source=f"puzzle_dir:{folder}",
            revision=f"sha256:{_settings_digest(folder)}",
            seed=config.seed,
            train_puzzles=len(groups.group_indices) - 1,
            num_aug=None,
            rows={part: len(split) for part, split in splits.items()},
            difficulty=None,
            fingerprint=data_fingerprint(fingerprints, meta.vocab_size, meta.seq_len),
            split_fingerprints=fingerprints,
            checks=checks,
        ),
        groups,
    )
    say(
        f"data: {name} from {folder}: {data.meta.train_puzzles:,} training groups ({len(splits['train']):,} rows), "
        f"{len(validation):,} validation, {len(splits['test']):,} test, fingerprint {data.meta.fingerprint[:16]}"
    )
    for check, result in checks.items():
        say(f"data check: {check.replace('_', ' ')}: {result}")
    return data


def _settings_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in ("train", "test"):
        digest.update((folder / name / "dataset.json").read_bytes())
    return digest.hexdigest()


def _hold_out(source: PuzzleSet, groups: int, folder: Path) -> tuple[PuzzleSet, PuzzleSet]:
    """All but the last `groups` groups, and of those each group's first puzzle: its copies say nothing new."""
    total = len(source.group_indices) - 1
    if groups >= total:
        raise UserError(
            f"data.validation_groups={groups}: {folder / 'train'} has {total} groups, and some must be left to train on; ask "
            f"for fewer, or put a validation/ beside train/"
        )
    kept = total - groups
    puzzles = int(source.group_indices[kept])
    rows = int(source.puzzle_indices[puzzles])
    left = PuzzleSet(
        source.inputs[:rows],
        source.labels[:rows],
        source.puzzle_identifiers[:puzzles],
        source.puzzle_indices[: puzzles + 1],
        source.group_indices[: kept + 1],
    )
    chosen = np.array(source.group_indices[kept:-1])
    examples = [np.arange(*source.puzzle_indices[p : p + 2].tolist()) for p in chosen.tolist()]
    held = np.concatenate(examples)
    return left, PuzzleSet(
        source.inputs[held],
        source.labels[held],
        source.puzzle_identifiers[chosen],
        np.cumsum([0, *map(len, examples)]),
        np.arange(groups + 1),
    )


def _split(part: PuzzleSplit, place: Path) -> Split:
    """The only set of a part, with label 0 where there is none. Arrays of bytes stay where they are, on disk."""
    source, ignore = next(iter(part.sets.values())), part.meta.ignore_label_id
    labels = source.labels
    if ignore != 0:
        if any((labels[i : i + _CHUNK] == 0).any() for i in range(0, len(labels), _CHUNK)):
            raise UserError(f"{place}: ignore_label_id={ignore} with labels of 0; only 0 can stand for no label here")
        if ignore is not None:
            labels = np.where(labels == ignore, 0, labels)
    for first in range(0, len(labels), _CHUNK):
        unlabelled = np.flatnonzero((labels[first : first + _CHUNK] == 0).all(1))
        if len(unlabelled):
            raise UserError(f"{place}: row {first + unlabelled[0]} has no label at all; drop it")
    sizes = np.diff(source.puzzle_indices)
    return Split(
        source.inputs if source.inputs.dtype == np.uint8 else source.inputs.astype(np.uint8),
        labels if labels.dtype == np.uint8 else labels.astype(np.uint8),
        np.full(len(labels), -1, np.int32),
        np.repeat(source.puzzle_identifiers, sizes).astype(np.int32),
    )


def _rows(split: Split, rows: np.ndarray) -> Split:
    return Split(split.inputs[rows], split.labels[rows], split.rating[rows], split.puzzle_ids[rows])


def _first(split: Split, count: int | None, folder: Path) -> Split:
    if count is not None and count > len(split):
        raise UserError(
            f"data.test_puzzles={count}: {folder / 'test'} has {len(split)}; ask for no more, or null for all"
        )
    return split if count is None else _rows(split, np.arange(count))


def _sudoku_box(meta: FolderMeta, splits: dict[str, Split]) -> Box | None:
    """The box shape by whose rules every label solves its puzzle."""
    digits = meta.vocab_size - 2
    shapes = [Box(rows, digits // rows) for rows in range(2, digits // 2 + 1) if digits % rows == 0 and digits <= 25]
    for box in shapes if meta.seq_len == digits**2 else ():
        if all(_all_solved(split, box) for split in splits.values()):
            return box
    return None


def _all_solved(split: Split, box: Box) -> bool:
    for first in range(0, len(split), _CHUNK):
        answers, puzzles = (torch.from_numpy(np.array(a[first : first + _CHUNK])) for a in (split.labels, split.inputs))
        if not box.solved(answers, puzzles).all():
            return False
    return True


def _symmetric(a: Split, b: Split, box: Box) -> int:
    """Puzzles of a that are a rearrangement of one of b."""
    mine, theirs = ((digits_from_tokens(np.array(s.inputs)), digits_from_tokens(np.array(s.labels))) for s in (a, b))
    return int(puzzles_symmetric_to(*mine, *theirs, box).sum())


def write_puzzle_dir(folder: Path, data: PuzzleData, num_aug: int, seed: int) -> None:
    """Write a Sudoku data set in the released format: train/ with num_aug fixed copies of each puzzle as its group,
    validation/ and test/ as they are. The folder appears complete or not at all; UserError when it exists already.

    seed: data.seed, which the copies are a function of, as in training with data.num_aug.
    """
    if folder.exists():
        raise UserError(f"{folder}: exists already; choose another folder, or delete it")
    box = data.meta.box
    meta = FolderMeta(box.vocab_size, box.cells, 1, 0, 0, 0, ("all",))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
        try:
            for name in SPLITS:
                split: Split = getattr(data, name)
                copies = num_aug + 1 if name == "train" else 1
                base, k = np.repeat(np.arange(len(split)), copies), np.tile(np.arange(copies), len(split))
                inputs, labels = augment(split.inputs[base], split.labels[base], row_key(seed, base, k), box)
                rows = np.arange(len(base) + 1)
                write_split(building, name, PuzzleSet(inputs, labels, np.zeros(len(base)), rows, rows[::copies]), meta)
            (building / "identifiers.json").write_text('["<blank>"]\n')
            building.chmod(0o755)
            building.rename(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror}); choose a folder on a disk with room"
        ) from error

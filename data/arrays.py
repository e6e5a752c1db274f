"""What a prepared data set is: three splits of token arrays and the record of where they come from."""

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from data.generate import Puzzles
from data.sudoku import Box, tokens_from_digits

SPLITS = ("train", "validation", "test")


class Rules(Protocol):
    """What is known about right answers without labels; data/sudoku.py's Box knows Sudoku's."""

    def to_fill(self, tokens: torch.Tensor) -> torch.Tensor:
        """bool [B, S]: cells of the puzzles [B, S] that an answer fills in; the others are given."""
        ...

    def solved(self, answers: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """bool [B]: answers [B, S] that are complete, keep what the puzzle [B, S] gives and break no rule."""
        ...


class NoRules:
    """Of puzzles that only their labels judge: every cell counts, no answer is recognised."""

    def to_fill(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(tokens, dtype=torch.bool)

    def solved(self, answers: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)


@dataclass(frozen=True)
class Split:
    """N puzzles as tokens. Token 0 is padding; Sudoku: 1 blank, 1 + d digit d."""

    inputs: np.ndarray
    """uint8 [N, S]."""
    labels: np.ndarray
    """uint8 [N, S]: the solutions; 0 where there is no label."""
    rating: np.ndarray
    """int32 [N]: difficulty as the source counts it (generated: guesses, see `generate`); -1 unknown."""
    puzzle_ids: np.ndarray
    """int32 [N]: row of the puzzle-embedding table; Sudoku puzzles all share id 0."""

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class DataMeta:
    """Identity of a data set: enough to tell whether two results are about the same data."""

    name: str
    """What results must call it; generated sets never carry the name of a real one."""
    box_rows: int
    box_cols: int
    """Of a Sudoku; 0 for puzzles whose rules are not known."""
    vocab_size: int
    seq_len: int
    num_puzzle_ids: int
    source: str
    """csv, hub:<id>, generated, file:<path> (a user's own puzzles) or imported:<file> (unknown, see trainer/importing.py)."""
    revision: str | None
    """csv: sha256 of both files; hub: commit; generated: version of the generator."""
    seed: int
    train_puzzles: int
    """Base puzzles."""
    num_aug: int | None
    """Fixed symmetric copies per base puzzle; null: endless."""
    rows: dict[str, int | None]
    """Rows per split; train: base puzzles x (num_aug + 1), null when endless."""
    difficulty: str | None
    """Of generated puzzles."""
    fingerprint: str
    """sha256 over the three splits, vocab_size and seq_len."""
    split_fingerprints: dict[str, str]
    checks: dict[str, int | str]
    """What was checked, and what came out."""

    @property
    def box(self) -> Box:
        assert self.box_rows, "only a Sudoku has boxes"
        return Box(self.box_rows, self.box_cols)

    @property
    def rules(self) -> Rules:
        return self.box if self.box_rows else NoRules()


@dataclass(frozen=True)
class Groups:
    """How the rows of a released data set belong together; see data/puzzle_dir.py."""

    puzzle_indices: np.ndarray
    """integers [puzzles + 1], first row of each puzzle"""
    group_indices: np.ndarray
    """integers [groups + 1], first puzzle of each group"""


@dataclass(frozen=True)
class PuzzleData:
    """A prepared data set. No puzzle stands in two splits, even up to symmetry (see `meta.checks`)."""

    train: Split
    """Base puzzles, before augmentation."""
    validation: Split
    test: Split
    meta: DataMeta
    groups: Groups | None = None
    """Of the training rows, where they are drawn in the released order."""


def split_from_puzzles(puzzles: Puzzles) -> Split:
    return Split(
        inputs=tokens_from_digits(puzzles.puzzles),
        labels=tokens_from_digits(puzzles.solutions),
        rating=puzzles.rating.astype(np.int32),
        puzzle_ids=np.zeros(len(puzzles.puzzles), np.int32),
    )


def split_fingerprint(split: Split) -> str:
    """sha256 over the shape and bytes of the four arrays (little endian)."""
    digest = hashlib.sha256()
    for array, dtype in ((split.inputs, "u1"), (split.labels, "u1"), (split.rating, "<i4"), (split.puzzle_ids, "<i4")):
        digest.update(f"{dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array, dtype=dtype).tobytes())
    return digest.hexdigest()


def data_fingerprint(split_fingerprints: dict[str, str], vocab_size: int, seq_len: int) -> str:
    parts = [f"vocab_size={vocab_size}", f"seq_len={seq_len}"]
    parts += [f"{name}={split_fingerprints[name]}" for name in SPLITS]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()

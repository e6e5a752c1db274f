"""Training rows in random order with augmentation, as a function of the draw's number alone."""

from dataclasses import dataclass

import numpy as np
import torch

from data.arrays import Groups, Split
from data.puzzle_dir import training_rows
from data.sudoku import Box
from data.symmetry import augment, hash_numbers, row_key
from models.losses import IGNORE
from trainer.errors import UserError


@dataclass(frozen=True)
class Batch:
    """Rows drawn for training."""

    inputs: torch.Tensor
    """int64 [count, S] tokens."""
    labels: torch.Tensor
    """int64 [count, S] tokens; IGNORE where there is no label."""
    puzzle_ids: torch.Tensor
    """int32 [count]."""
    base_ids: torch.Tensor
    """int64 [count]: row of the training split each was made from."""
    noise_keys: torch.Tensor
    """int64 [count]: seeds of the initial noise, for models that start from some."""


class TrainSampler:
    """Draw number i is in pass i // N over the N base puzzles, each pass in its own random order.

    num_aug None: every draw is a fresh random symmetry of its base puzzle, a function of (seed, i). num_aug K: one of
    the base's K + 1 fixed rows, chosen by (seed, pass, base); the row itself is a function of (data_seed, base, k), so
    runs with different seeds share the same rows. There is no state: resuming needs only the next draw's number.
    """

    def __init__(self, split: Split, box: Box, num_aug: int | None, seed: int, data_seed: int = 0) -> None:
        self.split = split
        self.box = box
        self.num_aug = num_aug
        self.seed = seed
        self.data_seed = data_seed
        self._pass = -1
        self._order = np.empty(0, np.int64)

    def draw(self, first: int, count: int) -> Batch:
        """Draws number first .. first + count - 1."""
        draws = np.arange(first, first + count)
        passes, places = np.divmod(draws, len(self.split))
        base = np.empty(count, np.int64)
        for p in np.unique(passes):
            base[passes == p] = self._pass_order(int(p))[places[passes == p]]
        if self.num_aug is None:
            keys = row_key(self.seed, draws, np.ones(count, np.int64))
        else:
            high = hash_numbers(self.seed, passes, base, 2) >> np.uint64(32)
            k = (high * np.uint64(self.num_aug + 1)) >> np.uint64(32)
            keys = row_key(self.data_seed, base, k)
        inputs, labels = augment(self.split.inputs[base], self.split.labels[base], keys, self.box)
        return Batch(
            # NumPy converts, because PyTorch would start its threads for it, which on a busy machine takes longer.
            inputs=torch.from_numpy(inputs.astype(np.int64)),
            labels=torch.from_numpy(labels.astype(np.int64)),
            puzzle_ids=torch.from_numpy(self.split.puzzle_ids[base]),
            base_ids=torch.from_numpy(base),
            noise_keys=torch.from_numpy((hash_numbers(self.seed, draws, 0, 3) >> np.uint64(1)).astype(np.int64)),
        )

    def _pass_order(self, p: int) -> np.ndarray:
        """Base puzzles in the order of pass p; the last one asked for is kept."""
        if p != self._pass:
            hashes = hash_numbers(self.seed, p, np.arange(len(self.split)), 1)
            self._pass, self._order = p, np.argsort(hashes, kind="stable")
        return self._order


class GroupSampler:
    """Draw number i is row i of the released loader's batches, one after another (data/puzzle_dir.py).

    The released trainers take a whole batch every step and use the rows of finished puzzles; here every draw is used, in
    the same order. Draws are cheap one after another; going back begins anew.
    """

    def __init__(self, split: Split, groups: Groups, batch: int, passes: int, seed: int) -> None:
        self.split, self.groups, self.batch, self.passes, self.seed = split, groups, batch, passes, seed
        self._rewind()

    def _rewind(self) -> None:
        self._iteration, self._batches = -1, iter(())
        self._first, self._rows = 0, np.empty(0, np.int64)

    def _advance(self) -> None:
        """The next batch, of the next iteration where this one has ended."""
        self._first += len(self._rows)
        found = next(self._batches, None)
        if found is None:
            self._iteration += 1
            self._batches = training_rows(self.groups, self.batch, self.seed, self._iteration, self.passes)
            found = next(self._batches, None)
        if found is None:
            raise UserError(
                f"schedule.global_batch={self.batch}: {self.passes} passes over the training groups do not fill it; lower it "
                "or raise data.passes"
            )
        self._rows = found[0]

    def draw(self, first: int, count: int) -> Batch:
        """Draws number first .. first + count - 1."""
        if first < self._first:
            self._rewind()
        parts, wanted = [], first
        while wanted < first + count:
            while wanted >= self._first + len(self._rows):
                self._advance()
            parts.append(self._rows[wanted - self._first : first + count - self._first])
            wanted += len(parts[-1])
        rows = np.concatenate(parts) if parts else np.empty(0, np.int64)
        labels = self.split.labels[rows].astype(np.int64)
        draws = np.arange(first, first + count)
        return Batch(
            inputs=torch.from_numpy(self.split.inputs[rows].astype(np.int64)),
            labels=torch.from_numpy(np.where(labels == 0, IGNORE, labels)),
            puzzle_ids=torch.from_numpy(self.split.puzzle_ids[rows]),
            base_ids=torch.from_numpy(rows),
            noise_keys=torch.from_numpy((hash_numbers(self.seed, draws, 0, 3) >> np.uint64(1)).astype(np.int64)),
        )

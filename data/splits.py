"""Train, validation and test puzzles that share no puzzle up to symmetry."""

from collections.abc import Callable

import numpy as np

from data import generate as generator
from data.generate import Difficulty, Puzzles
from data.sudoku import Box
from data.symmetry import (
    canonical_is_exact,
    first_of_each_class,
    hash_numbers,
    puzzles_symmetric_to,
    solutions_symmetric_to,
)
from trainer.config import SudokuConfig
from trainer.errors import UserError

GENERATED_TEST_PUZZLES = 2_000
_BARREN_LIMIT = 20_000
"""Generated puzzles in a row, all symmetric to earlier ones, after which there are taken to be no more."""
_CHUNK = 4_000

SplitPuzzles = dict[str, Puzzles]


def generated_splits(config: SudokuConfig, say: Callable[[str], None]) -> SplitPuzzles:
    """Splits of generated puzzles, no two of which are symmetric. UserError when there are too few such puzzles.

    Test puzzles come first in the generator's sequence, then validation, then training puzzles: so runs with different
    data.train_puzzles share their test and validation puzzles, and a larger training set contains the smaller one.
    """
    box = Box(config.box_rows, config.box_cols)
    sizes = {
        "test": config.test_puzzles or GENERATED_TEST_PUZZLES,
        "validation": config.validation_puzzles,
        "train": config.train_puzzles,
    }
    puzzles = _distinct_puzzles(box, sum(sizes.values()), config.seed, config.difficulty, say)
    splits = {}
    first = 0
    for name, size in sizes.items():
        splits[name] = take(puzzles, slice(first, first + size))
        first += size
    return splits


def _distinct_puzzles(box: Box, count: int, seed: int, difficulty: Difficulty, say: Callable[[str], None]) -> Puzzles:
    """The first `count` generated puzzles that are not symmetric to an earlier one."""
    kept = generator.generate(box, 0, seed, difficulty)
    drawn = barren = 0
    while len(kept.puzzles) < count:
        # At least 64, and more and more while nothing new turns up, because each round looks at all puzzles kept.
        size = min(max(count - len(kept.puzzles), 64, barren), _CHUNK)
        new = generator.generate(box, size, seed, difficulty, first=drawn)
        drawn += size
        both = _join(kept, new)
        before = len(kept.puzzles)
        kept = take(both, first_of_each_class(both.puzzles, both.solutions, box))
        barren = barren + size if len(kept.puzzles) == before else 0
        if barren >= _BARREN_LIMIT:
            raise UserError(
                f"data.train_puzzles + data.validation_puzzles + data.test_puzzles = {count}: only "
                f"{len(kept.puzzles)} {box.size_name} puzzles of difficulty={difficulty} differ up to symmetry (the "
                f"last {barren} drawn were all repeats); ask for at most {len(kept.puzzles)} in all"
            )
        if count > _CHUNK and len(kept.puzzles) < count:
            say(f"generated {len(kept.puzzles):,} of {count:,} puzzles")
    return take(kept, slice(0, count))


def real_splits(config: SudokuConfig, train: Puzzles, test: Puzzles, origin: str) -> SplitPuzzles:
    """Seeded subsamples of a published data set; `origin` names it in errors.

    Test puzzles are taken as published: all, or data.test_puzzles of them. Training and then validation puzzles are
    drawn from the published training rows without those symmetric to a test puzzle or to one drawn before.
    """
    box = Box(config.box_rows, config.box_cols)
    if config.test_puzzles is not None:
        if config.test_puzzles > len(test.puzzles):
            raise UserError(
                f"data.test_puzzles={config.test_puzzles}: {origin} has {len(test.puzzles)} test puzzles; ask for no "
                "more, or null for all"
            )
        test = take(test, np.sort(_random_order(config.seed, len(test.puzzles))[: config.test_puzzles]))
    wanted = config.train_puzzles + config.validation_puzzles
    order = _random_order(config.seed, len(train.puzzles))
    # Nearly always the first draw is enough; only if too many of it had to be dropped, all rows are looked at.
    for draw in (order[: wanted + wanted // 20 + 100], order):
        pool = take(train, draw)
        pool = take(pool, ~puzzles_symmetric_to(pool.puzzles, pool.solutions, test.puzzles, test.solutions, box))
        pool = take(pool, first_of_each_class(pool.puzzles, pool.solutions, box))
        if len(pool.puzzles) >= wanted:
            break
    if len(pool.puzzles) < wanted:
        raise UserError(
            f"data.train_puzzles={config.train_puzzles} + data.validation_puzzles={config.validation_puzzles}: "
            f"{origin} has {len(train.puzzles)} training rows, of which {len(pool.puzzles)} differ from each other and "
            f"from every test puzzle up to symmetry; ask for at most {len(pool.puzzles)} in all"
        )
    return {
        "train": take(pool, slice(0, config.train_puzzles)),
        "validation": take(pool, slice(config.train_puzzles, wanted)),
        "test": test,
    }


def check_splits(splits: SplitPuzzles, box: Box) -> dict[str, int | str]:
    """Counts that show the splits are disjoint up to symmetry, and how many test solutions resemble training ones."""
    train, validation, test = splits["train"], splits["validation"], splits["test"]

    def shared(a: Puzzles, b: Puzzles) -> int:
        return int(puzzles_symmetric_to(a.puzzles, a.solutions, b.puzzles, b.solutions, box).sum())

    checks: dict[str, int | str] = {
        "symmetry_test": "exact" if canonical_is_exact(box) else "invariants (may call different puzzles symmetric)",
        "test_puzzles_symmetric_to_train": shared(test, train),
        "test_puzzles_symmetric_to_validation": shared(test, validation),
        "validation_puzzles_symmetric_to_train": shared(validation, train),
        "test_solutions_symmetric_to_train": int(solutions_symmetric_to(test.solutions, train.solutions, box).sum()),
    }
    overlaps = [key for key, value in checks.items() if "puzzles_symmetric" in key and value]
    if overlaps:
        raise AssertionError(f"splits overlap: {overlaps} in {checks}")
    return checks


def take(puzzles: Puzzles, rows: slice | np.ndarray) -> Puzzles:
    return Puzzles(puzzles.puzzles[rows], puzzles.solutions[rows], puzzles.rating[rows])


def _join(a: Puzzles, b: Puzzles) -> Puzzles:
    return Puzzles(
        np.concatenate([a.puzzles, b.puzzles]),
        np.concatenate([a.solutions, b.solutions]),
        np.concatenate([a.rating, b.rating]),
    )


def _random_order(seed: int, count: int) -> np.ndarray:
    """A random order of 0..count-1 that does not depend on the NumPy version."""
    return np.argsort(hash_numbers(seed, np.arange(count)), kind="stable")

"""Seeded Sudoku puzzles of any box shape: uniquely solvable, minimal, rated.

The *rating* is the number of guesses of one fixed search: apply naked and hidden singles until nothing changes, then
guess in the first cell (row order) with the fewest candidates, smallest digit first, and so on depth-first, until it is
proved that there is exactly one solution. Rating 0 means that singles alone solve the puzzle.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from data import kernels
from data.sudoku import Box
from trainer.errors import UserError

Difficulty = Literal["any", "beyond_singles"]

GENERATOR_VERSION = 2
"""Raise it when the same seed gives other puzzles than before."""
ATTEMPTS = 5_000
"""Puzzles drawn for one that singles do not solve, before giving up on the box shape."""
MAX_GUESSES = 20_000
"""Guesses per uniqueness proof. Far beyond what puzzles of up to 16 digits need. With 25 digits a clue whose removal cannot be
decided within it stays (so such a puzzle is unique but perhaps not minimal), and ratings stop there."""


@dataclass(frozen=True)
class Puzzles:
    """n puzzles of one box shape, as digits."""

    puzzles: np.ndarray
    """uint8 [n, S], 0 for a blank."""
    solutions: np.ndarray
    """uint8 [n, S]."""
    rating: np.ndarray
    """int32 [n]: guesses of the search above."""

    @property
    def singles(self) -> np.ndarray:
        """bool [n]: naked and hidden singles alone solve the puzzle."""
        return self.rating == 0


@lru_cache
def neighbours(box: Box) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int32 tables peers[S, P], units[3 digits, digits] and units_of[S, 3].

    They hold the cells that share a unit with a cell, the cells of a unit, and the units of a cell.
    """
    n = box.digits
    cells = np.arange(box.cells).reshape(n, n)
    boxes = cells.reshape(box.cols, box.rows, box.rows, box.cols).swapaxes(1, 2).reshape(n, n)
    units = np.concatenate([cells, cells.T, boxes]).astype(np.int32)
    shares = np.zeros((box.cells, box.cells), bool)
    for unit in units:
        shares[np.ix_(unit, unit)] = True
    np.fill_diagonal(shares, False)
    peers = np.nonzero(shares)[1].reshape(box.cells, -1).astype(np.int32)
    units_of = np.argsort(units.reshape(-1), kind="stable").reshape(box.cells, 3).astype(np.int32) // n
    return peers, units, units_of


def generate(box: Box, n: int, seed: int, difficulty: Difficulty = "any", first: int = 0) -> Puzzles:
    """Puzzles number first .. first + n - 1 of the endless sequence that (box, seed, difficulty) stands for.

    Each puzzle depends only on these and its number, so a set can be extended or made in pieces. Raises UserError when
    the box shape seems to have no puzzle of the difficulty (4x4 has none beyond singles).
    """
    hard = difficulty == "beyond_singles"
    stream = np.array([seed], np.uint64)
    for part in (box.rows, box.cols, int(hard)):
        stream = kernels.mix64(stream * kernels.GOLDEN + np.uint64(part + 1))
    keys = kernels.mix64(stream + np.arange(first, first + n, dtype=np.uint64) * kernels.GOLDEN)
    tables = neighbours(box)
    puzzles = np.empty((n, box.cells), np.uint8)
    solutions = np.empty((n, box.cells), np.uint8)
    rating = np.empty(n, np.int32)
    # A first puzzle by itself shows whether the difficulty exists at all before many are tried in vain.
    for part in (slice(0, 1), slice(1, n)):
        kernels.make_puzzles(
            keys[part], *tables, hard, ATTEMPTS, MAX_GUESSES, puzzles[part], solutions[part], rating[part]
        )
        if (rating[part] < 0).any():
            raise UserError(
                f"data.difficulty={difficulty}: {ATTEMPTS} random {box.size_name} puzzles held none that naked and "
                "hidden singles do not solve; use data.difficulty=any"
            )
    return Puzzles(puzzles, solutions, rating)


def count_solutions(grid: np.ndarray, box: Box, limit: int = 2) -> int:
    """How many solutions a puzzle uint8[S] has, counted up to limit (2 tells whether it is unique)."""
    tables = neighbours(box)
    scratch = np.empty(box.cells, np.uint8)
    return kernels.solve_grid(np.asarray(grid, np.uint8), *tables, limit, np.iinfo(np.int64).max, scratch)[0]


def solve(grid: np.ndarray, box: Box) -> np.ndarray | None:
    """The first solution of a puzzle uint8[S], as uint8[S]; None when there is none."""
    tables = neighbours(box)
    solution = np.empty(box.cells, np.uint8)
    unlimited = np.iinfo(np.int64).max
    found, _ = kernels.solve_grid(np.asarray(grid, np.uint8), *tables, 1, unlimited, solution)
    return solution if found else None

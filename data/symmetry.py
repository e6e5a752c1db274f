"""Symmetries of Sudoku: random ones for augmentation, and canonical forms that tell whether two puzzles are the same.

The symmetry group of a box shape: renaming digits, reordering bands and the rows in a band, reordering stacks and the
columns in a stack and, where the box is square, transposing. Each maps puzzles to puzzles and solutions to solutions.
"""

import itertools
import math
from functools import lru_cache

import numpy as np

from data import symmetry_kernels
from data.kernels import GOLDEN, mix64
from data.sudoku import Box

_EXACT_LIMIT = 100_000
"""Most column orders for which canonical forms are searched (9x9: 1,296; 12 digits: 31,104)."""


def augment(inputs: np.ndarray, labels: np.ndarray, keys: np.ndarray, box: Box) -> tuple[np.ndarray, np.ndarray]:
    """Row i of inputs and labels (tokens uint8[n, S]) under the symmetry that keys[i] (uint64[n]) stands for.

    Key 0 is the identity; any other key is an independent random symmetry, a function of the key alone. New arrays are
    returned.
    """
    inputs, labels = np.ascontiguousarray(inputs), np.ascontiguousarray(labels)
    new_inputs, new_labels = np.empty_like(inputs), np.empty_like(labels)
    symmetry_kernels.augment_rows(inputs, labels, keys, box.rows, box.cols, new_inputs, new_labels)
    return new_inputs, new_labels


def row_key(seed: int, base: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Key uint64[n] of row k (int[n]) of base puzzle base (int[n]); row 0 is the puzzle itself, key 0."""
    key = hash_numbers(seed, base, k)
    return np.where(np.asarray(k) == 0, np.uint64(0), np.where(key == 0, np.uint64(1), key))


def hash_numbers(seed: int, *numbers: np.ndarray | int) -> np.ndarray:
    """uint64[n] that look independent and random, from non-negative integers [n] (or a single one)."""
    value = mix64(np.array([seed], np.uint64) + GOLDEN)
    for number in numbers:
        value = mix64(value * GOLDEN + np.asarray(number).astype(np.uint64))
    return value


# --- canonical forms -------------------------------------------------------------------------------------------------


def canonical_is_exact(box: Box) -> bool:
    """Whether keys of this box shape are equal exactly for symmetric grids: yes up to 12 digits."""
    return min(_line_orders(box.rows, box.cols), _line_orders(box.cols, box.rows)) <= _EXACT_LIMIT


def canonical_solution_keys(solutions: np.ndarray, box: Box) -> np.ndarray:
    """A key per solution (digits uint8[N, S]), equal exactly when two solutions are symmetric.

    Keys are byte rows, uint8[N, S]. With more than 12 digits the search is infeasible and the key is an invariant of 8
    bytes: symmetric solutions still share it, and others sharing it are treated as the same (`canonical_is_exact`).
    """
    if not canonical_is_exact(box):
        return solution_invariants(solutions, box)[:, None].view(np.uint8)
    return _canonical(solutions, solutions, box)[:, : box.cells]


def canonical_puzzle_keys(puzzles: np.ndarray, solutions: np.ndarray, box: Box) -> np.ndarray:
    """A key per puzzle (digits uint8[N, S], solutions likewise), equal exactly when two puzzles are symmetric.

    Keys are byte rows, uint8[N, 2 S]: the smallest symmetric copy of the solution and, over all ways to reach it, the
    smallest pattern of givens. More than 12 digits: as in `canonical_solution_keys`.
    """
    if not canonical_is_exact(box):
        return puzzle_invariants(puzzles, solutions, box)[:, None].view(np.uint8)
    return _canonical(puzzles, solutions, box)


def solution_invariants(solutions: np.ndarray, box: Box) -> np.ndarray:
    """uint64[N] that symmetric solutions share and others hardly ever; microseconds a row."""
    return _invariants(solutions, solutions, box, with_givens=False)


def puzzle_invariants(puzzles: np.ndarray, solutions: np.ndarray, box: Box) -> np.ndarray:
    """uint64[N] that symmetric puzzles share and others hardly ever; microseconds a row."""
    return _invariants(puzzles, solutions, box, with_givens=True)


def first_of_each_class(puzzles: np.ndarray, solutions: np.ndarray, box: Box) -> np.ndarray:
    """bool[N]: rows that are not symmetric to an earlier row (digits uint8[N, S])."""
    invariant = puzzle_invariants(puzzles, solutions, box)
    _, group, size = np.unique(invariant, return_inverse=True, return_counts=True)
    doubtful = np.flatnonzero(size[group] > 1)
    keys = _as_scalars(canonical_puzzle_keys(puzzles[doubtful], solutions[doubtful], box))
    _, first = np.unique(keys, return_index=True)  # the index of the first of each
    kept = np.ones(len(puzzles), bool)
    kept[doubtful] = False
    kept[doubtful[first]] = True
    return kept


def puzzles_symmetric_to(
    puzzles: np.ndarray, solutions: np.ndarray, other_puzzles: np.ndarray, other_solutions: np.ndarray, box: Box
) -> np.ndarray:
    """bool[N]: puzzles that are symmetric to one of the other puzzles (digits uint8[N, S] and [M, S])."""
    mine, theirs = puzzle_invariants(puzzles, solutions, box), puzzle_invariants(other_puzzles, other_solutions, box)
    doubtful, others = np.flatnonzero(np.isin(mine, theirs)), np.isin(theirs, mine)
    keys = _as_scalars(canonical_puzzle_keys(puzzles[doubtful], solutions[doubtful], box))
    other_keys = _as_scalars(canonical_puzzle_keys(other_puzzles[others], other_solutions[others], box))
    found = np.zeros(len(puzzles), bool)
    found[doubtful] = np.isin(keys, other_keys)
    return found


def solutions_symmetric_to(solutions: np.ndarray, other_solutions: np.ndarray, box: Box) -> np.ndarray:
    """bool[N]: solutions that are symmetric to one of the other solutions (digits uint8[N, S] and [M, S])."""
    solutions, back = np.unique(solutions, axis=0, return_inverse=True)
    other_solutions = np.unique(other_solutions, axis=0)
    return puzzles_symmetric_to(solutions, solutions, other_solutions, other_solutions, box)[back.reshape(-1)]


def _as_scalars(keys: np.ndarray) -> np.ndarray:
    """Byte rows [N, K] as one sortable scalar each, [N]."""
    return np.ascontiguousarray(keys).view(f"V{keys.shape[1]}").reshape(-1)


def _line_orders(rows_per_band: int, bands: int) -> int:
    return math.factorial(bands) * math.factorial(rows_per_band) ** bands


@lru_cache
def _column_orders(groups: int, size: int) -> np.ndarray:
    """uint8[K, groups * size]: every order of columns that moves stacks whole and columns within them."""
    inner = list(itertools.permutations(range(size)))
    orders = [
        [g * size + c for g, within in zip(outer, choice, strict=True) for c in within]
        for outer in itertools.permutations(range(groups))
        for choice in itertools.product(inner, repeat=groups)
    ]
    return np.array(orders, np.uint8)


def _canonical(puzzles: np.ndarray, solutions: np.ndarray, box: Box) -> np.ndarray:
    out = np.empty((len(solutions), 2 * box.cells), np.uint8)
    # The number of stacks is box.rows, of columns in a stack box.cols. Where rows have fewer orders than columns, the
    # transposed grid is searched instead: any canonical form will do.
    if _line_orders(box.rows, box.cols) < _line_orders(box.cols, box.rows):
        orders, transpose = _column_orders(box.cols, box.rows), 2
    else:
        orders, transpose = _column_orders(box.rows, box.cols), int(box.rows == box.cols)
    arrays = (np.ascontiguousarray(puzzles), np.ascontiguousarray(solutions))
    symmetry_kernels.canonical_rows(*arrays, box.rows, box.cols, orders, transpose, out)
    return out


def _invariants(puzzles: np.ndarray, solutions: np.ndarray, box: Box, with_givens: bool) -> np.ndarray:
    out = np.empty(len(solutions), np.uint64)
    arrays = (np.ascontiguousarray(puzzles), np.ascontiguousarray(solutions))
    symmetry_kernels.invariants(*arrays, box.rows, box.cols, with_givens, out)
    return out

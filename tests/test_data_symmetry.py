"""Augmentation and canonical forms, against groups written out here."""

import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.generate import Puzzles, count_solutions, generate
from data.sudoku import Box, digits_from_tokens, rule_violations, tokens_from_digits
from data.symmetry import (
    augment,
    canonical_is_exact,
    canonical_puzzle_keys,
    canonical_solution_keys,
    first_of_each_class,
    puzzle_invariants,
    puzzles_symmetric_to,
    row_key,
    solutions_symmetric_to,
)

SHAPES = [(2, 2), (2, 3), (3, 2), (3, 3), (2, 4), (2, 5)]
keys = st.integers(1, 2**64 - 1)


@cache
def examples(shape: tuple[int, int]) -> Puzzles:
    return generate(Box(*shape), 16, seed=21)


def moved(puzzles: np.ndarray, solutions: np.ndarray, key: np.ndarray | int, box: Box) -> tuple[np.ndarray, np.ndarray]:
    """Digits under the symmetries of keys."""
    full_keys = np.broadcast_to(np.asarray(key, np.uint64), len(puzzles)).copy()
    a, b = augment(tokens_from_digits(puzzles), tokens_from_digits(solutions), full_keys, box)
    return digits_from_tokens(a), digits_from_tokens(b)


def line_permutations(groups: int, size: int) -> list[list[int]]:
    """All orders of rows (or columns) that keep bands together."""
    return [
        [g * size + i for g, inner in zip(outer, inners, strict=True) for i in inner]
        for outer in itertools.permutations(range(groups))
        for inners in itertools.product(itertools.permutations(range(size)), repeat=groups)
    ]


def cell_permutations(box: Box) -> np.ndarray:
    """Every move of cells in the group, int[K, S]; transposing ones included where the box is square."""
    n = box.digits
    moves = []
    for rows in line_permutations(box.cols, box.rows):
        for cols in line_permutations(box.rows, box.cols):
            cells = np.add.outer(np.array(rows) * n, np.array(cols))
            moves.append(cells.reshape(-1))
            if box.rows == box.cols:
                moves.append(cells.T.reshape(-1))
    return np.array(moves)


def relabelled(grids: np.ndarray) -> np.ndarray:
    """Grids [K, S] with digits renamed so that the first row reads 1, 2, 3, ..."""
    n = int(grids.max())
    rename = np.zeros((len(grids), n + 1), np.uint8)
    np.put_along_axis(rename, grids[:, :n].astype(np.int64), np.arange(1, n + 1, dtype=np.uint8)[None], axis=1)
    return np.take_along_axis(rename, grids.astype(np.int64), axis=1)


# --- augmentation ----------------------------------------------------------------------------------------------------


@given(shape=st.sampled_from(SHAPES), key=keys)
def test_augmented_rows_are_valid_puzzles_with_their_solutions(shape: tuple[int, int], key: int) -> None:
    box, made = Box(*shape), examples(shape)
    puzzles, solutions = moved(made.puzzles, made.solutions, key, box)
    for i in range(3):
        assert rule_violations(solutions[i], box) == []
    assert ((puzzles == 0) | (puzzles == solutions)).all()
    assert ((puzzles > 0).sum(axis=1) == (made.puzzles > 0).sum(axis=1)).all()
    if box.digits <= 9:
        assert count_solutions(puzzles[0], box) == 1


def test_key_zero_is_the_identity_among_other_keys() -> None:
    box, made = Box(3, 3), examples((3, 3))
    inputs, labels = tokens_from_digits(made.puzzles), tokens_from_digits(made.solutions)
    some = np.where(np.arange(16) % 2, 0, np.arange(1, 17)).astype(np.uint64)
    new_inputs, new_labels = augment(inputs, labels, some, box)
    same = (new_inputs == inputs).all(axis=1) & (new_labels == labels).all(axis=1)
    assert same.tolist() == [bool(i % 2) for i in range(16)]
    assert not np.shares_memory(new_inputs, inputs)


@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 2**31 - 1), cut=st.integers(0, 16))
def test_a_row_depends_on_its_key_alone(shape: tuple[int, int], seed: int, cut: int) -> None:
    box, made = Box(*shape), examples(shape)
    inputs, labels = tokens_from_digits(made.puzzles), tokens_from_digits(made.solutions)
    some = row_key(seed, np.arange(16), np.arange(16))
    whole = augment(inputs, labels, some, box)
    order = np.roll(np.arange(16), 5)
    rolled = augment(inputs[order], labels[order], some[order], box)
    head = augment(inputs[:cut], labels[:cut], some[:cut], box)
    for part in (0, 1):
        assert (rolled[part] == whole[part][order]).all()
        assert (head[part] == whole[part][:cut]).all()


@pytest.mark.parametrize("shape", [(2, 2), (2, 3)])
def test_random_symmetries_reach_the_whole_group_and_nothing_else(shape: tuple[int, int]) -> None:
    """All moves of cells occur, and all renamings of digits; a transposed 6x6 or a forgotten move would show."""
    box, made = Box(*shape), examples(shape)
    moves = cell_permutations(box)
    solution = made.solutions[:1]
    orbit = {row.tobytes() for row in relabelled(solution[0][moves])}
    count = 60 * len(moves)
    copies = np.repeat(solution, count, axis=0)
    _, images = moved(copies, copies, row_key(1, np.arange(count), np.ones(count)), box)
    assert {row.tobytes() for row in relabelled(images)} == orbit
    for cell in (0, box.cells - 1):
        share = np.bincount(images[:, cell], minlength=box.digits + 1)[1:] / count
        assert np.abs(share - 1 / box.digits).max() < 0.02
    names = {row.tobytes() for row in images[:, : box.digits]}  # first rows: every order of the digits
    assert len(names) == {4: 24, 6: 720}[box.digits]


def test_a_puzzle_and_its_label_move_together_and_independently_of_each_other() -> None:
    # The move of the input must not depend on the label: with the solution as the input too, both come out equal.
    box, made = Box(3, 3), examples((3, 3))
    puzzles, solutions = moved(made.solutions, made.solutions, 77, box)
    assert (puzzles == solutions).all()
    again, _ = moved(made.solutions, made.puzzles, 77, box)
    assert (again == solutions).all()


def test_row_keys() -> None:
    base, k = np.repeat(np.arange(50), 40), np.tile(np.arange(40), 50)
    some = row_key(3, base, k)
    assert some.dtype == np.uint64
    assert (some[k == 0] == 0).all() and (some[k > 0] != 0).all()
    assert len(np.unique(some[k > 0])) == 50 * 39
    assert (row_key(3, base[7:9], k[7:9]) == some[7:9]).all()
    assert (row_key(4, base, k)[k > 0] != some[k > 0]).all()


# --- canonical forms -------------------------------------------------------------------------------------------------


@given(shape=st.sampled_from(SHAPES), key=keys)
def test_keys_do_not_change_under_symmetries(shape: tuple[int, int], key: int) -> None:
    box, made = Box(*shape), examples(shape)
    p, s = made.puzzles[:4], made.solutions[:4]
    new_p, new_s = moved(p, s, key, box)
    assert (canonical_solution_keys(new_s, box) == canonical_solution_keys(s, box)).all()
    assert (canonical_puzzle_keys(new_p, new_s, box) == canonical_puzzle_keys(p, s, box)).all()
    assert (puzzle_invariants(new_p, new_s, box) == puzzle_invariants(p, s, box)).all()


@given(key=keys, mask_seed=st.integers(0, 1000))
def test_keys_survive_symmetries_of_the_solution_itself(key: int, mask_seed: int) -> None:
    """A solution with many automorphisms: its pattern of givens must be minimised over all of them."""
    box = Box(3, 3)
    cyclic = np.array([[(3 * (r % 3) + r // 3 + c) % 9 + 1 for c in range(9)] for r in range(9)], np.uint8).reshape(
        1, 81
    )
    assert rule_violations(cyclic[0], box) == []
    puzzle = cyclic * (np.random.default_rng(mask_seed).random((1, 81)) < 0.3)
    new = moved(puzzle.astype(np.uint8), cyclic, key, box)
    assert (canonical_puzzle_keys(*new, box) == canonical_puzzle_keys(puzzle, cyclic, box)).all()


def test_a_canonical_form_is_a_member_of_the_class() -> None:
    box, made = Box(3, 3), examples((3, 3))
    forms = canonical_puzzle_keys(made.puzzles, made.solutions, box)
    solutions, marks = forms[:, :81] + 1, forms[:, 81:]
    for i in range(len(forms)):
        assert rule_violations(solutions[i], box) == []
        assert solutions[i, :9].tolist() == list(range(1, 10))
    assert (marks.sum(axis=1) == (made.puzzles > 0).sum(axis=1)).all()
    puzzles = (solutions * marks).astype(np.uint8)
    assert all(count_solutions(puzzle, box) == 1 for puzzle in puzzles)
    assert (canonical_puzzle_keys(puzzles, solutions, box) == forms).all()


def test_exactly_36_minimal_puzzles_of_4x4_up_to_symmetry() -> None:
    """All 2**16 patterns of givens on one solution of each of the two classes."""
    box = Box(2, 2)
    made = generate(box, 200, seed=0)
    _, first = np.unique(canonical_solution_keys(made.solutions, box), axis=0, return_index=True)
    assert len(first) == 2
    patterns = (np.arange(2**16)[:, None] >> np.arange(16)) & 1
    puzzles, solutions = [], []
    for solution in made.solutions[first]:
        few = patterns[(patterns.sum(axis=1) >= 4) & (patterns.sum(axis=1) <= 7)].astype(np.uint8)  # none has more
        unique = np.array([count_solutions(p * solution, box) == 1 for p in few])
        weights = 2 ** np.arange(16)
        unique_set = set((few[unique] @ weights).tolist())
        for pattern in few[unique]:
            number = int(pattern @ weights)
            if not any(number - (1 << c) in unique_set for c in np.flatnonzero(pattern).tolist()):
                puzzles.append(pattern * solution)
                solutions.append(solution)
    classes = np.unique(canonical_puzzle_keys(np.array(puzzles), np.array(solutions), box), axis=0)
    assert len(classes) == 36


def test_exactly_49_solutions_of_6x6_up_to_symmetry() -> None:
    """49 classes turn up, and their orbits, counted by brute force, add up to all 28,200,960 solutions."""
    box = Box(2, 3)
    solutions = generate(box, 12_000, seed=0).solutions
    _, first = np.unique(canonical_solution_keys(solutions, box), axis=0, return_index=True)
    assert len(first) == 49
    moves = cell_permutations(box)
    assert len(moves) == 3456
    total = 0
    for solution in solutions[first]:
        automorphisms = (relabelled(solution[moves]) == relabelled(solution[None])).all(axis=1).sum()
        total += 720 * len(moves) // automorphisms
    assert total == 28_200_960


def test_puzzles_with_the_same_solution_are_told_apart() -> None:
    box, made = Box(3, 3), examples((3, 3))
    solution = made.solutions[:1]
    variants = np.repeat(made.puzzles[:1], 20, axis=0)
    blanks = np.flatnonzero(variants[0] == 0)[:20]
    variants[np.arange(20), blanks] = solution[0, blanks]  # one more given, at 20 different places
    found = canonical_puzzle_keys(variants, np.repeat(solution, 20, axis=0), box)
    assert len(np.unique(found, axis=0)) == 20


def test_matching_finds_exactly_the_symmetric_rows() -> None:
    box = Box(2, 3)
    made = generate(box, 60, seed=31)
    kept = first_of_each_class(made.puzzles, made.solutions, box)
    copies = moved(made.puzzles[:10], made.solutions[:10], np.arange(1, 11, dtype=np.uint64), box)
    both = np.concatenate([made.puzzles, copies[0]]), np.concatenate([made.solutions, copies[1]])
    assert first_of_each_class(*both, box).tolist() == kept.tolist() + [False] * 10
    hits = puzzles_symmetric_to(made.puzzles[:30], made.solutions[:30], copies[0][:5], copies[1][:5], box)
    by_key = canonical_puzzle_keys(made.puzzles, made.solutions, box)
    assert hits.tolist() == [any((key == other).all() for other in by_key[:5]) for key in by_key[:30]]
    assert hits[:5].all() and not hits.all()


def test_solution_matching_ignores_givens_and_repeats() -> None:
    box, made = Box(3, 3), examples((3, 3))
    _, copies = moved(made.solutions[:3], made.solutions[:3], 99, box)
    twice = np.concatenate([made.solutions[2:8], made.solutions[2:8]])
    assert solutions_symmetric_to(twice, copies, box).tolist() == ([True] + [False] * 5) * 2


def test_large_boxes_use_invariants_and_say_so() -> None:
    assert canonical_is_exact(Box(3, 3)) and canonical_is_exact(Box(3, 4)) and canonical_is_exact(Box(2, 5))
    box = Box(4, 4)
    assert not canonical_is_exact(box)
    made = generate(box, 2, seed=0)
    new = moved(made.puzzles, made.solutions, 5, box)
    found = canonical_puzzle_keys(made.puzzles, made.solutions, box)
    assert (found == canonical_puzzle_keys(*new, box)).all() and (found[0] != found[1]).any()
    assert (canonical_solution_keys(new[1], box) == canonical_solution_keys(made.solutions, box)).all()


def test_twelve_digits_are_still_exact() -> None:
    box = Box(3, 4)
    made = generate(box, 2, seed=1)
    new = moved(made.puzzles, made.solutions, 5, box)
    found = canonical_puzzle_keys(made.puzzles, made.solutions, box)
    assert (found == canonical_puzzle_keys(*new, box)).all() and (found[0] != found[1]).any()

"""Generated puzzles against an independent solver written here."""

import hashlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from data.generate import GENERATOR_VERSION, count_solutions, generate, solve
from data.sudoku import Box, rule_violations
from trainer.errors import UserError

SHAPES = [(2, 2), (2, 3), (3, 2), (2, 4), (3, 3), (2, 5), (3, 4)]


@cache
def _peers(box: Box) -> list[list[int]]:
    n = box.digits
    place = [(i // n, i % n, i // n // box.rows, i % n // box.cols) for i in range(box.cells)]
    return [
        [j for j, q in enumerate(place) if j != i and (p[0] == q[0] or p[1] == q[1] or p[2:] == q[2:])]
        for i, p in enumerate(place)
    ]


def _options(grid: list[int], cell: int, box: Box) -> set[int]:
    return set(range(1, box.digits + 1)) - {grid[p] for p in _peers(box)[cell]}


def brute_count(grid: list[int], box: Box, limit: int = 2) -> int:
    """Solutions of a puzzle by plain backtracking on the cell with the fewest options."""
    blanks = [cell for cell, digit in enumerate(grid) if digit == 0]
    if not blanks:
        return 1
    cell, options = min(((c, _options(grid, c, box)) for c in blanks), key=lambda pair: len(pair[1]))
    found = 0
    for digit in options:
        grid[cell] = digit
        found += brute_count(grid, box, limit - found)
        grid[cell] = 0
        if found >= limit:
            break
    return found


def solved_by_singles(grid: list[int], box: Box) -> bool:
    """Naked and hidden singles by the book, one at a time, until none is left."""
    grid = list(grid)
    while True:
        options = {c: _options(grid, c, box) for c, digit in enumerate(grid) if digit == 0}
        if not options:
            return True
        for cell, possible in options.items():
            hidden = [
                d
                for d in possible
                for unit in _units_of(cell, box)
                if all(d not in options.get(other, set()) for other in unit if other != cell)
            ]
            if len(possible) == 1 or hidden:
                grid[cell] = hidden[0] if hidden else possible.pop()
                break
        else:
            return False


def _units_of(cell: int, box: Box) -> list[list[int]]:
    n = box.digits
    r, c = divmod(cell, n)
    top, left = r // box.rows * box.rows, c // box.cols * box.cols
    inside = [(top + i) * n + left + j for i in range(box.rows) for j in range(box.cols)]
    return [[r * n + j for j in range(n)], [i * n + c for i in range(n)], inside]


@pytest.mark.parametrize("shape", SHAPES)
def test_puzzles_are_valid_and_keep_to_their_solution(shape: tuple[int, int]) -> None:
    box = Box(*shape)
    made = generate(box, 20, seed=1)
    for puzzle, solution in zip(made.puzzles, made.solutions, strict=True):
        assert rule_violations(solution, box) == []
        assert ((puzzle == 0) | (puzzle == solution)).all()
        assert 0 < (puzzle > 0).sum() < box.cells


@pytest.mark.parametrize(("shape", "count"), [((2, 2), 20), ((2, 3), 12), ((3, 2), 6), ((3, 3), 4)])
def test_puzzles_are_unique_and_minimal(shape: tuple[int, int], count: int) -> None:
    box = Box(*shape)
    for puzzle in generate(box, count, seed=2).puzzles.tolist():
        assert brute_count(puzzle, box) == 1
        for cell in np.flatnonzero(puzzle):
            fewer = list(puzzle)
            fewer[cell] = 0
            assert brute_count(fewer, box) == 2, "a clue could go"


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (3, 3)])
def test_singles_flag_means_naked_and_hidden_singles_solve_it(shape: tuple[int, int]) -> None:
    box = Box(*shape)
    made = generate(box, 25, seed=3)
    assert made.singles.tolist() == [solved_by_singles(puzzle, box) for puzzle in made.puzzles.tolist()]
    assert ((made.rating == 0) == made.singles).all()


@pytest.mark.parametrize("shape", [(2, 3), (3, 3)])
def test_beyond_singles_means_beyond_singles(shape: tuple[int, int]) -> None:
    box = Box(*shape)
    made = generate(box, 15, seed=4, difficulty="beyond_singles")
    assert (made.rating > 0).all()
    assert not any(solved_by_singles(puzzle, box) for puzzle in made.puzzles.tolist())


def test_difficulty_that_does_not_exist_is_refused_quickly() -> None:
    with pytest.raises(UserError, match=r"data\.difficulty=beyond_singles.*4x4.*use data\.difficulty=any"):
        generate(Box(2, 2), 3, seed=0, difficulty="beyond_singles")


@pytest.mark.parametrize("difficulty", ["any", "beyond_singles"])
def test_a_puzzle_depends_only_on_seed_and_number(difficulty) -> None:
    box = Box(2, 3)
    whole = generate(box, 12, seed=7, difficulty=difficulty)
    parts = [generate(box, n, seed=7, difficulty=difficulty, first=first) for first, n in ((0, 5), (5, 1), (6, 6))]
    for field in ("puzzles", "solutions", "rating"):
        joined = np.concatenate([getattr(part, field) for part in parts])
        assert (joined == getattr(whole, field)).all(), field
    other = generate(box, 12, seed=8, difficulty=difficulty)
    assert (other.puzzles != whole.puzzles).any(axis=1).all()
    assert len(np.unique(whole.puzzles, axis=0)) == 12


def test_puzzles_of_a_generator_version_never_change() -> None:
    """If this fails and the change is meant, raise GENERATOR_VERSION, or old caches would pass for the new puzzles."""
    digest = hashlib.sha256()
    for shape in [(2, 2), (2, 3), (3, 3)]:
        made = generate(Box(*shape), 10, seed=0)
        digest.update(made.puzzles.tobytes() + made.solutions.tobytes() + made.rating.astype("<i4").tobytes())
    assert (GENERATOR_VERSION, digest.hexdigest()[:16]) == (2, "877e7380e203a14e")


def test_no_puzzles_is_an_empty_set() -> None:
    made = generate(Box(3, 3), 0, seed=0)
    assert made.puzzles.shape == made.solutions.shape == (0, 81) and made.rating.shape == (0,)


@pytest.mark.parametrize("shape", [(4, 4), (3, 5)])
def test_large_boxes_work(shape: tuple[int, int]) -> None:
    box = Box(*shape)
    made = generate(box, 1, seed=0)
    assert rule_violations(made.solutions[0], box) == []
    assert count_solutions(made.puzzles[0], box) == 1


def test_solve_and_count() -> None:
    box = Box(3, 3)
    made = generate(box, 5, seed=9)
    for puzzle, solution in zip(made.puzzles, made.solutions, strict=True):
        assert count_solutions(puzzle, box) == 1
        assert (solve(puzzle, box) == solution).all()
        fewer = puzzle.copy()
        fewer[np.flatnonzero(puzzle)[:2]] = 0
        assert count_solutions(fewer, box) == 2
    impossible = np.zeros(81, np.uint8)
    impossible[[0, 1]] = 1
    assert count_solutions(impossible, box) == 0 and solve(impossible, box) is None
    subtle = np.zeros(81, np.uint8)  # no two clues meet, but the first cell has no digit left
    subtle[1:9] = range(1, 9)
    subtle[9] = 9
    assert count_solutions(subtle, box) == 0 and solve(subtle, box) is None


def test_all_288_solutions_of_4x4_are_counted() -> None:
    assert count_solutions(np.zeros(16, np.uint8), Box(2, 2), limit=1000) == 288


def test_random_solutions_use_every_digit_everywhere() -> None:
    solutions = generate(Box(2, 2), 8000, seed=0).solutions
    assert len(np.unique(solutions, axis=0)) == 288
    share = np.stack([(solutions == d).mean(axis=0) for d in range(1, 5)])
    assert np.abs(share - 0.25).max() < 0.05


def test_works_where_no_cache_can_be_written(tmp_path: Path) -> None:
    # A file in the place of every cache folder: not even root can write there.
    package = tmp_path / "data"
    package.mkdir()
    (package / "__pycache__").write_text("")
    (package / "kernels.py").write_text((Path(__file__).parents[1] / "data/kernels.py").read_text())
    home = tmp_path / "home"
    home.write_text("")
    code = "import numpy as np; from data.kernels import below; print(below(np.array([5], np.uint64), 1000))"
    environment = {"HOME": str(home), "XDG_CACHE_HOME": str(home), "PATH": "/usr/bin:/bin"}
    found = subprocess.run(
        [sys.executable, "-B", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    from data.kernels import below

    assert int(found.stdout) == below(np.array([5], np.uint64), 1000)

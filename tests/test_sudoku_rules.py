"""Notations, rules and messages of data.sudoku."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.generate import generate
from data.sudoku import (
    Box,
    check_givens,
    digits_from_tokens,
    format_grid,
    is_complete_solution,
    parse_puzzle,
    rule_violations,
    tokens_from_digits,
)
from trainer.errors import UserError

NINE = Box(3, 3)
PUZZLE = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
SOLUTION = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"


def digits(text: str, box: Box = NINE) -> np.ndarray:
    return parse_puzzle(text, box)


@pytest.mark.parametrize("blank", ["0", ".", "_", "*", "-"])
@pytest.mark.parametrize("per_line", [81, 9])
def test_every_usual_notation_reads_the_same(blank: str, per_line: int) -> None:
    text = PUZZLE.replace(".", blank)
    text = "\n".join(text[i : i + per_line] for i in range(0, 81, per_line))
    expected = [0 if c == "." else int(c) for c in PUZZLE]
    assert parse_puzzle(text, NINE).tolist() == expected
    assert parse_puzzle(text, NINE).dtype == np.uint8


def test_pretty_printed_grid_with_borders() -> None:
    pretty = format_grid(digits(PUZZLE), NINE)
    assert pretty.splitlines()[0] == "5 3 . | . 7 . | . . ."
    assert pretty.splitlines()[3] == "------+-------+------"
    boxed = "+-------+\n" + "\n".join(f"| {line} |" for line in pretty.splitlines()) + "\n+-------+\n"
    assert (parse_puzzle(boxed, NINE) == digits(PUZZLE)).all()


@given(data=st.data(), shape=st.sampled_from([(2, 2), (2, 3), (3, 2), (3, 3), (2, 5), (4, 4), (5, 5)]))
def test_format_then_parse_is_the_identity(data: st.DataObject, shape: tuple[int, int]) -> None:
    box = Box(*shape)
    values = st.lists(st.integers(0, box.digits), min_size=box.cells, max_size=box.cells)
    grid = np.array(data.draw(values), np.uint8)
    assert (parse_puzzle(format_grid(grid, box), box) == grid).all()
    assert (digits_from_tokens(tokens_from_digits(grid)) == grid).all()
    assert tokens_from_digits(grid).max() <= box.vocab_size - 1


def test_letters_are_digits_beyond_nine_in_both_cases() -> None:
    box = Box(2, 5)
    assert box.symbols == "123456789A"
    assert parse_puzzle("aA" + "." * 98, box)[:2].tolist() == [10, 10]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PUZZLE[:-1], "80 cells found, 81 expected"),
        (PUZZLE + "1", "82 cells found, 81 expected"),
        ("", "0 cells found, 81 expected"),
        (PUZZLE[:4] + "x" + PUZZLE[5:], "unexpected character 'x' at position 5"),
        (PUZZLE[:4] + "²" + PUZZLE[5:], "unexpected character '²' at position 5"),
        (PUZZLE[:9] + "\n1?" + PUZZLE[11:], "unexpected character '?' at line 2, column 2"),
        ("A" + PUZZLE[1:], "digit 'A' at position 1 is too large for 9x9, which uses 1-9"),
    ],
)
def test_unreadable_puzzles_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_puzzle(text, NINE)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_digit_too_large_for_a_small_grid() -> None:
    with pytest.raises(UserError, match="digit '7' at position 2 is too large for 6x6"):
        parse_puzzle("17" + "0" * 34, Box(2, 3))


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({(0, 1): 5}, "digit 5 stands twice in row 1: at row 1 column 1 and at row 1 column 2"),
        ({(8, 0): 5}, "digit 5 stands twice in column 1: at row 1 column 1 and at row 9 column 1"),
        ({(1, 2): 3}, "digit 3 stands twice in box 1: at row 1 column 2 and at row 2 column 3"),
    ],
)
def test_contradictory_givens_are_located(cells: dict[tuple[int, int], int], message: str) -> None:
    grid = digits(PUZZLE)
    check_givens(grid, NINE)
    for (r, c), digit in cells.items():
        grid[9 * r + c] = digit
    with pytest.raises(UserError, match=message):
        check_givens(grid, NINE)


def test_boxes_of_a_6x6_grid_are_two_rows_by_three_columns() -> None:
    grid = np.zeros(36, np.uint8)
    grid[0] = grid[6 + 2] = 4
    with pytest.raises(UserError, match="twice in box 1"):
        check_givens(grid, Box(2, 3))
    grid[6 + 2], grid[2 * 6 + 1] = 0, 4  # third row: another box
    check_givens(grid, Box(2, 3))


def test_violations_are_named() -> None:
    grid = digits(SOLUTION)
    assert rule_violations(grid, NINE) == []
    grid[0] = 0
    assert rule_violations(grid, NINE) == ["1 cell is empty"]
    grid[0] = 3
    assert rule_violations(grid, NINE) == ["row 1 has two 3s", "column 1 has two 3s", "box 1 has two 3s"]


SHAPES = [(2, 2), (2, 3), (3, 2), (3, 3), (2, 5)]
EXAMPLES = {shape: generate(Box(*shape), 8, seed=5) for shape in SHAPES}


@given(
    shape=st.sampled_from(SHAPES),
    row=st.integers(0, 7),
    changes=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 12)), max_size=3),
)
def test_recognised_exactly_when_no_rule_is_broken(shape, row, changes) -> None:
    box, examples = Box(*shape), EXAMPLES[shape]
    givens, grid = examples.puzzles[row], examples.solutions[row].copy()
    for cell, digit in changes:
        grid[cell % box.cells] = min(digit, box.digits)
    kept = bool(((givens == 0) | (givens == grid)).all())
    expected = kept and not rule_violations(grid, box)
    got = is_complete_solution(torch.from_numpy(grid), torch.from_numpy(givens), box)
    assert bool(got) == expected


def test_two_swapped_cells_of_a_row_break_only_columns_and_boxes() -> None:
    # Each unit kind alone must be able to refuse: swaps along a row keep rows, along a column keep columns, ...
    grid = torch.from_numpy(digits(SOLUTION)).long()
    blank = torch.zeros_like(grid)
    assert bool(is_complete_solution(grid, blank, NINE))
    latin = torch.tensor([[(r + c) % 9 + 1 for c in range(9)] for r in range(9)]).flatten()  # only boxes are wrong
    rows_only = torch.arange(1, 10).repeat(9)  # only rows are right
    columns_only = torch.arange(1, 10).repeat_interleave(9)
    boxes_only = torch.tensor([[r % 3 * 3 + c % 3 + 1 for c in range(9)] for r in range(9)]).flatten()
    # Rows and boxes are right, columns are not:
    no_columns = torch.tensor([[(r % 3 * 3 + c) % 9 + 1 for c in range(9)] for r in range(9)]).flatten()
    no_rows = no_columns.view(9, 9).T.flatten()
    wrong = torch.stack([latin, rows_only, columns_only, boxes_only, no_columns, no_rows])
    assert not is_complete_solution(wrong, torch.zeros_like(wrong), NINE).any()


def test_another_right_grid_that_changes_a_given_is_no_solution() -> None:
    grid = torch.from_numpy(digits(SOLUTION))
    givens = torch.from_numpy(digits(PUZZLE))
    renamed = grid % 9 + 1  # obeys every rule
    assert bool(is_complete_solution(renamed, torch.zeros_like(grid), NINE))
    assert not bool(is_complete_solution(renamed, givens, NINE))
    one_given = torch.zeros_like(grid)
    one_given[-1] = grid[-1]
    assert not bool(is_complete_solution(renamed, one_given, NINE))
    assert bool(is_complete_solution(grid, one_given, NINE))


def test_leading_dimensions_dtypes_and_values_out_of_range() -> None:
    grids = torch.from_numpy(EXAMPLES[3, 3].solutions).reshape(2, 4, 81)
    givens = torch.from_numpy(EXAMPLES[3, 3].puzzles).reshape(2, 4, 81)
    for dtype in (torch.uint8, torch.int32, torch.int64):
        got = is_complete_solution(grids.to(dtype), givens.to(dtype), NINE)
        assert got.shape == (2, 4) and got.all()
    wide = grids.long()
    wide[0, 1, 3], wide[1, 2, 80], wide[1, 3, 7] = -1, 1000, 10
    assert is_complete_solution(wide, torch.zeros_like(wide), NINE).tolist() == [
        [True, False, True, True],
        [True, True, False, False],
    ]

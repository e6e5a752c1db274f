"""The rules of Sudoku and its notations, for any box shape.

A grid is a flat array of S = digits**2 cells in row order; 0 is a blank, 1..digits are digits. Models see *tokens*
instead: 0 is padding (unused by Sudoku), 1 a blank, 1 + d digit d.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from trainer.errors import UserError

SYMBOLS = "123456789ABCDEFGHIJKLMNOP"
BLANKS = "0._*"
BLANK_TOKEN = 1
_COUNT_WORDS = {2: "two", 3: "three", 4: "four", 5: "five"}


@dataclass(frozen=True)
class Box:
    """The shape of a box, in cells. The grid has rows * cols rows, columns and digits, at most 25."""

    rows: int
    cols: int

    @property
    def digits(self) -> int:
        return self.rows * self.cols

    @property
    def cells(self) -> int:
        return self.digits**2

    @property
    def symbols(self) -> str:
        """The characters of digits 1, 2, ...: 1-9, then A-P."""
        return SYMBOLS[: self.digits]

    @property
    def vocab_size(self) -> int:
        """Tokens: padding, blank and the digits."""
        return self.digits + 2

    @property
    def size_name(self) -> str:
        """Such as 9x9."""
        return f"{self.digits}x{self.digits}"

    def to_fill(self, tokens: torch.Tensor) -> torch.Tensor:
        """bool [B, S]: the empty cells of puzzles [B, S] (tokens)."""
        return tokens == BLANK_TOKEN

    def solved(self, answers: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """bool [B]: answers [B, S] (tokens) that solve their puzzles [B, S], by the rules alone."""
        digits, givens = ((t.long() - BLANK_TOKEN).clamp(min=0) for t in (answers, tokens))
        return is_complete_solution(digits, givens, self)


def tokens_from_digits(grids: np.ndarray) -> np.ndarray:
    """Digits (0 blank) to tokens, uint8, any shape."""
    return (grids + 1).astype(np.uint8)


def digits_from_tokens(tokens: np.ndarray) -> np.ndarray:
    """Tokens to digits (0 blank), uint8, any shape."""
    return (tokens - 1).astype(np.uint8)


def parse_puzzle(text: str, box: Box) -> np.ndarray:
    """A puzzle in any usual notation to digits uint8[S], 0 for a blank.

    White space, `|`, `+` and box drawing are ignored. `-` is ignored when the cells are complete without it, and a blank
    otherwise.
    Raises UserError on a wrong number of cells, an unknown character or a digit beyond the box.
    """
    digit_of = {symbol: d for d, symbol in enumerate(SYMBOLS, start=1)} | dict.fromkeys(BLANKS, 0)
    cells: list[int] = []  # -1 for a dash, whose meaning shows only at the end
    for position, raw in enumerate(text, start=1):
        char = raw.upper()
        if char.isspace() or char in "|+" or "\u2500" <= char <= "\u257f":
            continue
        if char == "-":
            cells.append(-1)
            continue
        if char not in digit_of:
            raise UserError(
                f"puzzle: unexpected character {raw!r} at {_place(text, position)}; use {box.symbols[0]}-"
                f"{box.symbols[-1]} and one of {' '.join(BLANKS)} - for a blank"
            )
        if digit_of[char] > box.digits:
            raise UserError(
                f"puzzle: digit {raw!r} at {_place(text, position)} is too large for {box.size_name}, which uses "
                f"{box.symbols[0]}-{box.symbols[-1]}"
            )
        cells.append(digit_of[char])
    if len(cells) != box.cells:
        cells = [cell for cell in cells if cell >= 0]
    if len(cells) != box.cells:
        raise UserError(
            f"puzzle: {len(cells)} cells found, {box.cells} expected for {box.size_name}; give every cell, with 0 or . "
            "for a blank"
        )
    return np.maximum(cells, 0).astype(np.uint8)


def _place(text: str, position: int) -> str:
    """Where character number `position` (from 1) stands, for messages: with its line when there are several."""
    before = text[: position - 1]
    if "\n" not in text.strip():
        return f"position {position}"
    return f"line {before.count(chr(10)) + 1}, column {position - before.rfind(chr(10)) - 1}"


def format_grid(grid: np.ndarray, box: Box) -> str:
    """Digits [S] as text with box borders, `.` for a blank; `parse_puzzle` reads it back."""
    symbols = "." + box.symbols
    border = "+".join(["-" * (2 * box.cols + 1)] * box.rows)[1:-1]
    lines = []
    for r, row in enumerate(np.asarray(grid).reshape(box.digits, box.digits)):
        if r and r % box.rows == 0:
            lines.append(border)
        stacks = [row[c : c + box.cols] for c in range(0, box.digits, box.cols)]
        lines.append(" | ".join(" ".join(symbols[int(d)] for d in stack) for stack in stacks))
    return "\n".join(lines)


def _units(box: Box) -> Iterator[tuple[str, list[int]]]:
    """Names and cells of all rows, columns and boxes."""
    n = box.digits
    for r in range(n):
        yield f"row {r + 1}", [r * n + c for c in range(n)]
    for c in range(n):
        yield f"column {c + 1}", [r * n + c for r in range(n)]
    for b in range(n):
        top, left = b // box.rows * box.rows, b % box.rows * box.cols
        yield f"box {b + 1}", [(top + i) * n + left + j for i in range(box.rows) for j in range(box.cols)]


def _cell_name(cell: int, box: Box) -> str:
    return f"row {cell // box.digits + 1} column {cell % box.digits + 1}"


def check_givens(grid: np.ndarray, box: Box) -> None:
    """Raise UserError when a digit of the puzzle [S] stands twice in a row, column or box; blanks are 0."""
    for name, cells in _units(box):
        seen: dict[int, int] = {}
        for cell in cells:
            digit = int(grid[cell])
            if digit in seen:
                raise UserError(
                    f"puzzle: digit {box.symbols[digit - 1]} stands twice in {name}: at "
                    f"{_cell_name(seen[digit], box)} and at {_cell_name(cell, box)}; correct one of them"
                )
            if digit:
                seen[digit] = cell


def rule_violations(grid: np.ndarray, box: Box) -> list[str]:
    """What keeps a grid [S] of digits from being a solution, such as "row 3 has two 5s"; empty when nothing does."""
    problems = []
    for name, cells in _units(box):
        counts = np.bincount(np.asarray(grid)[cells], minlength=box.digits + 1)
        for digit in range(1, box.digits + 1):
            if counts[digit] > 1:
                count = _COUNT_WORDS.get(int(counts[digit]), str(counts[digit]))
                problems.append(f"{name} has {count} {box.symbols[digit - 1]}s")
    blanks = int((np.asarray(grid) == 0).sum())
    if blanks:
        problems.append(f"{blanks} {'cell is' if blanks == 1 else 'cells are'} empty")
    return problems


def is_complete_solution(grids: torch.Tensor, givens: torch.Tensor, box: Box) -> torch.Tensor:
    """Which grids are complete, keep the givens and break no rule.

    grids, givens: integers [..., S] on one device, digits with 0 for a blank (values outside 0..digits count as blank).
    Returns bool [...]. No label is needed, so this recognises a solved puzzle at test time.
    """
    n = box.digits
    lead = grids.shape[:-1]
    inside = (grids > 0) & (grids <= n)
    shifts = torch.where(inside, grids, 0).to(torch.int32)
    # A digit becomes a power of two. n powers of two whose sum has n bits set must all differ, so one sum per unit
    # tells whether each digit 1..n occurs exactly once; a blank (2**0) spoils the sum.
    powers = torch.bitwise_left_shift(torch.ones_like(shifts), shifts)
    powers = powers.reshape(*lead, box.cols, box.rows, box.rows, box.cols)  # bands, rows, stacks, columns
    wanted = 2 ** (n + 1) - 2
    box_rows = powers.sum(dim=-1, dtype=torch.int32)
    rows_right = (box_rows.sum(dim=-1, dtype=torch.int32) == wanted).flatten(-2).all(dim=-1)
    boxes_right = (box_rows.sum(dim=-2, dtype=torch.int32) == wanted).flatten(-2).all(dim=-1)
    columns = powers.flatten(-2).flatten(-3, -2).sum(dim=-2, dtype=torch.int32)
    columns_right = (columns == wanted).all(dim=-1)
    kept = ((givens == 0) | (givens == grids)).all(dim=-1)
    return rows_right & boxes_right & columns_right & kept

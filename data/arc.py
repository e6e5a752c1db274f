"""ARC grids as tokens on a canvas, and the augmentations of a task with their inverses.

Tokens: 0 padding, 1 the mark that ends a grid, 2 + colour a cell. Grids are uint8 [rows, columns] of colours 0..9, at most
as large as the canvas. Follows the released TRM's converter and evaluator (parity README, section 4).
"""

from dataclasses import dataclass

import numpy as np

CANVAS = 30
COLOURS = 10
END_TOKEN = 1
FIRST_COLOUR = 2
VOCAB_SIZE = FIRST_COLOUR + COLOURS
INVERSE_DIHEDRAL = (0, 3, 2, 1, 4, 5, 6, 7)
"""The dihedral number that undoes each one."""
_SEPARATOR = "|||"


def dihedral(grid: np.ndarray, number: int) -> np.ndarray:
    """One of the eight symmetries of the square: 0 none, 1-3 quarter turns counter-clockwise, 4 left-right flip, 5 up-down
    flip, 6 transpose, 7 left-right flip of a quarter turn."""
    if number < 4:
        return np.rot90(grid, number)
    return (np.fliplr(grid), np.flipud(grid), grid.T, np.fliplr(np.rot90(grid)))[number - 4]


def tokens_from_grid(grid: np.ndarray, canvas: int = CANVAS, row: int = 0, column: int = 0) -> np.ndarray:
    """uint8 [canvas * canvas]: the grid with its corner at (row, column), an end mark below each column and right of each
    row where the canvas has room, padding elsewhere."""
    rows, columns = grid.shape
    assert row + rows <= canvas and column + columns <= canvas, (grid.shape, row, column, canvas)
    tokens = np.zeros((canvas, canvas), np.uint8)
    bottom, right = row + rows, column + columns
    tokens[row:bottom, column:right] = grid + FIRST_COLOUR
    tokens[bottom : bottom + 1, column:right] = END_TOKEN
    tokens[row:bottom, right : right + 1] = END_TOKEN
    return tokens.reshape(-1)


def crop(tokens: np.ndarray) -> np.ndarray:
    """The largest rectangle of colours at the top left of a canvas, as colours; (0, 0) when the first cell is none.

    tokens [canvas * canvas]. Of rectangles with equal area, the one with fewest rows.
    """
    side = round(len(tokens) ** 0.5)
    canvas = tokens.reshape(side, side)
    coloured = (canvas >= FIRST_COLOUR) & (canvas < VOCAB_SIZE)
    # Columns filled from the left in this row and in every row above it.
    width = np.minimum.accumulate(np.minimum.accumulate(coloured, axis=1).sum(1))
    area = width * np.arange(1, side + 1)
    rows = int(area.argmax())
    if area[rows] == 0:
        return np.zeros((0, 0), np.uint8)
    return (canvas[: rows + 1, : width[rows]] - FIRST_COLOUR).astype(np.uint8)


@dataclass(frozen=True)
class Augmentation:
    """Recolour, then turn or flip. `colours[c]` is what colour c becomes; black (0) stays."""

    dihedral: int = 0
    colours: tuple[int, ...] = tuple(range(COLOURS))

    def apply(self, grid: np.ndarray) -> np.ndarray:
        return dihedral(np.asarray(self.colours, np.uint8)[grid], self.dihedral)

    def undo(self, grid: np.ndarray) -> np.ndarray:
        back = np.argsort(self.colours).astype(np.uint8)
        return back[dihedral(grid, INVERSE_DIHEDRAL[self.dihedral])]

    def name(self, task: str) -> str:
        """Identifier of the augmented copy of a task: task|||t<dihedral>|||<new colour of each old one>."""
        return f"{task}{_SEPARATOR}t{self.dihedral}{_SEPARATOR}{''.join(map(str, self.colours))}"

    @staticmethod
    def of_name(name: str) -> "tuple[str, Augmentation]":
        """The task and the augmentation of an identifier; a name without one is the task itself."""
        task, *parts = name.split(_SEPARATOR)
        if not parts:
            return task, Augmentation()
        turn, colours = parts
        return task, Augmentation(int(turn.removeprefix("t")), tuple(map(int, colours)))

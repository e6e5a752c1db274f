"""Solve Sudoku with a trained checkpoint: the grid, the loops it took, and whether the answer stands.

    python solve.py checkpoint=outputs/<run> puzzle=53..7....6..195....98....6.8...6...3 ... (81 characters)
    python solve.py checkpoint=outputs/<run> file=puzzles.txt        one puzzle a line, or grids parted by blank lines
    cat puzzles.txt | python solve.py checkpoint=outputs/<run> file=-

Blanks are 0 or a dot. Exit code: 0 when every answer is valid, 1 when one is not, 2 for a mistake in the input.
"""

import sys

from trainer.cli import compose_settings, run_program
from trainer.config import SolveConfig


def main(config: SolveConfig) -> int:
    from trainer.solver import solve_program

    return solve_program(config)


if __name__ == "__main__":
    run_program(lambda: main(compose_settings("solve", sys.argv[1:], SolveConfig)))

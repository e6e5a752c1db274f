"""Write a Sudoku data set in the on-disk format of the HRM, TRM and EqR repositories, so that they can train on it.

    python scripts/write_puzzle_dir.py <folder> data=sudoku9 data.num_aug=1000
    python train.py data=puzzle_dir data.path=<folder>

Settings are those of train.py. The copies of a training puzzle are those that a run with the same data.num_aug and
data.seed trains on; data.num_aug=null, a fresh symmetry at every draw, has no place in the format.
"""

import argparse
from functools import partial
from pathlib import Path

from data.build import load_puzzle_data
from data.folder import write_puzzle_dir
from trainer.cli import run_program
from trainer.compose import compose_launch
from trainer.config import SudokuConfig, TrainConfig
from trainer.errors import UserError


def main(folder: Path, overrides: list[str]) -> None:
    config = compose_launch("config", overrides, TrainConfig).jobs[0].data
    if not isinstance(config, SudokuConfig):
        raise UserError(
            f"data.kind={config.kind}: a data set of Sudoku puzzles can be written; use data=sudoku9, for one"
        )
    if config.num_aug is None:
        raise UserError(
            "data.num_aug=null: the format holds a fixed number of copies of each puzzle; give data.num_aug=1000, or 0 for none"
        )
    write_puzzle_dir(folder, load_puzzle_data(config), config.num_aug, config.seed)
    print(f"written: {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    run_program(partial(main, asked.folder, asked.overrides))

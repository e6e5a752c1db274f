"""Small data sets and CSV files for the tests of data.build."""

import csv
from pathlib import Path
from typing import Any

import numpy as np

from data.arrays import PuzzleData, Split
from data.build import load_puzzle_data
from data.generate import Puzzles
from data.sudoku import Box, digits_from_tokens
from data.symmetry import canonical_puzzle_keys
from trainer.config import SudokuConfig

SIX = Box(2, 3)


def settings(cache_dir: Path, **changes: Any) -> SudokuConfig:
    base = {
        "kind": "sudoku", "name": "sudoku-extreme", "box_rows": 2, "box_cols": 3, "source": "generated", "train_puzzles": 20,
        "validation_puzzles": 10, "test_puzzles": 15, "seed": 0, "cache_dir": cache_dir, "hub_timeout": 0.5,
    }  # fmt: skip
    return SudokuConfig.model_validate(base | changes)


def quiet(_: str) -> None:
    pass


def load(config: SudokuConfig) -> tuple[PuzzleData, list[str]]:
    said: list[str] = []
    return load_puzzle_data(config, said.append), said


def split_keys(split: Split, box: Box) -> set[bytes]:
    keys = canonical_puzzle_keys(digits_from_tokens(split.inputs), digits_from_tokens(split.labels), box)
    return {key.tobytes() for key in keys}


def text(grid: np.ndarray, blank: str = ".") -> str:
    return "".join(blank if d == 0 else str(d) for d in grid.tolist())


def write_csv(path: Path, puzzles: Puzzles, first: int, count: int, blank: str = ".") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["source", "question", "answer", "rating"])
        for i in range(first, first + count):
            writer.writerow(["made", text(puzzles.puzzles[i], blank), text(puzzles.solutions[i]), i])

"""Make the bundled checkpoints and demo puzzles in models/pretrained/ from runs of the CPU experiment.

    python scripts/bundle.py outputs/<infiloop run> outputs/<trm run>

Copies the averaged weights of each run's best checkpoint, and 100 test puzzles (a random subset, seed 0) as CSV.
"""

import argparse
import csv
from functools import partial
from pathlib import Path

from data.arrays import DataMeta
from data.build import load_puzzle_data
from data.sudoku import digits_from_tokens
from trainer.checkpoint import export_ema, find_checkpoint, load_checkpoint
from trainer.cli import run_program
from trainer.config import PROJECT
from trainer.errors import UserError
from trainer.evaluator import subset

BUNDLED = PROJECT / "models" / "pretrained"
DEMO_PUZZLES = 100


def main(runs: list[Path]) -> None:
    checkpoints = [load_checkpoint(find_checkpoint(run)) for run in runs]
    config, meta = checkpoints[0].config, DataMeta(**checkpoints[0].data_meta)
    data = load_puzzle_data(config.data)
    for checkpoint in checkpoints:
        if checkpoint.data_meta["fingerprint"] != data.meta.fingerprint:
            raise UserError(f"{checkpoint.path}: trained on other data than {data.meta.name} here; train it again")
    BUNDLED.mkdir(exist_ok=True)
    for checkpoint in checkpoints:
        export_ema(checkpoint.path, BUNDLED / f"{checkpoint.config.model.name}_sudoku6.safetensors")
    chosen = subset(data.test, DEMO_PUZZLES, 0)
    with (BUNDLED / "sudoku6_demo.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["source", "question", "answer", "rating"])
        for question, answer, rating in zip(chosen.inputs, chosen.labels, chosen.rating, strict=True):
            digits = ["".join(map(str, digits_from_tokens(row).tolist())) for row in (question, answer)]
            writer.writerow([meta.name, *digits, rating])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    run_program(partial(main, parser.parse_args().runs))

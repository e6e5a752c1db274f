"""Two bundled checkpoints, InfiLoop and TRM, on the same 6x6 puzzles: accuracy by depth, then one puzzle solved by each.

    python scripts/demo.py [folder for the picture and tables, default outputs/demo]

The puzzles are 100 of the CPU experiment's test puzzles; naked and hidden singles alone solve none of them.
"""

import argparse
import logging
from functools import partial
from pathlib import Path

from data.sudoku import digits_from_tokens, format_grid
from trainer.checkpoint import load_checkpoint
from trainer.cli import run_program
from trainer.config import PROJECT, EvalConfig, TrainerConfig
from trainer.curves import draw_depth_curve
from trainer.report import evaluate_checkpoint, own_puzzles
from trainer.runtime import set_up
from trainer.solver import verdict

BUNDLED = PROJECT / "models" / "pretrained"
TRAINER = TrainerConfig(
    device="cpu", dtype="float32", compile=False, micro_batch="auto", log_every=1, eval_every=0, checkpoint_every=1
)


def main(folder: Path) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    runtime, settings = set_up(TRAINER), EvalConfig(n="all", segments=12, batch_size=50)
    everything = []
    for name in ("infiloop", "trm"):
        checkpoint = load_checkpoint(BUNDLED / f"{name}_sudoku6.safetensors")
        split, meta = own_puzzles(BUNDLED / "sudoku6_demo.csv", checkpoint)
        results, evaluation = evaluate_checkpoint(checkpoint, split, meta, settings, runtime)
        everything.append((name, results, evaluation))

    first = everything[0][1]
    print(
        f"\nexact accuracy by depth, n={len(split)} ({meta.name}), EMA weights, H={first['H_cycles']} "
        f"L={first['L_cycles']}; training went to {first['trained']['segments']} segments\n"
    )
    print("segments  executed layers  " + "".join(f"{name:>20}" for name, _, _ in everything))
    for rows in zip(*(results["depths"] for _, results, _ in everything), strict=True):
        segments = rows[0]["outer_updates"] // first["H_cycles"]
        if segments in (1, 2, 3, 4, 6, 8, 12):
            scores = "".join(f"{r['exact_accuracy']:>11.4f} ({r['exact']}/{r['n']})" for r in rows)
            print(f"{segments:>8}  {rows[0]['executed_layers']:>15,}  {scores}")

    folder.mkdir(parents=True, exist_ok=True)
    draw_depth_curve([results for _, results, _ in everything], folder / "depth_curves.png")
    print(f"\nthe curves: {folder / 'depth_curves.png'}")

    hardest = int(split.rating.argmax())
    puzzle = digits_from_tokens(split.inputs[hardest])
    print(
        f"\na puzzle that needs {split.rating[hardest]} guesses when singles run out:\n{format_grid(puzzle, meta.box)}"
    )
    for name, _, evaluation in everything:
        answer = digits_from_tokens(evaluation.answers[hardest])
        problems = verdict(answer, puzzle, meta.box)
        print(f"\n{name}: {'valid' if not problems else 'NOT valid: ' + '; '.join(problems)}")
        print(format_grid(answer, meta.box))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=PROJECT / "outputs" / "demo")
    run_program(partial(main, parser.parse_args().folder))

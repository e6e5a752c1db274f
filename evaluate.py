"""Evaluate a checkpoint at any depth: one pass to the greatest, scored at every decode on the way.

    python evaluate.py checkpoint=outputs/<run>                                       as trained
    python evaluate.py checkpoint=outputs/<run> eval.H_cycles=6 eval.L_cycles=12 eval.segments=12
    python evaluate.py checkpoint=outputs/<run> eval.layers=20000 eval.decode=segment eval.n=512
    python evaluate.py checkpoint=outputs/<run> puzzles=my.csv                        columns question, answer

Writes results.json, depth_curve.csv and depth_curve.png. `python evaluate.py --help` lists every setting.
"""

import sys

from trainer.cli import compose_settings, run_program
from trainer.config import EvaluateConfig


def main(config: EvaluateConfig) -> None:
    from trainer.report import evaluate_program

    evaluate_program(config)


if __name__ == "__main__":
    run_program(lambda: main(compose_settings("evaluate", sys.argv[1:], EvaluateConfig)))

"""Make a checkpoint of ours from released weights of TRM, HRM, FPRM, EqR or InfiLoop.

    python scripts/import_checkpoint.py step_21700 --out outputs/trm.safetensors
    python scripts/import_checkpoint.py step_21700 --out outputs/trm.safetensors --config all_config.yaml
    python scripts/import_checkpoint.py weights.safetensors --out outputs/mlp.safetensors schedule.segments=16 seed=1
    python scripts/import_checkpoint.py infiloop.pt --out outputs/infiloop.safetensors --names names.json

The file is what torch.save wrote (read by the restricted unpickler alone) or safetensors. Names may have the wrappers
`_orig_mod.`, `model.` and `inner.` or not. Then `evaluate.py checkpoint=outputs/trm.safetensors puzzles=my.csv` and solve.py
work as for a run; `scripts/export_checkpoint.py` gives the released form back.

Settings come from the weights, then from --config (the all_config.yaml beside a released checkpoint), then from the
family's paper preset; every one is printed with its origin. Settings as train.py reads them (model.num_heads=4) go before
all but the weights: what contradicts those is refused.

--names: JSON {"their name": "our name"} for names that are not TRM's, null for a weight to leave out. InfiLoop has a
query and a decay on each axis: inner.query, inner.raw_decay, outer.query, outer.raw_decay; for a decay that is stored as
lambda or as beta = exp(-lambda), write inner.lambda or inner.beta. Such as

    {"inner.attnres_L.q": "inner.query", "inner.attnres_L.beta": "inner.beta"}

EqR: names, wrapper and settings follow its released code; there is no released file here to test with. A training file of
EqR's with its carry inside is refused: save its "model" and "ema" alone.
"""

import argparse
from functools import partial
from pathlib import Path

from trainer.cli import run_program
from trainer.importing import import_checkpoint
from trainer.released_weights import read_names


def main(asked: argparse.Namespace) -> None:
    names = {} if asked.names is None else read_names(asked.names)
    import_checkpoint(asked.source, asked.out, asked.settings, asked.config, names, asked.seq_len)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the released file")
    parser.add_argument("settings", nargs="*", help="as train.py reads them, such as model.num_heads=4")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint to write")
    parser.add_argument("--config", type=Path, help="all_config.yaml of the released run")
    parser.add_argument("--names", type=Path, help="map of names, JSON")
    parser.add_argument("--seq-len", type=int, help="cells of a puzzle, where the weights do not tell")
    run_program(partial(main, parser.parse_intermixed_args()))

"""Write a checkpoint's weights as a state_dict with the released names, for the authors' programs to load.

    python scripts/export_checkpoint.py outputs/<run> --out step_2600
    python scripts/export_checkpoint.py outputs/<run> --out weights.safetensors --weights raw --prefix ""

Of an imported checkpoint: the tensors it was made from, bit for bit, dtypes and names included (dropout masks as ones). Of
one of ours: float32 under the names of a compiled released run (`_orig_mod.model.inner.`), or with another --prefix.
--names: JSON {"their name": "our name"} as in import_checkpoint.py, for weights that the released code does not have.
"""

import argparse
from functools import partial
from pathlib import Path

from trainer.checkpoint import find_checkpoint, load_checkpoint
from trainer.cli import run_program
from trainer.released_weights import read_names, released_state
from trainer.state_file import write_state


def main(asked: argparse.Namespace) -> None:
    checkpoint = load_checkpoint(find_checkpoint(asked.checkpoint))
    names = {} if asked.names is None else read_names(asked.names)
    state = released_state(checkpoint, asked.weights, asked.prefix, names)
    write_state(asked.out, state)
    print(
        f"written: {asked.out}, {len(state)} tensors of {checkpoint.path} ({asked.weights}), such as {next(iter(state))}"
    )
    s = checkpoint.config.schedule
    print(
        f"its depth, which the file cannot hold: schedule.H_cycles={s.H_cycles} schedule.L_cycles={s.L_cycles} "
        f"schedule.segments={s.segments} model.num_heads={checkpoint.config.model.num_heads} (give these to import_checkpoint.py)"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a run directory or a checkpoint")
    parser.add_argument(
        "--out", type=Path, required=True, help="the file to write: safetensors by its ending, else torch.save"
    )
    parser.add_argument("--weights", choices=["ema", "raw"], default="ema")
    parser.add_argument("--prefix", help="what stands in front of every name")
    parser.add_argument("--names", type=Path, help="map of names, JSON")
    run_program(partial(main, parser.parse_args()))

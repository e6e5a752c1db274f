"""Train a looped reasoner on Sudoku, validate on the way, keep the best checkpoint, test it.

python train.py experiment=sudoku6_cpu                     small InfiLoop on 6x6 Sudoku: minutes on two CPU cores
python train.py model=infiloop data=sudoku                 the paper's recipe (a GPU job)
python train.py -m experiment=sudoku6_cpu model.connection.beta0=0.10,0.55,0.90
python train.py experiment=tiny                            seconds; a smoke test
python train.py from=outputs/<run>/config.yaml             a run again, from its saved settings
python train.py --help                                     groups, options, how to override
"""

from trainer.cli import run_train


def main(config) -> None:
    from trainer.loop import train  # after the settings are known to be right: importing torch takes seconds

    train(config)


if __name__ == "__main__":
    run_train(main)

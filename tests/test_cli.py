"""The command line: a mistake is one line, exit code 2 and no directory; jobs run as Hydra runs them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from trainer.cli import compose_settings, run_program, run_train
from trainer.compose import compose_launch
from trainer.config import PROJECT, EvaluateConfig, SolveConfig, SudokuConfig, TrainConfig
from trainer.errors import UserError

# A program whose job does what its seed says, so that no test here trains anything.
PROGRAM = """
import logging, sys, time
from trainer.cli import dump_config, run_train
from trainer.config import TrainConfig
from trainer.errors import UserError

def main(config):
    logging.getLogger("job").info("seed %s", config.seed)
    (config.run_dir / "config.yaml").write_text(dump_config(config))
    if config.seed == 7:
        raise UserError("data.path: no such folder")
    if config.seed == 8:
        raise ZeroDivisionError("a fault of ours")
    if config.seed == 9:
        time.sleep(60)
    if config.seed == 10:
        TrainConfig.model_validate({"seed": 1})
    print(sys.argv[1:])

run_train(main)
"""


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(*argv: str, program: str | Path = "program.py", **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), **variables}
    command = [sys.executable, str(program), *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait(process: subprocess.Popen[str]) -> Done:
    out, err = process.communicate(timeout=60)
    return Done(process.returncode, out, err)


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "program.py")


# --- mistakes, found before anything starts --------------------------------------------------------------------------


def mistake(*argv: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that run_train says about these arguments."""

    def job(config: TrainConfig) -> None:
        raise AssertionError("the job started")

    with pytest.raises(SystemExit) as caught:
        run_train(job, list(argv))
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    return err.removeprefix("error: ").strip()


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("trainer.max_stepz=5", "trainer.max_stepz: no such setting; did you mean trainer.max_steps?"),
        ("device=cpu", "device: no such setting; did you mean trainer.device?"),
        ("+trainer.foo=1", "trainer.foo: no such setting; trainer has checkpoint_every, compile, device"),
        ("+seed=3", "+seed=3: seed exists, so write it without the +"),
        ("modle=trm", "modle: no such setting; did you mean model?"),
        (
            "model=infilop",
            "model=infilop: no such option; did you mean infiloop? options of model: eqr, fprm, hrm, infiloop, looped, trm",
        ),
        ("experiment=tinny", "experiment=tinny: no such option; did you mean tiny? options of experiment: sudoku6"),
        ("experiment=null", "or none at all with ~experiment"),
        ("+experiment=tiny", "experiment has a choice already, so write it without the +"),
        ("model/connection=foo", "options of model/connection: attention_residual, carry_last, constant_step"),
        ("model/connection@model.othr_connection=carry_last", "mean model/connection@model.other_connection"),
        ("model=trm model.connection.beta0=0.5", "model.connection.beta0: no such setting; model.connection has kind"),
        ("hydra/launcher=foo", "hydra/launcher=foo: no such option; options of hydra/launcher: basic"),
        ("hydra.run.dirr=x", "hydra.run.dirr: no such setting; did you mean hydra.run.dir?"),
        ("seed=abc", "seed=abc: expected an integer"),
        ("seed=???", "seed is missing"),
        ("seed=${nope}", "seed: Interpolation key 'nope' not found"),
        ("run_dir=x/${nope}", "run_dir: Interpolation key 'nope' not found"),
        ("model.connection.beta0=1.82", "model.connection.beta0=1.82 with beta=learned"),
        ("model.hidden_size=[1", "model.hidden_size=[1: not readable as name=value"),
        ("tiny", "'tiny' is not a setting: write name=value"),
        ("seed=1 seed=2", "seed is given twice: seed=1 and seed=2"),
        ("seed=1,2", "seed=1,2: several values for one setting; add -m"),
        ("--mutlirun seed=1", "--mutlirun: no such flag; did you mean --multirun?"),
        ("--config-name nope", "--config-name: no such flag; flags are --help, --version, --multirun"),
        ("--cfg", "expected one argument"),
        ("--cfg job -m", "leave --multirun out"),
        ("from=nowhere/config.yaml", "from=nowhere/config.yaml: expected a run's config.yaml"),
        ("from=program.py", "from=program.py: not readable as YAML"),
        ("run_dir=program.py/x", "run_dir=program.py/x cannot be made: Not a directory"),
        # Sweeps: every job is checked, and a mistake that only one of them has names it.
        ("trainer.max_stepz=5 -m seed=0,1", "trainer.max_stepz: no such setting; did you mean trainer.max_steps?"),
        (
            "-m model.connection.beta0=0.1,1.82,0.9",
            "job 1 (model.connection.beta0=1.82): model.connection.beta0=1.82 wi",
        ),
        ("-m model=infiloop,infilop", "job 1 (model=infilop): model=infilop: no such option; did you mean infiloop?"),
        ("hydra.mode=MULTIRUN model.num_heads=4,3", "job 1 (model.num_heads=3): model.num_heads=3 does not divide"),
        ("-m seed=interval(0,1)", "does not support sweep type"),
        ("-m hydra.run.dir=a,b", "Sweeping over Hydra's configuration is not supported"),
        ("-m run_dir=x seed=0,1", "run_dir=x: under -m each job has a folder of its own"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_directory(
    argv: str, told: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert told in mistake(*argv.split(), capsys=capsys)
    assert entries(folder) == []


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "checkpoint is missing: give checkpoint=<value>"),
        (["checkpoint=x", "eval.segment=3"], "eval.segment: no such setting; did you mean eval.segments?"),
        (
            ["checkpoint=x", "model=trm"],
            "model: no such setting; there are checkpoint, eval, out, puzzles, trainer, which",
        ),
        (["checkpoint=x", "eval.segments=3", "eval.layers=9"], "eval.segments and eval.layers both set the depth"),
        (["checkpoint=x", "eval.halting=maybe"], "eval.halting=maybe: expected on, off or batch_residual"),
        (["-m", "checkpoint=x", "eval.segments=1,2"], "--multirun is for train.py"),
        (["checkpoint=x", "eval.segments=1,2"], "eval.segments=1,2: several values"),
    ],
)
def test_mistakes_to_evaluate(argv: list[str], told: str, folder: Path):
    with pytest.raises(UserError) as caught:
        compose_settings("evaluate", argv, EvaluateConfig)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert entries(folder) == []


def test_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "WORLD_SIZE=2" in mistake("seed=1", capsys=capsys)


# --- texts survive Hydra's grammar -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "puzzle",
    [
        "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79",
        "000000000302540000050301070000000004409006005023054790000000050700810000080060009",
        "530070000600195000098000060800060003400803001700020006060000280000419005000080079",
        "1.." + "." * 78,
        "1e5",
        "0x10",
        "53..7\n6..1 \n",
        " 12 ",
        "[1",
        "{a: 1}",
        "a'b\\",
        "true",
        "1,2",
        "key=value",
    ],
)
def test_a_puzzle_stays_the_text_it_was(puzzle: str):
    settings = compose_settings("solve", ["checkpoint=x", f"puzzle={puzzle}"], SolveConfig)
    assert settings.puzzle == puzzle


@pytest.mark.parametrize("path", ["outputs/multirun/x/0_seed=1,model=trm", "my runs/a (b)", "007", "~/x", "[1]", "a:b"])
def test_a_path_stays_the_text_it_was(path: str):
    assert compose_settings("evaluate", [f"checkpoint={path}"], EvaluateConfig).checkpoint == Path(path)
    assert compose_settings("solve", ["checkpoint=x", f"file={path}"], SolveConfig).file == path


def test_null_and_quotes_keep_their_meaning():
    settings = compose_settings("solve", ["checkpoint='a b'", "puzzle=null", "file=-"], SolveConfig)
    assert (settings.checkpoint, settings.puzzle, settings.file) == (Path("a b"), None, "-")


def test_a_sweep_composes_each_job_as_the_sweeper_will():
    argv = ["model=trm,infiloop", "seed=range(0,2)", "experiment=tiny"]
    launch = compose_launch("config", argv, TrainConfig, sweep=True)
    assert launch.labels == ["model=trm seed=0", "model=trm seed=1", "model=infiloop seed=0", "model=infiloop seed=1"]
    assert [(job.model.name, job.seed) for job in launch.jobs] == [
        ("trm", 0),
        ("trm", 1),
        ("infiloop", 0),
        ("infiloop", 1),
    ]
    assert launch.directory.parent == Path("outputs/multirun")


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_has_one_directory_with_its_log_and_can_be_started_again_from_its_settings(folder: Path):
    done = wait(
        start("experiment=tiny", "model/connection=constant_step", "seed=3", "data.source=csv", "data.path=a, b")
    )
    assert done.code == 0 and done.err == ""
    assert done.out.splitlines() == [
        "seed 3",
        "['experiment=tiny', 'model/connection=constant_step', 'seed=3', 'data.source=csv', 'data.path=a, b']",
    ]
    (run,) = (folder / "outputs").iterdir()
    assert run.name.endswith("_infiloop_sudoku4_s3") and entries(run) == ["config.yaml", "train.log"]
    assert (run / "train.log").read_text() == "seed 3\n"

    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved.pop("run_dir") == f"outputs/{run.name}"
    assert saved["data"]["path"] == str(folder / "a, b")
    assert wait(start(f"from={run}/config.yaml", "run_dir=again")).code == 0
    again = yaml.safe_load((folder / "again/config.yaml").read_text())
    assert again.pop("run_dir") == "again" and again == saved


def test_saved_settings_give_way_to_the_command_line(folder: Path):
    assert wait(start("experiment=tiny", "seed=3", "run_dir=first")).code == 0
    launch = compose_launch("config", ["from=first", "data=sudoku6", "schedule.lr=0.5", "seed=4"], TrainConfig)
    (job,) = launch.jobs
    assert isinstance(job.data, SudokuConfig)
    assert (job.data.name, job.data.box_cols, job.schedule.lr, job.seed) == ("sudoku6", 3, 0.5, 4)
    assert job.model.hidden_size == 32 and job.run_dir.parent == Path("outputs")  # a directory of its own
    other = compose_launch("config", ["from=first", "model/connection=constant_step"], TrainConfig).jobs[0]
    assert other.model.connection.kind == "constant_step" and other.model.hidden_size == 32


def test_a_start_moves_on_when_another_of_this_second_has_its_directory(folder: Path):
    other = "from pathlib import Path\nfrom trainer.compose import STAMP\nstamp = str(STAMP)\n"
    other += 'Path(f"outputs/{stamp}_infiloop_sudoku4_s0").mkdir(parents=True)\n'
    (folder / "program.py").write_text(other + PROGRAM)
    assert wait(start("experiment=tiny")).code == 0
    theirs, ours = sorted((folder / "outputs").iterdir(), key=lambda path: len(path.name))
    assert ours.name == theirs.name.replace("_infiloop", ".2_infiloop")
    assert entries(theirs) == [] and entries(ours) == ["config.yaml", "train.log"]


@pytest.mark.parametrize(
    ("seed", "code", "told"),
    [
        (7, 2, "error: data.path: no such folder\n"),
        (10, 2, "error: run_dir is missing: expected a path; model is missing"),
    ],
)
def test_a_mistake_found_by_the_job_is_one_line(seed: int, code: int, told: str, folder: Path):
    done = wait(start("experiment=tiny", f"seed={seed}", "run_dir=run"))
    assert done.code == code and done.err.startswith(told) and done.err.count("\n") == 1
    assert done.err in (folder / "run/train.log").read_text()


def test_a_fault_of_ours_keeps_its_traceback(folder: Path):
    done = wait(start("experiment=tiny", "seed=8", "run_dir=run"))
    assert done.code == 1
    assert done.err.startswith("Traceback") and done.err.endswith("ZeroDivisionError: a fault of ours\n")
    assert 'raise ZeroDivisionError("a fault of ours")' in done.err and "HYDRA_FULL_ERROR" not in done.err
    assert (folder / "run/train.log").read_text().count("Traceback") == 1


def test_ctrl_c_is_quiet(folder: Path):
    process = start("experiment=tiny", "seed=9", "run_dir=run")
    deadline = time.monotonic() + 30
    while not (folder / "run/config.yaml").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    done = wait(process)
    assert done.code == 130 and done.err == ""


def test_a_sweep_goes_on_after_a_failed_job(folder: Path):
    done = wait(start("experiment=tiny", "-m", "seed=7,2"))  # flags and overrides in any order
    assert done.code == 2
    assert done.err == "error: job 0 (seed=7): data.path: no such folder\n"
    assert [line for line in done.out.splitlines() if line.startswith("seed")] == ["seed 7", "seed 2"]
    (sweep,) = (folder / "outputs/multirun").iterdir()
    jobs = [f"{number}_experiment=tiny,seed={seed}" for number, seed in enumerate([7, 2])]
    assert entries(sweep) == [*jobs, "multirun.yaml"]
    for job in jobs:
        assert entries(sweep / job) == ["config.yaml", "train.log"]
        saved = yaml.safe_load((sweep / job / "config.yaml").read_text())
        assert Path(saved["run_dir"]) == (sweep / job).relative_to(folder)
        assert (sweep / job / "train.log").read_text().startswith(f"seed {saved['seed']}\n")


def test_a_sweep_with_a_fault_of_ours_ends_in_its_traceback(folder: Path):
    done = wait(start("-m", "experiment=tiny", "seed=8,1"))
    assert done.code == 1
    assert done.err.startswith("error: job 0 (seed=8): ZeroDivisionError: a fault of ours; the other jobs go on")
    assert 'raise ZeroDivisionError("a fault of ours")' in done.err and "1 of 2 jobs failed" in done.err
    assert "seed 1\n" in done.out


def test_a_real_process_says_one_line_too(folder: Path):
    done = wait(start("trainer.max_stepz=5"))
    assert done == (2, "", "error: trainer.max_stepz: no such setting; did you mean trainer.max_steps?\n")
    assert entries(folder) == []


# --- the programs ----------------------------------------------------------------------------------------------------


def test_help_lists_groups_options_and_programs(folder: Path):
    done = wait(start("--help", program=PROJECT / "train.py"))
    assert done.code == 0 and done.err == "" and len(done.out.splitlines()) < 30
    for line in (
        "  model: eqr, fprm, hrm, infiloop, looped, trm",
        "  data: puzzle_dir, sudoku, sudoku4, sudoku6, sudoku9",
        "experiment=sudoku6_cpu",
    ):
        assert line in done.out
    for program in ("evaluate.py", "solve.py"):
        assert program in done.out
    assert entries(folder) == []


@pytest.mark.parametrize(("name", "settings"), [("evaluate", EvaluateConfig), ("solve", SolveConfig)])
def test_help_and_settings_of_the_other_programs(name: str, settings: type, capsys: pytest.CaptureFixture[str]):
    for flag, told in (("--help", f"python {name}.py checkpoint=outputs/<run>"), ("--version", "longloop ")):
        with pytest.raises(SystemExit) as caught:
            compose_settings(name, [flag], settings)
        assert caught.value.code == 0 and told in capsys.readouterr().out
    with pytest.raises(SystemExit):
        compose_settings(name, ["--cfg", "job", "trainer=cpu"], settings)
    assert yaml.safe_load(capsys.readouterr().out)["checkpoint"] == "???"


def test_cfg_job_prints_the_settings(folder: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        run_train(lambda config: None, ["--cfg", "job", "--resolve", "experiment=tiny"])
    shown = yaml.safe_load(capsys.readouterr().out)
    assert caught.value.code == 0 and entries(folder) == []
    assert (
        shown["model"]["hidden_size"] == 32
        and shown["run_dir"].endswith("_infiloop_sudoku4_s0")
        and "hydra" not in shown
    )


def test_exit_codes_of_a_program(capsys: pytest.CaptureFixture[str]):
    def interrupted() -> None:
        raise KeyboardInterrupt

    def mistaken() -> None:
        raise UserError("puzzle: expected\n81 characters")

    for main, code in ((lambda: None, 0), (lambda: 3, 3), (interrupted, 130), (mistaken, 2)):
        with pytest.raises(SystemExit) as caught:
            run_program(main)
        assert caught.value.code == code
    assert capsys.readouterr().err == "error: puzzle: expected 81 characters\n"

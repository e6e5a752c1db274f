"""The programs as a user starts them: every documented command, in a copy of the checkout, as processes of their own."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from data.sudoku import digits_from_tokens
from tests.runs import BOX4, bundled, losses, puzzles, solved_grids
from trainer.checkpoint import load_checkpoint
from trainer.compose import compose_launch
from trainer.config import PROJECT, EvaluateConfig, TrainConfig

slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(900)  # the first process compiles the puzzle generator
PROGRAMS = ("train.py", "evaluate.py", "solve.py")
ALONE = ["trainer.threads=1", "trainer.compile=false"]
TINY = [
    *ALONE,
    "trainer.max_steps=2",
    "model.hidden_size=32",
    "schedule.global_batch=4",
    "data.train_puzzles=8",
    "data.validation_puzzles=4",
    "data.test_puzzles=6",
]
BLANK4, SOLVED4 = digits_from_tokens(puzzles(BOX4, 1).inputs)[0], solved_grids(BOX4, 1)[0]


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that git knows or would take: what a clone has, and nothing that lies about."""
    folder = tmp_path_factory.mktemp("checkout") / "longloop"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=PROJECT, capture_output=True, text=True
    )
    if listed.returncode:
        shutil.copytree(PROJECT, folder, ignore=shutil.ignore_patterns(".*", "outputs", "cache", "__pycache__"))
        return folder
    for name in listed.stdout.splitlines():
        if (PROJECT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A bare machine: no GPU, no account, no network for data, and neither wandb nor datasets installed."""
    absent = tmp_path_factory.mktemp("absent")
    # Imported by Python itself at its start: these packages then count as not installed.
    (absent / "sitecustomize.py").write_text(
        "import sys\nfor name in ('wandb', 'datasets'): sys.modules[name] = None\n"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "HF_"))}
    return {
        **kept,
        "PYTHONPATH": str(absent),
        "HOME": str(absent),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "NUMBA_CACHE_DIR": str(tmp_path_factory.mktemp("numba")),
        "MPLCONFIGDIR": str(tmp_path_factory.mktemp("matplotlib")),
    }


class Shell(NamedTuple):
    folder: Path
    environment: dict[str, str]

    def __call__(self, command: str) -> Done:
        """A shell command, with this Python for `python` and an empty standard input."""
        command = re.sub(r"\bpython(?= [\w/]+\.py)", shlex.quote(sys.executable), command)
        done = subprocess.run(
            command,
            shell=True,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def shell(checkout: Path, machine: dict[str, str]) -> Shell:
    return Shell(checkout, machine)


@pytest.fixture(scope="session")
def run(shell: Shell) -> str:
    """outputs/example, trained by `experiment=tiny`; relative to the checkout."""
    done = shell("python train.py experiment=tiny run_dir=outputs/example trainer.threads=1")
    assert done.code == 0, done.err
    last_lines = done.out[done.out.index("test/exact_accuracy") :]
    results = json.loads((shell.folder / "outputs/example/results.json").read_text())
    assert re.match(rf"test/exact_accuracy = [01]\.\d{{4}} \({results['exact']}/12\)   <- headline", last_lines)
    assert results["n"] == 12 and "Traceback" not in done.err
    return "outputs/example"


# --- documented commands ---------------------------------------------------------------------------------------------


def documented(text: str) -> list[str]:
    """Commands in the text: lines that begin with `python`, or pipe into it, without their comment."""
    lines = [re.split(r"\s+#|\s{2,}|\s\.\.\.\s", line.strip())[0] for line in text.splitlines()]
    return [line for line in lines if re.match(r"(cat \S+ \| )?python \w+\.py ", line)]


@cache
def commands() -> list[str]:
    texts = [(PROJECT / "README.md").read_text()]
    texts += [(PROJECT / program).read_text().split('"""')[1] for program in PROGRAMS]
    texts += re.findall(r"`(python \w+\.py [^`]+)`", texts[0])
    return sorted({command for text in texts for command in documented(text)})


def shrunk(command: str, run: str) -> str:
    """The command at a size for tests, on the tiny run."""
    command = command.replace("outputs/<run>", run)
    command = re.sub(r"puzzle=(<[^>]*>|\S+)", f"puzzle={''.join(map(str, BLANK4))}", command)
    command = re.sub(r"eval\.n=\d+", "eval.n=5", command)
    if "--help" in command or "--cfg" in command:
        return command
    extra = list(ALONE) if "train.py" not in command else list(TINY)
    if re.search("data=sudoku[ 9]|data=sudoku$|sudoku9_cpu", command):
        extra.append("schedule.segments=2")
    return " ".join([command, *(e for e in extra if e.partition("=")[0] not in command)])


def test_there_are_commands_to_check() -> None:
    """The reader below finds them: at least the README's six, and each program's launch lines."""
    found = commands()
    assert len(found) >= 12
    for program in PROGRAMS:
        assert sum(program in command for command in found) >= 3
    assert "python train.py model=infiloop data=sudoku" in found
    assert "python evaluate.py checkpoint=outputs/<run> eval.layers=20000 eval.n=512" in found


@slow
@pytest.mark.parametrize("command", commands())
def test_documented_command(command: str, shell: Shell, run: str) -> None:
    (shell.folder / "puzzles.txt").write_text("".join(map(str, BLANK4)) + "\n")
    rows = ["".join(map(str, grid)) for grid in (BLANK4, SOLVED4)]
    (shell.folder / "my.csv").write_text(f"question,answer\n{','.join(rows)}\n")
    done = shell(shrunk(command, run))
    solving = "solve.py" in command
    assert done.code == 0 or (solving and done.code == 1), done.err
    assert "Traceback" not in done.err
    if solving:
        assert "loops: " in done.out and ("valid: " in done.out or "NOT valid: " in done.out)
    elif "--help" in command:
        assert "model=trm" in done.out or "model: eqr, fprm, hrm, infiloop, looped, trm" in done.out
    else:
        prefix = "test/" if "train.py" in command else ""
        assert re.search(rf"^{prefix}exact_accuracy = \d\.\d{{4}} \(\d+/\d+\)", done.out, re.M)


def test_every_override_of_the_readme_composes() -> None:
    """`key=value` in the README's table and text, each by itself, as written."""
    readme = (PROJECT / "README.md").read_text()
    quoted = [word for code in re.findall(r"`([^`\n]+)`", readme) for word in code.split()]
    settings = [
        word for word in quoted if re.fullmatch(r"[a-z][\w./@]*=[\w.]*\w", word) and not word.startswith("from")
    ]
    assert len(settings) > 10
    for setting in settings:
        if setting.startswith("eval."):
            compose_launch("evaluate", ["checkpoint=x", setting], EvaluateConfig)
        else:
            companions = ["model.connection.beta=fixed"] if "beta0=" in setting else []
            if setting == "model.mixer=mlp":
                companions = ["model.positions=none"]
            if setting == "data=puzzle_dir":
                companions = ["data.path=folder"]
            compose_launch("config", [setting, *companions], TrainConfig)


def from_scripts(shell: Shell) -> Shell:
    """As where the project is installed: files in scripts/ import its packages."""
    path = f"{shell.environment['PYTHONPATH']}:{shell.folder}"
    return Shell(shell.folder, shell.environment | {"PYTHONPATH": path})


@slow
def test_a_written_folder_is_trained_on_and_weights_go_out_and_come_back(shell: Shell, run: str) -> None:
    """The README's three scripts, at a size for tests."""
    here = from_scripts(shell)
    for command in (
        "python scripts/write_puzzle_dir.py folders/four data=sudoku4 data.num_aug=3",
        "python train.py experiment=tiny data=puzzle_dir data.path=folders/four data.validation_groups=4 "
        "trainer.max_steps=3 trainer.threads=1 run_dir=outputs/four",
        f"python scripts/export_checkpoint.py {run} --out folders/step_20",
        "python scripts/import_checkpoint.py folders/step_20 --out folders/back.safetensors --seq-len 16 model.num_heads=2",
        "python evaluate.py checkpoint=folders/back.safetensors trainer=cpu trainer.compile=false out=folders/results",
    ):
        done = here(command)
        assert done.code == 0 and "Traceback" not in done.err, (command, done.err)
    assert "exact_accuracy" in done.out and "training data is unknown" in done.out
    refused = here("python scripts/write_puzzle_dir.py folders/other data=sudoku4 data.num_aug=null")
    assert refused.code == 2 and refused.err.startswith("error: data.num_aug=null") and refused.err.count("\n") == 1


@slow
def test_bench_reports_a_ratio_of_one_run(shell: Shell) -> None:
    here, small = from_scripts(shell), "trainer.compile=false model.hidden_size=32 schedule.global_batch=4"
    done = here(f"python scripts/bench.py {small}")
    assert done.code == 0, done.err
    told = json.loads(done.out.splitlines()[-1])
    assert told["share_of_matmul_rate_eager"] == told["matmuls_alone_s"] / told["step_eager_s"]
    refused = here("python scripts/bench.py model.hiden_size=32")
    assert (
        refused.code == 2
        and refused.err == "error: model.hiden_size: no such setting; did you mean model.hidden_size?\n"
    )


@slow
def test_demo_compares_the_bundled_checkpoints(shell: Shell) -> None:
    for name in ("infiloop", "trm"):
        bundled(name)
    done = from_scripts(shell)("python scripts/demo.py outputs/demo")
    assert done.code == 0, done.err
    assert "segments  executed layers" in done.out and "infiloop: " in done.out and "trm: " in done.out
    assert (shell.folder / "outputs/demo/depth_curves.png").is_file()


@slow
def test_make_help_lists_the_targets(shell: Shell) -> None:
    done = shell("make help")
    assert done.code == 0 and {"setup", "train", "test", "test-all", "demo", "lint"} <= set(
        re.findall(r"^ *([\w-]+)", done.out, re.M)
    )


# --- processes -------------------------------------------------------------------------------------------------------


@slow
def test_sweep_over_beta0(shell: Shell) -> None:
    """Three jobs, three run directories, three results; each with its own beta0."""
    folder = shell.folder / "outputs/sweep"
    sweep = "python train.py -m experiment=tiny model.connection.beta0=0.10,0.55,0.90 hydra.sweep.dir=outputs/sweep"
    done = shell(" ".join([sweep, "trainer.threads=1", "trainer.max_steps=2"]))
    assert done.code == 0, done.err
    runs = sorted(path.parent for path in folder.glob("*/results.json"))
    assert len(runs) == 3 and done.out.count("test/exact_accuracy = ") == 3
    assert [load_checkpoint(run / "last.safetensors").config.model.connection.beta0 for run in runs] == [  # pyright: ignore
        0.10,
        0.55,
        0.90,
    ]
    assert len({losses(run)[0] for run in runs}) == 3


@slow
def test_the_saved_settings_repeat_a_run(shell: Shell, run: str) -> None:
    done = shell(f"python train.py from={run}/config.yaml run_dir=outputs/again trainer.max_steps=5")
    assert done.code == 0, done.err
    again = losses(shell.folder / "outputs/again")
    assert len(again) == 5 and again == losses(shell.folder / run)[:5]
    facts = json.loads((shell.folder / "outputs/again/environment.json").read_text())
    assert facts["command"] == f"{Path(sys.executable).name} train.py from={run}/config.yaml run_dir=outputs/again " + (
        "trainer.max_steps=5"
    )


@slow
def test_evaluate_and_solve_from_the_shell(shell: Shell, run: str) -> None:
    done = shell(f"python evaluate.py checkpoint={run} eval.halting=on eval.weights=raw {' '.join(ALONE)}")
    assert done.code == 0 and "weights raw of step 20" in done.out and "halting on" in done.out
    puzzle = "".join(map(str, BLANK4))
    for given in (f"puzzle={puzzle}", f"puzzle={puzzle.replace('0', '.')}"):
        done = shell(f"python solve.py checkpoint={run} {given}")
        assert done.code == 1 and "NOT valid: " in done.out and "Traceback" not in done.err
    piped = shell(f"printf '{puzzle}\\n{puzzle}\\n' | python solve.py checkpoint={run} file=-")
    assert piped.code == 1 and piped.out.endswith("0 of 2 answers are valid\n")


@slow
def test_a_reader_that_leaves_costs_no_results(shell: Shell, run: str) -> None:
    """`| head -1` closes the pipe while the program writes to it, with its messages and its progress."""
    evaluating = f"python evaluate.py checkpoint={run} out=outputs/left {' '.join(ALONE)} 2>&1; echo $? > code"
    shell(f"({evaluating}) | head -1")
    assert (shell.folder / "code").read_text() == "0\n"
    assert (shell.folder / "outputs/left/depth_curve.png").is_file()
    (shell.folder / "many.txt").write_text(("".join(map(str, BLANK4)) + "\n") * 400)
    done = shell(f"(python solve.py checkpoint={run} file=many.txt; echo $? > code) | head -1")
    assert (shell.folder / "code").read_text() == "1\n" and "Traceback" not in done.err, done.err


@slow
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train.py experiment=tiny schedule.lr=1e9 run_dir=outputs/lr", r"step [1-5]: .*not finite"),
        ("train.py experiment=tiny run_dir={run}", "holds a run already"),
        ("train.py experiment=tiny data.path=nowhere data.source=csv run_dir=outputs/no", "no file train.csv there"),
        ("train.py experiment=tiny eval.n=13 run_dir=outputs/n", "eval.n=13: the test split holds 12 puzzles"),
        ("train.py experiment=tiny trainer.device=cuda run_dir=outputs/cuda", "this machine has none"),
        ("evaluate.py checkpoint=outputs/nowhere", "no such file or directory"),
        ("evaluate.py checkpoint={run} eval.n=13", "the test split holds 12 puzzles"),
        ("evaluate.py checkpoint={run} eval.layers=5 eval.segments=2", "both set the depth"),
        ("solve.py checkpoint={run} puzzle=123", "3 cells found, 16 expected"),
        ("solve.py checkpoint={run} puzzle=11..............", "stands twice in row 1"),
        ("solve.py checkpoint={run} puzzle=1x..............", "unexpected character 'x'"),
        ("solve.py checkpoint={run}", "nothing to solve"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(command: str, message: str, shell: Shell, run: str) -> None:
    done = shell("python " + command.format(run=run))
    assert done.code == 2 and "Traceback" not in done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert re.search(message, line)


@slow
def test_tracker_that_is_not_installed(shell: Shell) -> None:
    done = shell("python train.py experiment=tiny logger=wandb trainer.max_steps=5 run_dir=outputs/wandb")
    assert done.code == 0 and "the wandb package is not installed" in done.out
    assert len(losses(shell.folder / "outputs/wandb")) == 5


@slow
def test_compiled_run_is_the_eager_run(shell: Shell) -> None:
    """With a real compiler: the same first losses, the same names in the file, and either evaluates the other's."""
    lines = "experiment=tiny trainer.max_steps=3 trainer.threads=1"
    for name, compiled in (("eager", "false"), ("compiled", "auto")):
        done = shell(f"python train.py {lines} trainer.compile={compiled} run_dir=outputs/{name}")
        assert done.code == 0, done.err
    if ", eager (" in done.out:
        return  # this machine has no compiler, and the run said so
    eager, compiled = (losses(shell.folder / "outputs" / name) for name in ("eager", "compiled"))
    assert compiled == pytest.approx(eager, rel=1e-4)
    tensors = [load_checkpoint(shell.folder / f"outputs/{n}/last.safetensors").tensors for n in ("eager", "compiled")]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        torch.testing.assert_close(tensors[1][name], tensor, rtol=1e-2, atol=3e-3)
    for mode in ("true", "false"):
        done = shell(f"python evaluate.py checkpoint=outputs/compiled trainer.threads=1 trainer.compile={mode}")
        assert done.code == 0 and "exact_accuracy = " in done.out

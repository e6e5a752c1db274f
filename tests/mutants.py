"""Break the model layer in one place at a time and see that a test notices.

    python -m tests.mutants                       every mutant; exit code 1 if one survives
    python -m tests.mutants --write               the same, and docs/mutants.md
    python -m tests.mutants --only decay --jobs 2 those whose name contains a word

The packages are copied to a temporary folder, one mutation is made there, and the fast tests of the model layer run until
one fails. A mutant whose text is no longer in its file, or which cannot even be imported, is an error.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutant_table import MUTANTS, Mutant

PROJECT = Path(__file__).resolve().parent.parent
PACKAGES = ("models", "trainer", "data", "tests")
# Quick and sharp ones first: a mutant's run ends at the first failure.
TESTS = ("parity", "core", "carry", "halting", "losses", "optim", "blocks", "precision", "connections", "noise", "fprm")
OPTIONS = ("-x", "-q", "--tb=short", "--timeout=120", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist")
# Each mutant has a process of its own, forked from one that has imported these: importing them is most of a short run.
PRELOAD = (
    "torch",
    "numba",
    "hypothesis",
    "pydantic",
    "safetensors.torch",
    "hydra",
    "matplotlib.pyplot",
    "psutil",
    "tqdm",
)
TABLE = PROJECT / "docs" / "mutants.md"


@dataclass(frozen=True)
class Outcome:
    """What the tests said about one mutant."""

    mutant: Mutant
    killed_by: str | None
    problem: str | None = None


CONTROL = Mutant("(control: nothing is changed)", "models/core.py", "class LoopedReasoner", "class LoopedReasoner")


def survived(mutant: Mutant) -> str:
    return f"{mutant.name}: SURVIVED, no test of the model layer fails"


def mutated(mutant: Mutant, text: str) -> str:
    """The file's text with the mutation made."""
    found = text.count(mutant.source)
    if found != 1:
        raise ValueError(f"{mutant.name}: its text is {found} times in {mutant.file}, not once")
    return text.replace(mutant.source, mutant.replacement)


class FirstFailure:
    """Pytest plugin: which test failed first."""

    name: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.name is None:
            self.name = report.nodeid.removeprefix("tests/")


def run_tests(folder: Path) -> tuple[int, str | None, str]:
    """Exit code, first failure and output of the fast tests of the model layer as they are in `folder`."""
    for name in list(sys.modules):
        if name.split(".")[0] in PACKAGES:
            del sys.modules[name]
    sys.path[:] = [str(folder), *(entry for entry in sys.path if Path(entry or ".").resolve() != PROJECT)]
    sys.dont_write_bytecode = True
    os.chdir(folder)
    first, output = FirstFailure(), io.StringIO()
    files = [f"tests/test_{name}.py" for name in TESTS]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = pytest.main([*OPTIONS, "--hypothesis-profile=mutants", *files], plugins=[first])
        broken = sys.modules.get("models")
    if broken is not None and not Path(str(broken.__file__)).is_relative_to(folder):
        return 99, None, f"the tests imported {broken.__file__}"
    return int(code), first.name, output.getvalue()


def try_mutant(mutant: Mutant) -> tuple[str | None, str | None]:
    """Copy, break, test; in a process that does nothing afterwards. Returns the test that noticed, or the problem."""
    with tempfile.TemporaryDirectory(prefix="longloop-mutant-") as name:
        folder = Path(name).resolve()
        for package in PACKAGES:
            shutil.copytree(PROJECT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "cache"))
        shutil.copy(PROJECT / "pyproject.toml", folder)
        path = folder / mutant.file
        try:
            path.write_text(mutated(mutant, path.read_text(encoding="utf-8")), encoding="utf-8")
        except ValueError as error:
            return None, str(error)
        try:
            code, failed, output = run_tests(folder)
        finally:
            os.chdir(PROJECT)
    if code == pytest.ExitCode.TESTS_FAILED and failed:
        return failed, None
    if code == pytest.ExitCode.OK:
        return None, survived(mutant)
    return None, f"{mutant.name}: pytest ended with {code}\n{output[-2000:]}"


def write_table(outcomes: list[Outcome]) -> None:
    lines = [
        "# Mutants of the model layer",
        "",
        "Each row is one deliberate mistake and the first test that fails with it; written by",
        "`python -m tests.mutants --write`. The exact changes are in `tests/mutant_table.py`.",
        "",
        "| mistake | file | first failing test |",
        "| --- | --- | --- |",
        *(f"| {o.mutant.name} | `{o.mutant.file}` | `{o.killed_by}` |" for o in outcomes),
    ]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word in the mutants' names")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tried at a time")
    parser.add_argument("--write", action="store_true", help="write docs/mutants.md (needs every mutant killed)")
    options = parser.parse_args(arguments)
    chosen = [CONTROL, *(mutant for mutant in MUTANTS if options.only in mutant.name)]
    if len(chosen) == 1:
        parser.error(f"no mutant's name contains {options.only!r}")
    os.environ["OMP_NUM_THREADS"] = "1"
    processes, outcomes = multiprocessing.get_context("forkserver"), []
    processes.set_forkserver_preload(list(PRELOAD))
    with processes.Pool(options.jobs, maxtasksperchild=1) as pool:
        for mutant, (killed_by, problem) in zip(chosen, pool.imap(try_mutant, chosen, chunksize=1), strict=True):
            print(f"{mutant.name}: {killed_by or 'no test fails'}", flush=True)
            if mutant is not CONTROL:
                outcomes.append(Outcome(mutant, killed_by, problem))
            elif killed_by or problem != survived(CONTROL):
                print(f"without any mistake, a test fails: {killed_by or problem}", file=sys.stderr)
                return 1
    problems = [outcome.problem for outcome in outcomes if outcome.problem]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(outcomes) - len(problems)} of {len(outcomes)} mutants killed")
    if options.write and not problems and not options.only:
        write_table(outcomes)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Break the model layer in one place at a time and see that a test notices.

    python -m tests.mutants                       every mutant; exit code 1 if one survives
    python -m tests.mutants --write               the same, and docs/mutants.md
    python -m tests.mutants --only decay --jobs 2 those whose name contains a word

The packages are copied to a temporary folder, one mutation is made there, and the fast tests of the model layer run until
one fails. A mutant whose text is no longer in its file, or which cannot even be imported, is an error.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutant_table import MUTANTS, Mutant

PROJECT = Path(__file__).resolve().parent.parent
PACKAGES = ("models", "trainer", "data", "tests")
# Quick and sharp ones first: a mutant's run ends at the first failure.
TESTS = ("parity", "core", "carry", "halting", "losses", "optim", "blocks", "precision", "connections")
TABLE = PROJECT / "docs" / "mutants.md"


@dataclass(frozen=True)
class Outcome:
    """What the tests said about one mutant."""

    mutant: Mutant
    killed_by: str | None
    problem: str | None = None


def mutated(mutant: Mutant, text: str) -> str:
    """The file's text with the mutation made."""
    found = text.count(mutant.source)
    if found != 1:
        raise ValueError(f"{mutant.name}: its text is {found} times in {mutant.file}, not once")
    return text.replace(mutant.source, mutant.replacement)


def run_tests(folder: Path) -> tuple[int, str]:
    """Exit code and output of the model layer's fast tests in `folder`, stopping at the first failure."""
    options = ["-x", "-q", "--no-header", "--tb=line", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist"]
    files = [f"tests/test_{name}.py" for name in TESTS]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--hypothesis-profile=mutants", *files],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def try_mutant(mutant: Mutant) -> Outcome:
    """Copy, break, test."""
    with tempfile.TemporaryDirectory(prefix="longloop-mutant-") as name:
        folder = Path(name)
        for package in PACKAGES:
            shutil.copytree(PROJECT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "cache"))
        shutil.copy(PROJECT / "pyproject.toml", folder)
        path = folder / mutant.file
        try:
            path.write_text(mutated(mutant, path.read_text(encoding="utf-8")), encoding="utf-8")
        except ValueError as error:
            return Outcome(mutant, None, str(error))
        code, output = run_tests(folder)
    failed = re.search(r"^FAILED (\S+)", output, re.MULTILINE)
    if code == 1 and failed:
        return Outcome(mutant, failed[1].removeprefix("tests/"))
    if code == 0:
        return Outcome(mutant, None, f"{mutant.name}: SURVIVED, no test of the model layer fails")
    return Outcome(mutant, None, f"{mutant.name}: pytest ended with {code}\n{output[-2000:]}")


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
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name]
    if not chosen:
        parser.error(f"no mutant's name contains {options.only!r}")
    outcomes = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(try_mutant, chosen):
            print(f"{outcome.mutant.name}: {outcome.killed_by or 'NOT KILLED'}", flush=True)
            outcomes.append(outcome)
    problems = [outcome.problem for outcome in outcomes if outcome.problem]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(chosen) - len(problems)} of {len(chosen)} mutants killed")
    if options.write and not problems and not options.only:
        write_table(outcomes)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

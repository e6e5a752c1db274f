"""The deliberate mistakes of tests/mutants.py still apply, are written down, and each is noticed."""

import os
import subprocess
import sys

import pytest

from tests.mutants import MUTANTS, PROJECT, TABLE, mutated


def test_every_mutation_still_applies() -> None:
    """A mutation whose text is gone would test nothing."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        text = (PROJECT / mutant.file).read_text(encoding="utf-8")
        assert mutated(mutant, text) != text
        compile(mutated(mutant, text), mutant.file, "exec")


def test_the_written_table_is_current() -> None:
    """docs/mutants.md names every mutant and nothing else; `python -m tests.mutants --write` renews it."""
    rows = [line.split(" | ")[0].removeprefix("| ") for line in TABLE.read_text(encoding="utf-8").splitlines()[7:]]
    assert rows == [mutant.name for mutant in MUTANTS]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_mutant_is_noticed() -> None:
    """A mutant that survives is a mistake the tests would let through."""
    command = [sys.executable, "-m", "tests.mutants", "--jobs", str(os.cpu_count() or 1)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

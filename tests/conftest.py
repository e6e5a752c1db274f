"""One thread, fixed seeds, repeatable property tests."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings

from data.generate import Puzzles, generate
from tests.puzzle_files import SIX, write_csv

torch.set_num_threads(1)

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, max_examples=40)
settings.register_profile(
    "mutants",  # a failure is enough; its smallest example is not looked for
    settings.get_profile("repeatable"),
    phases=(Phase.explicit, Phase.generate),
)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def six() -> Puzzles:
    return generate(SIX, 150, seed=100)


@pytest.fixture
def folder(tmp_path: Path, six: Puzzles) -> Path:
    """train.csv with 100 and test.csv with 30 puzzles."""
    write_csv(tmp_path / "csv/train.csv", six, 0, 100)
    write_csv(tmp_path / "csv/test.csv", six, 100, 30)
    return tmp_path / "csv"


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub that refuses connections at once, and none of the user's own offline switches or copies."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for switch in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(switch, raising=False)


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    package = pytest.importorskip("datasets", reason="the optional package datasets is not installed")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    package.disable_progress_bars()
    return package

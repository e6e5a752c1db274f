"""The Hugging Face hub as a source, through local folders and servers that fail."""

import csv
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data.build import SUDOKU_EXTREME, check_source
from data.generate import Puzzles
from tests.puzzle_files import load, settings, write_csv
from trainer.errors import UserError

pytestmark = pytest.mark.usefixtures("no_hub")


@pytest.mark.parametrize("blank", [".", "0"])
def test_hub_through_a_local_folder(tmp_path: Path, folder: Path, six: Puzzles, datasets: Any, blank: str) -> None:
    write_csv(folder / "train.csv", six, 0, 100, blank)
    write_csv(folder / "test.csv", six, 100, 30, blank)
    config = settings(tmp_path, source="hub", hub_id=str(folder))
    check_source(config)
    data, _ = load(config)
    assert data.meta.source == f"hub:{folder}" and data.meta.name == str(folder), "not the default's name"
    from_csv, _ = load(settings(tmp_path / "other", source="csv", path=folder))
    assert data.meta.split_fingerprints == from_csv.meta.split_fingerprints
    _, said = load(config)
    assert len(said) == 1
    auto, _ = load(settings(tmp_path / "third", source="auto", hub_id=str(folder)))
    assert auto.meta.fingerprint == data.meta.fingerprint


def test_prepared_data_of_another_hub_id_is_not_taken(tmp_path: Path, folder: Path, datasets: Any) -> None:
    load(settings(tmp_path, source="hub", hub_id=str(folder)))
    data, _ = load(settings(tmp_path, source="auto", hub_id="nobody/elsewhere"))
    assert data.meta.source == "generated"


@pytest.mark.parametrize(
    ("header", "message"), [("source,puzzle,answer,rating", "no column question"), ("question,answer", None)]
)
def test_hub_columns(tmp_path: Path, folder: Path, datasets: Any, header: str, message: str | None) -> None:
    columns = header.split(",")
    for name in ("train", "test"):
        with (folder / f"{name}.csv").open(newline="") as file:
            rows = [{**row, "puzzle": row["question"]} for row in csv.DictReader(file)]
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
    config = settings(tmp_path, source="hub", hub_id=str(folder))
    if message:
        with pytest.raises(UserError, match=message):
            load(config)
    else:
        assert (load(config)[0].test.rating == -1).all()


def test_faulty_hub_rows_are_an_error_not_a_fallback(tmp_path: Path, folder: Path, datasets: Any) -> None:
    lines = (folder / "test.csv").read_text().splitlines()
    lines[3] = lines[3].replace(lines[3].split(",")[2], lines[4].split(",")[2])
    (folder / "test.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=r"test row 3: the answer does not solve the question"):
        load(settings(tmp_path, source="auto", hub_id=str(folder)))


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A hub that takes connections and never answers; yields a list that grows with each connection."""
    server = socket.create_server(("127.0.0.1", 0))
    asked: list[int] = []
    held = []

    def accept() -> None:
        while True:
            try:
                held.append(server.accept()[0])
            except OSError:
                return
            asked.append(1)

    threading.Thread(target=accept, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    yield asked
    server.close()
    for connection in held:
        connection.close()


def test_a_hub_that_never_answers_costs_the_timeout(tmp_path: Path, silent_hub: list[int], datasets: Any) -> None:
    began = time.monotonic()
    data, said = load(settings(tmp_path, source="auto", hub_id=SUDOKU_EXTREME, hub_timeout=1.0))
    assert 1.0 <= time.monotonic() - began < 10  # five retries of `datasets` would take 23 s
    assert data.meta.source == "generated" and silent_hub == [1]
    assert any("the hub does not answer" in line for line in said)
    with pytest.raises(UserError, match=r"data\.source=hub: sapientinc/sudoku-extreme: .*data\.source=csv data\.path="):
        check_source(settings(tmp_path, source="hub", hub_id=SUDOKU_EXTREME))


@pytest.mark.parametrize("switch", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_switches_are_respected(
    tmp_path: Path, silent_hub: list[int], datasets: Any, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    monkeypatch.setenv(switch, "1")
    data, _ = load(settings(tmp_path, source="auto", hub_id=SUDOKU_EXTREME, hub_timeout=30.0))
    with pytest.raises(UserError, match="offline"):
        load(settings(tmp_path, source="hub", hub_id=SUDOKU_EXTREME, hub_timeout=30.0))
    assert data.meta.source == "generated" and silent_hub == []


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"datasets is not installed"):
        check_source(settings(tmp_path, source="hub", hub_id=SUDOKU_EXTREME))
    _, said = load(settings(tmp_path, source="auto", hub_id=SUDOKU_EXTREME))
    assert any("datasets is not installed" in line for line in said)

"""Released data folders as data sets: trained on in the released order, evaluated, written back."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.arrays import NoRules, PuzzleData
from data.build import load_puzzle_data
from data.folder import load_puzzle_dir, write_puzzle_dir
from data.puzzle_dir import PuzzleSplit, read_split, training_batches
from data.sampler import GroupSampler, TrainSampler
from data.sudoku import Box
from models.losses import IGNORE
from tests.parity import FIXTURES
from tests.runs import composed, losses, tiny
from trainer import loop
from trainer.config import PuzzleDirConfig, TrainConfig
from trainer.errors import UserError


def settings(path: Path, **changes: object) -> PuzzleDirConfig:
    values = {"kind": "puzzle_dir", "path": path, "validation_groups": 2, "passes": 3, "seed": 0}
    return PuzzleDirConfig.model_validate(values | changes)


def load(path: Path, **changes: object) -> PuzzleData:
    return load_puzzle_dir(settings(path, **changes), lambda line: None)


def test_a_sudoku_folder() -> None:
    """Groups held out for validation are not trained on; the rules are found in the labels."""
    said: list[str] = []
    data = load_puzzle_dir(settings(FIXTURES / "sudoku_dir"), said.append)
    assert data.meta.rules == Box(3, 3) and data.meta.name == "sudoku_dir"
    assert (data.meta.train_puzzles, len(data.train), len(data.validation), len(data.test)) == (6, 18, 2, 6)
    whole = read_split(FIXTURES / "sudoku_dir", "train").sets["all"]
    assert np.array_equal(data.train.inputs, whole.inputs[:18])
    assert np.array_equal(data.validation.inputs, whole.inputs[[18, 21]]), "the first puzzle of each group held out"
    assert data.meta.checks["test_puzzles_symmetric_to_train"] == 0
    assert any("9x9 Sudoku" in line for line in said)
    assert load(FIXTURES / "sudoku_dir", test_puzzles=4).meta.fingerprint != data.meta.fingerprint


def test_an_arc_folder_has_no_rules_and_several_examples_a_puzzle() -> None:
    data = load(FIXTURES / "arc_dir")
    assert isinstance(data.meta.rules, NoRules) and data.meta.num_puzzle_ids == 55
    assert (data.meta.train_puzzles, len(data.validation)) == (7, 4)
    assert data.train.puzzle_ids[:5].tolist() == [1, 1, 1, 1, 2]


def test_draws_are_the_released_batches_one_after_another() -> None:
    """Over the end of an iteration, in any portions, and after going back."""
    data = load(FIXTURES / "sudoku_dir")
    assert data.groups is not None
    source = read_split(FIXTURES / "sudoku_dir", "train")
    six_groups = replace(source.sets["all"], group_indices=source.sets["all"].group_indices[:7])
    expected = [
        batch.inputs
        for number in range(3)
        for batch in training_batches(PuzzleSplit(source.meta, {"all": six_groups}), 4, 0, number, passes=3)
    ]
    assert len(expected) == 3 * (6 * 3 // 4)
    stream = np.concatenate(expected)
    sampler = GroupSampler(data.train, data.groups, 4, 3, 0)
    assert np.array_equal(sampler.draw(0, 40).inputs.numpy(), stream[:40])
    assert np.array_equal(sampler.draw(40, 5).inputs.numpy(), stream[40:45])
    assert np.array_equal(sampler.draw(7, 6).inputs.numpy(), stream[7:13])
    assert sampler.draw(3, 0).inputs.shape == (0, 81)


def test_cells_without_a_label_are_ignored() -> None:
    data = load(FIXTURES / "arc_dir")
    assert data.groups is not None
    batch = GroupSampler(data.train, data.groups, 8, 3, 0).draw(0, 8)
    rows = data.train.labels[batch.base_ids.numpy()]
    assert (batch.labels.numpy()[rows == 0] == IGNORE).all() and (rows == 0).any()
    assert np.array_equal(batch.labels.numpy()[rows != 0], rows[rows != 0])
    assert np.array_equal(batch.puzzle_ids.numpy(), data.train.puzzle_ids[batch.base_ids.numpy()])


@pytest.mark.parametrize("folder", ["sudoku_dir", "arc_dir"])
def test_training_and_testing_on_a_folder(folder: str, tmp_path: Path) -> None:
    """Four steps, validation, test; with ARC, an embedding per task and cells without labels."""
    config = tiny(
        tmp_path / "run",
        "data=puzzle_dir",
        f"data.path={FIXTURES / folder}",
        "data.validation_groups=2",
        "trainer.max_steps=4",
        "schedule.global_batch=4",
        "model.puzzle_tokens=1",
        "model.puzzle_emb_dim=32",
    )
    results = loop.train(config)
    assert results["n"] == {"sudoku_dir": 6, "arc_dir": 54}[folder] and results["data"] == folder
    data = load(FIXTURES / folder)
    labelled = data.test.labels != 0
    if folder == "sudoku_dir":
        labelled &= data.test.inputs == 1
    assert results["cells"] == labelled.sum()
    assert len(set(losses(tmp_path / "run"))) > 1
    recorded = json.loads((tmp_path / "run/environment.json").read_text())["data"]
    assert recorded["source"] == f"puzzle_dir:{FIXTURES / folder}"


def test_what_is_written_is_what_a_run_trains_on(tmp_path: Path) -> None:
    """Copies of a puzzle are the fixed rows of data.num_aug; validation and test come back as they were."""
    config = composed("config", TrainConfig, "experiment=tiny", "data.num_aug=3").data
    data = load_puzzle_data(config, lambda line: None)
    write_puzzle_dir(tmp_path / "out/folder", data, 3, config.seed)
    again = load(tmp_path / "out/folder")
    assert again.meta.rules == Box(2, 2)
    for part in ("validation", "test"):
        assert np.array_equal(getattr(again, part).inputs, getattr(data, part).inputs), part
        assert np.array_equal(getattr(again, part).labels, getattr(data, part).labels), part
    drawn = TrainSampler(data.train, Box(2, 2), 3, 0, config.seed).draw(0, 2_000)
    rows = {row.tobytes() for row in drawn.inputs.numpy().astype(np.uint8)}
    written = {row.tobytes() for row in np.asarray(again.train.inputs)}
    assert rows == written and len(again.train) == 64
    assert again.groups is not None and np.diff(again.groups.group_indices).tolist() == [4] * 16
    with pytest.raises(UserError, match="exists already"):
        write_puzzle_dir(tmp_path / "out/folder", data, 3, 0)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["folder"], "nothing half-written"


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def no_label(folder: Path) -> None:
    labels = np.load(folder / "test/all__labels.npy")
    labels[3] = 0
    np.save(folder / "test/all__labels.npy", labels)


def two_sets(folder: Path) -> None:
    for path in list((folder / "test").glob("all__*.npy")):
        shutil.copy(path, path.with_name(path.name.replace("all", "more")))
    edit(folder / "test/dataset.json", sets=["all", "more"])


FAULTS = {
    "two sets": (two_sets, "sets all, more; folders with one set"),
    "another vocabulary": (lambda f: edit(f / "test/dataset.json", vocab_size=12), "vocab_size=12, but train has 11"),
    "names": (lambda f: (f / "identifiers.json").write_text('["<blank>", "b"]'), "2 names"),
    "no names": (lambda f: (f / "identifiers.json").unlink(), "identifiers.json: No such file"),
    "no label": (no_label, "row 3 has no label"),
    "label 0 that counts": (
        lambda f: [edit(f / part / "dataset.json", ignore_label_id=None) for part in ("train", "test")] + [no_label(f)],
        "labels of 0",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(FIXTURES / "sudoku_dir", folder)
    change, told = FAULTS[fault]
    change(folder)
    with pytest.raises(UserError) as caught:
        load(folder)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_too_much_asked_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.validation_groups=8: .* has 8 groups"):
        load(FIXTURES / "sudoku_dir", validation_groups=8)
    with pytest.raises(UserError, match=r"data\.test_puzzles=7: .* has 6"):
        load(FIXTURES / "sudoku_dir", test_puzzles=7)
    with pytest.raises(UserError, match="No such file"):
        load(tmp_path)
    data = load(FIXTURES / "sudoku_dir")
    assert data.groups is not None
    with pytest.raises(UserError, match=r"schedule\.global_batch=19: 3 passes"):
        GroupSampler(data.train, data.groups, 19, 3, 0).draw(0, 1)

"""Sources, splits, cache and CSV reading of data.build."""

import builtins
import json
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.arrays import Split, data_fingerprint, split_fingerprint
from data.build import SUDOKU_EXTREME, check_source, load_csv_puzzles, load_puzzle_data
from data.generate import Puzzles, generate
from data.sudoku import Box, digits_from_tokens, tokens_from_digits
from data.symmetry import augment, row_key
from tests.puzzle_files import SIX, load, quiet, settings, split_keys, text, write_csv
from trainer.config import SudokuConfig
from trainer.errors import UserError

pytestmark = pytest.mark.usefixtures("no_hub")


# --- generated data --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("difficulty", ["any", "beyond_singles"])
def test_generated_splits(tmp_path: Path, difficulty: str) -> None:
    data, said = load(settings(tmp_path, difficulty=difficulty))
    assert (len(data.train), len(data.validation), len(data.test)) == (20, 10, 15)
    assert data.meta.name == f"generated-sudoku6-{difficulty}" and data.meta.difficulty == difficulty
    assert (data.meta.vocab_size, data.meta.seq_len, data.meta.num_puzzle_ids) == (8, 36, 1)
    for split in (data.train, data.validation, data.test):
        assert split.inputs.dtype == split.labels.dtype == np.uint8
        assert split.rating.dtype == split.puzzle_ids.dtype == np.int32
        assert ((split.inputs == 1) | (split.inputs == split.labels)).all() and split.labels.min() >= 2
        assert difficulty == "any" or (split.rating > 0).all()
    keys = [split_keys(split, SIX) for split in (data.train, data.validation, data.test)]
    assert len(set.union(*keys)) == 45, "no two puzzles anywhere are symmetric"
    text_said = "\n".join(said)
    assert data.meta.fingerprint in text_said and "20 training puzzles" in text_said
    assert f"test solutions symmetric to train: {data.meta.checks['test_solutions_symmetric_to_train']}" in text_said
    assert "test puzzles symmetric to train: 0" in text_said


def test_second_load_is_the_same_and_says_one_line(tmp_path: Path) -> None:
    first, _ = load(settings(tmp_path))
    second, said = load(settings(tmp_path))
    assert len(said) == 1 and "generated-sudoku6-any" in said[0]
    assert second.meta == first.meta
    for a, b in ((first.train, second.train), (first.validation, second.validation), (first.test, second.test)):
        assert split_fingerprint(a) == split_fingerprint(b)


def test_metadata_file_tells_everything(tmp_path: Path) -> None:
    data, _ = load(settings(tmp_path, num_aug=1000))
    (path,) = tmp_path.glob("generated-sudoku6-any-*/meta.json")
    record = json.loads(path.read_text())
    assert record["rows"] == {"train": 20 * 1001, "validation": 10, "test": 15}
    assert record["source"] == "generated" and record["seed"] == 0 and record["train_puzzles"] == 20
    prints = {name: split_fingerprint(getattr(data, name)) for name in ("train", "validation", "test")}
    assert record["split_fingerprints"] == prints
    assert record["fingerprint"] == data_fingerprint(prints, 8, 36) == data.meta.fingerprint
    endless, _ = load(settings(tmp_path, num_aug=None))  # the same arrays, other virtual rows
    assert endless.meta.rows["train"] is None and endless.meta.fingerprint == data.meta.fingerprint


def test_fingerprint_covers_every_array() -> None:
    puzzles = generate(Box(2, 2), 3, seed=0)
    split = Split(
        tokens_from_digits(puzzles.puzzles),
        tokens_from_digits(puzzles.solutions),
        puzzles.rating,
        np.zeros(3, np.int32),
    )
    for field in ("inputs", "labels", "rating", "puzzle_ids"):
        changed = getattr(split, field).copy()
        changed.flat[-1] += 1
        assert split_fingerprint(replace(split, **{field: changed})) != split_fingerprint(split), field


def test_seed_and_sizes(tmp_path: Path) -> None:
    base, _ = load(settings(tmp_path))
    other, _ = load(settings(tmp_path, seed=1))
    assert not split_keys(other.test, SIX) & split_keys(base.test, SIX)
    more, _ = load(settings(tmp_path, train_puzzles=30))  # test and validation stay, training only grows
    assert (more.test.inputs == base.test.inputs).all() and (more.validation.inputs == base.validation.inputs).all()
    assert (more.train.inputs[:20] == base.train.inputs).all()


def test_the_whole_universe_of_4x4(tmp_path: Path) -> None:
    four = {"box_rows": 2, "box_cols": 2, "train_puzzles": 16, "validation_puzzles": 8, "test_puzzles": 12}
    data, _ = load(settings(tmp_path, **four))
    keys = [split_keys(split, Box(2, 2)) for split in (data.train, data.validation, data.test)]
    assert [len(k) for k in keys] == [16, 8, 12] and len(set.union(*keys)) == 36
    with pytest.raises(UserError, match=r"= 37: only 36 4x4 puzzles.*ask for at most 36"):
        load(settings(tmp_path, **four | {"test_puzzles": 13}))


# --- cache -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["train.npz", "validation.npz", "test.npz", "meta.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "empty"])
def test_damaged_cache_is_named(tmp_path: Path, file: str, damage: str) -> None:
    load(settings(tmp_path))
    (path,) = tmp_path.glob(f"*/{file}")
    content = bytearray(path.read_bytes())
    if damage == "flip":
        place = content.index(b"fingerprint") if file == "meta.json" else len(content) // 2
        content[place] ^= 1
    path.write_bytes({"flip": content, "truncate": content[: len(content) // 2]}.get(damage, b""))
    if damage == "delete":
        path.unlink()
    with pytest.raises(UserError, match=r"damaged or incomplete; delete the folder") as caught:
        load(settings(tmp_path))
    assert str(path) in str(caught.value) and str(path.parent) in str(caught.value)


def test_changed_metadata_is_noticed(tmp_path: Path) -> None:
    load(settings(tmp_path))
    (path,) = tmp_path.glob("*/meta.json")
    path.write_text(path.read_text().replace('"vocab_size": 8', '"vocab_size": 9'))
    with pytest.raises(UserError, match="damaged"):
        load(settings(tmp_path))


def test_unusable_cache_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.cache_dir=.*cannot keep the prepared data.*set data\.cache_dir"):
        load(settings(tmp_path / "file" / "cache"))


def test_killed_build_leaves_nothing_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = []

    def failing_write(path: Path, content: bytes) -> int:
        writes.append(path.name)
        if len(writes) == 2:
            raise KeyboardInterrupt
        with builtins.open(path, "wb") as file:  # noqa: PTH123
            return file.write(content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", failing_write)
        with pytest.raises(KeyboardInterrupt):
            load(settings(tmp_path))
    assert not list(tmp_path.glob("generated*"))
    assert len(load(settings(tmp_path))[0].train) == 20


def _build(config: SudokuConfig, barrier: Any, queue: Any) -> None:
    barrier.wait()
    queue.put(load_puzzle_data(config, quiet).meta.fingerprint)


def test_concurrent_builds_agree(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(4), context.Queue()
    config = settings(tmp_path)
    workers = [context.Process(target=_build, args=(config, barrier, queue)) for _ in range(4)]
    for worker in workers:
        worker.start()
    prints = {queue.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert prints == {load(config)[0].meta.fingerprint}
    assert len(list(tmp_path.iterdir())) == 1, "no scratch folders stay behind"


# --- CSV source ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["csv", "auto"])
def test_csv_source(tmp_path: Path, folder: Path, six: Puzzles, source: str) -> None:
    data, said = load(settings(tmp_path, source=source, path=folder, test_puzzles=None))
    assert data.meta.name == "sudoku-extreme" and data.meta.source == "csv" and data.meta.difficulty is None
    assert data.meta.revision is not None and data.meta.revision.startswith("sha256:")
    assert (len(data.train), len(data.validation), len(data.test)) == (20, 10, 30)
    assert (digits_from_tokens(data.test.inputs) == six.puzzles[100:130]).all()
    assert data.test.rating.tolist() == list(range(100, 130))
    rows = {row.tobytes(): i for i, row in enumerate(six.puzzles[:100])}
    for split in (data.train, data.validation):  # rows of train.csv, each with its own label and rating
        for question, answer, rating in zip(split.inputs, split.labels, split.rating, strict=True):
            i = rows[digits_from_tokens(question).tobytes()]
            assert (digits_from_tokens(answer) == six.solutions[i]).all() and rating == i
    assert len(split_keys(data.train, SIX) | split_keys(data.validation, SIX)) == 30
    assert "NOT" not in "\n".join(said)


def test_csv_subsample_is_seeded(tmp_path: Path, folder: Path) -> None:
    chosen = [load(settings(tmp_path, source="csv", path=folder, seed=s))[0].train.rating.tolist() for s in (0, 0, 1)]
    assert chosen[0] == chosen[1] and set(chosen[0]) != set(chosen[2])
    assert chosen[0] != sorted(chosen[0])


def test_training_rows_symmetric_to_test_rows_are_dropped(tmp_path: Path, six: Puzzles) -> None:
    """80 of 100 training rows are symmetric copies of test puzzles, 10 more of each other."""
    keys = row_key(1, np.arange(100), np.ones(100))
    base = np.concatenate([np.arange(100, 130), np.arange(100, 130), np.arange(100, 120), np.arange(10), np.arange(10)])
    a, b = augment(tokens_from_digits(six.puzzles[base]), tokens_from_digits(six.solutions[base]), keys, SIX)
    copies = Puzzles(digits_from_tokens(a), digits_from_tokens(b), np.zeros(100, np.int32))
    write_csv(tmp_path / "csv/train.csv", copies, 0, 100)
    write_csv(tmp_path / "csv/test.csv", six, 100, 30)
    sizes = {"source": "csv", "path": tmp_path / "csv", "test_puzzles": None}
    data, _ = load(settings(tmp_path, train_puzzles=7, validation_puzzles=3, **sizes))
    assert len(data.test) == 30, "test puzzles are never dropped"
    kept = split_keys(data.train, SIX) | split_keys(data.validation, SIX)
    assert len(kept) == 10 and not kept & split_keys(data.test, SIX)
    with pytest.raises(UserError, match=r"100 training rows, of which 10 differ .* ask for at most 10 in all"):
        load(settings(tmp_path, train_puzzles=8, validation_puzzles=3, **sizes))


def test_counts_the_files_cannot_give(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UserError, match=r"data\.train_puzzles=95 .* 100 training rows"):
        load(settings(tmp_path, source="csv", path=folder, train_puzzles=95))
    with pytest.raises(UserError, match=r"data\.test_puzzles=31: .* has 30 test puzzles"):
        load(settings(tmp_path, source="csv", path=folder, test_puzzles=31))


def test_changed_files_are_not_hidden_by_the_cache(tmp_path: Path, folder: Path, six: Puzzles) -> None:
    config = settings(tmp_path, source="auto", path=folder)
    before, _ = load(config)
    again, said = load(config)
    assert len(said) == 1 and again.meta == before.meta
    write_csv(folder / "test.csv", six, 120, 30)
    after, _ = load(config)
    assert after.meta.revision != before.meta.revision and after.meta.fingerprint != before.meta.fingerprint
    assert load(config)[0].meta == after.meta


def test_explicit_path_without_files_is_an_error_for_auto_too(tmp_path: Path, folder: Path) -> None:
    for source in ("auto", "csv"):
        with pytest.raises(UserError, match=r"data\.path=.*nowhere: no file train\.csv there; get .* put them"):
            check_source(settings(tmp_path, source=source, path=tmp_path / "nowhere"))
    (folder / "test.csv").unlink()
    with pytest.raises(UserError, match=r"no file test\.csv there"):
        load(settings(tmp_path / "cache", source="auto", path=folder))
    assert not (tmp_path / "cache").exists()


# --- order of sources ------------------------------------------------------------------------------------------------


def test_auto_falls_back_to_generated_with_a_banner(tmp_path: Path) -> None:
    began = time.monotonic()
    data, said = load(settings(tmp_path, source="auto", hub_id=SUDOKU_EXTREME))
    assert time.monotonic() - began < 15
    assert any(line.startswith("!! ") and "generated 6x6 puzzles, NOT Sudoku-Extreme" in line for line in said)
    assert data.meta.name == "generated-sudoku6-any" and data.meta.source == "generated"
    again, said = load(settings(tmp_path, source="auto", hub_id=SUDOKU_EXTREME))
    assert any("NOT Sudoku-Extreme" in line for line in said), "the banner comes every time"
    assert again.meta == data.meta


def test_a_generated_stand_in_is_never_taken_for_the_real_data(tmp_path: Path, folder: Path) -> None:
    load(settings(tmp_path, source="auto"))
    with pytest.raises(UserError, match=r"data\.source=cache: no prepared data in .*sudoku-extreme-"):
        check_source(settings(tmp_path, source="cache"))
    data, _ = load(settings(tmp_path, source="auto", path=folder))
    assert data.meta.name == "sudoku-extreme" and data.meta.source == "csv"


def test_auto_prefers_prepared_real_data(tmp_path: Path, folder: Path) -> None:
    prepared, _ = load(settings(tmp_path, source="csv", path=folder))
    for source in ("auto", "cache"):
        data, said = load(settings(tmp_path, source=source, hub_id=SUDOKU_EXTREME))
        assert len(said) == 1 and data.meta == prepared.meta
    other, _ = load(settings(tmp_path, source="auto", hub_id=SUDOKU_EXTREME, seed=5))  # prepared for seed 0 only
    assert other.meta.source == "generated"


def test_generated_is_generated_even_with_files_and_prepared_data(tmp_path: Path, folder: Path) -> None:
    load(settings(tmp_path, source="csv", path=folder))
    data, said = load(settings(tmp_path, source="generated"))
    assert data.meta.name == "generated-sudoku6-any" and not any(line.startswith("!!") for line in said)


# --- own puzzles -----------------------------------------------------------------------------------------------------


def own(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "own.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_own_puzzles(tmp_path: Path, six: Puzzles) -> None:
    q, a = text(six.puzzles[0]), text(six.solutions[0])
    spaced = " ".join(q)
    path = own(
        tmp_path,
        f"\ufeffAnswer,comment,question\r\n{a},hello,{q}\r\n\r\n{a},,{q.replace('.', '0')}\r\n{a},,{spaced}\r\n",
    )
    split = load_csv_puzzles(path, SIX)
    assert len(split) == 3 and (split.rating == -1).all()
    assert (digits_from_tokens(split.inputs) == six.puzzles[0]).all()
    assert (digits_from_tokens(split.labels) == six.solutions[0]).all()
    questions = load_csv_puzzles(own(tmp_path, f"question\n{q}\n"), SIX, with_answers=False)
    assert len(questions) == 1 and (questions.labels == 0).all()


def test_faults_are_named_with_file_and_line(tmp_path: Path, six: Puzzles) -> None:
    q, a = text(six.puzzles[0]), text(six.solutions[0])
    other = text(six.solutions[1])
    given = q.index(next(c for c in q if c != "."))
    swapped = a[:35] + ("1" if a[35] != "1" else "2")
    changed = a.translate(str.maketrans("123456", "234561"))
    twice = a[given] + "." * (given - 1) + q[given:] if given else q[:1] * 2 + q[2:]
    good = f"question,answer\n{q},{a}\n"
    cases: list[tuple[str | bytes, str]] = [
        ("", "line 1: no column question and no column answer"),
        ("question,solution\n", "line 1: no column answer"),
        ("question,answer\n", "no puzzles; expected at least one row"),
        (good + q, "line 3: 1 fields, 2 expected; the file may be cut off"),
        (good + f"{q},{a},7\n", "line 3: 3 fields, 2 expected"),
        (good + f"{q},{a[:20]}", "line 3, answer: 20 cells found, 36 expected"),
        (good + f"{q[:-1]},{a}\n", "line 3, question: 35 cells found, 36 expected"),
        (good + f"{q[:5]}x{q[6:]},{a}\n", "line 3, question: unexpected character 'x' at position 6"),
        (good + f"7{q[1:]},{a}\n", "line 3, question: digit '7' at position 1 is too large for 6x6"),
        (good + f"{q},.{a[1:]}\n", "line 3: the answer does not solve the question"),
        (good + f"{'.' * 36},{swapped}\n", "line 3: the answer does not solve the question: row 6 has two"),
        (good + f"{q},{changed}\n", "line 3: the answer does not solve the question: it changes the given at row"),
        (good + "\n\n" + f"{q},{other}\n", "line 5: the answer does not solve the question"),
        (f"question,answer,rating\n{q},{a},hard\n", "line 2: rating 'hard' is not a number"),
        (good.encode() + b"\xff\xfe", "not a text file in UTF-8"),
    ]
    for content, message in cases:
        path = own(tmp_path, content)
        with pytest.raises(UserError) as caught:
            load_csv_puzzles(path, SIX)
        assert str(path) in str(caught.value) and message in str(caught.value), (message, str(caught.value))
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"line 2, question: digit . stands twice in "):
        load_csv_puzzles(own(tmp_path, f"question\n{twice}\n"), SIX, with_answers=False)
    with pytest.raises(UserError, match="no such file"):
        load_csv_puzzles(tmp_path / "none.csv", SIX)


def test_a_fault_in_the_training_file_is_named(tmp_path: Path, folder: Path) -> None:
    content = (folder / "train.csv").read_text()
    (folder / "train.csv").write_text(content[: len(content) - 30])  # an interrupted download
    with pytest.raises(UserError, match=r"train\.csv, line 101"):
        load(settings(tmp_path, source="csv", path=folder))

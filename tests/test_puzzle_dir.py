"""The released data format: every batch of the released loader element for element; faults in a folder are named."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from data.puzzle_dir import (
    FolderBatch,
    PuzzleSet,
    PuzzleSplit,
    evaluation_batches,
    read_identifiers,
    read_split,
    training_batches,
    training_rows,
    write_split,
)
from tests.parity import FIXTURES, facts, tensors
from trainer.errors import UserError

FACTS = {"sudoku_batches": "sudoku", "arc_batches": "arc_eval"}


def same(prefix: str, found: Iterator[FolderBatch], case: str) -> None:
    """The fixture's batches whose names begin with prefix, and no more of them."""
    expected = tensors(case)
    told = facts(FACTS[case])["batches"]["effective"]
    names = sorted(
        {k.rsplit(".", 1)[0] for k in expected if k.startswith(f"{prefix}.")}, key=lambda n: int(n.split("batch")[-1])
    )
    assert names
    batches = list(found)
    assert len(batches) >= len(names)
    for name in names:
        batch = batches[int(name.split("batch")[-1])]
        for part in ("inputs", "labels", "puzzle_identifiers"):
            mine, theirs = getattr(batch, part), expected[f"{name}.{part}"].numpy()
            assert mine.dtype == np.int32 and np.array_equal(mine, theirs), f"{name}.{part}"
        assert (batch.set_name, batch.real) == (told[name]["set_name"], told[name]["global_effective_batch_size"])


@pytest.fixture(scope="module")
def sudoku() -> dict[str, PuzzleSplit]:
    return {name: read_split(FIXTURES / "sudoku_dir", name) for name in ("train", "test")}


def test_sudoku_training_batches(sudoku: dict[str, PuzzleSplit]) -> None:
    """Two iterations, two orders in one, an incomplete last batch dropped, one rank of two."""
    train = sudoku["train"]
    for number in (0, 1):
        same(f"train_e1.pass{number}", training_batches(train, 4, 0, number), "sudoku_batches")
        assert len(list(training_batches(train, 4, 0, number))) == 2
    same("train_e2.pass0", training_batches(train, 4, 0, 0, passes=2), "sudoku_batches")
    assert len(list(training_batches(train, 3, 0, 0))) == 2, "8 groups make two batches of 3"
    same("train_e1_g3.pass0", training_batches(train, 3, 0, 0), "sudoku_batches")
    same("train_e1_rank1of2.pass0", training_batches(train, 4, 0, 0, rank=1, ranks=2), "sudoku_batches")


def test_sudoku_test_batches(sudoku: dict[str, PuzzleSplit]) -> None:
    """In order, the last one padded; ranks share each batch."""
    same("test.pass0", evaluation_batches(sudoku["test"], 4), "sudoku_batches")
    assert len(list(evaluation_batches(sudoku["test"], 4))) == 2
    for rank in (0, 1):
        same(f"test_rank{rank}of2.pass0", evaluation_batches(sudoku["test"], 4, rank, 2), "sudoku_batches")


def test_arc_batches() -> None:
    """Several examples a puzzle, drawn with numpy's global generator as it was seeded for the fixture."""
    train, test = (read_split(FIXTURES / "arc_dir", name) for name in ("train", "test"))
    same("train", training_batches(train, 8, 0, 0, within=np.random.RandomState(123)), "arc_batches")
    same("test", evaluation_batches(test, 8), "arc_batches")
    names = read_identifiers(FIXTURES / "arc_dir")
    assert len(names) == train.meta.num_puzzle_identifiers and names[0] == "<blank>"


def test_our_choice_of_examples_depends_on_seed_and_iteration_alone() -> None:
    source = read_split(FIXTURES / "arc_dir", "train").sets["all"]

    def rows(seed: int, number: int) -> np.ndarray:
        return np.concatenate([rows for rows, _ in training_rows(source, 7, seed, number)])

    assert np.array_equal(rows(3, 1), rows(3, 1))
    assert not np.array_equal(rows(3, 1), rows(3, 2)) and not np.array_equal(rows(3, 1), rows(4, 1))
    for examples, puzzles in training_rows(source, 7, 0, 0):
        assert len(examples) == 7
        assert (source.puzzle_indices[puzzles] <= examples).all() and (
            examples < source.puzzle_indices[puzzles + 1]
        ).all()


def test_what_is_written_is_read_back(tmp_path: Path, sudoku: dict[str, PuzzleSplit]) -> None:
    write_split(tmp_path, "train", sudoku["train"].sets["all"], sudoku["train"].meta)
    (tmp_path / "identifiers.json").write_text('["<blank>"]')
    again = read_split(tmp_path, "train")
    assert again.meta == sudoku["train"].meta
    for part in PuzzleSet.__dataclass_fields__:
        assert np.array_equal(getattr(again.sets["all"], part), getattr(sudoku["train"].sets["all"], part)), part
    theirs = json.loads((FIXTURES / "sudoku_dir/train/dataset.json").read_text())
    ours = json.loads((tmp_path / "train/dataset.json").read_text())
    assert ours.keys() == theirs.keys()
    # The released builder counts groups there; these are the puzzles.
    assert ours == theirs | {"total_puzzles": 24}


def damage(folder: Path, part: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    array = np.load(folder / f"test/all__{part}.npy")
    np.save(folder / f"test/all__{part}.npy", change(array))


def edit(folder: Path, **changes: object) -> None:
    path = folder / "test/dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


FAULTS = {
    "inputs of another length": (lambda f: damage(f, "inputs", lambda a: a[:, :80]), "all__inputs.npy: shape"),
    "a label fewer": (lambda f: damage(f, "labels", lambda a: a[:-1]), "all__labels.npy: shape"),
    "a token too many": (lambda f: damage(f, "inputs", lambda a: np.where(a == 3, 11, a)), "all__inputs.npy: row 0"),
    "offsets that fall": (lambda f: damage(f, "puzzle_indices", lambda a: a[::-1].copy()), "all__puzzle_indices.npy"),
    "a group too many": (lambda f: damage(f, "group_indices", lambda a: np.append(a, 9)), "all__group_indices.npy"),
    "an unknown identifier": (lambda f: damage(f, "puzzle_identifiers", lambda a: a + 1), "all__puzzle_identifiers"),
    "fractions": (lambda f: damage(f, "inputs", lambda a: a / 2), "integers expected"),
    "objects": (lambda f: damage(f, "labels", lambda a: a.astype(object)), "not a readable array"),
    "no file": (lambda f: (f / "test/all__labels.npy").unlink(), "all__labels.npy: No such file"),
    "an empty file": (lambda f: (f / "test/all__labels.npy").write_bytes(b""), "all__labels.npy"),
    "half a file": (
        lambda f: (f / "test/all__labels.npy").write_bytes((f / "test/all__labels.npy").read_bytes()[:300]),
        "all__labels.npy",
    ),
    "no settings": (lambda f: (f / "test/dataset.json").unlink(), "dataset.json: No such file"),
    "broken settings": (lambda f: (f / "test/dataset.json").write_text("{"), "dataset.json: not valid JSON"),
    "a set twice": (lambda f: edit(f, sets=["all", "all"]), "each name once"),
    "a text for a number": (lambda f: edit(f, vocab_size="11"), "vocab_size='11', a whole number of at least 1"),
    "no vocabulary": (lambda f: (f / "test/dataset.json").write_text('{"seq_len": 81}'), "dataset.json: vocab_size"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(FIXTURES / "sudoku_dir", folder)
    change, told = FAULTS[fault]
    change(folder)
    with pytest.raises(UserError) as caught:
        read_split(folder, "test")
    assert told in str(caught.value) and "\n" not in str(caught.value)

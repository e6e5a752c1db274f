"""ARC's grids, augmentations and votes against the released converter and evaluator, and against what must hold."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.arc import CANVAS, INVERSE_DIHEDRAL, Augmentation, crop, dihedral, tokens_from_grid
from data.puzzle_dir import read_identifiers, read_split
from tests.parity import FIXTURES, facts
from trainer.arc_votes import PASS_AT, ArcVotes, grid_key

ARC = FIXTURES / "arc_dir"
grids = st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**31)).map(
    lambda t: np.random.default_rng(t[2]).integers(0, 10, t[:2]).astype(np.uint8)
)
augmentations = st.builds(
    Augmentation, st.integers(0, 7), st.permutations(range(1, 10)).map(lambda colours: (0, *colours))
)


def new_votes() -> ArcVotes:
    return ArcVotes(json.loads((ARC / "test_puzzles.json").read_text()), read_identifiers(ARC))


@pytest.fixture(scope="module")
def votes() -> ArcVotes:
    """The fixture's predictions, batch by batch."""
    counted = new_votes()
    with np.load(FIXTURES / "arc_eval.npz") as arrays:
        for batch in zip(*(arrays[k] for k in ("inputs", "puzzle_identifiers", "preds", "q_halt_logits")), strict=True):
            counted.add(*batch)
    return counted


def test_pass_at_is_the_released_one(votes: ArcVotes) -> None:
    told = facts("arc_eval")
    assert {f"ARC/pass@{k}": votes.pass_at(k) for k in PASS_AT} == told["results"]
    assert {f"ARC/pass@{k}": votes.pass_at(k) for k in (1, 3)} == told["results_with_pass_Ks_1_3"]


def test_rankings_are_the_released_ones(votes: ArcVotes) -> None:
    """Order, votes and mean probability of every candidate of every pair."""
    for name, told in facts("arc_eval")["ranking"].items():
        task, pair = name.rstrip("]").split("[")
        test = votes.tasks[task]["test"][int(pair)]
        assert grid_key(np.asarray(test["input"], np.uint8)) == told["input_sha256"]
        label = grid_key(np.asarray(test["output"], np.uint8))
        assert label == told["label_sha256"]
        mine = votes.ranking(task, test["input"])
        assert [grid_key(c.grid) for c in mine] == [c["sha256"] for c in told["ranking"]], name
        assert [c.votes for c in mine] == [c["votes"] for c in told["ranking"]], name
        assert [c.probability / c.votes for c in mine] == pytest.approx(
            [c["mean_q"] for c in told["ranking"]], rel=1e-14
        )
        assert [grid_key(c.grid) == label for c in mine] == [c["correct"] for c in told["ranking"]], name


def test_submission_is_the_released_one_with_every_pair_in_place(votes: ArcVotes) -> None:
    theirs = json.loads((FIXTURES / "arc_eval.submission.json").read_text())
    ours = votes.submission()
    assert ours["ev0006"][1] == {"attempt_1": [], "attempt_2": []}, "a pair nobody answered keeps its place"
    del ours["ev0006"][1]
    assert ours == theirs
    json.dumps(ours)


def answer_all(counted: ArcVotes, pairs: np.ndarray | None = None) -> None:
    """Every test row of the folder answered by a label: its own, or that of row pairs[i]."""
    rows = read_split(ARC, "test").sets["all"]
    ids = rows.puzzle_identifiers[np.searchsorted(rows.puzzle_indices, np.arange(len(rows.inputs)), side="right") - 1]
    labels = rows.labels if pairs is None else rows.labels[pairs]
    counted.add(rows.inputs, ids, labels, np.zeros(len(ids), np.float32))


def test_an_oracle_solves_every_task() -> None:
    counted = new_votes()
    answer_all(counted)
    assert [counted.pass_at(k) for k in PASS_AT] == [1.0] * len(PASS_AT)


def test_answers_of_other_tasks_solve_none() -> None:
    counted = new_votes()
    rows = read_split(ARC, "test").sets["all"]
    answer_all(counted, np.roll(np.arange(len(rows.inputs)), len(rows.inputs) // 2))
    assert counted.pass_at(1000) == 0.0


def test_votes_of_one_evaluation_do_not_reach_the_next() -> None:
    first = new_votes()
    answer_all(first)
    assert new_votes().pass_at(1000) == 0.0


@given(grids, augmentations)
def test_augmentations_are_undone(grid: np.ndarray, augmentation: Augmentation) -> None:
    """undo after apply is the identity, and the identifier says all of it."""
    assert np.array_equal(augmentation.undo(augmentation.apply(grid)), grid)
    assert Augmentation.of_name(augmentation.name("007bbfb7")) == ("007bbfb7", augmentation)
    assert Augmentation.of_name("007bbfb7") == ("007bbfb7", Augmentation())


def test_dihedrals_are_eight_different_ones() -> None:
    grid = np.arange(6).reshape(2, 3)
    assert len({dihedral(grid, k).tobytes() + bytes(dihedral(grid, k).shape) for k in range(8)}) == 8
    for k in range(8):
        assert np.array_equal(dihedral(dihedral(grid, k), INVERSE_DIHEDRAL[k]), grid), k


@given(grids)
def test_a_grid_on_the_canvas_is_cropped_back(grid: np.ndarray) -> None:
    assert np.array_equal(crop(tokens_from_grid(grid)), grid)


def test_canvas() -> None:
    """End marks below and right, the corner left empty, and none where the grid fills the canvas."""
    tokens = tokens_from_grid(np.array([[0, 9]], np.uint8), canvas=4, row=1, column=1).reshape(4, 4)
    assert tokens.tolist() == [[0, 0, 0, 0], [0, 2, 11, 1], [0, 1, 1, 0], [0, 0, 0, 0]]
    full = tokens_from_grid(np.zeros((CANVAS, CANVAS), np.uint8))
    assert (full == 2).all()


@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        (["000", "222", "222"], (0, 0)),
        (["220", "220", "200"], (2, 2)),
        (["222", "200", "200"], (1, 3)),
        (["2200", "2200", "2222", "2222"], (4, 2)),
        (["1222", "2222", "2222", "2222"], (0, 0)),
    ],
)
def test_crop_takes_the_largest_rectangle_at_the_corner(rows: list[str], shape: tuple[int, int]) -> None:
    assert crop(np.array([list(map(int, row)) for row in rows], np.uint8).reshape(-1)).shape == shape

"""Several starts of one puzzle: whose answer counts, what is reported, and that no puzzle notices another."""

import math
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from data.arrays import Split
from data.sudoku import BLANK_TOKEN
from models.connections import StateMemory
from models.core import LoopedReasoner, Memory
from tests.runs import BOX4, Scripted, evaluating, finished_run, puzzles, reordered, steady, tiny
from tests.tiny import CARRY_LAST, noisy
from trainer.breadth import Readings, chosen_start, rows_of_a_pass, start_key
from trainer.config import Choose, Halting
from trainer.errors import UserError
from trainer.evaluator import Depth, Evaluation, evaluate
from trainer.report import evaluate_program

TEN = puzzles(BOX4, 10)
DEPTH = Depth(H_cycles=2, L_cycles=2, outer_updates=6)
CHOICES: tuple[Choose, ...] = ("first", "convergence", "halting", "vote")
BY_CHOICE = pytest.mark.parametrize("choose", CHOICES)


def readings(
    answers: list[list[int]], moved: list[list[float]] | None = None, logits: list[list[float]] | None = None
) -> Readings:
    """One cell a puzzle."""
    a = torch.tensor(answers, dtype=torch.uint8)[..., None]
    zero = torch.zeros(a.shape[:2])
    moved_, logits_ = (zero if v is None else torch.tensor(v) for v in (moved, logits))
    return Readings(a, moved_, logits_, zero.int())


# --- the choice ------------------------------------------------------------------------------------------------------


def test_choices() -> None:
    """One puzzle a row: the least movement, the greatest logit, the commonest answer; of equals the lowest start."""
    said = readings(
        [[1, 2, 2, 3], [4, 4, 1, 1], [1, 2, 3, 4], [5, 5, 5, 5]],
        [[0.5, 0.9, 0.4, 0.1], [0.9, 0.3, 0.2, 0.8], [0.4, 0.2, 0.2, 0.9], [0.1, 0.1, 0.1, 0.1]],
        [[-3.0, 0.0, 2.0, 1.0], [-1.0, -1.0, -2.0, -1.0], [0.0, 0.0, 5.0, 5.0], [1.0, 2.0, 3.0, 4.0]],
    )
    assert chosen_start(said, "first").tolist() == [0, 0, 0, 0]
    assert chosen_start(said, "convergence").tolist() == [3, 2, 1, 0]
    assert chosen_start(said, "halting").tolist() == [2, 0, 2, 3]
    assert chosen_start(said, "vote").tolist() == [2, 2, 1, 0]  # ties of votes go to the answer that moved least


def test_starts_that_left_the_numbers_come_last() -> None:
    bad = [[math.nan, 0.5, math.inf], [math.nan, math.inf, math.nan]]
    said = readings([[1, 2, 3], [1, 2, 2]], bad, [[math.nan, -9.0, -math.inf], [math.nan, math.nan, 1.0]])
    assert chosen_start(said, "convergence").tolist() == [1, 0]
    assert chosen_start(said, "halting").tolist() == [1, 2]
    assert chosen_start(said, "vote").tolist() == [1, 1]


def test_rows_of_a_pass() -> None:
    """(puzzles, starts of each) at most batch_size rows together, all starts of a puzzle if they fit."""
    expected = {
        (10, 1, 4): (4, 1),
        (10, 3, 10): (3, 3),
        (10, 3, 2): (1, 2),
        (10, 4, 256): (10, 4),
        (1, 128, 64): (1, 64),
    }
    for asked, layout in expected.items():
        assert rows_of_a_pass(*asked) == layout


def test_keys_of_starts() -> None:
    """Start 0 has the puzzle's own key; all starts of all puzzles have different ones, and none is negative."""
    keys = {(i, k): start_key(row, k) for i, row in enumerate(TEN.inputs) for k in range(300)}
    assert len(set(keys.values())) == 3000 and min(keys.values()) >= 0
    assert keys[3, 7] == start_key(TEN.inputs[3].copy(), 7)


# --- scripted starts -------------------------------------------------------------------------------------------------


class ScriptedStarts(Scripted):
    """Start k of puzzle i has, after update u, the tokens answers[i, k, u - 1], the halting logit halts[i, k, u - 1], and
    moves by speed[i, k]. It knows its rows by their keys."""

    def __init__(self, answers: np.ndarray, halts: np.ndarray, speed: np.ndarray):
        super().__init__(answers[:, 0])
        self.every, self.logits, self.speed = (torch.from_numpy(t) for t in (answers.astype(np.int64), halts, speed))
        self.known = {start_key(TEN.inputs[i], k): (i, k) for i in range(10) for k in range(answers.shape[1])}
        self.rows_seen: list[int] = []

    def start(self, batch: int, keys: Tensor | None = None, noise: float | None = None) -> Memory:
        assert keys is not None
        self.rows_seen.append(batch)
        rows = torch.tensor([self.known[key] for key in keys.tolist()])
        return Memory(StateMemory(rows), StateMemory(torch.zeros(batch, 1)))

    def segment(
        self,
        memory: Memory,
        x: Tensor,
        H_cycles: int,
        L_cycles: int,
        grad_outer_cycles: int = 0,
        after_outer: Callable[[Memory], None] | None = None,
    ) -> Memory:
        i, k = memory.inner.h.T
        assert torch.equal(i, x)  # the input of a row is its own puzzle's
        for _ in range(H_cycles):
            memory = memory._replace(outer=StateMemory(memory.outer.h + self.speed[i, k][:, None]))
            assert after_outer is not None
            after_outer(memory)
        return memory

    def decode(self, memory: Memory) -> tuple[Tensor, Tensor | None]:
        i, k = memory.inner.h.T
        u = round((memory.outer.h[0, 0] / self.speed[i[0], k[0]]).item()) - 1
        return torch.nn.functional.one_hot(self.every[i, k, u], self.vocab_size).float(), self.logits[i, k, u].float()


def scripted(right: np.ndarray, speed: np.ndarray, halts: np.ndarray | None = None, updates: int = 3) -> ScriptedStarts:
    """Starts [10, K] that are right where told from update 2 on, else blank but for the start's number."""
    answers = np.full((10, right.shape[1], updates, 16), BLANK_TOKEN)
    for cell, digit in enumerate((np.arange(right.shape[1]) % 4, np.arange(right.shape[1]) // 4)):
        answers[..., cell] = digit[None, :, None] + 2
    answers[:, :, 1:][right] = TEN.labels[:, None, None].repeat(right.shape[1], 1)[right]
    halts = np.zeros(answers.shape[:3]) if halts is None else halts
    return ScriptedStarts(answers, halts, speed)


RNG = np.random.default_rng(0)
RIGHT, SPEED = RNG.random((10, 5)) < 0.4, RNG.permuted(np.tile(np.arange(1.0, 6.0), (10, 1)), axis=1)


@BY_CHOICE
@pytest.mark.parametrize("batch_size", [1, 3, 4, 10, 16, 256])
def test_counts_of_several_starts(choose: Choose, batch_size: int) -> None:
    """The chosen start's answers are the headline; the mean over starts and the oracle are counted beside it."""
    model = scripted(RIGHT, SPEED, np.repeat(4 - SPEED[:, :, None], 3, axis=2))  # positive logits: halting is off
    result = evaluate(model, TEN, BOX4, Depth(1, 1, 3), starts=5, choose=choose, batch_size=batch_size)
    least = SPEED.argmin(1)
    if choose == "vote":  # wrong starts all differ, so two right ones win, else the one that moved least
        votes = np.where(RIGHT, RIGHT.sum(1, keepdims=True), 1)
        expected = RIGHT[np.arange(10), np.where(votes == votes.max(1, keepdims=True), SPEED, 99).argmin(1)]
    else:
        expected = RIGHT[np.arange(10), 0 if choose == "first" else least]
    assert result.exact.tolist() == expected.tolist()
    assert [row.exact for row in result.rows] == [0, expected.sum(), expected.sum()]
    assert [row.starts_exact for row in result.rows] == [0, RIGHT.sum(), RIGHT.sum()]
    assert [row.any_start_exact for row in result.rows] == [0, RIGHT.any(1).sum(), RIGHT.any(1).sum()]
    assert all((row.n, row.starts, row.segments_used) == (10, 5, 10 * (i + 1)) for i, row in enumerate(result.rows))
    assert result.last.recognised == expected.sum()
    assert max(model.rows_seen) <= batch_size


def test_progress_counts_rows() -> None:
    """Ten puzzles of three updates from five starts are 150, however they are cut; filler is not counted."""
    for batch_size in (3, 7, 64):
        seen: list[int] = []
        model = scripted(RIGHT, SPEED)
        evaluate(
            model, TEN, BOX4, Depth(1, 1, 3), starts=5, batch_size=batch_size, progress=lambda n, s=seen: s.append(n)
        )
        assert sum(seen) == 150


def test_each_start_halts_by_itself() -> None:
    """Start k halts after segment k + 1, keeps its answer of then, and the chosen start's segments are reported."""
    halts = np.full((10, 3, 3), -1.0)
    for k in range(3):
        halts[:, k, k:] = k + 1
    right = np.tile([True, True, False], (10, 1))
    for batch_size in (2, 16):
        model = scripted(right, np.tile([2.0, 1.0, 3.0], (10, 1)), halts)
        result = evaluate(
            model, TEN, BOX4, Depth(1, 1, 3), starts=3, choose="convergence", halting="on", batch_size=batch_size
        )
        assert result.segments.tolist() == [2] * 10 and [row.exact for row in result.rows] == [0, 10, 10]
        assert [row.starts_exact for row in result.rows] == [0, 10, 10]  # start 0 halted before it was right
        last = evaluate(
            model, TEN, BOX4, Depth(1, 1, 3), starts=3, choose="halting", halting="on", batch_size=batch_size
        )
        assert last.segments.tolist() == [3] * 10 and last.last.exact == 0


# --- models ----------------------------------------------------------------------------------------------------------

NOISY = {"noise": noisy(0.9, 0.3), "initial": CARRY_LAST, "initial_and_noise": noisy(0.9, 0.05)}


def random_starts(name: str) -> LoopedReasoner:
    return steady(NOISY[name], "mlp", initial_state="fixed" if name == "noise" else "noise")


def same(mine: Evaluation, theirs: Evaluation) -> bool:
    return (
        [astuple(row) for row in mine.rows] == [astuple(row) for row in theirs.rows]
        and np.array_equal(mine.answers, theirs.answers)
        and np.array_equal(mine.segments, theirs.segments)
    )


@pytest.mark.parametrize(("name", "halting"), [("noise", "on"), ("initial", "off"), ("initial_and_noise", "on")])
@BY_CHOICE
def test_batch_size_and_order_change_nothing(name: str, halting: Halting, choose: Choose) -> None:
    """Ten puzzles of three starts in batches of 1, 3, 4, 10, 16, and shuffled: the same answers and counts."""
    model, order, depth = random_starts(name), np.random.default_rng(0).permutation(10), Depth(2, 1, 4)

    def run(split: Split = TEN, batch_size: int = 30) -> Evaluation:
        return evaluate(model, split, BOX4, depth, starts=3, choose=choose, halting=halting, batch_size=batch_size)

    whole = run()
    for batch_size in (1, 3, 4, 10, 16):
        assert same(run(batch_size=batch_size), whole)
    shuffled = run(reordered(TEN, order), 4)
    assert np.array_equal(shuffled.answers, whole.answers[order])
    assert np.array_equal(shuffled.segments, whole.segments[order])
    assert same(run(), whole)


@pytest.mark.parametrize("name", NOISY)
def test_starts_differ_and_the_first_is_the_single_one(name: str) -> None:
    model = random_starts(name)
    single = evaluate(model, TEN, BOX4, DEPTH)
    first = evaluate(model, TEN, BOX4, DEPTH, starts=4, choose="first")
    assert np.array_equal(first.answers, single.answers) and first.last.exact == single.last.exact
    others = [evaluate(model, TEN, BOX4, DEPTH, starts=4, choose=choose).answers for choose in CHOICES[1:]]
    assert any(not np.array_equal(single.answers, other) for other in others)
    assert single.last.starts_exact == single.last.any_start_exact == single.last.exact


def test_noise_of_evaluation_is_a_choice() -> None:
    """Left out: as in training. 0: none, so that fixed initial states leave every start the same. Larger: others."""
    model = random_starts("noise")
    trained, same_again, silent, loud = (
        evaluate(model, TEN, BOX4, DEPTH, noise=noise).answers for noise in (None, 0.3, 0.0, 2.0)
    )
    assert np.array_equal(trained, same_again)
    assert not np.array_equal(trained, silent) and not np.array_equal(trained, loud)
    still = evaluate(steady(noisy(0.9, 0.0), "mlp"), TEN, BOX4, DEPTH)
    assert np.array_equal(silent, still.answers)
    many = evaluate(model, TEN, BOX4, DEPTH, noise=0.0, starts=3, choose="vote")
    assert np.array_equal(many.answers, silent) and many.last.starts_exact == 3 * many.last.exact


@torch.no_grad()
def test_movement_is_that_of_the_last_outer_update() -> None:
    """convergence chooses by the root mean square change of h_H over the last outer update, at every depth."""
    model = random_starts("initial")
    keys = [[start_key(row, k) for k in range(4)] for row in TEN.inputs]
    tokens = torch.from_numpy(TEN.inputs).repeat_interleave(4, 0)
    x = model.encode(tokens, model.puzzle_rows(torch.zeros(40, dtype=torch.int32)))
    memory, answers, moved, states = model.start(40, torch.tensor(keys).flatten()), [], [], []
    states.append(memory.outer.h)
    for _ in range(3):
        for _ in range(2):
            memory = model.segment(memory, x, 1, 2)
            states.append(memory.outer.h)
        moved.append((states[-1] - states[-2]).square().mean((1, 2)).sqrt().view(10, 4))
        answers.append(model.decode(memory)[0].argmax(-1).view(10, 4, 16))
    for segments in (1, 2, 3):
        got = evaluate(model, TEN, BOX4, replace(DEPTH, outer_updates=2 * segments), starts=4, batch_size=16).answers
        chosen = moved[segments - 1].argmin(1)
        assert np.array_equal(got, answers[segments - 1][torch.arange(10), chosen].numpy())
        assert len(set(chosen.tolist())) > 1


# --- runs ------------------------------------------------------------------------------------------------------------

EQR = ("model=eqr", "model.connection.noise=0.05")


def test_a_run_with_breadth_reports_it(tmp_path: Path) -> None:
    """Starts, choice, single starts and oracle in results.json, with their counts; folder names tell evaluations apart."""
    run_dir = finished_run(*EQR, "eval.starts=3", "eval.choose=vote")
    results = evaluate_program(evaluating(run_dir, "eval.starts=3", "eval.choose=vote", out=tmp_path / "a"))
    assert (results["starts"], results["choose"], results["noise"]) == (3, "vote", None)
    assert results["single_starts_n"] == 3 * results["n"]
    assert results["single_starts_exact"] <= results["any_start_exact"] * 3 and results["exact"] <= results["n"]
    assert results["executed_layers_all_starts"] == 3 * results["executed_layers"] == 3 * 36
    last = results["depths"][-1]
    assert (last["starts"], last["starts_exact"]) == (3, results["single_starts_exact"])
    single = evaluate_program(evaluating(run_dir, "eval.noise=0.5", out=tmp_path / "b"))
    assert (single["starts"], single["choose"], single["noise"]) == (1, None, 0.5)


def test_training_validates_with_the_starts_it_is_told() -> None:
    run_dir = finished_run(*EQR, "eval.starts=3", "eval.choose=vote")
    assert '"validation/starts": 3' in (run_dir / "metrics.jsonl").read_text()


def test_starts_that_would_all_be_the_same_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"eval\.starts=2 with model\.initial_state=fixed"):
        evaluate_program(evaluating(finished_run(), "eval.starts=2", out=tmp_path / "out"))
    with pytest.raises(UserError, match=r"eval\.halting=batch_residual with model\.halting=q_head"):
        evaluate_program(evaluating(finished_run(), "eval.halting=batch_residual", out=tmp_path / "out"))
    with pytest.raises(UserError, match=r"eval\.noise=0\.1: no connection"):
        evaluate_program(evaluating(finished_run(), "eval.noise=0.1", out=tmp_path / "out"))
    with pytest.raises(UserError, match=r"^eval\.starts=2 with model\.initial_state=fixed"):
        tiny(tmp_path / "run", "eval.starts=2")
    assert not any(tmp_path.iterdir())

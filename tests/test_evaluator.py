"""The evaluator: right counts, every puzzle once and by itself, depth in any unit, flat memory."""

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from data.arrays import Split
from data.build import load_csv_puzzles
from data.sudoku import BLANK_TOKEN, Box, is_complete_solution
from models.config import ConnectionConfig
from models.core import LoopedReasoner, Memory
from models.halting import QHead
from tests.runs import BOX4, BOX9, Scripted, bundled, puzzles, reordered, steady, tiny
from tests.tiny import CARRY_LAST, constant_step, residual
from trainer.checkpoint import load_checkpoint
from trainer.config import EvalConfig, Halting
from trainer.errors import UserError
from trainer.evaluator import Depth, Evaluation, decode_points, evaluate, resolve_depth, subset

TEN = puzzles(BOX4, 10)
DEPTH = Depth(H_cycles=2, L_cycles=2, outer_updates=8)


def counts(evaluation: Evaluation) -> list[tuple[int, ...]]:
    return [(r.outer_updates, r.n, r.exact, r.cells_right, r.cells, r.recognised) for r in evaluation.rows]


def same_answers(mine: Evaluation, theirs: Evaluation) -> bool:
    return np.array_equal(mine.answers, theirs.answers) and np.array_equal(mine.segments, theirs.segments)


# --- counts ----------------------------------------------------------------------------------------------------------


def test_one_wrong_cell_is_a_wrong_puzzle() -> None:
    """Ten empty 9x9 grids, each answered with one wrong cell: no puzzle of 10, 800 cells of 810."""
    split = puzzles(BOX9, 10, givens=0)
    answers = split.labels.copy()
    for i in range(10):
        answers[i, 8 * i] = answers[i, 8 * i] % 9 + 2 if answers[i, 8 * i] < 10 else 2
    model = Scripted(answers[:, None], vocab_size=BOX9.vocab_size)
    last = evaluate(model, split, BOX9, Depth(1, 1, 1), batch_size=4).last
    assert (last.exact, last.n, last.cells_right, last.cells) == (0, 10, 800, 810)
    assert last.exact_accuracy == 0.0 and round(last.cell_accuracy, 4) == 0.9877
    right = evaluate(Scripted(split.labels[:, None], vocab_size=BOX9.vocab_size), split, BOX9, Depth(1, 1, 1)).last
    assert (right.exact, right.cells_right, right.recognised) == (10, 810, 10)


def test_cell_accuracy_leaves_givens_out_and_exact_counts_them() -> None:
    """All blanks right and one given changed: every cell of cell_accuracy, but not the puzzle."""
    answers = TEN.labels.copy()
    given = np.argmax(TEN.inputs != BLANK_TOKEN, axis=1)
    answers[np.arange(10), given] = answers[np.arange(10), given] % 4 + 2
    last = evaluate(Scripted(answers[:, None]), TEN, BOX4, Depth(1, 1, 1)).last
    assert last.cells == last.cells_right == (TEN.inputs == BLANK_TOKEN).sum() < 160
    assert last.exact == last.recognised == 0


def test_counts_per_depth() -> None:
    """Puzzle i is solved from update i + 1 on, and forgotten by puzzle 0 at the last update."""
    answers = np.repeat(np.full_like(TEN.labels, BLANK_TOKEN)[:, None], 10, axis=1)
    for i in range(10):
        answers[i, i:] = TEN.labels[i]
    answers[0, -1] = BLANK_TOKEN
    result = evaluate(Scripted(answers), TEN, BOX4, Depth(1, 3, 10), batch_size=4)
    assert [row.exact for row in result.rows] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    assert [row.recognised for row in result.rows] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert [row.block_applications for row in result.rows] == [4 * u for u in range(1, 11)]
    assert [row.executed_layers for row in result.rows] == [8 * u for u in range(1, 11)]
    assert result.exact.tolist() == [False] + [True] * 9
    blanks = (TEN.inputs == BLANK_TOKEN).sum(1)
    assert [row.cells_right for row in result.rows] == [*np.cumsum(blanks)[:9], blanks[1:].sum()]


def test_recognised_needs_no_label_and_counts_no_wrong_grid() -> None:
    """Labels unknown: a valid completion counts, a grid with a changed given, a broken rule or a blank does not."""
    labels = TEN.labels.copy()
    other = (labels - 1) % 4 + 2  # another valid grid: every digit moved on
    swapped = labels.copy()
    swapped[:, [0, 1]] = swapped[:, [1, 0]]
    blank = labels.copy()
    blank[np.arange(10), np.argmax(TEN.inputs == BLANK_TOKEN, axis=1)] = BLANK_TOKEN
    unknown = Split(TEN.inputs, np.zeros_like(labels), TEN.rating, TEN.puzzle_ids)
    for answer, expected in ((labels, 10), (other, 0), (swapped, 0), (blank, 0)):
        assert evaluate(Scripted(answer[:, None]), unknown, BOX4, Depth(1, 1, 1)).last.recognised == expected


@torch.no_grad()
def test_recognised_of_a_model_is_what_its_answers_say() -> None:
    """On real answers: never more than were valid at a decoded depth, and never fewer than at the depth before."""
    model, split = steady(residual()), puzzles(BOX4, 16, givens=0.95)
    result = evaluate(model, split, BOX4, DEPTH, decode="outer_update")
    seen = np.zeros(16, bool)
    for row in result.rows:
        at = evaluate(model, split, BOX4, replace(DEPTH, outer_updates=row.outer_updates)).answers
        digits, givens = (torch.from_numpy(t.astype(np.int64) - 1).clamp(min=0) for t in (at, split.inputs))
        seen |= is_complete_solution(digits, givens, BOX4).numpy()
        assert row.recognised == seen.sum() >= row.exact
    assert [row.recognised for row in result.rows] == sorted(row.recognised for row in result.rows)


def test_nothing_to_score_is_an_error() -> None:
    empty = reordered(TEN, np.arange(0))
    full = Split(TEN.labels, TEN.labels, TEN.rating, TEN.puzzle_ids)
    for split, message in ((empty, "no puzzles"), (full, "no puzzle has an empty cell")):
        with pytest.raises(UserError, match=message):
            evaluate(Scripted(TEN.labels[:, None]), split, BOX4, Depth(1, 1, 1))


# --- every puzzle by itself ------------------------------------------------------------------------------------------


@torch.no_grad()
def halting_here_and_there(model: LoopedReasoner) -> LoopedReasoner:
    """The model with a halting bias at which half of its logits on TEN, over four segments, are positive."""
    x = model.encode(torch.from_numpy(TEN.inputs), torch.zeros(10, 0))
    memory, logits = model.start(10), []
    for _ in range(4):
        memory = model.segment(memory, x, 2, 2)
        logits.append(model.decode(memory)[1])
    assert isinstance(model.halting, QHead) and model.halting.head.bias is not None
    model.halting.head.bias.sub_(torch.cat(logits).median())
    return model


@pytest.mark.parametrize("halting", ["on", "off"])
@pytest.mark.parametrize("mixer", ["attention", "mlp"])
def test_batch_size_and_order_change_no_answer(mixer: str, halting: Halting) -> None:
    """Ten puzzles in batches of 1, 3, 4, 10, 16, and shuffled: the same answers and segments, puzzle by puzzle."""
    model, order = halting_here_and_there(steady(residual(), mixer)), np.random.default_rng(0).permutation(10)
    whole = evaluate(model, TEN, BOX4, DEPTH, halting=halting, batch_size=10)
    for batch_size in (1, 3, 4, 16):
        part = evaluate(model, TEN, BOX4, DEPTH, halting=halting, batch_size=batch_size)
        assert same_answers(part, whole) and counts(part) == counts(whole)
        assert all(row.n == 10 for row in part.rows)
    for batch_size in (3, 10):
        shuffled = evaluate(model, reordered(TEN, order), BOX4, DEPTH, halting=halting, batch_size=batch_size)
        assert np.array_equal(shuffled.answers, whole.answers[order])
        assert np.array_equal(shuffled.segments, whole.segments[order])
    assert (halting == "on") == (len(set(whole.segments.tolist())) > 1)
    assert len({answer.tobytes() for answer in whole.answers}) > 5


def test_trained_model_answers_the_same_in_any_batch() -> None:
    """The bundled InfiLoop on ten of its puzzles, with its halting head."""
    found = bundled()
    checkpoint = load_checkpoint(found.checkpoint)
    model = checkpoint.build_model("ema").eval()
    split = reordered(load_csv_puzzles(found.puzzles, Box(2, 3)), np.arange(10))
    depth = resolve_depth(EvalConfig(), checkpoint.config.schedule, checkpoint.config.model)
    whole = evaluate(model, split, Box(2, 3), depth, halting="on")
    assert whole.last.exact >= 9
    for batch_size in (1, 3, 4):
        assert same_answers(evaluate(model, split, Box(2, 3), depth, halting="on", batch_size=batch_size), whole)


def test_filler_rows_count_nowhere() -> None:
    """Ten puzzles in batches of four: the two filler rows of the last batch, solved though they are, are not counted."""
    answers = np.where((np.arange(10) < 8)[:, None], BLANK_TOKEN, TEN.labels)
    seen: list[int] = []
    last = evaluate(
        Scripted(answers[:, None]), TEN, BOX4, Depth(1, 1, 1), batch_size=4, progress=lambda n: seen.append(n)
    ).last
    assert (last.exact, last.recognised, last.segments_used) == (2, 2, 10)
    assert last.cells_right == (TEN.inputs[8:] == BLANK_TOKEN).sum()
    assert seen == [4, 4, 2]


# --- halting ---------------------------------------------------------------------------------------------------------


def test_halting_takes_each_puzzle_at_its_own_segment() -> None:
    """Puzzle i is willing from segment i + 1 on; its answer, right only there, is kept whatever comes later."""
    answers = np.repeat(np.full_like(TEN.labels, BLANK_TOKEN)[:, None], 8, axis=1)
    halts = np.full((10, 4), -1.0)
    for i in range(10):
        own = i % 5
        if own < 4:
            answers[i, 2 * own + 1] = TEN.labels[i]  # after the second update of its segment
            halts[i, own:] = np.array([1.0, -1.0, 1.0, 1.0])[: 4 - own]  # changing its mind is too late
    model = Scripted(answers, halts, H_cycles=2)
    expected = [1, 2, 3, 4, 4] * 2
    for batch_size in (1, 3, 10):
        result = evaluate(model, TEN, BOX4, DEPTH, halting="on", decode="outer_update", batch_size=batch_size)
        assert result.segments.tolist() == expected
        assert result.exact.tolist() == [True, True, True, True, False] * 2
        assert result.last.mean_segments == sum(expected) / 10 and max(result.segments) == 4
        assert [row.exact for row in result.rows] == [0, 2, 2, 4, 4, 6, 6, 8]
    off = evaluate(model, TEN, BOX4, DEPTH, halting="off")
    assert off.segments.tolist() == [4] * 10 and [row.exact for row in off.rows] == [2, 2, 2, 2]


def test_halting_needs_a_whole_segment() -> None:
    """A logit in the middle of a segment, or in a last partial one, stops nothing."""
    answers = np.repeat(TEN.labels[:, None], 5, axis=1)
    answers[:, :1] = BLANK_TOKEN
    halts = np.array([[1.0, -1.0, -1.0]] * 10)
    result = evaluate(Scripted(answers, halts, 2), TEN, BOX4, Depth(2, 1, 5), halting="on", decode="outer_update")
    assert [row.exact for row in result.rows] == [0, 10, 10, 10, 10] and result.segments.tolist() == [1] * 10
    late = evaluate(Scripted(answers, -halts * [[1, 1, -1]], 2), TEN, BOX4, Depth(2, 1, 5), halting="on")
    assert late.segments.tolist() == [2] * 10


# --- depth -----------------------------------------------------------------------------------------------------------


def test_depth_in_any_unit(tmp_path: Path) -> None:
    """H=2, L=2, two layers: a segment is 2 outer updates, 6 block applications, 12 executed layers."""
    config = tiny(tmp_path)

    def depth(**asked: int) -> Depth:
        return resolve_depth(EvalConfig.model_validate(asked), config.schedule, config.model)

    assert (
        depth() == depth(segments=3) == depth(outer_updates=6) == depth(layers=36) == depth(layers=31) == Depth(2, 2, 6)
    )
    assert depth(layers=37).outer_updates == 7 and depth(layers=1).outer_updates == 1
    assert depth(segments=128) == Depth(2, 2, 256)
    assert depth(H_cycles=6, L_cycles=12, segments=12) == Depth(6, 12, 72)
    assert depth(H_cycles=6, L_cycles=12, layers=20_000) == Depth(6, 12, 770)  # 26 layers an update
    assert (depth(outer_updates=5).segments, depth(outer_updates=6).segments) == (3, 3)
    assert decode_points(Depth(2, 2, 5), "segment") == [2, 4, 5]
    assert decode_points(Depth(2, 2, 5), "outer_update") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "connection",
    [CARRY_LAST, constant_step(0.3), residual(), residual(memory_span="segment"), residual(memory_span="outer_cycle")],
    ids=["carry_last", "constant_step", "residual", "by_segment", "by_outer_cycle"],
)
def test_one_pass_equals_a_run_to_each_depth(connection: ConnectionConfig) -> None:
    model = steady(connection)
    once = evaluate(model, TEN, BOX4, replace(DEPTH, outer_updates=7), decode="outer_update")
    assert [row.outer_updates for row in once.rows] == list(range(1, 8))
    for row in once.rows:
        alone = evaluate(model, TEN, BOX4, replace(DEPTH, outer_updates=row.outer_updates))
        assert counts(alone)[-1][:-1] == counts(once)[row.outer_updates - 1][:-1]
    by_segment = evaluate(model, TEN, BOX4, replace(DEPTH, outer_updates=7))
    assert [row.outer_updates for row in by_segment.rows] == [2, 4, 6, 7] and same_answers(by_segment, once)
    assert len({row.cells_right for row in once.rows}) > 1


@torch.no_grad()
@pytest.mark.parametrize("span", ["run", "segment", "outer_cycle"])
def test_memory_restarts_where_training_restarts_it(span: str) -> None:
    """The logits that the evaluator reads are those of training's segments, one after the other."""
    model = steady(residual(memory_span=span))
    read: list[Tensor] = []

    class Watched(LoopedReasoner):
        def decode(self, memory: Memory) -> tuple[Tensor, Tensor | None]:
            logits, halt = super().decode(memory)
            read.append(logits)
            return logits, halt

    model.__class__ = Watched
    evaluate(model, TEN, BOX4, DEPTH)
    tokens = torch.from_numpy(TEN.inputs)
    x = model.encode(tokens, model.puzzle_rows(torch.zeros(10, dtype=torch.int32)))
    memory, trained = model.start(10), []
    for _ in range(4):
        memory = model.segment(memory, x, 2, 2, grad_outer_cycles=1)
        trained.append(LoopedReasoner.decode(model, memory)[0])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(read, trained, strict=True))
    if span != "run":
        lasting = steady(residual())
        memory = lasting.start(10)
        for _ in range(4):
            memory = lasting.segment(memory, x, 2, 2)
        assert not torch.allclose(lasting.decode(memory)[0], read[-1], atol=1e-3)


def test_subset_is_fixed_by_its_seed() -> None:
    split = puzzles(BOX4, 100)
    one, again, other = (subset(split, 10, seed) for seed in (0, 0, 1))
    assert np.array_equal(one.puzzle_ids, again.puzzle_ids) and not np.array_equal(one.puzzle_ids, other.puzzle_ids)
    assert len(set(one.puzzle_ids)) == 10 and sorted(one.puzzle_ids) == list(one.puzzle_ids)
    assert np.array_equal(one.inputs, split.inputs[one.puzzle_ids])
    assert np.array_equal(one.labels, split.labels[one.puzzle_ids])


# --- memory ----------------------------------------------------------------------------------------------------------


def live_bytes() -> int:
    """Bytes of all tensors made since gc.freeze(); none may belong to a graph, which would keep more out of sight."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) is Tensor:
            assert thing.grad_fn is None
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def peak_bytes(connection: ConnectionConfig, layers: int) -> int:
    """The most bytes alive at any of ten looks while 64 puzzles run to this many executed layers."""
    depth = Depth(H_cycles=10, L_cycles=3, outer_updates=layers // 40)
    done, peak = 0, 0

    def look(_: int) -> None:
        nonlocal done, peak
        done += 1
        if done == depth.outer_updates or done % max(1, depth.outer_updates // 10) == 0:
            peak = max(peak, live_bytes())

    gc.collect()
    gc.freeze()
    try:
        model = steady(connection, "mlp", hidden_size=8, layers=10)
        last = evaluate(model, puzzles(BOX4, 64), BOX4, depth, progress=look).last
    finally:
        gc.unfreeze()
    assert last.executed_layers == layers
    return peak


def test_memory_does_not_grow_with_depth() -> None:
    """64 puzzles at (about) 100 and at 20,000 executed layers: within 3 %. The full attention residual, which keeps every
    candidate, fails the same comparison long before."""
    assert peak_bytes(residual(), 20_000) <= 1.03 * peak_bytes(residual(), 80)
    assert peak_bytes(residual(full=True), 800) > 1.5 * peak_bytes(residual(full=True), 80)

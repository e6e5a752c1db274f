"""What survives from segment to segment, row by row: fresh puzzles in finished rows, everything else bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from data.sampler import Batch, TrainSampler
from models.config import ConnectionConfig
from models.core import LoopedReasoner, Memory
from tests.tiny import (
    CARRY_LAST,
    assert_close,
    build,
    constant_step,
    injection,
    model_config,
    noisy,
    parameter_gradients,
    puzzles,
    residual,
    train_config,
)
from trainer.config import TrainConfig
from trainer.loop import Carry, StepResult, empty_carry, forward_backward, mark_finished, replace_finished

CONNECTIONS = [
    CARRY_LAST,
    constant_step(0.5),
    residual(),
    residual(include_initial=False),
    residual(memory_span="segment"),
    residual(full=True),
    noisy(),
]
BY_CONNECTION = pytest.mark.parametrize(
    "connection",
    CONNECTIONS,
    ids=["carry_last", "constant_step", "residual", "without_initial", "by_segment", "full", "noisy"],
)
MIXERS = pytest.mark.parametrize("mixer", ["mlp", "attention"])
FINISHED = torch.tensor([True, False, True, False])


def tensors(memory: Memory) -> list[Tensor]:
    return [*memory.inner, *memory.outer]


class CountingSampler(TrainSampler):
    """Puzzle number i has its own tokens, labels and id, all functions of i."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def draw(self, first: int, count: int) -> Batch:
        self.asked.append((first, count))
        drawn = [puzzles(1, seed=100 + i) for i in range(first, first + count)]
        tokens, labels, ids = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        return Batch(tokens, labels, ids.int(), ids, ids)


def lived(model: LoopedReasoner, config: TrainConfig, sampler: CountingSampler, steps: int) -> tuple[Carry, int]:
    """A carry after some segments, nothing finished in between."""
    carry, drawn = replace_finished(empty_carry(model, 4), model, sampler, 0)
    for _ in range(steps):
        result = forward_backward(model, carry, config, 4)
        carry = mark_finished(carry, result, model, config, torch.Generator())
        carry.finished[:] = False
    return carry, drawn


@MIXERS
@BY_CONNECTION
def test_finished_rows_are_replaced_and_no_other(connection: ConnectionConfig, mixer: str) -> None:
    """Rows 0 and 2 get the next puzzles, in row order, and a cold start's output; rows 1 and 3 stay bit for bit."""
    model = build(model_config(connection, mixer))
    config, sampler = train_config(model.config, segments=9), CountingSampler()
    before, drawn = lived(model, config, sampler, 2)
    before.finished = FINISHED.clone()
    old = {name: getattr(before, name).clone() for name in ("tokens", "labels", "puzzle_ids", "segments")}
    old_memory = [tensor.clone() for tensor in tensors(before.memory)]
    after, drawn = replace_finished(before, model, sampler, drawn)

    assert sampler.asked == [(0, 4), (4, 2)] and drawn == 6
    for name, value in old.items():
        assert torch.equal(getattr(after, name)[~FINISHED], value[~FINISHED]), name
        assert torch.equal(getattr(before, name), value), f"{name} of the carry before changed in place"
    for mine, theirs in zip(tensors(after.memory), old_memory, strict=True):
        assert torch.equal(mine[~FINISHED], theirs[~FINISHED])
    tokens, labels, ids = (torch.cat(parts) for parts in zip(*(puzzles(1, seed=104 + i) for i in (0, 1)), strict=True))
    assert torch.equal(after.tokens[FINISHED].long(), tokens) and torch.equal(after.labels[FINISHED], labels)
    assert torch.equal(after.puzzle_ids[FINISHED].long(), ids)
    assert after.segments.tolist() == [0, 2, 0, 2] and not after.finished.any()

    with torch.no_grad():
        x = model.encode(after.tokens, model.puzzle_rows(after.puzzle_ids))
        warm = model.decode(model.segment(after.memory, x, 2, 2))
        cold = model.decode(model.segment(model.start(4, after.puzzle_ids.long()), x, 2, 2))
        kept = model.decode(model.segment(before.memory, x, 2, 2))
    exact = getattr(connection, "kind", "") != "full_attention_residual"  # hidden slots change the order of its sums
    for got, fresh, same in zip(warm, cold, kept, strict=True):
        assert got is not None and fresh is not None and same is not None
        torch.testing.assert_close(got[FINISHED], fresh[FINISHED], rtol=0, atol=0 if exact else 1e-5)
        assert torch.equal(got[~FINISHED], same[~FINISHED])
        assert not torch.allclose(got[~FINISHED], fresh[~FINISHED], atol=1e-4)


def test_nothing_is_drawn_when_nothing_finished() -> None:
    model, sampler = build(model_config()), CountingSampler()
    carry, drawn = lived(model, train_config(model.config), sampler, 1)
    same, still = replace_finished(carry, model, sampler, drawn)
    assert same is carry and still == drawn == 4 and sampler.asked == [(0, 4)]


@torch.no_grad()
def test_rows_of_different_age_stream_as_in_full() -> None:
    """Rows reset at different times: the full form hides their old candidates, so it still equals the stream."""
    results = []
    for full in (False, True):
        model = build(model_config(residual(0.55, full)))
        x = injection(model, 4)
        memory = model.segment(model.start(4), x, 2, 2)
        memory = model.segment(model.reset(memory, FINISHED), x, 1, 2)
        memory = model.segment(model.reset(memory, torch.tensor([False, False, True, True])), x, 2, 2)
        results.append((model.decode(memory)[0], memory.inner.h))
    for streaming, reference in zip(*results, strict=True):
        assert_close(streaming, reference, 1e-4)


@torch.no_grad()
def test_rows_do_not_read_each_other() -> None:
    """A puzzle's state is the same whatever its batch mates are."""
    for connection in CONNECTIONS:
        model = build(model_config(connection))
        x = injection(model, 4)
        other = torch.cat((x[:1], injection(model, 3, seed=9)))
        here, there = (model.segment(model.start(4), rows, 2, 2) for rows in (x, other))
        for a, b in zip(tensors(here), tensors(there), strict=True):
            assert torch.equal(a[0], b[0])


# --- one training step -----------------------------------------------------------------------------------------------


def step_gradients(connection: Any, micro_batch: int) -> tuple[dict[str, Tensor], StepResult]:
    model = build(model_config(connection))
    config = train_config(model.config, segments=9, global_batch=6)
    sampler = CountingSampler()
    carry, _ = replace_finished(empty_carry(model, 6), model, sampler, 0)
    first = forward_backward(model, carry, config, 6)
    carry = mark_finished(carry, first, model, config, torch.Generator())
    model.zero_grad()
    result = forward_backward(model, carry, config, micro_batch)
    assert result.puzzle_gradient is not None
    return parameter_gradients(model) | {"rows": result.puzzle_gradient}, result


@BY_CONNECTION
@pytest.mark.parametrize("micro_batch", [1, 2, 4, 5])
def test_micro_batches_only_split(connection: ConnectionConfig, micro_batch: int) -> None:
    """One step from the same state: gradients to 1e-5 for any split, and the same sums, states and decisions."""
    whole, together = step_gradients(connection, 6)
    parts, split = step_gradients(connection, micro_batch)
    for name, gradient in whole.items():
        assert (parts[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name
    for name, total in together.sums.items():
        torch.testing.assert_close(split.sums[name], total, rtol=1e-6, atol=1e-6)
    assert torch.equal(split.exact, together.exact)
    assert split.halt_logit is not None and together.halt_logit is not None
    assert_close(split.halt_logit, together.halt_logit, 1e-5)
    for mine, theirs in zip(tensors(split.memory), tensors(together.memory), strict=True):
        assert_close(mine, theirs, 1e-5)


@BY_CONNECTION
def test_carry_moves_on(connection: ConnectionConfig) -> None:
    """The second segment begins where the first ended, without a graph; a frozen carry would repeat segment one."""
    model = build(model_config(connection))
    config, sampler = train_config(model.config, segments=9), CountingSampler()
    carry, _ = lived(model, config, sampler, 2)
    with torch.no_grad():
        x = model.encode(carry.tokens, model.puzzle_rows(carry.puzzle_ids))
        start = model.start(4, carry.puzzle_ids.long())  # the sampler here gives a puzzle's id as its key
        memory = model.segment(model.segment(start, x, 2, 2), x, 2, 2)
    for mine, expected in zip(tensors(carry.memory), tensors(memory), strict=True):
        assert not mine.requires_grad
        assert_close(mine, expected, 1e-5)
    assert carry.segments.tolist() == [2, 2, 2, 2]


def test_without_a_puzzle_table_there_is_no_gradient_for_it() -> None:
    """puzzle_emb_dim=0: the trainer must not run sign-SGD on nothing."""
    model = build(model_config(puzzle_emb_dim=0))
    carry, _ = replace_finished(empty_carry(model, 4), model, CountingSampler(), 0)
    assert forward_backward(model, carry, train_config(model.config), 2).puzzle_gradient is None

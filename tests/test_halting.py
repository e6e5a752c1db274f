"""When a puzzle's loop ends in training, and the losses of the rules that decide it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from models.core import LoopedReasoner
from models.halting import FixedHalting, QHead, exploration_minimum
from tests.tiny import build, model_config, train_config
from trainer.config import TrainConfig
from trainer.loop import Carry, StepResult, empty_carry, mark_finished


def marked(
    model: LoopedReasoner, config: TrainConfig, done: list[int], logits: list[float] | None, seed: int = 0
) -> Carry:
    """The carry after a segment in which rows had `done` segments before and the head said `logits`."""
    batch = len(done)
    carry = empty_carry(model, batch)
    carry.segments, carry.finished = torch.tensor(done), torch.zeros(batch, dtype=torch.bool)
    memory = carry.memory.map(lambda t: t + 1)
    q = None if logits is None else torch.tensor(logits)
    result = StepResult(memory, q, torch.zeros(batch, dtype=torch.bool), {}, None)
    return mark_finished(carry, result, model, config, torch.Generator().manual_seed(seed))


def test_a_row_ends_when_willing_or_out_of_segments() -> None:
    """Positive logit: ends at once. Otherwise only after the last segment; never at the first one by force."""
    model = build(model_config())
    config = train_config(model.config, segments=3)
    after = marked(model, config, [0, 0, 1, 1, 2, 2], [0.1, -0.1, 2.0, -2.0, 0.5, -5.0])
    assert after.finished.tolist() == [True, False, True, False, True, True]
    assert after.segments.tolist() == [1, 1, 2, 2, 3, 3]
    assert torch.equal(after.memory.outer.h, empty_carry(model, 6).memory.outer.h + 1)  # the segment's memory moves on


def test_fixed_halting_runs_every_segment() -> None:
    """halting=fixed has no head, no loss and no early end."""
    model = build(model_config(halting="fixed"))
    assert isinstance(model.halting, FixedHalting) and not list(model.halting.parameters())
    assert model.decode(model.start(2))[1] is None
    assert model.halting.loss(None, torch.tensor([True])) == 0
    after = marked(model, train_config(model.config, segments=3), [0, 1, 2], None)
    assert after.finished.tolist() == [False, False, True]


def test_exploration_only_delays() -> None:
    """Exploration forbids an early end before a drawn segment in 2..segments; it never ends a row or goes past the last."""
    model = build(model_config())
    rows = 400
    always = train_config(model.config, segments=4, halt_exploration=1.0, global_batch=rows)
    first = marked(model, always, [0] * rows, [9.0] * rows)
    assert not first.finished.any()
    second = marked(model, always, [1] * rows, [9.0] * rows)
    assert 0.2 < second.finished.float().mean() < 0.5  # a third drew 2
    assert marked(model, always, [3] * rows, [9.0] * rows).finished.all()
    assert not marked(model, always, [1] * rows, [-9.0] * rows).finished.any()
    never = train_config(model.config, segments=4, halt_exploration=0.0)
    assert marked(model, never, [0] * rows, [9.0] * rows).finished.all()


def test_exploration_draws() -> None:
    """Uniform in 2..segments for the asked share of rows, 0 for the others; the same seed gives the same draws."""
    draws = exploration_minimum(20_000, 0.3, 5, torch.Generator().manual_seed(1))
    shares = torch.bincount(draws, minlength=6) / 20_000
    assert shares[0].item() == pytest.approx(0.7, abs=0.02) and shares[1] == 0
    assert shares[2:].tolist() == pytest.approx([0.3 / 4] * 4, abs=0.01)
    assert torch.equal(draws, exploration_minimum(20_000, 0.3, 5, torch.Generator().manual_seed(1)))
    assert not torch.equal(draws, exploration_minimum(20_000, 0.3, 5, torch.Generator().manual_seed(2)))
    assert exploration_minimum(10, 1.0, 1, torch.Generator()).max() <= 2  # one segment: nothing to delay to


def test_exploration_ignores_the_global_generator() -> None:
    """Draws come from the run's own generator, so that evaluation or augmentation cannot shift them."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    exploration_minimum(10, 0.5, 3, torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_head_starts_unwilling() -> None:
    """Weight 0 and bias -5: nothing halts before the head has learned."""
    head = QHead(8)
    state = torch.randn(5, 8)
    logit: Any = head.read(state)
    assert logit.tolist() == [-5.0] * 5
    assert not head.wants_to_halt(logit, None).any()
    assert head.wants_to_halt(torch.tensor([0.0, 1e-6, -1e-6]), None).tolist() == [False, True, False]


def test_head_loss_is_binary_cross_entropy() -> None:
    """Against "exactly right", summed over puzzles; the second output is not trained."""
    head = QHead(4)
    with torch.no_grad():
        head.head.weight.normal_()
    state, correct = torch.randn(3, 4), torch.tensor([True, False, True])
    logit = head.read(state)
    assert logit is not None
    loss = head.loss(logit, correct)
    p = [1 / (1 + math.exp(-value)) for value in logit.tolist()]
    assert loss.item() == pytest.approx(-(math.log(p[0]) + math.log(1 - p[1]) + math.log(p[2])), rel=1e-5)
    loss.backward()
    weight: Tensor | None = head.head.weight.grad
    assert weight is not None and weight[0].abs().max() > 0 and (weight[1] == 0).all()

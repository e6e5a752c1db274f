"""Equality with the released FPRM: block, solver, training segment, halting and row replacement.

Tolerances are the fixtures' own: outputs 1e-4 absolute, a gradient 1e-4 of its norm plus 1e-6, decisions exact.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data.arrays import Split
from models.connections import DampedFixedPoint, FixedPointMemory
from models.core import LoopedReasoner
from models.halting import ResidualHalting
from tests.parity import build_case, facts, fprm_connection, fprm_parts, same_gradients, tensors
from tests.runs import BOX4, puzzles
from tests.test_parity import TraceSampler, near
from tests.tiny import damped, train_config
from trainer.evaluator import Depth, evaluate
from trainer.loop import empty_carry, forward_backward, mark_finished, replace_finished
from trainer.optim import build_optimizer

BY_CASE = pytest.mark.parametrize("case", ["fprm_conv1d", "fprm_conv2d"])


def released(case: str) -> LoopedReasoner:
    config = facts(case)["config"]
    return build_case(case, fprm_connection(config), **fprm_parts(config))


def same_solver(memory: FixedPointMemory, io: dict[str, Tensor], at: str) -> None:
    near(memory.residual, io[f"{at}.residues"], f"{at} residual")
    near(memory.best, io[f"{at}.best_residues"], f"{at} best residual")
    near(memory.step_size, io[f"{at}.stepsize"].flatten(), f"{at} step size")
    assert torch.equal(memory.patience, io[f"{at}.patience"]), at


@BY_CASE
@torch.no_grad()
def test_single_steps_of_evaluation(case: str) -> None:
    """Twelve steps of one block application each: states, residuals, step sizes, patience, answers."""
    model, io = released(case).eval(), tensors(case, ".io")
    x = model.encode(io["inputs"], model.puzzle_rows(io["puzzle_identifiers"]))
    memory = model.start(4)
    for step in range(12):
        memory, at = model.segment(memory, x, 1, 1), f"eval.{step}"
        logits, q = model.decode(memory)
        assert q is not None
        near(memory.outer.h, io[f"{at}.y"], f"{at} state")
        near(logits, io[f"{at}.logits"], f"{at} logits")
        near(q, io[f"{at}.q_halt_logits"], f"{at} halting logit")
        same_solver(memory.outer, io, at)
    assert facts(case)["solver_events"]["stepsize_reductions_in_eval_trace"] > 0


# --- halting of whole batches ----------------------------------------------------------------------------------------


def split_of(io: dict[str, Tensor]) -> Split:
    """The case's four puzzles; their labels do not matter here."""
    tokens, nothing = io["inputs"].numpy().astype(np.uint8), np.zeros(4, np.int32)
    return Split(tokens, tokens, nothing, io["puzzle_identifiers"].numpy())


def steps_of(memories: list[FixedPointMemory], rows: list[int], threshold: float, smallest: float) -> int:
    """Steps after which a batch of these rows stops, from each row's own memory after 1, 2, ... steps."""
    for steps, memory in enumerate(memories, start=1):
        if memory.residual[rows].max() < threshold or memory.step_size[rows].max() < smallest:
            return steps
    return len(memories)


@torch.no_grad()
def own_run(model: LoopedReasoner, split: Split, cap: int) -> tuple[list[FixedPointMemory], list[np.ndarray]]:
    """Every row's memory and answer after 1, 2, ... steps; no row reads another."""
    x = model.encode(torch.from_numpy(split.inputs), model.puzzle_rows(torch.from_numpy(split.puzzle_ids)))
    memory, memories, answers = model.eval().start(4), [], []
    for _ in range(cap):
        memory = model.segment(memory, x, 1, 1)
        memories.append(memory.outer)
        answers.append(model.decode(memory)[0].argmax(-1).numpy())
    return memories, answers


@BY_CASE
def test_a_batch_runs_until_its_slowest_puzzle_settles(case: str) -> None:
    """eval.halting=batch_residual is the released evaluation: the same number of steps, and the same answers."""
    model, io = released(case), tensors(case, ".io")
    for decode in ("segment", "outer_update"):
        result = evaluate(model, split_of(io), BOX4, Depth(1, 1, 1000), decode=decode, halting="batch_residual")
        assert result.segments.tolist() == [int(io["evalrun.n_segments"])] * 4 and len(result.rows) == 1000
        assert np.array_equal(result.answers, io["evalrun.preds"].numpy())
    memory = own_run(model, split_of(io), int(io["evalrun.n_segments"]))[0][-1]
    near(memory.h, io["evalrun.y"], "state")
    same_solver(memory, io, "evalrun")


@BY_CASE
@pytest.mark.parametrize(
    "changes",
    [{}, {"decay_eval": 0.5, "threshold": 1e-9, "smallest_step": 0.1}, {"decay_eval": 0.8, "threshold": 0.02}],
    ids=["released", "steps_shrink", "slower"],
)
def test_batch_mates_decide_together(case: str, changes: dict[str, Any]) -> None:
    """In batches of 1, 2, 3 and 4: the steps and answers that each row's own run gives, whichever rule ends it, and
    whatever fills up the last batch. Where steps shrink, they really do; alone, rows stop at different times."""
    config = facts(case)["config"]
    connection = damped(patience=5) if not changes else damped(patience=3, **changes)
    model, split, cap = build_case(case, connection, **fprm_parts(config)), split_of(tensors(case, ".io")), 80
    memories, answers = own_run(model, split, cap)
    for batch_size in (1, 2, 3, 4):
        result = evaluate(model, split, BOX4, Depth(1, 1, cap), halting="batch_residual", batch_size=batch_size)
        for first in range(0, 4, batch_size):
            rows = list(range(first, min(first + batch_size, 4)))
            steps = steps_of(memories, rows, connection.threshold, connection.smallest_step)
            assert result.segments[rows].tolist() == [steps] * len(rows)
            assert np.array_equal(result.answers[rows], answers[steps - 1][rows])
        assert batch_size > 1 or len(set(result.segments.tolist())) > 1
        assert result.segments.min() < cap or batch_size > 1
    if changes:
        assert memories[-1].step_size.min() < 0.7
    each = evaluate(model, split, BOX4, Depth(1, 1, cap), halting="on", batch_size=3)
    assert np.array_equal(
        each.segments, evaluate(model, split, BOX4, Depth(1, 1, cap), halting="batch_residual", batch_size=1).segments
    )


def test_one_rule_must_hold_for_all_rows_and_filler_does_not_count() -> None:
    """One row at rest and one too slow to get there: each has settled, the batch has not. A row left out of count may move."""
    rule = released("fprm_conv2d").halting
    assert isinstance(rule, ResidualHalting)
    h, both = torch.zeros(2, 1, 1), torch.tensor([True, True])

    def memory(residual: list[float], step: list[float]) -> FixedPointMemory:
        return FixedPointMemory(h, torch.tensor(step), torch.tensor(residual), torch.tensor(residual), torch.ones(2))

    mixed = memory([0.05, 0.5], [1.0, 1e-4])
    assert rule.wants_to_halt(None, mixed).all() and not rule.batch_wants_to_halt(mixed, both)
    assert rule.batch_wants_to_halt(mixed, torch.tensor([True, False]))
    assert rule.batch_wants_to_halt(mixed, torch.tensor([False, True]))
    assert rule.batch_wants_to_halt(memory([0.05, 0.06], [1.0, 1.0]), both)
    assert rule.batch_wants_to_halt(memory([0.5, 0.6], [1e-4, 1e-4]), both)


@BY_CASE
def test_training_segment(case: str) -> None:
    """Six differentiated steps: losses and every gradient, the convolution's and the scales' among them."""
    model, io, told = released(case).train(), tensors(case, ".io"), facts(case)["config"]
    config = train_config(model.config, H_cycles=1, L_cycles=told["n_backwards_L"], global_batch=4)
    carry = empty_carry(model, 4)
    carry.tokens, carry.labels, carry.puzzle_ids = io["inputs"], io["labels"].long(), io["puzzle_identifiers"]
    result = forward_backward(model, carry, config, 4)
    assert result.halt_logit is not None
    near(model.decode(result.memory)[0].detach(), io["train.logits"], "logits")
    near(result.sums["cell_loss"], io["train.lm_loss"], "cell loss")
    near(result.sums["halt_loss"].float(), io["train.q_halt_loss"], "halting loss")
    same_solver(result.memory.outer, io, "train")
    same_gradients(case, model, result.puzzle_gradient)


@BY_CASE
def test_rows_are_replaced_when_they_settle(case: str) -> None:
    """Six training steps: rows halt by their own residual or at the cap, and fresh ones start from the stored vector."""
    model, io, told = released(case).train(), tensors(case, ".io"), facts(case)["config"]
    config = train_config(
        model.config,
        H_cycles=1,
        L_cycles=told["n_backwards_L"],
        segments=told["max_iter"],
        global_batch=4,
        halt_exploration=0.0,
    )
    sampler, exploration = TraceSampler(io), torch.Generator().manual_seed(0)
    carry, drawn = empty_carry(model, 4), 0
    for step in range(6):
        sampler.step, sampler.rows, at = step, carry.finished, f"act.{step}"
        carry, drawn = replace_finished(carry, model, sampler, drawn)
        assert torch.equal(carry.tokens.int(), io[f"{at}.current_data.inputs"])
        result = forward_backward(model, carry, config, 4)
        near(model.decode(result.memory)[0].detach(), io[f"{at}.logits"], f"{at} logits")
        near(result.sums["cell_loss"] + 0.5 * result.sums["halt_loss"], io[f"{at}.masked_full_loss"], f"{at} loss")
        same_solver(result.memory.outer, io, at)
        carry = mark_finished(carry, result, model, config, exploration)
        assert torch.equal(carry.segments.int(), io[f"{at}.steps"])
        assert torch.equal(carry.finished, io[f"{at}.halted"])


def test_scales_take_no_weight_decay() -> None:
    model = released("fprm_conv2d")
    groups = build_optimizer(model, train_config(model.config).schedule).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    spared = {names[id(p)] for group in groups if group["weight_decay"] == 0 for p in group["params"]}
    assert spared == {"block.raw_alpha_1", "block.raw_alpha_2"}


def test_evaluation_in_the_midst_of_training_uses_its_own_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    model, modes, step = released("fprm_conv2d").train(), [], DampedFixedPoint.step

    def watched(self: DampedFixedPoint, memory: FixedPointMemory, z: Tensor) -> FixedPointMemory:
        modes.append(self.training)
        return step(self, memory, z)

    monkeypatch.setattr(DampedFixedPoint, "step", watched)
    evaluate(model, puzzles(BOX4, 2), BOX4, Depth(1, 1, 3))
    assert modes == [False] * 3 and model.training


def test_noisy_starts_are_the_puzzles_own() -> None:
    """Any batch size gives the same answers, and another row's noise another state."""
    config = facts("fprm_conv2d")["config"]
    model = build_case("fprm_conv2d", fprm_connection(config), **fprm_parts(config) | {"initial_state": "noise"})
    split = puzzles(BOX4, 5)
    answers = [evaluate(model, split, BOX4, Depth(1, 1, 2), batch_size=size).answers for size in (1, 2, 5)]
    assert all((answers[0] == other).all() for other in answers[1:])
    first, again, other = (model.start(1, torch.tensor([key])).outer.h for key in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(first[:, 0], first[:, 1])

"""Equality with the released FPRM: block, solver, training segment, halting and row replacement.

Tolerances are the fixtures' own: outputs 1e-4 absolute, a gradient 1e-4 of its norm plus 1e-6, decisions exact.
"""

import pytest
import torch
from torch import Tensor

from models.connections import DampedFixedPoint, FixedPointMemory, settled
from models.core import LoopedReasoner
from tests.parity import build_case, facts, fprm_connection, fprm_parts, same_gradients, tensors
from tests.runs import BOX4, puzzles
from tests.test_parity import TraceSampler, near
from tests.tiny import train_config
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


@BY_CASE
@torch.no_grad()
def test_a_batch_runs_until_its_slowest_puzzle_settles(case: str) -> None:
    """The released evaluation, which halts whole batches: the same number of steps, and the same answers."""
    model, io = released(case).eval(), tensors(case, ".io")
    x = model.encode(io["inputs"], model.puzzle_rows(io["puzzle_identifiers"]))
    memory, steps, connection = model.start(4), 0, fprm_connection(facts(case)["config"])
    while steps == 0 or not settled(memory.outer, connection).all():
        memory, steps = model.segment(memory, x, 1, 1), steps + 1
    assert steps == io["evalrun.n_segments"]
    near(memory.outer.h, io["evalrun.y"], "state")
    same_solver(memory.outer, io, "evalrun")
    assert torch.equal(model.decode(memory)[0].argmax(-1), io["evalrun.preds"])


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

"""Every model with every connection on every axis: it trains, replaces rows, and evaluates each puzzle by itself."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.blocks import Block
from models.config import ConnectionConfig, ModelConfig, ResidualBlockConfig, TiedBlockConfig
from models.core import LoopedReasoner
from tests.runs import BOX4, puzzles, steady
from tests.test_carry import FINISHED, CountingSampler, tensors
from tests.tiny import (
    CARRY_LAST,
    build,
    constant_step,
    damped,
    injection,
    model_config,
    noisy,
    parameter_gradients,
    residual,
    train_config,
)
from trainer.evaluator import Depth, evaluate
from trainer.loop import empty_carry, forward_backward, mark_finished, replace_finished
from trainer.optim import build_optimizer, set_lr

CONNECTIONS: dict[str, ConnectionConfig] = {
    "carry_last": CARRY_LAST,
    "constant_step": constant_step(0.5),
    "learned_step": constant_step(0.5, learned=True),
    "residual": residual(),
    "full_residual": residual(full=True),
    "damped": damped(),
    "noisy": noisy(),
}
ODD: dict[str, Any] = {"hidden_size": 15, "num_heads": 3, "positions": "learned", "ffn_multiple": 1}


def ordinary(kind: Any, layer_scale: float | None = None) -> dict[str, Any]:
    return {"recursion": "flat", "block": ResidualBlockConfig(kind=kind, layer_scale=layer_scale)}


def tied(convolution: Any, kernel: int, norm: Any) -> dict[str, Any]:
    block = TiedBlockConfig(kind="tied", alpha_1=0.75, alpha_2=0.25, convolution=convolution, kernel=kernel, norm=norm)
    return {"recursion": "flat", "block": block, "mixer": "attention", "initial_state": "noise"}


MODELS: dict[str, dict[str, Any]] = {
    "hrm": {"levels": "untied"},
    "hrm_odd": {"levels": "untied", **ODD},
    "hrm_attention": {"levels": "untied", "mixer": "attention"},
    "hrm_attention_odd": {"levels": "untied", "mixer": "attention", **ODD},
    "looped_post": ordinary("post_norm"),
    "looped_post_scaled": ordinary("post_norm", 0.5),
    "looped_pre": ordinary("pre_norm"),
    "looped_pre_scaled_odd": ordinary("pre_norm", 0.1) | ODD,
    "looped_pre_attention": ordinary("pre_norm") | {"mixer": "attention"},
    "looped_pre_attention_scaled": ordinary("pre_norm", 0.1) | {"mixer": "attention"},
    "looped_post_attention_scaled_odd": ordinary("post_norm", 0.5) | {"mixer": "attention"} | ODD,
    "fprm_grid": tied("grid", 3, "none"),
    "fprm_causal_odd": tied("causal", 4, "output") | ODD,
}
CASES = [
    pytest.param(MODELS[model], CONNECTIONS[connection], axes, id=f"{model}-{connection}-{axes}")
    for model in MODELS
    for connection in CONNECTIONS
    for axes in (("inner", "outer", "both") if model.startswith("hrm") else ("both",))
]
BY_CASE = pytest.mark.parametrize(("model", "connection", "axes"), CASES)


def settings(model: dict[str, Any], connection: ConnectionConfig, axes: str) -> ModelConfig:
    return model_config(connection, axes=axes, **model)


@BY_CASE
def test_trains_and_replaces_rows(model: dict[str, Any], connection: ConnectionConfig, axes: str) -> None:
    """Two optimizer steps: finite losses that differ, a gradient for every parameter, all of them moved; then a finished
    row gets fresh memory and its neighbours keep theirs bit for bit."""
    made = build(settings(model, connection, axes)).train()
    config, sampler = train_config(made.config, segments=9, global_batch=4), CountingSampler()
    optimizer = build_optimizer(made, config.schedule)
    carry, drawn = replace_finished(empty_carry(made, 4), made, sampler, 0)
    before, losses = {name: p.detach().clone() for name, p in made.named_parameters()}, []
    for _ in range(2):
        result = forward_backward(made, carry, config, 3)
        losses.append(float(result.sums["cell_loss"]))
        for name, gradient in parameter_gradients(made).items():
            assert torch.isfinite(gradient).all() and gradient.norm() > 0, name
        set_lr(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        carry = mark_finished(carry, result, made, config, torch.Generator())
    assert np.isfinite(losses).all() and losses[0] != losses[1]
    for name, parameter in made.named_parameters():
        assert not torch.equal(parameter, before[name]), name

    carry.finished = FINISHED.clone()
    old = [tensor.clone() for tensor in tensors(carry.memory)]
    carry, _ = replace_finished(carry, made, sampler, drawn)
    fresh = tensors(made.start(4, carry.puzzle_ids.long()))
    for mine, theirs in zip(tensors(carry.memory), old, strict=True):
        assert torch.equal(mine[~FINISHED], theirs[~FINISHED])
    if connection.kind != "full_attention_residual":  # which hides old candidates instead of dropping them
        for mine, theirs in zip(tensors(carry.memory), fresh, strict=True):
            assert torch.equal(mine[FINISHED], theirs[FINISHED])


@BY_CASE
def test_evaluates_each_puzzle_by_itself(model: dict[str, Any], connection: ConnectionConfig, axes: str) -> None:
    """Five puzzles in batches of 5, 1, 3 and 16: the same answers."""
    changes = dict(model)
    made = steady(connection, changes.pop("mixer", "mlp"), axes=axes, **changes)
    split, depth = puzzles(BOX4, 5), Depth(2, 2, 5)
    whole = evaluate(made, split, BOX4, depth, batch_size=5)
    for batch_size in (1, 3, 16):
        assert np.array_equal(evaluate(made, split, BOX4, depth, batch_size=batch_size).answers, whole.answers)
    assert len({answer.tobytes() for answer in whole.answers}) > 1


# --- untied levels ---------------------------------------------------------------------------------------------------


def one_segment(model: LoopedReasoner) -> dict[str, Tensor]:
    config = train_config(model.config, global_batch=4)
    carry, _ = replace_finished(empty_carry(model, 4), model, CountingSampler(), 0)
    forward_backward(model, carry, config, 4)
    return parameter_gradients(model)


@pytest.mark.parametrize("mixer", ["mlp", "attention"])
def test_untied_levels_have_a_block_each(mixer: str) -> None:
    """Two blocks with different numbers, the inner one called L_cycles times as often, each with its own gradient."""
    model = build(model_config(mixer=mixer, levels="untied"))
    assert isinstance(model.block, Block) and isinstance(model.outer_block, Block)
    calls: list[str] = []
    model.block.register_forward_hook(lambda *_: calls.append("inner"))
    model.outer_block.register_forward_hook(lambda *_: calls.append("outer"))
    gradients = one_segment(model)
    assert calls == (["inner"] * 2 + ["outer"]) * 2
    names = [name.removeprefix("block.") for name in gradients if name.startswith("block.")]
    assert len(names) == len([name for name in gradients if name.startswith("outer_block.")]) > 0
    for name in names:
        inner, outer = gradients[f"block.{name}"], gradients[f"outer_block.{name}"]
        assert inner.norm() > 0 and outer.norm() > 0 and not torch.allclose(inner, outer), name
        assert not torch.equal(model.get_parameter(f"block.{name}"), model.get_parameter(f"outer_block.{name}")), name


@pytest.mark.parametrize("mixer", ["mlp", "attention"])
@pytest.mark.parametrize("connection", CONNECTIONS.values(), ids=CONNECTIONS.keys())
def test_untied_levels_with_equal_weights_are_tied_ones(connection: ConnectionConfig, mixer: str) -> None:
    """HRM with both blocks alike answers as TRM bit for bit, and its two gradients add up to TRM's."""
    trm, hrm = build(model_config(connection, mixer)), build(model_config(connection, mixer, levels="untied"))
    weights = trm.state_dict()
    shared = {f"outer_{name}": value for name, value in weights.items() if name.startswith("block.")}
    hrm.load_state_dict(weights | shared)
    with torch.no_grad():
        here, there = (m.segment(m.start(3), injection(m, 3), 2, 2) for m in (trm, hrm))
    assert all(torch.equal(a, b) for a, b in zip(tensors(here), tensors(there), strict=True))
    tied_gradients, untied = one_segment(trm), one_segment(hrm)
    for name, gradient in tied_gradients.items():
        got = untied[name] + untied[f"outer_{name}"] if name.startswith("block.") else untied[name]
        assert (got - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name

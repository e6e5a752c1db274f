"""Compute types and the compiler change speed, not answers."""

import copy
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.config import ConnectionConfig
from models.connections import DecayMemory, FixedPointMemory, HistoryMemory, NoisyMemory, StateMemory
from models.core import LoopedReasoner
from models.losses import segment_loss
from tests.tiny import (
    CARRY_LAST,
    build,
    constant_step,
    damped,
    model_config,
    noisy,
    parameter_gradients,
    puzzles,
    residual,
)
from trainer.config import TrainerConfig
from trainer.runtime import set_up

CONNECTIONS = [CARRY_LAST, constant_step(0.5), residual(), residual(full=True), damped(), noisy()]
BY_CONNECTION = pytest.mark.parametrize("connection", CONNECTIONS, ids=lambda c: c.kind)
MIXERS = pytest.mark.parametrize("mixer", ["mlp", "attention"])


def one_step(model: LoopedReasoner, segments: int = 2) -> tuple[Any, Tensor, dict[str, Tensor]]:
    """Memory, logits and gradients after a few segments of which the last is trained."""
    tokens, labels, ids = puzzles(4)
    x = model.encode(tokens, model.puzzle_rows(ids))
    memory = model.start(4)
    for _ in range(segments - 1):
        memory = model.segment(memory, x.detach(), 2, 2)
    memory = model.segment(memory, x, 2, 2, grad_outer_cycles=1)
    logits, q = model.decode(memory)
    loss = segment_loss(logits, labels)
    (loss.cells + 0.5 * model.halting.loss(q, loss.exact)).backward()
    return memory, logits.detach(), parameter_gradients(model)


@MIXERS
@BY_CONNECTION
def test_bfloat16_compute(connection: ConnectionConfig, mixer: str) -> None:
    """The block runs in bfloat16; weights, gradients, averaging memories and the halting logit stay float32."""
    model = build(model_config(connection, mixer))
    exact = copy.deepcopy(model)
    model.compute_dtype = torch.bfloat16
    memory, logits, gradients = one_step(model)
    assert logits.dtype == torch.bfloat16
    kept = torch.bfloat16 if connection.kind == "carry_last" else torch.float32
    assert {t.dtype for t in (*memory.inner, *memory.outer) if t.is_floating_point()} == {kept}
    assert isinstance(memory.outer, StateMemory | DecayMemory | HistoryMemory | FixedPointMemory | NoisyMemory)
    q = model.decode(memory)[1]
    assert q is not None and q.dtype == torch.float32
    assert {g.dtype for g in gradients.values()} == {torch.float32}
    assert all(torch.isfinite(g).all() for g in gradients.values())
    _, expected, _ = one_step(exact)
    assert (logits.float() - expected).norm() < 0.1 * expected.norm()


class NoDouble(TorchDispatchMode):
    """Refuses any operation that makes a 64-bit float tensor, as MPS does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            assert not (isinstance(value, Tensor) and value.dtype == torch.float64), f"{func} makes float64"
        return out


@MIXERS
@BY_CONNECTION
def test_no_64_bit_float(connection: ConnectionConfig, mixer: str) -> None:
    """Apple GPUs have no 64-bit floats: none may appear in a training step of the model, forward or backward."""
    model = build(model_config(connection, mixer))
    with NoDouble():
        one_step(model)
        with pytest.raises(AssertionError, match="makes float64"):
            torch.zeros(1).double()


def test_mode_sees_backward() -> None:
    """The check above would notice a float64 in a gradient."""
    x = torch.ones(1, requires_grad=True)
    with pytest.raises(AssertionError), NoDouble():
        (x.double() * 2).float().sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("connection", [residual(), noisy()], ids=["residual", "noisy"])
def test_compiled_updates_give_the_same_gradients(connection: ConnectionConfig) -> None:
    """Compiling changes neither the names in the state dict nor the gradients of a step, nor the noise on the way."""
    model = build(model_config(connection, layers=1))
    names = list(model.state_dict())
    memory, logits, gradients = one_step(model)
    if shutil.which("g++") or shutil.which("clang++") or shutil.which("c++"):
        torch.compiler.reset()
        model.compile_updates()
        assert list(model.state_dict()) == names
        model.zero_grad()
        compiled_memory, compiled_logits, compiled = one_step(model)
        assert [type(part) for part in compiled_memory] == [type(part) for part in memory]
        torch.testing.assert_close(compiled_logits, logits, rtol=0, atol=1e-4)
        for name, gradient in gradients.items():
            assert (compiled[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name
    else:
        settings = {"device": "cpu", "dtype": "float32", "micro_batch": 1, "log_every": 1, "eval_every": 0}
        assert not set_up(TrainerConfig(compile="auto", checkpoint_every=1, **settings)).compile

"""Equality with the released TRM (outputs, gradients, row replacement) and with independent InfiLoop computations.

Tolerances are the fixtures' own: outputs 1e-4 absolute, a gradient 1e-4 of its norm plus 1e-6, decisions exact.
"""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from data.sampler import Batch, TrainSampler
from models.config import ConnectionConfig
from models.connections import AttentionResidual, DecayMemory, FullAttentionResidual
from models.core import LoopedReasoner, Memory
from tests.parity import build_case, facts, same_gradients, tensors
from tests.tiny import CARRY_LAST, assert_close, residual, train_config
from trainer.loop import empty_carry, forward_backward, mark_finished, replace_finished

TRM = ("trm_att", "trm_mlp")
INFILOOP = ("infiloop_att", "infiloop_mlp_outer_only")
CASES = [(case, CARRY_LAST) for case in TRM] + [(c, residual(full=f)) for c in INFILOOP for f in (False, True)]
BY_CASE = pytest.mark.parametrize(("case", "connection"), CASES, ids=lambda v: v if isinstance(v, str) else v.kind)


def near(mine: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-4, msg=lambda text: f"{what}: {text}")


def depth(case: str) -> tuple[int, int]:
    config = facts(case)["config"]
    return config["H_cycles"], config["L_cycles"]


def recorded_steps(connection: AttentionResidual) -> list[Tensor]:
    """Step sizes e_t / D_t of the updates to come, read off the memory each update leaves behind."""
    sizes: list[Tensor] = []
    step: Callable[[DecayMemory, Tensor], DecayMemory] = connection.step

    def recording(memory: DecayMemory, z: Tensor) -> DecayMemory:
        after = step(memory, z)
        sizes.append(torch.exp(connection.score(z) - after.log_d))
        return after

    connection.step = recording
    return sizes


@BY_CASE
@torch.no_grad()
def test_three_segments(case: str, connection: ConnectionConfig) -> None:
    """Outputs, states, memories and step sizes after each of three segments: the forward recursion is the authors'."""
    model, io = build_case(case, connection), tensors(case, ".io")
    x = model.encode(io["inputs"], model.puzzle_rows(io["puzzle_identifiers"]))
    memory = model.start(len(x))
    axes = {a: m for a, m in (("inner", model.inner), ("outer", model.outer)) if isinstance(m, AttentionResidual)}
    steps = {axis: recorded_steps(module) for axis, module in axes.items()}
    for segment in range(3):
        memory = model.segment(memory, x, *depth(case))
        logits, q = model.decode(memory)
        at = f"eval.{segment}" if case in TRM else f"eval.seg{segment}"
        states = ("z_L", "z_H") if case in TRM else ("inner.h", "outer.h")
        assert q is not None
        near(logits, io[f"{at}.logits"], f"{at} logits")
        near(q, io[f"{at}.q_halt_logits"], f"{at} halting logit")
        near(memory.inner.h, io[f"{at}.{states[0]}"], f"{at} inner state")
        near(memory.outer.h, io[f"{at}.{states[1]}"], f"{at} outer state")
        for axis in axes:
            near(getattr(memory, axis).log_d, io[f"{at}.{axis}.log_d"], f"{at} {axis} log D")
            near(torch.stack(steps[axis]), io[f"{at}.{axis}.gamma"], f"{at} {axis} step sizes")
            steps[axis].clear()


@BY_CASE
def test_training_loss_and_gradients(case: str, connection: ConnectionConfig) -> None:
    """The trainer's pass over one segment: loss and every gradient, so truncation and the halting loss are the authors'."""
    model, io = build_case(case, connection), tensors(case, ".io")
    H, L = depth(case)
    config, carry = train_config(model.config, H_cycles=H, L_cycles=L, global_batch=4), empty_carry(model, 4)
    carry.tokens, carry.labels, carry.puzzle_ids = io["inputs"], io["labels"].long(), io["puzzle_identifiers"]
    result = forward_backward(model, carry, config, 4)

    assert result.halt_logit is not None
    near(model.decode(result.memory)[0].detach(), io["train.logits"], "logits")
    near(result.halt_logit, io["train.q_halt_logits"], "halting logit")
    near(result.sums["cell_loss"], io["train.lm_loss"], "cell loss")
    near(result.sums["halt_loss"].float(), io["train.q_halt_loss"], "halting loss")
    near(result.sums["cell_loss"] + 0.5 * result.sums["halt_loss"], io["train.loss"], "loss")
    same_gradients(case, model, result.puzzle_gradient)


class TraceSampler(TrainSampler):
    """Stands in for the sampler: step by step, row i of the fixture's batch for every finished row i."""

    def __init__(self, io: dict[str, Tensor]) -> None:
        self.io = io
        self.step = 0
        self.rows = torch.zeros(0, dtype=torch.bool)

    def draw(self, first: int, count: int) -> Batch:
        batch = {
            k: self.io[f"act_batch.{self.step}.{k}"][self.rows] for k in ("inputs", "labels", "puzzle_identifiers")
        }
        assert len(batch["inputs"]) == count
        ids = batch["puzzle_identifiers"]
        return Batch(
            batch["inputs"].long(), batch["labels"].long(), ids, ids.long(), torch.zeros(count, dtype=torch.int64)
        )


@pytest.mark.parametrize("case", TRM)
def test_rows_are_replaced_as_in_the_released_wrapper(case: str) -> None:
    """Six training steps without an optimizer: which rows halt, what replaces them, step counts, losses, metrics."""
    model, io = build_case(case, CARRY_LAST), tensors(case, ".io")
    told = facts(case)["config"]
    H, L = depth(case)
    config = train_config(model.config, H_cycles=H, L_cycles=L, segments=told["halt_max_steps"], global_batch=4)
    sampler, exploration = TraceSampler(io), torch.Generator().manual_seed(0)
    carry, drawn = empty_carry(model, 4), 0
    for step in range(6):
        sampler.step, sampler.rows = step, carry.finished
        carry, drawn = replace_finished(carry, model, sampler, drawn)
        at = f"act.{step}"
        assert torch.equal(carry.tokens.int(), io[f"{at}.current_data.inputs"])
        assert torch.equal(carry.labels.int(), io[f"{at}.current_data.labels"])
        assert torch.equal(carry.puzzle_ids, io[f"{at}.current_data.puzzle_identifiers"])

        result = forward_backward(model, carry, config, 4)
        assert result.halt_logit is not None
        near(model.decode(result.memory)[0].detach(), io[f"{at}.logits"], f"{at} logits")
        near(result.halt_logit, io[f"{at}.q_halt_logits"], f"{at} halting logit")
        near(result.sums["cell_loss"] + 0.5 * result.sums["halt_loss"], io[f"{at}.loss"], f"{at} loss")

        carry = mark_finished(carry, result, model, config, exploration)
        assert torch.equal(carry.segments.int(), io[f"{at}.steps"])
        assert torch.equal(carry.finished, io[f"{at}.halted"])
        counted = carry.finished & (carry.labels >= 0).any(-1)
        assert counted.sum() == io[f"{at}.metric.count"]
        assert (result.exact & counted).sum() == io[f"{at}.metric.exact_accuracy"]
        assert carry.segments[counted].sum() == io[f"{at}.metric.steps"]
        said = (result.halt_logit >= 0) == result.exact
        assert (said & counted).sum() == io[f"{at}.metric.q_halt_accuracy"]
    assert drawn == 4 + sum(int(io[f"act.{step}.halted"].sum()) for step in range(5))


# --- the attention residual alone, against the full form in float64 --------------------------------------------------

RESIDUAL = facts("attention_residual")["cases"]


def residual_case(
    case: str, form: type[AttentionResidual] | type[FullAttentionResidual], dtype: torch.dtype
) -> tuple[AttentionResidual | FullAttentionResidual, Tensor]:
    """The case's connection in `dtype`, and its lambda, a leaf."""
    told: dict[str, Any] = RESIDUAL[case]
    config = residual(told["beta"], beta="fixed", include_initial=told["include_initial"])
    connection = form(config, width=8, eps=facts("attention_residual")["rms_eps"]).to(dtype)
    lam = -torch.tensor(told["beta"], dtype=torch.float64).log().to(dtype)
    connection.fixed_lambda = lam.requires_grad_()
    assert connection.query is not None
    connection.query.data = (told["query_scale"] * tensors("attention_residual")["query"]).to(dtype)
    return connection, lam


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["f64", "f32"])
@pytest.mark.parametrize("form", [AttentionResidual, FullAttentionResidual])
@pytest.mark.parametrize("case", RESIDUAL)
def test_attention_residual(
    case: str,
    form: type[AttentionResidual] | type[FullAttentionResidual],
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """State and log D at all 64 steps and gradients of candidates, query and lambda: rule and numerics are right."""
    io = tensors("attention_residual")
    connection, lam = residual_case(case, form, dtype)
    z = io["z"].to(dtype).requires_grad_()
    memory: Any = connection.init(z[0])
    h, log_d = [memory.h], []

    def keep_log_d() -> None:
        log_d.append(torch.logsumexp(memory.s, 1) if form is FullAttentionResidual else memory.log_d)

    keep_log_d()
    for candidate in z[1:]:
        memory = connection.step(memory, candidate)
        h.append(memory.h)
        keep_log_d()
    (io["w"].to(dtype) * memory.h).sum().backward()

    first = 0 if connection.include_initial else 1
    assert_close(torch.stack(h)[first:].detach(), io[f"{case}.h"], tolerance, "h")
    assert_close(torch.stack(log_d)[first:].detach(), io[f"{case}.log_d"], tolerance, "log D")
    query = connection.query
    gradients = {"z": z.grad, "query": None if query is None else query.grad, "lambda": lam.grad}
    # Some gradients are small differences of large numbers, of which float32 keeps what the large ones leave.
    largest = max(io[f"{case}.grad_{name}"].abs().max().item() for name in gradients) if dtype == torch.float32 else 0
    for name, mine in gradients.items():
        assert mine is not None, name
        assert_close(mine, io[f"{case}.grad_{name}"], tolerance, f"gradient of {name}", least_scale=largest)


def test_released_model_is_reproduced_by_rows_alone() -> None:
    """Rows one at a time give what the batch gives: no row reads another."""
    model, io = build_case("trm_att", CARRY_LAST), tensors("trm_att", ".io")
    with torch.no_grad():
        for row in range(4):
            one = slice(row, row + 1)
            x = model.encode(io["inputs"][one], model.puzzle_rows(io["puzzle_identifiers"][one]))
            memory: Memory = model.segment(model.start(1), x, *depth("trm_att"))
            near(model.decode(memory)[0], io["eval.0.logits"][one], f"row {row}")


def test_fixture_models_are_ours() -> None:
    """The cases build the class the programs use, and in the InfiLoop ones the axes hold what the file says."""
    both, outer = (build_case(case, residual()) for case in INFILOOP)
    assert isinstance(both, LoopedReasoner)
    for model, case in ((both, "infiloop_att"), (outer, "infiloop_mlp_outer_only")):
        told = facts(case)
        for axis in told["axes"]:
            beta = cast(AttentionResidual, getattr(model, axis)).beta().item()
            assert beta == pytest.approx(told["beta"][axis], rel=1e-5)

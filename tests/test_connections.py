"""What every connection promises, whatever the candidates. Shapes: B puzzles, S positions, D width."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from models.config import AttentionResidualConfig, ConnectionConfig, ConstantStepConfig
from models.connections import (
    AttentionResidual,
    CarryLast,
    ConstantStep,
    DampedFixedPoint,
    FullAttentionResidual,
    NoisyRelaxation,
    build_connection,
)
from models.noise import normal
from models.ops import attention_residual_update
from tests.tiny import assert_close, constant_step, damped, noisy, residual

EPS = 1e-5
FORGETS_ALL = 1e-320
"""A beta0 so small that lambda (737) leaves nothing of the past in float32."""

seeds = st.integers(0, 2**31 - 1)
betas = st.sampled_from([1e-6, 0.1, 0.55, 0.9, 1.0, 1.82])
query_scales = st.sampled_from([0.0, 0.3, 3.0, 30.0])
lengths = st.integers(1, 24)


def candidates(seed: int, steps: int, width: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    """z_0 .. z_steps, [steps + 1, B=2, S=3, D], of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(steps + 1, 2, 3, width, generator=generator, dtype=dtype)
    return z * torch.exp(torch.randn(steps + 1, 2, 3, 1, generator=generator, dtype=dtype))


def made(
    config: ConnectionConfig,
    query_scale: float = 0.0,
    seed: int = 0,
    width: int = 6,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """The connection with a random query of the given scale."""
    connection: Any = build_connection(config, width, EPS).to(dtype)
    if getattr(connection, "query", None) is not None:
        query = torch.randn(width, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        connection.query.data = query_scale * query
    return connection


def run(connection: Any, z: Tensor) -> list[Any]:
    """Memories after 0, 1, ... steps."""
    memories = [connection.init(z[0])]
    for candidate in z[1:]:
        memories.append(connection.step(memories[-1], candidate))
    return memories


# --- attention residual ----------------------------------------------------------------------------------------------


@given(seeds, betas, query_scales, lengths, st.booleans(), st.booleans())
def test_streaming_equals_full(
    seed: int, beta: float, query_scale: float, steps: int, content_score: bool, include_initial: bool
) -> None:
    """States and gradients of candidates, query and decay, in float64: the stream is the softmax over all candidates."""
    z = candidates(seed, steps, dtype=torch.float64)
    weight = candidates(seed + 1, 0, dtype=torch.float64)[0]
    results = []
    for full in (False, True):
        config = residual(
            beta,
            full,
            beta="learned" if beta < 1 else "fixed",
            content_score=content_score,
            include_initial=include_initial,
        )
        connection = made(config, query_scale, seed, dtype=torch.float64)
        leaf = z.clone().requires_grad_()
        states = torch.stack([memory.h for memory in run(connection, leaf)])
        (weight * states[-1]).sum().backward()
        results.append([states.detach(), leaf.grad, *(p.grad for p in connection.parameters())])
    for streaming, full in zip(*results, strict=True):
        torch.testing.assert_close(streaming, full, rtol=1e-9, atol=1e-9)


@given(seeds, betas, query_scales, lengths, st.booleans())
@torch.no_grad()
def test_state_is_a_weighted_average(seed: int, beta: float, query_scale: float, steps: int, full: bool) -> None:
    """Step sizes lie in [0, 1] and no state is longer than the longest candidate: the loop cannot blow up."""
    z = candidates(seed, steps)
    connection = made(residual(beta, full, beta="fixed"), query_scale, seed)
    longest = z[0].norm(dim=-1)
    memories = run(connection, z)
    for before, after, candidate in zip(memories, memories[1:], z[1:], strict=False):
        log_d = torch.logsumexp(after.s, 1) if full else after.log_d
        step = torch.exp(connection.score(candidate) - log_d)
        assert (step >= 0).all() and (step <= 1 + 1e-4).all()
        moved = before.h + step[..., None] * (candidate - before.h)
        assert_close(after.h, moved, 1e-4, "h + g (z - h)", least_scale=candidate.abs().max().item())
        longest = torch.maximum(longest, candidate.norm(dim=-1))
        assert (after.h.norm(dim=-1) <= longest * (1 + 1e-5)).all()


@given(seeds, query_scales, lengths, st.booleans())
@torch.no_grad()
def test_infinite_decay_is_carry_last(seed: int, query_scale: float, steps: int, full: bool) -> None:
    """lambda -> infinity gives the last candidate bit for bit: h + g (z - h) would leave a rounding error at g = 1."""
    z = candidates(seed, steps)
    connection = made(residual(FORGETS_ALL, full, beta="fixed"), query_scale, seed)
    for memory, candidate in zip(run(connection, z), z, strict=True):
        assert torch.equal(memory.h, candidate)


@given(seeds, lengths, st.booleans(), st.booleans())
@torch.no_grad()
def test_equal_scores_without_decay_are_the_running_mean(seed: int, steps: int, full: bool, content: bool) -> None:
    """q = 0 and lambda = 0: the state is the mean of all candidates, the initial state among them."""
    z = candidates(seed, steps, dtype=torch.float64)
    connection = made(residual(1.0, full, beta="fixed", content_score=content), 0.0, dtype=torch.float64)
    for t, memory in enumerate(run(connection, z)):
        torch.testing.assert_close(memory.h, z[: t + 1].mean(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("content_score", [True, False])
def test_step_sizes_of_equal_scores(content_score: bool) -> None:
    """q starts at 0, and then the step sizes at beta 0.55 are 0.645, 0.540, 0.495, ... and tend to 1 - beta."""
    connection = made(residual(0.55, content_score=content_score))
    z = torch.zeros(61, 1, 1, 6)
    z[1:] = 1  # then 1 - h shrinks by 1 - g at every step
    h = torch.stack([memory.h[0, 0, 0] for memory in run(connection, z)]).double()
    steps = 1 - (1 - h[1:9]) / (1 - h[:8])
    D, expected = 1.0, []
    for _ in range(8):
        D = 0.55 * D + 1
        expected.append(1 / D)
    assert steps.tolist() == pytest.approx(expected, abs=1e-4)
    assert [round(s, 3) for s in expected[:3]] == [0.645, 0.540, 0.495]
    D_last = torch.exp(run(connection, z)[-1].log_d)
    assert (1 / D_last).item() == pytest.approx(1 - 0.55, abs=1e-6)


@given(seeds, st.sampled_from([0.1, 0.55, 1.82]), query_scales, lengths, st.booleans())
def test_initial_state_left_out(seed: int, beta: float, query_scale: float, steps: int, full: bool) -> None:
    """include_initial=false: h_1 = z_1 exactly, and z_0 leaves no trace in later states; by default it does."""
    z = candidates(seed, steps)
    other = torch.cat((z[:1] + 1, z[1:]))
    for include in (False, True):
        connection = made(residual(beta, full, beta="fixed", include_initial=include), query_scale, seed)
        here, there = run(connection, z), run(connection, other)
        assert torch.equal(here[1].h, z[1]) or include
        assert all(torch.equal(a.h, b.h) for a, b in zip(here[1:], there[1:], strict=True)) or include
        if include and query_scale <= 0.3:
            assert not torch.equal(here[1].h, there[1].h)
        leaf = z.clone().requires_grad_()
        run(connection, leaf)[-1].h.sum().backward()
        assert leaf.grad is not None and torch.isfinite(leaf.grad).all()
        assert include or (leaf.grad[0] == 0).all()


def test_never_nan_for_large_scores_and_long_runs() -> None:
    """Scores of +-80 for 100,000 steps: finite states and gradients, log D within 1e-3 of the exact sum at beta = 1."""
    steps, generator = 100_000, torch.Generator().manual_seed(0)
    patterns = torch.tensor([[80.0, 80.0], [-80.0, -80.0], [80.0, -80.0], [-80.0, 80.0], [0.0, 0.0]]).T.contiguous()
    z = torch.randn(2, 5, 3, generator=generator)
    exact = torch.logsumexp(patterns.double(), 0) + math.log(steps / 2)
    for beta, tolerance in ((1.0, 1e-3), (0.55, None), (1.82, None)):
        lam, count = torch.tensor(-math.log(beta)), steps if beta == 1 else steps // 20
        h, log_d = z[1], patterns[1]
        with torch.no_grad():
            for t in range(count - 1):
                h, log_d = attention_residual_update(h, log_d, z[t % 2], patterns[t % 2], lam)
        assert torch.isfinite(h).all() and torch.isfinite(log_d).all()
        if tolerance is not None:
            assert ((log_d.double() - exact).abs() <= tolerance * exact.abs()).all()
            assert (h.norm(dim=-1) <= z.norm(dim=-1).amax(0) * (1 + 1e-3)).all()
        leaves = [t.clone().requires_grad_() for t in (z, patterns, lam)]
        for t in range(100):
            h, log_d = attention_residual_update(h, log_d, leaves[0][t % 2], leaves[1][t % 2], leaves[2])
        (h.sum() + log_d.sum()).backward()
        for leaf in leaves:
            assert leaf.grad is not None and torch.isfinite(leaf.grad).all()


def test_score_reads_the_direction_only() -> None:
    """The score is query . RMSNorm(z): a candidate's size does not change it, and +-80 is reached as intended."""
    connection = made(residual(0.55), width=2)
    connection.query.data = torch.tensor([40.0, 40.0])
    z = torch.tensor([[[1.0, 1.0], [-3.0, -3.0], [2.0, -2.0]]])
    assert connection.score(z)[0].tolist() == pytest.approx([80, -80, 0], abs=1e-3)


def size_after(connection: Any, steps: int) -> int:
    memory = run(connection, candidates(0, steps))[-1]
    return sum(tensor.untyped_storage().nbytes() for tensor in memory)


@pytest.mark.parametrize("config", [residual(), residual(full=True), constant_step(0.5), noisy()], ids=lambda c: c.kind)
@torch.no_grad()
def test_memory_does_not_grow(config: ConnectionConfig) -> None:
    """Only the full form, the reference, may keep more after 200 steps than after 2."""
    connection = made(config)
    grown = size_after(connection, 200) / size_after(connection, 2)
    if config.kind == "full_attention_residual":
        assert grown > 30
    else:
        assert grown == 1


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("beta0", "beta"),
    [(0.10, "learned"), (0.55, "learned"), (0.90, "learned"), (0.1, "fixed"), (1.0, "fixed"), (1.82, "fixed")],
)
def test_beta_starts_at_beta0(beta0: float, beta: str, full: bool) -> None:
    """A fixed beta is not a parameter; a learned one is, next to the query, which starts at 0: D + 1 numbers."""
    connection: Any = build_connection(residual(beta0, full, beta=beta), 6, EPS)
    assert connection.beta().item() == pytest.approx(beta0, rel=1e-6)
    names = {name for name, _ in connection.named_parameters()}
    assert names == ({"query", "raw_decay"} if beta == "learned" else {"query"})
    assert connection.query.abs().max() == 0
    assert sum(p.numel() for p in connection.parameters()) == 6 + (beta == "learned")


@pytest.mark.parametrize("beta0", [1.0, 1.82])
def test_learned_beta_of_one_or_more_is_refused(beta0: float) -> None:
    """softplus cannot reach lambda <= 0; the message names both settings and the way out."""
    with pytest.raises(ValidationError, match=rf"beta0={beta0} with beta=learned.*use beta=fixed"):
        residual(beta0)


def test_without_content_score_there_is_no_query() -> None:
    """content_score=false trains the decay alone, and every candidate scores 0."""
    for full in (False, True):
        connection = made(residual(content_score=False, full=full))
        assert [name for name, _ in connection.named_parameters()] == ["raw_decay"]
        assert (connection.score(candidates(0, 0)[0]) == 0).all()


def test_memory_is_wide() -> None:
    """bfloat16 candidates leave float32 memories: sums over many steps would be lost in bfloat16."""
    z = candidates(0, 3).bfloat16()
    for config in (residual(), residual(full=True), constant_step(0.5), damped(), noisy()):
        for tensor in run(made(config), z)[-1]:
            assert tensor.dtype == torch.float32 or not tensor.is_floating_point()
    assert run(CarryLast(), z)[-1].h.dtype == torch.bfloat16


def test_restart_keeps_only_the_present_state() -> None:
    """h_0 := h and log D := its score, whatever came before; an initial state that does not count still does not."""
    z = candidates(0, 5)
    for full in (False, True):
        connection = made(residual(full=full), 1.0)
        memory = run(connection, z)[-1]
        again = connection.restart(memory)
        assert torch.equal(again.h, memory.h)
        expected = connection.step(connection.init(memory.h), z[1])
        assert torch.equal(connection.step(again, z[1]).h, expected.h)

        connection = made(residual(full=full, include_initial=False), 1.0)
        fresh = connection.restart(connection.init(z[0]))
        assert torch.equal(connection.step(fresh, z[1]).h, z[1])
        lived = connection.step(connection.restart(run(connection, z)[-1]), z[1])
        assert not torch.equal(lived.h, z[1])


# --- carry-last and constant step ------------------------------------------------------------------------------------


@given(seeds, lengths)
def test_constant_step_of_one_is_carry_last(seed: int, steps: int) -> None:
    """c = 1 gives the last candidate bit for bit, as carry-last does."""
    z = candidates(seed, steps)
    for connection in (CarryLast(), made(constant_step(1.0))):
        for memory, candidate in zip(run(connection, z), z, strict=True):
            assert torch.equal(memory.h, candidate)


@pytest.mark.parametrize("learned", [False, True])
def test_constant_step_is_an_exponential_average(learned: bool) -> None:
    """h_t = (1 - c) h_{t-1} + c z_t with c starting at `step`; learned, c is one number with a gradient."""
    z = candidates(0, 4)
    connection = made(constant_step(0.3, learned))
    h = z[0]
    for memory, candidate in zip(run(connection, z)[1:], z[1:], strict=True):
        h = 0.7 * h + 0.3 * candidate
        assert_close(memory.h.detach(), h, 1e-6)
    assert torch.as_tensor(connection.step_size()).item() == pytest.approx(0.3)
    assert [(n, p.numel()) for n, p in connection.named_parameters()] == ([("raw_step", 1)] if learned else [])
    if learned:
        run(connection, z)[-1].h.sum().backward()
        assert connection.raw_step.grad.abs() > 0


def test_learned_step_of_one_is_refused() -> None:
    with pytest.raises(ValidationError, match="learned=true"):
        constant_step(1.0, learned=True)


# --- noisy relaxation ------------------------------------------------------------------------------------------------


@given(seeds, lengths)
def test_relaxation_without_noise_is_a_constant_step(seed: int, steps: int) -> None:
    z = candidates(seed, steps)
    for mine, expected in zip(run(made(noisy(0.3, 0.0)), z), run(made(constant_step(0.3)), z), strict=True):
        assert_close(mine.h, expected.h, 1e-6)


def test_noise_comes_from_the_puzzles_key_step_by_step() -> None:
    """h_t = (1 - a) h_{t-1} + a z_t + sigma n, every n another one."""
    z, keys = candidates(0, 4), torch.tensor([7, 2**62 + 7])
    connection = made(noisy(0.8, 0.5))
    memory, h, drawn = connection.keyed(connection.init(z[0]), keys, None), z[0], []
    for candidate in z[1:]:
        drawn.append(normal(memory.stream, (3, 6)))
        memory = connection.step(memory, candidate)
        h = 0.2 * h + 0.8 * candidate + 0.5 * drawn[-1]
        assert_close(memory.h, h, 1e-6)
    for one in range(4):
        assert not any(torch.equal(drawn[one], drawn[other]) for other in range(one))
        assert not torch.equal(drawn[one][0], drawn[one][1])
    louder = connection.keyed(connection.init(z[0]), keys, 2.0)
    assert_close(connection.step(louder, z[1]).h - (0.2 * z[0] + 0.8 * z[1]), 2 * drawn[0], 1e-5)


def test_noise_of_a_step_is_not_drawn_again_after_a_restart() -> None:
    """Nothing but the state is remembered, so a restart changes nothing; the stream goes on."""
    connection = made(noisy())
    memory = run(connection, candidates(0, 3))[-1]
    assert all(torch.equal(a, b) for a, b in zip(connection.restart(memory), memory, strict=True))


def test_kinds_build_their_classes() -> None:
    """A row of a table must be able to name its connection."""
    assert isinstance(build_connection(residual(), 6, EPS), AttentionResidual)
    assert isinstance(build_connection(residual(full=True), 6, EPS), FullAttentionResidual)
    assert isinstance(build_connection(constant_step(0.5), 6, EPS), ConstantStep)
    assert isinstance(build_connection(damped(), 6, EPS), DampedFixedPoint)
    assert isinstance(build_connection(noisy(), 6, EPS), NoisyRelaxation)
    for config, unknown in ((AttentionResidualConfig, "qery"), (ConstantStepConfig, "stepp")):
        with pytest.raises(ValidationError, match=unknown):
            config.model_validate({"kind": "attention_residual", unknown: 1})

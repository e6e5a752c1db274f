"""Connections: the rule that turns (memory, candidate) into the state the next loop step reads.

Shapes: B puzzles, T positions (puzzle tokens, then cells), D width, K candidates kept by the full form.

A connection is a module with three calls. `init(z_0)` makes a memory from a state [B, T, D]; `step(memory, z)` takes the
candidate [B, T, D] in; `memory.h` is what the next loop step reads. Memories are NamedTuples of tensors whose first axis
is the puzzle, so slicing, resetting, detaching and saving a carry need to know nothing else about them. `reset` gives the
chosen rows a fresh memory; `restart` forgets everything but the present state. A connection that draws noise takes it from
the puzzle's own stream, which `keyed` hands it.
"""

import math
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from models.config import (
    AttentionResidualConfig,
    CarryLastConfig,
    ConnectionConfig,
    ConstantStepConfig,
    DampedFixedPointConfig,
    NoisyRelaxationConfig,
    softplus_inverse,
)
from models.noise import advance, normal, streams
from models.ops import attention_residual_update, score, wide

M = TypeVar("M", bound="StateMemory | DecayMemory | HistoryMemory | FixedPointMemory | NoisyMemory")


class StateMemory(NamedTuple):
    """Memory of connections that keep the state and nothing else."""

    h: Tensor
    """[B, T, D]"""


class DecayMemory(NamedTuple):
    """Memory of the streaming attention residual, float32 whatever the block's dtype (float64 stays, for checks)."""

    h: Tensor
    """[B, T, D]"""
    log_d: Tensor
    """[B, T], log of the decayed sum of exp(score)."""


class HistoryMemory(NamedTuple):
    """Memory of the full attention residual: every candidate so far."""

    h: Tensor
    """[B, T, D]"""
    z: Tensor
    """[B, K, T, D]"""
    s: Tensor
    """[B, K, T], score minus lambda times age; -inf hides a candidate."""


class FixedPointMemory(NamedTuple):
    """Memory of the damped fixed point, float32 (float64 stays)."""

    h: Tensor
    """[B, T, D]"""
    step_size: Tensor
    """[B]"""
    residual: Tensor
    """[B], largest relative change that the last candidate asked for at any position; inf before the first."""
    best: Tensor
    """[B], smallest residual so far."""
    patience: Tensor
    """[B], loop steps left before the step size shrinks."""


class NoisyMemory(NamedTuple):
    """Memory of the noisy relaxation: the state, float32 (float64 stays), and the puzzle's place in its stream of noise."""

    h: Tensor
    """[B, T, D]"""
    stream: Tensor
    """int64 [B, 2], models/noise.py"""
    noise: Tensor
    """float32 [B], standard deviation."""


def where_rows(rows: Tensor, fresh: Tensor, old: Tensor) -> Tensor:
    """`fresh` where `rows` [B] is true, else `old`; both [B, ...]."""
    return torch.where(rows.view(-1, *[1] * (old.dim() - 1)), fresh, old)


class Connection(nn.Module, Generic[M]):
    """What every connection shares; see the module's docstring."""

    def init(self, z_0: Tensor) -> M:
        raise NotImplementedError

    def step(self, memory: M, z: Tensor) -> M:
        raise NotImplementedError

    def keyed(self, memory: M, keys: Tensor, noise: float | None) -> M:
        """The memory with streams of noise of its own for the puzzles, keys int64 [B], at this standard deviation (None:
        as in training); for a connection that draws none, the memory as it is."""
        return memory

    def reset(self, memory: M, fresh: M, rows: Tensor) -> M:
        """Memory with the rows [B] (bool) taken from `fresh`, the others untouched bit for bit."""
        return type(memory)(*(where_rows(rows, f, m) for f, m in zip(fresh, memory, strict=True)))

    def restart(self, memory: M) -> M:
        """A memory that begins at the present state."""
        return self.init(memory.h)


class CarryLast(Connection[StateMemory]):
    """h_t = z_t (TRM, HRM)."""

    def init(self, z_0: Tensor) -> StateMemory:
        return StateMemory(z_0)

    def step(self, memory: StateMemory, z: Tensor) -> StateMemory:
        return StateMemory(z)


class ConstantStep(Connection[StateMemory]):
    """h_t = c z_t + (1 - c) h_{t-1}, c fixed or a learned sigmoid; state in float32 (float64 stays)."""

    def __init__(self, config: ConstantStepConfig):
        super().__init__()
        if config.learned:
            raw = math.log(config.step / (1 - config.step))
            self.raw_step = nn.Parameter(torch.tensor(raw))
        else:
            self.raw_step = None
            self.fixed_step = config.step

    def step_size(self) -> Tensor | float:
        return self.fixed_step if self.raw_step is None else torch.sigmoid(self.raw_step)

    def init(self, z_0: Tensor) -> StateMemory:
        return StateMemory(wide(z_0))

    def step(self, memory: StateMemory, z: Tensor) -> StateMemory:
        c = self.step_size()
        return StateMemory(c * wide(z) + (1 - c) * memory.h)


class _Decay(nn.Module):
    """Query and decay of one axis, shared by the streaming and the full attention residual.

    Trainable: query [D] (starts at 0, so that all candidates begin equal) and raw_decay [] with
    lambda = softplus(raw_decay), beta = exp(-lambda). Neither takes weight decay (trainer/optim.py).
    """

    def __init__(self, config: AttentionResidualConfig, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.include_initial = config.include_initial
        self.query = nn.Parameter(torch.zeros(width)) if config.content_score else None
        lam = -math.log(config.beta0)
        if config.beta == "learned":
            self.raw_decay = nn.Parameter(torch.tensor(softplus_inverse(lam)))
        else:
            self.raw_decay = None
            self.register_buffer("fixed_lambda", torch.tensor(lam), persistent=False)

    def lam(self) -> Tensor:
        """lambda, a scalar; negative where beta is fixed above 1."""
        if self.raw_decay is None:
            return self.get_buffer("fixed_lambda")
        return F.softplus(self.raw_decay)

    def beta(self) -> Tensor:
        return torch.exp(-self.lam())

    def score(self, z: Tensor) -> Tensor:
        """query . RMSNorm(z): [B, T, D] -> float32 [B, T] (float64 stays)."""
        if self.query is None:
            return torch.zeros_like(wide(z)[..., 0])
        return score(z, self.query, self.eps)


class AttentionResidual(_Decay, Connection[DecayMemory]):
    """Streaming form: h_t = h_{t-1} + g_t (z_t - h_{t-1}) with g_t = e_t / (beta D_{t-1} + e_t) (InfiLoop)."""

    def init(self, z_0: Tensor) -> DecayMemory:
        s = self.score(z_0)
        return DecayMemory(wide(z_0), s if self.include_initial else torch.full_like(s, -math.inf))

    def restart(self, memory: DecayMemory) -> DecayMemory:
        # The present state counts as a candidate, unless it is still an initial state that does not.
        nothing_kept = memory.log_d.isneginf()
        return DecayMemory(memory.h, self.score(memory.h).masked_fill(nothing_kept, -math.inf))

    def step(self, memory: DecayMemory, z: Tensor) -> DecayMemory:
        return DecayMemory(*attention_residual_update(memory.h, memory.log_d, z, self.score(z), self.lam()))


class FullAttentionResidual(_Decay, Connection[HistoryMemory]):
    """h_t = sum_i softmax_i(s_i - lambda (t - i)) z_i over all candidates: what the streaming form must equal.

    Keeps every candidate: O(K T D) memory, O(K^2 T D) time. For checks and short runs.
    """

    def init(self, z_0: Tensor) -> HistoryMemory:
        s = self.score(z_0)
        s = s if self.include_initial else torch.full_like(s, -math.inf)
        return HistoryMemory(wide(z_0), wide(z_0)[:, None], s[:, None])

    def restart(self, memory: HistoryMemory) -> HistoryMemory:
        nothing_kept = memory.s.isneginf().all(1)
        s = self.score(memory.h).masked_fill(nothing_kept, -math.inf)
        return HistoryMemory(memory.h, memory.h[:, None], s[:, None])

    def reset(self, memory: HistoryMemory, fresh: HistoryMemory, rows: Tensor) -> HistoryMemory:
        # Rows of one batch share K, so a fresh row keeps its old slots, hidden, and starts in the newest one.
        hidden = torch.full_like(memory.s, -math.inf)
        hidden[:, -1] = fresh.s[:, -1]
        z = memory.z.clone()
        z[:, -1] = where_rows(rows, fresh.z[:, -1], z[:, -1])
        return HistoryMemory(where_rows(rows, fresh.h, memory.h), z, where_rows(rows, hidden, memory.s))

    def step(self, memory: HistoryMemory, z: Tensor) -> HistoryMemory:
        # Candidates age by lambda a step, so that a step without gradient, or with an older lambda, stays as it was: what
        # log_d does in the streaming form.
        z_all = torch.cat([memory.z, wide(z)[:, None]], dim=1)
        s_all = torch.cat([memory.s - self.lam(), self.score(z)[:, None]], dim=1)
        weight = torch.softmax(s_all, dim=1)
        return HistoryMemory((weight[..., None] * z_all).sum(1), z_all, s_all)


class DampedFixedPoint(Connection[FixedPointMemory]):
    """h_t = s z_t + (1 - s) h_{t-1} with a step size s per puzzle that shrinks when the residual stops improving.

    The residual of a step, max over positions of max_c |h - z| / max_c |z|, decides about the step after it. Follows the
    released FPRM (parity README, section 3).
    """

    EPS = 1e-8

    def __init__(self, config: DampedFixedPointConfig):
        super().__init__()
        self.config = config

    def init(self, z_0: Tensor) -> FixedPointMemory:
        h, each = wide(z_0), wide(z_0)[:, 0, 0]
        inf = torch.full_like(each, math.inf)
        step, patience = (torch.full_like(each, value) for value in (self.config.step, self.config.patience))
        return FixedPointMemory(h, step, inf, inf.clone(), patience)

    def step(self, memory: FixedPointMemory, z: Tensor) -> FixedPointMemory:
        c, h, z = self.config, memory.h, wide(z)
        with torch.no_grad():
            change, size = (h - z).abs().amax(-1), z.abs().amax(-1)
            residual = (change / (size + self.EPS)).amax(-1)
            improved = residual < memory.best
            best = torch.where(improved, residual, memory.best)
            full = torch.full_like(residual, c.patience)
            patience = torch.where(improved, full, memory.patience - 1)
            shrink = (patience <= 0) & (residual >= c.threshold)
            decay = c.decay_train if self.training else c.decay_eval
            step_size = torch.where(shrink, memory.step_size * decay, memory.step_size)
            patience = torch.where(shrink, full, patience)
        s = memory.step_size.detach()[:, None, None]
        return FixedPointMemory(s * z + (1 - s) * h, step_size, residual, best, patience)


def settled(memory: FixedPointMemory, config: DampedFixedPointConfig) -> Tensor:
    """bool [B]: puzzles at a fixed point, or with a step size too small to get there."""
    return (memory.residual < config.threshold) | (memory.step_size < config.smallest_step)


class NoisyRelaxation(Connection[NoisyMemory]):
    """h_t = (1 - a) h_{t-1} + a z_t + sigma * noise, as in the released EqR, which adds it in evaluation too.

    The noise of a step is a function of the puzzle's key and the number of steps since it began (there: of the global
    generator), so a puzzle's states are its own in any batch, micro-batch and order.
    """

    def __init__(self, config: NoisyRelaxationConfig):
        super().__init__()
        self.config = config

    def init(self, z_0: Tensor) -> NoisyMemory:
        noise = torch.full((len(z_0),), self.config.noise, device=z_0.device)
        return NoisyMemory(wide(z_0), streams(torch.arange(len(z_0), device=z_0.device)), noise)

    def keyed(self, memory: NoisyMemory, keys: Tensor, noise: float | None) -> NoisyMemory:
        level = memory.noise if noise is None else torch.full_like(memory.noise, noise)
        return memory._replace(stream=streams(keys.to(memory.stream.device)), noise=level)

    def restart(self, memory: NoisyMemory) -> NoisyMemory:
        return memory

    def step(self, memory: NoisyMemory, z: Tensor) -> NoisyMemory:
        a, drawn = self.config.step, normal(memory.stream, memory.h.shape[1:])
        h = (1 - a) * memory.h + a * wide(z) + memory.noise.detach()[:, None, None] * drawn
        return memory._replace(h=h, stream=advance(memory.stream))


def build_connection(config: ConnectionConfig, width: int, eps: float) -> Connection:
    if isinstance(config, CarryLastConfig):
        return CarryLast()
    if isinstance(config, ConstantStepConfig):
        return ConstantStep(config)
    if isinstance(config, DampedFixedPointConfig):
        return DampedFixedPoint(config)
    if isinstance(config, NoisyRelaxationConfig):
        return NoisyRelaxation(config)
    streaming = config.kind == "attention_residual"
    return AttentionResidual(config, width, eps) if streaming else FullAttentionResidual(config, width, eps)

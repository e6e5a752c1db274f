"""Halting rules: when a puzzle's loop ends. Each owns its loss and is a small module of the model.

Shapes: B puzzles, D width. `read` turns the first position's state [B, D] into a halting logit [B] (or None), `loss`
turns that logit into a sum over puzzles; `wants_to_halt` decides per puzzle [B] from the logit and the outer connection's
memory.
"""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from models.blocks import Linear
from models.config import DampedFixedPointConfig, ModelConfig
from models.connections import FixedPointMemory, settled


class FixedHalting(nn.Module):
    """Every puzzle gets every segment."""

    def read(self, h_0: Tensor) -> Tensor | None:
        return None

    def loss(self, logit: Tensor | None, correct: Tensor) -> Tensor:
        return torch.zeros((), device=correct.device)

    def wants_to_halt(self, logit: Tensor | None, outer: Any) -> Tensor:
        return torch.zeros(len(outer.h), dtype=torch.bool, device=outer.h.device)


class QHead(nn.Module):
    """TRM's head: output 0 is trained to say "this answer is exactly right"; halt when it is positive.

    Output 1 ("continue" in HRM) has no loss here; it is kept so that released weights load and parameters agree.
    Weight starts at 0 and bias at -5, so nothing halts before the head has learned.
    """

    def __init__(self, width: int):
        super().__init__()
        self.head = Linear(width, 2, bias=True)
        assert self.head.bias is not None
        with torch.no_grad():
            self.head.weight.zero_()
            self.head.bias.fill_(-5.0)

    def read(self, h_0: Tensor) -> Tensor | None:
        return self.head(h_0)[:, 0].float()

    def loss(self, logit: Tensor | None, correct: Tensor) -> Tensor:
        """Binary cross-entropy against "exactly right" [B] (bool), summed over puzzles."""
        assert logit is not None
        return F.binary_cross_entropy_with_logits(logit, correct.float(), reduction="sum")

    def wants_to_halt(self, logit: Tensor | None, outer: Any) -> Tensor:
        assert logit is not None
        return logit > 0


class ResidualHalting(QHead):
    """FPRM's rule: a puzzle ends when its state has stopped moving. The head is trained all the same, but decides nothing."""

    def __init__(self, width: int, connection: DampedFixedPointConfig):
        super().__init__(width)
        self.connection = connection

    def wants_to_halt(self, logit: Tensor | None, outer: FixedPointMemory) -> Tensor:
        return settled(outer, self.connection)

    def batch_wants_to_halt(self, outer: FixedPointMemory, counted: Tensor) -> Tensor:
        """bool []: whether all rows of a batch stop, as in the released FPRM: when the `counted` rows [B] (bool) are all at
        a fixed point, or all have too small a step size."""
        at_rest = outer.residual[counted].amax() < self.connection.threshold
        return at_rest | (outer.step_size[counted].amax() < self.connection.smallest_step)


HaltingRule = FixedHalting | QHead


def build_halting(config: ModelConfig) -> HaltingRule:
    if config.halting == "fixed":
        return FixedHalting()
    outer = config.axis_connection("outer")
    if config.halting == "residual":
        assert isinstance(outer, DampedFixedPointConfig), "ModelConfig refuses other connections"
        return ResidualHalting(config.hidden_size, outer)
    return QHead(config.hidden_size)


def exploration_minimum(batch: int, chance: float, segments: int, generator: torch.Generator) -> Tensor:
    """Segments before which each puzzle may not halt: with `chance` uniform in 2..segments, else 0; int64 [B], CPU.

    Drawn for the whole global batch at once, from a generator of its own, so that micro-batches and ranks see the same.
    """
    explore = torch.rand(batch, generator=generator) < chance
    least = torch.randint(2, max(segments, 2) + 1, (batch,), generator=generator)
    return torch.where(explore, least, 0)

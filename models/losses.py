"""Losses of a decoded segment. Sums over puzzles leave here; the caller divides once, by the global batch."""

from typing import NamedTuple

import torch
from torch import Tensor

IGNORE = -100


def log_stablemax(logits: Tensor) -> Tensor:
    """log of stablemax over the last axis, float32 (float64 stays): s(x) = x + 1 for x >= 0, else 1 / (1 - x).

    log s(x) = log1p(x) or -log1p(-x), so nothing overflows. Each branch is clamped to its own side: otherwise the branch
    not taken has an infinite slope at a logit of exactly 1.0 (or -1.0), and infinity times 0 is NaN in the gradient.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    log_s = torch.where(wide >= 0, torch.log1p(wide.clamp(min=0)), -torch.log1p(-wide.clamp(max=0)))
    return torch.log_softmax(log_s, dim=-1)


class SegmentLoss(NamedTuple):
    """Sums over the puzzles of one micro-batch, and which of them are exactly right."""

    cells: Tensor
    """[], cross-entropy, averaged over each puzzle's supervised cells."""
    exact: Tensor
    """bool [B]"""
    cells_right: Tensor
    """int64 [B], supervised cells right."""
    cells_supervised: Tensor
    """int64 [B]"""


def segment_loss(logits: Tensor, labels: Tensor) -> SegmentLoss:
    """logits [B, S, V], labels int64 [B, S] with IGNORE for unsupervised cells.

    A puzzle without supervised cells has loss 0 and counts as exact, as in the released TRM.
    """
    supervised = labels != IGNORE
    target = labels.where(supervised, torch.zeros_like(labels))
    nll = -log_stablemax(logits).gather(-1, target[..., None])[..., 0]
    count = supervised.sum(-1)
    per_puzzle = (nll * supervised).sum(-1) / count.clamp(min=1)
    right = (logits.argmax(-1) == labels) & supervised
    return SegmentLoss(per_puzzle.sum(), right.sum(-1) == count, right.sum(-1), count)

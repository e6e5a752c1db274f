"""Reference of the attention-residual update, in plain PyTorch, float32 inside.

Shapes: B puzzles, T positions, D width. float64 inputs stay float64, for checks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """float32, or float64 where it came in as that."""
    return x if x.dtype == torch.float64 else x.float()


def score(z: Tensor, query: Tensor, eps: float) -> Tensor:
    """query . RMSNorm(z) over the width: z [B, T, D], query [D] -> [B, T]."""
    z = wide(z)
    return (z * query).sum(-1) * torch.rsqrt(z.square().mean(-1) + eps)


def attention_residual_update(h: Tensor, log_d: Tensor, z: Tensor, s: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
    """One step of the streaming attention residual (DESIGN, numerics of the attention residual).

    h [B, T, D] state, log_d [B, T], z [B, T, D] candidate, s [B, T] its score, lam [] = lambda. Returns the new h and
    log_d. With x = s + lambda - log_d, the step size is sigmoid(x): never NaN, and exact at both ends, where the shorter
    h + g (z - h) would leave a rounding error at g = 1.
    """
    x = s + lam - log_d
    h = torch.sigmoid(x)[..., None] * wide(z) + torch.sigmoid(-x)[..., None] * h
    # logaddexp(log_d - lambda, s) written with x, so that one exponential serves and -inf (nothing kept yet) is exact.
    log_d = torch.maximum(s, log_d - lam) + F.softplus(-x.abs())
    return h, log_d

"""The shared block: attention or a token-mixing MLP, then SwiGLU, each followed by RMSNorm (post-norm, as in TRM).

Shapes: B puzzles, T positions, D width. Weights are float32 and cast to the input's dtype where used. State-dict names
are ours; tests/parity.py maps the released code's names onto them.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from trainer.config import ModelConfig

# Cutting a normal at two of its own standard deviations leaves a standard deviation of 0.8796; dividing by it restores
# the one asked for.
_CUT_STD = 0.8796256610342398


def truncated_normal(*shape: int, std: float) -> Tensor:
    """float32 sample whose standard deviation *after* the cut is `std` (unlike torch.nn.init.trunc_normal_)."""
    if std == 0:
        return torch.zeros(shape)
    full = std / _CUT_STD
    return nn.init.trunc_normal_(torch.empty(shape), std=full, a=-2 * full, b=2 * full)


def rms_norm(x: Tensor, eps: float, dim: int = -1) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over `dim`, computed in float32 (float64 stays), without a learned scale."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim, keepdim=True) + eps)).to(x.dtype)


class Linear(nn.Module):
    """y = x W^T (+ b), with W [out, in] of standard deviation 1/sqrt(in), cast to x's dtype."""

    def __init__(self, width_in: int, width_out: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(truncated_normal(width_out, width_in, std=1 / math.sqrt(width_in)))
        self.bias = nn.Parameter(torch.zeros(width_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class SwiGLU(nn.Module):
    """down(silu(gate) * value); inner width round(expansion * width * 2/3), rounded up to a multiple of `multiple`."""

    def __init__(self, width: int, expansion: float, multiple: int):
        super().__init__()
        inner = -(-round(expansion * width * 2 / 3) // multiple) * multiple
        self.gate_up = Linear(width, 2 * inner)
        self.down = Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Rotary(nn.Module):
    """Rotary positions, half-split layout: channel i turns with channel i + head_dim/2 by position * theta^(-2i/head_dim)."""

    def __init__(self, positions: int, head_dim: int, theta: float):
        super().__init__()
        frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angle = torch.outer(torch.arange(positions, dtype=torch.float32), frequency)
        self.register_buffer("cos", angle.cos().repeat(1, 2)[:, None], persistent=False)  # [T, 1, head_dim]
        self.register_buffer("sin", angle.sin().repeat(1, 2)[:, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, heads, head_dim], turned in float32 and cast back."""
        wide = x.float()
        low, high = wide.chunk(2, dim=-1)
        turned = torch.cat((-high, low), dim=-1)
        return (wide * self.get_buffer("cos") + turned * self.get_buffer("sin")).to(x.dtype)


class Attention(nn.Module):
    """Full (not causal) softmax attention. qkv is laid out query heads, key heads, value heads."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width)

    def forward(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        batch, positions, width = x.shape
        q, k, v = self.qkv(x).view(batch, positions, 3 * self.heads, width // self.heads).chunk(3, dim=2)
        if rotary is not None:
            q, k = rotary(q), rotary(k)
        # The library wants [B, heads, T, head_dim]: without the swap it would attend over heads instead of positions.
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.out(mixed.transpose(1, 2).reshape(batch, positions, width))


class Layer(nn.Module):
    """h <- rms(h + mix(h)); h <- rms(h + SwiGLU(h)). With the token mixer, the first norm runs over positions, as in TRM."""

    def __init__(self, config: ModelConfig, positions: int):
        super().__init__()
        self.eps = config.rms_norm_eps
        if config.mixer == "attention":
            self.attention = Attention(config.hidden_size, config.num_heads)
        else:
            self.token_mlp = SwiGLU(positions, config.expansion, config.ffn_multiple)
        self.mlp = SwiGLU(config.hidden_size, config.expansion, config.ffn_multiple)
        self.mixer = config.mixer

    def forward(self, h: Tensor, rotary: Rotary | None) -> Tensor:
        if self.mixer == "attention":
            h = rms_norm(h + self.attention(h, rotary), self.eps)
        else:
            across = h.transpose(1, 2)
            h = rms_norm(across + self.token_mlp(across), self.eps).transpose(1, 2)
        return rms_norm(h + self.mlp(h), self.eps)


class Block(nn.Module):
    """The shared block f: `layers` layers over h + injection, all [B, T, D]. One call is one block application."""

    def __init__(self, config: ModelConfig, positions: int):
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, positions) for _ in range(config.layers))
        use_rotary = config.mixer == "attention" and config.positions == "rope"
        head_dim = config.hidden_size // config.num_heads
        self.rotary = Rotary(positions, head_dim, config.rope_theta) if use_rotary else None

    def forward(self, h: Tensor, injection: Tensor) -> Tensor:
        h = h + injection
        for layer in self.layers:
            h = layer(h, self.rotary)
        return h

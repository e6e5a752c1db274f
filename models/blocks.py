"""The shared block: attention or a token-mixing MLP, then SwiGLU, in post-norm (TRM), pre-norm or tied residuals (FPRM).

Shapes: B puzzles, T positions, D width. Weights are float32 and cast to the input's dtype where used. State-dict names
are ours; models/released.py maps the released code's names onto them.
"""

import math
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig, TiedBlockConfig

# Cutting a normal at two of its own standard deviations leaves a standard deviation of 0.8796; dividing by it restores
# the one asked for.
_CUT_STD = 0.8796256610342398


def truncated_normal(*shape: int, std: float, generator: torch.Generator | None = None) -> Tensor:
    """float32 sample whose standard deviation *after* the cut is `std` (unlike torch.nn.init.trunc_normal_)."""
    if std == 0:
        return torch.zeros(shape)
    full = std / _CUT_STD
    return nn.init.trunc_normal_(torch.empty(shape), std=full, a=-2 * full, b=2 * full, generator=generator)


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
    """Two residual branches F, mixing and SwiGLU. Post-norm: h <- rms(h + F(h)); pre-norm: h <- h + F(rms(h)).

    With the token mixer, the norm beside it runs over positions, as in TRM. A layer scale multiplies each branch.
    """

    def __init__(self, config: ModelConfig, positions: int):
        super().__init__()
        assert not isinstance(config.block, TiedBlockConfig)
        self.eps = config.rms_norm_eps
        if config.mixer == "attention":
            self.attention = Attention(config.hidden_size, config.num_heads)
        else:
            self.token_mlp = SwiGLU(positions, config.expansion, config.ffn_multiple)
        self.mlp = SwiGLU(config.hidden_size, config.expansion, config.ffn_multiple)
        self.mixer, self.pre_norm = config.mixer, config.block.kind == "pre_norm"
        start = config.block.layer_scale
        self.mix_scale, self.mlp_scale = (
            None if start is None else nn.Parameter(torch.full((config.hidden_size,), start)) for _ in range(2)
        )

    def _add(self, h: Tensor, branch: Callable[[Tensor], Tensor], scale: Tensor | None) -> Tensor:
        out = branch(rms_norm(h, self.eps) if self.pre_norm else h)
        if scale is not None:
            out = out * scale.to(out.dtype)
        return h + out if self.pre_norm else rms_norm(h + out, self.eps)

    def forward(self, h: Tensor, rotary: Rotary | None) -> Tensor:
        if self.mixer == "attention":
            h = self._add(h, lambda x: self.attention(x, rotary), self.mix_scale)
        else:
            scale = None if self.mix_scale is None else self.mix_scale[:, None]
            h = self._add(h.transpose(1, 2), self.token_mlp, scale).transpose(1, 2)
        return self._add(h, self.mlp, self.mlp_scale)


class Block(nn.Module):
    """The shared block f: `layers` layers over h + injection, all [B, T, D]. One call is one block application."""

    def __init__(self, config: ModelConfig, positions: int):
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, positions) for _ in range(config.layers))
        self.rotary = build_rotary(config, positions)

    def forward(self, h: Tensor, injection: Tensor) -> Tensor:
        h = h + injection
        for layer in self.layers:
            h = layer(h, self.rotary)
        return h


class TiedLayer(nn.Module):
    """h <- a h + b Attention(rms(h)); h <- a h + b SwiGLU(rms(h)), with a and b [D] of the whole block."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.attention = Attention(config.hidden_size, config.num_heads)
        self.mlp = SwiGLU(config.hidden_size, config.expansion, config.ffn_multiple)

    def forward(self, h: Tensor, rotary: Rotary | None, a: Tensor, b: Tensor) -> Tensor:
        h = a * h + b * self.attention(rms_norm(h, self.eps), rotary)
        return a * h + b * self.mlp(rms_norm(h, self.eps))


class TiedBlock(nn.Module):
    """FPRM's block: a depthwise convolution over the cells, the injection, then layers with tied residual scales.

    With N layers, a_1 and a_2 sigmoids of learned numbers per channel: b_2 = 1 - a_2 a_1^(2N) and
    b_1 = b_2 (1 - a_1) / (1 - a_1^(2N)), so that a fixed point of the whole keeps its scale. The first `prefix` positions
    bypass the convolution, which replaces the state (no skip). Follows the released FPRM (parity README, section 3).
    """

    def __init__(self, config: ModelConfig, positions: int):
        super().__init__()
        tied = config.block
        assert isinstance(tied, TiedBlockConfig)
        self.kind, self.norm, self.eps, self.prefix = (
            tied.convolution,
            tied.norm,
            config.rms_norm_eps,
            config.puzzle_tokens,
        )
        self.side = math.isqrt(positions - self.prefix)
        width, k = config.hidden_size, tied.kernel
        if self.kind == "grid":
            self.conv = nn.Conv2d(width, width, k, padding=k // 2, groups=width, bias=False)
        elif self.kind == "causal":
            self.conv = nn.Conv1d(width, width, k, groups=width, bias=False)
        self.layers = nn.ModuleList(TiedLayer(config) for _ in range(config.layers))
        self.raw_alpha_1, self.raw_alpha_2 = (
            nn.Parameter(torch.full((width,), math.log(alpha / (1 - alpha)))) for alpha in (tied.alpha_1, tied.alpha_2)
        )
        self.rotary = build_rotary(config, positions)

    def _convolve(self, h: Tensor) -> Tensor:
        if self.kind == "none":
            return h
        cells = h[:, self.prefix :].transpose(1, 2)  # [B, D, S]
        weight = self.conv.weight.to(h.dtype)
        if self.kind == "grid":
            grid = cells.unflatten(2, (self.side, self.side))
            cells = F.conv2d(grid, weight, padding=self.conv.padding, groups=self.conv.groups).flatten(2)
        else:
            cells = F.conv1d(F.pad(cells, (weight.shape[-1] - 1, 0)), weight, groups=self.conv.groups)
        return torch.cat((h[:, : self.prefix], cells.transpose(1, 2)), dim=1)

    def forward(self, h: Tensor, injection: Tensor) -> Tensor:
        a_1, a_2 = self.raw_alpha_1.sigmoid(), self.raw_alpha_2.sigmoid()
        kept = a_1 ** (2 * len(self.layers))
        b_2 = 1 - a_2 * kept
        b_1 = b_2 * (1 - a_1) / (1 - kept + 1e-5)  # the released code's guard
        a_1, a_2, b_1, b_2 = (t.to(h.dtype) for t in (a_1, a_2, b_1, b_2))
        h = self._convolve(h)
        if self.norm == "input":
            h = rms_norm(h, self.eps)
        h = a_2 * h + b_2 * injection
        for layer in self.layers:
            h = layer(h, self.rotary, a_1, b_1)
        return rms_norm(h, self.eps) if self.norm == "output" else h


def build_rotary(config: ModelConfig, positions: int) -> Rotary | None:
    if config.mixer != "attention" or config.positions != "rope":
        return None
    return Rotary(positions, config.hidden_size // config.num_heads, config.rope_theta)


def build_block(config: ModelConfig, positions: int) -> Block | TiedBlock:
    return TiedBlock(config, positions) if isinstance(config.block, TiedBlockConfig) else Block(config, positions)

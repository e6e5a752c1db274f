"""The nested recursion written out once more, from the equations alone, on a state dict: what models/core.py must equal.

No layer of the project is used. The attention residual is the full form: every candidate and its log weight are kept.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.config import AttentionResidualConfig, ConnectionConfig, ConstantStepConfig, ModelConfig


def rms(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5) ** 0.5


def swiglu(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    both = x @ w[f"{name}.gate_up.weight"].T
    half = both.shape[-1] // 2
    gate, value = both[..., :half], both[..., half:]
    return (gate * torch.sigmoid(gate) * value) @ w[f"{name}.down.weight"].T


def rotated(x: Tensor, theta: float) -> Tensor:
    """x [B, T, d] of one head."""
    half = x.shape[-1] // 2
    frequency = torch.tensor([theta ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=x.dtype)
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def attention(w: dict[str, Tensor], name: str, x: Tensor, heads: int, theta: float | None) -> Tensor:
    width = x.shape[-1]
    d = width // heads
    qkv = x @ w[f"{name}.qkv.weight"].T
    mixed = []
    for head in range(heads):
        q, k, v = (qkv[..., part * width + head * d : part * width + (head + 1) * d] for part in range(3))
        if theta is not None:
            q, k = rotated(q, theta), rotated(k, theta)
        weight = torch.exp(q @ k.transpose(1, 2) / math.sqrt(d))
        mixed.append((weight / weight.sum(-1, keepdim=True)) @ v)
    return torch.cat(mixed, -1) @ w[f"{name}.out.weight"].T


def block(w: dict[str, Tensor], config: ModelConfig, h: Tensor) -> Tensor:
    theta = config.rope_theta if config.positions == "rope" else None
    for layer in range(config.layers):
        name = f"block.layers.{layer}"
        if config.mixer == "attention":
            h = rms(h + attention(w, f"{name}.attention", h, config.num_heads, theta))
        else:
            across = h.transpose(1, 2)
            h = rms(across + swiglu(w, f"{name}.token_mlp", across)).transpose(1, 2)
        h = rms(h + swiglu(w, f"{name}.mlp", h))
    return h


@dataclass
class Axis:
    """State of one axis, with every candidate so far and its log weight."""

    config: ConnectionConfig
    w: dict[str, Tensor]
    name: str
    h: Tensor
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def score(self, z: Tensor) -> Tensor:
        query = self.w.get(f"{self.name}.query")
        return z.new_zeros(z.shape[:-1]) if query is None else (rms(z) * query).sum(-1)

    def begin(self) -> None:
        if isinstance(self.config, AttentionResidualConfig) and self.config.include_initial:
            self.kept = [(self.h, self.score(self.h))]

    def take(self, z: Tensor) -> None:
        if isinstance(self.config, AttentionResidualConfig):
            raw = self.w.get(f"{self.name}.raw_decay")
            lam = -math.log(self.config.beta0) if raw is None else torch.log(1 + torch.exp(raw))
            self.kept = [*((old, s - lam) for old, s in self.kept), (z, self.score(z))]
            weight = torch.stack([s for _, s in self.kept]).exp()
            self.h = (torch.stack([old for old, _ in self.kept]) * weight[..., None]).sum(0) / weight.sum(0)[..., None]
        elif isinstance(self.config, ConstantStepConfig):
            raw = self.w.get(f"{self.name}.raw_step")
            c = self.config.step if raw is None else 1 / (1 + torch.exp(-raw))
            self.h = self.h + c * (z - self.h)
        else:
            self.h = z

    def detach(self) -> None:
        self.h, self.kept = self.h.detach(), [(z.detach(), s.detach()) for z, s in self.kept]


def segments(
    w: dict[str, Tensor], config: ModelConfig, tokens: Tensor, rows: Tensor, H: int, L: int, count: int = 1
) -> tuple[Tensor, Tensor]:
    """Logits and halting logits after `count` segments; only the last outer cycle of the last one has a graph."""
    width, prefix = config.hidden_size, config.puzzle_tokens
    x = w["token_embedding.weight"][tokens]
    if prefix:
        padded = torch.zeros(len(rows), prefix * width, dtype=rows.dtype)
        padded = torch.cat((rows, padded[:, rows.shape[1] :]), 1)
        x = torch.cat((padded.reshape(-1, prefix, width), x), 1)
    if config.positions == "learned":
        x = (x + w["position_embedding"]) / math.sqrt(2)
    x = x * math.sqrt(width)
    inner = Axis(config.axis_connection("inner"), w, "inner", w["L_init"].expand_as(x))
    outer = Axis(config.axis_connection("outer"), w, "outer", w["H_init"].expand_as(x))
    inner.begin()
    outer.begin()
    for _ in range(count * H):
        inner.detach()
        outer.detach()
        for _ in range(L):
            inner.take(block(w, config, inner.h + outer.h + x))
        outer.take(block(w, config, outer.h + inner.h))
    q = outer.h[:, 0] @ w["halting.head.weight"].T + w["halting.head.bias"]
    return (outer.h @ w["lm_head.weight"].T)[:, prefix:], q[:, 0]


def loss(logits: Tensor, q: Tensor, labels: Tensor) -> Tensor:
    """Stablemax cross-entropy averaged per puzzle, plus half the halting loss, summed over puzzles."""
    s = torch.where(logits >= 0, logits + 1, 1 / (1 - logits.clamp(max=0)))
    p = s / s.sum(-1, keepdim=True)
    total = logits.new_zeros(())
    for row in range(len(labels)):
        cells = [i for i in range(labels.shape[1]) if labels[row, i] != -100]
        right = all(logits[row, i].argmax() == labels[row, i] for i in cells)
        for i in cells:
            total = total - torch.log(p[row, i, labels[row, i]]) / len(cells)
        target = torch.sigmoid(q[row])
        total = total - 0.5 * torch.log(target if right else 1 - target)
    return total

"""Optimizers, schedule and averaged weights: AdamW, sign-SGD for puzzle embeddings, warm-up with cosine floor, EMA."""

import math

import torch
import torch.nn as nn
from torch import Tensor

from trainer.config import ScheduleConfig


def lr_factor(step: int, warmup_steps: int, total_steps: int, min_ratio: float) -> float:
    """Share of the base learning rate at optimizer step 1, 2, ...: linear warm-up, then a cosine down to `min_ratio`."""
    if step < warmup_steps:
        return step / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


KINDS = {
    "query": "queries",
    "raw_alpha_1": "queries",  # FPRM's residual scales: no weight decay, as in the released code
    "raw_alpha_2": "queries",
    "raw_decay": "scalars",
    "raw_step": "scalars",
}
"""Parameters that are no plain weights, by the last part of their name."""


def build_adamw(model: nn.Module, schedule: ScheduleConfig) -> torch.optim.AdamW:
    """AdamW over three groups: weights, queries and FPRM's scales (no decay), connection scalars (own rate, no decay)."""
    groups: dict[str, list[nn.Parameter]] = {"weights": [], "queries": [], "scalars": []}
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        kind = KINDS.get(leaf, "weights")
        groups[kind].append(parameter)
    settings = [
        {"params": groups["weights"], "base_lr": schedule.lr, "weight_decay": schedule.weight_decay},
        {"params": groups["queries"], "base_lr": schedule.lr, "weight_decay": 0.0},
        {"params": groups["scalars"], "base_lr": schedule.decay_lr, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in settings if g["params"]],
        lr=schedule.lr,
        betas=(schedule.adam_beta1, schedule.adam_beta2),
        eps=schedule.adam_eps,
        fused=next(model.parameters()).device.type in ("cpu", "cuda"),
    )


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


@torch.no_grad()
def sign_sgd(table: Tensor, puzzle_ids: Tensor, gradients: Tensor, lr: float, weight_decay: float) -> None:
    """Sign-SGD on the rows of a puzzle table [N, E] that the batch used; the other rows are not touched.

    puzzle_ids [B], gradients [B, E]. Gradients of equal ids are summed first; then row <- row (1 - lr wd) - lr sign(sum).
    """
    ids, place = torch.unique(puzzle_ids.long(), return_inverse=True)
    total = torch.zeros(len(ids), table.shape[1], dtype=gradients.dtype, device=table.device)
    total.index_add_(0, place, gradients)
    table[ids] = table[ids] * (1 - lr * weight_decay) - lr * total.sign()


class AveragedWeights:
    """EMA of every trained parameter: shadow <- ema * shadow + (1 - ema) * parameter after each optimizer step."""

    def __init__(self, model: nn.Module, ema: float):
        self.ema = ema
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.shadow = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(self.shadow, self.parameters, 1 - self.ema)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange averaged and raw weights in place; calling it twice restores both bit for bit."""
        for parameter, shadow in zip(self.parameters, self.shadow, strict=True):
            raw = parameter.clone()
            parameter.copy_(shadow)
            shadow.copy_(raw)

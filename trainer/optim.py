"""Optimizers, schedule and averaged weights: AdamW, AdamATan2, sign-SGD for puzzle embeddings, cosine floor, EMA."""

import math
from collections.abc import Iterable
from typing import Any

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


class AdamATan2(torch.optim.Optimizer):
    """Adam with atan2 in place of the division (Everett and others, arXiv 2407.05872), as TRM trains with.

    p <- p (1 - lr weight_decay) - lr atan2(m / (1 - beta1^t), sqrt(v / (1 - beta2^t))): no eps, and a step never exceeds
    lr pi / 2. Groups may carry a weight decay and lr of their own. State and updates are in the parameter's dtype.
    """

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float]):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None, "the gradients are there when step is called"
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            moved = [p for p in group["params"] if p.grad is not None]
            for p in moved:
                if not self.state[p]:
                    self.state[p] = {"step": 0, "mean": torch.zeros_like(p), "square": torch.zeros_like(p)}
                state = self.state[p]
                state["step"] += 1
                state["mean"].lerp_(p.grad, 1 - beta1)
                state["square"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                mean = state["mean"] / (1 - beta1 ** state["step"])
                size = (state["square"] / (1 - beta2 ** state["step"])).sqrt_()
                p.mul_(1 - lr * group["weight_decay"]).sub_(torch.atan2(mean, size), alpha=lr)


def build_optimizer(model: nn.Module, schedule: ScheduleConfig) -> torch.optim.Optimizer:
    """AdamW or AdamATan2 over three groups: weights, queries and FPRM's scales (no decay), connection scalars (own rate,
    no decay)."""
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
    used, betas = [g for g in settings if g["params"]], (schedule.adam_beta1, schedule.adam_beta2)
    if schedule.optimizer == "adam_atan2":
        return AdamATan2(used, schedule.lr, betas)
    return torch.optim.AdamW(
        used,
        lr=schedule.lr,
        betas=betas,
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

"""Small models and settings for tests."""

from typing import Any

import torch
from torch import Tensor

from models.config import (
    AttentionResidualConfig,
    CarryLastConfig,
    ConnectionConfig,
    ConstantStepConfig,
    DampedFixedPointConfig,
    ModelConfig,
    NoisyRelaxationConfig,
)
from models.core import LoopedReasoner
from trainer.config import ScheduleConfig, TrainConfig

VOCAB, SEQ = 6, 9
CARRY_LAST = CarryLastConfig(kind="carry_last")


def residual(beta0: float = 0.55, full: bool = False, **changes: Any) -> AttentionResidualConfig:
    kind = "full_attention_residual" if full else "attention_residual"
    return AttentionResidualConfig(kind=kind, beta0=beta0, **changes)


def constant_step(step: float, learned: bool = False) -> ConstantStepConfig:
    return ConstantStepConfig(kind="constant_step", step=step, learned=learned)


def damped(**changes: Any) -> DampedFixedPointConfig:
    """The released FPRM's numbers, less patient, so that step sizes shrink in short runs."""
    values = {
        "step": 1.0,
        "patience": 2,
        "decay_train": 0.9,
        "decay_eval": 0.99,
        "threshold": 0.1,
        "smallest_step": 1e-3,
    }
    return DampedFixedPointConfig(kind="damped_fixed_point", **(values | changes))


def noisy(step: float = 0.9, noise: float = 0.1) -> NoisyRelaxationConfig:
    return NoisyRelaxationConfig(kind="noisy_relaxation", step=step, noise=noise)


def model_config(connection: ConnectionConfig = CARRY_LAST, mixer: str = "mlp", **changes: Any) -> ModelConfig:
    """Width 16, two layers, two puzzle tokens; attention with rotary positions unless said."""
    values: dict[str, Any] = {
        "name": "tiny",
        "connection": connection,
        "mixer": mixer,
        "positions": "rope" if mixer == "attention" else "none",
        "hidden_size": 16,
        "num_heads": 2,
        "layers": 2,
        "expansion": 4.0,
        "ffn_multiple": 16,
        "puzzle_tokens": 2,
        "puzzle_emb_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    return ModelConfig(**(values | changes))


def build(config: ModelConfig, seed: int = 0, puzzles: int = 5) -> LoopedReasoner:
    """A model whose branches are damped (at the plain initial weights the recursion amplifies rounding) and whose
    queries, puzzle rows and halting head are not zero, so that each of them shows in the outputs."""
    torch.manual_seed(seed)
    model = LoopedReasoner(config, VOCAB, SEQ, puzzles)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("out.weight", "token_mlp.down.weight")):
                parameter.mul_(0.5)
            elif name.endswith("mlp.down.weight"):
                parameter.mul_(0.3)
            elif name.endswith("query"):
                parameter.normal_(std=0.3)
            elif name == "halting.head.weight":
                parameter.normal_(std=0.2)
            elif name == "halting.head.bias":
                parameter.fill_(0.1)
        model.puzzle_table.normal_(std=0.5)
    return model


def puzzles(batch: int, seed: int = 0, ids: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels (some cells unsupervised) and puzzle ids of `batch` puzzles."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (batch, SEQ), generator=generator)
    labels = torch.randint(0, VOCAB, (batch, SEQ), generator=generator)
    labels[torch.rand(batch, SEQ, generator=generator) < 0.2] = -100
    return tokens, labels, torch.randint(0, ids, (batch,), generator=generator)


def injection(model: LoopedReasoner, batch: int, seed: int = 0) -> Tensor:
    tokens, _, ids = puzzles(batch, seed)
    return model.encode(tokens, model.puzzle_rows(ids))


def train_config(model: ModelConfig, **schedule: Any) -> TrainConfig:
    """What the trainer's step reads of a run's settings; `schedule` changes H=2, L=2, three segments, batch 6."""
    values: dict[str, Any] = {
        "H_cycles": 2,
        "L_cycles": 2,
        "segments": 3,
        "grad_outer_cycles": 1,
        "global_batch": 6,
        "total_steps": 10,
        "lr": 1e-3,
        "warmup_steps": 2,
        "lr_min_ratio": 1.0,
        "weight_decay": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-8,
        "decay_lr": 1e-2,
        "puzzle_emb_lr": 1e-3,
        "puzzle_emb_weight_decay": 0.1,
        "ema": 0.9,
        "halt_exploration": 0.0,
        "halt_loss_weight": 0.5,
    }
    return TrainConfig.model_construct(model=model, schedule=ScheduleConfig(**(values | schedule)))


def parameter_gradients(model: LoopedReasoner) -> dict[str, Tensor]:
    """Gradients by name, zeros where there is none."""
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def assert_close(mine: Tensor, expected: Tensor, tolerance: float, what: str = "", least_scale: float = 0) -> None:
    """Largest difference at most `tolerance` times the largest expected value (or `least_scale`, if that is larger)."""
    assert mine.shape == expected.shape, (what, mine.shape, expected.shape)
    assert torch.isfinite(mine).all(), f"{what}: not finite"
    if mine.numel() == 0:
        return
    gap, scale = (mine.double() - expected.double()).abs().max().item(), expected.double().abs().max().item()
    assert gap <= tolerance * max(scale, least_scale), f"{what}: off by {gap:.3g} at a scale of {scale:.3g}"

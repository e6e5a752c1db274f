"""Optimizers, schedule and averaged weights against the released code's trajectories."""

import pytest
import torch
import torch.nn as nn

from tests.parity import facts, tensors
from tests.tiny import assert_close, build, constant_step, model_config, residual, train_config
from trainer.optim import AveragedWeights, build_optimizer, lr_factor, set_lr, sign_sgd


@pytest.mark.parametrize("case", range(6))
def test_schedule(case: int) -> None:
    """Linear warm-up, then a cosine down to the floor, at every step of the released trainer."""
    told = facts("optim")
    entry = [*told["schedule"], told["schedule_far"]][case]
    config = entry["config"]
    for step, lr in zip(entry["steps"], entry["lr"], strict=True):
        factor = lr_factor(step, config["num_warmup_steps"], config["num_training_steps"], config["min_ratio"])
        assert config["base_lr"] * factor == pytest.approx(lr, rel=1e-9, abs=1e-15), step


class Toy(nn.Module):
    """One weight and one query, as in the fixture's two groups."""

    def __init__(self, weight: torch.Tensor, query: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.query = nn.Parameter(query.clone())


def test_adamw_trajectory() -> None:
    """Six steps with warm-up, decay on one group only, to 1e-6 of torch.optim.AdamW's own path."""
    io, told = tensors("optim"), facts("optim")["adamw"]
    model = Toy(io["adamw.decay.0"], io["adamw.nodecay.0"])
    settings = {"lr": told["base_lr"], "weight_decay": told["weight_decay"], "lr_min_ratio": told["min_ratio"]}
    schedule = train_config(
        model_config(), adam_beta1=told["beta1"], adam_beta2=told["beta2"], adam_eps=told["eps"], **settings
    ).schedule
    optimizer = build_optimizer(model, schedule)
    for step in range(1, 7):
        set_lr(optimizer, lr_factor(step, told["num_warmup_steps"], told["num_training_steps"], told["min_ratio"]))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(told["lr_per_step"][step - 1], rel=1e-9)
        model.weight.grad = io[f"adamw.grad_decay.{step}"].clone()
        model.query.grad = io[f"adamw.grad_nodecay.{step}"].clone()
        optimizer.step()
        assert_close(model.weight.detach(), io[f"adamw.decay.{step}"], 1e-6, f"decay {step}")
        assert_close(model.query.detach(), io[f"adamw.nodecay.{step}"], 1e-6, f"no decay {step}")


def test_adam_atan2_trajectory() -> None:
    """Six steps on the same start, gradients and rates as above, to 1e-6 of the formula's path in float64."""
    io, told = tensors("optim"), facts("optim")
    adamw, atan2 = told["adamw"], told["adam_atan2"]
    model = Toy(io["adamw.decay.0"], io["adamw.nodecay.0"])
    schedule = train_config(
        model_config(),
        optimizer="adam_atan2",
        lr=adamw["base_lr"],
        weight_decay=atan2["weight_decay"],
        adam_beta1=atan2["beta1"],
        adam_beta2=atan2["beta2"],
    ).schedule
    optimizer = build_optimizer(model, schedule)
    for step, lr in enumerate(adamw["lr_per_step"], start=1):
        set_lr(optimizer, lr / adamw["base_lr"])
        model.weight.grad = io[f"adamw.grad_decay.{step}"].clone()
        optimizer.step()
        assert_close(model.weight.detach(), io[f"adam_atan2.{step}"], 1e-6, f"step {step}")
    assert torch.equal(model.query.detach(), io["adamw.nodecay.0"]), "no gradient, no step"


def test_adam_atan2_does_not_care_for_the_gradient_s_scale() -> None:
    """Gradients a million times as large or small give the same steps, which is why it needs no eps."""
    steps = []
    for scale in (1e-6, 1.0, 1e6):
        model = Toy(torch.zeros(3, 2), torch.zeros(2))
        optimizer = build_optimizer(model, train_config(model_config(), optimizer="adam_atan2").schedule)
        set_lr(optimizer, 1.0)
        for seed in range(3):
            model.weight.grad = scale * torch.randn(3, 2, generator=torch.Generator().manual_seed(seed))
            optimizer.step()
        steps.append(model.weight.detach().clone())
    assert_close(steps[0], steps[1], 1e-5)
    assert_close(steps[2], steps[1], 1e-5)


def test_groups() -> None:
    """Queries and connection scalars carry no weight decay, scalars have their own rate; each parameter is in one group."""
    model = build(
        model_config(residual(), axes="outer", other_connection=constant_step(0.5, learned=True), positions="learned")
    )
    schedule = train_config(model.config, lr=1e-3, decay_lr=3e-2, weight_decay=0.7).schedule
    optimizer = build_optimizer(model, schedule)
    set_lr(optimizer, 0.5)
    found = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    names = dict(model.named_parameters())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(found) == len(names)
    expected = {"outer.query": (5e-4, 0.0), "outer.raw_decay": (1.5e-2, 0.0), "inner.raw_step": (1.5e-2, 0.0)}
    assert expected.keys() <= names.keys()
    for name, parameter in names.items():
        group = found[id(parameter)]
        assert (group["lr"], group["weight_decay"]) == pytest.approx(expected.get(name, (5e-4, 0.7))), name


def test_a_learned_beta_moves_at_its_own_rate() -> None:
    """A step moves raw_decay by about decay_lr, far more than lr: else a sweep over beta0 would measure the budget."""
    model = build(model_config(residual(0.55)))
    schedule = train_config(model.config, lr=1e-4, decay_lr=1e-2).schedule
    optimizer = build_optimizer(model, schedule)
    raw = dict(model.named_parameters())["inner.raw_decay"]
    before = raw.item()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    set_lr(optimizer, 1.0)
    optimizer.step()
    assert before - raw.item() == pytest.approx(1e-2, rel=1e-3)


def test_averaged_weights_trajectory() -> None:
    """Three updates of the released EMA; frozen parameters and buffers are not averaged; swapping twice is exact."""
    io, mu = tensors("optim"), facts("optim")["ema"]["mu"]
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model.register_buffer("buf", torch.zeros(3))
    model[1].bias.requires_grad_(False)

    def load(step: int) -> None:
        prefix = f"ema.param.{step}."
        model.load_state_dict({k.removeprefix(prefix): v for k, v in io.items() if k.startswith(prefix)})

    load(0)
    averaged = AveragedWeights(model, mu)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    for step in range(4):
        if step:
            load(step)
            averaged.update()
        assert len(averaged.shadow) == len(names) == 3
        for name, shadow in zip(names, averaged.shadow, strict=True):
            assert_close(shadow, io[f"ema.shadow.{step}.{name}"], 1e-6, f"{name} after {step} updates")

    raw = {name: value.clone() for name, value in model.state_dict().items()}
    averaged.swap()
    for name, value in model.state_dict().items():
        assert_close(value, io[f"ema.copy.{name}"], 1e-6, name)
    averaged.swap()
    for name, value in model.state_dict().items():
        assert torch.equal(value, raw[name]), name


def test_sign_sgd_trajectory() -> None:
    """Gradients of equal ids are summed before the sign; rows outside the batch stay bit for bit."""
    io, told = tensors("signsgd"), facts("signsgd")
    table = io["weights.0"].clone()
    for step, lr in enumerate(told["lr_per_step"]):
        ids = io[f"ids.{step}"]
        assert torch.equal(table[ids.long()], io[f"gathered.{step}"])
        before = table.clone()
        sign_sgd(table, ids, io[f"grad.{step}"], lr, told["weight_decay"])
        torch.testing.assert_close(table, io[f"weights.{step + 1}"], rtol=0, atol=1e-6)
        untouched = [row for row in range(len(table)) if row not in ids.tolist()]
        assert untouched and torch.equal(table[untouched], before[untouched])
        table = io[f"weights.{step + 1}"].clone()


def test_sign_of_zero_is_zero() -> None:
    """Gradients that cancel move a row by its decay alone."""
    table = torch.ones(2, 3)
    sign_sgd(table, torch.tensor([1, 1]), torch.tensor([[1.0, -1.0, 2.0], [-1.0, 1.0, -1.0]]), 0.1, 0.5)
    assert table[0].tolist() == [1, 1, 1]
    assert table[1].tolist() == pytest.approx([0.95, 0.95, 0.85])

"""Stablemax cross-entropy against the released float64 code, at its extremes, and the sums made of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from models.losses import IGNORE, log_stablemax, segment_loss
from tests.parity import tensors

extremes = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-7, -1e-7, 1e-30, 1e4, -1e4])
logits = st.lists(st.one_of(st.floats(-1e4, 1e4, width=32), extremes), min_size=6, max_size=6)


def cell_losses(values: Tensor, labels: Tensor) -> Tensor:
    """Loss per position, 0 where the label is ignored."""
    target = labels.clamp(min=0)[..., None]
    return -log_stablemax(values).gather(-1, target)[..., 0] * (labels != IGNORE)


def released(values: Tensor) -> Tensor:
    """log stablemax as the released code has it, in float64 (whose exact 1.0 logit costs it no NaN)."""
    x = values.double()
    s = torch.where(x < 0, 1 / (1 - x + 1e-30), x + 1)
    return torch.log(s / s.sum(-1, keepdim=True))


# At 1e30, log s is 69, which float32 keeps to 4e-6.
@pytest.mark.parametrize(("kind", "tolerance"), [("", 1e-6), ("bf16_", 5e-6)])
def test_released_values_and_gradients(kind: str, tolerance: float) -> None:
    """Values and gradients to 1e-6; row 0 holds an exact 0, exact 1.0 twice, 1e4, -1e6, 1e30, 1e-7."""
    io = tensors("stablemax")
    values, labels = io[f"{kind}logits"].float().requires_grad_(), io["labels"].long()
    loss = cell_losses(values, labels)
    (io["cotangent"].float() * loss).sum().backward()
    torch.testing.assert_close(loss.double(), io[f"{kind}loss"], rtol=0, atol=tolerance)
    assert values.grad is not None
    if kind:  # the stored gradient is rounded to bfloat16
        torch.testing.assert_close(values.grad.bfloat16(), io["bf16_grad_logits"], rtol=1e-2, atol=1e-6)
    else:
        torch.testing.assert_close(values.grad, io["grad_logits"], rtol=1e-6, atol=1e-6)


def test_released_loss_head() -> None:
    """A puzzle's loss is the mean over its supervised cells, puzzles are summed; a row without any adds 0."""
    io = tensors("stablemax")
    values, labels = io["logits"].clone().requires_grad_(), io["labels"].long()
    loss = segment_loss(values, labels)
    loss.cells.backward()
    torch.testing.assert_close(loss.cells.double(), io["loss_head_lm_loss"], rtol=1e-6, atol=1e-6)
    assert values.grad is not None
    torch.testing.assert_close(values.grad, io["loss_head_grad_logits"], rtol=1e-6, atol=1e-6)
    assert loss.exact[3] and loss.cells_supervised[3] == 0 and (values.grad[3] == 0).all()


@given(logits, st.integers(0, 5))
def test_float32_equals_float64(values: list[float], label: int) -> None:
    """Any logits in -1e4..1e4, exact 0 and 1.0 among them: values and gradients of float64, never NaN."""
    narrow = torch.tensor([[values]], requires_grad=True)
    wide = torch.tensor([[values]], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[label]])
    cell_losses(narrow, target).sum().backward()
    (-released(wide)[..., label]).sum().backward()
    torch.testing.assert_close(log_stablemax(narrow).double(), released(wide), rtol=1e-6, atol=1e-6)
    assert narrow.grad is not None and wide.grad is not None
    torch.testing.assert_close(narrow.grad.double(), wide.grad, rtol=1e-5, atol=1e-6)


def test_is_a_distribution() -> None:
    """Probabilities sum to 1 and order as the logits do; s(0) = 1 from both sides."""
    values = torch.tensor([-1e4, -3.0, -1e-6, 0.0, 1e-6, 3.0, 1e4])
    p = log_stablemax(values).exp()
    assert p.sum().item() == pytest.approx(1, abs=1e-6)
    assert (p.diff() >= 0).all() and p[3].item() == pytest.approx(p[2].item(), rel=1e-5)
    assert (p[-1] / p[3]).item() == pytest.approx(1e4 + 1, rel=1e-5)


def test_exact_and_cell_counts() -> None:
    """Exact means every supervised cell right; an ignored cell counts neither for nor against."""
    labels = torch.tensor([[0, 1, 2], [0, 1, IGNORE], [0, 1, 2], [IGNORE, IGNORE, IGNORE]])
    answers = torch.tensor([[0, 1, 2], [0, 1, 0], [0, 1, 1], [2, 2, 2]])
    loss = segment_loss(5 * torch.nn.functional.one_hot(answers, 3).float(), labels)
    assert loss.exact.tolist() == [True, True, False, True]
    assert loss.cells_right.tolist() == [3, 2, 2, 0]
    assert loss.cells_supervised.tolist() == [3, 2, 3, 0]
    assert torch.isfinite(loss.cells)


def test_ignored_cells_get_no_gradient() -> None:
    """Logits of unsupervised cells are free; a supervised cell weighs 1 / (number of them in its puzzle)."""
    labels = torch.tensor([[1, IGNORE, IGNORE], [1, 1, 1]])
    values = torch.zeros(2, 3, 4, requires_grad=True)
    segment_loss(values, labels).cells.backward()
    assert values.grad is not None
    assert (values.grad[0, 1:] == 0).all()
    torch.testing.assert_close(values.grad[1, 0] * 3, values.grad[0, 0])

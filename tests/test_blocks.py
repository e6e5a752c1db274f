"""The parts of the shared block, each against its formula written by hand."""

import math

import pytest
import torch
from torch import Tensor

from models.blocks import Attention, Block, Linear, Rotary, SwiGLU, rms_norm, truncated_normal
from tests.reference import attention, rotated
from tests.tiny import assert_close, model_config


@pytest.mark.parametrize("rope", [False, True])
@torch.no_grad()
def test_attention_is_softmax_over_positions(rope: bool) -> None:
    """Equals hand-written softmax attention to 1e-5 at Sudoku's length; swapped axes would mix heads instead of cells."""
    layer, x = Attention(32, 4), torch.randn(3, 97, 32)
    w = {f"a.{name}": value for name, value in layer.state_dict().items()}
    expected = attention(w, "a", x, 4, 10000.0 if rope else None)
    mine = layer(x, Rotary(97, 8, 10000.0) if rope else None)
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)


def test_rotary_sees_distance_only() -> None:
    """Scores of rotated vectors depend on how far apart two positions are, and position 0 is not turned."""
    rotary = Rotary(40, 8, 10000.0)
    q, k = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 40, 1, 8)
    score = rotary(q)[0, :, 0] @ rotary(k)[0, :, 0].T
    for gap in (0, 1, 7, 30):
        along = score.diagonal(gap)
        assert_close(along, along[:1].expand_as(along), 1e-4, f"distance {gap}")
    assert torch.equal(rotary(q)[:, 0], q[:, 0])
    assert_close(rotary(q)[:, :, 0], rotated(q[:, :, 0], 10000.0), 1e-5)


@pytest.mark.parametrize(
    ("width", "expansion", "multiple", "inner"), [(512, 4.0, 256, 1536), (97, 4.0, 256, 512), (96, 4.0, 32, 256)]
)
def test_swiglu_width(width: int, expansion: float, multiple: int, inner: int) -> None:
    """Inner width 2/3 of expansion x width, rounded up to the multiple: the paper's parameter count depends on it."""
    layer = SwiGLU(width, expansion, multiple)
    assert layer.gate_up.weight.shape == (2 * inner, width)
    assert layer.down.weight.shape == (width, inner)


def test_rms_norm() -> None:
    """Over the last axis, in float32 whatever the input, with eps inside the root and no scale."""
    x = torch.randn(2, 3, 8)
    expected = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt()
    assert_close(rms_norm(x, 0.1), expected, 1e-6)
    half = rms_norm(x.bfloat16() * 100, 1e-5)
    assert half.dtype == torch.bfloat16
    assert_close(half.float(), rms_norm(x.bfloat16().float() * 100, 1e-5), 1e-2)
    assert (rms_norm(torch.zeros(2, 8), 1e-5) == 0).all()


@pytest.mark.parametrize("mixer", ["attention", "mlp"])
def test_norms_of_a_layer(mixer: str) -> None:
    """The token mixer's norm runs over positions, as released; after the SwiGLU each position has unit mean square."""
    config = model_config(mixer=mixer, layers=1)
    block = Block(config, 12)
    with torch.no_grad():
        for name, weight in block.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                weight.zero_()  # the branches add nothing, only the norms act
        x = torch.randn(2, 12, 16)
        expected = x if mixer == "attention" else rms(x, 1)
        assert_close(
            block(x, torch.zeros_like(x)), rms(rms(expected, 2) if mixer == "attention" else expected, 2), 1e-5
        )


def rms(x: Tensor, dim: int) -> Tensor:
    return x / (x.square().mean(dim, keepdim=True) + 1e-5).sqrt()


def test_initial_weights() -> None:
    """The standard deviation asked for is the one after the cut at two standard deviations; biases start at 0."""
    sample = truncated_normal(1000, 1000, std=0.5)
    assert sample.std().item() == pytest.approx(0.5, rel=5e-3)
    assert sample.abs().max().item() == pytest.approx(2 * 0.5 / 0.87963, rel=1e-3)
    assert (truncated_normal(3, std=0) == 0).all()
    layer = Linear(400, 300, bias=True)
    assert layer.weight.shape == (300, 400) and layer.bias is not None
    assert layer.weight.std().item() == pytest.approx(1 / math.sqrt(400), rel=2e-2)
    assert (layer.bias == 0).all()

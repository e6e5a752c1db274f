"""Normal noise as a function of a key and a step: no generator, so no order of drawing.

Shapes: B puzzles. A stream is two words of 32 bits a puzzle, int64 [B, 2], that move on by a constant at every step; each
number hashes its place with both. Streams share more numbers than chance would have it only where the second words agree
and the first nearly do.
"""

import math

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_STRIDE = (0x9E3779B9, 0x7F4A7C15)  # odd, so that a word comes back after 2^32 steps only


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (held in int64) that scatters them: shifts and odd factors, all products below 2^63."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _WORD
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _WORD
    return x ^ (x >> 15)


def streams(keys: Tensor) -> Tensor:
    """The streams [B, 2] of keys [B] (int64) at step 0; different keys, different streams."""
    low, high = keys & _WORD, (keys >> 32) & _WORD
    second = _mix(high ^ _mix(low))
    return torch.stack((_mix(low ^ _mix(second)), second), dim=1)


def advance(streams: Tensor) -> Tensor:
    """The streams [B, 2] one step later."""
    return torch.stack([(streams[:, i] + _STRIDE[i]) & _WORD for i in (0, 1)], dim=1)


def normal(streams: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Independent standard normal numbers, float32 [B, *shape], of the streams' present step.

    Integer operations on every element by itself, so that a row's numbers do not depend on its batch mates, and the
    compiler fuses them. Each number has 24 random bits and lies within +-5.4.
    """
    first, second = (streams[:, i].view(-1, *[1] * len(shape)) for i in (0, 1))
    place = torch.arange(math.prod(shape), device=streams.device).view(shape)
    bits = _mix(_mix(place ^ first) ^ second) >> 8
    uniform = (2 * bits + 1 - 2**24).float() / 2**24  # odd numbers over 2^24: symmetric, never +-1, exact in float32
    return math.sqrt(2) * torch.erfinv(uniform)

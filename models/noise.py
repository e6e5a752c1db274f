"""Normal noise as a function of a key and a step: no generator, no state, so no order of drawing.

Shapes: B puzzles.
"""

import math

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (held in int64) that scatters them: shifts and odd factors, all products below 2^63."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _WORD
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _WORD
    return x ^ (x >> 15)


def keyed_normal(keys: Tensor, steps: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Independent standard normal numbers, float32 [B, *shape], from keys and steps [B] (int64, steps >= 0).

    Integer operations on every element by itself, so that a row's numbers do not depend on its batch mates, and the
    compiler fuses them. Each number has 24 random bits and lies within +-5.4. Keys and steps meet in two words of 32 bits,
    so that streams do not overlap, not even in part, unless both words do.
    """
    low, high, steps = keys & _WORD, (keys >> 32) & _WORD, steps & _WORD
    first = _mix(low ^ _mix(steps))
    second = _mix(high ^ _mix(low ^ _mix(steps ^ 0x9E3779B9)))
    first, second = (word.view(-1, *[1] * len(shape)) for word in (first, second))
    place = torch.arange(math.prod(shape), device=keys.device).view(shape)
    bits = _mix(_mix(place ^ first) ^ second) >> 8
    uniform = (2 * bits + 1 - 2**24).float() / 2**24  # odd numbers over 2^24: symmetric, never +-1, exact in float32
    return math.sqrt(2) * torch.erfinv(uniform)

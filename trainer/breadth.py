"""Breadth: several random starts of one puzzle, and whose answer counts.

Shapes: P puzzles, K starts of each, S cells.
"""

import math
import zlib
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.config import Choose


class Readings(NamedTuple):
    """What starts say at one depth; a halted one, what it said when it halted."""

    answers: Tensor
    """uint8 [P, K, S] tokens"""
    moved: Tensor
    """float32 [P, K], root mean square change of h_H in the last outer update."""
    logits: Tensor
    """float32 [P, K], halting logit."""
    segments: Tensor
    """int32 [P, K], segments begun."""


def start_key(tokens: np.ndarray, start: int) -> int:
    """The noise key of a puzzle's start: the puzzle's own in any batch, and different for each of its starts."""
    return zlib.crc32(tokens.tobytes(), start)  # starts at different values of the checksum never meet


def rows_of_a_pass(n: int, starts: int, batch_size: int) -> tuple[int, int]:
    """Puzzles, and starts of each, that run together: at most batch_size rows, all starts of a puzzle if they fit."""
    at_once = min(starts, batch_size)
    return min(batch_size // at_once, n), at_once


def measures_movement(choose: Choose, starts: int) -> bool:
    return starts > 1 and choose in ("convergence", "vote")


def chosen_start(readings: Readings, choose: Choose) -> Tensor:
    """int64 [P], the start whose answer counts; of equals the lowest.

    convergence: the one that moved least. halting: the one with the greatest halting logit. vote: of the starts whose
    answer, cell for cell, most starts share, the one that moved least. A start that has left the numbers comes last.
    """
    worst = torch.finfo(torch.float32).max
    moved = readings.moved.nan_to_num(nan=worst, posinf=worst)
    if choose == "first":
        return torch.zeros(len(moved), dtype=torch.int64, device=moved.device)
    if choose == "halting":
        return readings.logits.nan_to_num(nan=-worst).argmax(1)
    if choose == "convergence":
        return moved.argmin(1)
    votes = (readings.answers[:, :, None] == readings.answers[:, None]).all(-1).sum(-1)
    return moved.masked_fill(votes < votes.amax(1, keepdim=True), math.inf).argmin(1)

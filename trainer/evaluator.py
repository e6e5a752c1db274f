"""Evaluation by depth: one pass to the greatest depth, sums and counts at every decode on the way.

Words: an outer update is L_cycles inner updates and one outer one, L_cycles + 1 block applications (in a flat recursion,
L_cycles updates of its one axis); executed layers are block applications times layers per block. Shapes: N puzzles, B of
them in a batch, S cells, R decoded depths.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from data.arrays import Split
from data.sudoku import BLANK_TOKEN, Box, is_complete_solution
from models.config import ModelConfig
from models.core import LoopedReasoner, Memory
from trainer.config import EvalConfig, ScheduleConfig
from trainer.errors import UserError


@dataclass(frozen=True)
class Depth:
    """How far an evaluation runs: H and L cycles, and outer updates in all (H to a segment; the last may be partial)."""

    H_cycles: int
    L_cycles: int
    outer_updates: int

    @property
    def segments(self) -> int:
        return math.ceil(self.outer_updates / self.H_cycles)


def resolve_depth(config: EvalConfig, trained: ScheduleConfig, model: ModelConfig) -> Depth:
    """The depth asked for in segments, outer updates or executed layers; default: as trained. Rounds up."""
    H, L = config.H_cycles or trained.H_cycles, config.L_cycles or trained.L_cycles
    if config.layers is not None:
        updates = math.ceil(config.layers / (model.layers * model.applications_per_update(L)))
    elif config.outer_updates is not None:
        updates = config.outer_updates
    else:
        updates = H * (config.segments or trained.segments)
    return Depth(H, L, updates)


@dataclass(frozen=True)
class DepthRow:
    """Counts after `outer_updates` outer updates, over all n puzzles."""

    outer_updates: int
    block_applications: int
    executed_layers: int
    n: int
    exact: int
    """Puzzles whose every supervised cell is right."""
    cells_right: int
    """Cells right among those that were blank in the puzzle."""
    cells: int
    recognised: int
    """Puzzles whose answer, at this depth or an evaluated one before, was recognised as a solution without the label."""
    segments_used: int
    """Sum over puzzles of the segments each had run when its answer was fixed."""

    @property
    def exact_accuracy(self) -> float:
        return self.exact / self.n

    @property
    def cell_accuracy(self) -> float:
        return self.cells_right / self.cells

    @property
    def recognised_share(self) -> float:
        return self.recognised / self.n

    @property
    def mean_segments(self) -> float:
        return self.segments_used / self.n


@dataclass(frozen=True)
class Evaluation:
    """Rows by depth, and per puzzle what held at the greatest depth."""

    depth: Depth
    rows: list[DepthRow]
    answers: np.ndarray
    """uint8 tokens [N, S]"""
    exact: np.ndarray
    """bool [N]"""
    segments: np.ndarray
    """int32 [N], segments run when the answer was fixed."""

    @property
    def last(self) -> DepthRow:
        return self.rows[-1]


def decode_points(depth: Depth, decode: Literal["segment", "outer_update"]) -> list[int]:
    """Outer updates after which answers are read: each one, or each segment's last and the very last."""
    step = 1 if decode == "outer_update" else depth.H_cycles
    return sorted({*range(step, depth.outer_updates + 1, step), depth.outer_updates})


class _BatchPass:
    """One batch on its way to the greatest depth: frozen answers of halted puzzles, sums per decoded depth."""

    def __init__(self, tokens: Tensor, labels: Tensor, real: int, box: Box, halting: bool, points: list[int]):
        batch, device = tokens.shape[0], tokens.device
        self.tokens, self.labels, self.box, self.halting = tokens, labels, box, halting
        self.real = torch.arange(batch, device=device) < real  # filler rows of the last batch count nowhere
        self.blank = tokens == BLANK_TOKEN
        self.answer = torch.zeros_like(tokens)
        self.halted = torch.zeros(batch, dtype=torch.bool, device=device)
        self.recognised = torch.zeros_like(self.halted)
        self.segments = torch.zeros(batch, dtype=torch.int32, device=device)
        self.points = {point: i for i, point in enumerate(points)}
        self.sums = torch.zeros(len(points), 4, dtype=torch.int64, device=device)

    def read(self, logits: Tensor, outer_updates: int, segments_begun: int) -> None:
        """Take the answers of the puzzles still running, then score every puzzle's present answer."""
        running = ~self.halted
        self.answer = torch.where(running[:, None], logits.argmax(-1).to(self.answer.dtype), self.answer)
        self.segments.masked_fill_(running, segments_begun)
        digits, givens = (
            (self.answer.long() - BLANK_TOKEN).clamp(min=0),
            (self.tokens.long() - BLANK_TOKEN).clamp(min=0),
        )
        self.recognised |= is_complete_solution(digits, givens, self.box)
        right = self.answer == self.labels
        self.exact = right.all(-1)
        counts = torch.stack(
            (
                (self.exact & self.real).sum(),
                (right & self.blank & self.real[:, None]).sum(),
                (self.recognised & self.real).sum(),
                self.segments[self.real].sum(),
            )
        )
        self.sums[self.points[outer_updates]] = counts


@torch.no_grad()
def evaluate(
    model: LoopedReasoner,
    split: Split,
    box: Box,
    depth: Depth,
    *,
    decode: Literal["segment", "outer_update"] = "segment",
    halting: bool = False,
    batch_size: int = 256,
    progress: Callable[[int], object] | None = None,
) -> Evaluation:
    """Run every puzzle of `split` to `depth` and score it at each decode point.

    With `halting`, a puzzle's answer is the one at its own first segment whose halting logit is positive, whatever the
    others in its batch do. The last batch is filled up with copies of its first puzzle, which count nowhere. `progress`
    is called with the number of outer updates times puzzles done. The model's mode, weights and random state are left
    alone.
    """
    n = len(split.inputs)
    if n == 0:
        raise UserError("evaluation: the split holds no puzzles; choose another split or eval.n")
    cells = int((split.inputs == BLANK_TOKEN).sum())
    if cells == 0:
        raise UserError("evaluation: no puzzle has an empty cell, so there is nothing to score; choose another split")
    device, mode = model.H_init.device, model.training
    model.eval()  # a damped connection has a rate of its own for evaluation
    batch_size = min(batch_size, n)
    points = decode_points(depth, decode)
    wanted = set(points)
    sums = torch.zeros(len(points), 4, dtype=torch.int64)
    answers, exact, segments_used = [], [], []
    for first in range(0, n, batch_size):
        index = np.arange(first, first + batch_size)
        real = min(batch_size, n - first)
        index[real:] = first
        tokens = torch.from_numpy(split.inputs[index]).to(device)
        labels = torch.from_numpy(split.labels[index]).to(device)
        x = model.encode(tokens, model.puzzle_rows(torch.from_numpy(split.puzzle_ids[index]).to(device)))
        run = _BatchPass(tokens, labels, real, box, halting, points)
        keys = [zlib.crc32(row.tobytes()) for row in split.inputs[index]]  # noise is the puzzle's own in any batch
        memory, done = model.start(batch_size, torch.tensor(keys)), 0

        def after_outer(memory: Memory, run: _BatchPass = run, real: int = real) -> None:
            nonlocal done
            done += 1
            if done in wanted:  # the end of a segment always is
                logits, q = model.decode(memory)
                run.read(logits, done, math.ceil(done / depth.H_cycles))
                if halting and done % depth.H_cycles == 0:
                    run.halted |= model.halting.wants_to_halt(q, memory.outer)
            if progress is not None:
                progress(real)

        while done < depth.outer_updates:
            outer = min(depth.H_cycles, depth.outer_updates - done)
            memory = model.segment(memory, x, outer, depth.L_cycles, after_outer=after_outer)
        sums += run.sums.cpu()
        answers.append(run.answer[:real].cpu().numpy())
        exact.append(run.exact[:real].cpu().numpy())
        segments_used.append(run.segments[:real].cpu().numpy())
    model.train(mode)
    per_update = model.config.applications_per_update(depth.L_cycles)
    rows = [
        DepthRow(u, u * per_update, u * per_update * model.config.layers, n, row[0], row[1], cells, row[2], row[3])
        for u, row in zip(points, sums.tolist(), strict=True)
    ]
    return Evaluation(depth, rows, np.concatenate(answers), np.concatenate(exact), np.concatenate(segments_used))


def subset(split: Split, n: int, seed: int) -> Split:
    """A fixed random subset of n puzzles, in the split's order; the same whatever else runs."""
    index = np.sort(np.random.default_rng(seed).choice(len(split.inputs), size=n, replace=False))
    return Split(split.inputs[index], split.labels[index], split.rating[index], split.puzzle_ids[index])

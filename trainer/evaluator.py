"""Evaluation by depth: one pass to the greatest depth, sums and counts at every decode on the way.

Words: an outer update is L_cycles inner updates and one outer one, L_cycles + 1 block applications (in a flat recursion,
L_cycles updates of its one axis); executed layers are block applications times layers per block. Shapes: N puzzles, B of
them in a batch, S cells, R decoded depths.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from data.arrays import Rules, Split
from models.config import ModelConfig
from models.connections import where_rows
from models.core import LoopedReasoner, Memory
from models.halting import ResidualHalting
from trainer.breadth import Readings, chosen_start, measures_movement, rows_of_a_pass, start_key
from trainer.config import Choose, EvalConfig, Halting, ScheduleConfig
from trainer.errors import UserError

CHUNK = 65_536
"""Puzzles looked at together where nothing is computed: a test set may be larger than memory."""


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
    """Cells right among those that the puzzle does not give."""
    cells: int
    recognised: int
    """Puzzles whose answer, at this depth or an evaluated one before, was recognised as a solution without the label."""
    segments_used: int
    """Sum over puzzles of the segments each had run when its answer was fixed."""
    starts: int
    """Starts of each puzzle; the counts above are of the chosen one's answer."""
    starts_exact: int
    """Starts, of n * starts, whose every supervised cell is right."""
    any_start_exact: int
    """Puzzles with such a start: what an oracle would choose, not an accuracy."""

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


class _Batch:
    """The puzzles of a batch: counts per decoded depth, as soon as all their starts have got there.

    Only the first `real` puzzles count; the others fill up the last batch.
    """

    def __init__(
        self, tokens: Tensor, labels: Tensor, real: int, rules: Rules, points: list[int], starts: int, choose: Choose
    ):
        self.tokens, self.labels, self.rules, self.starts = tokens, labels, rules, starts
        self.choose: Choose = choose
        self.real = torch.arange(len(tokens), device=tokens.device) < real
        self.labelled = labels != 0
        self.counted = rules.to_fill(tokens) & self.labelled & self.real[:, None]
        self.recognised = torch.zeros_like(self.real)
        self.waiting: dict[int, list[Readings]] = {point: [] for point in points}
        self.counts: list[Tensor] = []

    def take(self, point: int, readings: Readings) -> None:
        """Keep what some of the starts say at a depth; when those were the last ones, choose and score."""
        parts = [*self.waiting.pop(point), readings]
        if sum(part.answers.shape[1] for part in parts) < self.starts:
            self.waiting[point] = parts
            return
        every = Readings(*(torch.cat(tensors, 1) for tensors in zip(*parts, strict=True)))
        puzzle, chosen = torch.arange(len(self.real), device=self.real.device), chosen_start(every, self.choose)
        self.answer, self.segments = every.answers[puzzle, chosen], every.segments[puzzle, chosen]
        self.recognised |= self.rules.solved(self.answer, self.tokens)
        right = self.answer == self.labels
        self.exact = (right | ~self.labelled).all(-1)
        each = (every.answers == self.labels[:, None]) | ~self.labelled[:, None]
        each = each.all(-1) & self.real[:, None]
        counts = (
            self.exact & self.real,
            right & self.counted,
            self.recognised & self.real,
            self.segments * self.real,
            each,
            each.any(1),
        )
        self.counts.append(torch.stack([count.sum() for count in counts]))


class _Pass:
    """Rows on their way to the greatest depth, all at once: some starts of each puzzle of a batch.

    `counted` of the `at_once` starts of a puzzle are real, the others filler. `said` is what the rows say so far.
    """

    def __init__(
        self, model: LoopedReasoner, batch: _Batch, depth: Depth, halting: Halting, at_once: int, counted: int
    ):
        self.model, self.batch, self.depth, self.halting = model, batch, depth, halting
        self.shape, self.counted, self.points = (len(batch.real), at_once), counted, set(batch.waiting)
        self.real = (batch.real[:, None] & (torch.arange(at_once, device=batch.real.device) < counted)).flatten()
        self.halted = torch.zeros_like(self.real)
        self.measuring = measures_movement(batch.choose, batch.starts)
        self.said: Readings | None = None

    def run(self, memory: Memory, x: Tensor, progress: Callable[[int], object] | None) -> None:
        self.done, self.before = 0, memory.outer.h if self.measuring else None
        depth, rows = self.depth, int(self.real.sum())

        def after_outer(memory: Memory) -> None:
            self.done += 1
            if self.done in self.points:  # the end of a segment always is
                self._read(memory)
                self._report(self.done)
            self.before = memory.outer.h if self.measuring else None
            if progress is not None:
                progress(rows)

        while self.done < depth.outer_updates and not (self.halting != "off" and self.halted.all()):
            outer = min(depth.H_cycles, depth.outer_updates - self.done)
            memory = self.model.segment(memory, x, outer, depth.L_cycles, after_outer=after_outer)
        for point in sorted(point for point in self.points if point > self.done):
            self._report(point)  # every row has halted: nothing changes any more
        if progress is not None and self.done < depth.outer_updates:
            progress(rows * (depth.outer_updates - self.done))

    def _read(self, memory: Memory) -> None:
        """Take in what the rows still running say, then which of them halt."""
        (logits, q), outer, H = self.model.decode(memory), memory.outer, self.depth.H_cycles
        moved = nothing = torch.zeros(len(logits), device=logits.device)
        if self.before is not None:
            moved = (outer.h.float() - self.before.float()).square().flatten(1).mean(1).sqrt()
        segments = torch.full_like(nothing, math.ceil(self.done / H), dtype=torch.int32)
        now = Readings(logits.argmax(-1).to(torch.uint8), moved, nothing if q is None else q, segments)
        old = self.said or now
        self.said = Readings(*(where_rows(self.halted, before, new) for before, new in zip(old, now, strict=True)))
        if self.done % H == 0 and self.halting == "on":
            self.halted |= self.model.halting.wants_to_halt(q, outer)
        elif self.done % H == 0 and self.halting == "batch_residual":
            assert isinstance(self.model.halting, ResidualHalting), "EvalConfig.conflict refuses other models"
            self.halted |= self.model.halting.batch_wants_to_halt(outer, self.real)

    def _report(self, point: int) -> None:
        assert self.said is not None
        self.batch.take(point, Readings(*(t.unflatten(0, self.shape)[:, : self.counted] for t in self.said)))


def cells_that_count(split: Split, rules: Rules) -> int:
    """Cells of the whole split that count for cell accuracy: not given in the puzzle, and labelled.

    UserError when the puzzles give every cell.
    """
    empty = labelled = 0
    for first in range(0, len(split), CHUNK):
        tokens, labels = (torch.from_numpy(np.array(a[first : first + CHUNK])) for a in (split.inputs, split.labels))
        to_fill = rules.to_fill(tokens)
        empty, labelled = empty + int(to_fill.sum()), labelled + int((to_fill & (labels != 0)).sum())
    if empty == 0:
        raise UserError("evaluation: no puzzle has an empty cell, so there is nothing to score; choose another split")
    return labelled


@torch.no_grad()
def evaluate(
    model: LoopedReasoner,
    split: Split,
    rules: Rules,
    depth: Depth,
    *,
    decode: Literal["segment", "outer_update"] = "segment",
    halting: Halting = "off",
    starts: int = 1,
    choose: Choose = "convergence",
    noise: float | None = None,
    batch_size: int = 256,
    progress: Callable[[int], object] | None = None,
) -> Evaluation:
    """Run every puzzle of `split` to `depth` from `starts` random starts and score the chosen answer at each decode point.

    With halting=on, a row's answer is the one at its own first segment whose halting rule is satisfied, whatever the others
    in its batch do. With halting=batch_residual (models/halting.py) all rows of a batch stop together, as in the released
    FPRM. A batch is at most batch_size rows; more starts than that run one part after the other. The last batch is filled
    up with copies of its first puzzle, which count nowhere; neither do they keep a batch from stopping, while the padding
    of the released FPRM does. `progress` is called with the number of outer updates times rows done. The model's mode,
    weights and random state are left alone.
    """
    n = len(split.inputs)
    if n == 0:
        raise UserError("evaluation: the split holds no puzzles; choose another split or eval.n")
    cells = cells_that_count(split, rules)
    device, mode = model.H_init.device, model.training
    model.eval()  # a damped connection has a rate of its own for evaluation
    puzzles, at_once = rows_of_a_pass(n, starts, batch_size)
    points = decode_points(depth, decode)
    sums = torch.zeros(len(points), 6, dtype=torch.int64)
    answers, exact, segments_used = [], [], []
    for first in range(0, n, puzzles):
        index = np.arange(first, first + puzzles)
        real = min(puzzles, n - first)
        index[real:] = first
        tokens = torch.from_numpy(split.inputs[index]).to(device)
        labels = torch.from_numpy(split.labels[index]).to(device)
        x = model.encode(tokens, model.puzzle_rows(torch.from_numpy(split.puzzle_ids[index]).to(device)))
        x = x.repeat_interleave(at_once, 0)
        batch = _Batch(tokens, labels, real, rules, points, starts, choose)
        for begin in range(0, starts, at_once):
            counted = min(at_once, starts - begin)
            own = [begin + (k if k < counted else 0) for k in range(at_once)]
            keys = torch.tensor([start_key(row, start) for row in split.inputs[index] for start in own])
            rows = _Pass(model, batch, depth, halting, at_once, counted)
            rows.run(model.start(len(keys), keys, noise), x, progress)
        sums += torch.stack(batch.counts).cpu()
        answers.append(batch.answer[:real].cpu().numpy())
        exact.append(batch.exact[:real].cpu().numpy())
        segments_used.append(batch.segments[:real].cpu().numpy())
    model.train(mode)
    per_update = model.config.applications_per_update(depth.L_cycles)
    rows = [
        DepthRow(
            u,
            u * per_update,
            u * per_update * model.config.layers,
            n,
            c[0],
            c[1],
            cells,
            c[2],
            c[3],
            starts,
            c[4],
            c[5],
        )
        for u, c in zip(points, sums.tolist(), strict=True)
    ]
    return Evaluation(depth, rows, np.concatenate(answers), np.concatenate(exact), np.concatenate(segments_used))


def subset(split: Split, n: int, seed: int) -> Split:
    """A fixed random subset of n puzzles, in the split's order; the same whatever else runs."""
    index = np.sort(np.random.default_rng(seed).choice(len(split.inputs), size=n, replace=False))
    return Split(split.inputs[index], split.labels[index], split.rating[index], split.puzzle_ids[index])

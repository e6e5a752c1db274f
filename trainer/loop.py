"""The training loop, read from top to bottom: `train` sets up, then repeats one step.

A step: rows that finished get fresh puzzles; one segment for the whole global batch, in micro-batches; one optimizer
step; rows that should halt are marked. The rare events (log, validate, save) follow, in that order.
"""

import logging
import math
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from data.arrays import PuzzleData
from data.build import load_puzzle_data
from data.sampler import GroupSampler, TrainSampler
from models.connections import AttentionResidual, ConstantStep, FullAttentionResidual
from models.core import LoopedReasoner, Memory
from models.halting import exploration_minimum
from models.losses import segment_loss
from trainer.capacity import fitting_micro_batch, probe, seconds_per_step
from trainer.checkpoint import save_checkpoint
from trainer.config import PuzzleDirConfig, TrainConfig
from trainer.errors import UserError
from trainer.evaluator import evaluate, resolve_depth
from trainer.metrics import Tracker, progress_bar
from trainer.optim import AveragedWeights, build_optimizer, lr_factor, set_lr, sign_sgd
from trainer.report import choose_subset, final_report, refuse_too_many
from trainer.run_dir import record_run, refuse_used
from trainer.runtime import Runtime, free_memory, seed_everything, set_up

log = logging.getLogger("longloop")

LONG_RUN_HOURS = 24


@dataclass
class Carry:
    """Everything that survives from one segment to the next, for the rows of the global batch."""

    memory: Memory
    tokens: Tensor
    """uint8 [B, S]"""
    labels: Tensor
    """int64 [B, S]"""
    puzzle_ids: Tensor
    """int32 [B]"""
    segments: Tensor
    """int64 [B], segments the row's puzzle has had."""
    finished: Tensor
    """bool [B], rows to be replaced before the next segment."""


def empty_carry(model: LoopedReasoner, batch: int) -> Carry:
    """All rows finished, so that the first step fills them."""
    device = model.H_init.device
    return Carry(
        memory=model.start(batch),
        tokens=torch.zeros(batch, model.seq_len, dtype=torch.uint8, device=device),
        labels=torch.zeros(batch, model.seq_len, dtype=torch.int64, device=device),
        puzzle_ids=torch.zeros(batch, dtype=torch.int32, device=device),
        segments=torch.zeros(batch, dtype=torch.int64, device=device),
        finished=torch.ones(batch, dtype=torch.bool, device=device),
    )


def replace_finished(
    carry: Carry, model: LoopedReasoner, sampler: TrainSampler | GroupSampler, drawn: int
) -> tuple[Carry, int]:
    """Fresh puzzles and fresh memories for finished rows, in row order; every other row stays bit for bit.

    `drawn` counts the puzzles drawn so far; returns the carry and the new count.
    """
    count = int(carry.finished.sum())
    if count == 0:
        return carry, drawn
    rows, device = carry.finished, carry.tokens.device
    batch = sampler.draw(drawn, count)
    keys = torch.zeros(len(rows), dtype=torch.int64)
    keys[rows.cpu()] = batch.noise_keys
    carry = replace(
        carry,
        memory=model.reset(carry.memory, rows, keys),
        tokens=carry.tokens.clone(),
        labels=carry.labels.clone(),
        puzzle_ids=carry.puzzle_ids.clone(),
        segments=carry.segments.masked_fill(rows, 0),
        finished=torch.zeros_like(rows),
    )
    carry.tokens[rows] = batch.inputs.to(device, carry.tokens.dtype)
    carry.labels[rows] = batch.labels.to(device, carry.labels.dtype)
    carry.puzzle_ids[rows] = batch.puzzle_ids.to(device)
    return carry, drawn + count


@dataclass
class StepResult:
    """Sums over the global batch after one segment."""

    memory: Memory
    halt_logit: Tensor | None
    exact: Tensor
    """bool [B]"""
    sums: dict[str, Tensor]
    puzzle_gradient: Tensor | None
    """[B, E], of the puzzle-table rows."""


def forward_backward(model: LoopedReasoner, carry: Carry, config: TrainConfig, micro_batch: int) -> StepResult:
    """One segment for every row, gradients of (summed loss / global batch) accumulated over micro-batches."""
    schedule, batch = config.schedule, len(carry.finished)
    memories, halt_logits, exact, row_gradients = [], [], [], []
    names = ("cell_loss", "halt_loss", "cells_right", "cells")
    sums = {name: torch.zeros((), dtype=torch.float64 if name.endswith("loss") else torch.int64) for name in names}
    for first in range(0, batch, micro_batch):
        part = slice(first, first + micro_batch)
        rows = model.puzzle_rows(carry.puzzle_ids[part]).requires_grad_(config.model.puzzle_emb_dim > 0)
        x = model.encode(carry.tokens[part], rows)
        memory = model.segment(
            carry.memory.map(lambda t: t[part]),  # noqa: B023 - used at once
            x,
            schedule.H_cycles,
            schedule.L_cycles,
            schedule.grad_outer_cycles,
        )
        logits, q = model.decode(memory)
        loss = segment_loss(logits, carry.labels[part])
        halt_loss = model.halting.loss(q, loss.exact)
        ((loss.cells + schedule.halt_loss_weight * halt_loss) / batch).backward()
        memories.append(memory.map(Tensor.detach))
        exact.append(loss.exact)
        row_gradients.append(rows.grad)
        if q is not None:
            halt_logits.append(q.detach())
        for name, value in zip(
            names, (loss.cells, halt_loss, loss.cells_right.sum(), loss.cells_supervised.sum()), strict=True
        ):
            sums[name] += value.detach().cpu()
    return StepResult(
        Memory.cat(memories),
        torch.cat(halt_logits) if halt_logits else None,
        torch.cat(exact),
        sums,
        torch.cat(row_gradients) if row_gradients[0] is not None else None,
    )


def mark_finished(
    carry: Carry, result: StepResult, model: LoopedReasoner, config: TrainConfig, exploration: torch.Generator
) -> Carry:
    """Advance the segment count and mark rows that halt: out of segments, or willing and not held back by exploration."""
    schedule, batch = config.schedule, len(carry.finished)
    segments = carry.segments + 1
    least = exploration_minimum(batch, schedule.halt_exploration, schedule.segments, exploration).to(segments.device)
    willing = model.halting.wants_to_halt(result.halt_logit, result.memory.outer) & (segments >= least)
    return replace(carry, memory=result.memory, segments=segments, finished=willing | (segments >= schedule.segments))


@torch.no_grad()
def answers_are_finite(model: LoopedReasoner, carry: Carry, config: TrainConfig) -> bool:
    """Whether the present weights still answer in numbers, seen on a few rows: a checkpoint of others is of no use."""
    part, schedule = slice(4), config.schedule
    with torch.compiler.set_stance("force_eager"):  # too few rows to compile for
        x = model.encode(carry.tokens[part], model.puzzle_rows(carry.puzzle_ids[part]))
        memory = model.segment(carry.memory.map(lambda t: t[part]), x, schedule.H_cycles, schedule.L_cycles)
        return bool(torch.isfinite(model.decode(memory)[0]).all())


def diverged(step: int, what: str, config: TrainConfig, saved: dict[str, int]) -> UserError:
    """The error that ends a run whose numbers have left the finite."""
    good = ", ".join(f"{config.run_dir / name}.safetensors of step {at}" for name, at in saved.items())
    lower = f"lower schedule.lr (now {config.schedule.lr:g})"
    return UserError(f"step {step}: {what}; stopped, {lower}. Good checkpoints so far: {good}")


def connection_facts(model: LoopedReasoner) -> dict[str, float]:
    """What the connections have learned so far: beta or step size per axis."""
    facts = {}
    for axis, connection in (("inner", model.inner), ("outer", model.outer)):
        if isinstance(connection, AttentionResidual | FullAttentionResidual):
            facts[f"beta_{axis}"] = connection.beta().item()
        elif isinstance(connection, ConstantStep):
            facts[f"step_{axis}"] = torch.as_tensor(connection.step_size()).item()
    return facts


def training_sampler(config: TrainConfig, data: PuzzleData) -> TrainSampler | GroupSampler:
    """What draws the puzzles of a run."""
    if isinstance(config.data, PuzzleDirConfig):
        assert data.groups is not None
        return GroupSampler(data.train, data.groups, config.schedule.global_batch, config.data.passes, config.data.seed)
    return TrainSampler(data.train, data.meta.box, config.data.num_aug, config.seed, config.data.seed)


def announce(model: LoopedReasoner, config: TrainConfig, data: PuzzleData, runtime: Runtime) -> int:
    """Say what will run, choose the micro-batch, estimate the time; returns the micro-batch."""
    schedule = config.schedule
    counts = model.parameter_counts()
    log.info(
        f"model {config.model.name}: {counts['parameters']:,} parameters ({counts['without_embeddings']:,} without "
        f"embeddings and output head; puzzle table of {counts['puzzle_table']:,} numbers not counted)"
    )
    sampler = training_sampler(config, data)
    sample = sampler.draw(0, schedule.global_batch)
    tokens, labels = sample.inputs.to(runtime.device), sample.labels.to(runtime.device, torch.int64)
    probed = probe(model, tokens, labels, schedule)
    micro = config.trainer.micro_batch
    if micro == "auto":
        micro = fitting_micro_batch(probed.bytes_per_puzzle, free_memory(runtime.device), schedule.global_batch)
        fit = f" ({probed.bytes_per_puzzle / 1e6:.1f} MB of saved activations a puzzle)"
    else:
        fit = " (as set)"
    log.info(f"global batch {schedule.global_batch} in micro-batches of {micro}{fit}")
    if runtime.compile:
        log.info("compiling the recursion (once, under a minute) ...")
        model.compile_updates()
    seconds = seconds_per_step(model, tokens, labels, schedule, micro, probed)
    hours = seconds * config.steps / 3600
    took = f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"
    log.info(f"estimate: {seconds:.2f} s a step, {took} for {config.steps:,} steps, evaluation not counted")
    if hours > LONG_RUN_HOURS:
        log.info(
            f"that is {hours / 24:.0f} days on this machine; the same pipeline at CPU size: "
            "python train.py experiment=sudoku6_cpu"
        )
    return micro


def train(config: TrainConfig) -> dict[str, Any]:
    """Train, validate, save, and report on the whole test split. Returns what results.json holds."""
    refuse_used(config.run_dir)
    runtime = set_up(config.trainer)
    data = load_puzzle_data(config.data, log.info)
    refuse_too_many(config.eval, data.test, "the test split")
    seed_everything(config.seed)
    model = LoopedReasoner(config.model, data.meta.vocab_size, data.meta.seq_len, data.meta.num_puzzle_ids)
    model.to(runtime.device)
    model.compute_dtype = runtime.dtype
    run_dir = record_run(config, model, data.meta)
    micro_batch = announce(model, config, data, runtime)

    schedule, settings = config.schedule, config.trainer
    optimizer, averaged = build_optimizer(model, schedule), AveragedWeights(model, schedule.ema)
    sampler = training_sampler(config, data)
    exploration = torch.Generator().manual_seed(config.seed)
    carry, drawn = empty_carry(model, schedule.global_batch), 0
    depth = resolve_depth(config.eval, schedule, config.model)
    best, begin = (-1, -1), time.perf_counter()
    # Every validation takes the same puzzles; all of them unless that would take longer than a validation may.
    automatic = config.eval.model_copy(update={"n": "auto"})
    validation, _ = choose_subset(
        data.validation, automatic, model, depth, "the validation split", config.eval.max_minutes
    )
    meta, saved = asdict(data.meta), {"last": 0}
    # The first checkpoint shows that the disk takes them, and is what is left if step 1 already goes astray.
    save_checkpoint(run_dir / "last.safetensors", model, averaged.shadow, config, 0, meta)

    with Tracker(run_dir, config) as tracker, progress_bar(config.steps, "training") as bar:
        for step in range(1, config.steps + 1):
            carry, drawn = replace_finished(carry, model, sampler, drawn)

            result = forward_backward(model, carry, config, micro_batch)
            gradient_norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
            loss = float(result.sums["cell_loss"] + schedule.halt_loss_weight * result.sums["halt_loss"])
            loss /= schedule.global_batch
            if not (math.isfinite(loss) and math.isfinite(gradient_norm.item())):
                what = f"loss {loss:.4g}, gradient norm {gradient_norm.item():.4g}, not finite"
                raise diverged(step, what, config, saved)

            factor = lr_factor(step, schedule.warmup_steps, schedule.total_steps, schedule.lr_min_ratio)
            set_lr(optimizer, factor)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if result.puzzle_gradient is not None:
                rate, decay = schedule.puzzle_emb_lr * factor, schedule.puzzle_emb_weight_decay
                sign_sgd(model.puzzle_table, carry.puzzle_ids, result.puzzle_gradient, rate, decay)
            averaged.update()

            carry = mark_finished(carry, result, model, config, exploration)
            tracker.add(loss, gradient_norm.item(), result.sums, result.exact, carry.segments, carry.finished, drawn)
            bar.update()

            # --- once in a while: log
            if step % settings.log_every == 0 or step == config.steps:
                row = tracker.write(step, lr=schedule.lr * factor, **connection_facts(model))
                bar.set_postfix(
                    loss=f"{row['train/loss']:.3f}", exact=f"{row['train/exact_accuracy']:.3f}", refresh=False
                )

            validating = step == config.steps or (settings.eval_every and step % settings.eval_every == 0)
            saving = step == config.steps or step % settings.checkpoint_every == 0
            if (validating or saving) and not answers_are_finite(model, carry, config):
                raise diverged(step, "after the update, answers are not finite", config, saved)

            # --- once in a while: validate with the averaged weights, keep the best
            validated = None
            if validating:
                averaged.swap()
                evaluation = evaluate(
                    model,
                    validation,
                    data.meta.rules,
                    depth,
                    decode=config.eval.decode,
                    halting=config.eval.halting,
                    starts=config.eval.starts,
                    choose=config.eval.choose,
                    noise=config.eval.noise,
                    batch_size=config.eval.batch_size,
                )
                averaged.swap()
                validated = tracker.write_validation(step, evaluation)
                score = (evaluation.last.exact, evaluation.last.cells_right)
                if score >= best:  # cells break ties, and of equals the later one is kept
                    best, saved["best"] = score, step
                    save_checkpoint(run_dir / "best.safetensors", model, averaged.shadow, config, step, meta, validated)

            # --- once in a while: save
            if saving:
                saved["last"] = step
                save_checkpoint(run_dir / "last.safetensors", model, averaged.shadow, config, step, meta, validated)

    return final_report(config, data, run_dir, runtime, (time.perf_counter() - begin) / 60)

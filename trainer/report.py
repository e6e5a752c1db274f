"""From a checkpoint to numbers on disk and on screen: results.json, depth_curve.csv, depth_curve.png and a summary.

Every number carries what it was measured on: n, split, depth, cycles, weights, seed, data set name and fingerprint.
"""

import json
import logging
import math
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.arrays import DataMeta, PuzzleData, Rules, Split, split_fingerprint
from data.build import load_csv_puzzles, load_puzzle_data
from models.core import LoopedReasoner
from trainer.breadth import rows_of_a_pass
from trainer.checkpoint import Checkpoint, find_checkpoint, load_checkpoint
from trainer.config import EvalConfig, EvaluateConfig, TrainConfig
from trainer.curves import draw_depth_curve
from trainer.errors import UserError
from trainer.evaluator import Depth, Evaluation, evaluate, resolve_depth, subset
from trainer.files import write_atomically, write_csv
from trainer.metrics import progress_bar
from trainer.runtime import Runtime, set_up

log = logging.getLogger("longloop")

OWN = "own puzzles"
"""What results call the split of a user's file."""
LONG_UPDATE_SECONDS = 20
"""A batch whose outer update takes longer than this is not timed by itself."""


def ready_model(checkpoint: Checkpoint, weights: str, runtime: Runtime) -> LoopedReasoner:
    """The checkpoint's model on the device, in evaluation mode, compiled where the runtime says so."""
    model = checkpoint.build_model("ema" if weights == "ema" else "raw").to(runtime.device).eval()
    model.compute_dtype = runtime.dtype
    if runtime.compile:
        model.compile_updates()
    return model


@torch.no_grad()
def _seconds_per_update(model: LoopedReasoner, depth: Depth, batch: int) -> float:
    """Seconds of one outer update of a batch."""
    tokens = torch.ones(batch, model.seq_len, dtype=torch.int64, device=model.H_init.device)
    ids = torch.zeros(batch, dtype=torch.int32, device=tokens.device)
    x = model.encode(tokens, model.puzzle_rows(ids))

    def once() -> float:
        begin = time.perf_counter()
        memory = model.segment(model.start(batch), x, 1, depth.L_cycles)
        model.decode(memory)[0].sum().item()
        return time.perf_counter() - begin

    once()
    return once()


def _minutes(model: LoopedReasoner, depth: Depth, puzzles: int, starts: int, batch_size: int, enough: float) -> float:
    """Minutes that some puzzles take to `depth`, with all their starts.

    Measured on a few rows, uncompiled; where that comes to more than `enough`, and a batch does not take long itself, on
    a whole batch, whose compiled graph then serves the evaluation too.
    """
    total, few = puzzles * starts, min(4, puzzles * starts)
    batch = math.prod(rows_of_a_pass(puzzles, starts, batch_size))
    with torch.compiler.set_stance("force_eager"):
        each = _seconds_per_update(model, depth, few) / few
    if each * depth.outer_updates * total / 60 > enough and each * batch < LONG_UPDATE_SECONDS:
        each = _seconds_per_update(model, depth, batch) / batch
    return each * depth.outer_updates * total / 60


def refuse_too_many(settings: EvalConfig, split: Split, where: str) -> None:
    """Refuse an eval.n beyond what the split holds."""
    if isinstance(settings.n, int) and settings.n > len(split.inputs):
        raise UserError(f"eval.n={settings.n}: {where} holds {len(split.inputs)} puzzles; give at most that, or all")


def choose_subset(
    split: Split, settings: EvalConfig, model: LoopedReasoner, depth: Depth, where: str, max_minutes: float
) -> tuple[Split, str | None]:
    """The puzzles to evaluate and, unless that is all of them, a label saying which."""
    total = len(split.inputs)
    if settings.n == "all":
        return split, None
    if settings.n == "auto":
        minutes = _minutes(model, depth, total, settings.starts, settings.batch_size, max_minutes)
        if minutes <= max_minutes:
            return split, None
        n = max(1, min(total, 2 ** int(np.log2(max(1.0, total * max_minutes / minutes)))))
        log.info(
            f"all {total:,} puzzles of {where} would take about {minutes:,.0f} minutes here: a subset of {n} is evaluated "
            "(eval.n=all for all of them, eval.max_minutes to allow more)"
        )
    else:
        refuse_too_many(settings, split, where)
        n = settings.n
    if n == total:
        return split, None
    return subset(
        split, n, settings.subset_seed
    ), f"random subset of {n} of {total}, eval.subset_seed={settings.subset_seed}"


def by_blanks(split: Split, rules: Rules, evaluation: Evaluation) -> list[dict[str, int]]:
    """Exact counts at the greatest depth, grouped by the number of cells to fill in."""
    blanks = rules.to_fill(torch.from_numpy(np.array(split.inputs))).sum(1).numpy()
    return [
        {"empty_cells": int(b), "n": int((blanks == b).sum()), "exact": int(evaluation.exact[blanks == b].sum())}
        for b in np.unique(blanks)
    ]


def trained_depth(config: TrainConfig) -> dict[str, int]:
    """Cycles and segments of training, and the executed layers that they come to."""
    s = config.schedule
    applications = s.segments * s.H_cycles * config.model.applications_per_update(s.L_cycles)
    layers = applications * config.model.layers
    return {"H_cycles": s.H_cycles, "L_cycles": s.L_cycles, "segments": s.segments, "executed_layers": layers}


def breadth_of(evaluation: Evaluation, settings: EvalConfig) -> dict[str, Any]:
    """How many random starts a puzzle had, whose answer counts, and what the starts reach by themselves."""
    last = evaluation.last
    return {
        "starts": last.starts,
        "choose": settings.choose if last.starts > 1 else None,
        "noise": settings.noise,  # null: as in training, which model_settings tell
        "executed_layers_all_starts": last.executed_layers * last.starts,
        "single_starts_exact": last.starts_exact,
        "single_starts_n": last.n * last.starts,
        "single_starts_exact_accuracy": last.starts_exact / (last.n * last.starts),
        "any_start_exact": last.any_start_exact,
        "any_start_note": "puzzles that at least one start answers right at the greatest depth; choosing it needs the labels, "
        "so it is no accuracy",
    }


def results_of(
    evaluation: Evaluation,
    split: Split,
    checkpoint: Checkpoint,
    settings: EvalConfig,
    meta: DataMeta,
    label: str | None,
) -> dict[str, Any]:
    """Everything about one evaluation, ready for JSON; the headline is exact accuracy at the greatest depth."""
    last, depth, config = evaluation.last, evaluation.depth, checkpoint.config
    return {
        "headline": "exact_accuracy",
        "exact_accuracy": last.exact_accuracy,
        "exact": last.exact,
        "n": last.n,
        "cell_accuracy": last.cell_accuracy,
        "cells_right": last.cells_right,
        "cells": last.cells,
        "cells_counted": "cells empty in the puzzle; givens excluded",
        "recognised_at_some_depth": last.recognised,
        "recognised_note": "answers at any evaluated depth that keep the givens and break no rule, told without labels; "
        "not comparable with fixed-depth accuracy",
        "split": OWN if meta.source.startswith("file:") else settings.split,
        "subset": label,
        "subset_seed": settings.subset_seed if label else None,
        "data": meta.name,
        "data_fingerprint": meta.fingerprint,
        "weights": settings.weights,
        "halting": settings.halting,
        "batch_size": settings.batch_size,
        **breadth_of(evaluation, settings),
        "decode": settings.decode,
        "H_cycles": depth.H_cycles,
        "L_cycles": depth.L_cycles,
        "segments": depth.segments,
        "outer_updates": depth.outer_updates,
        "block_applications": last.block_applications,
        "executed_layers": last.executed_layers,
        "mean_segments": last.mean_segments,
        "max_segments": int(evaluation.segments.max()),
        "trained": trained_depth(config),
        "model": config.model.name,
        "model_settings": config.model.model_dump(mode="json"),
        "seed": config.seed,
        "trained_on": trained_on(checkpoint),
        "checkpoint": str(checkpoint.path),
        "checkpoint_step": checkpoint.step,
        "by_empty_cells": by_blanks(split, meta.rules, evaluation),
        "depths": [
            {**asdict(row), "exact_accuracy": row.exact_accuracy, "cell_accuracy": row.cell_accuracy}
            for row in evaluation.rows
        ],
    }


def write_results(folder: Path, results: dict[str, Any]) -> None:
    """results.json, depth_curve.csv and depth_curve.png in `folder`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be created ({error.strerror}); choose another place") from error
    write_atomically(folder / "results.json", (json.dumps(results, indent=1) + "\n").encode())
    write_csv(folder / "depth_curve.csv", results["depths"])
    draw_depth_curve([results], folder / "depth_curve.png")


def depth_table(results: dict[str, Any], most: int = 12) -> list[str]:
    """At most `most` rows of the depth curve as text, the last always among them."""
    rows = results["depths"]
    keep = (
        {round(i * (len(rows) - 1) / max(1, most - 1)) for i in range(most)} if len(rows) > most else range(len(rows))
    )
    lines = ["outer updates  executed layers  exact accuracy         cell accuracy  recognised so far"]
    for i in sorted(keep):
        r = rows[i]
        exact = f"{r['exact_accuracy']:.4f} ({r['exact']}/{r['n']})"
        lines.append(
            f"{r['outer_updates']:>13}  {r['executed_layers']:>15,}  {exact:<21}  {r['cell_accuracy']:>13.4f}  "
            f"{r['recognised']:>17}"
        )
    return lines


def summary(results: dict[str, Any], folder: Path, prefix: str = "") -> list[str]:
    """The headline, labelled, with its counts and where the files lie."""
    r = results
    segments = f"{r['outer_updates'] / r['H_cycles']:.3g} segments"
    breadth = []
    if r["starts"] > 1:
        breadth = [
            f"{prefix}exact_accuracy is that of {r['starts']} starts a puzzle, one chosen by {r['choose']}",
            f"single starts: mean exact accuracy {r['single_starts_exact_accuracy']:.4f} "
            f"({r['single_starts_exact']}/{r['single_starts_n']}); any start right: {r['any_start_exact']} of {r['n']} puzzles "
            "(an oracle's choice, not an accuracy)",
            f"all starts together: {r['executed_layers_all_starts']:,} executed layers a puzzle",
        ]
    return [
        f"{prefix}exact_accuracy = {r['exact_accuracy']:.4f} ({r['exact']}/{r['n']})   <- headline: every cell right",
        f"{prefix}cell_accuracy = {r['cell_accuracy']:.4f} ({r['cells_right']}/{r['cells']})   (givens excluded)",
        *breadth,
        f"data {r['data']} [{r['data_fingerprint'][:12]}], split {r['split']}"
        + (f", {r['subset']}" if r["subset"] else ", all of it"),
        f"H={r['H_cycles']} L={r['L_cycles']}, {'at most ' * (r['halting'] != 'off')}{segments} = {r['outer_updates']} outer "
        f"updates = {r['block_applications']:,} block applications = {r['executed_layers']:,} executed layers",
        f"weights {r['weights']} of step {r['checkpoint_step']} (seed {r['seed']}), halting {r['halting']}, mean segments "
        f"{r['mean_segments']:.2f}, max {r['max_segments']}",
        *([f"trained on {r['trained_on']}"] if r["trained_on"].startswith("unknown") else []),
        f"files: {folder / 'results.json'}, depth_curve.csv, depth_curve.png",
    ]


def evaluate_checkpoint(
    checkpoint: Checkpoint,
    split: Split,
    meta: DataMeta,
    settings: EvalConfig,
    runtime: Runtime,
    max_minutes: float | None = None,
) -> tuple[dict[str, Any], Evaluation]:
    """Evaluate one checkpoint on one split as the settings say, with a progress bar; max_minutes stands for theirs."""
    model = ready_model(checkpoint, settings.weights, runtime)
    depth = resolve_depth(settings, checkpoint.config.schedule, checkpoint.config.model)
    where = meta.name if meta.source.startswith("file:") else f"the {settings.split} split"
    chosen, label = choose_subset(split, settings, model, depth, where, max_minutes or settings.max_minutes)
    with progress_bar(len(chosen.inputs) * settings.starts * depth.outer_updates, "evaluating") as bar:
        evaluation = evaluate(
            model,
            chosen,
            meta.rules,
            depth,
            decode=settings.decode,
            halting=settings.halting,
            starts=settings.starts,
            choose=settings.choose,
            noise=settings.noise,
            batch_size=settings.batch_size,
            progress=bar.update,
        )
    return results_of(evaluation, chosen, checkpoint, settings, meta, label), evaluation


def final_report(
    config: TrainConfig, data: PuzzleData, run_dir: Path, runtime: Runtime, trained_minutes: float
) -> dict[str, Any]:
    """Evaluate the best checkpoint on the test split, write the results and print the summary."""
    checkpoint = load_checkpoint(find_checkpoint(run_dir, "best"))
    log.info(f"testing {checkpoint.path} (best on validation, step {checkpoint.step})")
    minutes = max(config.eval.max_minutes, trained_minutes / 10)
    results, _ = evaluate_checkpoint(checkpoint, data.test, data.meta, config.eval, runtime, minutes)
    write_results(run_dir, results)
    for line in (*depth_table(results), "", *summary(results, run_dir, "test/")):
        log.info(line)
    return results


def trained_on(checkpoint: Checkpoint) -> str:
    """The data of training, by name and fingerprint; of an imported checkpoint it is unknown."""
    meta = checkpoint.data_meta
    if checkpoint.imported is not None:
        return f"unknown ({meta['source']})"
    return f"{meta['name']} [{meta['fingerprint'][:12]}]"


def own_puzzles(path: Path, checkpoint: Checkpoint) -> tuple[Split, DataMeta]:
    """The puzzles of a CSV file, with an identity of their own: the file's name and the fingerprint of its rows."""
    split = load_csv_puzzles(path, checkpoint.box)
    return split, replace(
        DataMeta(**checkpoint.data_meta), name=path.name, source=f"file:{path}", fingerprint=split_fingerprint(split)
    )


def checkpoint_puzzles(checkpoint: Checkpoint, split: str) -> tuple[Split, DataMeta]:
    """A split of the data that the checkpoint's settings name, which must be what it was trained on.

    The training data of an imported checkpoint is unknown: there, puzzles of the right shape are enough, and a line says so.
    """
    expected = DataMeta(**checkpoint.data_meta)
    data = load_puzzle_data(checkpoint.config.data, log.info)
    if checkpoint.imported is not None:
        for name in ("vocab_size", "seq_len"):
            if getattr(data.meta, name) != getattr(expected, name):
                raise UserError(
                    f"{checkpoint.path}: its model has {name}={getattr(expected, name)}, but data {data.meta.name} has "
                    f"{getattr(data.meta, name)}; give puzzles=<csv>, or import it again with data=<fitting data>"
                )
        log.info(
            f"{checkpoint.path}: imported, so that its training data is unknown: it may have seen any of these puzzles"
        )
    elif data.meta.fingerprint != expected.fingerprint:
        raise UserError(
            f"data {data.meta.name}: its fingerprint {data.meta.fingerprint[:12]} is not the checkpoint's "
            f"({expected.name}, {expected.fingerprint[:12]}); give puzzles=<csv> to evaluate on other puzzles"
        )
    return (data.test if split == "test" else data.validation), data.meta


def evaluation_label(results: dict[str, Any]) -> str:
    """A folder name that tells an evaluation from others of the same run."""
    r = results
    puzzles = r["data"] if r["split"] == OWN else f"{r['data']}-{r['split']}"
    some = f"-n{r['n']}-s{r['subset_seed']}" if r["subset"] else ""
    # Whole batches stop together, so their size belongs to the result.
    halting = {"off": "", "on": "-halting", "batch_residual": f"-batch_residual{r['batch_size']}"}[r["halting"]]
    each = "-each" if r["decode"] == "outer_update" else ""
    breadth = f"-{r['starts']}starts-{r['choose']}" if r["starts"] > 1 else ""
    noise = f"-noise{r['noise']:g}" if r["noise"] is not None else ""
    depth = f"H{r['H_cycles']}-L{r['L_cycles']}-u{r['outer_updates']}{each}{breadth}{noise}"
    return f"{puzzles}{some}-{depth}-{r['weights']}{r['checkpoint_step']}{halting}"


def evaluate_program(config: EvaluateConfig) -> dict[str, Any]:
    """What evaluate.py does: load, check that data and checkpoint belong together, evaluate, write, print."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    checkpoint = load_checkpoint(find_checkpoint(config.checkpoint, config.which))
    if (conflict := config.eval.conflict(checkpoint.config.model)) is not None:
        raise UserError(f"{checkpoint.path}: {conflict}")
    runtime = set_up(config.trainer)
    if config.puzzles is not None:
        split, meta = own_puzzles(config.puzzles, checkpoint)
    else:
        split, meta = checkpoint_puzzles(checkpoint, config.eval.split)
    log.info(f"evaluating {checkpoint.path} (step {checkpoint.step}, {config.eval.weights} weights)")
    results, _ = evaluate_checkpoint(checkpoint, split, meta, config.eval, runtime)
    if (asked := config.eval.layers) is not None and asked != results["executed_layers"]:
        log.info(
            f"eval.layers={asked}: run to the end of an outer update, {results['executed_layers']:,} executed layers"
        )
    place = config.checkpoint if config.checkpoint.is_dir() else Path("outputs") / config.checkpoint.stem
    folder = config.out or place / "evaluations" / evaluation_label(results)
    write_results(folder, results)
    for line in (*depth_table(results), "", *summary(results, folder)):
        log.info(line)
    return results

"""Metrics of a run: sums kept between log rows, one division when a row is written, files always, a tracker if asked for."""

import json
import logging
import netrc
import os
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from torch import Tensor
from tqdm import tqdm

from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.evaluator import Evaluation
from trainer.files import write_csv

log = logging.getLogger("longloop")

WANDB_TIMEOUT = 20
"""Seconds to wait for the W&B server before the run is logged offline."""


def progress_bar(total: int, what: str) -> tqdm:
    """A bar with ETA on a terminal; every ten seconds a line elsewhere."""
    live = sys.stderr.isatty()
    return tqdm(total=total, desc=what, dynamic_ncols=live, mininterval=0.5 if live else 10.0, smoothing=0.1)


class Tracker:
    """metrics.jsonl of a run (one JSON object a row), at its end metrics.csv, and, if asked for, Weights & Biases.

    Rows of training carry: step, puzzles_started, puzzles_finished, mean_segments (of puzzles finished since the last
    row), train/loss (mean over steps of the loss per puzzle), train/exact_accuracy (of finished puzzles, at their last
    segment; not a test score), train/cell_accuracy (all supervised cells of all rows, givens included).
    """

    def __init__(self, run_dir: Path, config: TrainConfig):
        self.path = run_dir / "metrics.jsonl"
        self.finished_in_all = 0
        self.wandb = _start_wandb(run_dir, config) if config.logger.kind == "wandb" else None
        self.begin = time.perf_counter()
        self._clear()

    def __enter__(self) -> "Tracker":
        try:
            self.file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror}); choose another run_dir") from error
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        rows = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
        write_csv(self.path.with_suffix(".csv"), rows)
        if self.wandb is not None:
            self.wandb.finish()

    def _clear(self) -> None:
        self.steps = self.finished = self.exact = self.segments = self.cells_right = self.cells = 0
        self.loss = self.cell_loss = self.halt_loss = self.gradient_norm = 0.0

    def add(
        self,
        loss: float,
        gradient_norm: float,
        sums: dict[str, Tensor],
        exact: Tensor,
        segments: Tensor,
        finished: Tensor,
        drawn: int,
    ) -> None:
        """Take one optimizer step in; exact, segments and finished are [B]."""
        self.steps += 1
        self.loss += loss
        self.gradient_norm += gradient_norm
        self.cell_loss += float(sums["cell_loss"]) / len(finished)
        self.halt_loss += float(sums["halt_loss"]) / len(finished)
        self.cells_right += int(sums["cells_right"])
        self.cells += int(sums["cells"])
        self.finished += int(finished.sum())
        self.exact += int((exact & finished).sum())
        self.segments += int(segments[finished].sum())
        self.drawn = drawn

    def write(self, step: int, **facts: float) -> dict[str, Any]:
        """Write one row of training metrics and begin the next."""
        self.finished_in_all += self.finished
        row: dict[str, Any] = {
            "step": step,
            "seconds": round(time.perf_counter() - self.begin, 3),
            "puzzles_started": self.drawn,
            "puzzles_finished": self.finished_in_all,
            "mean_segments": self.segments / max(1, self.finished),
            "train/loss": self.loss / self.steps,
            "train/cell_loss": self.cell_loss / self.steps,
            "train/halt_loss": self.halt_loss / self.steps,
            "train/exact_accuracy": self.exact / max(1, self.finished),
            "train/cell_accuracy": self.cells_right / max(1, self.cells),
            "gradient_norm": self.gradient_norm / self.steps,
            **facts,
        }
        self._clear()
        self._emit(row)
        return row

    def write_validation(self, step: int, evaluation: Evaluation) -> dict[str, Any]:
        """Write one row of validation: accuracy with counts at one segment and at the greatest depth."""
        last, H = evaluation.last, evaluation.depth.H_cycles
        first = next(r for r in evaluation.rows if r.outer_updates >= min(H, evaluation.depth.outer_updates))
        row = {
            "step": step,
            "seconds": round(time.perf_counter() - self.begin, 3),
            "validation/exact_accuracy": last.exact_accuracy,
            "validation/exact": last.exact,
            "validation/n": last.n,
            "validation/cell_accuracy": last.cell_accuracy,
            "validation/starts": last.starts,
            "validation/segments": evaluation.depth.segments,
            "validation/executed_layers": last.executed_layers,
            "validation/exact_accuracy_one_segment": first.exact_accuracy,
            "validation/weights": "ema",
        }
        log.info(
            f"step {step}: validation exact_accuracy = {last.exact_accuracy:.4f} ({last.exact}/{last.n}) after "
            f"{evaluation.depth.segments} segments, {first.exact_accuracy:.4f} after one"
        )
        self._emit(row)
        return row

    def _emit(self, row: dict[str, Any]) -> None:
        try:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror}); free space") from error
        if self.wandb is not None:
            self.wandb.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])


def _has_wandb_key() -> bool:
    """Whether W&B would find a key without asking for one."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _start_wandb(run_dir: Path, config: TrainConfig) -> Any:
    """A W&B run, offline without a key or network; None, with one line, where the package is missing."""
    try:
        import wandb
    except ImportError:
        log.info("logger=wandb: the wandb package is not installed (pip install wandb); metrics go to files only")
        return None
    later = f"this run is logged offline; later: wandb sync {run_dir / 'wandb'}/offline-*"
    mode: Any = os.environ.get("WANDB_MODE")
    if mode is None and not _has_wandb_key():
        mode = "offline"
        log.info(f"logger=wandb: no API key, so {later}")

    def start(mode: Any) -> Any:
        return wandb.init(
            project=config.logger.project,
            entity=config.logger.entity,
            dir=str(run_dir),
            name=run_dir.name,
            mode=mode,
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(init_timeout=WANDB_TIMEOUT),
        )

    try:
        return start(mode)
    except wandb.Error as error:
        if mode == "offline":
            raise UserError(f"logger=wandb: {str(error).splitlines()[0]}; use logger=files") from error
        log.info(f"logger=wandb: {str(error).splitlines()[0]}; {later} (WANDB_MODE=offline starts that way at once)")
        return start("offline")

"""Small runs and scripted models for tests of the trainer, the evaluator and the programs."""

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.arrays import DataMeta, Split
from data.sudoku import Box, tokens_from_digits
from models.config import ConnectionConfig
from models.connections import StateMemory
from models.core import LoopedReasoner, Memory
from models.halting import QHead
from tests.tiny import CARRY_LAST, model_config
from trainer import loop
from trainer.compose import SettingsT, compose_launch
from trainer.config import EvaluateConfig, SolveConfig, TrainConfig

BOX4, BOX9 = Box(2, 2), Box(3, 3)
_RUNS = tempfile.TemporaryDirectory(prefix="longloop-tests-")  # removed when Python ends
CPU = ["trainer=cpu", "trainer.threads=1", "trainer.compile=false"]


# --- runs ------------------------------------------------------------------------------------------------------------


@cache
def composed(name: str, settings: type[SettingsT], *overrides: str) -> SettingsT:
    return compose_launch(name, list(overrides), settings).jobs[0]


def tiny(run_dir: Path, *overrides: str) -> TrainConfig:
    """experiment=tiny (4x4 Sudoku, 20 steps of batch 8, eager) with overrides."""
    config = composed("config", TrainConfig, "experiment=tiny", "trainer.threads=1", *overrides)
    return config.model_copy(update={"run_dir": run_dir})


def evaluating(checkpoint: Path, *overrides: str, **paths: Path) -> EvaluateConfig:
    """Settings of evaluate.py; `paths` are out and puzzles."""
    config = composed("evaluate", EvaluateConfig, "checkpoint=x", *CPU, *overrides)
    return config.model_copy(update={"checkpoint": checkpoint, **paths})


def solving(checkpoint: Path, *overrides: str, **texts: str) -> SolveConfig:
    """Settings of solve.py; `texts` are puzzle and file."""
    config = composed("solve", SolveConfig, "checkpoint=x", *CPU, *overrides)
    return config.model_copy(update={"checkpoint": checkpoint, **texts})


@cache
def finished_run(*overrides: str) -> Path:
    """The directory of a finished tiny run, trained once in a test session; not to be written to."""
    run_dir = Path(_RUNS.name) / str(len(list(Path(_RUNS.name).iterdir())))
    loop.train(tiny(run_dir, *overrides))
    return run_dir


def train_only(monkeypatch: pytest.MonkeyPatch, config: TrainConfig) -> Path:
    """Train without the test at the end."""
    monkeypatch.setattr(loop, "final_report", lambda *_: {})
    loop.train(config)
    return config.run_dir


def rows_of(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Training or validation rows of metrics.jsonl, without the clock."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows if any(k.startswith(kind) for k in row)]


def losses(run_dir: Path) -> list[float]:
    return [row["train/loss"] for row in rows_of(run_dir)]


# --- puzzles ---------------------------------------------------------------------------------------------------------


def solved_grids(box: Box, count: int) -> np.ndarray:
    """Valid grids, digits [count, S], all different: one pattern with digits exchanged."""
    n, rng = box.digits, np.random.default_rng(0)
    pattern = np.array(
        [[(r % box.rows * box.cols + r // box.rows + c) % n for c in range(n)] for r in range(n)]
    ).ravel()
    return np.stack([1 + rng.permutation(n)[pattern] for _ in range(count)]).astype(np.uint8)


def puzzles(box: Box, count: int, givens: float = 0.4) -> Split:
    """Puzzles with about this share of givens (and at least one empty cell); ids 0, 1, 2, ..."""
    grids = solved_grids(box, count)
    given = np.random.default_rng(1).random(grids.shape) < givens
    given[:, -1] = False
    ids = np.arange(count, dtype=np.int32)
    return Split(tokens_from_digits(grids * given), tokens_from_digits(grids), np.zeros(count, np.int32), ids)


def reordered(split: Split, order: np.ndarray) -> Split:
    return Split(split.inputs[order], split.labels[order], split.rating[order], split.puzzle_ids[order])


def meta_of(box: Box, **changes: Any) -> DataMeta:
    values: dict[str, Any] = {
        "name": "toy",
        "box_rows": box.rows,
        "box_cols": box.cols,
        "vocab_size": box.vocab_size,
        "seq_len": box.cells,
        "num_puzzle_ids": 1,
        "source": "generated",
        "revision": None,
        "seed": 0,
        "train_puzzles": 1,
        "num_aug": None,
        "rows": {},
        "difficulty": None,
        "fingerprint": "0" * 64,
        "split_fingerprints": {},
        "checks": {},
    }
    return DataMeta(**(values | changes))


# --- models ----------------------------------------------------------------------------------------------------------


def steady(connection: ConnectionConfig = CARRY_LAST, mixer: str = "attention", **changes: Any) -> LoopedReasoner:
    """A model for 4x4 whose recursion does not amplify rounding, so that batch sizes do not show, and whose halting logit
    differs from puzzle to puzzle and from segment to segment."""
    torch.manual_seed(0)
    settings = {"puzzle_emb_dim": 0, "puzzle_tokens": 1} | changes
    model = LoopedReasoner(model_config(connection, mixer, **settings), BOX4.vocab_size, BOX4.cells)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                parameter.mul_(0.5)
            elif name.endswith("query"):
                parameter.normal_(std=0.3)
        if isinstance(model.halting, QHead):
            assert model.halting.head.bias is not None
            model.halting.head.weight.normal_(std=0.3)
            model.halting.head.bias.fill_(0.0)
    return model.eval()


class Scripted(LoopedReasoner):
    """Gives the answers of a script: puzzle with id i has, after update u, the tokens answers[i, u - 1], and after
    segment s the halting logit halts[i, s - 1]; negative where no halts are given."""

    def __init__(
        self,
        answers: np.ndarray,
        halts: np.ndarray | None = None,
        H_cycles: int = 1,
        vocab_size: int = BOX4.vocab_size,
    ):
        super().__init__(model_config(puzzle_emb_dim=0), vocab_size, answers.shape[-1])
        self.answers = torch.from_numpy(answers.astype(np.int64))
        shape = (answers.shape[0], -(-answers.shape[1] // H_cycles))
        self.halts = torch.from_numpy(halts).float() if halts is not None else torch.full(shape, -1.0)
        self.H_cycles = H_cycles

    def puzzle_rows(self, puzzle_ids: Tensor) -> Tensor:
        return puzzle_ids.long()

    def encode(self, tokens: Tensor, puzzle_rows: Tensor) -> Tensor:
        return puzzle_rows

    def start(self, batch: int, keys: Tensor | None = None, noise: float | None = None) -> Memory:
        return Memory(StateMemory(torch.zeros(batch)), StateMemory(torch.zeros(batch)))

    def segment(
        self,
        memory: Memory,
        x: Tensor,
        H_cycles: int,
        L_cycles: int,
        grad_outer_cycles: int = 0,
        after_outer: Callable[[Memory], None] | None = None,
    ) -> Memory:
        for _ in range(H_cycles):
            memory = Memory(StateMemory(memory.inner.h + 1), StateMemory(x))
            if after_outer is not None:
                after_outer(memory)
        return memory

    def decode(self, memory: Memory) -> tuple[Tensor, Tensor | None]:
        update, ids = int(memory.inner.h[0]), memory.outer.h.long()
        logits = F.one_hot(self.answers[ids, update - 1], self.vocab_size).float()
        return logits, self.halts[ids, -(-update // self.H_cycles) - 1]


class Bundled(NamedTuple):
    checkpoint: Path
    puzzles: Path


def bundled(name: str = "infiloop") -> Bundled:
    """A bundled checkpoint and its puzzles; the calling test is skipped as long as there is none."""
    folder = Path(__file__).resolve().parent.parent / "models" / "pretrained"
    found = Bundled(folder / f"{name}_sudoku6.safetensors", folder / "sudoku6_demo.csv")
    if not found.checkpoint.is_file() or not found.puzzles.is_file():
        pytest.skip(f"{found.checkpoint.name} is not bundled yet")
    return found

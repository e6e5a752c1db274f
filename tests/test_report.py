"""What a run leaves behind: settings, environment, metrics, results, curve; and the line that is read first."""

import csv
import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.arrays import Split
from data.build import load_puzzle_data
from models.core import LoopedReasoner
from tests.runs import (
    BOX4,
    BOX9,
    Scripted,
    evaluating,
    finished_run,
    losses,
    meta_of,
    puzzles,
    rows_of,
    solved_grids,
    steady,
    tiny,
    train_only,
)
from trainer import loop, report
from trainer.checkpoint import save_checkpoint
from trainer.compose import compose_launch
from trainer.config import EvalConfig, TrainConfig
from trainer.curves import published_curve
from trainer.errors import UserError
from trainer.evaluator import Depth, evaluate
from trainer.metrics import Tracker
from trainer.report import by_blanks, choose_subset, depth_table, evaluate_program

EVERYWHERE = {
    "headline", "exact_accuracy", "exact", "n", "cell_accuracy", "cells_right", "cells", "cells_counted", "split", "subset",
    "data", "data_fingerprint", "weights", "halting", "decode", "H_cycles", "L_cycles", "segments", "outer_updates",
    "block_applications", "executed_layers", "mean_segments", "max_segments", "trained", "model", "model_settings", "seed",
    "checkpoint", "checkpoint_step", "by_empty_cells", "depths", "recognised_at_some_depth",
}  # fmt: skip


def results_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


# --- the run directory -----------------------------------------------------------------------------------------------


def test_run_directory_holds_what_is_needed() -> None:
    names = {path.name for path in finished_run().iterdir()}
    files = ["config.yaml", "environment.json", "metrics.jsonl", "metrics.csv", "best.safetensors", "last.safetensors"]
    assert names == {*files, "results.json", "depth_curve.csv", "depth_curve.png"}
    assert (finished_run() / "depth_curve.png").read_bytes().startswith(b"\x89PNG")


def test_environment_tells_runs_apart() -> None:
    facts = json.loads((finished_run() / "environment.json").read_text())
    assert {"command", "started", "git_commit", "git_dirty", "python", "machine", "device", "threads"} <= facts.keys()
    assert facts["command"].split()[1] == sys.argv[0] and facts["device"] == "cpu" and facts["threads"] == 1
    assert facts["packages"]["torch"] and facts["packages"]["hydra-core"]
    data = load_puzzle_data(tiny(Path("unused")).data, lambda _: None)
    model = LoopedReasoner(tiny(Path("unused")).model, data.meta.vocab_size, data.meta.seq_len)
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert facts["data"]["fingerprint"] == data.meta.fingerprint and facts["data"]["name"] == data.meta.name


def test_saved_settings_alone_repeat_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["seed=3", "model.connection.beta0=0.7", "trainer.micro_batch=4", "trainer.max_steps=5"]
    first = train_only(monkeypatch, tiny(tmp_path / "a", *lines))
    argv = [f"from={first}/config.yaml", f"run_dir={tmp_path / 'b'}"]
    again = compose_launch("config", argv, TrainConfig).jobs[0]
    assert again == tiny(tmp_path / "b", *lines)
    assert losses(train_only(monkeypatch, again)) == losses(first) and len(losses(first)) == 5


def test_a_used_run_directory_is_refused(tmp_path: Path) -> None:
    """Before anything is read or written; Hydra's own log does not count."""
    (tmp_path / "train.log").touch()
    loop.refuse_used(tmp_path)
    loop.refuse_used(tmp_path / "new")
    with pytest.raises(UserError, match=rf"^run_dir={finished_run()}: holds a run already; choose another run_dir"):
        loop.train(tiny(finished_run()))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match=rf"^run_dir={tmp_path}: is not empty \(it holds notes.txt\)"):
        loop.train(tiny(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"train.log", "notes.txt"}


def test_metrics_are_kept_as_csv_too() -> None:
    with (finished_run() / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    rows = [json.loads(line) for line in (finished_run() / "metrics.jsonl").read_text().splitlines()]
    assert [{k: v for k, v in row.items() if v} for row in table] == [{k: str(v) for k, v in r.items()} for r in rows]
    assert {row["step"] for row in table} == {str(step) for step in range(1, 21)} and len(table) == 22


@pytest.mark.parametrize("missing", [True, False])
def test_a_tracker_without_account_does_not_stop_a_run(
    missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """wandb not installed, or no key and no network: one line, and the run goes on with its files."""
    started: list[str | None] = []

    class FakeWandb:
        Error = ConnectionError
        Settings = dict

        @staticmethod
        def init(**settings: Any) -> Any:
            started.append(settings["mode"])
            if settings["mode"] != "offline":
                raise ConnectionError("no network\nat all")
            return FakeWandb

        log = finish = staticmethod(lambda *_, **__: None)

    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "wandb", None if missing else FakeWandb)
    overrides = ["logger=wandb", "trainer.max_steps=2"]
    with caplog.at_level(logging.INFO):
        run_dir = train_only(monkeypatch, tiny(tmp_path / "a", *overrides))
        assert len(losses(run_dir)) == 2
        if missing:
            assert "the wandb package is not installed" in caplog.text and not started
            return
        assert "no API key, so this run is logged offline; later: wandb sync" in caplog.text
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        assert len(losses(train_only(monkeypatch, tiny(tmp_path / "b", *overrides)))) == 2
        assert "no network; this run is logged offline" in caplog.text
    assert started == ["offline", None, "offline"]


def test_no_tracker_is_asked_for_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert tiny(tmp_path).logger.kind == "files" and Tracker(tmp_path, tiny(tmp_path)).wandb is None


# --- results ---------------------------------------------------------------------------------------------------------


def test_a_run_ends_with_the_test_score(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On the whole test split, in the log and in results.json, and again from evaluate.py."""
    with caplog.at_level(logging.INFO):
        returned = loop.train(tiny(tmp_path / "run"))
    results = results_of(tmp_path / "run")
    test = load_puzzle_data(tiny(tmp_path).data, lambda _: None).test
    assert results["n"] == len(test) == 12 and results["subset"] is None and results["split"] == "test"
    assert results == json.loads(json.dumps(returned)) and results["headline"] == "exact_accuracy"
    score = f"{results['exact'] / 12:.4f} ({results['exact']}/12)"
    assert f"test/exact_accuracy = {score}   <- headline" in caplog.text
    assert (
        f"test/cell_accuracy = {results['cell_accuracy']:.4f} ({results['cells_right']}/{results['cells']})"
        in caplog.text
    )
    assert "test/" not in "".join(key for row in rows_of(tmp_path / "run") for key in row)
    offline = evaluate_program(evaluating(tmp_path / "run", out=tmp_path / "out"))
    assert results_of(tmp_path / "out") == json.loads(json.dumps(offline)) == results


def test_validation_during_training_is_what_evaluate_says(tmp_path: Path) -> None:
    """Exactly, at the step of each checkpoint: the same weights, puzzles, depth and counts."""
    for which in ("last", "best"):
        asked = evaluating(finished_run(), f"which={which}", "eval.split=validation", out=tmp_path)
        results = evaluate_program(asked)
        row = next(r for r in rows_of(finished_run(), "validation") if r["step"] == results["checkpoint_step"])
        assert results["split"] == "validation" and results["n"] == row["validation/n"] == 8
        assert results["exact"] == row["validation/exact"] and results["segments"] == row["validation/segments"]
        assert results["cell_accuracy"] == row["validation/cell_accuracy"]
        first = results["depths"][0]["exact_accuracy"]
        assert first == row["validation/exact_accuracy_one_segment"]


def test_results_carry_what_they_were_measured_on(tmp_path: Path) -> None:
    asked = [
        "eval.H_cycles=3",
        "eval.L_cycles=4",
        "eval.layers=95",
        "eval.n=5",
        "eval.subset_seed=2",
        "eval.halting=on",
    ]
    results = evaluate_program(evaluating(finished_run(), *asked, "eval.decode=outer_update", out=tmp_path))
    assert results.keys() >= EVERYWHERE and results == results_of(tmp_path)
    depth = {k: results[k] for k in ("H_cycles", "L_cycles", "segments", "outer_updates", "block_applications")}
    assert depth == {"H_cycles": 3, "L_cycles": 4, "segments": 4, "outer_updates": 10, "block_applications": 50}
    assert results["executed_layers"] == 100 and results["trained"] == {
        "H_cycles": 2,
        "L_cycles": 2,
        "segments": 3,
        "executed_layers": 36,
    }
    assert (results["n"], results["subset"]) == (5, "random subset of 5 of 12, eval.subset_seed=2")
    assert (results["halting"], results["weights"], results["seed"], results["model"]) == ("on", "ema", 0, "infiloop")
    with (tmp_path / "depth_curve.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [int(row["executed_layers"]) for row in table] == list(range(10, 101, 10))
    assert all(row["n"] == "5" and float(row["exact_accuracy"]) == int(row["exact"]) / 5 for row in table)


def test_evaluations_do_not_overwrite_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = train_only(monkeypatch, tiny(tmp_path / "run", "trainer.max_steps=1"))
    ways = [
        "eval.segments=4",
        "eval.halting=on",
        "eval.weights=raw",
        "eval.n=4",
        "eval.split=validation",
        "eval.L_cycles=5",
    ]
    for way in ways:
        evaluate_program(evaluating(run_dir, way))
    assert len(list((run_dir / "evaluations").iterdir())) == len(ways)


def test_one_wrong_cell_in_every_puzzle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten empty 9x9 grids in a user's file, each answered with one wrong cell; then with none."""
    config = tiny(tmp_path, "data=sudoku9", "model.mixer=attention", "model.positions=none")
    checkpoint, table = tmp_path / "nine.safetensors", tmp_path / "toy.csv"
    model = LoopedReasoner(config.model, BOX9.vocab_size, BOX9.cells)
    save_checkpoint(checkpoint, model, [p.clone() for p in model.parameters()], config, 1, vars(meta_of(BOX9)))
    grid = solved_grids(BOX9, 1)[0]
    solution = "".join(map(str, grid))
    table.write_text("question,answer\n" + f"{'.' * 81},{solution}\n" * 10)
    wrong = np.array([*grid[:80], grid[80] % 9 + 1]) + 1
    for answer, exact, cells in (
        (wrong, "0.0000 (0/10)", "0.9877 (800/810)"),
        (grid + 1, "1.0000 (10/10)", "1.0000 (810/810)"),
    ):
        scripted = Scripted(np.repeat(answer[None, None], 6, axis=1), vocab_size=BOX9.vocab_size)
        monkeypatch.setattr(report, "ready_model", lambda *_, scripted=scripted: scripted)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            results = evaluate_program(evaluating(checkpoint, puzzles=table, out=tmp_path / "out"))
        headline = "   <- headline: every cell right"
        assert f"exact_accuracy = {exact}{headline}" in caplog.messages
        assert f"cell_accuracy = {cells}   (givens excluded)" in caplog.messages
        assert (results["data"], results["split"]) == ("toy.csv", "own puzzles")


def test_halting_is_refused_where_a_model_never_halts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"eval\.halting=on with model\.halting=fixed"):
        evaluate_program(evaluating(finished_run("model.halting=fixed"), "eval.halting=on", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_results_say_that_batches_stopped_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of halting and the size of a batch are in the results and in the folder's name."""
    lines = [
        "model=fprm",
        "model.mixer=attention",
        "model.positions=rope",
        "model.hidden_size=16",
        "trainer.max_steps=2",
    ]
    alone = ["eval.H_cycles=1", "eval.L_cycles=1", "eval.segments=30", "eval.halting=batch_residual"]
    run_dir = train_only(monkeypatch, tiny(tmp_path / "run", *lines, *alone))
    for size in (2, 5):
        results = evaluate_program(evaluating(run_dir, *alone, f"eval.batch_size={size}"))
        assert (results["halting"], results["batch_size"], results["segments"]) == ("batch_residual", size, 30)
        assert results["mean_segments"] <= results["max_segments"] <= 30
    names = sorted(folder.name for folder in (run_dir / "evaluations").iterdir())
    assert len(names) == 2 and [name.rpartition("-")[2] for name in names] == ["batch_residual2", "batch_residual5"]


def test_results_by_empty_cells() -> None:
    """Puzzles with 1, 5 and 12 blanks, each bucket with its own count."""
    grids = puzzles(BOX4, 9)
    blanks = np.array([1, 1, 5, 5, 5, 12, 12, 12, 12])
    tokens = np.where(np.arange(16) < blanks[:, None], 1, grids.labels).astype(np.uint8)
    split = Split(tokens, grids.labels, grids.rating, grids.puzzle_ids)
    answers = grids.labels.copy()
    answers[[1, 5, 6, 7], 0] = 1
    result = evaluate(Scripted(answers[:, None]), split, BOX4, Depth(1, 1, 1), batch_size=4)
    assert by_blanks(split, BOX4, result) == [
        {"empty_cells": 1, "n": 2, "exact": 1},
        {"empty_cells": 5, "n": 3, "exact": 3},
        {"empty_cells": 12, "n": 4, "exact": 1},
    ]


def test_depth_table_always_shows_the_last_row(tmp_path: Path) -> None:
    results = evaluate_program(
        evaluating(finished_run(), "eval.outer_updates=50", "eval.decode=outer_update", out=tmp_path)
    )
    lines = depth_table(results)
    assert len(results["depths"]) == 50 and len(lines) == 13
    assert lines[1].split()[:2] == ["1", "6"] and lines[-1].split()[:2] == ["50", "300"]


# --- how many puzzles ------------------------------------------------------------------------------------------------


def test_n_auto_keeps_to_its_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second a puzzle and update: 100 puzzles to 8 updates are 400 s; what fits is a labelled power of two."""
    split, model, depth = puzzles(BOX4, 100), steady(), Depth(2, 2, 8)

    def chosen(minutes: float, **settings: Any) -> tuple[int, str | None]:
        some, label = choose_subset(split, EvalConfig(**settings), model, depth, "the test split", minutes)
        return len(some), label

    monkeypatch.setattr(report, "_seconds_per_update", lambda model, depth, batch: 0.5 * batch)
    assert chosen(7) == chosen(1, n="all") == chosen(1, n=100) == (100, None)
    assert chosen(6) == (64, "random subset of 64 of 100, eval.subset_seed=0")
    assert chosen(2.2, subset_seed=5) == (32, "random subset of 32 of 100, eval.subset_seed=5")
    assert chosen(0.001)[0] == 1 and chosen(1, n=7) == (7, "random subset of 7 of 100, eval.subset_seed=0")
    with pytest.raises(UserError, match=r"^eval\.n=101: the test split holds 100 puzzles"):
        chosen(1, n=101)
    # A few puzzles by themselves are slow; before a subset is taken, the real batch is timed.
    asked: list[int] = []
    monkeypatch.setattr(report, "_seconds_per_update", lambda model, depth, batch: asked.append(batch) or 0.05)
    assert chosen(0.15, batch_size=32) == (100, None) and asked == [4, 32]


# --- the published curve ---------------------------------------------------------------------------------------------


def test_published_curve_is_for_the_same_setting_alone() -> None:
    model = {"hidden_size": 512, "mixer": "attention", "axes": "both", "connection": {"kind": "attention_residual"}}
    here = {"model": "infiloop", "model_settings": model, "data": "Sudoku-Extreme", "split": "test", "halting": "off"}
    here |= {"H_cycles": 6, "L_cycles": 12, "starts": 1}
    published = published_curve(here)
    assert published is not None and len(published[0]) == len(published[1])
    trm = here | {"model": "trm", "model_settings": model | {"connection": {"kind": "carry_last"}}}
    other = published_curve(trm)
    assert other is not None and other[1] != published[1]
    changes = [
        {"data": "generated-sudoku9-any"}, {"split": "validation"}, {"split": "own puzzles"}, {"H_cycles": 3},
        {"L_cycles": 6}, {"halting": "on"}, {"model": "mine"}, {"model": "trm"}, {"starts": 2},
    ]  # fmt: skip
    assert all(published_curve(here | change) is None for change in changes)
    for change in ({"hidden_size": 96}, {"mixer": "mlp"}, {"axes": "inner"}, {"connection": {"kind": "constant_step"}}):
        assert published_curve(here | {"model_settings": model | change}) is None

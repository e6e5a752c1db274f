"""Checkpoints: both sets of weights, the same names in any mode, damage named in one line; and which one is the best."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.arrays import PuzzleData
from data.build import load_puzzle_data
from models.core import LoopedReasoner
from tests.runs import evaluating, finished_run, rows_of, tiny, train_only
from trainer import loop
from trainer.checkpoint import export_ema, find_checkpoint, load_checkpoint, save_checkpoint
from trainer.errors import UserError
from trainer.evaluator import Evaluation, evaluate
from trainer.files import write_atomically
from trainer.report import evaluate_program


def logits(model: LoopedReasoner) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, model.vocab_size, (4, model.seq_len), generator=generator)
    with torch.no_grad():
        x = model.encode(tokens, model.puzzle_rows(torch.zeros(4, dtype=torch.int32)))
        return model.decode(model.segment(model.start(4), x, 2, 2))[0]


def parts(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file, as they lie in it."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118


# --- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 32])
def test_saved_model_gives_the_same_logits(rows: int, tmp_path: Path) -> None:
    config = tiny(tmp_path, f"model.puzzle_emb_dim={rows}")
    data = load_puzzle_data(config.data, lambda _: None)
    model = LoopedReasoner(config.model, data.meta.vocab_size, data.meta.seq_len)
    model.puzzle_table.normal_()
    averaged = [p.detach() * 0.5 for p in model.parameters()]
    file = tmp_path / "last.safetensors"
    save_checkpoint(file, model, averaged, config, 7, dataclasses.asdict(data.meta), {"validation/exact": 3})
    loaded = load_checkpoint(file)
    assert (loaded.step, loaded.config, loaded.path) == (7, config, file)
    assert loaded.data_meta == dataclasses.asdict(data.meta) and loaded.validation == {"validation/exact": 3}
    assert torch.equal(logits(loaded.build_model("raw")), logits(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert torch.equal(logits(loaded.build_model("ema")), logits(model))


def test_both_sets_of_weights_are_kept() -> None:
    """raw.* and ema.* cover the same parameters and differ; the frozen buffers are there once."""
    tensors, _ = parts(finished_run() / "last.safetensors")
    raw, ema = ({n[4:]: t for n, t in tensors.items() if n.startswith(kind)} for kind in ("raw.", "ema."))
    config = load_checkpoint(finished_run() / "last.safetensors").config
    model = LoopedReasoner(config.model, 6, 16)
    assert raw.keys() == ema.keys() == dict(model.named_parameters()).keys()
    assert all(not torch.equal(raw[name], ema[name]) for name in ("block.layers.0.mlp.down.weight", "inner.query"))
    buffers = {n for n in tensors if n.startswith("buffer.")}
    assert buffers == {"buffer.H_init", "buffer.L_init", "buffer.puzzle_table"}
    assert len(tensors) == 2 * len(raw) + len(buffers)


def test_evaluation_takes_the_weights_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[dict[str, Tensor]] = []

    def watch(model: LoopedReasoner, *arguments: Any, **settings: Any) -> Evaluation:
        used.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return evaluate(model, *arguments, **settings)

    monkeypatch.setattr("trainer.report.evaluate", watch)
    tensors, _ = parts(finished_run() / "last.safetensors")
    for weights in ("raw", "ema"):
        asked = evaluating(finished_run(), f"eval.weights={weights}", "which=last", out=tmp_path / weights)
        results = evaluate_program(asked)
        assert results["weights"] == weights and results["checkpoint_step"] == 20
        assert all(torch.equal(p, tensors[f"{weights}.{name}"]) for name, p in used[-1].items())
    assert evaluating(finished_run()).eval.weights == "ema"


def test_eager_and_compiled_runs_write_the_same_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile, here with a backend that compiles nothing, leaves no prefix in any name."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **kwargs: compile_(call, **{**kwargs, "backend": "eager"}))
    monkeypatch.setattr("trainer.runtime.compiler_missing", lambda device: None)
    for name, compiled in (("a", "false"), ("b", "true")):
        train_only(monkeypatch, tiny(tmp_path / name, f"trainer.compile={compiled}", "trainer.max_steps=1"))
    a, b = (parts(tmp_path / name / "last.safetensors")[0] for name in "ab")
    assert a.keys() == b.keys() and all("_orig_mod" not in name for name in b)
    both = [load_checkpoint(tmp_path / name / "last.safetensors").build_model("raw") for name in "ab"]
    both[0].compile_updates()
    for model in both:
        model.load_state_dict(both[1].state_dict())
    torch.testing.assert_close(logits(both[0]), logits(both[1]))


def test_export_keeps_the_averaged_weights_alone(tmp_path: Path) -> None:
    source, target = finished_run() / "best.safetensors", tmp_path / "small.safetensors"
    export_ema(source, target)
    exported = load_checkpoint(target)
    assert torch.equal(logits(exported.build_model("ema")), logits(load_checkpoint(source).build_model("ema")))
    assert target.stat().st_size < 0.6 * source.stat().st_size
    with pytest.raises(UserError, match=r"small\.safetensors: holds no raw weights; ask for ema ones"):
        exported.build_model("raw")


# --- damage ----------------------------------------------------------------------------------------------------------


def renamed(tensors: dict[str, Tensor], _: dict[str, str]) -> None:
    tensors["ema.lm_hed.weight"] = tensors.pop("ema.lm_head.weight")


def added(tensors: dict[str, Tensor], _: dict[str, str]) -> None:
    tensors["ema.extra"] = torch.zeros(1)


def reshaped(tensors: dict[str, Tensor], _: dict[str, str]) -> None:
    tensors["ema.lm_head.weight"] = tensors["ema.lm_head.weight"][:-1].clone()


def without_header(_: dict[str, Tensor], metadata: dict[str, str]) -> None:
    metadata.clear()


def other_settings(_: dict[str, Tensor], metadata: dict[str, str]) -> None:
    header = json.loads(metadata["longloop"])
    header["config"]["model"]["hiden_size"] = 3
    metadata["longloop"] = json.dumps(header)


def other_data(_: dict[str, Tensor], metadata: dict[str, str]) -> None:
    header = json.loads(metadata["longloop"])
    del header["data"]["seq_len"]
    metadata["longloop"] = json.dumps(header)


def flipped(tensors: dict[str, Tensor], _: dict[str, str]) -> None:
    tensors["ema.lm_head.weight"][0, 0] *= -1


def not_finite(tensors: dict[str, Tensor], _: dict[str, str]) -> None:
    tensors["ema.lm_head.weight"][0, 0] = torch.nan


def whole_numbers(tensors: dict[str, Tensor], _: dict[str, str]) -> None:
    tensors["ema.lm_head.weight"] = tensors["ema.lm_head.weight"].int()


def another_format(_: dict[str, Tensor], metadata: dict[str, str]) -> None:
    metadata["longloop"] = metadata["longloop"].replace('"format": 1', '"format": 2')


def no_object(_: dict[str, Tensor], metadata: dict[str, str]) -> None:
    metadata["longloop"] = "[1, 2]"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed, "lacks lm_head.weight"),
        (added, "has an unknown tensor extra"),
        (reshaped, r"lm_head.weight has shape \[5, 32\], its settings ask for \[6, 32\]"),
        (flipped, "damaged, its weights are not those that were written"),
        (not_finite, "lm_head.weight holds numbers that are not finite"),
        (whole_numbers, r"lm_head.weight is torch\.int32, finite torch\.float32 expected"),
        (another_format, "header not understood .format 2, 1 expected"),
        (without_header, "has no longloop header"),
        (other_settings, "header not understood"),
        (other_data, "header not understood"),
        (no_object, "header not understood"),
    ],
)
def test_wrong_content_is_named(
    change: Callable[[dict[str, Tensor], dict[str, str]], None], message: str, tmp_path: Path
) -> None:
    tensors, metadata = parts(finished_run() / "best.safetensors")
    change(tensors, metadata)
    save_file(tensors, tmp_path / "bad.safetensors", metadata=metadata)
    with pytest.raises(UserError, match=rf"^{tmp_path}/bad\.safetensors: {message}") as caught:
        load_checkpoint(tmp_path / "bad.safetensors").build_model("ema")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kept", [0, 4, 1000, -1])
def test_truncated_file_is_named(kept: int, tmp_path: Path) -> None:
    content = (finished_run() / "best.safetensors").read_bytes()
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(content[:kept])
    with pytest.raises(UserError, match=rf"^{bad}: not a readable safetensors file"):
        load_checkpoint(bad)


def test_other_kinds_of_files_are_named(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3)}, tmp_path / "model.pt")
    with pytest.raises(UserError, match=r"model\.pt: not a readable safetensors file"):
        load_checkpoint(tmp_path / "model.pt")
    with pytest.raises(UserError, match=f"checkpoint={tmp_path}: no best.safetensors or last.safetensors in it"):
        find_checkpoint(tmp_path)
    with pytest.raises(UserError, match=f"checkpoint={tmp_path}/nowhere: no such file or directory"):
        find_checkpoint(tmp_path / "nowhere")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens while writing, a reader sees the old file or the new one, and no other is left behind."""
    target = tmp_path / "last.safetensors"
    write_atomically(target, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=rf"^{target}: cannot be written \(No space left on device\)"):
        write_atomically(target, b"new content")
    assert target.read_bytes() == b"old" and list(tmp_path.iterdir()) == [target]


# --- which one -------------------------------------------------------------------------------------------------------


def scripted_scores(scores: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation number i answers scores[i] of its puzzles exactly."""
    left = iter(scores)

    def score(*arguments: Any, **settings: Any) -> Evaluation:
        real = evaluate(*arguments, **settings)
        rows = [dataclasses.replace(row, exact=round(next(left) * 10), n=10) for row in real.rows[-1:]]
        return dataclasses.replace(real, rows=rows)

    monkeypatch.setattr(loop, "evaluate", score)


def test_best_is_the_best_on_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted_scores([0.1, 0.5, 0.3], monkeypatch)
    run_dir = train_only(monkeypatch, tiny(tmp_path / "run", "trainer.max_steps=3", "trainer.eval_every=1"))
    best, last = (load_checkpoint(find_checkpoint(run_dir, which)) for which in ("best", "last"))
    assert (best.step, last.step) == (2, 3)
    assert best.validation is not None and best.validation["validation/exact_accuracy"] == 0.5
    assert [row["validation/exact_accuracy"] for row in rows_of(run_dir, "validation")] == [0.1, 0.5, 0.3]
    assert any(not torch.equal(tensor, last.tensors[name]) for name, tensor in best.tensors.items())


def test_evaluation_says_which_checkpoint_it_took(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished_run(), run_dir)
    for which in ("best", "last"):
        with caplog.at_level("INFO"):
            evaluate_program(evaluating(run_dir, f"which={which}", out=tmp_path / "out"))
        assert f"evaluating {run_dir / which}.safetensors (step" in caplog.text
    (run_dir / "best.safetensors").unlink()
    assert find_checkpoint(run_dir, "best") == run_dir / "last.safetensors"


def test_test_puzzles_are_not_read_for_selection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the test split taken away, a run is the same up to the test at its end; best may come from validation alone."""

    class Untouchable:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"the test split was read: {name}")

    def without_test(*arguments: Any) -> PuzzleData:
        return dataclasses.replace(load_puzzle_data(*arguments), test=Untouchable())  # pyright: ignore

    whole = train_only(monkeypatch, tiny(tmp_path / "whole", "trainer.eval_every=4"))
    monkeypatch.setattr(loop, "load_puzzle_data", without_test)
    blind = train_only(monkeypatch, tiny(tmp_path / "blind", "trainer.eval_every=4"))
    assert rows_of(blind) == rows_of(whole) and rows_of(blind, "validation") == rows_of(whole, "validation")
    for name in ("best", "last"):
        a, b = (load_checkpoint(run / f"{name}.safetensors") for run in (whole, blind))
        assert a.step == b.step and all(torch.equal(t, b.tensors[key]) for key, t in a.tensors.items())

"""Before step 1: device, compiler, seeds, the micro-batch that fits, and an honest estimate."""

import ctypes
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from data.build import load_puzzle_data
from data.sampler import TrainSampler
from models.core import LoopedReasoner
from tests.runs import tiny, train_only
from trainer import capacity, loop, runtime
from trainer.capacity import Probe, fitting_micro_batch, probe, saved_bytes_per_puzzle, seconds_per_step
from trainer.errors import UserError
from trainer.runtime import available_device, compiler_missing, free_memory, set_up

# --- device and compiler ---------------------------------------------------------------------------------------------


def machine(monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")]
)
def test_auto_takes_cuda_then_mps_then_cpu(
    cuda: bool, mps: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, cuda, mps)
    assert available_device("auto").type == expected and available_device("cpu").type == "cpu"


@pytest.mark.parametrize("wanted", ["cuda", "mps"])
def test_an_absent_device_is_refused(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, False, False)
    with pytest.raises(UserError, match=rf"^trainer\.device={wanted}: this machine has none; use trainer\.device=auto"):
        available_device(wanted)


def test_without_a_compiler_runs_are_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says why; asking for the compiler by name is an error."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    for which, include, reason in (
        (lambda name: None, "/usr/include", "no C++ compiler"),
        (lambda name: f"/usr/bin/{name}", str(tmp_path), f"{tmp_path}/Python.h is missing"),
    ):
        monkeypatch.setattr(runtime.shutil, "which", which)
        monkeypatch.setattr(runtime.sysconfig, "get_path", lambda _, include=include: include)
        assert str(compiler_missing(cpu)).startswith(reason)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert set_up(tiny(tmp_path, "trainer.compile=auto").trainer).compile is False
        assert len(caplog.messages) == 1 and f"eager ({reason}" in caplog.messages[0]
        with pytest.raises(UserError, match=r"^trainer\.compile=true: "):
            set_up(tiny(tmp_path, "trainer.compile=true").trainer)
    (tmp_path / "Python.h").touch()
    assert compiler_missing(cpu) is None and set_up(tiny(tmp_path, "trainer.compile=auto").trainer).compile
    assert not set_up(tiny(tmp_path, "trainer.compile=false").trainer).compile


def test_bfloat16_is_for_cuda_unless_asked_for(tmp_path: Path) -> None:
    assert set_up(tiny(tmp_path, "trainer.dtype=auto").trainer).dtype == torch.float32
    assert set_up(tiny(tmp_path, "trainer.dtype=bfloat16").trainer).dtype == torch.bfloat16


def test_bfloat16_trains_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = train_only(monkeypatch, tiny(tmp_path / "run", "trainer.dtype=bfloat16", "trainer.max_steps=2"))
    assert (run_dir / "last.safetensors").is_file()


FAULTS_OF_A_STEP = """
import resource, torch
from trainer import runtime
runtime.keep_freed_memory()
for step in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    [torch.zeros(5 << 20) for _ in range(8)]  # 8 buffers of 5,120 pages, freed together
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no glibc")
def test_freed_memory_serves_the_next_step() -> None:
    """Without the call it is kept or not, by what else lies on the heap; with it, always."""
    done = subprocess.run([sys.executable, "-c", FAULTS_OF_A_STEP], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 5120


def test_free_memory_respects_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8000))
    monkeypatch.setattr(runtime, "Path", lambda _: tmp_path)
    assert free_memory(torch.device("cpu")) == 8000
    files = {"memory.max": "max\n", "memory.current": "1000\n", "memory.stat": "anon 600\ninactive_file 300\n"}
    for limit, free in (("max", 8000), ("3000", 2300), ("90000", 8000)):
        for name, text in (files | {"memory.max": f"{limit}\n"}).items():
            (tmp_path / name).write_text(text)
        assert free_memory(torch.device("cpu")) == free


# --- micro-batch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("per_puzzle", "free", "global_batch", "expected"),
    [
        (60, 2 * 60 * 768, 768, 768),  # half of the free memory holds the whole batch
        (60, 2 * 60 * 768 - 1, 768, 384),  # not quite: halved, because micro-batches are of one size
        (60, 2 * 60 * 300, 768, 256),
        (60, 2 * 60 * 5, 768, 4),
        (60, 1, 768, 1),  # one puzzle is the least, fitting or not
        (1, 10**12, 6, 6),
        (1, 2 * 5, 7, 1),  # a prime number has no even split but 1
    ],
)
def test_largest_even_split_that_fits(per_puzzle: int, free: int, global_batch: int, expected: int) -> None:
    assert fitting_micro_batch(per_puzzle, free, global_batch) == expected


@pytest.mark.parametrize("mixer", ["mlp", "attention"])
def test_saved_bytes_grow_with_what_is_differentiated(mixer: str, tmp_path: Path) -> None:
    """Activations of the last outer cycle alone are kept: about in proportion to L + 1, and the same for any H."""
    config = tiny(tmp_path, f"model.mixer={mixer}")
    data = load_puzzle_data(config.data, lambda _: None)
    model = LoopedReasoner(config.model, data.meta.vocab_size, data.meta.seq_len)
    batch = TrainSampler(data.train, data.meta.box, None, 0).draw(0, 8)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def saved(**changes: int) -> int:
        schedule = config.schedule.model_copy(update=changes)
        return saved_bytes_per_puzzle(model, batch.inputs, batch.labels, schedule)

    base = saved()
    assert saved(H_cycles=5) == base and 1.9 < saved(L_cycles=5) / base < 2.1
    assert 1.8 < saved(grad_outer_cycles=2) / base < 2.1
    width, positions = 32, 17
    per_layer = 4 * positions * width  # one float32 activation; a layer keeps at least ten of them
    assert base > 10 * per_layer * 2 * 3
    assert all(p.grad is None and torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_micro_batch_is_chosen_to_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With memory for three puzzles' activations, a global batch of 8 runs by twos; a set number is left alone."""
    monkeypatch.setattr(loop, "probe", lambda *_: Probe(bytes_per_puzzle=1000, seconds_per_puzzle=0.01))
    monkeypatch.setattr(loop, "free_memory", lambda _: 2 * 3000 + 100)
    sizes: list[int] = []

    def watch(model: LoopedReasoner, carry: loop.Carry, config: object, micro_batch: int) -> loop.StepResult:
        sizes.append(micro_batch)
        return forward_backward(model, carry, config, micro_batch)  # pyright: ignore[reportArgumentType]

    forward_backward = loop.forward_backward
    monkeypatch.setattr(loop, "forward_backward", watch)
    with caplog.at_level(logging.INFO):
        train_only(monkeypatch, tiny(tmp_path / "a", "trainer.max_steps=1"))
        train_only(monkeypatch, tiny(tmp_path / "b", "trainer.max_steps=1", "trainer.micro_batch=3"))
    assert sizes == [2, 3]
    assert "global batch 8 in micro-batches of 2 (0.0 MB of saved activations a puzzle)" in caplog.text
    assert "global batch 8 in micro-batches of 3 (as set)" in caplog.text


# --- estimate --------------------------------------------------------------------------------------------------------


def test_estimate_is_said_before_step_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For the whole run as it will be; where that is days, with the way to the CPU experiment."""
    for seconds, line in ((3.0, "estimate: 3.00 s a step, 1.0 minutes for 20 steps"), (360, "2.0 hours for 20 steps")):
        monkeypatch.setattr(loop, "seconds_per_step", lambda *_, seconds=seconds: seconds)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            train_only(monkeypatch, tiny(tmp_path / str(seconds)))
        at = next(i for i, message in enumerate(caplog.messages) if line in message)
        assert at < next(i for i, message in enumerate(caplog.messages) if message.startswith("step "))
        assert "experiment=sudoku6_cpu" not in caplog.text
    monkeypatch.setattr(loop, "seconds_per_step", lambda *_: 86400.0)
    with caplog.at_level(logging.INFO):
        train_only(monkeypatch, tiny(tmp_path / "long", "trainer.max_steps=2"))
    assert "that is 2 days on this machine; the same pipeline at CPU size: python train.py experiment=sudoku6_cpu" in (
        caplog.text
    )


def test_seconds_per_step_scales_to_the_global_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(tmp_path)
    data = load_puzzle_data(config.data, lambda _: None)
    model = LoopedReasoner(config.model, data.meta.vocab_size, data.meta.seq_len)
    batch = TrainSampler(data.train, data.meta.box, None, 0).draw(0, 8)
    timed: list[int] = []
    monkeypatch.setattr(capacity, "_one_pass", lambda model, tokens, labels, schedule: timed.append(len(tokens)))
    clock = iter(range(100))
    monkeypatch.setattr(capacity.time, "perf_counter", lambda: next(clock))
    arguments = model, batch.inputs, batch.labels, config.schedule

    assert seconds_per_step(*arguments, 4, Probe(1, 0.1)) == 2.0 and timed == [4, 4]  # 1 s a micro-batch, two of them
    timed.clear()
    assert seconds_per_step(*arguments, 4, Probe(1, 10.0)) == 80.0 and timed == []  # too slow to be timed again
    assert probe(*arguments).seconds_per_puzzle == 0.5 and timed == [2, 2, 2]

"""Speed of one training step, as a share of what its own matrix products would take by themselves.

    python scripts/bench.py                            the CPU experiment's step, compiled and eager
    python scripts/bench.py model.ffn_multiple=256     with settings of train.py on top of experiment=sudoku6_cpu
    python scripts/bench.py model.hidden_size=512 model.num_heads=8 schedule.global_batch=16

The products of a step (forward of all block applications, and the two backward ones of the differentiated) are also run
alone, in two ways: all in the step's order and memory, and each again and again on the same numbers, which then lie in the
cache: a rate that no step can have, given as `repeated`. Before any timing, compiled and eager steps must give the same loss
and gradients (1e-3 of the norm): a speed is only reported for a right result. A shared machine's speed changes by the
second, so all sides take turns in one process, and the fastest call of each counts.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from data.sudoku import Box
from models.blocks import Linear
from models.core import LoopedReasoner
from trainer.cli import run_program
from trainer.compose import compose_launch
from trainer.config import SudokuConfig, TrainConfig
from trainer.loop import Carry, empty_carry, forward_backward
from trainer.runtime import seed_everything, set_up


def random_rows(model: LoopedReasoner, config: TrainConfig) -> Carry:
    """A global batch of random tokens and labels, at the initial memories."""
    carry = empty_carry(model, config.schedule.global_batch)
    tokens, labels = (
        torch.randint(1, model.vocab_size, carry.tokens.shape, dtype=d) for d in (torch.uint8, torch.int64)
    )
    return replace(carry, tokens=tokens, labels=labels)


def training_step(model: LoopedReasoner, carry: Carry, config: TrainConfig) -> float:
    """The loss of one segment of the whole batch at once, with gradients: a step of trainer/loop.py less the optimizer."""
    model.zero_grad(set_to_none=True)
    sums = forward_backward(model, carry, config, config.schedule.global_batch).sums
    return (
        float(sums["cell_loss"] + config.schedule.halt_loss_weight * sums["halt_loss"]) / config.schedule.global_batch
    )


def seconds(call: Callable[[], object], least: float) -> float:
    """Fastest seconds of a call, over at least `least` seconds and two calls, after one to warm up."""
    call()
    times, begin = [], time.perf_counter()
    while len(times) < 2 or time.perf_counter() - begin < least:
        t = time.perf_counter()
        call()
        times.append(time.perf_counter() - t)
    return min(times)


def products(model: LoopedReasoner, batch: int) -> list[tuple[int, int, int]]:
    """(rows, in, out) of every weight product of one block application; the two inside attention are not counted."""
    c, T = model.config, model.config.puzzle_tokens + model.seq_len
    shapes = []
    for name, module in model.block.named_modules():
        if isinstance(module, Linear):
            out_width, in_width = module.weight.shape
            shapes.append((batch * c.hidden_size if "token_mlp" in name else batch * T, in_width, out_width))
    return shapes


def all_products(model: LoopedReasoner, batch: int, H: int, L: int) -> tuple[Callable[[], None], int]:
    """The weight products of a step and nothing else, in its order, and how many floating-point operations they are.

    Each differentiated application has buffers of its own, as in the step, where its activations wait for the backward pass.
    """
    shapes = products(model, batch)
    differentiated = model.config.applications_per_update(L)
    weights = [torch.randn(o, i) for _, i, o in shapes]
    gradients = [torch.zeros(o, i) for _, i, o in shapes]
    kept = [
        [(torch.randn(rows, i), torch.randn(rows, o), torch.empty(rows, i)) for rows, i, o in shapes]
        for _ in range(differentiated)
    ]

    def run() -> None:
        for application in range(H * differentiated):  # those without gradient, too, pass through as many buffers
            for weight, (x, y, _) in zip(weights, kept[application % differentiated], strict=True):
                torch.mm(x, weight.t(), out=y)
        for buffers in reversed(kept):
            for weight, gradient, (x, y, back) in zip(weights, gradients, buffers, strict=True):
                torch.mm(y, weight, out=back)
                torch.addmm(gradient, y.t(), x, beta=0.0, out=gradient)

    applications = H * differentiated
    return run, sum(2 * rows * i * o * (applications + 2 * differentiated) for rows, i, o in shapes)


def repeated_products(shape: tuple[int, int, int]) -> tuple[Callable[[], object], Callable[[], object]]:
    """One product's forward pass and its two backward ones, always on the same numbers."""
    rows, i, o = shape
    x, w, g = torch.randn(rows, i), torch.randn(o, i), torch.randn(rows, o)
    return lambda: x @ w.t(), lambda: (g @ w, g.t() @ x)


def fastest(calls: dict[Any, Callable[[], object]], rounds: int, least: float) -> dict[Any, float]:
    """Fastest seconds of each call; they take turns, each for `least` seconds in every round."""
    with torch.no_grad():
        times = [{name: seconds(call, least) for name, call in calls.items()} for _ in range(rounds)]
    return {name: min(t[name] for t in times) for name in calls}


def bench(overrides: list[str]) -> int:
    config = compose_launch("config", ["experiment=sudoku6_cpu", *overrides], TrainConfig).jobs[0]
    seed_everything(config.seed)
    runtime = set_up(config.trainer)
    if not isinstance(config.data, SudokuConfig):
        sys.exit("bench: data=sudoku6 and other generated data give the shapes")
    box, schedule = Box(config.data.box_rows, config.data.box_cols), config.schedule
    model = LoopedReasoner(config.model, box.vocab_size, box.cells).to(runtime.device)
    model.compute_dtype = runtime.dtype
    carry = random_rows(model, config)

    eager_loss = training_step(model, carry, config)
    eager_gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    if runtime.compile:
        model.compile_updates()
    begin = time.perf_counter()
    loss = training_step(model, carry, config)
    compiling = time.perf_counter() - begin
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    worst = max(((a - b).norm() / (b.norm() + 1e-6)).item() for a, b in zip(gradients, eager_gradients, strict=True))
    same = abs(loss - eager_loss)
    print(f"compiled against eager, one step: loss {same:.1e} apart, gradients at most {worst:.1e} of their norm")
    if worst > 1e-3 or same > 1e-4:
        sys.exit("bench: the compiled step is not the eager one; no speed is reported")

    @torch.enable_grad()
    def step() -> float:
        return training_step(model, carry, config)

    def eager_step() -> float:
        with torch.compiler.set_stance("force_eager"):
            return step()

    alone, flops = all_products(model, schedule.global_batch, schedule.H_cycles, schedule.L_cycles)
    calls: dict[Any, Callable[[], object]] = {"compiled": step, "eager": eager_step, "products": alone}
    shapes = products(model, schedule.global_batch)
    for shape in set(shapes):
        calls[shape, "forward"], calls[shape, "backward"] = repeated_products(shape)
    times = fastest(calls, rounds=8, least=0.5)
    compiled, eager, matmul = times["compiled"], times["eager"], times["products"]
    differentiated = model.config.applications_per_update(schedule.L_cycles)
    repeated = sum(
        differentiated * (schedule.H_cycles * times[shape, "forward"] + times[shape, "backward"]) for shape in shapes
    )
    result = {
        "model": config.model.model_dump(mode="json"),
        "batch": schedule.global_batch,
        "H_cycles": schedule.H_cycles,
        "L_cycles": schedule.L_cycles,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "step_compiled_s": compiled,
        "step_eager_s": eager,
        "matmuls_alone_s": matmul,
        "matmul_gflops": flops / matmul / 1e9,
        "share_of_matmul_rate_compiled": matmul / compiled,
        "share_of_matmul_rate_eager": matmul / eager,
        "repeated_matmuls_s": repeated,
        "share_of_repeated_rate_compiled": repeated / compiled,
        "share_of_repeated_rate_eager": repeated / eager,
        "compile_s": compiling,
    }
    print(f"step                   compiled {compiled * 1e3:.0f} ms, eager {eager * 1e3:.0f} ms")
    for name, alone_seconds in (("its products alone", matmul), ("... repeated", repeated)):
        print(
            f"{name:<22} {alone_seconds * 1e3:.0f} ms ({flops / alone_seconds / 1e9:.0f} GFLOP/s): the compiled step runs at "
            f"{alone_seconds / compiled:.0%} of that rate, the eager one at {alone_seconds / eager:.0%}"
        )
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    run_program(partial(bench, parser.parse_args().overrides))

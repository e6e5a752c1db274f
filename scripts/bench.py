"""Speed of one training step, as a share of what its own matrix products would take by themselves.

    python scripts/bench.py                            the CPU experiment's step, compiled and eager
    python scripts/bench.py model.ffn_multiple=256     with settings of train.py on top of experiment=sudoku6_cpu
    python scripts/bench.py model.hidden_size=512 model.num_heads=8 schedule.global_batch=16

Every product of a step (forward of all block applications, forward and two backward ones of the differentiated) is timed
alone, with the shapes and the thread count of the step, in the same process. Before any timing, compiled and eager steps
must give the same loss and gradients (1e-3 of the norm): a speed is only reported for a right result.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

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


def seconds(call: Callable[[], object], least: float = 2.0) -> float:
    """Median seconds of a call, over at least `least` seconds and five calls, after one to warm up."""
    call()
    times, begin = [], time.perf_counter()
    while len(times) < 5 or time.perf_counter() - begin < least:
        t = time.perf_counter()
        call()
        times.append(time.perf_counter() - t)
    return sorted(times)[len(times) // 2]


def products(model: LoopedReasoner, batch: int) -> list[tuple[int, int, int]]:
    """(rows, in, out) of every weight product of one block application; the two inside attention are not counted."""
    c, T = model.config, model.config.puzzle_tokens + model.seq_len
    shapes = []
    for name, module in model.block.named_modules():
        if isinstance(module, Linear):
            out_width, in_width = module.weight.shape
            shapes.append((batch * c.hidden_size if "token_mlp" in name else batch * T, in_width, out_width))
    return shapes


def matmul_seconds(model: LoopedReasoner, batch: int, H: int, L: int) -> tuple[float, float]:
    """(seconds, floating-point operations) of all weight products of a step, each shape timed alone."""
    differentiated = model.config.applications_per_update(L)
    applications = H * differentiated
    total = flops = 0.0
    timed: dict[tuple[int, int, int], tuple[float, float]] = {}
    with torch.no_grad():
        for shape in products(model, batch):
            if shape not in timed:
                rows, i, o = shape
                x, w, g = torch.randn(rows, i), torch.randn(o, i), torch.randn(rows, o)
                timed[shape] = (
                    seconds(lambda x=x, w=w: F.linear(x, w), 0.5),
                    seconds(lambda x=x, w=w, g=g: (g @ w, g.T @ x), 0.5),
                )
            forward, backward = timed[shape]
            total += applications * forward + differentiated * backward
            flops += 2 * shape[0] * shape[1] * shape[2] * (applications + 2 * differentiated)
    return total, flops


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
    eager = seconds(lambda: training_step(model, carry, config))
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
    compiled = seconds(lambda: training_step(model, carry, config))
    matmul, flops = matmul_seconds(model, schedule.global_batch, schedule.H_cycles, schedule.L_cycles)
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
        "compile_s": compiling,
    }
    print(
        f"step   compiled {compiled * 1e3:.0f} ms, eager {eager * 1e3:.0f} ms, "
        f"its matrix products alone {matmul * 1e3:.0f} ms"
    )
    print(
        f"share of the matmul rate ({flops / matmul / 1e9:.0f} GFLOP/s): "
        f"compiled {matmul / compiled:.0%}, eager {matmul / eager:.0%}"
    )
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    run_program(partial(bench, parser.parse_args().overrides))

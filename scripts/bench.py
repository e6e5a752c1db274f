"""Speed of one training step, as a share of what its own matrix products would take by themselves.

    python scripts/bench.py                                     the CPU experiment's step, compiled and eager
    python scripts/bench.py width=512 batch=16 mixer=attention  another shape

Every product of a step (forward of all block applications, forward and two backward ones of the differentiated) is timed
alone, with the shapes and the thread count of the step, in the same process. Before any timing, compiled and eager steps
must give the same loss and gradients (1e-4 of the norm): a speed is only reported for a right result.
"""

import json
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from data.sudoku import Box
from models.blocks import Linear
from models.core import LoopedReasoner
from models.losses import segment_loss
from trainer.config import AttentionResidualConfig, ModelConfig
from trainer.runtime import keep_freed_memory

DEFAULTS = {"width": 96, "batch": 64, "mixer": "mlp", "digits": 6, "H": 2, "L": 4, "puzzle_tokens": 0, "multiple": 128}


def build(shape: dict) -> LoopedReasoner:
    """InfiLoop of the given shape; the CPU experiment's by default."""
    config = ModelConfig(
        name="infiloop",
        connection=AttentionResidualConfig(kind="attention_residual", beta0=0.55),
        mixer=shape["mixer"],
        positions="rope" if shape["mixer"] == "attention" else "none",
        hidden_size=shape["width"],
        num_heads=max(1, shape["width"] // 64),
        layers=2,
        expansion=4,
        ffn_multiple=shape["multiple"],
        puzzle_tokens=shape["puzzle_tokens"],
        puzzle_emb_dim=0,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
    )
    digits = shape["digits"]
    box = {4: Box(2, 2), 6: Box(2, 3), 9: Box(3, 3)}[digits]
    return LoopedReasoner(config, box.vocab_size, box.cells)


def training_step(model: LoopedReasoner, tokens: torch.Tensor, labels: torch.Tensor, shape: dict) -> torch.Tensor:
    """One segment with loss and gradients, as trainer/loop.py does it, without the optimizer."""
    model.zero_grad(set_to_none=True)
    x = model.encode(tokens, model.puzzle_rows(torch.zeros(len(tokens), dtype=torch.int32)))
    memory = model.segment(model.start(len(tokens)), x, shape["H"], shape["L"], 1)
    logits, q = model.decode(memory)
    loss = segment_loss(logits, labels)
    total = (loss.cells + 0.5 * model.halting.loss(q, loss.exact)) / len(tokens)
    total.backward()
    return total.detach()


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
    applications, differentiated = H * (L + 1), L + 1
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


def main(arguments: list[str]) -> None:
    shape = dict(DEFAULTS)
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in shape:
            sys.exit(f"bench: unknown setting {key!r}; settings are {', '.join(shape)}")
        shape[key] = value if key == "mixer" else int(value)
    keep_freed_memory()
    torch.manual_seed(0)
    model = build(shape)
    tokens = torch.randint(1, model.vocab_size, (shape["batch"], model.seq_len))
    labels = torch.randint(2, model.vocab_size, tokens.shape)

    eager_loss = training_step(model, tokens, labels, shape)
    eager_gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    eager = seconds(lambda: training_step(model, tokens, labels, shape))
    model.compile_updates()
    begin = time.perf_counter()
    compiled_loss = training_step(model, tokens, labels, shape)
    compiling = time.perf_counter() - begin
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    worst = max(((a - b).norm() / (b.norm() + 1e-6)).item() for a, b in zip(gradients, eager_gradients, strict=True))
    same = abs(compiled_loss - eager_loss).item()
    print(
        f"compiled against eager, one step: loss differs by {same:.1e}, gradients by at most {worst:.1e} of their norm"
    )
    if worst > 1e-2 or same > 1e-3:
        sys.exit("bench: the compiled step is not the eager one; no speed is reported")
    compiled = seconds(lambda: training_step(model, tokens, labels, shape))
    matmul, flops = matmul_seconds(model, shape["batch"], shape["H"], shape["L"])
    result = {
        **shape,
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


if __name__ == "__main__":
    main(sys.argv[1:])

"""Before step 1: how many puzzles fit a backward pass, and how long the run will take.

At the papers' width one puzzle's saved activations are about 60 MB, so a global batch of 768 does not fit most devices.
Micro-batches split it; the gradients stay those of the global batch.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from models.core import LoopedReasoner
from models.losses import segment_loss
from trainer.config import ScheduleConfig

PROBE = 2
"""Puzzles in the measuring pass."""
SHARE = 0.5
"""Share of free memory that saved activations may take; the rest is for temporaries, carry, optimizer and others."""

LONG_PASS_SECONDS = 20
"""A micro-batch slower than this is not timed by itself."""


def _one_pass(model: LoopedReasoner, tokens: Tensor, labels: Tensor, schedule: ScheduleConfig) -> None:
    """Forward and backward of one segment from fresh memories; gradients are dropped."""
    ids = torch.zeros(len(tokens), dtype=torch.int32, device=tokens.device)
    x = model.encode(tokens, model.puzzle_rows(ids))
    memory = model.segment(
        model.start(len(tokens)), x, schedule.H_cycles, schedule.L_cycles, schedule.grad_outer_cycles
    )
    logits, q = model.decode(memory)
    loss = segment_loss(logits, labels)
    (loss.cells + model.halting.loss(q, loss.exact)).backward()
    model.zero_grad(set_to_none=True)


def saved_bytes_per_puzzle(model: LoopedReasoner, tokens: Tensor, labels: Tensor, schedule: ScheduleConfig) -> int:
    """Bytes that autograd keeps for one puzzle's segment (eager; the compiled graph keeps less)."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _one_pass(model, tokens[:PROBE], labels[:PROBE], schedule)
    return max(1, sum(seen.values()) // min(PROBE, len(tokens)))


def fitting_micro_batch(per_puzzle: int, free: int, global_batch: int) -> int:
    """Largest even split of the global batch whose saved activations stay within SHARE of the free bytes (at least 1)."""
    most = max(1, int(SHARE * free) // per_puzzle)
    pieces = next(k for k in range(1, global_batch + 1) if global_batch % k == 0 and global_batch // k <= most)
    return global_batch // pieces


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds_of_pass(model: LoopedReasoner, tokens: Tensor, labels: Tensor, schedule: ScheduleConfig) -> float:
    """Seconds of a forward and backward pass over these puzzles, after one pass to warm up (and compile)."""
    _one_pass(model, tokens, labels, schedule)
    _synchronise(tokens.device)
    begin = time.perf_counter()
    _one_pass(model, tokens, labels, schedule)
    _synchronise(tokens.device)
    return time.perf_counter() - begin


@dataclass(frozen=True)
class Probe:
    """What a few puzzles cost before anything is compiled."""

    bytes_per_puzzle: int
    seconds_per_puzzle: float


def probe(model: LoopedReasoner, tokens: Tensor, labels: Tensor, schedule: ScheduleConfig) -> Probe:
    few = min(PROBE, len(tokens))
    seconds = _seconds_of_pass(model, tokens[:few], labels[:few], schedule) / few
    return Probe(saved_bytes_per_puzzle(model, tokens, labels, schedule), seconds)


def seconds_per_step(
    model: LoopedReasoner, tokens: Tensor, labels: Tensor, schedule: ScheduleConfig, micro_batch: int, probed: Probe
) -> float:
    """Estimated seconds of one optimizer step: one micro-batch, timed; where that takes long, the probe, scaled up."""
    if probed.seconds_per_puzzle * micro_batch > LONG_PASS_SECONDS:
        return probed.seconds_per_puzzle * schedule.global_batch
    one = _seconds_of_pass(model, tokens[:micro_batch], labels[:micro_batch], schedule)
    return one * schedule.global_batch / micro_batch

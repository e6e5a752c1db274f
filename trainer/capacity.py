"""Before step 1: how many puzzles fit a backward pass, and how long the run will take.

At the papers' width one puzzle's saved activations are about 60 MB, so a global batch of 768 does not fit most devices.
Micro-batches split it; the gradients stay those of the global batch.
"""

import time

import torch
from torch import Tensor

from models.core import LoopedReasoner
from models.losses import segment_loss
from trainer.config import ScheduleConfig
from trainer.runtime import free_memory

PROBE = 2
"""Puzzles in the measuring pass."""
SHARE = 0.5
"""Share of free memory that saved activations may take; the rest is for temporaries, carry, optimizer and others."""


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


def choose_micro_batch(
    model: LoopedReasoner, tokens: Tensor, labels: Tensor, schedule: ScheduleConfig
) -> tuple[int, int]:
    """(micro-batch, saved bytes per puzzle) for this model on this device."""
    per_puzzle = saved_bytes_per_puzzle(model, tokens, labels, schedule)
    return fitting_micro_batch(per_puzzle, free_memory(tokens.device), schedule.global_batch), per_puzzle


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_per_step(
    model: LoopedReasoner, tokens: Tensor, labels: Tensor, schedule: ScheduleConfig, micro_batch: int
) -> float:
    """Estimated seconds of one optimizer step.

    Times one micro-batch after a warm-up pass (which compiles); where even a few puzzles take long, scales from those.
    """

    def timed(count: int) -> float:
        _synchronise(tokens.device)
        begin = time.perf_counter()
        _one_pass(model, tokens[:count], labels[:count], schedule)
        _synchronise(tokens.device)
        return time.perf_counter() - begin

    few = min(PROBE, micro_batch)
    slow = timed(few) / few
    if slow * micro_batch > 20:
        return slow * schedule.global_batch
    timed(micro_batch)
    return timed(micro_batch) * schedule.global_batch / micro_batch

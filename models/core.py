"""The recursion: one shared block, applied along two axes (or one), each with its own connection.

    segment(memory, x):                     nested (TRM, InfiLoop; HRM, where z_H has a block of its own)
        for outer in 1..H:                  gradient only in the last `grad_outer_cycles` of them
            for inner in 1..L:
                z_L = f(h_L, h_H + x);  inner connection takes z_L in
            z_H = f(h_H, h_L);          outer connection takes z_H in

    segment(memory, x):                     flat (FPRM, plain looped transformer): no z_L
        for outer in 1..H:
            for inner in 1..L:
                z_H = f(h_H, x);        outer connection takes z_H in

Shapes: B puzzles, P puzzle tokens, S cells, T = P + S positions, D width, V vocabulary. Depth (H, L, segments) is an
argument of the call, never a setting of the model.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from models.blocks import Linear, build_block, rms_norm, truncated_normal
from models.config import AttentionResidualConfig, ModelConfig
from models.connections import build_connection
from models.halting import build_halting


class NoMemory(NamedTuple):
    """Memory of the inner axis of a flat recursion: there is none."""


class Memory(NamedTuple):
    """Connection memories of both axes; every tensor inside has the puzzle as its first axis."""

    inner: Any
    outer: Any

    def map(self, change: Callable[[Tensor], Tensor]) -> "Memory":
        return Memory(type(self.inner)(*map(change, self.inner)), type(self.outer)(*map(change, self.outer)))

    @staticmethod
    def cat(parts: "list[Memory]") -> "Memory":
        """The memories of several groups of puzzles as one."""
        if len(parts) == 1:
            return parts[0]
        return Memory(
            type(parts[0].inner)(*map(torch.cat, zip(*(p.inner for p in parts), strict=True))),
            type(parts[0].outer)(*map(torch.cat, zip(*(p.outer for p in parts), strict=True))),
        )


Update = Callable[[Memory, Tensor], Any]
"""What takes the memory and the injection to the new memory of one axis."""


class LoopedReasoner(nn.Module):
    """TRM, InfiLoop and everything between: the nested recursion over one block.

    The puzzle table is a buffer with its own optimizer (trainer/optim.py): a batch's rows are looked up with
    `puzzle_rows` and handed to `encode`, so that a training step can ask for their gradient alone.
    """

    puzzle_table: Tensor
    H_init: Tensor
    L_init: Tensor

    def __init__(self, config: ModelConfig, vocab_size: int, seq_len: int, num_puzzle_ids: int = 1):
        super().__init__()
        self.config = config
        self.vocab_size, self.seq_len = vocab_size, seq_len
        width, positions = config.hidden_size, config.puzzle_tokens + seq_len
        self.compute_dtype = torch.float32
        self.token_embedding = nn.Embedding(
            vocab_size, width, _weight=truncated_normal(vocab_size, width, std=1 / math.sqrt(width))
        )
        self.position_embedding = (
            nn.Parameter(truncated_normal(positions, width, std=1 / math.sqrt(width)))
            if config.positions == "learned"
            else None
        )
        self.block = build_block(config, positions)
        self.outer_block = build_block(config, positions) if config.levels == "untied" else None
        self.lm_head = Linear(width, vocab_size)
        self.halting = build_halting(config)
        eps = config.rms_norm_eps
        self.flat = config.recursion == "flat"
        self.inner = None if self.flat else build_connection(config.axis_connection("inner"), width, eps)
        self.outer = build_connection(config.axis_connection("outer"), width, eps)
        inner = config.axis_connection("inner")
        self.inner_span = inner.memory_span if isinstance(inner, AttentionResidualConfig) else "run"
        self.register_buffer("puzzle_table", torch.zeros(num_puzzle_ids, config.puzzle_emb_dim))
        self.register_buffer("H_init", truncated_normal(width, std=config.initial_std))
        if not self.flat:
            self.register_buffer("L_init", truncated_normal(width, std=config.initial_std))
        self.inner_update = self._inner_update
        self.outer_update = self._outer_update
        self.differentiated_cycle = self._differentiated_cycle

    def compile_updates(self) -> None:
        """Compile the recursion; the state dict keeps its names.

        Without gradient, one graph of each axis' update serves any H and L. With gradient, where L is that of training, the
        whole outer cycle is one graph: its backward pass then adds up the weights' gradients by itself.
        """
        self.inner_update = torch.compile(self._inner_update, dynamic=False)
        self.outer_update = torch.compile(self._outer_update, dynamic=False)
        self.differentiated_cycle = torch.compile(self._differentiated_cycle, dynamic=False)

    # --- input and memory ---

    def puzzle_rows(self, puzzle_ids: Tensor) -> Tensor:
        """Rows of the puzzle table: ids [B] -> [B, puzzle_emb_dim]."""
        return self.puzzle_table[puzzle_ids.long()]

    def encode(self, tokens: Tensor, puzzle_rows: Tensor) -> Tensor:
        """Injection x [B, T, D] in the compute dtype, from tokens [B, S] (integers) and puzzle rows [B, puzzle_emb_dim]."""
        width, prefix = self.config.hidden_size, self.config.puzzle_tokens
        x = self.token_embedding(tokens.long())
        if prefix:
            padded = nn.functional.pad(puzzle_rows, (0, prefix * width - puzzle_rows.shape[-1]))
            x = torch.cat((padded.view(-1, prefix, width).to(x.dtype), x), dim=1)
        if self.position_embedding is not None:
            x = math.sqrt(0.5) * (x + self.position_embedding)
        return (math.sqrt(width) * x).to(self.compute_dtype)

    def _initial_states(self, batch: int, keys: Tensor) -> list[Tensor]:
        """First states of the outer and (nested) the inner axis, [B, T, D] each in the compute dtype."""
        shape = (self.config.puzzle_tokens + self.seq_len, self.config.hidden_size)
        axes = [self.H_init] if self.flat else [self.H_init, self.L_init]
        if self.config.initial_state == "fixed":
            return [vector.to(self.compute_dtype).expand(batch, *shape).contiguous() for vector in axes]
        rows = [[] for _ in axes]
        for key in keys.tolist():
            generator = torch.Generator().manual_seed(key)
            for states in rows:
                states.append(truncated_normal(*shape, std=self.config.initial_std, generator=generator))
        return [torch.stack(states).to(self.H_init.device, self.compute_dtype) for states in rows]

    @torch.no_grad()
    def start(self, batch: int, keys: Tensor | None = None, noise: float | None = None) -> Memory:
        """Fresh memories of `batch` puzzles.

        `keys` [B] (int64 >= 0) seed each puzzle's noise, in its initial states and its connections, where the model has any
        (row numbers when not given), so that a puzzle's answer does not depend on the batch it is in. `noise` replaces the
        standard deviation that the connections have in training.
        """
        keys = torch.arange(batch) if keys is None else keys
        assert len(keys) == batch
        outer, *inner = self._initial_states(batch, keys)
        return Memory(
            # Keys are not negative, so the other axis' stream, of ~key, is no puzzle's outer one.
            NoMemory() if self.inner is None else self.inner.keyed(self.inner.init(*inner), ~keys, noise),
            self.outer.keyed(self.outer.init(outer), keys, noise),
        )

    @torch.no_grad()
    def reset(self, memory: Memory, rows: Tensor, keys: Tensor | None = None) -> Memory:
        """Fresh memory for the rows [B] (bool), the others bit for bit as they were. keys [B] as in `start`."""
        fresh = self.start(rows.shape[0], keys)
        inner = memory.inner if self.inner is None else self.inner.reset(memory.inner, fresh.inner, rows)
        return Memory(inner, self.outer.reset(memory.outer, fresh.outer, rows))

    # --- recursion ---

    def _inner_update(self, memory: Memory, x: Tensor) -> Any:
        assert self.inner is not None
        h_L, h_H = memory.inner.h.to(x.dtype), memory.outer.h.to(x.dtype)
        return self.inner.step(memory.inner, self.block(h_L, h_H + x))

    def _outer_update(self, memory: Memory, x: Tensor) -> Any:
        h_H = memory.outer.h.to(x.dtype)
        if self.flat:
            return self.outer.step(memory.outer, self.block(h_H, x))
        block = self.block if self.outer_block is None else self.outer_block
        return self.outer.step(memory.outer, block(h_H, memory.inner.h.to(x.dtype)))

    def _cycle(self, memory: Memory, x: Tensor, L_cycles: int, inner_update: Update, outer_update: Update) -> Memory:
        if self.inner is None:
            for _ in range(L_cycles):
                memory = memory._replace(outer=outer_update(memory, x))
            return memory
        if self.inner_span == "outer_cycle":
            memory = memory._replace(inner=self.inner.restart(memory.inner))
        for _ in range(L_cycles):
            memory = memory._replace(inner=inner_update(memory, x))
        return memory._replace(outer=outer_update(memory, x))

    def _differentiated_cycle(self, memory: Memory, x: Tensor, L_cycles: int) -> Memory:
        return self._cycle(memory, x, L_cycles, self._inner_update, self._outer_update)

    def segment(
        self,
        memory: Memory,
        x: Tensor,
        H_cycles: int,
        L_cycles: int,
        grad_outer_cycles: int = 0,
        after_outer: Callable[[Memory], None] | None = None,
    ) -> Memory:
        """H_cycles outer cycles from `memory`; only the last `grad_outer_cycles` of them build a graph.

        `after_outer` sees the memory after every outer update, for decoding on the way.
        """
        if self.inner is not None and self.inner_span == "segment":
            memory = memory._replace(inner=self.inner.restart(memory.inner))
        grad_outer_cycles = grad_outer_cycles if torch.is_grad_enabled() else 0
        without = x.detach()  # so that these updates share their graphs with evaluation, where x has no gradient either
        for outer in range(H_cycles):
            if outer < H_cycles - grad_outer_cycles:
                with torch.no_grad():
                    memory = self._cycle(memory, without, L_cycles, self.inner_update, self.outer_update)
            else:
                if outer == H_cycles - grad_outer_cycles:
                    # Where more follow, the first cycle sees inputs like theirs, and shares one compiled graph with them.
                    more = grad_outer_cycles > 1
                    memory = memory.map(lambda t: t.detach().requires_grad_(more and t.is_floating_point()))  # noqa: B023
                memory = self.differentiated_cycle(memory, x, L_cycles)
            if after_outer is not None:
                after_outer(memory)
        return memory

    def decode(self, memory: Memory) -> tuple[Tensor, Tensor | None]:
        """Logits [B, S, V] in the compute dtype and halting logits (float32 [B], None without a head), from h_H."""
        h = memory.outer.h.to(self.compute_dtype)
        if self.config.block.kind == "pre_norm":  # its stream grows with depth, and the heads read directions
            h = rms_norm(h, self.config.rms_norm_eps)
        return self.lm_head(h)[:, self.config.puzzle_tokens :], self.halting.read(h[:, 0])

    # --- facts ---

    def block_applications(self, H_cycles: int, L_cycles: int, segments: int) -> int:
        return segments * H_cycles * self.config.applications_per_update(L_cycles)

    def parameter_counts(self) -> dict[str, int]:
        """Trained parameters, the same without token embeddings and output head, and the puzzle table (outside both)."""
        total = sum(p.numel() for p in self.parameters())
        embeddings = self.token_embedding.weight.numel() + self.lm_head.weight.numel()
        return {
            "parameters": total,
            "without_embeddings": total - embeddings,
            "puzzle_table": self.puzzle_table.numel(),
        }

"""The deliberate mistakes that tests/mutants.py makes: name, file, exact text, what takes its place."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One mistake; `source` is in `file` exactly once."""

    name: str
    file: str
    source: str
    replacement: str


CORE, BLOCKS, CONNECTIONS = "models/core.py", "models/blocks.py", "models/connections.py"
UPDATE, LOSSES, HALTING = "models/ops/attention_residual.py", "models/losses.py", "models/halting.py"
NOISE = "models/noise.py"
LOOP, OPTIM, CONFIG = "trainer/loop.py", "trainer/optim.py", "models/config.py"

NEW_H = "    h = torch.sigmoid(x)[..., None] * wide(z) + torch.sigmoid(-x)[..., None] * h\n"
NEW_LOG_D = "    log_d = torch.maximum(s, log_d - lam) + F.softplus(-x.abs())\n"
OUTER = '        self.outer = build_connection(config.axis_connection("outer"), width, eps)\n'
ATTEND = """        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.out(mixed.transpose(1, 2).reshape(batch, positions, width))
"""
TOKEN_NORM = "h = self._add(h.transpose(1, 2), self.token_mlp, scale).transpose(1, 2)"
STABLE = "torch.where(wide >= 0, torch.log1p(wide.clamp(min=0)), -torch.log1p(-wide.clamp(max=0)))"
DECAY_INIT = "        return DecayMemory(wide(z_0), s if self.include_initial else torch.full_like(s, -math.inf))\n"
ROW_RESET = "type(memory)(*(where_rows(rows, f, m) for f, m in zip(fresh, memory, strict=True)))"

MUTANTS = (
    # --- the recursion
    Mutant("input injection dropped", CORE, "self.block(h_L, h_H + x)", "self.block(h_L, h_H)"),
    Mutant(
        "input injected into the outer update too",
        CORE,
        "block(h_H, memory.inner.h.to(x.dtype))",
        "block(h_H, memory.inner.h.to(x.dtype) + x)",
    ),
    Mutant("inner updates thrown away", CORE, "memory = memory._replace(inner=inner_update(memory, x))", "pass"),
    Mutant(
        "gradient not truncated",
        CORE,
        "grad_outer_cycles if torch.is_grad_enabled() else 0",
        "H_cycles if torch.is_grad_enabled() and grad_outer_cycles else 0",
    ),
    Mutant(
        "input gets no gradient",
        CORE,
        "self.differentiated_cycle(memory, x, L_cycles)",
        "self.differentiated_cycle(memory, without, L_cycles)",
    ),
    Mutant("gradient of one outer cycle too few", CORE, "if outer < H_cycles - grad", "if outer <= H_cycles - grad"),
    Mutant("halting head reads the mean", CORE, "self.halting.read(h[:, 0])", "self.halting.read(h.mean(1))"),
    Mutant(
        "positions not scaled", CORE, "math.sqrt(0.5) * (x + self.position_embedding)", "x + self.position_embedding"
    ),
    Mutant("embeddings not scaled", CORE, "(math.sqrt(width) * x).to", "x.to"),
    Mutant(
        "one query shared by both axes",
        CORE,
        OUTER,
        OUTER + '        if config.axes == "both" and hasattr(self.inner, "query"):\n'
        "            self.outer.query = self.inner.query\n",
    ),
    Mutant("one connection shared by both axes", CORE, OUTER, OUTER + "        self.outer = self.inner\n"),
    Mutant("axes swapped", CONFIG, 'self.axes in ("both", axis)', 'self.axes == "both" or self.axes != axis'),
    Mutant(
        "span segment starts at the initial state",
        CORE,
        'self.inner_span == "segment":\n            memory = memory._replace(inner=self.inner.restart(memory.inner))',
        'self.inner_span == "segment":\n            memory = memory._replace(inner=self.start(x.shape[0]).inner)',
    ),
    Mutant("span outer_cycle ignored", CORE, 'if self.inner_span == "outer_cycle":', "if False:"),
    # --- connections
    Mutant("z_0 left out of the stream", CONNECTIONS, DECAY_INIT, DECAY_INIT.replace("self.include_initial", "False")),
    Mutant(
        "z_0 left out of both forms",
        CONNECTIONS,
        "self.include_initial = config.include_initial",
        "self.include_initial = False",
    ),
    Mutant(
        "z_0 always kept", CONNECTIONS, "self.include_initial = config.include_initial", "self.include_initial = True"
    ),
    Mutant(
        "restart brings a left-out z_0 back",
        CONNECTIONS,
        "nothing_kept = memory.log_d.isneginf()",
        "nothing_kept = memory.log_d.isnan()",
    ),
    Mutant(
        "restart keeps log D",
        CONNECTIONS,
        "self.score(memory.h).masked_fill(nothing_kept, -math.inf))\n\n    def step(self, memory: DecayMemory",
        "memory.log_d)\n\n    def step(self, memory: DecayMemory",
    ),
    Mutant("decay applied after the score", UPDATE, NEW_LOG_D, "    log_d = torch.logaddexp(log_d, s) - lam\n"),
    Mutant("step size without decay", UPDATE, "x = s + lam - log_d", "x = s - log_d"),
    Mutant("h + g (z - h)", UPDATE, NEW_H, "    h = h + torch.sigmoid(x)[..., None] * (wide(z) - h)\n"),
    Mutant(
        "log D summed without a maximum",
        UPDATE,
        NEW_LOG_D,
        "    log_d = torch.log(torch.exp(log_d - lam) + torch.exp(s))\n",
    ),
    Mutant("score of the unnormalised candidate", UPDATE, " * torch.rsqrt(z.square().mean(-1) + eps)", ""),
    Mutant(
        "query starts at random", CONNECTIONS, "nn.Parameter(torch.zeros(width))", "nn.Parameter(torch.randn(width))"
    ),
    Mutant(
        "decay gets no gradient", CONNECTIONS, "z, self.score(z), self.lam())", "z, self.score(z), self.lam().detach())"
    ),
    Mutant(
        "score gets no gradient", CONNECTIONS, "z, self.score(z), self.lam())", "z, self.score(z).detach(), self.lam())"
    ),
    Mutant("decay is exp(raw)", CONNECTIONS, "return F.softplus(self.raw_decay)", "return torch.exp(self.raw_decay)"),
    Mutant("full form without decay", CONNECTIONS, "[memory.s - self.lam(), ", "[memory.s, "),
    Mutant(
        "full form's decay gets no gradient",
        CONNECTIONS,
        "[memory.s - self.lam(), ",
        "[memory.s - self.lam().detach(), ",
    ),
    Mutant(
        "constant step the other way round",
        CONNECTIONS,
        "c * wide(z) + (1 - c) * memory.h",
        "(1 - c) * wide(z) + c * memory.h",
    ),
    Mutant("noise dropped", CONNECTIONS, " + memory.noise.detach()[:, None, None] * drawn", ""),
    Mutant("noise ignores the puzzle's key", CONNECTIONS, "stream=streams(keys.to(memory.stream.device)), ", ""),
    Mutant("the same noise at every step", CONNECTIONS, "h=h, stream=advance(memory.stream)", "h=h"),
    Mutant(
        "noise at the wrong size",
        CONNECTIONS,
        "level = memory.noise if noise is None else",
        "level = memory.noise if True else",
    ),
    Mutant("both axes draw the same noise", CORE, "self.inner.init(*inner), ~keys", "self.inner.init(*inner), keys"),
    Mutant(
        "noise of places not mixed",
        NOISE,
        "_mix(_mix(place ^ first) ^ second) >> 8",
        "_mix(place ^ first ^ second) >> 8",
    ),
    Mutant("learned beta of 1 or more accepted", CONFIG, 'self.beta == "learned" and self.beta0 >= 1', "False"),
    # --- rows of the batch
    Mutant("state of a halted row kept", LOOP, "memory=model.reset(carry.memory, rows, keys)", "memory=carry.memory"),
    Mutant(
        "log D of a halted row kept",
        CONNECTIONS,
        ROW_RESET,
        "type(memory)(where_rows(rows, fresh.h, memory.h), *memory[1:])",
    ),
    Mutant(
        "old candidates of a halted row kept",
        CONNECTIONS,
        "hidden = torch.full_like(memory.s, -math.inf)",
        "hidden = memory.s.clone()",
    ),
    Mutant(
        "neighbours of a halted row reset",
        LOOP,
        "model.reset(carry.memory, rows, keys)",
        "model.reset(carry.memory, torch.ones_like(rows), keys)",
    ),
    Mutant(
        "neighbour's puzzle replaced",
        LOOP,
        "rows, device = carry.finished, ",
        "rows, device = carry.finished.roll(1), ",
    ),
    Mutant(
        "segment counts of neighbours cleared",
        LOOP,
        "carry.segments.masked_fill(rows, 0)",
        "torch.zeros_like(carry.segments)",
    ),
    Mutant(
        "labels of the old puzzle kept",
        LOOP,
        "carry.labels[rows] = batch.labels.to(device, carry.labels.dtype)",
        "pass",
    ),
    Mutant("carry frozen", LOOP, "replace(carry, memory=result.memory, segments", "replace(carry, segments"),
    Mutant("carry keeps its graph", LOOP, "memory.map(Tensor.detach)", "memory"),
    Mutant(
        "micro-batches averaged one by one",
        LOOP,
        "halt_loss) / batch).backward()",
        "halt_loss) / len(rows)).backward()",
    ),
    Mutant("halting loss not trained", LOOP, "loss.cells + schedule.halt_loss_weight * halt_loss)", "loss.cells)"),
    # --- halting
    Mutant(
        "halting forced at step one", LOOP, "willing | (segments >= schedule.segments)", "willing | (segments >= 1)"
    ),
    Mutant("never halts early", LOOP, "willing | (segments >= schedule.segments)", "(segments >= schedule.segments)"),
    Mutant(
        "a batch halts when each row has settled in its own way",
        HALTING,
        "at_rest | (outer.step_size[counted].amax() < self.connection.smallest_step)",
        "settled(outer, self.connection)[counted].all()",
    ),
    Mutant("filler rows hold a batch up", HALTING, "outer.residual[counted].amax()", "outer.residual.amax()"),
    Mutant("exploration ends rows", LOOP, "& (segments >= least)", "| (segments >= least)"),
    Mutant(
        "exploration from the global generator", HALTING, "torch.rand(batch, generator=generator)", "torch.rand(batch)"
    ),
    Mutant("exploration one segment short", HALTING, "max(segments, 2) + 1, (batch,)", "max(segments, 3), (batch,)"),
    Mutant(
        "halting target always right",
        HALTING,
        "logit, correct.float(), reduction",
        "logit, torch.ones_like(logit), reduction",
    ),
    # --- block and losses
    Mutant(
        "token mixer's norm over the width",
        BLOCKS,
        TOKEN_NORM,
        TOKEN_NORM.replace(
            "self._add(h.transpose(1, 2), self.token_mlp, scale).transpose(1, 2)",
            "self._add(h, lambda x: self.token_mlp(x.transpose(1, 2)).transpose(1, 2), None)",
        ),
    ),
    Mutant(
        "attention over heads",
        BLOCKS,
        ATTEND,
        "        return self.out(F.scaled_dot_product_attention(q, k, v).reshape(batch, positions, width))\n",
    ),
    Mutant("causal attention", BLOCKS, "v.transpose(1, 2))\n", "v.transpose(1, 2), is_causal=True)\n"),
    Mutant("rotary turns the other way", BLOCKS, "torch.cat((-high, low), dim=-1)", "torch.cat((high, -low), dim=-1)"),
    Mutant("gate and value swapped", BLOCKS, "gate, value = self.gate_up(x)", "value, gate = self.gate_up(x)"),
    Mutant("weights start too narrow", BLOCKS, "full = std / _CUT_STD", "full = std"),
    Mutant("stablemax unclamped", LOSSES, STABLE, "torch.where(wide >= 0, torch.log1p(wide), -torch.log1p(-wide))"),
    Mutant("softmax for stablemax", LOSSES, STABLE, "wide"),
    Mutant("loss averaged over all cells", LOSSES, "/ count.clamp(min=1)", "/ labels.shape[-1]"),
    Mutant("ignored cells count as wrong", LOSSES, "right.sum(-1) == count", "right.all(-1)"),
    # --- optimizers
    Mutant("query decays", OPTIM, '"query": "queries",', ""),
    Mutant("decay learns at the weights' rate", OPTIM, "schedule.decay_lr", "schedule.lr"),
    Mutant("EMA the other way round", OPTIM, "1 - self.ema)", "self.ema)"),
    Mutant("equal ids not summed", OPTIM, "total.index_add_(0, place, gradients)", "total[place] = gradients"),
    Mutant(
        "absent puzzle rows decay",
        OPTIM,
        "    table[ids] = table[ids]",
        "    table.mul_(1 - lr * weight_decay)\n    table[ids] = table[ids]",
    ),
    Mutant("warm-up off by one", OPTIM, "return step / warmup_steps", "return (step - 1) / warmup_steps"),
)

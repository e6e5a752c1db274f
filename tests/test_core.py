"""The recursion against an independent computation, and what it must do for any connection, depth and layout."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.connections import AttentionResidual, CarryLast, ConstantStep
from models.core import LoopedReasoner, Memory
from models.losses import segment_loss
from tests import reference
from tests.tiny import (
    CARRY_LAST,
    SEQ,
    VOCAB,
    assert_close,
    build,
    constant_step,
    injection,
    model_config,
    noisy,
    parameter_gradients,
    puzzles,
    residual,
)

H, L = 2, 3
FORGETS_ALL = 1e-320

LAYOUTS: dict[str, ModelConfig] = {
    "trm": model_config(),
    "trm_attention": model_config(mixer="attention"),
    "trm_attention_learned_positions": model_config(mixer="attention", positions="learned"),
    "trm_attention_no_positions": model_config(mixer="attention", positions="none"),
    "infiloop": model_config(residual(0.55)),
    "infiloop_attention": model_config(residual(0.55), mixer="attention"),
    "infiloop_full": model_config(residual(0.55, full=True)),
    "infiloop_learned_positions": model_config(residual(0.9), positions="learned"),
    "infiloop_without_initial": model_config(residual(0.55, include_initial=False)),
    "infiloop_without_content": model_config(residual(0.55, content_score=False)),
    "infiloop_growing": model_config(residual(1.82, beta="fixed")),
    "inner_only": model_config(residual(0.55), axes="inner"),
    "outer_only": model_config(residual(0.55), axes="outer"),
    "outer_beside_constant_step": model_config(residual(0.55), axes="outer", other_connection=constant_step(0.3)),
    "constant_step_learned": model_config(constant_step(0.4, learned=True)),
    "no_puzzle_tokens": model_config(residual(0.55), puzzle_tokens=0, puzzle_emb_dim=0),
    "no_puzzle_rows": model_config(residual(0.55), mixer="attention", puzzle_emb_dim=0),
    "rows_over_two_tokens": model_config(residual(0.55), puzzle_emb_dim=20),
    "one_layer": model_config(residual(0.55), layers=1),
}
BY_LAYOUT = pytest.mark.parametrize("config", LAYOUTS.values(), ids=LAYOUTS.keys())


def two_segments(
    model: LoopedReasoner, batch: int, grad_outer_cycles: int = 1
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, halting logits and gradients ("rows" among them) of the second of two segments."""
    tokens, labels, ids = puzzles(batch)
    rows = model.puzzle_rows(ids).requires_grad_()
    x = model.encode(tokens, rows)
    memory = model.segment(model.start(batch), x.detach(), H, L)
    logits, q = model.decode(model.segment(memory, x, H, L, grad_outer_cycles))
    assert q is not None
    loss = segment_loss(logits, labels)
    (loss.cells + 0.5 * model.halting.loss(q, loss.exact)).backward()
    gradients = parameter_gradients(model)
    gradients["rows"] = torch.zeros_like(rows) if rows.grad is None else rows.grad
    return logits.detach(), q.detach(), gradients


@BY_LAYOUT
def test_two_segments_equal_the_equations(config: ModelConfig) -> None:
    """Outputs and all gradients of the last outer cycle equal an independent computation in float64."""
    model = build(config).double()
    model.compute_dtype = torch.float64
    logits, q, mine = two_segments(model, 3)

    tokens, labels, ids = puzzles(3)
    w = {k: v.detach().clone().requires_grad_(v.is_floating_point()) for k, v in model.state_dict().items()}
    rows = model.puzzle_rows(ids).detach().requires_grad_()
    expected_logits, expected_q = reference.segments(w, config, tokens, rows, H, L, count=2)
    reference.loss(expected_logits, expected_q, labels).backward()

    # Float32 in our model: rotations, and the halting logit.
    tolerance = 1e-4 if config.mixer == "attention" and config.positions == "rope" else 1e-5
    assert_close(logits, expected_logits.detach(), tolerance, "logits")
    assert_close(q, expected_q.detach(), tolerance, "halting logit")
    for name, gradient in mine.items():
        expected = rows.grad if name == "rows" else w[name].grad
        if expected is None:
            assert (gradient == 0).all(), name
        else:
            assert_close(gradient, expected, tolerance, f"gradient of {name}", least_scale=1e-3)


@BY_LAYOUT
def test_only_the_last_outer_cycle_carries_gradient(config: ModelConfig) -> None:
    """One cycle more changes the gradients, so truncation shows; without `grad_outer_cycles` there is no graph at all."""
    model = build(config)
    _, _, one = two_segments(model, 3)
    model.zero_grad()
    _, _, all_cycles = two_segments(model, 3, grad_outer_cycles=H)
    name = "block.layers.0.mlp.gate_up.weight"
    assert (one[name] - all_cycles[name]).norm() > 0.01 * one[name].norm()
    memory = model.segment(model.start(2), injection(model, 2), H, L)
    assert not any(tensor.requires_grad for tensor in (*memory.inner, *memory.outer))


@BY_LAYOUT
@torch.no_grad()
def test_a_changed_cell_reaches_the_others(config: ModelConfig) -> None:
    """Changing one input cell changes the logits at every other cell: positions are mixed, and the input is read."""
    model = build(config)
    tokens, _, ids = puzzles(1)
    changed = tokens.clone()
    changed[0, 4] = (tokens[0, 4] + 1) % VOCAB
    outputs = []
    for t in (tokens, changed):
        x = model.encode(t, model.puzzle_rows(ids))
        outputs.append(model.decode(model.segment(model.start(1), x, 1, 2))[0])
    assert ((outputs[0] - outputs[1]).abs().amax(-1) > 1e-6).all()


# --- connections inside the recursion --------------------------------------------------------------------------------


def same_weights(config: ModelConfig, other: LoopedReasoner) -> LoopedReasoner:
    model = build(config).to(next(other.parameters()).dtype)
    model.compute_dtype = other.compute_dtype
    model.load_state_dict(other.state_dict(), strict=False)
    return model


@pytest.mark.parametrize("axes", ["both", "inner", "outer"])
@pytest.mark.parametrize("grad_outer_cycles", [1, H])
@pytest.mark.parametrize("span", ["run", "segment", "outer_cycle"])
def test_streaming_equals_full_in_segments(axes: str, grad_outer_cycles: int, span: str) -> None:
    """The stream may replace the full form in a model, truncated or not: outputs and every gradient agree."""
    models = [build(model_config(residual(0.55, full, memory_span=span), axes=axes)).double() for full in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    results = []
    for model in models:
        model.compute_dtype = torch.float64
        results.append(two_segments(model, 3, grad_outer_cycles))
    for streaming, full in zip(*results, strict=True):
        if isinstance(streaming, Tensor):
            assert_close(streaming, full, 1e-6)
        else:
            for name, gradient in streaming.items():
                assert_close(gradient, full[name], 1e-5, f"gradient of {name}", least_scale=1e-3)


@pytest.mark.parametrize("mixer", ["mlp", "attention"])
@pytest.mark.parametrize(
    "connection",
    [
        residual(FORGETS_ALL, beta="fixed"),
        residual(FORGETS_ALL, True, beta="fixed"),
        residual(FORGETS_ALL, beta="fixed", include_initial=False),
        constant_step(1.0),
    ],
    ids=["streaming", "full", "without_initial", "constant_step"],
)
def test_forgetting_everything_is_trm(connection: Any, mixer: str) -> None:
    """lambda -> infinity, or a constant step of 1, gives TRM bit for bit, gradients of the block included."""
    trm = build(model_config(mixer=mixer))
    logits, q, gradients = two_segments(trm, 3)
    other_logits, other_q, other = two_segments(same_weights(model_config(connection, mixer), trm), 3)
    assert torch.equal(logits, other_logits) and torch.equal(q, other_q)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, other[name]), name


@pytest.mark.parametrize("full", [False, True])
@torch.no_grad()
def test_memory_span(full: bool) -> None:
    """run: nothing restarts; segment, outer_cycle: the inner memory restarts from the present h at each, the outer never."""
    models = {s: build(model_config(residual(0.55, full, memory_span=s))) for s in ("run", "segment", "outer_cycle")}
    x = injection(models["run"], 2)

    def lived(span: str) -> Memory:
        return models[span].segment(models[span].start(2), x, 1, L)

    def restarted(memory: Memory) -> Memory:
        inner = models["run"].inner
        assert inner is not None
        return memory._replace(inner=inner.restart(memory.inner))

    def equal(a: Memory, b: Memory) -> bool:
        return all(torch.equal(s, t) for s, t in zip((*a.inner, *a.outer), (*b.inner, *b.outer), strict=True))

    run, begin = models["run"], lived("run")
    by_segment = models["segment"].segment(begin, x, 2, L)
    by_cycle = models["outer_cycle"].segment(begin, x, 2, L)
    assert equal(by_segment, run.segment(restarted(begin), x, 2, L))
    assert equal(by_cycle, run.segment(restarted(run.segment(restarted(begin), x, 1, L)), x, 1, L))
    assert not torch.equal(by_segment.outer.h, run.segment(begin, x, 2, L).outer.h)
    assert not torch.equal(by_cycle.outer.h, by_segment.outer.h)
    assert equal(lived("segment"), begin) and equal(
        lived("outer_cycle"), begin
    )  # at the very start a restart is nothing


@pytest.mark.parametrize("span", ["run", "segment", "outer_cycle"])
@pytest.mark.parametrize("full", [False, True])
@torch.no_grad()
def test_left_out_initial_state_stays_left_out(full: bool, span: str) -> None:
    """A restart at the very start must not bring the initial state back: after one inner cycle h_L is the candidate."""
    model = build(model_config(residual(0.55, full, memory_span=span, include_initial=False)))
    trm = same_weights(model_config(), model)
    x = injection(model, 2)
    assert torch.equal(model.segment(model.start(2), x, 1, 1).inner.h, trm.segment(trm.start(2), x, 1, 1).inner.h)


def test_axes_choose_their_connections() -> None:
    """`axes` says where `connection` goes, the other axis gets `other_connection`, and each axis has its own numbers."""
    kinds: dict[str, tuple[type, type]] = {
        "both": (AttentionResidual, AttentionResidual),
        "inner": (AttentionResidual, ConstantStep),
        "outer": (ConstantStep, AttentionResidual),
    }
    for axes, (inner, outer) in kinds.items():
        model = build(model_config(residual(), axes=axes, other_connection=constant_step(0.5)))
        assert (type(model.inner), type(model.outer)) == (inner, outer)
    assert type(build(model_config(residual(), axes="inner")).outer) is CarryLast
    both = build(model_config(residual()))
    assert {n for n, _ in both.named_parameters() if n.startswith(("inner.", "outer."))} == {
        f"{axis}.{leaf}" for axis in ("inner", "outer") for leaf in ("query", "raw_decay")
    }


@torch.no_grad()
def test_noise_is_each_puzzles_and_each_axis_own() -> None:
    """A puzzle's states are a function of its key, wherever it is in a batch; no axis draws what the other draws."""
    model = build(model_config(noisy()))
    x = injection(model, 3)
    keys = torch.tensor([5, 2**63 - 1, 0])
    together = model.segment(model.start(3, keys), x, H, L)
    begin = model.start(3, keys)
    assert not any(torch.equal(a, b) for a in begin.inner.stream for b in begin.outer.stream)
    for row in range(3):
        alone = model.segment(model.start(1, keys[row : row + 1]), x[row : row + 1], H, L)
        assert_close(alone.outer.h[0], together.outer.h[row], 1e-4)
    other = model.segment(model.start(3, keys + torch.tensor([1, 0, 0])), x, H, L)
    assert not torch.allclose(other.outer.h[0], together.outer.h[0], atol=1e-2)
    assert torch.equal(other.outer.h[1:], together.outer.h[1:])
    silent = model.segment(model.start(3, keys, noise=0.0), x, H, L)
    again = model.segment(model.start(3, keys + 0, noise=0.0), x, H, L)
    assert torch.equal(silent.outer.h, again.outer.h) and not torch.equal(silent.outer.h, together.outer.h)


# --- depth, size, layout ---------------------------------------------------------------------------------------------


@torch.no_grad()
def test_depth_is_an_argument() -> None:
    """One model runs any H, L and number of segments; block applications are what is said; H = 4 is H = 2 twice."""
    for config in (LAYOUTS["trm"], LAYOUTS["infiloop"]):
        model = build(config)
        x, calls = injection(model, 2), []
        handle = model.block.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        for cycles, inner_cycles, segments in ((3, 6, 2), (6, 12, 1), (1, 1, 5)):
            calls.clear()
            memory, decoded = model.start(2), []
            for _ in range(segments):
                memory = model.segment(memory, x, cycles, inner_cycles, after_outer=lambda m, d=decoded: d.append(m))
            assert len(calls) == model.block_applications(cycles, inner_cycles, segments)
            assert len(calls) == segments * cycles * (inner_cycles + 1)
            assert len(decoded) == segments * cycles and torch.equal(decoded[-1].outer.h, memory.outer.h)
        handle.remove()
        once = model.segment(model.start(2), x, 4, 3)
        twice = model.segment(model.segment(model.start(2), x, 2, 3), x, 2, 3)
        assert torch.equal(once.outer.h, twice.outer.h) and torch.equal(once.inner.h, twice.inner.h)


def paper(connection: Any) -> LoopedReasoner:
    sizes = {"hidden_size": 512, "num_heads": 8, "ffn_multiple": 256, "puzzle_tokens": 16, "puzzle_emb_dim": 512}
    with torch.device("meta"):
        return LoopedReasoner(model_config(connection, "attention", **sizes), 11, 81, 1000)


def test_parameter_counts_of_the_paper() -> None:
    """Sudoku recipe: 6,828,034 for TRM; InfiLoop adds 513 an axis. The puzzle table stays outside the count."""
    trm, infiloop = paper(CARRY_LAST).parameter_counts(), paper(residual()).parameter_counts()
    assert trm["parameters"] == 6_828_034
    assert infiloop["parameters"] == 6_829_060 == trm["parameters"] + 2 * 513
    assert trm["without_embeddings"] == 6_828_034 - 2 * 11 * 512
    assert trm["puzzle_table"] == 1000 * 512


def test_frozen_states_are_saved_but_not_trained() -> None:
    """H_init, L_init and the puzzle table are buffers: in the file, out of AdamW and of the count."""
    model = build(LAYOUTS["infiloop"])
    frozen = {"H_init", "L_init", "puzzle_table"}
    assert frozen == {name for name, _ in model.named_buffers()} & set(model.state_dict())
    assert frozen.isdisjoint(name for name, _ in model.named_parameters())
    assert not torch.equal(model.H_init, model.L_init)
    start = model.start(2)
    assert torch.equal(start.outer.h, model.H_init.expand_as(start.outer.h))
    assert torch.equal(start.inner.h, model.L_init.expand_as(start.inner.h))


@torch.no_grad()
def test_prefix_and_first_position() -> None:
    """Puzzle rows fill the first positions, zero-padded, all times sqrt(D); without puzzle tokens q reads the first cell."""
    model = build(LAYOUTS["rows_over_two_tokens"])
    tokens, _, ids = puzzles(3)
    x = model.encode(tokens, model.puzzle_rows(ids))
    rows = torch.cat((model.puzzle_table[ids], torch.zeros(3, 12)), 1).view(3, 2, 16)
    assert_close(x[:, :2], 4 * rows, 1e-6)
    assert_close(x[:, 2:], 4 * model.token_embedding.weight[tokens], 1e-6)

    bare = build(LAYOUTS["no_puzzle_tokens"])
    memory = bare.segment(bare.start(3), injection(bare, 3), 1, 1)
    logits, q = bare.decode(memory)
    assert logits.shape == (3, SEQ, VOCAB) and q is not None
    first_cell = bare.halting.read(memory.outer.h[:, 0])
    assert first_cell is not None and torch.equal(q, first_cell)


@torch.no_grad()
def test_learned_positions_tell_cells_apart() -> None:
    """Without positions, attention gives equal cells equal logits; with learned or rotary ones it does not."""
    for positions, told_apart in (("none", False), ("learned", True), ("rope", True)):
        model = build(model_config(mixer="attention", positions=positions, puzzle_tokens=1))
        tokens = torch.tensor([[1, 1, 2, 3, 4, 5, 0, 2, 3]])
        x = model.encode(tokens, model.puzzle_table[:1])
        logits, _ = model.decode(model.segment(model.start(1), x, 1, 2))
        assert ((logits[0, 0] - logits[0, 1]).abs().max() > 1e-3) == told_apart, positions

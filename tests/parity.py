"""The parity fixtures: released weights, imported, and what the released code computes with them.

fixtures/parity/README.md says what they hold.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from models.config import ConnectionConfig, DampedFixedPointConfig, ModelConfig, TiedBlockConfig
from models.core import LoopedReasoner
from models.released import our_name
from trainer.released_weights import named_weights
from trainer.state_file import read_state

FIXTURES = Path(__file__).resolve().parent / "fixtures" / "parity"

PUZZLE_ROWS = "inner.puzzle_emb.local_weights"
"""Name under which the fixtures keep the gradient of the batch's puzzle rows."""


def facts(case: str) -> dict[str, Any]:
    return json.loads((FIXTURES / f"{case}.json").read_text())


def tensors(case: str, part: str = "") -> dict[str, Tensor]:
    return load_file(FIXTURES / f"{case}{part}.safetensors")


def fprm_parts(config: dict[str, Any]) -> dict[str, Any]:
    """Settings of a released FPRM configuration that TRM does not have."""
    return {
        "recursion": "flat",
        "halting": "residual",
        "initial_state": "fixed" if config["fixed_init"] else "noise",
        "initial_std": config["init_std"],
        "block": TiedBlockConfig(
            kind="tied",
            alpha_1=config["alpha_1_init"],
            alpha_2=config["alpha_2_init"],
            convolution="causal" if config["conv_type"] == "conv1d" else "grid",
            kernel=config["conv_kernel_size"],
            norm=config["norm_placement"],
        ),
    }


def fprm_connection(config: dict[str, Any]) -> DampedFixedPointConfig:
    return DampedFixedPointConfig(
        kind="damped_fixed_point",
        step=config["stepsize"],
        patience=config["decay_patience"],
        decay_train=config["stepsize_decay_train"],
        decay_eval=config["stepsize_decay_eval"],
        threshold=config["fp_thresh"],
        smallest_step=1e-3,
    )


def build_case(case: str, connection: ConnectionConfig, **parts: Any) -> LoopedReasoner:
    """The case's model with its weights, `connection` on the axes the case names (all without names)."""
    told = facts(case)
    config, axes = told["config"], told.get("axes", [])
    model = LoopedReasoner(
        ModelConfig(
            **parts,
            name=case,
            connection=connection,
            axes=axes[0] if len(axes) == 1 else "both",
            mixer="mlp" if config["mlp_t"] else "attention",
            positions=config["pos_encodings"],
            hidden_size=config["hidden_size"],
            num_heads=config["num_heads"],
            layers=config["L_layers"],
            expansion=config["expansion"],
            ffn_multiple=256,
            puzzle_tokens=config["puzzle_emb_len"],
            puzzle_emb_dim=config["puzzle_emb_ndim"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=config["rope_theta"],
        ),
        config["vocab_size"],
        config["seq_len"],
        config["num_puzzle_identifiers"],
    )
    file = FIXTURES / f"{case}.weights.safetensors"
    weights, _ = named_weights(file, read_state(file)[0], {})
    # A file with the attention residual on one axis keeps unused numbers of the other.
    unused = set(weights) - set(model.state_dict())
    assert unused <= {f"{axis}.{leaf}" for axis in ("inner", "outer") for leaf in ("query", "raw_decay")}, unused
    model.load_state_dict({name: value for name, value in weights.items() if name not in unused}, strict=True)
    return model


def same_gradients(case: str, model: LoopedReasoner, puzzle_gradient: Tensor | None) -> None:
    """Every gradient of the trainer's step against the released one, to 1e-4 of its norm plus 1e-6."""
    mine = {name: p.grad for name, p in model.named_parameters()} | {PUZZLE_ROWS: puzzle_gradient}
    expected = {name if name == PUZZLE_ROWS else str(our_name(name)): g for name, g in tensors(case, ".grads").items()}
    assert mine.keys() == expected.keys()
    for name, gradient in expected.items():
        got = mine[name]
        assert got is not None, name
        gap, norm = (4 * got - gradient).norm().item(), gradient.norm().item()  # theirs is of the sum over 4 rows
        assert gap <= 1e-4 * norm + 1e-6, f"{name}: off by {gap:.3g} at norm {norm:.3g}"

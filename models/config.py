"""Settings of a model: its connections, its block, its recursion. Typed, and checked for contradictions by name."""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Settings(BaseModel):
    """Base of all settings: no unknown keys, no changes after validation, nothing converted (true is not 1), no inf."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


# --- connections -----------------------------------------------------------------------------------------------------


class CarryLastConfig(Settings):
    """h_t = z_t (TRM, HRM)."""

    kind: Literal["carry_last"]


class ConstantStepConfig(Settings):
    """h_t = h_{t-1} + c (z_t - h_{t-1})."""

    kind: Literal["constant_step"]
    step: float = Field(gt=0, le=1)
    """c, or its start when learned."""
    learned: bool = False
    """Learn c = sigmoid(raw) per axis; needs step < 1."""

    @model_validator(mode="after")
    def _learned_step_below_one(self) -> "ConstantStepConfig":
        if self.learned and self.step >= 1:
            raise ValueError(f"step={self.step} with learned=true: a learned step is a sigmoid, so start it below 1")
        return self


class AttentionResidualConfig(Settings):
    """h_t is a decayed softmax average of all candidates so far (InfiLoop); `full_...` keeps every candidate."""

    kind: Literal["attention_residual", "full_attention_residual"]
    beta0: float = Field(gt=0)
    """beta = exp(-lambda) at the start; 0.55 in the paper."""
    beta: Literal["learned", "fixed"] = "learned"
    """learned: lambda = softplus(raw), one scalar per axis, so beta stays in (0, 1)."""
    content_score: bool = True
    """false: every score is 0 and only the decay weighs candidates (no query is created)."""
    include_initial: bool = True
    """Whether z_0, the initial state, counts as the first candidate."""
    memory_span: Literal["run", "segment", "outer_cycle"] = "run"
    """How long the inner axis' memory lives before it restarts from the present h. The outer axis always lives on."""

    @model_validator(mode="after")
    def _learned_beta_below_one(self) -> "AttentionResidualConfig":
        if self.beta == "learned" and self.beta0 >= 1:
            raise ValueError(
                f"beta0={self.beta0} with beta=learned: a learned decay has lambda = softplus(raw) > 0, so beta0 must "
                "be below 1; use beta=fixed for beta0 of 1 or more"
            )
        if self.beta == "learned" and self.beta0 < 1e-30:
            raise ValueError(f"beta0={self.beta0} with beta=learned: too small to learn from; use beta=fixed")
        return self


class DampedFixedPointConfig(Settings):
    """h_t = s z_t + (1 - s) h_{t-1}; a puzzle's step size s shrinks when its residual stops improving (FPRM)."""

    kind: Literal["damped_fixed_point"]
    step: float = Field(gt=0, le=1)
    """s at the start."""
    patience: int = Field(gt=0)
    """Loop steps without a new smallest residual before s shrinks."""
    decay_train: float = Field(gt=0, le=1)
    """s <- decay s in training."""
    decay_eval: float = Field(gt=0, le=1)
    """The same in evaluation."""
    threshold: float = Field(gt=0)
    """A residual below this counts as a fixed point: s stays, and residual halting ends the puzzle."""
    smallest_step: float = Field(ge=0)
    """Residual halting also ends a puzzle whose s is below this."""


class NoisyRelaxationConfig(Settings):
    """h_t = (1 - a) h_{t-1} + a z_t + noise (EqR)."""

    kind: Literal["noisy_relaxation"]
    step: float = Field(gt=0, le=1)
    """a."""
    noise: float = Field(ge=0)
    """Standard deviation of the noise in training, and in evaluation unless eval.noise says otherwise."""


ConnectionConfig = Annotated[
    CarryLastConfig | ConstantStepConfig | AttentionResidualConfig | DampedFixedPointConfig | NoisyRelaxationConfig,
    Field(discriminator="kind"),
]


# --- model -----------------------------------------------------------------------------------------------------------


class ResidualBlockConfig(Settings):
    """Ordinary residual layers: attention (or the token mixer), then SwiGLU."""

    kind: Literal["post_norm", "pre_norm"]
    """post_norm: h <- rms(h + F(h)). pre_norm: h <- h + F(rms(h)), and what the heads read is normalised."""
    layer_scale: float | None = Field(default=None, gt=0)
    """Start of a learned factor per channel on every branch F; null: none."""


class TiedBlockConfig(Settings):
    """FPRM's block: h <- a_1 h + b_1 F(rms(h)) in every half layer, after a convolution over the grid and the injection."""

    kind: Literal["tied"]
    alpha_1: float = Field(gt=0, lt=1)
    """a_1 at the start (learned per channel, shared by all layers): what a half layer keeps."""
    alpha_2: float = Field(gt=0, lt=1)
    """What the block keeps of the state where it adds the injection, at the start (learned per channel)."""
    convolution: Literal["none", "grid", "causal"]
    """Depthwise, over the cells alone: grid is two-dimensional, causal runs along the flattened grid."""
    kernel: int = Field(gt=0)
    norm: Literal["none", "input", "output"]
    """Where else the state is normalised: after the convolution, after the last layer, or nowhere."""

    @model_validator(mode="after")
    def _odd_on_the_grid(self) -> "TiedBlockConfig":
        if self.convolution == "grid" and self.kernel % 2 == 0:
            raise ValueError(
                f"kernel={self.kernel} with convolution=grid: the kernel is centred, so give an odd number"
            )
        return self


BlockConfig = Annotated[ResidualBlockConfig | TiedBlockConfig, Field(discriminator="kind")]


class ModelConfig(Settings):
    """One shared block over two axes (inner: z_L, outer: z_H) or one, a connection on each."""

    name: str
    recursion: Literal["nested", "flat"] = "nested"
    """nested: z_L and z_H. flat: one stream, the outer axis, updated L_cycles times in an outer cycle."""
    levels: Literal["shared", "untied"] = "shared"
    """untied: z_L and z_H have a block each, as in HRM."""
    block: BlockConfig = ResidualBlockConfig(kind="post_norm")
    initial_state: Literal["fixed", "noise"] = "fixed"
    """fixed: one frozen random vector at all positions. noise: fresh numbers for every puzzle and position."""
    initial_std: float = Field(default=1.0, gt=0)
    connection: ConnectionConfig
    axes: Literal["both", "inner", "outer"] = "both"
    """Which axes use `connection`; the other axis uses `other_connection`."""
    other_connection: ConnectionConfig = CarryLastConfig(kind="carry_last")
    halting: Literal["q_head", "residual", "fixed"] = "q_head"
    """q_head: a puzzle ends when its halting logit is positive. residual: when its state has stopped moving (needs the
    connection damped_fixed_point on the outer axis). fixed: always the full number of segments."""
    mixer: Literal["attention", "mlp"]
    """What mixes positions: self-attention, or a SwiGLU over positions (needs a fixed length)."""
    positions: Literal["rope", "learned", "none"]
    hidden_size: int = Field(gt=0)
    """D, the width."""
    num_heads: int = Field(gt=0)
    layers: int = Field(gt=0)
    """Layers in the shared block."""
    expansion: float = Field(gt=0, le=1024)
    """SwiGLU inner width = round(expansion * width * 2/3), rounded up to a multiple of ffn_multiple."""
    ffn_multiple: int = Field(gt=0, le=65536)
    puzzle_tokens: int = Field(ge=0)
    """Positions in front of the cells; the halting head reads position 0."""
    puzzle_emb_dim: int = Field(ge=0)
    """Numbers per puzzle id, spread over the puzzle tokens and zero-padded. 0: no table, the tokens enter as zeros."""
    rms_norm_eps: float = Field(gt=0)
    rope_theta: float = Field(gt=0)

    @model_validator(mode="after")
    def _shapes_fit(self) -> "ModelConfig":
        if self.hidden_size % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} does not divide hidden_size={self.hidden_size}; change one")
        if self.mixer == "attention" and self.positions == "rope" and (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"positions=rope needs an even head size, but hidden_size/num_heads = "
                f"{self.hidden_size // self.num_heads}"
            )
        if self.mixer == "mlp" and self.positions == "rope":
            raise ValueError("positions=rope has no effect with mixer=mlp; use positions=none or positions=learned")
        if round(self.expansion * self.hidden_size * 2 / 3) < 1:
            raise ValueError(
                f"expansion={self.expansion}: an inner width of 0 at hidden_size={self.hidden_size}; raise it"
            )
        if self.puzzle_emb_dim > self.puzzle_tokens * self.hidden_size:
            raise ValueError(
                f"puzzle_emb_dim={self.puzzle_emb_dim} does not fit puzzle_tokens={self.puzzle_tokens} x "
                f"hidden_size={self.hidden_size}; lower it or raise puzzle_tokens"
            )
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> "ModelConfig":
        if self.recursion == "flat" and self.levels == "untied":
            raise ValueError("levels=untied needs two levels, and recursion=flat has one; use recursion=nested")
        if self.recursion == "flat" and self.axes == "inner":
            raise ValueError("axes=inner with recursion=flat: its one axis is the outer one; use axes=both or outer")
        if self.block.kind == "tied" and self.mixer == "mlp":
            raise ValueError("block.kind=tied is written for attention; use mixer=attention")
        if self.halting == "residual" and self.axis_connection("outer").kind != "damped_fixed_point":
            raise ValueError(
                f"halting=residual reads the residual of damped_fixed_point, but the outer connection is "
                f"{self.axis_connection('outer').kind}; use halting=q_head or model/connection=damped_fixed_point"
            )
        return self

    def applications_per_update(self, L_cycles: int) -> int:
        """Block applications in one outer cycle."""
        return L_cycles + (self.recursion == "nested")

    def axis_connection(self, axis: Literal["inner", "outer"]) -> ConnectionConfig:
        return self.connection if self.axes in ("both", axis) else self.other_connection

    def noise_levels(self) -> list[float]:
        """Noise of the connections in use that draw any, be it 0."""
        used = [self.axis_connection("outer")]
        if self.recursion == "nested":
            used.append(self.axis_connection("inner"))
        return [connection.noise for connection in used if isinstance(connection, NoisyRelaxationConfig)]


def softplus_inverse(y: float) -> float:
    """x with log(1 + e^x) = y, for y > 0."""
    return y + math.log(-math.expm1(-y))

"""Every setting of a run, typed and checked once, before any data is loaded.

Hydra composes YAML into a dictionary; `TrainConfig.model_validate` turns it into these frozen objects. Unknown keys are
refused everywhere. Contradictions are refused in the validators below, by the names of the settings involved. The model's
settings are in models/config.py.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PlainSerializer, model_validator

from models.config import ModelConfig, Settings

MAX_SEED = 2**31 - 1
PROJECT = Path(__file__).resolve().parent.parent

FilePath = Annotated[Path, Field(strict=False)]
"""A path as typed: relative ones start at the working directory."""
SourcePath = Annotated[Path, Field(strict=False), AfterValidator(lambda path: path.expanduser().absolute())]
"""A path that a saved run must find again from elsewhere: made absolute."""
ProjectPath = Annotated[
    Path,
    Field(strict=False),
    AfterValidator(lambda path: PROJECT / path.expanduser()),
    PlainSerializer(lambda path: str(path.relative_to(PROJECT) if path.is_relative_to(PROJECT) else path)),
]
"""A path whose relative form starts at the project folder, wherever a program is started; saved in that form."""


# --- data ------------------------------------------------------------------------------------------------------------


class SudokuConfig(Settings):
    """A Sudoku family: where its puzzles come from and how many are used."""

    kind: Literal["sudoku"]
    name: str
    """What results call this data set; a fallback to generated puzzles changes it."""
    box_rows: int = Field(ge=2, le=5)
    box_cols: int = Field(ge=2, le=5)
    """A box is box_rows x box_cols cells; the grid has box_rows * box_cols rows, columns and digits."""
    source: Literal["auto", "cache", "csv", "hub", "generated"]
    """auto: prepared cache, then CSV in `path`, then the hub, then generated with a banner."""
    path: SourcePath | None = None
    """Folder with train.csv and test.csv (columns source, question, answer, rating)."""
    hub_id: str | None = None
    """Data set on the Hugging Face hub, for source=hub or auto."""
    train_puzzles: int = Field(gt=0)
    """Base puzzles for training, before augmentation."""
    validation_puzzles: int = Field(gt=0)
    """Puzzles for choosing the best checkpoint; never training puzzles, never test puzzles."""
    test_puzzles: int | None = Field(default=None, gt=0)
    """null: all there are (generated: 2,000)."""
    difficulty: Literal["any", "beyond_singles"] = "any"
    """Generated puzzles only. beyond_singles: naked and hidden singles alone do not solve them (all splits)."""
    num_aug: int | None = Field(default=None, ge=0)
    """null: a fresh random symmetry at every draw. N: base puzzle b has N + 1 fixed rows, row 0 the puzzle itself."""
    seed: int = Field(ge=0, le=MAX_SEED)
    """Seed of generation, subsampling and splits; separate from the run's seed so that runs share test puzzles."""
    cache_dir: ProjectPath
    """Prepared data; relative to the project folder."""
    hub_timeout: float = Field(default=10.0, gt=0)
    """Seconds to wait for the hub."""

    @model_validator(mode="after")
    def _source_has_what_it_needs(self) -> "SudokuConfig":
        if self.source == "csv" and self.path is None:
            raise ValueError("source=csv needs path: a folder with train.csv and test.csv")
        if self.path is not None and self.source in ("generated", "hub"):
            raise ValueError(
                f"path={self.path} has no effect with source={self.source}; use source=csv, or leave path out"
            )
        if self.source == "hub" and self.hub_id is None:
            raise ValueError("source=hub needs hub_id")
        if self.box_rows * self.box_cols > 25:
            raise ValueError(f"box_rows x box_cols = {self.box_rows * self.box_cols}: at most 25 digits are supported")
        return self

    @property
    def digits(self) -> int:
        return self.box_rows * self.box_cols


class PuzzleDirConfig(Settings):
    """A folder in the format of the HRM, TRM and EqR repositories, trained on in their order."""

    kind: Literal["puzzle_dir"]
    name: str | None = None
    """What results call this data set; null: the folder's name."""
    path: SourcePath
    """The folder with train/ and test/."""
    validation_groups: int = Field(gt=0)
    """Groups for choosing the best checkpoint, the last ones of train/, which are then not trained on; without effect
    where the folder has a validation/ of its own."""
    test_puzzles: int | None = Field(default=None, gt=0)
    """null: all there are; else the first ones."""
    passes: int = Field(gt=0)
    """Orders of the groups that are joined before a last batch that is not full is dropped (there: eval_interval)."""
    seed: int = Field(ge=0, le=MAX_SEED)
    """Seed of the order (there: seed)."""


DataConfig = Annotated[SudokuConfig | PuzzleDirConfig, Field(discriminator="kind")]


# --- schedule, trainer, evaluation, logging --------------------------------------------------------------------------


class ScheduleConfig(Settings):
    """Depth of a training segment and the optimisation that goes with it."""

    H_cycles: int = Field(gt=0)
    """Outer cycles per segment."""
    L_cycles: int = Field(gt=0)
    """Inner cycles per outer cycle."""
    segments: int = Field(gt=0)
    """Most segments a puzzle gets; each ends in a decode, a loss and one optimizer step."""
    grad_outer_cycles: int = Field(gt=0)
    """How many outer cycles at the end of a segment carry gradient."""
    global_batch: int = Field(gt=0)
    """Puzzles per optimizer step, over all micro-batches and ranks."""
    total_steps: int = Field(gt=0)
    """Optimizer steps of the whole schedule."""
    lr: float = Field(gt=0)
    warmup_steps: int = Field(ge=0)
    lr_min_ratio: float = Field(ge=0, le=1)
    """Cosine floor as a share of lr; 1 keeps lr constant after warm-up."""
    optimizer: Literal["adamw", "adam_atan2"] = "adamw"
    """adam_atan2: TRM's, which has no eps."""
    weight_decay: float = Field(ge=0)
    adam_beta1: float = Field(ge=0, lt=1)
    adam_beta2: float = Field(ge=0, lt=1)
    adam_eps: float = Field(gt=0)
    """adamw alone."""
    decay_lr: float = Field(gt=0)
    """Learning rate of connection scalars (raw decay, raw step); Adam moves them by about decay_lr a step."""
    puzzle_emb_lr: float = Field(ge=0)
    """Learning rate of the sign-SGD on puzzle embeddings."""
    puzzle_emb_weight_decay: float = Field(ge=0)
    ema: float = Field(ge=0, lt=1)
    """Decay of the averaged weights per optimizer step."""
    halt_exploration: float = Field(ge=0, le=1)
    """Chance per segment that halting before a random segment of 2..segments is forbidden."""
    halt_loss_weight: float = Field(ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> "ScheduleConfig":
        if self.grad_outer_cycles > self.H_cycles:
            raise ValueError(
                f"grad_outer_cycles={self.grad_outer_cycles} exceeds H_cycles={self.H_cycles}; at most all of them"
            )
        return self


class TrainerConfig(Settings):
    """How a run uses the machine, and how often it looks up."""

    device: Literal["auto", "cpu", "cuda", "mps"]
    dtype: Literal["auto", "float32", "bfloat16"]
    """Compute dtype of the block; weights and connection memories stay float32. auto: bfloat16 on CUDA only."""
    compile: Literal["auto"] | bool
    """auto: torch.compile where a compiler exists, else eager with one line that says so."""
    threads: int | None = Field(default=None, gt=0)
    """CPU threads; null leaves PyTorch's choice."""
    micro_batch: Literal["auto"] | Annotated[int, Field(gt=0)]
    """Puzzles per backward pass; auto fits the device's free memory. Only splits the global batch."""
    max_steps: int | None = Field(default=None, gt=0)
    """Stop after this many steps; the schedule stays that of total_steps."""
    log_every: int = Field(gt=0)
    """Optimizer steps between rows of metrics.jsonl."""
    eval_every: int = Field(ge=0)
    """Optimizer steps between validations; 0: only at the end."""
    checkpoint_every: int = Field(gt=0)
    """Optimizer steps between saves of the last checkpoint."""


Halting = Literal["on", "off", "batch_residual"]
Choose = Literal["first", "convergence", "halting", "vote"]


class EvalConfig(Settings):
    """How a checkpoint is evaluated. Depth: at most one of segments, outer_updates and layers."""

    weights: Literal["ema", "raw"] = "ema"
    split: Literal["test", "validation"] = "test"
    H_cycles: int | None = Field(default=None, gt=0)
    """null: as trained."""
    L_cycles: int | None = Field(default=None, gt=0)
    segments: int | None = Field(default=None, gt=0)
    outer_updates: int | None = Field(default=None, gt=0)
    layers: int | None = Field(default=None, gt=0)
    """Executed layers; rounded up to whole outer updates."""
    decode: Literal["segment", "outer_update"] = "segment"
    """How often an answer is read out and scored."""
    halting: Halting = "off"
    """on: each puzzle's answer is the one at its own halting segment. batch_residual: a whole batch stops when its slowest
    puzzle settles, as in the released FPRM; for comparison with it, for batches then show in the answers."""
    starts: int = Field(default=1, gt=0)
    """Random starts of each puzzle: other initial noise, other noise on the way."""
    choose: Choose = "convergence"
    """Whose answer counts when there are several starts: the one that moved least in the last outer update, the one with
    the greatest halting logit, the answer most starts share (ties: moved least), or the first."""
    noise: float | None = Field(default=None, ge=0)
    """Standard deviation of the noise of noisy_relaxation; null: as in training."""
    n: Literal["auto", "all"] | Annotated[int, Field(gt=0)] = "auto"
    """Puzzles evaluated. auto: all, or a labelled subset when all would take longer than max_minutes."""
    subset_seed: int = Field(default=0, ge=0, le=MAX_SEED)
    max_minutes: float = Field(default=2.0, gt=0)
    """Only for n=auto. The test at the end of a training run may also take a tenth of the run's own time."""
    batch_size: int = Field(default=256, gt=0)

    @model_validator(mode="after")
    def _one_depth(self) -> "EvalConfig":
        given = [k for k in ("segments", "outer_updates", "layers") if getattr(self, k) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join('eval.' + g for g in given)} both set the depth; give one of them")
        return self

    def conflict(self, model: ModelConfig) -> str | None:
        """Why a model cannot be evaluated like this, in one line; None where it can."""
        if self.halting == "on" and model.halting == "fixed":
            return "eval.halting=on with model.halting=fixed: that model never halts; use eval.halting=off"
        if self.halting == "batch_residual" and model.halting != "residual":
            return (
                f"eval.halting=batch_residual with model.halting={model.halting}: only residual halting stops whole batches; "
                "use eval.halting=on or off"
            )
        levels = model.noise_levels()
        if self.noise is not None and not levels:
            return (
                f"eval.noise={self.noise:g}: no connection of this model draws noise; leave it out, or use "
                "model/connection=noisy_relaxation"
            )
        noisy = any(levels) if self.noise is None else self.noise > 0
        if self.starts > 1 and model.initial_state == "fixed" and not noisy:
            return (
                f"eval.starts={self.starts} with model.initial_state=fixed and no noise: all starts would be the same; use "
                "eval.starts=1, or a model with initial_state=noise"
            )
        if self.starts > 1 and self.choose == "halting" and model.halting == "fixed":
            return (
                "eval.choose=halting with model.halting=fixed: that model has no halting logit; use "
                "eval.choose=convergence"
            )
        return None


class LoggerConfig(Settings):
    """Where metrics go besides the run directory's metrics.jsonl and metrics.csv, which are always written."""

    kind: Literal["files", "wandb"]
    project: str = "longloop"
    entity: str | None = None


class TrainConfig(Settings):
    """Everything `train.py` reads."""

    seed: int = Field(ge=0, le=MAX_SEED)
    run_dir: FilePath
    model: ModelConfig
    data: DataConfig
    schedule: ScheduleConfig
    trainer: TrainerConfig
    eval: EvalConfig
    logger: LoggerConfig

    @model_validator(mode="after")
    def _crossing_settings(self) -> "TrainConfig":
        micro = self.trainer.micro_batch
        if isinstance(micro, int) and micro > self.schedule.global_batch:
            raise ValueError(
                f"trainer.micro_batch={micro} exceeds schedule.global_batch={self.schedule.global_batch}; "
                "micro-batches split the global batch"
            )
        if self.eval.split == "validation":
            raise ValueError("eval.split=validation is for evaluate.py; training validates by itself and ends on test")
        if (conflict := self.eval.conflict(self.model)) is not None:
            raise ValueError(conflict)
        return self

    @property
    def steps(self) -> int:
        """Optimizer steps this run takes."""
        limit = self.trainer.max_steps
        return self.schedule.total_steps if limit is None else min(limit, self.schedule.total_steps)


class EvaluateConfig(Settings):
    """Everything `evaluate.py` reads."""

    checkpoint: FilePath
    """Run directory, its best/ or last/ folder, or a bundled checkpoint."""
    which: Literal["best", "last"] = "best"
    eval: EvalConfig
    trainer: TrainerConfig
    puzzles: FilePath | None = None
    """CSV with question and answer columns to evaluate instead of the checkpoint's own data."""
    out: FilePath | None = None
    """Folder for results; null: <checkpoint>/evaluations/<label>."""

    @model_validator(mode="after")
    def _one_source(self) -> "EvaluateConfig":
        if self.puzzles is not None and self.eval.split == "validation":
            raise ValueError("eval.split=validation has no effect with puzzles, which are all evaluated; leave one out")
        return self


class SolveConfig(Settings):
    """Everything `solve.py` reads."""

    checkpoint: FilePath
    which: Literal["best", "last"] = "best"
    puzzle: str | None = None
    """A puzzle: digits with 0 or . for blanks, on one line."""
    file: str | None = None
    """A file of puzzles, or - for standard input."""
    weights: Literal["ema", "raw"] = "ema"
    segments: int | None = Field(default=None, gt=0)
    H_cycles: int | None = Field(default=None, gt=0)
    L_cycles: int | None = Field(default=None, gt=0)
    halting: Literal["on", "off"] = "on"
    """on: stop a puzzle at its own halting segment; off: always run all segments."""
    trainer: TrainerConfig

    @model_validator(mode="after")
    def _one_input(self) -> "SolveConfig":
        if self.puzzle is not None and self.file is not None:
            raise ValueError("puzzle and file are both given; give one of them")
        return self

"""conf/: everything composes and validates, the paper's recipe stays as pinned, contradictions are refused by name."""

import copy
import os
import re
import shlex
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer.cli import dump_config
from trainer.compose import CONF, compose_launch, validate
from trainer.config import PROJECT, EvalConfig, EvaluateConfig, SolveConfig, SudokuConfig, TrainConfig
from trainer.errors import UserError

CONNECTIONS = sorted(path.stem for path in (CONF / "model/connection").glob("*.yaml"))
EXPERIMENTS = sorted((CONF / "experiment").glob("*.yaml"))
OPTIONS = [
    f"{path.parent.relative_to(CONF).as_posix()}={path.stem}"
    for path in sorted(CONF.rglob("*.yaml"))
    if path.parent != CONF
]


def train_config(*overrides: str) -> TrainConfig:
    return compose_launch("config", list(overrides), TrainConfig).jobs[0]


@cache
def default_values(connection: str) -> dict[str, Any]:
    config = train_config(f"model/connection={connection}")
    return config.model_dump()


def refusal(changes: dict[str, Any], connection: str = "attention_residual") -> str:
    """What is said about the default settings with some values changed."""
    values = copy.deepcopy(default_values(connection))
    for key, value in changes.items():
        *sections, name = key.split(".")
        reduce(lambda parent, section: parent[section], sections, values)[name] = value
    with pytest.raises(UserError) as caught:
        validate(values, TrainConfig)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_default_run_is_the_papers_recipe():
    config = train_config()
    attention_residual = {
        "kind": "attention_residual",
        "beta0": 0.55,
        "beta": "learned",
        "content_score": True,
        "include_initial": True,
        "memory_span": "run",
    }
    assert config.model.model_dump() == {
        "name": "infiloop",
        "recursion": "nested",
        "levels": "shared",
        "block": {"kind": "post_norm", "layer_scale": None},
        "initial_state": "fixed",
        "initial_std": 1.0,
        "connection": attention_residual,
        "axes": "both",
        "other_connection": {"kind": "carry_last"},
        "halting": "q_head",
        "mixer": "attention",
        "positions": "rope",
        "hidden_size": 512,
        "num_heads": 8,
        "layers": 2,
        "expansion": 4,
        "ffn_multiple": 256,
        "puzzle_tokens": 16,
        "puzzle_emb_dim": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    assert config.schedule.model_dump() == {
        "H_cycles": 3,
        "L_cycles": 6,
        "segments": 12,
        "grad_outer_cycles": 1,
        "global_batch": 768,
        "total_steps": 71610,
        "lr": 1e-4,
        "warmup_steps": 2000,
        "lr_min_ratio": 1.0,
        "optimizer": "adamw",
        "weight_decay": 1.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-8,
        "decay_lr": 1e-3,
        "puzzle_emb_lr": 1e-4,
        "puzzle_emb_weight_decay": 1.0,
        "ema": 0.999,
        "halt_exploration": 0.1,
        "halt_loss_weight": 0.5,
    }
    data = config.data
    assert isinstance(data, SudokuConfig)
    assert (data.source, data.hub_id) == ("auto", "sapientinc/sudoku-extreme")
    assert (data.train_puzzles, data.num_aug, data.test_puzzles, data.digits) == (1000, 1000, None, 9)
    assert (config.trainer.device, config.trainer.dtype, config.trainer.compile) == ("auto", "auto", "auto")
    assert config.logger.kind == "files" and config.steps == 71610
    assert train_config("model=infiloop", "data=sudoku").model_dump() == config.model_dump()


def test_trm_differs_from_infiloop_by_its_connection_alone():
    trm, infiloop = (train_config(f"model={name}").model_dump(exclude={"run_dir"}) for name in ("trm", "infiloop"))
    assert trm["model"].pop("connection") == {"kind": "carry_last"}
    infiloop["model"].pop("connection")
    assert (trm["model"].pop("name"), infiloop["model"].pop("name")) == ("trm", "infiloop")
    assert trm == infiloop


@pytest.mark.parametrize("path", ["schedule/paper.yaml", "model/infiloop.yaml", "model/trm.yaml", "data/sudoku.yaml"])
def test_every_value_of_a_paper_recipe_says_where_it_is_from(path: str):
    descriptions = {
        "name",
        "box_rows",
        "box_cols",
        "kind",
        "source",
        "path",
        "hub_id",
        "difficulty",
        "cache_dir",
        "hub_timeout",
    }
    for line in (CONF / path).read_text().splitlines():
        key = re.match(r"(\w+): ", line)
        if key and key[1] not in descriptions and line != "axes: both":
            assert re.search(r"# (paper|assumption|released code)", line), line


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes(option: str):
    needs = ["data.path=somewhere"] if option == "data=puzzle_dir" else []
    assert train_config(option, *needs)


@pytest.mark.parametrize("option", ["trainer=cpu", "trainer=gpu", "eval=default"])
def test_programs_for_checkpoints_share_the_groups(option: str):
    evaluate = compose_launch("evaluate", ["checkpoint=outputs/x", option], EvaluateConfig).jobs[0]
    assert evaluate.checkpoint == Path("outputs/x") and evaluate.eval == EvalConfig()
    if option.startswith("trainer"):
        solve = compose_launch("solve", ["checkpoint=outputs/x", option], SolveConfig).jobs[0]
        assert solve.trainer == evaluate.trainer


def test_eval_yaml_states_the_defaults_of_the_class():
    assert train_config().eval == EvalConfig()
    assert set(yaml.safe_load((CONF / "eval/default.yaml").read_text())) == set(EvalConfig.model_fields)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_experiments_are_short_and_their_launch_lines_compose(path: Path):
    lines = path.read_text().splitlines()
    launches = [line for line in lines if line.startswith("#   python train.py ")]
    assert lines[0] == "# @package _global_" and launches and len(lines) <= 40
    for launch in launches:
        train_config(*shlex.split(launch)[3:])
    for model in ("trm", "infiloop"):
        config = train_config(f"experiment={path.stem}", f"model={model}")
        assert config.model.name == model
        assert config.model.mixer == "mlp" and config.trainer.device == "cpu"


def test_tiny_is_tiny():
    config = train_config("experiment=tiny")
    assert isinstance(config.data, SudokuConfig)
    assert config.data.name == "sudoku4" and config.model.hidden_size == 32 and config.trainer.compile is False
    assert (config.data.train_puzzles, config.data.validation_puzzles, config.data.test_puzzles) == (16, 8, 12)
    assert (config.schedule.segments, config.schedule.global_batch, config.steps) == (3, 8, 20)


def test_sudoku6_is_2000_test_puzzles_beyond_singles():
    data = train_config("data=sudoku6").data
    assert isinstance(data, SudokuConfig)
    assert (data.box_rows, data.box_cols, data.difficulty, data.num_aug) == (2, 3, "beyond_singles", None)
    assert (data.train_puzzles, data.test_puzzles) == (1000, 2000)


@pytest.mark.parametrize("kind", CONNECTIONS)
def test_any_model_takes_any_connection_on_either_axis(kind: str):
    both = train_config("model=trm", f"model/connection={kind}").model
    assert both.axis_connection("inner").kind == both.axis_connection("outer").kind == kind
    other = "model/connection@model.other_connection=constant_step"
    inner = train_config("model.axes=inner", f"model/connection={kind}", other).model
    assert (inner.axis_connection("inner").kind, inner.axis_connection("outer").kind) == (kind, "constant_step")
    outer = train_config(f"model/connection={kind}", "model.axes=outer").model
    assert (outer.axis_connection("inner").kind, outer.axis_connection("outer").kind) == ("carry_last", kind)


def test_settings_of_a_chosen_connection_and_an_experiments_seed_can_be_set():
    config = train_config(
        "experiment=tiny",
        "model/connection=attention_residual",
        "model.connection.beta0=1.82",
        "model.connection.beta=fixed",
        "seed=5",
    )
    assert config.model.connection.model_dump()["beta0"] == 1.82 and config.seed == 5


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model.connection.beta0": 1.82}, ["model.connection.beta0=1.82", "beta=learned", "beta=fixed"]),
        ({"model.connection.beta0": 1.0}, ["model.connection.beta0=1.0", "beta=learned"]),
        ({"model.num_heads": 3}, ["model.num_heads=3", "hidden_size=512"]),
        ({"model.hidden_size": 8}, ["model.positions=rope", "even"]),
        ({"model.mixer": "mlp"}, ["model.positions=rope", "mixer=mlp", "positions=none"]),
        ({"model.puzzle_tokens": 0}, ["model.puzzle_emb_dim=512", "puzzle_tokens=0"]),
        ({"schedule.grad_outer_cycles": 4}, ["schedule.grad_outer_cycles=4", "H_cycles=3"]),
        ({"trainer.micro_batch": 1000}, ["trainer.micro_batch=1000", "schedule.global_batch=768"]),
        ({"eval.segments": 3, "eval.layers": 9}, ["eval.segments", "eval.layers"]),
        ({"eval.split": "validation"}, ["eval.split=validation"]),
        ({"eval.halting": "on", "model.halting": "fixed"}, ["eval.halting=on", "model.halting=fixed"]),
        (
            {"eval.halting": "batch_residual"},
            ["eval.halting=batch_residual", "model.halting=q_head", "eval.halting=on"],
        ),
        ({"eval.starts": 4}, ["eval.starts=4", "model.initial_state=fixed", "initial_state=noise"]),
        ({"eval.noise": 0.1}, ["eval.noise=0.1", "noisy_relaxation"]),
        (
            {"eval.starts": 4, "eval.choose": "halting", "model.initial_state": "noise", "model.halting": "fixed"},
            ["eval.choose=halting", "model.halting=fixed", "eval.choose=convergence"],
        ),
        ({"data.source": "csv"}, ["data.source=csv", "path"]),
        ({"data.source": "generated", "data.path": "real"}, ["data.path=", "source=generated", "source=csv"]),
        ({"model.expansion": 1e-4}, ["model.expansion=0.0001", "inner width of 0"]),
        ({"data.source": "hub", "data.hub_id": None}, ["data.source=hub", "hub_id"]),
    ],
)
def test_contradictions_are_refused_by_name(changes: dict[str, Any], named: list[str]):
    message = refusal(changes)
    for name in named:
        assert name in message


def test_several_starts_need_something_random():
    """Noise on the way is enough, unless evaluation turns it off; so is a random initial state alone."""
    relaxing = {"model.initial_state": "fixed", "eval.starts": 4}
    assert "eval.starts=4" in refusal(relaxing | {"eval.noise": 0.0}, connection="noisy_relaxation")
    assert "eval.starts=4" in refusal(relaxing | {"model.connection.noise": 0.0}, connection="noisy_relaxation")
    for lines in (["model/connection=noisy_relaxation"], ["model.initial_state=noise"], ["model=eqr", "eval.noise=0"]):
        assert train_config(*lines, "eval.starts=4").eval.starts == 4
    assert train_config("model=fprm", "eval.starts=4", "eval.halting=batch_residual").eval.halting == "batch_residual"


def test_a_learned_step_of_one_is_refused_by_name():
    message = refusal({"model.connection.learned": True, "model.connection.step": 1}, connection="constant_step")
    assert "model.connection.step=1" in message and "learned=true" in message


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("seed", "abc", "seed=abc: expected an integer >= 0 and <= 2147483647"),
        ("seed", True, "seed=true: expected an integer >= 0"),  # not 1
        ("seed", "5", "seed=5: expected an integer"),
        ("schedule.total_steps", 1.5, "schedule.total_steps=1.5: expected an integer > 0"),
        ("schedule.lr", float("inf"), "schedule.lr=inf: expected a number > 0"),
        ("schedule.lr", float("nan"), "schedule.lr=nan: expected a number > 0"),
        ("schedule.adam_beta1", 1, "schedule.adam_beta1=1: expected a number >= 0 and < 1"),
        ("data.box_rows", 6, "data.box_rows=6: expected an integer >= 2 and <= 5"),
        ("trainer.compile", "yes", "trainer.compile=yes: expected auto, true or false"),
        ("trainer.micro_batch", 0, "trainer.micro_batch=0: expected auto or an integer > 0"),
        ("trainer.threads", 0, "trainer.threads=0: expected an integer > 0 or null"),
        ("eval.n", "some", "eval.n=some: expected auto, all or an integer > 0"),
        ("eval.halting", True, "eval.halting=true: expected on, off or batch_residual"),
        ("model.axes", "inside", "model.axes=inside: expected both, inner or outer"),
        ("model.connection.kind", "foo", "model.connection.kind=foo: expected one of carry_last, constant_step"),
        ("model.connection.kind", "constant_step", "model/connection=<kind> chooses a connection whole"),
        ("model.connection", 5, "model.connection=5: expected a section of settings"),
        ("data.pth", "x", "data.pth: no such setting; did you mean data.path?"),
        ("model.connection.beta_0", 1, "model.connection.beta_0: no such setting; did you mean model.connection.beta0"),
        ("logger.zzz", "x", "logger.zzz: no such setting; logger has entity, kind, project"),
    ],
)
def test_a_wrong_value_is_told_with_key_value_and_expectation(key: str, value: Any, told: str):
    assert told in refusal({key: value})


def test_on_and_off_stay_words():
    assert train_config().eval.halting == "off"
    assert train_config("eval.halting=on").eval.halting == "on"


def test_saved_settings_read_back_equal():
    config = train_config("model/connection=constant_step", "data=sudoku6", "eval.halting=on", "schedule.lr=1e-5")
    saved: dict[str, Any] = yaml.safe_load(dump_config(config))
    assert validate(saved, TrainConfig) == config
    assert saved["data"]["cache_dir"] == "data/cache"  # a saved run can move to another machine


def test_cache_lies_in_the_project_and_data_path_where_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    data, other = (train_config(line).data for line in ("data.path=csvs", f"data.cache_dir={os.sep}elsewhere"))
    assert isinstance(data, SudokuConfig) and isinstance(other, SudokuConfig)
    assert data.cache_dir == PROJECT / "data/cache"
    assert data.path == tmp_path / "csvs"
    assert other.cache_dir == Path("/elsewhere")

"""Released checkpoints: read under any wrapper, refused by name, and written back bit for bit."""

import dataclasses
import math
import os
import pickle
import random
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from models.config import NoisyRelaxationConfig, ResidualBlockConfig
from models.core import LoopedReasoner
from models.released import our_name, released_name, without_wrappers
from tests.parity import facts, tensors
from tests.runs import BOX4, evaluating, finished_run, puzzles, solving, steady
from tests.test_checkpoint import logits
from trainer.checkpoint import Checkpoint, load_checkpoint
from trainer.config import PROJECT, SudokuConfig
from trainer.errors import UserError
from trainer.import_settings import sudoku_box
from trainer.importing import import_checkpoint
from trainer.released_weights import Names, released_state
from trainer.report import evaluate_program
from trainer.solver import solve_program
from trainer.state_file import read_state

CASES = ("trm_att", "trm_mlp", "fprm_conv1d", "fprm_conv2d", "infiloop_att", "infiloop_mlp_outer_only")
WRAPPERS = ("", "inner.", "model.inner.", "_orig_mod.model.inner.", "_orig_mod.inner.", "model._orig_mod.inner.")
AXES = ("inner", "outer")
State = dict[str, Tensor]


def released(case: str, wrapper: str = "_orig_mod.model.inner.") -> State:
    """The case's weights as a released run writes them; InfiLoop's own names are made up."""
    state = {}
    for name, tensor in tensors(case, ".weights").items():
        axis, _, leaf = name.partition(".")
        own = axis in AXES and leaf in ("query", "raw_decay")
        state[wrapper + (f"res_{axis}.{leaf}" if own else name.removeprefix("inner."))] = tensor
    return state


def names(case: str, wrapper: str = "_orig_mod.model.inner.") -> Names:
    """The map for InfiLoop's made-up names."""
    axes = facts(case).get("axes", [])
    return {
        f"{wrapper}res_{axis}.{leaf}": f"{axis}.{leaf}" if axis in axes else None
        for axis in AXES * bool(axes)
        for leaf in ("query", "raw_decay")
    }


class Folder:
    """Where a test keeps released files, and imports them."""

    def __init__(self, path: Path):
        self.path, self.out, self.said = path, path / "imported.safetensors", []

    def file(self, state: Any, name: str = "step_21700") -> Path:
        torch.save(state, self.path / name)
        return self.path / name

    def config(self, case: str, **changes: Any) -> Path:
        """all_config.yaml of the case, with training settings that are nobody's business here."""
        file = self.path / "all_config.yaml"
        file.write_text(yaml.safe_dump({"arch": facts(case)["config"] | changes, "lr": 1e-4, "seed": 3}))
        return file

    def load(self, state: Any, case: str, *settings: str, names: Names | None = None, **told: Any) -> LoopedReasoner:
        source = state if isinstance(state, Path) else self.file(state)
        told_in = self.config(case, **told)
        model = import_checkpoint(source, self.out, list(settings), told_in, names, say=self.said.append)
        loaded = load_checkpoint(self.out).build_model("ema")
        assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
        return loaded

    def refused(self, message: str, *arguments: Any, **told: Any) -> None:
        """The import is refused in one line, and nothing is written."""
        with pytest.raises(UserError, match=message) as caught:
            self.load(*arguments, **told)
        assert "\n" not in str(caught.value)
        assert {file.name for file in self.path.iterdir()} <= {"step_21700", "all_config.yaml", "w.safetensors"}

    def exported(self, prefix: str | None = None) -> State:
        return released_state(load_checkpoint(self.out), "ema", prefix, {})


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def same(a: State, b: State) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name


# --- names -----------------------------------------------------------------------------------------------------------


def test_names_go_there_and_back() -> None:
    """Under any wrapper, every weight of the fixtures; _orig_mod may stand inside."""
    for case in CASES[:4]:
        for name in tensors(case, ".weights"):
            if name.endswith(".mask"):
                continue
            bare = without_wrappers(name)
            ours = our_name(name)
            assert ours is not None and released_name(ours, fprm="fprm" in case) == bare
            assert all(our_name(wrapper + bare) == ours for wrapper in WRAPPERS)
    assert (
        our_name("_orig_mod.model.inner.H_level.layers.3.mlp.down_proj.weight")
        == "outer_block.layers.3.mlp.down.weight"
    )
    assert our_name("inner.query") == "inner.query" == our_name("model.inner.inner.query")
    unknown = ("inner.L_level.layers.0.mlp.up.weight", "inner.M_level.layers.0.mlp.down_proj.weight", "x", "inner.")
    assert all(our_name(name) is None for name in unknown)


# --- weights and outputs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_imported_model_gives_the_released_outputs(case: str, folder: Folder) -> None:
    model, io, told = folder.load(released(case), case, names=names(case)).eval(), tensors(case, ".io"), facts(case)
    x, memory = model.encode(io["inputs"], model.puzzle_rows(io["puzzle_identifiers"])), model.start(len(io["inputs"]))
    cycles = (1, 1) if "fprm" in case else (told["config"]["H_cycles"], told["config"]["L_cycles"])
    for step in range(12 if "fprm" in case else 3):
        memory = model.segment(memory, x, *cycles)
        at = f"eval.seg{step}" if "infiloop" in case else f"eval.{step}"
        answer, q = model.decode(memory)
        torch.testing.assert_close(answer, io[f"{at}.logits"], rtol=0, atol=1e-4)
        torch.testing.assert_close(q, io[f"{at}.q_halt_logits"], rtol=0, atol=1e-4)
    checkpoint = load_checkpoint(folder.out)
    assert (
        checkpoint.step == 21700
        and checkpoint.config.seed == 3
        and checkpoint.config.schedule.H_cycles == (1 if "fprm" in case else 3)
    )
    assert checkpoint.data_meta["source"] == "imported:step_21700" and checkpoint.box == BOX4


@pytest.mark.parametrize(
    ("case", "wrapper"), [*((case, "_orig_mod.model.inner.") for case in CASES), *(("trm_mlp", w) for w in WRAPPERS)]
)
def test_export_is_lossless(case: str, wrapper: str, folder: Folder) -> None:
    """Names, order, dtypes and bits as they were, in bfloat16 or float32; masks come back as ones."""
    state = released(case, wrapper)
    state = {k: t.to(torch.bfloat16) if "init" in k or "layers.0" in k else t for k, t in state.items()}
    folder.load(state, case, names=names(case, wrapper))
    left_out = {theirs for theirs, ours in names(case, wrapper).items() if ours is None}
    kept = {name: tensor for name, tensor in state.items() if name not in left_out}
    same(folder.exported(), kept)
    assert list(folder.exported()) == list(kept)
    bare = {without_wrappers(name): tensor for name, tensor in kept.items()}
    same(folder.exported("model.inner."), {f"model.inner.{name}": tensor for name, tensor in bare.items()})


@pytest.mark.parametrize("case", CASES[:4])
def test_our_own_export_is_what_the_released_code_writes(case: str, folder: Folder) -> None:
    """Without the record of an import: the same names under the same wrappers, FPRM's masks among them."""
    folder.load(released(case), case)
    own = dataclasses.replace(load_checkpoint(folder.out), imported=None)
    same(released_state(own, "ema", None, {}), released(case))
    assert released_state(own, "ema", "", {}).keys() == released(case, "").keys()


def test_safetensors_and_training_files(folder: Folder) -> None:
    state = released("trm_att")
    source = folder.path / "w.safetensors"
    save_file({name: t.to(torch.float16) for name, t in state.items()}, source)
    folder.load(source, "trm_att")
    assert all(tensor.dtype == torch.float16 for tensor in folder.exported().values())
    folder.out.unlink()
    folder.load({"model": state, "step": 7, "optimizers": [{"state": {}}]}, "trm_att")
    assert "weights under 'model' of a larger file; left out: optimizers, step" in folder.said
    folder.out.unlink()
    plain = {name.removeprefix("_orig_mod."): t * 2 for name, t in state.items() if "init" not in name}
    folder.load({"model": state, "ema": {"mu": 0.999, "shadow": plain}}, "trm_att")
    same(folder.exported(), {n: t if "init" in n else t * 2 for n, t in state.items()})


@pytest.mark.parametrize("kind", ["lambda", "beta"])
def test_a_decay_may_be_given_as_lambda_or_beta(kind: str, folder: Folder) -> None:
    state, mapped = released("infiloop_att"), names("infiloop_att")
    for axis in AXES:
        theirs = f"_orig_mod.model.inner.res_{axis}.raw_decay"
        lam = math.log1p(math.exp(state[theirs].item()))
        state[theirs] = torch.tensor([math.exp(-lam) if kind == "beta" else lam])
        mapped[theirs] = f"{axis}.{kind}"
    model = folder.load(state, "infiloop_att", names=mapped)
    weights = tensors("infiloop_att", ".weights")
    for axis in AXES:
        torch.testing.assert_close(model.state_dict()[f"{axis}.raw_decay"], weights[f"{axis}.raw_decay"])
    same(folder.exported(), state)
    state["_orig_mod.model.inner.res_outer.raw_decay"] = torch.tensor([1.5 if kind == "beta" else -0.5])
    folder.out.unlink()
    folder.refused(f"res_outer.raw_decay = .* is no {kind} of an axis", state, "infiloop_att", names=mapped)


def test_forms_without_a_fixture(folder: Folder) -> None:
    """A block for each level (HRM), a learned table of positions, FPRM from drawn states, an 8x8 vocabulary."""
    base, lead = released("trm_att"), "_orig_mod.model.inner."
    levels = {name.replace("L_level", "H_level"): t + 1 for name, t in base.items() if "L_level" in name}
    positions = {f"{lead}embed_pos.embedding_weight": torch.ones(20, 32)}
    drawn = {name: t for name, t in released("fprm_conv2d").items() if "init_vec" not in name}
    eight = {n: torch.ones(10, 32) if "embed_tokens" in n or "lm_head" in n else t for n, t in base.items()}
    forms: list[tuple[str, State, dict[str, Any], str, str]] = [
        ("trm_att", base | levels, {}, "levels", "untied"),
        ("trm_att", base | positions, {"pos_encodings": "learned", "seq_len": None}, "positions", "learned"),
        ("fprm_conv2d", drawn, {"fixed_init": False}, "initial_state", "noise"),
        ("trm_att", eight, {"seq_len": 64}, "levels", "shared"),
    ]
    for case, state, told, key, value in forms:
        model = folder.load(state, case, **told)
        assert getattr(model.config, key) == value and model.seq_len == (told.get("seq_len") or 16)
        same(folder.exported(), state)
        data = load_checkpoint(folder.out).config.data
        assert isinstance(data, SudokuConfig)
        assert data.digits**2 == model.seq_len and data.name == f"sudoku{data.digits}"
        folder.out.unlink()


def eqr_state() -> State:
    """As EqR's code writes it: no puzzle table, no initial states, a token mixer over the cells alone."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed_tokens.embedding_weight": (11, 32), "lm_head.weight": (11, 32), "q_head.weight": (2, 32)}
    for layer in ("L_level.layers.0.", "L_level.layers.1."):
        shapes |= {f"{layer}mlp_t.gate_up_proj.weight": (512, 81), f"{layer}mlp_t.down_proj.weight": (81, 256)}
        shapes |= {f"{layer}mlp.gate_up_proj.weight": (512, 32), f"{layer}mlp.down_proj.weight": (32, 256)}
    state = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {f"model.inner.{name}": t for name, t in (state | {"q_head.bias": torch.zeros(2)}).items()}


def test_eqr(folder: Folder) -> None:
    model = import_checkpoint(folder.file(eqr_state()), folder.out, ["model.num_heads=4"], say=folder.said.append)
    assert (model.seq_len, model.config.puzzle_tokens, model.config.initial_state) == (81, 0, "noise")
    assert model.config.axis_connection("inner").model_dump() == {
        "kind": "noisy_relaxation",
        "step": 0.95,
        "noise": 0.01,
    }
    assert folder.said[0] == "family: eqr; vocabulary 11, 1 puzzle ids: Sudoku 9x9"
    assert any(line.split() == ["model.num_heads", "4", "you"] for line in folder.said)
    assert any(line.split() == ["model.halting", "q_head", "preset"] for line in folder.said)
    assert any(line.split() == ["seq_len", "81", "weights"] for line in folder.said)
    same(folder.exported(), eqr_state())


def test_a_configuration_of_eqr(folder: Folder) -> None:
    told = folder.path / "all_config.yaml"
    arch = {
        "hidden_size": 32,
        "num_heads": 4,
        "lambda_": 0.9,
        "noise_scale": 0.02,
        "mlp_t": True,
        "pos_encodings": "rope",
    }
    arch |= {"halt_max_steps": 8, "H_cycles": 2, "L_cycles": 3, "H_init_std": 0.5, "L_init_std": 0.5}
    told.write_text(yaml.safe_dump({"arch": arch}))
    model = import_checkpoint(folder.file(eqr_state()), folder.out, [], told, say=folder.said.append)
    outer = model.config.axis_connection("outer")
    assert isinstance(outer, NoisyRelaxationConfig) and (outer.step, outer.noise) == (0.9, 0.02)
    assert model.config.initial_std == 0.5
    schedule = load_checkpoint(folder.out).config.schedule
    assert (schedule.H_cycles, schedule.L_cycles, schedule.segments) == (2, 3, 8)
    told.write_text(yaml.safe_dump({"arch": arch | {"L_init_std": 1.0}}))
    folder.out.unlink()
    with pytest.raises(UserError, match=r"L_init_std=1\.0: only L_init_std=0\.5 can be imported"):
        import_checkpoint(folder.path / "step_21700", folder.out, [], told)


def test_the_puzzle_is_told_by_the_vocabulary(folder: Folder) -> None:
    """Official TRM: 16 puzzle tokens, one row as wide as the model; Maze is kept, but is no Sudoku."""
    state = released("trm_att")
    del state["_orig_mod.model.inner.puzzle_emb.weights"]
    state["_orig_mod.model.inner.puzzle_emb.weights"] = torch.zeros(1, 32)
    model = import_checkpoint(folder.file(state), folder.out, ["model.num_heads=2"], say=folder.said.append)
    assert (model.seq_len, model.config.puzzle_tokens) == (900, 16)
    assert load_checkpoint(folder.out).config.schedule.segments == 16
    with pytest.raises(UserError, match="reads 900 cells with 6 tokens, which is no Sudoku"):
        solve_program(solving(folder.out, puzzle="1" + "." * 15))
    with pytest.raises(UserError, match="its model has vocab_size=6, but data generated-sudoku9-any has 11"):
        evaluate_program(evaluating(folder.out))
    mixer = released("trm_mlp")
    for name in list(mixer):
        if "mlp_t.down" in name:
            mixer[name] = torch.zeros(97, 512)
        if "mlp_t.gate" in name:
            mixer[name] = torch.zeros(1024, 97)
        if "embed_tokens" in name or "lm_head" in name:
            mixer[name] = torch.zeros(11, 32)
    folder.out.unlink()
    model = import_checkpoint(
        folder.file(mixer), folder.out, ["model.num_heads=2"], seq_len=None, say=folder.said.append
    )
    assert (model.seq_len, model.config.puzzle_tokens, model.config.mixer) == (81, 16, "mlp")
    assert [sudoku_box(n + 2, n * n) for n in (4, 5, 6, 9)] == [BOX4, None, sudoku_box(8, 36), sudoku_box(11, 81)]
    box = sudoku_box(8, 36)
    assert box is not None and (box.rows, box.cols) == (2, 3)


# --- settings of ours and of a configuration file --------------------------------------------------------------------


def test_maze_form_of_fprm_has_its_own_preset(folder: Folder) -> None:
    state = folder.file(released("fprm_conv1d"))
    import_checkpoint(
        state, folder.out, ["model.num_heads=2", "model.puzzle_tokens=4"], seq_len=16, say=folder.said.append
    )
    config = load_checkpoint(folder.out).config
    assert config.model.block.model_dump()["norm"] == "output" and config.schedule.segments == 24


@pytest.mark.parametrize(
    ("case", "setting", "message"),
    [
        ("trm_att", "model.hidden_size=64", "model.hidden_size=64: the weights of .* say model.hidden_size=32"),
        ("trm_att", "model.layers=3", "model.layers=3: the weights of .* say model.layers=2"),
        ("trm_mlp", "model.puzzle_tokens=3", "have 20 positions, not 16 cells and 3 puzzle tokens"),
        ("trm_att", "model.hiden_size=32", "model.hiden_size"),
        ("trm_att", "model.expansion=31", "down_proj.weight has shape .32, 256., its settings ask for .32, 768."),
        ("trm_att", "model=infiloop", "lacks inner.query, inner.raw_decay, outer.query, outer.raw_decay"),
        ("trm_att", "model.levels=untied", "model.levels=untied: the weights of"),
        ("infiloop_att", "model=trm", "model=trm: the weights of .* have the names of model=infiloop; leave it out"),
    ],
)
def test_settings_that_contradict_the_weights(case: str, setting: str, message: str, folder: Folder) -> None:
    folder.refused(message, released(case), case, setting, names=names(case))


@pytest.mark.parametrize(
    ("case", "told", "message"),
    [
        (
            "trm_att",
            {"hidden_size": 64},
            "all_config.yaml: hidden_size=64, but the weights of .* say model.hidden_size=32",
        ),
        ("trm_att", {"mlp_t": True}, "mlp_t=True, but the weights of .* say model.mixer=attention"),
        ("trm_att", {"L_layers": 4}, "L_layers=4, but the weights"),
        ("trm_att", {"pos_encodings": "rope2d"}, "pos_encodings=rope2d: only rope, learned and none can be imported"),
        ("trm_att", {"expansion": 31}, "expansion=31, but the weights of .* have inner widths {32: 256}"),
        ("trm_mlp", {"puzzle_emb_len": 16}, "have 20 positions, not 16 cells and 16 puzzle tokens"),
        (
            "fprm_conv1d",
            {"conv_type": "conv2d"},
            "conv_type=conv2d, but the weights of .* say model.block.convolution=causal",
        ),
        ("fprm_conv1d", {"fixed_init": False}, "fixed_init=False, but the weights"),
        ("fprm_conv2d", {"softmax_temp": 2.0}, "softmax_temp=2.0: only softmax_temp=1.0 can be imported"),
        ("fprm_conv2d", {"halting_mechanism": "act"}, "halting_mechanism=act: only"),
    ],
)
def test_a_configuration_file_that_contradicts_the_weights(
    case: str, told: dict[str, Any], message: str, folder: Folder
) -> None:
    folder.refused(message, released(case), case, **told)


# --- refusals --------------------------------------------------------------------------------------------------------


def changed(name: str, change: Callable[[Tensor], Any]) -> Callable[[State], Any]:
    return lambda state: {n: change(t) if n.endswith(name) else t for n, t in state.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"model.extra": torch.zeros(1)}, "unknown weights: model.extra; a map of names"),
        (lambda s: s | {f"e.{i}": torch.zeros(1) for i in range(6)}, "unknown weights: e.0, e.1, e.2, e.3 and 2 more"),
        (lambda s: {n: t for n, t in s.items() if "lm_head" not in n}, "lacks lm_head.weight; model=trm needs them"),
        (lambda s: {n: t for n, t in s.items() if "embed" not in n}, "has no matrix embed_tokens.embedding_weight"),
        (
            lambda s: {n: t for n, t in s.items() if "layers" not in n},
            "has no matrix L_level.layers.0.mlp.down_proj.weight",
        ),
        (
            changed("q_head.weight", lambda t: t[:1]),
            r"q_head.weight has shape \[1, 32\], its settings ask for \[2, 32\]",
        ),
        (changed("lm_head.weight", lambda t: t[0]), r"lm_head.weight has shape \[32\]"),
        (changed("H_init", lambda t: t * torch.nan), "numbers that are not finite: _orig_mod.model.inner.H_init"),
        (changed("H_init", lambda t: t.int()), "H_init is torch.int32; expected float32, bfloat16 or float16"),
        (changed("H_init", lambda t: t.to(torch.complex64)), "H_init is torch.complex64"),
        (changed("H_init", lambda t: t.double()), "H_init is torch.float64"),
        (changed("H_init", lambda t: t.to_sparse()), "H_init is no plain tensor"),
        (changed("H_init", lambda t: t.to("meta")), "H_init is no plain tensor"),
        (changed("H_init", lambda t: 3), "expected names and tensors alone; these are something else: .*H_init"),
        (lambda s: s | {"inner.H_init": torch.zeros(32)}, "H_init and inner.H_init are the same weight"),
        (lambda s: s | {3: torch.zeros(1)}, "expected names and tensors alone; these are something else: 3"),
        (lambda s: {"state": {0: {"step": 1}}, "param_groups": []}, "is the state of an optimizer"),
        (lambda s: {"weights": s, "step": 3}, "these are something else: weights, step"),
        (lambda s: {"model": s, "ema": 1}, "'ema' holds no 'shadow'"),
        (lambda s: {"model": s, "ema": {"shadow": {"x": torch.zeros(1)}}}, "weights that the model does not have: x"),
        (lambda s: list(s.values()), "holds a list; expected a state_dict"),
        (lambda s: {}, "holds no weights"),
    ],
)
def test_wrong_content_is_refused_by_name(change: Callable[[State], Any], message: str, folder: Folder) -> None:
    folder.refused(message, change(released("trm_att")), "trm_att")


class Malicious:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_malicious_pickle_is_refused_and_does_not_run(
    folder: Folder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    mark = tmp_path_factory.mktemp("mark") / "ran"
    for state in (Malicious(mark), {"model": released("trm_att"), "carry": Malicious(mark)}):
        folder.refused(r"refused, unpickling it would call \w+.system; only tensors are read", state, "trm_att")
    source = folder.file({})
    source.write_bytes(pickle.dumps(Malicious(mark)))
    folder.refused("step_21700: (refused|not a readable)", source, "trm_att")
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore")
def test_damaged_files_are_refused_or_read(folder: Folder) -> None:
    """Whatever bytes a file has, reading it ends in tensors or in one line."""
    rng, small = random.Random(0), {f"w.{i}": torch.ones(2, 3) for i in range(3)}
    for zipped in (True, False):
        torch.save(small, folder.path / "step_21700", _use_new_zipfile_serialization=zipped)
        content = (folder.path / "step_21700").read_bytes()
        for _ in range(200):
            damaged = bytearray(content)
            for _ in range(rng.choice([1, 2, 8])):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            (folder.path / "step_21700").write_bytes(damaged)
            try:
                read_state(folder.path / "step_21700")
            except UserError as error:
                assert "\n" not in str(error)


@pytest.mark.parametrize("kept", [0, 100, -1])
def test_cut_files_are_refused(kept: int, folder: Folder) -> None:
    pickled, plain = folder.file(released("trm_att")), folder.path / "w.safetensors"
    save_file(released("trm_att"), plain)
    for source in (pickled, plain):
        source.write_bytes(source.read_bytes()[:kept])
        folder.refused(f"{source.name}: not a readable", source, "trm_att")


def test_files_that_are_not_there_or_are_in_the_way(folder: Folder) -> None:
    with pytest.raises(UserError, match="nowhere: cannot be read"):
        import_checkpoint(folder.path / "nowhere", folder.out, [])
    with pytest.raises(UserError, match="a vocabulary of 7 does not tell the number of cells; give --seq-len"):
        odd = {n: torch.zeros(7, 32) if "embed" in n or "lm_" in n else t for n, t in released("trm_att").items()}
        import_checkpoint(folder.file(odd), folder.out, [])
    with pytest.raises(UserError, match="names that the file does not hold: q"):
        import_checkpoint(folder.file(released("trm_att")), folder.out, [], names={"q": "inner.query"})
    folder.out.write_text("mine")
    with pytest.raises(UserError, match=r"imported\.safetensors: exists; choose another name"):
        import_checkpoint(folder.file(released("trm_att")), folder.out, [])
    assert folder.out.read_text() == "mine"


# --- our own, and the programs ---------------------------------------------------------------------------------------


def program(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: Any) -> int:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROJECT / "scripts" / name), run_name="__main__")
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_run_of_ours_goes_out_and_comes_back(
    folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The tiny InfiLoop run, exported and imported, gives the same answers in evaluate.py and solve.py."""
    run = load_checkpoint(finished_run() / "best.safetensors")
    state, out = folder.path / "step_20", folder.out
    assert program(monkeypatch, "export_checkpoint.py", finished_run(), "--out", state) == 0
    released, _ = read_state(state)
    assert (
        "_orig_mod.model.inner.inner.query" in released
        and released["_orig_mod.model.inner.H_init"].dtype == torch.float32
    )
    depth = [f"schedule.{k}={v}" for k, v in (("H_cycles", 2), ("L_cycles", 2), ("segments", 3))]
    told = ["--seq-len", 16, *depth, "model.num_heads=4"]
    assert program(monkeypatch, "import_checkpoint.py", state, "--out", out, *told) == 0
    assert "model.connection.beta0" in capsys.readouterr().out
    loaded = load_checkpoint(out)
    assert torch.equal(logits(loaded.build_model("ema")), logits(run.build_model("ema")))

    with caplog.at_level("INFO"):
        results = evaluate_program(evaluating(out, out=folder.path / "results"))
    assert "imported, so that its training data is unknown" in caplog.text
    assert results["trained_on"] == "unknown (imported:step_20)" and results["checkpoint_step"] == 20
    own = evaluate_program(evaluating(finished_run(), out=folder.path / "own"))
    assert (results["exact"], results["cells_right"], results["n"]) == (own["exact"], own["cells_right"], own["n"])
    assert own["trained_on"] == f"{own['data']} [{own['data_fingerprint'][:12]}]"
    mine = puzzles(BOX4, 2)
    rows = ["".join(map(str, (grid - 1).tolist())) for grid in (*mine.inputs, *mine.labels)]
    (folder.path / "my.csv").write_text(f"question,answer\n{rows[0]},{rows[2]}\n{rows[1]},{rows[3]}\n")
    results = evaluate_program(evaluating(out, out=folder.path / "r", puzzles=folder.path / "my.csv"))
    assert results["n"] == 2 and results["data"] == "my.csv" and results["trained_on"].startswith("unknown")
    assert solve_program(solving(out, puzzle=rows[0])) in (0, 1)


def test_other_data_is_refused_by_its_shape(folder: Folder) -> None:
    import_checkpoint(
        folder.file(eqr_state()), folder.out, ["data=sudoku6", "model.num_heads=4"], say=folder.said.append
    )
    with pytest.raises(UserError, match=r"its model has vocab_size=11, but data .* has 8; give puzzles=<csv>"):
        evaluate_program(evaluating(folder.out))


def test_mistakes_of_the_programs_end_in_one_line(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder.path / "names.json").write_text('{"a": 1}')
    for arguments in (
        ["import_checkpoint.py", folder.path / "no", "--out", folder.out],
        ["import_checkpoint.py", folder.path / "no", "--out", folder.out, "--names", folder.path / "names.json"],
        ["export_checkpoint.py", folder.path / "no", "--out", folder.out],
        ["export_checkpoint.py", finished_run(), "--out", finished_run() / "best.safetensors"],
    ):
        assert program(monkeypatch, *map(str, arguments)) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert not folder.out.exists()


def test_what_the_released_code_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_checkpoint(finished_run() / "best.safetensors")
    scaled = steady(block=ResidualBlockConfig(kind="post_norm", layer_scale=0.1))
    monkeypatch.setattr(Checkpoint, "build_model", lambda *_: scaled)
    with pytest.raises(UserError, match=r"has no weight like block\.layers\.0\.mix_scale; --names can give it a name"):
        released_state(run, "ema", None, {})


def test_names_for_what_the_released_code_does_not_have(folder: Folder) -> None:
    run = load_checkpoint(finished_run() / "best.safetensors")
    state = released_state(run, "raw", "inner.", {"inner.q_L": "inner.query", "inner.beta_L": "inner.beta"})
    assert {"inner.q_L", "inner.beta_L", "inner.outer.query"} < state.keys() and "inner.inner.query" not in state
    raw = run.build_model("raw")
    assert torch.equal(state["inner.q_L"], raw.state_dict()["inner.query"])
    assert state["inner.beta_L"] == torch.exp(-torch.nn.functional.softplus(raw.state_dict()["inner.raw_decay"]))
    assert state["inner.puzzle_emb.weights"].shape == (1, 32)  # its puzzle token enters as zeros
    with pytest.raises(UserError, match=r"has no weights outer\.q, which the map names"):
        released_state(run, "raw", None, {"x": "outer.q"})

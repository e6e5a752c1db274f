"""From a command line to validated settings: Hydra composes, pydantic checks, and a mistake is told in one line.

Hydra tells a mistake over several lines, with exit code 1 and often after it has made a directory. So the programs
first compose here, by the same rules and from the same overrides, and let Hydra start only when every job's settings are
right.
"""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from models.config import Settings
from trainer.config import PROJECT
from trainer.errors import UserError
from trainer.mistakes import describe, explain, fields_of, first_line, flat, full_key, is_text

CONF = PROJECT / "conf"
CONNECTIONS = {"model/connection": "connection", "model/connection@model.other_connection": "other_connection"}
SettingsT = TypeVar("SettingsT", bound=Settings)


class Stamp:
    """When this process started, to the second; `advance` tells it from another start in the same second."""

    def __init__(self) -> None:
        self._start = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        self._attempt = 1

    def advance(self) -> None:
        self._attempt += 1

    def __str__(self) -> str:
        return self._start if self._attempt == 1 else f"{self._start}.{self._attempt}"


STAMP = Stamp()
# use_cache as in Hydra's ${now:}: a launcher's worker process gets the sweep's stamp with the config, not its own.
OmegaConf.register_new_resolver("run_stamp", lambda: str(STAMP), use_cache=True, replace=True)
OmegaConf.register_new_resolver("file_name", lambda text: re.sub(r"[^\w.,=+-]+", "-", text)[:120], replace=True)


# --- composing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch(Generic[SettingsT]):
    """What a command line asks for, checked."""

    overrides: list[str]
    """For Hydra: quoted where its grammar would change a text, `from` replaced."""
    jobs: list[SettingsT]
    labels: list[str]
    """Per job, the overrides that tell it from the others; empty for a single job."""
    directory: Path
    """The directory Hydra would create: run directory, or under -m the folder of all jobs."""


@contextmanager
def hydra_at_conf() -> Iterator[Hydra]:
    """Hydra's composer over conf/, wherever the program was started."""
    if not CONF.is_dir():
        raise UserError(f"{CONF} is missing: the programs read their settings there, so run them from a checkout")
    with initialize_config_dir(str(CONF), job_name="longloop", version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        try:
            yield hydra
        finally:
            HydraConfig.instance().cfg = None


def compose_launch(name: str, lines: list[str], settings: type[SettingsT], *, sweep: bool = False) -> Launch[SettingsT]:
    """Composes conf/<name>.yaml with the overrides and validates it, under `sweep` (-m) every job."""
    overrides = parse_overrides(load_saved(lines), settings, sweep=sweep)
    with hydra_at_conf() as hydra:
        # As Hydra does it: a first config without the swept values says how to sweep, then each job is composed anew.
        first = compose_config(hydra, name, overrides, sweep=sweep)
        if not sweep:
            jobs, labels = [_validated(first, settings)], [""]
        else:
            jobs, labels = _validated_jobs(hydra, name, first, overrides, settings)
        try:
            directory = Path(str(first.hydra.sweep.dir if sweep else first.hydra.run.dir))
        except OmegaConfBaseException as error:
            raise UserError(first_line(error)) from error
    return Launch([str(o.input_line) for o in overrides], jobs, labels, directory)


def compose_config(hydra: Hydra, name: str, overrides: list[Override], *, sweep: bool = False) -> DictConfig:
    """The composed config, Hydra's own node included, not validated."""
    mode = RunMode.MULTIRUN if sweep else RunMode.RUN
    try:
        return hydra.compose_config(name, [str(o.input_line) for o in overrides], run_mode=mode)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(explain(hydra, name, overrides, error)) from error


def _validated(config: DictConfig, settings: type[SettingsT]) -> SettingsT:
    HydraConfig.instance().set_config(config)  # for ${hydra:...}
    return validate(task_values(config), settings)


def task_values(config: DictConfig) -> dict[str, Any]:
    """A config as plain resolved values, without Hydra's own node."""
    config = copy.deepcopy(config)
    with read_write(config), open_dict(config):
        config.pop("hydra", None)
    try:
        return cast(dict[str, Any], OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    except MissingMandatoryValue as error:
        key = error.full_key or ""
        raise UserError(f"{key} is missing: give {key}=<value>") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {first_line(error)}") from error


def validate(values: dict[str, Any], settings: type[SettingsT]) -> SettingsT:
    try:
        return settings.model_validate(values)
    except ValidationError as error:
        raise UserError(describe(error, settings)) from error


def _validated_jobs(
    hydra: Hydra, name: str, first: DictConfig, overrides: list[Override], settings: type[SettingsT]
) -> tuple[list[SettingsT], list[str]]:
    """Every job of a sweep. A mistake that not all jobs share is told with the overrides of the job that has it."""
    own = [str(o.input_line) for o in overrides if o.is_hydra_override()]
    swept = {o.get_key_element() for o in overrides if o.is_sweep_override()}
    jobs, labels, mistakes = [], [], []
    for job in _job_overrides(hydra, first, overrides):
        labels.append(" ".join(line for line in job if line.partition("=")[0] in swept))
        try:
            config = compose_config(hydra, name, OverridesParser.create().parse_overrides(own + job))
            jobs.append(_validated(config, settings))
        except UserError as error:
            mistakes.append((str(error), labels[-1]))
    if mistakes:
        message, label = mistakes[0]
        shared = len(mistakes) == len(labels) and len({message for message, _ in mistakes}) == 1
        raise UserError(message if shared else f"job {labels.index(label)} ({label}): {message}")
    return jobs, labels


def _job_overrides(hydra: Hydra, first: DictConfig, overrides: list[Override]) -> list[list[str]]:
    """The overrides of each job, as Hydra's basic sweeper lists them."""
    sweeper = cast(dict[str, Any], OmegaConf.to_container(first.hydra.sweeper, resolve=True))
    tasks = [str(o.input_line) for o in overrides if not o.is_hydra_override()]
    if not str(sweeper["_target_"]).endswith(".BasicSweeper"):
        # A sweeper that searches has no list of jobs; what can be checked before it starts are the fixed overrides.
        return [[str(o.input_line) for o in overrides if not (o.is_hydra_override() or o.is_sweep_override())]]
    params = [f"{key}={value}" for key, value in (sweeper["params"] or {}).items()]
    parser = OverridesParser.create(config_loader=hydra.config_loader)  # choice(glob(...)) needs to look up options
    try:
        return BasicSweeper.split_arguments(parser.parse_overrides(params + tasks), None)[0]
    except HydraException as error:
        raise UserError(flat(error)) from error


# --- reading overrides -----------------------------------------------------------------------------------------------


def parse_overrides(lines: list[str], settings: type[Settings], *, sweep: bool) -> list[Override]:
    """Parses overrides; refuses the ones that Hydra's grammar cannot read, that repeat a key, or that need -m."""
    texts = set() if sweep else {key for key, field in fields_of(settings) if is_text(field.annotation)}
    parser = OverridesParser.create()
    overrides: list[Override] = []
    seen: dict[str, str] = {}
    for line in lines:
        if not re.match(r"~|[^=]+=", line):
            raise UserError(f"{line!r} is not a setting: write name=value, for example model=trm")
        try:
            override = parser.parse_override(_quoted(line, texts))
        except HydraException as error:
            raise UserError(
                f"{line}: not readable as name=value, or as a quoted text name='...' ({flat(error)})"
            ) from error
        key = full_key(override)
        if key in seen:
            raise UserError(f"{key} is given twice: {seen[key]} and {line}")
        if override.is_sweep_override() and not sweep:
            raise UserError(f"{line}: several values for one setting; add -m to run a job for each, or give one value")
        if override.key_or_group == "run_dir" and sweep:
            raise UserError(
                f"{line}: under -m each job has a folder of its own; hydra.sweep.dir=<folder> sets their parent"
            )
        seen[key] = line
        overrides.append(override)
    return overrides


def _quoted(line: str, texts: set[str]) -> str:
    """Quotes the value of a text setting, so that a puzzle does not turn into a number nor a path into a sweep."""
    match = re.fullmatch(r"(\+{0,2}([\w.]+)=)(.+)", line, re.DOTALL)
    if match is None or match[2] not in texts or match[3] in ("null", "???"):
        return line
    value = match[3]
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return line
    return match[1] + QuotedString(value, Quote.single).with_quotes()


def load_saved(lines: list[str]) -> list[str]:
    """Turns `from=<config.yaml of a run>` into an experiment that sets everything as saved, but for the run directory.

    Sections whose group the command line chooses are left out, so that `from=... data=sudoku4` takes all of sudoku4.
    """
    paths = [line.removeprefix("from=") for line in lines if line.startswith("from=")]
    if not paths:
        return lines
    others = [line for line in lines if not line.startswith("from=")]
    groups = [line.lstrip("+~").partition("=")[0] for line in others]
    if len(paths) > 1 or "experiment" in groups:
        raise UserError("from= sets everything an experiment can: give one from=, and no experiment=")
    path = Path(paths[0]).expanduser()
    path = path / "config.yaml" if path.is_dir() else path
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except OSError as error:
        raise UserError(f"from={path}: expected a run's config.yaml or its folder ({error.strerror})") from error
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise UserError(f"from={path}: not readable as YAML ({first_line(error)})") from error
    if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
        raise UserError(f"from={path}: expected the saved settings of a run, with a section `model`")
    model = cast(dict[str, Any], values["model"])
    values.pop("run_dir", None)
    for group in groups:
        *sections, last = group.partition("@")[2].split(".") if "@" in group else group.split("/")
        parent: Any = values
        for section in sections:
            parent = parent.get(section) if isinstance(parent, dict) else None
        if isinstance(parent, dict):
            parent.pop(last, None)
    kinds = []
    for group, key in CONNECTIONS.items():
        if "model" in values and isinstance(model.get(key), dict):
            kinds.append({f"override /{group}": model[key].get("kind")})
    node = {"defaults": [*kinds, "_self_"], **values}
    ConfigStore.instance().store(group="experiment", name="from", node=node, package="_global_")
    return ["experiment=from", *others]

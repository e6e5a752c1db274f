"""What train.py, evaluate.py and solve.py share: one line for a mistake, no directory before the settings are right.

    run_train(job, argv=None)                       train.py; job(config: TrainConfig) runs under Hydra, once per -m job
    compose_settings(name, argv, EvaluateConfig)    evaluate.py and solve.py; returns settings, creates nothing
    run_program(main)                               calls main(), turns UserError into one line and exit code 2
    dump_config(config)                             YAML that `python train.py from=<file>` reads again

evaluate.py then ends in

    if __name__ == "__main__":
        run_program(lambda: main(compose_settings("evaluate", sys.argv[1:], EvaluateConfig)))

where main returns None or an exit code, and train.py in `run_train(main)`.
"""

import argparse
import difflib
import logging
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template
from typing import Any, NoReturn, TextIO

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from models.config import Settings
from trainer.compose import (
    CONF,
    STAMP,
    SettingsT,
    compose_config,
    compose_launch,
    hydra_at_conf,
    load_saved,
    parse_overrides,
    task_values,
    validate,
)
from trainer.config import PROJECT, TrainConfig
from trainer.errors import UserError
from trainer.mistakes import describe

HYDRA_FLAGS = {"--hydra-help", "--info", "-i", "--shell-completion", "-sc"}  # answered by Hydra itself, train.py only
crash_log = logging.getLogger(
    "trainer.crash"
)  # the run's train.log alone (conf/config.yaml); stderr is told at the end


class _Unread:
    """A stream that goes on, unread, when its reader has left (`... | head`): a run loses no results over it."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """Runs a program and exits: its own code, 2 for a UserError, 130 for ctrl-C, 1 with a traceback for the rest."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Unread):
            setattr(sys, name, _Unread(stream))
    try:
        code = main() or 0
    except (UserError, ValidationError) as error:
        _complain(_as_user_error(error))
        code = 2
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def compose_settings(name: str, argv: Sequence[str], settings: type[SettingsT]) -> SettingsT:
    """The validated settings of conf/<name>.yaml with the overrides in argv. Creates nothing; exits after --help."""
    command = _parse(argv)
    if command.multirun:
        raise UserError(f"--multirun is for train.py; run {name}.py once for each value")
    if _answered(name, command, settings):
        raise SystemExit(0)
    return compose_launch(name, command.overrides, settings).jobs[0]


def run_train(job: Callable[[TrainConfig], None], argv: Sequence[str] | None = None) -> NoReturn:
    """Checks every job's settings, then runs `job` as a Hydra app: once, or under -m once for each job of the sweep."""
    run_program(lambda: _train(job, list(sys.argv[1:] if argv is None else argv)))


def dump_config(config: TrainConfig) -> str:
    """The settings as YAML, for `python train.py from=<file>`."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


# --- train.py --------------------------------------------------------------------------------------------------------


def _train(job: Callable[[TrainConfig], None], argv: list[str]) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Where ranks come in: rank 0 alone composes, claims the directory and broadcasts both; the others skip Hydra.
        raise UserError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: training is one process for now; start train.py without torchrun"
        )
    if HYDRA_FLAGS.intersection(argv):
        return _under_hydra(job, argv, [""])
    command = _parse(argv)
    if _answered("config", command, TrainConfig):
        return 0
    sweep = command.multirun or any(line.upper() == "HYDRA.MODE=MULTIRUN" for line in command.overrides)
    launch = compose_launch("config", command.overrides, TrainConfig, sweep=sweep)
    _claim(launch.directory)
    return _under_hydra(job, ["--multirun"] * sweep + launch.overrides, launch.labels)


def _claim(directory: Path) -> None:
    """Makes the directory; where another start of this second has just made it, moves on to the next stamp.

    An existing directory that the command line chose is left to the job, which knows whether it may continue there.
    """
    try:
        directory.mkdir(parents=True)
    except FileExistsError as error:
        stamp = str(STAMP)
        if stamp in directory.name:
            STAMP.advance()
            _claim(directory.with_name(directory.name.replace(stamp, str(STAMP))))
        elif not directory.is_dir():
            raise UserError(f"run_dir={directory} is a file; choose another name") from error
    except OSError as error:
        raise UserError(f"run_dir={directory} cannot be made: {error.strerror}") from error


def _under_hydra(job: Callable[[TrainConfig], None], argv: list[str], labels: list[str]) -> int:
    """Lets @hydra.main start the job or jobs. Exceptions wait until it is done, since it would shorten tracebacks."""
    failures: list[Exception] = []
    started_as, launcher_pid, sweep = sys.argv, os.getpid(), "--multirun" in argv

    def task(values: DictConfig) -> None:
        config = HydraConfig.get()
        run_dir = Path(config.runtime.output_dir)
        if run_dir.is_relative_to(Path.cwd()):
            run_dir = run_dir.relative_to(Path.cwd())
        sys.argv = started_as
        try:
            job(validate({**task_values(values), "run_dir": run_dir}, TrainConfig))
        except Exception as caught:
            if os.getpid() != launcher_pid:
                raise  # in the worker of another launcher, which carries it back
            error = _as_user_error(caught) if isinstance(caught, ValidationError) else caught
            name = f"job {config.job.num} ({labels[config.job.num]}): " if sweep else ""
            failures.append(error)
            if isinstance(error, UserError):
                crash_log.error("error: %s", error)
                if sweep:
                    _complain(f"{name}{error}")
            else:
                crash_log.exception("%s", type(error).__name__)
                if sweep:
                    _complain(
                        f"{name}{type(error).__name__}: {error}; the other jobs go on, the traceback follows them"
                    )

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra's own failures: whole tracebacks as well
    sys.argv = [sys.argv[0], *argv]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
    finally:
        sys.argv = started_as
    if not sweep and failures:
        raise failures[0]
    crashes = [error for error in failures if not isinstance(error, UserError)]
    if crashes:
        raise ExceptionGroup(f"{len(failures)} of {len(labels)} jobs failed", crashes)
    return 2 if failures else 0


# --- command line ----------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Hydra's flags, before, between or after the overrides."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    command, unknown = parser.parse_known_intermixed_args(list(argv))
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        near = difflib.get_close_matches(unknown[0], flags, n=1)
        hint = f"did you mean {near[0]}?" if near else f"flags are {', '.join(f for f in flags if f.startswith('--'))}"
        raise UserError(f"{unknown[0]}: no such flag; {hint}")
    if command.multirun and command.cfg:
        raise UserError("--cfg shows the settings of one job; leave --multirun out")
    return command


def _answered(name: str, command: argparse.Namespace, settings: type[Settings]) -> bool:
    """Prints what --help, --version and --cfg ask for."""
    if command.version:
        print("longloop", tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"])
    elif command.help:
        with hydra_at_conf() as composer:
            template = compose_config(composer, name, []).hydra.help.template
            groups = {g: sorted(composer.config_loader.get_group_options(g)) for g in composer.list_all_config_groups()}
        lines = [
            f"  {g}: {', '.join(o)}" for g, o in sorted(groups.items()) if len(o) > 1 and not g.startswith("hydra")
        ]
        print(Template(template).safe_substitute(APP_CONFIG_GROUPS="\n".join(lines)).rstrip())
    elif command.cfg:
        # Not validated: to look at settings that contradict each other is what one may want it for.
        with hydra_at_conf() as composer:
            config = compose_config(
                composer, name, parse_overrides(load_saved(command.overrides), settings, sweep=False)
            )
        HydraConfig.instance().set_config(config)  # for ${hydra:...}
        with open_dict(config):
            config.pop("hydra")
        try:
            print(OmegaConf.to_yaml(config, resolve=command.resolve), end="")
        except OmegaConfBaseException as error:
            raise UserError(str(error).partition("\n")[0]) from error
    return bool(command.version or command.help or command.cfg)


def _as_user_error(error: UserError | ValidationError) -> UserError:
    if isinstance(error, UserError):
        return error
    named = [settings for settings in Settings.__subclasses__() if settings.__name__ == error.title]
    return UserError(describe(error, named[0] if named else Settings))


def _complain(message: object) -> None:
    """One line on stderr."""
    print("error:", " ".join(str(message).splitlines()), file=sys.stderr)

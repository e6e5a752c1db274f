"""What a run directory holds besides metrics and checkpoints: settings, command, environment."""

import json
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

from data.arrays import DataMeta
from models.core import LoopedReasoner
from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.files import write_atomically

PROJECT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "numpy", "numba", "hydra-core", "omegaconf", "pydantic", "safetensors")


def _git(*arguments: str) -> str | None:
    """Output of a git command in the project, or None outside a checkout."""
    try:
        done = subprocess.run(["git", *arguments], cwd=PROJECT, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def environment(model: LoopedReasoner) -> dict[str, Any]:
    """Command, commit, versions, machine and parameter counts: what is needed to tell two runs apart."""
    status = _git("status", "--porcelain")
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": None if status is None else bool(status),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "machine": platform.platform(),
        "device": str(model.H_init.device),
        "threads": torch.get_num_threads(),
        **model.parameter_counts(),
    }


def refuse_used(run_dir: Path) -> None:
    """Refuse a run directory that holds anything yet, but for the log that Hydra has just opened there."""
    held = sorted(path.name for path in run_dir.iterdir() if path.name != "train.log") if run_dir.is_dir() else []
    if held:
        what = "holds a run already" if "config.yaml" in held else f"is not empty (it holds {held[0]})"
        raise UserError(f"run_dir={run_dir}: {what}; choose another run_dir or remove it")


def record_run(config: TrainConfig, model: LoopedReasoner, meta: DataMeta) -> Path:
    """Create the run directory and write config.yaml and environment.json."""
    run_dir = config.run_dir
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run_dir={run_dir}: cannot be written ({error.strerror}); choose another run_dir") from error
    settings = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    write_atomically(run_dir / "config.yaml", settings.encode())
    facts = {**environment(model), "data": asdict(meta)}
    write_atomically(run_dir / "environment.json", (json.dumps(facts, indent=1) + "\n").encode())
    return run_dir

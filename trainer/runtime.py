"""The machine: device, compute dtype, compiler, threads, seeds, free memory."""

import ctypes
import logging
import random
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from torch.utils._triton import has_triton

from trainer.config import TrainerConfig
from trainer.errors import UserError

log = logging.getLogger("longloop")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt, as glibc's malloc.h numbers them."""


@dataclass(frozen=True)
class Runtime:
    """What a program runs on."""

    device: torch.device
    dtype: torch.dtype
    compile: bool


def available_device(wanted: str) -> torch.device:
    """`auto` takes cuda, mps, cpu in that order; an explicit device that is absent is the user's mistake."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        wanted = next(name for name, here in present.items() if here)
    if not present[wanted]:
        raise UserError(f"trainer.device={wanted}: this machine has none; use trainer.device=auto or cpu")
    return torch.device(wanted)


def compiler_missing(device: torch.device) -> str | None:
    """Why torch.compile cannot work here, or None."""
    if device.type == "mps":
        return "torch.compile is not used on mps"
    if device.type == "cuda":
        return None if has_triton() else "Triton is not installed"
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        return "no C++ compiler"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return None if header.is_file() else f"{header} is missing (Debian and Ubuntu: apt install python3-dev)"


def keep_freed_memory() -> None:
    """Have the C library keep freed memory for the next step instead of handing it back to the system.

    A CPU step frees and takes back the same large buffers; handed back, they cost 15,000 page faults a step. glibc only.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if sys.platform == "linux" and mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the most that every glibc accepts
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def set_up(config: TrainerConfig) -> Runtime:
    """Pick device, dtype and compiler, and say what was picked and why."""
    keep_freed_memory()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = available_device(config.device)
    wide = device.type == "cuda" and torch.cuda.is_bf16_supported()
    dtype = torch.bfloat16 if config.dtype == "bfloat16" or (config.dtype == "auto" and wide) else torch.float32
    missing = compiler_missing(device)
    if config.compile is True and missing:
        raise UserError(f"trainer.compile=true: {missing}; use trainer.compile=auto or false")
    compiled = config.compile is not False and missing is None
    reason = "" if compiled else f" ({missing or 'trainer.compile=false'})"
    log.info(
        f"device {device.type}, {str(dtype).removeprefix('torch.')}, {'compiled' if compiled else 'eager'}{reason}, "
        f"{torch.get_num_threads()} threads"
    )
    if compiled:
        # A sweep builds several models in one process; old graphs would count against the recompilation limit.
        torch.compiler.reset()
    return Runtime(device, dtype, compiled)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - libraries may draw from the global generator
    torch.manual_seed(seed)


def free_memory(device: torch.device) -> int:
    """Bytes a run may still take on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    return min(psutil.virtual_memory().available, _left_in_container(Path("/sys/fs/cgroup")))


def _left_in_container(cgroup: Path) -> int:
    """Bytes left under a container's memory limit (cgroup 2); files in memory, which give way, count as left."""
    try:
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such file, or a limit of "max"
        return sys.maxsize
    return limit - used + int(stat.get("inactive_file", 0))

"""Prepared data on disk: `<cache_dir>/<name>-<hash>/` with meta.json and one .npz per split.

A folder appears complete or not at all (written aside, then renamed), so builds may run at the same time and be killed.
Every file is checked by sha256 when it is read.
"""

import dataclasses
import hashlib
import io
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from data.arrays import SPLITS, DataMeta, PuzzleData, Split, data_fingerprint, split_fingerprint
from trainer.errors import UserError

_FORMAT = 1


def cache_folder(cache_dir: Path, name: str, request: dict[str, Any]) -> Path:
    """Where the data set that `request` describes (plain JSON values) is kept."""
    text = json.dumps({"format": _FORMAT, "name": name, **request}, sort_keys=True)
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    return cache_dir / f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def read_meta(folder: Path) -> DataMeta | None:
    """The record of a prepared data set; None when there is no such folder. UserError when it is damaged."""
    return _parse_meta(folder / "meta.json")[0] if folder.exists() else None


def read_data(folder: Path) -> PuzzleData:
    """A prepared data set, every file verified. UserError naming the file that is missing or damaged."""
    meta, hashes = _parse_meta(folder / "meta.json")
    splits: dict[str, Split] = {}
    for name in SPLITS:
        path = folder / f"{name}.npz"
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != hashes.get(path.name):
            raise _damaged(path)
        with np.load(io.BytesIO(content)) as arrays:
            splits[name] = Split(**arrays)
        if split_fingerprint(splits[name]) != meta.split_fingerprints.get(name):
            raise _damaged(folder / "meta.json")
    if data_fingerprint(meta.split_fingerprints, meta.vocab_size, meta.seq_len) != meta.fingerprint:
        raise _damaged(folder / "meta.json")
    return PuzzleData(splits["train"], splits["validation"], splits["test"], meta)


def write_data(folder: Path, data: PuzzleData) -> None:
    """Keep a data set, replacing one that was built from another origin. UserError when the disk refuses."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
        try:
            _write_files(building, data)
            building.chmod(0o755)
            _publish(building, folder, data.meta)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"data.cache_dir={folder.parent}: cannot keep the prepared data there ({error.strerror}); set "
            "data.cache_dir to a folder on a disk with room where you may write"
        ) from error


def _write_files(folder: Path, data: PuzzleData) -> None:
    hashes = {}
    for name in SPLITS:
        split: Split = getattr(data, name)
        buffer = io.BytesIO()
        arrays = {f.name: getattr(split, f.name) for f in dataclasses.fields(split)}
        np.savez(buffer, allow_pickle=False, **arrays)
        content = buffer.getvalue()
        hashes[f"{name}.npz"] = hashlib.sha256(content).hexdigest()
        (folder / f"{name}.npz").write_bytes(content)
    record = {**dataclasses.asdict(data.meta), "sha256": hashes}
    (folder / "meta.json").write_text(json.dumps(record, indent=2) + "\n")


def _publish(building: Path, folder: Path, meta: DataMeta) -> None:
    """Rename the finished folder into place. What another process has put there meanwhile stays if it is the same."""
    try:
        building.rename(folder)
    except OSError:
        present = read_meta(folder)
        if present is None:
            raise
        if (present.source, present.revision, present.fingerprint) == (meta.source, meta.revision, meta.fingerprint):
            return
        old = Path(tempfile.mkdtemp(prefix=".replaced-", dir=folder.parent))
        try:
            folder.replace(old)  # onto an empty folder, so that there is no half-deleted one at any time
            building.rename(folder)
        finally:
            shutil.rmtree(old, ignore_errors=True)


def _parse_meta(path: Path) -> tuple[DataMeta, dict[str, str]]:
    try:
        record = json.loads(path.read_text())
        hashes = record.pop("sha256")
        return DataMeta(**record), hashes
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path) from error


def _damaged(path: Path) -> UserError:
    return UserError(
        f"{path}: prepared data is damaged or incomplete; delete the folder {path.parent} and run again to rebuild it"
    )

"""Puzzle tables from the Hugging Face hub through the optional package `datasets`, without ever hanging."""

import http.client
import importlib.util
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data.generate import Puzzles
from data.sudoku import Box
from data.tables import Row, table_puzzles
from trainer.errors import UserError

_OFFLINE_SWITCHES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


class HubUnavailable(Exception):
    """The data set cannot be had from the hub now; the message says why, in one line."""


def check_hub(hub_id: str, timeout: float) -> None:
    """Raise HubUnavailable in about `timeout` seconds when the data set cannot be had, not even from a local copy."""
    datasets = _import_datasets()
    _check_there(datasets, hub_id, _use_network(hub_id, timeout))


def fetch_hub(hub_id: str, box: Box, timeout: float) -> tuple[Puzzles, Puzzles, str | None]:
    """(training rows, test rows, commit) of a data set on the hub, or of a local folder that `datasets` can load.

    Raises HubUnavailable when it cannot be had, UserError when its rows are faulty. Offline (by the switches of the hub
    libraries, or because the hub does not answer within `timeout` seconds) a copy downloaded before is used.
    """
    datasets = _import_datasets()
    network = _use_network(hub_id, timeout)
    _check_there(datasets, hub_id, network)
    try:
        with _Offline(datasets, not network):
            loaded = _as_text(datasets.load_dataset, hub_id)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise HubUnavailable(f"{hub_id}: {_reason(error)}") from error
    for name in ("train", "test"):
        if name not in loaded:
            raise UserError(f"data.hub_id={hub_id}: no split {name}; it has {', '.join(loaded)}")
        for column in ("question", "answer"):
            if column not in loaded[name].column_names:
                raise UserError(f"data.hub_id={hub_id}: split {name} has no column {column}; give a data set with both")
    train, test = (table_puzzles(_rows(loaded[name], hub_id, name), box, True, hub_id) for name in ("train", "test"))
    return train, test, _commit(loaded["train"])


def _as_text(load: Callable[..., Any], hub_id: str) -> Any:
    """load(hub_id), with the grids of CSV files as text.

    By itself `datasets` reads a column of bare digits as numbers: 81 digits overflow, and zeros in front get lost.
    """
    try:
        return load(hub_id, converters={"question": str, "answer": str})
    except (TypeError, ValueError):  # not made of CSV files, or the copy at hand was downloaded without this
        return load(hub_id)


def _use_network(hub_id: str, timeout: float) -> bool:
    """Whether to talk to the hub: not for a local folder, not when switched off, not when it does not answer."""
    switched_off = any(os.environ.get(s, "").upper() in ("1", "ON", "YES", "TRUE") for s in _OFFLINE_SWITCHES)
    return not switched_off and not Path(hub_id).is_dir() and _answers(hub_id, timeout)


def _answers(hub_id: str, timeout: float) -> bool:
    """Whether the hub answers within timeout seconds. A thread, because name resolution itself cannot be timed out."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    answered = []

    def ask() -> None:
        request = urllib.request.Request(f"{endpoint}/api/datasets/{hub_id}", method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=timeout):
                answered.append(True)
        except urllib.error.HTTPError as error:
            if error.code < 500:  # it is there, and `datasets` will tell what it refuses
                answered.append(True)
        except (OSError, ValueError, http.client.HTTPException):
            pass

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return bool(answered)


def _import_datasets() -> Any:
    if importlib.util.find_spec("datasets") is None:
        raise HubUnavailable("the package datasets is not installed (pip install datasets)")
    try:
        import datasets
    except ImportError as error:
        raise HubUnavailable(f"the package datasets cannot be imported ({error}); reinstall it") from error
    return datasets


def _check_there(datasets: Any, hub_id: str, network: bool) -> None:
    """Raise HubUnavailable when the data set does not exist, or neither the hub nor a local copy can be had."""
    try:
        with _Offline(datasets, not network):
            _as_text(datasets.load_dataset_builder, hub_id)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        if network or Path(hub_id).is_dir():
            raise HubUnavailable(f"{hub_id}: {_reason(error)}") from error
        raise HubUnavailable(f"{hub_id}: offline or the hub does not answer, and no downloaded copy is here") from error


class _Offline:
    """Makes `datasets` go straight to its local copies, instead of five retries against a dead network."""

    def __init__(self, datasets: Any, offline: bool) -> None:
        self.config = datasets.config
        self.offline = offline

    def __enter__(self) -> None:
        self.before = {s: getattr(self.config, s) for s in _OFFLINE_SWITCHES if hasattr(self.config, s)}
        for switch in self.before if self.offline else ():
            setattr(self.config, switch, True)

    def __exit__(self, *_: object) -> None:
        for switch, value in self.before.items():
            setattr(self.config, switch, value)


def _rows(split: Any, hub_id: str, name: str) -> Iterator[Row]:
    number = 0
    for batch in split.iter(batch_size=10_000):
        ratings = batch.get("rating") or [None] * len(batch["question"])
        for question, answer, rating in zip(batch["question"], batch["answer"], ratings, strict=True):
            number += 1
            rated = "" if rating is None else str(rating)
            yield f"{hub_id}, {name} row {number}", str(question).strip(), str(answer).strip(), rated


def _commit(split: Any) -> str | None:
    """The data set's commit: part of the addresses its files were downloaded from."""
    for address in split.info.download_checksums or {}:
        if address.startswith("hf://") and "@" in address:
            return address.split("@", 1)[1].split("/", 1)[0]
    return None


def _reason(error: BaseException) -> str:
    """One line for an error; `datasets` puts what happened into the cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:200]

"""From settings to puzzles: choose the source, make disjoint splits, keep them prepared on disk.

Order of data.source=auto: prepared real data, CSV files in data.path, the hub, generated puzzles with a banner. A
generated stand-in has its own name and its own folder, so it is never taken for the real data later.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from data.arrays import SPLITS, DataMeta, PuzzleData, Split, data_fingerprint, split_fingerprint, split_from_puzzles
from data.cache import cache_folder, read_data, read_meta, write_data
from data.folder import load_puzzle_dir
from data.generate import GENERATOR_VERSION
from data.hub import HubUnavailable, check_hub, fetch_hub
from data.splits import GENERATED_TEST_PUZZLES, SplitPuzzles, check_splits, generated_splits, real_splits
from data.sudoku import Box
from data.tables import load_csv_puzzles, read_csv
from trainer.config import DataConfig, PuzzleDirConfig, SudokuConfig
from trainer.errors import UserError

__all__ = ["DataMeta", "PuzzleData", "Split", "check_source", "load_csv_puzzles", "load_puzzle_data"]

SUDOKU_EXTREME = "sapientinc/sudoku-extreme"
Say = Callable[[str], None]


def check_source(config: SudokuConfig) -> None:
    """Raise UserError when an explicitly asked source or path cannot be had. Reads and creates nothing else."""
    if config.path is not None and config.source in ("auto", "csv"):
        for file in _csv_files(config.path):
            if not file.is_file():
                raise UserError(
                    f"data.path={config.path}: no file {file.name} there; get train.csv and test.csv from "
                    f"https://huggingface.co/datasets/{SUDOKU_EXTREME} and put them into that folder"
                )
    if config.source == "cache" and _prepared(config) is None:
        raise UserError(
            f"data.source=cache: no prepared data in {_real_folder(config)}; prepare it once with data.source=csv or "
            "data.source=hub, or copy that folder there"
        )
    if config.source == "hub" and config.hub_id is not None and _prepared(config) is None:
        try:
            check_hub(config.hub_id, config.hub_timeout)
        except HubUnavailable as error:
            raise _no_hub(config, error) from error


def load_puzzle_data(config: DataConfig, say: Say = print) -> PuzzleData:
    """The data set of the settings, prepared before or built now; `say` gets lines for the user.

    Raises UserError when an explicit source cannot be had, rows are faulty, there are too few puzzles, or prepared data
    is damaged.
    """
    if isinstance(config, PuzzleDirConfig):
        return load_puzzle_dir(config, say)
    check_source(config)
    if config.source != "generated":
        prepared = _prepared(config)
        if prepared is not None:
            return _load(prepared, config, say)
        if config.path is not None:
            return _build_from_csv(config, config.path, say)
        if config.hub_id is not None:
            try:
                return _build_from_hub(config, config.hub_id, say)
            except HubUnavailable as error:
                if config.source == "hub":
                    raise _no_hub(config, error) from error
                reason = str(error)
        else:
            reason = "neither data.path nor data.hub_id is set"
        _say_banner(config, reason, say)
    return _load_generated(config, say)


# --- sources ---------------------------------------------------------------------------------------------------------


def _csv_files(folder: Path) -> tuple[Path, Path]:
    return folder / "train.csv", folder / "test.csv"


def _csv_revision(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in _csv_files(folder):
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return f"sha256:{digest.hexdigest()}"


def _build_from_csv(config: SudokuConfig, folder: Path, say: Say) -> PuzzleData:
    say(f"reading {folder}/train.csv and test.csv")
    revision = _csv_revision(folder)
    train, test = (read_csv(file, _box(config)) for file in _csv_files(folder))
    splits = real_splits(config, train, test, str(folder))
    return _finish(config, splits, config.name, "csv", revision, _real_folder(config), say)


def _build_from_hub(config: SudokuConfig, hub_id: str, say: Say) -> PuzzleData:
    say(f"fetching {hub_id} (waiting at most {config.hub_timeout:g} s for an answer)")
    train, test, revision = fetch_hub(hub_id, _box(config), config.hub_timeout)
    splits = real_splits(config, train, test, hub_id)
    # The configured name describes the configured default; another data set goes by its own id.
    name = config.name if hub_id == SUDOKU_EXTREME else hub_id
    return _finish(config, splits, name, f"hub:{hub_id}", revision, _real_folder(config), say)


def _load_generated(config: SudokuConfig, say: Say) -> PuzzleData:
    name = f"generated-sudoku{config.digits}-{config.difficulty}"
    request = {
        **_request(config),
        "test_puzzles": config.test_puzzles or GENERATED_TEST_PUZZLES,
        "generator": GENERATOR_VERSION,
    }
    folder = cache_folder(config.cache_dir, name, request)
    if read_meta(folder) is not None:
        return _load(folder, config, say)
    say(f"generating {config.digits}x{config.digits} puzzles, difficulty={config.difficulty}, seed={config.seed}")
    splits = generated_splits(config, say)
    return _finish(config, splits, name, "generated", f"generator-{GENERATOR_VERSION}", folder, say)


def _say_banner(config: SudokuConfig, reason: str, say: Say) -> None:
    real = "Sudoku-Extreme" if config.name == "sudoku-extreme" else config.name
    size = f"{config.digits}x{config.digits}"
    say(f"!! {real} cannot be had: {reason}")
    say(f"!! using generated {size} puzzles, NOT {real}; results carry the generated set's name")
    say(f"!! for {real}: set data.path to a folder with its train.csv and test.csv")


def _no_hub(config: SudokuConfig, error: HubUnavailable) -> UserError:
    return UserError(
        f"data.source=hub: {error}; download train.csv and test.csv of https://huggingface.co/datasets/{config.hub_id} "
        "into a folder and set data.source=csv data.path=<folder>"
    )


# --- prepared data ---------------------------------------------------------------------------------------------------


def _box(config: SudokuConfig) -> Box:
    return Box(config.box_rows, config.box_cols)


def _request(config: SudokuConfig) -> dict[str, int | None]:
    """What the arrays of a data set depend on, besides its name and origin."""
    fields = ("box_rows", "box_cols", "train_puzzles", "validation_puzzles", "test_puzzles", "seed")
    return {field: getattr(config, field) for field in fields}


def _real_folder(config: SudokuConfig) -> Path:
    return cache_folder(config.cache_dir, config.name, _request(config))


def _prepared(config: SudokuConfig) -> Path | None:
    """The folder of prepared real data, when it is there and comes from where the settings say."""
    if config.source == "generated":
        return None
    folder = _real_folder(config)
    meta = read_meta(folder)
    if meta is None:
        return None
    if config.path is not None and config.source in ("auto", "csv"):
        same = meta.source == "csv" and meta.revision == _csv_revision(config.path)
    elif config.source == "hub" or (config.source == "auto" and meta.source.startswith("hub:")):
        same = meta.source == f"hub:{config.hub_id}"
    else:
        same = True
    return folder if same else None


def _load(folder: Path, config: SudokuConfig, say: Say) -> PuzzleData:
    data = read_data(folder)
    meta = replace(data.meta, num_aug=config.num_aug, rows=_rows(data, config))
    say(f"data: {meta.name} from {folder} ({_counts(meta)}), fingerprint {meta.fingerprint[:16]}")
    return replace(data, meta=meta)


def _finish(
    config: SudokuConfig, splits: SplitPuzzles, name: str, source: str, revision: str | None, folder: Path, say: Say
) -> PuzzleData:
    """Check, record, keep and announce a new data set."""
    box = _box(config)
    checks = check_splits(splits, box)
    arrays = {split: split_from_puzzles(splits[split]) for split in SPLITS}
    fingerprints = {split: split_fingerprint(arrays[split]) for split in SPLITS}
    meta = DataMeta(
        name=name,
        box_rows=box.rows,
        box_cols=box.cols,
        vocab_size=box.vocab_size,
        seq_len=box.cells,
        num_puzzle_ids=1,
        source=source,
        revision=revision,
        seed=config.seed,
        train_puzzles=config.train_puzzles,
        num_aug=config.num_aug,
        rows={},
        difficulty=config.difficulty if source == "generated" else None,
        fingerprint=data_fingerprint(fingerprints, box.vocab_size, box.cells),
        split_fingerprints=fingerprints,
        checks=checks,
    )
    data = PuzzleData(arrays["train"], arrays["validation"], arrays["test"], meta)
    data = replace(data, meta=replace(meta, rows=_rows(data, config)))
    write_data(folder, data)
    say(f"data: {name} (source {source}, revision {revision}), kept in {folder}")
    say(f"data: {_counts(data.meta)}, fingerprint {meta.fingerprint}")
    for check, result in checks.items():
        say(f"data check: {check.replace('_', ' ')}: {result}")
    return data


def _rows(data: PuzzleData, config: SudokuConfig) -> dict[str, int | None]:
    train = None if config.num_aug is None else len(data.train) * (config.num_aug + 1)
    return {"train": train, "validation": len(data.validation), "test": len(data.test)}


def _counts(meta: DataMeta) -> str:
    virtual = "endless" if meta.rows["train"] is None else f"{meta.rows['train']:,}"
    return (
        f"{meta.train_puzzles:,} training puzzles ({virtual} rows), {meta.rows['validation']:,} validation, "
        f"{meta.rows['test']:,} test"
    )

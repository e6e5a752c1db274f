"""Telling a mistake in the settings in one line: the key, the value, what was expected, what is near."""

import difflib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from hydra._internal.hydra import Hydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from models.config import Settings

SHOWN = 3  # mistakes told in one line


def describe(error: ValidationError, settings: type[Settings]) -> str:
    """A pydantic error in one line: the full key, the value, what was expected."""
    known = [key for key, _ in fields_of(settings)]
    messages: dict[str, str] = {}  # one per key: a union reports each of its members
    for detail in error.errors():
        key, field, section = _locate(settings, detail["loc"])
        value, kind = _shown(detail["input"]), detail["type"]
        if kind == "extra_forbidden" and key in known:  # a setting of another kind of connection
            key, _, name = key.rpartition(".")
            whole = "data=<name> chooses the data" if key == "data" else "model/connection=<kind> chooses a connection"
            message = f"{key}: {name} belongs to another kind; {whole} whole"
        elif kind == "extra_forbidden":
            message = _unknown(key, known)
        elif kind == "value_error":
            message = detail["msg"].removeprefix("Value error, ")
            own = re.match(r"(\w+)=", message)
            if key and not message.startswith(f"{key}."):
                message = f"{key}.{message}" if own and own[1] in section.model_fields else f"{key}: {message}"
        elif kind == "union_tag_invalid":
            tags = detail.get("ctx", {})
            message = (
                f"{key}.kind={tags.get('tag')}: expected one of {str(tags.get('expected_tags')).replace(chr(39), '')}"
            )
        elif kind in ("missing", "union_tag_not_found"):
            message = f"{key} is missing" + (f": expected {_expected(field)}" if field else "")
        else:
            message = f"{key}={value}: expected {_expected(field) if field else detail['msg']}"
        messages.setdefault(key, message)
    told = list(messages.values())
    more = f"; and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
    return "; ".join(told[:SHOWN]) + more


def explain(hydra: Hydra, name: str, overrides: list[Override], error: Exception) -> str:
    """Why Hydra could not compose, in one line: the override at fault and what it could have been."""

    @cache
    def known_with(*lines: str) -> set[str]:
        """Keys and groups there are when only these overrides are given."""
        config = hydra.compose_config(name, list(lines), run_mode=RunMode.MULTIRUN)
        return {*_dotted(OmegaConf.to_container(config, resolve=False)), *config.hydra.runtime.choices}

    def unknown(key: str, known: set[str]) -> str:
        return _unknown(key, [k for k in known if k.startswith("hydra") == key.startswith("hydra")])

    groups = [o for o in overrides if _options(hydra, o.key_or_group)]
    for override in groups:
        options, value, line = _options(hydra, override.key_or_group), override.value(), override.input_line
        key = full_key(override)
        if override.is_delete():
            continue
        if value is None:
            return f"{line}: choose an option of {key} ({', '.join(options)}), or none at all with ~{key}"
        if value not in options and not override.is_sweep_override():
            near = difflib.get_close_matches(str(value), options, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            return f"{line}: no such option; {hint}options of {key}: {', '.join(options)}"
        if key not in known_with():
            return unknown(key, known_with())
        if override.is_add() or override.is_force_add():
            return f"{line}: {key} has a choice already, so write it without the +"
    chosen = [str(o.input_line) for o in groups if not o.is_sweep_override()]
    for override in overrides:
        key = full_key(override)
        if override in groups or override.is_force_add():
            continue
        try:
            known = known_with(*chosen)
        except (HydraException, OmegaConfBaseException, ValueError):
            break  # the groups do not go together; Hydra's own words say which
        if override.is_add() and key in known:
            return f"{override.input_line}: {key} exists, so write it without the +"
        if not override.is_add() and key not in known:
            return unknown(key, known)
    return flat(error)


def full_key(override: Override) -> str:
    return override.key_or_group + (f"@{override.package}" if override.package else "")


def _unknown(key: str, known: Iterable[str]) -> str:
    """A key that does not exist: near matches, else what there is beside it."""

    def split(key: str) -> tuple[str, str]:
        parent, _, leaf = key.replace("/", ".").rpartition(".")
        return parent, leaf

    def likeness(a: str, b: str) -> float:
        return difflib.SequenceMatcher(None, a, b).ratio()

    parent, leaf = split(key)
    # The last name decides: a long shared prefix would make any neighbour look alike.
    known = set(known)
    near = [(likeness(leaf, split(k)[1]) + likeness(parent, split(k)[0]) / 2, k) for k in known]
    near = sorted(((score, k) for score, k in near if likeness(leaf, split(k)[1]) >= 0.7), reverse=True)
    best = [k for score, k in near[:SHOWN] if score > near[0][0] - 0.15]
    if best:
        return f"{key}: no such setting; did you mean {' or '.join(best)}?"
    while parent and parent not in known:
        parent = split(parent)[0]
    beside = sorted({split(k)[1] for k in known if split(k)[0] == parent and "/" not in k})
    hint = "; model/connection=<kind> chooses another connection" if parent.endswith("connection") else ""
    return f"{key}: no such setting; {parent or 'there'} has {', '.join(beside)}{hint}".replace(
        "there has", "there are"
    )


def _options(hydra: Hydra, group: str) -> list[str]:
    return [] if "." in group else hydra.config_loader.get_group_options(group)


def _dotted(values: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield f"{prefix}{key}"
            yield from _dotted(value, f"{prefix}{key}.")


def flat(error: Exception) -> str:
    text = str(error).partition("Config search path:")[0]
    return " ".join(text.split()) or first_line(error.__cause__ or error)


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].strip()


def _shown(value: Any) -> str:
    text = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | None) else str(value)
    return text if text is not None and len(text) <= 60 else f"{str(value)[:57]}..."


# --- the settings' own types -----------------------------------------------------------------------------------------


def _models(annotation: Any) -> list[type[Settings]]:
    """The settings classes an annotation allows."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def fields_of(settings: type[Settings], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key there can be, sections included, with its field."""
    for name, field in settings.model_fields.items():
        yield prefix + name, field
        for model in _models(field.annotation):
            yield from fields_of(model, f"{prefix}{name}.")


def is_text(annotation: Any) -> bool:
    if get_origin(annotation) is Literal or _models(annotation):
        return False
    return annotation in (str, Path) or any(is_text(part) for part in get_args(annotation))


def _locate(settings: type[Settings], location: tuple[int | str, ...]) -> tuple[str, FieldInfo | None, type[Settings]]:
    """The dotted key of a pydantic location, its field (None: no such key) and the section it lies in."""
    key: list[str] = []
    field: FieldInfo | None = None
    section, models = settings, [settings]
    for part in map(str, location):
        named = [model for model in models if part in model.model_fields]
        tagged = [
            model for model in models if part in get_args(getattr(model.model_fields.get("kind"), "annotation", None))
        ]
        if not models:
            break  # a member of a union of plain types
        if named:
            section, field = named[0], named[0].model_fields[part]
            models = _models(field.annotation)
            key.append(part)
        elif tagged and len(models) > 1:
            models = tagged
        else:
            field = None
            key.append(part)
    return ".".join(key), field, models[0] if models else section


def _expected(field: FieldInfo) -> str:
    return _expectation(field.annotation, field.metadata)


def _expectation(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """What a setting accepts, in words: `auto, all or an integer > 0`."""
    if get_origin(annotation) is Annotated:
        base, *extra = get_args(annotation)
        inner = [m for e in extra for m in (e.metadata if isinstance(e, FieldInfo) else [e])]
        return _expectation(base, [*metadata, *inner])
    if get_origin(annotation) is Literal:
        *most, last = map(str, get_args(annotation))
        return f"{', '.join(most)} or {last}" if most else last
    if _models(annotation):
        return "a section of settings"
    parts = get_args(annotation)
    if parts:
        words = [_expectation(part, metadata) for part in parts]
        words = [word for text in words for word in re.split(r", | or ", text)]
        return f"{', '.join(words[:-1])} or {words[-1]}"
    names = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "a text",
        Path: "a path",
        NoneType: "null",
    }
    bounds = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    limits = [f"{sign} {getattr(m, bound)}" for m in metadata for bound, sign in bounds.items() if hasattr(m, bound)]
    if annotation not in (int, float):
        limits = []
    return " ".join([names.get(annotation, str(annotation)), " and ".join(limits)]).strip()

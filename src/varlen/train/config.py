"""Configuration files: TOML to settings, table by table, and a sentence for every key that isn't one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from varlen.arguments import as_tokens
from varlen.errors import SettingError, SourceError
from varlen.parsed import UnreadableError, parse_toml
from varlen.regular import read_regular_text
from varlen.train.settings import TrainSettings

_Settings = TypeVar("_Settings")
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    tuple: "a list of texts",
    Mapping: "a table",
}


def read_config(path: str | Path, changes: Sequence[str] = ()) -> TrainSettings:
    """Read a configuration file."""
    try:
        table = parse_toml(read_regular_text(path))
    except OSError as error:
        raise SourceError(
            f"{path} can't be read: {error.strerror or error}; varlen train --init {path} writes an example"
        ) from None
    except ValueError as error:
        raise SourceError(f"{path} is no TOML: {error}") from None
    for change in changes:
        _put(table, change)
    return as_settings(TrainSettings, table, "")


def as_settings(kind: type[_Settings], table: Mapping[str, Any], name: str) -> _Settings:
    """Return the settings that a table holds."""
    hints = get_type_hints(kind, include_extras=True)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise SettingError(
                f"{_dotted(name, key)} is no setting; the nearest is {_nearest(key, name, known)}"
            )
    given = {key: _as_value(hints[key], value, _dotted(name, key)) for key, value in table.items()}
    for key, field in known.items():
        if key not in given and field.default is MISSING and field.default_factory is MISSING:
            what = f"the table [{key}]" if is_dataclass(hints[key]) else _dotted(name, key)
            raise SettingError(f"the configuration lacks {what}, which has no default")
    return kind(**given)


def _dotted(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _nearest(key: str, name: str, known: Iterable[str]) -> str:
    """Return the setting that was meant: one of another table that has this very name, or one that is alike."""
    hints = get_type_hints(TrainSettings)
    for table in (field.name for field in fields(TrainSettings)):
        kind = next(option for option in (hints[table], *get_args(hints[table])) if is_dataclass(option))
        if key in {field.name for field in fields(kind)}:
            return f"{table}.{key}"
    return _dotted(name, difflib.get_close_matches(key, list(known), n=1, cutoff=0.0)[0])


def _as_value(hint: Any, value: Any, key: str) -> Any:
    """Return a value as a field wants it."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    options = tuple(option for option in options if option is not NoneType)
    for option in options:
        if get_origin(option) is Annotated:
            return as_tokens(value, key)
        if is_dataclass(option):
            if isinstance(value, Mapping):
                return as_settings(option, value, key)  # type: ignore[arg-type]
        elif _fits(option, value):
            if get_origin(option) is tuple:
                return tuple(value)
            return float(value) if option is float else value
    raise SettingError(f"{key} must be {_in_words(options)}, got {_shown(value)}{_meant(options, value)}")


def _fits(option: Any, value: Any) -> bool:
    """Return whether a value of TOML is of this type: a truth value is no number, and a whole number is one."""
    origin = get_origin(option)
    if origin is Literal:
        return value in get_args(option) and isinstance(value, str)
    if origin is tuple:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if origin is not None:
        return isinstance(value, Mapping)
    if option is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, option) and (option is bool or not isinstance(value, bool))


def _in_words(options: Sequence[Any]) -> str:
    words = []
    for option in options:
        if get_origin(option) is Literal:
            words.append(" or ".join(f'"{choice}"' for choice in get_args(option)))
        else:
            words.append(
                "a table" if is_dataclass(option) else _WORDS.get(get_origin(option) or option, "a table")
            )
    return " or ".join(words)


def _meant(options: Sequence[Any], value: Any) -> str:
    """Say which choice is nearest to a text that is none of them; "" where none is near."""
    choices = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
    near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    return f'; the nearest is "{near[0]}"' if near else ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _put(table: dict[str, Any], change: str) -> None:
    """Put one "table.key=value" over a table."""
    key, equals, text = change.partition("=")
    *path, last = key.strip().split(".")
    if not (equals and path and last):
        raise SettingError(f"--set takes TABLE.KEY=VALUE, such as run.steps=100; got {change!r}")
    for part in path:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise SettingError(f"--set {change}: {part} is no table")
        table = inner
    try:
        table[last] = parse_toml(f"value = {text.strip()}")["value"]
    except UnreadableError:
        table[last] = text.strip()

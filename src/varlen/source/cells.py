"""Cells of Arrow columns as the Python values that their types mean.

`arrow.json` (`datasets.Json`) holds JSON's values as text, alone or within lists, structs and maps, and a map is an
object; `to_pylist` gives the text, and a list of pairs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from varlen.errors import SourceError

Decode = Callable[[Any], Any]
_JSON = "arrow.json"


@dataclass(frozen=True, slots=True)
class NotJson:
    """A cell of JSON type that holds something else."""

    said: str


@dataclass(frozen=True, slots=True)
class _Said:
    """A value whose nulls are its author's, and no keys that other rows have."""

    value: Any


def refuse(why: str) -> NoReturn:
    """Say why a row can't be used.

    Raises:
        SourceError: always.
    """
    raise SourceError(why)


class _UnreadableError(Exception):
    """A cell can't be decoded; says why."""


def decode_column(type_: Any, values: list[Any], prune: Decode | None) -> list[Any]:
    """Return the cells of a column as what its type means.

    Args:
        type_: of the column, in Arrow's words.
        values: of the column, as `to_pylist` gives them.
        prune: takes away what a cell holds only since other rows do; JSON's own nulls and those of maps stay.
    """
    decode = _decoder(type_)
    if decode is None:
        return values if prune is None else [prune(value) for value in values]
    found: list[Any] = []
    for value in values:
        try:
            cell = decode(value)
            found.append(_plain(cell if prune is None else prune(cell)))
        except _UnreadableError as error:
            found.append(NotJson(str(error)))
    return found


def _decoder(type_: Any) -> Decode | None:
    """Return what decodes the values of a type; None where they are what they mean."""
    import pyarrow as pa

    kinds = pa.types
    if isinstance(type_, pa.BaseExtensionType):
        return _from_json if type_.extension_name == _JSON else _decoder(type_.storage_type)
    if kinds.is_dictionary(type_) or kinds.is_run_end_encoded(type_):
        return _decoder(type_.value_type)
    if kinds.is_map(type_):
        return _map_decoder(_decoder(type_.key_type), _decoder(type_.item_type))
    if kinds.is_struct(type_):
        fields = (type_.field(index) for index in range(type_.num_fields))
        decoders = {field.name: decode for field in fields if (decode := _decoder(field.type)) is not None}
        return _struct_decoder(decoders) if decoders else None
    if getattr(type_, "value_type", None) is not None:  # lists of all kinds
        decode = _decoder(type_.value_type)
        return None if decode is None else _list_decoder(decode)
    return None


def _from_json(text: Any) -> Any:
    if text is None:
        return None
    try:
        return _Said(json.loads(text))
    except json.JSONDecodeError as error:
        raise _UnreadableError(
            f"text that is not valid JSON ({error.msg} at position {error.pos:,}), in a column of JSON"
        ) from None
    except (ValueError, RecursionError, TypeError):
        raise _UnreadableError(
            "text with a number of too many digits, or brackets nested too deeply, in a column of JSON"
        ) from None


def _list_decoder(decode: Decode) -> Decode:
    return lambda value: [decode(entry) for entry in value] if isinstance(value, list | tuple) else value


def _struct_decoder(decoders: dict[str, Decode]) -> Decode:
    def decode(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: decoders[key](held) if key in decoders else held for key, held in value.items()}

    return decode


def _map_decoder(of_keys: Decode | None, of_items: Decode | None) -> Decode:
    def decode(value: Any) -> Any:
        if value is None:
            return None
        pairs = [
            (of_keys(key) if of_keys else key, of_items(item) if of_items else item) for key, item in value
        ]
        keys = [key for key, _ in pairs]
        if not all(isinstance(key, str) for key in keys):
            raise _UnreadableError("a map whose keys aren't text")
        if len(set(keys)) < len(keys):
            raise _UnreadableError("a map that holds a key twice")
        return _Said(dict(pairs))

    return decode


def _plain(value: Any) -> Any:
    """Return a decoded value without marks."""
    if isinstance(value, _Said):
        return _plain_map(value.value)
    if isinstance(value, dict):
        return {key: _plain(held) for key, held in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list) else value


def _plain_map(value: Any) -> Any:
    """Return what was said; the items of a map may be marked themselves, those of JSON are not."""
    if isinstance(value, dict) and any(isinstance(held, _Said | dict | list) for held in value.values()):
        return {key: _plain(held) for key, held in value.items()}
    return value

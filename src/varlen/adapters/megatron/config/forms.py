"""A configuration in whichever form it comes: YAML, a mapping, objects with attributes, or argparse's namespace."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from varlen.counts import many
from varlen.errors import MissingExtraError, SettingError, SourceError
from varlen.parsed import UnreadableError, parse_yaml
from varlen.regular import read_regular_text

NOT_SAID = "???"
"""What OmegaConf and Hydra write where a value must still be given."""
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_LONGEST_CHAIN = 16
"""References that are followed one after the other; more are taken to go round."""
_VALUES = (str, bytes, int, float, complex, bool, list, tuple, set, frozenset, Path, type(None), type)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
_PLAIN = ("dict", "object", "Namespace", "SimpleNamespace", "DictConfig", "OrderedDict", "mappingproxy")
"""Classes whose names say nothing about what they hold."""


def open_tree(cfg: Any) -> tuple[dict[str, Any], str]:
    """Return a configuration's first level by name, and words for where it came from."""
    origin = "the configuration"
    if isinstance(cfg, Path) or (isinstance(cfg, str) and "\n" not in cfg):
        origin = str(cfg)
        cfg = _parsed(_text_of(Path(cfg)), origin)
    elif isinstance(cfg, str):
        origin = "the YAML text"
        cfg = _parsed(cfg, origin)
    found = entries(cfg, ())
    if found is None:
        raise SettingError(
            f"a configuration is a path, YAML, a mapping or an object with attributes; got {type(cfg).__name__}"
        )
    return _nested(found), origin


def entries(value: Any, wanted: Iterable[str]) -> dict[str, Any] | None:
    """Return what a mapping or an object holds, by name; None for plain values and functions."""
    if isinstance(value, Mapping):
        return {str(name): _item(value, name) for name in value}
    if isinstance(value, (*_VALUES, *_FUNCTIONS)) or hasattr(value, "__array__"):
        return None
    names = [field.name for field in fields(value)] if is_dataclass(value) else []
    names += [name for name in getattr(value, "__dict__", {}) if not name.startswith("_")]
    names += [name for name in wanted if hasattr(type(value), name)]
    return {name: getattr(value, name) for name in dict.fromkeys(names) if hasattr(value, name)}


def class_names(value: Any) -> tuple[str, ...]:
    """Return the names of the classes that a part of a configuration is of, its own first; `_target_` of YAML."""
    if isinstance(value, Mapping):
        target = value.get("_target_") if "_target_" in value else None
        return (target.rsplit(".", 1)[-1],) if isinstance(target, str) else ()
    return tuple(kind.__name__ for kind in type(value).__mro__ if kind.__name__ not in _PLAIN)


def resolved(value: Any, tree: Mapping[str, Any]) -> Any:
    """Return what a value stands for where it names another setting, as in `${model.seq_length}`."""
    here: Any = value
    for _ in range(_LONGEST_CHAIN):
        match = _REFERENCE.fullmatch(here) if isinstance(here, str) else None
        if match is None:
            return here
        here = tree
        for name in match[1].split("."):
            held = entries(here, (name,))
            if held is None or name not in held:
                return value
            here = held[name]
    return value


def _item(mapping: Mapping[Any, Any], name: Any) -> Any:
    """Return a mapping's value; OmegaConf raises where a value must still be given."""
    try:
        return mapping[name]
    except Exception as error:
        if type(error).__name__ == "MissingMandatoryValue":
            return NOT_SAID
        raise


def _nested(found: dict[str, Any]) -> dict[str, Any]:
    """Return the same with names such as `model.seq_length` put where they belong."""
    tree = {name: value for name, value in found.items() if "." not in name}
    for name in found.keys() - tree.keys():
        *parts, last = name.split(".")
        here = tree
        for part in parts:
            held = entries(here.get(part), ()) or {}
            here[part] = dict(held)
            here = here[part]
        here[last] = found[name]
    return tree


def _text_of(path: Path) -> str:
    if path.expanduser().is_dir():
        raise SourceError(f"{path} is a folder; name the YAML file in it")
    try:
        return read_regular_text(path.expanduser())
    except FileNotFoundError:
        raise SourceError(
            f"{path}: there is no such file; name the YAML file of a training configuration"
        ) from None
    except UnicodeDecodeError:
        raise SourceError(f"{path} is no text; name the YAML file of a training configuration") from None
    except OSError as error:
        raise SourceError(f"{path} can't be read: {error.strerror or error}") from None


def _parsed(text: str, origin: str) -> dict[str, Any]:
    """Return the mapping that YAML holds; nothing that it names is imported or run."""
    try:
        found = parse_yaml(text)
    except ModuleNotFoundError:
        raise MissingExtraError("PyYAML is not installed; `pip install pyyaml` installs it") from None
    except UnreadableError as error:
        where = "" if error.line is None else f", line {error.line}"
        raise SourceError(f"{origin}{where}: not YAML that can be read safely: {error}") from None
    if found is None:
        raise SourceError(f"{origin} is empty; it must hold the settings of a training")
    if not isinstance(found, dict):
        held = many(len(found), "entry", "entries") if isinstance(found, list) else repr(found)[:60]
        raise SourceError(
            f"{origin} holds a {type(found).__name__} ({held}), not a mapping of settings such as `model:`"
        )
    return found

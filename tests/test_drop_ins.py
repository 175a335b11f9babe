"""Drop-ins have their peers' arguments, defaults, methods and attributes; what differs stands on their page."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from typing import Any

import pytest
from drop_ins import FACTS, PAIRS, Pair

TOLD = json.loads(FACTS.read_text(encoding="utf-8"))


def named(path: str) -> Any:
    """Return what stands under a dotted path: modules, and attributes of what they hold."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise LookupError(path)


def parameters_of(thing: Any) -> list[list[Any]]:
    """Name, kind and default's text of each parameter of a callable, without `self`."""
    found = list(inspect.signature(thing).parameters.values())
    return [
        [p.name, p.kind.name, None if p.default is p.empty else repr(p.default)]
        for p in found
        if p.name != "self"
    ]


def differences(pair: Pair) -> list[str]:
    """What a user of the peer would meet: sentences."""
    ours = named(pair.ours)
    if pair.theirs:
        told = TOLD[pair.ours]
        found = _of_parameters(told["parameters"], parameters_of(ours))
        for name, theirs in told.get("methods", {}).items():
            if name in ("__init__",):
                continue
            if not hasattr(ours, name):
                found.append(f"has no method {name}")
            else:
                found += [f"{name}: {each}" for each in _of_parameters(theirs, parameters_of(getattr(ours, name)))]
        return found
    theirs = named(pair.path)
    found = _of_parameters(parameters_of(theirs), parameters_of(ours))
    if inspect.isclass(theirs):
        found += [f"has no {name}" for name in dir(theirs) if not name.startswith("_") and not hasattr(ours, name)]
    return found


def _of_parameters(theirs: list[list[Any]] | None, ours: list[list[Any]]) -> list[str]:
    if theirs is None:
        return []
    named_ours = {name: (kind, default) for name, kind, default in ours}
    takes_all = {kind for _, kind, _ in ours if kind.startswith("VAR_")}
    found = []
    places = [name for name, kind, _ in ours if kind in ("POSITIONAL_OR_KEYWORD", "POSITIONAL_ONLY")]
    place = 0
    for name, kind, default in theirs:
        if kind.startswith("VAR_"):
            if kind not in takes_all:
                found.append(f"takes no {'*' if kind == 'VAR_POSITIONAL' else '**'}{name}")
            continue
        if name not in named_ours:
            if takes_all != {"VAR_POSITIONAL", "VAR_KEYWORD"} and not ("VAR_KEYWORD" in takes_all and kind == "KEYWORD_ONLY"):
                found.append(f"takes no {name}")
            continue
        if kind == "POSITIONAL_OR_KEYWORD":
            if name not in places:
                found.append(f"{name} is keyword-only")
            elif places.index(name) != place:
                found.append(f"{name} stands at place {places.index(name)}, not {place}")
            place += 1
        mine = named_ours[name][1]
        if default is not None and mine is None:
            found.append(f"{name} has no default, there {default}")
        elif default is not None and not _same(default, mine):
            found.append(f"{name} is {mine} by default, there {default}")
    required = [name for name, kind, default in ours if default is None and not kind.startswith("VAR_")]
    known = {name for name, _, _ in theirs}
    found += [f"wants {name} besides" for name in required if name not in known]
    return found


def _same(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        return bool(ast.literal_eval(one) == ast.literal_eval(other))
    except (ValueError, SyntaxError):
        return False

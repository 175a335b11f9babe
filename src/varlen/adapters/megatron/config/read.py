"""From a configuration in any form to a Reading: names found, values of their kinds, the dialect told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from varlen.adapters.megatron.config.forms import NOT_SAID, class_names, entries, open_tree, resolved
from varlen.adapters.megatron.config.reading import CONVERSATIONS, Reading
from varlen.adapters.megatron.config.settings import (
    ARGUMENTS,
    CONTAINERS,
    IN_BATCH_NEW,
    IN_BATCH_OLD,
    OFFLINE_FLAG,
    OFFLINE_NEW,
    OFFLINE_OLD,
    REAL_NEIGHBOURS,
    RENAMED,
    SECTIONS,
    SETTINGS,
)
from varlen.adapters.megatron.config.values import EXPECTED, as_kind
from varlen.adapters.megatron.dialects import NEWEST, Dialect, as_dialect
from varlen.arguments import as_count
from varlen.errors import SettingError

NEAR = 0.88
"""How alike two names must be, as difflib counts it, for one to be taken for the other mistyped."""
_OLD_NAMES, _NEW_NAMES = (OFFLINE_OLD, IN_BATCH_OLD), (OFFLINE_NEW, OFFLINE_FLAG, IN_BATCH_NEW)
_NEW_CLASSES = {
    "GPTSFTDatasetConfig",
    "DirectHFSFTDatasetConfig",
    "EnergonDatasetConfig",
    "MockVLMSFTDatasetConfig",
}
_OLD_CLASSES = {"HFDatasetConfig", *CONVERSATIONS}


@dataclass(slots=True)
class _Found:
    """What is gathered while a configuration is gone through."""

    tree: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    classes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)
    """Every name of `SETTINGS` and `CONTAINERS` that stands there, with a value or without."""
    mistyped: list[tuple[str, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def read(cfg: Any, *, dialect: str | None = None, world_size: int | None = None) -> Reading:
    """Read a configuration."""
    said = None if dialect is None else as_dialect(dialect)
    if world_size is not None:
        world_size = as_count(world_size, "world_size")
    tree, origin = open_tree(cfg)
    found = _Found(tree)
    is_arguments = not any(section in tree for section in SECTIONS)
    if is_arguments:
        _go_through_arguments(found)
    else:
        _go_through(found, "", tree)
    if not found.named:
        seen = ", ".join(list(tree)[:4]) or "nothing"
        raise SettingError(
            f"{origin} holds no settings of Megatron: it has {seen}; a configuration of Megatron-Bridge has `model`, "
            "`train` and `dataset`, Megatron-LM's arguments have `micro_batch_size` and others"
        )
    if found.wrong:
        more = f" ({len(found.wrong)} settings have values of a wrong kind)" if len(found.wrong) > 1 else ""
        raise SettingError(f"{origin}: {'; '.join(found.wrong)}{more}")
    told = said or _told(found)
    return Reading(
        values=found.values,
        spelled=found.spelled,
        dialect=told or ("0.5" if _is_old(found) else NEWEST),
        is_certain=told is not None,
        release=_release(dialect),
        is_arguments=is_arguments,
        classes=found.classes,
        held=frozenset(found.held),
        mistyped=tuple(found.mistyped),
        world_size=world_size or _counted(tree),
        origin=origin,
    )


def _go_through(found: _Found, path: str, level: Mapping[str, Any]) -> None:
    """Gather what one level holds, and what its containers hold."""
    known = CONTAINERS.get(path, path)
    near = [name for name in (*SETTINGS, *CONTAINERS) if name.rpartition(".")[0] == known]
    for last, value in level.items():
        written = f"{path}.{last}" if path else last
        name = RENAMED.get(full := f"{known}.{last}" if known else last, full)
        value = resolved(value, found.tree)
        if written in CONTAINERS:
            _go_into(found, written, value)
        elif name in SETTINGS:
            _keep(found, name, written, value)
        elif path and last not in REAL_NEIGHBOURS and not last.startswith("_"):
            _suspect(found, written, last, [other.rpartition(".")[2] for other in near])


def _go_into(found: _Found, written: str, value: Any) -> None:
    name = CONTAINERS[written]
    found.named.add(written)
    wanted = [setting.rpartition(".")[2] for setting in SETTINGS if setting.rpartition(".")[0] == name]
    wanted += [inner.rpartition(".")[2] for inner in CONTAINERS if inner.rpartition(".")[0] == written]
    inside = entries(value, wanted)
    if inside is None:
        if value is not None and value != NOT_SAID:
            found.wrong.append(f"{written} must be a mapping or an object of settings; got {value!r:.60}")
        return
    found.held.add(name)
    if written in ("model", "dataset", "peft", "dataset.preprocessing"):
        found.classes[written] = class_names(value)
    _go_through(found, written, inside)


def _go_through_arguments(found: _Found) -> None:
    for name, value in found.tree.items():
        plain = name.removeprefix("--").replace("-", "_")
        if plain in ARGUMENTS:
            for setting in ARGUMENTS[plain]:
                _keep(found, setting, name, resolved(value, found.tree))
        elif plain not in REAL_NEIGHBOURS:
            _suspect(found, name, plain, list(ARGUMENTS))
    if not found.named:
        found.mistyped.clear()


def _keep(found: _Found, name: str, written: str, value: Any) -> None:
    """Keep a setting's value, or say why it is none."""
    found.named.add(name)
    if name in found.values and written in RENAMED:
        return
    if written != name:
        found.spelled[name] = written
    if value is None or (isinstance(value, str) and value == NOT_SAID):
        found.values.setdefault(name, None)
        return
    kind = SETTINGS[name].kind
    try:
        found.values[name] = as_kind(value, kind)
    except (TypeError, ValueError):
        message = f"{written} must be {EXPECTED[kind]}; got {value!r:.60}"
        if message not in found.wrong:
            found.wrong.append(message)


def _suspect(found: _Found, written: str, last: str, near: list[str]) -> None:
    """Note a name that nobody knows where it is all but one that somebody does."""
    alike = get_close_matches(last, near, n=1, cutoff=NEAR)
    if alike:
        found.mistyped.append((written, written[: len(written) - len(last)] + alike[0]))


def _told(found: _Found) -> Dialect | None:
    """Return the dialect whose names or classes are there; a setting of 0.6 that is off is a setting of 0.6.

    An older name beside them was set by hand, and is found to be one that nobody reads.
    """
    is_new = found.named & set(_NEW_NAMES) or set(found.classes.get("dataset", ())) & _NEW_CLASSES
    return "0.6" if is_new else None


def _is_old(found: _Found) -> bool:
    """Return whether names or classes are there that release 0.6 no longer has; 0.4 and 0.5 have the same."""
    return bool(found.named & set(_OLD_NAMES) or set(found.classes.get("dataset", ())) & _OLD_CLASSES)


def _release(dialect: str | None) -> tuple[int, ...] | None:
    """Return a release that was named to the patch, or that no dialect is named after."""
    parts = ("" if dialect is None else str(dialect)).removeprefix("v").split(".")
    numbers = tuple(int(part) for part in parts if part.isdecimal())
    return numbers if len(numbers) > 2 or numbers > (0, 6) or () < numbers < (0, 4) else None


def _counted(tree: Mapping[str, Any]) -> int | None:
    """Return the number of processes, where the arguments hold it."""
    count = tree.get("world_size")
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None

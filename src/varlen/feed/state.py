"""Where a loader stands, as JSON: a few hundred bytes, the same on every rank; refused where it doesn't belong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from varlen.errors import StateError
from varlen.feed.stream import Position
from varlen.pack.lengths import as_count

VERSION = 1
_MOST = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedState:
    """What the trainer has taken: whole steps, and batches of the step that it is in."""

    step: int = 0
    """Steps before this one."""
    micro_batch: int = 0
    """Batches of this step that every rank has taken."""
    position: Position = field(default_factory=Position)
    """Of this step's first pack."""


def to_json(state: IndexedState, belongs_to: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as numbers, texts and mappings.

    Args:
        state: of a loader.
        belongs_to: settings and fingerprints that the bytes depend on, by name.
    """
    position = state.position
    return {
        "version": VERSION,
        "mode": "indexed",
        "step": state.step,
        "micro_batch": state.micro_batch,
        "epoch": position.epoch,
        "window": position.window,
        "pack": position.pack,
        "belongs_to": dict(belongs_to),
    }


def from_json(state: Mapping[str, Any], belongs_to: Mapping[str, Any], free: frozenset[str]) -> IndexedState:
    """Return a state that `to_json` wrote.

    Args:
        state: as it is, or back from JSON.
        belongs_to: of the loader that is to go on.
        free: names in it that may differ where a step begins: the world size and the size of batches.

    Raises:
        StateError: another version, mode, data or setting, named; or no state at all.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"a loader's state is a mapping, got {type(state).__name__}")
    if state.get("version") != VERSION or state.get("mode") != "indexed":
        raise StateError(
            f"the state has version {state.get('version')!r} and mode {state.get('mode')!r}; this loader reads "
            f"version {VERSION} and mode 'indexed'"
        )
    try:
        numbers = {
            name: as_count(state[name], name, 0, _MOST)
            for name in ("step", "micro_batch", "epoch", "window", "pack")
        }
        was = dict(state["belongs_to"])
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"this is no state of a loader: {type(error).__name__} {error}") from None
    _check_same(was, belongs_to, free if numbers["micro_batch"] == 0 else frozenset())
    return IndexedState(
        step=numbers["step"],
        micro_batch=numbers["micro_batch"],
        position=Position(epoch=numbers["epoch"], window=numbers["window"], pack=numbers["pack"]),
    )


def _check_same(was: Mapping[str, Any], now: Mapping[str, Any], free: frozenset[str]) -> None:
    """Require that a state belongs to this loader.

    Raises:
        StateError: it doesn't; names what differs.
    """
    differ = [name for name in {**was, **now} if name not in free and was.get(name) != now.get(name)]
    if differ:
        told = "; ".join(f"{name} was {was.get(name)!r} and is {now.get(name)!r}" for name in differ)
        raise StateError(
            f"the state was saved with other data or settings: {told}. Make the loader with those, or begin anew"
        )

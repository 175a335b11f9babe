"""What a source holds that no token stands for, each loss counted in its own unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Texts = Mapping[str, tuple[int, int]]
"""By the key of a message that holds them (`reasoning_content`, `tool_calls`): messages, and characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """Losses of some rows; those of several are added by `+`."""

    records: int = 0
    """Records that can't be used: rows, or documents of packed rows."""
    rows: int = 0
    """Rows of stretches that can't be read, where the file says how many they hold."""
    num_bytes: int = 0
    """Bytes, as stored, of stretches that can't be read and whose rows can't be counted."""
    dropped: Texts = field(default_factory=dict)
    """Texts of earlier turns that a chat template leaves out by design, since a later user turn follows."""
    unwritten: Texts = field(default_factory=dict)
    """Texts of an assistant's own turn that a chat template doesn't write; the caller allows this."""
    empty_turns: int = 0
    """Turns of an assistant that say nothing, of which the end mark alone is trained."""

    def __add__(self, other: Losses) -> Losses:
        return Losses(
            records=self.records + other.records,
            rows=self.rows + other.rows,
            num_bytes=self.num_bytes + other.num_bytes,
            dropped=_added(self.dropped, other.dropped),
            unwritten=_added(self.unwritten, other.unwritten),
            empty_turns=self.empty_turns + other.empty_turns,
        )

    def __bool__(self) -> bool:
        """Whether anything is lost."""
        return self != Losses()

    def to_json(self) -> dict[str, Any]:
        """Return plain values, keys of texts in order."""
        found = asdict(self)
        for name in ("dropped", "unwritten"):
            found[name] = {key: list(found[name][key]) for key in sorted(found[name])}
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Losses:
        """Return losses from what `to_json` gives; what is absent is nothing, as in results of version 0.1.0."""
        texts: dict[str, Any] = {
            name: {str(key): (int(count[0]), int(count[1])) for key, count in found.get(name, {}).items()}
            for name in ("dropped", "unwritten")
        }
        counts: dict[str, Any] = {name: int(found.get(name, 0)) for name in _COUNTS}
        return cls(**counts, **texts)


_COUNTS = ("records", "rows", "num_bytes", "empty_turns")


def _added(one: Texts, other: Texts) -> Texts:
    if not one or not other:
        return one or other
    pairs = {key: (one.get(key, (0, 0)), other.get(key, (0, 0))) for key in {**one, **other}}
    return {key: (a[0] + b[0], a[1] + b[1]) for key, (a, b) in pairs.items()}

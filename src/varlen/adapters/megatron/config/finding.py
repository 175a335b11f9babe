"""How a rule says what it found, in the configuration's own spelling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from varlen.adapters.megatron.config.reading import Reading, as_written
from varlen.adapters.megatron.config.report import ConfigFinding, Kind, Outcome

Rule: TypeAlias = Callable[[Reading], Iterator[ConfigFinding]]
"""A rule goes over one reading, and yields what breaks it."""


def found(
    reading: Reading,
    kind: Kind,
    setting: str,
    *,
    limit: str,
    what: str,
    outcome: Outcome,
    changes: Mapping[str, Any] | None = None,
    fix: str | None = None,
    seen: str | None = None,
) -> ConfigFinding:
    """Return a finding; an error unless it is advice."""
    mended = dict(changes or {})
    written = ", ".join(f"{reading.spell(name)} = {as_written(value)}" for name, value in mended.items())
    return ConfigFinding(
        kind=kind,
        level="warning" if outcome == "advice" else "error",
        outcome=outcome,
        setting=reading.spell(setting),
        seen=seen or reading.shown(setting),
        limit=limit,
        what=what,
        fix="; ".join(part for part in (fix, written) if part),
        changes=mended,
    )

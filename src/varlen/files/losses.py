"""What a source holds that no token stands for, each loss counted in its own unit, and said in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from varlen.counts import many
from varlen.types import Ledger

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
    cut_files: int = 0
    """Files that end too early: what stood behind their end can't be counted."""
    dropped: Texts = field(default_factory=dict)
    """Texts of earlier turns that a chat template leaves out by design, since a later user turn follows."""
    unwritten: Texts = field(default_factory=dict)
    """Texts of an assistant's own turn that a chat template doesn't write; the caller allows this."""
    empty_turns: int = 0
    """Turns of an assistant that say nothing, of which the end mark alone is trained."""

    def __add__(self, other: Losses) -> Losses:
        if self is NO_LOSSES or other is NO_LOSSES:
            return other if self is NO_LOSSES else self
        return Losses(
            records=self.records + other.records,
            rows=self.rows + other.rows,
            num_bytes=self.num_bytes + other.num_bytes,
            cut_files=self.cut_files + other.cut_files,
            dropped=_added(self.dropped, other.dropped),
            unwritten=_added(self.unwritten, other.unwritten),
            empty_turns=self.empty_turns + other.empty_turns,
        )

    def __sub__(self, before: Losses) -> Losses:
        """Return what has come since."""
        return Losses(
            records=self.records - before.records,
            rows=self.rows - before.rows,
            num_bytes=self.num_bytes - before.num_bytes,
            cut_files=self.cut_files - before.cut_files,
            dropped=_since(self.dropped, before.dropped),
            unwritten=_since(self.unwritten, before.unwritten),
            empty_turns=self.empty_turns - before.empty_turns,
        )

    def __bool__(self) -> bool:
        """Whether anything is lost."""
        return self is not NO_LOSSES and self != NO_LOSSES

    @property
    def of_reading(self) -> int:
        """Whatever can't be read, in all units: 0 where everything is read."""
        return self.records + self.rows + self.num_bytes + self.cut_files

    @property
    def num_rows(self) -> int:
        """Rows that are known to be lost, those of stretches that can't be read among them."""
        return self.records + self.rows

    def numbers(self) -> list[int]:
        """Return all counts."""
        texts = [count for found in (self.dropped, self.unwritten) for count in found.values()]
        counts = [self.records, self.rows, self.num_bytes, self.cut_files, self.empty_turns]
        return [*counts, *(number for count in texts for number in count)]

    def stretches(self) -> list[str]:
        """Say what can't be read of whole stretches of files, one sentence a unit; these losses come first."""
        found = []
        if self.rows:
            found.append(f"{many(self.rows, 'row')} of damaged stretches can't be read")
        if self.num_bytes:
            found.append(f"{many(self.num_bytes, 'byte')} can't be read, nor the rows in them be counted")
        if self.cut_files:
            found.append(
                f"{many(self.cut_files, 'file ends', 'files end')} too early: what is missing can't be counted"
            )
        return found

    def texts(self) -> list[str]:
        """Say which texts of messages aren't written by a chat template, one sentence a key."""
        whys = (
            (self.unwritten, "aren't written by the chat template (allowed)"),
            (self.dropped, "are left out by the chat template, as a later user turn follows"),
        )
        found = [
            f"{many(messages, 'message')}: {many(characters, 'character')} of `{key}` {why}"
            for texts, why in whys
            for key, (messages, characters) in sorted(texts.items())
        ]
        if self.empty_turns:
            turns = many(self.empty_turns, "turn of the assistant says", "turns of the assistant say")
            found.append(f"{turns} nothing: the end mark alone is trained")
        return found

    def sentences(self) -> list[str]:
        """Say all that is lost, what can't be read first."""
        records = [f"{many(self.records, 'record')} skipped"] if self.records else []
        return [*self.stretches(), *records, *self.texts()]

    def to_json(self) -> dict[str, Any]:
        """Return plain values, keys of texts in order."""
        dropped, unwritten = (
            {key: list(texts[key]) for key in sorted(texts)} for texts in (self.dropped, self.unwritten)
        )
        return {
            "records": self.records,
            "rows": self.rows,
            "num_bytes": self.num_bytes,
            "cut_files": self.cut_files,
            "dropped": dropped,
            "unwritten": unwritten,
            "empty_turns": self.empty_turns,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Losses:
        """Return losses from what `to_json` gives; what is absent is nothing, as in results of version 0.1.0."""
        if not any(found.values()):
            return NO_LOSSES
        texts: dict[str, Any] = {
            name: {str(key): (int(count[0]), int(count[1])) for key, count in found.get(name, {}).items()}
            for name in ("dropped", "unwritten")
        }
        return cls(
            records=int(found.get("records", 0)),
            rows=int(found.get("rows", 0)),
            num_bytes=int(found.get("num_bytes", 0)),
            cut_files=int(found.get("cut_files", 0)),
            dropped=texts["dropped"],
            unwritten=texts["unwritten"],
            empty_turns=int(found.get("empty_turns", 0)),
        )


NO_LOSSES = Losses()


def total(found: Iterable[Losses]) -> Losses:
    """Return the sum of losses."""
    return sum(found, NO_LOSSES)


def stored(found: Mapping[str, Any]) -> Losses:
    """Return the losses of a shard or a manifest; version 0.1.0 wrote the number of records alone."""
    losses = found.get("losses")
    return Losses(records=int(found.get("num_skipped", 0))) if losses is None else Losses.from_json(losses)


def nothing_read(paths: Sequence[str], documents: int, losses: Losses, example: str | None) -> str:
    """Say that files hold nothing to train on, what became of it, and of what can't be read one example."""
    more = f" and {many(len(paths) - 1, 'more file')}" if len(paths) > 1 else ""
    why = many(documents, "empty document") if documents else "no document"
    such_as = [f"the first: {example}"] if example else []
    return "; ".join([f"{paths[0]}{more} hold{'' if more else 's'} {why}", *losses.sentences(), *such_as])


def nothing_left(ledger: Ledger, losses: Losses, capacity: int, epochs: int = 1) -> str:
    """Say what became of everything, where nothing is left to train on."""
    times = f" in {many(epochs, 'epoch')}" if epochs > 1 and ledger.documents_in else ""
    found = [f"{many(ledger.documents_in, 'document')} read{times}"]
    whys = (
        (ledger.dropped_documents, f"longer than {many(capacity, 'token')} and dropped"),
        (ledger.empty_documents, "without a token"),
    )
    found += [f"{count:,} {why}" for count, why in whys if count]
    if ledger.packed:
        found.append(f"{many(ledger.packed, 'token')} packed, none of which has a label")
    return "; ".join([", ".join(found), *losses.sentences()])


def _added(one: Texts, other: Texts) -> Texts:
    if not one or not other:
        return one or other
    pairs = {key: (one.get(key, (0, 0)), other.get(key, (0, 0))) for key in {**one, **other}}
    return {key: (a[0] + b[0], a[1] + b[1]) for key, (a, b) in pairs.items()}


def _since(now: Texts, before: Texts) -> Texts:
    counts = {
        key: (n[0] - before.get(key, (0, 0))[0], n[1] - before.get(key, (0, 0))[1]) for key, n in now.items()
    }
    return {key: count for key, count in counts.items() if any(count)}

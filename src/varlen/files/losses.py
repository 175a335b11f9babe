"""Input that doesn't become tokens: each kind of loss counted in its own unit, and described in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from varlen.counts import many
from varlen.types import Ledger

_COUNTS = ("records", "rows", "num_bytes", "cut_files", "empty_turns")
Texts = Mapping[str, tuple[int, int]]  # (messages, characters) by message key, such as `reasoning_content`


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """Losses of some rows; `+` adds them up."""

    records: int = 0  # unusable records: rows, or documents of packed rows
    rows: int = 0  # rows of unreadable stretches, where the file says how many they hold
    num_bytes: int = 0  # stored bytes of unreadable stretches whose rows can't be counted
    cut_files: int = 0  # truncated files: what is missing can't be counted
    # Texts of earlier turns that a chat template drops by design, since a later user turn follows.
    dropped: Texts = field(default_factory=dict)
    # Texts of an assistant's turn that a chat template doesn't write, which the caller allows.
    unwritten: Texts = field(default_factory=dict)
    empty_turns: int = 0  # assistant turns without text, of which only the end mark is trained

    def __add__(self, other: Losses) -> Losses:
        if self is NO_LOSSES or other is NO_LOSSES:
            return other if self is NO_LOSSES else self
        return self._plus(other, 1)

    def __sub__(self, before: Losses) -> Losses:
        return self._plus(before, -1)

    def _plus(self, other: Losses, sign: int) -> Losses:
        counts: dict[str, Any] = {n: getattr(self, n) + sign * getattr(other, n) for n in _COUNTS}
        dropped = _sum_of(self.dropped, other.dropped, sign)
        return Losses(**counts, dropped=dropped, unwritten=_sum_of(self.unwritten, other.unwritten, sign))

    def __bool__(self) -> bool:
        return self is not NO_LOSSES and self != NO_LOSSES

    @property
    def of_reading(self) -> int:
        """Everything that can't be read, in all units: 0 where everything was read."""
        return self.records + self.rows + self.num_bytes + self.cut_files

    @property
    def num_rows(self) -> int:
        """Rows known to be lost, including those of unreadable stretches."""
        return self.records + self.rows

    def numbers(self) -> list[int]:
        """Return all counts in one list."""
        texts = [count for texts_by_key in (self.dropped, self.unwritten) for count in texts_by_key.values()]
        counts = [self.records, self.rows, self.num_bytes, self.cut_files, self.empty_turns]
        return [*counts, *(number for count in texts for number in count)]

    def stretches(self) -> list[str]:
        """Describe unreadable stretches of files, one sentence per unit; these losses are listed first."""
        sentences = []
        if self.rows:
            sentences.append(f"{many(self.rows, 'row')} of damaged stretches can't be read")
        if self.num_bytes:
            sentences.append(f"{many(self.num_bytes, 'byte')} can't be read, nor the rows in them be counted")
        if self.cut_files:
            sentences.append(
                f"{many(self.cut_files, 'file ends', 'files end')} too early: what is missing can't be counted"
            )
        return sentences

    def texts(self) -> list[str]:
        """Describe the texts of messages that a chat template doesn't write, one sentence per key."""
        whys = (
            (self.unwritten, "aren't written by the chat template (allowed)"),
            (self.dropped, "are left out by the chat template, as a later user turn follows"),
        )
        sentences = [
            f"{many(messages, 'message')}: {many(characters, 'character')} of `{key}` {why}"
            for texts, why in whys
            for key, (messages, characters) in sorted(texts.items())
        ]
        if self.empty_turns:
            turns = many(self.empty_turns, "turn of the assistant says", "turns of the assistant say")
            sentences.append(f"{turns} nothing: the end mark alone is trained")
        return sentences

    def sentences(self) -> list[str]:
        """Describe all losses, unreadable input first."""
        records = [f"{many(self.records, 'record')} skipped"] if self.records else []
        return [*self.stretches(), *records, *self.texts()]

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with sorted keys."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("dropped", "unwritten"):
            values[name] = {key: list(values[name][key]) for key in sorted(values[name])}
        return values

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Losses:
        """Return losses from what `to_json` returned; missing entries are 0, as in results of version 0.1.0."""
        if not any(stored.values()):
            return NO_LOSSES
        values: dict[str, Any] = {name: int(stored.get(name, 0)) for name in _COUNTS}
        values |= {
            name: {str(key): (int(count[0]), int(count[1])) for key, count in stored.get(name, {}).items()}
            for name in ("dropped", "unwritten")
        }
        return cls(**values)


NO_LOSSES = Losses()


def total(losses: Iterable[Losses]) -> Losses:
    """Add losses up."""
    return sum(losses, NO_LOSSES)


def stored(record: Mapping[str, Any]) -> Losses:
    """Return the losses stored in a shard or a manifest; version 0.1.0 stored only the number of records."""
    losses = record.get("losses")
    return Losses(records=int(record.get("num_skipped", 0))) if losses is None else Losses.from_json(losses)


def nothing_read(paths: Sequence[str], documents: int, losses: Losses, example: str | None) -> str:
    """Return the error message for files without a token: what was lost, and an unreadable record."""
    more = f" and {many(len(paths) - 1, 'more file')}" if len(paths) > 1 else ""
    why = many(documents, "empty document") if documents else "no document"
    such_as = [f"the first: {example}"] if example else []
    return "; ".join([f"{paths[0]}{more} hold{'' if more else 's'} {why}", *losses.sentences(), *such_as])


def nothing_left(ledger: Ledger, losses: Losses, capacity: int, epochs: int = 1) -> str:
    """Account for every document where nothing is left to train on."""
    times = f" in {many(epochs, 'epoch')}" if epochs > 1 and ledger.documents_in else ""
    facts = [f"{many(ledger.documents_in, 'document')} read{times}"]
    whys = (
        (ledger.dropped_documents, f"longer than {many(capacity, 'token')} and dropped"),
        (ledger.empty_documents, "without a token"),
    )
    facts += [f"{count:,} {why}" for count, why in whys if count]
    if ledger.packed:
        facts.append(f"{many(ledger.packed, 'token')} packed, none of which has a label")
    return "; ".join([", ".join(facts), *losses.sentences()])


def _sum_of(first: Texts, second: Texts, sign: int) -> Texts:
    """Add `sign` times the second counts to the first; keys with counts of 0 are dropped."""
    if not second:
        return first
    pairs = {key: (first.get(key, (0, 0)), second.get(key, (0, 0))) for key in {**first, **second}}
    sums = {key: (a[0] + sign * b[0], a[1] + sign * b[1]) for key, (a, b) in pairs.items()}
    return {key: count for key, count in sums.items() if any(count)}

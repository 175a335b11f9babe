"""Input that doesn't become tokens: each kind of loss counted in its own unit, and described in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from varlen.counts import many
from varlen.types import Ledger

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
        """Return the losses added since `before`."""
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
    def from_json(cls, stored: Mapping[str, Any]) -> Losses:
        """Return losses from what `to_json` returned; missing entries are 0, as in results of version 0.1.0."""
        if not any(stored.values()):
            return NO_LOSSES
        texts: dict[str, Any] = {
            name: {str(key): (int(count[0]), int(count[1])) for key, count in stored.get(name, {}).items()}
            for name in ("dropped", "unwritten")
        }
        return cls(
            records=int(stored.get("records", 0)),
            rows=int(stored.get("rows", 0)),
            num_bytes=int(stored.get("num_bytes", 0)),
            cut_files=int(stored.get("cut_files", 0)),
            dropped=texts["dropped"],
            unwritten=texts["unwritten"],
            empty_turns=int(stored.get("empty_turns", 0)),
        )


NO_LOSSES = Losses()


def total(losses: Iterable[Losses]) -> Losses:
    """Add losses up."""
    return sum(losses, NO_LOSSES)


def stored(record: Mapping[str, Any]) -> Losses:
    """Return the losses stored in a shard or a manifest; version 0.1.0 stored only the number of records."""
    losses = record.get("losses")
    return Losses(records=int(record.get("num_skipped", 0))) if losses is None else Losses.from_json(losses)


def nothing_read(paths: Sequence[str], documents: int, losses: Losses, example: str | None) -> str:
    """Say that files hold nothing to train on, what was lost, and one example of an unreadable record."""
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


def _added(first: Texts, second: Texts) -> Texts:
    if not first or not second:
        return first or second
    pairs = {key: (first.get(key, (0, 0)), second.get(key, (0, 0))) for key in {**first, **second}}
    return {key: (a[0] + b[0], a[1] + b[1]) for key, (a, b) in pairs.items()}


def _since(now: Texts, before: Texts) -> Texts:
    counts = {
        key: (n[0] - before.get(key, (0, 0))[0], n[1] - before.get(key, (0, 0))[1]) for key, n in now.items()
    }
    return {key: count for key, count in counts.items() if any(count)}

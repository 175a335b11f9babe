"""Which columns of a file hold its documents: found by their usual names, or named by the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from varlen.errors import SettingError, SourceError
from varlen.files.rows import listed

Kind = Literal["tokens", "messages", "prompt", "instruction", "text"]

# Columns that a row of each kind must have, in order of preference: token ids before the text they came from.
_NEEDED: dict[Kind, tuple[str, ...]] = {
    "tokens": ("input_ids",),
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
_OPTIONAL: dict[Kind, tuple[str, ...]] = {
    "tokens": (
        "labels",
        "loss_mask",
        "loss_weights",
        "attention_mask",
        "seq_lengths",
        "seq_start_id",
        "position_ids",
    ),
    "messages": ("tools", "system", "chat_template_kwargs"),
    "prompt": ("label", "system", "tools", "chat_template_kwargs"),
    "instruction": ("context", "history", "system", "chat_template_kwargs"),
    "text": (),
}
# Roles that some objects of a file have and others lack.
_OF_SOME_ROWS = ("tools", "system", "context", "history", "label", "chat_template_kwargs")
# Alternative names, used where the first is absent. `completion_mask` and `assistant_masks` are TRL's. Alpaca's
# `input` is the context of an instruction; in files of `input` and `output` it is the whole question.
_ALSO_CALLED = {
    "messages": ("conversations", "conversation"),
    "tools": ("functions",),
    "system": ("system_prompt",),
    "loss_mask": ("completion_mask", "assistant_masks"),
    "instruction": ("query", "question", "prompt", "input"),
    "context": ("input",),
    "output": ("response", "answer", "completion"),
}
# Column names that only documents have, so that they distinguish a row from any other object.
DOCUMENT_FIELDS = frozenset(
    spelling
    for kind in _NEEDED
    for role in _NEEDED[kind]
    if role not in ("instruction", "output")
    for spelling in (role, *_ALSO_CALLED.get(role, ()))
) | {"instruction", "output", "response", "chosen", "rejected"}
_MOST_FOUND = 256
_FOUND: dict[tuple[Any, ...], Columns] = {}
ROLES = tuple(dict.fromkeys(role for kind in _NEEDED for role in (*_NEEDED[kind], *_OPTIONAL[kind])))


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The kind of data in a file's rows, and the columns that hold it."""

    kind: Kind
    names: Mapping[str, str]  # column name by role, such as {"text": "body"}
    passed_over: frozenset[str] = frozenset()  # usual names replaced by the caller
    fields: Fields = field(init=False)  # what is read from rows that are objects

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", self._fields())

    def _fields(self) -> Fields:
        return Fields(
            needed=tuple(
                dict.fromkeys(name for role, name in self.names.items() if role not in _OF_SOME_ROWS)
            ),
            optional=tuple(name for role, name in self.names.items() if role in _OF_SOME_ROWS),
            refused=frozenset(
                (
                    *(
                        name
                        for role in _OPTIONAL[self.kind]
                        if role not in self.names or (role == "context" and self.kind == "instruction")
                        for name in _spellings(role)
                    ),
                    *self._instead(),
                    *(
                        name
                        for role in ("tools", "system")
                        if role in self.names
                        for name in _spellings(role)
                    ),
                )
            ).difference(self.names.values(), self.passed_over),
        )

    def _instead(self) -> tuple[str, ...]:
        """Return the spellings preferred to the instruction's column: a row with one of them holds something else."""
        names = _spellings("instruction") if self.kind == "instruction" else ()
        chosen = self.names.get("instruction", "")
        return names[: names.index(chosen)] if chosen in names else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """The fields that are read from rows that are objects, each with keys of its own."""

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()  # None where a row lacks the key
    # Keys that the inspected rows lack, so no other row may have them: silently ignoring a mask would be worse than
    # failing.
    refused: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """All fields that are read."""
        return self.needed + self.optional


def check_named(named: Mapping[str, str]) -> None:
    """Raise if a column is named for an unknown role."""
    unknown = [role for role in named if role not in ROLES]
    if unknown:
        raise SettingError(f"columns can be named for {', '.join(ROLES)}; got {unknown[0]!r}")


def find_columns(
    present: Sequence[str],
    named: Mapping[str, str],
    where: str,
    *,
    are_fields: bool = False,
    are_a_line: bool = False,
) -> Columns:
    """Choose the columns that hold documents."""
    key = (tuple(present), tuple(named.items()), are_fields)
    columns = _FOUND.get(key)  # many files have the same columns
    if columns is None:
        columns = _find(present, named, where, are_fields=are_fields, are_a_line=are_a_line)
        if len(_FOUND) >= _MOST_FOUND:
            _FOUND.clear()
        _FOUND[key] = columns
    return columns


def _find(
    present: Sequence[str], named: Mapping[str, str], where: str, *, are_fields: bool, are_a_line: bool
) -> Columns:
    """Choose the columns of a combination seen for the first time; arguments as in `find_columns`."""
    absent = [(role, name) for role, name in named.items() if name not in present]
    if absent:
        role, name = absent[0]
        raise SourceError(f"{where} has no column `{name}` (named for {role}); it has {listed(present)}")
    kinds = [kind for kind in _NEEDED if any(role in named for role in (*_NEEDED[kind], *_OPTIONAL[kind]))]
    for kind in kinds or _NEEDED:
        names = {role: _name(role, named, present) for role in (*_NEEDED[kind], *_OPTIONAL[kind])}
        if all(names[role] for role in _NEEDED[kind]):
            masks = [name for name in _ALSO_CALLED["loss_mask"] if name in present]
            if len(masks) > 1 and names.get("loss_mask") in masks and "loss_mask" not in named:
                raise SourceError(
                    f"{where} has {listed(masks)}, two masks of what is trained on; name one: "
                    f"--column loss_mask={masks[0]}"
                )
            if kind == "instruction":
                names["context"] = _context(names, named, present, where, are_fields=are_fields)
            if are_fields:
                names |= {
                    role: names[role] or role for role in _OF_SOME_ROWS if role in names and role != "context"
                }
            return Columns(
                kind=kind,
                names={role: name for role, name in names.items() if name},
                passed_over=frozenset(name for role in named for name in _spellings(role)),
            )
    _refuse_others(present, where)
    line = " in its first line, where names must stand" if are_a_line else ""
    raise SourceError(
        f"{where} has no column of documents: need `text`, `messages`, `prompt` and `completion`, "
        "`instruction` and `output`, or `input_ids`, "
        f"found {listed(present)}{line}; name yours: --column text=NAME (columns={{'text': NAME}}), "
        "messages=NAME for chats, or input_ids=NAME for tokens"
    )


def _refuse_others(present: Sequence[str], where: str) -> None:
    """Raise if the rows are a known kind of data other than documents."""
    if list(present) == ["indices"]:
        raise SourceError(
            f"{where} has the column `indices` alone: it says which rows of another file are meant and in which "
            "order, as `datasets` keeps them after select, shuffle or sort; load the data set with datasets, call "
            "flatten_indices() and save it again"
        )
    pairs = [(name, _other_of(name)) for name in present if _other_of(name) in present]
    if pairs:
        better, worse = pairs[0]
        role = (
            "input_ids"
            if better.endswith("input_ids")
            else "completion"
            if "prompt" in present
            else "messages"
        )
        raise SourceError(
            f"{where} holds preference pairs (`{better}` and `{worse}`), two answers of which one is better, and not "
            "documents: to train on the better ones alone, name them, as in "
            f"--column {role}={better} (columns={{'{role}': '{better}'}}; text={better} where they are texts); to "
            "train on pairs, use varlen.adapters.trl.dpo.PackedDPOTrainer"
        )


def _other_of(name: str) -> str:
    """Return the name of the rejected column beside a chosen one; "" for other names."""
    return name.replace("chosen", "rejected") if "chosen" in name else ""


def _spellings(role: str) -> tuple[str, ...]:
    """Return the possible column names of a role, in order of preference."""
    return (role, *_ALSO_CALLED.get(role, ()))


def _name(role: str, named: Mapping[str, str], present: Sequence[str]) -> str | None:
    for name in (named.get(role), *_spellings(role)):
        if name in present:
            return name
    return None


def _context(
    names: Mapping[str, str | None],
    named: Mapping[str, str],
    present: Sequence[str],
    where: str,
    *,
    are_fields: bool,
) -> str | None:
    """Return the column of the instruction's context; of objects, the first row may lack it."""
    if "context" in named:
        return named["context"]
    known = [name for name in ("context", "input") if name != names["instruction"]]
    matches = [name for name in known if name in present]
    if len(matches) > 1:
        raise SourceError(
            f"{where} has {listed(matches)}, and both may be what an instruction is about; name one: "
            f"--column context={matches[0]}"
        )
    return matches[0] if matches else known[-1] if are_fields else None

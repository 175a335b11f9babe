"""The texts of a chat as slots: its shape, and the same chat with a mark of private-use characters for each text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from varlen.errors import SourceError

Shape = tuple[tuple[Any, ...], ...]
"""Of each message what decides how it is written, but for its texts."""

Render = Callable[[list[dict[str, Any]], bool], str]
"""From messages of the one form, and whether to end with a generation prompt, to text."""

_THOUGHTS = "reasoning_content"
_ALWAYS = {"role", "content", _THOUGHTS, "tool_calls"}
_IDS = ("id", "tool_call_id")
_OF_CALLS = ("name", "key", "value", "arguments")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A place for one text of a chat."""

    message: int
    key: str
    """Of the message; of a call `name` or `id`, and `key` and `value`, which stand for its arguments, or `arguments`
    where those are one JSON text."""
    call: int = -1
    """Of the message's calls; -1: of the message itself."""
    part: int = -1
    """Of a content that is given as parts."""

    @property
    def is_argument(self) -> bool:
        """Whether it stands for arguments that are no one text, which are as many as a row has."""
        return self.key in ("key", "value") and self.call >= 0

    @property
    def is_said(self) -> bool:
        """Whether it stands for what an assistant says."""
        return self.key in (_OF_CALLS if self.call >= 0 else ("content", _THOUGHTS))

    def value_in(self, messages: Sequence[dict[str, Any]]) -> str | dict[str, Any]:
        """Return what stands in its place in a chat of the shape: a text, or the arguments of a call."""
        message = messages[self.message]
        if self.part >= 0:
            return str(message[self.key][self.part]["text"])
        if self.call < 0:
            return str(message[self.key])
        call = message["tool_calls"][self.call]
        if self.key == "arguments":
            return call["function"]["arguments"]  # type: ignore[no-any-return]
        return str(call["id"] if self.key == "id" else call["function"]["name"])


@dataclass(slots=True)
class _Marked:
    """Messages of a shape with marks for texts."""

    slot: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    ids: dict[str, str] = field(default_factory=dict)

    def mark(self, slot: Slot, digits: int = 1) -> str:
        self.slots.append(slot)
        return f"{self.slot}{len(self.slots) - 1:0{digits}d}{self.slot}"

    def mark_id(self, slot: Slot, value: str) -> str:
        """Return a mark for an id: nine characters, as Mistral's templates ask for, the same for the same id."""
        if value not in self.ids:
            self.ids[value] = self.mark(slot, 7)
        return self.ids[value]


def shape_of(messages: Sequence[dict[str, Any]], source: str) -> Shape | None:
    """Return the shape of a chat; None where it holds more than texts and calls.

    Keys that the source of the template doesn't speak of don't matter.
    """
    shape: list[tuple[Any, ...]] = []
    ids: dict[str, int] = {}
    for message in messages:
        content = message.get("content")
        if len(message) == 2 and type(content) is str:
            shape.append((message["role"], 1))
            continue
        held: list[Any] = [message["role"], 1 if _is_slot(message, "content") else (0, content)]
        if type(content) is list:
            held[1] = ("parts", *(bool(part["text"].strip()) or part["text"] for part in content))
        thoughts = message.get(_THOUGHTS)
        if thoughts is not None:
            held.append((_THOUGHTS, _is_slot(message, _THOUGHTS) or thoughts))
        for key, value in message.items():
            if key in _ALWAYS or key not in source:
                continue
            if type(value) is not str or not value:
                return None
            held.append((key, ids.setdefault(value, len(ids)) if key in _IDS else -1))
        for call in message.get("tool_calls", ()):
            own = _call_shape(call, ids)
            if own is None:
                return None
            held.append(own)
        shape.append(tuple(held))
    return tuple(shape)


def _is_slot(message: dict[str, Any], key: str) -> bool:
    """Whether a text stands in a slot; one that is blank beside others is told by templates, and is none."""
    value = message.get(key)
    if not isinstance(value, str):
        return False
    return bool(value.strip()) or (
        key == "content" and not (message.get("tool_calls") or _THOUGHTS in message)
    )


def _call_shape(call: dict[str, Any], ids: dict[str, int]) -> tuple[Any, ...] | None:
    """Return the shape of a call; None where it has more than a name, arguments and an id."""
    function = call["function"]
    if len(function) != 2 or not isinstance(function["arguments"], dict):
        return None
    held: list[Any] = ["call", bool(function["arguments"])]
    for key, value in call.items():
        if key == "function" or (key == "type" and value == "function"):
            continue
        if type(value) is not str or not value:
            return None
        held.append((key, ids.setdefault(value, len(ids)) if key == "id" else value))
    return tuple(held)


def masked(
    messages: Sequence[dict[str, Any]], slot: str, source: str, *, arguments: bool
) -> tuple[Any, list[Slot]]:
    """Return messages of some shape with a mark in place of every text, and what each mark stands for.

    Args:
        messages: in the one form, of a shape.
        slot: a character that stands nowhere.
        source: of the template.
        arguments: mark those of calls too, of which one is given in place of all; else they stay.
    """
    made = _Marked(slot)
    for number, message in enumerate(messages):
        given: dict[str, Any] = {}
        for key in ("role", _THOUGHTS, *message):
            if key in given or key not in message:
                continue
            value = message[key]
            if key == "tool_calls":
                value = [_masked_call(made, number, *one, arguments) for one in enumerate(value)]
            elif key == "content" and isinstance(value, list):
                value = [_masked_part(made, number, *one) for one in enumerate(value)]
            elif key in _IDS and isinstance(value, str):
                value = made.mark_id(Slot(message=number, key=key), value)
            elif key != "role" and _is_slot(message, key) and (key in _ALWAYS or key in source):
                value = made.mark(Slot(message=number, key=key))
            given[key] = value
        made.messages.append(given)
    return made.messages, made.slots


def _masked_part(made: _Marked, message: int, number: int, part: dict[str, Any]) -> dict[str, Any]:
    is_blank = not part["text"].strip()
    return (
        part if is_blank else {**part, "text": made.mark(Slot(message=message, key="content", part=number))}
    )


def _masked_call(
    made: _Marked, message: int, number: int, call: dict[str, Any], arguments: bool
) -> dict[str, Any]:
    given: Any = call["function"]["arguments"]
    name = made.mark(Slot(message=message, key="name", call=number))
    if arguments and given:
        key, value = (made.mark(Slot(message=message, key=key, call=number)) for key in ("key", "value"))
        given = {key: value}
    marked = {**call, "function": {**call["function"], "name": name, "arguments": given}}
    if isinstance(call.get("id"), str):
        marked["id"] = made.mark_id(Slot(message=message, key="id", call=number), call["id"])
    return marked


def cut(text: str, slot: str) -> tuple[list[str], list[int]]:
    """Cut a rendering at its marks; return what stands between them, and their numbers."""
    parts = re.split(f"{slot}(\\d+){slot}", text)
    return parts[::2], [int(part) for part in parts[1::2]]


def try_render(render: Render, messages: list[dict[str, Any]], prompts: bool) -> str | None:
    """Render what a template may refuse, such as a chat that ends early."""
    try:
        return render(messages, prompts)
    except SourceError:
        return None


def free_character(text: str) -> str:
    """Return a private-use character that doesn't stand in a text.

    Raises:
        SourceError: all of them do.
    """
    free = next((c for c in map(chr, range(0xF0000, 0xF0008)) if c not in text), "")
    if not free:
        used = set(text)
        free = next((c for c in map(chr, range(0xF0008, 0xFFFFE)) if c not in used), "")
    if not free:
        raise SourceError("the chat holds all 65,534 private-use characters of plane 15, which no text does")
    return free

"""What of an assistant's messages a chat template doesn't write, by message, key and characters.

A template is a program: it may drop thoughts, calls, or what stands before `</think>`, without an error. Where a text
is the skeleton of its shape filled in, the skeleton says what has no slot. Elsewhere each text is looked for in the
turn that it belongs to; JSON counts by value, and white space at either end is no loss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from varlen.errors import SourceError
from varlen.source.chats.skeleton import Turn
from varlen.source.losses import Losses

_THOUGHTS = "reasoning_content"
_INLINE = "content (<think>)"
"""Thoughts that stand within a content."""
_SHOWN = 40
_SPACES = re.compile(r"\s+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """A text of an assistant's message that isn't written."""

    message: int
    key: str
    text: str
    by_design: bool
    """It is an earlier turn's thoughts, which are written where no later user's turn follows."""


def lost_texts(
    messages: Sequence[dict[str, Any]],
    trained: Collection[int],
    turns: Mapping[int, Turn],
    said: Mapping[int, str] | None,
    alone: Callable[[int], str],
) -> Iterator[Lost]:
    """Yield the texts of trained messages that a rendering doesn't hold.

    Args:
        messages: the chat, in the one form.
        trained: index of the messages that matter.
        turns: of the skeleton of the chat's shape, by message; none where there is no skeleton.
        said: text of each message's turn, where the rendering isn't the skeleton filled in; None where it is.
        alone: returns the text of the chat up to a message.
    """
    last_user = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for number in sorted(trained):
        message, turn = messages[number], turns.get(number)
        missing = {slot.key if slot.call < 0 else "tool_calls" for slot in turn.missing} if turn else set()
        is_earlier = number < last_user
        for key in sorted(missing):
            designed = turn is not None and all(
                slot in turn.by_design
                for slot in turn.missing
                if (slot.key if slot.call < 0 else "tool_calls") == key
            )
            by_design = key == _THOUGHTS and is_earlier and designed
            yield Lost(message=number, key=key, text=_text(message, key), by_design=by_design)
        if said is None or number not in said:
            continue
        content = message.get("content")
        if len(message) == 2 and type(content) is str and content.strip() in said[number]:
            continue
        for key, text in _unfound(message, said[number], missing):
            by_design = key in (_THOUGHTS, _INLINE) and is_earlier and _stands_in(text, alone(number))
            yield Lost(message=number, key=key, text=text, by_design=by_design)


def _text(message: dict[str, Any], key: str) -> str:
    """Return the text under a key of a message, calls as JSON."""
    if key == "tool_calls":
        return "".join(_spelled(call) for call in message["tool_calls"])
    value = message[key]
    return "".join(part["text"] for part in value) if isinstance(value, list) else str(value)


def _spelled(call: dict[str, Any]) -> str:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{call['function']['name']}{text}"


def _unfound(message: dict[str, Any], turn: str, known: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield key and text of what stands nowhere in a turn, but for what is known to be missing."""
    content, thoughts = message.get("content"), message.get(_THOUGHTS)
    if content and "content" not in known:
        for text in [part["text"] for part in content] if isinstance(content, list) else [content]:
            yield from _unfound_content(text, turn)
    if thoughts and _THOUGHTS not in known and not _stands_in(thoughts, turn):
        yield _THOUGHTS, thoughts
    if "tool_calls" not in known:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            found = call["function"]["name"] in turn and (
                _holds(turn, arguments) if not isinstance(arguments, str) else arguments.strip() in turn
            )
            if not found:
                yield "tool_calls", _spelled(call)


def _unfound_content(text: str, turn: str) -> Iterator[tuple[str, str]]:
    """Yield what of a content is missing; thoughts that stand within it are told apart."""
    if text.strip() in turn:
        return
    before, end, answer = text.rpartition("</think>")
    thoughts = before.rpartition("<think>")[2]
    if not end or not _stands_in(answer, turn):
        if not _stands_in(text, turn):
            yield "content", text
    elif not _stands_in(thoughts, turn):
        yield _INLINE, thoughts


def _stands_in(text: str, turn: str) -> bool:
    """Whether a turn holds a text, which the template may have written in other letters or with other spaces."""
    return text.strip() in turn or _SPACES.sub("", text).casefold() in _SPACES.sub("", turn).casefold()


def _holds(turn: str, value: Any) -> bool:
    """Whether a turn holds every key and leaf of a JSON value, in JSON's spelling or as plain text."""
    if isinstance(value, dict):
        return all(_holds(turn, key) and _holds(turn, held) for key, held in value.items())
    if isinstance(value, list):
        return all(_holds(turn, held) for held in value)
    forms = [str(value), json.dumps(value)]
    if isinstance(value, str):
        forms = [value.strip(), json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]]
    return any(form in turn for form in forms)


def losses_of(lost: Sequence[Lost], *, allowed: bool, way_out: Callable[[], str]) -> Losses:
    """Count what isn't written.

    Args:
        lost: of one chat.
        allowed: an assistant's own turn may lose texts.
        way_out: returns the end of the sentence.

    Raises:
        SourceError: a turn loses a text of its own, and that isn't allowed.
    """
    own = [one for one in lost if not one.by_design]
    if own and not allowed:
        one = own[0]
        shown = one.text.strip()
        shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"
        more = f", and {len(own) - 1:,} more" if len(own) > 1 else ""
        raise SourceError(
            f"the chat template doesn't write `{one.key}` of message {one.message + 1} "
            f"({len(one.text.strip()):,} characters: {shown!r}{more}), which would not be trained; {way_out()}"
        )
    return Losses(dropped=_counted([one for one in lost if one.by_design]), unwritten=_counted(own))


def _counted(lost: Sequence[Lost]) -> dict[str, tuple[int, int]]:
    """Return messages and characters by key."""
    keys = dict.fromkeys(one.key for one in lost)
    return {
        key: (
            len({one.message for one in lost if one.key == key}),
            sum(len(one.text.strip()) for one in lost if one.key == key),
        )
        for key in keys
    }

"""Find in a rendered chat what the assistant says, for templates that don't mark it themselves.

What an assistant generates begins where the generation prompt ends and stops behind its end-of-turn mark. Where
these stand is read off a skeleton: the same roles with a short mark of private-use characters in place of each
content. The real text must be the skeleton with the real contents put in, character by character; nothing is
searched for in it, so what a user writes can't pass for a template's words.

A chat that is no skeleton filled in, because it calls tools or because the template looks into its contents, is
measured by prefixes instead: a turn is what the chat with it has more than the chat before it. Where that fails
too, because the template rewrites what was said before, a turn is what stands between the messages around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from varlen.source.chats.skeleton import EndMarks, Render, Skeleton, Turn, free_character, try_render


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """Where one assistant's message stands in the text."""

    message: int
    start: int
    stop: int
    has_mark: bool


def fill(skeleton: Skeleton, messages: list[dict[str, Any]], text: str) -> list[Said] | None:
    """Return where assistants speak in a text that is the skeleton with these contents, else None."""
    values = (messages[number][key] for number, key in skeleton.slots)
    places = _places(skeleton.pieces, values, text)
    if places is None:
        return None
    return [
        Said(
            message=turn.message,
            start=places[turn.first][0] - turn.lead,
            stop=places[turn.last][1] + turn.mark,
            has_mark=turn.mark > 0,
        )
        for turn in skeleton.turns
    ]


def _places(pieces: Sequence[str], values: Iterable[str], text: str) -> list[tuple[int, int]] | None:
    """Walk through the text, content by content, each as it is or trimmed."""
    if not text.startswith(pieces[0]):
        return None
    reached: dict[int, Any] = {len(pieces[0]): None}  # a position, and the places on the way to it
    for value, piece in zip(values, pieces[1:]):
        following: dict[int, Any] = {}
        for position, way in reached.items():
            for form in _forms(value):
                stop = position + len(form)
                if text.startswith(form, position) and text.startswith(piece, stop):
                    following.setdefault(stop + len(piece), (way, position, stop))
        reached = following
    if len(text) not in reached:
        return None
    places, way = [], reached[len(text)]
    while way is not None:
        way, start, stop = way
        places.append((start, stop))
    return places[::-1]


def _forms(content: str) -> Iterator[str]:
    """Yield a content as templates write it: whole first, then trimmed in their ways."""
    yield content
    if content != content.strip():
        lines = (content.strip("\n"), content.lstrip("\n"), content.rstrip("\n"))
        trimmed = dict.fromkeys((content.strip(), content.lstrip(), content.rstrip(), *lines))
        yield from (form for form in trimmed if form != content)


def by_prefixes(
    render: Render,
    messages: list[dict[str, Any]],
    text: str,
    skeleton: Skeleton | None,
    marks: EndMarks,
) -> list[Said] | None:
    """Measure each assistant's message as what the chat with it has more than the chat before it.

    Args:
        render: the template.
        messages: the chat.
        text: the chat as text.
        skeleton: of the same roles, which knows how turns open and close; None where there is none.
        marks: what ends a turn.

    Returns:
        Where assistants speak, or None where the text doesn't begin with the text of its first messages.
    """
    known = {turn.message: turn for turn in skeleton.turns} if skeleton else {}
    said: list[Said] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompted, plain = (try_render(render, messages[:number], prompts) for prompts in (True, False))
        until = try_render(render, messages[: number + 1], False)
        if prompted is None or until is None:
            return None
        if not text.startswith(until):
            until = until.rstrip()
        before = prompted if until.startswith(prompted) else prompted.rstrip()
        if not (text.startswith(until) and until.startswith(before)):
            return None
        turn, start = known.get(number), len(before)
        if prompted == plain:  # no generation prompt, so a header must be told from what the assistant says
            if turn is None or turn.opening is None or not until.startswith(turn.opening, start):
                return None
            start += len(turn.opening)
        length, has_mark = _turn_length(until[start:], turn, marks)
        if said and start < said[-1].stop:
            return None
        said.append(Said(message=number, start=start, stop=start + length, has_mark=has_mark))
    return said


def _turn_length(turn: str, known: Turn | None, marks: EndMarks) -> tuple[int, bool]:
    """Return how much of a message's text is the assistant's, and whether a mark ends it."""
    trimmed = turn.rstrip()
    closing = known.closing if known else ""
    if known and known.mark and trimmed.endswith(closing.rstrip()):
        return len(trimmed) - len(closing.rstrip()) + known.mark, True
    if known and not known.mark and turn.endswith(closing) and not marks.end(trimmed):
        return len(turn) - len(closing), False
    return len(trimmed), marks.end(trimmed)


def by_frames(
    render: Render, messages: list[dict[str, Any]], text: str, skeleton: Skeleton | None, foreign: str
) -> list[Said] | None:
    """Take as the assistant's what stands between the messages of others, less what the template frames it by.

    Args:
        render: the template.
        messages: the chat.
        text: the chat as text.
        skeleton: of the same roles, which knows the frames; None where there is none.
        foreign: as of `skeleton_of`.

    Returns:
        Where assistants speak, or None where another's content isn't written once, whole and in order, or two
        assistants' messages follow each other.
    """
    others = [n for n, message in enumerate(messages) if message["role"] != "assistant"]
    if skeleton is None or not all(isinstance(messages[n]["content"], str) for n in others):
        return None
    slot = free_character(foreign + text)
    masked = [
        {**message, "content": f"{slot}{n}{slot}"} if message["role"] != "assistant" else message
        for n, message in enumerate(messages)
    ]
    framed = try_render(render, masked, False)
    parts = re.split(f"{slot}(\\d+){slot}", framed or "")
    pieces = parts[::2]
    if [int(part) for part in parts[1::2]] != others:
        return None
    places = _places(pieces, (messages[n]["content"] for n in others), text)
    if places is None:
        return None
    starts = [0, *(stop for _, stop in places)]
    said = []
    for turn in skeleton.turns:
        after = skeleton.pieces[turn.last + 1]
        alone = turn.message + 1 == len(messages) or messages[turn.message + 1]["role"] != "assistant"
        number = sum(n < turn.message for n in others)
        opening = skeleton.pieces[turn.first]
        opening = opening[: len(opening) - turn.lead]
        piece = pieces[number]
        fits = len(opening) + len(after) <= len(piece) and piece.startswith(opening) and piece.endswith(after)
        if not (alone and fits) or (turn.message and messages[turn.message - 1]["role"] == "assistant"):
            return None
        start = starts[number]
        stop = start + len(piece) - len(after) + turn.mark
        said.append(Said(message=turn.message, start=start + len(opening), stop=stop, has_mark=turn.mark > 0))
    return said

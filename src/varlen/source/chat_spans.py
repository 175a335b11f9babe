"""Find in a rendered chat what the assistant says, for templates that don't mark it themselves.

What an assistant generates begins where the generation prompt ends and stops behind its end-of-turn mark. Where
these stand is read off a skeleton: the same roles with a short mark of private-use characters in place of each
content. The real text must be the skeleton with the real contents put in, character by character; nothing is
searched for in it, so what a user writes can't pass for a template's words.

A chat that is no skeleton filled in, because it calls tools or because the template looks into its contents, is
measured by prefixes instead: a turn is what the chat with it has more than the chat before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from varlen.errors import SourceError

THOUGHTS = ("reasoning_content", "reasoning", "thinking")

Shape = tuple[tuple[str, str], ...]
"""Of each message its role, and the key that holds its thoughts, if it has any."""

Render = Callable[[list[dict[str, Any]], bool], str]
"""From messages, and whether to end with a generation prompt, to text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What a template writes around an assistant's message."""

    message: int
    first: int
    """The slot, a place for a content, where the turn begins: its thoughts or its content."""
    last: int
    """The slot of its content."""
    opening: str
    """Between what came before the message and the turn, where the template knows no generation prompt."""
    lead: int
    """Characters before the first slot that the assistant generates."""
    closing: str
    """What of the text after the content belongs to this message."""
    mark: int
    """Characters of it up to where its end-of-turn mark stops; 0 where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skeleton:
    """What a template writes for a row of roles, with slots where contents stand."""

    pieces: tuple[str, ...]
    """The template's own text before, between and after the slots."""
    slots: tuple[tuple[int, str], ...]
    """Of each slot the message and the key of it that it holds."""
    turns: tuple[Turn, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """Where one assistant's message stands in the text."""

    message: int
    start: int
    stop: int
    has_mark: bool


class EndMarks:
    """The texts that end a turn: a tokenizer's special tokens."""

    def __init__(self, marks: Sequence[str], eos: str) -> None:
        known = sorted({m for m in (*marks, eos) if m.strip()}, key=lambda m: (-len(m), m))
        self.known = tuple(known)
        self.eos = eos
        self._any = re.compile("|".join(map(re.escape, known))) if known else None

    def stop(self, closing: str) -> int:
        """Return where the end-of-turn mark stops in the text after a content, 0 where there is none."""
        found = self._any.search(closing) if self._any else None
        if found is None:  # a mark that the tokenizer knows not as one token
            found = re.match(r"\S+", closing)
        return found.end() if found else 0

    def end(self, turn: str) -> bool:
        """Return whether a turn stops with a special token."""
        return turn.endswith(self.known)


def shape_of(messages: list[dict[str, Any]]) -> Shape | None:
    """Return the shape of a chat that a skeleton can have: text alone, but for an assistant's thoughts."""
    shape = []
    for message in messages:
        thoughts = ""
        for key, value in message.items():
            if key == "role":
                continue
            if type(value) is not str:
                return None
            if key in THOUGHTS and message["role"] == "assistant" and not thoughts:
                thoughts = key
            elif key != "content":
                return None
        if "content" not in message:
            return None
        shape.append((message["role"], thoughts))
    return tuple(shape)


def skeleton_of(render: Render, shape: Shape, marks: EndMarks, foreign: str) -> Skeleton | None:
    """Render a shape's skeleton.

    Args:
        render: the template.
        shape: who speaks.
        marks: what ends a turn.
        foreign: text that the template may write itself; the slots' marks are chosen not to stand in it.

    Returns:
        The skeleton, or None where the template doesn't write every content once and in order.
    """
    slot = next(c for c in map(chr, range(0xF0000, 0xFFFFD)) if c not in foreign)
    messages: list[dict[str, Any]] = []
    slots: list[tuple[int, str]] = []
    for number, (role, thoughts) in enumerate(shape):
        message = {"role": role}
        for key in filter(None, (thoughts, "content")):
            message[key] = f"{slot}{len(slots)}{slot}"
            slots.append((number, key))
        messages.append(message)
    text = _try(render, messages, False)
    if text is None:
        return None
    parts = re.split(f"{slot}(\\d+){slot}", text)
    order = [int(part) for part in parts[1::2]]
    pieces = parts[::2]
    spoken = [slots[s][0] for s in order if shape[slots[s][0]][0] == "assistant"]
    own = [n for n, (role, _) in enumerate(shape) if role == "assistant"]
    if sorted(set(spoken)) != own or spoken != sorted(spoken):
        return None

    turns = []
    for number in own:
        at = [k for k, s in enumerate(order) if slots[s][0] == number]
        first, last = at[0], at[-1]
        keys = [slots[order[k]][1] for k in at]
        if last - first != len(at) - 1 or keys.count("content") != 1 or keys[-1] != "content" or len(at) > 2:
            return None
        before = "".join(f"{pieces[k]}{slot}{order[k]}{slot}" for k in range(first)) + pieces[first]
        opening, lead = _opening(render, messages[:number], before, pieces[first])
        closing = _closing(render, messages[: number + 1], pieces[last + 1], f"{slot}{order[last]}{slot}")
        mark = marks.stop(closing)
        if not mark and marks.eos.strip() and pieces[last + 1].startswith(marks.eos):
            closing, mark = marks.eos, len(marks.eos)  # written only where another message follows
        turns.append(
            Turn(
                message=number, first=first, last=last, opening=opening, lead=lead, closing=closing, mark=mark
            )
        )
    return Skeleton(pieces=tuple(pieces), slots=tuple(slots[s] for s in order), turns=tuple(turns))


def _try(render: Render, messages: list[dict[str, Any]], prompts: bool) -> str | None:
    """Render what a template may refuse, such as a chat that ends early."""
    try:
        return render(messages, prompts)
    except SourceError:
        return None


def _opening(render: Render, earlier: list[dict[str, Any]], before: str, piece: str) -> tuple[str, int]:
    """Return a header that is nobody's, and how many characters before the first slot are generated."""
    plain, prompted = _try(render, earlier, False), _try(render, earlier, True)
    if plain is None:
        return "", 0
    if prompted is not None and prompted != plain:
        prompt = prompted[len(plain) :] if prompted.startswith(plain) else ""
        at = piece.rfind(prompt) if prompt else -1
        return "", len(piece) - at - len(prompt) if at >= 0 else 0
    if not before.startswith(plain):
        return "", 0
    opening = before[len(plain) :]
    # Without a generation prompt the assistant is asked right after the message before, so a space is its own.
    return (opening, 0) if opening.strip() else ("", len(opening))


def _closing(render: Render, messages: list[dict[str, Any]], piece: str, slot: str) -> str:
    """Return what of the text after a content is there without the messages that follow."""
    alone = _try(render, messages, False)
    if alone is None or slot not in alone:
        return ""
    own = alone.rpartition(slot)[2]
    same = next((k for k, (a, b) in enumerate(zip(own, piece)) if a != b), min(len(own), len(piece)))
    return own[:same]


def fill(skeleton: Skeleton, messages: list[dict[str, Any]], text: str) -> list[Said] | None:
    """Return where assistants speak in a text that is the skeleton with these contents, else None."""
    places = _places(skeleton, messages, text)
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


def _places(skeleton: Skeleton, messages: list[dict[str, Any]], text: str) -> list[tuple[int, int]] | None:
    """Walk through the text, content by content, each as it is or trimmed."""
    pieces = skeleton.pieces
    if not text.startswith(pieces[0]):
        return None
    reached: dict[int, Any] = {len(pieces[0]): None}  # a position, and the places on the way to it
    for (number, key), piece in zip(skeleton.slots, pieces[1:]):
        following: dict[int, Any] = {}
        for position, way in reached.items():
            for form in _forms(messages[number][key]):
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
        before, until = _try(render, messages[:number], True), _try(render, messages[: number + 1], False)
        if before is None or until is None:
            return None
        if not text.startswith(until):
            until = until.rstrip()
        if not until.startswith(before):
            before = before.rstrip()
        if not (text.startswith(until) and until.startswith(before)):
            return None
        turn = known.get(number)
        start = len(before)
        if turn and turn.opening and until.startswith(turn.opening, start):
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

"""What a chat template writes around contents, known by the roles alone: a skeleton with slots, and its end marks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
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
    opening: str | None
    """The header between earlier messages and the turn, for templates without a generation prompt; None: unknown."""
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


class EndMarks:
    """The texts that end a turn: a tokenizer's special tokens."""

    def __init__(self, marks: Sequence[str], eos: str) -> None:
        known = sorted({m for m in (*marks, eos) if m.strip()}, key=lambda m: (-len(m), m))
        self.known = tuple(known)
        self.eos = eos
        self._any = re.compile("|".join(map(re.escape, known))) if known else None

    def first(self, text: str) -> re.Match[str] | None:
        """Return the first special token in a text."""
        return self._any.search(text) if self._any else None

    def stop(self, closing: str) -> int:
        """Return where the end-of-turn mark stops in the text after a content, 0 where there is none."""
        # What the tokenizer doesn't know as one token can be a mark too, right after the content.
        found = self.first(closing) or re.match(r"\S+", closing)
        return found.end() if found else 0

    def end(self, turn: str) -> bool:
        """Return whether a turn stops with a special token."""
        return turn.endswith(self.known)


def shape_of(messages: list[dict[str, Any]], source: str) -> Shape | None:
    """Return the shape of a chat that a skeleton can have: text alone, but for an assistant's thoughts.

    Keys that the source of the template doesn't speak of don't matter.
    """
    shape = []
    for message in messages:
        thoughts = ""
        for key, value in message.items():
            if key == "role" or (key != "content" and key not in source):
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
    slot = free_character(foreign)
    messages: list[dict[str, Any]] = []
    slots: list[tuple[int, str]] = []
    for number, (role, thoughts) in enumerate(shape):
        message = {"role": role}
        for key in filter(None, (thoughts, "content")):
            message[key] = f"{slot}{len(slots)}{slot}"
            slots.append((number, key))
        messages.append(message)
    text = try_render(render, messages, False)
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
        opening, lead = _opening(render, messages[:number], pieces[first], slot)
        alone = try_render(render, messages[: number + 1], False) or ""
        content = f"{slot}{order[last]}{slot}"
        rest = alone.rpartition(content)[2] if content in alone else ""
        closing, mark = _closing(rest, pieces[last + 1], marks)
        turns.append(
            Turn(
                message=number, first=first, last=last, opening=opening, lead=lead, closing=closing, mark=mark
            )
        )
    return Skeleton(pieces=tuple(pieces), slots=tuple(slots[s] for s in order), turns=tuple(turns))


def try_render(render: Render, messages: list[dict[str, Any]], prompts: bool) -> str | None:
    """Render what a template may refuse, such as a chat that ends early."""
    try:
        return render(messages, prompts)
    except SourceError:
        return None


def _opening(render: Render, earlier: list[dict[str, Any]], piece: str, slot: str) -> tuple[str | None, int]:
    """Return a header that is nobody's, and how many characters before the first slot are generated."""
    plain, prompted = try_render(render, earlier, False), try_render(render, earlier, True)
    if plain is None:
        return None, 0
    if prompted is not None and prompted != plain:
        prompt = prompted[len(plain) :] if prompted.startswith(plain) else ""
        at = piece.rfind(prompt) if prompt else -1
        return None, len(piece) - at - len(prompt) if at >= 0 else 0
    before = plain.rpartition(slot)[2]
    if not piece.startswith(before):
        before = before.rstrip()
    if not piece.startswith(before):
        return None, 0
    opening = piece[len(before) :]
    # Without a generation prompt the assistant is asked right after the message before, so a space is its own.
    return (opening, 0) if opening.strip() else ("", len(opening))


def _closing(own: str, piece: str, marks: EndMarks) -> tuple[str, int]:
    """Return what after a content belongs to its message, and where in it the end-of-turn mark stops.

    Args:
        own: what the template writes after the content where no message follows.
        piece: what it writes where the next one does, with that one's header.
        marks: what ends a turn.
    """
    for closing in (own, own.rstrip()):
        if piece.startswith(closing) and (mark := marks.stop(closing)):
            return closing, mark
    last, among = marks.first(own), marks.first(piece)
    if (
        last and among and last.start() == among.start()
    ):  # the last turn of a chat ends with a mark of its own
        return piece[: among.end()], among.end()
    if marks.eos.strip() and piece.startswith(marks.eos):  # written only where another message follows
        return marks.eos, len(marks.eos)
    same = next((k for k, (a, b) in enumerate(zip(own, piece)) if a != b), min(len(own), len(piece)))
    word = re.match(r"\S+(?=\s)", own[:same])  # a mark, and not the beginning of two that differ
    return (word[0], word.end()) if word else (own if piece.startswith(own) else "", 0)


def free_character(text: str) -> str:
    """Return a private-use character that doesn't stand in a text.

    Raises:
        SourceError: all of them do.
    """
    used = set(text) if not text.isascii() else set()
    free = next((c for c in map(chr, range(0xF0000, 0xFFFFE)) if c not in used), "")
    if not free:
        raise SourceError("the chat holds all 65,534 private-use characters of plane 15, which no text does")
    return free

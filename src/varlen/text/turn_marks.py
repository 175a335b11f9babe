"""Where a turn begins and ends in what a chat template writes around it: generation prompts and end-of-turn marks."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from varlen.errors import VarlenError


class EndMarks:
    """The texts that end a turn: a tokenizer's special tokens."""

    def __init__(self, marks: Sequence[str], eos: str) -> None:
        """Take the texts of all special tokens, and the EOS."""
        known = sorted({m for m in (*marks, eos) if m.strip()}, key=lambda m: (-len(m), m))
        self.known = tuple(known)
        self.eos = eos
        self.usual = ""
        """What ends a turn without calls; empty where that isn't known."""
        self.of_answers: Collection[str] = ()
        """Special tokens that a template writes for each answer of a tool."""
        self.headers: Collection[str] = ()
        """Special tokens of a generation prompt, none of which ends a turn."""
        self.begins = ""
        """The special token that a turn of thoughts begins with, right after the generation prompt."""
        self.prompt = ""
        """The generation prompt after a user's message; empty where the template writes none."""
        self.opens = False
        """Turns have no mark of their own, and end with the token that opens the next message."""
        self._usual_tokens: frozenset[str] = frozenset()
        self.is_known = False
        """Whether these have been looked for."""
        self._any = re.compile("|".join(map(re.escape, known))) if known else None
        self._many = re.compile(f"(?:{self._any.pattern})+") if self._any else None

    def first(self, text: str) -> re.Match[str] | None:
        """Return the first special token in a text."""
        return self._any.search(text) if self._any else None

    def at(self, text: str, start: int) -> re.Match[str] | None:
        """Return the special token that begins at a place of a text."""
        return self._any.match(text, start) if self._any else None

    def runs(self, text: str) -> list[re.Match[str]]:
        """Return the stretches of a text that are special tokens, one right after the other."""
        return list(self._many.finditer(text)) if self._many else []

    def stop(self, closing: str) -> int:
        """Return where the end-of-turn mark stops in what is written after a content for its message, 0: no mark.

        Special tokens that follow the mark at once, such as the EOS, are what a model must write to stop, too.
        """
        # What the tokenizer doesn't know as one token can be a mark too, right after the content.
        found = self.first(closing) or re.match(r"\S+", closing)
        stop = found.end() if found else 0
        while stop and (more := self.at(closing, stop)):
            stop = more.end()
        # Phi-3 ends a chat with a line end and the EOS.
        after = len(closing) - len(closing[stop:].lstrip())
        return (
            after + len(self.eos)
            if stop and self.eos.strip() and closing.startswith(self.eos, after)
            else stop
        )

    def with_eos(self, text: str, stop: int) -> int:
        """Return where the EOS stops that follows a mark at once; `stop`, where none does."""
        while stop and self.eos.strip() and text.startswith(self.eos, stop):
            stop += len(self.eos)
        return stop

    def know_prompt(self, render: Callable[[list[Any], bool], str], asked: list[Any]) -> None:
        """Take note of a template's generation prompt."""
        answer = {"role": "assistant", "content": asked[1]["content"]}
        try:
            plain, prompted = render(asked[:1], False), render(asked[:1], True)
            whole, thought = render([asked[0], answer], False), render(asked, False)
        except VarlenError:
            return
        self._usual_tokens = frozenset(mark for mark in self.known if mark in whole)
        self.prompt = prompted[len(plain) :] if prompted.startswith(plain) else ""
        self.headers = frozenset(mark for mark in self.known if mark in self.prompt)
        begin = self.at(thought, len(prompted)) if thought.startswith(prompted) and self.prompt else None
        self.begins = begin[0] if begin else ""

    def know_answers(self, render: Callable[[list[Any], bool], str], called: list[Any]) -> None:
        """Take note of how a template goes on after a turn of calls."""
        try:
            none, one, two = (render(called[:count], False) for count in (2, 3, 4))
        except VarlenError:
            return
        again = frozenset(mark for mark in self.known if two.count(mark) > one.count(mark) > 0)
        self.of_answers = again - self._usual_tokens
        turn = none.rstrip()
        token = self.at(two, len(turn)) if two.startswith(turn) and not self.end(turn) else None
        self.opens = token is not None and token[0] not in self.of_answers

    def end(self, turn: str) -> bool:
        """Return whether a turn stops with a special token."""
        return turn.endswith(self.known)


def opening_of(
    plain: str | None, prompted: str | None, piece: str, slot: str, marks: EndMarks
) -> tuple[str | None, int]:
    """Return a header that is nobody's, and how many characters before a turn's first slot are generated."""
    usual = marks.prompt
    if plain is None:  # a chat can't end there, such as one that begins with the assistant
        return None, _after_usual(usual, piece)
    before = plain.rpartition(slot)[2]
    if prompted is not None and prompted != plain:
        prompt = prompted[len(plain) :] if prompted.startswith(plain) else usual
        at = len(before) if piece.startswith(before + prompt) else piece.rfind(prompt)
        return None, (
            len(piece) - at - len(prompt)
            if prompt and at >= 0
            else _partly(plain, prompt, piece, slot, marks)
        )
    if not piece.startswith(before):
        before = before.rstrip()
    if not piece.startswith(before):
        same = _common(before, piece)
        if usual and (usual in piece or (marks.begins and piece.startswith(marks.begins))):
            return None, _after_usual(usual, piece) if usual in piece else len(piece)
        return None, len(piece) - same if usual and marks.end(piece[:same]) else 0
    opening = piece[len(before) :]
    if usual:  # a turn that goes on after the answer of a tool, with a header or without
        return "", len(opening) - (len(usual) if opening.startswith(usual) else 0)
    # Without a generation prompt the assistant is asked right after the message before, so a space is its own.
    return (opening, 0) if opening.strip() else ("", len(opening))


def opened_by(plain: str | None, prompted: str | None, piece: str, slot: str) -> str:
    """Return what a generation prompt has more than the text before a turn's first slot: that slot may begin with it.

    Arguments as of `opening_of`.
    """
    if plain is None or prompted is None or not prompted.startswith(plain):
        return ""
    before = prompted.rpartition(slot)[2]
    return before[len(piece) :] if before.startswith(piece) else ""


def _after_usual(usual: str, piece: str) -> int:
    """Return how many characters follow the generation prompt, or as much of it as is written, before a turn."""
    for length in range(len(usual), 0, -1):
        at = piece.rfind(usual[:length])
        if at >= 0:
            cut = length if length == len(usual) else 1 + max(usual.rfind(end, 0, length) for end in "\n>")
            return len(piece) - at - cut if usual[:cut].strip() else 0
    return 0


def _partly(plain: str, prompt: str, piece: str, slot: str, marks: EndMarks) -> int:
    r"""Return how many characters are generated where the text goes on otherwise than the end of the prompt.

    `<think>\n` asks for thoughts, and a turn without any is written as `<think></think>`, of which the prompt has
    written `<think>`. DeepSeek-V3 writes no header before calls after the first ones of a chat.
    """
    before = plain.rpartition(slot)[2]
    if not prompt or not piece.startswith(before):
        return 0
    rest = piece[len(before) :]
    if marks.headers and not any(mark in rest for mark in marks.headers):
        return len(rest)
    same = _common(rest, prompt)
    if same < len(rest):
        same = max(rest.rfind(end, 0, same) + len(end) if end in rest[:same] else 0 for end in ("\n", ">"))
    return len(rest) - same if rest[:same].strip() else 0


def closing_of(own: str, piece: str, marks: EndMarks) -> tuple[str, int]:
    """Return what after a content belongs to its message, and where in it the end-of-turn mark stops."""
    for opener in marks.of_answers:
        own = own.partition(opener)[0]
    for closing in (own, own.rstrip()):
        if piece.startswith(closing) and (mark := marks.stop(closing)):
            return closing, mark
    last, among = marks.first(own), marks.first(piece)
    is_other = (
        last and among and last.start() == among.start() and among[0] not in (*marks.headers, marks.begins)
    )
    if among and is_other:  # the last turn of a chat ends with a mark of its own
        stop = marks.with_eos(piece, among.end())
        return piece[:stop], stop
    if marks.eos.strip() and piece.startswith(marks.eos):  # written only where another message follows
        return marks.eos, len(marks.eos)
    token = marks.at(piece, len(own.rstrip())) if marks.opens and piece.startswith(own.rstrip()) else None
    if token and token[0] not in marks.headers:
        return piece[: token.end()], token.end()
    same = _common(own, piece)
    word = re.match(r"\S+(?=\s)", own[:same])  # a mark, and not the beginning of two that differ
    return (word[0], word.end()) if word else (own if piece.startswith(own) else "", 0)


def call_closing(own: str, piece: str, marks: EndMarks, *, is_answered: bool) -> tuple[str, int]:
    """Return what after a call belongs to its message, and where in it the mark stops that ends the turn.

    A turn of calls may end with what other turns end with, with a mark of calls alone (`<|call|>`), or with the
    special token that opens the answers of tools (`<|observation|>`): that is what a model must write to stop. What
    the template writes for every single answer is no part of the turn.
    """
    same = own[: _common(own, piece)]
    if marks.usual and marks.usual in same:
        stop = marks.with_eos(same, same.index(marks.usual) + len(marks.usual))
        return same[:stop], stop
    for run in reversed(marks.runs(same)):
        stop = run.start()
        while (token := marks.at(same, stop)) and token[0] not in marks.of_answers:
            stop = token.end()
        if stop > run.start():
            return same[:stop], stop
    if same.rstrip() == own.rstrip() and is_answered:
        stop = len(same.rstrip())
        token = marks.at(piece, stop)
        if token and token[0] not in marks.of_answers:
            return piece[: token.end()], token.end()
    stop = len(same.rstrip())
    return same[:stop], stop


def _common(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    return next((k for k, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))

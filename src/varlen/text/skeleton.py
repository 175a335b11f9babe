"""What a chat template writes around the texts of a chat of some shape: a skeleton with slots, and its turns.

A skeleton is the rendering of marks of private-use characters in place of every text: contents, thoughts, names and
arguments of calls. It says where a turn begins and ends, and which texts the template doesn't write at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from varlen.errors import SourceError, VarlenError

Kind = Literal["joined", "apart", "unwritten"]
"""What a skeleton is for: to be filled in, arguments written as JSON among its texts; to be filled in with arguments
and tools as a rendering has them; or to tell what isn't written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A stretch of text that an assistant generates; pieces are counted without the slots of arguments."""

    first: int
    """The piece that it begins in, which stands before its first slot."""
    lead: str
    """What it generates before that slot: the end of the piece."""
    opened: str
    """What the generation prompt has after the piece, as `<think>`: not generated where a text begins with it."""
    last: int
    """The piece that it ends in, which stands after its last slot."""
    mark: str
    """What of that piece it generates, or the end of that where arguments stand before it."""
    tail: str
    """What follows in that piece."""
    is_bare: bool
    """No argument of a call stands between its last slot and the mark."""
    seal: str
    """What the text must end with there, where one does: the last special token of the mark, or nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What a template writes for an assistant's message."""

    message: int
    regions: tuple[Region, ...]
    """One, but where another's message is written in between; none where nothing of it is written."""
    has_mark: bool
    opening: str | None
    """The header between earlier messages and the turn, for templates without a generation prompt; None: unknown."""
    closing: str
    """What of the text after its last slot belongs to this message."""
    mark: int
    """Characters of it up to where its end-of-turn mark stops; 0 where there is none."""
    missing: tuple[Slot, ...] = ()
    """Texts that aren't written."""
    by_design: frozenset[Slot] = frozenset()
    """Those of them that are written where no later message follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skeleton:
    """What a template writes for a shape, with slots where texts stand."""

    pieces: tuple[str, ...]
    """The template's own text before, between and after the slots, those of arguments left out."""
    slots: tuple[Slot, ...]
    """In the order of the text, those of arguments left out; one may stand twice."""
    turns: tuple[Turn, ...]
    is_open: bool
    """Arguments are left out, or tools stand in several pieces, so that it can't be filled in."""
    hole: int | None
    """The one piece in which tools stand, whose text is another for each row."""


def skeleton_of(
    render: Render,
    messages: Sequence[dict[str, Any]],
    source: str,
    marks: EndMarks,
    foreign: str,
    *,
    kind: Kind = "joined",
    tool: str | None = None,
) -> Skeleton | None:
    """Render the skeleton of a chat's shape.

    Cost: three renderings of the chat, at most, for each of the assistant's messages.
    """
    slot = free_character(foreign)
    marked, slots = masked(messages, slot, source, arguments=True)
    text = try_render(render, marked, False)
    if text is None:
        return None
    pieces, order = cut(text, slot)
    if kind == "joined":
        pieces, order, slots = _joined(pieces, order, slots)
    own = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    firsts = {number: at for at, number in reversed(list(enumerate(order)))}
    once = {n for n, one in enumerate(slots) if one.is_said and one.call < 0 and one.message in own}
    if any(order.count(number) > 1 for number in once & set(order)):
        return None
    builder = _Builder(render, marked, slots, slot, marks, pieces, order, firsts)
    if kind == "unwritten":
        turns = [builder.unwritten(number) for number in own]
        begins = [0 for number in firsts if slots[number].is_said and slots[number].message in own]
    else:
        turns = [builder.turn(number) for number in own]
        begins = [turn.regions[0].first for turn in turns if turn.regions]
    unsaid = any(slot.key == "content" for turn in turns for slot in turn.missing)
    if begins != sorted(begins) or (unsaid and not begins):
        return None
    kept = [at for at, number in enumerate(order) if not slots[number].is_argument]
    bounds = [-1, *kept, len(order)]
    kept_pieces = tuple(
        "".join([pieces[a + 1], *(f"{slot}{pieces[at + 1]}" for at in range(a + 1, b))])
        for a, b in zip(bounds, bounds[1:])
    )
    holes = [at for at, piece in enumerate(kept_pieces) if tool and tool in piece]
    return Skeleton(
        pieces=kept_pieces,
        slots=tuple(slots[order[at]] for at in kept),
        turns=tuple(turns),
        is_open=any(one.is_argument for one in slots) or len(holes) > 1,
        hole=holes[0] if holes else None,
    )


def _joined(
    pieces: list[str], order: list[int], slots: list[Slot]
) -> tuple[list[str], list[int], list[Slot]]:
    """Take arguments that are written as the JSON of an object as one text, in the slot of their value."""
    if len(set(order)) < len(order):  # what stands twice may be written in two ways
        return pieces, order, slots
    kept, numbers, slots, at = [pieces[0]], [], list(slots), 0
    while at < len(order):
        number, following = order[at], pieces[at + 1]
        is_json = (
            slots[number].is_argument
            and slots[number].key == "key"
            and order[at + 1 : at + 2] == [number + 1]
            and (kept[-1].endswith('{"') and following in ('": "', '":"') and pieces[at + 2].startswith('"}'))
        )
        if is_json:
            slots[number] = replace(slots[number], key="")
            number, at = number + 1, at + 1
            slots[number] = replace(slots[number], key="arguments")
            kept[-1], following = kept[-1][:-2], pieces[at + 1][2:]
        kept.append(following)
        numbers.append(number)
        at += 1
    return kept, numbers, slots


@dataclass(slots=True)
class _Builder:
    """Finds the turns of a rendering of marks."""

    render: Render
    marked: list[dict[str, Any]]
    slots: list[Slot]
    slot: str
    marks: EndMarks
    pieces: list[str]
    order: list[int]
    firsts: dict[int, int]
    """Where each slot first stands, among the slots in the order of the text."""

    def turn(self, number: int) -> Turn:
        """Return what is written for the assistant's message of a number."""
        found = self.unwritten(number)
        alone = try_render(self.render, self.marked[: number + 1], False) or ""
        at = self._places(self._said_in(number), alone)
        if not at:
            return found
        runs = self._runs(at, number)
        regions = []
        opening, closing, mark = None, "", 0
        for place, run in enumerate(runs):
            lead, opened = 0, ""
            if place == 0:
                earlier = self.marked[:number]
                plain, prompted = (try_render(self.render, earlier, prompts) for prompts in (False, True))
                opening, lead = opening_of(plain, prompted, self.pieces[run[0]], self.slot, self.marks)
                opened = opened_by(plain, prompted, self.pieces[run[0]], self.slot)
            else:  # the turn goes on after others' messages
                until = max(self.slots[n].message for n in self.order[: run[0]])
                alone = try_render(self.render, self.marked[: until + 1], False) or ""
            closing, mark = self._closing(alone, run[-1], number)
            regions.append(self._region(run, lead, opened, mark))
        return replace(
            found,
            regions=tuple(regions),
            has_mark=self._ends(closing[:mark], runs[-1][-1]) or self._asks_a_tool(alone, runs[-1][-1]),
            opening=opening,
            closing=closing,
            mark=mark,
        )

    def unwritten(self, number: int) -> Turn:
        """Return what isn't written of the assistant's message of a number, as a turn that stands nowhere."""
        missing = [n for n in self._said_in(number) if n not in self.firsts]
        alone = (try_render(self.render, self.marked[: number + 1], False) or "") if missing else ""
        return Turn(
            message=number,
            regions=(),
            has_mark=True,
            opening=None,
            closing="",
            mark=0,
            missing=tuple(self.slots[n] for n in missing),
            by_design=frozenset(self.slots[n] for n in missing if f"{self.slot}{n}{self.slot}" in alone),
        )

    def _said_in(self, number: int) -> list[int]:
        """Return the slots of what the message says."""
        return [n for n, slot in enumerate(self.slots) if slot.message == number and slot.is_said]

    def _places(self, mine: list[int], alone: str) -> list[int]:
        """Return where a message's slots stand; a call's name may stand twice, and once more in its answer."""
        places: list[int] = []
        for n in mine:
            if n in self.firsts:
                again = [at for at in range(self.firsts[n] + 1, len(self.order)) if self.order[at] == n]
                places += [self.firsts[n], *again[: max(0, alone.count(f"{self.slot}{n}{self.slot}") - 1)]]
        return sorted(places)

    def _runs(self, at: list[int], number: int) -> list[list[int]]:
        """Part a message's slots where another message's stands between them."""
        runs = [[at[0]]]
        for place in at[1:]:
            between = range(runs[-1][-1] + 1, place)
            if any(self.slots[self.order[n]].message != number for n in between):
                runs.append([])
            runs[-1].append(place)
        return runs

    def _closing(self, alone: str, last: int, number: int) -> tuple[str, int]:
        """Return what belongs to the message after its slot `last`, and where its mark stops."""
        rest = self._after(alone, last)
        own, piece = rest.partition(self.slot)[0], self.pieces[last + 1]
        if self.slots[self.order[last]].key == "content":
            return closing_of(own, piece, self.marks)
        follows = self.marked[number + 1]["role"] if number + 1 < len(self.marked) else ""
        return call_closing(own, piece, self.marks, is_answered=follows == "tool")

    def _ends(self, closing: str, last: int) -> bool:
        """Whether a mark ends the turn; after a call, or thoughts, not any word does."""
        if self.slots[self.order[last]].key == "content":
            return bool(closing)
        return self.marks.end(closing) or bool(self.marks.usual and closing.endswith(self.marks.usual))

    def _asks_a_tool(self, alone: str, last: int) -> bool:
        """Whether the template opens a tool's answer after the turn, which so has ended."""
        return self._after(alone, last).startswith(tuple(self.marks.of_answers))

    def _after(self, alone: str, last: int) -> str:
        """Return what the template writes after a slot where no message follows."""
        _, mark, rest = alone.rpartition(f"{self.slot}{self.order[last]}{self.slot}")
        if not mark:
            return ""
        return rest.removeprefix('"}') if self.slots[self.order[last]].key == "arguments" else rest

    def _region(self, run: list[int], lead: int, opened: str, mark: int) -> Region:
        """Return a region in pieces that are counted without the slots of arguments."""
        before, piece = self.pieces[run[0]], self.pieces[run[-1] + 1]
        skipped = [self.slots[number].is_argument for number in self.order]
        first = run[0] - sum(skipped[: run[0]])
        last = run[-1] + 1 - sum(skipped[: run[-1] + 1])
        bare = not self.slots[self.order[run[-1]]].is_argument
        run_of = self.marks.runs(piece[:mark])
        seal = run_of[-1][0] if run_of and run_of[-1].end() == mark else ""
        return Region(
            first=first,
            lead=before[len(before) - lead :],
            opened=opened,
            last=last,
            mark=piece[:mark],
            tail=piece[mark:],
            is_bare=bare,
            seal=seal,
        )


# The texts of a chat as slots: its shape, and the same chat with a mark of private-use characters for each text.

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
    """Return messages of some shape with a mark in place of every text, and what each mark stands for."""
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
    """Return a private-use character that doesn't stand in a text."""
    free = next((c for c in map(chr, range(0xF0000, 0xF0008)) if c not in text), "")
    if not free:
        used = set(text)
        free = next((c for c in map(chr, range(0xF0008, 0xFFFFE)) if c not in used), "")
    if not free:
        raise SourceError("the chat holds all 65,534 private-use characters of plane 15, which no text does")
    return free


# Where a turn begins and ends in what a chat template writes around it: generation prompts and end-of-turn marks.


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

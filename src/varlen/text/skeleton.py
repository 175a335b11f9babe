"""The text that a chat template writes around the contents of a chat: a skeleton with slots, and its turns.

A skeleton is the rendering of a chat with a placeholder of private-use characters for every text: contents, thoughts,
names and arguments of calls. It holds where a turn begins and ends, and which texts the template doesn't write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from varlen.errors import SourceError, VarlenError

# A skeleton's purpose. "joined": to be filled in, with arguments written as JSON; "apart": to be filled in, with
# arguments and tools as rendered; "unwritten": to find what isn't written.
Kind = Literal["joined", "apart", "unwritten"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A stretch of text that an assistant generates; pieces are counted without the slots of arguments."""

    first: int  # the piece that it begins in, before its first slot
    lead: str  # the end of that piece that it generates
    opened: str  # what the prompt adds, such as `<think>`: not generated where a text begins with it
    last: int  # the piece that it ends in, after its last slot
    mark: str  # what it generates of that piece; where arguments stand in it, only what follows the last of them
    tail: str  # the rest of that piece
    is_bare: bool  # no argument of a call stands between its last slot and the mark
    seal: str  # what the text must end with, if anything: the last special token of the mark


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What a template writes for an assistant's message."""

    message: int
    # Usually one; several if another's message is written in between; none if nothing of it is written.
    regions: tuple[Region, ...]
    has_mark: bool
    opening: str | None  # header before the turn, for templates without a generation prompt; None: unknown
    closing: str  # the part of the text after its last slot that belongs to this message
    mark: int  # length of `closing` up to the end of its end-of-turn mark; 0 where there is none
    missing: tuple[Slot, ...] = ()  # texts that aren't written
    by_design: frozenset[Slot] = frozenset()  # of these, written if no message follows


@dataclass(frozen=True, kw_only=True, slots=True)
class Skeleton:
    """What a template writes for a shape, with slots for texts."""

    # The template's own text before, between and after the slots, except those of arguments.
    pieces: tuple[str, ...]
    slots: tuple[Slot, ...]  # in text order, except those of arguments; may repeat
    turns: tuple[Turn, ...]
    is_open: bool  # it can't be filled in: arguments are left out, or tools stand in several pieces
    hole: int | None  # the one piece with tools, which differ between rows


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

    Cost: at most three renderings of the chat for each of the assistant's messages.
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
    once = {
        n
        for n, one_slot in enumerate(slots)
        if one_slot.is_generated and one_slot.call < 0 and one_slot.message in own
    }
    if any(order.count(number) > 1 for number in once & set(order)):
        return None
    builder = _Builder(render, marked, slots, slot, marks, pieces, order, firsts)
    if kind == "unwritten":
        turns = [builder.unwritten(number) for number in own]
        begins = [0 for number in firsts if slots[number].is_generated and slots[number].message in own]
    else:
        turns = [builder.turn(number) for number in own]
        begins = [turn.regions[0].first for turn in turns if turn.regions]
    lacks_content = any(slot.key == "content" for turn in turns for slot in turn.missing)
    if begins != sorted(begins) or (lacks_content and not begins):
        return None
    own_slots = [at for at, number in enumerate(order) if not slots[number].is_argument]
    bounds = [-1, *own_slots, len(order)]
    own_pieces = tuple(
        "".join([pieces[a + 1], *(f"{slot}{pieces[at + 1]}" for at in range(a + 1, b))])
        for a, b in zip(bounds, bounds[1:])
    )
    holes = [at for at, piece in enumerate(own_pieces) if tool and tool in piece]
    return Skeleton(
        pieces=own_pieces,
        slots=tuple(slots[order[at]] for at in own_slots),
        turns=tuple(turns),
        is_open=any(one_slot.is_argument for one_slot in slots) or len(holes) > 1,
        hole=holes[0] if holes else None,
    )


def _joined(
    pieces: list[str], order: list[int], slots: list[Slot]
) -> tuple[list[str], list[int], list[Slot]]:
    """Merge arguments that are written as a JSON object into one text, in the slot of their value."""
    if len(set(order)) < len(order):  # repeated slots may be written in two ways
        return pieces, order, slots
    merged, numbers, slots, at = [pieces[0]], [], list(slots), 0
    while at < len(order):
        number, following = order[at], pieces[at + 1]
        is_json = (
            slots[number].is_argument
            and slots[number].key == "key"
            and order[at + 1 : at + 2] == [number + 1]
            and (
                merged[-1].endswith('{"') and following in ('": "', '":"') and pieces[at + 2].startswith('"}')
            )
        )
        if is_json:
            slots[number] = replace(slots[number], key="")
            number, at = number + 1, at + 1
            slots[number] = replace(slots[number], key="arguments")
            merged[-1], following = merged[-1][:-2], pieces[at + 1][2:]
        merged.append(following)
        numbers.append(number)
        at += 1
    return merged, numbers, slots


@dataclass(slots=True)
class _Builder:
    """Finds the turns in a rendering of placeholders."""

    render: Render
    marked: list[dict[str, Any]]
    slots: list[Slot]
    slot: str
    marks: EndMarks
    pieces: list[str]
    order: list[int]
    firsts: dict[int, int]  # index of each slot's first occurrence in the text

    def turn(self, number: int) -> Turn:
        """Return what is written for the assistant's message of an index."""
        missing_turn = self.unwritten(number)
        prefix = try_render(self.render, self.marked[: number + 1], False) or ""
        at = self._positions(self._generated_in(number), prefix)
        if not at:
            return missing_turn
        runs = self._runs(at, number)
        regions = []
        opening, closing, mark = None, "", 0
        for index, run in enumerate(runs):
            lead, opened = 0, ""
            if index == 0:
                earlier = self.marked[:number]
                plain, prompted = (try_render(self.render, earlier, prompts) for prompts in (False, True))
                opening, lead = opening_of(plain, prompted, self.pieces[run[0]], self.slot, self.marks)
                opened = opened_by(plain, prompted, self.pieces[run[0]], self.slot)
            else:  # the turn continues after others' messages
                until = max(self.slots[n].message for n in self.order[: run[0]])
                prefix = try_render(self.render, self.marked[: until + 1], False) or ""
            closing, mark = self._closing(prefix, run[-1], number)
            regions.append(self._region(run, lead, opened, mark))
        return replace(
            missing_turn,
            regions=tuple(regions),
            has_mark=self._ends(closing[:mark], runs[-1][-1]) or self._asks_a_tool(prefix, runs[-1][-1]),
            opening=opening,
            closing=closing,
            mark=mark,
        )

    def unwritten(self, number: int) -> Turn:
        """Return a turn without a position that lists what isn't written of a message."""
        missing = [n for n in self._generated_in(number) if n not in self.firsts]
        prefix = (try_render(self.render, self.marked[: number + 1], False) or "") if missing else ""
        return Turn(
            message=number,
            regions=(),
            has_mark=True,
            opening=None,
            closing="",
            mark=0,
            missing=tuple(self.slots[n] for n in missing),
            by_design=frozenset(self.slots[n] for n in missing if f"{self.slot}{n}{self.slot}" in prefix),
        )

    def _generated_in(self, number: int) -> list[int]:
        """Return the slots of the message's generated texts."""
        return [n for n, slot in enumerate(self.slots) if slot.message == number and slot.is_generated]

    def _positions(self, mine: list[int], prefix: str) -> list[int]:
        """Return the positions of a message's slots. A call's name may occur twice, and again in its response."""
        found: list[int] = []
        for n in mine:
            if n in self.firsts:
                again = [at for at in range(self.firsts[n] + 1, len(self.order)) if self.order[at] == n]
                found += [self.firsts[n], *again[: max(0, prefix.count(f"{self.slot}{n}{self.slot}") - 1)]]
        return sorted(found)

    def _runs(self, at: list[int], number: int) -> list[list[int]]:
        """Group a message's slots, separated by another message's."""
        runs = [[at[0]]]
        for position in at[1:]:
            between = range(runs[-1][-1] + 1, position)
            if any(self.slots[self.order[n]].message != number for n in between):
                runs.append([])
            runs[-1].append(position)
        return runs

    def _closing(self, prefix: str, last: int, number: int) -> tuple[str, int]:
        """Return the text after slot `last` that belongs to the message, and where its mark ends."""
        rest = self._after(prefix, last)
        own, piece = rest.partition(self.slot)[0], self.pieces[last + 1]
        if self.slots[self.order[last]].key == "content":
            return closing_of(own, piece, self.marks)
        follows = self.marked[number + 1]["role"] if number + 1 < len(self.marked) else ""
        return call_closing(own, piece, self.marks, has_response=follows == "tool")

    def _ends(self, closing: str, last: int) -> bool:
        """Whether a mark ends the turn; after a call, or thoughts, only known marks count."""
        if self.slots[self.order[last]].key == "content":
            return bool(closing)
        return self.marks.end(closing) or bool(self.marks.usual and closing.endswith(self.marks.usual))

    def _asks_a_tool(self, prefix: str, last: int) -> bool:
        """Whether the template opens a tool response after the turn, which ends it."""
        return self._after(prefix, last).startswith(tuple(self.marks.response_tokens))

    def _after(self, prefix: str, last: int) -> str:
        """Return what the template writes after a slot where no message follows."""
        _, mark, rest = prefix.rpartition(f"{self.slot}{self.order[last]}{self.slot}")
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


# The texts of a chat as slots: its shape, and the same chat with a placeholder for each text.

Shape = tuple[tuple[Any, ...], ...]  # for each message, how it is written, without its texts

Render = Callable[[list[dict[str, Any]], bool], str]  # (messages, add a generation prompt) to text

_THOUGHTS = "reasoning_content"
_ALWAYS = {"role", "content", _THOUGHTS, "tool_calls"}
_IDS = ("id", "tool_call_id")
_OF_CALLS = ("name", "key", "value", "arguments")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The position of one text in a chat."""

    message: int
    # Of the message; of a call `name` or `id`, and `key` and `value`, which stand for its arguments, or `arguments`
    # where these are one JSON text.
    key: str
    call: int = -1  # index among the message's calls; -1: the message itself
    part: int = -1  # index in a content that is given as parts

    @property
    def is_argument(self) -> bool:
        """Whether it stands for arguments that aren't one text, and vary in number."""
        return self.key in ("key", "value") and self.call >= 0

    @property
    def is_generated(self) -> bool:
        """Whether it stands for text that an assistant generates."""
        return self.key in (_OF_CALLS if self.call >= 0 else ("content", _THOUGHTS))

    def value_in(self, messages: Sequence[dict[str, Any]]) -> str | dict[str, Any]:
        """Return its value in a chat of the shape: a text, or the arguments of a call."""
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
    """Messages of a shape with placeholders for texts."""

    slot: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    ids: dict[str, str] = field(default_factory=dict)

    def mark(self, slot: Slot, digits: int = 1) -> str:
        self.slots.append(slot)
        return f"{self.slot}{len(self.slots) - 1:0{digits}d}{self.slot}"

    def mark_id(self, slot: Slot, value: str) -> str:
        """Return a placeholder for an id: nine characters, as Mistral's templates require; equal for equal ids."""
        if value not in self.ids:
            self.ids[value] = self.mark(slot, 7)
        return self.ids[value]


def shape_of(messages: Sequence[dict[str, Any]], source: str) -> Shape | None:
    """Return the shape of a chat; None where it holds more than texts and calls.

    Keys that don't occur in the template's source are ignored.
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
    """Whether a text has a slot; templates treat blank texts beside others specially, so these have none."""
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
    """Return messages with a placeholder for every text, and the slot of each placeholder."""
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
    """Cut a rendering at its placeholders; return the text between them, and their numbers."""
    parts = re.split(f"{slot}(\\d+){slot}", text)
    return parts[::2], [int(part) for part in parts[1::2]]


def try_render(render: Render, messages: list[dict[str, Any]], prompts: bool) -> str | None:
    """Render, or return None where the template refuses, such as for a chat that ends early."""
    try:
        return render(messages, prompts)
    except SourceError:
        return None


def free_character(text: str) -> str:
    """Return a private-use character that doesn't occur in a text."""
    free = next((c for c in map(chr, range(0xF0000, 0xF0008)) if c not in text), "")
    if not free:
        used = set(text)
        free = next((c for c in map(chr, range(0xF0008, 0xFFFFE)) if c not in used), "")
    if not free:
        raise SourceError("the chat holds all 65,534 private-use characters of plane 15, which no text does")
    return free


# Find where a turn begins and ends in the template's text: generation prompts and end-of-turn marks.


class EndMarks:
    """The texts that end a turn: a tokenizer's special tokens."""

    def __init__(self, marks: Sequence[str], eos: str) -> None:
        known = sorted({m for m in (*marks, eos) if m.strip()}, key=lambda m: (-len(m), m))
        self.known = tuple(known)
        self.eos = eos
        self.usual = ""  # what ends a turn without calls; empty if unknown
        self.response_tokens: Collection[str] = ()  # special tokens written for each tool response
        self.headers: Collection[str] = ()  # special tokens of a generation prompt, none of which ends a turn
        # The special token that begins a turn with thoughts, right after the generation prompt.
        self.begins = ""
        self.prompt = ""  # the generation prompt after a user's message; empty where the template writes none
        # Turns have no mark of their own, and end with the token that opens the next message.
        self.opens = False
        self._usual_tokens: frozenset[str] = frozenset()
        self.is_known = False  # whether these have been probed
        self._any = re.compile("|".join(map(re.escape, known))) if known else None
        self._many = re.compile(f"(?:{self._any.pattern})+") if self._any else None

    def first(self, text: str) -> re.Match[str] | None:
        """Return the first special token in a text."""
        return self._any.search(text) if self._any else None

    def at(self, text: str, start: int) -> re.Match[str] | None:
        """Return the special token that begins at a position."""
        return self._any.match(text, start) if self._any else None

    def runs(self, text: str) -> list[re.Match[str]]:
        """Return the runs of consecutive special tokens in a text."""
        return list(self._many.finditer(text)) if self._many else []

    def stop(self, closing: str) -> int:
        """Return where the end-of-turn mark ends in the text after a content, 0: no mark.

        Special tokens right after the mark, such as the EOS, belong to it: a model must write them to stop.
        """
        # Text right after the content that isn't a single token can be a mark too.
        match = self.first(closing) or re.match(r"\S+", closing)
        stop = match.end() if match else 0
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
        """Return where EOS tokens right after a mark end; `stop`, where there are none."""
        while stop and self.eos.strip() and text.startswith(self.eos, stop):
            stop += len(self.eos)
        return stop

    def probe_prompt(self, render: Callable[[list[Any], bool], str], asked: list[Any]) -> None:
        """Probe a template's generation prompt."""
        response = {"role": "assistant", "content": asked[1]["content"]}
        try:
            plain, prompted = render(asked[:1], False), render(asked[:1], True)
            whole, thought = render([asked[0], response], False), render(asked, False)
        except VarlenError:
            return
        self._usual_tokens = frozenset(mark for mark in self.known if mark in whole)
        self.prompt = prompted[len(plain) :] if prompted.startswith(plain) else ""
        self.headers = frozenset(mark for mark in self.known if mark in self.prompt)
        begin = self.at(thought, len(prompted)) if thought.startswith(prompted) and self.prompt else None
        self.begins = begin[0] if begin else ""

    def probe_responses(self, render: Callable[[list[Any], bool], str], called: list[Any]) -> None:
        """Probe how a template continues after a turn of calls."""
        try:
            none, single, two = (render(called[:count], False) for count in (2, 3, 4))
        except VarlenError:
            return
        again = frozenset(mark for mark in self.known if two.count(mark) > single.count(mark) > 0)
        self.response_tokens = again - self._usual_tokens
        turn = none.rstrip()
        token = self.at(two, len(turn)) if two.startswith(turn) and not self.end(turn) else None
        self.opens = token is not None and token[0] not in self.response_tokens

    def end(self, turn: str) -> bool:
        """Whether a turn ends with a special token."""
        return turn.endswith(self.known)


def opening_of(
    plain: str | None, prompted: str | None, piece: str, slot: str, marks: EndMarks
) -> tuple[str | None, int]:
    """Return the header before a turn, and how many characters before its first slot are generated."""
    usual = marks.prompt
    if plain is None:  # a chat can't end there, for example one that begins with the assistant
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
    if usual:  # a turn that continues after a tool response, with a header or without
        return "", len(opening) - (len(usual) if opening.startswith(usual) else 0)
    # Without a generation prompt, the assistant continues right after the message before, so it generates the space.
    return (opening, 0) if opening.strip() else ("", len(opening))


def opened_by(plain: str | None, prompted: str | None, piece: str, slot: str) -> str:
    """Return what a generation prompt adds to the text before a turn's first slot: that slot may begin with it.

    Arguments as in `opening_of`.
    """
    if plain is None or prompted is None or not prompted.startswith(plain):
        return ""
    before = prompted.rpartition(slot)[2]
    return before[len(piece) :] if before.startswith(piece) else ""


def _after_usual(usual: str, piece: str) -> int:
    """Return how many characters follow the generation prompt, or its written prefix, before a turn."""
    for length in range(len(usual), 0, -1):
        at = piece.rfind(usual[:length])
        if at >= 0:
            cut = length if length == len(usual) else 1 + max(usual.rfind(end, 0, length) for end in "\n>")
            return len(piece) - at - cut if usual[:cut].strip() else 0
    return 0


def _partly(plain: str, prompt: str, piece: str, slot: str, marks: EndMarks) -> int:
    """Return what `opening_of` counts where a piece holds only part of the generation prompt."""
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
    """Return the text after a content that belongs to its message, and where its end-of-turn mark ends."""
    for opener in marks.response_tokens:
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
    word = re.match(r"\S+(?=\s)", own[:same])  # a mark, unlike the common prefix of two that differ
    return (word[0], word.end()) if word else (own if piece.startswith(own) else "", 0)


def call_closing(own: str, piece: str, marks: EndMarks, *, has_response: bool) -> tuple[str, int]:
    """Return the text after a call that belongs to its message, and where the mark that ends the turn ends.

    A turn of calls may end like other turns, with a mark for calls (`<|call|>`), or with the special token that opens
    tool responses (`<|observation|>`), which a model must write to stop. What the template writes for every single
    response is no part of the turn.
    """
    same = own[: _common(own, piece)]
    if marks.usual and marks.usual in same:
        stop = marks.with_eos(same, same.index(marks.usual) + len(marks.usual))
        return same[:stop], stop
    for run in reversed(marks.runs(same)):
        stop = run.start()
        while (token := marks.at(same, stop)) and token[0] not in marks.response_tokens:
            stop = token.end()
        if stop > run.start():
            return same[:stop], stop
    if same.rstrip() == own.rstrip() and has_response:
        stop = len(same.rstrip())
        token = marks.at(piece, stop)
        if token and token[0] not in marks.response_tokens:
            return piece[: token.end()], token.end()
    stop = len(same.rstrip())
    return same[:stop], stop


def _common(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    return next((k for k, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))

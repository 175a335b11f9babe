"""Locate the assistant's messages in a rendered chat, for templates that don't mark them themselves.

What an assistant generates begins where the generation prompt ends, and ends after its end-of-turn mark. Both are
read off a skeleton: the same roles with a short placeholder of private-use characters for each content. The real text
must equal the skeleton with the real contents filled in, character by character. Nothing is searched for, so user
content can't be mistaken for the template's text.

Where that fails, because the chat calls tools or the template inspects contents, turns are measured by prefixes: a
turn is what rendering the chat with it adds to the chat before it. Where that fails too, because the template
rewrites earlier turns, a turn is the text between the messages around it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from varlen.text.skeleton import EndMarks, Render, Skeleton, Turn, cut, free_character, masked, try_render

Value = str | dict[str, Any]  # what fills a slot: a text, or the arguments of a call
Forms = Callable[[Value], Iterable[str]]
Way = tuple[Any, ...]  # linked list of (previous, start, stop); empty at the beginning


class Located(NamedTuple):
    """Where one assistant's message stands in the text."""

    message: int
    # Ascending; usually one; several if another's message stands within it; none if nothing of it is written.
    spans: tuple[tuple[int, int], ...]
    has_mark: bool

    @property
    def stop(self) -> int:
        """The end of its last span."""
        return self.spans[-1][1] if self.spans else 0


def fill(skeleton: Skeleton, messages: list[dict[str, Any]], text: str) -> list[Located] | None:
    """Return where assistants speak in a text that is the skeleton filled in, else None.

    For closed skeletons; `fill_masked` handles open ones.
    """
    values = [slot.value_in(messages) for slot in skeleton.slots]
    return _turns_in(skeleton, skeleton.pieces, values, text, skeleton.hole)


def fill_masked(
    skeleton: Skeleton, render: Render, messages: list[dict[str, Any]], source: str, text: str, foreign: str
) -> list[Located] | None:
    """Return where assistants speak in a text that has tools, or calls with arguments of any form, else None.

    Renders the chat once more, with placeholders for all texts but arguments: the text between them is the template's
    own, a tool or an argument, and ends with what ends a turn.
    """
    slot = free_character(foreign + text)
    marked, slots = masked(messages, slot, source, arguments=False)
    rendered = try_render(render, marked, False)
    if rendered is None:
        return None
    pieces, order = cut(rendered, slot)
    if [slots[number] for number in order] != list(skeleton.slots):
        return None
    return _turns_in(skeleton, pieces, [slot.value_in(messages) for slot in skeleton.slots], text)


def _turns_in(
    skeleton: Skeleton, pieces: Sequence[str], values: Sequence[Value], text: str, hole: int | None = None
) -> list[Located] | None:
    """Find the turns in a text made of these pieces and the values between them; piece `hole` may be any text."""
    found = _locate(pieces, values, text, hole)
    if found is None:
        return None
    begins, ends = [0, *(stop for _, stop in found)], [*(start for start, _ in found), len(text)]
    located = []
    for turn in skeleton.turns:
        spans = []
        for region in turn.regions:
            start = ends[region.first] - len(region.lead)
            if region.is_bare:
                stop = begins[region.last] + len(region.mark)
                if not text.startswith(region.mark, begins[region.last]):
                    return None
            else:
                stop = ends[region.last] - len(region.tail)
                is_intact = text.startswith(region.tail, stop) and text.endswith(region.seal, 0, stop)
                if not is_intact or stop < begins[region.last]:
                    return None
            if start < begins[region.first] or not text.startswith(region.lead, start):
                return None
            if region.opened and text.startswith(region.opened, start, stop):
                start += len(region.opened)
            spans.append((start, stop))
        located.append(Located(message=turn.message, spans=tuple(spans), has_mark=turn.has_mark))
    return located


def _locate(
    pieces: Sequence[str], values: Sequence[Value], text: str, hole: int | None = None
) -> list[tuple[int, int]] | None:
    """Find the positions of contents in the text, verbatim or trimmed, else as JSON."""
    if hole is None and (whole := _as_they_are(pieces, values, text)) is not None:
        return whole
    for forms in (_forms, _json_forms):
        found = _around(pieces, values, text, forms, hole) if hole is not None else None
        if hole is None and (way := _walk(pieces, values, text, forms).get(len(text))):
            found = _along(way)
        if found is not None:
            return found
    return [] if hole is None and not values and text == pieces[0] else None


def _as_they_are(pieces: Sequence[str], values: Sequence[Value], text: str) -> list[tuple[int, int]] | None:
    """Find the positions of contents that are all written verbatim: a fast path for the first result of `_walk`."""
    found, stop = [], 0
    for value, piece in zip(values, pieces):
        start = stop + len(piece)
        if type(value) is not str or not text.startswith(piece, stop) or not text.startswith(value, start):
            return None
        stop = start + len(value)
        found.append((start, stop))
    return found if found and text[stop:] == pieces[-1] else None


def _around(
    pieces: Sequence[str], values: Sequence[Value], text: str, forms: Forms, hole: int
) -> list[tuple[int, int]] | None:
    """Find the positions of contents around a piece that may be any text, from both ends; None if ambiguous."""
    before = _walk([*pieces[:hole], ""], values[:hole], text, forms)
    length, behind = len(text), [piece[::-1] for piece in pieces[:hole:-1]]
    after = _walk(
        [*behind, ""], values[hole:][::-1], text[::-1], lambda value: (form[::-1] for form in forms(value))
    )
    if len(before) != 1 or len(after) != 1:
        return None
    (begin, way), (end, back) = *before.items(), *after.items()
    if begin > length - end:
        return None
    return [*_along(way), *((length - stop, length - start) for start, stop in reversed(_along(back)))]


def _walk(pieces: Sequence[str], values: Sequence[Value], text: str, forms: Forms) -> dict[int, Way]:
    """Match contents one by one; return the possible end positions, with the path to each."""
    reached: dict[int, Way] = {len(pieces[0]): ()} if text.startswith(pieces[0]) else {}
    for value, piece in zip(values, pieces[1:]):
        following: dict[int, Way] = {}
        for position, way in reached.items():
            for form in forms(value):
                stop = position + len(form)
                if text.startswith(form, position) and text.startswith(piece, stop):
                    following.setdefault(stop + len(piece), (way, position, stop))
                    if type(value) is not str:
                        break  # no spelling of an object is a prefix of another
        reached = following
    return reached


def _along(way: Way) -> list[tuple[int, int]]:
    """Return the positions on a path."""
    found = []
    while way:
        way, start, stop = way
        found.append((start, stop))
    return found[::-1]


def _forms(content: Value) -> Iterator[str]:
    """Yield the spellings of a content: verbatim first, then trimmed; arguments as JSON."""
    if isinstance(content, dict):
        yield json.dumps(content, ensure_ascii=False)
        if text := getattr(content, "text", None):
            yield text
        yield json.dumps(content)
        yield from (json.dumps(content, ensure_ascii=e, separators=(",", ":")) for e in (False, True))
        return
    yield content
    if content != content.strip():
        lines = (content.strip("\n"), content.lstrip("\n"), content.rstrip("\n"))
        trimmed = dict.fromkeys((content.strip(), content.lstrip(), content.rstrip(), *lines))
        yield from (form for form in trimmed if form != content)


def _json_forms(content: Value) -> Iterator[str]:
    """Yield the spellings of a content, including those as JSON strings."""
    yield from _forms(content)
    if isinstance(content, str):
        yield from dict.fromkeys(json.dumps(content, ensure_ascii=ascii_)[1:-1] for ascii_ in (False, True))


def by_prefixes(
    render: Render, messages: list[dict[str, Any]], text: str, skeleton: Skeleton | None, marks: EndMarks
) -> list[Located] | None:
    """Measure each assistant's message as what rendering the chat with it adds to the chat before it."""
    known = {turn.message: turn for turn in skeleton.turns} if skeleton else {}
    located: list[Located] = []
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
        if prompted == plain:  # without a generation prompt, skip the header
            if turn is None or turn.opening is None or not until.startswith(turn.opening, start):
                return None
            start += len(turn.opening)
        length, has_mark = _turn_length(until[start:], turn, marks)
        if not has_mark and marks.opens and turn is not None and turn.mark:
            # The token that opens the next message ends the turn.
            token = marks.at(text, start + length)
            if token is not None and turn.closing[: turn.mark].endswith(token[0]):
                length, has_mark = length + len(token[0]), True
        if located and start < located[-1].stop:
            return None
        located.append(Located(message=number, spans=((start, start + length),), has_mark=has_mark))
    return located


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
) -> list[Located] | None:
    """Take what stands between the other messages, minus the template's framing, as the assistant's."""
    others = [n for n, message in enumerate(messages) if message["role"] != "assistant"]
    contents = [messages[n]["content"] for n in others]
    if skeleton is None or not all(isinstance(content, str) for content in contents):
        return None
    slot = free_character(foreign + text)
    framing = [
        {**message, "content": f"{slot}{n}{slot}"} if message["role"] != "assistant" else message
        for n, message in enumerate(messages)
    ]
    framed = try_render(render, framing, False)
    pieces, order = cut(framed or "", slot)
    if order != others:
        return None
    found = _locate(pieces, contents, text)
    if found is None:
        return None
    starts = [0, *(stop for _, stop in found)]
    located = []
    for turn in skeleton.turns:
        if len(turn.regions) != 1:
            return None
        region = turn.regions[0]
        after = skeleton.pieces[region.last]
        is_single = turn.message + 1 == len(messages) or messages[turn.message + 1]["role"] != "assistant"
        number = sum(n < turn.message for n in others)
        opening = skeleton.pieces[region.first].removesuffix(region.lead)
        piece = pieces[number]
        fits = len(opening) + len(after) <= len(piece) and piece.startswith(opening) and piece.endswith(after)
        if not (is_single and fits) or (turn.message and messages[turn.message - 1]["role"] == "assistant"):
            return None
        start = starts[number]
        stop = start + len(piece) - len(after) + turn.mark
        located.append(
            Located(message=turn.message, spans=((start + len(opening), stop),), has_mark=turn.mark > 0)
        )
    return located

"""Render one conversation through a chat template, locate the assistant's text, and find what was lost."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varlen.errors import MissingExtraError, SettingError, SourceError
from varlen.files.losses import NO_LOSSES, Losses
from varlen.text.assistant_spans import Located, by_frames, by_prefixes, fill, fill_masked
from varlen.text.messages import Chat, joined, split_thoughts, well_formed
from varlen.text.skeleton import (
    Kind,
    Render,
    Shape,
    Skeleton,
    Turn,
    free_character,
    shape_of,
    skeleton_of,
    try_render,
)

if TYPE_CHECKING:
    from varlen.text.chat_template import ChatTemplate

_MOST_SKELETONS = 512
_WAYS_OUT = (
    "put {% generation %} ... {% endgeneration %} around what the assistant says in the template, "
    'choose another template, or supervise="all"'
)
_ASKED: list[dict[str, Any]] = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]
_CALLED: list[dict[str, Any]] = [
    _ASKED[0],
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "id": f"call0000{n}", "function": {"name": "f", "arguments": {}}}
            for n in (1, 2)
        ],
    },
    *({"role": "tool", "content": ".", "name": "f", "tool_call_id": f"call0000{n}"} for n in (1, 2)),
]


class Rendering:
    """One conversation rendered through a template."""

    def __init__(
        self, template: ChatTemplate, chat: Chat, tools: list[Any] | None, variables: Mapping[str, Any]
    ) -> None:
        self._template, self._tools, self._variables = template, tools, variables
        self._messages, self._off, self._weights = chat.messages, chat.off, chat.weights
        if not chat.is_plain and any(type(message.get("content")) is list for message in chat.messages):
            self._messages = joined(chat.messages) if template.wants(variables).joins else chat.messages
        self._program = template.program
        self._is_plain = tools is None and (
            chat.is_plain
            or all(len(message) == 2 and type(message.get("content")) is str for message in self._messages)
        )
        if tools:
            from varlen.text.wants import tools_in_form

            self._tools = tools_in_form(tools, template.wants(variables))
        self._foreign = template.source
        if not self._is_plain or variables:
            given = (spelled(tools, "the tools of a chat") if tools else "", spelled(variables, VARIABLES))
            self._foreign = "".join((template.source, *template.special_tokens.values(), *given))

    def render(self, some: list[dict[str, Any]], prompts: bool) -> str:
        """Render normalized messages in the form that the template takes."""
        if not self._is_plain or some is not self._messages:
            from varlen.text.wants import in_form

            some = in_form(some, self._template.wants(self._variables))
        return self._program.run(some, self._tools, prompts=prompts, variables=self._variables)

    def rendered(self, first: int, trained: Sequence[int], choice: Choice) -> Rendered:
        """Render, locate the assistant's text, and count losses."""
        if self._program.has_generation:
            return self._generated(first, trained, choice)
        text = well_formed(self.render(self._messages, False))
        if self._tools:
            self._check_tools(text)
        try:
            located, skeleton, is_exact = self._locate(text)
        except SourceError:
            if not choice.everything or self._off or self._weights:
                raise
            ends = self._messages[-1]["role"] == "assistant" and not self._template.marks.end(text.rstrip())
            return Rendered(text=text, spans=((0, len(text)),), needs_eos=ends)
        turns = {} if skeleton is None else {turn.message: turn for turn in skeleton.turns}
        if skeleton is not None and skeleton.is_open:  # by arguments without slots
            is_exact = is_exact and self._template.wants(self._variables).whole_arguments
        texts = None
        if not is_exact:
            texts = {where.message: "".join(text[a:b] for a, b in where.spans) for where in located}
        losses = self._losses(trained, turns, texts, choice)
        spans = [
            (w.message, span)
            for w in located
            if w.message in trained
            for span in w.spans
            if span[0] < span[1]
        ]
        if not spans:
            raise SourceError("the assistant says nothing in this chat, so nothing in it would be trained")
        weights = self._weigh([number for number, _ in spans]) if self._weights else ()
        last = len(self._messages) - 1
        needs_eos = any(w.message == last and not w.has_mark for w in located) and last in trained
        off = [span for w in located if w.message in self._off for span in w.spans]
        return Rendered(
            text=text,
            spans=tuple(span for _, span in spans),
            needs_eos=needs_eos,
            off=tuple(off),
            weights=weights,
            losses=losses,
        )

    def _weigh(self, owners: Sequence[int]) -> tuple[float, ...]:
        """Return the weight of each span, given its message."""
        return tuple(self._weights.get(number, 1.0) for number in owners)

    def _locate(self, text: str) -> tuple[list[Located], Skeleton | None, bool]:
        """Locate the assistant's messages by the skeleton of their shape, else by prefixes, else by frames."""
        messages, source = self._messages, self._template.source
        located, skeleton = self._filled(messages, text)
        if located is None and any("</think>" in (message.get("content") or "") for message in messages):
            apart = split_thoughts(messages)
            if self.render(apart, False) == text:  # the template treats both alike
                self._messages = messages = apart
                self._is_plain = False
                located, skeleton = self._filled(messages, text)
        if located is not None:
            return located, skeleton, True
        marks = self._template.marks
        if not (marks.response_tokens and any("tool_calls" in message for message in messages)):
            roles = [{"role": message["role"], "content": "."} for message in messages]
            bare = self._skeleton(shape_of(roles, source), roles)
            located = by_prefixes(self.render, messages, text, bare, marks)
            located = located or by_frames(self.render, messages, text, bare, self._foreign)
        if located is None:
            raise SourceError(
                "the chat template rewrites earlier turns, or their contents, so that what the assistant said "
                f"can't be located in the text; {twin_of(source) or _WAYS_OUT}"
            )
        return located, skeleton, False

    def _filled(
        self, messages: list[dict[str, Any]], text: str
    ) -> tuple[list[Located] | None, Skeleton | None]:
        """Locate the assistant's messages in a text that is the filled-in skeleton of their shape."""
        source = self._template.source
        shape = self._shape(messages)
        skeleton = self._skeleton(shape, messages) if shape is not None else None
        if skeleton is None:
            return None, None
        located = None if skeleton.is_open else fill(skeleton, messages, text)
        if located is None and (self._tools or any("tool_calls" in message for message in messages)):
            if any(slot.key == "arguments" for slot in skeleton.slots):
                skeleton = self._skeleton(shape, messages, "apart")
            if skeleton is not None:
                located = fill_masked(skeleton, self.render, messages, source, text, self._foreign)
        return located, skeleton

    def _shape(self, messages: list[dict[str, Any]]) -> Shape | None:
        """Return the shape of messages; fast for those of role and text only."""
        if self._is_plain and messages is self._messages:
            return tuple([(message["role"], 1) for message in messages])
        return shape_of(messages, self._template.source)

    def _skeleton(self, shape: Any, messages: list[dict[str, Any]], kind: Kind = "joined") -> Skeleton | None:
        """Return the cached skeleton of a shape."""
        template = self._template
        key = (kind, shape, bool(self._tools), spelled(self._variables, VARIABLES))
        if key not in template.skeletons:
            if not template.marks.is_known:
                self._probe_marks()
            if len(template.skeletons) >= _MOST_SKELETONS:
                template.skeletons.clear()
            # A row's tools stand between texts and bound no turn, so a placeholder stands for them.
            tool = free_character(self._foreign) if self._tools else None
            like = Rendering(
                template, Chat(messages=messages), _tools_named(tool) if tool else None, self._variables
            )
            template.skeletons[key] = skeleton_of(
                like.render, messages, template.source, template.marks, like._foreign, kind=kind, tool=tool
            )
        return template.skeletons[key]

    def _probe_marks(self) -> None:
        """Probe what ends a turn without calls, and what the template writes for each tool response."""
        marks = self._template.marks
        marks.is_known = True
        asked = Rendering(self._template, Chat(messages=_ASKED), None, self._template.variables)
        thought = [_ASKED[0], {**_ASKED[1], "reasoning_content": "."}]
        marks.probe_prompt(asked.render, thought)
        called = Rendering(self._template, Chat(messages=_CALLED), None, self._template.variables)
        marks.probe_responses(called.render, _CALLED)
        skeleton = skeleton_of(asked.render, _ASKED, self._template.source, marks, self._foreign)
        if skeleton is not None and skeleton.turns[0].has_mark:
            marks.usual = skeleton.turns[0].closing[: skeleton.turns[0].mark]

    def _losses(
        self,
        trained: Sequence[int],
        turns: Mapping[int, Any],
        texts: Mapping[int, str] | None,
        choice: Choice,
    ) -> Losses:
        """Count what isn't written of the trained messages."""
        messages = self._messages
        empty = sum(_is_empty(messages[number]) for number in trained)
        if texts is None and not any(turn.missing for turn in turns.values()):
            return Losses(empty_turns=empty) if empty else NO_LOSSES
        lost = list(
            lost_texts(messages, trained, turns, texts, lambda n: self.render(messages[: n + 1], False))
        )
        if not lost and not empty:
            return NO_LOSSES
        counted = losses_of(lost, allowed=choice.allow_unwritten, way_out=lambda: self._way_out(lost))
        return replace(counted, empty_turns=empty)

    def _way_out(self, lost: Sequence[Lost]) -> str:
        """Suggest how to keep what is lost: by the template's training twin, if it has one that writes it."""
        allow = "or allow the loss (allow_unwritten=True, --allow-unwritten)"
        twin = self._template.twin()
        if twin is not None:
            try:
                asked = Rendering(twin, Chat(messages=self._messages), self._tools, self._variables)
                text = asked.render(self._messages, False)
            except SourceError:
                text = ""
            if all(entry.key != "tool_calls" and entry.text.strip() in text for entry in lost):
                return f"{twin_of(self._template.source)}, {allow}"
        return f"choose another template, {allow}"

    def _check_tools(self, text: str) -> None:
        """Raise if the template doesn't write the tools."""
        tools = self._tools or []
        if self._template.wants(self._variables).tools:
            return
        functions = [tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in tools]
        names = [function.get("name") for function in functions]
        absent = [name for name in names if isinstance(name, str) and name not in text]
        if absent or not names:
            raise SourceError(
                f"the chat template doesn't write tools, and the row has {len(tools):,} ({', '.join(absent[:3])}); "
                "choose a template that does, or leave the column out"
            )

    def _marked(self) -> tuple[str, str, str, str]:
        """Render the chat with a mark before and after each generation block."""
        converted, program = self._messages, self._program
        if not self._is_plain:
            from varlen.text.wants import in_form

            converted = in_form(converted, self._template.wants(self._variables))
        messages = self._messages
        content = "".join(m["content"] for m in messages) if self._is_plain else spelled(messages, "a chat")
        start = free_character(content + self._foreign)
        stop = free_character(content + self._foreign + start)
        marked = program.run(converted, self._tools, marks=start + stop, variables=self._variables)
        text = marked.replace(start, "").replace(stop, "")
        if not program.has_bare_generation and text != self.render(messages, False):
            raise SourceError(
                "the chat template works with the text of its {% generation %} blocks, so that they can't be "
                "located; let it write them as they are"
            )
        return well_formed(text), marked, start, stop

    def _generated(self, first: int, trained: Sequence[int], choice: Choice) -> Rendered:
        """Read the spans off the template's own marks."""
        text, marked, start, stop = self._marked()
        if self._tools:
            self._check_tools(text)
        spans = marked_spans(marked, start, stop)
        messages = self._messages
        if not spans:
            raise SourceError("the {% generation %} blocks of the chat template mark nothing in this chat")
        speaking = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        off: list[tuple[int, int]] = []
        weights: tuple[float, ...] = ()
        if len(trained) < len(speaking) or self._weights:
            owned = self._owned(text, spans, speaking)
            if owned is not None:
                off = [span for n in speaking if n in self._off for span in owned[n]]
                spans = [span for n in trained for span in owned[n]]
                weights = self._weigh([n for n in trained for _ in owned[n]]) if self._weights else ()
            elif trained == [n for n in speaking if n >= first] and not self._weights:
                spans = after_prompt(self.render, messages, text, spans, first)
            else:
                raise SourceError(
                    "the chat template rewrites earlier turns, so that the {% generation %} blocks of single "
                    "messages can't be told apart; switch no message off, give none a weight, and don't set "
                    'supervise="last"'
                )
        shape = self._shape(messages)
        skeleton = self._skeleton(shape, messages, "unwritten") if shape is not None else None
        turns = {} if skeleton is None else {turn.message: turn for turn in skeleton.turns}
        losses = self._losses(trained, turns, dict.fromkeys(trained, text), choice)
        if not spans:
            raise SourceError("the assistant says nothing in this chat, so nothing in it would be trained")
        ends = len(messages) - 1 in trained and not self._template.marks.end(text[slice(*spans[-1])].rstrip())
        if ends:
            roles = [{"role": message["role"], "content": "."} for message in messages]
            bare = self._skeleton(shape_of(roles, self._template.source), roles)
            ends = not (bare and bare.turns[-1].mark)
        merged, weights = _merged(spans, weights)
        return Rendered(
            text=text, spans=merged, needs_eos=ends, off=tuple(off), weights=weights, losses=losses
        )

    def _owned(
        self, text: str, spans: list[tuple[int, int]], speaking: Sequence[int]
    ) -> dict[int, list[tuple[int, int]]] | None:
        """Assign generation blocks to the assistant's messages; None where that is ambiguous."""
        owned = of_messages(self.render, self._messages, text, spans, speaking)
        if owned is None:
            with suppress(SourceError):
                located = self._locate(text)[0]
                owned = of_located(
                    [(turn.message, turn.spans[0][0]) for turn in located if turn.spans], spans
                )
        if owned is None and len(spans) == len(speaking):
            return {number: [span] for number, span in zip(speaking, spans)}
        return owned if owned is not None and set(speaking) <= owned.keys() else None


def _merged(
    spans: Sequence[tuple[int, int]], weights: Sequence[float]
) -> tuple[tuple[tuple[int, int], ...], tuple[float, ...]]:
    """Merge adjacent spans of equal weight."""
    merged: list[tuple[int, int]] = []
    merged_weights: list[float] = []
    for (start, stop), weight in zip(spans, weights or itertools.repeat(1.0)):
        if merged and merged[-1][1] == start and merged_weights[-1] == weight:
            start = merged.pop()[0]
            merged_weights.pop()
        merged.append((start, stop))
        merged_weights.append(weight)
    return tuple(merged), tuple(merged_weights) if weights else ()


def _tools_named(name: str) -> list[Any]:
    """Return a placeholder for a row's tools."""
    parameters = {"type": "object", "properties": {}}
    return [{"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}]


def _is_empty(message: dict[str, Any]) -> bool:
    """Whether an assistant's message has no content."""
    content = message.get("content")
    if type(content) is str and content and not content[0].isspace():
        return False
    text = (
        any(part["text"].strip() for part in content)
        if isinstance(content, list)
        else (content or "").strip()
    )
    return not (text or message.get("tool_calls") or (message.get("reasoning_content") or "").strip())


# The result of rendering, and the options that determine what is supervised.


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A conversation as text, and which of its characters are supervised."""

    text: str  # as the template writes it
    spans: tuple[tuple[int, int], ...]  # supervised characters [start, stop), ascending, disjoint, none empty
    needs_eos: bool  # it ends with an assistant's message without an end mark, so append a supervised EOS
    off: tuple[tuple[int, int], ...] = ()  # assistant text that its author switched off
    weights: tuple[float, ...] = ()  # label weight of each span; empty where all are 1
    losses: Losses = NO_LOSSES  # what the template left out


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Options: what of a conversation is supervised, and what may be lost."""

    everything: bool = False  # supervise all of the text except what its author switches off
    last: bool = False  # supervise only the last of the assistant's messages
    allow_unwritten: bool = False  # count what a template drops of an assistant's turn, instead of raising
    row_weights: bool = False  # accept message weights other than 0 and 1


ALL = Choice()


def between(spans: Sequence[tuple[int, int]], length: int) -> tuple[tuple[int, int], ...]:
    """Return the gaps between spans of a text."""
    bounds = [0, *(edge for span in spans for edge in span), length]
    return tuple((a, b) for a, b in zip(bounds[::2], bounds[1::2]) if a < b)


VARIABLES = "the variables of a chat template"


def spelled(value: Any, what: str, *, is_sorted: bool = False) -> str:
    """Return JSON of a row's value that a template receives."""
    if not value:
        return ""
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=is_sorted)
    except (TypeError, ValueError, RecursionError) as error:
        schemas = " schemas" if "tools" in what else ""
        raise SourceError(f"{what} must be JSON{schemas}; these are not: {error}") from error


# Spans from a template's own {% generation %} marks.


def marked_spans(marked: str, start: str, stop: str) -> list[tuple[int, int]]:
    """Return the spans of outermost blocks, in positions of the text without marks."""
    spans, position, depth, opened = [], 0, 0, 0
    for number, piece in enumerate(marked.replace(stop, start).split(start)):
        if number:
            is_start = marked[position + number - 1] == start
            if is_start and not depth:
                opened = position
            depth += 1 if is_start else -1
            if not depth and position > opened:
                spans.append((opened, position))
        position += len(piece)
    return spans


def after_prompt(
    render: Render, messages: list[dict[str, Any]], text: str, spans: list[tuple[int, int]], first: int
) -> list[tuple[int, int]]:
    """Return the spans after the first messages, which are a prompt."""
    before = render(messages[:first], False).rstrip()
    if not text.startswith(before):
        raise SourceError(
            "the chat template rewrites the prompt when the completion follows, so that the completion "
            "can't be located; give the whole chat as `messages`"
        )
    return [span for span in spans if span[0] >= len(before)]


def of_messages(
    render: Render,
    messages: list[dict[str, Any]],
    text: str,
    spans: list[tuple[int, int]],
    speaking: Collection[int],
) -> dict[int, list[tuple[int, int]]] | None:
    """Assign spans to the assistant's messages by rendering prefixes; None where that is ambiguous."""
    owned: dict[int, list[tuple[int, int]]] = {}
    rest = list(spans)
    for number in speaking:
        until = try_render(render, messages[: number + 1], False)
        if until is None or not text.startswith(until.rstrip()):
            return None
        owned[number] = [span for span in rest if span[0] < len(until.rstrip())]
        rest = rest[len(owned[number]) :]
    return None if rest else owned


def of_located(
    begins: Collection[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> dict[int, list[tuple[int, int]]] | None:
    """Assign spans to the assistant's messages by where these begin; None where a span holds two."""
    owned: dict[int, list[tuple[int, int]]] = {number: [] for number, _ in begins}
    for start, stop in spans:
        before = [number for number, begin in begins if begin < stop]
        if not before or sum(start < begin < stop for _, begin in begins) > 1:
            return None
        owned[before[-1]].append((start, stop))
    return owned


# What a chat template doesn't write of the assistant's messages, by message, key and characters.
#
# A template is a program: it may silently drop thoughts, calls, or the text before `</think>`. Where a text is a
# filled-in skeleton, the skeleton lists what has no slot. Otherwise each text is searched for in its turn; JSON is
# compared by value, and neither white space nor case counts.

_THOUGHTS = "reasoning_content"
_INLINE = "content (<think>)"  # thoughts within a content
_SHOWN = 40
_SPACES = re.compile(r"\s+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """A text of an assistant's message that isn't written."""

    message: int
    key: str
    text: str
    by_design: bool  # it is an earlier turn's thoughts, which are written where no later user turn follows


def lost_texts(
    messages: Sequence[dict[str, Any]],
    trained: Collection[int],
    turns: Mapping[int, Turn],
    texts: Mapping[int, str] | None,
    render_to: Callable[[int], str],
) -> Iterator[Lost]:
    """Yield the texts of trained messages that a rendering doesn't contain."""
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
        if texts is None or number not in texts:
            continue
        content = message.get("content")
        if len(message) == 2 and type(content) is str and content.strip() in texts[number]:
            continue
        for key, text in _unfound(message, texts[number], missing):
            by_design = key in (_THOUGHTS, _INLINE) and is_earlier and _stands_in(text, render_to(number))
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
    """Yield key and text of what a turn doesn't contain, except what is known to be missing."""
    content, thoughts = message.get("content"), message.get(_THOUGHTS)
    if content and "content" not in known:
        for text in [part["text"] for part in content] if isinstance(content, list) else [content]:
            yield from _unfound_content(text, turn)
    if thoughts and _THOUGHTS not in known and not _stands_in(thoughts, turn):
        yield _THOUGHTS, thoughts
    if "tool_calls" not in known:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            is_written = call["function"]["name"] in turn and (
                _holds(turn, arguments) if not isinstance(arguments, str) else arguments.strip() in turn
            )
            if not is_written:
                yield "tool_calls", _spelled(call)


def _unfound_content(text: str, turn: str) -> Iterator[tuple[str, str]]:
    """Yield what is missing of a content; thoughts within it are treated separately."""
    if text.strip() in turn:
        return
    before, end, response = text.rpartition("</think>")
    thoughts = before.rpartition("<think>")[2]
    if not end or not _stands_in(response, turn):
        if not _stands_in(text, turn):
            yield "content", text
    elif not _stands_in(thoughts, turn):
        yield _INLINE, thoughts


def _stands_in(text: str, turn: str) -> bool:
    """Whether a turn contains a text, ignoring white space and case."""
    return text.strip() in turn or _SPACES.sub("", text).casefold() in _SPACES.sub("", turn).casefold()


def _holds(turn: str, value: Any) -> bool:
    """Whether a turn contains every key and leaf of a JSON value, as JSON or as plain text."""
    if isinstance(value, dict):
        return all(_holds(turn, key) and _holds(turn, held) for key, held in value.items())
    if isinstance(value, list):
        return all(_holds(turn, held) for held in value)
    forms = [str(value), json.dumps(value)]
    if isinstance(value, str):
        forms = [value.strip(), json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]]
    return any(form in turn for form in forms)


def losses_of(lost: Sequence[Lost], *, allowed: bool, way_out: Callable[[], str]) -> Losses:
    """Count what isn't written; raise if that isn't allowed."""
    own = [entry for entry in lost if not entry.by_design]
    if own and not allowed:
        first = own[0]
        shown = first.text.strip()
        shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"
        more = f", and {len(own) - 1:,} more" if len(own) > 1 else ""
        raise SourceError(
            f"the chat template doesn't write `{first.key}` of message {first.message + 1} "
            f"({len(first.text.strip()):,} characters: {shown!r}{more}), which would not be trained; {way_out()}"
        )
    return Losses(dropped=_counted([entry for entry in lost if entry.by_design]), unwritten=_counted(own))


def _counted(lost: Sequence[Lost]) -> dict[str, tuple[int, int]]:
    """Return (messages, characters) by key."""
    keys = dict.fromkeys(entry.key for entry in lost)
    return {
        key: (
            len({entry.message for entry in lost if entry.key == key}),
            sum(len(entry.text.strip()) for entry in lost if entry.key == key),
        )
        for key in keys
    }


# Training twins: variants of chat templates in TRL that keep earlier turns as they were written.
#
# A template that rewrites earlier turns can't be trained on all turns of a row. For some families TRL has a variant
# that doesn't, with `{% generation %}` marks. Both are found in the installed package by their text.

TWIN = "trl-training"  # value of `chat_template` that selects it


def twin_of(source: str) -> str:
    """Name the twin of a template and the option that selects it; "" where there is none."""
    name = _twins().get(source, ("", ""))[0]
    return (
        f"TRL's training twin of this template ({name}) keeps earlier turns: --chat-template {TWIN}"
        if name
        else ""
    )


def training_twin(source: str | None) -> str:
    """Return the text of a template's training twin."""
    if _folder() is None:
        raise MissingExtraError(
            f"chat_template={TWIN!r} takes the training templates of TRL, which isn't installed; run: pip install trl"
        )
    if source is not None and source in _twins():
        return _twins()[source][1]
    known = ", ".join(sorted(name for name, _ in _twins().values()))
    found = "TRL has no training twin of the tokenizer's chat template"
    if source is None:
        found = "the tokenizer has no chat template, so TRL has no training twin of it"
    raise SettingError(f"{found}; TRL has twins of: {known}; choose another chat_template")


def _folder() -> Path | None:
    """Return the folder of TRL's templates, without importing TRL."""
    try:
        spec = find_spec("trl")
    except (ImportError, ValueError):
        return None
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    folder = Path(locations[0]) / "chat_templates" if locations else None
    return folder if folder is not None and folder.is_dir() else None


@lru_cache(maxsize=1)
def _twins() -> dict[str, tuple[str, str]]:
    """Return the name and the text of each template's twin, by the template's text."""
    folder = _folder()
    if folder is None:
        return {}
    twins = {}
    for path in sorted(folder.glob("*_training.jinja")):
        original = folder / path.name.replace("_training", "")
        try:
            twins[original.read_text("utf-8")] = (path.stem, path.read_text("utf-8"))
        except OSError:
            continue
    return twins

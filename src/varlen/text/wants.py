"""Probe the form in which a chat template takes messages, by rendering short chats; and convert messages to it.

Templates differ: they take arguments of calls as an object or as text; null content as an absent key, as empty text
or as null; thoughts under one key or another. What a template doesn't support it drops, or writes as Python's repr,
without an error. So each form is tried with unique placeholders, and the first that writes all of them is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from varlen.errors import SourceError
from varlen.text.messages import THOUGHTS, Arguments

if TYPE_CHECKING:
    from varlen.text.jinja_sandbox import Program

Blank = Literal["absent", "empty", "null"]

_USER, _CONTENT, _NAME, _KEY, _VALUE, _THOUGHT, _TOOL, _OTHER, _MORE = (chr(0xF0000 + n) for n in range(9))
_NUMBER, _FRACTION = 9_081_726_354, 0.8172635
# Arguments of several types, of which a template may write some.
_ARGUMENTS: dict[str, Any] = {
    _KEY: _VALUE,
    _OTHER: {_CONTENT: _NUMBER, _THOUGHT: [_MORE, {_USER: _FRACTION}]},
    "last": -_NUMBER // 7,
}
_BLANKS: tuple[Blank, ...] = ("absent", "empty", "null")  # as transformers does first
_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "d",
        "parameters": {"type": "object", "properties": {"p": {"type": "string", "description": "d"}}},
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wants:
    """The form in which a template takes what is more than text."""

    arguments: Literal["object", "text"] | None  # of calls; None: it writes no calls
    null: Blank  # how a null content beside calls is passed
    empty: Blank  # how an empty content beside calls is passed
    thoughts: tuple[str, ...]  # keys for thoughts, in addition to those of transformers
    # Any arguments are written in full; otherwise those of each row must be searched for.
    whole_arguments: bool
    # Parts of a content are written as their joined texts, or unsupported, so that they are joined.
    joins: bool
    tools: Literal["wrapped", "bare"] | None  # OpenAI's form, or only their `function`; None: writes none


def wants_of(program: Program, variables: Mapping[str, Any]) -> Wants:
    """Probe what a template takes."""
    probe = _Probe(program, variables)
    arguments: Literal["object", "text"] | None = None
    null: Blank = "empty"
    empty: Blank = "empty"
    forms: tuple[Literal["object", "text"], ...] = ("object", "text")
    for form in forms:
        blanks = [blank for blank in _BLANKS if probe.writes_call(form, blank)]
        if arguments is None and (blanks or probe.writes_call(form, "text")):
            arguments = form
            null = blanks[0] if blanks else "empty"
            empty = "empty" if "empty" in blanks else null
    return Wants(
        arguments=arguments,
        null=null,
        empty=empty,
        thoughts=probe.thoughts(),
        whole_arguments=arguments is not None and probe.writes_all(arguments, null),
        joins=probe.joins_parts(),
        tools="wrapped" if probe.writes_tools("wrapped") else "bare" if probe.writes_tools("bare") else None,
    )


def in_form(messages: Sequence[dict[str, Any]], wants: Wants) -> list[dict[str, Any]]:
    """Convert normalized messages to the template's form."""
    return [_converted(message, number, wants) for number, message in enumerate(messages, start=1)]


def tools_in_form(tools: list[Any] | None, wants: Wants) -> list[Any] | None:
    """Convert tools to the template's form."""
    if not tools or wants.tools != "bare":
        return tools
    return [tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in tools]


def _converted(message: dict[str, Any], number: int, wants: Wants) -> dict[str, Any]:
    content = message.get("content")
    if len(message) == 2 and type(content) is str:
        return message
    given = dict(message)
    calls = message.get("tool_calls")
    if message["role"] == "assistant":
        if not content:
            blank = wants.null if content is None else wants.empty if calls else "empty"
            if blank == "absent":
                given.pop("content", None)
            else:
                given["content"] = "" if blank == "empty" else None
        thoughts = message.get("reasoning_content")
        if thoughts is not None:
            more = dict.fromkeys(wants.thoughts, thoughts)
            given = {"thinking": thoughts, **given, **more}
        if calls:
            given["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": _arguments(call["function"]["arguments"], number, wants),
                    },
                }
                for call in calls
            ]
    return given


def _arguments(
    arguments: Arguments | dict[str, Any] | str, number: int, wants: Wants
) -> dict[str, Any] | str:
    """Return arguments as an object or as text."""
    if isinstance(arguments, str):
        if wants.arguments == "object":
            raise SourceError(
                f"the arguments of a tool call of message {number} are text that is no JSON object, which the chat "
                f"template wants: {arguments[:60]!r}"
            )
        return arguments
    if wants.arguments == "text":
        text = getattr(arguments, "text", None)
        return json.dumps(arguments, ensure_ascii=False) if text is None else str(text)
    return dict(arguments)


def _calling(arguments: Any, content: str) -> dict[str, Any]:
    """Return a message with a call and a content, if not "absent"."""
    call = {"type": "function", "id": "call00000", "function": {"name": _NAME, "arguments": arguments}}
    message: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
    if content != "absent":
        message["content"] = {"empty": "", "null": None, "text": _CONTENT}[content]
    return message


class _Probe:
    """Renders chats of placeholders."""

    def __init__(self, program: Program, variables: Mapping[str, Any]) -> None:
        self._program, self._variables = program, variables

    def _render(self, message: dict[str, Any], tools: list[Any] | None = None, *, user: str = _USER) -> str:
        """Render a user's message and an assistant's; "" where the template fails."""
        return self._run([{"role": "user", "content": user}, message], tools)

    def _run(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        try:
            return self._program.run(messages, tools, variables=self._variables)
        except SourceError:
            return ""

    def writes_call(self, form: str, blank: str) -> bool:
        """Whether a call with its arguments in this form is written without Python's repr."""
        named: Any = {_KEY: _VALUE}
        given = json.dumps(named, ensure_ascii=False) if form == "text" else named
        message = _calling(given, blank)
        for tools in (None, [_PROBE_TOOL]):
            text = self._render(message, tools)
            is_written = all(mark in text for mark in (_NAME, _KEY, _VALUE))
            as_text = form != "text" or given in text
            spoilt = f"'{_KEY}'" in text or f'\\"{_KEY}' in text
            if (
                is_written
                and as_text
                and not spoilt
                and (blank == "text" or not self._writes_none(message, text, tools))
            ):
                return True
        return False

    def writes_all(self, form: str, blank: str) -> bool:
        """Whether arguments of several types are written with all their keys and values."""
        given = json.dumps(_ARGUMENTS, ensure_ascii=False) if form == "text" else _ARGUMENTS
        message = _calling(given, blank)
        marks = [_NAME, _KEY, _VALUE, _OTHER, _CONTENT, _THOUGHT, _MORE, _USER, "last"]
        marks += [str(_NUMBER), str(-_NUMBER // 7), str(_FRACTION)]
        texts = (self._render(message, tools, user=".") for tools in (None, [_PROBE_TOOL]))
        return any(all(mark in text for mark in marks) for text in texts)

    def _writes_none(self, message: dict[str, Any], text: str, tools: list[Any] | None) -> bool:
        """Whether absent content is written as "None"."""
        text_with_content = self._render({**message, "content": _CONTENT}, tools)
        return _CONTENT in text_with_content and text == text_with_content.replace(_CONTENT, "None")

    def thoughts(self) -> tuple[str, ...]:
        """Return another key under which thoughts must be passed, if the usual two aren't read."""
        usual = {"thinking": _THOUGHT, "reasoning_content": _THOUGHT}
        ways = [
            usual,
            *({**usual, key: _THOUGHT} for key in (*THOUGHTS, "thoughts", "thought") if key not in usual),
        ]
        for way in ways:
            if _THOUGHT in self._render({"role": "assistant", "content": _CONTENT, **way}):
                return tuple(key for key in way if key not in usual)
        return ()

    def joins_parts(self) -> bool:
        """Whether two parts are written as one text, or unsupported."""
        texts = (f" {_CONTENT} ", f" {_VALUE}\n")
        parts = [{"type": "text", "text": text} for text in texts]
        for role in ("user", "assistant"):
            contents = {"user": _USER, "assistant": _NAME}
            by_parts, by_text = (
                self._run([{"role": r, "content": {**contents, role: c}[r]} for r in contents], None)
                for c in (parts, "".join(texts))
            )
            if _CONTENT in by_parts and _VALUE in by_parts and "type" not in by_parts and by_parts != by_text:
                return False
        return True

    def writes_tools(self, form: Literal["wrapped", "bare"]) -> bool:
        """Whether the names of two tools in this form are written."""
        function: dict[str, Any] = _PROBE_TOOL["function"]
        tools: list[Any] = [function, {**function, "name": _OTHER}]
        if form == "wrapped":
            tools = [{"type": "function", "function": tool} for tool in tools]
        text = self._render({"role": "assistant", "content": _CONTENT}, tools)
        return _TOOL in text and _OTHER in text

"""Tool calls and tools, from whatever a row holds, in the form of OpenAI's chat completions.

A call is `{"type": "function", "id": ..., "function": {"name": ..., "arguments": {...}}}`, a tool
`{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}`. A template that wants
arguments as text is handed text: `wants.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from varlen.errors import SourceError
from varlen.files.rows import found_kind

_SHOWN = 40
_TOOL_KEYS = ("description", "parameters", "input_schema", "strict")


class Arguments(dict[str, Any]):
    """The arguments of a call, by name, and the text that the row gives them as."""

    __slots__ = ("text",)

    def __init__(self, named: Mapping[str, Any], text: str | None = None) -> None:
        super().__init__(named)
        self.text = text
        """JSON, as the row has it; None where it has an object."""


def as_calls(value: object, number: int) -> list[dict[str, Any]]:
    """Return the tool calls of a message, each in the one form."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):  # what is no JSON is refused as text
            value = json.loads(value)
    if isinstance(value, dict) and ("function" in value or "name" in value):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(call, dict) for call in value):
        raise SourceError(
            f"the tool_calls of message {number} must be a list of objects, found {found_kind(value)}"
        )
    return [_call(call, number) for call in value]


def spoken_calls(content: str, number: int) -> list[dict[str, Any]] | None:
    """Return the calls that a ShareGPT message of `function_call` has as its text: JSON of one call, or of a list."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return as_calls(value if isinstance(value, list) else [value], number)


def as_tools(value: object) -> list[Any] | None:
    """Return the tools of a row as objects; None where there are none."""
    if isinstance(value, str):
        value = (
            from_json(value, "`tools`") if value.strip() else None
        )  # a CSV file says "none" by an empty field
    if value is None:
        return None
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise SourceError(f"`tools` must be a list, found {found_kind(value)}")
    return [_tool(tool, number) for number, tool in enumerate(value, start=1)] or None


def from_json(text: str, what: str, wrong: str = "") -> Any:
    """Return what JSON text holds."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
        wrong = wrong or f"{what} is text, but not valid JSON"
        raise SourceError(f"{wrong} ({error.msg} at position {error.pos:,}): {shown!r}") from error
    except (ValueError, RecursionError) as error:  # a number of too many digits; lists within lists
        raise SourceError(f"the JSON text of {what} can't be read: {error}") from error


def _call(call: dict[str, Any], number: int) -> dict[str, Any]:
    """Return one call in the one form; a key whose value is null is absent, as in tables."""
    call = {key: value for key, value in call.items() if value is not None}
    function = call.get("function")
    if isinstance(function, str) and "arguments" in call:  # {"function": "name", "arguments": ...}
        call["name"], function = call.pop("function"), None
    if function is None:
        function = {key: call.pop(key) for key in ("name", "arguments", "parameters") if key in call}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise SourceError(
            f"a tool call of message {number} has no name; need "
            '{"function": {"name": ..., "arguments": {...}}}, found the keys '
            + (", ".join(f"`{key}`" for key in (function or call)) if isinstance(function, dict) else "none")
        )
    given = function.get("arguments", function.get("parameters"))
    rest = {
        k: v for k, v in function.items() if k not in ("name", "arguments", "parameters") and v is not None
    }
    named = {"name": function["name"], "arguments": _arguments(given, number), **rest}
    return {"type": "function", **call, "function": named}


def _arguments(given: object, number: int) -> Arguments | str:
    """Return arguments by name; text that is no JSON object stays text, which some templates take."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return Arguments({})
    if isinstance(given, dict):
        return Arguments(given)
    if not isinstance(given, str):
        raise SourceError(
            f"the arguments of a tool call of message {number} must be an object or its JSON text, "
            f"found {found_kind(given)}"
        )
    try:
        value = json.loads(given)
    except (ValueError, RecursionError):
        return given
    return Arguments(value, given) if isinstance(value, dict) else given


def _tool(tool: object, number: int) -> dict[str, Any]:
    """Return one tool in the one form."""
    if isinstance(tool, str):
        tool = from_json(tool, f"tool {number}")
    if not isinstance(tool, dict):
        raise SourceError(
            f"the tools of a chat must be JSON schemas; tool {number} is none of these: {found_kind(tool)}"
        )
    if isinstance(tool.get("function"), str):
        tool = {**tool, "function": from_json(tool["function"], f"the function of tool {number}")}
    if tool.get("function") is None and isinstance(tool.get("name"), str) and any(map(tool.get, _TOOL_KEYS)):
        bare = {key: value for key, value in tool.items() if key not in ("type", "function")}
        if "input_schema" in bare:
            bare["parameters"] = bare.pop("input_schema")
        tool = {"type": "function", "function": bare}
    function = tool.get("function")
    if isinstance(function, dict) and isinstance(function.get("parameters"), str):
        schema = from_json(function["parameters"], f"the parameters of tool {number}")
        tool = {**tool, "function": {**function, "parameters": schema}}
    return tool

"""Normalize a chat's messages, from any form that rows have; each fault is a sentence.

A normalized message is an object with these keys:

=====================  ===========================================================================================
`role`                 `system`, `developer`, `user`, `assistant` or `tool`
`content`              text; null where an assistant's message has none; several parts of text stay a list, since a
                       template may write something between them
`reasoning_content`    an assistant's thoughts, as text (also given as `reasoning` or `thinking`)
`tool_calls`           an assistant's calls, each `{"type": "function", "function": {"name", "arguments"}}`
others                 unchanged: `name`, `tool_call_id` and the like; null is the same as absent
=====================  ===========================================================================================

Flags that switch labels off (`weight: 0`, `train: false`, `loss: false`) or weigh them (`weight: 0.5`) are removed
from the messages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Number
from typing import Any, cast

import numpy as np

from varlen.errors import SourceError
from varlen.files.rows import READ_AS_TEXT, NotJson
from varlen.parsed import json_fault
from varlen.text.loss_masks import ALLOWED, OPTION

ROLES = ("system", "developer", "user", "assistant", "tool")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # the first is the common one

# Roles by the names of ShareGPT, Gemma and old OpenAI formats, and the common ones.
_ROLE_OF = {role: role for role in ROLES} | {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
_ROLES_OF_CALLS = ("function_call", "tool_call")  # roles of ShareGPT whose content is the JSON text of calls

_NEITHER = "a chat must be a list of messages or the JSON text of one; this text is neither"
_CALLS = ("tool_calls", "function_call")


def as_messages(value: object) -> list[dict[str, Any]]:
    """Return a row's normalized messages with content as text; flags are kept. Arguments as in `as_chat`."""
    messages = _messages(value)
    return joined(messages) if any(type(message.get("content")) is list for message in messages) else messages


def joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose contents are text, with parts joined."""
    return [
        {**message, "content": "".join(part["text"] for part in message["content"])}
        if type(message.get("content")) is list
        else message
        for message in messages
    ]


def split_thoughts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move `<think>...</think>` from contents to `reasoning_content`."""
    return [_apart(message) for message in messages]


def _apart(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, str) or "reasoning_content" in message:
        return message
    before, end, response = content.partition("</think>")
    blank, begin, thoughts = before.rpartition("<think>")
    thoughts = thoughts if begin else before
    if not end or blank.strip() or "</think>" in response or not (thoughts.strip() or response.strip()):
        return message
    return {**message, "reasoning_content": thoughts, "content": response}


def as_chat(value: object, *, keeps_weights: bool = False) -> Chat:
    """Normalize a row's messages, and return which of them aren't trained on.

    Messages of a common role and text only are passed on without a copy. `keeps_weights`: accept weights other than 0
    and 1; else they raise.
    """
    if isinstance(value, Chat):
        return value
    messages = _messages(value)
    if messages is value:
        return Chat(messages=messages, is_plain=True)
    weights = {
        index: weight
        for index, message in enumerate(messages)
        if (weight := weight_of(message, index + 1, keeps_weights=keeps_weights)) != 1
    }
    off = frozenset(index for index, weight in weights.items() if weight == 0)
    return Chat(messages=messages, off=off, weights={i: w for i, w in weights.items() if w != 0})


def _messages(value: object) -> list[dict[str, Any]]:
    """Normalize a row's messages but for their flags; return a list that needs no change as it is."""
    if isinstance(value, str):
        value = from_json(value, "the chat", _NEITHER)
    if isinstance(value, dict):
        value = _rows(value)
    if not isinstance(value, list):
        raise SourceError(f"a chat must be a list of messages, found {_kind_in_words(value)}")
    if not value:
        raise SourceError("the chat is an empty list; a chat needs messages, and one from the assistant")
    known = _ROLE_OF
    for message in value:
        if not (
            type(message) is dict
            and len(message) == 2
            and type(message.get("content")) is str
            and type(role := message.get("role")) is str
            and known.get(role) == role
        ):
            break
    else:
        return value
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(value, start=1):
        made, is_call = _plain_message(message) or _as_message(message, number)
        if is_call and messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            # ShareGPT's message and the call after it are one turn.
            check_one_turn(messages[-1], made, number)
            messages[-1] = {**made, **messages[-1], "tool_calls": made["tool_calls"]}
        else:
            messages.append(made)
    return messages


def well_formed(text: str) -> str:
    """Return the text of a chat; raise if it can't be encoded."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SourceError(
            f"the chat holds half a character (a lone surrogate at position {error.start:,} of its text); "
            "mend or leave out the row"
        ) from error
    return text


def without_nulls(value: Any, *, is_chat: bool) -> Any:
    """Drop null keys from objects in a table's value: in tables, null means absent.

    A table gives every object the keys of all rows, so a call's `arguments` would name those of all other calls, and
    a model would learn to write them.
    """
    if not is_chat:
        return _pruned(value)
    if isinstance(value, dict):  # a dict of lists, or a wrapper of messages
        return {
            key: _pruned(held) if key in _CALLS else without_nulls(held, is_chat=True)
            for key, held in value.items()
        }
    if not isinstance(value, list):
        return value
    return [
        {key: _pruned(held) if key in _CALLS else held for key, held in message.items()}
        if isinstance(message, dict) and any(message.get(call) for call in _CALLS)
        else message
        for message in value
    ]


def _pruned(value: Any) -> Any:
    """Drop null keys of objects at any depth."""
    if isinstance(value, dict):
        return {key: _pruned(held) for key, held in value.items() if held is not None}
    return [_pruned(entry) for entry in value] if isinstance(value, list) else value


def _rows(columns: dict[Any, Any]) -> object:
    """Turn an object of lists into a list of objects (`datasets` stores sequences of objects so).

    Unwraps `{"messages": [...]}` with a single key.
    """
    wrapped = [columns[key] for key in ("messages", "conversations") if isinstance(columns.get(key), list)]
    if wrapped:
        return wrapped[0]
    lists = {key: held for key, held in columns.items() if held is not None}
    count = {len(held) if isinstance(held, list) else -1 for held in lists.values()}
    if len(count) != 1 or -1 in count:
        return columns
    return [dict(zip(lists, entries)) for entries in zip(*lists.values())]


def _plain_message(message: object) -> tuple[dict[str, Any], bool] | None:
    """Fast path of `_as_message` for messages of role and text only; None for any other."""
    if type(message) is not dict or len(message) != 2:
        return None
    role, content = message.get("role"), message.get("content")
    if type(role) is not str or _ROLE_OF.get(role) != role:
        return None
    if type(content) is str:
        return message, False
    if type(content) is not list or not content:
        return None
    for part in content:
        if not (type(part) is dict and len(part) == 2 and part.get("type") == "text"):
            return None
        if type(part.get("text")) is not str:
            return None
    return {"role": role, "content": content if len(content) > 1 else content[0]["text"]}, False


def _as_message(message: object, number: int) -> tuple[dict[str, Any], bool]:
    """Normalize one message; return it, and whether it is a ShareGPT message that holds only calls."""
    if not isinstance(message, dict):
        raise SourceError(
            f"message {number} must be an object with role and content, found {_kind_in_words(message)}"
        )
    given_role, role = _role_of(message, number)
    if "content" not in message and isinstance(message.get("value"), str):
        message = {("content" if key == "value" else key): value for key, value in message.items()}
    result: dict[str, Any] = {"role": role}
    for key, value in message.items():
        if not isinstance(key, str):
            raise SourceError(f"message {number} has the key {key!r}; keys must be text")
        if key in _CALLS and not value and value != "":
            continue  # tables give every message an empty list
        if key == "content" or (value is not None and key not in ("role", "from")):
            result[key] = value
    calls = None
    if (
        given_role in _ROLES_OF_CALLS
        and isinstance(result.get("content"), str)
        and "tool_calls" not in result
    ):
        calls = calls_in_text(result["content"], number)
        if calls:
            result["tool_calls"], result["content"] = calls, None
    if isinstance(result.get("content"), list):
        _take_parts(result, number)
    if role == "assistant":
        _take_thoughts(result, number)
        if "function_call" in result and "tool_calls" not in result:
            result["tool_calls"] = [result.pop("function_call")]
        if "tool_calls" in result:
            result["tool_calls"] = as_calls(result["tool_calls"], number)
            if not result["tool_calls"]:
                del result["tool_calls"]
    _check_content(result, number)
    return result, bool(calls)


def _check_content(message: dict[str, Any], number: int) -> None:
    """Raise if a message has neither content nor calls."""
    content, role = message.get("content"), message["role"]
    if content is None:
        if role != "assistant" or not (message.get("tool_calls") or message.get("reasoning_content")):
            seen = ", ".join(f"`{key}`" for key in list(message)[:12])
            lacks = "null as its content" if "content" in message else "no content"
            raise SourceError(
                f"message {number} ({role}) has {lacks}; only an assistant's message with tool_calls may have none; "
                f"found the keys {seen}"
            )
    elif not isinstance(content, str | list):
        raise SourceError(
            f"the content of message {number} ({role}) must be text or a list of parts of text, "
            f"found {_kind_in_words(content)}"
            + ("; an object may stand there as its JSON text" if isinstance(content, dict) else "")
        )


def _role_of(message: dict[Any, Any], number: int) -> tuple[str, str]:
    """Return the role as given, and its common name."""
    role = message.get("role")
    if role is None:
        role = message.get("from")
    if role is None:
        seen = ", ".join(f"`{key}`" for key in list(message)[:12]) or "none"
        raise SourceError(f"message {number} has no role; need `role` and `content`, found the keys {seen}")
    known = _ROLE_OF.get(role) if isinstance(role, str) else None
    if known is None:
        raise SourceError(
            f"message {number} has the unknown role {role!r}; known: {', '.join(ROLES)}, and "
            "ShareGPT's words (human, gpt, ...)" + (f"; {READ_AS_TEXT}" if isinstance(role, bytes) else "")
        )
    return role, known


def _take_parts(message: dict[str, Any], number: int) -> None:
    """Normalize a content's parts: a single text to a string, thoughts to their key."""
    texts: list[str] = []
    thoughts: list[str] = []
    for part in message["content"]:
        if (
            isinstance(part, dict)
            and part.get("type") in ("thinking", "reasoning")
            and message["role"] == "assistant"
        ):
            held = [part[key] for key in ("thinking", "reasoning", "text") if part.get(key) is not None]
            thoughts.append(_joined_text(held[0] if held else None, number))
        else:
            texts.append(_part_text(part, number))
    if thoughts and not any(message.get(key) for key in THOUGHTS):
        message["reasoning_content"] = "".join(thoughts)
    if len(texts) > 1:
        message["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        message["content"] = "".join(texts) if texts or not thoughts else None


def _joined_text(held: object, number: int) -> str:
    """Return a text that may be given as parts."""
    if isinstance(held, list):
        return "".join(_part_text(part, number) for part in held)
    return _part_text({"type": "text", "text": held}, number)


def _take_thoughts(message: dict[str, Any], number: int) -> None:
    """Store an assistant's thoughts under their common key."""
    given = {key: message[key] for key in THOUGHTS if key in message}
    if not given:
        return
    texts = {
        key: _joined_text(held, number) if isinstance(held, list) else held for key, held in given.items()
    }
    odd = [key for key, held in texts.items() if not isinstance(held, str)]
    if odd:
        raise SourceError(
            f"`{odd[0]}` of message {number} must be text, found {_kind_in_words(given[odd[0]])}"
        )
    distinct = {held for held in texts.values() if held} or {""}
    if len(distinct) > 1:
        names = " and ".join(f"`{key}`" for key, held in texts.items() if held)
        raise SourceError(f"message {number} has {names}, which differ; both are its thoughts: keep one")
    for key in given:
        del message[key]
    message["reasoning_content"] = distinct.pop()


def _part_text(part: object, number: int) -> str:
    """Return the text of one part of a content."""
    if isinstance(part, dict):
        flags = [key for key in FLAGS if part.get(key) not in (None, True, 1)]
        if flags:
            raise SourceError(
                f"a part of message {number} has `{flags[0]}`: {part[flags[0]]!r}; only whole messages can be "
                "switched off: give the part a message of its own, or leave the flag out"
            )
        text = part.get("text")
        if part.get("type", "text") in ("text", "input_text", "output_text") and isinstance(text, str):
            return text
        kind = part.get("type")
        seen = f"a part of type {kind!r}" if kind != "text" else f"a text that is {_kind_in_words(text)}"
    else:
        seen = _kind_in_words(part)
    raise SourceError(
        f"the content of message {number} may hold only parts of text, "
        f'{{"type": "text", "text": "..."}}; found {seen}'
    )


def _kind_in_words(value: object) -> str:
    """Name a value's kind as a sentence has it, with its article."""
    if isinstance(value, NotJson):
        return value.why
    kinds = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        bytes: f"bytes; {READ_AS_TEXT}",
    }
    return "null" if value is None else kinds.get(type(value), type(value).__name__)


# Flags of a message that switch its labels on or off, or weigh them.

# Keys for whether a message is trained on: of OpenAI, Mistral, axolotl and ms-swift.
FLAGS = ("weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight", "loss_scale")
_SWITCHES = ("train", "training", "trainable", "masked")  # keys that switch labels and never weigh them
_MASKED = "masked"  # Torchtune's key, with inverted meaning
# Axolotl's keys for parts of a message.
_DETAILS = ("training_detail", "train_detail", "reasoning_training_detail", "train_details")
_ALL = frozenset((*FLAGS, _MASKED, *_DETAILS))


def weight_of(message: dict[str, Any], number: int, *, keeps_weights: bool) -> float:
    """Remove the flags of a message; return the weight of its labels: 0 where it isn't trained on, 1 by default."""
    if _ALL.isdisjoint(message):
        return 1.0
    for key in _DETAILS:
        if message.pop(key, None):
            raise SourceError(
                f"message {number} has `{key}`, labels of single characters, which are not read; switch whole "
                "messages by `train`, or mark the parts by `{% generation %}` in the template"
            )
    is_on, weights = True, {}
    for key in (*FLAGS, _MASKED):
        value = message.pop(key, None)
        if value is None:
            continue
        flag = _number(value)
        if flag in (0, 1):
            is_on = is_on and bool(flag) != (key == _MASKED)
            continue
        weights[key] = _weight(key, flag, value, number, keeps_weights=keeps_weights)
    if len(set(weights.values())) > 1:
        listed = " and ".join(f"the {key} {weight:g}" for key, weight in weights.items())
        raise SourceError(f"message {number} has {listed}, and one weight is meant; keep one of them")
    return next(iter(weights.values()), 1.0) if is_on else 0.0


def check_one_turn(earlier: dict[str, Any], message: dict[str, Any], number: int) -> None:
    """Raise if two messages of one turn have different flags, since a turn has one weight."""
    for key in _ALL.intersection((*earlier, *message)):
        usual = 0 if key == _MASKED else None if key in _DETAILS else 1
        held = [usual if each.get(key) is None else each[key] for each in (earlier, message)]
        if _number(held[0]) != _number(held[1]):
            raise SourceError(
                f"messages {number - 1} and {number} are one turn, and have the {key} {held[0]!r} and {held[1]!r}; "
                "make them the same"
            )


def _number(value: Any) -> Any:
    """Return a flag as a number if it is or spells one."""
    if isinstance(value, str):
        text = value.strip().lower()
        if text in ("true", "false"):
            return float(text == "true")
        with suppress(ValueError):
            return float(text) if "_" not in text else value
    return value


def _weight(key: str, flag: Any, value: Any, number: int, *, keeps_weights: bool) -> float:
    """Validate a weight other than 0 and 1."""
    weight = math.nan
    if isinstance(flag, Number):
        with suppress(OverflowError):
            weight = float(cast(Any, flag))
    is_one = key not in _SWITCHES and is_weight(weight)
    if is_one and keeps_weights:
        return weight
    if key in _SWITCHES or not keeps_weights:
        out = (
            f"{OPTION}, make it one of them, or leave the message's row out"
            if is_one
            else "make it one of them, or leave the message's row out"
        )
        raise SourceError(
            f"message {number} has the {key} {value!r}; only 0 and 1 (false and true) can be kept: {out}"
        )
    raise SourceError(
        f"message {number} has the {key} {value!r}; {ALLOWED}: mend or leave out the message's row"
    )


def is_weight(weight: float) -> bool:
    """Whether a number is a valid loss weight: not negative, finite in float32, and not underflowing to 0."""
    if not 0 <= weight <= float(np.finfo(np.float32).max):
        return False
    return weight == 0 or float(np.float32(weight)) > 0


# A chat: normalized messages, and the weights of their labels.


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """The messages of a row, and which of them are trained on."""

    messages: list[dict[str, Any]]
    off: frozenset[int] = frozenset()  # indexes of messages whose labels are switched off
    is_plain: bool = False  # all messages consist of role and text only
    weights: Mapping[int, float] = field(default_factory=dict)  # by index, where neither 0 nor 1

    def shifted(self, number: int) -> tuple[frozenset[int], dict[int, float]]:
        """Return `off` and `weights` shifted by a number of preceding messages."""
        return (
            frozenset(index + number for index in self.off),
            {index + number: weight for index, weight in self.weights.items()},
        )


# Normalize tool calls and tools to the form of OpenAI's chat completions.
#
# A call is `{"type": "function", "id": ..., "function": {"name": ..., "arguments": {...}}}`, a tool `{"type":
# "function", "function": {"name": ..., "description": ..., "parameters": {...}}}`. `wants.py` converts arguments back
# to text for templates that need it.

_SHOWN = 40
_TOOL_KEYS = ("description", "parameters", "input_schema", "strict")


class Arguments(dict[str, Any]):
    """The arguments of a call, by name, and their JSON text in the row."""

    __slots__ = ("text",)

    def __init__(self, named: Mapping[str, Any], text: str | None = None) -> None:
        super().__init__(named)
        self.text = text  # None where the row has an object


def as_calls(value: object, number: int) -> list[dict[str, Any]]:
    """Normalize the tool calls of a message."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):  # text that isn't JSON is rejected below
            value = json.loads(value)
    if isinstance(value, dict) and ("function" in value or "name" in value):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(call, dict) for call in value):
        raise SourceError(
            f"the tool_calls of message {number} must be a list of objects, found {_kind_in_words(value)}"
        )
    return [_call(call, number) for call in value]


def calls_in_text(content: str, number: int) -> list[dict[str, Any]] | None:
    """Return the calls in the text of a ShareGPT `function_call`: JSON of a call, or of a list."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return as_calls(value if isinstance(value, list) else [value], number)


def as_tools(value: object) -> list[Any] | None:
    """Normalize the tools of a row; None where there are none."""
    if isinstance(value, str):
        value = from_json(value, "`tools`") if value.strip() else None  # an empty CSV field means none
    if value is None:
        return None
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise SourceError(f"`tools` must be a list, found {_kind_in_words(value)}")
    return [_tool(tool, number) for number, tool in enumerate(value, start=1)] or None


def from_json(text: str, what: str, wrong: str = "") -> Any:
    """Parse JSON text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
        wrong = wrong or f"{what} is text, but not valid JSON"
        raise SourceError(f"{wrong} ({json_fault(error)} at position {error.pos:,}): {shown!r}") from error
    except (ValueError, RecursionError) as error:  # a number of too many digits, or nested too deeply
        raise SourceError(f"the JSON text of {what} can't be read: {error}") from error


def _call(call: dict[str, Any], number: int) -> dict[str, Any]:
    """Normalize one call; null keys are absent, as in tables."""
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
    """Return arguments by name; text that is no JSON object stays text, which some templates accept."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return Arguments({})
    if isinstance(given, dict):
        return Arguments(given)
    if not isinstance(given, str):
        raise SourceError(
            f"the arguments of a tool call of message {number} must be an object or its JSON text, "
            f"found {_kind_in_words(given)}"
        )
    try:
        value = json.loads(given)
    except (ValueError, RecursionError):
        return given
    return Arguments(value, given) if isinstance(value, dict) else given


def _tool(tool: object, number: int) -> dict[str, Any]:
    """Normalize one tool."""
    if isinstance(tool, str):
        tool = from_json(tool, f"tool {number}")
    if not isinstance(tool, dict):
        raise SourceError(
            f"the tools of a chat must be JSON schemas; tool {number} is none of these: {_kind_in_words(tool)}"
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

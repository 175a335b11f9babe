"""Messages of a chat, from whatever a row holds: one spelling of roles and keys, each fault in a sentence."""

from __future__ import annotations

import json
from typing import Any

from varlen.errors import SourceError

ROLES = ("system", "developer", "user", "assistant", "tool")

_ROLE_OF = {role: role for role in ROLES} | {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
}
"""ShareGPT's words, Gemma's and OpenAI's old ones beside the common ones."""

_CALLS = ("tool_calls", "function_call")


def as_messages(value: object) -> list[dict[str, Any]]:
    """Return a row's messages with `role` and `content` by their common names.

    ShareGPT's `from` and `value` are renamed; content given as parts of text is joined; keys whose value is null
    are left out, since a Parquet file gives them for what a message doesn't have, but for a null `content`,
    which stays. Messages that need none of this are handed on as they are, not copied.

    Args:
        value: a list of messages, or a JSON string of one.

    Raises:
        SourceError: it is no list of messages; the message is named, counted from 1.
    """
    if isinstance(value, str):
        value = _from_json(value)
    if not isinstance(value, list):
        raise SourceError(f"a chat must be a list of messages, found {_json_kind(value)}")
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
            return [_as_message(message, number) for number, message in enumerate(value, start=1)]
    return value


def well_formed(text: str) -> str:
    """Return the text of a chat, which must be such as a tokenizer can take.

    Raises:
        SourceError: it holds half a character, as JSON can spell it.
    """
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
    """Return a value of a table without what its objects hold as null: there, that is how a key is absent.

    A column of a table gives every object all keys that any row's has, so a call's `arguments` would name those of
    all other calls, and a model would learn to write them.

    Args:
        value: messages, or tools.
        is_chat: of messages, leave out what their calls hold; their own nulls are `as_messages`' to judge.
    """
    if not is_chat:
        return _pruned(value)
    if not isinstance(value, list):
        return value
    return [
        {key: _pruned(held) if key in _CALLS else held for key, held in message.items()}
        if isinstance(message, dict) and any(message.get(call) for call in _CALLS)
        else message
        for message in value
    ]


def _pruned(value: Any) -> Any:
    """Return a value without the nulls of objects, however deep they lie."""
    if isinstance(value, dict):
        return {key: _pruned(held) for key, held in value.items() if held is not None}
    return [_pruned(entry) for entry in value] if isinstance(value, list) else value


def _from_json(text: str) -> object:
    """Read a list of messages that was kept as text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        shown = text if len(text) <= 40 else text[:40] + "…"
        raise SourceError(
            f"a chat must be a list of messages or the JSON text of one; this text is neither "
            f"({error.msg} at position {error.pos:,}): {shown!r}"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of too many digits; lists within lists
        raise SourceError(f"the JSON text of the chat can't be read: {error}") from error


def _as_message(message: object, number: int) -> dict[str, Any]:
    """Return one message with its role and content checked and named as is common."""
    if not isinstance(message, dict):
        raise SourceError(
            f"message {number} must be an object with role and content, found {_json_kind(message)}"
        )
    role = _role_of(message, number)
    if "content" not in message and isinstance(message.get("value"), str):
        message = {("content" if key == "value" else key): value for key, value in message.items()}
    kept: dict[str, Any] = {"role": role}
    for key, value in message.items():
        if not isinstance(key, str):
            raise SourceError(f"message {number} has the key {key!r}; keys must be text")
        if key == "content" or (value is not None and key not in ("role", "from")):
            kept[key] = value
    content = kept.get("content")
    if isinstance(content, list):
        kept["content"] = "".join(_part_text(part, number) for part in content)
    elif content is None:
        if role != "assistant" or not any(kept.get(call) for call in _CALLS):
            raise SourceError(
                f"message {number} ({role}) has no content; only an assistant's message with tool_calls may have none"
            )
    elif not isinstance(content, str):
        raise SourceError(
            f"the content of message {number} ({role}) must be text or a list of parts of text, "
            f"found {_json_kind(content)}"
        )
    if "tool_calls" in kept:
        kept["tool_calls"] = _tool_calls(kept["tool_calls"], number)
    return kept


def _role_of(message: dict[Any, Any], number: int) -> str:
    """Return who speaks, by its common name."""
    role = message.get("role")
    if role is None:
        role = message.get("from")
    if role is None:
        seen = ", ".join(f"`{key}`" for key in list(message)[:12]) or "none"
        raise SourceError(f"message {number} has no role; need `role` and `content`, found the keys {seen}")
    known = _ROLE_OF.get(role) if isinstance(role, str) else None
    if known is None:
        raise SourceError(f"message {number} has the unknown role {role!r}; known: {', '.join(ROLES)}")
    return known


def _part_text(part: object, number: int) -> str:
    """Return the text of one part of a content."""
    if isinstance(part, dict):
        text = part.get("text")
        if part.get("type", "text") == "text" and isinstance(text, str):
            return text
        kind = part.get("type")
        seen = f"a part of type {kind!r}" if kind != "text" else f"a text that is {_json_kind(text)}"
    else:
        seen = _json_kind(part)
    raise SourceError(
        f"the content of message {number} may hold only parts of text, "
        f'{{"type": "text", "text": "..."}}; found {seen}'
    )


def _tool_calls(calls: object, number: int) -> list[Any]:
    """Return the calls of a message; what a Parquet file adds as null to a call is left out."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise SourceError(
            f"the tool_calls of message {number} must be a list of objects, found {_json_kind(calls)}"
        )
    return [{key: value for key, value in call.items() if value is not None} for call in calls]


def _json_kind(value: object) -> str:
    """Name a value's kind in JSON's words."""
    kinds = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return "null" if value is None else kinds.get(type(value), type(value).__name__)

"""ChatML, the template where a tokenizer has none of its own; plain chats are written without running it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from varlen.source.chats.messages import well_formed

CHATML = """\
{% for message in messages %}
{% if message['tool_calls'] or message['function_call'] %}
{{ raise_exception("ChatML has no form for tool calls; use the template of the model's tokenizer") }}
{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""

CLOSING = "<|im_end|>\n"
_HEADERS = {role: f"<|im_start|>{role}\n" for role in ("system", "developer", "user", "assistant", "tool")}


def write_chatml(
    messages: list[dict[str, Any]], trained: Collection[int] | None, first: int, mark: int
) -> tuple[str, list[tuple[int, int]], int] | None:
    """Write plain messages as ChatML; None for any other chat.

    Args:
        messages: of role and content.
        trained: index of those that are; None: the assistant's from number `first` on.
        first: index.
        mark: characters of the closing that are trained.

    Returns:
        The text, its spans, and how many of the turns say nothing.
    """
    pieces: list[str] = []
    spans = []
    position = number = empty = 0
    assistant = _HEADERS["assistant"]
    try:
        for message in messages:
            content = message["content"]
            header = _HEADERS[message["role"]]
            if len(message) != 2 or type(content) is not str:
                return None
            pieces += (header, content, CLOSING)
            start = position + len(header)
            position = start + len(content) + len(CLOSING)
            if header is assistant and (number >= first if trained is None else number in trained):
                spans.append((start, start + len(content) + mark))
                empty += not content or content.isspace()
            number += 1
    except (TypeError, KeyError):
        return None
    if not spans or type(messages) is not list:
        return None
    return well_formed("".join(pieces)), spans, empty

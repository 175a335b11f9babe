"""Read what the assistant says off a template's own {% generation %} marks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from varlen.errors import SourceError
from varlen.source.chats.slots import Render, try_render


def between(marked: str, start: str, stop: str) -> list[tuple[int, int]]:
    """Return where outermost blocks stand, in positions of the text without marks."""
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
    """Return the spans that lie behind the first messages, which are a prompt.

    Raises:
        SourceError: the template rewrites the prompt.
    """
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
    """Return which spans belong to which of the assistant's messages; None where that can't be told.

    Args:
        render: the template.
        messages: the chat.
        text: of the chat.
        spans: of the messages `speaking`.
        speaking: index of each, ascending.
    """
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
    """Return which spans belong to which of the assistant's messages, by where these begin; None where one holds two.

    Args:
        begins: number of each message, and where its turn begins in the text, ascending.
        spans: ascending.
    """
    owned: dict[int, list[tuple[int, int]]] = {number: [] for number, _ in begins}
    for start, stop in spans:
        before = [number for number, begin in begins if begin < stop]
        if not before or sum(start < begin < stop for _, begin in begins) > 1:
            return None
        owned[before[-1]].append((start, stop))
    return owned

"""What becomes of a conversation: its text, what of it is supervised, and what is lost; and what is asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from varlen.errors import SourceError
from varlen.source.losses import Losses

NO_LOSSES = Losses()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A conversation as text, and what of it the assistant said."""

    text: str
    """The conversation as its template writes it."""
    spans: tuple[tuple[int, int], ...]
    """Supervised characters [start, stop), ascending, disjoint, none empty."""
    needs_eos: bool
    """The last message is the assistant's and no end-of-turn mark follows it: an EOS token must be appended, and
    supervised."""
    off: tuple[tuple[int, int], ...] = ()
    """Characters that the assistant says and that aren't supervised, since their author switches them off."""
    weights: tuple[float, ...] = ()
    """What a label in each of the spans weighs; empty where each weighs 1."""
    losses: Losses = NO_LOSSES
    """What the template leaves out of the conversation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What of a conversation is supervised, and what may be lost."""

    everything: bool = False
    """Supervise all of the text but what its author switches off."""
    last: bool = False
    """Supervise the last of the assistant's messages alone."""
    allow_unwritten: bool = False
    """Count the texts of an assistant's own turn that the template doesn't write, where it would be an error."""
    row_weights: bool = False
    """Take other weights of messages than 0 and 1."""


ALL = Choice()


def between(spans: Sequence[tuple[int, int]], length: int) -> tuple[tuple[int, int], ...]:
    """Return the stretches of a text between others.

    Args:
        spans: ascending.
        length: of the text.
    """
    bounds = [0, *(place for span in spans for place in span), length]
    return tuple((a, b) for a, b in zip(bounds[::2], bounds[1::2]) if a < b)


def spelled(value: Any, what: str) -> str:
    """Return JSON of what a row gives to a template.

    Raises:
        SourceError: it is none.
    """
    if not value:
        return ""
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=what.startswith("the variables"))
    except (TypeError, ValueError, RecursionError) as error:
        schemas = " schemas" if "tools" in what else ""
        raise SourceError(f"{what} must be JSON{schemas}; these are not: {error}") from error

"""An instruction and what it asks for, as Alpaca, Dolly and Megatron-LM's files of answers have them, as a chat."""

from __future__ import annotations

from typing import Any

from varlen.errors import SourceError
from varlen.source.rows import json_kind


def instruction_messages(instruction: Any, context: Any, output: Any) -> list[dict[str, Any]]:
    r"""Return the chat that an instruction and its answer are.

    Args:
        instruction: what the user asks.
        context: what the question is about, which follows it after an empty line; None or "" where there is none.
        output: what the assistant answers.

    Raises:
        SourceError: one of them is no text, or there is no answer to train on.

    >>> instruction_messages("Sum up.", "A long text.", "Short.")[0]["content"]
    'Sum up.\n\nA long text.'
    """
    for role, value in (("instruction", instruction), ("context", context or ""), ("output", output)):
        if not isinstance(value, str):
            raise SourceError(f"`{role}` must be a string, found {json_kind(value)}")
    if not output:
        raise SourceError("the output is empty, so there is nothing to train on; leave out the row")
    asked = "\n\n".join(part for part in (instruction, context) if part)
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]

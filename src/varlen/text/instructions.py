"""An instruction and what it asks for, as Alpaca, Dolly and Megatron-LM's files of answers have them, as a chat."""

from __future__ import annotations

from typing import Any

from varlen.errors import SourceError
from varlen.files.rows import found_kind
from varlen.text.calls import from_json
from varlen.text.messages import as_messages


def instruction_messages(
    instruction: Any, context: Any, output: Any, history: Any = None
) -> list[dict[str, Any]]:
    r"""Return the chat that an instruction and its answer are.

    >>> instruction_messages("Sum up.", "A long text.", "Short.")[0]["content"]
    'Sum up.\n\nA long text.'
    """
    for role, value in (("instruction", instruction), ("context", context or ""), ("output", output)):
        if not isinstance(value, str):
            raise SourceError(f"`{role}` must be a string, found {found_kind(value)}")
    if not output:
        raise SourceError("the output is empty, so there is nothing to train on; leave out the row")
    asked = "\n\n".join(part for part in (instruction, context) if part and part.strip())
    turn = [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
    return [*_earlier(history), *turn] if history else turn


def _earlier(history: Any) -> list[dict[str, Any]]:
    """Return earlier turns as messages."""
    if isinstance(history, str):
        history = from_json(history, "`history`") if history.strip() else []
    if isinstance(history, list) and all(isinstance(turn, dict) for turn in history):
        return as_messages(history) if history else []
    messages: list[dict[str, Any]] = []
    for turn in history if isinstance(history, list) else [history]:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise SourceError(
                f"`history` must be a list of pairs of question and answer, or of messages, found {found_kind(turn)}"
            )
        messages += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turn)]
    return messages

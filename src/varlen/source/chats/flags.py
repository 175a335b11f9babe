"""Flags of a message by which its author switches its labels on or off."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from varlen.errors import SourceError

FLAGS = ("weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight", "loss_scale")
"""Keys that say whether a message is trained on: OpenAI's and Mistral's, axolotl's, ms-swift's."""
_MASKED = "masked"
"""Torchtune's key, which says that it isn't."""
_DETAILS = ("training_detail", "train_detail", "reasoning_training_detail", "train_details")
"""Keys of axolotl that say it of some characters."""
_ALL = frozenset((*FLAGS, _MASKED, *_DETAILS))


def is_trained(message: dict[str, Any], number: int) -> bool:
    """Take the flags out of a message; return whether it is trained on.

    Args:
        message: in the one form; changed.
        number: of it, for what is said.

    Raises:
        SourceError: a flag is neither on nor off, or is one of single characters.
    """
    if _ALL.isdisjoint(message):
        return True
    for key in _DETAILS:
        if message.pop(key, None):
            raise SourceError(
                f"message {number} has `{key}`, labels of single characters, which are not read; switch whole "
                "messages by `train`, or mark the parts by `{% generation %}` in the template"
            )
    is_on = True
    for key in (*FLAGS, _MASKED):
        value = message.pop(key, None)
        if value is None:
            continue
        flag = value
        if isinstance(value, str):
            flag = {"true": 1, "false": 0}.get(value.strip().lower(), value)
            with suppress(ValueError):
                flag = float(flag)
        if flag not in (0, 1):
            raise SourceError(
                f"message {number} has the {key} {value!r}; only 0 and 1 (false and true) can be kept: "
                "make it one of them, or leave the message's row out"
            )
        is_on = is_on and bool(flag) != (key == _MASKED)
    return is_on

"""Flags of a message by which its author switches its labels on or off, or says what they weigh."""

from __future__ import annotations

import math
from contextlib import suppress
from numbers import Number
from typing import Any, cast

import numpy as np

from varlen.errors import SourceError
from varlen.source.loss_masks import ALLOWED, OPTION

FLAGS = ("weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight", "loss_scale")
"""Keys that say whether a message is trained on: OpenAI's and Mistral's, axolotl's, ms-swift's."""
_SWITCHES = ("train", "training", "trainable", "masked")
"""Keys that switch labels and never weigh them."""
_MASKED = "masked"
"""Torchtune's key, which says that it isn't."""
_DETAILS = ("training_detail", "train_detail", "reasoning_training_detail", "train_details")
"""Keys of axolotl that say it of some characters."""
_ALL = frozenset((*FLAGS, _MASKED, *_DETAILS))


def weight_of(message: dict[str, Any], number: int, *, weighs: bool) -> float:
    """Take the flags out of a message; return what its labels weigh: 0 where it isn't trained on, 1 where it is.

    Args:
        message: in the one form; changed.
        number: of it, for what is said.
        weighs: take other weights than 0 and 1.

    Raises:
        SourceError: a flag is neither on nor off, nor a weight that may be taken; two weights differ; or a flag is
            one of single characters.
    """
    if _ALL.isdisjoint(message):
        return 1.0
    for key in _DETAILS:
        if message.pop(key, None):
            raise SourceError(
                f"message {number} has `{key}`, labels of single characters, which are not read; switch whole "
                "messages by `train`, or mark the parts by `{% generation %}` in the template"
            )
    is_on, found = True, {}
    for key in (*FLAGS, _MASKED):
        value = message.pop(key, None)
        if value is None:
            continue
        flag = _number(value)
        if flag in (0, 1):
            is_on = is_on and bool(flag) != (key == _MASKED)
            continue
        found[key] = _weight(key, flag, value, number, weighs=weighs)
    if len(set(found.values())) > 1:
        said = " and ".join(f"the {key} {weight:g}" for key, weight in found.items())
        raise SourceError(f"message {number} has {said}, and one weight is meant; keep one of them")
    return next(iter(found.values()), 1.0) if is_on else 0.0


def check_one_turn(earlier: dict[str, Any], message: dict[str, Any], number: int) -> None:
    """Refuse two messages of one turn whose flags differ, since it has one weight.

    Args:
        earlier: the message before.
        message: the one that becomes a part of it.
        number: of the message, for what is said.

    Raises:
        SourceError: they differ.
    """
    for key in _ALL.intersection((*earlier, *message)):
        usual = 0 if key == _MASKED else None if key in _DETAILS else 1
        held = [usual if one.get(key) is None else one[key] for one in (earlier, message)]
        if _number(held[0]) != _number(held[1]):
            raise SourceError(
                f"messages {number - 1} and {number} are one turn, and have the {key} {held[0]!r} and {held[1]!r}; "
                "make them the same"
            )


def _number(value: Any) -> Any:
    """Return a flag as a number, where it is one or spells one."""
    if isinstance(value, str):
        text = value.strip().lower()
        if text in ("true", "false"):
            return float(text == "true")
        with suppress(ValueError):
            return float(text) if "_" not in text else value
    return value


def _weight(key: str, flag: Any, value: Any, number: int, *, weighs: bool) -> float:
    """Return a weight that is neither 0 nor 1.

    Raises:
        SourceError: it is none, or weights aren't taken.
    """
    weight = math.nan
    if isinstance(flag, Number):
        with suppress(OverflowError):
            weight = float(cast(Any, flag))
    is_one = key not in _SWITCHES and is_weight(weight)
    if is_one and weighs:
        return weight
    if key in _SWITCHES or not weighs:
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
    """Whether a number can weigh a loss: not negative, finite in float32, and 0 there only if it is 0."""
    if not 0 <= weight <= float(np.finfo(np.float32).max):
        return False
    return weight == 0 or float(np.float32(weight)) > 0

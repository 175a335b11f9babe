"""What a model's own code does with arguments that tell boundaries: some drop them on their way to attention.

Read off the installed source and not off a list of names, which would age.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from varlen.adapters.hf.model import text_decoder
from varlen.parsed import parse_python

_READ: WeakKeyDictionary[Any, tuple[str | None, bool]] = WeakKeyDictionary()
"""Decoders whose code was read, each with what was found."""


def drops_boundaries(model: Any) -> str | None:
    """Return the class of a layer that takes keyword arguments and hands them on to nobody; None where none does.

    FlashAttention's boundaries travel as keyword arguments, from the model through its layers.
    """
    return _read(model)[0]


def drops_block_masks(model: Any) -> bool:
    """Return whether the model makes its masks over, and passes over those of FlexAttention while it does."""
    return _read(model)[1]


def _read(model: Any) -> tuple[str | None, bool]:
    """Read the code of a decoder's modules, once a model: there are thousands, and a batch comes every step."""
    decoder = text_decoder(model)
    if decoder not in _READ:
        kinds: dict[Any, None] = dict.fromkeys(type(module) for module in decoder.modules())
        swallowing = next((kind.__name__ for kind in kinds if _swallows(kind)), None)
        _READ[decoder] = swallowing, any(map(_passes_over, kinds))
    return _READ[decoder]


@lru_cache(maxsize=4096)
def _swallows(kind: Any) -> bool:
    if not kind.__module__.startswith("transformers."):
        return False
    function = _forward(kind)
    if function is None or function.args.kwarg is None:
        return False
    name = function.args.kwarg.arg
    return not any(
        keyword.arg is None and isinstance(keyword.value, ast.Name) and keyword.value.id == name
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
    )


@lru_cache(maxsize=4096)
def _passes_over(kind: Any) -> bool:
    if not kind.__module__.startswith("transformers."):
        return False
    phrase = "not isinstance(attention_mask, BlockMask)"
    try:
        if phrase not in inspect.getsource(sys.modules[kind.__module__]):
            return False
        functions = [inspect.unwrap(each) for each in vars(kind).values() if inspect.isfunction(each)]
        return any(phrase in inspect.getsource(function) for function in functions)
    except (OSError, TypeError, KeyError):
        return False


def _forward(kind: Any) -> ast.FunctionDef | None:
    """Return the syntax of a module's forward; None where there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward)))
        found = parse_python(source).body[0]
    except (OSError, TypeError, SyntaxError, AttributeError, IndexError):
        return None
    return found if isinstance(found, ast.FunctionDef) else None

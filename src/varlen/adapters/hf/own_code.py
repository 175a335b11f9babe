"""Whose code a module runs: that of libraries whose modules are known, or somebody's own.

A class may be one's own in part, and code is also put on single modules, on others' classes, and into hooks.
"""

from __future__ import annotations

import dis
import sys
from functools import lru_cache, partial
from types import CodeType
from typing import Any

import torch

KNOWN_LIBRARIES = frozenset(
    (
        "torch",
        "transformers",
        "peft",
        "bitsandbytes",
        "torchao",
        "accelerate",
        "liger_kernel",
        "kernels",
        "trl",
        "varlen",
    )
)
"""Whose modules are known: those that mix tokens are named elsewhere, and the others act on each token alone."""
_COMPUTE_NOTHING = frozenset(("__init__", "__repr__", "extra_repr", "reset_parameters", "_init_weights"))
_WRAPPING = frozenset((*sys.stdlib_module_names, "typing_extensions"))
"""Modules whose decorators call what they wrap."""
_FORWARDS = ("forward", "_old_forward", "_original_forward")
"""Attributes of single modules: what is called in place of the class's forward, and what accelerate wraps there."""


def is_known(kind: Any) -> bool:
    """Return whether the code of a class of modules is that of libraries whose modules are known."""
    return _own_class(kind) is None


def plain_class(kind: Any) -> Any:
    """Return the class that torch has made a class of its own of, as `fully_shard` does; else the class itself."""
    bases = kind.__bases__
    return bases[1] if len(bases) == 2 and bases[0].__module__.startswith("torch.distributed.") else kind


def own_code(module: Any) -> str | None:
    """Name the code of one's own that a module runs when it is called; None where it runs none."""
    own = _own_class(type(module))
    return own.__name__ if own is not None else put_on(module)


def put_on(module: Any) -> str | None:
    """Name the code that was put on a single module, and isn't of its class; None where there is none."""
    for name in _FORWARDS:
        if (put := vars(module).get(name)) is not None and not _is_of_libraries(put):
            return f"a {name} that was put on it"
    for hook in (*vars(module)["_forward_pre_hooks"].values(), *vars(module)["_forward_hooks"].values()):
        if not _is_of_libraries(hook) and not _answers_nothing(hook):
            return f"the hook {getattr(hook, '__qualname__', type(hook).__name__)}"
    return None


def _own_class(kind: Any) -> Any:
    """Return the class whose code isn't known that computes something in a class of modules; None for none."""
    for number, each in enumerate(kind.__mro__):
        if each is torch.nn.Module:
            return None
        functions = {
            name: v for name, v in vars(each).items() if name not in _COMPUTE_NOTHING and callable(v)
        }
        if _is_library(each.__module__):
            if not all(isinstance(v, type) or _is_of_libraries(v) for v in functions.values()):
                return each
        elif any(name in ("forward", "__call__") or _replaces(name, kind, number) for name in functions):
            return each
    return None


def _replaces(name: str, kind: Any, number: int) -> bool:
    """Whether a method stands in the place of one that a forward may call; those of all models are about files."""
    for each in kind.__mro__[number + 1 :]:
        if each is torch.nn.Module or each.__module__ == "transformers.modeling_utils":
            return False
        if name in vars(each):
            return True
    return False


def _is_library(module: Any) -> bool:
    return str(module).partition(".")[0] in KNOWN_LIBRARIES


def _is_of_libraries(function: Any) -> bool:
    """Return whether a function, and what it wraps, was written in a known library, whatever it is named after."""
    wrapped = getattr(function, "__wrapped__", None)
    if isinstance(function, partial):
        function = function.func
    plain = getattr(function, "__func__", function)
    if not hasattr(plain, "__globals__"):
        plain = vars(type(plain)).get("__call__", plain)
    written = getattr(plain, "__globals__", {}).get("__name__") or type(function).__module__
    if wrapped is not None and str(written).partition(".")[0] in _WRAPPING:
        return _is_of_libraries(wrapped)
    if not _is_library(written) and written != "builtins":
        return False
    return wrapped is None or _is_of_libraries(wrapped)


def _answers_nothing(hook: Any) -> bool:
    """Return whether a hook returns None wherever it ends, so that it changes no input and no output."""
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    return code is not None and _ends_with_none(code)


@lru_cache(maxsize=256)
def _ends_with_none(code: CodeType) -> bool:
    before = None
    for step in dis.get_instructions(code):
        if step.opname == "RETURN_CONST" and step.argval is not None:
            return False
        is_none = before is not None and before.opname == "LOAD_CONST" and before.argval is None
        if step.opname == "RETURN_VALUE" and not is_none:
            return False
        before = step
    return True

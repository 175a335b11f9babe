"""Attention backends: which there are, and a model set to one of them for a while, by a stand-in where it must be."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from varlen.adapters import hf
from varlen.adapters.hf import attention
from varlen.errors import ModelError, SettingError
from varlen.verify import stand_in

CPU_BACKENDS = ("eager", "sdpa", "flex_attention", attention.NAME, "flash_attention_2")
"""What is tried where nothing is said; FlashAttention's kernels need a GPU, so on CPU a stand-in runs."""
_FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""The packages behind FlashAttention's names in transformers."""


def backends_for(model: Any, names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the backends to try.

    Args:
        model: decides on which device.
        names: as transformers names them; None for all that varlen knows on this device.

    Raises:
        SettingError: none, a name twice, or one that varlen gives no arguments for.
    """
    if names is None:
        newer = ("flash_attention_3",) if _has_kernel(model, "flash_attention_3") else ()
        return CPU_BACKENDS + newer
    if isinstance(names, str):
        names = (names,)
    if not isinstance(names, Sequence):
        raise SettingError(f"backends must be a list of names, got {names!r}")
    unknown = [name for name in names if name not in (*CPU_BACKENDS, *_FLASH_PACKAGES)]
    if unknown or not names or len(set(names)) != len(names):
        fault = f"{unknown[0]!r} is none" if unknown else "got " + (", ".join(names) or "none")
        known = ", ".join(dict.fromkeys((*CPU_BACKENDS, *_FLASH_PACKAGES)))
        raise SettingError(f"backends must be one or more of {known}, each once; {fault}")
    return tuple(names)


@contextmanager
def attending(model: Any, backend: str) -> Iterator[tuple[str, ...]]:
    """Set a model to a backend, and afterwards back to what it was set to.

    Args:
        model: a transformers model, bare or wrapped.
        backend: one of `backends_for`.

    Yields:
        What stands in for a kernel that this machine doesn't have: nothing, or the name of the kernel.

    Raises:
        ModelError: transformers doesn't let this model have that attention.
    """
    from transformers.utils import logging

    hf.register()
    configs = _configs(model)
    before = [
        (config, config._attn_implementation_internal, config._experts_implementation_internal)
        for config in configs
    ]
    verbosity = logging.get_verbosity()
    with ExitStack() as stack:
        # Compiled anew for every shape of mask, kernels would take minutes; and what a compiled model computes
        # is what its modules say.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        logging.set_verbosity(40)  # errors only: what it warns of is in the report
        try:
            yield _set(model, backend, configs, stack)
        finally:
            logging.set_verbosity(verbosity)
            for config, name, experts in before:
                config._attn_implementation_internal = name
                config._experts_implementation_internal = experts


def _set(model: Any, backend: str, configs: list[Any], stack: ExitStack) -> tuple[str, ...]:
    """Set the attention; return what stands in."""
    if hf.unwrap(model).dtype is torch.float64 and hf.has_experts(model):
        for config in configs:  # one by one: their grouped products know no float64
            config._experts_implementation_internal = "eager"
    if backend == "flex_attention":
        stack.enter_context(_uncompiled_flex_attention())
    if backend in _FLASH_PACKAGES and not _has_kernel(model, backend):
        base = hf.unwrap(model)
        if not getattr(base, "_supports_flash_attn", False):
            raise ModelError(f"{type(base).__name__} doesn't support FlashAttention, says transformers")
        stack.enter_context(stand_in.flash_attention())
        for config in configs:
            config._attn_implementation_internal = backend
        return (stand_in.FLASH,)
    base = hf.unwrap(model)
    if hf.implementation(model) == backend:
        return ()
    try:
        base.set_attn_implementation(backend)
    except (ImportError, ValueError) as error:
        raise ModelError(first_sentence(error)) from None
    if hf.implementation(model) != backend:
        raise ModelError(
            f'{type(base).__name__} keeps the attention that it was made with, "{hf.implementation(model)}"; make it '
            f'with attn_implementation="{backend}"'
        )
    return ()


@contextmanager
def _uncompiled_flex_attention() -> Iterator[None]:
    """Let FlexAttention run without compiling, which it otherwise warns of."""
    from torch.nn.attention import flex_attention

    module: Any = flex_attention
    before = module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # PyTorch's own, when its compiler is imported
            yield
    finally:
        module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


def _has_kernel(model: Any, backend: str) -> bool:
    """Return whether FlashAttention itself can run: on a GPU, with its package."""
    on_gpu = hf.unwrap(model).device.type == "cuda"
    return on_gpu and importlib.util.find_spec(_FLASH_PACKAGES[backend]) is not None


def _configs(model: Any) -> list[Any]:
    """Return every configuration in the model that says which attention to use, each once."""
    found: dict[int, Any] = {}
    waiting = [getattr(module, "config", None) for module in hf.unwrap(model).modules()]
    while waiting:
        config = waiting.pop()
        if config is None or id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            continue
        found[id(config)] = config
        waiting += [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ()]
    return list(found.values())


def first_sentence(error: BaseException) -> str:
    """Return what transformers says, without the advice to open issues.

    Args:
        error: that it raised.
    """
    text = " ".join(str(error).split())
    return text.split(" Please ")[0].split(". ")[0].rstrip(".")

"""Attention backends: a model set to one, stand-ins for kernels, which kernels ran, and attention between tokens."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from types import TracebackType
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode

from varlen.adapters import hf
from varlen.adapters.hf import attention
from varlen.attention.documents import attend_in_packs
from varlen.attention.rules import LayerRules
from varlen.errors import ModelError, SettingError
from varlen.verify.models.trial import Inputs, Trial

CPU_BACKENDS = ("eager", "sdpa", "flex_attention", attention.NAME, "flash_attention_2")
"""What is tried by default; FlashAttention's kernels need a GPU, so on CPU a stand-in runs."""
_FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""The packages behind FlashAttention's names in transformers."""


def backends_for(model: Any, names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the backends to try."""
    if names is None:
        newer = ("flash_attention_3",) if _has_kernel(model, "flash_attention_3") else ()
        return CPU_BACKENDS + newer
    if isinstance(names, str):
        names = (names,)
    if not isinstance(names, Sequence):
        raise SettingError(f"backends must be a list of names, got {names!r}")
    unknown = [name for name in names if name not in (*CPU_BACKENDS, *_FLASH_PACKAGES)]
    if unknown or not names or len(set(names)) != len(names):
        fault = f"{unknown[0]!r} is none of them" if unknown else "got " + (", ".join(names) or "none")
        known = ", ".join(dict.fromkeys((*CPU_BACKENDS, *_FLASH_PACKAGES)))
        raise SettingError(f"backends must be one or more of {known}, each once; {fault}")
    return tuple(names)


@contextmanager
def attending(model: Any, backend: str) -> Iterator[tuple[str, ...]]:
    """Set a model to a backend, and afterwards back to what it was set to."""
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
        # is what its modules have.
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
    """Set the attention; return the kernels that are stood in for."""
    if hf.unwrap(model).dtype is torch.float64 and hf.has_experts(model):
        for config in configs:  # one by one: their grouped products know no float64
            config._experts_implementation_internal = "eager"
    if backend == "flex_attention":
        stack.enter_context(_uncompiled_flex_attention())
    if backend in _FLASH_PACKAGES and not _has_kernel(model, backend):
        base = hf.unwrap(model)
        if not getattr(base, "_supports_flash_attn", False):
            raise ModelError(
                f"{type(base).__name__} doesn't support FlashAttention (_supports_flash_attn); leave {backend} out "
                "of backends"
            )
        stack.enter_context(flash_attention())
        for config in configs:
            config._attn_implementation_internal = backend
        return (FLASH,)
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
    """Run FlexAttention uncompiled, without its warning."""
    from torch.nn.attention import flex_attention

    module: Any = flex_attention
    before = module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        with warnings.catch_warnings():
            # PyTorch's own warning, when its compiler is imported.
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


def _has_kernel(model: Any, backend: str) -> bool:
    """Return whether FlashAttention itself can run: on a GPU, with its package."""
    on_gpu = hf.unwrap(model).device.type == "cuda"
    return on_gpu and importlib.util.find_spec(_FLASH_PACKAGES[backend]) is not None


def _configs(model: Any) -> list[Any]:
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
    """Return transformers' message without the advice to open issues."""
    text = " ".join(str(error).split())
    return text.split(" Please ")[0].split(". ")[0].rstrip(".")


# Stand-ins for kernels that need a GPU: transformers' own dispatch runs, and behind it each document by itself.
#
# They prove that boundaries reach the place where a kernel would read them, and what a model does with the
# result. They prove nothing about the kernels themselves.

FLASH = "flash_attn_varlen_func"  # FlashAttention's name of the kernel that `flash_attention` replaces
_OF_FLA = ("delta",)  # kernels that take `cu_seqlens`; causal-conv1d and mamba-ssm take `seq_idx`


@contextmanager
def flash_attention() -> Iterator[None]:
    """Put kernels that need no GPU where transformers looks for FlashAttention's."""
    from transformers import modeling_flash_attention_utils
    from transformers.integrations import flash_attention as integration

    flash: Any = modeling_flash_attention_utils
    dtype_of: Any = integration.get_target_dtype

    def dtype_for(query: torch.Tensor, module: torch.nn.Module) -> torch.dtype | None:
        try:
            return dtype_of(query, module)  # type: ignore[no-any-return]
        except StopIteration:
            # transformers takes the dtype of an nn.Linear if the query is float32; this layer has none.
            return None

    process = flash._lazy_define_process_function(_varlen_kernel)
    padding = flash._pad_input, flash._unpad_input  # transformers' own, for masks with holes
    # transformers 5.23 unpacks a function for the cache's kernel beside it, 5.17 knows none
    arguments = (process, dict) if hasattr(flash, "_process_with_kvcache_kwargs_fn") else process
    kernels = (_dense_kernel, _varlen_kernel, None, *padding), arguments
    with (
        patch.object(flash, "lazy_import_flash_attention", lambda *_, **__: kernels),
        patch.object(integration, "get_target_dtype", dtype_for),
    ):
        yield


def _varlen_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    **rest: Any,
) -> torch.Tensor:
    if not torch.equal(cu_seqlens_q, cu_seqlens_k) or int(cu_seqlens_q[-1]) != len(q) or int(cu_seqlens_q[0]):
        raise ModelError(
            f"FlashAttention would get segments from {int(cu_seqlens_q[0]):,} to {int(cu_seqlens_q[-1]):,} of "
            f"{len(q):,} tokens, and leave the others uncomputed"
        )
    longest = int(cu_seqlens_q.diff().max())
    if max(max_seqlen_q, max_seqlen_k) < longest:
        raise ModelError(
            f"FlashAttention would get {max_seqlen_q:,} tokens as the longest segment's, and it has {longest:,}"
        )
    sinks = rest.get("s_aux", rest.get("learnable_sink"))
    window = None if window_size[0] < 0 else window_size[0] + 1
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    rules = LayerRules(scale, window, softcap or None, is_causal=causal)
    return attend_in_packs(q, k, v, ends=cu_seqlens_q, longest=None, rules=rules, sinks=sinks)


def _dense_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Attend as `flash_attn_func` does: each row is a segment."""
    rows, width = q.shape[:2]
    ends = torch.arange(rows + 1, dtype=torch.int32, device=q.device) * width
    out = _varlen_kernel(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), ends, ends, width, width, **options
    )
    return out.view(rows, width, *out.shape[1:])


@contextmanager
def recurrence(model: Any) -> Iterator[tuple[str, ...]]:
    """Let a model's convolutions and recurrences keep segments apart where they are given them, as their kernels do.

    transformers' own fallbacks refuse boundaries. Each segment is given to them by itself here. A function that is
    given no boundaries runs over whole rows, as it would anywhere.
    """
    homes = {sys.modules[type(module).__module__] for module in model.modules()}
    found: list[str] = []
    with ExitStack() as stack:
        for home in homes:
            for name, function in inspect.getmembers(home, _is_fallback):
                stack.enter_context(patch.object(home, name, _by_segment(function)))
                found.append(name)
        yield tuple(sorted(found))


def _is_fallback(value: Any) -> bool:
    """Return whether transformers replaces this function by a kernel if the kernel's package is installed."""
    return (
        callable(value)
        and hasattr(value, "__wrapped__")
        and getattr(value.__wrapped__, "__module__", "").startswith("transformers.models.")
    )


def _by_segment(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a fallback that takes segments as its kernel does, and runs over each by itself."""
    plain = inspect.unwrap(function)
    takes_ends = any(word in plain.__name__ for word in _OF_FLA)

    @wraps(plain)
    def apart(*args: Any, **kwargs: Any) -> Any:
        numbers, ends = kwargs.pop("seq_idx", None), kwargs.pop("cu_seqlens", None)
        numbers, ends = (None, ends) if takes_ends else (numbers, None)  # the other form is passed over
        if numbers is None and ends is None:
            return plain(*args, **kwargs)
        axis = 2 if plain.__name__.startswith("causal_conv1d") else 1
        given: dict[Any, Any] = dict(enumerate(args)) | kwargs
        first = next(iter(given.values()))
        rows, width = first.shape[0], first.shape[axis]
        cut = partial(_cut, rows=rows, width=width, axis=axis)
        outputs = []
        for row, start, stop in _segments(numbers, ends, rows, width):
            parts = {name: cut(v, row, start, stop, is_first=v is first) for name, v in given.items()}
            named = {name: part for name, part in parts.items() if isinstance(name, str)}
            outputs.append((row, plain(*(parts[i] for i in range(len(args))), **named)))
        # None: a fused training path that only the kernel has; the caller then runs the layer's steps.
        if any(out is None for _, out in outputs):
            return None
        return _joined(outputs, rows, axis)

    return apart


def _segments(numbers: Any, ends: Any, rows: int, width: int) -> list[tuple[int, int, int]]:
    """Return row, first token and end of every segment."""
    if numbers is not None:
        changes = [
            [*torch.cat([torch.ones(1), line.diff()]).nonzero()[:, 0].tolist(), width]
            for line in numbers.cpu()
        ]
        return [(row, a, b) for row, at in enumerate(changes) for a, b in zip(at, at[1:])]
    bounds = ends.tolist()
    if rows != 1 or bounds[0] != 0 or bounds[-1] != width:
        raise ModelError(
            f"cu_seqlens run from {bounds[0]:,} to {bounds[-1]:,}, and there are {rows:,} rows of {width:,} tokens; "
            'a recurrence takes the segments of one row: pass layout="flat"'
        )
    return [(0, a, b) for a, b in zip(bounds, bounds[1:]) if b > a]


def _cut(
    value: Any, row: int, start: int, stop: int, *, is_first: bool, rows: int, width: int, axis: int
) -> Any:
    """Return a segment's part of an argument with a value per token, and any other argument whole."""
    if not torch.is_tensor(value):
        return value
    if axis == 2:
        return value[row : row + 1, :, start:stop] if is_first else value
    if value.ndim >= 3 and value.shape[:2] == (rows, width):
        return value[row : row + 1, start:stop]
    return value


def _joined(outputs: list[tuple[int, Any]], rows: int, axis: int) -> Any:
    """Return the segments' outputs side by side, and whatever else the last one returned."""
    parts = [out[0] if isinstance(out, tuple) else out for _, out in outputs]
    lines = [torch.cat([p for (r, _), p in zip(outputs, parts) if r == row], dim=axis) for row in range(rows)]
    whole = torch.cat(lines, dim=0)
    last = outputs[-1][1]
    return (whole, *last[1:]) if isinstance(last, tuple) else whole


# AttentionPicture: which token attends to which in a row, with boundaries and without, read from eager attention.

SHADES = "·░▒▓█"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionPicture:
    """Attention weights of the batch's fullest row of documents, the largest of all layers and heads."""

    owner: npt.NDArray[np.int64]  # `[width]`: the document of each token, from 0; -1 at padding
    kept_apart: npt.NDArray[np.float32]  # `[width, width]`: from each token to each, with boundaries
    without: npt.NDArray[np.float32] | None  # likewise without boundaries; None if not shown

    def between(self, weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the largest weight from any token of a document to any of another, `[documents, documents]`.

        `weights`: `[width, width]`, one of the two above.
        """
        count = int(self.owner.max()) + 1
        found = np.zeros((count, count), np.float32)
        for i in range(count):
            for j in range(count):
                found[i, j] = weights[np.ix_(self.owner == i, self.owner == j)].max()
        return found

    def __str__(self) -> str:
        pictures = [("with boundaries", self.between(self.kept_apart))]
        if self.without is not None:
            pictures.append(("without", self.between(self.without)))
        drawn = [[title, *map(_shaded, weights)] for title, weights in pictures]
        width = max(len(line) for line in drawn[0]) + 6
        return "\n".join("".join(part.ljust(width) for part in line).rstrip() for line in zip(*drawn))


def attention_picture(trial: Trial) -> AttentionPicture | None:
    """Read the attention weights of one row; None where the model returns none."""
    row = max(range(len(trial.owner)), key=lambda i: len(np.unique(trial.owner[i])))
    kept_apart = _weights(trial, trial.inputs, row)
    if kept_apart is None:
        return None
    owner = trial.owner[row]
    first = int(owner[owner >= 0].min())
    return AttentionPicture(
        owner=np.where(owner >= 0, owner - first, -1),
        kept_apart=kept_apart,
        without=_weights(trial, hf.inputs_without_boundaries, row),
    )


def _weights(trial: Trial, inputs: Inputs, row: int) -> npt.NDArray[np.float32] | None:
    """Return the largest weight over layers and heads, `[width, width]`."""
    layers = [weights[row].abs().amax(0).float().cpu().numpy() for weights in trial.attentions(inputs)]
    return np.maximum.reduce(layers).astype(np.float32) if layers else None


def _shaded(weights: Any) -> str:
    """Return a row of weights as one character each; a dot means exactly 0."""
    steps = [0 if w == 0 else 1 + min(3, int(w * 4)) for w in weights]
    return " ".join(SHADES[step] for step in steps)


# Which attention kernels ran: a setting is what a model was asked for, and only a run shows what it did.

_ATTENTION = ("scaled_dot_product", "flash", "varlen_attn", "flex_attention")
"""What the names of attention kernels contain, in PyTorch and in the packages that register their own."""
_WEIGHING = ("_softmax", "_safe_softmax")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that reach a device."""

    supports_higher_order_operators = True  # FlexAttention is one

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.dtypes: set[torch.dtype] = set()
        self.formed = 0
        """Scores that became weights in a layer of attention: routers have a softmax as well."""
        self._within: list[str] = []
        self._following = ExitStack()

    def __enter__(self) -> Any:
        """Also follow which module runs; PyTorch's own are part of the module that calls them."""

        def enters(module: torch.nn.Module, _: Any) -> None:
            kind = type(module)
            is_part = kind.__module__.startswith("torch.") and bool(self._within)
            self._within.append(self._within[-1] if is_part else kind.__name__)

        def leaves(*_: Any) -> None:
            if self._within:  # empty where somebody's hook before ours raised
                self._within.pop()

        self._following.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", ".*global hooks on modules")  # they see a compiled model twice
        for hook in (
            modules.register_module_forward_pre_hook(enters),
            modules.register_module_forward_hook(leaves, always_call=True),
        ):
            self._following.callback(hook.remove)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._following.close()
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = _name(func)
        self.counts[name] += 1
        if name in _WEIGHING and self._within and "Attention" in self._within[-1]:
            self.formed += 1
        if name in _PRODUCTS:
            self.dtypes |= {x.dtype for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()}
        return func(*args, **(kwargs or {}))


def kernels_of(run: Callable[[], Any]) -> tuple[Any, tuple[tuple[str, int], ...]]:
    """Run something, and return what it returns, and which attention kernels ran and how often, by name."""
    with _Recorder() as recorder:
        result = run()
    counts = recorder.counts
    found = {name: count for name, count in counts.items() if any(word in name for word in _ATTENTION)}
    # A layer of attention is known by its name; where none has such a name, any softmax may have been its.
    formed = recorder.formed or (0 if found else sum(counts[name] for name in _WEIGHING))
    if formed:
        found["softmax"] = formed
    return result, tuple(sorted(found.items()))


def computed_in(run: Callable[[], Any]) -> tuple[Any, torch.dtype | None]:
    """Run something, and return what it returns and the coarsest dtype of its matrix products.

    Weights don't show it: under autocast products are computed in another dtype.
    """
    with _Recorder() as recorder:
        result = run()
    coarsest = max(recorder.dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)
    return result, coarsest


def _name(operator: Any) -> str:
    """Return an operator's name without the library and the overload."""
    name = getattr(operator, "__name__", str(operator))
    return str(name).partition("::")[2].partition(".")[0] or str(name).partition(".")[0]

"""AttentionPicture: who attends to whom in a row, with boundaries and without, read from eager attention."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode

from varlen.adapters import hf
from varlen.verify.models.trial import Inputs, Trial

SHADES = "·░▒▓█"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionPicture:
    """Attention weights of the batch's fullest row of documents, the largest of all layers and heads."""

    owner: npt.NDArray[np.int64]
    """`[width]`: the document of each token, from 0; -1 at padding."""
    kept_apart: npt.NDArray[np.float32]
    """`[width, width]`: from each token to each, with boundaries."""
    without: npt.NDArray[np.float32] | None
    """The same without boundaries; None where the model shows none."""

    def between(self, weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the largest weight from any token of a document to any of another, `[documents, documents]`.

        Args:
            weights: `[width, width]`, one of the two above.
        """
        count = int(self.owner.max()) + 1
        found = np.zeros((count, count), np.float32)
        for i in range(count):
            for j in range(count):
                found[i, j] = weights[np.ix_(self.owner == i, self.owner == j)].max()
        return found

    def __str__(self) -> str:
        """Draw both in characters, documents by documents."""
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
    if not hf.accepts(trial.model, "output_attentions"):
        return None
    outputs: Any = trial.call(inputs(trial.batch, trial.model), output_attentions=True)
    width = trial.owner.shape[1]
    found = [w for w in getattr(outputs, "attentions", None) or () if w is not None]
    square = [w[row].abs().amax(0) for w in found if w.ndim == 4 and w.shape[-2:] == (width, width)]
    if not square:
        return None
    largest = square[0]
    for each in square[1:]:
        largest = largest.maximum(each)
    return np.asarray(largest.float().cpu().numpy(), dtype=np.float32)


def _shaded(weights: Any) -> str:
    """Write a row of weights as one character each: a dot only for exactly nothing."""
    steps = [0 if w == 0 else 1 + min(3, int(w * 4)) for w in weights]
    return " ".join(SHADES[step] for step in steps)


# Which attention kernels ran: a setting says what a model was asked for, and only a run what it did.

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
        """Begin to follow which module is at work; PyTorch's own are parts of the one that calls them."""

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
        """End to follow."""
        self._following.close()
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count and run one operator."""
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

    Weights don't tell: under autocast products are computed in another dtype.
    """
    with _Recorder() as recorder:
        result = run()
    coarsest = max(recorder.dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)
    return result, coarsest


def _name(operator: Any) -> str:
    """Return an operator's name without the library and the overload."""
    name = getattr(operator, "__name__", str(operator))
    return str(name).partition("::")[2].partition(".")[0] or str(name).partition(".")[0]

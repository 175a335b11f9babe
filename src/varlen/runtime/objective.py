"""Objectives: functions of log-probabilities and columns, whose gradients become the weights of a step's targets.

    forward pass ─► log-probabilities of all occurrences ─► function ─► its gradients ─► weights of the planned step
    or, of a sum over occurrences: in the head, block of rows by block of rows, as the planned step runs

The gradient of any function of log-probabilities is that of a sum in which each is weighed by the function's own
gradient there. So one forward pass that keeps no activations gives what the function sees at once, and the step runs
as if these were the weights of its losses: exact, whatever the function couples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import torch

from varlen.arguments import in_words
from varlen.attention.kernels import on_device
from varlen.errors import SettingError, described
from varlen.types import IntArray

Function = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]
"""Of log-probabilities `[occurrences]` and columns beside them; returns a scalar."""
Scope = Literal["target", "group", "step"]
"""What a function must see at once: it is a "target"'s where it is a sum over occurrences."""


def check_scope(scope: object) -> None:
    """Refuse a scope that there isn't."""
    if scope not in get_args(Scope):
        raise SettingError(f"scope={scope!r}; it must be {in_words(get_args(Scope))}")


@dataclass(frozen=True, slots=True)
class Occurrences:
    """The occurrences of a step: in the order of the rows given, by rising positions."""

    targets: IntArray
    """int64 `[occurrences]`, in host memory: the number of each one's target among those of the step; several may
    have one."""
    columns: Mapping[str, torch.Tensor]
    """`[occurrences, ...]` each, `row`, `group` and `position` among them."""
    count: int
    """Targets of the step."""

    def some(self, which: IntArray | None) -> dict[str, torch.Tensor]:
        """Return copies of the columns of some occurrences, None for all, and where each row's begin."""
        if which is None:
            found = {name: column.clone() for name, column in self.columns.items()}
        else:
            at = on_device(torch.from_numpy(which), self.columns["row"].device)
            found = {name: column[at] for name, column in self.columns.items()}
        rows = found["row"]
        begins = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        begins[1:] = rows[1:] != rows[:-1]
        ends = torch.tensor([len(rows)], device=rows.device)
        return {**found, "row_offsets": torch.cat([begins.nonzero().flatten(), ends])}


def weights_of_step(
    function: Function, scope: Scope, losses: torch.Tensor, occurrences: Occurrences
) -> tuple[torch.Tensor, float]:
    """Return the weight of each target's loss in the step's, and the step's loss.

    Args:
        function: of the step.
        scope: "step" calls it once, "group" for each group.
        losses: `[targets]`: cross-entropy of each.
        occurrences: of the step.
    """
    index = on_device(torch.from_numpy(occurrences.targets), losses.device)
    log_probs = -losses[index]
    gradient = torch.zeros_like(log_probs)
    values = []
    for which in [None] if scope == "step" else _groups(occurrences):
        at = slice(None) if which is None else on_device(torch.from_numpy(which), losses.device)
        value, gradient[at] = called(function, log_probs[at], occurrences.some(which))
        values.append(value)
    weights = torch.zeros_like(losses).index_add_(0, index, -gradient)
    return weights, float(torch.stack(values).sum()) if values else 0.0


def _groups(occurrences: Occurrences) -> list[IntArray]:
    """Return the occurrences of each group."""
    groups = occurrences.columns["group"].cpu().numpy()
    order = np.argsort(groups, kind="stable")
    cuts = np.flatnonzero(np.diff(groups[order])) + 1
    return np.split(order, cuts) if len(order) else []


def called(
    function: Function, log_probs: torch.Tensor, columns: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call a function; return its value and its gradient by the log-probabilities."""
    leaf = log_probs.detach().requires_grad_()
    name = getattr(function, "__name__", type(function).__name__)
    with torch.enable_grad():
        try:
            value = function(leaf.clone(), columns)  # which may be overwritten
        except Exception as error:
            error.add_note(
                f"in the objective {name}, with {len(leaf):,} log-probabilities and the columns {', '.join(columns)}"
            )
            raise
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.is_complex():
        seen = type(value).__name__
        if torch.is_tensor(value):
            seen = "a complex number" if value.is_complex() else f"a tensor of shape {list(value.shape)}"
        raise SettingError(
            f"the objective {name} returned {seen}; it must return a scalar tensor, such as a sum"
        )
    if not value.requires_grad:
        raise SettingError(
            f"what the objective {name} returned has no graph to its log-probabilities (detached, or made by float() "
            "or item()?); compute it of them by torch's functions"
        )
    try:
        (gradient,) = torch.autograd.grad(value, leaf, torch.ones_like(value), allow_unused=True)
    except RuntimeError as error:
        raise SettingError(f"the objective {name} can't be differentiated: {described(error)}") from error
    if gradient is None:
        raise SettingError(f"what the objective {name} returned doesn't depend on the log-probabilities")
    return value.detach().reshape(()), gradient


@dataclass(slots=True)
class Objective:
    """A function that is a sum over occurrences: it is called for each block of rows whose logits are there."""

    function: Function
    occurrences: Occurrences
    values: list[torch.Tensor] = field(default_factory=list)
    """What it has returned so far."""
    _order: IntArray = field(init=False)
    _offsets: IntArray = field(init=False)

    def __post_init__(self) -> None:
        self._order = np.argsort(self.occurrences.targets, kind="stable")
        counts = np.bincount(self.occurrences.targets, minlength=self.occurrences.count)
        self._offsets = np.concatenate([[0], np.cumsum(counts)])

    def weights(self, losses: torch.Tensor, numbers: IntArray) -> torch.Tensor:
        """Return the weights of some targets' losses.

        Args:
            losses: `[some]`: cross-entropy of each.
            numbers: int64 `[some]`: which targets of the step.
        """
        sizes = self._offsets[numbers + 1] - self._offsets[numbers]
        owners = np.repeat(np.arange(len(numbers)), sizes)
        if not len(owners):
            return torch.zeros_like(losses)
        before = np.cumsum(sizes) - sizes
        which = self._order[np.arange(len(owners)) - before[owners] + self._offsets[numbers][owners]]
        order = np.argsort(which)
        index = on_device(torch.from_numpy(owners[order]), losses.device)
        value, gradient = called(self.function, -losses[index], self.occurrences.some(which[order]))
        self.values.append(value)
        return torch.zeros_like(losses).index_add_(0, index, -gradient)

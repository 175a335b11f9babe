"""Objectives of policies and preferences, for `SliceEngine.step(batch, loss=..., scope=...)`.

    loss = vl.losses.grpo(batch, clip=0.2)
    engine.step(batch, loss=loss, scope=loss.scope)

Each is made for a batch, whose rows and targets are the denominators of its means, and so may be called with some of
the occurrences at a time: its `scope` says what it must see at once. It reads columns by these names: `advantages`,
`old_log_probs` (of the policy that wrote the rows; left out: the policy's own), `ref_log_probs` (of a reference),
`teacher_log_probs`, and `chosen`, 1 or 0 for each row. Columns may have a value for each token or for each row.

Batches of several ranks or several calls that make one step pass `num_rows` and `num_targets` of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from varlen.batch.packed import PackedBatch, on_host
from varlen.batch.tree_batch import TreeBatch
from varlen.errors import SettingError

Columns = Mapping[str, torch.Tensor]
Over = Literal["rows", "targets", "constant"]


@dataclass(frozen=True, slots=True)
class Loss:
    """A function of log-probabilities and columns, and what it must see at once."""

    name: str
    scope: Literal["target", "group", "step"]
    function: Callable[[torch.Tensor, Columns], torch.Tensor]

    def __call__(self, log_probs: torch.Tensor, columns: Columns) -> torch.Tensor:
        """Return the part of the step's loss that these occurrences have.

        Args:
            log_probs: `[occurrences]`.
            columns: beside them, as `SliceEngine.step` gives them.
        """
        return self.function(log_probs, columns)


def grpo(
    batch: TreeBatch | PackedBatch,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    beta: float = 0.0,
    over: Over = "rows",
    longest: int | None = None,
    num_rows: int | None = None,
    num_targets: int | None = None,
) -> Loss:
    """Return GRPO's loss: clipped ratios times advantages (Shao et al. 2024, arXiv 2402.03300).

    Args:
        batch: of the step.
        clip: how far below 1 a ratio counts, and above it without `clip_high`.
        clip_high: how far above 1 a ratio counts (DAPO's "clip higher").
        beta: factor of the divergence from `ref_log_probs`, by Schulman's estimate.
        over: "rows" is a mean over rows of their mean over targets; "targets" one over all targets (DAPO; Yu et al.
            2025, arXiv 2503.14476); "constant" divides by rows times `longest` (Dr. GRPO; Liu et al. 2025, arXiv
            2503.20783).
        longest: tokens that an answer may have, of "constant".
        num_rows: rows with a target in the whole step; None for those of the batch.
        num_targets: targets of the whole step; None for `batch.step_num_targets`.
    """
    weigh = _weights(batch, over, longest, num_rows, num_targets)
    high = clip if clip_high is None else clip_high

    def loss(log_probs: torch.Tensor, columns: Columns) -> torch.Tensor:
        advantages, ratio = _of(columns, "advantages", log_probs), _ratio(log_probs, columns)
        each = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + high) * advantages)
        return ((each + beta * _divergence(log_probs, columns, beta)) * weigh(columns, log_probs)).sum()

    return Loss("grpo", "target", loss)


def dapo(
    batch: TreeBatch | PackedBatch, *, clip: float = 0.2, clip_high: float = 0.28, beta: float = 0.0
) -> Loss:
    """Return DAPO's loss: GRPO's over all targets, clipped higher than low.

    Args:
        batch: of the step.
        clip: see `grpo`.
        clip_high: see `grpo`.
        beta: see `grpo`.
    """
    return Loss(
        "dapo", "target", grpo(batch, clip=clip, clip_high=clip_high, beta=beta, over="targets").function
    )


def ppo(batch: TreeBatch | PackedBatch, *, clip: float = 0.2) -> Loss:
    """Return PPO's loss of the policy, over all targets; advantages are of each token.

    Args:
        batch: of the step.
        clip: see `grpo`.
    """
    return Loss("ppo", "target", grpo(batch, clip=clip, over="targets").function)


def reinforce(batch: TreeBatch | PackedBatch, *, num_rows: int | None = None) -> Loss:
    """Return the policy gradient of whole rows: minus advantages times log-probabilities, a mean over rows.

    With `leave_one_out` as advantages it is RLOO (Ahmadian et al. 2024, arXiv 2402.14740).

    Args:
        batch: of the step.
        num_rows: see `grpo`.
    """
    count = _num_rows(batch) if num_rows is None else num_rows

    def loss(log_probs: torch.Tensor, columns: Columns) -> torch.Tensor:
        return -(_of(columns, "advantages", log_probs) * log_probs).sum() / count

    return Loss("reinforce", "target", loss)


def cispo(batch: TreeBatch | PackedBatch, *, clip_high: float = 5.0) -> Loss:
    """Return CISPO's loss: capped ratios weigh log-probabilities (MiniMax 2025, arXiv 2506.13585).

    Args:
        batch: of the step.
        clip_high: the most that a ratio counts.
    """
    weigh = _weights(batch, "targets", None, None, None)

    def loss(log_probs: torch.Tensor, columns: Columns) -> torch.Tensor:
        ratio = _ratio(log_probs, columns).clamp(max=clip_high).detach()
        each = -ratio * _of(columns, "advantages", log_probs) * log_probs
        return (each * weigh(columns, log_probs)).sum()

    return Loss("cispo", "target", loss)


def gspo(
    batch: TreeBatch | PackedBatch,
    *,
    clip: float = 3e-4,
    clip_high: float = 4e-4,
    num_rows: int | None = None,
) -> Loss:
    """Return GSPO's loss: ratios are of whole rows, their mean over targets (Zheng et al. 2025, arXiv 2507.18071).

    Args:
        batch: of the step.
        clip: how far below 1 a ratio counts.
        clip_high: how far above.
        num_rows: see `grpo`.
    """
    count = _num_rows(batch) if num_rows is None else num_rows

    def loss(log_probs: torch.Tensor, columns: Columns) -> torch.Tensor:
        old = columns.get("old_log_probs")
        of_row, sizes = _rows_of(columns, log_probs)
        change = log_probs - (log_probs.detach() if old is None else old.to(log_probs))
        ratio = (_by_row(change, of_row, sizes) / sizes).exp()
        advantages = _by_row(_of(columns, "advantages", log_probs), of_row, sizes) / sizes
        clipped = ratio.clamp(1 - clip, 1 + clip_high) * advantages
        return -torch.minimum(ratio * advantages, clipped).sum() / count

    return Loss("gspo", "group", loss)


def dpo(batch: TreeBatch | PackedBatch, *, beta: float = 0.1, num_pairs: int | None = None) -> Loss:
    """Return DPO's loss of pairs, each a group of two rows (Rafailov et al. 2023, arXiv 2305.18290).

    Args:
        batch: of the step; the column `chosen` is 1 for one row of each group and 0 for the other.
        beta: how far the policy may leave the reference.
        num_pairs: of the whole step; None for those of the batch.
    """
    count = _num_rows(batch) / 2 if num_pairs is None else num_pairs

    def loss(log_probs: torch.Tensor, columns: Columns) -> torch.Tensor:
        of_row, sizes = _rows_of(columns, log_probs)
        gains = _by_row(log_probs - _of(columns, "ref_log_probs", log_probs), of_row, sizes)
        first = columns["row_offsets"][:-1]
        groups, chosen = columns["group"][first], columns["chosen"][first] != 0
        _, pair, counts = torch.unique(groups, return_inverse=True, return_counts=True)
        wins = torch.zeros_like(counts).index_add_(0, pair, chosen.to(counts.dtype))
        if bool(((counts != 2) | (wins != 1)).any()):
            wrong = int(((counts != 2) | (wins != 1)).sum())
            raise SettingError(
                f"dpo compares two rows of each group, one of them chosen; {wrong:,} of {len(counts):,} groups are "
                "otherwise: give each pair a group of its own, and the column chosen, 1 for one row and 0 for another"
            )
        signed = torch.where(chosen, gains, -gains)
        margins = torch.zeros(len(counts), dtype=gains.dtype, device=gains.device).index_add(0, pair, signed)
        return -logsigmoid(beta * margins).sum() / count

    return Loss("dpo", "group", loss)


def distillation(batch: TreeBatch | PackedBatch) -> Loss:
    """Return the policy gradient towards a teacher on the policy's own tokens: the reverse divergence, by targets.

    The advantage of a token is how much likelier the teacher finds it (`teacher_log_probs`) than the policy that
    wrote it.

    Args:
        batch: of the step.
    """
    weigh = _weights(batch, "targets", None, None, None)

    def loss(log_probs: torch.Tensor, columns: Columns) -> torch.Tensor:
        old = columns.get("old_log_probs")
        old = log_probs.detach() if old is None else old.to(log_probs)
        advantages = _of(columns, "teacher_log_probs", log_probs) - old
        return -((log_probs - old).exp() * advantages * weigh(columns, log_probs)).sum()

    return Loss("distillation", "target", loss)


def leave_one_out(rewards: np.typing.ArrayLike, groups: np.typing.ArrayLike) -> np.typing.NDArray[np.float64]:
    """Return each row's reward less the mean of the others in its group; 0 for a row alone.

    Args:
        rewards: `[rows]`.
        groups: `[rows]`.
    """
    given = np.asarray(rewards, np.float64)
    _, which, counts = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    sums, others = np.bincount(which, given), np.maximum(counts - 1, 1)
    found: np.typing.NDArray[np.float64] = np.where(
        counts[which] > 1, given - (sums[which] - given) / others[which], 0.0
    )
    return found


def _of(columns: Columns, name: str, like: torch.Tensor) -> torch.Tensor:
    """Return a column in the dtype of log-probabilities."""
    if name not in columns:
        known = ", ".join(columns)
        raise SettingError(
            f"this objective reads the column {name}, and the batch has {known}; pass it to vl.fold"
        )
    return columns[name].to(like)


def _ratio(log_probs: torch.Tensor, columns: Columns) -> torch.Tensor:
    """Return how much likelier each target is than when it was written."""
    old = columns.get("old_log_probs")
    return (log_probs - (log_probs.detach() if old is None else old.to(log_probs))).exp()


def _divergence(log_probs: torch.Tensor, columns: Columns, beta: float) -> torch.Tensor | float:
    """Return Schulman's estimate of the divergence from the reference, at each target; 0 without a factor."""
    if not beta:
        return 0.0
    behind = _of(columns, "ref_log_probs", log_probs) - log_probs
    return behind.exp() - behind - 1


def _targets_of_rows(batch: TreeBatch | PackedBatch) -> tuple[np.typing.NDArray[np.int64], int]:
    """Return the targets of each row by its number, and the rows that have any."""
    if isinstance(batch, TreeBatch):
        counts = np.bincount(on_host(batch.rows), minlength=1)
    else:
        counts = on_host(batch.document_targets)
    return counts.astype(np.int64), int((counts > 0).sum())


def _num_rows(batch: TreeBatch | PackedBatch) -> int:
    return max(_targets_of_rows(batch)[1], 1)


def _weights(
    batch: TreeBatch | PackedBatch,
    over: Over,
    longest: int | None,
    num_rows: int | None,
    num_targets: int | None,
) -> Callable[[Columns, torch.Tensor], torch.Tensor]:
    """Return what gives the weight of each occurrence in a mean."""
    if over not in ("rows", "targets", "constant") or (over == "constant") != (longest is not None):
        raise SettingError(
            f'over={over!r} and longest={longest!r}; over must be "rows", "targets" or "constant", and longest goes '
            "with the last"
        )
    counts, rows = _targets_of_rows(batch)
    rows = max(rows if num_rows is None else num_rows, 1)
    if over == "rows":
        of_rows = 1.0 / (np.maximum(counts, 1) * rows)
    elif over == "targets":
        of_rows = np.full(len(counts), 1.0 / (batch.step_num_targets if num_targets is None else num_targets))
    else:
        assert longest is not None
        of_rows = np.full(len(counts), 1.0 / (rows * longest))
    table = torch.from_numpy(of_rows)

    def weigh(columns: Columns, like: torch.Tensor) -> torch.Tensor:
        return table.to(like)[columns["row"].long()]

    return weigh


def _rows_of(columns: Columns, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the place of each occurrence's row among those here, and the targets of each row."""
    sizes = columns["row_offsets"].diff()
    return torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes), sizes.to(like.dtype)


def _by_row(values: torch.Tensor, of_row: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return the sums of rows."""
    return torch.zeros(len(sizes), dtype=values.dtype, device=values.device).index_add(0, of_row, values)

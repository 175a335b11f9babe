"""The inputs of a step of trees: tokens of a batch without padding, what they see, and what they predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from varlen.attention.kernels import on_device
from varlen.batch.packed import PackedBatch, on_host
from varlen.batch.tree_batch import TreeBatch, TreeSegments, segments_of
from varlen.errors import DocumentsError
from varlen.runtime.decoder import IGNORED, Targets
from varlen.runtime.objective import Occurrences
from varlen.runtime.tree_slices import Tree, TreeCache, TreeSlice, joined_trees
from varlen.step_plan import StepPlan
from varlen.types import IntArray


@dataclass(frozen=True, eq=False)
class StepForest:
    """The trees of a step, one behind the other, and what their tokens predict.

    A *target* is a token and one of the ids that it predicts; occurrences of several rows may be of one target.
    """

    trees: Sequence[Tree]
    offsets: IntArray
    """int64 `[tokens + 1]`: the targets of each token."""

    def slice_of(self, tree: int, start: int, cache: TreeCache) -> TreeSlice:
        """Return the rows of a slice."""
        one = self.trees[tree]
        held = one.rows(start)
        return TreeSlice(held.spans, one.longest_row, start, held, cache)

    def whole(self, trees: Sequence[int]) -> TreeSlice:
        """Return the rows of trees that are whole in one MicroPack."""
        return joined_trees([self.trees[tree] for tree in trees])

    def targets(self, parts: Sequence[tuple[int, int]], labels: torch.Tensor) -> tuple[Targets, IntArray]:
        """Return what the tokens of some ranges predict, and which targets of the step these are.

        Args:
            parts: first and last token of each range.
            labels: int64 `[targets]`: ids of all.
        """
        tokens = np.concatenate([np.arange(*part) for part in parts])
        sizes = self.offsets[tokens + 1] - self.offsets[tokens]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        rows = np.repeat(np.arange(len(tokens)), sizes)
        numbers = np.arange(len(rows)) - offsets[rows] + self.offsets[tokens][rows]
        at = on_device(torch.from_numpy(numbers), labels.device)
        return Targets(labels[at], on_device(torch.from_numpy(rows), labels.device), offsets), numbers


@dataclass(frozen=True, eq=False)
class ForestInputs:
    """A batch of trees without padding."""

    batch: TreeBatch

    @cached_property
    def _real(self) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        return on_host(self.batch.forest_tokens).ravel() >= 0

    @cached_property
    def number(self) -> IntArray:
        """int64 `[rows * width]`: the number of each token without padding."""
        return np.cumsum(self._real) - 1

    @cached_property
    def input_ids(self) -> IntArray:
        """int64 `[tokens]`."""
        return on_host(self.batch.input_ids).ravel()[self._real].astype(np.int64)

    @cached_property
    def positions(self) -> IntArray:
        """int64 `[tokens]`."""
        return on_host(self.batch.position_ids).ravel()[self._real].astype(np.int64)

    @cached_property
    def offsets(self) -> IntArray:
        """int64 `[trees + 1]`: where trees begin."""
        return np.append(np.flatnonzero(self.positions == 0), len(self.positions))

    @cached_property
    def subtree_ends(self) -> list[IntArray]:
        """For each tree: one past the last token behind each token, within the tree."""
        ends = on_host(self.batch.subtree_end).astype(np.int64)
        begins = np.cumsum(on_host(self.batch.forest_tokens >= 0).sum(1))
        firsts = np.concatenate([[0], begins[:-1]])
        flat = (ends + firsts[:, None]).ravel()[self._real]
        return [flat[a:b] - a for a, b in zip(self.offsets, self.offsets[1:])]

    @cached_property
    def segments(self) -> list[TreeSegments]:
        """The segments of each tree."""
        of_each = zip(self.subtree_ends, self.offsets, self.offsets[1:])
        return [
            segments_of(ends[None], self.positions[None, a:b], np.ones((1, b - a), np.bool_))
            for ends, a, b in of_each
        ]

    @cached_property
    def targets(self) -> tuple[IntArray, IntArray, IntArray]:
        """The token of each target, the id that it predicts, and the target of each occurrence; int64."""
        sources = self.number[on_host(self.batch.sources)]
        ids = on_host(self.batch.targets).astype(np.int64)
        most = int(ids.max(initial=0)) + 1
        pairs, which = np.unique(sources * most + ids, return_inverse=True)
        return pairs // most, pairs % most, which.astype(np.int64)

    def forest(self, plan: StepPlan) -> StepForest:
        """Return the trees with the slices of a plan."""
        packs = plan.forward
        trees = []
        for tree, (ends, a, b) in enumerate(zip(self.subtree_ends, self.offsets, self.offsets[1:])):
            mine = packs.document_ids == tree
            slices = sorted(zip(packs.starts[mine].tolist(), packs.stops[mine].tolist()))
            trees.append(Tree(ends, self.positions[a:b], slices))
        counts = np.bincount(self.targets[0], minlength=len(self.positions))
        return StepForest(trees, np.concatenate([[0], np.cumsum(counts)]))

    def occurrences(self, device: torch.device) -> Occurrences:
        """Return the occurrences with their columns on a device."""
        _check_columns(self.batch.columns, tuple(self.batch.sources.shape))
        columns = self.batch.objective_columns()
        columns.pop("row_offsets")
        held: Mapping[str, torch.Tensor] = {
            name: torch.as_tensor(column).detach().to(device) for name, column in columns.items()
        }
        return Occurrences(self.targets[2], held, len(self.targets[0]))


def _check_columns(columns: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """Refuse columns, perhaps put into the batch by hand, that aren't beside its targets."""
    for name, column in columns.items():
        seen = tuple(getattr(column, "shape", ()))
        if seen[: len(shape)] != shape:
            raise DocumentsError(
                f"columns[{name!r}] is of shape {list(seen)}, and this batch has columns of shape {list(shape)}, a "
                "value for each occurrence of trees, or for each place of a batch of documents"
            )


def occurrences_of_documents(batch: PackedBatch, labels: torch.Tensor) -> Occurrences:
    """Return the labels of a batch of documents as occurrences: rows are its segments, in their order.

    Args:
        batch: of documents.
        labels: int64 `[tokens]`: the next token of each, -100 for none.
    """
    targets = np.flatnonzero(labels.cpu().numpy() != IGNORED)
    lengths = on_host(batch.document_lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.searchsorted(offsets, targets, side="right") - 1
    groups = np.zeros(len(lengths), np.int64)
    if batch.document_groups is not None:
        groups = on_host(batch.document_groups).astype(np.int64)
    at = torch.from_numpy(np.flatnonzero(on_host(batch.segment_ids).ravel() >= 0)[targets + 1])
    _check_columns(batch.columns, tuple(batch.labels.shape))
    given = {name: torch.as_tensor(column).detach() for name, column in batch.columns.items()}
    held = {name: column.flatten(0, 1)[at.to(column.device)] for name, column in given.items()}
    beside = {"row": rows, "group": groups[rows], "position": targets + 1 - offsets[rows]}
    held |= {name: torch.from_numpy(column) for name, column in beside.items()}
    columns = {name: column.to(labels.device) for name, column in held.items()}
    return Occurrences(targets, columns, len(labels))

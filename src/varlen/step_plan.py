"""The data structures of a planned step: its mesh, the MicroPacks of both passes, and the order of their tasks."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from varlen.arguments import in_words
from varlen.errors import SettingError
from varlen.types import Int32Array, IntArray, rebuilt

Sharding = Literal["none", "optimizer", "parameters"]
PlanMethod = Literal["packed", "balanced", "sliced", "micropack", "dynamic_cp"]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "kv"]
TaskArray = npt.NDArray[np.uint8]
SliceKey = tuple[tuple[int, int, int], ...]  # a MicroPack as its slices: document, start, stop

FORWARD: Final = 0
BACKWARD: Final = 1
"""The whole backward pass, or only its input gradients if `StepPlan.splits_backward`."""
WEIGHT: Final = 2
"""The weight gradients of a backward MicroPack, if `StepPlan.splits_backward`."""
KINDS: Final = 3
MOST_GPUS: Final = 1 << 20  # larger meshes are assumed to be a mistake


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """How a job's GPUs are arranged: `dp * pp * cp * tp` of them.

    GPUs are numbered as Megatron numbers them: tp varies fastest, then cp, then dp, then pp.
    """

    dp: int = 1
    """Data-parallel ranks."""
    pp: int = 1
    """Pipeline stages of the model; each GPU of a pipeline runs one stage."""
    cp: int = 1
    """GPUs that share every document's rows (context parallelism), whatever its length."""
    tp: int = 1
    """GPUs that share every layer's heads and columns (tensor parallelism)."""
    virtual_stages: int = 1
    """Chunks of layers on each GPU; above 1 the pipeline is interleaved: stage s holds chunks s, s + pp, s + 2 pp…"""
    sharding: Sharding = "optimizer"
    """What data-parallel ranks shard: nothing, optimizer states, or parameters and gradients as well."""

    def __post_init__(self) -> None:
        for name in ("dp", "pp", "cp", "tp", "virtual_stages"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise SettingError(f"mesh {name}={value!r}; it must be a whole number of at least 1")
        if self.num_gpus > MOST_GPUS:
            raise SettingError(
                f"a mesh of {self.num_gpus:,} GPUs (dp {self.dp:,}, pp {self.pp:,}, cp {self.cp:,}, tp {self.tp:,}); "
                f"a plan is of {MOST_GPUS:,} at most"
            )
        if self.sharding not in get_args(Sharding):
            raise SettingError(f"mesh sharding={self.sharding!r}; it must be {in_words(get_args(Sharding))}")
        if self.virtual_stages > 1 and self.pp == 1:
            raise SettingError(f"virtual_stages={self.virtual_stages} needs pp of at least 2; pp is 1")

    @property
    def num_gpus(self) -> int:
        """GPUs in all."""
        return self.dp * self.pp * self.cp * self.tp

    @property
    def num_chunks(self) -> int:
        """Chunks of layers of the model, `pp * virtual_stages`; chunk q runs on stage `q % pp`."""
        return self.pp * self.virtual_stages


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroPacks:
    """What data-parallel ranks run in one pass, MicroPack after MicroPack, as flat arrays; read-only.

    Rank `r` runs the MicroPacks `rank_offsets[r]:rank_offsets[r + 1]` in this order; MicroPack `m` holds the
    slices `slice_offsets[m]:slice_offsets[m + 1]`; slice `j` is the tokens `starts[j]:stops[j]` of document
    `document_ids[j]`. A document that a merged group shares stands in a MicroPack of each of its ranks.
    """

    rank_offsets: Int32Array
    """int32 `[dp + 1]`."""
    slice_offsets: Int32Array
    """int32 `[num_micropacks + 1]`. A MicroPack may be empty: it keeps counts equal where parameters are sharded."""
    document_ids: Int32Array
    """int32 `[num_slices]`: index in `StepPlan.lengths`; not the corpus id of `PackedBatch.document_ids`."""
    starts: Int32Array
    """int32 `[num_slices]`."""
    stops: Int32Array
    """int32 `[num_slices]`: above `starts`."""

    def __post_init__(self) -> None:
        for field in fields(self):
            getattr(self, field.name).flags.writeable = False

    __reduce__ = rebuilt  # arrays are read-only in another process too

    @property
    def num_micropacks(self) -> int:
        """MicroPacks of all ranks."""
        return len(self.slice_offsets) - 1

    @property
    def counts(self) -> Int32Array:
        """int32 `[dp]`: MicroPacks of each rank."""
        return np.diff(self.rank_offsets)

    @property
    def micropack_of_slice(self) -> Int32Array:
        """int32 `[num_slices]`."""
        return np.repeat(np.arange(self.num_micropacks, dtype=np.int32), np.diff(self.slice_offsets))

    @property
    def ranks(self) -> Int32Array:
        """int32 `[num_micropacks]`: the data-parallel rank of each."""
        return np.repeat(np.arange(len(self.counts), dtype=np.int32), self.counts)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepPlan:
    """What every GPU of a mesh does in one optimizer step, as flat arrays; read-only.

    `plan_step` makes it, `simulate` scores it, a runtime executes it, a report draws it.

    Invariants, which `varlen.plan.check.check_plan` proves: every token of every document stands in exactly one
    forward and in one backward slice of each rank that shares it; a document's forward slices run first to last and
    its backward slices last to first, on the ranks `first_ranks[d]:first_ranks[d] + num_ranks[d]`; every
    MicroPack of a rank is run once by each chunk of layers, and the order of tasks has no cycle.
    """

    lengths: Int32Array
    """int32 `[num_documents]`: tokens of each document of the step."""
    first_ranks: Int32Array
    """int32 `[num_documents]`: the first data-parallel rank that holds the document; -1 for one of length 0."""
    num_ranks: Int32Array
    """int32 `[num_documents]`: 1, or the power of two of neighbouring ranks that share its rows (DP-Merge)."""
    forward: MicroPacks
    backward: MicroPacks
    tasks: TaskArray
    """uint8 `[num_tasks]`: `kind + 3 * chunk on this stage`, with kind FORWARD, BACKWARD or WEIGHT. The n-th task of
    a kind and chunk is that of the rank's n-th MicroPack of the pass."""
    task_offsets: Int32Array
    """int32 `[dp * pp + 1]`: stage s of rank r runs those from `task_offsets[r * pp + s]` up to the next offset."""
    mesh: Mesh
    splits_backward: bool = False
    """Whether weight gradients are separate tasks (zero-bubble schedules; Qi et al. 2023, arXiv 2401.10241)."""
    method: PlanMethod = "micropack"
    recompute: Recompute = "none"
    recompute_share: float = 1.0
    """With recompute="full": the share of each chunk's layers, rounded up, that are recomputed; the others recompute
    selectively."""
    offload: Offload = "none"
    answered_by: str = ""
    """A description of the winning candidate: `"24 to 24 MicroPacks a rank, … 2 of 512 documents shared"`. It begins
    with "quick" where `Planner` had no plan in time, which `feed.plans.choice_of` and metrics read."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "recompute_share", float(self.recompute_share))
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False

    def __repr__(self) -> str:
        return (
            f"StepPlan({self.method}, {self.num_documents:,} documents of {self.num_tokens:,} tokens on {self.mesh}, "
            f"{self.forward.num_micropacks:,} MicroPacks, recompute={self.recompute!r}, offload={self.offload!r})"
        )

    __reduce__ = rebuilt  # arrays are read-only in another process too

    @property
    def num_documents(self) -> int:
        """Documents of the step."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return int(self.lengths.sum(dtype=np.int64))

    def documents_of(self, rank: int) -> npt.NDArray[np.bool_]:
        """Return which documents a data-parallel rank computes slices of, bool `[num_documents]`.

        Args:
            rank: data-parallel rank, from 0. Its batch holds all tokens of these documents.
        """
        mine: npt.NDArray[np.bool_] = (self.first_ranks <= rank) & (rank < self.first_ranks + self.num_ranks)
        return mine & (self.first_ranks >= 0)

    @property
    def num_merged(self) -> int:
        """Documents that more than one data-parallel rank shares."""
        return int((self.num_ranks > 1).sum())


def spread(plan: StepPlan, ranks: int | None = None) -> StepPlan:
    """Return the same plan on a mesh with `ranks` times as many data-parallel ranks, and as many fewer of cp.

    The GPUs that shared every document because of cp share it as neighbouring data-parallel ranks: they hold the same
    MicroPacks and run the same tasks. Seconds, bytes and results are equal.

    Args:
        plan: of a mesh whose cp is a multiple of `ranks`.
        ranks: a power of two, or `check_plan` refuses the groups of ranks; by default all of cp.

    Cost: O(slices and tasks, times `ranks`).
    """
    mesh = plan.mesh
    ranks = mesh.cp if ranks is None else ranks
    if ranks == 1:
        return plan
    copies = np.repeat(np.arange(mesh.dp), ranks)
    stages = (mesh.pp * copies[:, np.newaxis] + np.arange(mesh.pp)).ravel()
    tasks, task_offsets = copied(plan.task_offsets, stages)
    is_held = plan.first_ranks >= 0
    return replace(
        plan,
        mesh=replace(mesh, dp=mesh.dp * ranks, cp=mesh.cp // ranks),
        first_ranks=np.where(is_held, plan.first_ranks * ranks, -1).astype(np.int32),
        num_ranks=np.where(is_held, plan.num_ranks * ranks, 1).astype(np.int32),
        forward=_spread(plan.forward, copies),
        backward=_spread(plan.backward, copies),
        tasks=plan.tasks[tasks],
        task_offsets=task_offsets,
    )


def _spread(packs: MicroPacks, ranks: IntArray) -> MicroPacks:
    """Return MicroPacks of the given ranks, in this order."""
    micropacks, rank_offsets = copied(packs.rank_offsets, ranks)
    slices, slice_offsets = copied(packs.slice_offsets, micropacks)
    return MicroPacks(
        rank_offsets=rank_offsets,
        slice_offsets=slice_offsets,
        document_ids=packs.document_ids[slices],
        starts=packs.starts[slices],
        stops=packs.stops[slices],
    )


def copied(offsets: Int32Array, parts: IntArray) -> tuple[IntArray, Int32Array]:
    """Return the indices of what lies in some parts, part after part, and where each part begins."""
    sizes = np.diff(offsets)[parts].astype(np.int64)
    begins = np.cumsum(sizes) - sizes
    indices: IntArray = np.arange(sizes.sum()) + np.repeat(offsets[:-1][parts] - begins, sizes)
    return indices, np.append(begins, sizes.sum()).astype(np.int32)

"""The data structures of a planned step: its mesh, the MicroPacks of both passes, and the order of their tasks."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from varlen.arguments import in_words
from varlen.errors import SettingError
from varlen.types import Int32Array, rebuilt

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


def spread(plan: StepPlan) -> StepPlan:
    """Return the plan of `dp * cp` data-parallel ranks that do what the GPUs of `plan` do; its mesh has cp=1.

    The cp GPUs of a data-parallel rank become neighbouring ranks, which share all its documents and run its tasks.
    Unless cp is a power of two, `check_plan` refuses such groups of ranks.

    Cost: O(slices and tasks, times cp).
    """
    mesh, times = plan.mesh, plan.mesh.cp
    if times == 1:
        return plan
    is_held = plan.first_ranks >= 0
    counts = np.diff(plan.task_offsets).reshape(mesh.dp, mesh.pp)
    return replace(
        plan,
        first_ranks=np.where(is_held, plan.first_ranks * times, -1).astype(np.int32),
        num_ranks=np.where(is_held, plan.num_ranks * times, 1).astype(np.int32),
        forward=_spread_packs(plan.forward, times),
        backward=_spread_packs(plan.backward, times),
        tasks=_repeated(plan.tasks, plan.task_offsets[:: mesh.pp], times),
        task_offsets=_offsets(counts.repeat(times, axis=0).ravel()),
        mesh=replace(mesh, dp=mesh.dp * times, cp=1),
    )


def _spread_packs(packs: MicroPacks, times: int) -> MicroPacks:
    """Return MicroPacks of which each rank's are those of `times` neighbouring ranks."""
    bounds = packs.slice_offsets[packs.rank_offsets]
    return MicroPacks(
        rank_offsets=_offsets(packs.counts.repeat(times)),
        slice_offsets=_offsets(_repeated(np.diff(packs.slice_offsets), packs.rank_offsets, times)),
        document_ids=_repeated(packs.document_ids, bounds, times),
        starts=_repeated(packs.starts, bounds, times),
        stops=_repeated(packs.stops, bounds, times),
    )


def _repeated(values: Any, offsets: Int32Array, times: int) -> Any:
    """Return values of which each part `offsets[i]:offsets[i + 1]` stands `times` times, one behind the other."""
    return np.concatenate([part for part in np.split(values, offsets[1:-1]) for _ in range(times)])


def _offsets(counts: npt.NDArray[Any]) -> Int32Array:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)

"""Whole documents balanced by work over ranks and micro-batches: WLB-LLM's greedy, and Karmarkar-Karp."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from varlen import jit
from varlen.plan import kernels_groups
from varlen.plan.baselines.orders import Order, ordered
from varlen.plan.baselines.packed import rank_choices
from varlen.plan.baselines.placing import placed, work_of_packs
from varlen.plan.candidate import Candidate
from varlen.plan.partition import partition
from varlen.step_plan import Mesh
from varlen.types import FloatArray, Int32Array

BALANCED_ORDERS: tuple[Order, ...] = ("long_first", "long_last", "long_middle", "long_ends")
COUNTS = (
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    8.0,
    12.0,
    *(2.0**step * part for step in range(4, 31) for part in (1, 1.5)),
)
"""Micro-batches a rank that may be tried, times the pipeline's stages: as long as more of them help."""
LEAST_TOKENS = 1024
"""Tokens of a micro-batch, on average, below which more of them are not tried."""
_MOST_STEPS, _LEAST_ROUNDS = 2**29, 4
"""Documents times micro-batches of all ranks that are looked at, about a second; but this many micro-batches for each
of the pipeline's stages are always tried. Steps of less than some 20,000 documents are never held back by it."""
SLACK = 2.0
"""Times its even share of tokens that a micro-batch may hold, as WLB-LLM has it."""


def balanced_candidates(
    lengths: Int32Array,
    work: FloatArray,
    mesh: Mesh,
    *,
    counts: tuple[int, ...] | None = None,
    orders: tuple[Order, ...] = BALANCED_ORDERS,
) -> Iterator[Candidate]:
    """Yield both ways to balance whole documents, at each number of micro-batches, in every order.

    - WLB-LLM (Wang et al. 2025, "WLB-LLM: Workload-Balanced 4D Parallelism for Large Language Model Training",
      arXiv 2503.17924): all micro-batches of the step are filled at once, documents from long to short.
    - Karmarkar-Karp: documents to ranks of even work, as verl does; then on each rank, from much work to little, to
      the micro-batch with the least.

    Args:
        lengths: int32 `[num_documents]`.
        work: float64 `[num_documents]`: seconds of both passes.
        mesh: where it runs.
        counts: micro-batches a rank; None for those of `micro_batch_counts`.
        orders: of the micro-batches of each rank.
    """
    for count in micro_batch_counts(lengths, mesh) if counts is None else counts:
        for name, pack_of, ranks in (
            *by_workload(lengths, work, count, mesh.dp),
            ("Karmarkar-Karp", *by_differencing(work, count, mesh.dp)),
        ):
            pack_work = work_of_packs(work, pack_of, ranks.size)
            for order in orders:
                yield placed(
                    lengths,
                    pack_of,
                    ranks,
                    np.ones(ranks.size, np.int32),
                    ordered(pack_work, ranks, order),
                    mesh=mesh,
                    label=f"{name}, {count} micro-batches a rank, {order.replace('_', ' ')}",
                )


def micro_batch_counts(lengths: Int32Array, mesh: Mesh, steps: int = _MOST_STEPS) -> tuple[int, ...]:
    """Return the numbers of micro-batches a rank that may be tried, at least one, rising.

    The last is one document a micro-batch, or micro-batches of `LEAST_TOKENS`; of very many documents, as many as can
    be filled in about a second.

    Args:
        lengths: int32 `[num_documents]`.
        mesh: where it runs.
        steps: documents times micro-batches of all ranks that may be looked at for one of these numbers.
    """
    most = int(lengths.sum(dtype=np.int64)) // (mesh.dp * LEAST_TOKENS)
    held = int(np.count_nonzero(lengths))
    in_time = max(steps // max(held * mesh.dp, 1), _LEAST_ROUNDS * mesh.num_chunks)
    most = min(most, held, in_time)
    tried = {round(times * mesh.num_chunks) for times in COUNTS}
    return (*sorted(count for count in tried if count < most), max(most, 1))


def by_workload(
    lengths: Int32Array, work: FloatArray, count: int, dp: int
) -> Iterator[tuple[str, Int32Array, Int32Array]]:
    """Yield micro-batches filled by WLB-LLM's greedy with the ways to hand them to ranks.

    A document goes to the micro-batch with the least work if its tokens fit there, else to the one with the fewest
    tokens if they fit there. What fits nowhere waits, and goes to the least work in the end: our step is one step.

    Args:
        lengths: int32 `[num_documents]`.
        work: float64 `[num_documents]`.
        count: micro-batches a rank.
        dp: data-parallel ranks.

    Yields:
        A name; int32 `[num_documents]`, the micro-batch of each document, -1 where it is empty; and int32
        `[num_packs]`, the rank of each micro-batch.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")[: np.count_nonzero(lengths)].astype(np.int32)
    limit = max(SLACK * lengths.sum(dtype=np.int64) / (count * dp), float(lengths.max(initial=0)))
    pack_of = np.full(lengths.size, -1, np.int32)
    with jit.sized(1e-7 * lengths.size * count * dp):
        kernels_groups.least_work(order, lengths, work, count * dp, int(limit), pack_of)
    used, numbers = np.unique(pack_of[order], return_inverse=True)
    pack_of[order] = numbers
    pack_work = work_of_packs(work, pack_of, used.size)
    for name, ranks in rank_choices(pack_work, dp):
        yield f"WLB-LLM, {name}", pack_of, ranks


def by_differencing(work: FloatArray, count: int, dp: int) -> tuple[Int32Array, Int32Array]:
    """Return the micro-batch of each document, int32 `[num_documents]`, and the rank of each, int32 `[num_packs]`.

    Args:
        work: float64 `[num_documents]`; 0 for empty documents and no others.
        count: micro-batches a rank, at most; ranks with fewer documents have fewer.
        dp: data-parallel ranks.
    """
    held = np.flatnonzero(work)
    rank_of = partition(work[held], dp) if held.size > dp else np.arange(held.size, dtype=np.int32)
    pack_of = np.full(work.size, -1, np.int32)
    ranks: list[int] = []
    for rank in range(dp):
        mine = held[rank_of == rank]
        mine = mine[np.argsort(-work[mine], kind="stable")]
        parts = min(count, mine.size)
        if parts:
            pack_of[mine] = len(ranks) + partition(work[mine], parts, method="greedy")
        ranks += [rank] * parts
    return pack_of, np.array(ranks, np.int32)

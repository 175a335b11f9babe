"""Padded batches: padding, and what ranks wait for each other, of `vl.PaddedSampler` and of others' samplers.

Section `padded`, on log-normal lengths with a mean of about 150 tokens, at most 512, as encoders have, with 8
ranks, with and without accumulation. Each sampler gives an epoch of batches for all ranks; those of torch and
transformers have 32 rows each, and varlen's as many padded tokens at most as 32 of the longest have. All figures are
counted but the seconds to make an epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from statistics import median

import numpy as np

import varlen as vl
from benchmarks.checks import WrongResultError
from benchmarks.inputs import Int32Array, lognormal_lengths
from benchmarks.rows import Limit, Row, Step

DOCUMENTS, LONGEST, ROWS, RANKS = 100_000, 512, 32, 8
WORK = (6 * 768.0, 1.0)
"""Of a token and of a squared token in an encoder of width 768."""
Batches = list[list[list[int]]]
"""By rank, in their order, the documents of each batch."""


@cache
def _lengths() -> Int32Array:
    return lognormal_lengths(DOCUMENTS, mean=160, longest=LONGEST)


def _torch_random(accumulated: int) -> Batches:
    from torch.utils.data import BatchSampler, RandomSampler

    order = RandomSampler(range(DOCUMENTS))
    return _dealt(list(BatchSampler(order, ROWS, drop_last=True)), accumulated)


def _grouped(accumulated: int) -> Batches:
    from transformers.trainer_pt_utils import LengthGroupedSampler

    order = list(LengthGroupedSampler(ROWS * accumulated, lengths=_lengths().tolist()))
    return _dealt([order[begin : begin + ROWS] for begin in range(0, DOCUMENTS, ROWS)], accumulated)


def _rebalanced(accumulated: int) -> Batches:
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    settings = {
        "effective_batch_size": ROWS * RANKS * accumulated,
        "dp_size": RANKS,
        "grad_accum": accumulated,
    }
    lengths = _lengths().tolist()
    return [list(BatchRebalanceSampler(lengths, **settings, rank=rank)) for rank in range(RANKS)]


def _varlen(accumulated: int) -> Batches:
    settings = {"max_tokens": ROWS * LONGEST, "micro_batches": accumulated, "work": WORK}
    return [
        list(vl.PaddedSampler(_lengths(), dp_rank=rank, dp_world_size=RANKS, **settings))
        for rank in range(RANKS)
    ]


def _dealt(batches: list[list[int]], accumulated: int) -> Batches:
    """Deal batches to ranks in turn, as accelerate does; what makes no whole step is left out."""
    whole = len(batches) // (RANKS * accumulated) * RANKS * accumulated
    return [batches[rank:whole:RANKS] for rank in range(RANKS)]


SAMPLERS: dict[str, Callable[[int], Batches]] = {
    "torch, random batches": _torch_random,
    "transformers, group_by_length": _grouped,
    "transformers, batch_rebalance": _rebalanced,
    "varlen, PaddedSampler": _varlen,
}
OF_A_RANK = ("transformers, batch_rebalance", "varlen, PaddedSampler")
"""Samplers that know their rank: eight of them are made. Of the others one serves all ranks."""


def figures(batches: Batches, lengths: Int32Array, work: tuple[float, float]) -> dict[str, float]:
    """Return the share of padding, the imbalance of ranks, and an epoch's time over that of the same documents alone.

    Ranks wait for each other at every batch, as with sharded parameters; time is taken for work.
    """
    rows = np.array([[len(batch) for batch in rank] for rank in batches])
    widths = np.array([[lengths[batch].max() for batch in rank] for rank in batches], np.float64)
    taken = [lengths[one] for rank in batches for batch in rank for one in batch]
    each = np.array(taken, np.float64)
    cost = rows * (work[0] * widths + work[1] * widths**2)
    alone = float((work[0] * each + work[1] * each**2).sum()) / len(batches)
    return {
        "padding": 1 - float(each.sum() / (rows * widths).sum()),
        "imbalance": float(cost.max(0).sum() / cost.mean(0).sum()),
        "time": float(cost.max(0).sum()) / alone,
        "left out": float(lengths.size - len({one for rank in batches for batch in rank for one in batch})),
    }


def _measured(name: str, accumulated: int) -> list[Row]:
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        batches = SAMPLERS[name](accumulated)
        seconds.append((time.perf_counter() - begun) / (RANKS if name in OF_A_RANK else 1))
    if len({len(rank) for rank in batches}) > 1:
        raise WrongResultError(f"{name}: ranks have different numbers of batches")
    found = figures(batches, _lengths(), WORK)
    is_ours = name.startswith("varlen")
    if is_ours and found["left out"]:
        raise WrongResultError(f"{name}: {found['left out']:,.0f} documents don't come")
    what = f"{name}, {accumulated} batches a step" if accumulated > 1 else name
    note = f"{found['left out']:,.0f} documents left out" if found["left out"] else ""
    return [
        Limit(what=f"{what}: padding", value=100 * found["padding"], unit="%", limit=None, note=note),
        Limit(
            what=f"{what}: work of the slowest rank over the mean",
            value=found["imbalance"],
            unit="times",
            limit=None,
        ),
        Limit(
            what=f"{what}: epoch over that of documents alone", value=found["time"], unit="times", limit=None
        ),
        Limit(
            what=f"{what}: making an epoch for a rank",
            value=median(seconds),
            unit="s",
            limit=None,
            samples=seconds,
        ),
    ]


def steps() -> list[Step]:
    return [
        Step(f"{name}, {accumulated}", partial(_measured, name, accumulated))
        for accumulated in (1, 4)
        for name in SAMPLERS
    ]


SECTIONS = {"padded": steps}

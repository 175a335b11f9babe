"""A plan as large as those that are broadcast: 1,024 documents on 64 x 16 stages, 48 MicroPacks a rank."""

import heapq

import numpy as np

from varlen.step_plan import BACKWARD, FORWARD, WEIGHT, Mesh, MicroPacks, StepPlan


def large_plan(dp: int = 64, pp: int = 16, count: int = 48, documents: int = 1024, seed: int = 0) -> StepPlan:
    """Documents by dice, cut anywhere; every rank's tasks in an order of its own."""
    random = np.random.default_rng(seed)
    lengths = np.ceil(random.lognormal(8, 1.5, documents)).clip(count, 131_072).astype(np.int32)
    owners = (np.arange(documents) % dp).astype(np.int32)
    held = [np.flatnonzero(owners == rank) for rank in range(dp)]
    forward = [_cut(random, mine, lengths, count) for mine in held]
    mirrored = [_cut(random, mine, lengths, count) for mine in held]
    backward = [
        [[(d, int(lengths[d]) - b, int(lengths[d]) - a) for d, a, b in pack] for pack in rank]
        for rank in mirrored
    ]
    tasks = [_scheduled(random, pp, _needed(*both)) for both in zip(forward, backward)]
    return StepPlan(
        lengths=lengths,
        first_ranks=owners,
        num_ranks=np.ones(documents, np.int32),
        forward=_flat(forward),
        backward=_flat(backward),
        tasks=np.array(tasks, np.uint8).reshape(-1),
        task_offsets=np.arange(dp * pp + 1, dtype=np.int32) * 3 * count,
        mesh=Mesh(dp=dp, pp=pp),
        splits_backward=True,
        recompute="full",
    )


def _cut(
    random: np.random.Generator, documents: np.ndarray, lengths: np.ndarray, count: int
) -> list[list[tuple[int, int, int]]]:
    """MicroPacks of one rank: its tokens in a row, cut where dice say."""
    bounds = np.cumsum([0, *lengths[documents]])
    cuts = {0, int(bounds[-1]), *random.choice(np.arange(1, bounds[-1]), count - 1, replace=False).tolist()}
    found = []
    for begin, end in zip(sorted(cuts), sorted(cuts)[1:]):
        inside = range(np.searchsorted(bounds, begin, "right") - 1, np.searchsorted(bounds, end, "left"))
        found.append(
            [
                (int(documents[j]), max(begin - bounds[j], 0), min(end, bounds[j + 1]) - bounds[j])
                for j in inside
            ]
        )
    return found


def _flat(ranks: list[list[list[tuple[int, int, int]]]]) -> MicroPacks:
    every = [micropack for rank in ranks for micropack in rank]
    flat = np.array([one for micropack in every for one in micropack], np.int32)
    return MicroPacks(
        rank_offsets=np.cumsum([0, *map(len, ranks)], dtype=np.int32),
        slice_offsets=np.cumsum([0, *map(len, every)], dtype=np.int32),
        document_ids=flat[:, 0].copy(),
        starts=flat[:, 1].copy(),
        stops=flat[:, 2].copy(),
    )


def _needed(
    forward: list[list[tuple[int, int, int]]], backward: list[list[tuple[int, int, int]]]
) -> list[int]:
    """How many forward MicroPacks each backward one waits for: to the ends of its documents."""
    last = {document: turn + 1 for turn, pack in enumerate(forward) for document, _, _ in pack}
    return [max(last[document] for document, _, _ in pack) for pack in backward]


def _scheduled(random: np.random.Generator, pp: int, needed: list[int]) -> list[list[int]]:
    """The tasks of a rank's stages: backward as soon as one can run, then forward, then weight gradients."""
    count = len(needed)
    seconds = random.lognormal(0, 0.3, (3, count)) * np.array([[1.0], [1.5], [0.8]])
    ends = np.full((2, pp, count), np.inf)
    tasks: list[list[int]] = [[] for _ in range(pp)]
    done = np.zeros((3, pp), np.int64)
    free = [(0.0, stage) for stage in range(pp)]
    while free:
        now, stage = heapq.heappop(free)
        forward, backward, weight = done[:, stage].tolist()
        f_ready = forward < count and (stage == 0 or ends[FORWARD, stage - 1, forward] <= now)
        b_ready = backward < count and forward >= needed[backward]
        b_ready = b_ready and (stage == pp - 1 or ends[BACKWARD, stage + 1, backward] <= now)
        if not b_ready and not f_ready and weight == backward:
            if weight < count:
                heapq.heappush(free, (now + 0.1, stage))
            continue
        kind = BACKWARD if b_ready else FORWARD if f_ready and forward < backward + 3 * pp else WEIGHT
        if kind == WEIGHT and weight == backward:
            kind = FORWARD
        end = now + seconds[kind, done[kind, stage]]
        if kind != WEIGHT:
            ends[kind, stage, done[kind, stage]] = end
        done[kind, stage] += 1
        tasks[stage].append(kind)
        heapq.heappush(free, (end, stage))
    return tasks

"""Planned steps for tests: equal MicroPacks in a closed-form order, and random ones in random orders that can run."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from varlen.cost.memory import BACKWARD_COUNTS, CLOSED, FORWARD_COUNTS, OPENED, OWN, Memory
from varlen.simulate.graph import Durations
from varlen.simulate.schedules import Schedule
from varlen.step_plan import BACKWARD, FORWARD, WEIGHT, Mesh, MicroPacks, StepPlan
from varlen.types import FloatArray

Slices = list[list[list[tuple[int, int, int]]]]
"""For each rank, for each MicroPack, the slices (document, start, stop)."""


def micropacks_of(ranks: Slices) -> MicroPacks:
    packs = [pack for rank in ranks for pack in rank]
    slices = np.array([one for pack in packs for one in pack], np.int32).reshape(-1, 3)
    return MicroPacks(
        rank_offsets=np.cumsum([0, *map(len, ranks)]).astype(np.int32),
        slice_offsets=np.cumsum([0, *map(len, packs)]).astype(np.int32),
        document_ids=slices[:, 0].copy(),
        starts=slices[:, 1].copy(),
        stops=slices[:, 2].copy(),
    )


def plan_of(
    forward: Slices, backward: Slices, stages: list[list[int]], mesh: Mesh, splits_backward: bool = False
) -> StepPlan:
    passes = (*enumerate(forward), *enumerate(backward))
    rows = [(d, stop, rank) for rank, packs in passes for pack in packs for d, _, stop in pack]
    count = 1 + max((d for d, _, _ in rows), default=-1)
    lengths, first_ranks, num_ranks = (np.full(count, value, np.int32) for value in (0, -1, 1))
    for document in range(count):
        lengths[document] = max((stop for d, stop, _ in rows if d == document), default=0)
        ranks = {rank for d, _, rank in rows if d == document}
        first_ranks[document], num_ranks[document] = min(ranks, default=-1), max(len(ranks), 1)
    return StepPlan(
        lengths=lengths,
        first_ranks=first_ranks,
        num_ranks=num_ranks,
        forward=micropacks_of(forward),
        backward=micropacks_of(backward),
        tasks=np.array([task for stage in stages for task in stage], np.uint8),
        task_offsets=np.cumsum([0, *map(len, stages)]).astype(np.int32),
        mesh=mesh,
        splits_backward=splits_backward,
    )


def zero_bubble(pp: int, count: int) -> Schedule:
    """Return ZB-H1: input gradients first, weight gradients later, where the pipeline would be idle.

    Every stage holds at most pp MicroPacks, as the first stage of 1F1B does: stage s runs pp - s - 1 forwards ahead,
    and delays weight gradients by s MicroPacks. With equal costs and count >= pp a step takes
    count(forward + input + weight) + (pp - 1)(forward + input - weight), if weight is the least of the three
    (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv 2401.10241).
    """
    stages = []
    for stage in range(pp):
        ahead = min(count, pp - stage - 1)
        order = [FORWARD] * ahead
        for done in range(count):
            order += [FORWARD] * (ahead + done < count) + [BACKWARD] + [WEIGHT] * (done >= stage)
        stages.append(order + [WEIGHT] * min(stage, count))
    return Schedule(
        np.array([task for stage in stages for task in stage], np.uint8),
        np.cumsum([0, *map(len, stages)]).astype(np.int32),
    )


def equal_plan(
    schedule: Schedule, count: int, mesh: Mesh, splits_backward: bool = False, slices: int = 1
) -> StepPlan:
    """Make a plan in which every rank runs `count` MicroPacks of one row, `slices` of them a document."""
    stages = [
        part.tolist() for _ in range(mesh.dp) for part in np.split(schedule.tasks, schedule.offsets[1:-1])
    ]
    forward, backward = [], []
    for rank in range(mesh.dp):
        documents = [
            [[(document, at, at + 1)] for at in range(slices)]
            for document in range(rank * count // slices, (rank + 1) * count // slices)
        ]
        forward.append([pack for packs in documents for pack in packs])
        backward.append([pack for packs in documents for pack in packs[::-1]])
    return plan_of(forward, backward, stages, mesh, splits_backward)


def _gathers(plan: StepPlan, gather: FloatArray) -> FloatArray:
    """Seconds of tasks that gather once, and reduce in as many where they add to weight gradients."""
    backward = gather if plan.splits_backward else 2 * gather
    return np.stack([gather, backward, gather * plan.splits_backward])


def durations_of(plan: StepPlan, forward: Any, backward: Any, weight: Any = 0.0, **others: Any) -> Durations:
    """Give tasks the durations said, one for all or one each; messages and collectives take none."""
    chunks, ahead, back = plan.mesh.num_chunks, plan.forward.num_micropacks, plan.backward.num_micropacks

    def rows(micropacks: MicroPacks) -> np.ndarray:
        share = plan.mesh.cp * plan.num_ranks[micropacks.document_ids]
        sums = np.zeros(micropacks.num_micropacks)
        np.add.at(sums, micropacks.micropack_of_slice, (micropacks.stops - micropacks.starts) / share)
        return sums

    return Durations(
        forward=np.broadcast_to(np.asarray(forward, np.float64), (chunks, ahead)).copy(),
        backward=np.broadcast_to(np.asarray(backward, np.float64), (chunks, back)).copy(),
        weight=np.broadcast_to(np.asarray(weight, np.float64), (chunks, back)).copy(),
        send_forward=np.broadcast_to(np.asarray(others.get("send_forward", 0.0)), ahead).copy(),
        send_backward=np.broadcast_to(np.asarray(others.get("send_backward", 0.0)), back).copy(),
        latency_s=others.get("latency_s", 0.0),
        gather=_gathers(plan, np.broadcast_to(np.asarray(others.get("gather", 0.0)), chunks)),
        sync=np.broadcast_to(np.asarray(others.get("sync", 0.0)), plan.mesh.pp).copy(),
        forward_rows=rows(plan.forward),
        backward_rows=rows(plan.backward),
    )


def memory_of(plan: StepPlan, **fields: Any) -> Memory:
    """Every row holds a byte from its forward to its backward; other bytes are 0 unless said."""
    sizes = {"held_bytes": 1.0, "gradient_bytes": 0.0, "kept_for_weight_bytes": 0.0, "near_bytes": 0.0}
    chunks = {name: np.full(plan.mesh.num_chunks, fields.get(name, size)) for name, size in sizes.items()}
    held, gradient, apart, _ = chunks.values()
    passing, splits = fields.get("passing_bytes", 0.0), plan.splits_backward
    left, back = np.zeros((len(held), FORWARD_COUNTS)), np.zeros((len(held), BACKWARD_COUNTS))
    left[:, OWN], back[:, OWN] = held, apart * splits - held
    back[:, OPENED], back[:, CLOSED] = gradient, -gradient
    peaks, back_peaks = left[:, None].copy(), np.zeros((len(held), 1, BACKWARD_COUNTS))
    peaks[:, :, OWN] += passing
    back_peaks[:, 0, OWN], back_peaks[:, 0, OPENED] = passing, gradient
    return Memory(
        state_bytes=np.full(plan.mesh.pp, fields.get("state_bytes", 0.0)),
        limit_bytes=1e9,
        forward_peaks=peaks,
        forward_left=left,
        backward_peaks=back_peaks,
        backward_left=back,
        first_bytes=np.zeros((2, len(held))),
        **chunks,
    )


def _spread(
    random: np.random.Generator, cuts: list[tuple[int, int, list[int]]], dp: int, aligned: bool
) -> Slices:
    """Put documents, given as (document, length, ranks), into MicroPacks of their ranks, cut at random."""
    ranks: Slices = [[] for _ in range(dp)]
    for document, length, holders in cuts:
        marks = sorted({0, length, *random.integers(0, length + 1, random.integers(0, 3)).tolist()})
        for start, stop in zip(marks, marks[1:]):
            if aligned:
                level = max(len(ranks[rank]) for rank in holders)
                for rank in holders:
                    ranks[rank] += [[] for _ in range(level - len(ranks[rank]))]
            joins = len(holders) == 1 and ranks[holders[0]] and random.random() < 0.4
            joins = joins and all(held != document for held, _, _ in ranks[holders[0]][-1])
            for rank in holders:
                if joins:
                    ranks[rank][-1].append((document, start, stop))
                else:
                    ranks[rank].append([(document, start, stop)])
    if aligned:
        most = max(map(len, ranks))
        for rank in ranks:
            rank += [[] for _ in range(most - len(rank))]
    return ranks


def _reversed(ranks: Slices) -> Slices:
    return [packs[::-1] for packs in ranks]


def random_plan(seed: int, mesh: Mesh, splits_backward: bool, num_documents: int) -> StepPlan:
    """Make a plan that can run, with random documents, cuts, MicroPacks, merged groups and order of tasks."""
    random = np.random.default_rng(seed)
    documents = []
    for document in range(num_documents):
        ranks = [int(random.integers(mesh.dp))]
        if mesh.dp % 2 == 0 and random.random() < 0.3:
            ranks = [ranks[0] // 2 * 2, ranks[0] // 2 * 2 + 1]
        documents.append((document, int(random.integers(1, 40)), ranks))
    aligned = mesh.sharding == "parameters"
    passes = [
        _spread(random, [documents[one] for one in random.permutation(num_documents)], mesh.dp, aligned)
        for _ in (FORWARD, BACKWARD)
    ]
    forward, backward = passes[0], _reversed(passes[1])
    return plan_of(
        forward,
        backward,
        _random_order(random, forward, backward, mesh, splits_backward),
        mesh,
        splits_backward,
    )


def _random_order(
    random: np.random.Generator, forward: Slices, backward: Slices, mesh: Mesh, splits_backward: bool
) -> list[list[int]]:
    """Run tasks that can run, or groups of tasks that start together, in random order; note it stage by stage."""
    last = mesh.num_chunks - 1
    stages: list[list[int]] = [[] for _ in range(mesh.dp * mesh.pp)]
    counts = {
        (kind, rank, chunk): len(packs[rank])
        for kind, packs in ((FORWARD, forward), (BACKWARD, backward), (WEIGHT, backward))
        for rank in range(mesh.dp)
        for chunk in range(last + 1)
        if kind != WEIGHT or splits_backward
    }
    done = dict.fromkeys(counts, 0)

    def needs(task: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
        kind, rank, chunk, number = task
        found = [(kind, rank, chunk, number - 1)]
        if kind == WEIGHT:
            found.append((BACKWARD, rank, chunk, number))
        elif kind == FORWARD:
            found.append((FORWARD, rank, chunk - 1, number))
        elif chunk < last:
            found.append((BACKWARD, rank, chunk + 1, number))
        else:
            held = {document for document, _, _ in backward[rank][number]}
            found += [
                (FORWARD, rank, last, ahead)
                for ahead, pack in enumerate(forward[rank])
                if held & {document for document, _, _ in pack}
            ]
        return found

    while heads := [(*lane, done[lane]) for lane in counts if done[lane] < counts[lane]]:
        for choice in random.permutation(len(heads)):
            party = parties_with(heads[choice], forward, backward, mesh)
            wanted = [need for task in party for need in needs(task)]
            if all(
                number < done.get((kind, rank, chunk), number + 1) for kind, rank, chunk, number in wanted
            ):
                break
        else:
            raise AssertionError("the plan can't run")
        for kind, rank, chunk, _ in sorted(party):
            stages[rank * mesh.pp + chunk % mesh.pp].append(kind + 3 * (chunk // mesh.pp))
            done[kind, rank, chunk] += 1
    return stages


def parties_with(
    task: tuple[int, int, int, int], forward: Slices, backward: Slices, mesh: Mesh
) -> set[tuple[int, int, int, int]]:
    """The tasks (kind, rank, chunk, number in its rank) that start together with one, itself among them."""
    kind, rank, chunk, number = task
    packs = forward if kind == FORWARD else backward
    if mesh.sharding == "parameters":
        return {(kind, other, chunk, number) for other in range(mesh.dp)}
    if kind == WEIGHT:
        return {task}
    party, fresh = set(), {(rank, number)}
    while fresh:
        party |= fresh
        held = {(d, start) for other, place in fresh for d, start, _ in packs[other][place]}
        fresh = {
            (other, place)
            for other in range(mesh.dp)
            for place, pack in enumerate(packs[other])
            if held & {(d, start) for d, start, _ in pack}
        } - party
    return {(kind, other, chunk, place) for other, place in party}


@st.composite
def step_plans(draw: st.DrawFn, sharding: str | None = None) -> StepPlan:
    pp = draw(st.integers(1, 3))
    mesh = Mesh(
        dp=draw(st.sampled_from([1, 2, 3, 4])),
        pp=pp,
        virtual_stages=draw(st.sampled_from([1, 2])) if pp > 1 else 1,
        sharding=sharding or draw(st.sampled_from(["optimizer", "parameters"])),  # type: ignore[arg-type]
    )
    return random_plan(draw(st.integers(0, 2**32 - 1)), mesh, draw(st.booleans()), draw(st.integers(1, 6)))


@st.composite
def priced_plans(draw: st.DrawFn, sharding: str | None = None) -> tuple[StepPlan, Durations]:
    """Small random plans with random durations of everything, many of them equal."""
    plan = draw(step_plans(sharding))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    largest = draw(st.sampled_from([1, 3, 1000]))
    chunks, ahead, back = plan.mesh.num_chunks, plan.forward.num_micropacks, plan.backward.num_micropacks

    def some(*shape: int) -> np.ndarray:
        return random.integers(0, largest + 1, shape).astype(np.float64)

    others = {
        "send_forward": some(ahead),
        "send_backward": some(back),
        "latency_s": float(some()),
        "gather": some(chunks) * (plan.mesh.sharding == "parameters"),
        "sync": some(plan.mesh.pp),
    }
    weight = some(chunks, back) * plan.splits_backward
    return plan, durations_of(plan, some(chunks, ahead), some(chunks, back), weight, **others)

"""Random plans that keep every rule, an oracle of whether a plan does, and plans as large as those broadcast."""

import heapq
from collections import defaultdict
from dataclasses import dataclass, field
from random import Random

import numpy as np

from varlen.step_plan import BACKWARD, FORWARD, KINDS, WEIGHT, Mesh, MicroPacks, StepPlan

Slice = tuple[int, int, int]
"""Document, first token, one past the last."""


def random_plan(
    seed: int, *, most_documents: int = 8, mesh: Mesh | None = None, lengths: list[int] | None = None
) -> StepPlan:
    """A plan by dice, for a mesh and documents by dice unless given, that keeps every rule."""
    random = Random(seed)
    mesh = mesh or random_mesh(random)
    if lengths is None:
        lengths = [random.choice([0, 1, 2, 5, 30, 100]) for _ in range(random.randint(0, most_documents))]
    first_ranks, num_ranks = [], []
    for length in lengths:
        num = random.choice([n for n in (1, 1, 1, 2, 4) if n <= mesh.dp])
        first_ranks.append(random.randrange(mesh.dp // num) * num if length else -1)
        num_ranks.append(num if length else 1)
    order = [document for document, length in enumerate(lengths) if length]
    random.shuffle(order)
    forward = _micropacks(random, mesh, _cut(random, order, lengths), first_ranks, num_ranks)
    backwards = list(reversed(_cut(random, order, lengths)))
    backward = _micropacks(random, mesh, backwards, first_ranks, num_ranks)
    splits = random.random() < 0.5
    tasks, offsets = _tasks(random, mesh, forward, backward, num_ranks, splits)
    return StepPlan(
        lengths=np.array(lengths, np.int32),
        first_ranks=np.array(first_ranks, np.int32),
        num_ranks=np.array(num_ranks, np.int32),
        forward=forward,
        backward=backward,
        tasks=np.array(tasks, np.uint8),
        task_offsets=np.array(offsets, np.int32),
        mesh=mesh,
        splits_backward=splits,
        recompute="full",
    )


def random_mesh(random: Random) -> Mesh:
    pp = random.randint(1, 3)
    return Mesh(
        dp=random.randint(1, 5),
        pp=pp,
        virtual_stages=random.randint(1, 2) if pp > 1 else 1,
        sharding=random.choice(["none", "optimizer", "parameters"]),  # type: ignore[arg-type]
    )


def _cut(random: Random, order: list[int], lengths: list[int]) -> list[Slice]:
    """Slices of all documents, those of each in order, mixed at random with those of its neighbours."""
    waiting = []
    for document in order:
        cuts = sorted(
            {
                0,
                lengths[document],
                *(random.randrange(lengths[document]) for _ in range(random.randint(0, 3))),
            }
        )
        waiting.append([(document, a, b) for a, b in zip(cuts, cuts[1:])])
    found = []
    while waiting:
        chosen = random.randrange(min(len(waiting), 2))
        found.append(waiting[chosen].pop(0))
        waiting = [slices for slices in waiting if slices]
    return found


def _micropacks(
    random: Random, mesh: Mesh, slices: list[Slice], first_ranks: list[int], num_ranks: list[int]
) -> MicroPacks:
    """Slices in the order given, a shared one as the first of a MicroPack on each of its ranks."""
    held: list[list[list[Slice]]] = [[] for _ in range(mesh.dp)]
    for one in slices:
        first, num = first_ranks[one[0]], num_ranks[one[0]]
        ranks = range(first, first + num)
        if mesh.sharding == "parameters" and num > 1:
            most = max(len(held[rank]) for rank in ranks)
            for rank in ranks:
                held[rank] += [[] for _ in range(most - len(held[rank]))]
        for rank in ranks:
            if num > 1 or not held[rank] or random.random() < 0.6:
                held[rank].append([])
            held[rank][-1].append(one)
    if mesh.sharding == "parameters":
        most = max(len(micropacks) for micropacks in held)
        for micropacks in held:
            micropacks += [[] for _ in range(most - len(micropacks))]
    every = [micropack for micropacks in held for micropack in micropacks]
    flat = np.array([one for micropack in every for one in micropack], np.int32).reshape(-1, 3)
    return MicroPacks(
        rank_offsets=np.cumsum([0, *map(len, held)], dtype=np.int32),
        slice_offsets=np.cumsum([0, *map(len, every)], dtype=np.int32),
        document_ids=flat[:, 0].copy(),
        starts=flat[:, 1].copy(),
        stops=flat[:, 2].copy(),
    )


def _tasks(
    random: Random, mesh: Mesh, forward: MicroPacks, backward: MicroPacks, num_ranks: list[int], splits: bool
) -> tuple[list[int], list[int]]:
    """An order for each stage, as tasks were chosen one after the other from those that could run."""
    running = Running(mesh, forward, backward, num_ranks)
    stages: dict[tuple[int, int], list[int]] = defaultdict(list)
    total = mesh.num_chunks * (forward.num_micropacks + backward.num_micropacks * (2 if splits else 1))
    while total:
        kind, rank = (
            random.choice([FORWARD, BACKWARD, WEIGHT] if splits else [FORWARD, BACKWARD]),
            random.randrange(mesh.dp),
        )
        chunk = random.randrange(mesh.num_chunks)
        number = running.done[kind, rank, chunk]
        if number >= running.count(kind, rank):
            continue
        party = running.party(kind, rank, number)
        if all(running.can_run(kind, one, chunk) and running.done[kind, one, chunk] == n for one, n in party):
            for one, _ in party:
                running.done[kind, one, chunk] += 1
                stages[one, chunk % mesh.pp].append(kind + KINDS * (chunk // mesh.pp))
                total -= 1
    lists = [stages[rank, stage] for rank in range(mesh.dp) for stage in range(mesh.pp)]
    return [code for one in lists for code in one], np.cumsum([0, *map(len, lists)]).tolist()


@dataclass
class Running:
    """How far each chunk of each rank is."""

    mesh: Mesh
    forward: MicroPacks
    backward: MicroPacks
    num_ranks: list[int]
    done: dict[tuple[int, int, int], int] = field(default_factory=lambda: defaultdict(int))
    """MicroPacks that have passed, by kind, rank and chunk."""

    def count(self, kind: int, rank: int) -> int:
        return int((self.forward if kind == FORWARD else self.backward).counts[rank])

    def slices(self, kind: int, rank: int, number: int) -> list[Slice]:
        micropacks = self.forward if kind == FORWARD else self.backward
        place = micropacks.rank_offsets[rank] + number
        parts = range(micropacks.slice_offsets[place], micropacks.slice_offsets[place + 1])
        return [
            (int(micropacks.document_ids[j]), int(micropacks.starts[j]), int(micropacks.stops[j]))
            for j in parts
        ]

    def can_run(self, kind: int, rank: int, chunk: int) -> bool:
        number, last = self.done[kind, rank, chunk], self.mesh.num_chunks - 1
        if kind == FORWARD:
            return chunk == 0 or self.done[FORWARD, rank, chunk - 1] > number
        if kind == WEIGHT:
            return self.done[BACKWARD, rank, chunk] > number
        documents = {document for document, _, _ in self.slices(BACKWARD, rank, number)}
        waits = any(
            documents & {document for document, _, _ in self.slices(FORWARD, rank, later)}
            for later in range(self.done[FORWARD, rank, chunk], self.count(FORWARD, rank))
        )
        return not waits and (chunk == last or self.done[BACKWARD, rank, chunk + 1] > number)

    def party(self, kind: int, rank: int, number: int) -> set[tuple[int, int]]:
        """Ranks, and the number of the MicroPack of each, that start one together."""
        party = {(rank, number)}
        if self.mesh.sharding == "parameters":
            party = {(one, number) for one in range(self.mesh.dp)}
        if kind == WEIGHT:
            return party
        size = 0
        while len(party) > size:
            size = len(party)
            for one in {
                one for member in party for one in self.slices(kind, *member) if self.num_ranks[one[0]] > 1
            }:
                for other in range(self.mesh.dp):
                    for place in range(self.count(kind, other)):
                        if one in self.slices(kind, other, place):
                            party.add((other, place))
        return party


def keeps_every_rule(plan: StepPlan) -> bool:
    """Whether a plan can be run and loses nothing, found by reading it slice by slice and running it task by task."""
    try:
        return _is_whole(plan) and _runs(plan)
    except IndexError:
        return False


def _is_whole(plan: StepPlan) -> bool:
    mesh = plan.mesh
    for length, first, num in zip(plan.lengths.tolist(), plan.first_ranks.tolist(), plan.num_ranks.tolist()):
        if length < 0 or (length == 0 and (first, num) != (-1, 1)):
            return False
        if length and (num not in (1, 2, 4, 8) or first < 0 or first % num or first + num > mesh.dp):
            return False
    for micropacks in (plan.forward, plan.backward):
        for offsets, whole in (
            (micropacks.rank_offsets, len(micropacks.slice_offsets) - 1),
            (micropacks.slice_offsets, len(micropacks.document_ids)),
        ):
            if offsets[0] != 0 or offsets[-1] != whole or sorted(offsets.tolist()) != offsets.tolist():
                return False
        if micropacks.document_ids.min(initial=0) < 0 or not _covers(plan, micropacks):
            return False
    return True


def _covers(plan: StepPlan, micropacks: MicroPacks) -> bool:
    """Whether each document runs from end to end on its ranks, and on those alone."""
    at: dict[tuple[int, int], int] = {}
    sharing: dict[Slice, int] = defaultdict(int)
    for document, (length, first, num) in enumerate(zip(plan.lengths, plan.first_ranks, plan.num_ranks)):
        for rank in range(first, first + num) if length else ():
            at[document, rank] = 0 if micropacks is plan.forward else int(length)
    for rank in range(plan.mesh.dp):
        for micropack in range(micropacks.rank_offsets[rank], micropacks.rank_offsets[rank + 1]):
            for j in range(micropacks.slice_offsets[micropack], micropacks.slice_offsets[micropack + 1]):
                start, stop, key = (
                    int(micropacks.starts[j]),
                    int(micropacks.stops[j]),
                    (int(micropacks.document_ids[j]), rank),
                )
                begin, end = (start, stop) if micropacks is plan.forward else (stop, start)
                if start >= stop or at.get(key) != begin:
                    return False
                at[key] = end
                sharing[key[0], start, stop] += 1
    if any(count != plan.num_ranks[document] for (document, _, _), count in sharing.items()):
        return False
    return all(
        end == (plan.lengths[document] if micropacks is plan.forward else 0)
        for (document, _), end in at.items()
    )


def _runs(plan: StepPlan) -> bool:
    """Whether tasks come to an end, each with the others that it starts together with."""
    mesh = plan.mesh
    offsets = plan.task_offsets.tolist()
    if offsets[0] != 0 or offsets[-1] != len(plan.tasks) or sorted(offsets) != offsets:
        return False
    running = Running(mesh, plan.forward, plan.backward, plan.num_ranks.tolist())
    turn = dict(enumerate(offsets[:-1]))
    moved = True
    while moved:
        moved = False
        for place in range(mesh.dp * mesh.pp):
            rank, stage = divmod(place, mesh.pp)
            while turn[place] < offsets[place + 1]:
                code = int(plan.tasks[turn[place]])
                kind, chunk = code % KINDS, code // KINDS * mesh.pp + stage
                number = running.done[kind, rank, chunk]
                if chunk >= mesh.num_chunks or number >= running.count(kind, rank):
                    return False
                party = running.party(kind, rank, number)
                if len({one for one, _ in party}) < len(party):
                    return False  # a rank would have to run two at a time
                if any(n >= running.count(kind, one) for one, n in party):
                    return False
                places = {one: one * mesh.pp + stage for one, _ in party}
                if not all(
                    turn[places[one]] < offsets[places[one] + 1]
                    and plan.tasks[turn[places[one]]] == code
                    and running.done[kind, one, chunk] == n
                    and running.can_run(kind, one, chunk)
                    for one, n in party
                ):
                    break
                for one, _ in party:
                    running.done[kind, one, chunk] += 1
                    turn[places[one]] += 1
                moved = True
    if any(turn[place] < offsets[place + 1] for place in turn):
        return False
    wanted = {
        FORWARD: plan.forward.counts,
        BACKWARD: plan.backward.counts,
        WEIGHT: plan.backward.counts * plan.splits_backward,
    }
    return all(
        running.done[kind, rank, chunk] == counts[rank]
        for kind, counts in wanted.items()
        for rank in range(mesh.dp)
        for chunk in range(mesh.num_chunks)
    )


def large_plan(dp: int = 64, pp: int = 16, count: int = 48, documents: int = 1024, seed: int = 0) -> StepPlan:
    """Documents by dice, cut anywhere; every rank's tasks in an order of its own."""
    random = np.random.default_rng(seed)
    lengths = np.ceil(random.lognormal(8, 1.5, documents)).clip(count, 131_072).astype(np.int32)
    owners = (np.arange(documents) % dp).astype(np.int32)
    held = [np.flatnonzero(owners == rank) for rank in range(dp)]
    forward = [_cut_by_dice(random, mine, lengths, count) for mine in held]
    mirrored = [_cut_by_dice(random, mine, lengths, count) for mine in held]
    backward = [
        [[(d, int(lengths[d]) - b, int(lengths[d]) - a) for d, a, b in pack] for pack in rank]
        for rank in mirrored
    ]
    tasks = [_scheduled(random, pp, _needed(*both)) for both in zip(forward, backward)]
    return StepPlan(
        lengths=lengths,
        first_ranks=owners,
        num_ranks=np.ones(documents, np.int32),
        forward=micropacks(*forward),
        backward=micropacks(*backward),
        tasks=np.array(tasks, np.uint8).reshape(-1),
        task_offsets=np.arange(dp * pp + 1, dtype=np.int32) * 3 * count,
        mesh=Mesh(dp=dp, pp=pp),
        splits_backward=True,
        recompute="full",
    )


def _cut_by_dice(
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


def micropacks(*ranks: list[list[tuple[int, int, int]]]) -> MicroPacks:
    """MicroPacks of slices `(document, start, stop)`, rank by rank."""
    every = [micropack for rank in ranks for micropack in rank]
    flat = np.array([one for micropack in every for one in micropack], np.int32).reshape(-1, 3)
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

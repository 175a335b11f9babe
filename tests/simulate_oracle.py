"""When each task of a plan runs, straight from the rules: starts are raised until every rule holds."""

from __future__ import annotations

from step_plans import Slices, parties_with

from varlen.simulate.graph import Durations
from varlen.step_plan import BACKWARD, FORWARD, WEIGHT, MicroPacks, StepPlan

Task = tuple[int, int, int, int]
"""Kind, rank, chunk, number in its rank."""


def slices_of(micropacks: MicroPacks) -> Slices:
    """Return flat MicroPacks as lists."""
    rows = list(zip(micropacks.document_ids.tolist(), micropacks.starts.tolist(), micropacks.stops.tolist()))
    ends = micropacks.slice_offsets.tolist()
    packs = [rows[first:last] for first, last in zip(ends, ends[1:])]
    ends = micropacks.rank_offsets.tolist()
    return [packs[first:last] for first, last in zip(ends, ends[1:])]


def orders_of(plan: StepPlan) -> list[list[Task]]:
    """Return the tasks of each stage of each rank."""
    orders = []
    ends = plan.task_offsets.tolist()
    for place, (first, last) in enumerate(zip(ends, ends[1:])):
        counts: dict[int, int] = {}
        order = []
        for code in plan.tasks[first:last].tolist():
            number = counts.get(code, 0)
            counts[code] = number + 1
            rank, stage = divmod(place, plan.mesh.pp)
            order.append((code % 3, rank, code // 3 * plan.mesh.pp + stage, number))
        orders.append(order)
    return orders


def run_by_rules(
    plan: StepPlan, seconds: Durations, overlap: bool, contention: bool
) -> tuple[dict[Task, tuple[float, float]], float]:
    """Return when each task that computes starts and stops, and when everything is done."""
    rules = Rules(plan, seconds, overlap, contention)
    while rules.raise_starts():
        pass
    return {task: (rules.start[task], rules.stop(task)) for task in rules.tasks}, rules.end()


class Rules:
    """The rules of a plan, and starts that are raised until they hold."""

    def __init__(self, plan: StepPlan, seconds: Durations, overlap: bool, contention: bool) -> None:
        self.plan, self.seconds, self.overlap = plan, seconds, overlap
        self.last = plan.mesh.num_chunks - 1
        self.slices = {FORWARD: slices_of(plan.forward), BACKWARD: slices_of(plan.backward)}
        self.orders = orders_of(plan)
        self.tasks = [task for order in self.orders for task in order]
        packs = self.slices[FORWARD], self.slices[BACKWARD]
        self.party = {task: parties_with(task, *packs, plan.mesh) for task in self.tasks}
        self.length = {task: max(self.work(other) for other in self.party[task]) for task in self.tasks}
        self.start = dict.fromkeys(self.tasks, 0.0)
        self.sent = dict.fromkeys(self.tasks, 0.0)
        """When the message of each begins to leave."""
        self.free_from = dict.fromkeys(self.tasks, 0.0)
        """When the stage turns to a task; without overlap it gathers parameters as soon as its input is there too."""
        self.before = {b: a for order in self.orders for a, b in zip(order, order[1:])}
        self.link_before: dict[Task, Task] = {}
        """The message before each on its link."""
        directions = ([FORWARD, BACKWARD],) if plan.mesh.pp == 2 else ([FORWARD], [BACKWARD])
        for order in self.orders if overlap and contention else []:
            for kinds in directions:
                posts = [task for task in order if task[0] in kinds and self.sends(task)]
                self.link_before |= {b: a for a, b in zip(posts, posts[1:])}

    def micropack(self, task: Task) -> int:
        kind, rank, _, number = task
        packs = self.plan.forward if kind == FORWARD else self.plan.backward
        return int(packs.rank_offsets[rank]) + number

    def traffic(self, task: Task) -> float:
        kind, _, chunk, _ = task
        return float(self.seconds.gather[chunk]) * (1 + (kind == BACKWARD and not self.plan.splits_backward))

    def work(self, task: Task) -> float:
        tables = (self.seconds.forward, self.seconds.backward, self.seconds.weight)
        own = float(tables[task[0]][task[2], self.micropack(task)])
        return max(own, self.traffic(task)) if self.overlap else own

    def sends(self, task: Task) -> bool:
        kind, _, chunk, _ = task
        return (kind == FORWARD and chunk < self.last) or (kind == BACKWARD and chunk > 0)

    def message_s(self, task: Task) -> float:
        seconds = self.seconds.send_forward if task[0] == FORWARD else self.seconds.send_backward
        return float(seconds[self.micropack(task)])

    def stop(self, task: Task) -> float:
        return self.start[task] + self.length[task]

    def free(self, task: Task) -> float:
        """When a stage is through with a task, its message included if it waits for that."""
        if self.overlap or not self.sends(task):
            return self.stop(task)
        return self.sent[task] + self.message_s(task)

    def arrival(self, task: Task) -> float:
        rows = self.seconds.forward_rows if task[0] == FORWARD else self.seconds.backward_rows
        latency_s = self.seconds.latency_s if rows[self.micropack(task)] > 0 else 0.0
        return self.sent[task] + self.message_s(task) + latency_s

    def inputs(self, task: Task) -> list[float]:
        kind, rank, chunk, number = task
        if kind == WEIGHT:
            return [self.stop((BACKWARD, rank, chunk, number))]
        if kind == FORWARD:
            return [self.arrival((FORWARD, rank, chunk - 1, number))] if chunk > 0 else []
        if chunk < self.last:
            return [self.arrival((BACKWARD, rank, chunk + 1, number))]
        held = {document for document, _, _ in self.slices[BACKWARD][rank][number]}
        return [
            self.stop((FORWARD, rank, self.last, ahead))
            for ahead, pack in enumerate(self.slices[FORWARD][rank])
            if held & {document for document, _, _ in pack}
        ]

    def raise_starts(self) -> bool:
        """Raise every start to what the others ask for; return whether any was."""
        old = dict(self.start), dict(self.sent), dict(self.free_from)
        gathers = not self.overlap and bool(self.seconds.gather.any())
        for task in self.tasks:
            if task in self.before:
                self.free_from[task] = max(self.free_from[task], self.free(self.before[task]))
        for task in self.tasks:
            begins = [max([self.free_from[other], *self.inputs(other)]) for other in self.party[task]]
            gathered_s = self.traffic(task) if gathers else 0.0
            self.start[task] = max(self.start[task], max(begins) + gathered_s)
        for task in self.tasks:
            self.start[task] = max(self.start[other] for other in self.party[task])
            self.sent[task] = max(self.sent[task], self.stop(task))
            if task in self.link_before:
                ahead = self.link_before[task]
                self.sent[task] = max(self.sent[task], self.sent[ahead] + self.message_s(ahead))
        return old != (self.start, self.sent, self.free_from)

    def end(self) -> float:
        """When the last stage has added up its gradients, and the last message is gone."""
        ends = [self.sent[task] + self.message_s(task) for task in self.tasks if self.sends(task)]
        for stage, sync in enumerate(self.seconds.sync.tolist()):
            orders = self.orders[stage :: self.plan.mesh.pp]
            ends.append(max((self.free(order[-1]) for order in orders if order), default=0.0) + sync)
        return max(ends)

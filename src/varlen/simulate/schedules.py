"""Fixed schedules: 1F1B, interleaved, slices. `fixed_schedule` chooses the planner's."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from varlen.errors import SettingError
from varlen.step_plan import BACKWARD, FORWARD, KINDS, Mesh, TaskArray
from varlen.types import Int32Array


class Schedule(NamedTuple):
    """The tasks of one data-parallel rank, stage by stage, as in `StepPlan`."""

    tasks: TaskArray
    """uint8 `[num_tasks]`: `kind + 3 * chunk on the stage`."""
    offsets: Int32Array
    """int32 `[pp + 1]`: stage s runs those from `offsets[s]` to the next."""


def one_f_one_b(pp: int, count: int) -> Schedule:
    """Return the 1F1B schedule: each stage alternates forwards and backwards as soon as the first backward can run.

    Stage s runs min(count, pp - s - 1) forwards first and so holds min(count, pp - s) MicroPacks at most; with equal
    costs a step takes (count + pp - 1)(forward + backward) (PipeDream-flush; Narayanan et al. 2021,
    "Memory-Efficient Pipeline-Parallel DNN Training", arXiv 2006.09503).

    >>> one_f_one_b(2, 2).tasks.tolist()
    [0, 0, 1, 1, 0, 1, 0, 1]
    """
    return sliced(pp, count, 1)


def sliced(pp: int, count: int, slices: int) -> Schedule:
    """Return 1F1B over slices: each document is `slices` MicroPacks, of which the last runs backward first.

    A stage waits for the end of the first document, so it runs slices - 1 more forwards before its first backward
    (Sun et al. 2024, "Seq1F1B", arXiv 2406.03488). In `StepPlan.backward`, the MicroPacks of a document are in
    reverse order.
    """
    _check(pp=pp, slices=slices)
    _check(0, count=count)
    if count % slices:
        raise _multiple(count, slices, "slices per document")
    stages = []
    for stage in range(pp):
        ahead = min(count, pp - stage + slices - 2)
        steady = [FORWARD, BACKWARD] * (count - ahead)
        stages.append([FORWARD] * ahead + steady + [BACKWARD] * ahead)
    return _schedule(stages)


@functools.lru_cache(maxsize=4096, typed=True)
def interleaved(pp: int, virtual: int, count: int) -> Schedule:
    """Return the interleaved 1F1B schedule of stages that hold `virtual` chunks of layers; plain 1F1B for one chunk.

    MicroPacks run in rounds of pp: all of a round through one chunk, then through the next. With equal costs
    a step takes (count + (pp - 1) / virtual)(forward + backward), in seconds of all chunks of a stage. Stage s holds
    up to 2 (pp - s - 1) + (virtual - 1) pp + 1 MicroPacks of a chunk each, more than necessary, to overlap messages,
    as in Megatron (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", arXiv 2104.04473, section 2.2).
    """
    _check(pp=pp, virtual=virtual)
    _check(0, count=count)
    if virtual == 1:
        return one_f_one_b(pp, count)
    if count % pp:
        raise _multiple(count, pp, "stages")
    total = count * virtual
    turn = np.arange(total) % (pp * virtual) // pp  # the chunk of each forward
    ahead_codes = FORWARD + KINDS * turn
    back_codes = BACKWARD + KINDS * (virtual - 1 - turn)
    stages = []
    for stage in range(pp):
        ahead = min(total, 2 * (pp - stage - 1) + (virtual - 1) * pp)
        steady = np.stack((ahead_codes[ahead:], back_codes[: total - ahead]), axis=1).ravel()
        stages.append([*ahead_codes[:ahead], *steady, *back_codes[total - ahead :]])
    return _schedule(stages)


def fixed_schedule(mesh: Mesh, count: int) -> Schedule:
    """Return the schedule for `count` MicroPacks that the planner tries besides dispatched orders."""
    return interleaved(mesh.pp, mesh.virtual_stages, count)


def _schedule(stages: list[list[int]]) -> Schedule:
    """Join the tasks of stages."""
    tasks = np.array([task for stage in stages for task in stage], np.uint8)
    return Schedule(tasks, np.cumsum([0, *map(len, stages)]).astype(np.int32))


def _check(smallest: int = 1, **numbers: int) -> None:
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < smallest:
            raise SettingError(f"{name}={number!r}; a schedule needs a whole number of at least {smallest}")


def _multiple(count: int, size: int, what: str) -> SettingError:
    below = count // size * size
    return SettingError(
        f"{count:,} MicroPacks can't go in rounds of {size:,} {what}; make it {below:,} or {below + size:,}, "
        "with empty ones if need be"
    )

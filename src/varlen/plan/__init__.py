"""Plan a step: assign documents to ranks, cut and pack them into MicroPacks, and order the tasks.

    lengths ──► assign (documents to ranks) ──► compose (MicroPacks) ──► score ──► StepPlan ──► check, serialize
                micropack, local_search          partition               simulate
    planner ──► planner_process ──► planner_worker: plans steps ahead in another process

In: lengths, a cost model, a mesh. Out: a `StepPlan`. `baselines/` has other projects' methods at their best settings.
Begin in `api.py`; what plans minimize, the simulated time within the memory, is `score.score`.
"""

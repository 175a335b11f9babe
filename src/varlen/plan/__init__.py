"""Documents of a step to ranks, MicroPacks and tasks.

    lengths ──► assign (documents to ranks) ──► compose (MicroPacks) ──► score ──► StepPlan ──► check, serialize
                micropack, local_search          partition               simulate
    planner ──► planner_process ──► planner_worker: plans of coming steps, made ahead

In: lengths, a cost model, a mesh. Out: a `StepPlan`. `baselines/` has the methods of others at their best settings.
Begin in `api.py`.
"""

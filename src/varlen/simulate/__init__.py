"""Simulate a planned step in time.

    StepPlan + CostModel ──► graph: tasks, durations ──► kernels.run_tasks ──► timeline.Timeline
                             dispatch, schedules: orders    memory

In: a plan and a cost model. Out: when each task runs and what each GPU holds.
`schedules` has orders fixed ahead, such as 1F1B.
Begin in `api.py`.
"""

"""Simulate a planned step in time.

    StepPlan + CostModel ──► durations ──► graph ──► kernels.run_tasks ──► timeline.Timeline
                             dispatch (orders)       memory

In: a plan and a cost model. Out: when each task runs and what each GPU holds. `schedules` has the closed forms.
Begin in `api.py`.
"""

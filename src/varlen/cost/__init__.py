"""Seconds and bytes of a slice.

    shape.ModelShape ─┐
    hardware.Hardware ┼─► model.CostModel ──► rates.Rates ──► kernels.price
    step_plan.Mesh   ─┘                  └──► memory.Memory

In: a model's numbers and a GPU's rates. Out: what planner and simulator ask for. `fit` makes rates of measurements.
Begin in `model.py`.
"""

"""The cost model: seconds and bytes of slices.

    shape.ModelShape ─┐
    hardware.Hardware ┼─► model.CostModel ──► rates.Rates ──► kernels.price
    step_plan.Mesh   ─┘                  └──► memory.Memory

In: a model's shape and a GPU's rates. Out: prices for planner and simulator. `fit` turns measurements into rates.
Begin in `model.py`.
"""

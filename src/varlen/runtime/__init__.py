"""A plan on a real model: slices, pipelines, shared documents.

    PackedBatch + StepPlan ──► engine.SliceEngine ──► inputs ──► step (one process)   ─┐
                                                            └──► mesh/rank (one rank) ─┤
    attention (registered) ◄── the model's layers ◄── decoder ◄── chunk ◄── stage_run ◄┘

In: a transformers model, a batch, a plan. Out: `.grad` of every parameter as the uncut model gives it.
`calibrate` measures the kernels that the cost model prices.
Begin in `engine.py`.
"""

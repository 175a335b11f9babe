"""Attention within documents: a layer's rules, each kernel wrapped once, and the choice between them.

    adapters.hf ────────► rules.LayerRules ──► documents ──► choice ──► a kernel, or each document by itself
    runtime.attention ──► rules.LayerRules ──► choice ─┬─► kernels     many slices in one call, on CUDA
                                                       └─► tiles       one slice as rectangles, on any device

In: queries, keys and values, where segments end, the rules. Out: the output, and for slices its log-sum-exp and the
gradients. The room knows no caches, no ranks and no models: `runtime` keeps earlier tokens, `adapters.hf` registers
the function that transformers calls.
Begin in `rules.py`. To add a kernel, go to the end of `kernels.py`.
"""

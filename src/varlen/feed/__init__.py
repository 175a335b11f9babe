"""The loader: packs in the order of training, the same bytes whatever happens.

    loader.PackedLoader ──► opening ──► spec.Spec ──► process or thread ──► PackedBatch
                                        ├─ indexed    packs of a store: windows, stream, table
                                        ├─ mixing     packs of several stores by shares: heads, mixed_table
                                        └─ streaming  packs straight from documents: rounds of lanes, intake

In: data and `settings`. Out: batches, and `state`, which names what the trainer took. A batch crosses from the worker
in a slot of shared memory: `ring`, `wire`.
Begin in `loader.py`, then the file of the mode.
"""

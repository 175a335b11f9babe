"""The loader: packs in the order of training, the same bytes whatever happens.

    loader.PackedLoader ──► opening ──► spec.Spec ──► worker/ (process or thread) ──► PackedBatch
                                        ├─ indexed/    packs of a store: windows, stream, table
                                        ├─ mixture/    packs of several stores by shares
                                        ├─ streaming/  packs straight from documents: rounds of lanes, intake
                                        └─ batches     a step's packs as arrays, in every mode

`plans` decides a step before its batch is made; what ranks tell each other, plans among it, goes by `exchange`.

In: data and `settings`. Out: batches, and `state`, which names what the trainer took. A batch crosses from the worker
in a slot of shared memory, `worker/ring.py`. Batches hold no images: `adapters.hf.model_inputs` takes them, see
docs/isolation.md.
Begin in `loader.py`, then the folder of the mode.
"""

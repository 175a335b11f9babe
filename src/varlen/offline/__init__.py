"""Process whole data sets before training: tokenize into a store, pack into files.

    Source ──► index ──► token store ──► pack ──► Parquet, Arrow
               crew: tasks in this process, in other processes, on Ray

In: a `Source`. Out: complete folders with a manifest, written atomically. The same command resumes.
Begin in `index.py` and `pack.py`; `outputs.py` describes how outputs are written. Megatron's files are written by
`varlen.adapters.megatron.packing`, through `pack.make_set`.
"""

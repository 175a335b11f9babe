"""Work on whole data sets before training: tokenize into a store, pack into files.

    Source ──► index ──► token store ──► pack ──► Parquet, Arrow
               crew: tasks in this process, in other processes, over Ray

In: a `Source`. Out: finished folders with a manifest, or nothing that looks finished. The same command resumes.
Begin in `index.py` and `pack.py`; `outputs.py` says where results appear and how.
"""

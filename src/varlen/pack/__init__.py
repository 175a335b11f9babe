"""Assign documents to packs by their lengths.

    lengths ──► lengths.as_lengths ──► pieces (overlong, groups) ──► assign ──► Packing
                                       window, passes: a stream       kernels

In: int64 lengths. Out: a `Packing`, whose ledger balances. `score` and `api.lower_bound` say how good it is.
Begin in `api.py`; a method is a kernel in `kernels.py` and a line of `api.assign`.
"""

"""A loader that streams texts in small packs."""

import varlen as vl


def loader_of(texts, **changes):
    usual = {
        "capacity": 256,
        "global_batch_size": 12,
        "window": 8,
        "seed": 3,
        "worker": "thread",
        "epochs": 2,
    }
    return vl.PackedLoader(texts, **{**usual, **changes})

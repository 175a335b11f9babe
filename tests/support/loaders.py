"""Stores and loaders for the tests of the feed."""

import json

import numpy as np
import pytest
from tests.support.stores import write_store

import varlen as vl
from varlen.documents.source import open_source
from varlen.offline import index as index_module
from varlen.offline.index import index_source

NAMES = ("input_ids", "labels", "position_ids", "segment_ids", "cu_seqlens", "document_ids", "pack_ids")


def random_store(folder, shards=4, documents=60, longest=30, seed=5):
    """A token store with a loss mask in every other shard; empty and overlong documents are among them."""
    rng = np.random.default_rng(seed)
    store = write_store(
        folder,
        [
            [
                [
                    (rng.integers(0, 99, n).tolist(), None if shard % 2 else rng.integers(0, 2, n).tolist())
                    for n in rng.integers(0, longest, documents)
                ]
            ]
            for shard in range(shards)
        ],
    )
    manifest = {
        **store.manifest,
        "fingerprint": f"seed {seed}",
        "source": {"tokenizer": {"name": "bytes", "vocab_size": 260}},
    }
    (store.folder / "manifest.json").write_text(json.dumps(manifest))
    return store.folder


def loader_of(store, **changes):
    """A loader with small packs."""
    usual = {
        "capacity": 32,
        "global_batch_size": 24,
        "window": 50,
        "seed": 3,
        "worker": "thread",
        "epochs": 2,
    }
    return vl.PackedLoader(store, **{**usual, **changes})


def content(batch):
    """Everything of a batch that training depends on."""
    return (*(getattr(batch, name).tobytes() for name in NAMES), batch.step_num_targets)


def drained(loader):
    """The content of all batches that are left, and the state before the first and after each."""
    found, states = [], [loader.state_dict()]
    for batch in loader:
        found.append(content(batch))
        states.append(loader.state_dict())
    return found, states


def index_until(data, folder, notes, monkeypatch):
    """Index, killed when so many parts are finished."""
    real, calls = index_module.write_json, []

    def dying(*arguments):
        calls.append(arguments)
        if len(calls) > notes:
            raise KeyboardInterrupt
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(index_module, "write_json", dying)
        with pytest.raises(KeyboardInterrupt):
            index_source(open_source(data), folder)

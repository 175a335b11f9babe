"""Loaders that leave out what they can't read, and what their batches are to be."""

import os
import shutil

from tests.support.loaders import NAMES, loader_of

from varlen.store.store import open_store

PAD = 7
WORKERS = ("thread", "process")


def skipping(data, **changes):
    return loader_of(data, **{"pad_id": PAD, "on_error": "skip", **changes})


def taken(loader):
    """All batches that are left, the state after each, and what was skipped."""
    with loader:
        found = [(batch, loader.state_dict()) for batch in loader]
        return found, loader.stats().skipped


def drain(loader):
    """Take what is left, and ask for nothing else, as `list` would for its length."""
    for _ in loader:
        pass


def masked(batch, is_bad):
    """What a batch is to be where some of its pieces are masked, and how many those are."""
    arrays = {name: getattr(batch, name).copy() for name in NAMES}
    pieces = 0
    for row, (first, stop) in enumerate(zip(batch.pack_offsets[:-1], batch.pack_offsets[1:])):
        for segment in range(first, stop):
            begin, length = int(batch.document_starts[segment]), int(batch.document_lengths[segment])
            if is_bad(int(batch.document_ids[segment]), begin, begin + length):
                here = batch.segment_ids[row] == segment - first
                assert here.sum() == length
                arrays["input_ids"][row][here], arrays["labels"][row][here] = PAD, -100
                pieces += 1
    return arrays, pieces


def assert_masked(found, skipped, whole, is_bad, some=True):
    """Require that batches are those of the whole data but for bad pieces, which are masked and counted."""
    assert len(found) == len(whole)
    pieces = 0
    for (batch, state), (expected, expected_state) in zip(found, whole):
        assert state["step"] == expected_state["step"]
        assert state["micro_batch"] == expected_state["micro_batch"]
        arrays, count = masked(expected, is_bad)
        for name in NAMES:
            assert (getattr(batch, name) == arrays[name]).all(), name
        assert batch.step_num_targets == expected.step_num_targets
        assert batch.num_targets == int((batch.labels != -100).sum())
        pieces += count
    assert skipped == pieces
    assert (pieces > 0) == some


def numbered(store):
    """Of each document its shard, and where its tokens begin there."""
    kept = open_store(store, check_tokens=False)
    return [
        (shard, int(begin))
        for shard in range(len(kept.shards))
        for begin in kept.shard(shard).offsets[:-1].tolist()
    ]


def damaged(store, folder, name="tokens.bin", cut=None):
    """A copy of a store of whose third shard a file is gone, ends before, or fails whenever it is read."""
    shutil.copytree(store, folder)
    path = folder / "2" / name
    if cut is None:
        path.unlink()
    elif cut == "fails":
        path.unlink()
        path.mkdir()  # opens, and gives an error of the system
    else:
        os.truncate(path, cut)
    return folder

"""Batches of a step: every token where the plan says, targets counted over all ranks, whatever the world size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.stores import write_store

from varlen.feed.batches import BatchSettings, make_batch, plan_step
from varlen.feed.indexed.stream import PackStream, Position
from varlen.feed.indexed.windows import Groups, Windows, WindowSettings

CAPACITY = 12


@st.composite
def stores(draw):
    """Shards of documents as ids and marks."""
    shards = []
    for _ in range(draw(st.integers(1, 3))):
        lengths = draw(st.lists(st.integers(0, 20), max_size=12))
        is_masked = draw(st.booleans())
        ids = draw(st.integers(0, 70_000))
        shard = []
        for number, length in enumerate(lengths):
            marks = [(number + place) % 3 % 2 for place in range(length)] if is_masked else None
            shard.append((list(range(ids, ids + length)), marks))
            ids += length
        shards.append([shard])
    return shards


def steps_of(store, settings):
    """All steps of one epoch."""
    chosen = WindowSettings(capacity=CAPACITY, window=10, overlong="split")
    stream = PackStream(Windows(store, Groups(store), chosen), 1)
    position, steps = Position(), []
    while True:
        packs, position, _ = stream.take(position, settings.global_batch_size)
        if packs.num_packs == 0:
            return steps
        steps.append(plan_step(store, packs, len(steps), settings))


def settings_of(ranks, micro_batch_size, **more):
    chosen = {"capacity": CAPACITY, "global_batch_size": 12, "dp_world_size": ranks, **more}
    return BatchSettings(micro_batch_size=micro_batch_size, **chosen)


def batches_of(store, settings):
    """Step, rank and batch of everything that is trained."""
    rounds = settings.global_batch_size // settings.dp_world_size // settings.micro_batch_size
    for step in steps_of(store, settings):
        for rank in range(settings.dp_world_size):
            for number in range(rounds):
                yield step, rank, make_batch(store, step, rank, number, settings)


def segments_of(batch):
    """Document, first token, ids and labels of every segment."""
    ids, labels = batch.input_ids.ravel(), batch.labels.ravel()
    bounds = np.flatnonzero(np.diff(np.concatenate([[-1], _owners(batch), [-1]]))).tolist()
    runs = [(a, b) for a, b in zip(bounds, bounds[1:]) if _owners(batch)[a] >= 0]
    for (start, stop), document, first in zip(runs, batch.document_ids, batch.document_starts):
        yield int(document), int(first), ids[start:stop].tolist(), labels[start:stop].tolist()


def _owners(batch):
    """Number of the segment at every position, -1 at padding."""
    rows = np.arange(batch.segment_ids.size).reshape(batch.segment_ids.shape) // batch.segment_ids.shape[1]
    return np.where(batch.segment_ids < 0, -1, rows * 10**6 + batch.segment_ids).ravel()


def wanted_of(shards):
    """The oracle: ids and labels of every document, were it one piece."""
    documents = [document for shard in shards for document in shard[0]]
    return [
        (ids, [i if m else -100 for i, m in zip(ids, marks or [1] * len(ids))]) for ids, marks in documents
    ]


@given(stores(), st.sampled_from([(1, 12), (1, 1), (2, 3), (3, 4), (4, 1), (6, 2), (12, 1)]), st.booleans())
def test_every_token_and_label_reaches_one_rank_once(tmp_path_factory, shards, shape, is_flat):
    store = write_store(tmp_path_factory.mktemp("store"), shards)
    settings = settings_of(*shape, layout="flat" if is_flat else "rows")
    wanted = wanted_of(shards)

    found, counted = {}, {}
    for step, _, batch in batches_of(store, settings):
        counted.setdefault(step.number, [step.num_targets, 0])[1] += batch.num_targets
        assert batch.step_num_targets == step.num_targets
        for document, first, ids, labels in segments_of(batch):
            whole_ids, whole_labels = wanted[document]
            assert ids == whole_ids[first : first + len(ids)]
            assert labels == [-100, *whole_labels[first + 1 : first + len(ids)]]
            found.setdefault(document, []).append((first, first + len(ids)))
    assert all(promised == given for promised, given in counted.values())
    whole = {document: len(ids) for document, (ids, _) in enumerate(wanted) if ids}
    assert {document: max(stop for _, stop in pieces) for document, pieces in found.items()} == whole
    for pieces in found.values():
        assert [0, *(stop for _, stop in sorted(pieces))][:-1] == [start for start, _ in sorted(pieces)]


def test_the_set_of_a_step_does_not_depend_on_the_world_size(tmp_path):
    rng = np.random.default_rng(0)
    shards = [[[(rng.integers(0, 99, n).tolist(), None) for n in rng.integers(0, 14, 90)]] for _ in range(2)]
    store = write_store(tmp_path, shards)

    def sets(ranks, micro_batch_size):
        made = {}
        for step, _, batch in batches_of(store, settings_of(ranks, micro_batch_size)):
            rows = zip(batch.pack_ids.tolist(), batch.input_ids.tolist(), batch.labels.tolist())
            made.setdefault(step.number, []).extend(rows)
        return [sorted(rows) for _, rows in sorted(made.items())]

    alone = sets(1, 12)
    assert len(alone) > 3
    assert [number for rows in alone for number, _, _ in rows] == list(range(12 * len(alone)))
    for shape in ((2, 6), (3, 4), (4, 3), (6, 2), (12, 1), (2, 1)):
        assert sets(*shape) == alone


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_only_the_end_of_the_last_epoch_is_masked(tmp_path, layout):
    store = write_store(tmp_path, [[[([1, 2, 3], None)]]])
    batches = [batch for _, _, batch in batches_of(store, settings_of(4, 3, layout=layout, pad_id=7))]

    assert [batch.num_tokens for batch in batches] == [3, 0, 0, 0]
    assert {batch.step_num_targets for batch in batches} == {2}
    assert all((batch.labels == -100).all() and (batch.input_ids == 7).all() for batch in batches[1:])
    assert all(batch.loss_scale() == 4 / 2 for batch in batches)

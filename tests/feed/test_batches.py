"""Batches of a step: ranks agree, every token where the plan says, targets counted, packs full and mixed."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.stores import write_store

import varlen as vl
from varlen.documents import blocks
from varlen.errors import StalledError
from varlen.feed.batches import BatchSettings, deal_step, make_batch
from varlen.feed.exchange import StoreExchange, job_store, name_of
from varlen.feed.indexed.stream import PackStream, Position
from varlen.feed.indexed.windows import Groups, Windows, WindowSettings
from varlen.pack.score import length_correlation

CAPACITY = 12


@st.composite
def stores(draw):
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
    chosen = WindowSettings(capacity=CAPACITY, window=10, overlong="split")
    stream = PackStream(Windows(store, Groups(store), chosen), 1)
    position, steps = Position(), []
    while True:
        packs, position, _ = stream.take(position, settings.global_batch_size)
        if packs.num_packs == 0:
            return steps
        steps.append(deal_step(store, packs, len(steps), settings))


def settings_of(ranks, micro_batch_size, **more):
    chosen = {"capacity": CAPACITY, "global_batch_size": 12, "dp_world_size": ranks, **more}
    return BatchSettings(micro_batch_size=micro_batch_size, **chosen)


def batches_of(store, settings):
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


def ranks_of(count, deadline_s=20.0):
    store = torch.distributed.HashStore()
    return [StoreExchange(store, "here", rank, count, deadline_s) for rank in range(count)]


def side_by_side(works):
    def result(work):
        try:
            return work()
        except StalledError as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(result, works))


def test_every_rank_gets_what_all_said_and_again_the_same():
    ranks = ranks_of(3)
    for key in ("round 0", "round 1", "round 0"):
        said = [{rank: [key, rank], rank + 3: {"a": [1, None]}} for rank in range(3)]
        found = side_by_side([partial(rank.all, key, one) for rank, one in zip(ranks, said)])
        expected = {lane: value for one in said for lane, value in one.items()}
        assert found == [expected] * 3


def test_a_rank_that_does_it_again_alone_finds_what_it_found():
    ranks = ranks_of(2)
    first = side_by_side([partial(ranks[r].all, "k", {r: r}) for r in range(2)])
    assert ranks[1].all("k", {1: 1}) == first[1] == {0: 0, 1: 1}
    assert ranks[1].all("k", {1: 7}) == first[1]  # what it said first stands


def test_who_is_missing_is_named():
    ranks = ranks_of(4, deadline_s=0.3)
    found = side_by_side([partial(ranks[r].all, "round 7", {r: r}) for r in (0, 2)])
    assert all("2 ranks of 4 (1, 3) at round 7" in str(error) for error in found)


def test_a_wait_can_be_given_up():
    rank = ranks_of(2)[0]
    threading.Timer(0.1, rank.close).start()
    with pytest.raises(StalledError, match="waited 0 s for 1 rank"):
        rank.all("k", {0: 0})


def test_old_keys_are_removed_from_the_store(monkeypatch):
    monkeypatch.setattr("varlen.feed.exchange._KEPT", 3)
    store = torch.distributed.HashStore()
    rank = StoreExchange(store, "here", 0, 1, 1.0)
    for number in range(10):
        rank.all(f"round {number}", {0: 0})
    assert [number for number in range(10) if store.check([f"here/round {number}/0"])] == [7, 8, 9]


def test_without_a_group_there_is_no_store_and_names_count_up():
    assert job_store() is None
    first, again, other = (name_of({"names count up": value}).rpartition("/") for value in ("a", "a", "b"))
    assert (first[2], again[2], other[2]) == ("0", "1", "0")
    assert first[0] == again[0] != other[0]


DEALT = 40
"""Times that the same documents are dealt at random: packs no more alike than all these but one are at random."""


def encode(text):
    """A text says how long it is."""
    return [1] * (int(text) - 1 if text.isdigit() else 1)


def lengths_of(name, request):
    """Lengths in the order of the data, and a capacity."""
    if name == "log-normal":
        return np.random.default_rng(1).lognormal(5, 1.2, 12_000).clip(2, 4096).astype(int), 4096
    data = request.getfixturevalue("data")
    capacity = {"gsm8k_train": 2048, "mix_sft": 8192, "code_src": 16384}[name]
    lengths = np.load(data / "lengths" / f"{name}.npz")["lengths"].astype(int)
    return lengths[(lengths > 1) & (lengths <= capacity)], capacity


def packed(tmp_path, lengths, capacity, mode, method):
    """The lengths in each pack, as the loader hands them out; without the end, where packs can't be filled."""
    path = tmp_path / "lengths.jsonl"
    path.write_text("".join(json.dumps({"text": f"{length:06}"}) + "\n" for length in lengths))
    packs, ends = {}, [0]
    with vl.PackedLoader(
        path,
        encode,
        eos=0,
        capacity=capacity,
        global_batch_size=4,
        mode=mode,
        method=method,
        worker="thread",
        cache=tmp_path,
    ) as loader:
        for batch in loader:
            at = 0
            for number, row in zip(batch.pack_ids.tolist(), batch.segment_ids):
                count = int(row.max()) + 1
                packs[number] = batch.document_lengths[at : at + count]
                at += count
            ends.append(loader.state_dict()["at"].get("step", 0))
    steps = sorted(set(ends))
    last = 4 * steps[-2] if mode == "streaming" else len(packs) - 4
    return [packs[number] for number in range(last)]


def correlation(packs):
    return length_correlation(np.concatenate(packs), np.cumsum([0, *map(len, packs)]))


def at_random(packs, capacity):
    """The correlations where the same documents are dealt in a random order, each to the pack that is open."""
    lengths, found = np.concatenate(packs), []
    for seed in range(DEALT):
        mixed = np.random.default_rng(seed).permutation(lengths)
        dealt = vl.pack(mixed, capacity, "next_fit")
        found.append(length_correlation(mixed[dealt.document_ids], dealt.offsets))
    return np.sort(found)


SETS = ["log-normal", "gsm8k_train", "mix_sft", "code_src"]


@pytest.mark.parametrize("mode", ["streaming", "indexed"])
@pytest.mark.parametrize("name", SETS)
def test_full_packs_hold_lengths_that_are_no_more_alike_than_at_random(
    tmp_path, monkeypatch, request, mode, name
):
    monkeypatch.setattr(blocks, "FEWEST_BLOCK_BYTES", 400)
    lengths, capacity = lengths_of(name, request)

    packs = packed(tmp_path, lengths, capacity, mode, "best_fit")

    assert len(packs) > 100
    assert sum(map(np.sum, packs)) / (len(packs) * capacity) >= 0.995
    assert correlation(packs) <= at_random(packs, capacity)[-2]


def test_packs_sorted_by_length_would_be_seen(tmp_path, monkeypatch, request):
    monkeypatch.setattr(blocks, "FEWEST_BLOCK_BYTES", 400)
    lengths, capacity = lengths_of("log-normal", request)

    for mode in ("streaming", "indexed"):
        packs = packed(tmp_path, lengths, capacity, mode, "best_fit_decreasing")
        assert correlation(packs) > at_random(packs, capacity)[-1] + 0.1

"""What a state says of a lane: small, the same once it is read again, and refused where it was changed."""

import base64
import json
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import varlen as vl
from varlen.errors import StateError
from varlen.feed.streaming.lane import Arrival, Counts, from_record, shuffle_keys, to_record


def arrival(rows, mask=None):
    """Documents that wait: each a number, its first token here, tokens and rounds."""
    ids, firsts, lengths, ages = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return Arrival(
        ids=ids,
        firsts=firsts,
        ages=ages.astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        tokens=np.zeros(int(lengths.sum()), dtype=np.int32),
        mask=mask,
    )


def rows_of(record):
    return list(zip(*(one.tolist() for one in (record.ids, record.starts, record.lengths, record.ages))))


ROW = st.tuples(st.integers(0, 2**62), st.integers(0, 2**31 - 1), st.integers(0, 99), st.integers(0, 20))
ROWS = st.lists(ROW | st.tuples(*[st.integers(0, 2)] * 4), max_size=30)
SEED = st.none() | st.integers(0, 2**62)


@given(ROWS, SEED, st.lists(st.integers(0, 5), max_size=3))
def test_documents_come_back_in_their_order_whatever_it_is(rows, seed, epochs):
    counts = Counts(documents=7, claims=2)
    record = json.loads(json.dumps(to_record(arrival(rows), counts, seed, epochs)))
    found = from_record(record, seed)
    assert rows_of(found) == rows
    assert (found.counts, found.is_masked) == (counts, False)
    assert (record["documents"], record["tokens"]) == (len(rows), sum(row[2] for row in rows))


@given(ROWS, SEED, st.integers(0, 5))
def test_the_order_of_documents_that_wait_as_they_came_is_not_stored(rows, seed, epoch):
    ids = np.array([row[0] for row in rows], dtype=np.int64)
    keys = ids if seed is None else shuffle_keys(ids, seed, epoch)
    came = [
        rows[n] for n in np.lexsort(([r[2] for r in rows], [r[1] for r in rows], keys, [-r[3] for r in rows]))
    ]
    record = to_record(arrival(came), Counts(), seed, [9, epoch])
    assert record["epoch"] in (9, epoch)
    assert rows_of(from_record(record, seed)) == came


def test_marks_are_told():
    for marks, is_masked in (([1, 1], False), ([1, 0], True)):
        record = to_record(arrival([(3, 0, 2, 0)], np.array(marks, dtype=np.uint8)), Counts(), 0, [0])
        assert from_record(record, 0).is_masked is is_masked


def changed(record, name, value):
    return {key: one for key, one in {**record, name: value}.items() if value is not KeyError or key != name}


@settings(deadline=None)
@given(ROWS.filter(len), st.data())
def test_a_record_that_was_changed_is_refused_and_nothing_else_is_raised(rows, data):
    record = to_record(arrival(rows), Counts(), 3, [0])
    name = data.draw(st.sampled_from(sorted(record)))
    odd = st.sampled_from([KeyError, None, -1, 1.5, "", "ÿ", [], {}, True, 2**63, 2**62, 10**30])
    near = st.integers(0, 40) | st.text("AQgw=/+", max_size=9)
    text = record["waiting"]
    at = data.draw(st.integers(0, len(text) - 1))
    bent = st.sampled_from([text[:at] + "A" + text[at + 1 :], text[:at], text[at:], text + "AAAA"])
    value = data.draw(bent if name == "waiting" else odd | near)
    try:
        found = from_record(changed(record, name, value), 3)
    except StateError:
        return
    if name in ("documents", "tokens", "waiting"):
        assert rows_of(found) == rows
    elif name == "epoch":
        assert sorted(rows_of(found)) == sorted(rows)
    else:
        assert name == "masked"


def test_numbers_that_turn_over_are_refused():
    for row in ((-5, 0, 1, 0), (1, -1, 1, 0), (1, 0, 1, -1), (1, 2**40, 1, 0)):
        with pytest.raises(StateError, match="1 waiting documents of 1 tokens aren't what they were"):
            from_record(to_record(arrival([row]), Counts(), 0, [0]), 0)


def test_a_record_that_was_cut_or_put_together_otherwise_is_refused():
    rows = [(9, 0, 4, 0), (5, 0, 6, 1), (7, 0, 2, 0)]
    record = to_record(arrival(rows), Counts(), 0, [])
    assert record["epoch"] is None
    packed = base64.b64decode(record["waiting"])
    planes = bytearray(zlib.decompress(packed))
    twice = (
        bytes(planes[:-24]) + bytes([0, 0, 2]) + bytes(planes[-21:])
    )  # in the place of an order of 0, 1 and 2
    for waiting in (packed[:-2], packed + packed, zlib.compress(twice), zlib.compress(bytes(10**6)), b""):
        with pytest.raises(StateError):
            from_record({**record, "waiting": base64.b64encode(waiting).decode()}, 0)
    for name in ("documents", "tokens"):
        for value in (0, 2**40, 2**62, 2**63 - 1):
            with pytest.raises(StateError):
                from_record({**record, name: value}, 0)
    with pytest.raises(StateError):
        from_record({**record, "waiting": " " + record["waiting"]}, 0)
    assert rows_of(from_record(record, 0)) == rows


def short_texts(path, count):
    """Documents of about 15 tokens with the end of each."""
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(2.5, 0.5, count), 1, 60).astype(int).tolist()
    path.write_text("".join(json.dumps({"text": "x" * size}) + "\n" for size in sizes))
    return path


def test_a_state_is_small_also_where_documents_are(tmp_path):
    path = short_texts(tmp_path / "a.jsonl", 120_000)
    with vl.PackedLoader(path, capacity=1024, global_batch_size=8, worker="thread", epochs=2) as loader:
        sizes = []
        for number, _ in enumerate(loader):
            if number % 10 == 9:
                state = loader.state_dict()
                lanes = state["at"]["lanes"]
                sizes.append((len(json.dumps(state)), sum(lane["documents"] for lane in lanes)))
    most, documents = max(sizes)
    assert documents > 10_000
    assert most <= 2.2 * documents + 10_000


def test_a_changed_lane_is_refused_when_the_state_is_loaded(tmp_path):
    path = short_texts(tmp_path / "a.jsonl", 4_000)
    with vl.PackedLoader(path, capacity=256, global_batch_size=4, worker="thread") as loader:
        for _ in range(20):
            next(loader)
        state = loader.state_dict()
        wanted = next(loader).input_ids.tobytes()
        lanes = state["at"]["lanes"]
        assert lanes[1]["documents"] > 0
        for name, value in (
            ("waiting", lanes[0]["waiting"]),
            ("tokens", 5),
            ("documents", 10**12),
            ("counts", 3),
        ):
            lane = {**lanes[1], name: value}
            with pytest.raises(StateError):
                loader.load_state_dict(
                    {**state, "at": {**state["at"], "lanes": [lanes[0], lane, *lanes[2:]]}}
                )
        loader.load_state_dict(json.loads(json.dumps(state)))
        assert next(loader).input_ids.tobytes() == wanted

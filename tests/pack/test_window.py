"""`vl.WindowPacker`: the promises of `vl.pack` over a stream, at any cut of it; and packs counted, not made."""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.packings import (
    METHODS,
    POLICIES,
    Piece,
    arrays_of,
    check_complete,
    check_limits,
    kept_of,
    packs_of,
    random_lengths,
)

import varlen as vl
from varlen.errors import LedgerError, LengthsError, OverlongDocumentError, SettingError, StateError
from varlen.feed.indexed.windows import WindowSettings, packed_window
from varlen.pack.window import count_packs
from varlen.types import Ledger, Method, Overlong

Stream = tuple[list[int], dict[str, Any]]


@st.composite
def streams(
    draw: st.DrawFn, methods: tuple[Method, ...] = METHODS, policies: tuple[Overlong, ...] = POLICIES
) -> Stream:
    """Lengths and settings of a packer that takes them, windows of a few pieces."""
    multiple = draw(st.sampled_from([1, 1, 2]))
    capacity = multiple * draw(st.integers(1, 16))
    method, overlong = draw(st.sampled_from(methods)), draw(st.sampled_from(policies))
    longest = capacity if overlong == "error" and method != "wrapped" else 3 * capacity
    lengths = draw(st.lists(st.integers(0, longest), max_size=50))
    chosen = {
        "capacity": capacity,
        "window": draw(st.integers(1, 12)),
        "method": method,
        "overlong": overlong,
        "max_documents": draw(st.sampled_from([None, None, 1, 3])),
        "document_multiple_of": multiple,
        "min_fill": draw(st.sampled_from([0.995, 0.7, 1.0, 0])),
        "max_age": draw(st.sampled_from([4, 0, 1])),
    }
    return lengths, chosen


def portions(lengths: list[int], sizes: list[int]) -> Iterator[list[int]]:
    """The lengths in portions of these sizes, over and over; sizes of 0 give empty portions."""
    at, turn = 0, 0
    while at < len(lengths):
        size = sizes[turn % len(sizes)]
        yield lengths[at : at + size]
        at, turn = at + size, turn + 1


def run(packer: vl.WindowPacker, lengths: list[int], sizes: list[int]) -> list[list[Piece]]:
    packs = [pack for part in portions(lengths, sizes) for pack in packs_of(packer.add(part))]
    return packs + packs_of(packer.flush())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("overlong", POLICIES)
@settings(max_examples=settings.default.max_examples // 5)
@given(data=st.data())
def test_every_token_goes_out_once_whatever_the_settings(method, overlong, data):
    lengths, chosen = data.draw(streams((method,), (overlong,)))
    packer = vl.WindowPacker(**chosen)
    packs = run(packer, lengths, data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3)))
    pieces: dict[int, int] = defaultdict(int)
    for document, _, _ in (piece for pack in packs for piece in pack):
        pieces[document] += 1
    part = kept_of(lengths, chosen["capacity"], overlong)

    check_complete(packs, part)
    check_limits(packs, chosen["capacity"], chosen["document_multiple_of"], chosen["max_documents"])
    assert all(pack == sorted(pack) for pack in packs)
    assert packer.num_waiting == packer.waiting_tokens == 0
    assert packer.num_records == len(lengths)
    assert packer.ledger == Ledger(
        tokens_in=sum(lengths),
        packed=sum(part),
        truncated=sum(lengths) - sum(part) if overlong == "truncate" else 0,
        dropped=sum(lengths) - sum(part) if overlong == "drop" else 0,
        documents_in=len(lengths),
        empty_documents=lengths.count(0),
        split_documents=sum(count > 1 for count in pieces.values()),
        truncated_documents=sum(a != b for a, b in zip(lengths, part)) if overlong == "truncate" else 0,
        dropped_documents=sum(a != b for a, b in zip(lengths, part)) if overlong == "drop" else 0,
    )


@given(streams(), st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any))
def test_packs_do_not_depend_on_how_lengths_are_divided_among_calls(stream, sizes):
    lengths, chosen = stream
    at_once = run(vl.WindowPacker(**chosen), lengths, [len(lengths) or 1])

    assert run(vl.WindowPacker(**chosen), lengths, sizes) == at_once
    assert run(vl.WindowPacker(**chosen), lengths, [1]) == at_once


@settings(max_examples=settings.default.max_examples // 2)
@given(streams(), st.integers(1, 9))
def test_a_packer_restored_from_any_step_goes_on_exactly(stream, size):
    lengths, chosen = stream
    packer = vl.WindowPacker(**chosen)
    states, packings = [json.dumps(packer.state_dict())], []
    for part in portions(lengths, [size]):
        packings.append(packer.add(part))
        states.append(json.dumps(packer.state_dict()))
    packings.append(packer.flush())
    parts = list(portions(lengths, [size]))
    for step, state in enumerate(states):
        restored = vl.WindowPacker(**chosen)
        restored.load_state_dict(json.loads(state))
        assert json.dumps(restored.state_dict()) == state
        tail = [restored.add(part) for part in parts[step:]] + [restored.flush()]
        for ours, theirs in zip(tail, packings[step:], strict=True):
            assert packs_of(ours) == packs_of(theirs)
            assert ours.ledger == theirs.ledger
        assert restored.ledger == packer.ledger


@given(streams(), st.integers(1, 9))
def test_the_ledger_of_each_call_speaks_of_that_call_and_they_add_up(stream, size):
    lengths, chosen = stream
    packer = vl.WindowPacker(**chosen)
    ledgers = []
    for part in portions(lengths, [size]):
        packing = packer.add(part)
        assert packing.num_documents == packing.ledger.documents_in == packer.num_records
        assert packing.ledger.balance == 0
        assert packing.num_tokens == packing.ledger.packed
        assert packer.ledger.balance == packer.waiting_tokens
        ledgers.append(packing.ledger)
    ledgers.append(packer.flush().ledger)
    names = [field.name for field in dataclasses.fields(Ledger) if field.name != "documents_in"]

    for name in names:
        assert sum(getattr(ledger, name) for ledger in ledgers) == getattr(packer.ledger, name), name


@given(streams(methods=("wrapped", "next_fit")), st.integers(1, 9))
def test_methods_with_one_open_pack_give_the_packs_of_the_whole_stream(stream, size):
    lengths, chosen = stream
    whole = {name: chosen[name] for name in ("capacity", "method", "overlong", "max_documents")}
    packing = vl.pack(lengths, **whole, document_multiple_of=chosen["document_multiple_of"])
    packer = vl.WindowPacker(**chosen)

    assert run(packer, lengths, [size]) == packs_of(packing)
    assert packer.ledger == packing.ledger


@given(streams(methods=("best_fit", "first_fit", "best_fit_decreasing", "balanced")))
def test_memory_stays_within_a_window_and_what_one_call_brings(stream):
    lengths, chosen = stream
    packer = vl.WindowPacker(**chosen)
    for length in lengths:
        pieces = -(-length // chosen["capacity"]) if chosen["overlong"] == "split" else 1
        before = packer.num_waiting
        packed = packer.add([length]).num_pieces
        assert packer.num_waiting < chosen["window"]
        if packed:
            assert packer.num_waiting <= chosen["window"] // 2 + pieces
        else:
            assert packer.num_waiting <= before + pieces


@given(
    streams(methods=("best_fit", "first_fit_decreasing", "balanced"), policies=("error", "truncate", "drop"))
)
def test_no_document_waits_longer_than_max_age_windows(stream):
    lengths, chosen = stream
    packer = vl.WindowPacker(**chosen)
    windows, came = 0, {}
    for record, (length, part) in enumerate(
        zip(lengths, kept_of(lengths, chosen["capacity"], chosen["overlong"]))
    ):
        came[record] = windows
        expected = packer.state_dict()["fresh"] + (part > 0)
        packer.add([length])
        state = packer.state_dict()
        windows += state["fresh"] < expected  # a window has taken the fresh pieces
        assert all(windows - came[waiting] <= chosen["max_age"] for waiting in state["waiting"]["records"])


def test_a_piece_nobody_wants_goes_out_after_max_age_windows():
    # Documents of 8 fill packs of 8; the 5 fits nothing that comes and must not wait for ever.
    for max_age in (0, 1, 3):
        packer = vl.WindowPacker(capacity=8, window=4, max_age=max_age)
        handed = [packer.add([5, 8, 8, 8])] + [packer.add([8, 8, 8]) for _ in range(5)]
        windows = [number for number, packing in enumerate(handed) if [0] in packing.to_lists()]
        assert windows == [max_age]


def test_packs_that_are_full_enough_go_out_at_once_and_others_wait():
    packer = vl.WindowPacker(capacity=10, window=4, min_fill=0.9)

    assert packer.add([6, 3, 5, 1]).to_lists() == [[0, 1, 3]]
    assert (packer.num_waiting, packer.waiting_tokens) == (1, 5)
    assert packer.add([5, 2, 7]).to_lists() == [[2, 4], [5, 6]]
    assert packer.flush().to_lists() == []


def test_the_packs_of_a_window_stand_in_the_order_of_their_first_document():
    lengths = random_lengths(8, 5000, 1000, "even")
    packer = vl.WindowPacker(capacity=1000, window=500)
    for part in portions(lengths, [250]):
        first = [pack[0] for pack in packs_of(packer.add(part))]
        assert first == sorted(first)


def test_a_stream_of_tiny_documents_is_not_packed_anew_for_each_of_them(monkeypatch):
    from varlen.pack import passes

    calls, pack = [], passes.pack

    def counted(lengths: Any, *rest: Any, **named: Any) -> Any:
        calls.append(len(lengths))
        return pack(lengths, *rest, **named)

    monkeypatch.setattr(passes, "pack", counted)
    packer = vl.WindowPacker(capacity=10**6, window=100, method="wrapped")
    packer.add([1] * 10_000)

    assert len(calls) <= 200


@pytest.mark.parametrize("method", METHODS)
def test_a_packer_flushed_twice_and_used_again_goes_on_counting(method):
    packer = vl.WindowPacker(capacity=8, window=4, method=method)
    assert packs_of(packer.flush()) == []
    packer.add([3])
    assert packs_of(packer.flush()) == [[(0, 0, 3)]]
    packer.add([0, 4])
    assert packs_of(packer.flush()) == [[(2, 0, 4)]]
    assert packer.flush().num_documents == packer.num_records == 3
    assert (packer.ledger.packed, packer.ledger.empty_documents) == (7, 1)


def test_arrays_of_a_window_are_those_of_a_packing():
    packing = vl.WindowPacker(capacity=8, window=2).add([5, 3, 8])

    assert [array.dtype for array in arrays_of(packing)] == [np.int64, np.int32, np.int32, np.int64]
    assert all(not array.flags.writeable for array in arrays_of(packing))


def test_lengths_that_are_refused_leave_the_packer_as_it_was():
    packer = vl.WindowPacker(capacity=8, window=4, overlong="error")
    packer.add([5, 2])
    before = packer.state_dict()
    with pytest.raises(OverlongDocumentError, match=r"document 1 has 9 tokens .* counted from record 2"):
        packer.add([3, 9])
    with pytest.raises(LengthsError, match="length -1 of document 0 is negative"):
        packer.add([-1])

    assert packer.state_dict() == before
    assert packer.add([3, 6]).to_lists() == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"capacity": 0}, "capacity must be a whole number from 1"),
        ({"window": 0}, "window must be a whole number from 1"),
        ({"method": "fast"}, "method must be one of"),
        ({"overlong": "cut"}, "overlong must be one of"),
        ({"max_documents": 0}, "max_documents must be a whole number from 1"),
        ({"document_multiple_of": 3}, "the nearest: 6 or 9"),
        ({"min_fill": 1.5}, "min_fill must be a number from 0 to 1, got 1.5"),
        ({"min_fill": float("nan")}, "min_fill must be a number from 0 to 1, got nan"),
        ({"min_fill": "0.9"}, "min_fill must be a number from 0 to 1, got '0.9'"),
        ({"max_age": -1}, "max_age must be a whole number from 0"),
    ],
)
def test_settings_of_a_packer_out_of_range_are_refused(changed, words):
    with pytest.raises(SettingError, match=words):
        vl.WindowPacker(**{"capacity": 8, **changed})


def test_state_holds_numbers_of_waiting_pieces_and_no_more():
    packer = vl.WindowPacker(capacity=1000, window=100)
    packer.add(random_lengths(9, 20_000, 1000))
    state = packer.state_dict()

    assert len(state["waiting"]["records"]) == packer.num_waiting < 100
    assert len(json.dumps(state)) < 3000
    assert set(state["waiting"]) == {"records", "starts", "stops", "ages"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("capacity", 16),
        ("window", 5),
        ("method", "first_fit"),
        ("overlong", "drop"),
        ("max_documents", 3),
        ("document_multiple_of", 2),
        ("min_fill", 0.9),
        ("max_age", 1),
    ],
)
def test_a_state_of_other_settings_is_refused_by_their_name(name, value):
    state = vl.WindowPacker(**{"capacity": 8, "window": 4, name: value}).state_dict()
    packer = vl.WindowPacker(capacity=8, window=4)
    with pytest.raises(StateError, match=f"other settings: {name} {value!r}, here ") as caught:
        packer.load_state_dict(state)
    assert isinstance(caught.value, ValueError)


def _spoil(path: str, value: Any) -> Any:
    def spoil(state: dict[str, Any]) -> None:
        *folders, name = path.split(".")
        for folder in folders:
            state = state[folder]
        if value is KeyError:
            del state[name]
        else:
            state[name] = value(state[name]) if callable(value) else value

    return spoil


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("version", 2, "the state has version 2, this varlen reads version 1"),
        ("version", KeyError, "no state of a WindowPacker: KeyError: 'version'"),
        ("settings", [], "other settings"),
        ("settings", 5, "no state of a WindowPacker"),
        ("settings.capacity", KeyError, "other settings: capacity None, here 8"),
        ("waiting", [], "no state of a WindowPacker"),
        ("waiting", KeyError, "no state of a WindowPacker"),
        ("waiting.ages", KeyError, "no state of a WindowPacker: KeyError: 'ages'"),
        ("waiting.records", lambda records: records[:-1], "it was truncated or modified"),
        (
            "waiting.records",
            lambda records: records[::-1],
            "order of their arrival; it was truncated or modified",
        ),
        ("waiting.records", lambda records: [*records[:-1], 99], "it was truncated or modified"),
        ("waiting.records", lambda records: [[number] for number in records], "list of whole numbers"),
        ("waiting.starts", lambda starts: [start - 1 for start in starts], "it was truncated or modified"),
        ("waiting.starts", lambda starts: [start + 0.5 for start in starts], "list of whole numbers"),
        ("waiting.stops", lambda stops: [stop + 1 for stop in stops], "doesn't add up: 16 tokens of 5"),
        ("waiting.stops", lambda stops: [2**40 for _ in stops], "it was truncated or modified"),
        ("waiting.ages", lambda ages: [-1 for _ in ages], "it was truncated or modified"),
        ("fresh", 4, "it was truncated or modified"),
        ("fresh", -1, "no state of a WindowPacker"),
        ("fresh", 3, "it was truncated or modified"),
        ("num_records", 4, "it was truncated or modified"),
        ("num_records", 6, "doesn't add up"),
        ("num_records", "many", "no state of a WindowPacker"),
        ("ledger.packed", lambda packed: packed + 1, "doesn't add up: 13 tokens of 5 documents wait"),
        ("ledger.packed", "8", "no state of a WindowPacker"),
        ("ledger.unknown", 1, "no state of a WindowPacker"),
        ("ledger", KeyError, "no state of a WindowPacker"),
    ],
)
def test_a_state_that_was_cut_or_changed_is_refused(path, value, words):
    packer = vl.WindowPacker(capacity=8, window=4)
    packer.add([5, 2, 7, 3, 4])
    state = json.loads(json.dumps(packer.state_dict()))
    assert len(state["waiting"]["records"]) == 3
    assert state["waiting"]["ages"] == [1, 1, 0]
    _spoil(path, value)(state)
    other = vl.WindowPacker(capacity=8, window=4)
    before = other.state_dict()

    with pytest.raises(StateError, match=words):
        other.load_state_dict(state)
    assert other.state_dict() == before


@pytest.mark.parametrize("state", [None, 5, [], {}, "state"])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(StateError, match="no state of a WindowPacker"):
        vl.WindowPacker(capacity=8).load_state_dict(state)


def test_tokens_that_vanish_while_they_wait_raise():
    packer = vl.WindowPacker(capacity=8, window=4)
    packer.add([5, 2])
    packer._waiting = packer._waiting.take(slice(0, 1))

    with pytest.raises(LedgerError, match="6 tokens wait, but the ledger leaves 8"):
        packer.add([1])
    with pytest.raises(LedgerError):
        packer.flush()


def test_waiting_pieces_of_one_document_that_overlap_are_refused():
    packer = vl.WindowPacker(capacity=8, window=8)
    packer.add([20])
    state = packer.state_dict()
    assert (state["waiting"]["starts"], state["waiting"]["stops"]) == ([0, 8, 16], [8, 16, 20])
    state["waiting"]["starts"][1], state["waiting"]["stops"][1] = 4, 12

    with pytest.raises(StateError, match="order of their arrival; it was truncated or modified"):
        vl.WindowPacker(capacity=8, window=8).load_state_dict(state)


def test_a_stream_goes_on_after_more_tokens_and_records_than_32_bits_count():
    packer = vl.WindowPacker(capacity=2**30, window=2, method="next_fit")
    packer.add([2**30] * 5 + [7])
    state = json.loads(json.dumps(packer.state_dict()))
    assert state["ledger"]["tokens_in"] > 2**32
    later = 2**40
    state["num_records"] += later
    state["ledger"]["documents_in"] += later
    state["waiting"]["records"] = [number + later for number in state["waiting"]["records"]]

    resumed = vl.WindowPacker(capacity=2**30, window=2, method="next_fit")
    resumed.load_state_dict(state)

    assert resumed.state_dict() == state
    assert resumed.flush().document_ids.tolist() == [5 + later]


DRAWN_METHODS = [*METHODS, "best_fit"]


def made(lengths, **settings):
    lengths = np.asarray(lengths, np.int64)
    window = packed_window(
        np.zeros_like(lengths), np.arange(len(lengths)), lengths, WindowSettings(**settings)
    )
    assert window.ledger.tokens_in == lengths.sum()
    return window.packs.num_packs


@given(
    st.lists(st.integers(0, 60), max_size=60),
    st.sampled_from([1, 7, 30, 50, 64, 400]),
    st.sampled_from([None, 1, 2, 5, 30]),
    st.sampled_from(["split", "truncate", "drop"]),
    st.sampled_from(DRAWN_METHODS),
    st.sampled_from([1, 1, 4]),
)
def test_as_many_packs_are_counted_as_are_made(lengths, capacity, most, overlong, method, multiple):
    settings = {
        "capacity": capacity * multiple,
        "method": method,
        "overlong": overlong,
        "max_documents": most,
        "document_multiple_of": multiple,
    }

    assert count_packs(lengths, **settings) == made(lengths, **settings)


@given(
    st.integers(0, 2**32),
    st.integers(1, 3000),
    st.sampled_from([0.1, 0.3, 0.8, 1.2, 2.0]),
    st.sampled_from([1.2, 2, 3, 6, 13, 15, 40, 1000]),
    st.sampled_from([64, 512, 8192, 2**17]),
    st.sampled_from([None, None, 2, 9, 20]),
    st.sampled_from(["split", "truncate", "drop"]),
    st.sampled_from(DRAWN_METHODS),
    st.sampled_from([1, 1, 16]),
)
def test_windows_of_real_sizes_are_counted_exactly(
    seed, count, spread, pieces_a_pack, capacity, most, overlong, method, multiple
):
    mean = np.log(capacity / pieces_a_pack) - spread**2 / 2
    lengths = np.random.default_rng(seed).lognormal(mean, spread, count).clip(0, 3 * capacity).astype(int)
    settings = {
        "capacity": capacity,
        "method": method,
        "overlong": overlong,
        "max_documents": most,
        "document_multiple_of": multiple,
    }

    assert count_packs(lengths, **settings) == made(lengths, **settings)


def test_an_overlong_document_is_refused_as_by_the_packer():
    with pytest.raises(OverlongDocumentError, match="50"):
        count_packs([50], capacity=10, overlong="error")

"""WindowPacker: where it stands, as JSON, and what it refuses to go on from."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.packings import random_lengths

import varlen as vl
from varlen.errors import LedgerError, StateError


def test_state_holds_numbers_of_waiting_pieces_and_no_more() -> None:
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
def test_a_state_of_other_settings_is_refused_by_their_name(name: str, value: Any) -> None:
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
        ("version", KeyError, "no state of a WindowPacker: KeyError 'version'"),
        ("settings", [], "other settings"),
        ("settings", 5, "no state of a WindowPacker"),
        ("settings.capacity", KeyError, "other settings: capacity None, here 8"),
        ("waiting", [], "no state of a WindowPacker"),
        ("waiting", KeyError, "no state of a WindowPacker"),
        ("waiting.ages", KeyError, "no state of a WindowPacker: KeyError 'ages'"),
        ("waiting.records", lambda records: records[:-1], "it was cut or changed"),
        ("waiting.records", lambda records: records[::-1], "order of their arrival; it was cut or changed"),
        ("waiting.records", lambda records: [*records[:-1], 99], "it was cut or changed"),
        ("waiting.records", lambda records: [[number] for number in records], "no list of whole numbers"),
        ("waiting.starts", lambda starts: [start - 1 for start in starts], "it was cut or changed"),
        ("waiting.starts", lambda starts: [start + 0.5 for start in starts], "no list of whole numbers"),
        ("waiting.stops", lambda stops: [stop + 1 for stop in stops], "doesn't add up: 16 tokens of 5"),
        ("waiting.stops", lambda stops: [2**40 for _ in stops], "it was cut or changed"),
        ("waiting.ages", lambda ages: [-1 for _ in ages], "it was cut or changed"),
        ("fresh", 4, "it was cut or changed"),
        ("fresh", -1, "no state of a WindowPacker"),
        ("fresh", 3, "it was cut or changed"),
        ("num_records", 4, "it was cut or changed"),
        ("num_records", 6, "doesn't add up"),
        ("num_records", "many", "no state of a WindowPacker"),
        ("ledger.packed", lambda packed: packed + 1, "doesn't add up: 13 tokens of 5 documents wait"),
        ("ledger.packed", "8", "no state of a WindowPacker"),
        ("ledger.unknown", 1, "no state of a WindowPacker"),
        ("ledger", KeyError, "no state of a WindowPacker"),
    ],
)
def test_a_state_that_was_cut_or_changed_is_refused(path: str, value: Any, words: str) -> None:
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
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(StateError, match="no state of a WindowPacker"):
        vl.WindowPacker(capacity=8).load_state_dict(state)


def test_tokens_that_vanish_while_they_wait_raise() -> None:
    packer = vl.WindowPacker(capacity=8, window=4)
    packer.add([5, 2])
    packer._waiting = packer._waiting.take(slice(0, 1))

    with pytest.raises(LedgerError, match="6 tokens wait, but the ledger leaves 8"):
        packer.add([1])
    with pytest.raises(LedgerError):
        packer.flush()


def test_waiting_pieces_of_one_document_that_overlap_are_refused() -> None:
    packer = vl.WindowPacker(capacity=8, window=8)
    packer.add([20])
    state = packer.state_dict()
    assert (state["waiting"]["starts"], state["waiting"]["stops"]) == ([0, 8, 16], [8, 16, 20])
    state["waiting"]["starts"][1], state["waiting"]["stops"][1] = 4, 12

    with pytest.raises(StateError, match="order of their arrival; it was cut or changed"):
        vl.WindowPacker(capacity=8, window=8).load_state_dict(state)


def test_a_stream_goes_on_after_more_tokens_and_records_than_32_bits_count() -> None:
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

"""A state of a store or of a mixture goes on for more epochs, or is refused where its window would be another."""

import copy
import json
from itertools import product
from types import SimpleNamespace

import pytest
from tests.support.rarely import mostly
from tests.support.stores import content as all_of
from tests.support.stores import drained
from tests.support.streaming import some_texts, times, tokens, write_texts

import varlen as vl
from varlen.errors import StateError


def loader_of(data, epochs, **changes):
    return vl.PackedLoader(data, "bytes", epochs=epochs, worker="thread", mode="indexed", **changes)


def covered(batches):
    """How often each token of each document came, of batches of rows."""
    return tokens([SimpleNamespace(batch=batch) for batch in batches])


def taken(loader):
    """The batches that are left, with memory of their own, and the state before the first and after each."""
    found, states = [], [loader.state_dict()]
    for batch in loader:
        found.append(copy.deepcopy(batch))
        states.append(json.loads(json.dumps(loader.state_dict())))
    return found, states


@pytest.mark.parametrize("lengths", mostly([3], [1, 3]))
def test_a_store_goes_on_for_more_epochs_from_any_batch(tmp_path, lengths):
    """Also from within the last step, which holds fewer packs than one that more would follow."""
    data = write_texts(tmp_path / "a.jsonl", some_texts(lengths, 30))
    named = {"capacity": 64, "global_batch_size": 8, "micro_batch_size": 1, "cache": tmp_path / "c"}
    with loader_of(data, 1, **named) as loader:
        first, states = taken(loader)
    once = covered(first)
    for number, state in enumerate(states):
        with loader_of(data, 3, **named) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            rest, later = taken(loader)
            assert covered(first[:number] + rest) == times(3, once), number
            loader.load_state_dict(later[3])
            assert [all_of(one) for one in taken(loader)[0]] == [all_of(one) for one in rest[3:]]
    with loader_of(data, 2, **named) as loader:
        short = taken(loader)[1]
    within = next(
        s for s in short if s["at"]["epoch"] == 0 and s["step"] == states[-2]["step"] and s["micro_batch"]
    )
    assert states[-2]["at"]["packs"] < within["at"]["packs"] == 8
    with loader_of(data, 1, **named) as loader:
        with pytest.raises(StateError, match="holds other packs here: with other epochs"):
            loader.load_state_dict(within)
        for wrong in (0, 9, "8", None, True):
            with pytest.raises(StateError, match="no state of a loader"):
                loader.load_state_dict({**states[-2], "at": {**states[-2]["at"], "packs": wrong}})
        old = {**states[-2], "at": {n: v for n, v in states[-2]["at"].items() if n not in ("packs", "print")}}
        loader.load_state_dict(old)
        assert covered(first[: len(states) - 2] + taken(loader)[0]) == once


def can_load(loader, state):
    """Whether a state is taken; if not, for the reason that there are other epochs."""
    try:
        loader.load_state_dict(state)
    except StateError as error:
        return "other epochs" not in str(error)
    return True


@pytest.mark.parametrize(
    ("micro", "until"), mostly([(1, "first"), (4, "all")], product((1, 4), ("first", "all")))
)
def test_a_mixture_goes_on_for_more_epochs_or_is_refused(tmp_path, until, micro):
    """Its last window is shorter than it is where more follows: what was packed of it can't be gone on with."""
    named = {
        "capacity": 64,
        "global_batch_size": 4,
        "micro_batch_size": micro,
        "cache": tmp_path / "c",
        "window": 16,
    }
    sources = {
        name: write_texts(tmp_path / f"{name}.jsonl", some_texts(n, 60)) for n, name in enumerate("ab")
    }
    mixture = vl.Mixture(sources, weights={"a": 2, "b": 1}, until=until)

    def made(epochs):
        return vl.PackedLoader(mixture, "bytes", epochs=epochs, worker="thread", **named)

    with made(1) as loader:
        first, states = taken(loader)
    with made(3) as loader:
        whole = [all_of(one) for one in taken(loader)[0]]
        refused = [number for number, state in enumerate(states) if not can_load(loader, state)]
        # States beside the refused ones, and some of the others.
        tried = {*range(0, len(states), 12), refused[0] - 1, refused[-1] + 1, len(states) - 1} - {*refused}
        for number in sorted(tried & {*range(len(states))}):
            loader.load_state_dict(states[number])
            assert [all_of(one) for one in first[:number]] + drained(loader)[0] == whole
    assert 0 < len(refused) <= 7 * 4 // micro
    with made(1) as loader:
        for number in sorted({*range(0, len(states), 12), *refused}):
            loader.load_state_dict(states[number])
            assert drained(loader)[0] == [all_of(one) for one in first[number:]]

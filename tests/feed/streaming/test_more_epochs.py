"""A state of a run in streaming goes on for more epochs: every document once an epoch, whatever state it was."""

import json
from collections import Counter
from itertools import islice, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.memory_rows import Again
from tests.support.rarely import examples, mostly
from tests.support.stores import content as all_of
from tests.support.stores import drained
from tests.support.streaming import (
    content,
    documents,
    feed_of,
    new_arrays,
    pieces,
    rows,
    run,
    side_by_side,
    some_texts,
    times,
    tokens,
    tokens_of,
    write_texts,
)

import varlen as vl
from varlen.documents import blocks
from varlen.documents.source import open_source
from varlen.errors import SettingError, StateError
from varlen.feed.state import FeedState, from_json, to_json
from varlen.feed.streaming.lane import LanePacks


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "FEWEST_BLOCK_BYTES", 200)


@pytest.fixture(autouse=True)
def no_step_left_out(monkeypatch):
    """A step of one token to a document has no label, and is left out: here each counts as if it had one."""
    labels = LanePacks.targets.fget
    monkeypatch.setattr(LanePacks, "targets", property(lambda packs: labels(packs) + 1))


def taken_over(state, before, after):
    """A state of a loader of so many epochs, as one of other epochs takes it."""
    saved = json.loads(json.dumps(to_json(state, "streaming", {"epochs": before})))
    return from_json(saved, "streaming", {"epochs": after}, frozenset())


def check_goes_on(make, before, after, later, every=1):
    """Require that all states of a run go on alike, and that epochs follow whole upon whole ones.

    Args:
        make: a feed of so many epochs.
        before: epochs of the run whose states are taken.
        after: epochs of the run that goes on.
        later: epochs of a third run that goes on from states of the second.
        every: of how many states one is tried.
    """
    once, first = tokens(run(make(1))), run(make(before))
    end = first[-1].state
    more = run(make(after), taken_over(end, before, after))
    whole = first + more

    assert tokens(first) == times(before, once)
    assert tokens(whole) == times(after, once)
    assert more[0].state.step >= end.step

    expected = [content(one) for one in whole]
    for taken, state in enumerate([FeedState(), *(one.state for one in first)]):
        if taken % every in (0, 1) or taken > len(first) - every:
            rest = run(make(after), taken_over(state, before, after))
            assert [content(one) for one in rest] == expected[taken:], taken
            if taken < len(first):
                place = rest[len(first) - 1 - taken].state
                assert place == taken_over(end, before, after)
            assert rest[-1].state == whole[-1].state
    for taken, one in enumerate(more[: 2 * every], start=len(first) + 1):
        assert [content(again) for again in run(make(after), one.state)] == expected[taken:]
    third = run(make(later), taken_over(whole[-1].state, after, later))
    assert tokens(whole + third) == times(later, once)
    for one, taken in ((first[len(first) // 2], len(first) // 2 + 1), (more[len(more) // 2], -1)):
        if taken > 0:  # from the first run, by way of the second, whose end isn't reached, to the third
            state = taken_over(taken_over(one.state, before, after), after, later)
            assert tokens(first[:taken] + run(make(later), state)) == times(later, once)
        else:
            at = len(first) + len(more) // 2 + 1
            rest = run(make(later), taken_over(one.state, after, later))
            assert [content(again) for again in rest] == [*expected[at:], *map(content, third)]


SHAPES = {
    "one window": {"texts": ["short"] * 60, "lanes": 1, "size": 2},
    "many rounds": {"texts": some_texts(1, 70), "lanes": 2, "size": 4, "micro": 2, "window_packs": 4},
    "lanes": {"texts": some_texts(3, 60), "lanes": 4, "size": 4, "micro": 2},
    "few": {"texts": ["one", "", "three"], "lanes": 4, "size": 4},
    "long": {"texts": ["x" * 700, "y" * 300], "lanes": 2, "size": 2, "method": "wrapped"},
    "in order": {"texts": some_texts(4, 40), "lanes": 2, "size": 2, "seed": None, "method": "next_fit"},
}


@pytest.mark.parametrize(
    ("shape", "before", "after", "later"),
    [
        *[("one window", *epochs) for epochs in ((1, 2, 4), (2, 3, 4), (1, 4, 5))],
        *[("few", *epochs) for epochs in ((1, 2, 4), (2, 3, 4))],
        *[(shape, 1, 2, 3) for shape in ("many rounds", "lanes", "long", "in order")],
        pytest.param("lanes", 2, 4, 5, marks=pytest.mark.soak),
    ],
)
def test_every_state_goes_on_for_more_epochs_and_all_alike(tmp_path, shape, before, after, later):
    named = dict(SHAPES[shape])
    texts = named.pop("texts")
    source = open_source(write_texts(tmp_path / "a.jsonl", texts))

    assert documents(run(feed_of(source, **named))) == tokens_of(texts)
    every = 1 if shape == "one window" else 9
    check_goes_on(lambda epochs: feed_of(source, epochs=epochs, **named), before, after, later, every)


@pytest.mark.soak
@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=50),
    st.sampled_from(["best_fit", "next_fit", "wrapped", "best_fit_decreasing", "balanced"]),
    st.sampled_from(["split", "truncate", "drop"]),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([(1, 1, 1), (1, 2, 1), (2, 4, 2), (4, 4, 1)]),
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2)),
    st.integers(1, 9),
)
@examples(8, 20)
def test_any_documents_and_settings_go_on_for_more_epochs(
    tmp_path_factory, lengths, method, overlong, most, sizes, epochs, window
):
    texts = [f"{n}".zfill(length) for n, length in enumerate(lengths)]
    kept = [t for t in texts if t and (overlong != "drop" or len(t) < 64)]
    if not kept:
        return
    lanes, size, micro = sizes
    source = open_source(write_texts(tmp_path_factory.mktemp("any") / "a.jsonl", texts))

    def make(count):
        named = {"method": method, "overlong": overlong, "max_documents": most, "window_packs": window}
        return feed_of(source, epochs=count, lanes=lanes, size=size, micro=micro, **named)

    first, more, last = epochs
    check_goes_on(make, first, first + more, first + more + last, every=7)


def test_an_end_that_moves_loses_documents(tmp_path):
    """What is guarded against: states within the last packs of an epoch, whose window would hold more."""
    source = open_source(write_texts(tmp_path / "a.jsonl", [f"{n}" for n in range(60)]))
    first = run(feed_of(source, lanes=1, size=1, epochs=1))
    rest = run(feed_of(source, lanes=1, size=1, epochs=3), first[1].state)  # and its end isn't told

    assert set(Counter(d for d, _, _ in pieces(first[:2] + rest)).values()) != {3}


@pytest.mark.parametrize("meets", mostly([True], [True, False]))
def test_other_world_sizes_go_on_for_more_epochs(tmp_path, meets):
    texts = some_texts(6, 70)
    source = open_source(write_texts(tmp_path / "a.jsonl", texts))
    named = {"lanes": 6, "size": 6}
    first = run(feed_of(source, epochs=1, **named))
    end = first[-1].state
    more = run(feed_of(source, epochs=3, **named), taken_over(end, 1, 3))

    def packs(made):
        return sorted(row for one in made for row in rows(one))

    begun = [one.state for one in first if one.state.micro_batch == 0]
    for state in (begun[0], begun[len(begun) // 2], begun[-3], begun[-2], end, more[5].state):
        state = taken_over(state, 1, 3) if "ends" not in state.at else state
        assert state.micro_batch == 0
        expected = [row for row in packs(first + more) if row[0] // 6 >= state.step]
        for ranks in (2, 3):
            made = side_by_side(source, ranks, state, meets, epochs=3, **named)
            assert len({len(of_rank) for of_rank in made}) == 1
            assert packs(one for of_rank in made for one in of_rank) == expected
            assert {json.dumps(of_rank[-1].state.at) for of_rank in made} == {json.dumps(more[-1].state.at)}


def test_a_run_goes_on_without_end(tmp_path):
    texts = some_texts(2, 30)
    source = open_source(write_texts(tmp_path / "a.jsonl", texts))
    once = tokens(run(feed_of(source, lanes=2, size=2)))
    first = run(feed_of(source, lanes=2, size=2, epochs=2))
    for taken in (1, len(first) // 2, len(first) - 1, len(first)):
        endless = feed_of(source, lanes=2, size=2, epochs=None)
        batches = endless.batches(taken_over(first[taken - 1].state, 2, None), new_arrays)
        rest = list(islice(batches, 6 * len(first)))
        batches.close()
        upto = next(n for n, one in enumerate(rest) if one.state.step > first[-1].state.step)
        assert tokens(first[:taken] + rest[: len(first) - taken]) == times(2, once)
        assert upto >= len(first) - taken
        assert min((tokens(first[:taken] + rest) & times(99, once)).values()) > 5


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(1)
    return write_texts(
        tmp_path_factory.mktemp("texts") / "a.jsonl", ["word " * n for n in rng.integers(0, 60, 120)]
    )


def loader_of(data, epochs, **changes):
    usual = {"capacity": 256, "global_batch_size": 8, "micro_batch_size": 2, "window": 4, "worker": "thread"}
    return vl.PackedLoader(data, "bytes", epochs=epochs, **{**usual, **changes})


OFTEN = [("file", "process"), ("rows", "thread"), ("iterable", "process")]


@pytest.mark.parametrize(
    ("form", "worker"), mostly(OFTEN, product(("file", "rows", "iterable"), ("thread", "process")))
)
def test_loaders_go_on_in_every_worker_and_of_every_source(data, form, worker):
    given_rows = [json.loads(line) for line in data.read_text().splitlines()]
    given = {"file": data, "rows": given_rows, "iterable": Again(given_rows)}[form]
    with loader_of(given, 1, worker=worker) as loader:
        found, states = drained(loader)
        tokens_once = loader.stats().ledger.packed
    with loader_of(given, 3, worker=worker) as loader:
        loader.load_state_dict(states[-1])
        more, later = drained(loader)
        assert loader.stats().ledger.check().packed == 2 * tokens_once
        for taken in (0, 1, len(found) // 2, len(found) - 2, len(found) - 1):
            loader.load_state_dict(json.loads(json.dumps(states[taken])))
            assert drained(loader)[0] == found[taken:] + more
        for taken in (1, len(more) // 2, len(more)):
            loader.load_state_dict(json.loads(json.dumps(later[taken])))
            assert drained(loader)[0] == more[taken:]
        assert loader.state_dict() == later[-1]


def test_steps_are_found_where_the_run_had_them(data):
    """Also those before the state, and where the loader had begun another run before."""
    with loader_of(data, 1) as loader:
        found, states = drained(loader)
    held = {}
    with loader_of(data, 3) as loader:
        for _ in range(8):
            next(loader)
        loader.load_state_dict(states[-3])
        more = drained(loader)[0][2:]
        whole = [found[n : n + 4] for n in range(0, len(found), 4)] + [
            more[n : n + 4] for n in range(0, len(more), 4)
        ]
        assert len(found) % 4 == len(more) % 4 == 0
        last = len(whole) - 1
        for step in (last, last - 1, len(found) // 4 - 1, 3, 0, len(found) // 4):
            loader.seek(step)
            taken = [next(loader) for _ in range(4)]
            assert [all_of(batch) for batch in taken] == whole[step]
            held[step] = sorted(n for batch in taken for n in batch.document_ids.tolist())
            assert sorted(loader.documents(step).document_ids.tolist()) == held[step]
        loader.seek(2)
        state = loader.state_dict()
    with loader_of(data, 3) as loader:
        loader.load_state_dict(state)
        assert [all_of(next(loader)) for _ in range(4)] == whole[2]


def test_fewer_epochs_are_refused_and_the_way_out_is_named(data):
    with loader_of(data, 3) as loader:
        next(loader)
        state = loader.state_dict()
    with loader_of(data, 2) as loader:
        with pytest.raises(
            StateError, match=r"epochs=3, and this loader has fewer, epochs=2; pass epochs=3 or more"
        ):
            loader.load_state_dict(state)
        assert loader.step == 0
    with loader_of(data, 5) as loader:
        loader.load_state_dict(state)
        longer = loader.state_dict()
    with loader_of(data, 3) as loader, pytest.raises(StateError, match="epochs=5, and this loader has fewer"):
        loader.load_state_dict(longer)
    with loader_of(data, None) as loader:
        next(loader)
        endless = loader.state_dict()
    with (
        loader_of(data, 9) as loader,
        pytest.raises(StateError, match=r"epochs=None, without an end.*run.steps without"),
    ):
        loader.load_state_dict(endless)
    with (
        loader_of(data, 4, capacity=512) as loader,
        pytest.raises(StateError, match=r"capacity was 256 and is 512\."),
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    "ends", [[0], [2, 1], [1, 1], [3], [True], ["1"], 1, "1", {"a": 1}, [None], [2**70], [1.5]]
)
def test_ends_that_can_not_be_are_refused(data, ends):
    with loader_of(data, 3) as loader:
        next(loader)
        state = loader.state_dict()
        for at in ({**state["at"], "ends": ends}, {"ends": ends}):
            with pytest.raises(StateError, match=r"no state of a loader|it was changed"):
                loader.load_state_dict({**state, "at": at})
    with (
        loader_of(data, 4) as loader,
        pytest.raises(StateError, match=r"no state of a loader|it was changed"),
    ):
        loader.load_state_dict({**state, "at": {**state["at"], "ends": ends}})


def test_a_state_of_the_first_version_goes_on_for_more_epochs(data):
    with loader_of(data, 1) as loader:
        found, states = drained(loader)
    with loader_of(data, 2) as loader:
        loader.load_state_dict(states[-1])
        more = drained(loader)[0]
        for taken in (1, len(found) - 3, len(found)):
            old = json.loads(json.dumps(states[taken]))
            del old["belongs_to"]["tokenizer"]
            for lane in old["at"]["lanes"]:
                lane["counts"]["skipped"] = lane["counts"].pop("losses")["records"]
            loader.load_state_dict(old)
            assert drained(loader)[0] == found[taken:] + more


@pytest.mark.parametrize("epochs", [0, -1, True, "2", 1.5, [1]])
def test_epochs_of_a_state_that_can_not_be_are_refused(data, epochs):
    with loader_of(data, 3) as loader:
        next(loader)
        state = loader.state_dict()
        with pytest.raises(StateError):
            loader.load_state_dict({**state, "belongs_to": {**state["belongs_to"], "epochs": epochs}})


def test_what_is_read_once_has_one_epoch_whatever_the_state(data):
    given = [json.loads(line) for line in data.read_text().splitlines()]
    with loader_of(iter(given), 1) as loader:
        next(loader)
    with pytest.raises(SettingError, match="can be iterated over once, and epochs is 2"):
        loader_of(iter(given), 2)

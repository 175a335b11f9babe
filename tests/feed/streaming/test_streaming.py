"""Straight from documents to batches: each document once, the same at any world size, and from any state on."""

import gzip
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.rarely import mostly
from tests.support.streaming import (
    Meeting,
    content,
    documents,
    feed_of,
    new_arrays,
    pieces,
    rows,
    run,
    side_by_side,
    some_texts,
    tokens_of,
    write_texts,
)

from varlen.documents import blocks
from varlen.documents.source import open_source
from varlen.errors import OverlongDocumentError, SettingError, SourceError, StateError
from varlen.feed.state import FeedState, from_json, to_json
from varlen.feed.streaming.intake import PostponedReads
from varlen.feed.streaming.lane import document_ids


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "FEWEST_BLOCK_BYTES", 200)


@pytest.fixture(scope="module")
def texts():
    return some_texts(1, 300)


@pytest.fixture(scope="module")
def source(texts, tmp_path_factory):
    return open_source(write_texts(tmp_path_factory.mktemp("streaming") / "a.jsonl", texts))


def saved(state):
    return from_json(json.loads(json.dumps(to_json(state, "streaming", {}))), "streaming", {}, frozenset())


def test_every_state_gives_the_rest_twice_after_json(tmp_path):
    source = open_source(write_texts(tmp_path / "a.jsonl", some_texts(5, 30)))
    feed = feed_of(source, lanes=2, size=4, micro=2, epochs=2)
    whole = run(feed)
    states = [FeedState(), *(one.state for one in whole)]
    expected = [content(one) for one in whole]

    assert len({json.dumps(state.at) for state in states}) > 4
    for taken, state in enumerate(states):
        assert saved(state) == state
        for again in range(2):
            count = 5 if again or taken % 9 else None
            batches = feed.batches(saved(state), new_arrays)
            assert [content(one) for one in islice(batches, count)] == expected[taken:][:count]
            batches.close()


def test_a_state_where_training_has_ended_gives_nothing(source):
    last = run(feed_of(source, lanes=2, size=4, micro=2))[-1].state
    assert run(feed_of(source, lanes=2, size=4, micro=2), saved(last)) == []


@pytest.mark.parametrize(
    ("ranks", "meets"), mostly([(2, True), (3, False), (6, True)], product((2, 3, 6), (True, False)))
)
def test_every_world_size_takes_the_same_set_of_packs_at_each_step(source, ranks, meets):
    def steps(made):
        found = {}
        for one in made:
            for number, *row in rows(one):
                found.setdefault(number // 12, []).append((number, *row))
        return {step: sorted(packs) for step, packs in found.items()}

    alone = run(feed_of(source, lanes=6, size=12))
    middle = [one.state for one in alone if one.state.micro_batch == 0][len(alone) // 30]
    for state in (FeedState(), middle):
        made = side_by_side(source, ranks, state, meets, lanes=6, size=12, micro=2)
        assert len({len(of_rank) for of_rank in made}) == 1
        assert steps([one for of_rank in made for one in of_rank]) == {
            step: packs for step, packs in steps(alone).items() if step >= state.step
        }
        for at_once in zip(*made):
            assert len({json.dumps(to_json(one.state, "streaming", {})) for one in at_once}) == 1
            assert len({one.batch.step_num_targets for one in at_once}) == 1
        assert made[0][-1].state == alone[-1].state


@pytest.mark.parametrize("meets", [True, False])
def test_a_run_whose_world_changes_again_and_again_takes_every_pack_once(source, texts, meets):
    """Two ranks of six lanes, then six, three and one, each from a state of any rank after JSON."""
    changed, state, steps = [], FeedState(), {}
    alone = run(feed_of(source, lanes=6, size=6))
    last = len(alone) // 6
    for ranks, until in ((2, last // 5), (6, last // 2), (3, last // 2 + 1), (1, None)):
        made = side_by_side(source, ranks, state, meets, lanes=6, size=6)
        taken = [[one for one in of_rank if until is None or step_of(one) < until] for of_rank in made]
        changed += [one for of_rank in taken for one in of_rank]
        state = saved(taken[ranks // 2][-1].state)

    for one in changed:
        steps.setdefault(step_of(one), []).extend(rows(one))
    expected: dict[int, list] = {}
    for one in alone:
        expected.setdefault(step_of(one), []).extend(rows(one))
    assert {step: sorted(packs) for step, packs in steps.items()} == {
        step: sorted(packs) for step, packs in expected.items()
    }
    assert documents(changed) == tokens_of(texts)
    assert state == alone[-1].state


def step_of(one):
    return int(one.batch.pack_ids[0]) // 6


def test_the_first_batch_of_a_state_reads_no_more_of_what_waited_than_its_step_holds(tmp_path, monkeypatch):
    read, reads = [], []

    def encode(some):
        read.extend(some)
        return [list(text.encode()) for text in some]

    path = write_texts(tmp_path / "a.jsonl", [f"{n:04}" + "x" * 40 for n in range(400)])
    feed = feed_of(open_source(path, encode, eos=0), lanes=2, size=2, micro=2, window_packs=4)
    whole = run(feed)
    taken = 3 + next(n for n, one in enumerate(whole) if one.state.at.get("round") == 4)
    state, bring = whole[taken - 1].state, PostponedReads.bring

    def noted(self, packs, left):
        read.clear()
        bring(self, packs, left)
        reads.append(len(set(read)))

    monkeypatch.setattr(PostponedReads, "bring", noted)
    again = run(feed, state)

    assert [content(one) for one in again] == [content(one) for one in whole[taken:]]
    waiting = sum(lane["documents"] for lane in state.at["lanes"])
    assert reads[0] <= len(again[0].batch.document_ids) < waiting
    assert len(reads) == 2
    assert 0 < sum(reads) <= waiting


def test_the_targets_of_a_step_are_those_of_all_its_batches(source):
    made = [one for of_rank in side_by_side(source, 2, FeedState(), True, micro=1) for one in of_rank]

    found, said = Counter(), {}
    for one in made:
        step = int(one.batch.pack_ids[0]) // 4
        found[step] += int((one.batch.labels != -100).sum())
        said[step] = one.batch.step_num_targets
    assert dict(found) == said


def test_each_document_comes_once_in_an_epoch_and_its_number_is_its_own(source, texts):
    made = run(feed_of(source, epochs=1))

    assert documents(made) == tokens_of(texts)
    twice = Counter(pieces(run(feed_of(source, epochs=2, lanes=2))))
    once = Counter(pieces(run(feed_of(source, epochs=1, lanes=2))))
    assert twice == {piece: 2 * count for piece, count in once.items()}


def test_an_endless_run_goes_through_epoch_after_epoch(tmp_path):
    few = some_texts(2, 30)
    source = open_source(write_texts(tmp_path / "a.jsonl", few))
    feed, seen = feed_of(source, epochs=None, max_age=2, window_packs=32, lanes=2), Counter()

    batches = feed.batches(FeedState(), new_arrays)
    for one in (next(batches) for _ in range(400)):
        seen.update(document for document, start, _ in pieces([one]) if start == 0)
    batches.close()

    assert len(seen) == len(few)
    assert min(seen.values()) > 5


@pytest.mark.parametrize("meets", [True, False])
@pytest.mark.parametrize("content_", [["one"], ["a", "b", ""], ["x" * 700], ["short"] * 40])
def test_ranks_take_as_many_batches_however_few_documents_there_are(tmp_path, content_, meets):
    source = open_source(write_texts(tmp_path / "a.jsonl", content_))

    made = side_by_side(source, 4, FeedState(), meets, epochs=2)

    assert len({len(of_rank) for of_rank in made}) == 1
    found = sum(len(tokens) // 4 for of_rank in made for _, _, tokens in pieces(of_rank))
    assert found == 2 * sum(len(text) + 1 for text in content_ if text)


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("epochs", [8, pytest.param(50, marks=pytest.mark.soak)])
def test_a_file_that_can_not_be_cut_gives_each_document_once_in_each_of_many_epochs(tmp_path, epochs, lanes):
    texts = some_texts(8, 1500, longest=1500)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    source = open_source(tmp_path / "a.jsonl.gz")
    made = run(feed_of(source, lanes=lanes, size=lanes, capacity=4096, epochs=epochs, window_packs=32))
    assert Counter(piece for _, _, piece in pieces(made)) == Counter(epochs * tokens_of(texts))


def test_data_that_trains_nothing_is_refused_and_not_read_for_ever(tmp_path):
    source = open_source(write_texts(tmp_path / "a.jsonl", ["x"] * 300), append_eos=False)
    with pytest.raises(SourceError, match="holds nothing to train on"):
        run(feed_of(source, epochs=None))
    with pytest.raises(SourceError, match="300 tokens packed, none of which has a label"):
        run(feed_of(source, epochs=1))


def test_without_a_shuffle_documents_of_a_lane_stay_in_the_order_of_the_files(source, texts):
    made = run(feed_of(source, lanes=1, size=2, seed=None, method="next_fit"))

    ids = [document for document, start, _ in sorted_packs(made) if start == 0]
    assert ids == sorted(ids)
    assert len(ids) == len(texts)
    shuffled = [d for d, start, _ in sorted_packs(run(feed_of(source, lanes=1, size=2))) if start == 0]
    assert sorted(shuffled) == ids
    assert np.corrcoef(np.argsort(np.argsort(shuffled)), np.arange(len(ids)))[0, 1] < 0.3


def sorted_packs(made):
    """Pieces in the order of the packs' numbers; batches of a step come with most work first."""
    one_by_one = {}
    for one in made:
        found, at = pieces([one]), 0
        for row, number in enumerate(one.batch.pack_ids.tolist()):
            count = int(one.batch.segment_ids[row].max()) + 1
            one_by_one[number] = found[at : at + count]
            at += count
    return [piece for number in sorted(one_by_one) for piece in one_by_one[number]]


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=60),
    st.sampled_from(["best_fit", "next_fit", "wrapped", "best_fit_decreasing", "balanced"]),
    st.sampled_from(["split", "truncate", "drop"]),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([1, 4]),
    st.integers(0, 9),
)
@settings(max_examples=25)
def test_any_documents_and_settings_come_out_whole_and_resume_anywhere(
    tmp_path_factory, lengths, method, overlong, most, multiple, seed
):
    folder = tmp_path_factory.mktemp("any")
    texts = [f"{n:04}" + "x" * length for n, length in enumerate(lengths)]
    source = open_source(write_texts(folder / "a.jsonl", texts))
    feed = feed_of(
        source,
        lanes=2,
        size=2,
        seed=seed,
        method=method,
        overlong=overlong,
        max_documents=most,
        document_multiple_of=multiple,
    )

    expected = tokens_of(texts)
    if overlong == "drop":
        expected = [one for one in expected if len(one) // 4 <= 64]
    elif overlong == "truncate":
        expected = sorted(one[: 4 * 64] for one in expected)
    if not expected:
        with pytest.raises(ValueError, match="nothing to train on"):
            run(feed)
        return
    made = run(feed)
    found, wanted = Counter(documents(made)), Counter(expected)
    cut, whole = (sorted(map(len, each.elements())) for each in (found - wanted, wanted - found))
    # A step of two packs with a piece of one token each has no target, and is left out.
    assert len(whole) <= (2 if method == "wrapped" else 0)
    assert whole == [length + 4 for length in cut]
    taken = seed * len(made) // 10
    state = FeedState() if taken == 0 else saved(made[taken - 1].state)
    assert [content(one) for one in run(feed, state)] == [content(one) for one in made[taken:]]
    assert made[-1].state.at["lanes"][0]["documents"] == 0


def test_a_document_longer_than_a_pack_is_refused_and_its_file_named(source):
    with pytest.raises(OverlongDocumentError, match=r"a document of .*a\.jsonl has \d+ tokens"):
        run(feed_of(source, overlong="error"))


def test_sizes_that_do_not_divide_each_other_are_refused(source):
    for wrong in ({"size": 6}, {"ranks": 3}, {"size": 8, "micro": 3}):
        with pytest.raises(SettingError):
            feed_of(source, **wrong)


def test_a_state_of_other_lanes_or_data_is_refused(source, tmp_path):
    state = next(one.state for one in run(feed_of(source)) if one.state.at["step"])
    other = open_source(write_texts(tmp_path / "a.jsonl", some_texts(9, 20, longest=9)))

    for changed, given_ in (
        (source, FeedState(step=state.step, at={**state.at, "lanes": state.at["lanes"][:2]})),
        (source, FeedState(step=0, at=state.at)),
        (source, FeedState(step=state.step, at={"round": 1})),
        (other, state),
    ):
        with pytest.raises(StateError):
            run(feed_of(changed), given_)


@pytest.mark.parametrize("meets", [True, False])
def test_a_bad_record_is_raised_by_every_rank_at_the_batch_that_needs_it(tmp_path, meets):
    good = [json.dumps({"text": text}) for text in some_texts(3, 400)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*good[:390], '{"text": 5}', *good[390:]]))
    source = open_source(path)
    meeting = Meeting(4) if meets else None
    feeds = [feed_of(source, 2, rank, exchange=meeting, seed=None) for rank in range(2)]
    said: list[tuple[int, str]] = []

    def take(feed):
        count = 0
        try:
            for _ in feed.batches(FeedState(), new_arrays):
                count += 1
        except SourceError as error:
            said.append((count, str(error)))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(take, feeds))

    assert len(said) == 2
    assert said[0] == said[1]
    assert said[0][0] > 20
    assert "a.jsonl line 391 holds number in `text`" in said[0][1]


@pytest.mark.parametrize("meets", [True, False])
def test_a_skipped_record_is_counted_the_same_on_every_rank(tmp_path, meets):
    texts = some_texts(4, 200)
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:50], "{", *lines[50:], '{"text": null}']))
    source = open_source(tmp_path / "a.jsonl", on_error="skip")

    made = side_by_side(source, 2, FeedState(), meets)

    assert documents([one for of_rank in made for one in of_rank]) == tokens_of(texts)
    for of_rank in made:
        counts = [lane["counts"] for lane in of_rank[-1].state.at["lanes"]]
        assert sum(one["losses"]["records"] for one in counts) == 2
        assert sum(one["documents"] for one in counts) == len(texts)
    middle = made[0][len(made[0]) // 2].state
    assert [content(one) for one in side_by_side(source, 2, middle, meets)[0]] == [
        content(one) for one in made[0][len(made[0]) // 2 + 1 :]
    ]


def test_closing_early_leaves_no_thread_also_where_another_rank_never_comes(source):
    before = set(threading.enumerate())
    batches = feed_of(source, epochs=None).batches(FeedState(), new_arrays)
    next(batches)
    batches.close()
    assert set(threading.enumerate()) <= before
    meeting = Meeting(4)
    feeds = [feed_of(source, 2, rank, exchange=meeting, epochs=None) for rank in range(2)]
    both = [feed.batches(FeedState(), new_arrays) for feed in feeds]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(next, both))
    for one in both:
        one.close()
    assert set(threading.enumerate()) <= before


def test_documents_beyond_what_a_number_can_tell_are_refused():
    last = document_ids((1 << 25) - 1, (1 << 18) - 1, np.array([(1 << 20) - 1]))
    assert last.tolist() == [2**63 - 1]
    for block, chunk, record in ((1 << 25, 0, 0), (0, 1 << 18, 0), (0, 0, 1 << 20)):
        with pytest.raises(SourceError, match="index the data instead"):
            document_ids(block, chunk, np.array([record]))

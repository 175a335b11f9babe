"""Padded batches: every document once, no batch over its bound, and as much work on every rank."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles.pack_padded import padded_batches, work_of

from varlen.errors import OverlongDocumentError, SettingError
from varlen.pack.padded import PaddedSteps, padded_steps

WORK = (100.0, 1.0)
USUAL = {
    "max_rows": 2**31 - 1, "multiple": 1, "ranks": 1, "micro_batches": 1, "window": None, "work": WORK, "seed": None,
}  # fmt: skip


def steps_of(lengths: object, max_tokens: int, **changes: object) -> PaddedSteps:
    return padded_steps(np.array(lengths, np.int32), max_tokens, **{**USUAL, **changes})  # type: ignore[arg-type]


def batches_of(steps: PaddedSteps) -> list[list[int]]:
    return [part.tolist() for part in np.split(steps.documents, steps.offsets[1:-1])]


calls = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(0, 30), min_size=1, max_size=60),
        "max_tokens": st.integers(32, 200),
        "max_rows": st.sampled_from([1, 3, 2**31 - 1]),
        "multiple": st.sampled_from([1, 8]),
        "ranks": st.integers(1, 4),
        "micro_batches": st.integers(1, 3),
        "window": st.sampled_from([None, 1, 7, 1000]),
        "seed": st.sampled_from([None, 0, 5]),
    }
).filter(lambda call: np.count_nonzero(call["lengths"]) >= call["ranks"] * call["micro_batches"])


@settings(max_examples=200)
@given(calls)
def test_every_document_comes_once_within_the_bounds_and_all_ranks_have_as_many(call):
    lengths, max_tokens = call["lengths"], call["max_tokens"]
    steps = steps_of(**call)
    batches = batches_of(steps)
    widths = [-(-length // call["multiple"]) * call["multiple"] for length in lengths]

    counts = Counter(one for batch in batches for one in batch)
    assert set(counts) == {one for one, length in enumerate(lengths) if length}
    assert (
        sum(counts.values()) - len(counts) == steps.repeated_documents < call["ranks"] * call["micro_batches"]
    )
    assert steps.repeated_documents == 0 or max(map(len, batches)) == 1
    assert steps.empty_documents == lengths.count(0)
    for number, batch in enumerate(batches):
        assert len(batch) * max(widths[one] for one in batch) <= max_tokens
        assert len(batch) <= call["max_rows"]
        assert steps.work[number] == work_of(batch, widths, WORK)
    assert steps.batches.shape[1:] == (call["micro_batches"], call["ranks"])
    assert sorted(steps.batches.flatten().tolist()) == list(range(len(batches)))
    real = sum(lengths[one] for batch in batches for one in batch)
    slots = sum(len(batch) * max(widths[one] for one in batch) for batch in batches)
    assert steps.padding == pytest.approx(1 - real / slots)


@settings(max_examples=200)
@given(calls)
def test_batches_are_those_of_the_oracle(call):
    widths = [-(-length // call["multiple"]) * call["multiple"] for length in call["lengths"]]
    real = [one for one, length in enumerate(call["lengths"]) if length]
    call = {**call, "seed": None, "window": call["window"] or 9}
    at_once = call["ranks"] * call["micro_batches"]
    theirs = padded_batches(widths, real, call["window"], call["max_tokens"], call["max_rows"], at_once)

    ours = batches_of(steps_of(**call))
    shortest = sorted((one for batch in theirs for one in batch), key=lambda one: widths[one])
    assert ours[: len(theirs)] == theirs
    assert [widths[one] for (one,) in ours[len(theirs) :]] == [
        widths[one] for one in shortest[: len(ours) - len(theirs)]
    ]


@given(calls)
def test_what_ranks_compute_at_once_are_neighbours_by_work(call):
    steps = steps_of(**call)
    spans = sorted((work.min(), work.max()) for work in steps.work[steps.batches].reshape(-1, call["ranks"]))

    assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:]))


def test_real_lengths_make_little_padding_and_even_work():
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 20_000), 1, 2048).astype(np.int32)
    steps = steps_of(lengths, 8192, ranks=8, micro_batches=4, seed=0)
    totals = steps.work[steps.batches].sum(1)  # a step's, on each rank

    assert steps.padding < 0.02
    assert steps.imbalance < 1.02
    assert totals.max() / totals.mean() < 1.6
    assert steps.work[steps.batches[0]].max() == steps.work.max()  # too little memory shows at the first step
    half = np.sort(steps.documents[: steps.offsets[len(steps.offsets) // 2]])
    assert not np.array_equal(half, np.arange(half.size))


def test_an_order_is_another_for_another_seed_and_the_same_for_the_same():
    lengths = np.arange(1, 200)
    first, again, other = (steps_of(lengths, 1000, seed=seed) for seed in (1, 1, 2))

    assert np.array_equal(first.documents, again.documents)
    assert np.array_equal(first.batches, again.batches)
    assert not np.array_equal(first.documents, other.documents)


def test_documents_that_fit_no_batch_are_refused_in_a_sentence():
    with pytest.raises(
        OverlongDocumentError,
        match=r"document 1 has 9 tokens.*max_tokens=8 \(2 of 3 documents.*max_tokens=10",
    ):
        steps_of([3, 9, 10], 8)
    with pytest.raises(OverlongDocumentError, match="max_tokens=16"):
        steps_of([3, 9], 12, multiple=8)
    with pytest.raises(SettingError, match=r"2 documents with tokens can't give 4 batches.*fewer ranks"):
        steps_of([1, 0, 2], 8, ranks=4)

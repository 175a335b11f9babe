"""Packs of an epoch as steps: every document once, as many batches on every rank, their work side by side."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.errors import OverlongDocumentError, SettingError
from varlen.pack.steps import Steps, steps_of

CAPACITY = 20
LENGTHS = st.lists(st.integers(0, CAPACITY), max_size=60)
SETTINGS = st.fixed_dictionaries(
    {"ranks": st.integers(1, 5), "packs_per_batch": st.integers(1, 3)},
    optional={
        "max_documents": st.integers(1, 4),
        "fill": st.sampled_from(["repeat", "empty"]),
        "balance_over": st.integers(1, 3),
        "in_order": st.booleans(),
        "seed": st.integers(0, 3),
    },
)


def documents_of(steps: Steps) -> list[list[int]]:
    """The documents of every pack that a batch holds, in the order of the batches."""
    packs = steps.packs.reshape(-1)
    return [
        steps.documents[steps.offsets[pack] : steps.offsets[pack + 1]].tolist() for pack in packs if pack >= 0
    ]


@given(LENGTHS, SETTINGS)
def test_every_document_stands_in_one_pack_and_every_pack_in_one_batch(lengths, settings):
    steps = steps_of(lengths, CAPACITY, **settings)

    packs = documents_of(steps)
    taken = sorted(number for pack in packs for number in pack)
    filled = [number for number, length in enumerate(lengths) if length]
    again = list(taken)
    for number in filled:
        again.remove(number)
    assert len(again) == steps.repeated_documents
    assert all(pack and sum(lengths[number] for number in pack) <= CAPACITY for pack in packs)
    assert all(len(pack) <= settings.get("max_documents", 60) for pack in packs)
    assert len(packs) == steps.num_packs
    assert steps.packed_tokens == sum(lengths[number] for number in taken)
    assert steps.empty_documents == len(lengths) - len(filled)
    assert steps.dropped_documents == steps.dropped_tokens == 0


@given(LENGTHS, SETTINGS)
def test_a_batch_is_empty_or_repeats_only_where_documents_are_fewer_than_batches(lengths, settings):
    steps = steps_of(lengths, CAPACITY, **settings)

    num_steps, ranks, each = steps.packs.shape
    filled = sum(length > 0 for length in lengths)
    empty = int((steps.packs < 0).all(axis=2).sum())
    assert empty == steps.empty_batches
    assert (steps.packs[:-1] >= 0).all()
    if steps.repeated_documents or empty:
        assert filled < num_steps * ranks * each
        assert filled % (ranks * each) < ranks
        assert (steps.repeated_documents > 0) != (empty > 0)
        assert (settings.get("fill", "repeat") == "repeat") == (empty == 0)
        assert steps.repeated_documents + empty < ranks
    if filled >= num_steps * ranks * each:
        assert (steps.packs >= 0).all()


@given(LENGTHS, SETTINGS)
def test_a_last_step_is_dropped_only_where_documents_are_too_few_for_it_and_is_counted(lengths, settings):
    steps = steps_of(lengths, CAPACITY, **settings, drop_last=True)

    taken = [number for pack in documents_of(steps) for number in pack]
    assert len(taken) == len(set(taken))
    assert (steps.packs >= 0).all()
    assert steps.dropped_tokens == sum(lengths) - sum(lengths[number] for number in taken)
    assert steps.dropped_documents == sum(length > 0 for length in lengths) - len(taken)
    assert steps.repeated_documents == steps.empty_batches == 0
    whole = steps_of(lengths, CAPACITY, **settings)
    if not whole.repeated_documents and (whole.packs >= 0).all():
        assert documents_of(steps) == documents_of(whole)
    else:
        assert len(steps.packs) == len(whole.packs) - 1


@given(LENGTHS, st.integers(1, 4), st.integers(1, 3))
def test_in_order_documents_come_step_after_step_and_rank_after_rank(lengths, ranks, each):
    steps = steps_of(
        lengths, CAPACITY, method="next_fit", in_order=True, ranks=ranks, packs_per_batch=each, fill="empty"
    )

    taken = [number for pack in documents_of(steps) for number in pack]
    assert taken == [number for number, length in enumerate(lengths) if length]


@given(LENGTHS, SETTINGS)
def test_the_same_lengths_and_settings_give_the_same_steps(lengths, settings):
    first, second = (steps_of(np.array(lengths, np.int64), CAPACITY, **settings) for _ in range(2))

    assert documents_of(first) == documents_of(second)
    assert first.packs.tolist() == second.packs.tolist()


def test_packs_of_a_step_are_about_equal_work_where_several_steps_are_balanced_together():
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1.2, 20_000), 1, 32_768).astype(int)

    def imbalance(balance_over: int, packs_per_batch: int = 1) -> float:
        steps = steps_of(
            lengths,
            32_768,
            ranks=8,
            packs_per_batch=packs_per_batch,
            balance_over=balance_over,
            work=(0.0, 1.0),
        )
        work = np.add.reduceat(lengths[steps.documents].astype(float) ** 2, steps.offsets[:-1])
        per_batch = work[steps.packs].sum(axis=2)
        return float((per_batch.max(axis=1) / per_batch.mean(axis=1)).mean())

    assert imbalance(8) < imbalance(4) < imbalance(1)
    assert imbalance(4) - 1 < 0.5 * (imbalance(1) - 1)
    assert imbalance(1, packs_per_batch=4) < imbalance(1)


def test_steps_in_a_window_come_in_random_order_and_another_at_every_seed():
    lengths = np.random.default_rng(0).integers(1, 500, 4_000)

    def works(seed: int) -> list[float]:
        steps = steps_of(lengths, 1_000, ranks=4, balance_over=16, seed=seed)
        work = np.add.reduceat(lengths[steps.documents].astype(float) ** 2, steps.offsets[:-1])
        return work[steps.packs].sum(axis=(1, 2))[:16].tolist()

    assert works(1) != sorted(works(1), reverse=True)
    assert works(1) != works(2)
    assert sorted(works(1)) == sorted(works(2))


def test_overlong_documents_are_refused_or_counted():
    with pytest.raises(OverlongDocumentError, match="document 1 has 30 tokens"):
        steps_of([5, 30, 6], CAPACITY)

    steps = steps_of([5, 30, 6], CAPACITY, overlong="drop")
    assert documents_of(steps) == [[0, 2]]
    assert (steps.dropped_documents, steps.dropped_tokens) == (1, 30)


@pytest.mark.parametrize(
    "settings",
    [{"overlong": "split"}, {"fill": "none"}, {"ranks": 0}, {"packs_per_batch": 0}, {"balance_over": 0}],
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(SettingError, match=next(iter(settings))):
        steps_of([1, 2], CAPACITY, **settings)

"""The demo's documents, drawn fairly, and their orders: every document once in every order."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.errors import LedgerError, SettingError, SourceError
from varlen.train.demo import corpus as corpus_module
from varlen.train.demo.corpus import Documents, read_corpus
from varlen.train.demo.orders import batches_as_packing, make_order, most_crowded_pack, step_slots
from varlen.train.demo.settings import ORDERS, DemoSettings, ModelSettings

SETTINGS = DemoSettings(
    steps=2, batch_documents=4, max_length=64, validation_documents=4, model=ModelSettings(vocab_size=300)
)


def write(tmp_path, count, text="word {} and more of it"):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text.format(n) * (1 + n % 7)}) + "\n" for n in range(count)))
    return path


def test_validation_documents_are_never_drawn_for_training(tmp_path):
    corpus = read_corpus(write(tmp_path, 40), SETTINGS)

    assert set(corpus.validation_ids).isdisjoint(corpus.train_ids)
    assert len(corpus.validation_ids) + len(corpus.train_ids) == len(corpus.documents.lengths) == 40
    for seed in range(20):
        drawn = corpus.draw(8, seed)
        assert len(set(drawn.tolist())) == 8
        assert set(drawn.tolist()) <= set(corpus.train_ids.tolist())


def test_a_draw_has_the_lengths_of_the_whole_set(tmp_path):
    corpus = read_corpus(write(tmp_path, 75), SETTINGS)
    lengths = corpus.documents.lengths

    drawn = np.sort(lengths[corpus.draw(8, seed=3)])

    strata = np.array_split(np.sort(lengths[corpus.train_ids]), 8)
    assert all(low.min() <= length <= high.max() for length, low, high in zip(drawn, strata, strata))


def test_seeds_draw_other_documents_in_another_order(tmp_path):
    corpus = read_corpus(write(tmp_path, 75), SETTINGS)

    assert corpus.draw(8, 0).tolist() == corpus.draw(8, 0).tolist()
    assert corpus.draw(8, 0).tolist() != corpus.draw(8, 1).tolist()
    assert corpus.documents.lengths[corpus.draw(8, 0)].tolist() != sorted(
        corpus.documents.lengths[corpus.draw(8, 0)]
    )


def test_texts_and_tokens_belong_together(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ["a", *("ab" * n for n in range(2, 30)), "b"])
    )

    corpus = read_corpus(tmp_path / "a.jsonl", replace(SETTINGS, model=ModelSettings(vocab_size=256)))

    assert corpus.too_short == 2
    assert len(corpus.texts) == len(corpus.documents.lengths) == 28
    assert (
        np.argsort(corpus.documents.lengths, kind="stable").tolist()
        == np.argsort([len(text) for text in corpus.texts], kind="stable").tolist()
    )


def test_too_few_documents_are_refused_with_how_many_it_takes(tmp_path):
    with pytest.raises(SourceError, match=r"holds 4 documents .* needs 5: 1 step of 4 .* 1 to validate"):
        read_corpus(write(tmp_path, 4), SETTINGS)
    with pytest.raises(SourceError, match=r"holds 10 documents .* needs 14: 3 steps of 4 .* 2 to validate"):
        read_corpus(write(tmp_path, 10), replace(SETTINGS, steps=3, exact_steps=True))
    assert len(read_corpus(write(tmp_path, 5), SETTINGS).train_ids) == 4


def test_the_way_out_of_too_few_documents_is_one_that_helps(tmp_path, monkeypatch):
    path = write(tmp_path, 40)
    asked = replace(SETTINGS, steps=30, exact_steps=True)
    with pytest.raises(SourceError, match=r"holds 40 documents .* pass more documents or --steps 9 at most$"):
        read_corpus(path, asked)
    with pytest.raises(SourceError, match=r"holds 4 documents .* pass more documents$"):
        read_corpus(write(tmp_path, 4), SETTINGS)

    monkeypatch.setattr(corpus_module, "MAX_DOCUMENTS", 20)
    with pytest.raises(
        SourceError, match=r"more, but the demo takes 20 documents .* pass --steps 4 at most$"
    ):
        read_corpus(write(tmp_path, 40), asked)


def test_a_file_whose_name_is_not_utf_8_is_described_in_characters_that_can_be_written(tmp_path):
    path = write(tmp_path, 40).rename(tmp_path / os.fsdecode(b"caf\xe9.jsonl"))

    assert (
        read_corpus(path, SETTINGS)
        .description.encode()
        .endswith("caf\N{REPLACEMENT CHARACTER}.jsonl".encode())
    )


def test_few_documents_are_trained_on_in_fewer_steps(tmp_path):
    assert read_corpus(write(tmp_path, 40), SETTINGS).settings == SETTINGS
    few = read_corpus(write(tmp_path, 9), SETTINGS).settings
    assert (few.steps, few.validation_documents) == (1, 2)


def test_long_documents_are_trained_on_in_fewer_steps_unless_steps_are_exact():
    long, middling, short = (np.full(500, length) for length in (100_000, 700, 300))

    assert DemoSettings().fitted(short).steps == DemoSettings().steps == 5
    assert DemoSettings().fitted(middling).steps == 4
    assert DemoSettings().fitted(long).steps == 2
    assert DemoSettings(exact_steps=True).fitted(long).steps == 5


def test_documents_without_a_target_do_not_count(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 20)

    with pytest.raises(SourceError, match="holds 0 documents of two tokens or more"):
        read_corpus(tmp_path / "a.jsonl", SETTINGS)


def test_reading_stops_at_a_limit_and_says_so(tmp_path, monkeypatch):
    path = write(tmp_path, 400)
    assert not read_corpus(path, SETTINGS).is_cut
    monkeypatch.setattr(corpus_module, "MAX_CHARACTERS", 2000)
    monkeypatch.setattr(corpus_module, "MAX_DOCUMENTS", 15)

    corpus = read_corpus(path, SETTINGS)

    assert corpus.is_cut
    assert 15 < corpus.documents_found < 400
    assert len(corpus.documents.lengths) == 15


def test_taken_documents_keep_their_tokens():
    documents = Documents(tokens=np.arange(10, dtype=np.int32), offsets=np.array([0, 3, 3, 10]))

    taken = documents.take(np.array([2, 0]))

    assert taken.tokens.tolist() == [3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert taken.lengths.tolist() == [7, 3]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("batch_documents", 1),
        ("max_length", 15),
        ("num_seeds", 0),
        ("seed", -1),
        ("threads", 0),
    ],
)
def test_settings_out_of_range_are_named(name, value):
    with pytest.raises(SettingError, match=f"{name} must be at least"):
        DemoSettings(**{name: value})


STEPS, BATCH, MAX_LENGTH = 3, 4, 64

all_lengths = st.lists(st.integers(2, 300), min_size=STEPS * BATCH, max_size=STEPS * BATCH).map(
    lambda values: np.array(values, dtype=np.int64)
)


@given(lengths=all_lengths, name=st.sampled_from(ORDERS), seed=st.integers(0, 5))
def test_every_order_trains_every_document_once_cut_at_the_same_length(lengths, name, seed):
    order = make_order(name, lengths, steps=STEPS, max_length=MAX_LENGTH, seed=seed)

    packing = order.packing
    assert sorted(packing.document_ids.tolist()) == list(range(len(lengths)))
    kept = np.empty(len(lengths), dtype=np.int64)
    kept[packing.document_ids] = packing.lengths
    assert kept.tolist() == np.minimum(lengths, MAX_LENGTH).tolist()
    assert packing.starts.tolist() == [0] * len(lengths)
    assert packing.ledger.packed == np.minimum(lengths, MAX_LENGTH).sum()
    assert packing.ledger.truncated == np.maximum(lengths - MAX_LENGTH, 0).sum()
    dealt = [order.pack_ids(step).tolist() for step in range(STEPS)]
    assert [pack for packs in dealt for pack in packs] == list(range(packing.num_packs))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert min(map(len, dealt)) >= 1


def test_random_batches_are_neighbours_and_buckets_are_neighbours_in_length():
    lengths = np.array([9, 2, 8, 3, 7, 4, 6, 5, 30, 20, 10, 40])

    random = make_order("random", lengths, steps=STEPS, max_length=MAX_LENGTH, seed=0).packing
    buckets = make_order("bucketed", lengths, steps=STEPS, max_length=MAX_LENGTH, seed=0).packing

    assert random.to_lists() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert sorted(sorted(lengths[ids].tolist()) for ids in buckets.to_lists()) == [
        [2, 3, 4, 5],
        [6, 7, 8, 9],
        [10, 20, 30, 40],
    ]


def test_buckets_are_shuffled_by_the_seed():
    lengths = np.arange(2, 2 + 40)
    orders = {
        tuple(
            make_order("bucketed", lengths, steps=10, max_length=64, seed=seed).packing.document_ids.tolist()
        )
        for seed in range(5)
    }

    assert len(orders) == 5


def test_few_short_documents_still_give_every_step_a_pack():
    order = make_order("packed", np.full(12, 5), steps=3, max_length=2048, seed=0)

    assert order.packing.num_packs >= 3


def test_documents_too_uneven_to_pack_for_so_many_steps_are_refused():
    with pytest.raises(SourceError, match="2 packs, too few for 6 steps"):
        make_order("packed", np.array([2000] + [2] * 11), steps=6, max_length=2048, seed=0)


@pytest.mark.parametrize(
    ("name", "layout", "slots"),
    [
        ("random", "flat", 29),
        ("random", "padded", 2 * 4 + 2 * 20),
        ("random", "padded_with_mask", 2 * 4 + 2 * 20),
        ("bucketed", "padded", 2 * 3 + 2 * 20),
        ("packed", "rows", 2 * 20),
    ],
)
def test_positions_are_counted_by_layout(name, layout, slots):
    order = make_order(name, np.array([2, 4, 20, 3]), steps=2, max_length=20, seed=0)

    assert step_slots(order, layout) == slots


def test_a_batch_that_holds_a_document_twice_does_not_balance():
    with pytest.raises(LedgerError):
        batches_as_packing(np.array([5, 5, 5]), np.array([[0, 1], [1, 2]]), 10)


def test_a_batch_that_leaves_a_document_out_does_not_balance():
    with pytest.raises(LedgerError):
        batches_as_packing(np.array([5, 5, 5]), np.array([[0, 1]]), 10)


def test_the_most_crowded_pack_is_the_first_with_most_documents():
    packing = batches_as_packing(np.array([5, 5, 5, 5]), np.array([[0, 1], [2, 3]]), 10)

    assert most_crowded_pack(packing) == 0

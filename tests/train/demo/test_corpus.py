"""The demo's documents: enough of them, drawn fairly, validation kept aside."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest

from varlen.errors import SettingError, SourceError
from varlen.train.demo import corpus as corpus_module
from varlen.train.demo.corpus import Documents, read_corpus
from varlen.train.demo.settings import DemoSettings, ModelSettings

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

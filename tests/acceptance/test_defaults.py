"""One default for one thing: whoever reads documents packs them best fit and splits what is too long, and says so."""

import inspect
import json
import logging
from dataclasses import fields

import pytest
from tests.support.command_line import asked

import varlen as vl
from varlen.adapters.axolotl.settings import VarlenSettings
from varlen.adapters.megatron.packing.offline import MegatronPackSettings
from varlen.feed.indexed.windows import WindowSettings
from varlen.feed.settings import LoaderSettings
from varlen.feed.streaming.feed import StreamingSettings
from varlen.offline.pack import PackSettings
from varlen.train.settings import DataSettings

LONG = "5 documents of 40 documents"


def of_fields(kind):
    return {field.name: field.default for field in fields(kind)}


def of_signature(function):
    return {name: one.default for name, one in inspect.signature(function).parameters.items()}


READ_DOCUMENTS = {
    "PackedLoader": of_signature(vl.PackedLoader),
    "LoaderSettings": of_fields(LoaderSettings),
    "StreamingSettings": of_fields(StreamingSettings),
    "WindowSettings": of_fields(WindowSettings),
    "WindowPacker": of_signature(vl.WindowPacker),
    "PackSettings": of_fields(PackSettings),
    "axolotl": {name: field.default for name, field in VarlenSettings.model_fields.items()},
}


@pytest.mark.parametrize("door", READ_DOCUMENTS)
def test_what_reads_documents_packs_best_fit_and_splits(door):
    assert READ_DOCUMENTS[door]["method"] == "best_fit"
    assert READ_DOCUMENTS[door]["overlong"] == "split"


def test_what_train_leaves_out_is_the_loaders():
    settings = of_fields(DataSettings)

    assert settings["method"] is settings["overlong"] is None


def test_lengths_alone_and_a_peer_that_refuses_keep_their_own():
    assert of_signature(vl.pack)["method"] == "best_fit_decreasing"
    assert of_signature(vl.pack)["overlong"] == "error"
    assert of_fields(MegatronPackSettings)["overlong"] == "error"
    assert "The default here" in vl.pack.__doc__


@pytest.fixture
def texts(tmp_path):
    lengths = [700 if n % 8 == 0 else 50 for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in lengths))
    return tmp_path


def test_pack_splits_and_says_how_many_documents_and_tokens(texts):
    printed = asked("pack", "a.jsonl", "-o", "out", "--capacity", 256, cwd=texts).stdout

    assert (
        "  5 documents longer than 256 tokens, 3,505 tokens in all, cut into pieces" in printed.splitlines()
    )


def said(caplog):
    return [one.getMessage() for one in caplog.records if "longer than capacity" in one.getMessage()]


def loader(source, **settings):
    given = {"capacity": 256, "global_batch_size": 2, "dp_rank": 0, "dp_world_size": 1, "worker": "thread"}
    tokenizer = "bytes" if str(source).endswith(".jsonl") else None
    return vl.PackedLoader(source, tokenizer, **{**given, **settings})


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
def test_a_loader_of_a_store_says_it_once_before_the_first_batch(texts, caplog, overlong):
    asked("index", "a.jsonl", "-o", "store", cwd=texts)

    with caplog.at_level(logging.WARNING), loader(texts / "store", overlong=overlong, epochs=2) as loaded:
        before = said(caplog)
        batches = list(loaded)

    assert batches
    assert len(before) == len(said(caplog)) == 1
    assert before[0].startswith(LONG)
    assert "with 3,505 tokens, are longer than capacity 256" in before[0]


@pytest.mark.parametrize(
    "settings", [{"overlong": "error"}, {"capacity": 1024}, {"dp_rank": 1, "dp_world_size": 2}]
)
def test_nothing_is_said_where_nothing_is_cut_or_by_other_ranks(texts, caplog, settings):
    asked("index", "a.jsonl", "-o", "store", cwd=texts)

    with caplog.at_level(logging.WARNING):
        try:
            loader(texts / "store", **settings).close()
        except vl.VarlenError:
            assert settings == {"overlong": "error"}

    assert said(caplog) == []


def test_streaming_says_it_once_as_soon_as_it_is_known_and_counts_it(texts, caplog):
    with caplog.at_level(logging.WARNING), loader(texts / "a.jsonl", mode="streaming") as loaded:
        list(loaded)
        stats = loaded.stats()

    assert len(said(caplog)) == 1
    assert "longer than capacity 256, and cut into pieces" in said(caplog)[0]
    assert stats.ledger.split_documents == 5

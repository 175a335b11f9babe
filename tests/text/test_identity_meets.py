"""Where tokens meet a tokenizer: stores, packed sets, mixtures and states name theirs, and refuse another by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.support.tokenizer_kinds import byte_bpe, llama_bpe, split_bpe
from tokenizers import Tokenizer

import varlen as vl
from varlen.documents.source import open_source
from varlen.errors import SettingError, StateError
from varlen.files.written import read_manifest
from varlen.offline.index import index_source
from varlen.offline.pack import PackSettings, pack_source
from varlen.store.open import open_tokens
from varlen.text.identity import made_by, mark_of
from varlen.text.load_tokenizer import load_tokenizer


@pytest.fixture
def texts(tmp_path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"hello you {i}"}) + "\n" for i in range(60)))
    return path


@pytest.fixture
def folders(tmp_path) -> dict[str, Path]:
    """Tokenizers by name, `again` and `spelled` of the ids of `one`."""
    made = {"one": split_bpe(), "again": split_bpe(), "two": byte_bpe(), "llama": llama_bpe()}
    spec = json.loads(split_bpe().to_str())
    spec["model"]["merges"] = [" ".join(pair) for pair in spec["model"]["merges"]]
    spec["model"].pop("ignore_merges")
    for name, backend in made.items():
        (tmp_path / name).mkdir()
        backend.save(str(tmp_path / name / "tokenizer.json"))
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (tmp_path / "spelled").mkdir()
    (tmp_path / "spelled" / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "spelled" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return {name: tmp_path / name for name in (*made, "spelled")}


def loader(data: Any, tokenizer: Any = None, **changes: Any) -> vl.PackedLoader:
    settings = {"capacity": 64, "global_batch_size": 2, "worker": "thread", **changes}
    return vl.PackedLoader(data, tokenizer, **settings)


def store(texts: Path, folder: Path, tokenizer: Any) -> Path:
    index_source(open_source(texts, tokenizer), folder)
    return folder


def test_stores_and_packed_sets_carry_the_mark_of_their_tokenizer(texts, folders, tmp_path):
    source = open_source(texts, folders["one"])
    store(texts, tmp_path / "store", folders["one"])
    pack_source(source, tmp_path / "packed", PackSettings(capacity=64))
    pack_source(tmp_path / "store", tmp_path / "again-packed", PackSettings(capacity=64))

    marks = [
        made_by(open_tokens(tmp_path / "store")),
        made_by(read_manifest(tmp_path / "packed")),
        made_by(read_manifest(tmp_path / "again-packed")),
        open_source(tmp_path / "packed").made_by(),
    ]

    assert marks == [mark_of(load_tokenizer(folders["one"]))] * 4
    store(tmp_path / "packed", tmp_path / "of-packed", None)
    assert made_by(open_tokens(tmp_path / "of-packed")) == marks[0]


def test_a_store_in_the_making_says_its_tokenizer(texts, folders, tmp_path, monkeypatch):
    seen = []
    from varlen.offline import index

    real = index.ShardWriter

    def writer(*words: Any) -> Any:
        seen.append(made_by(open_tokens(tmp_path / "store")))
        return real(*words)

    monkeypatch.setattr(index, "ShardWriter", writer)
    store(texts, tmp_path / "store", folders["one"])

    assert seen == [mark_of(load_tokenizer(folders["one"]))]


def test_ready_tokens_are_of_no_tokenizer_that_anybody_named(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2, 100_000]}) + "\n")

    store(path, tmp_path / "store", None)

    assert made_by(open_tokens(tmp_path / "store")) is None
    assert open_tokens(tmp_path / "store").manifest["source"]["tokenizer"] == {}


def test_a_packed_set_is_read_with_its_own_tokenizer_or_none(texts, folders, tmp_path):
    pack_source(open_source(texts, folders["one"]), tmp_path / "packed", PackSettings(capacity=64))

    for same in (None, "bytes", folders["again"], folders["spelled"], split_bpe()):
        open_source(tmp_path / "packed", same)
    for name in ("two", "llama"):
        with pytest.raises(
            SettingError, match=rf"packed holds tokens of the tokenizer one \(.*\), and {name} \(.*\) gives"
        ):
            open_source(tmp_path / "packed", folders[name])


def test_sets_of_several_tokenizers_are_not_read_together(texts, folders, tmp_path):
    for name in ("one", "two", "again"):
        pack_source(open_source(texts, folders[name]), tmp_path / f"packed-{name}", PackSettings(capacity=64))

    open_source([tmp_path / "packed-one", tmp_path / "packed-again"])
    with pytest.raises(
        SettingError, match=r"packed-two holds tokens of the tokenizer two \(.*\), and one \(.*apart"
    ):
        open_source([tmp_path / "packed-one", tmp_path / "packed-two"])


def test_a_store_names_its_tokenizer_where_another_is_given(texts, folders, tmp_path):
    store(texts, tmp_path / "store", folders["one"])

    with pytest.raises(
        SettingError, match=r"store holds tokens already, .* leave tokenizer out\. They were made by one"
    ):
        loader(tmp_path / "store", folders["two"])
    with pytest.raises(SettingError, match=r"leave tokenizer out$"):
        loader(tmp_path / "store", folders["again"])


def test_the_sources_of_a_mixture_hold_tokens_of_one_tokenizer(texts, folders, tmp_path):
    stores = {
        name: store(texts, tmp_path / f"store-{name}", folders[name]) for name in ("one", "again", "two")
    }
    settings = {"cache": tmp_path / "cache"}

    with loader(vl.Mixture({"a": stores["one"], "b": stores["again"]}, {"a": 1, "b": 1}), **settings) as made:
        assert made.state_dict()["belongs_to"]["tokenizer"]["name"] == "one"
    with loader(
        vl.Mixture({"a": stores["one"], "b": texts}, {"a": 1, "b": 1}), folders["spelled"], **settings
    ):
        pass
    with pytest.raises(
        SettingError, match=r"sources a and b of the mixture .* different tokenizers, one \(.*\) and two"
    ):
        loader(vl.Mixture({"a": stores["one"], "b": stores["two"]}, {"a": 1, "b": 1}), **settings)
    with pytest.raises(SettingError, match=r"one \(.*\) and the built-in one, bytes"):
        loader(vl.Mixture({"a": stores["one"], "b": texts}, {"a": 1, "b": 1}), **settings)
    with pytest.raises(SettingError, match=r"the source a holds tokens of the tokenizer one .* and two"):
        loader(
            vl.Mixture({"a": stores["one"], "b": stores["again"]}, {"a": 1, "b": 1}),
            folders["two"],
            **settings,
        )


@pytest.mark.parametrize("mode", ["indexed", "streaming"])
def test_a_state_names_the_tokenizer_and_goes_on_with_any_of_its_ids(texts, folders, tmp_path, mode, caplog):
    settings = {"mode": mode, "cache": tmp_path / "cache"}
    with loader(texts, folders["one"], **settings) as made:
        taken = [next(made).input_ids.tolist() for _ in range(2)]
        state = json.loads(json.dumps(made.state_dict()))
        rest = [batch.input_ids.tolist() for batch in made]

    for name in ("again", "spelled"):
        with loader(texts, folders[name], **settings) as made:
            made.load_state_dict(state)
            assert [batch.input_ids.tolist() for batch in made] == rest
    assert taken[0] != taken[1]
    for other, named in ((folders["two"], r"two \("), (None, "the built-in one, bytes")):
        with (
            loader(texts, other, **settings) as made,
            pytest.raises(StateError, match=rf"tokenizer was one \(.*\) and is {named}"),
        ):
            made.load_state_dict(state)
    del state["belongs_to"]["tokenizer"]
    with caplog.at_level(logging.WARNING), loader(texts, folders["one"], **settings) as made:
        made.load_state_dict(state)
    assert "doesn't say which tokenizer made its tokens; it is taken to be one" in caplog.text


def test_a_store_of_old_without_such_a_mark_is_read(texts, folders, tmp_path):
    store(texts, tmp_path / "store", folders["one"])
    path = tmp_path / "store" / "manifest.json"
    manifest = json.loads(path.read_bytes())
    manifest["source"]["tokenizer"]["fingerprint"] = "0" * 64
    del manifest["checksum"]  # of which there was none either
    path.write_text(json.dumps(manifest))

    with loader(tmp_path / "store") as made:
        assert sum(batch.num_tokens for batch in made) > 0
        mark = made.state_dict()["belongs_to"]["tokenizer"]
    assert (mark["name"], mark["fingerprint"]) == ("one", None)


@pytest.mark.parametrize("mode", ["indexed", "streaming"])
def test_tokens_that_are_bytes_are_told_and_no_others(texts, folders, tmp_path, mode, caplog):
    settings = {"mode": mode, "cache": tmp_path / "cache"}
    (tmp_path / "ids.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3]}) + "\n")
    ids = tmp_path / "ids.jsonl"
    for data, tokenizer, are_bytes in (
        (texts, None, True), (texts, "bytes", True), (texts, folders["one"], False), (ids, None, False),
    ):  # fmt: skip
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            loader(data, tokenizer, **settings).close()
        assert ("tokens are bytes" in caplog.text) is are_bytes


def test_indexing_with_the_same_tokenizer_spelled_otherwise_finds_the_store(texts, folders, tmp_path):
    first = index_source(open_source(texts, folders["one"]), tmp_path / "store")
    for name in ("again", "spelled"):
        folders[name].rename(tmp_path / "moved")
        (tmp_path / "moved").rename(tmp_path / name)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    folders["spelled"].rename(moved / "one")

    second, was_there = index_source(open_source(texts, moved / "one"), tmp_path / "store")

    assert was_there
    assert second.fingerprint == first[0].fingerprint
    assert isinstance(load_tokenizer(moved / "one").backend, Tokenizer)  # type: ignore[union-attr]


def test_what_another_tokenizer_made_is_not_replaced_and_named(texts, folders, tmp_path):
    store(texts, tmp_path / "store", folders["one"])
    pack_source(open_source(texts, folders["one"]), tmp_path / "packed", PackSettings(capacity=64))

    said = r"made from other data or settings: of tokens of the tokenizer one \(.*\), and two .*--overwrite"
    with pytest.raises(SettingError, match=said):
        store(texts, tmp_path / "store", folders["two"])
    with pytest.raises(SettingError, match=said):
        pack_source(open_source(texts, folders["two"]), tmp_path / "packed", PackSettings(capacity=64))

"""Fingerprints of tokenizers are equal where ids are; whatever holds tokens names its own and refuses another."""

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.support.tokenizer_kinds import byte_bpe, llama_bpe, split_bpe, unigram, wordlevel, wordpiece
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors

import varlen as vl
from varlen.documents.source import open_source
from varlen.errors import SettingError, StateError
from varlen.files.written import read_manifest
from varlen.offline.index import index_source
from varlen.offline.pack import PackSettings, pack_source
from varlen.store.open import open_tokens
from varlen.text.identity import TokenizerMark, canonical, check_same, made_by, mark_in, mark_of
from varlen.text.load_tokenizer import load_tokenizer

MAKERS = [byte_bpe, split_bpe, llama_bpe, wordpiece, unigram, wordlevel]


def fingerprint(backend: Tokenizer) -> str:
    return load_tokenizer(backend).fingerprint


def respelled(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The same tokenizer as older and newer versions of the library write it."""
    old = copy.deepcopy(spec)
    model = old["model"]
    if "merges" in model:
        model["merges"] = [" ".join(pair) for pair in model["merges"]]
    for key in ("ignore_merges", "byte_fallback", "fuse_unk", "dropout", "end_of_word_suffix"):
        if not model.get(key):
            model.pop(key, None)
    if isinstance(model["vocab"], dict):
        model["vocab"] = dict(sorted(model["vocab"].items(), reverse=True))
    old["added_tokens"] = old["added_tokens"][::-1]
    new = copy.deepcopy(spec)
    new["model"]["some_new_switch"] = False
    new["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    new["padding"] = {
        "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "x",
    }  # fmt: skip
    new["decoder"] = None
    wrapped = copy.deepcopy(spec)
    for name, inner in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        wrapped[name] = {"type": "Sequence", inner: [wrapped[name]] if wrapped[name] else []}
    return [old, new, wrapped]


@pytest.mark.parametrize("make", MAKERS)
def test_spellings_of_one_tokenizer_have_one_fingerprint(make):
    backend = make()
    spec = json.loads(backend.to_str())

    forms = [canonical(one) for one in respelled(spec)]

    assert forms == [canonical(spec)] * len(forms)
    for one in respelled(spec)[::2]:
        assert fingerprint(Tokenizer.from_str(json.dumps(one))) == fingerprint(backend)


@pytest.mark.parametrize("make", MAKERS)
def test_what_leaves_ids_alone_leaves_the_fingerprint_alone(make):
    backend = make()
    before = fingerprint(backend)

    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    backend.decoder = decoders.Fuse()

    assert fingerprint(backend) == before


def changes(backend: Tokenizer) -> list[Tokenizer]:
    """Others that give other ids."""
    spec = json.loads(backend.to_str())
    made = []

    def with_(change: Any) -> None:
        other = copy.deepcopy(spec)
        change(other)
        made.append(Tokenizer.from_str(json.dumps(other)))

    def swap(spec: dict[str, Any]) -> None:
        vocab = spec["model"]["vocab"]
        first, second = list(vocab)[-2:]
        vocab[first], vocab[second] = vocab[second], vocab[first]

    if isinstance(spec["model"]["vocab"], dict):
        with_(swap)
    else:
        with_(lambda spec: spec["model"]["vocab"][-1].__setitem__(1, -99.0))
    if spec["model"].get("merges"):
        with_(lambda spec: spec["model"].__setitem__("merges", spec["model"]["merges"][:-1]))
        with_(lambda spec: spec["model"].__setitem__("ignore_merges", True))
    with_(lambda spec: spec.__setitem__("normalizer", {"type": "Lowercase"}))
    with_(lambda spec: spec.__setitem__("pre_tokenizer", {"type": "Digits", "individual_digits": True}))
    for flags in ({}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}, {"normalized": True}):
        other = Tokenizer.from_str(backend.to_str())
        other.add_tokens([AddedToken("<extra>", **{"normalized": False, **flags})])
        made.append(other)
    begun = Tokenizer.from_str(backend.to_str())
    begun.post_processor = processors.TemplateProcessing(single="q $A", special_tokens=[("q", 3)])
    return [*made, begun]


@pytest.mark.parametrize("make", MAKERS)
def test_whatever_changes_ids_changes_the_fingerprint(make):
    backend = make()

    marks = [fingerprint(one) for one in [backend, *changes(backend)]]

    assert len(set(marks)) == len(marks)


def test_switches_that_are_on_unless_said_otherwise_count_where_they_are_off():
    prints = set()
    for prefix in (True, False):
        for regex in (True, False):
            backend = byte_bpe()
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)
            prints.add(fingerprint(backend))
    for scheme in ("always", "first", "never"):
        for split in (True, False):
            backend = byte_bpe()
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
            prints.add(fingerprint(backend))

    assert len(prints) == 10


def test_special_tokens_count_where_they_are_split():
    kinds = []
    for splits in (False, True):
        for special in (False, True):
            backend = byte_bpe()
            backend.add_tokens([AddedToken("<extra>", special=special, normalized=False)])
            backend.encode_special_tokens = splits
            kinds.append(fingerprint(backend))

    assert kinds[0] == kinds[1]  # found in the text in either case
    assert len(set(kinds)) == 3


def test_what_ends_a_document_is_no_part_of_it(tmp_path):
    assert load_tokenizer(byte_bpe(), eos="<s>").fingerprint == fingerprint(byte_bpe())
    assert load_tokenizer(eos=7).fingerprint == load_tokenizer().fingerprint


def mark(name: str, fingerprint: str | None) -> TokenizerMark:
    return TokenizerMark(name=name, fingerprint=fingerprint)


A, B, F, BYTES, OLD = (
    mark("a", "ids:1:aaaa"),
    mark("b", "ids:1:bbbb"),
    mark("f", "function:ff"),
    mark("bytes", "bytes:1"),
    mark("old", None),
)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [(A, A, True), (A, mark("z", A.fingerprint), True), (A, B, False), (A, BYTES, False), (BYTES, BYTES, True),
     (A, OLD, None), (OLD, OLD, None), (OLD, BYTES, False), (A, F, None), (F, BYTES, False), (F, F, True)],
)  # fmt: skip
def test_marks_are_compared_by_ids_and_not_by_name(one, other, same):
    assert one.is_same(other) is other.is_same(one) is same


def test_another_one_is_refused_by_name_and_what_cannot_be_told_is_said(caplog):
    with pytest.raises(
        SettingError, match=r"store holds tokens of the tokenizer a \(aaaa\), and b \(bbbb\) gives .*; go"
    ):
        check_same("store", A, B, "go")
    with pytest.raises(SettingError, match=r"of the tokenizer the built-in one, bytes, and b"):
        check_same("store", BYTES, B, "go")
    with caplog.at_level(logging.WARNING):
        check_same("store", A, A, "go")
        assert caplog.text == ""
        check_same("store", OLD, A, "go")
        check_same("packed", None, A, "go")

    assert (
        "store names old as its tokenizer, and whether a (aaaa) gives the same ids isn't known" in caplog.text
    )
    assert "packed doesn't say which tokenizer made its tokens" in caplog.text


def test_marks_go_through_manifests_and_those_of_old_are_read():
    made = load_tokenizer(byte_bpe())

    assert mark_in(json.loads(json.dumps(mark_of(made).to_json()))) == mark_of(made)
    assert mark_in({"name": "llama", "fingerprint": "0" * 64}) == mark("llama", None)
    assert mark_in({"name": "bytes", "fingerprint": "bytes:1 eos 7"}).are_bytes
    assert [mark_in(said) for said in (None, {}, "x")] == [None] * 3


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

    said = r"made from other data or settings: its tokenizer was one \(.*\), and two .*--overwrite"
    with pytest.raises(SettingError, match=said):
        store(texts, tmp_path / "store", folders["two"])
    with pytest.raises(SettingError, match=said):
        pack_source(open_source(texts, folders["two"]), tmp_path / "packed", PackSettings(capacity=64))

"""Fingerprints of tokenizers: equal where ids are, whatever a library writes; other where they differ."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest
from tests.support.tokenizer_kinds import byte_bpe, llama_bpe, split_bpe, unigram, wordlevel, wordpiece
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors

from varlen.errors import SettingError
from varlen.text.identity import TokenizerMark, canonical, check_same, mark_in, mark_of
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
        "store names old as its tokenizer, and whether a (aaaa) gives the same ids can't be told"
        in caplog.text
    )
    assert "packed doesn't say which tokenizer made its tokens" in caplog.text


def test_marks_go_through_manifests_and_those_of_old_are_read():
    made = load_tokenizer(byte_bpe())

    assert mark_in(json.loads(json.dumps(mark_of(made).to_json()))) == mark_of(made)
    assert mark_in({"name": "llama", "fingerprint": "0" * 64}) == mark("llama", None)
    assert mark_in({"name": "bytes", "fingerprint": "bytes:1 eos 7"}).are_bytes
    assert [mark_in(said) for said in (None, {}, "x")] == [None] * 3

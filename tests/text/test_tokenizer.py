"""Tokenizers from files, folders, objects and functions, and bytes: ids, what precedes a text and ends one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from varlen.documents.source import open_source
from varlen.errors import MissingExtraError, SettingError
from varlen.text.load_tokenizer import load_tokenizer, train_bpe
from varlen.text.tokenizer import ByteTokenizer, FastTokenizer, FunctionTokenizer

TEXTS = ["hello world", "", "def f():\n    return 1", "żółć 🦆"]


def make_backend(*, bos: str | None = "<s>", eos: str | None = "</s>") -> Tokenizer:
    """A small byte-level tokenizer that puts BOS before each text and EOS after, as asked."""
    backend = train_bpe(TEXTS * 9, 280)
    marks = [mark for mark in (bos, eos) if mark]
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in [*marks, "<pad>", "<|im_end|>x"]])
    if bos or eos:
        single = f"{bos or ''} $A {eos or ''}".strip()
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(mark, backend.token_to_id(mark)) for mark in marks]
        )
    return backend


def metaspace() -> Tokenizer:
    """A tokenizer that puts a mark before a text's first word, so that no text can be cut."""
    pieces = ["<unk>", "</s>", "▁", *sorted(set("".join(TEXTS) + "user\nHello thereHi, you") - {" "})]
    backend = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["</s>"])
    return backend


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return [int(i) for i in tokenizer.encode([text])[0]]


@given(st.lists(st.text(max_size=9), max_size=5))
def test_bytes_are_the_bytes_of_each_text(texts):
    tokens, offsets = load_tokenizer("bytes").encode(texts)

    assert tokens.tolist() == list("".join(texts).encode())
    assert offsets.tolist() == np.cumsum([0, *(len(text.encode()) for text in texts)]).tolist()
    assert load_tokenizer("bytes").decode(tokens) == "".join(texts)


def test_marks_are_ids_in_chats_and_text_elsewhere():
    text = "<|im_start|>user\nhi<|im_end|><|endoftext|><|pad|>"

    chat = load_tokenizer().encode([text, ""], is_chat=True)

    assert chat[0].tolist() == [258, *b"user\nhi", 259, 256, 257]
    assert chat[1].tolist() == [0, 11, 11]
    assert ids_of(load_tokenizer(), text) == list(text.encode())


@pytest.mark.parametrize(("bos", "eos"), [("<s>", "</s>"), ("<s>", None), (None, "</s>"), (None, None)])
def test_the_prefix_is_what_the_tokenizer_itself_puts_before_a_text(bos, eos):
    backend = make_backend(bos=bos, eos=eos)

    made = load_tokenizer(backend)

    for text in TEXTS:
        assert ids_of(made, text) == backend.encode(text, add_special_tokens=False).ids
        whole = [*made.specials.prefix_ids, *ids_of(made, text)]
        assert backend.encode(text, add_special_tokens=True).ids[: len(whole)] == whole
    assert len(made.specials.prefix_ids) == (bos is not None)
    assert made.specials.eos_id == (backend.token_to_id("</s>") if eos else None)


def test_a_document_begins_and_ends_as_the_tokenizer_would_have_it(tmp_path):
    backend = make_backend()
    (tmp_path / "a.txt").write_text("hello world\n\nreturn 1")

    [documents] = open_source(tmp_path, backend).read(open_source(tmp_path).parts()[0])

    bounds = documents.offsets.tolist()
    found = [documents.tokens[a:b].tolist() for a, b in zip(bounds, bounds[1:])]
    assert found == [backend.encode(text).ids for text in ("hello world", "return 1")]


def test_truncation_and_padding_of_a_file_are_left_out_and_the_callers_object_is_left_alone(tmp_path):
    backend = make_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "t.json"))

    for made in (load_tokenizer(tmp_path / "t.json"), load_tokenizer(backend)):
        assert len(ids_of(made, "hello world hello world def")) > 2
        assert ids_of(made, "a") == [backend.token_to_id("a")]
    assert backend.truncation is not None
    assert backend.padding is not None


def save_folder(folder: Path, config: dict[str, Any], **files: Any) -> Path:
    make_backend(bos="<s>", eos=None).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize("eos", ["<pad>", {"content": "<pad>", "special": True}])
def test_a_folder_says_its_eos_and_its_chat_template(tmp_path, eos):
    made = load_tokenizer(save_folder(tmp_path, {"eos_token": eos, "bos_token": "<s>", "chat_template": "T"}))

    assert isinstance(made, FastTokenizer)
    assert made.specials.eos_id == made.backend.token_to_id("<pad>")
    assert made.specials.texts == {"bos_token": "<s>", "eos_token": "<pad>"}
    assert made.specials.chat_templates == {"default": "T"}
    assert load_tokenizer(tmp_path, eos="<s>").specials.eos_id == made.backend.token_to_id("<s>")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "default one"),
        ({"chat_template__jinja": "own"}, "own"),
        ({"chat_template__json": {"chat_template": "json"}}, "default one"),
    ],
)
def test_a_chat_template_in_a_file_of_its_own_goes_first(tmp_path, files, expected):
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "default one"}]

    made = load_tokenizer(save_folder(tmp_path, {"chat_template": several}, **files))

    assert made.specials.chat_templates.get("default") == expected


def test_a_transformers_tokenizer_gives_the_ids_of_its_own(tmp_path):
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=make_backend(eos=None), bos_token="<s>", eos_token="<pad>"
    )
    fast.chat_template = {"default": "T", "rag": "no"}

    made = load_tokenizer(fast)

    for text in TEXTS:
        assert ids_of(made, text) == fast(text, add_special_tokens=False)["input_ids"]
        assert [*made.specials.prefix_ids, *ids_of(made, text)] == fast(text)["input_ids"]
    assert made.specials.eos_id == fast.eos_token_id
    assert made.specials.chat_templates == {"default": "T", "rag": "no"}


def test_a_function_may_take_a_text_or_a_list_of_them():
    one = load_tokenizer(lambda text: list(text.encode()))
    several = load_tokenizer(lambda texts: [np.array(list(text.encode())) for text in texts])

    for made in (one, several):
        assert isinstance(made, FunctionTokenizer)
        tokens, offsets = made.encode(TEXTS)
        assert tokens.tolist() == list("".join(TEXTS).encode())
        assert offsets.tolist() == np.cumsum([0, *(len(text.encode()) for text in TEXTS)]).tolist()


def test_functions_of_one_name_that_give_other_ids_have_other_fingerprints():
    marks = {load_tokenizer(lambda text, n=n: [i + n for i in text.encode()]).fingerprint for n in (0, 1, 1)}

    assert len(marks) == 2


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda text: [1.5], "got an array of float64 of shape"),
        (lambda text: [-1], "got numbers from -1 to -1"),
        (lambda text: [2**31], "got numbers from 2147483648 to 2147483648"),
        (lambda texts: [[1]] if texts == ["a"] else [[1], [2]], "2 results of 1 texts"),
        (lambda text: [1] if text == "a" else 1 / 0, "failed: ZeroDivisionError: division by zero"),
        (lambda text: None, "must return a list of ids for a text"),
        (lambda text: 1 / 0, "it raised ZeroDivisionError: division by zero"),
    ],
)
def test_what_a_function_returns_is_checked(function, said):
    with pytest.raises(SettingError, match=said):
        load_tokenizer(function).encode(["b"])


@pytest.mark.parametrize("eos", ["", "ab", 260, -1, True, 1.0, "\ud800\ud800", None])
def test_an_eos_must_be_one_token_by_id_or_as_its_text(eos):
    assert load_tokenizer(eos="<|im_end|>").specials.eos_id == 259
    assert load_tokenizer(eos="x").specials.eos_id == 120
    assert load_tokenizer(eos=np.int64(7)).specials.eos_id == 7
    assert load_tokenizer(eos=7).fingerprint == ByteTokenizer().fingerprint  # which is of the ids of texts
    if eos is not None:
        with pytest.raises(SettingError, match="eos must be one of the 260 tokens of bytes"):
            load_tokenizer(eos=eos)


def test_where_texts_cannot_be_cut_is_found_out():
    assert load_tokenizer("bytes").is_cuttable
    assert load_tokenizer(make_backend()).is_cuttable
    assert not load_tokenizer(metaspace()).is_cuttable


def test_spans_mark_the_tokens_that_hold_any_of_their_characters():
    made = load_tokenizer(metaspace())

    tokens, offsets, marks = made.encode_spans(  # type: ignore[attr-defined]
        ["hello world", "", "def"], np.array([[1, 3], [6, 8], [0, 1]]), np.array([0, 2, 2, 3])
    )

    pieces = [made.decode([i]).strip() for i in tokens]
    assert offsets.tolist() == [0, len(tokens) - 4, len(tokens) - 4, len(tokens)]
    assert [piece for piece, mark in zip(pieces, marks) if mark and piece] == ["e", "l", "w", "o", "▁", "d"]


def test_what_the_library_cannot_encode_is_an_error_of_varlen():
    backend = Tokenizer(
        models.WordLevel({"a": 0, "user": 1, "Hello": 2, "there": 3, "Hi": 4, ",": 5, "you": 6, ">": 7})
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    made = load_tokenizer(backend)

    with pytest.raises(SettingError, match=r"the tokenizer .* failed: .*UNK"):
        made.encode(["b"])
    with pytest.raises(SettingError, match=r"failed: .*UNK"):
        made.encode_spans(["b"], np.zeros((0, 2), np.int64), np.zeros(2, np.int64))  # type: ignore[attr-defined]
    backend.normalizer = normalizers.Prepend("x")
    with pytest.raises(SettingError, match=r"failed: .*UNK"):
        load_tokenizer(backend)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a tokenizer's JSON file"),
        (b"{}", "is not a tokenizer's JSON file"),
        (b"\xff", "is not a token"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_an_error(tmp_path, content, said):
    (tmp_path / "t.json").write_bytes(content)

    with pytest.raises(SettingError, match=said):
        load_tokenizer(tmp_path / "t.json")


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-0.5B", "org/name"])
def test_a_name_with_dots_is_one_of_the_hub(name, monkeypatch):
    asked = []

    class Hub:
        @staticmethod
        def from_pretrained(name, **_settings):
            asked.append(name)
            raise OSError("no network")

    monkeypatch.setattr("transformers.AutoTokenizer", Hub)
    with pytest.raises(SettingError, match=rf"no tokenizer can be loaded from {name}: no network"):
        load_tokenizer(name)

    assert asked == [name]


@pytest.mark.parametrize("name", ["models/tokenizer.json", "./Llama-3.1-8B", "models/spiece.model"])
def test_a_path_is_never_asked_of_the_hub(name, monkeypatch):
    monkeypatch.setattr("transformers.AutoTokenizer", None)

    with pytest.raises(SettingError, match="there is no tokenizer"):
        load_tokenizer(name)


def test_where_there_is_no_tokenizer_the_error_says_what_would_do(tmp_path):
    with pytest.raises(SettingError, match=r"there is no tokenizer .*; pass a tokenizer\.json"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(SettingError, match="got int"):
        load_tokenizer(5)
    with pytest.raises((SettingError, MissingExtraError), match=str(tmp_path)):
        load_tokenizer(tmp_path)
    for name, content in (("tokenizer_config.json", "["), ("chat_template.jinja", b"\xff")):
        folder = tmp_path / name[:4]
        folder.mkdir()
        save_folder(folder, {})
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(SettingError, match=name):
            load_tokenizer(folder)


SHORT_TEXTS = ["def one():\n    return 1\n", "", "żółć 🦆\x00", "def two():\n    return 2\n"] * 30


def test_documents_come_back_from_their_tokens_whatever_their_characters():
    tokenizer = train_bpe(SHORT_TEXTS[::4], 300)

    tokens, offsets = load_tokenizer(tokenizer).encode(SHORT_TEXTS)

    assert tokens.dtype == np.int32
    assert offsets.dtype == np.int64
    assert offsets[0] == 0
    assert offsets[-1] == len(tokens)
    back = [tokenizer.decode(tokens[a:b].tolist()) for a, b in zip(offsets, offsets[1:])]
    assert back == SHORT_TEXTS


def test_more_documents_than_a_batch_keep_their_order():
    tokenizer = train_bpe(SHORT_TEXTS, 260)
    texts = [str(number) for number in range(2500)]

    tokens, offsets = load_tokenizer(tokenizer).encode(texts)

    assert len(offsets) == 2501
    assert tokenizer.decode(tokens[offsets[1700] : offsets[1701]].tolist()) == "1700"


def test_the_same_texts_give_the_same_vocabulary():
    assert train_bpe(SHORT_TEXTS, 320).get_vocab() == train_bpe(SHORT_TEXTS, 320).get_vocab()


def test_the_vocabulary_holds_every_byte_and_never_more_than_asked():
    assert train_bpe(["aaaa"], 256).get_vocab_size() == 256
    assert 256 < train_bpe(SHORT_TEXTS, 290).get_vocab_size() <= 290


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(SettingError, match="at least 256"):
        train_bpe(SHORT_TEXTS, 255)


def test_no_texts_give_no_tokens():
    tokens, offsets = load_tokenizer(train_bpe(SHORT_TEXTS, 256)).encode([])

    assert len(tokens) == 0
    assert offsets.tolist() == [0]

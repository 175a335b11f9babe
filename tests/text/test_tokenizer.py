"""Tokenizers from files, folders, objects and functions: ids, specials and templates, here and in other processes."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.tokenizer_kinds import TEXTS, byte_bpe, llama_bpe, split_bpe
from tests.text.tokenizer_folders import FAST, FORMS, SPECIAL, Form
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from varlen.documents.source import open_source
from varlen.errors import MissingExtraError, SettingError
from varlen.text.load_tokenizer import _MODEL_TYPES, load_tokenizer, train_bpe
from varlen.text.tokenizer import ByteTokenizer, FastTokenizer, FunctionTokenizer

SOME_TEXTS = ["hello world", "", "def f():\n    return 1", "żółć 🦆"]


def make_backend(*, bos: str | None = "<s>", eos: str | None = "</s>") -> Tokenizer:
    """A small byte-level tokenizer that puts BOS before each text and EOS after, as asked."""
    backend = train_bpe(SOME_TEXTS * 9, 280)
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
    pieces = ["<unk>", "</s>", "▁", *sorted(set("".join(SOME_TEXTS) + "user\nHello thereHi, you") - {" "})]
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

    for text in SOME_TEXTS:
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

    for text in SOME_TEXTS:
        assert ids_of(made, text) == fast(text, add_special_tokens=False)["input_ids"]
        assert [*made.specials.prefix_ids, *ids_of(made, text)] == fast(text)["input_ids"]
    assert made.specials.eos_id == fast.eos_token_id
    assert made.specials.chat_templates == {"default": "T", "rag": "no"}


def test_a_function_may_take_a_text_or_a_list_of_them():
    one = load_tokenizer(lambda text: list(text.encode()))
    several = load_tokenizer(lambda texts: [np.array(list(text.encode())) for text in texts])

    for made in (one, several):
        assert isinstance(made, FunctionTokenizer)
        tokens, offsets = made.encode(SOME_TEXTS)
        assert tokens.tolist() == list("".join(SOME_TEXTS).encode())
        assert offsets.tolist() == np.cumsum([0, *(len(text.encode()) for text in SOME_TEXTS)]).tolist()


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


os.environ.setdefault("HF_HUB_OFFLINE", "1")
PLAIN = [form for form in FORMS if form.is_plain]
OTHER = [form for form in FORMS if not form.is_plain]
WITHOUT_TRANSFORMERS = """
import sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "torch"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refused())
"""


def names(forms: list[Form]) -> list[str]:
    return [form.name for form in forms]


def ids_in(made: Any, texts: list[str]) -> list[list[int]]:
    tokens, offsets = made.encode(texts)
    return [tokens[a:b].tolist() for a, b in zip(offsets.tolist(), offsets.tolist()[1:])]


def auto(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def run(code: str, *words: str) -> Any:
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS, ids=names(FORMS))
def test_a_folder_gives_the_ids_the_specials_and_the_templates_of_transformers(form, tmp_path):
    folder = form.write(tmp_path / "folder")
    try:
        wanted = auto(folder)
    except Exception:
        with pytest.raises(SettingError, match="no tokenizer can be loaded from"):
            load_tokenizer(folder)
        pytest.skip("transformers can't load it here")

    made = load_tokenizer(folder)
    again = pickle.loads(pickle.dumps(made))

    expected = [wanted(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert ids_in(made, TEXTS) == ids_in(again, TEXTS) == expected
    for text in ("hello", "user and assistant"):
        whole = [*made.specials.prefix_ids, *ids_in(made, [text])[0]]
        assert wanted(text)["input_ids"][: len(whole)] == whole
    assert (made.specials.eos_id, made.specials.pad_id) == (wanted.eos_token_id, wanted.pad_token_id)
    if wanted.bos_token_id in wanted("hello")["input_ids"][:1]:
        assert made.specials.prefix_ids == (wanted.bos_token_id,)
    assert made.specials.texts == wanted.special_tokens_map
    template = wanted.chat_template
    assert made.specials.chat_templates == (
        {"default": template} if isinstance(template, str) else template or {}
    )
    assert set(wanted.all_special_tokens) <= made.specials.end_marks
    assert made.vocab_size == max(wanted.get_vocab().values()) + 1
    assert again == made or again.fingerprint == made.fingerprint


@pytest.mark.filterwarnings("ignore")
def test_every_folder_goes_to_another_process_as_what_it_became_here(tmp_path):
    sent, expected = [], []
    for number, form in enumerate(FORMS):
        folder = form.write(tmp_path / str(number))
        try:
            made = load_tokenizer(folder)
        except SettingError:
            continue
        if isinstance(made, FastTokenizer):
            sent.append(made)
            expected.append(ids_in(made, TEXTS))
    (tmp_path / "sent").write_bytes(pickle.dumps(sent))

    got = run(
        "import json, pickle, sys\n"
        "made = pickle.load(open(sys.argv[1], 'rb'))\n"
        "texts = json.loads(sys.argv[2])\n"
        "ids = []\n"
        "for one in made:\n"
        "    tokens, bounds = one.encode(texts)\n"
        "    ids.append([tokens[a:b].tolist() for a, b in zip(bounds, bounds[1:])])\n"
        "print(json.dumps([ids, sorted({name.split('.')[0] for name in sys.modules})]))",
        str(tmp_path / "sent"),
        json.dumps(TEXTS),
    )

    assert len(sent) >= 45
    assert got[0] == expected
    assert not {"transformers", "torch"} & set(got[1])


def test_workers_of_the_loader_and_of_index_read_by_what_was_sent(tmp_path):
    folder = Form(name="", backend=split_bpe, config={**FAST, **SPECIAL, "split_special_tokens": True}).write(
        tmp_path / "folder"
    )
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{text} {i}"}) + "\n" for i in range(40) for text in TEXTS))
    wanted = auto(folder)

    code = (
        "import json, sys\n"
        "import varlen as vl\n"
        "ids = []\n"
        "with vl.PackedLoader(sys.argv[1], sys.argv[2], capacity=4096, global_batch_size=1, mode='streaming',\n"
        "                     shuffle=False, worker=sys.argv[3]) as loader:\n"
        "    for batch in loader:\n"
        "        ids += batch.input_ids[batch.segment_ids >= 0].tolist()\n"
        "print(json.dumps(sorted(ids)))"
    )
    got = run(code, str(texts), str(folder), "process")

    expected: list[int] = []
    for line in texts.read_text().splitlines():
        whole = wanted(json.loads(line)["text"])["input_ids"]
        expected += [*whole, wanted.eos_token_id]
    assert got == sorted(expected)


@pytest.mark.parametrize("form", PLAIN, ids=names(PLAIN))
def test_a_plain_folder_is_read_without_transformers(form, tmp_path):
    folder = form.write(tmp_path / "folder")
    with_it = load_tokenizer(folder)

    got = run(
        WITHOUT_TRANSFORMERS + "import json\nfrom varlen.text.load_tokenizer import load_tokenizer\n"
        "made = load_tokenizer(sys.argv[1])\n"
        "print(json.dumps([made.fingerprint, made.encode(json.loads(sys.argv[2]))[0].tolist()]))",
        str(folder),
        json.dumps(TEXTS),
    )

    assert got == [with_it.fingerprint, with_it.encode(TEXTS)[0].tolist()]


def test_without_transformers_others_are_refused_by_the_file_and_the_key(tmp_path):
    folders = [str(form.write(tmp_path / str(number))) for number, form in enumerate(OTHER)]

    got = run(
        WITHOUT_TRANSFORMERS + "import json\nfrom varlen.errors import MissingExtraError\n"
        "from varlen.text.load_tokenizer import load_tokenizer\n"
        "said = []\n"
        "for folder in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        load_tokenizer(folder)\n"
        "    except MissingExtraError as error:\n"
        "        said.append(str(error))\n"
        "print(json.dumps(said))",
        json.dumps(folders),
    )

    assert len(got) == len(OTHER)
    assert all(
        "takes transformers to be read" in said and 'pip install "varlen[train]"' in said for said in got
    )
    told = {form.name: said for form, said in zip(OTHER, got)}
    assert "in added_tokens.json, and not so in tokenizer.json" in told["more added_tokens.json"]
    assert "'split_special_tokens' in tokenizer_config.json" in told["split_special_tokens"]
    assert "'add_prefix_space' in tokenizer_config.json" in told["add_prefix_space"]
    assert (
        "names '<|im_end|>' as eos_token in tokenizer_config.json" in told["an EOS that tokenizer.json lacks"]
    )
    assert "another eos_token in special_tokens_map.json" in told["stale special_tokens_map"]
    assert "tokenizer_class 'LlamaTokenizer'" in told["llama 2"]
    assert "holds no tokenizer.json" in told["slow bert"]
    assert "model_type 'qwen2' in config.json" in told["qwen2 of the general class"]


def test_models_that_are_taken_for_plain_have_a_backend_alone_in_transformers(tmp_path):
    for model_type in sorted(_MODEL_TYPES):
        form = Form(
            name="",
            backend=split_bpe,
            config={**FAST, **SPECIAL},
            files={"config.json": {"model_type": model_type}},
        )

        assert type(auto(form.write(tmp_path / model_type))).__name__ == "TokenizersBackend", model_type


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}},
        {"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizerFast"]}},
    ],
)
def test_code_of_a_folder_is_never_run(config, tmp_path):
    form = Form(name="", config=config, files={"own.py": "open('RUN', 'w')\nclass OwnTokenizer: pass\n"})
    folder = form.write(tmp_path / "folder")

    with pytest.raises(
        SettingError, match=r"needs code of its own \(auto_map in tokenizer_config\.json\).*pass the object"
    ):
        load_tokenizer(folder)

    assert not list(tmp_path.rglob("RUN"))


def test_a_file_is_read_by_itself_and_what_lies_beside_it_is_told(tmp_path, caplog):
    folder = Form(name="", config={**FAST, "eos_token": "<|im_end|>"}).write(tmp_path / "folder")

    made = load_tokenizer(folder / "tokenizer.json")

    assert ids_in(made, TEXTS) == [byte_bpe().encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert "tokenizer_config.json beside it may add tokens" in caplog.text


def changed(kind: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=split_bpe(), bos_token="<s>", eos_token="</s>")
    if kind == "tokens":
        made.add_tokens(["<extra>", AddedToken("hello", lstrip=True)])
    elif kind == "special":
        made.add_special_tokens({"eos_token": "<eot>", "pad_token": "<pad>"})
    elif kind == "begin":
        made.add_bos_token, made.add_eos_token = True, True
    elif kind == "no begin":
        made.add_bos_token = False
    elif kind == "split":
        made.split_special_tokens = True
    elif kind == "templates":
        made.chat_template = {"default": "D", "tool_use": "T"}
    elif kind == "padding":
        made.backend_tokenizer.enable_padding(length=99)
        made.backend_tokenizer.enable_truncation(2)
    elif kind == "backend":
        made.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == "own call":

        class Shouting(PreTrainedTokenizerFast):
            def _encode_plus(self, text, *words, **more):
                return super()._encode_plus(
                    [one.upper() for one in text] if isinstance(text, list) else text.upper(), *words, **more
                )

        made = Shouting(tokenizer_object=split_bpe(), bos_token="<s>", eos_token="</s>")
    return made


KINDS = [
    "as it was",
    "tokens",
    "special",
    "begin",
    "no begin",
    "split",
    "templates",
    "padding",
    "backend",
    "own call",
]


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_is_taken_as_it_is_now(kind):
    wanted = changed(kind)

    made = load_tokenizer(wanted)
    if kind != "own call":  # a class of this test can't be sent
        made = pickle.loads(pickle.dumps(made))

    assert ids_in(made, TEXTS) == [wanted(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    whole = [*made.specials.prefix_ids, *ids_in(made, ["hello"])[0]]
    assert wanted("hello")["input_ids"][: len(whole)] == whole
    assert len(made.specials.prefix_ids) == (kind != "no begin")
    assert (made.specials.eos_id, made.specials.pad_id) == (wanted.eos_token_id, wanted.pad_token_id)
    assert made.specials.chat_templates == (wanted.chat_template or {})
    assert made.specials.texts == wanted.special_tokens_map


def test_a_switch_that_no_file_holds_is_kept_and_sent(tmp_path):
    backend = split_bpe()
    backend.encode_special_tokens = True

    made = pickle.loads(pickle.dumps(load_tokenizer(backend)))

    assert ids_in(made, TEXTS) == [backend.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert made.fingerprint != load_tokenizer(split_bpe()).fingerprint


def test_a_tokenizer_that_gives_other_ids_each_time_or_holds_python_is_refused(tmp_path):
    spec = json.loads(byte_bpe().to_str())
    spec["model"]["dropout"] = 0.5
    (tmp_path / "t.json").write_text(json.dumps(spec))

    with pytest.raises(SettingError, match=r"has dropout 0\.5 and gives other ids each time"):
        load_tokenizer(tmp_path / "t.json")

    class Words:
        def pre_tokenize(self, text):
            text.split(lambda number, part: [part])

    backend = byte_bpe()
    backend.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Words())
    with pytest.raises(SettingError, match="Custom PreTokenizer cannot be serialized"):
        load_tokenizer(backend)


def test_a_vocabulary_without_the_usual_words_still_says_what_it_puts_first():
    backend = Tokenizer(models.WordLevel({"1": 0, "<s>": 1}, unk_token="1"))
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])

    assert load_tokenizer(backend).specials.prefix_ids == (1,)


@pytest.mark.parametrize("make", [split_bpe, llama_bpe])
def test_chats_are_cut_only_where_no_mark_takes_what_stands_beside_it(make, tmp_path):
    backend = make()
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False, rstrip=True)])
    folder = Form(name="", backend=lambda: backend, config={**FAST, **SPECIAL}).write(tmp_path / "folder")
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello you"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat * 2}) + "\n")

    source = open_source(tmp_path / "chats.jsonl", folder, chat_template=template, append_eos=False)
    [documents] = source.read(source.parts()[0])

    wanted = auto(folder)
    wanted.chat_template = template
    expected = wanted.apply_chat_template(chat * 2, tokenize=True, return_dict=False)
    assert documents.tokens.tolist()[: len(expected)] == expected
    assert np.asarray(documents.loss_mask).any()


def test_real_tokenizers_are_read_as_transformers_reads_them(tmp_path):
    files = sorted((Path(__file__).parents[2] / "../shared/data/tokenizers").glob("*.tokenizer.json"))
    if not files:
        pytest.skip("no real tokenizers beside the checkout")
    for file in files:
        folder = tmp_path / file.name.partition(".")[0]
        folder.mkdir()
        (folder / "tokenizer.json").symlink_to(file.resolve())
        (folder / "tokenizer_config.json").write_text(json.dumps({**FAST, "eos_token": "<|endoftext|>"}))

        made, wanted = load_tokenizer(folder), auto(folder)

        assert ids_in(made, TEXTS) == [wanted(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
        assert made.specials.eos_id == wanted.eos_token_id


def test_a_name_of_the_hub_takes_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(MissingExtraError, match=r"org/name is a name on the hub, so it takes transformers"):
        load_tokenizer("org/name")

"""Folders of tokenizers against AutoTokenizer: ids, specials and templates, here and in other processes."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.tokenizer_kinds import TEXTS, byte_bpe, llama_bpe, split_bpe
from tests.text.tokenizer_folders import FAST, FORMS, SPECIAL, Form
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from varlen.documents.source import open_source
from varlen.errors import MissingExtraError, SettingError
from varlen.text.load_tokenizer import _MODEL_TYPES, load_tokenizer
from varlen.text.tokenizer import FastTokenizer

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


def ids_of(made: Any, texts: list[str]) -> list[list[int]]:
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
    assert ids_of(made, TEXTS) == ids_of(again, TEXTS) == expected
    for text in ("hello", "user and assistant"):
        whole = [*made.specials.prefix_ids, *ids_of(made, [text])[0]]
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
            expected.append(ids_of(made, TEXTS))
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

    assert ids_of(made, TEXTS) == [byte_bpe().encode(text, add_special_tokens=False).ids for text in TEXTS]
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

    assert ids_of(made, TEXTS) == [wanted(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    whole = [*made.specials.prefix_ids, *ids_of(made, ["hello"])[0]]
    assert wanted("hello")["input_ids"][: len(whole)] == whole
    assert len(made.specials.prefix_ids) == (kind != "no begin")
    assert (made.specials.eos_id, made.specials.pad_id) == (wanted.eos_token_id, wanted.pad_token_id)
    assert made.specials.chat_templates == (wanted.chat_template or {})
    assert made.specials.texts == wanted.special_tokens_map


def test_a_switch_that_no_file_holds_is_kept_and_sent(tmp_path):
    backend = split_bpe()
    backend.encode_special_tokens = True

    made = pickle.loads(pickle.dumps(load_tokenizer(backend)))

    assert ids_of(made, TEXTS) == [backend.encode(text, add_special_tokens=False).ids for text in TEXTS]
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

        assert ids_of(made, TEXTS) == [wanted(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
        assert made.specials.eos_id == wanted.eos_token_id


def test_a_name_of_the_hub_takes_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(MissingExtraError, match=r"org/name is a name on the hub, so it takes transformers"):
        load_tokenizer("org/name")

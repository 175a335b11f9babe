"""The tokenizer of a run: the model's own by default, compared with the data by name, and saved beside the model."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tokenizer_kinds import byte_bpe, split_bpe
from tests.support.training import LLAMA, Notes
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from varlen.documents.source import open_source
from varlen.errors import SettingError, SourceError, StateError
from varlen.offline.index import index_source
from varlen.text.load_tokenizer import load_tokenizer
from varlen.train.model import model_config, saved_dtype
from varlen.train.settings import ModelSettings
from varlen.train.tokens import run_tokenizer
from varlen.train.trainer import train

CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "chat_template": "T",
}


def write_tokenizer(folder: Path, make: Any = split_bpe, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    make().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG | config))
    return folder


def write_model(folder: Path, dtype: torch.dtype = torch.float32, vocab_size: int = 420, **more: Any) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(**(LLAMA | {"vocab_size": vocab_size, "attention_dropout": 0.0} | more))
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text(
        "".join(json.dumps({"text": "hello you, what is 12 + 34? " * 4}) + "\n" for _ in range(60))
    )
    return path


@pytest.fixture
def model(tmp_path) -> Path:
    return write_tokenizer(write_model(tmp_path / "tiny", torch.bfloat16))


def settings_of(source: Path, output: Path, model: Any, **changes: Any) -> Any:
    from tests.support.training import table

    from varlen.train.configuration import as_settings
    from varlen.train.settings import TrainSettings

    made = table(source, output, **changes)
    made["model"] = {"path": str(model)} if not isinstance(model, dict) else model
    made["run"]["steps"] = 2
    return as_settings(TrainSettings, made, "")


def trained(source: Path, output: Path, model: Any, **changes: Any) -> Notes:
    notes = Notes()
    train(settings_of(source, output, model, **changes), notes)
    return notes


def same_ids(folder: Path, other: Path) -> bool:
    texts = ["hello you", "a<s>b</s><|im_end|>\nc", "żółć 🦆"]
    one, two = (AutoTokenizer.from_pretrained(str(place)) for place in (folder, other))
    return [one(text)["input_ids"] for text in texts] == [two(text)["input_ids"] for text in texts] and (
        one.get_vocab() == two.get_vocab()
    )


@pytest.mark.parametrize("mode", ["indexed", "streaming"])
def test_documents_become_tokens_of_the_models_own_tokenizer_which_is_saved_with_it(
    texts, model, tmp_path, mode, caplog
):
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))

    with caplog.at_level(logging.WARNING):
        notes = trained(texts, tmp_path / "run", model, data__mode=mode, data__cache=str(tmp_path / "cache"))

    wanted = AutoTokenizer.from_pretrained(str(model))
    length = len(wanted("hello you, what is 12 + 34? " * 4)["input_ids"]) + 1
    assert notes.steps[0].tokens % length == 0
    out = tmp_path / "run" / "model"
    assert same_ids(out, model)
    assert AutoTokenizer.from_pretrained(str(out)).chat_template == "T"
    saved = AutoModelForCausalLM.from_pretrained(str(out), dtype="auto")
    assert saved.dtype == torch.bfloat16
    assert json.loads((out / "config.json").read_bytes())["dtype"] == "bfloat16"
    assert saved.generation_config.eos_token_id == [1, 3]
    assert "bytes" not in caplog.text
    assert not notes.said


@pytest.mark.parametrize(
    ("asked", "stored", "dtype"),
    [
        ("auto", torch.float16, torch.float16),
        ("float32", torch.bfloat16, torch.float32),
        ("bfloat16", torch.float32, torch.bfloat16),
    ],
)
def test_the_model_is_saved_in_the_dtype_that_is_asked_for(texts, tmp_path, asked, stored, dtype):
    folder = write_tokenizer(write_model(tmp_path / "tiny", stored))

    trained(texts, tmp_path / "run", {"path": str(folder), "dtype": asked})

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype="auto").dtype == dtype


def test_a_checkpoint_whose_configuration_names_no_dtype_has_that_of_its_weights(tmp_path):
    folder = write_model(tmp_path / "tiny", torch.bfloat16)
    config = json.loads((folder / "config.json").read_bytes())
    for key in ("dtype", "torch_dtype"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    given = ModelSettings(path=str(folder))

    assert saved_dtype(model_config(given, None), given) == torch.bfloat16
    random = ModelSettings(type="llama", settings=LLAMA)
    assert saved_dtype(model_config(random, 9), random) == torch.float32


def test_a_store_of_another_tokenizer_is_refused_by_name_with_the_way_out(texts, model, tmp_path):
    other = write_tokenizer(tmp_path / "other", byte_bpe)
    index_source(open_source(texts, other), tmp_path / "store")
    index_source(open_source(texts), tmp_path / "bytes")
    index_source(open_source(texts, model), tmp_path / "same")

    with pytest.raises(
        SettingError,
        match=r"store holds tokens of the tokenizer other \(.*\), and tiny \(.*--tokenizer .*data\.tokenizer",
    ):
        trained(tmp_path / "store", tmp_path / "run", model)
    with pytest.raises(
        SettingError, match=r"bytes holds tokens of the tokenizer the built-in one, bytes, and tiny"
    ):
        trained(tmp_path / "bytes", tmp_path / "run", model)
    assert not (tmp_path / "run").exists()
    trained(tmp_path / "same", tmp_path / "run", model)
    assert same_ids(tmp_path / "run" / "model", model)


def test_a_packed_set_of_another_tokenizer_is_refused_by_name(texts, model, tmp_path):
    from varlen.offline.pack import PackSettings, pack_source

    other = write_tokenizer(tmp_path / "other", byte_bpe)
    pack_source(open_source(texts, other), tmp_path / "packed", PackSettings(capacity=256))
    pack_source(open_source(texts, model), tmp_path / "same", PackSettings(capacity=256))

    with pytest.raises(SettingError, match=r"packed holds tokens of the tokenizer other \(.*\), and tiny"):
        trained(tmp_path / "packed", tmp_path / "run", model, data__cache=str(tmp_path / "cache"))
    trained(
        tmp_path / "same",
        tmp_path / "run",
        model,
        data__cache=str(tmp_path / "cache"),
        data__overlong="split",
    )


def test_whoever_names_the_tokenizer_of_the_data_may_train_a_model_on_its_ids(texts, model, tmp_path):
    other = write_tokenizer(tmp_path / "other", byte_bpe)
    index_source(open_source(texts, other), tmp_path / "store")

    for number, source in enumerate((tmp_path / "store", texts)):
        output = tmp_path / f"run{number}"
        notes = trained(
            source, output, model, data__tokenizer=str(other), data__cache=str(tmp_path / "cache")
        )

        assert same_ids(output / "model", other)
        [said] = notes.said
        assert said.startswith("the model's own tokenizer, tiny (")
        assert "isn't used: data.tokenizer is other (" in said
    with pytest.raises(SettingError, match=r"store holds tokens of the tokenizer other \(.*\), and tiny \("):
        trained(tmp_path / "store", tmp_path / "run2", model, data__tokenizer=str(model))


def test_bytes_are_told_where_a_model_has_no_tokenizer_or_they_are_asked_for(texts, model, tmp_path, caplog):
    bare = write_model(tmp_path / "bare")

    for number, (path, changes) in enumerate(((bare, {}), (model, {"data__tokenizer": "bytes"}))):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            trained(texts, tmp_path / f"run{number}", path, data__mode="streaming", **changes)
        assert "tokens are bytes" in caplog.text
        assert not (tmp_path / f"run{number}" / "model" / "tokenizer.json").exists()


def test_random_weights_know_the_tokenizer_that_is_named_and_it_is_saved(texts, tmp_path):
    folder = write_tokenizer(tmp_path / "tok", additional_special_tokens=["<extra>"])
    small = {"type": "llama", "settings": LLAMA}

    trained(texts, tmp_path / "run", small, data__tokenizer=str(folder), data__cache=str(tmp_path / "cache"))

    out = tmp_path / "run" / "model"
    assert json.loads((out / "config.json").read_bytes())["vocab_size"] == load_tokenizer(folder).vocab_size
    assert same_ids(out, folder)
    alone = tmp_path / "alone.json"
    split_bpe().save(str(alone))
    trained(texts, tmp_path / "run1", small, data__tokenizer=str(alone), data__cache=str(tmp_path / "cache"))
    made = AutoTokenizer.from_pretrained(str(tmp_path / "run1" / "model"))
    assert (made("hello you")["input_ids"], made.eos_token) == (split_bpe().encode("hello you").ids, "</s>")


def test_a_tokenizer_that_means_something_else_beside_this_model_is_told(texts, tmp_path, caplog):
    folder = write_tokenizer(tmp_path / "tok")
    qwen = {"type": "qwen2", "settings": {key: LLAMA[key] for key in LLAMA if key != "attention_dropout"}}

    with caplog.at_level(logging.WARNING):
        trained(
            texts, tmp_path / "run", qwen, data__tokenizer=str(folder), data__cache=str(tmp_path / "cache")
        )

    assert same_ids(tmp_path / "run" / "model", folder) or "AutoTokenizer doesn't read" in caplog.text


def test_a_template_that_is_named_is_saved(tmp_path, model):
    (tmp_path / "chats.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]})
        + "\n"
    )
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    )
    (tmp_path / "chat.jinja").write_text(template)

    trained(
        tmp_path / "chats.jsonl", tmp_path / "run", model, data__chat_template=str(tmp_path / "chat.jinja"),
        data__mode="streaming", run__epochs=9, data__global_batch_size=1, data__micro_batch_size=1,
    )  # fmt: skip

    assert AutoTokenizer.from_pretrained(str(tmp_path / "run" / "model")).chat_template == template


ASKED = [{"role": "user", "content": "what is 12?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "hello"}]


def write_chats(path: Path) -> Path:
    path.write_text((json.dumps({"messages": ANSWERED}) + "\n") * 40)
    return path


def with_end() -> Any:
    made = split_bpe()
    made.add_special_tokens(["<end>"])
    return made


@pytest.mark.parametrize("way", ["store", "documents", "streaming", "prompts"])
def test_a_model_of_a_tokenizer_without_a_template_can_be_chatted_with(tmp_path, way, caplog):
    folder = write_tokenizer(write_model(tmp_path / "tiny"), chat_template=None)
    source = write_chats(tmp_path / "chats.jsonl")
    if way == "store":
        index_source(open_source(source, folder), tmp_path / "store")
        source = tmp_path / "store"
    if way == "prompts":
        source.write_text((json.dumps({"prompt": ASKED, "completion": ANSWERED[1:]}) + "\n") * 40)
    changes = {"data__cache": str(tmp_path / "cache")} | (
        {"data__mode": "streaming"} if way == "streaming" else {}
    )

    with caplog.at_level(logging.WARNING):
        trained(source, tmp_path / "run", folder, **changes, eval__sets={"same": str(source)})

    out = tmp_path / "run" / "model"
    saved = AutoTokenizer.from_pretrained(str(out))
    text = saved.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nwhat is 12?<|im_end|>\n<|im_start|>assistant\n"
    assert saved.apply_chat_template(ANSWERED, tokenize=False) == f"{text}hello<|im_end|>\n"
    ends = AutoModelForCausalLM.from_pretrained(str(out)).generation_config.eos_token_id
    assert ends == [2, saved.eos_token_id, saved.convert_tokens_to_ids("<|im_end|>")]
    assert same_ids(out, folder)
    assert caplog.text.count("has no chat template") == (way != "store")
    assert "data.chat_template" in caplog.text or way == "store"
    assert "stop_strings" not in caplog.text
    if way != "store":  # the exported tokenizer has that template, although it equals ours
        notes = [open_source(source, str(one)).template_note() for one in (folder, out)]
        assert [note is None for note in notes] == [False, True]


def test_a_turn_that_no_single_token_ends_is_told_with_what_follows(tmp_path, caplog):
    folder = write_tokenizer(write_model(tmp_path / "plain"), byte_bpe, chat_template=None)
    chats = write_chats(tmp_path / "chats.jsonl")

    with caplog.at_level(logging.WARNING):
        trained(chats, tmp_path / "run", folder, data__mode="streaming")

    out = tmp_path / "run" / "model"
    length = len(AutoTokenizer.from_pretrained(str(out))("<|im_end|>", add_special_tokens=False)["input_ids"])
    assert f"<|im_end|>, the end of a turn, is {length} tokens of this tokenizer" in caplog.text
    assert 'pass stop_strings="<|im_end|>"' in caplog.text
    assert "<|im_start|>" in AutoTokenizer.from_pretrained(str(out)).chat_template


def test_texts_add_no_chat_template_and_no_end(texts, tmp_path):
    folder = write_tokenizer(write_model(tmp_path / "tiny"), chat_template=None)

    trained(texts, tmp_path / "run", folder, data__mode="streaming")

    out = tmp_path / "run" / "model"
    assert AutoTokenizer.from_pretrained(str(out)).chat_template is None
    assert AutoModelForCausalLM.from_pretrained(str(out)).generation_config.eos_token_id == 2


def test_the_end_of_the_models_own_template_ends_generation(tmp_path):
    ours = "{% for m in messages %}{{ m.role + ': ' + m.content + '<end>' }}{% endfor %}"
    folder = write_tokenizer(write_model(tmp_path / "tiny"), with_end, chat_template=ours)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "temperature": 0.5}))

    trained(write_chats(tmp_path / "chats.jsonl"), tmp_path / "run", folder, data__mode="streaming")

    out = tmp_path / "run" / "model"
    made = AutoTokenizer.from_pretrained(str(out))
    held = json.loads((out / "generation_config.json").read_bytes())
    assert (made.chat_template, held["temperature"]) == (ours, 0.5)
    ends = {1, made.eos_token_id, made.convert_tokens_to_ids("<end>")}
    assert set(held["eos_token_id"]) == ends


def test_a_run_goes_on_with_its_tokenizer_and_with_no_other(texts, model, tmp_path):
    given = {"data__mode": "streaming", "run__checkpoint_every": 1}
    trained(texts, tmp_path / "run", model, **given)
    other = write_tokenizer(tmp_path / "other", byte_bpe)

    with pytest.raises(StateError, match=r"tokenizer was tiny \(.*\) and is other \("):
        trained(texts, tmp_path / "run", model, **given, data__tokenizer=str(other))
    trained(texts, tmp_path / "run", model, **given, data__tokenizer=str(write_tokenizer(tmp_path / "copy")))


def test_ready_tokens_of_no_tokenizer_ask_for_the_size_of_the_vocabulary(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text((json.dumps({"input_ids": [1, 2, 3, 300]}) + "\n") * 9)
    small = {"type": "llama", "settings": LLAMA}

    with pytest.raises(SettingError, match=r"set model\.settings\.vocab_size"):
        trained(path, tmp_path / "run", small, data__cache=str(tmp_path / "cache"))
    assert (
        run_tokenizer(settings_of(path, tmp_path / "run", small).data, ModelSettings(type="llama")).vocab_size
        is None
    )


def test_a_name_on_the_hub_is_a_model_and_its_tokenizer(texts, model, tmp_path):
    (model / "generation_config.json").write_text('{"temperature": 0.7, "do_sample": true}')
    place = tmp_path / "home" / "hub" / "models--org--tiny"
    (place / "snapshots").mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    model.rename(place / "snapshots" / ("0" * 40))
    config = tmp_path / "c.toml"
    config.write_text(
        f'[data]\nsource = "{texts}"\ncapacity = 128\nglobal_batch_size = 2\nmode = "streaming"\n'
        f'[model]\npath = "org/tiny"\n[run]\noutput = "{tmp_path / "run"}"\nsteps = 1\n'
    )

    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    environment.pop("HF_HUB_CACHE", None)
    adapter = ["--set", "adapter.rank=2", "--set", f"run.output={tmp_path / 'adapter'}"]
    for more in ([], adapter):
        command = [sys.executable, "-m", "varlen", "train", str(config), *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        assert "bytes" not in done.stderr

    for name in ("run", "adapter"):
        folder = tmp_path / name / "model"
        assert same_ids(folder, place / "snapshots" / ("0" * 40))
        assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.7
    made_for = json.loads((tmp_path / "adapter" / "model" / "adapter_config.json").read_text())
    assert made_for["base_model_name_or_path"] == "org/tiny"


@pytest.mark.parametrize("path", ["./nowhere", "a/b/c", "/nowhere", "no such model"])
def test_what_is_neither_a_folder_nor_a_name_is_refused(texts, tmp_path, path):
    with pytest.raises(SourceError, match=r"holds no config\.json; name a folder .* or a model on the hub"):
        trained(texts, tmp_path / "run", {"path": path}, data__tokenizer="bytes")

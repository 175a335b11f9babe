"""What a user names is found and made, or refused in a sentence; no code of a checkpoint is ever run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.hf_models import SMALL, VOCABULARY, make
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig

import varlen as vl
from varlen.adapters import hf
from varlen.errors import ModelError
from varlen.verify.models.loading import load_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(LlamaConfig(**SMALL), "eager", torch.float32).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def config(path: Path, **settings: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return path


def tokenizer(size: int) -> Tokenizer:
    return Tokenizer(WordLevel({f"word{i}": i for i in range(size)}, unk_token="word0"))


def test_a_family_is_made_tiny():
    loaded = load_model("qwen3", dtype=torch.float64)

    assert type(loaded.model).__name__ == "Qwen3ForCausalLM"
    assert loaded.model.dtype is torch.float64
    assert loaded.notes == ("a tiny qwen3 with random weights",)


def test_a_folder_is_loaded_with_its_weights(folder):
    loaded = load_model(folder)
    again = make(LlamaConfig(**SMALL), "eager", torch.float32)

    assert loaded.notes == ()
    assert not loaded.model.training
    for name, weight in again.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight)
    assert vl.verify(str(folder), backends=["eager", "varlen"], layouts=["flat"], calls=False).ok


def test_a_folder_without_weights_gives_a_model_of_its_configuration(folder):
    (folder / "model.safetensors").unlink()
    loaded = load_model(folder)

    assert loaded.model.config.hidden_size == SMALL["hidden_size"]
    assert "holds no weights" in loaded.notes[0]


def test_a_configuration_gives_a_model_with_random_weights_and_is_left_alone():
    given = LlamaConfig(**SMALL)
    before, state = given.to_dict(), torch.get_rng_state()
    report = vl.verify(given, backends=["eager"], layouts=["rows"], calls=False)

    assert report.ok
    assert report.notes == ("random weights, made from the configuration",)
    assert given.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_live_model_is_used_as_it_is():
    model = make(LlamaConfig(**SMALL), "eager", torch.float32)

    assert load_model(model).model is model


def test_a_configuration_too_large_to_be_made_is_refused_before_it_is():
    with pytest.raises(
        ModelError, match=r"has \d+,\d+,\d+,\d+ weights, and varlen makes models of random ones up to"
    ):
        load_model(LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lama", "did you mean llama"),
        ("meta-llama/Llama-9-1T", "models are not downloaded"),
        ("Qwen/Qwen3-0.6B", "models are not downloaded"),
        ("./lama", "models are not downloaded"),
    ],
)
def test_a_name_that_nothing_has_is_refused_with_the_nearest(name, words):
    with pytest.raises(ModelError, match=words):
        load_model(name)


def test_a_file_is_no_folder(folder):
    with pytest.raises(ModelError, match="is a file; name the folder"):
        load_model(folder / "config.json")


def test_a_folder_without_a_configuration_is_no_checkpoint(tmp_path):
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        load_model(tmp_path)


def test_a_configuration_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="can't be read as JSON"):
        load_model(tmp_path)


def test_a_model_that_needs_code_of_its_own_is_refused_and_the_code_not_run(tmp_path):
    trap = tmp_path / "trap"
    path = config(
        tmp_path / "remote",
        model_type="mystery",
        auto_map={"AutoModelForCausalLM": "modeling_mystery.Mystery"},
    )
    (path / "modeling_mystery.py").write_text(f"open({str(trap)!r}, 'w')", encoding="utf-8")
    with pytest.raises(ModelError, match=r"needs code of its own \(modeling_mystery\.Mystery\)"):
        load_model(path)
    assert not trap.exists()


def test_code_beside_a_family_that_transformers_has_is_not_run(folder, tmp_path):
    trap = tmp_path / "trap"
    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    told["auto_map"] = {
        "AutoModelForCausalLM": "modeling_mystery.Mystery",
        "AutoConfig": "modeling_mystery.Config",
    }
    (folder / "config.json").write_text(json.dumps(told), encoding="utf-8")
    (folder / "modeling_mystery.py").write_text(f"open({str(trap)!r}, 'w')", encoding="utf-8")

    assert type(load_model(folder).model).__name__ == "LlamaForCausalLM"
    assert not trap.exists()


def test_a_model_type_that_transformers_lacks_is_refused(tmp_path):
    with pytest.raises(
        ModelError, match="names model type 'mystery', which the installed transformers doesn't have"
    ):
        load_model(config(tmp_path / "m", model_type="mystery"))


def test_a_family_without_a_causal_head_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(ModelError, match="clip is no language model"):
        load_model("clip")
    with pytest.raises(ModelError, match="name qwen2_vl_text, its text part"):
        load_model("qwen2_vl")
    with pytest.raises(ModelError, match="clip is no language model"):
        load_model(config(tmp_path / "m", model_type="clip"))


def test_weights_that_are_broken_are_refused_in_a_sentence(folder):
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelError, match="can't be loaded: "):
        load_model(folder)


def test_quantised_weights_without_their_package_are_refused_in_a_sentence(folder):
    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    told["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(told), encoding="utf-8")
    with pytest.raises(ModelError, match=r"can't be loaded: .*bitsandbytes"):
        load_model(folder)


def test_a_tokenizer_with_ids_that_the_model_does_not_embed_is_refused(folder):
    tokenizer(VOCABULARY + 3).save(str(folder / "tokenizer.json"))
    with pytest.raises(
        ModelError,
        match=rf"has 3 ids that the model doesn't embed, the first {VOCABULARY} \('word{VOCABULARY}'\)",
    ):
        vl.verify(str(folder))
    tokenizer(VOCABULARY).save(str(folder / "tokenizer.json"))
    assert load_model(folder).model is not None


@pytest.mark.parametrize("name", ["vocab.json", "added_tokens.json", "vocab.txt"])
def test_the_files_of_older_tokenizers_are_read_too(folder, name):
    words = {f"word{i}": i for i in range(VOCABULARY + 2)}
    (folder / name).write_text(
        "\n".join(words) if name == "vocab.txt" else json.dumps(words), encoding="utf-8"
    )
    with pytest.raises(
        ModelError, match=r"has 2 ids that the model doesn't embed, the first 97 \('word97'\)"
    ):
        load_model(folder)
    (folder / name).write_text("word" if name == "vocab.txt" else '{"word": 0}', encoding="utf-8")
    assert load_model(folder).model is not None
    if name != "vocab.txt":
        (folder / name).write_text("[]", encoding="utf-8")
        with pytest.raises(ModelError, match=r"the tokenizer's files in .* can't be read"):
            load_model(folder)


def test_a_tokenizer_can_be_given_for_a_live_model():
    model = make(LlamaConfig(**SMALL), "eager", torch.float32)

    assert load_model(model, tokenizer=tokenizer(VOCABULARY)).model is model
    with pytest.raises(ModelError, match=r"model\.resize_token_embeddings"):
        load_model(model, tokenizer=tokenizer(VOCABULARY + 1))


def test_a_tokenizer_that_can_not_be_read_is_refused(folder):
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match=r"tokenizer\.json can't be read"):
        load_model(folder)


def test_a_device_that_there_is_not_is_refused_in_a_sentence():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ModelError, match="can't be moved to cuda"):
        load_model("llama", device="cuda")


def test_a_model_can_be_made_on_a_device():
    loaded = load_model("llama", device="cpu")

    assert hf.unwrap(loaded.model).device.type == "cpu"
    assert loaded.remade is not None
    assert loaded.remade("sdpa").config._attn_implementation == "sdpa"


def test_a_folder_that_only_has_the_name_of_a_family_does_not_hide_it(tmp_path, monkeypatch):
    (tmp_path / "llama").mkdir()
    monkeypatch.chdir(tmp_path)

    assert load_model("llama").notes == ("a tiny llama with random weights",)


def test_an_empty_name_is_none():
    with pytest.raises(ModelError, match="'' is neither a folder nor a model type"):
        load_model("")


def test_weights_that_a_folder_lacks_are_told(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    notes = load_model(folder).notes

    assert notes[0].startswith(
        "1 weights aren't in the folder and are random, the first model.layers.1.mlp.up_proj"
    )


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match="holds an adapter and no model"):
        load_model(tmp_path)


@pytest.mark.parametrize("told", [{"model_type": ["llama"]}, {"auto_map": "code.Model"}, {}])
def test_a_configuration_of_another_shape_is_refused_in_a_sentence(tmp_path, told):
    with pytest.raises(ModelError, match=r"names model type|needs code of its own \(code\.Model\)"):
        load_model(config(tmp_path / "m", **told))


@pytest.mark.parametrize("dtype", ["float16", torch.int8])
def test_a_dtype_that_no_weights_have_is_refused(dtype):
    with pytest.raises(ModelError, match="dtype must be a torch dtype of floating point"):
        load_model("llama", dtype=dtype)


def test_what_is_no_tokenizer_is_refused():
    with pytest.raises(ModelError, match="a tokenizer must have get_vocab"):
        load_model("llama", tokenizer="x")


def test_the_meta_device_is_refused():
    with pytest.raises(ModelError, match="on the meta device nothing is computed"):
        load_model("llama", device="meta")
    with torch.device("meta"):
        model = make_on_meta()
    with pytest.raises(ModelError, match="21 of 21 weights of LlamaForCausalLM are on the meta device"):
        load_model(model)


def make_on_meta() -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL))


def test_copying_a_live_model_draws_nothing_from_the_callers_random_state():
    loaded = load_model(make(LlamaConfig(**SMALL), "eager", torch.float32))
    before = torch.get_rng_state()
    assert loaded.remade is not None
    loaded.remade("sdpa")

    assert torch.equal(torch.get_rng_state(), before)

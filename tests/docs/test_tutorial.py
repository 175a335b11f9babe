"""The tutorial from chats to a model, with its commands as they stand: the hub is a folder with a tiny model."""

import json
import re
from pathlib import Path

import pages
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

TUTORIAL = pages.ROOT / "docs" / "tutorials" / "chats.md"
NAME = "Qwen/Qwen3-0.6B"
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
WORDS = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def write_tokenizer(folder: Path) -> None:
    """As Qwen3's: a byte-level BPE with its marks, and the chat template of Qwen3 as TRL ships it."""
    from trl.chat_template_utils import qwen3_chat_template

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=MARKS, show_progress=False
    )
    backend.train_from_iterator(["What is 2 + 2? 2 + 2 is 4. user assistant"] * 9, trainer)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(qwen3_chat_template)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of the hub that holds one tiny Qwen3."""
    commit = "0" * 40
    place = tmp_path / "home" / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot = place / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=320, **sizes, **heads)).save_pretrained(snapshot)
    write_tokenizer(snapshot)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("VARLEN_JIT", raising=False)  # as readers have it: little work waits for no compiler


@pytest.mark.soak
def test_the_tutorial_leads_from_chats_to_a_model_that_transformers_loads(hub, tmp_path):
    text = (
        TUTORIAL.read_text(encoding="utf-8").replace("```bash\n", "```sh\n").replace("```py\n", "```python\n")
    )
    page = tmp_path / "tutorial.md"
    page.write_text(text, encoding="utf-8")

    records = pages.run(page, tmp_path / "work")

    assert [record.printed for record in records if record.failed] == []
    assert len(records) == len([block for block in pages.blocks(text) if block.language in ("python", "sh")])
    printed = "\n".join(record.printed for record in records)
    assert "360 documents" in printed
    shown = next(block.code for block in pages.blocks(text) if block.language == "text")
    assert shown in "\n".join(line.rstrip() for line in printed.splitlines())
    assert printed.count("360 documents") >= 3  # the broken row is left out
    assert re.search(r"steps +\d+ steps on 1 process", printed)
    out = tmp_path / "work" / "out"
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert {(sample["prompt"], sample["is_chat"]) for sample in samples} == {("What is 2 + 2?", True)}
    losses = [json.loads(line)["loss"] for line in (out / "evaluations.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    assert {path.name for path in (out / "model").iterdir()} >= {"model.safetensors", "chat_template.jinja"}
    assert (tmp_path / "work" / "adapter" / "model" / "model.safetensors").is_file()

"""Make what config.yml names: a Llama of two layers, a tokenizer of words, and 300 documents."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away"]
SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

draw = random.Random(0)
texts = (" ".join(draw.choices(WORDS, k=int(draw.lognormvariate(2.5, 0.7)) + 2)) for _ in range(300))
Path("data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

vocabulary = {word: number for number, word in enumerate([*SPECIAL.values(), *WORDS])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained("model")

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(vocabulary),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=3,
)
LlamaForCausalLM(config).save_pretrained("model")
print(f"300 documents in data.jsonl, {LlamaForCausalLM(config).num_parameters():,} parameters in model")

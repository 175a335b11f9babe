"""TRL's DPOTrainer on preference pairs, without a token of padding in its models.

python examples/trl_dpo.py
"""

import tempfile

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig

from varlen.adapters import hf
from varlen.adapters.trl.dpo import PackedDPOTrainer

END, PADDING = 98, 99


def make_pairs(count=200):
    """Chosen answers count up, rejected ones don't; lengths differ tenfold."""
    draw = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        prompt, *answers = (
            draw.integers(0, END, int(n) + 1) for n in draw.lognormal(2.5, 0.8, 3).clip(1, 90)
        )
        texts = [" ".join(f"<{n}>" for n in numbers) for numbers in (prompt, np.sort(answers[0]), answers[1])]
        rows.append({"prompt": texts[0], "chosen": " " + texts[1], "rejected": " " + texts[2]})
    return Dataset.from_list(rows)


def make_tokenizer():
    made = Tokenizer(models.WordLevel({f"<{n}>": n for n in range(100)}, unk_token="<0>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=f"<{END}>", pad_token=f"<{PADDING}>")


def make_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": PADDING}
    return hf.use_varlen_attention(LlamaForCausalLM(LlamaConfig(vocab_size=100, **ends, **sizes)))


def make_trainer(folder):
    args = DPOConfig(
        output_dir=folder,
        per_device_train_batch_size=1,  # packs of pairs
        gradient_accumulation_steps=4,
        num_train_epochs=2,
        learning_rate=2e-3,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    return PackedDPOTrainer(
        model=make_model(),
        ref_model=make_model(),
        args=args,
        train_dataset=make_pairs(),
        processing_class=make_tokenizer(),
        capacity=512,  # tokens of a pack; leave it out for batches of as many pairs as the arguments say
    )


def main(folder):
    trainer = make_trainer(folder)
    trainer.train()
    packs = trainer.train_dataset
    batches = [trainer.data_collator(packs[number]) for number in range(len(packs))]
    tokens = sum(batch["packed"].num_tokens for batch in batches)
    padded = sum(batch["input_ids"].numel() for batch in batches)
    pairs = [len(packs[number]) for number in range(len(packs))]
    print(f"{sum(pairs)} pairs in {len(packs)} packs of {min(pairs)} to {max(pairs)}")
    print(f"{tokens:,} tokens in the models, {padded:,} with padding")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(made)

"""TRL's SFTTrainer on packed documents, three ways: a packed set, a collator, a loader.

python examples/trl_sft.py packed       # rows packed ahead, by all the set's lengths at once
python examples/trl_sft.py collator     # batches of documents laid end to end
python examples/trl_sft.py loader       # packs made while training, which a checkpoint goes on with exactly
"""

import sys
import tempfile

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from varlen.adapters import hf
from varlen.adapters.hf.trainer import loader_for
from varlen.adapters.trl import DataCollatorForLanguageModeling, pack_dataset
from varlen.adapters.trl.trainer import PackedSFTTrainer

CAPACITY = 256
END, PADDING = 98, 99


def make_documents(count=400):
    draw = np.random.default_rng(0)
    lengths = draw.lognormal(3.5, 0.8, count).clip(3, CAPACITY).astype(int)
    rows = [[*np.sort(draw.integers(0, END, length - 1)).tolist(), END] for length in lengths]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def make_tokenizer():
    words = {f"<{n}>": n for n in range(100)}
    made = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=f"<{END}>", pad_token=f"<{PADDING}>")


def make_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": PADDING}
    return hf.use_varlen_attention(LlamaForCausalLM(LlamaConfig(vocab_size=100, **ends, **sizes)))


def make_trainer(way, folder):
    documents = make_documents()
    args = SFTConfig(
        output_dir=folder,
        per_device_train_batch_size={"packed": 4, "collator": 24, "loader": 4}[way],  # packs, or documents
        num_train_epochs=2,
        learning_rate=2e-3,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        max_length=None,
        padding_free=way == "packed",  # without it the documents of a row would see each other
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    usual = {"model": make_model(), "args": args, "processing_class": make_tokenizer()}
    if way == "packed":
        return SFTTrainer(train_dataset=pack_dataset(documents, CAPACITY, "bfd_split"), **usual)
    if way == "collator":
        collator = DataCollatorForLanguageModeling(pad_token_id=PADDING, padding_free=True)
        return SFTTrainer(train_dataset=documents, data_collator=collator, **usual)
    documents.save_to_disk(f"{folder}/tokens")
    return PackedSFTTrainer(train_loader=loader_for(args, f"{folder}/tokens", capacity=CAPACITY), **usual)


def main(way):
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(way, folder)
        trainer.train()
        if way == "loader":
            stats = trainer.train_loader.stats()
            print(f"packs are {100 * stats.fill_ratio:.1f} % full")
            trainer.train_loader.close()
        elif way == "packed":
            print(f"{len(make_documents())} documents in {len(trainer.train_dataset)} rows")
        steps, tokens = trainer.state.global_step, trainer.state.log_history[-1]["num_tokens"]
        print(f"{way}: {steps} steps, {tokens:,.0f} tokens")


if __name__ == "__main__":
    if not sys.argv[1:] or {*sys.argv[1:]} - {"packed", "collator", "loader"}:
        sys.exit(__doc__)
    for name in sys.argv[1:]:
        main(name)

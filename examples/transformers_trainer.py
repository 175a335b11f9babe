"""transformers' Trainer on packed documents that a loader makes, on any number of processes.

python examples/transformers_trainer.py run                          # trains; a second time, it goes on
torchrun --nproc-per-node 2 examples/transformers_trainer.py run     # the same on two processes
"""

import json
import random
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from varlen.adapters import hf
from varlen.adapters.hf.trainer import PackedTrainer, loader_for  # 1


def write_texts(path, count=600):
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away"]
    draw = random.Random(0)
    texts = [" ".join(draw.choices(words, k=int(draw.lognormvariate(2.5, 0.7)) + 1)) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def make_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=260, bos_token_id=256, eos_token_id=256, **sizes))
    return hf.use_varlen_attention(model)  # the fastest on CPU; on a GPU "flash_attention_2" does as well


def make_trainer(folder):
    folder.mkdir(parents=True, exist_ok=True)
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,  # packs
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=2e-3,
        logging_steps=5,
        save_steps=5,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    texts = folder / "texts.jsonl"
    with args.main_process_first(local=False):
        if not texts.exists():
            write_texts(texts)
    loader = loader_for(args, texts, "bytes", capacity=512, mode="indexed", cache=folder / "cache")  # 2
    held_out = [{"input_ids": list(b"the dog runs over a brown fox"[:length])} for length in (29, 12, 20)]
    return PackedTrainer(  # 3
        model=make_model(),
        args=args,
        train_loader=loader,
        eval_dataset=held_out,
        data_collator=hf.DataCollatorWithFlattening(return_flash_attn_kwargs=True),
    )


def main(folder):
    trainer = make_trainer(folder)
    with trainer.train_loader as loader:
        trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
        stats = loader.stats()
    print(f"{trainer.state.global_step} steps, {trainer.state.epoch:g} epochs")
    print(f"this rank: {stats.batches} batches, {stats.tokens:,} tokens, {100 * stats.fill_ratio:.1f} % full")
    print(f"loss on texts held out: {trainer.evaluate()['eval_loss']:.3f}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))

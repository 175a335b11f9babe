"""A Lightning module over packed documents, stopped after some steps and gone on with from its checkpoint.

python examples/lightning_module.py run 2 4    # on 2 processes; stops after 4 steps
python examples/lightning_module.py run 2      # goes on to the end
"""

import json
import random
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import LlamaConfig, LlamaForCausalLM

from varlen.adapters import hf
from varlen.adapters.lightning import PackedDataModule


def write_documents(path, count=300):
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away"]
    draw = random.Random(0)
    texts = (" ".join(draw.choices(words, k=int(draw.lognormvariate(2.5, 0.7)) + 1)) for _ in range(count))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


class LanguageModel(lightning.LightningModule):
    def __init__(self, folder):
        super().__init__()
        torch.manual_seed(0)
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        self.model, self.folder = LlamaForCausalLM(LlamaConfig(vocab_size=260, **sizes)), folder
        self.step_loss = 0.0

    def training_step(self, batch, _):
        # The sum over targets, times the scale, is this batch's part of the token mean over the whole step.
        loss_sum = self.model(**hf.model_inputs(batch, self.model), num_items_in_batch=1).loss
        loss = loss_sum * batch.loss_scale()
        self.step_loss += loss.detach()
        with (self.folder / f"seen-{self.global_rank}.txt").open("a") as seen:
            seen.writelines(f"{document}\n" for document in batch.document_ids.tolist())
        # Lightning divides by the number of batches that it accumulates; the scale has done so already.
        return loss * self.trainer.accumulate_grad_batches

    def on_before_optimizer_step(self, _):
        mean = self.trainer.strategy.reduce(self.step_loss, reduce_op="mean")
        self.print(f"step {self.global_step + 1}  loss {mean:.3f}")
        self.step_loss = 0.0

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def make_data(folder):
    return PackedDataModule(
        folder / "texts.jsonl",
        "bytes",
        mode="indexed",
        cache=folder / "cache",
        capacity=1024,
        global_batch_size=4,
        micro_batch_size=1,
    )


def train(folder, processes, stop_after):
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "texts.jsonl").exists():
        write_documents(folder / "texts.jsonl")
    checkpoint = folder / "checkpoint.ckpt"
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        accumulate_grad_batches=4
        // processes,  # the loader's global_batch_size over ranks and micro_batch_size
        max_epochs=1,  # an epoch of Lightning is all that the loader gives
        max_steps=stop_after,
        callbacks=[
            ModelCheckpoint(folder, "checkpoint", every_n_train_steps=2, enable_version_counter=False)
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        LanguageModel(folder),
        datamodule=make_data(folder),
        ckpt_path=checkpoint if checkpoint.exists() else None,
    )
    trainer.strategy.barrier()
    if trainer.is_global_zero:
        found = [line for file in folder.glob("seen-*.txt") for line in file.read_text().split()]
        print(f"{len(found)} documents so far, {len(set(found))} different ones, of 300")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    processes, stop_after = (*map(int, sys.argv[2:]), *(1, -1)[len(sys.argv) - 2 :])
    train(Path(sys.argv[1]), processes, stop_after)

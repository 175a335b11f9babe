"""An Accelerate loop over packed documents, stopped after some steps and gone on with, on any number of processes.

torchrun --nproc-per-node 2 examples/accelerate_loop.py run 4    # trains 4 steps, and saves
torchrun --nproc-per-node 2 examples/accelerate_loop.py run      # goes on to the end
"""

import json
import random
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import varlen as vl
from varlen.adapters import hf


def write_documents(path, count=300):
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away"]
    draw = random.Random(0)
    texts = (" ".join(draw.choices(words, k=int(draw.lognormvariate(2.5, 0.7)) + 1)) for _ in range(count))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def make_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=260, **sizes))


def make_loader(folder, accelerator):
    return vl.PackedLoader(
        folder / "texts.jsonl",
        "bytes",
        mode="indexed",
        cache=folder / "cache",
        capacity=1024,
        global_batch_size=4,
        micro_batch_size=1,
        dp_rank=accelerator.process_index,
        dp_world_size=accelerator.num_processes,
    )


def loss_of(model, batch):
    # The sum over targets, times the scale, is this batch's part of the token mean over the whole step.
    return model(**hf.model_inputs(batch, model), num_items_in_batch=1).loss * batch.loss_scale()


def train(folder, stop_after):
    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process and not (folder / "texts.jsonl").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_documents(folder / "texts.jsonl")
    accelerator.wait_for_everyone()

    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
    # The loader doesn't go through `prepare`: each rank's loader gives this rank's batches.
    loader = make_loader(folder, accelerator)
    accelerator.register_for_checkpointing(loader)
    accelerator.gradient_accumulation_steps = loader.micro_batches
    if (folder / "checkpoint").exists():
        accelerator.load_state(str(folder / "checkpoint"))
        accelerator.print(f"goes on after step {loader.step} of {len(loader) // loader.micro_batches}")

    step_loss = 0.0
    with loader, (folder / f"seen-{accelerator.process_index}.txt").open("a") as seen:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                # `backward` divides by the number of batches that are accumulated; the scale has done so already.
                accelerator.backward(loss * accelerator.gradient_accumulation_steps)
                optimizer.step()
                optimizer.zero_grad()
            step_loss += loss.detach()
            seen.writelines(f"{document}\n" for document in batch.document_ids)
            if accelerator.sync_gradients:
                mean = accelerator.reduce(step_loss, "mean")
                accelerator.print(
                    f"step {loader.step}  loss {mean:.3f}  over {batch.step_num_targets:,} targets"
                )
                step_loss = 0.0
                if loader.step == stop_after:
                    break
    accelerator.save_state(str(folder / "checkpoint"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        found = [line for file in folder.glob("seen-*.txt") for line in file.read_text().split()]
        print(f"{len(found)} documents so far, {len(set(found))} different ones, of 300")
    accelerator.end_training()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    train(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)

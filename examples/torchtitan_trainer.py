"""torchtitan's trainer over packed documents, stopped after some steps and gone on with on other ranks.

python examples/torchtitan_trainer.py run 4                                            # stops after 4 steps
torchrun --standalone --nproc-per-node 2 examples/torchtitan_trainer.py run            # goes on, on 2 ranks

Runs torchtitan's own trainer where torchtitan 0.3.0 is installed, on CPUs too; else one that does the same with data.
"""

import importlib.util
import json
import os
import random
import sys
from pathlib import Path

from varlen.adapters.torchtitan import PackedDataLoader, check_trainer

SIZES = {"local_batch_size": 1, "global_batch_size": 4, "seq_len": 256, "steps": 1000}
DOCUMENTS = 120


def write_documents(path, count=DOCUMENTS):
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away"]
    draw = random.Random(0)
    texts = (f"{n}: {' '.join(draw.choices(words, k=draw.randint(1, 40)))}" for n in range(count))
    part = path.with_suffix(f".{os.getpid()}")  # every rank may write it: the same text
    part.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    part.replace(path)


def data_of(folder):
    return PackedDataLoader.Config(
        source=str(folder / "texts.jsonl"),
        text_tokenizer="bytes",
        mode="indexed",
        global_batch_size=SIZES["global_batch_size"],  # as training.global_batch_size
        settings={"cache": str(folder / "cache")},
    )


def numbers_in(input_dict):
    """The documents of a batch, by the numbers that their texts begin with: what the trainer was given to learn."""
    tokens, positions = (input_dict[name].reshape(-1).tolist() for name in ("input", "positions"))
    begins = [n for n, place in enumerate(positions) if place == 0 and tokens[n]]  # padding is token 0
    return [bytes(tokens[n : n + 5]).partition(b":")[0].decode() for n in begins]


def seeing(trainer_class, folder, stop_after):
    """The trainer, which also writes down what it trains on, and stops early."""

    class Seeing(trainer_class):
        def forward_backward_step(self, *given, **named):
            with (folder / f"seen-{os.environ.get('RANK', '0')}.txt").open("a") as seen:
                for number in numbers_in(named["input_dict"] if named else given[0]):
                    seen.write(f"{number}\n")
            return super().forward_backward_step(*given, **named)

        def should_continue_training(self):
            return super().should_continue_training() and self.step != stop_after

    return Seeing


def stand_in(folder, stop_after):
    import torchtitan_stand_in as titan

    config = titan.Config(
        dataloader=data_of(folder), training=titan.Training(**SIZES), folder=folder / "checkpoint"
    )
    check_trainer(config)
    return seeing(titan.Trainer, folder, stop_after)(config)


def torchtitans_own(folder, stop_after):
    import torch

    if not torch.cuda.is_available():
        import torchtitan_on_cpu
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    class NoTokenizer(BaseTokenizer.Config):
        def build(self, **_):
            return None  # the loader has its own

    config = Trainer.Config(
        model_spec=model_registry("debugmodel"),
        dataloader=data_of(folder),
        training=TrainingConfig(mixed_precision_param="float32", disable_cuda_graphs=True, **SIZES),
        checkpoint=CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        activation_checkpoint=None,
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        metrics=MetricsProcessor.Config(log_freq=1),
        tokenizer=NoTokenizer(),
        hf_assets_path=str(folder),
        dump_folder=str(folder),
    )
    check_trainer(config)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29400")
    trainer = seeing(Trainer, folder, stop_after)(config)
    if not torch.cuda.is_available():
        torchtitan_on_cpu.sum_gradients(trainer)
    return trainer


def train(folder, stop_after):
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "texts.jsonl").exists():
        write_documents(folder / "texts.jsonl")
    is_there = importlib.util.find_spec("torchtitan") is not None
    trainer = (torchtitans_own if is_there else stand_in)(folder, stop_after)
    trainer.train()
    steps = len(trainer.dataloader) // trainer.dataloader.loader.micro_batches
    if os.environ.get("RANK", "0") == "0":
        whose = "torchtitan's own" if is_there else "a stand-in"
        print(f"{whose} trainer took {trainer.dataloader.loader.step} of {steps} steps")
        for step, loss in getattr(trainer, "losses", {}).items():
            print(f"step {step}  loss {loss:.4f}")
    trainer.close()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    train(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1)

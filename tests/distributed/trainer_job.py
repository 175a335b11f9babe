"""One rank of a Trainer's job: `trainer_job.py STORE OUT [CHECKPOINT]`; writes down what it took."""

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from tests.support.trainers import CountingTrainer, StopAt, arguments, packed_loader, tiny_llama


def main() -> None:
    """Train, from a checkpoint where one is given, else until the fourth step, one behind the last checkpoint."""
    store, out, *checkpoint = sys.argv[1:]
    sizes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4, "num_train_epochs": 1}
    args = arguments(f"{out}/run", save_strategy="steps", save_steps=3, **sizes)
    loader = packed_loader(args, store)
    trainer = CountingTrainer(model=tiny_llama(), args=args, train_loader=loader)
    if not checkpoint:
        train_on_pairs(out, args.process_index)
        train_weighted(store, out, sizes, args.process_index)
        trainer.add_callback(StopAt(4))
    trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
    when, rank = "resumed" if checkpoint else "begun", args.process_index
    found = {"taken": trainer.taken, "steps": trainer.state.max_steps, "log": trainer.state.log_history}
    Path(out, f"{when}-{rank}.json").write_text(json.dumps(found))
    if rank == 0:
        torch.save(trainer.model.state_dict(), f"{out}/weights.pt")


def train_weighted(store: str, out: str, sizes: dict[str, Any], rank: int) -> None:
    """Train two steps on the mean over documents."""
    args = arguments(f"{out}/weighted", **{**sizes, "max_steps": 2})
    loader = packed_loader(args, store)
    trainer = CountingTrainer(model=tiny_llama(), args=args, train_loader=loader, loss_weighting="document")
    trainer.train()
    if rank == 0:
        Path(out, "weighted.json").write_text(json.dumps(trainer.state.log_history))
        torch.save(trainer.model.state_dict(), f"{out}/weighted.pt")


def train_on_pairs(out: str, rank: int) -> None:
    """Train a step on packs of pairs, of which each rank's batches hold different numbers."""
    from tests.support.trainers import trained

    from varlen.adapters.trl.dpo import PackedDPOTrainer

    class Counting(PackedDPOTrainer):
        """Writes down the prompts of the pairs that it takes."""

        taken: ClassVar[list[list[Any]]] = []

        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **rest: Any) -> Any:
            rows, half = inputs["packed"], len(inputs["input_ids"]) // 2
            ends = rows.cu_seqlens[: half + 1].tolist()
            ids = rows.input_ids[0].tolist()
            self.taken.append([ids[first:last] for first, last in zip(ends, ends[1:])])
            return super().compute_loss(model, inputs, *args, **rest)

    settings = {"capacity": 160, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 100}
    trainer = trained(Counting, f"{out}/pairs", attention="varlen", **settings)
    found = {"taken": trainer.taken, "log": trainer.state.log_history}
    Path(out, f"pairs-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

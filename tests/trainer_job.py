"""One rank of a Trainer's job: `trainer_job.py STORE OUT [CHECKPOINT]`; writes down what it took."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from trainers import CountingTrainer, StopAt, arguments, packed_loader, tiny_llama


def main() -> None:
    """Train, from a checkpoint where one is given, else until the fourth step, one behind the last checkpoint."""
    store, out, *checkpoint = sys.argv[1:]
    sizes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4, "num_train_epochs": 1}
    args = arguments(f"{out}/run", save_strategy="steps", save_steps=3, **sizes)
    loader = packed_loader(args, store)
    trainer = CountingTrainer(model=tiny_llama(), args=args, train_loader=loader)
    if not checkpoint:
        trainer.add_callback(StopAt(4))
    trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
    when, rank = "resumed" if checkpoint else "begun", args.process_index
    found = {"taken": trainer.taken, "steps": trainer.state.max_steps, "log": trainer.state.log_history}
    Path(out, f"{when}-{rank}.json").write_text(json.dumps(found))
    if rank == 0:
        torch.save(trainer.model.state_dict(), f"{out}/weights.pt")


if __name__ == "__main__":
    main()

"""One rank of an axolotl run on a CPU: `axolotl_job.py CONFIG OUT [key=value ...]`; writes down what it trained.

All that runs is axolotl's own: reading and checking the configuration, tokenizing, loading the model, building the
trainer, training, saving.
"""

import json
import os
import sys
from pathlib import Path


def write_down(out):
    """Note every batch that is trained, with its step, and the gradients of the first step."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from varlen.adapters.axolotl.trainer import VarlenTrainer

    rank = os.environ.get("RANK", "0")
    gradients, seen = Path(out, f"gradients-{rank}.pt"), Path(out, f"seen-{rank}.jsonl")
    trained = VarlenTrainer.training_step

    def training_step(self, model, inputs, *given, **named):
        note = {"step": self.state.global_step, "documents": inputs["packed"].document_ids.tolist()}
        with seen.open("a") as file:
            file.write(json.dumps(note) + "\n")
        return trained(self, model, inputs, *given, **named)

    def keep(optimizer, _given, _named):
        if not gradients.exists():
            torch.save(
                [p.grad.clone() for group in optimizer.param_groups for p in group["params"]], gradients
            )

    VarlenTrainer.training_step = training_step
    register_optimizer_step_post_hook(keep)


def main():
    config, out, *changes = sys.argv[1:]
    sys.argv[1:] = []
    import axolotl_libraries  # noqa: F401
    import torch
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.cli.train import do_train

    write_down(out)
    fetcher = torch.utils.data._utils.fetch._MapDatasetFetcher
    cfg = load_cfg(config, **{name: json.loads(value) for name, value in (c.split("=") for c in changes)})
    cfg.device_map = {"": "cpu"}  # of several ranks axolotl wants each to have a GPU
    do_train(cfg, TrainerCliArgs())
    assert torch.utils.data._utils.fetch._MapDatasetFetcher is fetcher


if __name__ == "__main__":
    main()

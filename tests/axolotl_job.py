"""One rank of an axolotl run on a CPU: `axolotl_job.py CONFIG OUT [key=value ...]`; writes down what it trained.

All that runs is axolotl's own: reading and checking the configuration, tokenizing, loading the model, building the
trainer, training, saving. What it imports only for other work has stand-ins, which do nothing: GPU kernels (triton,
bitsandbytes), reports (wandb, evaluate), the hub's connections, and a trainer that a newer TRL doesn't have.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path

UNUSED = (
    "axolotl.contribs",
    "bitsandbytes",
    "evaluate",
    "fastcore",
    "httpcore",
    "httpx",
    "triton",
    "trl.experimental.prm",
    "wandb",
)


class Nothing(types.ModuleType):
    """A module, function, decorator or base class that does nothing."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(f"{self.__name__}.{name}")

    def __call__(self, *given, **named):
        return given[0] if len(given) == 1 and not named and callable(given[0]) else self

    def __mro_entries__(self, bases):
        return ()


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds Nothing for what isn't used."""

    def find_spec(self, name, path=None, target=None):
        if any(name == unused or name.startswith(unused + ".") for unused in UNUSED):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Nothing(spec.name)

    def exec_module(self, module):
        pass


def put_stand_ins():
    """Let torch, transformers and TRL find out what there is, then put stand-ins for what axolotl asks for."""
    import peft  # noqa: F401
    from torch.utils._triton import has_triton
    from transformers import EarlyStoppingCallback, PreTrainedModel, Trainer  # noqa: F401
    from trl.trainer.reward_trainer import DataCollatorForPreference  # noqa: F401

    has_triton()
    sys.meta_path.insert(0, StandIns())


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
    """Train as `axolotl train` does."""
    config, out, *changes = sys.argv[1:]
    sys.argv[1:] = []
    put_stand_ins()
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

"""What axolotl's jobs import, before they are forked; what it imports only for other work has stand-ins.

They do nothing: GPU kernels (triton, bitsandbytes), reports (wandb, evaluate), the hub's connections, and a trainer
that a newer TRL doesn't have.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

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


put_stand_ins()
for _name in ("axolotl.cli.train", "axolotl.core.builders", "varlen.adapters.axolotl.trainer"):
    importlib.import_module(_name)

"""VarlenTrainer: axolotl's trainer, fed by a PackedLoader over the data that axolotl has prepared."""

from __future__ import annotations

from inspect import signature
from typing import Any

from axolotl.core.trainers import AxolotlTrainer
from axolotl.integrations.base import PluginManager

from varlen.adapters.axolotl.settings import folder_of, loader_settings, saved
from varlen.adapters.hf.trainer import PackedTraining, loader_for
from varlen.adapters.peers import check_processes


class _DivisorTrainer(AxolotlTrainer):  # type: ignore[misc]
    """axolotl's trainer, which passes the divisor of losses to every model that takes it.

    axolotl passes it to no model whose inner `forward` doesn't name `num_items_in_batch`, which is nearly all, and so
    takes the mean of means; transformers passes it to all that pass it on to their loss.
    """

    def __init__(self, *given: Any, **rest: Any) -> None:
        super().__init__(*given, **rest)
        model = self.accelerator.unwrap_model(self.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        takes_any = (kind.kind is kind.VAR_KEYWORD for kind in signature(model.forward).parameters.values())
        self.model_accepts_loss_kwargs = getattr(model, "accepts_loss_kwargs", any(takes_any))


class VarlenTrainer(PackedTraining, _DivisorTrainer):
    """What axolotl's builder makes in the place of its own trainer."""

    def __init__(self, *, args: Any, train_dataset: Any, **rest: Any) -> None:
        cfg = PluginManager.get_instance().cfg
        check_processes(args.world_size)  # before the data is written and a loader started
        # axolotl wrote a number of steps here; the loader knows how many there are.
        args.max_steps = cfg.max_steps or -1
        loader = loader_for(args, saved(train_dataset, folder_of(cfg)), **loader_settings(cfg))
        super().__init__(
            args=args,
            train_dataset=train_dataset,
            train_loader=loader,
            loss_weighting=cfg.varlen.loss_weighting,
            **rest,
        )

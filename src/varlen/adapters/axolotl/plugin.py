"""VarlenPlugin: `plugins: [varlen.adapters.axolotl.VarlenPlugin]` in a configuration, and varlen packs its data.

axolotl tokenizes as ever. What it has prepared is fed by a PackedLoader, which packs the whole set, knows its exact
number of steps, gives every rank its own batches, and keeps its place in the checkpoints.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from varlen.adapters.axolotl.settings import count_steps
from varlen.adapters.hf.attention import use_varlen_attention


class VarlenPlugin(BasePlugin):  # type: ignore[misc]
    """axolotl's hooks, as far as packing needs them; it replaces no function of axolotl, torch or transformers."""

    def register(self, cfg: Any) -> None:
        """Let axolotl refuse documents longer than `sequence_len`, which it else leaves out.

        Args:
            cfg: the configuration as it was read.
        """
        if not cfg.get("excess_length_strategy"):
            cfg["excess_length_strategy"] = "raise"

    def get_input_args(self) -> str:
        """Return where the settings are that a configuration may have."""
        return "varlen.adapters.axolotl.settings.VarlenArguments"

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> Any:
        """Return axolotl's data sets with the exact number of steps, which warm-up and schedules go by.

        Args:
            cfg: axolotl's configuration.
            preprocess: only tokenize and save; left to axolotl.
        """
        if preprocess:
            return None
        from axolotl.common.datasets import load_datasets

        found = load_datasets(cfg=cfg)
        found.total_num_steps = count_steps(cfg, found.train_dataset)
        return found

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Set varlen's attention where it is asked for.

        Args:
            cfg: axolotl's configuration.
            model: before adapters are put on.
        """
        if cfg.varlen.attention == "varlen":
            use_varlen_attention(model)

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """Return what differs from the training arguments that axolotl makes.

        Args:
            cfg: axolotl's configuration.
        """
        return {
            "max_steps": cfg.max_steps
            or -1,  # axolotl writes in its count of steps; the loader knows its own
            "average_tokens_across_devices": True,  # the mean over the targets of a step is that over all ranks
        }

    def get_trainer_cls(self, cfg: Any) -> type[Any]:
        """Return axolotl's trainer with a loader under it.

        Args:
            cfg: axolotl's configuration; the trainer asks the plugin manager for it.
        """
        del cfg
        from varlen.adapters.axolotl.trainer import VarlenTrainer

        return VarlenTrainer

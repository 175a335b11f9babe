"""Configurations as Megatron-Bridge has them, for tests: sound ones, to be broken one setting at a time."""

import copy
from typing import Any

from varlen.adapters.megatron import check_config

SPECS = {"0.4": "packed_sequence_specs", "0.5": "packed_sequence_specs", "0.6": "offline_packing_specs"}


def plain(dataset: str | None = None, **changes: Any) -> dict[str, Any]:
    """A configuration that packs nothing: rows of 512 tokens, one GPU.

    Args:
        dataset: the data set's class, as YAML names it.
        changes: by setting, dots written as two underscores.
    """
    cfg: dict[str, Any] = {
        "model": {"seq_length": 512},
        "train": {"micro_batch_size": 1, "global_batch_size": 32},
        "dataset": {"seq_length": 512},
        "ddp": {},
    }
    if dataset is not None:
        cfg["dataset"]["_target_"] = f"megatron.bridge.{dataset}"
    return changed(cfg, {name.replace("__", "."): value for name, value in changes.items()})


def packed(dialect: str = "0.6", **changes: Any) -> dict[str, Any]:
    """The same with rows packed offline, a loss per token, and nothing to find fault with in release 0.6."""
    cfg = plain()
    cfg["model"]["calculate_per_token_loss"] = True
    cfg["dataset"][SPECS[dialect]] = {"packed_sequence_size": 512, "num_tokenizer_workers": 4}
    if dialect == "0.6":
        cfg["dataset"]["enable_offline_packing"] = True
    short = {"specs": f"dataset.{SPECS[dialect]}"}
    named = {}
    for name, value in changes.items():
        first, *rest = name.split("__")
        named[".".join([short.get(first, first), *rest])] = value
    return changed(cfg, named)


def in_batch(dialect: str = "0.6", **changes: Any) -> dict[str, Any]:
    """The same with rows packed within a micro-batch of four."""
    flag = "enable_in_batch_packing" if dialect == "0.6" else "pack_sequences_in_batch"
    changes = {"dataset__" + flag: True, "train__micro_batch_size": 4, **changes}
    return plain("data.DirectHFSFTDatasetConfig" if dialect == "0.6" else None, **changes)


def energon(**changes: Any) -> dict[str, Any]:
    """The same with Energon's packing."""
    settled = {
        "dataset__packing_buffer_size": 16,
        "dataset__micro_batch_size": 1,
        "model__calculate_per_token_loss": True,
    }
    return plain("data.builders.energon.EnergonDatasetConfig", **{**settled, **changes})


def changed(cfg: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    copied = copy.deepcopy(cfg)
    for name, value in changes.items():
        here = copied
        *parts, last = name.split(".")
        for part in parts:
            here = here.setdefault(part, {})
        here[last] = value
    return copied


def only(cfg: Any, kind: str, **settings: Any) -> Any:
    (found,) = [finding for finding in check_config(cfg, **settings) if finding.kind == kind]
    return found

"""Rules about Energon's own packing (`packing_buffer_size`), which Megatron-Bridge allows with few things."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from varlen.adapters.megatron.config.finding import found
from varlen.adapters.megatron.config.reading import Reading
from varlen.adapters.megatron.config.report import ConfigFinding

BUFFER = "dataset.packing_buffer_size"
OVERLAPS = tuple(
    f"{part}.{name}"
    for part in ("model", "comm_overlap")
    for name in ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute")
)


def energon_packs_alone(reading: Reading) -> Iterator[ConfigFinding]:
    """One row a micro-batch, a loss per token, no graphs, no pipeline, no further targets."""
    if not reading.is_energon:
        return
    if reading[BUFFER] < 1:
        yield _finding(reading, BUFFER, "1 or more, or not given", 16)
    rules: list[tuple[str, bool, str, Any]] = [
        ("train.micro_batch_size", reading["train.micro_batch_size"] not in (None, 1), "1", 1),
        ("model.calculate_per_token_loss", not reading["model.calculate_per_token_loss"], "true", True),
        (
            "ddp.average_in_collective",
            reading["ddp.average_in_collective"] and not reading["model.calculate_per_token_loss"],
            "false",
            False,
        ),
        ("model.cuda_graph_impl", reading["model.cuda_graph_impl"] != "none", "none", "none"),
        ("model.vision_cuda_graph_impl", reading["model.vision_cuda_graph_impl"] != "none", "none", "none"),
        ("model.dist_train.use_dist_train", reading["model.dist_train.use_dist_train"], "false", False),
        ("model.pipeline_model_parallel_size", reading.pp > 1, "1", 1),
        ("model.mtp_num_layers", bool(reading["model.mtp_num_layers"]), "not given", None),
    ]
    for setting, is_wrong, limit, value in rules:
        if is_wrong:
            yield _finding(reading, setting, f"{limit} with Energon's packing", value)


def energon_agrees_with_training(reading: Reading) -> Iterator[ConfigFinding]:
    """Energon's own micro-batch size is that of training, and of evaluation."""
    own = reading["dataset.micro_batch_size"]
    if own is None or reading.dialect != "0.6":
        return
    for setting in ("train.micro_batch_size", "validation.eval_micro_batch_size"):
        is_evaluation = setting.startswith("validation")
        if is_evaluation and not reading["dataset.do_validation"]:
            continue
        if reading.says(setting) and reading[setting] != own:
            base = reading.micro_batch if is_evaluation else reading[setting]
            rows = 1 if reading.is_energon else base
            yield _finding(
                reading,
                setting,
                f"the same as {reading.shown('dataset.micro_batch_size')}",
                rows,
                {setting: rows, "dataset.micro_batch_size": rows},
            )


def overlap_is_turned_off(reading: Reading) -> Iterator[ConfigFinding]:
    """Overlap of the experts' communication is turned off, as its schedule drops images and boundaries."""
    if not reading.is_energon:
        return
    for setting in OVERLAPS:
        if reading[setting]:
            yield found(
                reading,
                "energon",
                setting,
                limit="false with Energon's packing",
                what="its schedule doesn't hand on images and boundaries; Megatron-Bridge turns it off and warns",
                outcome="advice",
                changes={setting: False},
            )


def _finding(
    reading: Reading, setting: str, limit: str, value: Any, changes: dict[str, Any] | None = None
) -> ConfigFinding:
    return found(
        reading,
        "energon",
        setting,
        limit=limit,
        what="Megatron-Bridge doesn't have Energon's packing with it, and stops with a ValueError"
        if reading.dialect == "0.6"
        else "releases from 0.6 on refuse it with Energon's packing; this one doesn't check it",
        outcome="stops" if reading.dialect == "0.6" else "advice",
        changes=changes or {setting: value},
    )


RULES = (energon_packs_alone, energon_agrees_with_training, overlap_is_turned_off)

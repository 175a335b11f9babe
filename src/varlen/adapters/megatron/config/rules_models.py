"""Rules about models: families that can't be trained packed, further targets, prompts as weights, experts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from varlen.adapters.megatron.config.finding import found
from varlen.adapters.megatron.config.reading import Reading
from varlen.adapters.megatron.config.report import ConfigFinding, Outcome
from varlen.adapters.megatron.config.settings import OFFLINE_FLAG


@dataclass(frozen=True, slots=True)
class Family:
    """A family that NVIDIA doesn't train packed, one way or at all."""

    name: str
    pattern: str
    """Found in a name of the model, in small letters, without dots, dashes and underscores."""
    way: Literal["offline", "in-batch"]
    outcome: Outcome
    why: str
    until: tuple[int, int] | None = None
    """The release from which on this no longer holds."""


FAMILIES = (
    Family(
        "Qwen3-Next",
        r"qwen3next",
        "offline",
        "stops",
        "its gated delta nets refuse packed rows: Megatron Core stops with a NotImplementedError",
        (0, 6),
    ),
    Family(
        "Qwen3-Next",
        r"qwen3next",
        "offline",
        "advice",
        "NVIDIA's recipe for fine-tuning turns packing off",
    ),
    Family(
        "GLM-4.5",
        r"glm45(?!v)|glmmoe",
        "offline",
        "advice",
        "NVIDIA's recipes turn packing off as not supported",
    ),
    Family("DeepSeek-V4", r"deepseekv4|dsv4", "offline", "advice", "NVIDIA's recipes turn packing off"),
    Family("Qwen3.5-VL", r"qwen35vl", "in-batch", "advice", "NVIDIA's recipes turn in-batch packing off"),
    Family("Qwen-Omni", r"qwen(25|3|35)?omni", "in-batch", "stops", "its collator stops with a ValueError"),
    Family("Qwen3-ASR", r"qwen3asr", "in-batch", "stops", "its step stops with an error"),
    Family(
        "Nemotron-VL",
        r"nemotron.*vl",
        "in-batch",
        "stops",
        "images grow after the boundaries are made, so its collator stops with a ValueError",
    ),
)
"""Of each way of packing, the families that have it turned off or refuse it; the first that fits is said."""

_NAMES = (
    "model.hf_model_id",
    "dataset.hf_processor_path",
    "dataset.task_encoder.hf_processor_path",
    "tokenizer.tokenizer_model",
)


def family_packs(reading: Reading) -> Iterator[ConfigFinding]:
    """Families that opt out of a way of packing."""
    names = [
        *reading.classes.get("model", ()),
        *(str(reading[name]) for name in _NAMES if reading.says(name)),
    ]
    plain = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in names]
    for way, is_on in (
        ("offline", reading.is_offline),
        ("in-batch", reading.is_in_batch or reading.is_energon),
    ):
        for family in FAMILIES if is_on else ():
            matches = [name for name, text in zip(names, plain) if re.search(family.pattern, text)]
            if (
                family.way != way
                or not matches
                or not (family.until is None or reading.is_before(*family.until))
            ):
                continue
            setting, changes = _switched_off(reading, way)
            yield found(
                reading,
                "model_family",
                setting,
                limit=f"off for {family.name}",
                what=f"{matches[0]} is of the family {family.name}: {family.why}",
                outcome=family.outcome,
                changes=changes,
                seen=f"{reading.packing} of {matches[0]}",
            )
            break


def _switched_off(reading: Reading, way: str) -> tuple[str, dict[str, Any]]:
    """Return the setting that turns a way of packing on, and what turns it off."""
    if way == "offline":
        flag: dict[str, Any] = {OFFLINE_FLAG: False} if reading.dialect == "0.6" else {}
        return reading.specs, {reading.specs: None, **flag}
    if reading.is_in_batch:
        return reading.in_batch_name, {reading.in_batch_name: False}
    return "dataset.packing_buffer_size", {"dataset.packing_buffer_size": None}


def further_targets_stay_in_documents(reading: Reading) -> Iterator[ConfigFinding]:
    """Multi-token prediction shifts targets along a row; packed rows have documents and padding in it."""
    setting = "model.mtp_num_layers"
    if not reading[setting] or not (reading.is_offline or reading.is_in_batch or reading["dataset.sft"]):
        return
    is_padded = reading.is_offline and reading.spec("pad_seq_to_mult") > 1
    yield found(
        reading,
        "mtp",
        setting,
        limit="not given with packing",
        what="further targets are shifted by the boundaries without padding, and each document here has padding "
        "behind it, so they are another's (Megatron-LM pull request 6205)"
        if is_padded
        else "NVIDIA documents multi-token prediction as not supported with packed fine-tuning, though some of its "
        "own runs have it",
        outcome="silently wrong" if is_padded else "advice",
        changes={setting: None},
    )


def prompts_are_no_weights(reading: Reading) -> Iterator[ConfigFinding]:
    """P-tuning puts weights before each row, and packed rows begin many documents."""
    for setting in ("dataset.dataset_kwargs.virtual_tokens", "peft.virtual_tokens"):
        if reading.is_offline and reading[setting]:
            yield found(
                reading,
                "p_tuning",
                setting,
                limit="0 with packed rows",
                what="prompts that are weights stand before a row, not before each of its documents; Megatron-Bridge "
                "stops with an AssertionError",
                outcome="stops",
                changes={setting: 0},
            )


def experts_see_no_padding(reading: Reading) -> Iterator[ConfigFinding]:
    """Before 0.7 padding within packed rows counts in the losses and biases that balance experts."""
    balanced = [
        setting
        for setting in (
            "model.moe_aux_loss_coeff",
            "model.moe_z_loss_coeff",
            "model.moe_router_enable_expert_bias",
        )
        if reading[setting]
    ]
    is_padded = reading.is_offline and (reading.spec("pad_seq_to_mult") > 1 or reading[reading.width])
    is_padded |= reading.is_in_batch and reading.alignment > 1
    if reading["model.num_moe_experts"] and balanced and is_padded and reading.is_before(0, 7):
        yield found(
            reading,
            "moe_padding",
            balanced[0],
            limit="0 where packed rows have padding, before release 0.7",
            what="padding is routed to experts and counts in what balances them; only later releases mask it",
            outcome="advice",
            fix="keep padding small: full packs, and pad_seq_to_mult no larger than needed",
        )


RULES = (family_packs, further_targets_stay_in_documents, prompts_are_no_weights, experts_see_no_padding)

"""Rules about models: families that can't be trained packed, further targets, prompts as weights, experts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from varlen.adapters.megatron.config.reading import CONVERSATIONS, FINE_TUNING, Reading
from varlen.adapters.megatron.config.report import ConfigFinding, Outcome, found
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


FAMILY_RULES = (
    family_packs,
    further_targets_stay_in_documents,
    prompts_are_no_weights,
    experts_see_no_padding,
)


# Rules about the loss and about the process groups of context parallelism.

PER_TOKEN, AVERAGE = "model.calculate_per_token_loss", "ddp.average_in_collective"
HIERARCHY, KINDS = "model.hierarchical_context_parallel_sizes", "model.cp_comm_type"


def loss_is_per_token(reading: Reading) -> Iterator[ConfigFinding]:
    """Fine-tuning with context parallelism: a rank may hold no target, so no rank divides by its own number."""
    if reading[PER_TOKEN]:
        return
    is_energons = reading.is_energon and reading.dialect == "0.6"  # whose own rule says it
    if reading.cp > 1 and reading.is_fine_tuning and not is_energons:
        outcome, how = _nvidia_checks(reading)
        yield found(
            reading,
            "per_token_loss",
            PER_TOKEN,
            limit="true where fine-tuning with context parallelism",
            what=f"a rank whose chunks hold no target divides by nothing: its loss is NaN or counts wrongly; {how}",
            outcome=outcome,
            changes={PER_TOKEN: True} | ({AVERAGE: False} if reading[AVERAGE] else {}),
        )
    elif reading.is_offline:
        yield found(
            reading,
            "loss_weighting",
            PER_TOKEN,
            limit="true, for the mean over all targets of a step",
            what="every pack weighs the same whatever number of targets it holds, so a target's weight depends on "
            "what it is packed with",
            outcome="advice",
            changes={PER_TOKEN: True} | ({AVERAGE: False} if reading[AVERAGE] else {}),
        )


def gradients_are_summed(reading: Reading) -> Iterator[ConfigFinding]:
    """A loss per token is divided once, so gradients are summed over ranks and never averaged."""
    if not reading[AVERAGE]:
        return
    is_tuned = reading.cp > 1 and reading.is_fine_tuning
    if not (is_tuned or reading[PER_TOKEN]):
        return
    outcome, how = _nvidia_checks(reading)
    if reading[PER_TOKEN]:
        outcome, how = "stops", "Megatron Core stops with an AssertionError"
    yield found(
        reading,
        "average_in_collective",
        AVERAGE,
        limit="false " + ("with a loss per token" if reading[PER_TOKEN] else "with context parallelism"),
        what=f"gradients would be averaged over ranks whose numbers of targets differ; {how}",
        outcome=outcome,
        changes={AVERAGE: False},
    )


def _nvidia_checks(reading: Reading) -> tuple[Outcome, str]:
    """Return what NVIDIA's code does where a rank may have no target."""
    if reading.is_of(CONVERSATIONS):
        return "silently wrong", "releases before 0.6 check it for text alone, and train on"
    if reading.is_of(FINE_TUNING) or not reading.classes.get("dataset"):
        if not reading.is_arguments:
            return "stops", "Megatron-Bridge stops with an AssertionError"
        return "advice", "Megatron-LM doesn't check it"
    return "silently wrong", "Megatron-Bridge doesn't check custom data sets, and trains on"


def groups_of_ranks_multiply(reading: Reading) -> Iterator[ConfigFinding]:
    """Hierarchical context parallelism: sizes that multiply to CP, and are there where layers ask for them."""
    sizes = reading[HIERARCHY]
    yield from _kinds_are_one_or_one_a_layer(reading)
    if sizes is None and any("a2a+p2p" in kind for kind in _kinds(reading)):
        yield from _sizes_are_there(reading)
    if sizes is not None and math.prod(sizes) != reading.cp:
        inner = math.gcd(sizes[0] if sizes else 1, reading.cp)
        yield found(
            reading,
            "cp_sizes",
            HIERARCHY,
            limit=f"sizes whose product is context_parallel_size = {reading.cp}",
            what=f"their product is {math.prod(sizes)}; Megatron stops with an AssertionError",
            outcome="stops",
            changes={HIERARCHY: (inner, reading.cp // inner)},
        )


def _kinds(reading: Reading) -> tuple[str, ...]:
    """Return the kinds of communication, one or one a layer."""
    kinds = reading[KINDS] or ()
    return (kinds,) if isinstance(kinds, str) else kinds


def _sizes_are_there(reading: Reading) -> Iterator[ConfigFinding]:
    """Yield what is wrong with layers that ask for a hierarchy which isn't given."""
    if reading.cp > 1:
        is_even = reading.cp % 2 == 0 and reading.cp > 2
        yield found(
            reading,
            "cp_sizes",
            HIERARCHY,
            limit=f"sizes whose product is context_parallel_size = {reading.cp}, with cp_comm_type a2a+p2p",
            what="without them every rank attends to its own chunks only; releases that check it stop, others train "
            "on",
            outcome="silently wrong",
            changes={HIERARCHY: (reading.cp // 2, 2) if is_even else (reading.cp, 1)},
        )
    elif reading.dialect == "0.6" and not reading.is_arguments:
        yield found(
            reading,
            "cp_sizes",
            KINDS,
            limit="p2p without context parallelism, or a2a+p2p with sizes",
            what="Megatron-Bridge asks for the sizes of the hierarchy though there is no context parallelism, and "
            "stops with an AssertionError",
            outcome="stops",
            changes={KINDS: "p2p"},
        )


def _kinds_are_one_or_one_a_layer(reading: Reading) -> Iterator[ConfigFinding]:
    """Yield what is wrong with a list of kinds of another length than the layers; argparse has a list of one."""
    kinds, layers = reading[KINDS], reading["model.num_layers"]
    if reading.cp == 1 or not isinstance(kinds, tuple) or layers in (None, len(kinds)):
        return
    if reading.is_arguments and len(kinds) == 1:
        return
    is_same = len(set(kinds)) == 1
    yield found(
        reading,
        "cp_sizes",
        KINDS,
        limit=f"one name that is no list, or one for each of num_layers = {layers}",
        what=f"the list has {len(kinds)}; Megatron stops with an AssertionError",
        outcome="stops",
        changes={KINDS: kinds[0]} if is_same else None,
        fix=None if is_same else "write one name, such as p2p, or one a layer",
    )


def hybrid_groups_have_limits(reading: Reading) -> Iterator[ConfigFinding]:
    """Hybrid context parallelism: groups by the length of each sample; what it can't be combined with."""
    if not reading["model.hybrid_context_parallel"]:
        return
    needs = [
        ("model.pipeline_model_parallel_size", reading.pp > 1, "1", 1),
        ("model.enable_cuda_graph", bool(reading["model.enable_cuda_graph"]), "false", False),
        ("ddp.use_megatron_fsdp", bool(reading["ddp.use_megatron_fsdp"]), "false", False),
        (PER_TOKEN, not reading[PER_TOKEN], "true", True),
        ("dataset.dataloader_type", reading["dataset.dataloader_type"] != "single", '"single"', "single"),
    ]
    for setting, is_wrong, limit, value in needs:
        if is_wrong:
            yield found(
                reading,
                "hybrid_context_parallel",
                setting,
                limit=f"{limit} with hybrid_context_parallel",
                what="Megatron-LM stops with an AssertionError",
                outcome="stops",
                changes={setting: value},
            )
    if not reading.says("model.max_seqlen_per_dp_cp_rank"):
        length = reading["model.seq_length"]
        yield found(
            reading,
            "hybrid_context_parallel",
            "model.max_seqlen_per_dp_cp_rank",
            limit="given with hybrid_context_parallel",
            what="nothing says how long a sample one rank may take",
            outcome="stops",
            changes={"model.max_seqlen_per_dp_cp_rank": length} if length else None,
            fix=None if length else "set the tokens that one rank may take",
        )


LOSS_RULES = (loss_is_per_token, gradients_are_summed, groups_of_ranks_multiply, hybrid_groups_have_limits)


# Rules about CUDA graphs: what is recorded once has one shape, boundaries of packed rows included.

IMPL = "model.cuda_graph_impl"
ROUTER = {"moe", "moe_router", "moe_preprocess"}
_WHOLE = {"full", "full_iteration", "full_iteration_inference"}


def implementation(reading: Reading) -> str:
    """Return which graphs are recorded, older switches included.

    Args:
        reading: of the configuration.
    """
    if reading[IMPL] == "none" and reading["model.enable_cuda_graph"]:
        return "local"
    if reading[IMPL] == "none" and reading["model.external_cuda_graph"]:
        return "transformer_engine"
    return str(reading[IMPL])


def is_full_iteration(reading: Reading) -> bool:
    """Return whether one graph holds a whole step."""
    kind = implementation(reading)
    return kind == "full_iteration" or (kind == "local" and "full_iteration" in _scopes(reading))


def captured(reading: Reading) -> set[str]:
    """Return the parts of a layer that Transformer Engine's graphs hold; none for all of it."""
    return _scopes(reading) - _WHOLE


def _scopes(reading: Reading) -> set[str]:
    return {*(reading["model.cuda_graph_scope"] or ()), *(reading["model.cuda_graph_modules"] or ())}


def _captures_attention(reading: Reading) -> bool:
    parts = captured(reading)
    is_by_layer = implementation(reading) == "transformer_engine" or (
        implementation(reading) == "local" and reading.dialect != "0.6"
    )
    return is_full_iteration(reading) or (is_by_layer and (not parts or "attn" in parts))


def local_graphs_hold_a_step(reading: Reading) -> Iterator[ConfigFinding]:
    """From 0.6 on `local` means graphs of a whole step; parts of layers are Transformer Engine's."""
    if reading.dialect == "0.6" and implementation(reading) == "local" and not is_full_iteration(reading):
        parts = ", ".join(sorted(captured(reading))) or "no scope"
        yield found(
            reading,
            "cuda_graph_impl",
            IMPL,
            limit="transformer_engine for parts of layers; local only with the scope full_iteration",
            what=f"local graphs with {parts}; Megatron-Bridge stops with a ValueError",
            outcome="stops",
            changes={IMPL: "transformer_engine"},
        )


def boundaries_need_a_width(reading: Reading) -> Iterator[ConfigFinding]:
    """Boundaries padded to one number are those of rows of one width."""
    setting = f"{reading.specs}.pad_cu_seqlens"
    if reading.is_offline and reading[setting] and not reading[reading.width]:
        yield found(
            reading,
            "static_width",
            reading.width,
            limit="true with pad_cu_seqlens",
            what="boundaries are padded with the row's width, which must be one; Megatron-Bridge stops "
            + ("with a ValueError" if reading.dialect == "0.6" else "as it opens the data set"),
            outcome="stops",
            changes={reading.width: True},
        )


def graphs_need_one_shape(reading: Reading) -> Iterator[ConfigFinding]:
    """Graphs over packed rows need rows of one width, and where they hold attention, boundaries of one number."""
    if not reading.is_offline:
        return
    kind = implementation(reading)
    is_graph = is_full_iteration(reading) or kind == "transformer_engine" or _captures_attention(reading)
    checked = (
        "Megatron-Bridge stops with a ValueError"
        if reading.dialect == "0.6"
        else "releases before 0.6 don't check it: the graph replays the first row's shape, or its recording ends in "
        "an error"
    )
    setting = f"{reading.specs}.pad_cu_seqlens"
    is_said_already = reading[setting] and not reading[reading.width]
    if is_graph and not reading[reading.width] and not is_said_already:
        yield found(
            reading,
            "static_width",
            reading.width,
            limit=f"true with CUDA graphs ({kind})",
            what=f"rows of several widths don't fit one graph; {checked}",
            outcome="stops" if reading.dialect == "0.6" else "silently wrong",
            changes={reading.width: True},
        )
    if _captures_attention(reading) and not reading[setting]:
        yield found(
            reading,
            "static_boundaries",
            setting,
            limit=f"true with CUDA graphs that hold attention ({kind})",
            what=f"the number of documents differs from pack to pack; {checked}",
            outcome="stops" if reading.dialect == "0.6" else "silently wrong",
            changes={setting: True, reading.width: True},
        )


def routers_stay_out_of_graphs(reading: Reading) -> Iterator[ConfigFinding]:
    """From 0.6 on: the mask that keeps padding from experts doesn't reach a router within a graph."""
    parts = captured(reading)
    is_packed = reading.is_offline or reading.is_in_batch
    if reading.dialect != "0.6" or not is_packed or not reading["model.num_moe_experts"]:
        return
    if implementation(reading) == "transformer_engine" and (not parts or parts & ROUTER):
        setting = (
            "model.cuda_graph_modules"
            if reading.says("model.cuda_graph_modules")
            else "model.cuda_graph_scope"
        )
        yield found(
            reading,
            "graph_router",
            setting,
            limit="attn only, with packed rows and experts",
            what="the padding of packed rows can't be kept from a router inside a graph; Megatron-Bridge stops with "
            "a ValueError at the first step",
            outcome="stops",
            changes={
                setting: ("attn",),
                **({"model.cuda_graph_scope": None} if setting.endswith("modules") else {}),
            },
        )


def in_batch_rows_vary(reading: Reading) -> Iterator[ConfigFinding]:
    """Rows packed within a micro-batch are as long as their documents, so no graph fits the next."""
    if reading.is_in_batch and (
        is_full_iteration(reading) or implementation(reading) == "transformer_engine"
    ):
        yield found(
            reading,
            "graph_in_batch",
            IMPL,
            limit="none with in-batch packing, unless rows have one width and one number of boundaries",
            what="the length of a row and the number of its documents change with every micro-batch",
            outcome="advice",
            changes={IMPL: "none"},
        )


GRAPH_RULES = (
    local_graphs_hold_a_step,
    boundaries_need_a_width,
    graphs_need_one_shape,
    routers_stay_out_of_graphs,
    in_batch_rows_vary,
)

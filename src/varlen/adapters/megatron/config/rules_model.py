"""Rules about models, graphs and releases: the loss, context parallelism, Energon, families, what a release does."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from varlen.adapters.megatron.config.reading import CONVERSATIONS, FINE_TUNING, Reading
from varlen.adapters.megatron.config.report import ConfigFinding, Outcome, Rule, Rules, found
from varlen.adapters.megatron.config.rules_data import BUFFER, LOADER, MICRO, MULTIPLE, SIZE, VALUE_ERROR
from varlen.adapters.megatron.config.settings import OFFLINE_FLAG

PER_TOKEN, AVERAGE = "model.calculate_per_token_loss", "ddp.average_in_collective"
HIERARCHY, KINDS = "model.hierarchical_context_parallel_sizes", "model.cp_comm_type"
PIPELINE, FURTHER = "model.pipeline_model_parallel_size", "model.mtp_num_layers"
IMPL, SCOPE, MODULES = "model.cuda_graph_impl", "model.cuda_graph_scope", "model.cuda_graph_modules"
ONE_RANK = "model.max_seqlen_per_dp_cp_rank"


# The loss, and the process groups of context parallelism.


def _may_lack_targets(reading: Reading) -> bool:
    """Return whether a rank may hold no target, so that none may divide by its own number; Energon has its rule."""
    return reading.cp > 1 and reading.is_fine_tuning and not (reading.is_energon and reading.is_new)


def _nvidia_checks(reading: Reading) -> tuple[Outcome, str]:
    """Return what NVIDIA's code does where a rank may have no target."""
    if reading.is_of(CONVERSATIONS):
        return "silently wrong", "releases before 0.6 check it for text alone, and train on"
    if reading.is_of(FINE_TUNING) or not reading.classes.get("dataset"):
        if not reading.is_arguments:
            return "stops", "Megatron-Bridge stops with an AssertionError"
        return "advice", "Megatron-LM doesn't check it"
    return "silently wrong", "Megatron-Bridge doesn't check custom data sets, and trains on"


def _summed_per_token(reading: Reading) -> dict[str, Any]:
    return {PER_TOKEN: True} | ({AVERAGE: False} if reading[AVERAGE] else {})


def _asks_for_sizes(reading: Reading) -> bool:
    """Return whether a layer asks for the sizes of a hierarchy, and none are given."""
    kinds = reading[KINDS] or ()
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    return reading[HIERARCHY] is None and any("a2a+p2p" in kind for kind in kinds)


def _are_not_one_a_layer(reading: Reading) -> bool:
    """Return whether a list of kinds has another length than the layers; argparse has a list of one."""
    kinds, layers = reading[KINDS], reading["model.num_layers"]
    if reading.cp == 1 or not isinstance(kinds, tuple) or layers in (None, len(kinds)):
        return False
    return not (reading.is_arguments and len(kinds) == 1)


def _inner_and_outer(reading: Reading) -> tuple[int, int]:
    inner = math.gcd(next(iter(reading[HIERARCHY]), 1), reading.cp)
    return inner, reading.cp // inner


def _hybrid(setting: str, is_wrong: Any, limit: str, value: Any) -> Rule:
    return Rule(
        "hybrid_context_parallel",
        setting,
        lambda r: r["model.hybrid_context_parallel"] and is_wrong(r),
        f"{limit} with hybrid_context_parallel",
        "Megatron-LM stops with an AssertionError",
        to=value,
    )


LOSS_RULES = (
    Rule(
        "per_token_loss",
        PER_TOKEN,
        lambda r: not r[PER_TOKEN] and _may_lack_targets(r),
        "true where fine-tuning with context parallelism",
        lambda r: f"a rank without a target divides by 0: its loss is NaN or wrong; {_nvidia_checks(r)[1]}",
        lambda r: _nvidia_checks(r)[0],
        changes=_summed_per_token,
    ),
    Rule(
        "loss_weighting",
        PER_TOKEN,
        lambda r: not r[PER_TOKEN] and not _may_lack_targets(r) and r.is_offline,
        "true, for the mean over all targets of a step",
        "packs weigh the same, however many targets they hold, so the weight of a target depends on its pack",
        "advice",
        changes=_summed_per_token,
    ),
    # A loss per token is divided once, so gradients are summed over ranks and never averaged.
    Rule(
        "average_in_collective",
        AVERAGE,
        lambda r: r[AVERAGE] and r[PER_TOKEN],
        "false with a loss per token",
        "gradients would be averaged over unequal numbers of targets; Megatron Core stops with an AssertionError",
        to=False,
    ),
    Rule(
        "average_in_collective",
        AVERAGE,
        lambda r: r[AVERAGE] and not r[PER_TOKEN] and r.cp > 1 and r.is_fine_tuning,
        "false with context parallelism",
        lambda r: f"gradients would be averaged over unequal numbers of targets; {_nvidia_checks(r)[1]}",
        lambda r: _nvidia_checks(r)[0],
        to=False,
    ),
    # Hierarchical context parallelism: one kind of communication or one per layer, and sizes that multiply to CP.
    Rule(
        "cp_sizes",
        KINDS,
        _are_not_one_a_layer,
        lambda r: f"one name that is no list, or one for each of num_layers = {r['model.num_layers']}",
        lambda r: f"the list has {len(r[KINDS])}; Megatron stops with an AssertionError",
        changes=lambda r: {KINDS: r[KINDS][0]} if len(set(r[KINDS])) == 1 else {},
        fix=lambda r: None if len(set(r[KINDS])) == 1 else "write one name, such as p2p, or one per layer",
    ),
    Rule(
        "cp_sizes",
        HIERARCHY,
        lambda r: r.cp > 1 and _asks_for_sizes(r),
        "sizes whose product is context_parallel_size = {r.cp}, with cp_comm_type a2a+p2p",
        "without them every rank attends to its own chunks only; releases that check it stop, others train on",
        "silently wrong",
        to=lambda r: (r.cp // 2, 2) if r.cp % 2 == 0 and r.cp > 2 else (r.cp, 1),
    ),
    Rule(
        "cp_sizes",
        KINDS,
        lambda r: r.cp == 1 and _asks_for_sizes(r) and r.is_new and not r.is_arguments,
        "p2p without context parallelism, or a2a+p2p with sizes",
        "Megatron-Bridge asks for the sizes without context parallelism too, and stops with an AssertionError",
        to="p2p",
    ),
    Rule(
        "cp_sizes",
        HIERARCHY,
        lambda r: r[HIERARCHY] is not None and math.prod(r[HIERARCHY]) != r.cp,
        "sizes whose product is context_parallel_size = {r.cp}",
        lambda r: f"their product is {math.prod(r[HIERARCHY])}; Megatron stops with an AssertionError",
        to=_inner_and_outer,
    ),
    # Hybrid context parallelism: groups by the length of each sample; what it can't be combined with.
    _hybrid(PIPELINE, lambda r: r.pp > 1, "1", 1),
    _hybrid("model.enable_cuda_graph", lambda r: r["model.enable_cuda_graph"], "false", False),
    _hybrid("ddp.use_megatron_fsdp", lambda r: r["ddp.use_megatron_fsdp"], "false", False),
    _hybrid(PER_TOKEN, lambda r: not r[PER_TOKEN], "true", True),
    _hybrid(LOADER, lambda r: r[LOADER] != "single", '"single"', "single"),
    Rule(
        "hybrid_context_parallel",
        ONE_RANK,
        lambda r: r["model.hybrid_context_parallel"] and not r.has(ONE_RANK),
        "given with hybrid_context_parallel",
        "nothing says how long a sample one rank may take",
        changes=lambda r: {ONE_RANK: r["model.seq_length"]} if r["model.seq_length"] else {},
        fix=lambda r: None if r["model.seq_length"] else "set the tokens that one rank may take",
    ),
)


# CUDA graphs: what is recorded once has one shape, boundaries of packed rows included.

ROUTER = {"moe", "moe_router", "moe_preprocess"}
_WHOLE = {"full", "full_iteration", "full_iteration_inference"}


def implementation(reading: Reading) -> str:
    """Return which graphs are recorded, older switches included."""
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
    return {*(reading[SCOPE] or ()), *(reading[MODULES] or ())}


def _is_by_layer(reading: Reading) -> bool:
    return implementation(reading) == "transformer_engine"


def _captures_attention(reading: Reading) -> bool:
    parts = captured(reading)
    is_by_layer = _is_by_layer(reading) or (implementation(reading) == "local" and not reading.is_new)
    return is_full_iteration(reading) or (is_by_layer and (not parts or "attn" in parts))


def _graph_varies_in_width(reading: Reading) -> bool:
    """Return whether rows of a graph have several widths, and no other rule reports it."""
    is_graph = is_full_iteration(reading) or _is_by_layer(reading) or _captures_attention(reading)
    return reading.is_offline and is_graph and not (reading[reading.width] or reading.spec("pad_cu_seqlens"))


def _graph_checks(reading: Reading) -> str:
    """Return what the release does with packed rows of several shapes in a graph."""
    replays = (
        "releases before 0.6 don't check it: the graph replays the first row's shape, or its recording fails"
    )
    return VALUE_ERROR if reading.is_new else replays


def _holds_router(reading: Reading) -> bool:
    parts = captured(reading)
    is_packed = (reading.is_offline or reading.is_in_batch) and reading["model.num_moe_experts"]
    return reading.is_new and is_packed and _is_by_layer(reading) and (not parts or bool(parts & ROUTER))


def _parts(reading: Reading) -> str:
    return MODULES if reading.has(MODULES) else SCOPE


GRAPH_RULES = (
    # From 0.6 on `local` means graphs of a whole step; parts of layers are Transformer Engine's.
    Rule(
        "cuda_graph_impl",
        IMPL,
        lambda r: r.is_new and implementation(r) == "local" and not is_full_iteration(r),
        "transformer_engine for parts of layers; local only with the scope full_iteration",
        lambda r: f"local graphs hold {', '.join(sorted(captured(r))) or 'no scope'}; Megatron-Bridge stops",
        to="transformer_engine",
    ),
    # Boundaries padded to one number are those of rows of one width.
    Rule(
        "static_width",
        "{r.width}",
        lambda r: r.is_offline and r.spec("pad_cu_seqlens") and not r[r.width],
        "true with pad_cu_seqlens",
        "boundaries are padded up to the row's width, which must always be the same; Megatron-Bridge stops",
        to=True,
    ),
    Rule(
        "static_width",
        "{r.width}",
        _graph_varies_in_width,
        lambda r: f"true with CUDA graphs ({implementation(r)})",
        lambda r: f"rows of several widths don't fit one graph; {_graph_checks(r)}",
        lambda r: "stops" if r.is_new else "silently wrong",
        to=True,
    ),
    Rule(
        "static_boundaries",
        "{r.specs}.pad_cu_seqlens",
        lambda r: r.is_offline and _captures_attention(r) and not r.spec("pad_cu_seqlens"),
        lambda r: f"true with CUDA graphs that hold attention ({implementation(r)})",
        lambda r: f"the number of documents differs from pack to pack; {_graph_checks(r)}",
        lambda r: "stops" if r.is_new else "silently wrong",
        changes=lambda r: {f"{r.specs}.pad_cu_seqlens": True, r.width: True},
    ),
    # From 0.6 on the mask that keeps padding from experts doesn't reach a router within a graph.
    Rule(
        "graph_router",
        _parts,
        _holds_router,
        "attn only, with packed rows and experts",
        "a router inside a graph gets no mask of padding; Megatron-Bridge stops with a ValueError at the first step",
        changes=lambda r: {_parts(r): ("attn",), **({SCOPE: None} if r.has(MODULES) else {})},
    ),
    # Rows packed within a micro-batch are as long as their documents, so no graph fits the next.
    Rule(
        "graph_in_batch",
        IMPL,
        lambda r: r.is_in_batch and (is_full_iteration(r) or _is_by_layer(r)),
        "none with in-batch packing, unless rows have one width and one number of boundaries",
        "the length of a row and the number of its documents change with every micro-batch",
        "advice",
        to="none",
    ),
)


# Energon's own packing (`packing_buffer_size`), which Megatron-Bridge allows with few things.


def _energon(setting: str, is_wrong: Any, limit: Any, value: Any = None, changes: Any = None) -> Rule:
    return Rule(
        "energon",
        setting,
        is_wrong,
        limit,
        "Energon's packing doesn't go with it: releases from 0.6 on stop with a ValueError, others don't check it",
        lambda r: "stops" if r.is_new else "advice",
        to=value,
        changes=changes,
    )


def _with_energon(setting: str, right: tuple[Any, ...], limit: str) -> Rule:
    """Return the rule that a setting has one of these values with Energon's packing, the last being the usual one."""
    limit = f"{limit} with Energon's packing"
    return _energon(setting, lambda r: r.is_energon and r[setting] not in right, limit, right[-1])


def _energon_differs(setting: str) -> Rule:
    """Return the rule that Energon's own micro-batch size is that of training, and of evaluation."""
    own, is_evaluation = "dataset.micro_batch_size", setting.startswith("validation")

    def is_wrong(reading: Reading) -> bool:
        is_asked = reading.is_new and (reading["dataset.do_validation"] or not is_evaluation)
        is_given = reading[own] is not None and reading.has(setting)
        return is_asked and is_given and reading[setting] != reading[own]

    def rows(reading: Reading) -> dict[str, Any]:
        count = 1 if reading.is_energon else reading[MICRO] if is_evaluation else reading[setting]
        return {setting: count, own: count}

    return _energon(setting, is_wrong, lambda r: f"the same as {r.shown(own)}", changes=rows)


OVERLAPS = tuple(
    f"{part}.{name}"
    for part in ("model", "comm_overlap")
    for name in ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute")
)


def _overlap(setting: str) -> Rule:
    return Rule(
        "energon",
        setting,
        lambda r: r.is_energon and r[setting],
        "false with Energon's packing",
        "its schedule doesn't pass on images and boundaries; Megatron-Bridge turns it off and warns",
        "advice",
        to=False,
    )


ENERGON_RULES = (
    # One row a micro-batch, a loss per token, no graphs, no pipeline, no further targets.
    _energon(BUFFER, lambda r: r.is_energon and r[BUFFER] < 1, "1 or more, or not given", 16),
    _with_energon(MICRO, (None, 1), "1"),
    _with_energon(PER_TOKEN, (True,), "true"),
    _energon(
        AVERAGE,
        lambda r: r.is_energon and r[AVERAGE] and not r[PER_TOKEN],
        "false with Energon's packing",
        False,
    ),
    _with_energon(IMPL, ("none",), "none"),
    _with_energon("model.vision_cuda_graph_impl", ("none",), "none"),
    _with_energon("model.dist_train.use_dist_train", (False,), "false"),
    _with_energon(PIPELINE, (1,), "1"),
    _with_energon(FURTHER, (0, None), "not given"),
    _energon_differs(MICRO),
    _energon_differs("validation.eval_micro_batch_size"),
    # Overlap of the experts' communication is turned off, as its schedule drops images and boundaries.
    *map(_overlap, OVERLAPS),
)


# Families that can't be trained packed, further targets, prompts as weights, experts.


@dataclass(frozen=True, slots=True)
class Family:
    """A family that NVIDIA doesn't train packed, one way or at all."""

    name: str
    pattern: str
    """Found in a name of the model, in small letters, without dots, dashes and underscores."""
    way: Literal["offline", "in-batch"]
    outcome: Outcome
    why: str
    until: tuple[int, int] = (99, 0)
    """The release from which on this no longer holds."""


REFUSED_BY_CORE = "its gated delta nets refuse packed rows: Megatron Core stops with a NotImplementedError"
IMAGES_GROW = "images grow after the boundaries are made, so its collator stops with a ValueError"
FAMILIES = (
    Family("Qwen3-Next", r"qwen3next", "offline", "stops", REFUSED_BY_CORE, (0, 6)),
    Family("Qwen3-Next", r"qwen3next", "offline", "advice", "NVIDIA's fine-tuning recipe turns packing off"),
    Family("GLM-4.5", r"glm45(?!v)|glmmoe", "offline", "advice", "NVIDIA's recipes turn packing off"),
    Family("DeepSeek-V4", r"deepseekv4|dsv4", "offline", "advice", "NVIDIA's recipes turn packing off"),
    Family("Qwen3.5-VL", r"qwen35vl", "in-batch", "advice", "NVIDIA's recipes turn in-batch packing off"),
    Family("Qwen-Omni", r"qwen(25|3|35)?omni", "in-batch", "stops", "its collator stops with a ValueError"),
    Family("Qwen3-ASR", r"qwen3asr", "in-batch", "stops", "its step stops with an error"),
    Family("Nemotron-VL", r"nemotron.*vl", "in-batch", "stops", IMAGES_GROW),
)
"""Of each way of packing, the families that have it turned off or refuse it; the first that fits is reported."""

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
        *(str(reading[name]) for name in _NAMES if reading.has(name)),
    ]
    plain = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in names]
    ways = {"offline": reading.is_offline, "in-batch": reading.is_in_batch or reading.is_energon}
    for family in FAMILIES:
        matches = [name for name, text in zip(names, plain) if re.search(family.pattern, text)]
        if not ways[family.way] or not matches or not reading.is_before(*family.until):
            continue
        ways[family.way] = False
        setting, changes = _switched_off(reading, family.way)
        what = f"{matches[0]} is of the family {family.name}: {family.why}"
        limit, seen = f"off for {family.name}", f"{reading.packing} of {matches[0]}"
        yield found(reading, "model_family", setting, limit, what, family.outcome, changes, seen=seen)


def _switched_off(reading: Reading, way: str) -> tuple[str, dict[str, Any]]:
    """Return the setting that turns a way of packing on, and what turns it off."""
    if way == "offline":
        flag: dict[str, Any] = {OFFLINE_FLAG: False} if reading.is_new else {}
        return reading.specs, {reading.specs: None, **flag}
    if reading.is_in_batch:
        return reading.in_batch_name, {reading.in_batch_name: False}
    return BUFFER, {BUFFER: None}


def _pads_documents(reading: Reading) -> bool:
    return reading.is_offline and reading.spec("pad_seq_to_mult") > 1


BALANCE = ("model.moe_aux_loss_coeff", "model.moe_z_loss_coeff", "model.moe_router_enable_expert_bias")
"""What balances experts."""


def _balancer(reading: Reading) -> str:
    return next((setting for setting in BALANCE if reading[setting]), "")


def _has_padding(reading: Reading) -> bool:
    offline = reading.is_offline and (reading.spec("pad_seq_to_mult") > 1 or reading[reading.width])
    return offline or (reading.is_in_batch and reading.alignment > 1)


def _prompts(setting: str) -> Rule:
    return Rule(
        "p_tuning",
        setting,
        lambda r: r.is_offline and r[setting],
        "0 with packed rows",
        "a prompt of weights begins a row, and not each document; Megatron-Bridge stops with an AssertionError",
        to=0,
    )


FAMILY_RULES = (
    family_packs,
    # Multi-token prediction shifts targets along a row; packed rows have documents and padding in it.
    Rule(
        "mtp",
        FURTHER,
        lambda r: r[FURTHER] and _pads_documents(r),
        "not given with packing",
        "further targets are shifted as if documents had no padding (Megatron-LM pull request 6205)",
        "silently wrong",
        to=None,
    ),
    Rule(
        "mtp",
        FURTHER,
        lambda r: (
            r[FURTHER] and (r.is_offline or r.is_in_batch or r["dataset.sft"]) and not _pads_documents(r)
        ),
        "not given with packing",
        "NVIDIA documents it as not supported with packed fine-tuning, though some of its own runs have it",
        "advice",
        to=None,
    ),
    # P-tuning puts weights before each row, and packed rows begin many documents.
    _prompts("dataset.dataset_kwargs.virtual_tokens"),
    _prompts("peft.virtual_tokens"),
    # Before 0.7 padding within packed rows counts in the losses and biases that balance experts.
    Rule(
        "moe_padding",
        _balancer,
        lambda r: r["model.num_moe_experts"] and _balancer(r) and _has_padding(r) and r.is_before(0, 7),
        "0 where packed rows have padding, before release 0.7",
        "padding is routed to experts and counts in what balances them; only later releases mask it",
        "advice",
        fix="keep padding small: full packs, and pad_seq_to_mult no larger than needed",
    ),
)


# Releases: what one of them does wrong or otherwise with packed rows, and which one does it right.


def _perhaps(reading: Reading, release: str) -> str:
    """Return the words that a finding opens with where the release isn't known."""
    is_known = reading.release is not None or reading.dialect == "0.4"
    return "" if is_known else f"if the release is one before {release}: "


def _is_certain(reading: Reading) -> bool:
    return reading.is_certain or reading.release is not None


def _loses_padding(reading: Reading) -> bool:
    """Return whether `pad_seq_to_mult` is given, and doesn't reach the reader of Parquet rows."""
    is_parquet = not str(reading.spec("packed_train_data_path") or "").lower().endswith(".npy")
    is_first = reading.release is not None and reading.is_before(0, 4)
    return _pads_documents(reading) and is_parquet and reading.is_before(0, 5, 1) and not is_first


def _has_chats(reading: Reading) -> bool:
    names = reading.classes.get("dataset.preprocessing", ())
    return reading["dataset.dataset_kwargs.chat"] or any("Chat" in name for name in names)


RELEASE_RULES = (
    # Middle pipeline stages that get no boundaries attend across documents.
    Rule(
        "middle_stages",
        PIPELINE,
        lambda r: r.pp > 2 and r["dataset.sft"] and r.tp > 1,
        "at most 2 with packed rows and tensor parallelism",
        "ranks of middle stages get no boundaries, and stop or attend across documents (Megatron-LM issue 4092)",
        "advice",
        to=2,
    ),
    Rule(
        "middle_stages",
        PIPELINE,
        lambda r: r.pp > 2 and r.is_offline and r.is_before(0, 5),
        "at most 2 with packed rows, before release 0.5.0",
        lambda r: (
            ("" if _is_certain(r) else "if the release is one before 0.5.0: ")
            + "middle stages get no boundaries and attend across documents; users lost 10 to 20 points (issue 2952)"
        ),
        lambda r: "silently wrong" if _is_certain(r) else "advice",
        fix='use release 0.5.0 or later (then say so with dialect="0.5"), or two stages and more tensor parallelism',
    ),
    # The -1 that ends a row's boundaries is passed to the kernel that cuts rows among ranks.
    Rule(
        "boundary_terminators",
        "model.context_parallel_size",
        lambda r: r.is_offline and r.cp > 1 and r.is_before(0, 5, 1),
        "1 with packed rows, or release 0.5.1 and later",
        lambda r: (
            f"{_perhaps(r, '0.5.1')}the -1 after a row's boundaries counts as one of them when the row is cut among "
            "ranks; with rows from Parquet this failed (pull request 4489)"
        ),
        "advice",
        fix="use release 0.5.1 or later",
    ),
    Rule(
        "parquet_padding",
        MULTIPLE,
        _loses_padding,
        "1 with rows from Parquet, or release 0.5.1 and later",
        lambda r: (
            f"{_perhaps(r, '0.5.1')}the reader of Parquet rows ignores it: attention and experts take the padding of "
            "documents for tokens"
        ),
        "advice",
        fix="use release 0.5.1 or later",
    ),
    Rule(
        "packing_seed",
        "dataset.seed",
        lambda r: r.is_packed_here and not r.is_new and r.has("dataset.seed"),
        "of no effect on packs before release 0.6",
        "packs are drawn from NumPy's global generator, so each preparation gives others",
        "advice",
        fix="pack with `varlen pack --format megatron`, and name its file in packed_train_data_path",
    ),
    Rule(
        "tokenizer_workers",
        "{r.specs}.num_tokenizer_workers",
        lambda r: r.is_packed_here and r.is_new and r.spec("num_tokenizer_workers") in (-1, 0),
        "2 or more, for more than one process",
        "up to 0.5.1 this meant all cores; from 0.6 on it means one, on rank 0, while all others wait",
        "advice",
        to=8,
    ),
    # Chats aren't cut when they are tokenized.
    Rule(
        "overlong_samples",
        SIZE,
        lambda r: r.is_packed_here and _has_chats(r),
        "the longest chat",
        "a longer chat is left out, and a line of the log counts them; before 0.6 it ends packing with an IndexError",
        "advice",
        fix="see `varlen inspect` for the lengths; `varlen pack --overlong split` keeps every token",
    ),
    Rule(
        "eos_padding",
        MULTIPLE,
        lambda r: _pads_documents(r) and (r.is_before(0, 6) or r.release in ((0, 6, 0), None)),
        "1, or documents without end tokens within them, up to release 0.6.0",
        "padding is recognised by its token id, the end-of-document one: a real one at a document's end counts as "
        "padding, and one within it (chats of several turns) removes the target after it",
        "advice",
        fix="feed the rows with varlen, which stores lengths and infers none",
    ),
)

RULES: Rules = (*LOSS_RULES, *GRAPH_RULES, *ENERGON_RULES, *FAMILY_RULES, *RELEASE_RULES)

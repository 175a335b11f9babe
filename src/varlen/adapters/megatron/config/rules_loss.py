"""Rules about the loss and about the process groups of context parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterator

from varlen.adapters.megatron.config.finding import found
from varlen.adapters.megatron.config.reading import CONVERSATIONS, FINE_TUNING, Reading
from varlen.adapters.megatron.config.report import ConfigFinding, Outcome

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


RULES = (loss_is_per_token, gradients_are_summed, groups_of_ranks_multiply, hybrid_groups_have_limits)

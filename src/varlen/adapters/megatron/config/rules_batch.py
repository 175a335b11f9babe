"""Rules about batches: rows of a micro-batch, the global batch, and the processes that share it."""

from __future__ import annotations

from collections.abc import Iterator

from varlen.adapters.megatron.config.finding import found
from varlen.adapters.megatron.config.reading import Reading, multiples
from varlen.adapters.megatron.config.report import ConfigFinding

MICRO, GLOBAL = "train.micro_batch_size", "train.global_batch_size"
EVAL_MICRO, EVAL_GLOBAL = "validation.eval_micro_batch_size", "validation.eval_global_batch_size"


def packs_come_one_by_one(reading: Reading) -> Iterator[ConfigFinding]:
    """A micro-batch of offline packing is one row: its boundaries are those of one row."""
    rows = reading.micro_batch or 1
    if not (reading.is_offline or reading["dataset.sft"]) or rows == 1:
        return
    changes: dict[str, object] = {MICRO: 1}
    steps, size = reading[GLOBAL], reading.spec("packed_sequence_size")
    packed_already = reading.says(f"{reading.specs}.packed_train_data_path")
    if reading.is_offline and steps and size > 0 and steps % rows == 0 and not packed_already:
        # As many tokens a step, and as many in each forward pass.
        changes |= {GLOBAL: steps // rows, f"{reading.specs}.packed_sequence_size": size * rows}
    how = (
        "Megatron-Bridge stops with a ValueError; a custom data set at the first step"
        if not reading.is_arguments
        else "Megatron-LM stops where it hands the boundaries on"
    )
    yield found(
        reading,
        "micro_batch_packed",
        MICRO,
        limit="1 with packed rows",
        what=f"a packed row holds many documents already, and comes alone; {how}",
        outcome="stops",
        changes=changes,
    )


def in_batch_packs_several(reading: Reading) -> Iterator[ConfigFinding]:
    """Packing within a micro-batch needs two rows at least; the opposite of offline packing."""
    if reading.is_in_batch and reading.micro_batch == 1:
        yield found(
            reading,
            "micro_batch_in_batch",
            MICRO,
            limit="2 or more with in-batch packing",
            what="the rows of a micro-batch are packed into one, and there is only one; Megatron-Bridge stops with a "
            "ValueError",
            outcome="stops",
            changes={MICRO: 2},
        )


def packs_are_evaluated_one_by_one(reading: Reading) -> Iterator[ConfigFinding]:
    """The micro-batch of evaluation is one packed row too."""
    rows = reading[EVAL_MICRO] or 1
    if reading.is_offline and rows > 1 and reading["dataset.do_validation"]:
        yield found(
            reading,
            "eval_micro_batch",
            EVAL_MICRO,
            limit="1 with packed rows",
            what="evaluation hands on the boundaries of several rows where attention takes those of one; its first "
            "step stops",
            outcome="stops",
            changes={EVAL_MICRO: 1},
        )


def processes_divide(reading: Reading) -> Iterator[ConfigFinding]:
    """The number of processes is a multiple of TP·PP·CP."""
    group = reading.tp * reading.pp * reading.cp
    if reading.world_size is None or reading.world_size % group == 0:
        return
    below, above = multiples(reading.world_size, group)
    yield found(
        reading,
        "world_size",
        "world_size",
        limit=f"a multiple of TP·PP·CP = {reading.tp}·{reading.pp}·{reading.cp} = {group}",
        what="the processes can't be shared out; Megatron stops with an AssertionError",
        outcome="stops",
        fix=f"start {' or '.join(map(str, sorted({below, above})))} processes",
        seen=f"{reading.world_size} processes",
    )


def global_batch_divides(reading: Reading) -> Iterator[ConfigFinding]:
    """The global batch is a multiple of micro-batch size times data-parallel size."""
    steps, rows = reading[GLOBAL], reading.micro_batch
    if steps is None or rows is None:
        return
    group = rows * (reading.dp or 1)
    if steps % group:
        below, above = multiples(steps, group)
        of = (
            f"{MICRO} · data-parallel size = {rows}·{reading.dp} = {group}"
            if reading.dp
            else f"{MICRO} = {rows}"
        )
        yield found(
            reading,
            "global_batch",
            GLOBAL,
            limit=f"a multiple of {of}",
            what="the ranks can't take equally many micro-batches; Megatron stops with an AssertionError",
            outcome="stops",
            changes={GLOBAL: below},
            fix=f"{below} or {above}" if below != above else None,
        )


def evaluation_batch_divides(reading: Reading) -> Iterator[ConfigFinding]:
    """From 0.6 on: the same in evaluation, whose context parallelism may be another."""
    steps = reading[EVAL_GLOBAL] or reading[GLOBAL]
    rows = reading[EVAL_MICRO] or reading.micro_batch
    cp = reading["dist.eval_context_parallel_size"] or reading.cp
    group = reading.tp * reading.pp * cp
    if reading.dialect != "0.6" or reading.dp is None or steps is None or rows is None:
        return
    if not (reading.says(EVAL_GLOBAL) or reading.says(EVAL_MICRO) or cp != reading.cp):
        return
    assert reading.world_size is not None
    if reading.world_size % group:
        yield found(
            reading,
            "world_size",
            "dist.eval_context_parallel_size",
            limit=f"{reading.world_size} processes are a multiple of TP·PP·CP of evaluation = {group}",
            what="the processes can't be shared out in evaluation; Megatron-Bridge stops with an AssertionError",
            outcome="stops",
            changes={"dist.eval_context_parallel_size": reading.cp},
        )
        return
    share = rows * (reading.world_size // group)
    if steps % share:
        below, above = multiples(steps, share)
        yield found(
            reading,
            "global_batch",
            EVAL_GLOBAL,
            limit=f"a multiple of the evaluation's micro-batch · data-parallel size = {share}",
            what="the ranks can't take equally many micro-batches in evaluation; Megatron-Bridge stops with an "
            "AssertionError",
            outcome="stops",
            changes={EVAL_GLOBAL: below},
            fix=f"{below} or {above}" if below != above else None,
        )


RULES = (
    packs_come_one_by_one,
    in_batch_packs_several,
    packs_are_evaluated_one_by_one,
    processes_divide,
    global_batch_divides,
    evaluation_batch_divides,
)

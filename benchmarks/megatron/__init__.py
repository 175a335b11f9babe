"""Megatron: packing ahead, rows in random order and batches, beside megatron-bridge; round trips with it.

Section `megatron`. Begin in `round_trips`, as what isn't equal isn't worth a race; `offline` packs files, `rows`
reads and collates them; `chats` are the input of all.
"""

from benchmarks.rows import Step


def steps() -> list[Step]:
    # Here, since a contestant's process, whose memory is measured, imports the package too.
    from benchmarks.megatron import offline, round_trips, rows

    return [step for part in (round_trips, offline, rows) for step in part.steps()]


SECTIONS = {"megatron": steps}

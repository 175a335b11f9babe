"""The sizes of record batches of Arrow files: they may be compressed, or share values between rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, BinaryIO

from varlen.source.formats.arrow_blocks import blocks_of
from varlen.source.formats.damage import is_damage
from varlen.source.formats.decoded import batch_sizes, shares

_AMPLIFIED = 8
"""Times its share of the file that a batch decodes to before that is told of it."""


def sizes(table: Any, stored: BinaryIO, wanted: list[str], file_bytes: int) -> list[int]:
    """Estimate the bytes of each record batch: its share of the file, unless it decodes to many times as much.

    The same for the same file anywhere. Where batches are compressed or share values, the first, the middle and the
    last are looked into, and all of them if one decodes to more.

    Args:
        table: a reader of a file.
        stored: the file that it reads.
        wanted: columns.
        file_bytes: of the file.
    """
    count = table.num_record_batches
    share = file_bytes // max(count, 1)
    kinds = (table.schema.field(name).type for name in wanted)
    if not count or not (any(map(shares, kinds)) or any(b.is_compressed for b in blocks_of(stored, most=1))):
        return [share] * count

    def look(numbers: Sequence[int]) -> dict[int, int]:
        found = {number: _decoded_bytes(table, wanted, number) for number in numbers}
        return {number: size for number, size in found.items() if size > _AMPLIFIED * share}

    found = look(sorted({0, count // 2, count - 1}))
    if found:
        found |= look([number for number in range(count) if number not in found])
    return [found.get(number, share) for number in range(count)]


def _decoded_bytes(table: Any, wanted: list[str], number: int) -> int:
    """Return the bytes that a record batch decodes to; 0 where it can't be read, which reading will tell."""
    try:
        chosen = table.get_batch(number).select(wanted)
        chosen.validate()
    except Exception as error:
        if not is_damage(error):
            raise
        return 0
    return int(batch_sizes(chosen).sum())

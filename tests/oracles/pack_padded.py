"""Padded batches and how they are dealt, in plain lists: what `varlen.pack.padded` must give."""

from collections.abc import Sequence

Batch = list[int]


def padded_batches(
    widths: Sequence[int], order: Sequence[int], window: int, max_tokens: int, max_rows: int, at_once: int
) -> list[Batch]:
    """Cut documents into batches, the longest of each window first, as many as all ranks can compute.

    Args:
        widths: of each document's row.
        order: of the documents.
    """
    batches: list[Batch] = []
    for begin in range(0, len(order), window):
        left = sorted(order[begin : begin + window], key=lambda one: -widths[one])
        while left:
            rows = min(max_rows, max_tokens // widths[left[0]])
            batches.append(left[:rows])
            left = left[rows:]
    while len(batches) % at_once and max(map(len, batches)) > 1:
        missing = -len(batches) % at_once
        largest = sorted(range(len(batches)), key=lambda number: -len(batches[number]))[:missing]
        halved = [[batch[: len(batch) // 2], batch[len(batch) // 2 :]] for batch in batches]
        parts = [halved[number] if number in largest else [batch] for number, batch in enumerate(batches)]
        batches = [part for some in parts for part in some if part]
    return batches


def work_of(batch: Batch, widths: Sequence[int], work: tuple[float, float]) -> float:
    """Return what a batch costs, all its rows as wide as the widest."""
    width = max(widths[one] for one in batch)
    return len(batch) * (work[0] * width + work[1] * width * width)

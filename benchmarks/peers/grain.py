"""grain's packing transformations, which pack a stream of token arrays into padded rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

FIRST_FIT = "grain FirstFitPackIterDataset"
BEST_FIT = "grain BestFitPackIterDataset"
Fit = Literal["first", "best"]


def packer(
    arrays: list[np.ndarray], capacity: int, *, fit: Fit, num_bins: int
) -> Callable[[], list[dict[str, Any]]]:
    """Return a call that packs all documents into rows of ids, segments and positions.

    `num_bins` rows are open at a time; fit "first" is faster, "best" fuller.
    """
    import grain
    from grain import experimental

    packing = experimental.FirstFitPackIterDataset if fit == "first" else experimental.BestFitPackIterDataset
    reading = grain.ReadOptions(num_threads=0)

    def pack() -> list[dict[str, Any]]:
        stream = grain.MapDataset.source(arrays).map(_as_feature).to_iter_dataset(reading)
        length_struct = {"input_ids": capacity}
        return list(
            packing(stream, length_struct=length_struct, num_packing_bins=num_bins, shuffle_bins=False)
        )

    return pack


class FlatTokens:
    """Documents of a file of tokens that is mapped into memory: grain's fastest source, as it copies nothing."""

    def __init__(self, tokens: str, offsets: str) -> None:
        self._tokens, self._files = np.load(tokens, mmap_mode="r"), (tokens, offsets)
        self._offsets = np.load(offsets)

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """Go to other processes as the names of the files."""
        return FlatTokens, self._files

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"input_ids": self._tokens[self._offsets[index] : self._offsets[index + 1]]}


def batches(
    tokens: str,
    offsets: str,
    capacity: int,
    rows: int,
    epochs: int | None,
    *,
    fit: Fit,
    num_bins: int,
    threads: int,
    processes: int,
) -> Iterator[dict[str, Any]]:
    """Yield batches of packed rows with labels, segments and positions.

    With `threads=0` documents are read where they are packed; with `processes=0` a thread of this process reads and
    packs, ahead of whoever takes batches. `epochs=None` never ends.
    """
    import grain
    from grain import experimental

    packing = experimental.FirstFitPackIterDataset if fit == "first" else experimental.BestFitPackIterDataset
    stream = grain.MapDataset.source(FlatTokens(tokens, offsets)).repeat(epochs)
    packed = packing(
        stream.to_iter_dataset(grain.ReadOptions(num_threads=threads)),
        length_struct={"input_ids": capacity},
        num_packing_bins=num_bins,
        shuffle_bins=False,
    )
    batched = packed.batch(rows).map(_with_labels)
    if processes:
        return iter(batched.mp_prefetch(grain.MultiprocessingOptions(num_workers=processes)))
    return iter(experimental.ThreadPrefetchIterDataset(batched, prefetch_buffer_size=4))


def _as_feature(tokens: np.ndarray) -> dict[str, np.ndarray]:
    return {"input_ids": tokens}


def _with_labels(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add labels: no token is learned from another document's, and no padding."""
    is_learned = batch["input_ids_positions"] > 0
    return {**batch, "labels": np.where(is_learned, batch["input_ids"], np.int32(-100))}

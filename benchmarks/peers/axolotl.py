"""axolotl's sample packing: the batch sampler as its trainer builds it, and the compiled loop inside."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

SAMPLER = "axolotl MultipackBatchSampler"
KERNEL = "axolotl pack_group"
GROUP_SIZE = 100_000
"""Documents packed at a time: the sampler's default, and the fullest."""
BIN_SIZE = 200
"""Documents a pack may hold: axolotl's default for `sample_packing_bin_size`."""


def sampler(lengths: np.ndarray, capacity: int, *, group_size: int = GROUP_SIZE) -> Callable[[], list]:
    """Return a call that packs one epoch and hands out its batches of one pack each.

    One process, nothing dropped, and the documents in the order given: the cheapest order there is, since
    axolotl's own random order would be drawn inside the call.
    """
    from axolotl.utils.samplers.multipack import MultipackBatchSampler

    batches = MultipackBatchSampler(
        sampler=range(len(lengths)),
        batch_size=1,
        batch_max_len=capacity,
        lengths=lengths,
        bin_size=BIN_SIZE,
        drop_last=False,
        group_size=group_size,
        num_processes=1,
    )

    def pack_epoch() -> list:
        batches.set_epoch(0)
        return batches.generate_batches()

    return pack_epoch


def kernel(lengths: np.ndarray, capacity: int) -> Callable[[], list]:
    from axolotl.utils.samplers.multipack import pack_group

    def place() -> list:
        return pack_group(lengths, 0, capacity, len(lengths), BIN_SIZE, True)

    return place

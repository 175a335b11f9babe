"""Megatron-Bridge's packing in plain words, and what its release 0.3.1 returned: what ours is compared with."""

from typing import Any

import numpy as np


def seed_global(seed: int) -> None:
    np.random.seed(seed)  # noqa: NPY002


def draw_global() -> float:
    return float(np.random.random())  # noqa: NPY002


def documents(lengths: list[int]) -> list[dict[str, Any]]:
    """Return documents of so many positions each, whose tokens say which document they are of."""
    return [
        {
            "input_ids": [100 * number + at for at in range(length + 1)],
            "loss_mask": [(number + at) % 3 != 0 for at in range(length + 1)],
        }
        for number, length in enumerate(lengths)
    ]


def first_fit(lengths: list[int], size: int) -> list[list[int]]:
    """Put numbers of items, in order, into the first bin with room."""
    bins: list[list[int]] = []
    used: list[int] = []
    for item, length in enumerate(lengths):
        for number, held in enumerate(used):
            if held + length <= size:
                bins[number].append(item)
                used[number] += length
                break
        else:
            bins.append([item])
            used.append(length)
    return bins


def replayed(lengths: list[int], size: int, seed: int, algorithm: str) -> list[list[int]]:
    """Pack as the release does, one step after the other, with lists; returns documents row by row."""
    random = np.random.RandomState(seed)
    by_length: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        by_length.setdefault(length, []).append(number)
    listed = [length for length in sorted(by_length) for _ in by_length[length]]
    if algorithm == "first_fit_shuffle":
        random.shuffle(listed)
    if algorithm == "first_fit_decreasing":
        listed = listed[::-1]
    bins = [[listed[item] for item in held] for held in first_fit(listed, size)]
    stacks = {}
    for length in sorted(by_length):
        order = random.permutation(len(by_length[length]))
        stacks[length] = [by_length[length][place] for place in order]
    return [[stacks[length].pop() for length in held] for held in bins]


LENGTHS = [5, 9, 3, 16, 7, 3, 12, 1, 8, 5, 3, 10, 0, 2, 7, 14, 5, 6, 3, 11, 4, 9, 2, 0, 13]
"""Positions of 25 documents, packed into rows of 16 by megatron-bridge 0.3.1 from PyPI on 2026-11-23."""

RELEASED = {
    ("first_fit_shuffle", 0): [
        *([2, 7, 11, 12, 22, 23], [8, 9, 18], [24, 5], [21, 14], [3], [15, 13], [0, 17, 20], [1, 10]),
        *([19, 16], [6], [4]),
    ],
    ("first_fit_shuffle", 1234): [
        *([2, 8, 7, 13, 23, 22, 12], [21, 18, 5], [17, 16, 0], [24, 10], [15], [19, 20], [4, 1], [3]),
        *([9, 11], [6], [14]),
    ],
    ("first_fit_decreasing", 0): [
        *([3, 12, 23], [15, 22], [24, 5], [6, 20], [19, 9], [11, 17], [1, 14], [21, 4], [8, 16, 2]),
        [0, 18, 10, 13, 7],
    ],
    ("first_fit_decreasing", 1234): [
        *([3, 23, 12], [15, 22], [24, 10], [6, 20], [19, 0], [11, 17], [21, 14], [1, 4], [8, 16, 5]),
        [9, 2, 18, 13, 7],
    ],
}
"""Which documents its `fill_packing_strategy` put into each row, after `numpy.random.seed(seed)`."""

RELEASED_METADATA = {
    "first_fit_shuffle": {
        "dataset_max_seqlen": 16,
        "max_samples_per_bin": 6,
        "packing_factor": 2.27,
        "packing_efficiency": 89.77,
        "pack_size": 16,
        "min_packed_seqlen": 7,
    },
    "first_fit_decreasing": {
        "dataset_max_seqlen": 16,
        "max_samples_per_bin": 5,
        "packing_factor": 2.5,
        "packing_efficiency": 98.75,
        "pack_size": 16,
        "min_packed_seqlen": 14,
    },
}
"""Of its `create_packing_strategy`, at seed 0."""

RELEASED_ROW = {
    "input_ids": [*range(800, 809), *range(900, 906), *range(1800, 1804)],
    "loss_mask": [
        *(False, True, True, False, True, True, False, True, False),
        *(True, True, False, True, True, False, True, True, False, False),
    ],
    "seq_start_id": [0, 9, 15],
}
"""Its second row with "first_fit_shuffle" at seed 0."""

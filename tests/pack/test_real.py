"""Real lengths: packing by windows costs next to nothing, balanced balances, and no token is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import varlen as vl
from varlen.pack.api import DEFAULT_WORK

CAPACITIES = (2048, 4096, 8192, 16_384, 32_768)
WINDOW = 16_384
SETS = (
    "code_src",
    "gsm8k_train",
    "math5000",
    "mix_pretrain_docs",
    "mix_sft",
    "oasst_en100_paths",
    "pub_distca_prolong",
    "pub_distca_wlbllm",
    "pub_flexsp_wikipedia",
    "pub_graphcore_squad11_bert384",
    "pub_graphcore_wikipedia_bert512_sample200k",
    "pub_magiattention_buckets",
    "sgd_dialogues",
    "t0_train_mixture",
    "tau_bench_airline",
)
HISTOGRAMS = ("pub_graphcore_squad11_bert384",)
"""Sets that were written out from a histogram and so stand in order of length, which no stream of documents does."""


def read(data: Path, name: str, most: int | None = None) -> np.ndarray:
    """The lengths of a set in the order in which they are stored, those of histograms shuffled."""
    with np.load(data / "lengths" / f"{name}.npz") as stored:
        lengths = stored["lengths"]
    if name in HISTOGRAMS:
        lengths = np.random.default_rng(0).permutation(lengths)
    return lengths[:most]


def test_no_set_is_left_out(data: Path) -> None:
    with_lengths = [
        path.stem for path in (data / "lengths").glob("*.npz") if "lengths" in np.load(path).files
    ]

    assert sorted(with_lengths) == sorted(SETS)


def check_windows(lengths: np.ndarray, capacity: int, share: float = 0.001) -> None:
    """At most 0.1 % and one pack a window more packs than best-fit-decreasing over the whole set."""
    packer = vl.WindowPacker(capacity=capacity, window=WINDOW)
    parts = [packer.add(lengths[start : start + 10_000]) for start in range(0, len(lengths), 10_000)]
    parts.append(packer.flush())
    tokens = sum(np.bincount(part.document_ids, part.lengths, len(lengths)) for part in parts)
    whole = vl.pack(lengths, capacity, overlong="split").num_packs

    assert np.array_equal(tokens, lengths)
    assert all(part.pack_sums(part.lengths).max(initial=0) <= capacity for part in parts)
    assert sum(part.num_packs for part in parts) <= whole * (1 + share) + -(-len(lengths) // WINDOW)


@pytest.mark.parametrize("name", SETS)
def test_windows_take_at_most_a_thousandth_and_one_pack_a_window_more(name: str, data: Path) -> None:
    lengths = read(data, name, most=100_000)
    for capacity in CAPACITIES:
        check_windows(lengths, capacity)


@pytest.mark.soak
@pytest.mark.parametrize("name", SETS)
def test_windows_take_at_most_a_thousandth_more_over_whole_sets_and_little_above_in_any_order(
    name: str, data: Path
) -> None:
    # In a random order `sgd_dialogues` and the long documents of `pub_distca_prolong`, both at 2,048, came out up to
    # 0.15 % above: few short documents to fill up with, and a first pass that takes packs 99.5 % full as they are
    # since chasing the rest would sort documents by length.
    lengths = read(data, name)
    for capacity in CAPACITIES:
        check_windows(lengths, capacity)
        for seed in (1, 2):
            check_windows(np.random.default_rng(seed).permutation(lengths), capacity, share=0.0015)


def heaviest_times_packs(packing: Any) -> float:
    """Work of the heaviest pack times the number of packs: the cost of packs that wait for each other."""
    tokens = packing.lengths.astype(np.float64)
    work = packing.pack_sums(DEFAULT_WORK[0] * tokens + DEFAULT_WORK[1] * tokens**2)
    return packing.num_packs * float(work.max())


@pytest.mark.parametrize("name", SETS)
def test_balanced_is_never_worse_than_best_fit_decreasing(name: str, data: Path) -> None:
    lengths = read(data, name, most=20_000)
    for capacity in (2048, 8192, 32_768, 131_072):
        fullest = vl.pack(lengths, capacity, overlong="split")
        balanced = vl.pack(lengths, capacity, "balanced", overlong="split")
        assert heaviest_times_packs(balanced) <= heaviest_times_packs(fullest)
        if balanced.num_packs == fullest.num_packs:
            assert vl.score(balanced).work_imbalance <= vl.score(fullest).work_imbalance + 1e-9


def test_balanced_evens_out_work_where_the_longest_document_allows(data: Path) -> None:
    for name in ("t0_train_mixture", "gsm8k_train", "math5000", "sgd_dialogues"):
        lengths = read(data, name)
        fullest = vl.score(vl.pack(lengths, 32_768))
        balanced = vl.score(vl.pack(lengths, 32_768, "balanced"))
        assert balanced.work_imbalance < 1.003 < fullest.work_imbalance
        assert balanced.num_packs <= fullest.num_packs * 1.005


@pytest.mark.parametrize("name", SETS)
def test_best_fit_decreasing_is_full_to_the_bound_of_its_pieces(name: str, data: Path) -> None:
    lengths = read(data, name, most=100_000)
    for capacity in (2048, 8192):
        packing = vl.pack(lengths, capacity, overlong="split")
        bound = vl.lower_bound(packing.lengths, capacity)
        covered = np.bincount(packing.document_ids, packing.lengths, len(lengths))

        assert np.array_equal(covered, lengths)
        assert packing.num_packs <= 1.04 * bound + 1

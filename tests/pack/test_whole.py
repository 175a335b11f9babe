"""Whole windows and real lengths: packs that are full, and no more alike than documents dealt at random."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.packings import UNLIMITED

import varlen as vl
from varlen.pack import passes as whole_module
from varlen.pack.api import DEFAULT_WORK
from varlen.pack.passes import MIN_FILL, whole
from varlen.pack.score import length_correlation

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


def heaviest_times_packs(packing: Any) -> float:
    """Work of the heaviest pack times the number of packs: the cost of packs that wait for each other."""
    tokens = packing.lengths.astype(np.float64)
    work = packing.pack_sums(DEFAULT_WORK[0] * tokens + DEFAULT_WORK[1] * tokens**2)
    return packing.num_packs * float(work.max())


DEALT = 20


def windows_of(data: Path, name: str) -> list[tuple[int, np.ndarray]]:
    """Capacities and windows of a set in a random order, of documents most of which are shorter than half a pack."""
    with np.load(data / "lengths" / f"{name}.npz") as stored:
        lengths = stored["lengths"]
    lengths = np.random.default_rng(0).permutation(lengths[lengths > 0])
    sizes = sorted({min(size, lengths.size) for size in (4096, 16_384, 65_536)})
    capacities = [n for n in (2048, 4096, 8192, 16_384, 32_768) if np.median(lengths) <= n / 2]
    windows = [(capacity, lengths[:size]) for capacity in capacities for size in sizes]
    return [(capacity, window[window <= capacity]) for capacity, window in windows]


def packed(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    pack_of, num_packs = whole(lengths.astype(np.int32), capacity, "best_fit", UNLIMITED, 1)
    sums = np.bincount(pack_of, lengths, num_packs)
    assert (pack_of.min(), pack_of.max(), sums.max() <= capacity) == (0, num_packs - 1, True)
    return pack_of, num_packs


def correlation(lengths: np.ndarray, pack_of: np.ndarray) -> float:
    order = np.argsort(pack_of, kind="stable")
    return length_correlation(lengths[order], np.cumsum([0, *np.bincount(pack_of)]))


def at_random(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The correlations where documents are dealt in a random order, each to the pack that is open."""
    mixed = [np.random.default_rng(seed).permutation(lengths) for seed in range(DEALT)]
    dealt = [vl.pack(order, capacity, "next_fit") for order in mixed]
    return np.array([length_correlation(order[d.document_ids], d.offsets) for order, d in zip(mixed, dealt)])


@pytest.mark.parametrize("name", SETS)
def test_windows_of_real_lengths_are_full_wherever_they_can_be(data, name):
    seen = 0
    for capacity, lengths in windows_of(data, name):
        num_packs, tokens = packed(lengths, capacity)[1], lengths.sum(dtype=np.int64)
        fewest = vl.lower_bound(lengths, capacity)
        if tokens / (fewest * capacity) >= MIN_FILL:
            assert tokens / (num_packs * capacity) >= MIN_FILL, (capacity, lengths.size)
            seen += 1
        else:  # as few as can be, or hardly more, and no more than of the fullest method
            assert num_packs <= fewest * 1.01 + 1
            assert num_packs <= vl.pack(lengths, capacity).num_packs
    assert seen > 0


@pytest.mark.parametrize("name", [name for name in SETS if name != "pub_distca_wlbllm"])
def test_lengths_in_packs_of_real_windows_are_no_more_alike_than_at_random(data, name):
    # Left out is a set with two or three documents a pack, each of which must be chosen for packs to be full.
    for capacity, lengths in windows_of(data, name):
        if lengths.size <= 20_000:
            random = at_random(lengths, capacity)
            assert correlation(lengths, packed(lengths, capacity)[0]) <= random.max() + 3 * random.std()


def test_sorted_packs_would_be_seen(data):
    for capacity, lengths in windows_of(data, "gsm8k_train")[:2]:
        by_length = vl.pack(lengths, capacity)
        random = at_random(lengths, capacity)
        alike = length_correlation(lengths[by_length.document_ids], by_length.offsets)
        assert alike > random.max() + 9 * random.std()


@given(
    st.lists(st.integers(1, 40), max_size=60),
    st.sampled_from([40, 41, 100, 1000]),
    st.sampled_from(["best_fit", "first_fit"]),
    st.sampled_from([1, 2, 5, UNLIMITED]),
    st.sampled_from([1, 1, 4]),
)
def test_every_piece_stands_in_a_pack_that_holds_it(lengths, capacity, method, most, multiple):
    pack_of, num_packs = whole(np.array(lengths, np.int32), capacity * multiple, method, most, multiple)
    slots = -(-np.array(lengths, int) // multiple) * multiple

    assert sorted(set(pack_of.tolist())) == list(range(num_packs))
    assert np.bincount(pack_of, slots, num_packs).max(initial=0) <= capacity * multiple
    assert np.bincount(pack_of).max(initial=0) <= most
    assert num_packs >= vl.lower_bound(lengths, capacity * multiple, most, multiple)


def test_where_a_way_takes_too_many_packs_others_are_tried_and_the_fewest_are_taken(monkeypatch):
    tried, run_passes = [], whole_module._run_passes

    def counted(*arguments):
        found = run_passes(*arguments)
        tried.append(found[1])
        return found

    monkeypatch.setattr(whole_module, "_run_passes", counted)
    # Threes and fives of a pack of ten: two fives, or three threes, which leave a tenth whoever packs them.
    lengths = np.random.default_rng(0).choice([3, 3, 3, 5], 500)
    assert packed(lengths, 10)[1] == min(tried)
    assert len(tried) > 2
    tried.clear()
    packed(np.random.default_rng(0).integers(1, 90, 5000), 1000)
    assert len(tried) == 1


def test_packs_that_are_full_by_their_pieces_are_not_filled_in_vain(monkeypatch):
    monkeypatch.setattr(whole_module, "fill", None)  # would raise
    num_packs = whole(np.full(1000, 5, np.int32), 1000, "best_fit", 4, 1)[1]

    assert num_packs == 250


def test_no_set_is_left_out(data):
    with_lengths = [
        path.stem for path in (data / "lengths").glob("*.npz") if "lengths" in np.load(path).files
    ]

    assert sorted(with_lengths) == sorted(SETS)


@pytest.mark.parametrize("name", SETS)
def test_windows_take_at_most_a_thousandth_and_one_pack_a_window_more(name, data):
    lengths = read(data, name, most=100_000)
    for capacity in CAPACITIES:
        check_windows(lengths, capacity)


@pytest.mark.soak
@pytest.mark.parametrize("name", SETS)
def test_windows_take_at_most_a_thousandth_more_over_whole_sets_and_little_above_in_any_order(name, data):
    # In a random order `sgd_dialogues` and the long documents of `pub_distca_prolong`, both at 2,048, came out up to
    # 0.15 % above: few short documents to fill up with, and a first pass that takes packs 99.5 % full as they are
    # since chasing the rest would sort documents by length.
    lengths = read(data, name)
    for capacity in CAPACITIES:
        check_windows(lengths, capacity)
        for seed in (1, 2):
            check_windows(np.random.default_rng(seed).permutation(lengths), capacity, share=0.0015)


@pytest.mark.parametrize("name", SETS)
def test_balanced_is_never_worse_than_best_fit_decreasing(name, data):
    lengths = read(data, name, most=20_000)
    for capacity in (2048, 8192, 32_768, 131_072):
        fullest = vl.pack(lengths, capacity, overlong="split")
        balanced = vl.pack(lengths, capacity, "balanced", overlong="split")
        assert heaviest_times_packs(balanced) <= heaviest_times_packs(fullest)
        if balanced.num_packs == fullest.num_packs:
            assert vl.score(balanced).work_imbalance <= vl.score(fullest).work_imbalance + 1e-9


def test_balanced_evens_out_work_where_the_longest_document_allows(data):
    for name in ("t0_train_mixture", "gsm8k_train", "math5000", "sgd_dialogues"):
        lengths = read(data, name)
        fullest = vl.score(vl.pack(lengths, 32_768))
        balanced = vl.score(vl.pack(lengths, 32_768, "balanced"))
        assert balanced.work_imbalance < 1.003 < fullest.work_imbalance
        assert balanced.num_packs <= fullest.num_packs * 1.005


@pytest.mark.parametrize("name", SETS)
def test_best_fit_decreasing_is_full_to_the_bound_of_its_pieces(name, data):
    lengths = read(data, name, most=100_000)
    for capacity in (2048, 8192):
        packing = vl.pack(lengths, capacity, overlong="split")
        bound = vl.lower_bound(packing.lengths, capacity)
        covered = np.bincount(packing.document_ids, packing.lengths, len(lengths))

        assert np.array_equal(covered, lengths)
        assert packing.num_packs <= 1.04 * bound + 1

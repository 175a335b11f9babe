"""What an inspection advises: a capacity, a method and a policy that follow from the figures."""

from dataclasses import replace

import numpy as np
import pytest
from tests.support.rarely import mostly

import varlen as vl
from varlen.report.advice import CANDIDATES, DEFAULTS, choose_capacity, choose_method
from varlen.report.inspection import inspect_lengths

RNG = np.random.default_rng(0)
SHORT = RNG.integers(50, 200, 3_000)
LONG_TAIL = np.r_[RNG.integers(50, 200, 3_000), [30_000] * 3]


def test_the_advice_changes_with_the_data():
    short = inspect_lengths(SHORT).advice
    tail = inspect_lengths(LONG_TAIL, capacities=[2_048, 4_096]).advice
    documents = inspect_lengths(RNG.lognormal(8, 1, 2_000).astype(int) + 1).advice

    assert short.overlong == "error"
    assert "no document is cut" in short.why
    assert tail.overlong == "split"
    assert "Splitting what is longer loses nothing" in tail.why
    assert documents.capacity > short.capacity


def test_a_capacity_that_cuts_many_documents_is_not_chosen():
    lengths = np.r_[np.full(900, 500), np.full(100, 3_000)]

    found = inspect_lengths(lengths, capacities=[1_024, 2_048, 4_096, 8_192])

    assert found.advice.capacity == 4_096
    assert choose_capacity(found.capacities[:2]).capacity == 2_048


def rows(at, **changes):
    """The same figures with some packings changed."""
    return replace(at, packings=tuple(replace(row, **changes.get(row.name, {})) for row in at.packings))


LEVEL = {"packs": 100, "fill": 0.99, "work_imbalance": 1.2, "length_correlation": 0.0}
EQUAL = {door + name: LEVEL for door in DEFAULTS for name in CANDIDATES}


def test_a_capacity_that_cuts_many_documents_by_little_is_not_chosen():
    lengths = np.r_[np.full(900, 500), np.full(100, 1_100)]

    found = inspect_lengths(lengths, capacities=[1_024, 2_048])

    assert found.at(1_024).truncation_share < 0.05
    assert found.advice.capacity == 2_048
    assert "at 1,024 it would be 10.0 % of the documents" in found.advice.why


def test_a_capacity_whose_packs_stay_empty_is_not_chosen_for_its_smallness():
    found = inspect_lengths([600] * 900, capacities=[1_000, 1_250])

    assert found.advice.capacity == 1_250
    assert "packs are 96.00 % full; at 1,000 they would be 60.00 %" in found.advice.why


@pytest.mark.parametrize("door", DEFAULTS)
@pytest.mark.parametrize(
    ("changed", "is_taken"),
    [
        ({}, False),
        ({"work_imbalance": 1.01}, True),
        ({"work_imbalance": 1.18}, False),
        ({"packs": 99}, True),
        ({"packs": 101, "work_imbalance": 1.01}, False),
        ({"packs": 90, "work_imbalance": 1.3}, False),
        ({"packs": 90, "length_correlation": 0.6}, False),
        ({"packs": 90, "length_correlation": -0.6}, False),
    ],
)
def test_another_method_is_advised_if_it_is_better_in_one_way_and_worse_in_none(door, changed, is_taken):
    at = inspect_lengths(SHORT, capacities=[8_192]).at(8_192)

    changes = EQUAL | {door + "balanced": LEVEL | changed}

    assert choose_method(rows(at, **changes), door) == ("balanced" if is_taken else DEFAULTS[door])


def test_a_method_that_keeps_lengths_mixed_is_advised_over_one_that_sorts_and_takes_as_many_packs():
    at = inspect_lengths(SHORT, capacities=[8_192]).at(8_192)
    changes = EQUAL | {"best_fit_decreasing": LEVEL | {"length_correlation": 0.9}}

    assert choose_method(rows(at, **changes), "") == "best_fit"


DISTRIBUTIONS = {
    "lognormal": RNG.lognormal(5, 0.45, 4_000).astype(int) + 1,
    "wide": RNG.lognormal(6, 1.4, 3_000).astype(int) + 1,
    "uniform": RNG.integers(1, 1_000, 3_000),
    "bimodal": np.r_[RNG.integers(10, 30, 2_000), RNG.integers(900, 1_000, 500)],
    "one length": np.full(2_000, 341),
    "sorted": np.sort(RNG.lognormal(6, 0.5, 3_000).astype(int) + 1),
    "all overlong": RNG.integers(5_000, 9_000, 100),
    "tiny": np.array([3, 0, 5, 900]),
    "one document": np.array([7]),
}


REAL = (
    "mix_sft", "gsm8k_train", "code_src", "math5000", "mix_pretrain_docs", "oasst_en100_paths", "pub_distca_prolong",
    "pub_distca_wlbllm", "pub_flexsp_wikipedia", "pub_graphcore_wikipedia_bert512_sample200k",
    "pub_magiattention_buckets", "sgd_dialogues", "t0_train_mixture", "tau_bench_airline",
)  # fmt: skip


@pytest.mark.parametrize("arguments", [(), ("data.jsonl", "-o", "packed")], ids=["lengths", "documents"])
@pytest.mark.parametrize("name", mostly([*DISTRIBUTIONS, *REAL[:2]], [*DISTRIBUTIONS, *REAL]))
def test_advice_costs_nothing_against_the_default(name, arguments, request):
    lengths = DISTRIBUTIONS.get(name)
    if lengths is None:
        lengths = np.load(request.getfixturevalue("data") / "lengths" / f"{name}.npz")["lengths"]

    found = inspect_lengths(
        lengths, capacities=[1_024] if name in DISTRIBUTIONS else None, arguments=arguments
    )

    at, door = found.at(found.advice.capacity), "pack_" if arguments else ""
    default = at.packing(door + DEFAULTS[door])
    assert found.advised.name == door + found.advice.method
    assert found.advised.packs <= default.packs
    assert abs(found.advised.length_correlation) <= abs(default.length_correlation) + 0.1
    assert (
        at.packing(found.advice.call.split('method="')[1].split('"')[0]).packs
        <= at.packing(DEFAULTS[""]).packs
    )
    usual = next(
        (one for one in found.capacities if one.capacity == 4_096 and one.overlong_share <= 0.01), None
    )
    if usual is not None and at.capacity < 4_096:
        assert at.overlong_documents <= usual.overlong_documents
        slots = [one.packing("pack_best_fit").packs * one.capacity for one in (at, usual)]
        assert slots[0] <= slots[1]


def test_every_word_of_the_advice_is_in_the_figures():
    found = inspect_lengths(LONG_TAIL, capacities=[2_048])

    assert found.advice.capacity == 2_048
    assert f"{100 * found.advised.fill:.1f}"[:4] in found.advice.headline
    exec(found.advice.call, {"vl": vl, "lengths": LONG_TAIL})

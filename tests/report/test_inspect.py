"""The figures of an inspection, compared with counting by hand, and advice that follows from them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rarely import mostly

import varlen as vl
from varlen.errors import DocumentsError, LengthsError, SettingError
from varlen.report.advice import CANDIDATES, DEFAULTS, choose_capacity, choose_method, headline
from varlen.report.inspection import MOST_SOURCES, inspect_lengths, suitable_capacities
from varlen.report.inspection_figures import METHODS, PACK_METHODS, POLICIES
from varlen.report.page import share

SMALL = st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any)
RNG = np.random.default_rng(0)
SHORT = RNG.integers(50, 200, 3_000)
LONG_TAIL = np.r_[RNG.integers(50, 200, 3_000), [30_000] * 3]


def padded_by_hand(lengths, batch):
    """Slots of batches in this order, each padded to its longest."""
    parts = [lengths[start : start + batch] for start in range(0, len(lengths), batch)]
    return sum(max(part) * len(part) for part in parts)


@given(SMALL, st.integers(1, 9), st.integers(1, 50))
def test_padding_is_what_counting_batch_by_batch_gives(lengths, batch, capacity):
    found = inspect_lengths(lengths, capacities=[capacity], batch_documents=batch)

    full = sorted(length for length in lengths if length)
    ways = {way.name: way for way in found.padding}
    assert ways["buckets"].slots == padded_by_hand(full, batch)
    assert ways["maximum"].slots == max(full) * len(full)
    assert ways["random"].slots <= ways["maximum"].slots
    # Otherwise the batch that is not full may stand where it saves more than sorting does.
    if len(full) % batch == 0:
        assert ways["buckets"].slots <= ways["random"].slots
    assert ways["random"].slots_per_token == ways["random"].slots / sum(full)
    assert ways["random"].padding_share == 1 - sum(full) / ways["random"].slots
    cut = [min(length, capacity) for length in full]
    assert ("buckets_cut" in ways) == (max(full) > capacity)
    if max(full) > capacity:
        assert ways["buckets_cut"].slots == padded_by_hand(cut, batch)
        assert ways["buckets_cut"].tokens == ways["random_cut"].tokens == sum(cut)


@given(SMALL, st.integers(1, 9))
def test_random_batches_are_the_shuffle_of_the_seed(lengths, batch):
    found = inspect_lengths(lengths, capacities=[40], batch_documents=batch, seed=7)

    full = np.array([length for length in lengths if length])
    mixed = full[np.random.default_rng(7).permutation(full.size)]
    assert found.padding[0].slots == padded_by_hand(mixed.tolist(), batch)


@given(SMALL, st.integers(1, 50))
def test_losses_of_every_row_are_what_its_words_say(lengths, capacity):
    found = inspect_lengths(lengths, capacities=[capacity]).at(capacity)

    tokens = sum(lengths)
    longer = [length for length in lengths if length > capacity]
    lost = {"split": 0, "truncate": sum(length - capacity for length in longer), "drop": sum(longer)}
    assert found.overlong_documents == len(longer)
    assert found.truncation_share == lost["truncate"] / tokens
    assert found.dropping_share == lost["drop"] / tokens
    for row in found.packings:
        assert row.lost_tokens == lost[row.overlong]
        assert row.tokens + row.lost_tokens == tokens
        assert row.packs * capacity * row.fill == pytest.approx(row.tokens)
        longer_share = len(longer) / np.count_nonzero(lengths)
        assert row.dropped_share == (longer_share if row.overlong == "drop" else 0)
        if row.method != "wrapped":
            assert row.cut_share == (0 if row.overlong == "drop" else longer_share)
    cut_no_more = [row for row in found.packings if row.kind != "policy" and row.method != "wrapped"]
    assert found.lower_bound <= min(row.packs for row in cut_no_more)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_measured_as_it_packs(method):
    found = inspect_lengths(LONG_TAIL, capacities=[1_024]).at(1_024).packing(method)

    packing = vl.pack(LONG_TAIL, 1_024, method, "split")
    by_hand = [sum(int(n) ** 2 for n in pack) for pack in packs_of(packing)]
    assert found.packs == packing.num_packs
    assert found.fill == packing.fill_ratio
    assert found.attention_imbalance == pytest.approx(max(by_hand) / np.mean(by_hand))
    assert found.work_imbalance == pytest.approx(vl.score(packing).work_imbalance)
    assert found.length_correlation == vl.score(packing).length_correlation


def packs_of(packing):
    return np.split(packing.lengths, packing.offsets[1:-1])


def knapsack(lengths, capacity):
    """One pack after another, each filled with the largest document that still fits."""
    left, packs = sorted(lengths, reverse=True), 0
    while left:
        space, packs = capacity, packs + 1
        for length in list(left):
            if length <= space:
                space -= length
                left.remove(length)
    return packs


def test_the_largest_that_fits_takes_the_packs_that_first_fit_decreasing_takes():
    lengths = np.random.default_rng(1).integers(1, 900, 2_500)

    row = inspect_lengths(lengths, capacities=[700]).at(700).packing("llama_factory_knapsack")

    windows = [lengths[start : start + 1_000] for start in (0, 1_000, 2_000)]
    assert row.packs == sum(knapsack([n for n in window.tolist() if n <= 700], 700) for window in windows)


def test_the_row_of_axolotl_holds_at_most_two_hundred_documents_a_pack():
    row = inspect_lengths([1] * 1_000, capacities=[500]).at(500).packing("axolotl_multipack")

    assert (row.packs, row.fill) == (5, 0.4)


def test_wrapping_cuts_documents_that_would_fit():
    row = inspect_lengths([60] * 10, capacities=[100]).at(100).packing("wrapped")

    assert (row.packs, row.cut_share) == (6, 0.4)


def test_windows_fill_packs_less_than_everything_at_once():
    found = inspect_lengths(SHORT, capacities=[8_192]).at(8_192)

    assert found.packing("trl_bfd").fill < found.packing("best_fit_decreasing").fill
    assert found.packing("trl_bfd").packs == sum(
        vl.pack(SHORT[start : start + 1_000], 8_192).num_packs for start in (0, 1_000, 2_000)
    )


def test_the_distribution_counts_every_document_and_leaves_empty_ones_out_of_the_rest():
    lengths = np.r_[np.zeros(5, np.int64), np.arange(1, 101)]

    found = inspect_lengths(lengths, capacities=[128]).distribution

    assert (found.documents, found.empty, found.tokens, found.longest) == (105, 5, 5_050, 100)
    assert (found.mean, found.median) == (50.5, 50.5)
    assert found.p90 == np.quantile(lengths[5:], 0.9)
    assert found.longest_share == 100 / 5_050
    assert sum(b.documents for b in found.histogram) == 100
    assert sum(b.tokens for b in found.histogram) == 5_050
    for b in found.histogram:
        inside = [n for n in range(1, 101) if b.low <= n <= b.high]
        assert (b.documents, b.tokens) == (len(inside), sum(inside))


def test_supervised_tokens_are_counted_and_those_of_dropped_documents_too():
    found = inspect_lengths([10, 0, 50, 20], targets=[4, 0, 30, 6], capacities=[32])

    assert (found.distribution.targets, found.distribution.targets_share) == (40, 0.5)
    rows = {row.name: row for row in found.at(32).packings}
    assert rows["axolotl_multipack"].lost_targets == 30
    assert rows["trl_bfd"].lost_targets is None
    assert rows["best_fit"].lost_targets == 0


@pytest.mark.parametrize("lengths", [[1], [3, 0, 9], [2_000_000], [1] * 50, SHORT, LONG_TAIL])
def test_some_capacities_suit_any_lengths(lengths):
    chosen = suitable_capacities(np.asarray(lengths, np.int32))

    assert 1 <= len(chosen) <= 6
    assert list(chosen) == sorted(set(chosen))
    assert all(capacity & (capacity - 1) == 0 for capacity in chosen)


def test_a_large_set_offers_the_capacities_that_models_are_trained_with():
    chosen = suitable_capacities(RNG.lognormal(6, 1.2, 20_000).astype(np.int32) + 1)

    assert {2_048, 4_096, 8_192, 32_768} <= set(chosen)


def test_more_documents_than_are_packed_are_sampled_and_losses_are_counted_over_all(monkeypatch):
    monkeypatch.setattr("varlen.report.inspection_figures.MOST_DOCUMENTS", 2_000)
    monkeypatch.setattr("varlen.report.inspection_figures.MOST_WINDOWS", 2)
    lengths = np.r_[np.zeros(10, np.int64), LONG_TAIL, SHORT]

    found = inspect_lengths(lengths, capacities=[2_048])

    assert (found.packed_documents, found.window_documents, found.is_sampled) == (2_000, 2_000, True)
    assert found.distribution.documents == 6_013
    row = found.at(2_048).packing("axolotl_multipack")
    assert (row.documents, row.lost_tokens) == (2_000, 90_000)
    assert found.at(2_048).overlong_documents == 3
    for piece in found.picture.pieces:
        assert lengths[piece.document_id] >= piece.num_tokens > 0


def test_a_tiny_capacity_is_measured_on_fewer_documents(monkeypatch):
    monkeypatch.setattr("varlen.report.inspection_figures.MOST_PIECES", 10_000)

    found = inspect_lengths(SHORT, capacities=[1])

    assert found.packed_documents == 1_000
    assert found.at(1).packing("best_fit").fill == 1.0


def test_the_picture_shows_a_pack_with_texts_where_there_are_some():
    texts = {document: f"text {document}" for document in range(8)}

    found = inspect_lengths([100] * 64, capacities=[800], excerpts=texts)

    assert [piece.excerpt for piece in found.picture.pieces] == list(texts.values())
    assert sum(piece.num_tokens for piece in found.picture.pieces) <= found.picture.capacity == 800


def test_figures_go_through_json_and_back():
    found = inspect_lengths(LONG_TAIL, excerpts=[(0, 'a "quoted" <text>')], name="x")

    tree = json.loads(json.dumps(found.to_json(), allow_nan=False))

    assert tree["format"] == 2
    assert tree["advice"]["capacity"] == found.advice.capacity
    assert tree["padding"][0]["slots_per_token"] == found.padding[0].slots_per_token
    assert len(tree["capacities"][0]["packings"]) == len(PACK_METHODS) + 2 + len(METHODS) + len(POLICIES)
    assert tree["capacities"][0]["packings"][0]["fill"] == found.capacities[0].packings[0].fill


KEYS = {
    "": "format name distribution padding capacities advice picture batch_documents packed_documents "
    "window_documents window seed are_bytes sources notes",
    "distribution": "documents empty tokens mean median p90 p99 longest longest_share targets targets_share "
    "histogram",
    "padding": "name title cut_at tokens slots padding_share slots_per_token saved_share",
    "capacities": "capacity overlong_documents overlong_share truncation_share dropping_share lower_bound packings",
    "packings": "name title kind method overlong documents packs tokens fill lost_tokens lost_share lost_targets "
    "cut_share dropped_share attention_imbalance work_imbalance length_correlation padding_share slots_per_token "
    "estimated_packs lost_targets_share",
    "sources": "name documents tokens tokens_share median longest overlong_documents truncation_share targets",
    "advice": "capacity method packing overlong call command headline why",
    "picture": "capacity pieces documents free_slots packed_pairs padded_pairs",
}


def test_the_keys_of_the_json_are_pinned():
    tree = inspect_lengths(SHORT, sources=[("a", 2_000), ("b", 1_000)]).to_json()

    parts = {"": tree, "packings": tree["capacities"][0]["packings"][0]}
    for name in KEYS.keys() - parts.keys():
        parts[name] = tree[name][0] if isinstance(tree[name], tuple) else tree[name]
    assert {name: " ".join(part) for name, part in parts.items()} == KEYS


def test_texts_are_shortened_to_one_line_that_can_be_written():
    texts = dict.fromkeys(range(64), "a\n  b\x1b[31m \ud800 " + 1_000 * "c")

    found = inspect_lengths([100] * 64, excerpts=texts, name="bad\udcff\r\nname")

    assert found.name == "bad� name"
    for piece in found.picture.pieces:
        assert piece.excerpt.startswith("a b�[31m � cc")
        assert len(piece.excerpt) == 160


def test_the_same_seed_gives_the_same_figures():
    first, again, other = (inspect_lengths(LONG_TAIL, seed=seed) for seed in (3, 3, 4))

    assert first == again
    assert first.padding[0] != other.padding[0]


def test_everything_dropped_leaves_no_packs_and_no_error():
    row = inspect_lengths([50, 60], capacities=[10]).at(10).packing("next_fit_drop")

    assert (row.packs, row.tokens, row.lost_share, row.dropped_share) == (0, 0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"lengths": [0, 0]}, LengthsError, "none of 2 documents holds a token"),
        ({"lengths": []}, LengthsError, "none of 0 documents"),
        ({"lengths": [-1]}, LengthsError, "negative"),
        ({"capacities": []}, SettingError, "capacities is empty"),
        ({"capacities": [0]}, SettingError, "capacity must be a whole number"),
        (
            {"lengths": [2**30], "capacities": [8]},
            SettingError,
            "capacity 8 would cut what is looked at into 134,217,728",
        ),
        ({"batch_documents": 0}, SettingError, "batch_documents must be"),
        ({"seed": -1}, SettingError, "seed must be from 0"),
        ({"targets": [1]}, DocumentsError, "targets must be one whole number per document"),
        ({"targets": [1, 9]}, DocumentsError, "document 1 has 3 tokens and 9 of them supervised"),
    ],
)
def test_what_cannot_be_inspected_is_refused_in_a_sentence(changes, error, said):
    with pytest.raises(error, match=said):
        inspect_lengths(**{"lengths": [2, 3], **changes})


FOUND_BY_PEERS = {
    ("t0_train_mixture", 4096, "trl_bfd"): (0.9912, 0.003),
    ("t0_train_mixture", 4096, "axolotl_multipack"): (0.9973, 0.021),
    ("t0_train_mixture", 4096, "llama_factory_knapsack"): (0.9905, 0.021),
    ("t0_train_mixture", 4096, "next_fit_drop"): (0.9035, 0.021),
    ("t0_train_mixture", 32768, "trl_bfd"): (0.9423, 0),
    ("t0_train_mixture", 32768, "axolotl_multipack"): (0.9978, 0),
    ("t0_train_mixture", 32768, "llama_factory_knapsack"): (0.9423, 0),
    ("t0_train_mixture", 32768, "next_fit_drop"): (0.9779, 0),
    ("mix_sft", 4096, "trl_bfd"): (0.9906, 0.117),
    ("mix_sft", 4096, "axolotl_multipack"): (0.9976, 0.227),
    ("mix_sft", 4096, "llama_factory_knapsack"): (0.9921, 0.227),
    ("mix_sft", 4096, "next_fit_drop"): (0.9154, 0.227),
    ("pub_distca_prolong", 4096, "trl_bfd"): (0.9839, 0.255),
    ("pub_distca_prolong", 4096, "axolotl_multipack"): (0.9470, 0.519),
    ("pub_distca_prolong", 4096, "llama_factory_knapsack"): (0.9757, 0.519),
    ("pub_distca_prolong", 4096, "next_fit_drop"): (0.7568, 0.519),
    ("pub_distca_prolong", 32768, "trl_bfd"): (0.9921, 0.027),
    ("pub_distca_prolong", 32768, "axolotl_multipack"): (0.9933, 0.049),
    ("pub_distca_prolong", 32768, "llama_factory_knapsack"): (0.9913, 0.049),
    ("pub_distca_prolong", 32768, "next_fit_drop"): (0.9119, 0.049),
}
"""Fill and loss that the peers' own code came to on the same lengths (TRL 1.16, axolotl 0.19, LLaMA-Factory,
and a next-fit that also counts an end token)."""


@pytest.mark.parametrize("name", ["t0_train_mixture", "mix_sft", "pub_distca_prolong"])
def test_rows_of_peers_come_near_what_their_own_code_does(name, data):
    lengths = np.load(data / "lengths" / f"{name}.npz")["lengths"]
    rows = {key[1:]: value for key, value in FOUND_BY_PEERS.items() if key[0] == name}

    found = inspect_lengths(lengths, capacities=sorted({capacity for capacity, _ in rows}))

    for (capacity, policy), (fill, lost) in rows.items():
        row = found.at(capacity).packing(policy)
        assert row.fill == pytest.approx(fill, abs=0.01), (name, capacity, policy)
        assert row.lost_share == pytest.approx(lost, abs=0.0006), (name, capacity, policy)


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
EQUAL = {entry + name: LEVEL for entry in DEFAULTS for name in CANDIDATES}


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


@pytest.mark.parametrize("entry", DEFAULTS)
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
def test_another_method_is_advised_if_it_is_better_in_one_way_and_worse_in_none(entry, changed, is_taken):
    at = inspect_lengths(SHORT, capacities=[8_192]).at(8_192)

    changes = EQUAL | {entry + "balanced": LEVEL | changed}

    assert choose_method(rows(at, **changes), entry) == ("balanced" if is_taken else DEFAULTS[entry])


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

    at, entry = found.at(found.advice.capacity), "pack_" if arguments else ""
    default = at.packing(entry + DEFAULTS[entry])
    assert found.advised.name == entry + found.advice.method
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
    ways = {way.name: way for way in found.padding}
    saved = [1 - 1 / found.advised.fill / ways[name].slots_per_token for name in ("random", "buckets")]
    assert found.advice.headline == headline(2_048, 8, *saved)
    assert share(saved[0]) in found.advice.headline
    exec(found.advice.call, {"vl": vl, "lengths": LONG_TAIL})


@given(
    st.lists(st.lists(st.integers(0, 50), max_size=9), min_size=2, max_size=30).filter(
        lambda all_: any(map(any, all_))
    )
)
def test_every_file_is_counted_by_itself_and_small_ones_together(files):
    lengths = np.array([length for one in files for length in one])
    names = [(f"file {number}", len(one)) for number, one in enumerate(files)]

    found = inspect_lengths(lengths, capacities=[16], targets=lengths // 2, sources=names).sources

    largest = sorted(range(len(files)), key=lambda number: -sum(files[number]))
    alone, rest = largest[:MOST_SOURCES], largest[MOST_SOURCES:]
    groups = [files[number] for number in alone] + [[n for number in rest for n in files[number]]] * bool(
        rest
    )
    assert [one.name for one in found[: len(alone)]] == [f"file {number}" for number in alone]
    assert len(found) == len(groups)
    for one, inside in zip(found, groups):
        full = [length for length in inside if length]
        assert (one.documents, one.tokens, one.longest) == (len(inside), sum(full), max(full, default=0))
        assert one.tokens_share == sum(full) / lengths.sum()
        assert one.median == (np.median(full) if full else 0)
        assert one.overlong_documents == sum(length > 16 for length in full)
        assert one.truncation_share * max(sum(full), 1) == pytest.approx(sum(max(n - 16, 0) for n in full))
        assert one.targets == sum(length // 2 for length in inside)
    assert not rest or found[-1].name == f"{len(rest)} smaller file" + "s" * (len(rest) > 1)


@pytest.mark.parametrize(
    ("of_random", "of_grouped", "said"),
    [
        (
            0.5,
            0.01,
            "saves 50.0 % of the slots of random batches of 8, and 1.0 % of those of batches grouped by",
        ),
        (
            0.5,
            -0.01,
            "saves 50.0 % of the slots of random batches of 8, and takes 1.0 % more than batches grouped",
        ),
        (
            -0.5,
            -0.2,
            "takes 50.0 % more slots than random batches of 8, and 20.0 % more than batches grouped by",
        ),
    ],
)
def test_the_headline_says_it_where_packing_takes_more_slots(of_random, of_grouped, said):
    assert said in headline(4_096, 8, of_random, of_grouped)

"""`vl.pack_forest`: trees share packs, and one that is too long is cut where the fewest tokens are repeated."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.forests import rows_with_prefixes
from tests.support.rarely import examples

import varlen as vl
from varlen.errors import OverlongDocumentError, SettingError

METHODS = ["best_fit_decreasing", "first_fit_decreasing", "best_fit", "first_fit", "balanced"]


def pieces_of(forest, packing):
    """Tree, tokens and repeated tokens of each piece, as sets of token numbers."""
    found = []
    for tree, start, stop, prefix in zip(
        packing.document_ids, packing.starts, packing.stops, packing.prefixes
    ):
        begin = forest.tree_offsets[tree] + start
        before = [k for k in range(begin) if begin < forest.subtree_end[k]]
        assert len(before) == prefix
        found.append((tree, set(range(begin, forest.tree_offsets[tree] + stop)), set(before)))
    return found


@given(rows=rows_with_prefixes(), method=st.sampled_from(METHODS), extra=st.integers(0, 12), data=st.data())
@examples(80)
def test_every_token_stands_in_one_piece_whose_tokens_see_all_they_saw(rows, method, extra, data):
    assume(any(rows))
    groups = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    forest = vl.fold(rows, groups=groups)
    capacity = max(map(len, rows)) + extra
    packing = vl.pack_forest(forest, capacity, method, seed=data.draw(st.sampled_from([None, 3])))

    pieces = pieces_of(forest, packing)
    assert sorted(token for _, own, _ in pieces for token in own) == list(range(forest.num_tokens))
    for _, own, before in pieces:
        for token in own:
            assert {k for k in range(token + 1) if token < forest.subtree_end[k]} <= own | before
    sizes = packing.pack_sums(packing.slot_lengths)
    assert (sizes <= capacity).all()
    assert int(packing.slot_lengths.sum()) == forest.num_tokens + packing.repeated_tokens
    assert packing.ledger.balance == 0

    pack_of = np.repeat(np.arange(packing.num_packs), np.diff(packing.offsets))
    for group in set(packing.groups.tolist()):
        here = packing.groups[packing.document_ids] == group
        if packing.slot_lengths[here].sum() <= capacity:
            assert len(set(pack_of[here])) == 1


@given(rows=rows_with_prefixes(), extra=st.integers(0, 6))
@examples(60)
def test_no_other_cuts_repeat_fewer_tokens(rows, extra):
    assume(any(rows))
    forest = vl.fold([[9, *row] for row in rows])  # one tree
    assume(forest.num_tokens <= 14)
    capacity = max(map(len, rows)) + 1 + extra
    packing = vl.pack_forest(forest, capacity)

    def cost(cuts):
        bounds = [0, *cuts, forest.num_tokens]
        repeated = [int(forest.position_ids[begin]) for begin in bounds[:-1]]
        fits = all(b - a + extra <= capacity for a, b, extra in zip(bounds, bounds[1:], repeated))
        return (sum(repeated), len(repeated)) if fits else (np.inf, np.inf)

    every = itertools.chain.from_iterable(
        itertools.combinations(range(1, forest.num_tokens), count) for count in range(forest.num_tokens)
    )
    assert (packing.repeated_tokens, packing.num_pieces) == min(map(cost, every))


def test_balanced_packs_have_equal_work_of_what_their_tokens_see():
    rng = np.random.default_rng(0)
    rows, groups = [], []
    for tree in range(24):
        prompt = rng.integers(0, 50, int(rng.integers(1, 60))).tolist()
        for _ in range(int(rng.integers(1, 5))):
            rows.append(prompt + rng.integers(0, 50, int(rng.integers(1, 60))).tolist())
            groups.append(tree)
    forest = vl.fold(rows, groups=groups)
    work = (100.0, 1.0)

    def spread(packing):
        totals = np.zeros(packing.num_packs)
        for pack, (_, own, before) in zip(
            np.repeat(np.arange(packing.num_packs), np.diff(packing.offsets)), pieces_of(forest, packing)
        ):
            seen = [2 * int(forest.position_ids[token]) + 1 for token in own | before]
            totals[pack] += work[0] * len(seen) + work[1] * sum(seen)
        return totals.max() / totals.mean()

    balanced, best = (
        vl.pack_forest(forest, 700, method, work=work) for method in ("balanced", "best_fit_decreasing")
    )
    assert spread(balanced) < spread(best)
    assert spread(balanced) < 1.1


def test_what_fits_nowhere_and_methods_without_trees_are_refused():
    forest = vl.fold([[1, 2, 3], [1, 2], [4] * 9])
    with pytest.raises(
        OverlongDocumentError, match=r"row 2 has 9 tokens but capacity is 8 \(1 of 3 rows is too"
    ):
        vl.pack_forest(forest, 8)
    with pytest.raises(SettingError, match="method must be"):
        vl.pack_forest(forest, 9, "wrapped")
    with pytest.raises(SettingError, match=r"takes what vl.fold\(rows\) returned, and a list was given"):
        vl.pack_forest([[1, 2]], 9)
    with pytest.raises(SettingError, match="capacity"):
        vl.pack_forest(forest, 0)
    assert vl.pack_forest(vl.fold([]), 8).num_packs == 0
    assert vl.pack_forest(vl.fold([[], []]), 8).num_packs == 0

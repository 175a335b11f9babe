"""MicroPacks of a rank and of a block of ranks: kernels agree with references, order and grades are as said."""

from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles import plan_compose as reference_compose
from tests.oracles import simulate as reference

import varlen as vl
from varlen.cost.kernels import cut_evenly
from varlen.cost.memory import OWN, RETURNED
from varlen.plan import kernels_compose
from varlen.plan.assign import Groups, documents_of_ranks, grouped, merged_sizes
from varlen.plan.compose import BlockDocuments, Composition, Grading, RankDocuments, compose, seconds_of
from varlen.plan.local_search import blocks_of, padded, pipeline_of_block, work_of_block
from varlen.plan.micropack import recut
from varlen.simulate import kernels
from varlen.simulate.graph import priced, stage_costs
from varlen.types import IntArray

MESH = vl.Mesh(dp=4, pp=4, tp=4)
COSTS = stage_costs(
    vl.CostModel(
        model=vl.ModelShape.named("llama-2-7b"), hardware=vl.Hardware.named("h100"), recompute="full"
    ),
    MESH,
)
EVEN = Grading()
lengths_of_a_rank = st.lists(st.integers(1, 100_000), min_size=1, max_size=30)


def rank_of(lengths: list[int], num_ranks: list[int] | None = None, first_id: int = 0) -> RankDocuments:
    held = np.array(lengths, np.int32)
    ranks = np.array(num_ranks or [1] * len(lengths), np.int32)
    work = seconds_of(held, ranks, 8192.0, COSTS.rates)
    order = np.lexsort((-work, -ranks))
    return RankDocuments(
        document_ids=(first_id + order).astype(np.int32),
        lengths=held[order],
        num_ranks=ranks[order],
        work=work[order],
    )


def composed(documents: RankDocuments, count: int, grading: Grading = EVEN, **more: object) -> Composition:
    given = {"least_rows": 2048, "budget": float(documents.work.sum()) / count, "rates": COSTS.rates}
    (made,) = compose(BlockDocuments.of([documents]), count, grading, **(given | more)).apart()  # type: ignore[arg-type]
    return made


def ends_of(made: Composition, ranks: int = 1) -> np.ndarray:
    """Return where the MicroPacks of each rank begin, if all ranks have the same."""
    return made.num_micropacks * np.arange(ranks + 1, dtype=np.int32)


BOTH = (kernels_compose, reference_compose)


def _block_of(
    home: ModuleType, documents: BlockDocuments, count: int, part: float, ends: IntArray, *switches: bool
) -> list[np.ndarray]:
    """What is cut of the documents of several ranks, and their MicroPacks."""
    own = documents.seconds / count
    given = (documents.table, documents.work, documents.bounds, documents.shared)
    chained, *rest = home.to_cut(*given, own, part * own[0], 2048)
    cuts = np.array(cut_evenly(*rest, 2048, 128, 1.0, COSTS.rates))
    least = np.full(own.size, 0.05)
    made = home.composed_ranks(cuts, chained, *given, count, own, part * own[0], ends, 0.2, least, *switches)
    return [chained, *rest, *made]


@given(
    st.lists(st.floats(0, 9, width=16), max_size=20),
    st.lists(st.floats(0, 9, width=16), min_size=1, max_size=8),
)
@settings(deadline=None)
def test_filling_agrees_with_its_reference(work, loads):
    answers = []
    for home in (kernels_compose, reference_compose):
        filled = np.array(loads, float)
        answers.append((home.fill_lightest(np.array(work, float), filled).tolist(), filled.tolist()))
    assert answers[0] == answers[1]


@given(
    st.lists(st.tuples(st.integers(1, 60_000), st.sampled_from([1, 1, 2, 4])), min_size=1, max_size=25),
    st.integers(1, 30),
    st.floats(0.3, 3),
    *[st.booleans()] * 4,
)
@settings(deadline=None)
def test_composing_and_its_seconds_agree_with_their_references(
    drawn, count, part, graded, in_step, by_work, mixes
):
    documents = rank_of([length for length, _ in drawn], [ranks for _, ranks in drawn])
    given, ends = documents.table, np.array([2, 1] if graded else [0, 0])
    own, chained = (
        documents.seconds / count,
        len(drawn) - int(np.count_nonzero(documents.num_ranks == 1)) // 2,
    )
    cuts = cut_evenly(
        *(given[row, :chained].copy() for row in (0, 1)),
        documents.work[:chained],
        np.full(chained, part * own),
        2048,
        128,
        1.0,
        COSTS.rates,
    )
    rest = (documents.num_shared, count, own, part * own, ends, 0.2, 0.05, in_step, by_work, mixes)

    made = [
        home.composed(np.array(cuts), chained, given, documents.work, *rest)
        for home in (kernels_compose, reference_compose)
    ]
    others = BlockDocuments.of([documents, rank_of([90_000, 3000, 500]), documents])
    blocks = [_block_of(home, others, count, part, ends, in_step, by_work, mixes) for home in BOTH]
    prices = priced(COSTS, made[0][0], made[0][1])
    ahead, back = np.array([prices, 2 * prices[::-1]]), np.array([prices[::-1], prices[::-1] / 3])
    gathers = np.full((3, COSTS.layers.size), 1e-3)
    asked = (ahead, back, COSTS.layers, COSTS.has_head, gathers, graded, in_step)
    seconds = [home.task_seconds(*asked) for home in (kernels_compose, reference_compose)]

    for pair in (made, blocks, seconds):
        assert all(np.array_equal(one, other) for one, other in zip(*pair, strict=True))


@given(st.data(), *(st.integers(0, most) for most in (6, 8, 3, 3, 9)), st.booleans())
@settings(deadline=None)
def test_arranging_agrees_with_its_reference(data, num_cut, num_plain, heads, tails, num_whole, in_step):
    num_packs = num_cut + num_plain + heads + tails
    if num_packs == 0:
        num_whole = 0
    documents = 2 + num_whole
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    table = np.stack(
        [rng.integers(5, 9, documents), rng.integers(1, 3, documents), rng.permutation(documents)]
    )
    cuts = np.sort(rng.integers(0, 2, num_cut)).astype(np.int32)
    cuts = np.stack([cuts, rng.integers(0, 3, num_cut), rng.integers(4, 9, num_cut)]).astype(np.int32)
    beside = rng.integers(0, max(num_packs, 1), num_whole)
    filled = rng.integers(0, 3, num_packs).astype(float)
    arguments = (cuts, beside, filled, heads, tails, in_step, table.astype(np.int32))

    kernel, reference = (home.arrange(*arguments) for home in (kernels_compose, reference_compose))

    assert [part.tolist() for part in kernel] == [part.tolist() for part in reference]


@given(lengths_of_a_rank, st.integers(1, 20), st.floats(0.3, 3.0), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_what_a_backward_waits_for_agrees_with_its_reference(lengths, count, factor, cp):
    ahead = composed(rank_of(lengths), count)
    back = recut(ahead, factor, least_rows=1024, rates=COSTS.rates)
    back = back.extended(back.num_micropacks + 2)
    orders = [home.reversed_chains(back.chains) for home in (kernels_compose, reference_compose)]
    assert orders[0].tolist() == orders[1].tolist()
    waits = [
        home.backward_waits(back.chains, ahead.chains, orders[0])
        for home in (kernels_compose, reference_compose)
    ]
    assert waits[0].tolist() == waits[1].tolist()
    both = [home.backward_order(back.chains, ahead.chains) for home in (kernels_compose, reference_compose)]
    assert [each.tolist() for each in both[0]] == [each.tolist() for each in both[1]]
    assert [each.tolist() for each in both[0]] == [orders[0].tolist(), waits[0].tolist()]
    ends = ends_of(back)
    cuts = np.unique(ahead.slices[3].astype(np.int64) << 32 | ahead.slices[1])
    counted = [
        (
            home.are_whole(back.slices, ahead.slices, cp),
            home.forward_counts(
                back.slice_offsets, back.slices, ends, cp, home.are_whole(back.slices, ahead.slices, cp)
            ),
            home.backward_counts(
                back.slice_offsets,
                back.slices,
                orders[0],
                ends,
                cp,
                cuts,
                home.are_whole(back.slices, ahead.slices, cp),
            ),
        )
        for home in (kernels, reference)
    ]
    for one, other in zip(*counted):
        assert one.tolist() == other.tolist()
    same = (ahead.slice_offsets, ahead.slices, np.arange(ahead.num_micropacks), ends_of(ahead), cp)
    whole = kernels.are_whole(ahead.slices, ahead.slices, cp)
    alike = [
        home.backward_counts(*same, each, whole) for home in (kernels, reference) for each in (cuts, cuts[:0])
    ]
    assert {each.tobytes() for each in alike} == {alike[0].tobytes()}
    assert alike[0][RETURNED].tolist() == alike[0][OWN].tolist()
    memory = COSTS.memory
    tables = (memory.forward_peaks, memory.forward_left, memory.backward_peaks, memory.backward_left)
    tables += (memory.kept_for_weight_bytes, memory.first_bytes)
    asked = (
        *(of_pass[None] for of_pass in counted[0][1:]),
        *(table.copy() for table in tables),
        COSTS.mesh.pp,
    )
    taken = [home.task_bytes(*asked) for home in (kernels, reference)]
    for one, other in zip(*taken):
        assert one.tolist() == other.tolist()


@given(lengths_of_a_rank, st.integers(1, 20), st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_counts_of_ranks_with_the_same_slices_in_both_passes_agree_with_their_reference(lengths, count, cp):
    made = composed(rank_of(lengths), count)
    offsets = np.append(made.slice_offsets, made.slice_offsets[1:] + made.slices.shape[1])
    order = np.append(made.backward_order, made.num_micropacks + made.backward_order)
    asked = (offsets, np.tile(made.slices, 2), order, ends_of(made, ranks=2), cp)

    kernel, oracle = (home.counts_alike(*asked) for home in (kernels, reference))

    assert [each.tolist() for each in kernel] == [each.tolist() for each in oracle]


@given(
    lengths_of_a_rank,
    st.integers(1, 40),
    st.integers(0, 6),
    st.integers(0, 6),
    st.floats(0.1, 1.0),
    st.booleans(),
)
@settings(deadline=None, max_examples=80)
def test_every_token_stands_in_one_slice_of_the_forward_and_of_a_backward_composed_apart(
    lengths, count, steps, tails, smallest, in_step
):
    ahead = composed(
        rank_of(lengths), count, Grading(first=steps, last=tails, smallest=smallest), in_step=in_step
    )
    for composition in (ahead, recut(ahead, 1.7, least_rows=2048, rates=COSTS.rates)):
        starts, stops, _, ids, is_end = composition.slices.tolist()
        order = sorted(zip(ids, starts, stops, is_end))
        for document, length in enumerate(lengths):
            mine = [(a, b, e) for i, a, b, e in order if i == document]
            assert mine[0][0] == 0
            assert all(before[1] == after[0] for before, after in zip(mine, mine[1:]))
            assert [e for _, _, e in mine] == [0] * (len(mine) - 1) + [1]
            assert mine[-1][1] == length


@given(lengths_of_a_rank, st.integers(1, 40))
@settings(deadline=None, max_examples=80)
def test_slices_of_a_long_document_follow_each_other_and_hold_enough_rows(lengths, count):
    made = composed(rank_of(lengths), count)
    packs = np.repeat(np.arange(made.num_micropacks), np.diff(made.slice_offsets))
    starts, stops, _, ids, _ = made.slices
    for document in range(len(lengths)):
        mine = np.flatnonzero(ids == document)
        assert np.diff(packs[mine]).tolist() == [1] * (mine.size - 1)
        assert np.all(np.diff(starts[mine]) > 0)
        if mine.size > 1:
            assert (stops - starts)[mine].min() >= 2048


def test_slices_of_a_long_document_cost_equally():
    made = composed(rank_of([100_000]), 8)
    prices = priced(COSTS, made.slice_offsets, made.slices)
    seconds = prices[:, [0, 2, 4]].sum(axis=1)

    assert made.num_micropacks >= 7
    assert seconds.max() / seconds.min() < 1.2


def test_micropacks_of_short_documents_cost_equally():
    rng = np.random.default_rng(0)
    made = composed(rank_of(rng.integers(20, 3000, 400).tolist()), 24)
    seconds = priced(COSTS, made.slice_offsets, made.slices)[:, [0, 2, 4]].sum(axis=1)

    assert made.num_micropacks == 24
    assert seconds.max() / seconds.min() < 1.02


def test_without_an_order_chains_stand_as_their_documents_do():
    lengths = [500, 30_000, 700, 60_000, 900, 40_000, 80]
    for by_work, expected in ((True, [3, 5, 1]), (False, [1, 3, 5])):
        made = composed(rank_of(lengths), 12, by_work=by_work)
        long = made.slices[3][np.isin(made.slices[3], [1, 3, 5])].tolist()

        assert list(dict.fromkeys(long)) == expected
        assert sorted(set(made.slices[3].tolist())) == list(range(7))


def test_grades_rise_at_the_start_and_fall_at_the_end():
    rng = np.random.default_rng(0)
    made = composed(
        rank_of(rng.integers(20, 3000, 800).tolist()),
        24,
        Grading(first=4, last=4, smallest=0.2),
        least_rows=256,
    )
    rows = priced(COSTS, made.slice_offsets, made.slices)[:, 6]

    assert np.all(np.diff(rows[:5]) > 0)
    assert np.all(np.diff(rows[-5:]) < 0)
    assert rows[0] < 0.5 * rows[12]


def test_small_micropacks_stand_at_the_end_that_they_are_wanted_at():
    documents = rank_of(np.random.default_rng(0).integers(20, 3000, 800).tolist())
    for heads, tails in ((5, 0), (0, 5), (3, 6)):
        made = composed(documents, 24, Grading(first=heads, last=tails, smallest=0.2), least_rows=256)
        rows = priced(COSTS, made.slice_offsets, made.slices)[:, 6]
        whole = np.median(rows)

        assert (rows < 0.9 * whole).tolist() == [place < heads or place >= 24 - tails for place in range(24)]


def test_documents_of_a_rank_alone_fill_what_shared_slices_leave():
    documents = rank_of([60_000, *[1500] * 20], [4, *[1] * 20])
    budget = 0.5 * float(documents.work.sum()) / 8
    for mixes in (True, False):
        made = composed(documents, 8, budget=budget, in_step=True, mixes=mixes)
        packs = np.repeat(np.arange(made.num_micropacks), np.diff(made.slice_offsets))
        shared = packs[made.slices[2] == 4]
        beside = np.isin(packs[made.slices[2] == 1], shared)

        assert len(shared) > 4
        assert beside.any() == mixes


def test_short_documents_that_the_same_ranks_share_stand_in_one_micropack():
    documents = rank_of([60_000, *[3000] * 24, *[500] * 9], [4, *[4] * 24, *[1] * 9])
    budget = float(documents.work.sum()) / 10
    made = composed(documents, 10, budget=budget, in_step=True)
    packs = np.repeat(np.arange(made.num_micropacks), np.diff(made.slice_offsets))
    short = (made.slices[2] == 4) & (made.slices[1] - made.slices[0] == 3000)
    needed = float(documents.work[documents.lengths == 3000].sum()) / budget

    assert short.sum() == 24
    assert np.unique(packs[short]).size == int(np.ceil(needed)) < 24


def test_a_backward_runs_chains_in_order_and_each_from_its_end():
    composition = Composition(
        slice_offsets=np.arange(6, dtype=np.int32),
        slices=np.zeros((5, 5), np.int32),
        chains=np.array([4, 0, 0, 0, 7], np.int32),
    )

    assert composition.backward_order.tolist() == [0, 3, 2, 1, 4]


def test_shared_documents_are_cut_alike_on_all_ranks_and_stand_at_the_same_place():
    lengths = np.array([90_000, 70_000, 3000, 2000, 1500, 9000, 800, 100], np.int32)
    groups = grouped(lengths, np.array([4, 2, 1, 1, 1, 1, 1, 1], np.int32), 4, COSTS.rates)
    made = padded(
        [
            composed(documents, 12, Grading(first=2, smallest=0.3), in_step=True, budget=0.002)
            for documents in documents_of_ranks(groups, lengths, 4)
        ]
    )

    assert len({composition.num_micropacks for composition in made}) == 1
    for document, ranks in ((0, range(4)), (1, range(groups.first_ranks[1], groups.first_ranks[1] + 2))):
        places = []
        for rank in ranks:
            table, packs = (
                made[rank].slices,
                np.repeat(np.arange(made[rank].num_micropacks), np.diff(made[rank].slice_offsets)),
            )
            mine = table[3] == document
            places.append((packs[mine].tolist(), table[:2, mine].tolist()))
        assert len(places[0][0]) > 1
        assert all(place == places[0] for place in places)


def test_what_goes_into_layers_goes_in_the_pieces_of_forward_slices():
    ahead = composed(rank_of([50_000, 800, 900]), 8)
    back = recut(ahead, 1.5, least_rows=1024, rates=COSTS.rates)
    pieces = ahead.slices[[0, 1, 3]].T.tolist()
    wanted = [
        sum(
            last - first
            for start, stop, _, document, _ in back.slices[:, slice(*ends)].T.tolist()
            for first, last, of in pieces
            if of == document and start <= first < stop
        )
        for ends in pairwise(back.slice_offsets.tolist())
    ]

    counts = work_of_block([ahead], [back], COSTS).counts_backward[0]

    assert sorted(counts[RETURNED].tolist()) == sorted(wanted)
    assert sorted(counts[OWN].tolist()) != sorted(wanted)


def test_a_block_takes_as_long_as_its_slowest_rank_in_each_micropack():
    ranks = padded(
        [composed(rank_of([50_000, 800, 900]), 8), composed(rank_of([20_000, 9000, 4000], first_id=3), 8)]
    )
    alone = [pipeline_of_block(work_of_block([rank], [rank], COSTS), COSTS) for rank in ranks]
    block = pipeline_of_block(work_of_block(ranks, ranks, COSTS), COSTS)

    np.testing.assert_array_equal(block.forward, np.maximum(alone[0].forward, alone[1].forward))
    np.testing.assert_array_equal(block.after, np.maximum(alone[0].after, alone[1].after))
    np.testing.assert_array_equal(block.backward, np.maximum(alone[0].backward, alone[1].backward))
    np.testing.assert_array_equal(
        block.send_backward, np.maximum(alone[0].send_backward, alone[1].send_backward)
    )
    for rank, one in enumerate(alone):
        np.testing.assert_array_equal(block.forward_peaks[rank], one.forward_peaks[0])
        np.testing.assert_array_equal(block.backward_left[rank], one.backward_left[0])


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=30), st.integers(0, 4), st.floats(0.1, 1.5))
@settings(deadline=None, max_examples=60)
def test_groups_are_aligned_powers_of_two_and_blocks_hold_them_whole(lengths, levels, threshold):
    held, dp = np.array(lengths, np.int32), 2**levels
    sizes = merged_sizes(held, dp, COSTS.rates, threshold=threshold, most_ranks=8, most_rows=30_000)
    groups = grouped(held, sizes, dp, COSTS.rates)
    bounds = blocks_of(groups, dp, in_step=False)

    assert ((groups.first_ranks >= 0) == (held > 0)).all()
    assert set(sizes.tolist()) <= {1, 2, 4, 8, 16}
    used = groups.first_ranks >= 0
    assert (groups.first_ranks[used] % sizes[used] == 0).all()
    assert (groups.first_ranks[used] + sizes[used] <= dp).all()
    assert bounds[0] == 0
    assert bounds[-1] == dp
    first = np.searchsorted(bounds, groups.first_ranks[used], side="right")
    last = np.searchsorted(bounds, groups.first_ranks[used] + sizes[used] - 1, side="right")
    assert (first == last).all()
    assert groups.loads(dp).sum() == pytest.approx((groups.work * sizes)[used].sum())


def test_a_document_that_costs_more_than_a_rank_is_shared_by_as_few_ranks_as_are_enough():
    lengths = np.append(np.full(60, 2000), [120_000]).astype(np.int32)
    alone = seconds_of(lengths, np.ones(61, np.int32), 8192.0, COSTS.rates)

    sizes = merged_sizes(lengths, 8, COSTS.rates, threshold=0.9, most_ranks=8, most_rows=1e9)

    share = alone.sum() / 8
    assert sizes[:60].tolist() == [1] * 60
    work = seconds_of(lengths, sizes, 8192.0, COSTS.rates)
    assert work[60] <= 0.9 * share or sizes[60] == 8
    assert seconds_of(lengths, sizes // 2 + (sizes == 1), 8192.0, COSTS.rates)[60] > 0.9 * share


def test_loads_count_every_rank_that_shares_a_document():
    groups = Groups(
        first_ranks=np.array([0, 2, -1, 3], np.int32),
        num_ranks=np.array([2, 2, 1, 1], np.int32),
        work=np.array([5.0, 1.0, 9.0, 0.5]),
    )

    assert groups.loads(4).tolist() == [5.0, 5.0, 1.0, 1.5]

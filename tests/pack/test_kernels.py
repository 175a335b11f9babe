"""Every packing kernel returns what its reference in plain Python returns, and fills packs to the brim."""

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.oracles import pack as reference
from tests.oracles import pack_fill as reference_fill
from tests.support.packings import UNLIMITED, random_lengths

import varlen as vl
from varlen.pack import api, kernels, kernels_arrange
from varlen.pack.api import fill

Search = tuple[np.ndarray, np.ndarray, np.ndarray, int, int]
"""Order, slots, sizes, capacity, max_documents."""


def int32(values: Any) -> np.ndarray:
    return np.array(values, np.int32)


@st.composite
def searches(draw: st.DrawFn) -> Search:
    """Items to place: many ties, zero slots, slots as large as the capacity, several documents an item."""
    # Bitmap words hold 64 free spaces and 64 of those make the next level, so both edges are crossed.
    capacity = draw(st.one_of(st.integers(1, 12), st.sampled_from([63, 64, 65, 128, 4095, 4096, 4097, 9000])))
    values = st.one_of(
        st.integers(0, capacity),
        st.integers(1, max(1, capacity // 5)),
        st.sampled_from([0, 1, capacity, capacity // 2, capacity // 2 + 1, max(0, capacity - 1)]),
    )
    slots = draw(st.lists(values.filter(lambda slot: slot <= capacity), max_size=60))
    max_documents = draw(st.sampled_from([1, 2, 3, 7, UNLIMITED]))
    size = st.integers(1, min(4, max_documents)) if draw(st.booleans()) else st.just(1)
    sizes = [draw(size) for _ in slots]
    order = draw(st.permutations(range(len(slots)))) if draw(st.booleans()) else list(range(len(slots)))
    return int32(order), int32(slots), int32(sizes), capacity, max_documents


def run_search(function: Callable[..., int], *arguments: Any, items: int) -> tuple[int, list[int]]:
    """The number of packs and the pack of every item; arrays that come in must stay as they are."""
    before = [argument.copy() for argument in arguments if isinstance(argument, np.ndarray)]
    pack_of = np.full(items, -7, np.int32)
    num_packs = function(*arguments, pack_of)
    after = [argument for argument in arguments if isinstance(argument, np.ndarray)]
    assert all(np.array_equal(a, b) for a, b in zip(before, after)), "an argument was written"
    return int(num_packs), pack_of.tolist()


def most_packs(search: Search) -> int:
    _, slots, sizes, capacity, max_documents = search
    return api._most_packs(slots, sizes, capacity, max_documents)


@given(searches(), st.integers(0, 5))
def test_descending_equals_its_reference_and_keeps_ties_in_order(search, more):
    slots = search[1]
    largest = int(slots.max(initial=0)) + more
    ours, theirs = np.full(slots.size, -7, np.int32), np.full(slots.size, -7, np.int32)
    kernels.descending(slots, largest, ours)
    reference.descending(slots, largest, theirs)

    assert ours.tolist() == theirs.tolist()
    assert ours.tolist() == [
        item for _, item in sorted((-slot, item) for item, slot in enumerate(slots.tolist()))
    ]


@given(searches())
def test_next_fit_equals_its_reference(search):
    _, slots, sizes, capacity, max_documents = search
    arguments = (slots, sizes, capacity, max_documents)
    ours = run_search(kernels.next_fit, *arguments, items=slots.size)
    assert ours == run_search(reference.next_fit, *arguments, items=slots.size)


@given(searches())
@example((int32([0, 1, 2]), int32([0, 0, 0]), int32([1, 1, 1]), 1, 1))
@example((int32([]), int32([]), int32([]), 1, 1))
@example((int32([0]), int32([4096]), int32([1]), 4096, UNLIMITED))
def test_best_fit_equals_its_reference(search):
    items = search[1].size
    assert run_search(kernels.best_fit, *search, items=items) == run_search(
        reference.best_fit, *search, items=items
    )


@given(searches())
def test_first_fit_equals_its_reference(search):
    arguments = (*search, most_packs(search))
    ours = run_search(kernels.first_fit, *arguments, items=search[1].size)
    assert ours == run_search(reference.first_fit, *arguments, items=search[1].size)


def test_best_fit_passes_by_no_packs_that_are_too_crowded_for_any_item():
    # Pairs, three to a pack: of at most seven documents, a place stays free in every pack. A search that looked
    # at each of those would take a hundred times as long as one without.
    lengths, pairs = np.tile([5, 9, 7, 8], 50_000), np.arange(200_000) // 2
    took = {}
    for most in (6, 7):
        vl.pack(lengths[:10], 8192, "best_fit", groups=pairs[:10], max_documents=most)
        start = time.process_time()
        packing = vl.pack(lengths, 8192, "best_fit", groups=pairs, max_documents=most)
        took[most] = time.process_time() - start
        assert (packing.num_packs, int(np.diff(packing.offsets).max())) == (-(-100_000 // 3), 6)
    assert took[7] < 10 * took[6]


@given(searches())
@example((int32([]), int32([]), int32([]), 1, UNLIMITED))
def test_best_fit_decreasing_equals_its_reference(search):
    _, slots, _, capacity, max_documents = search
    arguments = (slots, capacity, max_documents)
    ours = run_search(kernels.best_fit_decreasing, *arguments, items=slots.size)
    assert ours == run_search(reference.best_fit_decreasing, *arguments, items=slots.size)


@given(searches())
def test_the_reference_of_best_fit_decreasing_is_best_fit_item_by_item(search):
    _, slots, _, capacity, max_documents = search
    order = np.empty(slots.size, np.int32)
    reference.descending(slots, capacity, order)
    one_by_one = (order, slots, np.ones(slots.size, np.int32), capacity, max_documents)
    together = run_search(reference.best_fit_decreasing, slots, capacity, max_documents, items=slots.size)
    assert together == run_search(reference.best_fit, *one_by_one, items=slots.size)


@given(searches(), st.integers(0, 9), st.sampled_from(["length", "squares", "few"]))
def test_balanced_equals_its_reference(search, packs, shape):
    order, slots, sizes, capacity, max_documents = search
    work = {"length": slots, "squares": slots.astype(float) ** 2 + 0.1, "few": slots % 3}[shape].astype(
        np.float64
    )
    most = packs + most_packs(search)
    arguments = (order, slots, sizes, work, capacity, max_documents, packs, most)
    ours = run_search(kernels.balanced, *arguments, items=slots.size)
    assert ours == run_search(reference.balanced, *arguments, items=slots.size)


@pytest.mark.parametrize("seed", range(20))
def test_searches_equal_their_references_where_ties_and_full_packs_abound(seed):
    # Few distinct slots, sizes and amounts of work: the lightest or first pack often has no space or no place left.
    draw = random.Random(seed)
    count, capacity, max_documents = 150, 12, draw.choice([3, 5, UNLIMITED])
    slots = int32([draw.choice([1, 2, 5]) for _ in range(count)])
    sizes = int32([draw.choice([1, 2, 3]) for _ in range(count)])
    work = np.array([float(draw.randint(0, 2)) for _ in range(count)])
    search = (int32(draw.sample(range(count), count)), slots, sizes, capacity, max_documents)
    most = 40 + most_packs(search)
    calls = {
        "best_fit": (kernels, search),
        "first_fit": (kernels, (*search, most)),
        "balanced": (kernels, (*search[:3], work, *search[3:], draw.randint(0, 40), most)),
    }
    for name, (room, arguments) in calls.items():
        ours = run_search(getattr(room, name), *arguments, items=count)
        assert ours == run_search(getattr(reference, name), *arguments, items=count), name


@pytest.mark.parametrize("max_documents", [UNLIMITED, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_first_fit_searches_all_levels_of_its_tree(max_documents, seed):
    # More than 64 * 64 packs make a third level; the count here is a plain numpy search.
    capacity, count = 1000, 9_000
    slots = int32(random_lengths(seed, count, capacity, "even"))
    sizes = np.ones(count, np.int32)
    rooms, places = np.zeros(count, int), np.full(count, max_documents)
    expected, opened = [], 0
    for slot in slots.tolist():
        fits = (rooms[:opened] >= slot) & (places[:opened] > 0)
        pack = int(fits.argmax()) if fits.any() else opened
        if pack == opened:
            rooms[pack], opened = capacity, opened + 1
        rooms[pack] -= slot
        places[pack] -= 1
        expected.append(pack)
    order = np.arange(count, dtype=np.int32)
    most = api._most_packs(slots, sizes, capacity, max_documents)
    arguments = (order, slots, sizes, capacity, max_documents, most)

    assert opened > 64 * 64
    assert run_search(kernels.first_fit, *arguments, items=count) == (opened, expected)


@pytest.mark.parametrize(
    ("capacity", "shape"), [(8192, "tail"), (8192, "even"), (300, "few"), (70_000, "tail")]
)
@pytest.mark.parametrize("max_documents", [UNLIMITED, 9])
def test_best_fit_decreasing_is_best_fit_in_descending_order_for_many_documents(
    capacity, shape, max_documents
):
    slots = int32(random_lengths(3, 20_000, capacity, shape))
    order = np.empty(slots.size, np.int32)
    kernels.descending(slots, capacity, order)
    ones = np.ones(slots.size, np.int32)

    ours = run_search(kernels.best_fit_decreasing, slots, capacity, max_documents, items=slots.size)
    assert ours == run_search(kernels.best_fit, order, slots, ones, capacity, max_documents, items=slots.size)


def test_best_fit_decreasing_plans_again_where_the_table_of_runs_was_too_short(monkeypatch):
    slots = int32(random_lengths(5, 500, 97))
    enough = run_search(kernels.best_fit_decreasing, slots, 97, 7, items=slots.size)
    plan, rows_seen = kernels._plan_equal_lengths, []

    def plan_in_short_tables(*arguments: Any) -> int:
        *before, clusters, runs, run_offsets = arguments
        rows_seen.append(len(runs))
        rows = len(runs) // 256
        planned: int = plan(*before, clusters[: 2 * rows], runs[:rows], run_offsets)
        return planned

    monkeypatch.setattr(kernels, "_plan_equal_lengths", plan_in_short_tables)
    again = run_search(kernels.best_fit_decreasing, slots, 97, 7, items=slots.size)

    assert len(rows_seen) > 2
    assert rows_seen == [rows_seen[0] * 4**turn for turn in range(len(rows_seen))]
    assert again == enough


@pytest.mark.parametrize("rows", range(0, 60, 3))
@pytest.mark.parametrize("short", ["runs", "clusters"])
def test_a_plan_never_writes_past_tables_that_are_too_short(rows, short):
    slots, capacity = int32(random_lengths(6, 200, 97)), 97
    counts = np.bincount(slots, minlength=capacity + 1)
    tables = {"runs": np.full((300, 3), -9, np.int32), "clusters": np.full((300, 4), -9, np.int32)}
    given = {**tables, short: tables[short][:rows]}
    ends, run_offsets = np.full((capacity + 1, 2), -1, np.int32), np.zeros(capacity + 2, np.int64)
    space = (*kernels._bitmap(capacity), ends, given["clusters"], given["runs"], run_offsets)
    planned = kernels._plan_equal_lengths(counts, capacity, UNLIMITED, *space)

    assert (tables[short][rows:] == -9).all()
    assert planned in (-1, vl.pack(slots, capacity).num_packs)
    assert planned == -1 or rows > 30


def wrap_with(
    function: Callable[..., tuple[int, int]], lengths: np.ndarray, *settings: int
) -> tuple[Any, ...]:
    counted = function(lengths, *settings, np.empty(0, np.int64), *(np.empty(0, np.int32) for _ in range(3)))
    arrays = [np.empty(counted[0], np.int64), *(np.empty(counted[0], np.int32) for _ in range(3))]
    filled = function(lengths, *settings, *arrays)
    return tuple(counted), tuple(filled), [array.tolist() for array in arrays]


@given(
    st.lists(st.one_of(st.integers(0, 50), st.just(0)), max_size=30),
    st.sampled_from([1, 2, 8]),
    st.integers(1, 9),
    st.sampled_from([1, 2, 3, UNLIMITED]),
)
def test_wrapped_equals_its_reference(lengths, multiple, times, max_documents):
    settings = (multiple * times, max_documents, multiple)
    ours = wrap_with(kernels_arrange.wrapped, int32(lengths), *settings)
    assert ours == wrap_with(reference.wrapped, int32(lengths), *settings)


@given(st.integers(0, 2**64 - 1), st.integers(0, 50))
def test_permutation_equals_its_reference(seed, size):
    ours, theirs = np.empty(size, np.int64), np.empty(size, np.int64)
    kernels_arrange.permutation(np.uint64(seed), ours)
    reference.permutation(np.uint64(seed), theirs)

    assert ours.tolist() == theirs.tolist()
    assert sorted(ours.tolist()) == list(range(size))


def test_permutation_gives_the_same_numbers_on_every_machine_and_version():
    # SplitMix64 from state 0 begins 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4 (Vigna's reference code).
    states = np.array([0x9E3779B97F4A7C15, 2 * 0x9E3779B97F4A7C15 % 2**64], np.uint64)
    numbers = reference._scramble(states).tolist()
    order = np.empty(3, np.int64)
    kernels_arrange.permutation(np.uint64(0), order)
    values = [0, 1, 2]
    for index, number in zip((2, 1), numbers):
        other = number % (index + 1)
        values[index], values[other] = values[other], values[index]

    assert numbers == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert order.tolist() == values


@st.composite
def assignments(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Packs of pieces (-1 for none, every pack used), their lengths, and the number of packs."""
    wanted = draw(st.lists(st.integers(-1, draw(st.sampled_from([0, 3, 40]))), max_size=60))
    names = {pack: number for number, pack in enumerate(sorted({pack for pack in wanted if pack >= 0}))}
    longest = draw(st.sampled_from([1, 7, 2**31 - 1]))
    lengths = [draw(st.integers(1, longest)) if pack >= 0 else 0 for pack in wanted]
    return int32([names.get(pack, -1) for pack in wanted]), int32(lengths), len(names)


@given(assignments(), st.randoms(use_true_random=False))
def test_rank_packs_and_renumber_equal_their_references(assignment, random):
    pack_of, _, num_packs = assignment
    numbers = list(range(num_packs))
    random.shuffle(numbers)
    results = []
    for room in (kernels_arrange, reference):
        ranked = pack_of.copy()
        used = room.rank_packs(ranked, np.full(num_packs, -1, np.int32))
        renumbered = ranked.copy()
        room.renumber(renumbered, np.array(numbers, np.int64))
        results.append((int(used), ranked.tolist(), renumbered.tolist()))
    assert results[0] == results[1]
    assert results[0][0] == num_packs


def sorted_with(
    room: Any, pack_of: np.ndarray, lengths: np.ndarray, num_packs: int, shift: int
) -> tuple[Any, ...]:
    """What the three kernels that sort pieces by pack leave behind."""
    length_bits = max(int(lengths.max(initial=0)), 1).bit_length()
    begin = np.zeros(-(-num_packs >> shift) + 1, np.int64)
    largest = int(room.batch_bounds(pack_of, shift, begin))
    words, position = np.full(int(begin[-1]), -7, np.int64), begin.copy()
    room.gather_batches(pack_of, lengths, shift, length_bits, position, words)
    gathered = words.copy()
    space = np.empty(largest, np.int64), np.empty((1 << shift) + 1, np.int64)
    offsets, placed = np.zeros(num_packs + 1, np.int64), np.full(words.size, -7, np.int32)
    room.order_batches(words, begin, shift, length_bits, *space, offsets, placed)
    return largest, *(array.tolist() for array in (begin, position, gathered, words, offsets, placed))


@given(assignments(), st.integers(1, 5))
def test_the_kernels_that_sort_pieces_by_pack_equal_their_references(assignment, shift):
    pack_of, lengths, _ = assignment
    ours = sorted_with(kernels_arrange, *assignment, shift)

    assert ours == sorted_with(reference, *assignment, shift)
    pieces = sorted((pack, piece) for piece, pack in enumerate(pack_of.tolist()) if pack >= 0)
    assert ours[4] == [piece for _, piece in pieces]
    assert ours[6] == [int(lengths[piece]) for _, piece in pieces]


@given(assignments(), st.sampled_from([1, 2, 8]), st.integers(1, 20))
def test_audit_and_checksum_equal_their_references(assignment, multiple, capacity):
    pieces, offsets, lengths = (np.array(part) for part in sorted_with(reference, *assignment, 3)[4:])
    pieces, offsets, lengths = pieces.astype(np.int64), offsets.astype(np.int64), lengths.astype(np.int32)
    ours = kernels_arrange.audit(pieces, lengths, offsets, capacity, multiple)
    theirs = reference.audit(pieces, lengths, offsets, capacity, multiple)

    assert tuple(map(int, ours)) == tuple(map(int, theirs))
    assert int(kernels_arrange.checksum(assignment[1])) == reference.checksum(assignment[1]) == int(ours[2])
    assert ours[0] == int(lengths.sum(dtype=np.int64))


Filling = tuple[np.ndarray, np.ndarray, int, int, int, bool]
"""Order, slots, capacity, least, max_documents, from_first."""


@st.composite
def fillings(draw: st.DrawFn) -> Filling:
    """Items that packs are filled with: long and short, of slot 0, in words of sums and over their edges."""
    capacity = draw(st.sampled_from([1, 5, 30, 63, 64, 65, 128, 200, 1000, 70_000, 10**6, 2**31 - 1]))
    parts = draw(st.sampled_from([1, 2, 4, 12]))
    slots = draw(st.lists(st.integers(0, max(capacity // parts, 1)), max_size=60))
    order = draw(st.permutations(range(len(slots)))) if draw(st.booleans()) else list(range(len(slots)))
    least = int(capacity * draw(st.sampled_from([0.0, 0.5, 0.9, 0.995, 1.0])))
    most = draw(st.sampled_from([1, 2, 5, UNLIMITED, UNLIMITED]))
    return int32(order[: draw(st.integers(0, 60))]), int32(slots), capacity, least, most, draw(st.booleans())


def run(room: Any, filling: Filling) -> tuple[int, list[int]]:
    pack_of = np.full(filling[1].size, -7, np.int32)
    return int(room.fill(*filling, pack_of)), pack_of.tolist()


@given(fillings())
def test_fill_equals_its_reference(filling):
    assert run(kernels_arrange, filling) == run(reference_fill, filling)


@pytest.mark.parametrize("shape", ["tail", "even", "few"])
@pytest.mark.parametrize("capacity", [600, 5000, 300_000])
@pytest.mark.parametrize("from_first", [False, True])
def test_fill_equals_its_reference_for_many_items(shape, capacity, from_first):
    slots = int32(random_lengths(4, 1500, min(capacity, 9000), shape))
    order = np.argsort(-slots if from_first else slots * 0, kind="stable").astype(np.int32)
    filling = (order, slots, capacity, int(0.995 * capacity), UNLIMITED, from_first)

    assert run(kernels_arrange, filling) == run(reference_fill, filling)


@given(fillings())
# Alone it fills a pack, and with another there are too many.
@example((int32([0]), int32([31, 1]), 63, 31, 1, False))
def test_packs_hold_enough_and_not_too_much_and_what_is_left_fills_no_pack_alone(filling):
    order, slots, capacity, least, most, _ = filling
    num_packs, packs = run(reference_fill, filling)
    pack_of = int32(packs)

    for pack in range(num_packs):
        held = slots[pack_of == pack]
        assert max(least, 1) <= held.sum(dtype=np.int64) <= capacity
        assert 0 < held.size <= most
    assert not (pack_of[slots == 0] >= 0).any()
    assert set(packs) <= set(range(-1, num_packs))
    assert not any(packs[item] < 0 and 0 < least <= slots[item] for item in order.tolist())


def test_a_pack_is_filled_by_those_that_leave_no_space():
    # 60 around which, 25 + 15 that fit; 30 comes first and leaves 10.
    slots = int32([60, 30, 25, 15, 70])
    assert fill(int32([0]), slots, 100, 0.9, UNLIMITED)[0].tolist() == [0, -1, 0, 0, -1]
    # From the piece in turn on, and round; or from the first on.
    around = int32([40, 60, 40])
    assert fill(int32([1]), around, 100, 1.0, UNLIMITED)[0].tolist() == [-1, 0, 0]
    assert fill(int32([1]), around, 100, 1.0, UNLIMITED, from_first=True)[0].tolist() == [0, 0, -1]


def test_of_many_that_fit_only_the_last_are_chosen():
    # Ten of 9 and one of 5 fit, and leave 5: nine of 9 and one of 19 leave nothing, and the first three stay.
    packs = fill(int32([0]), int32([9] * 10 + [5, 19]), 100, 1.0, UNLIMITED)[0].tolist()

    assert packs.count(0) == 10
    assert (packs[:3], packs[10:]) == ([0, 0, 0], [-1, 0])


def test_where_nothing_fills_packs_it_is_soon_given_up(monkeypatch):
    tried: list[int] = []
    filling = reference_fill._filling
    monkeypatch.setattr(reference_fill, "_filling", lambda *a: tried.append(1) or filling(*a))
    slots = int32([5] * 3000)
    run(reference_fill, (np.arange(3000, dtype=np.int32), slots, 8, 8, UNLIMITED, False))

    assert 0 < len(tried) <= reference_fill.FAILED + 1

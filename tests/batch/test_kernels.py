"""Every batch kernel returns what its reference in plain Python returns."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.batch.batches import Case, cases, tokens_like
from tests.oracles import batch as reference

import varlen as vl
from varlen.batch import kernels

DTYPES = ("int32", "int64", "uint16", "uint32", "int8")


def plan_of(case: Case) -> tuple[tuple[Any, ...], int, int]:
    """The first arguments of `measure` and `lay_segments`, and their multiples."""
    packing = case.packing
    wanted = np.arange(packing.num_packs) if case.pack_ids is None else np.array(case.pack_ids, np.int64)
    width = packing.capacity if case.layout == "rows" else 0
    multiple = packing.document_multiple_of
    plan = (packing.document_ids, packing.starts, packing.stops, packing.offsets, wanted, width)
    return plan, multiple, int(np.lcm(multiple, case.pad_to_multiple_of))


@given(cases(), st.sampled_from([1, 4, 128]), st.booleans(), st.integers(-2, 2))
def test_measure_and_lay_segments_equal_their_references(case, each, elsewhere, missing):
    plan, multiple, together = plan_of(case)
    sizing = (*plan, multiple, together, each, case.packing.num_documents)
    measured = kernels.measure(*sizing)
    assert tuple(map(int, measured)) == tuple(map(int, reference.measure(*sizing)))

    count, entries, positions, _, _, bad = (int(number) for number in measured)
    assert bad == -1
    token_offsets = np.cumsum([0, *map(len, case.documents)])
    homes = np.arange(count) % max(len(case.documents), 1) if elsewhere else np.empty(0, np.int64)
    exact = (homes, token_offsets, int(token_offsets[-1]) - missing, case.packing.capacity, 2)
    results = []
    for room in (kernels, reference):
        wide = np.full(3 * count + len(plan[4]) + 1, -7, np.int64)
        narrow, bounds = np.full((3, count), -7, np.int32), np.full((2, entries), -7, np.int32)
        located = (*plan, positions, multiple, each, *exact)
        answer = room.lay_segments(*located, wide, narrow, bounds[0], bounds[1])
        results.append((tuple(map(int, answer)), wide.tolist(), narrow.tolist(), bounds.tolist()))
    assert results[0] == results[1]


@given(cases(), st.sampled_from(DTYPES), st.integers(-1, 1), st.booleans(), st.data())
def test_plain_batch_equals_its_reference(case, dtype, missing, too_narrow, data):
    plan, multiple, together = plan_of(case)
    width = max(plan[5] - too_narrow, 0)
    tokens = np.arange(sum(map(len, case.documents)) - missing).astype(dtype)
    if dtype in ("int64", "uint32"):
        tokens[-1:] = data.draw(st.sampled_from([2**31 - 1, 2**31]))
    offsets = np.cumsum([0, *map(len, case.documents)])
    exact = (tokens, offsets, case.packing.capacity, 2, dtype in ("int64", "uint32"), 7)
    results = []
    for room in (kernels, reference):
        fits, *rest = room.plain_batch(*plan[:5], width, multiple, together, 128, *exact)
        parts = [part.tolist() if isinstance(part, np.ndarray) else int(part) for part in rest]
        results.append((bool(fits), parts if fits else None))
    assert results[0] == results[1]


@given(cases(), st.lists(st.integers(-3, 12), min_size=1, max_size=5), st.integers(0, 30))
def test_measure_finds_the_first_pack_that_is_not_there_or_too_wide(case, pack_ids, width):
    packing = case.packing
    multiple = packing.document_multiple_of
    arguments = (
        packing.document_ids,
        packing.starts,
        packing.stops,
        packing.offsets,
        np.array(pack_ids, np.int64),
        width,
        multiple,
        multiple,
        128,
        packing.num_documents,
    )
    ours = tuple(map(int, kernels.measure(*arguments)))
    used = packing.pack_sums(packing.slot_lengths).tolist()
    wrong = [
        place
        for place, pack in enumerate(pack_ids)
        if not 0 <= pack < packing.num_packs or 0 < width < used[pack]
    ]

    assert ours == tuple(map(int, reference.measure(*arguments)))
    assert ours[-1] == (wrong[0] if wrong else -1)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 4)), max_size=6),
    st.lists(st.integers(-1, 14), min_size=5, max_size=5),
    st.integers(0, 12),
    st.integers(1, 4),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([np.int64, np.int32]),
)
def test_locate_equals_its_reference(segments, offsets, num_values, capacity, whole, dtype):
    columns = [[segment[index] for segment in segments] for index in range(3)]
    documents, first, lengths = (np.array(c, t) for c, t in zip(columns, (np.int64, np.int32, np.int32)))
    results = []
    for room in (kernels, reference):
        sources = np.full(len(segments), -7, np.int64)
        answer = room.locate(
            documents, first, lengths, np.array(offsets, dtype), num_values, capacity, whole, sources
        )
        results.append((int(answer[0]), int(answer[1]), sources.tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("whole", "wrong"), [(0, []), (1, [1]), (2, [0, 1])], ids=["anywhere", "full or whole", "whole"]
)
def test_locate_lets_pieces_end_only_where_the_policy_cuts(whole, wrong):
    # Capacity 4; pieces of a document of 9: [0, 4) full, [4, 7) neither full nor the end, [5, 9) the end.
    first, lengths = np.array([0, 4, 5], np.int32), np.array([4, 3, 4], np.int32)
    for room in (kernels, reference):
        answer = room.locate(
            np.zeros(3, np.int64), first, lengths, np.array([0, 9]), 9, 4, whole, np.empty(3, np.int64)
        )
        assert tuple(map(int, answer)) == (len(wrong), wrong[0] if wrong else -1)


@st.composite
def laid_out(draw: st.DrawFn) -> dict[str, Any]:
    """Segments with their sources among values, and where they begin in a row."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    low = max(np.iinfo(dtype).min, -(2**31))
    high = min(np.iinfo(dtype).max, 2**31 - 1)
    values = draw(st.lists(st.integers(low, high), min_size=1, max_size=30))
    sources, lengths, begins, at = [], [], [], 0
    for _ in range(draw(st.integers(0, 5))):
        source = draw(st.integers(0, len(values) - 1))
        length = draw(st.integers(1, len(values) - source))
        at += draw(st.integers(0, 3))
        sources.append(source)
        lengths.append(length)
        begins.append(at)
        at += length
    return {
        "values": np.array(values, dtype),
        "sources": np.array(sources, np.int64),
        "lengths": np.array(lengths, np.int32),
        "begins": np.array(begins, np.int64),
        "width": at + draw(st.integers(0, 4)),
    }


@given(laid_out(), st.integers(-1, 2**31 - 1), st.integers(1, 3))
def test_assemble_equals_its_reference(row, pad_id, rows):
    width = -(-row["width"] // rows)
    results = []
    for room in (kernels, reference):
        out = [np.full((rows, width), -7, np.int32) for _ in range(4)]
        largest = room.assemble(row["values"], row["sources"], row["lengths"], row["begins"], pad_id, *out)
        results.append((int(largest), [array.tolist() for array in out]))
    assert results[0] == results[1]


@given(laid_out(), st.sampled_from(["none", "bool", "uint8", "float32"]), st.data())
def test_mask_labels_equals_its_reference(row, kind, data):
    count = row["values"].size
    mask = np.empty(0, np.uint8)
    if kind != "none":
        mask = np.array(data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))).astype(kind)
    results = []
    for room in (kernels, reference):
        labels = np.full(row["width"], -7, np.int32)
        targets = np.full(row["sources"].size, -7, np.int32)
        room.mask_labels(
            row["values"],
            row["sources"],
            mask,
            row["sources"],
            row["lengths"],
            row["begins"],
            labels,
            targets,
        )
        results.append((labels.tolist(), targets.tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@given(row=laid_out())
def test_copy_column_equals_its_reference(size, row):
    dtype = np.dtype(f"u{size}")
    values = row["values"].astype(np.int64).astype(dtype)
    pad = np.array([77], dtype)
    results = []
    for room in (kernels, reference):
        column = np.zeros(row["width"], dtype)
        room.copy_column(values, row["sources"], row["lengths"], row["begins"], pad, column)
        results.append(column.tolist())
    assert results[0] == results[1]


@given(laid_out())
def test_value_range_equals_its_reference(row):
    arguments = (row["values"], row["sources"], row["lengths"])
    assert tuple(map(int, kernels.value_range(*arguments))) == reference.value_range(*arguments)


def test_a_batch_of_many_rows_is_laid_out_the_same_by_both():
    lengths = [number % 37 + 1 for number in range(2000)]
    packing = vl.pack(lengths, 128, document_multiple_of=4)
    case = Case(documents=tokens_like(lengths), packing=packing)
    plan, multiple, together = plan_of(case)
    sizing = (*plan, multiple, together, 64, packing.num_documents)

    assert tuple(map(int, kernels.measure(*sizing))) == tuple(map(int, reference.measure(*sizing)))


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=6),
    st.integers(0, 9),
    st.integers(1, 4),
    st.sampled_from([np.int32, np.int64]),
    st.tuples(*[st.booleans()] * 4),
)
def test_fill_flat_row_equals_its_reference(sizes, padding, each, dtype, switches):
    with_ids, with_labels, positions, owners = switches
    tokens = sum(sizes)
    width = tokens + padding
    results = []
    for room in (kernels, reference):
        given_ids, targets = (
            np.arange(900, 900 + tokens, dtype=dtype),
            np.arange(700, 700 + tokens, dtype=dtype),
        )
        ids, labels = np.arange(100, 100 + width), np.arange(500, 500 + width)
        restarts = np.full(width if positions else 0, -7, np.int64)
        numbers = np.full(width if owners else 0, -7, np.int32)
        ends = np.full(len(sizes) + padding + 1, -7, np.int32)
        counts = room.fill_flat_row(
            *(given_ids, targets, np.array(sizes), -1, 2, 9, each, with_ids, with_labels),
            *(ids, labels, restarts, numbers, ends),
        )
        results.append([array.tolist() for array in (ids, labels, restarts, numbers, ends)] + [list(counts)])
    assert results[0] == results[1]

"""The kernels of Megatron's batches do what their references say, on rows of any shape."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles import megatron_batches as reference

from varlen.adapters.megatron.batches import kernels

EOS, TAIL = 2, 8


@st.composite
def stored(draw: st.DrawFn) -> dict[str, Any]:
    """Arrays of packed rows; one in four has a boundary that is wrong."""
    sizes = draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3))
    counts, totals = [len(row) for row in sizes], [sum(row) for row in sizes]
    total = sum(totals)
    starts = np.concatenate([np.cumsum([0, *row[:-1]]) for row in sizes]).astype(np.int64)
    mask = np.array(draw(st.lists(st.integers(0, 2), min_size=total, max_size=total)))
    arrays = {
        "input_ids": np.array(draw(st.lists(st.integers(0, 4), min_size=total, max_size=total)), np.int32),
        "loss_mask": draw(st.sampled_from([mask.astype(np.int8), mask, (mask / 2).astype(np.float32)])),
        "offsets": np.cumsum([0, *totals]).astype(np.int64),
        "starts": starts,
        "document_offsets": np.cumsum([0, *counts]).astype(np.int64),
    }
    if draw(st.integers(0, 3)) == 0:
        name = draw(st.sampled_from(["offsets", "starts", "document_offsets"]))
        place = draw(st.integers(0, len(arrays[name]) - 1))
        arrays[name] = arrays[name].copy()
        arrays[name][place] += draw(st.sampled_from([-3, -1, 1, 2, 100]))
    return arrays


def measured(module: Any, arrays: dict[str, Any], lengths: Any, keep: int) -> tuple[Any, ...]:
    found = np.full(len(arrays["starts"]), -7), np.full(len(arrays["offsets"]) - 1, -7)
    wrong, differs = module.measure_rows(*arrays.values(), lengths, keep, EOS, *found)
    return wrong, differs, *found


@given(stored(), st.integers(0, 2), st.data())
def test_measured_rows_are_those_of_the_reference(
    arrays: dict[str, Any], keep: int, data: st.DataObject
) -> None:
    size = len(arrays["starts"])
    given_lengths = data.draw(
        st.just(np.empty(0, np.int64))
        | st.lists(st.integers(-1, 8), min_size=size, max_size=size).map(lambda n: np.array(n, np.int64))
    )

    ours = measured(kernels, arrays, given_lengths, keep)
    theirs = measured(reference, arrays, given_lengths, keep)

    assert ours[0] == theirs[0]
    if ours[0] < 0:
        assert ours[1] == theirs[1]
        assert ours[2].tolist() == theirs[2].tolist()
        assert ours[3].tolist() == theirs[3].tolist()


def sound(arrays: dict[str, Any]) -> tuple[Any, Any] | None:
    """Lengths and widths of rows that are packed rows, or None."""
    wrong, _, lengths, used = measured(reference, arrays, np.empty(0, np.int64), 1)
    return None if wrong >= 0 else (lengths, used)


@given(stored(), st.data(), st.booleans(), st.booleans(), st.booleans())
def test_filled_rows_are_those_of_the_reference(
    arrays: dict[str, Any], data: st.DataObject, answer_only: bool, eos_in_loss: bool, cut: bool
) -> None:
    found = sound(arrays)
    if found is None:
        return
    lengths, used = found
    width = int(used.max()) + data.draw(st.integers(0, 5))
    silent = np.array(data.draw(st.sampled_from([[], [True] * len(used), [False] * len(used)])), np.bool_)
    is_float = arrays["loss_mask"].dtype.kind == "f" and not cut
    results = []
    for module in (kernels, reference):
        out = [np.full((len(used), width), 77, np.int64) for _ in range(4)]
        out[2] = out[2].astype(np.float32) if is_float else out[2]
        module.fill_rows(*arrays.values(), lengths, silent, int(answer_only), int(eos_in_loss), EOS, 9, *out)
        results.append([each.tolist() for each in out])

    assert results[0] == results[1]


@given(
    stored(),
    st.integers(0, 40),
    st.sampled_from([0, 4, TAIL]),
    st.sampled_from([1, 4]),
    st.booleans(),
    st.data(),
)
def test_boundaries_are_those_of_the_reference_and_cover_the_row(
    arrays: dict[str, Any], gap: int, tail: int, multiple: int, real: bool, data: st.DataObject
) -> None:
    found = sound(arrays)
    if found is None:
        return
    lengths, used = found
    width = int(used.max()) + gap
    documents = int(np.diff(arrays["document_offsets"]).max())
    most = data.draw(st.sampled_from([documents + 2, documents + 4, 2**31]))
    entries = min(most, documents + 1 + width)
    results = []
    for module in (kernels, reference):
        tables = np.full((2, len(used), entries), 77, np.int32)
        numbers = np.full((2, len(used)), 77)
        module.lay_boundaries(
            *(arrays[name] for name in ("offsets", "starts", "document_offsets")),
            lengths,
            width,
            tail,
            multiple,
            int(real),
            most,
            *tables,
            *numbers,
        )
        results.append((tables, numbers))

    (tables, numbers), (wanted_tables, wanted_numbers) = results
    assert tables.tolist() == wanted_tables.tolist()
    assert numbers.tolist() == wanted_numbers.tolist()
    assert (tables[1, :, -1] == width).all()
    assert (np.diff(tables[1]) >= 0).all()
    assert (np.diff(tables[0]) <= np.diff(tables[1])).all()

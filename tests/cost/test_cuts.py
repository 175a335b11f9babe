"""Documents are cut where the cost model says: kernels equal references, slices cover, parts cost alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles import cost as reference

from varlen.cost import kernels
from varlen.cost.hardware import Hardware
from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape
from varlen.step_plan import Mesh

COST = CostModel(model=ModelShape.named("llama-3-8b"), hardware=Hardware.named("h100"))
RATES = COST.rates(Mesh(dp=8, pp=4, tp=2))
Documents = tuple[np.ndarray, np.ndarray, float]


@st.composite
def documents(draw: st.DrawFn) -> Documents:
    """Lengths, the ranks that share each, and how much of the forward pass counts."""
    lengths = draw(st.lists(st.integers(1, 400_000), min_size=1, max_size=6))
    ranks = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=len(lengths), max_size=len(lengths)))
    return np.array(lengths, np.int32), np.array(ranks, np.int32), draw(st.sampled_from([0.0, 1.0]))


def work_of(given_documents: Documents, rows: float = 8_192.0) -> np.ndarray:
    """Seconds of each document, by the readable reference."""
    return reference.document_seconds(given_documents[0], given_documents[1], rows, given_documents[2], RATES)


@given(documents(), st.integers(1, 100_000))
def test_seconds_of_documents_equal_their_reference(given_documents: Documents, rows: int) -> None:
    lengths, ranks, part = given_documents
    lengths = np.append(lengths, 0).astype(np.int32)
    ranks = np.append(ranks, 1).astype(np.int32)

    seconds = kernels.document_seconds(lengths, ranks, float(rows), part, RATES)

    readable = reference.document_seconds(lengths, ranks, float(rows), part, RATES)
    np.testing.assert_array_equal(seconds, readable)
    assert seconds[-1] == 0
    for seen, length, count in zip(seconds[:-1], lengths, ranks):
        forward, inputs, weights = kernels.slice_seconds(0, length, count, rows, RATES)
        assert seen == pytest.approx(part * forward + inputs + weights)


@given(
    documents(), st.sampled_from([0.3, 1.0, 7.0]), st.sampled_from([512, 2_048]), st.sampled_from([1, 128])
)
def test_cuts_equal_their_reference(
    given_documents: Documents, finer: float, least_rows: int, multiple: int
) -> None:
    lengths, ranks, part = given_documents
    work = work_of(given_documents)
    columns = (
        lengths,
        ranks,
        work,
        np.full(len(work), work.max() / finer),
        least_rows,
        multiple,
        part,
        RATES,
    )

    compiled, readable = kernels.cut_evenly(*columns), reference.cut_evenly(*columns)

    assert [column.tolist() for column in compiled] == [column.tolist() for column in readable]
    assert [column.dtype for column in compiled] == [np.int32] * 3


@given(documents(), st.sampled_from([1.0, 5.0, 40.0]), st.sampled_from([512, 2_048]))
def test_cuts_cover_every_document_once_in_slices_of_enough_rows(
    given_documents: Documents, finer: float, least_rows: int
) -> None:
    lengths, ranks, part = given_documents
    work = work_of(given_documents)

    of, starts, stops = kernels.cut_evenly(
        lengths, ranks, work, np.full(len(work), work.max() / finer), least_rows, 128, part, RATES
    )

    for document, (length, count) in enumerate(zip(lengths, ranks)):
        mine = of == document
        assert starts[mine].tolist() == [0, *stops[mine][:-1].tolist()]
        assert stops[mine][-1] == length
        assert (stops[mine][:-1] % (128 * count) == 0).all()
        if mine.sum() > 1:
            assert (stops[mine] - starts[mine]).min() >= least_rows * count
    assert (np.diff(of) >= 0).all()


@pytest.mark.parametrize("parts", [2, 5, 8])
def test_cuts_are_those_of_the_closed_form_where_rates_are_equal(parts: int) -> None:
    """b_i = (-c2 + sqrt(c2² + 2·c1·W·i / k)) / c1, at c1·x + c2 seconds for the token after x others."""
    rates = COST.replace(mode="flops").rates(Mesh())
    length = 262_144
    lengths, one = np.array([length], np.int32), np.ones(1, np.int32)
    work = reference.document_seconds(lengths, one, 8_192.0, 1.0, rates)

    _, _, stops = kernels.cut_evenly(lengths, one, work, work / parts, 512, 1, 1.0, rates)

    c1 = 3.5 * rates.attention_flops * rates.forward_s[0, 0]
    c2 = 3 * (rates.linear_flops + rates.head_flops / 32) * rates.gemm_s[0] + c1 / 2
    whole = c1 * length**2 / 2 + c2 * length
    ends = [(-c2 + math.sqrt(c2**2 + 2 * c1 * whole * i / parts)) / c1 for i in range(1, parts + 1)]
    assert len(stops) == parts
    assert stops.tolist() == pytest.approx(ends, abs=2)


def test_slices_of_a_long_document_cost_alike_at_calibrated_rates() -> None:
    lengths, one = np.array([262_144], np.int32), np.ones(1, np.int32)
    work = reference.document_seconds(lengths, one, 8_192.0, 1.0, RATES)

    _, starts, stops = kernels.cut_evenly(lengths, one, work, work / 12, 2_048, 128, 1.0, RATES)

    columns = (np.arange(len(stops) + 1), starts, stops, np.ones(len(stops)))
    priced = kernels.price(*(column.astype(np.int32) for column in columns), RATES)
    seconds = priced[:, [0, 2, 4]].sum(axis=1)
    assert len(stops) == 12
    # Late slices have fewer rows, whose rates are lower than those that the cuts count with.
    assert seconds.max() / seconds.mean() < 1.15
    assert (np.diff(stops - starts) <= 0).all()

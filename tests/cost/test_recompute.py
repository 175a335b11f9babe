"""Recomputing some layers only: their bytes, and their seconds."""

from __future__ import annotations

import pytest
from tests.cost.test_price import COST, one

from varlen.cost.memory import OWN
from varlen.cost.rates import INPUT_LAYER
from varlen.step_plan import Mesh


def test_recomputing_some_layers_takes_their_share_between_selective_and_full() -> None:
    rates = [
        COST.replace(recompute=way, recompute_share=share).rates(Mesh(tp=4))  # type: ignore[arg-type]
        for way, share in (("selective", 1.0), ("full", 0.25), ("full", 1.0))
    ]

    none, some, whole = (one(8_192, 16_384, each)[INPUT_LAYER] for each in rates)

    assert none < some < whole
    assert some == pytest.approx(0.75 * none + 0.25 * whole)


def test_layers_that_memory_counts_as_recomputed_take_their_time() -> None:
    """A chunk of one layer recomputes it whole, however small the share."""
    mesh = Mesh(pp=8, virtual_stages=4)
    whole, some = (COST.replace(recompute="full", recompute_share=share) for share in (1.0, 0.01))

    assert COST.stages(mesh).layers.max() == 1
    assert some.memory(mesh).held_bytes.tolist() == whole.memory(mesh).held_bytes.tolist()
    assert one(0, 8_192, some.rates(mesh)).tolist() == one(0, 8_192, whole.rates(mesh)).tolist()


@pytest.mark.parametrize(("share", "layers"), [(0.1, 1), (1 / 9, 1), (0.25, 3), (0.5, 5), (1.0, 9)])
def test_a_share_of_a_chunks_layers_rounded_up_recomputes_fully(share: float, layers: int) -> None:
    some, none = (
        COST.replace(recompute=way, recompute_share=part).memory(Mesh(pp=4))
        for way, part in (("full", share), ("selective", 1.0))
    )
    whole = COST.replace(recompute="full").memory(Mesh(pp=4))

    expected = none.held_bytes[1] + layers / 9 * (whole.held_bytes[1] - none.held_bytes[1])
    assert COST.stages(Mesh(pp=4)).layers[1] == 9
    assert some.held_bytes[1] == pytest.approx(expected)
    assert some.backward_peaks[1, :, OWN].max() <= whole.backward_peaks[1, :, OWN].max()

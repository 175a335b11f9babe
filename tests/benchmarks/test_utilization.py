"""The table that packing is sold with: our packs keep what it promises."""

import numpy as np
import pytest
from benchmarks.packing import PROMISED, ROW, lengths_of_mean, utilization


@pytest.mark.parametrize("mean", PROMISED)
@pytest.mark.parametrize("seed", [0, 1])
def test_packs_are_fuller_than_promised_at_every_mean_length(mean, seed):
    padded, packed, improvement = PROMISED[mean]

    found = utilization(mean, num_documents=20_000, seed=seed)

    assert found.padded == pytest.approx(padded, rel=1e-4)
    assert found.packed > max(0.99, packed)
    assert found.improvement >= improvement
    assert found.lower_bound <= found.packs <= 1.01 * found.lower_bound


@pytest.mark.parametrize("mean", PROMISED)
def test_the_mean_is_kept_after_clipping(mean):
    lengths = lengths_of_mean(mean, ROW, 10_000, seed=3)

    assert lengths.min() >= 1
    assert lengths.max() <= ROW
    assert abs(lengths.mean() - mean) < 0.02
    assert np.unique(lengths).size > 500

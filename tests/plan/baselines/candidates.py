"""What every candidate of whole documents must be: each document once on each of its ranks, in one order."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from varlen.plan.search import Candidate
from varlen.step_plan import Mesh


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, Mesh]:
    """Lengths, some of them 0, seconds of each document if 1, 2, 4… ranks share it, and a mesh."""
    dp, pp = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    lengths = np.array(draw(st.lists(st.integers(0, 5000), max_size=40)), np.int32)
    own = lengths + 0.001 * lengths.astype(np.float64) ** 2
    work = np.stack([own / 2**level * (1 + 0.1 * level) for level in range(dp.bit_length())], axis=1)
    sharding = draw(st.sampled_from(["optimizer", "parameters"]))
    return lengths, work, Mesh(dp=dp, pp=pp, sharding=sharding)  # type: ignore[arg-type]


def check(candidate: Candidate, lengths: np.ndarray, mesh: Mesh, *, is_even: bool = False) -> None:
    """Each document stands whole in one MicroPack of each of its ranks, and ranks agree about what they share."""
    packs = candidate.forward
    assert candidate.backward is packs
    assert packs.rank_offsets.size == mesh.dp + 1
    assert packs.rank_offsets[-1] == packs.num_micropacks
    assert packs.slice_offsets[-1] == packs.document_ids.size
    assert not packs.starts.any()
    assert packs.stops.tolist() == lengths[packs.document_ids].tolist()

    held = np.flatnonzero(lengths)
    expected = {
        (int(document), int(candidate.first_ranks[document]) + turn)
        for document in held
        for turn in range(candidate.num_ranks[document])
    }
    found = list(zip(packs.document_ids.tolist(), packs.ranks[packs.micropack_of_slice].tolist()))
    assert sorted(found) == sorted(expected)
    assert (candidate.first_ranks[lengths == 0] == -1).all()
    for document in held:
        first, width = int(candidate.first_ranks[document]), int(candidate.num_ranks[document])
        assert width & (width - 1) == 0
        assert first % width == 0
        assert first + width <= mesh.dp

    counts = packs.counts
    if is_even or mesh.sharding == "parameters":
        assert counts.max() == counts.min()
    else:
        assert np.diff(packs.slice_offsets).min(initial=1) > 0
    _check_turns(candidate)


def _check_turns(candidate: Candidate) -> None:
    """What ranks share has one number on all of them: each then runs it at the same turn of a 1F1B schedule."""
    packs = candidate.forward
    turn = np.arange(packs.num_micropacks) - packs.rank_offsets[packs.ranks]
    turn_of_slice = turn[packs.micropack_of_slice]
    for document in np.flatnonzero(candidate.num_ranks > 1):
        assert np.unique(turn_of_slice[packs.document_ids == document]).size == 1
    for micropack in range(packs.num_micropacks):
        ids = packs.document_ids[packs.slice_offsets[micropack] : packs.slice_offsets[micropack + 1]]
        assert np.unique(candidate.num_ranks[ids]).size <= 1
        assert np.unique(candidate.first_ranks[ids]).size <= 1

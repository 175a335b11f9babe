"""What peers without an adapter here publish of their packers, in our own words: the same, or nothing lost."""

from __future__ import annotations

import numpy as np

import varlen as vl


def test_boundaries_and_masks_are_those_of_llama_factory_s_numbered_rows() -> None:
    numbered = np.array([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]])
    documents = [[7] * length for length in (2, 3, 1, 2, 3)]
    packing = vl.pack([2, 3, 1, 2, 3], 6, "best_fit", groups=[0, 0, 1, 1, 1])

    batch = vl.collate(documents, packing)

    assert (np.asarray(batch.segment_ids) + 1).tolist() == numbered.tolist()
    assert np.asarray(batch.document_lengths).tolist() == [2, 3, 1, 2, 3]
    # There the boundaries leave padding out; here it is a segment of its own, so that no position is uncovered.
    assert np.asarray(batch.cu_seqlens).tolist() == [0, 2, 5, 6, 7, 9, 12]
    assert batch.max_seqlen == 3
    same = (numbered[:, :, None] == numbered[:, None, :]) & (numbered[:, :, None] > 0)
    allowed = same & np.tri(6, dtype=bool)
    mask = np.asarray(batch.dense_mask()).reshape(2, 6, 6)
    real = numbered > 0
    assert (mask[real] == allowed[real]).all()


def test_documents_that_llm_foundry_packs_without_waste_are_packed_the_same() -> None:
    packing = vl.pack([1, 2, 4, 3], 5)

    assert sorted(packing.to_lists()) == [[0, 2], [1, 3]]
    assert packing.fill_ratio == 1.0


def test_what_llm_foundry_leaves_over_has_a_pack_here() -> None:
    packing = vl.pack([1, 2, 4, 4], 5)

    assert sorted(packing.to_lists()) == [[0, 2], [1], [3]]
    assert packing.ledger.packed == packing.ledger.tokens_in == 11


def test_the_example_of_best_fit_that_olmo_core_tests_gives_the_same_packs() -> None:
    lengths = [8, 6, 6, 4, 3]  # appendix B of arXiv 2404.10830, and two more behind it

    assert vl.pack(lengths, 8).to_lists() == [[0], [1], [2], [3, 4]]
    assert vl.pack([*lengths, 2, 3], 8, "best_fit").to_lists() == [[0], [1, 5], [2], [3, 4], [6]]

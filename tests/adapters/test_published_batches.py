"""What peers publish of their packed batches, in our own words: positions, targets, masks, and gradients of pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.trainers import tiny_llama
from torch.nn.functional import logsigmoid

import varlen as vl
from varlen.adapters.axolotl import MultipackBatchSampler
from varlen.adapters.hf import model_inputs


def examples(documents: list[list[int]], capacity: int, **settings: Any) -> list[list[tuple[int, int, int]]]:
    """(position, token, its target) of every token that predicts another, row by row."""
    masks = settings.pop("loss_mask", None)
    packing = vl.pack([len(document) for document in documents], capacity, **settings)
    batch = vl.collate(documents, packing, loss_mask=masks, shift_labels=True)
    found = []
    for row in range(batch.num_rows):
        targets = np.asarray(batch.shift_labels)[row]
        seen = zip(np.asarray(batch.position_ids)[row], np.asarray(batch.input_ids)[row], targets)
        found.append([(int(at), int(token), int(target)) for at, token, target in seen if target != -100])
    return found


# torchtitan shifts documents before it packs them, so that a row holds the tokens that predict alone; here whole
# documents are packed. What is learned at which position is the same, and that is compared.


@pytest.mark.parametrize("method", ["first_fit", "wrapped"])
@pytest.mark.parametrize(
    ("documents", "learned"),
    [
        ([[1, 2], [3, 4, 5]], [(0, 1, 2), (0, 3, 4), (1, 4, 5)]),
        (
            [[1, 10, 2], [1, 20, 21, 2]],
            [(0, 1, 10), (1, 10, 2), (0, 1, 20), (1, 20, 21), (2, 21, 2)],
        ),
    ],
)
def test_positions_and_targets_are_those_of_torchtitan_s_packed_rows(
    method: Any, documents: list[list[int]], learned: list[tuple[int, int, int]]
) -> None:
    assert examples(documents, 9, method=method) == [learned]


def test_masked_prompts_stay_masked_in_a_pack_as_torchtitan_s_do() -> None:
    chat, mask = [1, 10, 11, 20, 21, 2], [0, 0, 0, 1, 1, 1]

    assert examples([chat, chat], 12, loss_mask=[mask, mask]) == [[(2, 11, 20), (3, 20, 21), (4, 21, 2)] * 2]


def test_a_document_cut_at_a_row_s_end_goes_on_at_position_0_and_lacks_one_target_of_torchtitan_s() -> None:
    theirs = [[(n, n, n + 1) for n in range(5)], [(n, n + 5, n + 6) for n in range(4)]]

    ours = examples([list(range(10))], 5, method="wrapped")

    assert ours == [
        theirs[0][:4],
        theirs[1],
    ]  # the token behind the cut is in the next row, and none predicts it


def test_a_document_that_is_too_long_takes_nothing_with_it_that_waits() -> None:
    for settings, packed, dropped in (({"overlong": "drop"}, [[0, 2]], 20), ({}, None, 0)):
        packer = vl.WindowPacker(capacity=9, window=8, method="first_fit", **settings)  # type: ignore[arg-type]
        packs = [packer.add([6]), packer.add([20]), packer.add([3]), packer.flush()]

        held = [pack for packing in packs for pack in packing.to_lists()]
        assert packed is None or held == packed
        assert packer.ledger.dropped == dropped  # torchtitan leaves it out and doesn't say so
        assert packer.ledger.packed == 29 - dropped


# open-instruct's packs of answers to prompts, which it fills in their order.


@pytest.mark.parametrize("is_masked", [True, False])
def test_answers_of_rollouts_carry_masks_and_values_of_a_token_into_their_packs(is_masked: bool) -> None:
    queries, answers = [[1, 2, 3], [4, 5]], [[10, 11, 12], [20, 21]]
    masks = [[1, 0, 1], [0, 1]] if is_masked else [[1, 1, 1], [1, 1]]
    documents = [query + answer for query, answer in zip(queries, answers)]

    batch = vl.collate(
        documents,
        vl.pack([len(document) for document in documents], 8, "next_fit"),
        loss_mask=[[0] * len(query) + mask for query, mask in zip(queries, masks)],
        columns={
            "rollout": [[number] * len(document) for number, document in zip((7, 9), documents)],
            "logprob": [[0.0] * len(query) + [-0.5] * len(mask) for query, mask in zip(queries, masks)],
        },
        column_pads={"rollout": -1},
    )

    learned = [[False] * 3 + [True, not is_masked, True], [False] * 2 + [not is_masked, True]]
    assert (np.asarray(batch.labels) != -100).tolist() == [
        learned[0] + [False] * 2,
        learned[1] + [False] * 4,
    ]
    assert np.asarray(batch.columns["rollout"]).tolist() == [[7] * 6 + [-1] * 2, [9] * 4 + [-1] * 4]
    assert np.asarray(batch.columns["logprob"])[1].tolist() == [0, 0, -0.5, -0.5, 0, 0, 0, 0]


def test_answers_are_packed_in_their_order_and_in_more_packs_where_so_many_are_asked_for() -> None:
    lengths = [21, 15, 17]

    assert vl.pack(lengths, 40, "next_fit").to_lists() == [[0, 1], [2]]
    (packs,) = MultipackBatchSampler(range(3), 3, 40, lengths, None, sequential=True)
    assert packs == [[0], [1], [2]]


PAIRS = [([5, 6, 7, 8, 9], [5, 6, 3]), ([11, 12, 13], [11, 14, 15, 16, 17, 18]), ([21, 22], [21, 23, 24])]
"""Chosen and rejected answers of a prompt, each with the prompt in front."""


def preference_gradients(model: Any, scores: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of DPO's loss, without a reference, of the log-probabilities of chosen and rejected answers."""
    model.zero_grad()
    margins = torch.stack([chosen - rejected for chosen, rejected in zip(scores[::2], scores[1::2])])
    (-logsigmoid(0.5 * margins).mean()).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def score_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The log-probability of a document, which its logits give."""
    return logits[:-1].log_softmax(-1).gather(1, ids[1:, None]).sum()


def test_pairs_in_one_row_have_the_gradients_of_one_by_one_and_without_boundaries_others() -> None:
    model = tiny_llama("sdpa")
    documents = [torch.tensor(answer) for pair in PAIRS for answer in pair]
    packing = vl.pack([len(document) for document in documents], 22, groups=[0, 0, 1, 1, 2, 2])
    batch = vl.collate([document.tolist() for document in documents], packing, layout="flat").to_torch()
    apart = {"cu_seqlens": batch.cu_seqlens[[0, -1]], "segment_ids": batch.segment_ids * 0}

    def packed(one: Any) -> dict[str, torch.Tensor]:
        logits = model(**model_inputs(one, model)).logits[0]
        parts = logits.split(batch.document_lengths.tolist())
        in_order = [parts[n] for n in np.argsort(np.asarray(batch.document_ids))]
        return preference_gradients(model, [score_of(part, ids) for part, ids in zip(in_order, documents)])

    expected = preference_gradients(
        model, [score_of(model(input_ids=ids[None]).logits[0], ids) for ids in documents]
    )
    kept, lost = packed(batch), packed(batch.replace(**apart))

    assert sorted(batch.document_ids.tolist()) == list(range(6))
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(kept[name], gradient, rtol=1e-4, atol=1e-5 * scale, msg=name)
        assert float((lost[name] - gradient).abs().max()) > 1e-3 * scale, name

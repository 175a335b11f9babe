"""What peers publish of their packers and batches, in our own words: the same, or nothing lost."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.trainers import tiny_llama
from torch.nn.functional import logsigmoid
from torch.utils.data import DataLoader

import varlen as vl
from varlen.adapters.axolotl import MultipackBatchSampler
from varlen.adapters.hf import DataCollatorWithFlattening, model_inputs
from varlen.types import Ledger, Packing


def test_boundaries_and_masks_are_those_of_llama_factory_s_numbered_rows():
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


def test_documents_that_llm_foundry_packs_without_waste_are_packed_the_same():
    packing = vl.pack([1, 2, 4, 3], 5)

    assert sorted(packing.to_lists()) == [[0, 2], [1, 3]]
    assert packing.fill_ratio == 1.0


def test_what_llm_foundry_leaves_over_has_a_pack_here():
    packing = vl.pack([1, 2, 4, 4], 5)

    assert sorted(packing.to_lists()) == [[0, 2], [1], [3]]
    assert packing.ledger.packed == packing.ledger.tokens_in == 11


def test_the_example_of_best_fit_that_olmo_core_tests_gives_the_same_packs():
    lengths = [8, 6, 6, 4, 3]  # appendix B of arXiv 2404.10830, and two more behind it

    assert vl.pack(lengths, 8).to_lists() == [[0], [1], [2], [3, 4]]
    assert vl.pack([*lengths, 2, 3], 8, "best_fit").to_lists() == [[0], [1, 5], [2], [3, 4], [6]]


def taken(lengths: list[int], most: int, ranks: int, **settings: Any) -> list[list[list[int]]]:
    """The packs that each rank takes of one step's samples, at most `most` tokens in each."""
    usual = {
        "batch_size": 1,
        "bin_size": None,
        "num_replicas": ranks,
        "fill": "empty",
        "drop_last": False,
        **settings,
    }
    samplers = [
        MultipackBatchSampler(range(len(lengths)), batch_max_len=most, lengths=lengths, rank=rank, **usual)
        for rank in range(ranks)
    ]
    return [[pack for batch in sampler for pack in batch or [[]]] for sampler in samplers]


def indices(packs: Iterable[Iterable[int]]) -> list[int]:
    return sorted(itertools.chain.from_iterable(packs))


RANDOM = np.random.default_rng(0)
# Lengths, most tokens, and how many minibatches instructlab-training 0.16.2 returned for them on 2026-11-23: by its
# packer without padding, and on each rank by that with padding.
MINIBATCHES: list[tuple[list[int], int, int, list[int]]] = [
    ([], 100, 0, [0, 0]),
    ([50], 100, 1, [1]),
    ([30, 40, 50, 20, 60, 70, 80, 90], 200, 1, [1, 1, 1, 1]),
    ([80, 60, 40, 90, 50, 70], 100, 3, [3, 2]),
    ([50] * 10, 200, 2, [2, 1]),
    ([98, 95, 97, 96, 94, 99, 93, 96], 400, 2, [2]),
    ([100, 90, 80, 70, 60, 50, 40, 30, 20, 10], 200, 2, [3, 2]),
    ([30, 20], 100, 1, [1, 1, 1, 1]),
    ([7] * 5, 10, 3, [3, 2]),
    (RANDOM.integers(20, 200, 50).tolist(), 500, 4, [4, 3, 4, 4]),
    (RANDOM.integers(20, 100, 25).tolist(), 200, 3, [3, 3, 3, 2]),
]


@pytest.mark.parametrize(("lengths", "most", "unpadded", "padded"), MINIBATCHES)
def test_samples_of_a_step_are_divided_over_ranks_as_instructlab_s_packers_promise(
    lengths, most, unpadded, padded
):
    of_ranks = taken(lengths, most, len(padded))

    assert indices(itertools.chain.from_iterable(of_ranks)) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in pack) <= most for packs in of_ranks for pack in packs)
    # As many on every rank, as there without padding; with padding, ranks there wait for others that have ended.
    numbers = {len(packs) for packs in of_ranks}
    assert len(numbers) == 1
    assert max(numbers) <= unpadded <= max(padded)
    if len(lengths) >= len(padded) * unpadded:
        assert all(pack for packs in of_ranks for pack in packs)
    assert taken(lengths, most, len(padded)) == of_ranks


def test_work_of_ranks_is_as_even_as_instructlab_asks_and_samples_of_a_minibatch_are_limited():
    lengths = np.random.default_rng(0).integers(20, 200, 50).tolist()
    tokens = [sum(lengths[index] for index in indices(packs)) for packs in taken(lengths, 500, 4)]
    assert 1 - min(tokens) / max(tokens) < 0.5

    (packs,) = taken([10] * 20, 1000, 1, bin_size=5)
    assert [len(pack) for pack in packs] == [5] * 4


def test_micro_batches_of_verl_s_ranks_stay_within_the_limit_and_are_as_many_on_each_and_put_back():
    limit = 300
    of_ranks = [np.random.default_rng(rank).integers(50, 91, 20 + 5 * rank).tolist() for rank in range(2)]
    fewest = 4

    # An all-reduce there.
    agreed = max(fewest, *(vl.pack(lengths, limit, "best_fit").num_packs for lengths in of_ranks))
    for lengths in of_ranks:
        (packs,) = taken(lengths, limit, 1, batch_size=agreed)

        assert len(packs) == agreed
        assert all(0 < sum(lengths[index] for index in pack) <= limit for pack in packs)
        order = np.concatenate(packs)
        back = np.empty_like(order)
        back[order] = np.arange(order.size)
        assert (np.array(lengths)[order][back] == lengths).all()


@pytest.mark.parametrize(
    ("lengths", "limit", "fewest", "number"), [([6, 6, 6], 9, 1, 3), ([5] * 4, 20, 3, 3)]
)
def test_more_micro_batches_than_tokens_ask_for_come_where_the_limit_or_verl_s_fewest_needs_them(
    lengths, limit, fewest, number
):
    (packs,) = taken(lengths, limit, 1, batch_size=max(fewest, vl.pack(lengths, limit, "best_fit").num_packs))

    assert len(packs) == number
    assert indices(packs) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in pack) <= limit for pack in packs)


def test_responses_of_a_group_share_a_micro_batch_as_verl_forces_them_to():
    lengths = [4, 3, 2, 2, 5, 1]

    packs = vl.pack(lengths, 11, groups=[0, 0, 1, 1, 2, 2]).to_lists()

    assert sorted(packs) == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("width", [512, 4096])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_grid_of_axolotl_s_own_test_has_every_index_once_in_rows_of_its_shape(
    batch_size, width, sequential
):
    lengths = np.clip(np.random.default_rng(1).lognormal(5, 1, 300), 1, width).astype(int)
    rows = [{"input_ids": np.full(length, number)} for number, length in enumerate(lengths)]
    order = np.random.default_rng(2).permutation(300)
    sampler = MultipackBatchSampler(
        order, batch_size, width, lengths, 200, group_size=100_000, sequential=sequential
    )

    batches = [list(itertools.chain.from_iterable(batch)) for batch in sampler]
    collator = DataCollatorWithFlattening(pad_to_multiple_of=width)
    loaded = list(DataLoader(rows, batch_sampler=batches, collate_fn=collator))

    assert indices(batches) == list(range(300))
    assert len(loaded) == len(sampler)
    for batch, numbers in zip(loaded, batches):
        assert batch["input_ids"].shape[0] == 1
        assert batch["input_ids"].shape[1] % width == 0 < batch["input_ids"].shape[1] <= batch_size * width
        assert int((batch["position_ids"][batch["labels"] != -100] > 0).sum()) == lengths[
            numbers
        ].sum() - len(numbers)


def test_what_is_left_over_waits_for_the_next_documents_and_in_a_checkpoint():
    packer = vl.WindowPacker(capacity=5, window=4, min_fill=1.0, max_age=9)
    first = packer.add([1, 2, 4, 4])  # of the first documents llm-foundry packs 9 tokens, and 2 wait

    resumed = vl.WindowPacker(capacity=5, window=4, min_fill=1.0, max_age=9)
    resumed.load_state_dict(packer.state_dict())
    for one in (packer, resumed):
        rest = [one.add([1, 2]), one.flush()]
        packs = [pack for packing in (first, *rest) for pack in packing.to_lists()]
        assert indices(packs) == list(range(6))
        assert len(packs) == 3  # there the 2 left over and the next document are a row each
        assert one.ledger.packed == one.ledger.tokens_in == 14


FILES = [
    [[1, 2, 3, 4, 5, 6, 7, 0], [1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 0], [1, 2, 3, 0], [1, 2, 0]],
    [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0], [1, 2, 0]],
]


@pytest.mark.parametrize("overlong", ["truncate", "split"])
def test_documents_that_olmo_core_cuts_are_cut_so_and_masked_tokens_stay_masked(overlong):
    documents = [document for file in FILES for document in file]
    masks = [[1] * len(document) for document in documents]
    masks[0][1] = masks[5][8] = 0

    packing = vl.pack([len(document) for document in documents], 8, overlong=overlong)
    batch = vl.collate(documents, packing, loss_mask=masks, pad_id=-1)

    rows = [row[row >= 0].tolist() for row in batch.input_ids]
    assert len(rows) == 6  # as there, where each file is packed by itself
    assert rows[0] == documents[0]
    assert [1, 2, 3, 4, 5, 6, 7, 8] in rows
    assert any(row[-6:] == [9, 10, 0, 1, 2, 0] or row[:3] == [9, 10, 0] for row in rows) == (
        overlong == "split"
    )
    assert packing.ledger.truncated == (3 if overlong == "truncate" else 0)
    assert batch.labels[0].tolist() == [-100, -100, 3, 4, 5, 6, 7, 0]
    # 10 is a target either way in what is kept; 9, which is masked, begins a piece besides.
    assert (batch.labels == 9).sum() == 0
    assert (batch.labels == 10).sum() == (overlong == "split")


def test_files_that_olmo_core_packs_in_groups_are_packed_whole_in_no_more_rows():
    lengths = [4, 6, 6, 4, 3, 3, 8, 10, 3, 5]  # of four files, which in groups of two make 7 rows

    packing = vl.pack(lengths, 8, overlong="truncate")

    assert packing.num_packs == 7
    assert packing.ledger.truncated == 2
    assert indices(packing.to_lists()) == list(range(10))


def test_a_plan_of_packs_that_is_kept_in_files_is_replayed_as_xtuner_replays_its_own(tmp_path):
    samples = [list(range(begin, begin + 100)) for begin in range(0, 1000, 100)]
    # (sample, first token, one past the last), in packs of 2, 1 and 2: whole samples, and parts of others.
    plan = np.array([[7, 0, 100], [2, 0, 100], [4, 25, 75], [5, 90, 100], [9, 10, 30]])
    np.save(tmp_path / "slices.npy", plan)
    np.save(tmp_path / "bounds.npy", np.array([0, 2, 3, 5]))
    kept, bounds = (np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("slices", "bounds"))

    packing = Packing(
        document_ids=kept[:, 0].astype(np.int64),
        starts=kept[:, 1].astype(np.int32),
        stops=kept[:, 2].astype(np.int32),
        offsets=np.array(bounds),
        capacity=200,
        ledger=Ledger(documents_in=len(samples), tokens_in=1000, packed=280, truncated=220, dropped=500),
        overlong="truncate",  # pieces may end anywhere
    )
    for number in reversed(range(3)):
        batch = vl.collate(samples, packing, pack_ids=[number])
        slices = plan[bounds[number] : bounds[number + 1]].tolist()
        expected = [token for sample, begin, end in slices for token in samples[sample][begin:end]]
        assert batch.input_ids[0].tolist() == expected + [0] * (200 - len(expected))
        assert batch.position_ids[0].tolist()[: len(expected)] == [
            place for _, begin, end in slices for place in range(end - begin)
        ]


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
        ([[1, 10, 2], [1, 20, 21, 2]], [(0, 1, 10), (1, 10, 2), (0, 1, 20), (1, 20, 21), (2, 21, 2)]),
    ],
)
def test_positions_and_targets_are_those_of_torchtitan_s_packed_rows(method, documents, learned):
    assert examples(documents, 9, method=method) == [learned]


def test_masked_prompts_stay_masked_in_a_pack_as_torchtitan_s_do():
    chat, mask = [1, 10, 11, 20, 21, 2], [0, 0, 0, 1, 1, 1]

    assert examples([chat, chat], 12, loss_mask=[mask, mask]) == [[(2, 11, 20), (3, 20, 21), (4, 21, 2)] * 2]


def test_a_document_cut_at_a_row_s_end_goes_on_at_position_0_and_lacks_one_target_of_torchtitan_s():
    theirs = [[(n, n, n + 1) for n in range(5)], [(n, n + 5, n + 6) for n in range(4)]]

    ours = examples([list(range(10))], 5, method="wrapped")

    # The token behind the cut is in the next row, and none predicts it.
    assert ours == [
        theirs[0][:4],
        theirs[1],
    ]


def test_a_document_that_is_too_long_takes_nothing_with_it_that_waits():
    for settings, packed, dropped in (({"overlong": "drop"}, [[0, 2]], 20), ({}, None, 0)):
        packer = vl.WindowPacker(capacity=9, window=8, method="first_fit", **settings)  # type: ignore[arg-type]
        packs = [packer.add([6]), packer.add([20]), packer.add([3]), packer.flush()]

        held = [pack for packing in packs for pack in packing.to_lists()]
        assert packed is None or held == packed
        assert packer.ledger.dropped == dropped  # torchtitan leaves it out and doesn't say so
        assert packer.ledger.packed == 29 - dropped


# open-instruct's packs of answers to prompts, which it fills in their order.


@pytest.mark.parametrize("is_masked", [True, False])
def test_answers_of_rollouts_carry_masks_and_values_of_a_token_into_their_packs(is_masked):
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
    assert (np.asarray(batch.labels) != -100).tolist() == [learned[0] + [False] * 2, learned[1] + [False] * 4]
    assert np.asarray(batch.columns["rollout"]).tolist() == [[7] * 6 + [-1] * 2, [9] * 4 + [-1] * 4]
    assert np.asarray(batch.columns["logprob"])[1].tolist() == [0, 0, -0.5, -0.5, 0, 0, 0, 0]


def test_answers_are_packed_in_their_order_and_in_more_packs_where_so_many_are_asked_for():
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


def test_pairs_in_one_row_have_the_gradients_of_one_by_one_and_without_boundaries_others():
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

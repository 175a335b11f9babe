"""varlen's own batches in Megatron's keys, and their shares for context-parallel ranks and stages."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import varlen as vl
from varlen.adapters.megatron import (
    cp_slice,
    get_packed_seq_params,
    megatron_batch,
    mtp_targets,
    split_microbatches,
    stage_batch,
)
from varlen.adapters.megatron.batches.boundaries import entries, logical_boundaries, physical_boundaries
from varlen.errors import DocumentsError, SettingError


def documents(lengths: list[int]) -> list[np.ndarray[Any, Any]]:
    starts = np.cumsum([1, *lengths])
    return [np.arange(start, start + length, dtype=np.int32) for start, length in zip(starts, lengths)]


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.sampled_from(["rows", "flat"]),
    st.sampled_from([1, 4]),
    st.sampled_from(["0.4", "0.5", "0.6"]),
    st.booleans(),
)
def test_every_pair_of_neighbours_in_a_document_is_a_target_once(
    lengths, layout, multiple, dialect, on_torch
):
    given_documents = documents(lengths)
    packing = vl.pack(lengths, capacity=24, document_multiple_of=multiple)
    own = vl.collate(given_documents, packing, layout=layout, report=False)

    batch = megatron_batch(own.to_torch() if on_torch else own, dialect)

    trained = batch["loss_mask"] == 1
    pairs = set(zip(batch["tokens"][trained].tolist(), batch["labels"][trained].tolist()))
    assert pairs == {(t, t + 1) for one in given_documents for t in one[:-1].tolist()}
    assert int(trained.sum()) == own.num_targets
    assert (batch["labels"][~trained] == own.pad_id).all()
    assert sum(batch["token_count"]) == sum(lengths)
    for micro in split_microbatches(batch):
        places = entries(physical_boundaries(micro))  # type: ignore[arg-type]
        reals = entries(logical_boundaries(micro))  # type: ignore[arg-type]
        assert places[0] == reals[0] == 0
        assert places[-1] == micro["tokens"].shape[1]
        starts = set(places[:-1][np.diff(reals) > 0].tolist())
        tokens = micro["tokens"][0].tolist()
        firsts = {int(one[0]) for one in given_documents}
        assert {place for place, token in enumerate(tokens) if token in firsts} <= starts


def test_the_keys_and_dtypes_are_those_of_the_dialect():
    own = vl.collate(documents([3, 2, 4]), vl.pack([3, 2, 4], capacity=8))

    new, old = megatron_batch(own), megatron_batch(own, "0.4")

    assert new["cu_seqlens_q"].tolist() == [[0, 3, 7, 8], [0, 2, 8, 8]]
    assert old["cu_seqlens"].tolist() == [[0, 3, 7, 8, -1], [0, 2, 8, -1, -1]]
    assert old["cu_seqlens_argmin"].tolist() == [[4], [3]]
    assert new["max_seqlen_q"].tolist() == old["max_seqlen"].tolist() == [[4], [6]]
    assert {new[name].dtype for name in ("tokens", "labels", "loss_mask", "position_ids")} == {torch.int64}
    assert new["cu_seqlens_q"].dtype == torch.int32
    assert new["attention_mask"] is None


def test_rounded_slots_give_padded_boundaries_whose_padding_holds_no_token():
    own = vl.collate(documents([3, 2]), vl.pack([3, 2], capacity=16, document_multiple_of=4))

    batch = megatron_batch(own, padding_mask=True, total_tokens=True)

    assert batch["cu_seqlens_q"].tolist() == [[0, 3, 5, 5]]
    assert batch["cu_seqlens_q_padded"].tolist() == [[0, 4, 8, 16]]
    assert batch["pad_between_seqs"] is True
    assert batch["padding_mask"][0].tolist() == [False] * 3 + [True] + [False] * 2 + [True] * 10
    assert batch["total_tokens"] == 16
    assert "cu_seqlens_unpadded" in megatron_batch(own, "0.5")


def test_weights_come_from_a_column_or_an_array_and_move_with_the_labels():
    given_documents = documents([3, 2])
    weights = [np.array([9, 0.5, 0.25], np.float32), np.array([9, 2], np.float32)]
    own = vl.collate(given_documents, vl.pack([3, 2], capacity=6), columns={"weight": weights})

    by_name = megatron_batch(own, weights="weight")["loss_mask"]
    by_document = megatron_batch(own, weights=own.loss_weights("document"))["loss_mask"]

    assert by_name.dtype == torch.float32
    assert by_name.tolist() == [[0.5, 0.25, 0, 2, 0, 0]]
    assert by_document.tolist() == [[0.5, 0.5, 0, 1, 0, 0]]


def test_labels_that_are_masked_stay_out_of_the_loss():
    labels = [np.array([-100, -100, 3], np.int32)]
    own = vl.collate(documents([3]), vl.pack([3], capacity=4), labels=labels)

    batch = megatron_batch(own)

    assert batch["loss_mask"].tolist() == [[0, 1, 0, 0]]
    assert batch["labels"].tolist() == [[2, 3, 0, 0]]


def test_weights_that_are_not_there_are_refused():
    own = vl.collate(documents([3]), vl.pack([3], capacity=4))

    with pytest.raises(SettingError, match=r"no column 'weight' .* it has none"):
        megatron_batch(own, weights="weight")
    with pytest.raises(SettingError, match=r"labels' shape, \(1, 4\); got \(3,\)"):
        megatron_batch(own, weights=np.ones(3))
    with pytest.raises(SettingError, match="weights must be numbers, got <U1"):
        megatron_batch(own, weights=np.full((1, 4), "a"))


@pytest.mark.parametrize("weight", [np.nan, np.inf, 1e300])
def test_weights_that_no_loss_can_take_are_refused_where_a_target_is(weight):
    own = vl.collate(documents([3]), vl.pack([3], capacity=4))

    batch = megatron_batch(own, weights=np.array([[weight, 1, 0.5, weight]]))

    assert batch["loss_mask"].tolist() == [[1, 0.5, 0, 0]]
    with pytest.raises(SettingError, match=r"weights hold .* \(1 of 2 targets aren't finite in float32\)"):
        megatron_batch(own, weights=np.array([[1, weight, 0.5, 1]]))


def test_micro_batches_are_the_rows_in_order():
    own = vl.collate(documents([3, 2, 4]), vl.pack([3, 2, 4], capacity=8))
    batch = megatron_batch(own, "0.4")

    micro = split_microbatches(batch)

    assert len(micro) == 2
    assert [one["token_count"] for one in micro] == [[7], [2]]
    assert torch.equal(torch.cat([one["tokens"] for one in micro]), batch["tokens"])
    assert micro[1]["cu_seqlens"].tolist() == [[0, 2, 8, -1, -1]]


PER_TOKEN = ("tokens", "labels", "loss_mask", "position_ids", "padding_mask")


def batch_of(slots: list[int], dialect: str, reals: list[int] | None = None) -> dict[str, Any]:
    """A micro-batch of one row whose tokens are its places."""
    width = sum(slots)
    batch: dict[str, Any] = {name: torch.arange(width).unsqueeze(0) for name in PER_TOKEN}
    physical = np.cumsum([0, *slots]).astype(np.int32)
    logical = np.cumsum([0, *(reals or slots)]).astype(np.int32)
    if dialect == "0.6":
        batch["cu_seqlens_q"] = torch.tensor(logical).unsqueeze(0)
        batch["cu_seqlens_q_padded"] = torch.tensor(physical).unsqueeze(0)
    else:
        batch["cu_seqlens"] = torch.tensor([[*physical.tolist(), -1]], dtype=torch.int32)
        batch["cu_seqlens_unpadded"] = torch.tensor([[*logical.tolist(), -1]], dtype=torch.int32)
    return batch | {"token_count": [width], "attention_mask": torch.ones(1), "total_tokens": width}


def partitioned(slots: list[int], ranks: int, rank: int) -> list[int]:
    """Places of a rank, token by token, as Transformer Engine's kernel is documented."""
    ends = [each // ranks for each in np.cumsum([0, *slots]).tolist()]
    found = []
    for begin, end in itertools.pairwise(ends):
        for local in range(end - begin):
            first_half = local < (end - begin) // 2
            jump = rank if first_half else 2 * (ranks - 1) - rank
            found.append(local + begin * ranks + (end - begin) // 2 * jump)
    return found


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["0.4", "0.6"]),
    st.sampled_from(["zigzag", "contiguous"]),
)
def test_ranks_cover_every_token_once_and_hold_what_the_kernel_gives(chunks, ranks, dialect, mode):
    slots = [2 * ranks * chunk for chunk in chunks]
    batch = batch_of(slots, dialect)

    shares = [cp_slice(batch, rank, ranks, mode) for rank in range(ranks)]

    for name in PER_TOKEN:
        held = [share[name][0].tolist() for share in shares]
        assert sorted(itertools.chain(*held)) == list(range(sum(slots)))
        assert len({len(each) for each in held}) == 1
    for rank, share in enumerate(shares):
        wanted = partitioned(slots, ranks, rank) if mode == "zigzag" else None
        size = sum(slots) // ranks
        assert share["tokens"][0].tolist() == (wanted or list(range(rank * size, (rank + 1) * size)))
        assert share["total_tokens"] == size
        assert get_packed_seq_params(share).cp_partition_mode == mode
        for name in ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_q_padded"):
            assert share.get(name) is batch.get(name)


def test_rows_without_boundaries_are_cut_whole_and_masks_by_queries():
    batch = {"tokens": torch.arange(16).reshape(2, 8), "attention_mask": torch.arange(8).reshape(1, 1, 8, 1)}

    share = cp_slice(batch, 1, 2)

    assert share["tokens"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert share["attention_mask"].reshape(-1).tolist() == [2, 3, 4, 5]


def test_positions_of_several_axes_are_cut_with_the_tokens():
    batch = batch_of([4, 8], "0.6") | {"position_ids": torch.arange(36).reshape(3, 1, 12)}

    share = cp_slice(batch, 0, 2)

    assert share["position_ids"][1, 0].tolist() == (share["tokens"][0] + 12).tolist()


def test_rows_without_a_first_dimension_are_cut_too():
    batch = batch_of([4, 8], "0.6")
    flat = {name: value[0] if name in PER_TOKEN else value for name, value in batch.items()}

    for rank in range(2):
        share, wanted = cp_slice(flat, rank, 2), cp_slice(batch, rank, 2)
        for name in PER_TOKEN:
            assert share[name].tolist() == wanted[name][0].tolist()


def test_a_middle_stage_without_tokens_keeps_its_boundaries():
    batch = {"tokens": None, "cu_seqlens_q": torch.tensor([[0, 4, 8]])}

    assert cp_slice(batch, 0, 2) == batch


@pytest.mark.parametrize(
    ("change", "arguments", "error", "words"),
    [
        ({}, (0, 2, "ring"), SettingError, "mode must be"),
        ({}, (2, 2), SettingError, "cp_rank must be a whole number from 0"),
        (
            {"cu_seqlens_q_padded": torch.tensor([[0, 6, 12]])},
            (0, 2),
            SettingError,
            r"segment 0 takes up 6 places, .* 4 or 8 would do \(2 segments of 2\); pack with pad_seq_to_mult=4",
        ),
        (
            {"cu_seqlens_q_padded": torch.tensor([[0, 4, 8], [0, 4, 8]])},
            (0, 2),
            DocumentsError,
            "expect micro-batch size 1",
        ),
        (
            {"cu_seqlens_q_padded": torch.tensor([[0, 4, 8]])},
            (0, 2),
            DocumentsError,
            "boundaries reach from 0 to 8, but the row has 12 places",
        ),
        ({"labels": torch.zeros(1, 3)}, (0, 2), DocumentsError, "different widths: tokens 12, labels 3"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(change, arguments, error, words):
    with pytest.raises(error, match=words):
        cp_slice(batch_of([4, 8], "0.6") | change, *arguments)


def test_what_is_cut_already_cannot_be_cut_again():
    once = cp_slice(batch_of([4, 8], "0.4"), 0, 2)

    with pytest.raises(DocumentsError, match="can be cut once only"):
        cp_slice(once, 0, 2)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 4),
    st.sampled_from(["0.4", "0.6"]),
)
def test_later_targets_are_those_of_each_document_alone(packs, depth, dialect):
    width = max(1, *(sum(map(sum, slots)) for slots in packs))
    entries = max(map(len, packs)) + 1
    labels = torch.arange(1, len(packs) * width + 1).reshape(len(packs), width)
    mask = (labels % 3).float()
    logical, physical = torch.full((2, len(packs), entries + 1), -1)
    wanted, wanted_mask = torch.zeros(2, depth, *labels.shape)
    for row, slots in enumerate(packs):
        ends = np.cumsum([[0, 0], *([length, length + gap] for length, gap in slots)], axis=0)
        logical[row, : len(ends)], physical[row, : len(ends)] = torch.from_numpy(ends.T.copy())
        if dialect == "0.6":
            logical[row, len(ends) :], physical[row, len(ends) :] = ends[-1].tolist()
        for (_, begin), (length, _) in zip(ends.tolist(), slots):
            for layer in range(depth):
                for place in range(length - layer - 1):
                    wanted[layer, row, begin + place] = labels[row, begin + place + layer + 1]
                    wanted_mask[layer, row, begin + place] = mask[row, begin + place + layer + 1]
    names = (
        ("cu_seqlens_q", "cu_seqlens_q_padded") if dialect == "0.6" else ("cu_seqlens_unpadded", "cu_seqlens")
    )
    batch = {"labels": labels, "loss_mask": mask, **dict(zip(names, (logical, physical)))}

    rolled, masks = mtp_targets(batch, depth)

    assert rolled.dtype == torch.int64
    assert masks.dtype == torch.float32
    assert rolled.tolist() == wanted.tolist()
    assert masks.tolist() == wanted_mask.tolist()


def test_later_targets_need_labels_boundaries_and_a_depth():
    batch = batch_of([4, 8], "0.6")

    with pytest.raises(SettingError, match="depth must be a whole number from 1 on, got 0"):
        mtp_targets(batch, 0)
    with pytest.raises(DocumentsError, match="needs labels and loss_mask"):
        mtp_targets(batch | {"labels": None}, 1)
    with pytest.raises(DocumentsError, match="no boundaries"):
        mtp_targets({name: batch[name] for name in ("labels", "loss_mask")}, 1)
    with pytest.raises(DocumentsError, match="are of 1 rows, the labels of 2"):
        mtp_targets(batch | {name: batch[name].repeat(2, 1) for name in ("labels", "loss_mask")}, 1)
    with pytest.raises(DocumentsError, match="boundaries of row 0 end at 12, but its labels at 6; make the"):
        mtp_targets(cp_slice(batch, 0, 2), 1)
    with pytest.raises(DocumentsError, match=r"one shape, \[rows, width\]; got \(1, 12\) and \(1, 4\)"):
        mtp_targets(batch | {"loss_mask": batch["loss_mask"][:, :4]}, 1)


@pytest.mark.parametrize("dialect", ["0.4", "0.6"])
@pytest.mark.parametrize(
    ("stage", "kept"),
    [
        ((True, True), {"tokens", "position_ids", "labels", "loss_mask"}),
        ((True, False), {"tokens", "position_ids"}),
        ((False, False), set()),
        ((False, True), {"labels", "loss_mask"}),
        ((False, True, True), {"tokens", "position_ids", "labels", "loss_mask"}),
    ],
)
def test_every_stage_gets_its_boundaries_and_only_its_tensors(dialect, stage, kept):
    batch = batch_of([4, 8], dialect)

    given_to = stage_batch(batch, *stage)

    assert set(given_to) == set(batch)
    for name in ("tokens", "position_ids", "labels", "loss_mask"):
        assert (given_to[name] is not None) == (name in kept)
    for name in set(batch) - {"tokens", "position_ids", "labels", "loss_mask"}:
        assert given_to[name] is batch[name]


def test_a_stage_without_boundaries_or_without_its_tensors_is_refused():
    batch = batch_of([4, 8], "0.6")
    bare = {name: batch[name] for name in (*PER_TOKEN, "attention_mask")}

    with pytest.raises(DocumentsError, match="would attend to each other"):
        stage_batch(bare, False, False)
    with pytest.raises(DocumentsError, match="needs labels, which the batch doesn't have"):
        stage_batch(batch | {"labels": None}, False, True)
    masked = bare | {"attention_mask": torch.ones(1, 1, 12, 12)}
    assert stage_batch(masked, True, False)["tokens"] is batch["tokens"]

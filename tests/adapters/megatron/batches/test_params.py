"""What attention is told about a packed micro-batch: the fields of Megatron-Core's class, from every dialect."""

import sys
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varlen.adapters.megatron import (
    PackedSeqParams,
    build_uniform_packed_seq_params,
    get_packed_seq_cp_partition_indices,
    get_packed_seq_params,
    get_packed_seq_q_cu_seqlens,
    packed_seq_params,
    repack_mcore_thd_position_ids,
    unpack_mcore_thd_tensor_for_position_ids,
)
from varlen.errors import DocumentsError, MissingExtraError, SettingError


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


PLAIN = {"cu_seqlens": ints(0, 5, 7, 11, -1, -1), "max_seqlen": torch.tensor(5)}
PADDED = PLAIN | {"cu_seqlens": ints(0, 8, 16, -1), "cu_seqlens_unpadded": ints(0, 6, 13, -1)}


def test_the_newest_keys_are_handed_on_with_numbers_for_lengths():
    batch = {
        "cu_seqlens_q": ints(0, 6, 13).unsqueeze(0),
        "cu_seqlens_kv": ints(0, 6, 13),
        "cu_seqlens_q_padded": ints(0, 8, 16).unsqueeze(0),
        "max_seqlen_q": torch.tensor([[8]]),
        "cp_group": "group",
        "local_cp_size": 2,
        "tokens_per_sample": 4,
        "cp_partition_mode": "contiguous",
    }

    params = get_packed_seq_params(batch)

    assert params.cu_seqlens_q is not None
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 6, 13]  # type: ignore[union-attr]
    assert params.cu_seqlens_q_padded.tolist() == [0, 8, 16]  # type: ignore[union-attr]
    assert params.cu_seqlens_kv_padded is params.cu_seqlens_q_padded
    assert type(params.max_seqlen_q) is int
    assert params.max_seqlen_q == params.max_seqlen_kv == 8
    assert params.qkv_format == "thd"
    assert (params.cp_group, params.local_cp_size, params.tokens_per_sample) == ("group", 2, 4)
    assert params.cp_partition_mode == "contiguous"
    assert params.pad_between_seqs is True
    assert packed_seq_params is get_packed_seq_params


def test_without_unpadded_boundaries_there_are_no_padded_ones():
    params = get_packed_seq_params(PLAIN | {"cu_seqlens_argmin": torch.tensor(4)})

    assert params.cu_seqlens_q.tolist() == [0, 5, 7, 11]  # type: ignore[union-attr]
    assert params.cu_seqlens_q_padded is None
    assert params.cu_seqlens_kv_padded is None
    assert params.pad_between_seqs is False


def test_with_unpadded_boundaries_these_are_the_logical_ones():
    params = get_packed_seq_params(PADDED)

    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 6, 13]  # type: ignore[union-attr]
    assert params.cu_seqlens_q_padded.tolist() == [0, 8, 16]  # type: ignore[union-attr]
    assert params.cu_seqlens_kv_padded.tolist() == [0, 8, 16]  # type: ignore[union-attr]


@pytest.mark.parametrize("argmin", [None, torch.tensor(4), torch.tensor([[4]])])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_the_end_is_found_with_and_without_its_place(argmin, dimensions):
    bounds = PLAIN["cu_seqlens"].unsqueeze(0) if dimensions == 2 else PLAIN["cu_seqlens"]

    params = get_packed_seq_params({"cu_seqlens": bounds, "cu_seqlens_argmin": argmin})

    assert params.cu_seqlens_q.tolist() == [0, 5, 7, 11]  # type: ignore[union-attr]
    assert params.max_seqlen_q is None
    assert params.max_seqlen_kv is None


def test_boundaries_without_an_end_are_taken_whole():
    params = get_packed_seq_params({"cu_seqlens": ints(0, 512)})

    assert params.cu_seqlens_q.tolist() == [0, 512]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("batch", "numbers"),
    [
        (PLAIN, [0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3]),
        (PADDED, [0] * 8 + [1] * 8),
        ({"cu_seqlens_q": ints(0, 9, 16)}, [0] * 9 + [1] * 7),
    ],
)
def test_sequence_numbers_go_by_places_and_count_the_tail_as_one_more(batch, numbers):
    assert get_packed_seq_params(batch).seq_idx is None

    params = get_packed_seq_params(batch | {"total_tokens": 16})

    assert params.total_tokens == 16
    assert params.seq_idx is not None
    assert params.seq_idx.dtype == torch.int32
    assert params.seq_idx.tolist() == [numbers]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"tokens": 1}, "neither cu_seqlens_q nor cu_seqlens.*it has tokens"),
        ({"cu_seqlens_q": torch.zeros(2, 3)}, r"cu_seqlens_q has 2 rows; .* split_microbatches"),
        ({"cu_seqlens": torch.zeros(1, 1, 3)}, r"\[entries\] or \[1, entries\], got shape \(1, 1, 3\)"),
        ({"cu_seqlens": [0, 1]}, "got list"),
        ({"cu_seqlens": ints(-1, -1)}, "ends before its first entry"),
        (
            {"cu_seqlens": ints(0, 4, -1), "cu_seqlens_argmin": ints(3)},
            r"argmin is 3, but cu_seqlens holds -1 before that: \[0, 4, -1\]",
        ),
        (
            {"cu_seqlens_q": ints(0, 4, 8), "max_seqlen_q": ints(4, 4)},
            "max_seqlen_q must contain exactly one value, got 2",
        ),
    ],
)
def test_a_batch_that_attention_would_misread_is_refused(batch, words):
    with pytest.raises(DocumentsError, match=words):
        get_packed_seq_params(batch)


def test_boundaries_of_places_are_the_padded_ones_where_there_are_any():
    logical, padded = ints(0, 6, 14), ints(0, 8, 16)

    assert get_packed_seq_q_cu_seqlens(PackedSeqParams(cu_seqlens_q=logical, cu_seqlens_q_padded=padded)) == (
        logical,
        padded,
    )
    assert get_packed_seq_q_cu_seqlens(PackedSeqParams(cu_seqlens_q=logical)) == (logical, logical)
    with pytest.raises(DocumentsError, match="have no cu_seqlens_q"):
        get_packed_seq_q_cu_seqlens(PackedSeqParams())


def test_rows_of_one_length_are_sequences_of_their_own():
    params = build_uniform_packed_seq_params(3, 8)

    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        assert getattr(params, name).tolist() == [0, 8, 16, 24]
        assert getattr(params, name).dtype == torch.int32
    assert params.max_seqlen_q == params.max_seqlen_kv == 8
    with pytest.raises(SettingError, match="must be 1 or more: 0 and 8"):
        build_uniform_packed_seq_params(0, 8)


@dataclass
class Group:
    """A process group of one rank, as far as it is asked."""

    mine: int
    ranks: int

    def rank(self) -> int:
        return self.mine

    def size(self) -> int:
        return self.ranks


def test_places_of_a_context_parallel_rank_go_by_padded_boundaries():
    params = PackedSeqParams(cu_seqlens_q=ints(0, 6, 14), cu_seqlens_q_padded=ints(0, 8, 16))

    index = get_packed_seq_cp_partition_indices(
        params, total_tokens=16, cp_size=4, cp_rank=0, cp_group=Group(0, 4)
    )

    assert index.tolist() == [0, 7, 8, 15]
    with pytest.raises(SettingError, match="rank 1 and size 2, but cp_rank=0 and cp_size=2"):
        get_packed_seq_cp_partition_indices(
            params, total_tokens=16, cp_size=2, cp_rank=0, cp_group=Group(1, 2)
        )


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=6), st.integers(1, 3))
def test_documents_get_rows_of_their_own_and_positions_come_back(slots, axes):
    lengths = [length for length, _ in slots]
    if not sum(lengths):
        return
    logical = ints(0, *np.cumsum(lengths).tolist())
    physical = ints(0, *np.cumsum([length + gap for length, gap in slots]).tolist())
    total = int(physical[-1])
    params = PackedSeqParams(cu_seqlens_q=logical, cu_seqlens_q_padded=physical)
    packed = torch.arange(1, total + 1).unsqueeze(0)

    rows, is_token, starts, sizes = unpack_mcore_thd_tensor_for_position_ids(packed, params)
    again = repack_mcore_thd_position_ids(
        rows.expand(axes, *rows.shape), padded_starts=starts, lengths=sizes, total_length=total
    )

    assert sizes == [length for length in lengths if length]
    for row, kept, start, size in zip(rows, is_token, starts, sizes, strict=True):
        assert row[kept].tolist() == list(range(start + 1, start + size + 1))
        assert row[~kept].eq(0).all()
    expected = [
        place + 1 if any(start <= place < start + size for start, size in zip(starts, sizes)) else 0
        for place in range(total)
    ]
    assert again.tolist() == [[expected]] * axes


def test_rows_that_do_not_match_their_boundaries_are_refused():
    params = PackedSeqParams(cu_seqlens_q=ints(0, 2, 5))

    with pytest.raises(DocumentsError, match=r"shape \[1, places\], got \(2, 4\)"):
        unpack_mcore_thd_tensor_for_position_ids(torch.zeros(2, 4), params)
    with pytest.raises(DocumentsError, match=r"segment 1 spans \[2, 5\) but the packed row has 4 places"):
        unpack_mcore_thd_tensor_for_position_ids(torch.zeros(1, 4), params)
    with pytest.raises(DocumentsError, match="as many as cu_seqlens_q"):
        unpack_mcore_thd_tensor_for_position_ids(
            torch.zeros(1, 8), PackedSeqParams(cu_seqlens_q=ints(0, 2), cu_seqlens_q_padded=ints(0, 4, 8))
        )
    with pytest.raises(DocumentsError, match="must rise and hold at least a token"):
        unpack_mcore_thd_tensor_for_position_ids(torch.zeros(1, 4), PackedSeqParams(cu_seqlens_q=ints(0, 0)))
    with pytest.raises(DocumentsError, match="for 1 lengths and 1 starts"):
        repack_mcore_thd_position_ids(torch.zeros(1, 2, 3), padded_starts=[0], lengths=[2], total_length=4)
    with pytest.raises(DocumentsError, match="documents reach 5"):
        repack_mcore_thd_position_ids(torch.zeros(1, 1, 3), padded_starts=[2], lengths=[3], total_length=4)


def installed(monkeypatch: pytest.MonkeyPatch, fields: list[str]) -> None:
    """Stand in for a release of Megatron-Core whose class has some fields."""
    theirs = types.ModuleType("megatron.core.packed_seq_params")
    space: dict[str, Any] = dict.fromkeys(fields) | {"__annotations__": dict.fromkeys(fields, Any)}
    theirs.PackedSeqParams = dataclass(type("PackedSeqParams", (), space))  # type: ignore[attr-defined]
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "megatron.core.packed_seq_params", theirs)


def test_megatrons_own_object_gets_the_fields_that_it_has(monkeypatch):
    installed(monkeypatch, ["qkv_format", "cu_seqlens_q", "max_seqlen_q"])

    theirs = get_packed_seq_params(PLAIN).to_megatron()

    assert type(theirs) is sys.modules["megatron.core.packed_seq_params"].PackedSeqParams
    assert theirs.cu_seqlens_q.tolist() == [0, 5, 7, 11]
    assert (theirs.qkv_format, theirs.max_seqlen_q) == ("thd", 5)
    with pytest.raises(SettingError, match="cp_partition_mode='contiguous' is unknown"):
        get_packed_seq_params(PLAIN | {"cp_partition_mode": "contiguous"}).to_megatron()


def test_without_megatron_core_the_way_to_install_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.packed_seq_params", None)

    with pytest.raises(MissingExtraError, match="pip install megatron-core"):
        get_packed_seq_params(PLAIN).to_megatron()

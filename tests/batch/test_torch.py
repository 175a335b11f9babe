"""A batch as tensors: the dtypes that frameworks take, memory shared where it can be, the same on any device."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from tests.batch.batches import Case, cases, same_batch, tokens_like

import varlen as vl
from varlen.batch.packed import PackedBatch, on_host

WIDE = ("input_ids", "labels", "position_ids", "shift_labels")
INT32 = ("segment_ids", "cu_seqlens", "document_starts", "document_lengths", "document_targets")
INT64 = ("document_ids", "pack_ids", "pack_offsets")
NUMBERS = (
    "max_seqlen",
    "max_token_id",
    "num_targets",
    "step_num_targets",
    "dp_world_size",
    "pad_id",
    "layout",
)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def example(layout: str = "rows") -> PackedBatch:
    lengths = [3, 2, 6, 4]
    documents = tokens_like(lengths)
    return vl.collate(
        documents,
        vl.pack(lengths, 8, document_multiple_of=2, groups=[0, 1, 2, 1]),
        layout=layout,
        columns={"weight": [np.array(part, np.float32) / 4 for part in documents]},
        shift_labels=True,
    )


@given(cases())
def test_tensors_hold_what_arrays_hold(case: Case) -> None:
    batch = case.collate()
    tensors = batch.to_torch()
    for name in PackedBatch.__dataclass_fields__:
        ours, theirs = getattr(batch, name), getattr(tensors, name)
        if isinstance(ours, np.ndarray):
            assert isinstance(theirs, torch.Tensor), name
            assert theirs.tolist() == ours.tolist(), name
        elif name != "columns":
            assert theirs == ours, name
    for name, column in batch.columns.items():
        assert tensors.columns[name].tolist() == column.tolist()
    assert tensors.packs_without_targets.tolist() == batch.packs_without_targets.tolist()
    assert repr(tensors) == repr(batch)
    assert (tensors.num_tokens, tensors.num_rows) == (batch.num_tokens, batch.num_rows)


@pytest.mark.parametrize("device", DEVICES)
def test_ids_and_labels_are_int64_and_boundaries_int32(device: str) -> None:
    batch = example().to_torch(device)

    assert {name: getattr(batch, name).dtype for name in WIDE} == dict.fromkeys(WIDE, torch.int64)
    assert {name: getattr(batch, name).dtype for name in INT32} == dict.fromkeys(INT32, torch.int32)
    assert batch.cu_seqlens_padded.dtype == torch.int32
    assert {name: getattr(batch, name).dtype for name in INT64} == dict.fromkeys(INT64, torch.int64)
    assert batch.document_groups.dtype == torch.int64
    assert batch.columns["weight"].dtype == torch.float32
    assert all(
        getattr(batch, name).device.type == device for name in (*WIDE, *INT32, *INT64, "cu_seqlens_padded")
    )
    assert all(type(getattr(batch, name)) is type(getattr(example(), name)) for name in NUMBERS)


def test_host_tensors_share_the_memory_of_arrays_of_their_dtype() -> None:
    batch = example()
    tensors = batch.to_torch()
    for name in (*INT32, *INT64):
        assert getattr(tensors, name).data_ptr() == getattr(batch, name).ctypes.data, name
    assert tensors.columns["weight"].data_ptr() == batch.columns["weight"].ctypes.data
    again = tensors.to_torch()
    assert again.input_ids.data_ptr() == tensors.input_ids.data_ptr()


def test_arrays_that_can_not_be_written_are_copied() -> None:
    batch = example()
    batch.segment_ids.flags.writeable = False
    tensors = batch.to_torch()
    tensors.segment_ids[0, 0] = 5

    assert batch.segment_ids[0, 0] == 0


@pytest.mark.parametrize("dtype", ["bool", "uint8", "uint16", "float16", "int64", "float64"])
def test_columns_of_every_dtype_become_tensors_of_it(dtype: str) -> None:
    batch = vl.collate([[1, 2, 3]], vl.pack([3], 4), columns={"x": [np.array([0, 1, 1], dtype)]}).to_torch()

    assert batch.columns["x"].dtype == getattr(torch, dtype)
    assert batch.columns["x"].tolist() == [[0, 1, 1, 0]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_whatever_a_batch_can_do_it_can_do_as_tensors_on_any_device(device: str, layout: str) -> None:
    batch = example(layout)
    tensors = batch.to_torch(device)

    for weighting in ("token", "document", "pair", "longalign"):
        weights = tensors.loss_weights(weighting)
        assert (weights.dtype, weights.device.type) == (torch.float32, device)
        assert weights.tolist() == batch.loss_weights(weighting).tolist()
    assert tensors.dense_mask(3).device.type == device
    assert tensors.dense_mask(3).tolist() == batch.dense_mask(3).tolist()
    assert tensors.packs_without_targets.tolist() == batch.packs_without_targets.tolist()
    assert tensors.block_mask().kv_indices.device.type == device
    for index in range(batch.num_rows):
        row = tensors.row(index)
        wide = dict.fromkeys(WIDE, np.int32)
        as_arrays = {
            name: on_host(value).astype(wide.get(name, on_host(value).dtype))
            for name in PackedBatch.__dataclass_fields__
            if isinstance(value := getattr(row, name), torch.Tensor)
        }
        columns = {name: on_host(column) for name, column in row.columns.items()}
        same_batch(row.replace(**as_arrays, columns=columns), batch.row(index))


def test_torch_is_not_loaded_before_a_tensor_is_asked_for() -> None:
    script = (
        "import sys, varlen as vl; batch = vl.collate([[1, 2]], vl.pack([2], 4)); batch.dense_mask(); "
        "batch.loss_weights(); batch.row(0); assert 'torch' not in sys.modules; batch.to_torch(); "
        "assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_missing_torch_is_named_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from varlen.errors import MissingExtraError

    batch = example()
    monkeypatch.setitem(sys.modules, "torch", None)
    for make in (batch.to_torch, batch.mask_function, batch.block_mask):
        with pytest.raises(MissingExtraError, match=r"pip install 'varlen\[train\]'") as caught:
            make()
        assert isinstance(caught.value, ImportError)

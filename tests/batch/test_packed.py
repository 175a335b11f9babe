"""A batch as tensors and as masks: dtypes that frameworks take, shared memory, and who may attend to whom."""

import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.batch.batches import cases, same_batch, tokens_like

import varlen as vl
from varlen.batch.packed import PackedBatch, on_host
from varlen.errors import SettingError

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
        token_labels=[[-100, *part[1:]] for part in documents],
        document_labels=[2, 0, -100, 1],
        shift_labels=True,
    )


@given(cases())
def test_tensors_hold_what_arrays_hold(case):
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
def test_ids_and_labels_are_int64_and_boundaries_int32(device):
    batch = example().to_torch(device)

    assert {name: getattr(batch, name).dtype for name in WIDE} == dict.fromkeys(WIDE, torch.int64)
    assert {name: getattr(batch, name).dtype for name in INT32} == dict.fromkeys(INT32, torch.int32)
    assert batch.cu_seqlens_padded.dtype == torch.int32
    assert {name: getattr(batch, name).dtype for name in INT64} == dict.fromkeys(INT64, torch.int64)
    assert batch.document_groups.dtype == batch.document_labels.dtype == torch.int64
    assert batch.columns["weight"].dtype == torch.float32
    assert all(
        getattr(batch, name).device.type == device for name in (*WIDE, *INT32, *INT64, "cu_seqlens_padded")
    )
    assert all(type(getattr(batch, name)) is type(getattr(example(), name)) for name in NUMBERS)


def test_host_tensors_share_the_memory_of_arrays_of_their_dtype():
    batch = example()
    tensors = batch.to_torch()
    for name in (*INT32, *INT64):
        assert getattr(tensors, name).data_ptr() == getattr(batch, name).ctypes.data, name
    assert tensors.columns["weight"].data_ptr() == batch.columns["weight"].ctypes.data
    again = tensors.to_torch()
    assert again.input_ids.data_ptr() == tensors.input_ids.data_ptr()


def test_arrays_that_can_not_be_written_are_copied():
    batch = example()
    batch.segment_ids.flags.writeable = False
    tensors = batch.to_torch()
    tensors.segment_ids[0, 0] = 5

    assert batch.segment_ids[0, 0] == 0


@pytest.mark.parametrize("dtype", ["bool", "uint8", "uint16", "float16", "int64", "float64"])
def test_columns_of_every_dtype_become_tensors_of_it(dtype):
    batch = vl.collate([[1, 2, 3]], vl.pack([3], 4), columns={"x": [np.array([0, 1, 1], dtype)]}).to_torch()

    assert batch.columns["x"].dtype == getattr(torch, dtype)
    assert batch.columns["x"].tolist() == [[0, 1, 1, 0]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_whatever_a_batch_can_do_it_can_do_as_tensors_on_any_device(device, layout):
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


def test_torch_is_not_loaded_before_a_tensor_is_asked_for():
    script = (
        "import sys, varlen as vl; batch = vl.collate([[1, 2]], vl.pack([2], 4)); batch.dense_mask(); "
        "batch.loss_weights(); batch.row(0); assert 'torch' not in sys.modules; batch.to_torch(); "
        "assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_missing_torch_is_named_with_the_way_to_install_it(monkeypatch):
    from varlen.errors import MissingExtraError

    batch = example()
    monkeypatch.setitem(sys.modules, "torch", None)
    for make in (batch.to_torch, batch.mask_function, batch.block_mask):
        with pytest.raises(MissingExtraError, match=r'pip install "varlen\[train\]"') as caught:
            make()
        assert isinstance(caught.value, ImportError)


WINDOWS = st.sampled_from([None, 1, 2, 5, 1000])


def spelled_out(batch: PackedBatch, window: int | None, is_causal: bool = True) -> list[list[list[bool]]]:
    """Query by query and key by key, from the boundaries alone: segment ids and positions are not looked at."""
    rows, width = batch.input_ids.shape
    bounds = batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded
    owner: dict[int, tuple[int, int]] = {}
    segment = 0
    padding = batch.segment_ids.reshape(-1)
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
        if padding[begin] < 0:
            continue
        for place in range(int(batch.document_lengths[segment])):
            owner[begin + place] = (segment, place)
        assert begin + int(batch.document_lengths[segment]) <= end
        segment += 1
    mask = [[[False] * width for _ in range(width)] for _ in range(rows)]
    for row in range(rows):
        for query in range(width):
            for key in range(width):
                at, to = row * width + query, row * width + key
                if at in owner and to in owner:
                    (mine, now), (other, then) = owner[at], owner[to]
                    in_sight = then <= now or not is_causal
                    mask[row][query][key] = (
                        mine == other and in_sight and (not window or abs(now - then) < window)
                    )
                elif at not in owner:
                    mask[row][query][key] = at == to
    return mask


@settings(max_examples=settings.default.max_examples // 2)
@given(cases(), WINDOWS, st.booleans())
def test_the_dense_mask_is_what_boundaries_spell_out(case, window, is_causal):
    batch = case.collate()
    mask = batch.dense_mask(window, is_causal)

    assert mask.dtype == np.bool_
    assert mask.shape == (*batch.input_ids.shape, batch.input_ids.shape[1])
    assert mask.tolist() == spelled_out(batch, window, is_causal)


@given(cases(), WINDOWS)
def test_the_dense_mask_of_tensors_is_that_of_arrays(case, window):
    batch = case.collate()
    mask = batch.to_torch().dense_mask(window)

    assert isinstance(mask, torch.Tensor)
    assert mask.dtype == torch.bool
    assert mask.tolist() == batch.dense_mask(window).tolist()


@settings(max_examples=settings.default.max_examples // 2)
@given(cases(), WINDOWS, st.booleans(), st.booleans())
def test_the_mask_function_is_the_dense_mask(case, window, is_causal, tensors):
    batch = case.collate()
    rows, width = batch.input_ids.shape
    function = (batch.to_torch() if tensors else batch).mask_function(window, is_causal)
    row, query, key = torch.meshgrid(
        torch.arange(rows), torch.arange(width), torch.arange(width), indexing="ij"
    )

    assert function(row, 0, query, key).tolist() == batch.dense_mask(window, is_causal).tolist()


def long_batch(layout: Any) -> PackedBatch:
    """Two rows of 384: documents that cross the blocks of 128, fill one, and leave padding."""
    lengths = [100, 200, 30, 128, 128, 50]
    return vl.collate(tokens_like(lengths), vl.pack(lengths, 384, "next_fit"), layout=layout)


def from_blocks(block_mask: Any, function: Any, rows: int, width: int) -> np.ndarray:
    """The positions that a block mask lets a kernel see: all of full blocks, the mask function's of partial ones."""
    size_q, size_k = block_mask.BLOCK_SIZE
    seen = np.zeros((rows, width, width), bool)
    query, key = torch.meshgrid(torch.arange(width), torch.arange(width), indexing="ij")
    parts = (
        (block_mask.kv_num_blocks, block_mask.kv_indices, False),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, True),
    )
    for row in range(rows):
        exact = function(torch.tensor(row), torch.tensor(0), query, key).numpy()
        for counts, indices, full in parts:
            for block in range(counts.shape[-1]):
                for other in indices[row, 0, block, : counts[row, 0, block]].tolist():
                    here = np.s_[block * size_q : (block + 1) * size_q, other * size_k : (other + 1) * size_k]
                    seen[row][here] = True if full else exact[here]
    return seen


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("window", [None, 1, 40, 150])
def test_the_block_mask_lets_a_kernel_see_what_the_dense_mask_says(layout, window, is_causal):
    batch = long_batch(layout)
    rows, width = batch.input_ids.shape
    blocks = batch.to_torch().block_mask(window, is_causal)
    dense = batch.dense_mask(window, is_causal)

    seen = from_blocks(blocks, batch.mask_function(window, is_causal), rows, width)
    assert np.array_equal(seen, dense)
    # A block is looked at only if something in it is seen.
    padded = -(-width // 128) * 128
    held = np.zeros((rows, padded, padded), bool)
    held[:, :width, :width] = dense
    blocked = held.reshape(rows, padded // 128, 128, padded // 128, 128).any(axis=(2, 4))
    assert np.array_equal(blocks.to_dense()[:, 0].numpy().astype(bool), blocked)
    assert 0 < blocked.mean() < 1


def test_flex_attention_gives_what_dense_attention_gives():
    from torch.nn.attention.flex_attention import flex_attention

    batch = long_batch("rows").to_torch()
    rows, width = batch.input_ids.shape
    torch.manual_seed(0)
    query, key, value = (torch.randn(rows, 2, width, 8) for _ in range(3))
    flexible = torch.compiler.disable(flex_attention)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that flex_attention runs unfused without compilation
        ours = flexible(query, key, value, block_mask=batch.block_mask(40))
    mask = batch.dense_mask(40)[:, None]
    theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("window", [0, -1, "2"])
def test_a_window_below_one_is_refused_by_every_mask(window):
    batch = vl.collate([[1, 2, 3]], vl.pack([3], 4))
    for make in (batch.dense_mask, batch.mask_function, batch.block_mask):
        with pytest.raises(
            SettingError, match=f"sliding_window must be a whole number of at least 1, got {window!r}"
        ):
            make(window)

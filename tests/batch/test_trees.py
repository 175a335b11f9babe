"""`vl.collate` of a forest: what each token sees, every occurrence once, and no array that trees can't have."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.oracles import batch as oracle
from tests.support.forests import rows_with_prefixes
from tests.support.rarely import examples
from torch.nn.attention.flex_attention import create_mask

import varlen as vl
from varlen.attention import tree_masks
from varlen.batch import trees
from varlen.batch.packed import on_host
from varlen.errors import DocumentsError, SettingError, VarlenError


def batches_of(forest, packing, layout, at_once):
    """All packs in batches of so many."""
    ids = np.arange(packing.num_packs)
    for first in range(0, len(ids), at_once):
        yield vl.collate(forest, packing, pack_ids=ids[first : first + at_once][::-1], layout=layout)


@given(
    rows=rows_with_prefixes(),
    extra=st.integers(0, 12),
    layout=st.sampled_from(["rows", "flat"]),
    at_once=st.integers(1, 4),
    data=st.data(),
)
@examples(80)
def test_each_token_sees_its_rows_and_each_occurrence_is_in_one_batch(rows, extra, layout, at_once, data):
    assume(any(rows))
    mask = [data.draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row))) for row in rows]
    value = [[100 * number + position for position in range(len(row))] for number, row in enumerate(rows)]
    forest = vl.fold(rows, columns={"value": value}, loss_mask=mask)
    packing = vl.pack_forest(forest, max(map(len, rows)) + extra)

    found = []
    for batch in batches_of(forest, packing, layout, at_once):
        tokens, visible = batch.forest_tokens, batch.visible()
        for at, row in enumerate(tokens):
            for query in np.flatnonzero(row >= 0).tolist():
                seen = row[visible[at, query]].tolist()
                expected = [k for k in range(row[query] + 1) if row[query] < forest.subtree_end[k]]
                assert seen == expected  # exactly its ancestors, each once, by rising positions
                assert batch.position_ids[at, query] == len(expected) - 1
            for padding in np.flatnonzero(row < 0).tolist():
                assert np.flatnonzero(visible[at, padding]).tolist() == [padding]
        assert (batch.input_ids[tokens >= 0] == forest.token_ids[tokens[tokens >= 0]]).all()
        order = list(zip(batch.rows.tolist(), batch.positions.tolist()))
        assert order == sorted(order)
        for source, target, (row, position) in zip(batch.sources, batch.targets, order):
            path = forest.tokens_of(row)
            assert batch.forest_tokens.ravel()[source] == path[position - 1]
            assert target == rows[row][position]
        bounds = batch.row_offsets
        assert bounds[0] == 0
        assert bounds[-1] == batch.num_targets
        for begin, end, length in zip(bounds, bounds[1:], batch.row_lengths):
            (row,) = set(batch.rows[begin:end].tolist())
            assert length == len(rows[row])
        assert batch.columns["value"].tolist() == [100 * row + position for row, position in order]
        found += order
    wanted = [(r, p) for r, row in enumerate(rows) for p in range(1, len(row)) if mask[r][p]]
    assert sorted(found) == wanted


@given(rows=rows_with_prefixes(), extra=st.integers(0, 5), layout=st.sampled_from(["rows", "flat"]))
@examples(30)
def test_the_kernel_is_its_reference(rows, extra, layout):
    assume(any(rows))
    forest = vl.fold(rows)
    packing = vl.pack_forest(forest, max(map(len, rows)) + extra)
    found = vl.collate(forest, packing, layout=layout)
    real = trees.kernels
    try:
        trees.kernels = oracle
        wanted = vl.collate(forest, packing, layout=layout)
    finally:
        trees.kernels = real
    for name in ("input_ids", "position_ids", "subtree_end", "forest_tokens"):
        assert (getattr(found, name) == getattr(wanted, name)).all(), name


@given(rows=rows_with_prefixes(), extra=st.integers(0, 5), layout=st.sampled_from(["rows", "flat"]))
@examples(40)
def test_segments_are_runs_between_forks(rows, extra, layout):
    assume(any(rows))
    forest = vl.fold(rows)
    batch = vl.collate(forest, vl.pack_forest(forest, max(map(len, rows)) + extra), layout=layout)
    found, width = batch.segments(), batch.input_ids.shape[1]
    visible = batch.visible()
    covered = np.zeros(batch.input_ids.size, np.int64)
    for one, (begin, end, stop) in enumerate(zip(found.begins, found.ends, found.stops)):
        covered[begin:end] += 1
        row, at = divmod(begin, width)
        behind = np.flatnonzero(visible[row, :, end - 1 - row * width]) + row * width
        assert behind.tolist() == list(range(end - 1, stop))
        assert found.positions[one] == batch.position_ids[row, at]
        parent = found.parents[one]
        if parent >= 0:
            assert found.ends[parent] <= begin < found.stops[parent]
            assert found.depths[one] == found.depths[parent] + 1
            assert found.positions[one] == found.positions[parent] + found.ends[parent] - found.begins[parent]
        else:
            assert found.positions[one] == found.depths[one] == 0
    assert (covered == (batch.forest_tokens.ravel() >= 0)).all()


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (3, None), (150, None), (None, 4), (None, 200)])
def test_block_masks_are_those_of_all_pairs(window, chunk, monkeypatch):
    """Of blocks of 16 tokens, where a block's form decides, and of FlexAttention's own function."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 9, 40).tolist()
    rows = [
        trunk[: int(rng.integers(1, 40))] + rng.integers(0, 9, int(rng.integers(1, 60))).tolist()
        for _ in range(9)
    ]
    forest = vl.fold([*rows, list(range(300))])
    batch = vl.collate(forest, vl.pack_forest(forest, 330)).to_torch()
    wanted = batch.visible(window, chunk).numpy()
    mask = tree_masks.tree_block_mask(batch.subtree_end, batch.position_ids, window, chunk)
    rows_of_mask, width = batch.input_ids.shape
    assert (create_mask(mask.mask_mod, rows_of_mask, 1, width, width)[:, 0].numpy() == wanted).all()

    monkeypatch.setattr(tree_masks, "BLOCK", 16)
    ends, positions = (x.numpy().astype(np.int64) for x in (batch.subtree_end, batch.position_ids))
    some, whole = tree_masks._blocks_seen(ends, positions, window, chunk)
    count = -(-width // 16)
    padded = np.zeros((rows_of_mask, 16 * count, 16 * count), bool)
    padded[:, :width, :width] = wanted
    tiles = padded.reshape(rows_of_mask, count, 16, count, 16).swapaxes(2, 3)
    assert not (some & whole).any()
    assert (tiles.any((-1, -2)) <= (some | whole)).all()
    assert (whole <= tiles.all((-1, -2))).all()
    if window is None and chunk is None:  # nothing is looked at in vain, but on the diagonal
        assert (tiles.any((-1, -2)) >= (some | whole)).all()
        inner = (
            np.tril(np.ones((count, count), bool), -1)[None] & (np.arange(count) < count - 1)[None, :, None]
        )
        assert (whole == (tiles.all((-1, -2)) & inner))[:, : width // 16].all()


def test_a_batch_of_trees_has_no_labels_or_boundaries_and_says_what_it_has():
    forest = vl.fold([[1, 2], [1, 3]])
    batch = vl.collate(forest, vl.pack_forest(forest, 4))
    for name in (
        "labels",
        "cu_seqlens",
        "segment_ids",
        "dense_mask",
        "block_mask",
        "loss_scale",
        "max_seqlen",
    ):
        with pytest.raises(VarlenError, match=f"no `{name}`.*`targets`") as refused:
            getattr(batch, name)
        assert isinstance(refused.value, AttributeError)
        assert not hasattr(batch, name)
    with pytest.raises(AttributeError, match="no attribute 'lables'"):
        batch.lables  # noqa: B018
    with pytest.raises(SettingError, match="no mapping"):
        dict(batch)
    for other in (copy.copy(batch), pickle.loads(pickle.dumps(batch)), batch.to_torch()):
        assert on_host(other.targets).tolist() == [2, 3]
    assert repr(batch) == "TreeBatch(rows [1, 4], 3 tokens, 75.00% full, 2 targets)"
    assert batch.to_torch().input_ids.dtype == torch.int64
    assert batch.objective_columns().keys() == {"row", "group", "position", "row_offsets"}


def test_padding_layouts_and_columns_of_tokens():
    routes = [[0, 1, 2], [0, 1, 3]]
    forest = vl.fold([[1, 2, 3], [1, 2, 3]], columns={"route": routes}, identity=["route"], groups=[5, 5])
    packing = vl.pack_forest(forest, 8)
    rows = vl.collate(forest, packing, pad_id=9)
    assert rows.input_ids.tolist() == [[1, 2, 3, 3, 9, 9, 9, 9]]
    assert rows.token_columns["route"].tolist() == [[0, 1, 2, 3, 0, 0, 0, 0]]
    assert rows.groups.tolist() == [5] * 4
    flat = vl.collate(forest, packing, layout="flat", pad_to_multiple_of=6, step_num_targets=40)
    assert flat.input_ids.shape == (1, 6)
    assert flat.step_num_targets == 40
    empty = vl.collate(vl.fold([]), vl.pack_forest(vl.fold([]), 4))
    assert (empty.num_targets, empty.input_ids.shape, empty.max_token_id) == (0, (0, 4), -1)
    for layout in ("rows", "flat"):
        empty = vl.collate(vl.fold([[]]), vl.pack_forest(vl.fold([[]]), 4), layout=layout)
        assert len(empty.segments().begins) == 0


def test_other_packings_and_what_belongs_to_documents_are_refused():
    forest = vl.fold([[1, 2], [1, 3]])
    packing = vl.pack_forest(forest, 4)
    with pytest.raises(SettingError, match="this packing is one of documents; pack a forest's trees"):
        vl.collate(forest, vl.pack([3], 4))
    with pytest.raises(SettingError, match="this packing is one of trees, and documents were given"):
        vl.collate([[1, 2, 3]], packing)
    with pytest.raises(
        DocumentsError, match="the packing is of 1 trees with 3 tokens, and the forest has 1 with 4"
    ):
        vl.collate(vl.fold([[1, 2, 3, 4]]), packing)
    with pytest.raises(SettingError, match="labels, masks, columns or buffers were given beside a forest"):
        vl.collate(forest, packing, labels=[[1, 2]])
    with pytest.raises(SettingError, match="pack 3 is none of the 1 packs"):
        vl.collate(forest, packing, [3])
    with pytest.raises(SettingError, match="named twice"):
        vl.collate(forest, packing, [0, 0])
    with pytest.raises(SettingError, match="no multiple of pad_to_multiple_of=3; pack with capacity=6"):
        vl.collate(forest, packing, pad_to_multiple_of=3)
    with pytest.raises(SettingError, match="layout must be one of"):
        vl.collate(forest, packing, layout="columns")


def test_log_probabilities_of_documents_and_trees():
    made = torch.Generator().manual_seed(0)
    documents = [[1, 2, 3], [4, 5]]
    batch = vl.collate(documents, vl.pack([3, 2], 6), loss_mask=[[1, 1, 0], [1, 1]])
    logits = torch.randn(1, 6, 9, generator=made).bfloat16()
    wanted = torch.log_softmax(logits.float() / 2, -1)[0, [0, 3], [2, 5]]
    found = vl.log_probs(logits, batch, temperature=2)
    assert found.dtype == torch.float32
    assert torch.allclose(found, wanted, atol=1e-6)
    with pytest.raises(DocumentsError, match=r"logits are of shape \[1, 5, 9\], and the batch of \[1, 6\]"):
        vl.log_probs(logits[:, :5], batch)
    with pytest.raises(DocumentsError, match=r"logits are of shape \[1, 6\], and the batch of \[1, 6\]"):
        vl.log_probs(logits[..., 0], batch)
    with pytest.raises(DocumentsError, match="the batch predicts token id 5, and logits are of ids 0 to 4"):
        vl.log_probs(logits[..., :5], batch)
    for temperature in (0, -1.0, float("nan"), "1"):
        with pytest.raises(SettingError, match=r"temperature=.*; it must be a number above 0"):
            vl.log_probs(logits, batch, temperature)
    with pytest.raises(
        SettingError, match=r"vl.log_probs\(logits, batch\) takes a PackedBatch or a TreeBatch, .* Forest"
    ):
        vl.log_probs(logits, vl.fold([[1]]))

"""A batch as torchtitan's trainer reads it keeps documents apart, and teaches each token what comes after it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import varlen as vl
from varlen.adapters.torchtitan import trainer_batch

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=12)


def made(lengths, capacity=300, multiple=1, masked=False):
    """A batch of all packs, and the documents it is made of."""
    rng = np.random.default_rng(sum(lengths))
    documents = [rng.integers(1, 50, length) for length in lengths]
    masks = [rng.integers(0, 2, length) for length in lengths] if masked else None
    packing = vl.pack(lengths, capacity=capacity, document_multiple_of=multiple)
    return vl.collate(documents, packing, loss_mask=masks), documents


def read_as_torchtitan(positions):
    """The document of every position, by torchtitan's rule: one begins wherever positions are 0."""
    return np.cumsum(positions == 0, axis=1)


@given(LENGTHS, st.sampled_from([1, 4]), st.booleans())
def test_documents_begin_where_positions_are_zero_and_padding_stands_by_itself(lengths, multiple, masked):
    batch, _ = made(lengths, multiple=multiple, masked=masked)
    inputs, _ = trainer_batch(batch)
    places = inputs["positions"].numpy()
    found = read_as_torchtitan(places)

    assert (places[:, 0] == 0).all()
    for row, segments in enumerate(batch.segment_ids):
        real = segments >= 0
        pairs = {(one, other) for one, other in zip(segments[real].tolist(), found[row, real].tolist())}
        assert len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs})
        assert not set(found[row, real]) & set(found[row, ~real])
        assert np.array_equal(places[row, real], batch.position_ids[row, real])


@given(LENGTHS, st.sampled_from([1, 4]))
def test_padding_is_cut_so_that_no_part_crosses_a_block_of_128_and_no_part_is_shorter_than_it_must(
    lengths, multiple
):
    batch, _ = made(lengths, capacity=300, multiple=multiple)
    inputs, _ = trainer_batch(batch)
    for row, segments in enumerate(batch.segment_ids):
        places = inputs["positions"][row].numpy()
        for at in np.flatnonzero(segments < 0):
            begins = at == 0 or segments[at - 1] >= 0 or at % 128 == 0
            assert places[at] == (0 if begins else places[at - 1] + 1)


@given(LENGTHS, st.booleans(), st.booleans())
def test_a_label_is_the_next_token_of_the_same_document_where_that_is_a_target(lengths, masked, flat):
    batch, _ = made(lengths, masked=masked)
    inputs, labels = trainer_batch(batch, flat=flat)
    expected = np.full(batch.labels.shape, -100)
    for row, column in np.ndindex(batch.labels[:, 1:].shape):
        here, after = batch.segment_ids[row, column : column + 2]
        if here == after >= 0:
            expected[row, column] = batch.labels[row, column + 1]

    shape = (-1,) if flat else batch.labels.shape
    assert np.array_equal(labels.numpy(), expected.reshape(shape))
    assert np.array_equal(inputs["input"].numpy(), batch.input_ids.reshape(shape))
    assert int((labels != -100).sum()) == batch.num_targets
    assert {tensor.dtype for tensor in (*inputs.values(), labels)} == {labels.dtype}
    assert str(labels.dtype) == "torch.int64"


def test_nothing_is_lost_when_the_loader_uses_the_memory_of_a_batch_again():
    batch, _ = made([5, 7, 200])
    inputs, labels = trainer_batch(batch)
    before = [tensor.clone() for tensor in (*inputs.values(), labels)]
    for array in (batch.input_ids, batch.labels, batch.position_ids, batch.segment_ids):
        array[:] = 77

    assert all(bool((one == other).all()) for one, other in zip(before, (*inputs.values(), labels)))


@pytest.mark.parametrize("capacity", [128, 130])
def test_a_row_of_nothing_but_padding_is_many_short_documents_without_a_label(capacity):
    batch, _ = made([capacity], capacity=capacity)
    empty = batch.replace(
        segment_ids=np.full_like(batch.segment_ids, -1),
        position_ids=np.zeros_like(batch.position_ids),
        labels=np.full_like(batch.labels, -100),
    )
    inputs, labels = trainer_batch(empty)

    assert inputs["positions"][0].tolist() == [n % 128 for n in range(capacity)]
    assert bool((labels == -100).all())

"""A batch through a slot comes out as it went in, whatever it holds and however full the slot is."""

from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import varlen as vl
from varlen.feed.protocol import Made
from varlen.feed.state import FeedState
from varlen.feed.worker.ring import Slot, read_made, slot_bytes
from varlen.types import Ledger

LENGTHS = st.lists(st.integers(1, 16), min_size=1, max_size=60)


def same(one, other):
    """Whether two batches are equal in every field, dtypes included."""
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), field.name
            assert a.tobytes() == b.tobytes(), field.name
        else:
            assert a == b, field.name
    return True


@given(LENGTHS, st.sampled_from(["rows", "flat"]), st.sampled_from([1, 4]), st.integers(0, 3000))
def test_a_batch_comes_out_as_it_went_in(lengths, layout, multiple, room):
    documents = [list(range(n)) for n in lengths]
    packing = vl.pack(lengths, 16, document_multiple_of=multiple)
    plain = vl.collate(documents, packing, layout=layout)
    # With little room behind the large arrays, the others go with the message.
    memory = np.zeros(16 * plain.input_ids.size + 4 * 64 + room, dtype=np.uint8)
    slot = Slot(memory)
    made = Made(
        batch=vl.collate(documents, packing, layout=layout, out=slot.arrays),
        state=FeedState(step=3),
        ledger=packing.ledger,
        skipped=7,
    )
    read = read_made(slot.message(made), memory, made.state)

    assert same(read.batch, plain)
    assert (read.state, read.ledger, read.skipped) == (made.state, packing.ledger, 7)
    assert np.shares_memory(read.batch.input_ids, memory)


def test_batches_of_ordinary_documents_fit_into_a_slot_whole():
    lengths = [40] * 500
    packing = vl.pack(lengths, 1000)
    memory = np.zeros(slot_bytes(packing.num_packs * 1000), dtype=np.uint8)
    slot = Slot(memory)
    batch = vl.collate([[1] * 40] * 500, packing, out=slot.arrays)
    message = slot.message(Made(batch=batch, state=FeedState(), ledger=Ledger(tokens_in=0, packed=0)))

    assert len(message) < 3000
    assert np.shares_memory(read_made(message, memory, FeedState()).batch.document_ids, memory)

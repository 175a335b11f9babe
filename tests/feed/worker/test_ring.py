"""The ring and the batches in it: what one process writes another reads, and nothing is left behind."""

import gc
import os
import stat
import subprocess
import sys
import weakref
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import varlen as vl
from varlen.errors import SettingError
from varlen.feed.protocol import Made
from varlen.feed.state import FeedState
from varlen.feed.worker.ring import Ring, Slot, read_made, slot_bytes
from varlen.types import Ledger


def test_another_process_reads_what_was_written_and_the_other_way_round():
    ring = Ring(3, 5000)
    ring.slot(1)[:5] = [1, 2, 3, 4, 5]
    program = (
        "import sys; from varlen.feed.worker.ring import Ring; ring = Ring(3, 5000, int(sys.argv[1])); "
        "print(ring.slot(1)[:5].tolist(), ring.slot(0).sum()); ring.slot(2)[-1] = 77"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(ring.file)],
        pass_fds=[ring.file],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout == "[1, 2, 3, 4, 5] 0\n", done.stderr
    assert ring.slot(2)[-1] == 77
    assert ring.slot_bytes >= 5000
    ring.close()


def test_slots_do_not_overlap():
    ring = Ring(4, 100)
    for number in range(4):
        ring.slot(number)[:] = number + 1

    assert [set(ring.slot(number).tolist()) for number in range(4)] == [{1}, {2}, {3}, {4}]
    ring.close()


@pytest.mark.parametrize("kind", ["view", "reshaped", "torch"])
def test_a_slot_is_free_when_the_last_array_over_it_dies_and_no_sooner(kind):
    ring, freed = Ring(2, 4096), []

    whole = ring.lend(1, lambda _: freed.append(1))
    ids = whole[:400].view(np.int32)
    if kind == "torch":
        held = torch.from_numpy(ids)
    elif kind == "reshaped":
        held = ids.reshape(10, 10)[3:, ::2].T
    else:
        held = ids[5:]
    del whole, ids
    gc.collect()
    assert freed == []
    del held
    gc.collect()
    assert freed == [1]
    ring.close()


def test_arrays_outlive_the_ring_and_nothing_is_left_open():
    before = len(list(Path("/proc/self/fd").iterdir()))
    ring = Ring(2, 4096)
    held = ring.lend(0, ring.free)
    held[:] = 9
    ring.close()
    ring.close()
    there = weakref.ref(ring)
    del ring
    assert there() is None  # without a look for circles

    assert (held == 9).all()
    del held
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_whoever_fills_slots_sees_which_are_free_and_those_of_a_dead_one_are_found_again():
    ring = Ring(3, 100)
    other = Ring(3, 100, os.dup(ring.file))

    assert [other.mark() for _ in range(4)] == [0, 1, 2, None]
    ring.free(1)
    assert [other.mark(), other.mark()] == [1, None]
    ring.free_but({1})
    assert [other.mark() for _ in range(3)] == [0, 2, None]
    assert not ring.slot(0).any()  # marks and bytes don't overlap
    assert not other.slot(2).any()
    ring.close()
    other.close()


def test_the_memory_is_the_users_alone_and_has_no_name():
    ring = Ring(1, 10)

    assert stat.S_IMODE(os.fstat(ring.file).st_mode) == 0o600
    assert os.fstat(ring.file).st_nlink == 0
    assert not os.get_inheritable(ring.file)
    ring.close()


def test_more_memory_than_there_is_is_refused_in_a_sentence():
    with pytest.raises(SettingError, match=r"more than half of this machine's memory .* take fewer slots"):
        Ring(1 << 20, 1 << 40)
    with pytest.raises(SettingError, match=r'can\'t be shared .* pass worker="thread", or fewer slots'):
        Ring(2, 4096, file=10**6)


LENGTHS = st.lists(st.integers(1, 16), min_size=1, max_size=60)


def same(one, other):
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

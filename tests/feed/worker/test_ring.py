"""The ring: what one process writes another reads, slots stay as long as arrays over them, nothing is left behind."""

import gc
import os
import stat
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from varlen.errors import SettingError
from varlen.feed.worker.ring import Ring


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

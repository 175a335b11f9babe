"""What a run took is measured and not guessed."""

import sys
import time

import numpy as np
import pytest

from varlen.train.demo.job import current_bytes, now, peak_bytes, reset_peak

linux = pytest.mark.skipif(sys.platform != "linux", reason="the peak can be started anew on Linux only")


@linux
def test_the_peak_is_seen_after_the_memory_is_given_back_and_forgotten_on_request():
    reset_peak()
    before = current_bytes()
    block = np.ones(64 << 20, dtype=np.uint8)
    del block

    assert peak_bytes() - before > 60 << 20
    reset_peak()
    assert peak_bytes() - before < 32 << 20


def test_sleeping_takes_time_on_the_wall_and_working_takes_cpu():
    start = now()
    time.sleep(0.05)
    slept = now() - start
    start = now()
    while (now() - start).user_s < 0.05:
        sum(range(1000))
    worked = now() - start

    assert slept.wall_s >= 0.05
    assert slept.user_s < 0.04
    assert worked.user_s >= 0.05
    assert (slept + worked).wall_s == slept.wall_s + worked.wall_s

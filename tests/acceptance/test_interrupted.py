"""What a signal raises within a kernel leaves it as it is: Ctrl-C is a KeyboardInterrupt, whatever runs."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.support.rarely import mostly

from varlen import jit

JOB = Path(__file__).with_name("interrupted_job.py")


def outcomes(what: str, times: int, seed: int = 0) -> Counter[str]:
    command = [sys.executable, "-W", "ignore", JOB, what, str(times), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return Counter(json.loads(done.stdout.splitlines()[-1]))


def test_an_interrupt_within_kernels_arrives_as_such():
    assert outcomes("plan_step", 60) == {"KeyboardInterrupt": 60}


@pytest.mark.soak
@pytest.mark.parametrize("what", ["plan_step", "pack", "collate", "simulate", "loader"])
@pytest.mark.parametrize("seed", range(3))
def test_hundreds_of_interrupts_arrive_as_such(what, seed):
    assert outcomes(what, 200, seed) == {"KeyboardInterrupt": 200}


def made_of(function):
    """A kernel that was called before, whose machine code is this function."""
    kernel = jit._Kernel(lambda: None)
    kernel.dispatcher, kernel._is_compiled = function, True
    return kernel


def failing_with(*raised: BaseException):
    """A kernel as numba's: an exception in Python that it calls comes out as SystemError, perhaps of another one."""

    def kernel() -> None:
        try:
            raise raised[0]
        except BaseException as error:
            if len(raised) == 1:
                raise SystemError("returned a result with an exception set") from error
            try:
                raise raised[1] from error
            except SystemError as outer:
                raise SystemError("returned a result with an exception set") from outer

    return made_of(kernel)


class Stopped(Exception):
    """Raised by the handler of a signal."""


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        ((KeyboardInterrupt(),), KeyboardInterrupt),
        ((Stopped(),), Stopped),
        ((SystemExit(143),), SystemExit),
        ((KeyboardInterrupt(), SystemError("of another call")), KeyboardInterrupt),
    ],
)
def test_what_a_handler_raises_is_found_below_numbas_error(raised, kind):
    with pytest.raises(kind):
        failing_with(*raised)()


def test_a_fault_of_the_interpreter_itself_stays_one():
    def broken() -> None:
        raise SystemError("bad")

    with pytest.raises(SystemError, match="bad"):
        made_of(broken)()


FIRST = """
import os, signal, sys, threading, time
import numpy
import varlen as vl
vl.pack  # whoever interrupts the import of NumPy itself is left to Python
lengths = range(1, 3000)
send = lambda: (time.sleep(float(sys.argv[1])), os.kill(os.getpid(), signal.SIGINT))
threading.Thread(target=send, daemon=True).start()
try:
    vl.pack(lengths, 8192)
    time.sleep(9)
except KeyboardInterrupt:
    pass
print(vl.pack(lengths, 8192, "balanced").num_packs)
"""


@pytest.mark.parametrize("after_s", mostly([0.1, 0.3], [0.1, 0.3, *(0.04 * n for n in range(1, 40))]))
def test_an_interrupt_of_the_first_call_leaves_the_next_ones_whole(after_s):
    command = [sys.executable, "-W", "ignore", "-c", FIRST, str(after_s)]
    done = subprocess.run(
        command,
        env=os.environ | {"VARLEN_JIT": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert done.stdout.strip().isdigit(), done.stderr[-2000:]

"""What a trainer waits for `vl.PackedLoader`: at the call, at steps of 50 ms, while its storage stalls, at the start.

Each program is a trainer of its own, whose steps are sleeps: whoever trains on an accelerator leaves the processor
alone meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.rows import Limit, Row, Step
from benchmarks.stopwatch import measure

STEP_S = 0.05
CALL_LIMIT_S = 1e-4
MEDIAN_LIMIT = 0.1
STALLED_LIMIT = 0.5
"""Per cent of the time of steps."""
FIRST_LIMIT_S = 2.0
RESTORE_LIMIT_S = 5.0
FIRST_RUNS = 3

_TIMED = """
import json, os, signal, subprocess, sys, threading, time
from statistics import median
import varlen as vl

def taken(loader, steps, step_s, warm):
    '''Seconds that each call took, after some that aren't counted, and seconds from the first to the last.'''
    for _ in range(warm):
        next(loader)
        time.sleep(step_s)
    waits, frees, batch, begun = [], [], None, time.perf_counter()
    for _ in range(steps):
        start = time.perf_counter()
        new = next(loader)
        there = time.perf_counter()
        batch = new  # the one before dies
        del new
        frees.append(time.perf_counter() - there)
        waits.append(there - start)
        time.sleep(step_s)
    whole_s = time.perf_counter() - begun
    return {"waits": waits, "frees": frees, "whole_s": whole_s, "late": loader.stats().late}
"""
_CALL = """
with vl.PackedLoader(sys.argv[1], capacity=32768, global_batch_size=8, epochs=None) as loader:
    print(json.dumps(taken(loader, 200, 0.02, 20)))
"""
_STEPS = """
with vl.PackedLoader(sys.argv[1], capacity=8192, global_batch_size=8, epochs=None) as loader:
    print(json.dumps(taken(loader, 300, float(sys.argv[2]), 20)))
"""
_STOPPED = """
step_s, stall_s, slots, steps = float(sys.argv[2]), 2.0, 64, 600
with vl.PackedLoader(sys.argv[1], capacity=8192, global_batch_size=8, epochs=None, ring_slots=slots) as loader:
    next(loader)
    time.sleep(2)
    worker = loader._worker.pid
    def stall():
        time.sleep(steps * step_s / 2)
        os.kill(worker, signal.SIGSTOP)
        time.sleep(stall_s)
        os.kill(worker, signal.SIGCONT)
    threading.Thread(target=stall).start()
    print(json.dumps(taken(loader, steps, step_s, 0)))
"""
_SERVED = """
from pathlib import Path
folder, step_s, steps = Path(sys.argv[1]), float(sys.argv[2]), 600
server = subprocess.Popen(
    [sys.executable, "-m", "benchmarks.feeding.stalling_server", folder, "15", "30", "2"],
    stdout=subprocess.PIPE,
    text=True,
)
url = f"http://127.0.0.1:{server.stdout.readline().strip()}/texts.jsonl"
with vl.PackedLoader(url, mode="streaming", capacity=8192, global_batch_size=8, epochs=None) as loader:
    found = taken(loader, steps, step_s, 100)
server.terminate()
found["stalled"] = int(server.communicate()[0] or 0)
print(json.dumps(found))
"""
_FIRST = """
import json, sys, time
import varlen as vl
data, tokenizer, mode = sys.argv[1:4]
options = dict(capacity=8192, global_batch_size=8, mode=mode)
if mode == "streaming":
    options["append_eos"] = False
state = None
if len(sys.argv) > 4:
    with vl.PackedLoader(data, tokenizer or None, **options) as loader:
        for _ in range(int(sys.argv[4])):
            next(loader)
        state = loader.state_dict()
start = time.perf_counter()
with vl.PackedLoader(data, tokenizer or None, **options) as loader:
    if state is not None:
        loader.load_state_dict(state)
    next(loader)
    print(json.dumps(time.perf_counter() - start))
"""


def steps(store: Callable[[], Path], text: Callable[[], Path]) -> list[Step]:
    return [
        Step("the call", partial(_call, store)),
        Step("steps of 50 ms", partial(_steps, store)),
        Step("a worker that stands still", partial(_stopped, store)),
        Step("a server that stalls", partial(_served, text)),
        Step("the first batch", partial(_first, store, text)),
    ]


def _call(store: Callable[[], Path]) -> list[Row]:
    found = measure(_TIMED + _CALL, store() / "store")
    waits = found["waits"]
    what = "next(loader) when a batch of 8 packs of 32,768 tokens is ready, on the trainer's side"
    note = f"the slowest of {len(waits)}: {1000 * max(waits):.2g} ms; letting go of the batch before: {_us(found)}"
    return [Limit(what=what, value=median(waits), unit="s", limit=CALL_LIMIT_S, note=note)]


def _steps(store: Callable[[], Path]) -> list[Row]:
    found = measure(_TIMED + _STEPS, store() / "store", STEP_S)
    shares = [100 * wait / (wait + STEP_S) for wait in found["waits"]]
    what = "waiting for a batch of 65,536 tokens, steps of 50 ms, median of the steps"
    note = f"{_mean(found):.2g} % on the average; letting go of the batch before isn't counted: {_us(found)}"
    return [Limit(what=what, value=median(shares), unit="%", limit=MEDIAN_LIMIT, note=note)]


def _stopped(store: Callable[[], Path]) -> list[Row]:
    found = measure(_TIMED + _STOPPED, store() / "store", STEP_S)
    what = "waiting in 30 s of such steps in which the worker is stopped for 2 s, all of it"
    note = f"a ring of 64 slots of 1 MB; {found['late']} of {len(found['waits'])} batches came late"
    return [Limit(what=what, value=_mean(found), unit="%", limit=STALLED_LIMIT, note=note)]


def _served(text: Callable[[], Path]) -> list[Row]:
    found = measure(_TIMED + _SERVED, text(), STEP_S)
    if not found["stalled"]:
        raise RuntimeError("the server met no request while it stalled")
    what = "waiting in 30 s of steps of 50 ms, streaming over HTTP from a server that gives nothing for 2 s of them"
    note = (
        f"batches of 65,536 bytes as tokens, read_ahead_s=10; {found['stalled']} requests were held back, "
        f"{found['late']} of {len(found['waits'])} batches came late"
    )
    return [Limit(what=what, value=_mean(found), unit="%", limit=STALLED_LIMIT, note=note)]


def _first(store: Callable[[], Path], text: Callable[[], Path]) -> list[Row]:
    tokens = (str(store() / "store"), "", "indexed")
    texts = (str(text() / "texts.jsonl"), str(text() / "tokenizer.json"), "streaming")
    cases = (
        ("the first batch, out of a token store", tokens, FIRST_LIMIT_S),
        ("the first batch, streaming text", texts, FIRST_LIMIT_S),
        ("the first batch after going on in the middle, 8 lanes of text", (*texts, "10"), RESTORE_LIMIT_S),
    )
    rows: list[Row] = []
    for what, arguments, limit in cases:
        measure(_FIRST, *arguments)  # kernels are compiled, files are in memory
        times = [measure(_FIRST, *arguments) for _ in range(FIRST_RUNS)]
        note = "from the constructor on, the start of the worker's process included; kernels on disk"
        rows.append(Limit.of_times(what, times, limit, note))
    return rows


def _us(found: dict[str, Any]) -> str:
    return f"{1e6 * median(found['frees']):.0f} µs"


def _mean(found: dict[str, Any]) -> float:
    """Return the share of the time that was spent waiting, in per cent."""
    return float(100 * sum(found["waits"]) / found["whole_s"])

"""Interrupt calls of a public function that runs kernels, at times of chance, and say what came out of it.

Called as `interrupted_job.py WHAT TIMES SEED`; prints a JSON object of outcomes and how often each was seen.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

import varlen as vl

_LATEST_S = 20.0


def main() -> None:
    what, times, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    call, draw, seen = CALLS[what](), random.Random(seed), Counter[str]()
    call()
    waits: SimpleQueue[float] = SimpleQueue()
    threading.Thread(target=_send, args=(waits,), daemon=True).start()
    for _ in range(times):
        seen[_outcome(call, waits, draw.uniform(0.001, 0.06))] += 1
    print(json.dumps(seen))


def _send(waits: SimpleQueue[float]) -> None:
    """Interrupt this process after each of the times that come."""
    while True:
        time.sleep(waits.get())
        os.kill(os.getpid(), signal.SIGINT)


def _outcome(call: Callable[[], object], waits: SimpleQueue[float], after_s: float) -> str:
    try:
        waits.put(after_s)
        until = time.monotonic() + _LATEST_S
        while time.monotonic() < until:
            call()
        return "nothing"
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    except BaseException as error:
        return repr(error)


def _lengths(count: int) -> np.ndarray:
    return np.minimum(np.random.default_rng(0).lognormal(5.5, 1.2, count).astype(np.int64) + 1, 8192)


def _pack() -> Callable[[], object]:
    lengths = _lengths(3000)
    return lambda: [
        vl.pack(lengths, 8192, method) for method in ("best_fit_decreasing", "balanced", "wrapped")
    ]


def _collate() -> Callable[[], object]:
    lengths = _lengths(64)
    documents = [np.arange(length, dtype=np.int32) for length in lengths]
    packing = vl.pack(lengths, 8192)
    return lambda: [vl.collate(documents, packing, layout=layout) for layout in ("rows", "flat")]


def _plan() -> Callable[[], object]:
    cost = vl.CostModel(model=vl.ModelShape.named("llama-3-8b"), hardware=vl.Hardware.named("h100"))
    return lambda: vl.plan_step(_lengths(96), cost=cost, mesh=vl.Mesh(dp=4, pp=4, tp=4))


def _simulate() -> Callable[[], object]:
    cost = vl.CostModel(model=vl.ModelShape.named("llama-3-8b"), hardware=vl.Hardware.named("h100"))
    plan = vl.plan_step(_lengths(96), cost=cost, mesh=vl.Mesh(dp=4, pp=4, tp=4))
    return lambda: vl.simulate(plan, cost)


def _load() -> Callable[[], object]:
    documents = [{"text": "word " * int(length)} for length in _lengths(64) // 8]

    def read() -> None:
        with vl.PackedLoader(
            documents, "bytes", capacity=2048, global_batch_size=2, worker="thread"
        ) as loader:
            for _ in loader:
                pass

    return read


CALLS = {"pack": _pack, "collate": _collate, "plan_step": _plan, "simulate": _simulate, "loader": _load}

if __name__ == "__main__":
    main()

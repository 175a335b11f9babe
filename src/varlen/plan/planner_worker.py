"""The process that plans ahead: it reads lengths from a pipe and writes plans to another, until the pipe is closed.

::

    in     b"head" + JSON of the planning function's name and settings
           b"step" + step, 8 bytes + lengths, int32
    out    b"plan" + step, 8 bytes + plan_to_bytes
           b"fail" + step, 8 bytes + JSON of the error's class and message
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress

import numpy as np

from varlen.plan.serialize import from_json, named, plan_to_bytes
from varlen.workers.child import receive, send

_POLL_S = 2.0
_NICE = 5


def main() -> None:
    """Plan one step after the other."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints goes to the standard error
    with suppress(OSError):
        os.nice(_NICE)  # give precedence to the trainer
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    name, settings = "", {}
    while True:
        try:
            message = receive(sys.stdin.buffer)
        except EOFError:
            return
        kind, content = message[:4], message[4:]
        if kind == b"head":
            name, settings = from_json(content.decode())
            continue
        try:
            plan = named(name)(np.frombuffer(content[8:], np.int32).copy(), **settings)
            reply = b"plan" + content[:8] + plan_to_bytes(plan)
        except Exception as error:  # raised again where the step is taken
            reply = b"fail" + content[:8] + json.dumps([type(error).__name__, str(error)]).encode()
        try:
            send(out, reply)
        except (BrokenPipeError, OSError):
            return


def _watch(parent: int) -> None:
    """End with the trainer, even in the middle of a plan, or if a forked process keeps its pipes open."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)


if __name__ == "__main__":
    main()

"""A process that reads tasks from its standard input and writes results to its standard output."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import IO, Any

from varlen.errors import SettingError, VarlenError, WorkerDiedError, described
from varlen.workers.child import CANNOT_BE_SENT, receive, send

KEPT = "what is finished is kept: run the same again, with fewer processes if memory is short"


def main() -> None:
    """Run tasks until the input ends; tasks print to the standard error."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    inbox: SimpleQueue[bytes] = SimpleQueue()
    tasks = os.fdopen(os.dup(0), "rb")  # sys.stdin can't be closed at exit while a thread reads it
    threading.Thread(target=_listen, args=(tasks, inbox), daemon=True).start()
    head: Any = None
    while True:
        message = inbox.get()
        kind, content = message[:4], message[4:]
        if kind == b"head":
            head = content
            continue
        if isinstance(head, bytes):
            try:
                head = pickle.loads(head)
            except Exception as error:  # the user's own object
                send(results, pickle.dumps((False, SettingError(CANNOT_BE_SENT.format(error=error)))))
                continue
        send(results, pickle.dumps(outcome(head[0], head[1], pickle.loads(content))))


def outcome(function: Callable[[Any, Any], Any], shared: Any, task: Any) -> tuple[bool, Any]:
    """Run a task; return (True, result), or (False, error), which can be sent to another process."""
    try:
        return True, function(shared, task)
    except VarlenError as error:
        return False, error
    except MemoryError:
        return False, WorkerDiedError(f"a process that worked on a part ran out of memory; {KEPT}")
    except OSError as error:
        return False, OSError(error.errno, error.strerror or str(error), error.filename)
    except Exception as error:  # a bug: its traceback would be lost with the process
        import traceback

        return False, RuntimeError(f"{described(error, kind=True)}\n{traceback.format_exc()}")


def _listen(tasks: IO[bytes], inbox: SimpleQueue[bytes]) -> None:
    """Forward messages; exit when the sender is gone, as the results are not needed."""
    try:
        while True:
            inbox.put(receive(tasks))
    except (EOFError, OSError):
        os._exit(1)


if __name__ == "__main__":
    main()

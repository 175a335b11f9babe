"""A process that takes tasks from its standard input and answers on its standard output."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import IO, Any

from varlen.errors import SettingError, VarlenError, WorkerDiedError
from varlen.workers.child import CANNOT_BE_SENT, receive, send

KEPT = "what is finished is kept: run the same again, with fewer processes if memory is short"


def main() -> None:
    """Run tasks until there are none; what they print goes to the standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    inbox: SimpleQueue[bytes] = SimpleQueue()
    tasks = os.fdopen(os.dup(0), "rb")  # sys.stdin can't be closed at the end while it is listened to
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
            except Exception as error:  # it is what the user handed over
                send(answers, pickle.dumps((False, SettingError(CANNOT_BE_SENT.format(error=error)))))
                continue
        send(answers, pickle.dumps(outcome(head[0], head[1], pickle.loads(content))))


def outcome(function: Callable[[Any, Any], Any], shared: Any, task: Any) -> tuple[bool, Any]:
    """Run a task; an error is a result too, so that it can cross processes."""
    try:
        return True, function(shared, task)
    except VarlenError as error:
        return False, error
    except MemoryError:
        return False, WorkerDiedError(f"a process that worked on a part ran out of memory; {KEPT}")
    except OSError as error:
        return False, OSError(error.errno, error.strerror or str(error), error.filename)
    except Exception as error:  # a bug of ours: its traceback would be lost with the process
        import traceback

        return False, RuntimeError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")


def _listen(tasks: IO[bytes], inbox: SimpleQueue[bytes]) -> None:
    """Pass messages on; once whoever sent them is gone, nobody waits for what is being done."""
    try:
        while True:
            inbox.put(receive(tasks))
    except (EOFError, OSError):
        os._exit(1)


if __name__ == "__main__":
    main()

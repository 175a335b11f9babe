"""`python -m varlen.offline.worker`: takes tasks from its standard input and answers on its standard output."""

from __future__ import annotations

import os
import pickle
import threading
from queue import SimpleQueue
from typing import IO, Any

from varlen.errors import SettingError
from varlen.offline.tasks import NOT_FOUND, outcome, receive, send


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
                send(answers, pickle.dumps((False, SettingError(NOT_FOUND.format(error=error)))))
                continue
        send(answers, pickle.dumps(outcome(head[0], head[1], pickle.loads(content))))


def _listen(tasks: IO[bytes], inbox: SimpleQueue[bytes]) -> None:
    """Pass messages on; once whoever sent them is gone, nobody waits for what is being done."""
    try:
        while True:
            inbox.put(receive(tasks))
    except (EOFError, OSError):
        os._exit(1)


if __name__ == "__main__":
    main()

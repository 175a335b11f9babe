"""`python -m varlen.offline.worker`: takes tasks from its standard input and answers on its standard output."""

from __future__ import annotations

import os
import pickle
import sys

from varlen.offline.crew import outcome, receive, send


def main() -> None:
    """Run tasks until there are none; what they print goes to the standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    tasks = sys.stdin.buffer
    try:
        function, shared = pickle.loads(receive(tasks))
        while True:
            send(answers, pickle.dumps(outcome(function, shared, pickle.loads(receive(tasks)))))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return


if __name__ == "__main__":
    main()

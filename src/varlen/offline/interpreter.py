"""A fresh interpreter beside this one, which speaks through pipes: no fork, and no guard in the user's script."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from varlen.errors import WorkerDiedError
from varlen.signals import held_back


def fresh_interpreter(
    module: str, *arguments: str, threads: int, files: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a module in an interpreter of its own, with pipes to its standard input and output.

    It is a session of its own, so that Ctrl-C is for this process alone, which then stops the others; signals of
    schedulers, which may go to every process of a job, don't end it either.

    Args:
        module: to be run.
        arguments: of its command line.
        threads: that a tokenizer may run.
        files: open files that it keeps, under the same numbers.

    Raises:
        WorkerDiedError: no process can be started.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
    }
    try:
        with held_back():
            return subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,
                pass_fds=tuple(files),
            )
    except OSError as error:
        raise WorkerDiedError(
            f"no other process can be started ({error.strerror or error}); what is finished is kept: run the same "
            "again with fewer processes"
        ) from error

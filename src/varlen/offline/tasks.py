"""What crosses processes: a task's outcome, and messages with their length before them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import IO, Any

from varlen.errors import VarlenError, WorkerDiedError

NOT_FOUND = (
    "a tokenizer that is a function of this session can't be handed to other processes ({error}); put it into a "
    "module, or use one process (processes=1)"
)
KEPT = "what is finished is kept: run the same again, with fewer processes if memory is short"


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


def send(pipe: IO[bytes], content: bytes) -> None:
    """Write a message and its length."""
    pipe.write(struct.pack("<q", len(content)))
    pipe.write(content)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes:
    """Read a message."""
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError
    size = struct.unpack("<q", head)[0]
    content = pipe.read(size)
    if len(content) < size:
        raise EOFError
    return content

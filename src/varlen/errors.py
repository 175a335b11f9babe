"""Every exception that varlen raises on purpose, as one tree.

::

    VarlenError
    ├── InputError (also a ValueError)      what the caller gave can't be used
    │   ├── SettingError                    a capacity, method, policy or option out of range
    │   ├── LengthsError                    lengths that are negative, fractional, NaN, of a wrong shape
    │   ├── OverlongDocumentError           a document, or a group of them, longer than a pack
    │   ├── DocumentsError                  tokens, labels or masks that don't match the packing
    │   ├── OutputBufferError               a caller-supplied buffer of the wrong shape, dtype or layout
    │   ├── SourceError                     a file that is missing, empty or not what it says
    │   │   └── NoFileError (also an OSError)   a FIFO, a folder, a device in place of a file; or one far too large
    │   ├── StateError                      a saved state that doesn't belong to this object
    │   ├── PlanError                       a step that no plan can hold, or a plan that breaks its own rules
    │   └── ModelError                      a model that can't take this batch
    ├── MissingExtraError (also an ImportError)   an optional dependency that isn't installed
    ├── PlatformError (also an ImportError)       an operating system that varlen doesn't run on
    ├── WorkerDiedError                 a process that worked for varlen is gone: killed, or out of memory
    ├── DeviceMemoryError (also a MemoryError)    a task of a step that found no memory on its device
    ├── UnknownLengthError (also a TypeError)     a loader with an unknown number of batches
    ├── NoSuchArrayError (also an AttributeError) labels or boundaries of a batch of trees, which has none
    ├── StalledError (also a TimeoutError)        nothing came in time: a storage, a worker, another rank
    ├── DeadlockError                   tasks in an order in which each waits for another
    └── LedgerError                         tokens in and tokens out differ: a bug in varlen, never yours

A message says what was seen, the limit, how many offend, and the way out.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class VarlenError(Exception):
    """Root of the tree: `except VarlenError` catches everything varlen raises on purpose."""


class InputError(VarlenError, ValueError):
    """What the caller gave can't be used; the message says why and what would do."""


class SettingError(InputError):
    """A capacity, method, policy or option is out of its range."""


class LengthsError(InputError):
    """Lengths are negative, fractional, NaN, too large or of the wrong shape."""


class OverlongDocumentError(InputError):
    """A document, or a group that must stay together, is longer than a pack can hold."""


class DocumentsError(InputError):
    """Tokens, labels, masks or columns don't match the packing or each other."""


class OutputBufferError(InputError):
    """A caller-supplied buffer has the wrong shape, dtype or memory layout."""


class SourceError(InputError):
    """A file or folder of documents is missing, empty or not what it says it is."""


class NoFileError(SourceError, OSError):
    """Something else stands where a regular file should, or a file that is larger than any that belongs there."""


class StateError(InputError):
    """A saved state belongs to other settings, other data or another version."""


class PlanError(InputError):
    """No plan holds this step on this mesh, or a plan breaks a rule; the message says which, and what would fit."""

    axes: frozenset[str] = frozenset()
    """Axes of the mesh that the message proposes to enlarge: of "cp", "tp" and "pp"."""


class ModelError(InputError):
    """A model can't take this batch: too few positions, too small a vocabulary, an unknown family."""


class MissingExtraError(VarlenError, ImportError):
    """An optional dependency isn't installed; the message names the command that installs it."""


class PlatformError(VarlenError, ImportError):
    """This operating system is not one that varlen runs on; the message names the way out."""


class WorkerDiedError(VarlenError):
    """A process that worked for varlen is gone; the message says how, and what is kept."""


class DeviceMemoryError(VarlenError, MemoryError):
    """A task of a step found no memory; the message names it, its documents, and how many rows would fit."""

    rows_that_fit: int = 0
    """Estimated rows of a MicroPack that fits; 0 where none does."""


class UnknownLengthError(VarlenError, TypeError):
    """A loader has no length: its documents are tokenized as they come, or its epochs have no end."""


class NoSuchArrayError(VarlenError, AttributeError):
    """A batch has no such array; the message says what it has instead."""


class StalledError(VarlenError, TimeoutError):
    """Nothing came within a deadline; the message names the process and the seconds."""


class DeadlockError(VarlenError):
    """Tasks are in an order in which each waits for another; the message names the cycle."""


class LedgerError(VarlenError):
    """Tokens in and tokens out differ. This is a bug in varlen: please report it."""


# Errors of other libraries, in sentences.


def described(error: BaseException, *, kind: bool = False, whole: bool | None = None, most: int = 300) -> str:
    """Return an error's message for use in a sentence, at most `most` characters long.

    Args:
        kind: whether the type's name precedes the message; an error without a message is described by that alone.
        whole: whether all lines are joined, instead of the first line alone; by default as `kind`.
    """
    name, lines = type(error).__name__, str(error).splitlines()
    words = " ".join(" ".join(lines if (kind if whole is None else whole) else lines[:1]).split())
    words = words.rstrip(". ")
    if len(words) > most:
        words = f"{words[:most].rpartition(' ')[0] or words[:most]} …"
    return f"{name}: {words}" if kind and words else words or name


@contextmanager
def reading_state(of: str, *others: type[Exception]) -> Iterator[None]:
    """Turn the errors that reading a malformed state raises into a StateError."""
    wrong: tuple[type[Exception], ...]
    wrong = (LookupError, AttributeError, ArithmeticError, TypeError, ValueError, *others)
    try:
        yield
    except StateError:
        raise
    except wrong as error:
        raise StateError(f"this is no state of {of}: {described(error, kind=True)}") from None

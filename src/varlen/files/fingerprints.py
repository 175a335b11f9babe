"""Fingerprints that change with the content of files: of all bytes, or of samples of large files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from varlen.files.opening import faults, open_stored
from varlen.files.paths import File
from varlen.files.remote import remote_mark
from varlen.files.seen import PIECE_BYTES, sampled_digest, whole_digest

WHOLE_BYTES = 256 << 20  # files with at most so many bytes in total are read whole
_THREADS = 16


def fingerprint(file: File) -> str:
    """Return a string that changes whenever a file's content does: its SHA-256, or the server's ETag or checksum.

    Cost: reads a local file whole, about a second per GB.
    """
    if file.content is not None:
        return file.content
    if file.is_remote and (mark := file.mark or remote_mark(file.path, file.retry)) is not None:
        return mark
    with faults(file), open_stored(file) as stored:
        return whole_digest(stored)


def quick_fingerprint(file: File) -> str:
    """Return a string that changes with a file's size and almost always with its content.

    Of a remote file it is the server's ETag or checksum, else its size; of a local file its size and the SHA-256 of
    64 pieces of 64 KB: the first, the last, and 62 spread evenly between them. A change of the same size between the
    pieces goes unnoticed. Files of up to 4 MB are read whole.

    Cost: 64 reads of a local file, whatever its size.
    """
    if file.content is not None:
        return file.content
    if file.is_remote:
        mark = file.mark or remote_mark(file.path, file.retry)
        return f"size:{file.size}" if mark is None else mark
    with faults(file), open_stored(file, PIECE_BYTES) as stored:
        return sampled_digest(stored, file.size)


def file_fingerprints(files: Sequence[File], *, whole_bytes: int = WHOLE_BYTES) -> list[str]:
    """Return the fingerprint of each file.

    Local files are read whole if they have at most `whole_bytes` in total, otherwise sampled as `quick_fingerprint`
    does.

    Cost: about half a second for the most that is read whole; otherwise 4 MB per file.
    """
    is_small = sum(file.size for file in files if not file.is_remote) <= whole_bytes
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="varlen-fingerprint") as threads:
        return list(threads.map(_whole if is_small else quick_fingerprint, files))


def joint_fingerprint(files: Sequence[File], prints: Sequence[str]) -> str:
    """Return a string that changes whenever the names, the order, the sizes or the contents of files do.

    Neither folders nor modification times matter: the same data has the same fingerprint anywhere.
    """
    digest = hashlib.sha256()
    for file, print_ in zip(files, prints):
        digest.update(repr((file.name, file.size, print_)).encode())
    return f"sha256:{digest.hexdigest()}"


def _whole(file: File) -> str:
    """Read local files whole, but never remote ones, for which an ETag or a size must do."""
    return quick_fingerprint(file) if file.is_remote else fingerprint(file)

"""Checksums of a checkpoint: taken of each file while it is written, and held against what is read back."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem

from varlen.errors import StateError
from varlen.regular import open_regular
from varlen.train.ranks import Ranks

DIGEST_BYTES = 32
_BLOCK_BYTES = 4 << 20


class _Hashed:
    """A file that is being written, and the SHA-256 of what was written to it."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.digest = stream, hashlib.sha256()

    def write(self, content: Any) -> int:
        """Write and hash side by side: neither holds the interpreter."""
        hashing = threading.Thread(target=self.digest.update, args=(content,))
        hashing.start()
        try:
            return int(self._stream.write(content))
        finally:
            hashing.join()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class HashingFiles(FileSystem):
    """Files as PyTorch's checkpoints are written to, which are hashed on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[str, bytes] = {}
        """By name, of those that were written."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        """Open a file for writing."""
        with super().create_stream(path, mode) as stream:
            hashed = _Hashed(stream)
            yield cast(Any, hashed)
            self.digests[Path(path).name] = hashed.digest.digest()


def gathered(digests: Mapping[str, bytes], ranks: Ranks) -> dict[int, str]:
    """Return the checksums of the files that all ranks have written, by the shards' numbers.

    Args:
        digests: of this rank's files, by names that begin `shard-NUMBER-`, of which a rank writes one at most.
        ranks: of the run.
    """
    mine: list[float] = [0.0] * (1 + DIGEST_BYTES)
    for name, digest in digests.items():
        mine = [float(shard_number(name)), *map(float, digest)]
    return {
        int(number): bytes(map(int, digest)).hex()
        for number, *digest in ranks.gather(mine).tolist()
        if number
    }


def shard_number(name: str) -> int:
    """Return the number of a shard by the name of its file."""
    return int(name.split("-")[1])


def check_files(folder: Path, checksums: Mapping[str, str], mine: Sequence[str]) -> None:
    """Hold files against their checksums.

    Args:
        folder: of the checkpoint.
        checksums: of its files, by name.
        mine: names of those that are to be read.

    Raises:
        StateError: one holds something else than was written.
        OSError: one can't be read.
    """
    block = memoryview(bytearray(_BLOCK_BYTES))
    for name in mine:
        digest = hashlib.sha256()
        with open(folder / name, "rb", buffering=0, opener=open_regular) as file:
            while count := file.readinto(block):
                digest.update(block[:count])
        if digest.hexdigest() != checksums[name]:
            raise StateError(
                f"{folder / name} isn't what was written: its SHA-256 is {digest.hexdigest()[:12]}…, and "
                f"{checksums[name][:12]}… was noted; it is damaged, or of another step or run"
            )

"""The inputs of every benchmark: lengths, documents and texts drawn from a seed, and the real sets where present."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

CAPACITY = 8192
NUM_DOCUMENTS = 100_000
VOCABULARY = 50_000
TEXT_VOCABULARY = 16_384
CHARACTERS = 12_000_000
REAL_LENGTHS = Path(__file__).resolve().parents[2] / "shared" / "data" / "lengths"
_CHUNK = 1 << 20

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


def lognormal_lengths(
    count: int, *, mean: float = 680.0, sigma: float = 1.0, longest: int = CAPACITY, seed: int = 0
) -> Int32Array:
    """Draw document lengths with a long tail, in chunks, so that no more memory is used than the result.

    The mean, in tokens, is that before lengths are clipped to `[1, longest]`; with the defaults the clipped mean is
    about 675.
    """
    rng = np.random.default_rng(seed)
    lengths = np.empty(count, np.int32)
    location = np.log(mean) - sigma**2 / 2
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        drawn = np.rint(rng.lognormal(location, sigma, size))
        lengths[start : start + size] = np.clip(drawn, 1, longest)
    return lengths


@dataclass(frozen=True)
class Documents:
    """Random token ids as one flat array and offsets, and the same documents in the forms that peers take."""

    tokens: Int32Array
    """int32 `[num_tokens]`."""
    offsets: Int64Array
    """int64 `[num_documents + 1]`."""

    @classmethod
    def draw(cls, lengths: npt.ArrayLike, *, vocabulary: int = VOCABULARY, seed: int = 0) -> Documents:
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        tokens = np.random.default_rng(seed).integers(0, vocabulary, int(offsets[-1]), dtype=np.int32)
        return cls(tokens, offsets)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> Int64Array:
        return np.diff(self.offsets)

    @cached_property
    def arrays(self) -> list[Int32Array]:
        bounds = self.offsets.tolist()
        return [self.tokens[a:b] for a, b in pairwise(bounds)]

    @cached_property
    def lists(self) -> list[list[int]]:
        return [array.tolist() for array in self.arrays]

    @cached_property
    def arrow(self) -> Any:
        import pyarrow as pa

        return pa.ListArray.from_arrays(pa.array(self.offsets.astype(np.int32)), pa.array(self.tokens))


def real_lengths(folder: Path = REAL_LENGTHS, *, only: str = "*") -> Iterator[tuple[str, Int32Array]]:
    """Yield the name and the lengths of real sets, in the order their documents stand in.

    Sets published as a histogram are expanded and shuffled with a fixed seed, since a histogram has no order.
    Nothing is yielded where the folder is absent.
    """
    for path in sorted(folder.glob(f"{only}.npz")):
        with np.load(path) as stored:
            if "histogram" not in stored:
                yield path.stem, stored["lengths"].astype(np.int32)
                continue
            counts = stored["histogram"]
        expanded = np.repeat(np.arange(1, len(counts) + 1, dtype=np.int32), counts)
        np.random.default_rng(0).shuffle(expanded)
        yield path.stem, expanded


@cache
def source_texts() -> list[str]:
    """Return 12 million characters of Python sources, without the carriage returns that CSV would normalize."""
    from varlen.documents.texts import interpreter_texts

    texts, characters = [], 0
    for text in interpreter_texts():
        texts.append(text)
        characters += len(text)
        if characters >= CHARACTERS:
            break
    return texts


@cache
def trained_tokenizer() -> Any:
    from varlen.text.load_tokenizer import train_bpe

    return train_bpe(source_texts()[:: max(len(source_texts()) // 4000, 1)], TEXT_VOCABULARY)


def write_store(documents: Documents, folder: Path) -> None:
    """Write documents as arrays, as Parquet and as a token store, `folder / "store"`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from varlen.documents.source import open_source
    from varlen.offline.index import index_source

    np.save(folder / "tokens.npy", documents.tokens)
    np.save(folder / "offsets.npy", documents.offsets)
    pq.write_table(pa.table({"input_ids": documents.arrow}), folder / "data.parquet")
    index_source(open_source(folder / "data.parquet"), folder / "store")

"""Tokenizers for readers: texts in, one flat array of ids out, from any library.

Ids never include what a tokenizer adds by itself. `prefix_ids` are what it puts before a document (often BOS) and
`eos_id` is what ends one; the reader adds them.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from varlen.errors import SettingError, described
from varlen.types import Int32Array, IntArray

if TYPE_CHECKING:
    import tokenizers

_ENCODE_CHARACTERS = 4 << 20  # per call: enough for all threads, and bounded in memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Specials:
    """A tokenizer's special ids and texts, and its chat templates."""

    eos_id: int | None = None
    pad_id: int | None = None
    prefix_ids: tuple[int, ...] = ()  # prepended to documents that aren't chats: often BOS
    texts: Mapping[str, str] = field(default_factory=dict)  # {"eos_token": "</s>", ...}
    end_marks: frozenset[str] = frozenset()  # texts of all special tokens: where a chat's turn may end
    # By name: `default`, and others such as `tool_use`; a single one is the default.
    chat_templates: Mapping[str, str] = field(default_factory=dict)


class Tokenizer(Protocol):
    """Encodes text; immutable, and cheap to send to another process."""

    @property
    def name(self) -> str:
        """Name for messages and manifests."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the ids of any text would, or the prefix; the EOS is not included."""

    @property
    def vocab_size(self) -> int | None:
        """All ids are below; None if unknown."""

    @property
    def specials(self) -> Specials:
        """Special ids and texts."""

    @property
    def is_cuttable(self) -> bool:
        """Whether a text's ids don't depend on the text before it, except for merges across the cut."""

    def encode(self, texts: Sequence[str], *, is_chat: bool = False) -> tuple[Int32Array, IntArray]:
        """Return concatenated ids, int32, and int64 `[texts + 1]` offsets; nothing is added to the texts."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the approximate text of ids, for display."""


BYTE_EOS, BYTE_PAD, BYTE_TURN, BYTE_TURN_END = 256, 257, 258, 259
_BYTE_MARKS = {
    b"<|endoftext|>": BYTE_EOS,
    b"<|pad|>": BYTE_PAD,
    b"<|im_start|>": BYTE_TURN,
    b"<|im_end|>": BYTE_TURN_END,
}
_BYTE_MARK = re.compile(b"(" + b"|".join(map(re.escape, _BYTE_MARKS)) + b")")


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """The built-in tokenizer: the bytes of UTF-8 text, and four marks: end, padding, turn, end of turn.

    Marks are recognized only in chats; in documents they are text like any other.
    """

    name: str = "bytes"
    fingerprint: str = "bytes:1"
    vocab_size: int = 256 + len(_BYTE_MARKS)
    is_cuttable: bool = True
    eos_id: int = BYTE_EOS

    @property
    def specials(self) -> Specials:
        """The EOS, the padding and the marks of turns."""
        texts = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>", "bos_token": ""}
        marks = frozenset(mark.decode() for mark in _BYTE_MARKS)
        return Specials(eos_id=self.eos_id, pad_id=BYTE_PAD, texts=texts, end_marks=marks)

    def encode(self, texts: Sequence[str], *, is_chat: bool = False) -> tuple[Int32Array, IntArray]:
        """Return the bytes of each text, and in chats the ids of marks."""
        pieces = [text.encode() for text in texts]
        if is_chat and any(b"<|" in piece for piece in pieces):
            return _joined([_marked(piece) for piece in pieces])
        tokens = np.frombuffer(b"".join(pieces), dtype=np.uint8).astype(np.int32)
        return tokens, _offsets(map(len, pieces), len(pieces))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids that are bytes."""
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", "replace")


def with_marks(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the approximate text of ids, with the marks of the built-in tokenizer too."""
    if not isinstance(tokenizer, ByteTokenizer):
        return tokenizer.decode(ids)
    spelled = {id_: mark for mark, id_ in _BYTE_MARKS.items()}
    return b"".join(spelled.get(id_, bytes([id_ % 256])) for id_ in ids).decode("utf-8", "replace")


def _marked(piece: bytes) -> Int32Array:
    """Return the ids of a text with its marks recognized."""
    parts = [
        np.array([_BYTE_MARKS[part]], dtype=np.int32)
        if part in _BYTE_MARKS
        else np.frombuffer(part, dtype=np.uint8).astype(np.int32)
        for part in _BYTE_MARK.split(piece)
    ]
    return np.concatenate(parts)


@contextmanager
def backend_faults(name: str) -> Iterator[None]:
    """Turn exceptions and panics of the `tokenizers` library into a SettingError."""
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # Rust panics aren't Exceptions
        raise SettingError(f"the tokenizer {name} failed: {str(error)[:200]}") from error


@dataclass(frozen=True, slots=True)
class FastTokenizer:
    """A tokenizer of the `tokenizers` library, which encodes on several threads.

    It is sent to other processes in the library's serialization, so that none of them imports anything else.
    """

    backend: tokenizers.Tokenizer  # without truncation and padding
    name: str
    specials: Specials
    fingerprint: str
    vocab_size: int
    is_cuttable: bool

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the one switch that the library doesn't serialize."""
        values = tuple(getattr(self, field.name) for field in fields(self))
        return _again, (values, bool(self.backend.encode_special_tokens))

    def encode(self, texts: Sequence[str], *, is_chat: bool = False) -> tuple[Int32Array, IntArray]:  # noqa: ARG002
        """Return the ids of texts, including special tokens in them, as the library does."""
        parts: list[bytes] = []
        lengths: list[int] = []
        for batch in _batches(texts):
            for encoding in self._encode(batch):
                ids = encoding.ids
                lengths.append(len(ids))
                parts.append(struct.pack(f"{len(ids)}i", *ids))
        return np.frombuffer(b"".join(parts), dtype=np.int32), _offsets(lengths, len(lengths))

    def encode_spans(
        self, texts: Sequence[str], spans: IntArray, span_offsets: IntArray
    ) -> tuple[Int32Array, IntArray, Int32Array]:
        """Encode whole texts, and return for each token which of the given spans it overlaps.

        For tokenizers whose texts can't be cut at spans; about half as fast as `encode`.

        Arrays: `spans` is int64 `[spans, 2]`, characters [start, stop) of a text; `span_offsets` is int64 `[texts +
        1]`: text t has the spans `span_offsets[t]:span_offsets[t + 1]`.
        """
        parts, lengths, marks = [], [], []
        encodings = self._encode(list(texts), with_offsets=True)
        for encoding, first, last in zip(encodings, span_offsets, span_offsets[1:]):
            ranges = list(enumerate(spans[first:last].tolist(), first + 1))
            bounds = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            mark = np.zeros(len(bounds), dtype=np.int32)
            # A token that overlaps two spans belongs to the first.
            for number, (start, stop) in reversed(ranges):
                mark[(bounds[:, 1] > start) & (bounds[:, 0] < stop)] = number
            parts.append(np.array(encoding.ids, dtype=np.int32))
            lengths.append(len(bounds))
            marks.append(mark)
        return _concatenated(parts), _offsets(lengths, len(lengths)), _concatenated(marks)

    def _encode(self, batch: list[str], *, with_offsets: bool = False) -> list[tokenizers.Encoding]:
        """Encode a batch, with each token's position in its text if asked for."""
        encode = self.backend.encode_batch if with_offsets else self.backend.encode_batch_fast
        with backend_faults(self.name):
            return encode(batch, add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids."""
        return str(self.backend.decode(list(ids), skip_special_tokens=False))


def _again(values: tuple[Any, ...], splits_specials: bool) -> FastTokenizer:
    """Rebuild a tokenizer in the process that it was sent to."""
    made = FastTokenizer(*values)
    made.backend.encode_special_tokens = splits_specials
    return made


@dataclass(frozen=True, slots=True)
class FunctionTokenizer:
    """Any function from texts to ids."""

    function: Callable[[list[str]], Sequence[Sequence[int]]]  # from texts to the ids of each
    name: str
    specials: Specials
    fingerprint: str
    vocab_size: int | None = None
    is_cuttable: bool = True

    def encode(self, texts: Sequence[str], *, is_chat: bool = False) -> tuple[Int32Array, IntArray]:  # noqa: ARG002
        """Return the ids of texts."""
        parts: list[Int32Array] = []
        for batch in _batches(texts):
            try:
                rows = [np.asarray(row) for row in self.function(batch)]
            except Exception as error:
                words = described(error, kind=True)
                raise SettingError(f"the tokenizer {self.name} failed: {words}") from error
            odd = [row for row in rows if not _are_ids(row)]
            if odd or len(rows) != len(batch):
                got = (
                    f"numbers from {odd[0].min()} to {odd[0].max()}"
                    if odd and odd[0].ndim == 1 and odd[0].dtype.kind in "iu"
                    else f"an array of {odd[0].dtype} of shape {list(odd[0].shape)}"
                    if odd
                    else f"{len(rows):,} results of {len(batch):,} texts"
                )
                raise SettingError(
                    f"the tokenizer {self.name} must return a list of ids for each text, got {got}"
                )
            parts += [row.astype(np.int32) for row in rows]
        return _joined(parts)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the ids themselves: a function can't be inverted."""
        return " ".join(map(str, ids))


def _are_ids(row: npt.NDArray[Any]) -> bool:
    """Whether these are integers from 0 to 2^31 - 1."""
    if row.ndim != 1 or row.size == 0:
        return row.ndim == 1
    return row.dtype.kind in "iu" and row.min() >= 0 and row.max() < 2**31


def is_cuttable(encode: Callable[[str], list[int]]) -> bool:
    """Probe whether a text's ids are those of its parts when cut after a line end or a bracket.

    True for byte-level vocabularies; False where a mark is prepended to a text's first word.
    """
    probes = (("user\n", "Hello there"), ("user>", "Hi, you"))
    return all(encode(a + b) == encode(a) + encode(b) for a, b in probes)


def digest(text: str | bytes) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def _batches(texts: Sequence[str]) -> Iterable[list[str]]:
    """Cut texts into batches of a few megabytes."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _ENCODE_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _offsets(lengths: Iterable[int], count: int) -> IntArray:
    offsets = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.fromiter(lengths, dtype=np.int64, count=count), out=offsets[1:])
    return offsets


def _concatenated(parts: Sequence[Int32Array]) -> Int32Array:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def _joined(parts: Sequence[Int32Array]) -> tuple[Int32Array, IntArray]:
    return _concatenated(parts), _offsets(map(len, parts), len(parts))

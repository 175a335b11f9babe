"""The data structures of packing: a ledger that balances, and a packing as flat arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, fields
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from varlen.errors import LedgerError, SettingError

IntArray = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float64]

Method = Literal[
    "next_fit", "first_fit", "first_fit_decreasing", "best_fit", "best_fit_decreasing", "wrapped", "balanced"
]
Overlong = Literal["error", "split", "truncate", "drop"]


def rebuilt(value: Any) -> tuple[partial[Any], tuple[()]]:
    """Return what `__reduce__` returns, so that unpickling calls the constructor and freezes arrays."""
    kind: Callable[..., Any] = type(value)
    return partial(kind, **{field.name: getattr(value, field.name) for field in fields(value)}), ()


ADDED: Final = MappingProxyType({"is_added": True})
"""Metadata of a field that was added after objects of its class were stored and hashed: at its default it is neither
stored nor hashed, so that hashes stay the same."""


def stored_fields(value: Any) -> Iterator[Field[Any]]:
    """Yield the fields of a dataclass, except those that are `ADDED` and at their default."""
    for each in fields(value):
        if "is_added" not in each.metadata or getattr(value, each.name) != each.default:
            yield each


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """What became of every token: `tokens_in = packed + truncated + dropped`, and nothing twice.

    `packed` and `duplicated` are counted from the finished packs, the others from the input, so the
    balance is evidence and not a definition.
    """

    tokens_in: int
    """Tokens of all documents as given."""
    packed: int
    """Tokens that stand in a pack."""
    truncated: int = 0
    """Tokens cut off the end of overlong documents (`overlong="truncate"`)."""
    dropped: int = 0
    """Tokens of documents left out whole (`overlong="drop"`)."""
    duplicated: int = 0
    """Tokens that stand in more than one place; always 0 in a packing that is returned."""
    documents_in: int = 0
    """Documents as given, empty ones included."""
    empty_documents: int = 0
    """Documents of length 0, which no pack holds."""
    split_documents: int = 0
    """Documents cut into several pieces (`overlong="split"` or `method="wrapped"`)."""
    truncated_documents: int = 0
    """Documents that lost their end."""
    dropped_documents: int = 0
    """Documents left out whole, empty ones not counted."""
    repeated: int = 0
    """Tokens of documents that a mixture repeats; each time they are also in `tokens_in`."""

    def and_then(self, other: Ledger) -> Ledger:
        """Return the sum of two ledgers.

        Args:
            other: of other documents.
        """
        names = [field.name for field in fields(self)]
        return Ledger(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def balance(self) -> int:
        """Tokens unaccounted for; 0 in every ledger that varlen returns."""
        return self.tokens_in - self.packed - self.truncated - self.dropped

    def check(self) -> Ledger:
        """Return this ledger if it balances.

        Raises:
            LedgerError: tokens are missing or stand twice; a bug in varlen.
        """
        if self.balance != 0 or self.duplicated != 0:
            raise LedgerError(
                f"{self.tokens_in:,} tokens in, but {self.packed:,} packed + {self.truncated:,} truncated + "
                f"{self.dropped:,} dropped, {self.duplicated:,} duplicated: {self.balance:,} unaccounted for. "
                "This is a bug in varlen; please report the lengths and the settings"
            )
        return self


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packing:
    """Which piece of which document stands in which pack, as flat arrays.

    Pack `p` holds the pieces `offsets[p]:offsets[p + 1]`; piece `j` is the tokens
    `starts[j]:stops[j]` of document `document_ids[j]`. The arrays are read-only.

    Invariants: every token of every packed document stands in exactly one piece; no pack's slots
    (`slot_lengths`) sum over `capacity`; packs stand in the order of their first document (unless a
    seed permuted them), pieces within a pack in input order.

    Made by hand, a Packing replays a plan from elsewhere. Where pieces end inside their documents it needs
    `overlong="truncate"`: with the others `collate` takes that for documents that have changed since.
    """

    document_ids: IntArray
    """int64 `[num_pieces]`: index of the document among the lengths given."""
    starts: Int32Array
    """int32 `[num_pieces]`: first token of the piece within its document."""
    stops: Int32Array
    """int32 `[num_pieces]`: one past the piece's last token."""
    offsets: IntArray
    """int64 `[num_packs + 1]`: where each pack's pieces begin; `offsets[0] = 0`."""
    capacity: int
    """Tokens one pack can hold."""
    ledger: Ledger
    """The balance of tokens in and out."""
    method: Method = "best_fit_decreasing"
    overlong: Overlong = "error"
    document_multiple_of: int = 1
    """Every piece takes a slot rounded up to this multiple."""
    groups: IntArray | None = None
    """int64 `[num_documents]`: the group of each document, or None; documents of a group share a pack."""
    prefixes: Int32Array | None = None
    """int32 `[num_pieces]` of `pack_forest`, whose documents are trees: the tokens before the piece that it repeats,
    as they are needed for it; all 0 where no tree is cut. None of `pack`."""

    def __post_init__(self) -> None:
        for array in (self.document_ids, self.starts, self.stops, self.offsets, self.groups, self.prefixes):
            if array is not None:
                array.flags.writeable = False

    __reduce__ = rebuilt  # arrays are read-only in another process too

    @property
    def num_packs(self) -> int:
        """Number of packs."""
        return len(self.offsets) - 1

    @property
    def num_pieces(self) -> int:
        """Number of pieces in all packs."""
        return len(self.document_ids)

    @property
    def num_documents(self) -> int:
        """Number of documents given, those that are empty or dropped included."""
        return self.ledger.documents_in

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all packs."""
        return self.ledger.packed

    @property
    def fill_ratio(self) -> float:
        """Tokens over the slots of all packs, `num_tokens / (num_packs * capacity)`; 1.0 without packs."""
        slots = self.num_packs * self.capacity
        return self.num_tokens / slots if slots else 1.0

    @property
    def lengths(self) -> Int32Array:
        """int32 `[num_pieces]`: tokens of each piece."""
        return self.stops - self.starts

    @property
    def slot_lengths(self) -> IntArray:
        """int64 `[num_pieces]`: tokens that each takes up, with repeated ones, rounded to `document_multiple_of`."""
        multiple = self.document_multiple_of
        lengths = self.lengths.astype(np.int64) + (0 if self.prefixes is None else self.prefixes)
        return -(-lengths // multiple) * multiple

    @property
    def repeated_tokens(self) -> int:
        """Tokens that stand in another pack as well, since a tree was cut; 0 of `pack`."""
        return 0 if self.prefixes is None else int(self.prefixes.sum())

    def pack_sums(self, values: npt.ArrayLike) -> FloatArray | IntArray:
        """Sum a value per piece over each pack.

        Args:
            values: `[num_pieces]`, integers or floats.

        Returns:
            `[num_packs]`, int64 for integers and float64 for floats. Packs are never empty.
        """
        array = np.asarray(values)
        wide = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
        return np.add.reduceat(wide, self.offsets[:-1]) if self.num_packs else wide[:0]  # type: ignore[return-value]

    def to_lists(self) -> list[list[int]]:
        """Return the document ids of each pack, for reading and for small tests.

        >>> import varlen as vl
        >>> vl.pack([5, 2, 6, 3], capacity=8).to_lists()
        [[0, 3], [1, 2]]
        """
        bounds = self.offsets.tolist()
        ids = self.document_ids.tolist()
        return [ids[a:b] for a, b in zip(bounds[:-1], bounds[1:])]

    def __repr__(self) -> str:
        """Return one line: numbers of documents and packs, fill, padding, and tokens lost or repeated."""
        padding = self.num_packs * self.capacity - self.num_tokens - self.repeated_tokens
        lost = self.ledger.truncated + self.ledger.dropped
        tail = f", {lost:,} tokens cut or dropped" if lost else ""
        tail += f", {self.repeated_tokens:,} tokens repeated" if self.repeated_tokens else ""
        units = "documents" if self.prefixes is None else "trees"
        return (
            f"Packing({self.num_documents:,} {units} in {self.num_packs:,} packs of {self.capacity:,} tokens, "
            f"{100 * self.fill_ratio:.2f}% full, {padding:,} tokens of padding{tail})"
        )


def as_packing(given: object, use: str) -> Packing:
    """Raise unless the argument is a Packing; other types are easily passed by mistake."""
    if isinstance(given, Packing):
        return given
    raise SettingError(
        f"{use} takes what vl.pack(lengths, capacity) returned as packing, and a {type(given).__name__} was given"
    )

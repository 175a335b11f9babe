"""What the feed asks of documents that are tokens already, wherever they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from varlen.text.loss_masks import Mask
from varlen.types import Int32Array, IntArray

ROW_WEIGHTS = "row_weights"
"""What the marks of a source say where it is read with weights."""


class ReadableTokens(Protocol):
    """Documents as token ids, shard by shard, of which any can be read at any time."""

    @property
    def documents(self) -> IntArray:
        """int64 `[shards]`: documents of each shard that is there; more may come behind them."""

    def lengths(self, shards: IntArray, documents: IntArray) -> IntArray:
        """Return the lengths of documents, each given by its shard and its number there."""

    def where(self, shard: int) -> str:
        """Say where a shard lies."""

    def will_need(self, shards: IntArray, documents: IntArray) -> None:
        """Have the system read documents in while other things are done; arguments as in `lengths`."""

    def count_targets(
        self, shards: IntArray, documents: IntArray, starts: IntArray, stops: IntArray
    ) -> IntArray:
        """Count the labels that pieces of documents give: of supervised tokens but each piece's first.

        Args:
            shards: int64 `[pieces]`.
            documents: int64 `[pieces]`, numbers within the shards.
            starts: int64 `[pieces]`.
            stops: int64 `[pieces]`; a piece is its document's tokens [start, stop).

        Returns:
            int64 `[pieces]`.
        """

    def gather(
        self, shards: IntArray, documents: IntArray, starts: Sequence[int] | IntArray, lengths: IntArray
    ) -> tuple[Int32Array, Mask | None]:
        """Read pieces of documents end to end, in the order asked for.

        Args:
            shards: int64 `[pieces]`.
            documents: int64 `[pieces]`, numbers within the shards.
            starts: int `[pieces]`, the first token of each piece within its document.
            lengths: int64 `[pieces]`, tokens of each piece.

        Returns:
            Tokens, and the mask; None where all are supervised. As float32 it holds weights.
        """


class TokenDocuments(ReadableTokens, Protocol):
    """Documents as token ids, shard by shard, of which any can be read at any time.

    Shards come in parts, which are numbered; a part may have any number of shards, none too. The order of all of them
    is fixed before the first can be read, so that whatever is made of them doesn't depend on when it is asked for.
    """

    @property
    def parts(self) -> IntArray:
        """int64 `[shards]`: the part that each shard belongs to, ascending."""

    @property
    def tokens(self) -> IntArray:
        """int64 `[shards]`: tokens of each shard, or about so many; a function of the content."""

    @property
    def num_parts(self) -> int:
        """Parts of the whole, though not all may be there yet."""

    @property
    def fingerprint(self) -> str:
        """Changes with the tokens and their order; never with where they lie."""

    @property
    def tables(self) -> Path | None:
        """Folder for what is computed from the lengths once and kept; None: not among the data."""

    def fingerprint_at(self, num_parts: int) -> str | None:
        """Return the fingerprint of the first parts alone; None where they never were a whole."""

    def wait_for(self, num_parts: int) -> None:
        """Return when the first so many parts are there."""


def weighs(tokens: object) -> bool:
    """Whether documents were read with `row_weights`, so that their masks may hold weights."""
    manifest = getattr(tokens, "manifest", None)
    source = manifest.get("source") if isinstance(manifest, Mapping) else None
    return isinstance(source, Mapping) and bool(source.get(ROW_WEIGHTS))

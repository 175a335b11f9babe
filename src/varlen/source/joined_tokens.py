"""Several sets of token documents as one: shards of the first, then those of the second, and so on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from varlen.source.loss_masks import Mask, as_wide
from varlen.source.token_documents import TokenDocuments
from varlen.types import Int32Array, IntArray


class JoinedTokens:
    """Reads documents of any of several sets, which hold what they held when they were joined."""

    def __init__(self, sets: Sequence[TokenDocuments], num_parts: Sequence[int] | None = None) -> None:
        """Take the sets, all of whose parts are there.

        Args:
            sets: of documents.
            num_parts: of each set; it holds these parts alone. None: all that it has.
        """
        self._sets = tuple(sets)
        kept = [one.num_parts for one in sets] if num_parts is None else num_parts
        held = [one.documents[: np.searchsorted(one.parts, parts)] for one, parts in zip(sets, kept)]
        self._first = np.cumsum([0, *map(len, held)])
        self._documents: IntArray = np.concatenate(held)

    @property
    def documents(self) -> IntArray:
        """int64 `[shards]`: documents of each shard."""
        return self._documents

    def with_parts(self, num_parts: Sequence[int]) -> JoinedTokens:
        """Return the same sets, of each of which so many parts are held."""
        return JoinedTokens(self._sets, num_parts)

    def first_shard(self, number: int) -> int:
        """Return the shard with which a set begins."""
        return int(self._first[number])

    def where(self, shard: int) -> str:
        """Say where a shard lies."""
        number = int(np.searchsorted(self._first, shard, side="right")) - 1
        return self._sets[number].where(shard - int(self._first[number]))

    def _each(self, shards: IntArray, ask: Callable[[TokenDocuments, IntArray, IntArray], None]) -> None:
        """Ask each set for its documents, given by their places among all and the shards within the set."""
        owners = np.searchsorted(self._first, shards, side="right") - 1
        for number in np.unique(owners).tolist():
            places = np.flatnonzero(owners == number)
            ask(self._sets[number], places, shards[places] - self._first[number])

    def lengths(self, shards: IntArray, documents: IntArray) -> IntArray:
        """Return the lengths of documents; arguments as `TokenDocuments` has them."""
        found = np.empty(len(shards), dtype=np.int64)

        def ask(one: TokenDocuments, places: IntArray, within: IntArray) -> None:
            found[places] = one.lengths(within, documents[places])

        self._each(shards, ask)
        return found

    def will_need(self, shards: IntArray, documents: IntArray) -> None:
        """Have the system read documents in while other things are done; arguments as in `lengths`."""
        self._each(shards, lambda one, places, within: one.will_need(within, documents[places]))

    def count_targets(
        self, shards: IntArray, documents: IntArray, starts: IntArray, stops: IntArray
    ) -> IntArray:
        """Count the labels that pieces of documents give; arguments as `TokenDocuments` has them."""
        found = np.empty(len(shards), dtype=np.int64)

        def ask(one: TokenDocuments, places: IntArray, within: IntArray) -> None:
            found[places] = one.count_targets(within, documents[places], starts[places], stops[places])

        self._each(shards, ask)
        return found

    def gather(
        self, shards: IntArray, documents: IntArray, starts: Sequence[int] | IntArray, lengths: IntArray
    ) -> tuple[Int32Array, Mask | None]:
        """Read pieces of documents end to end, in the order asked for; arguments as `TokenDocuments` has them."""
        begins = np.cumsum(lengths) - lengths
        tokens = np.empty(int(lengths.sum()), dtype=np.int32)
        mask: Mask = np.ones(len(tokens), dtype=np.uint8)
        is_masked = False

        def ask(one: TokenDocuments, places: IntArray, within: IntArray) -> None:
            nonlocal is_masked, mask
            sizes = lengths[places]
            found, marks = one.gather(within, documents[places], np.asarray(starts)[places], sizes)
            where = np.repeat(begins[places] - (np.cumsum(sizes) - sizes), sizes) + np.arange(len(found))
            tokens[where] = found
            if marks is not None:
                is_masked, mask = True, as_wide(mask, marks)
                mask[where] = marks

        self._each(shards, ask)
        return tokens, mask if is_masked else None

"""Megatron-Bridge's packing functions under their own names: histogram, strategy, fill, first fit.

Equal to the release's in what they return, whatever it is given that it can pack, under the same state of NumPy's
global generator; 10 to 1,000 times faster. Where the release fails in silence or with a bare IndexError, these say
what is wrong.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from varlen.adapters.megatron.packing.replay import Draws, in_turn, packed_in_turn
from varlen.arguments import as_choice, as_count
from varlen.counts import many
from varlen.errors import DocumentsError, OverlongDocumentError, SettingError
from varlen.pack.lengths import as_lengths
from varlen.types import Int32Array, IntArray, Method

PACKING_ALGOS = ["first_fit_decreasing", "first_fit_shuffle"]
"""What the release's own preparation takes."""
PACKING_ALGORITHMS = (*PACKING_ALGOS, "first_fit", "best_fit_decreasing", "best_fit_shuffle", "best_fit")
"""What `create_packing_strategy` takes here. Best fit is as quick and leaves fewer rows half empty; in shuffled order
a row's documents stay a random sample."""

Item = TypeVar("Item")
Document = dict[str, Any]
Bins: TypeAlias = list[list[Item]]
"""The items of each bin: lists in lists, as the release has them."""
Documents: TypeAlias = dict[int, list[Document]]
"""Documents by length."""
_log = logging.getLogger(__name__)
_GLOBAL: Draws = np.random  # the generator that the release draws from


def find_first_bin_that_fits(bins: Sequence[Any], s: int, bin_size: int) -> int:
    """Return the number of the first bin with room for `s`, or -1.

    Args:
        bins: the lengths in each bin, or what they add up to.
        s: length to place.
        bin_size: what a bin holds.

    >>> find_first_bin_that_fits([[900, 90], [100]], 20, 1000), find_first_bin_that_fits([990], 20, 1000)
    (1, -1)
    """
    for number, held in enumerate(bins):
        if (sum(held) if isinstance(held, Iterable) else held) + s <= bin_size:
            return number
    return -1


def first_fit(
    seqlens: Sequence[Item], pack_size: int, *, item_lengths: Sequence[int] | None = None
) -> Bins[Item]:
    """Put items, in the order given, each into the first bin with room.

    Args:
        seqlens: lengths, or any objects where `item_lengths` says how long each is.
        pack_size: what a bin holds; a longer item gets a bin of its own.
        item_lengths: `[items]`.

    Returns:
        The items of each bin, bins as opened.

    Raises:
        DocumentsError: as many lengths as items are needed.
        LengthsError: negative or fractional lengths.

    >>> first_fit(["a", "b", "c", "d"], 10, item_lengths=[5, 3, 2, 7])
    [['a', 'b', 'c'], ['d']]
    """
    lengths = _lengths_of(seqlens, item_lengths)
    return _in_bins(seqlens, np.arange(len(lengths)), lengths, pack_size, "first_fit")


def first_fit_decreasing(
    seqlens: Sequence[Item], pack_size: int, *, item_lengths: Sequence[int] | None = None
) -> Bins[Item]:
    """Put items, from long to short, each into the first bin with room; arguments and result as in `first_fit`.

    Equal lengths keep their order.

    >>> first_fit_decreasing([1111, 8192, 4096, 1000], 2048)
    [[8192], [4096], [1111], [1000]]
    """
    lengths = _lengths_of(seqlens, item_lengths)
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    return _in_bins(seqlens, order, lengths, pack_size, "first_fit")


def first_fit_shuffle(
    seqlens: Sequence[Item], pack_size: int, *, item_lengths: Sequence[int] | None = None
) -> Bins[Item]:
    """Put items, in random order, each into the first bin with room; arguments and result as in `first_fit`.

    The order is drawn from NumPy's global generator, as in the release: `numpy.random.seed` makes it the same again.
    """
    lengths = _lengths_of(seqlens, item_lengths)
    order = np.arange(len(lengths))
    _GLOBAL.shuffle(order)
    return _in_bins(seqlens, order, lengths, pack_size, "first_fit")


def create_hist(
    dataset: Iterable[Document], truncate_seq_len: int, *, overlong: str = "error"
) -> tuple[Documents, list[int]]:
    """Return documents by length, and how many there are of each; a length is `len(input_ids) - 1`.

    Releases 0.3 to 0.5 fail with an IndexError at a document longer than `truncate_seq_len`; 0.6 leaves it out with
    a warning. Here it is an error, or with `overlong="drop"` left out with the warning. A document without tokens
    is left out with a warning too, where the releases count it as one of the longest.

    Args:
        dataset: documents with `input_ids`.
        truncate_seq_len: most positions of a document.
        overlong: "error" or "drop".

    Returns:
        Documents by length, and int `[truncate_seq_len + 1]`.

    Raises:
        OverlongDocumentError: a document is longer, and `overlong` is "error".
    """
    as_choice(overlong, "overlong", ("error", "drop"))
    most = as_count(truncate_seq_len, "truncate_seq_len", 0)
    sequences: Documents = defaultdict(list)
    histogram = [0] * (most + 1)
    first, length, skipped, empty = -1, 0, 0, 0
    for number, document in enumerate(dataset):
        positions = len(document["input_ids"]) - 1
        if 0 <= positions <= most:
            sequences[positions].append(document)
            histogram[positions] += 1
        elif positions < 0:
            empty += 1
        else:
            skipped += 1
            first, length = (number, positions) if skipped == 1 else (first, length)
    if skipped and overlong == "error":
        raise OverlongDocumentError(
            f"document {first:,} has {length + 1:,} tokens, {length:,} positions of input, but truncate_seq_len is "
            f"{most:,} ({many(skipped, 'document is', 'documents are')} too long); cut them before, or pass "
            'overlong="drop" to leave them out'
        )
    if skipped:
        _log.warning("left out %s longer than %d positions", many(skipped, "document"), most)
    if empty:
        _log.warning("left out %s without a token", many(empty, "document"))
    return sequences, histogram


def create_packing_strategy(
    histogram: Sequence[int], pack_size: int, packing_algorithm: str = "first_fit"
) -> tuple[Bins[int], dict[str, Any]]:
    """Pack lengths, given by how many there are of each.

    Args:
        histogram: documents of each length from 0 on.
        pack_size: positions of a row.
        packing_algorithm: of `PACKING_ALGORITHMS`. The best-fit ones are varlen's.

    Returns:
        The lengths in each row, and the release's metadata: `dataset_max_seqlen`, `max_samples_per_bin`,
        `packing_factor`, `packing_efficiency` (per cent), `pack_size`, `min_packed_seqlen`.

    Raises:
        SettingError: an algorithm of another name.
        DocumentsError: there is no document.
    """
    if packing_algorithm not in PACKING_ALGORITHMS:
        raise SettingError(
            f"packing_algorithm must be one of {', '.join(PACKING_ALGORITHMS)}; got {packing_algorithm!r}"
        )
    pack_size = as_count(pack_size, "pack_size")
    counts = as_lengths(histogram)
    rising = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    if not len(rising):
        raise DocumentsError("the histogram counts no document, so there is nothing to pack")
    turns = in_turn(rising, packing_algorithm, _GLOBAL)
    placed, offsets = packed_in_turn(turns, pack_size, _METHODS[packing_algorithm])
    lengths = turns[placed]
    held = lengths.tolist()
    assignments = [held[start:stop] for start, stop in pairwise(offsets.tolist())]
    return assignments, _metadata(lengths, offsets, pack_size)


_METHODS: dict[str, Method] = {
    "first_fit": "first_fit",
    "first_fit_shuffle": "first_fit",
    "first_fit_decreasing": "first_fit",
    "best_fit": "best_fit",
    "best_fit_shuffle": "best_fit",
    "best_fit_decreasing": "best_fit_decreasing",
}


def fill_packing_strategy(
    assignments: Bins[int],
    sequences: Mapping[int, Sequence[Document]],
    pack_size: int,
    pad_id: int,  # noqa: ARG001  # the release takes it and pads nothing either
) -> list[Document]:
    """Put documents into the places that lengths were given.

    Documents of a length are taken in a random order, drawn from NumPy's global generator as the release draws it.

    Args:
        assignments: the lengths in each row, of `create_packing_strategy`.
        sequences: documents by length, of `create_hist`: `input_ids`, and `loss_mask` or `answer_start_idx`.
        pack_size: positions of a row.
        pad_id: not used.

    Returns:
        Rows of `input_ids`, `loss_mask`, which stands at the input that a target belongs to, and `seq_start_id`.

    Raises:
        DocumentsError: a document has neither mask, or one of another length than its tokens; or places and
            documents don't match.
    """
    stacks: dict[int, list[tuple[list[int], list[Any]]]] = {}
    for length in range(pack_size + 1):
        group = sequences.get(length, ())
        if len(group):
            masks = _masks(group, length)
            order: list[int] = _GLOBAL.permutation(len(group)).tolist()
            stacks[length] = [(_plain(group[number]["input_ids"]), masks[number]) for number in order]
    rows = [_filled(lengths, stacks) for lengths in assignments]
    left = sum(map(len, stacks.values()))
    if left:
        raise DocumentsError(
            f"{many(left, 'document is', 'documents are')} left over: the assignments have no place for them; make "
            "them from the histogram of the same documents"
        )
    return rows


def _lengths_of(items: Sequence[Any], lengths: Sequence[int] | None) -> Int32Array:
    if lengths is not None and len(lengths) != len(items):
        raise DocumentsError(
            f"seqlens and item_lengths must have the same number of entries, got {len(items):,} and {len(lengths):,}"
        )
    return as_lengths(items if lengths is None else lengths)


def _in_bins(
    items: Sequence[Item], order: npt.NDArray[np.intp], lengths: Int32Array, pack_size: int, method: Method
) -> Bins[Item]:
    """Pack items in an order; returns those of each bin."""
    placed, offsets = packed_in_turn(lengths[order], as_count(pack_size, "pack_size"), method)
    taken = [items[number] for number in order[placed].tolist()]
    return [taken[start:stop] for start, stop in pairwise(offsets.tolist())]


def _metadata(lengths: Int32Array, offsets: IntArray, pack_size: int) -> dict[str, Any]:
    """Return the release's figures; divided in its order, so that they round alike."""
    packed, counts = np.add.reduceat(lengths, offsets[:-1], dtype=np.int64), np.diff(offsets)
    return {
        "dataset_max_seqlen": int(lengths.max()),
        "max_samples_per_bin": int(counts.max()),
        "packing_factor": round(len(lengths) / len(counts), 2),
        "packing_efficiency": round(int(packed.sum()) / len(packed) / pack_size * 100, 2),
        "pack_size": pack_size,
        "min_packed_seqlen": int(packed.min()),
    }


def _masks(group: Sequence[Document], length: int) -> Bins[Any]:
    """Return the mask of each document at its inputs: one place earlier than at its tokens."""
    masks: Bins[Any] = []
    if all("loss_mask" in document for document in group):
        for document in group:
            mask = _plain(document["loss_mask"])
            if len(mask) != len(document["input_ids"]):
                raise DocumentsError(
                    f"a document of length {length:,} has {len(document['input_ids']):,} `input_ids`, but "
                    f"{len(mask):,} values of `loss_mask`"
                )
            masks.append([*mask[1:], False])
        return masks
    for document in group:
        if "answer_start_idx" not in document:
            raise DocumentsError(
                f"a document of length {length:,} has no `loss_mask`, or another of its length hasn't, and it has no "
                f"`answer_start_idx` either; it has {', '.join(map(repr, document))}"
            )
        size = len(document["input_ids"])
        first = min(max(int(document["answer_start_idx"]) - 1, 0), size)
        masks.append([False] * first + [True] * (size - first))
    return masks


def _plain(values: Any) -> list[Any]:
    """Return a list of Python's numbers, of a list, an array or a tensor."""
    if isinstance(values, list):
        return values
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _filled(lengths: Sequence[int], stacks: Mapping[int, list[tuple[list[int], list[Any]]]]) -> Document:
    """Return a row; documents are taken off the stacks."""
    ids: list[int] = []
    mask: list[Any] = []
    starts: list[int] = []
    for length in lengths:
        stack = stacks.get(length)
        if not stack:
            raise DocumentsError(
                f"the assignments have more places of length {length:,} than there are documents; make them from the "
                "histogram of the same documents"
            )
        tokens, trained = stack.pop()
        starts.append(len(ids))
        ids += tokens
        mask += trained
    return {"input_ids": ids, "loss_mask": mask, "seq_start_id": starts}

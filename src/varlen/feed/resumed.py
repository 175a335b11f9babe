"""What waited when a state was saved: its lengths are known, so a round is packed first, and read again as needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from varlen.feed.intake import Reading
from varlen.feed.lane import Arrival, Counts, LanePacks
from varlen.feed.record import LaneRecord
from varlen.types import Int32Array, IntArray


def unread(record: LaneRecord) -> Arrival:
    """Return the documents that a record names with zeros for tokens, which `Unread` replaces."""
    offsets = np.concatenate([[0], np.cumsum(record.lengths)]).astype(np.int64)
    return Arrival(
        ids=record.ids,
        firsts=record.starts,
        ages=record.ages,
        offsets=offsets,
        tokens=np.zeros(int(offsets[-1]), np.int32),
        mask=None,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Pieces:
    """Pieces end to end, some of which are zeros yet."""

    ids: IntArray
    starts: IntArray
    lengths: IntArray
    tokens: Int32Array


class Unread:
    """Knows which documents were packed without being read, and reads them."""

    def __init__(self, intake: Reading, records: Mapping[int, LaneRecord]) -> None:
        """Take who reads, and what waited in each lane."""
        self._intake = intake
        self._waited = {lane: record.ids for lane, record in records.items()}

    def bring(self, packs: Mapping[int, LanePacks], left: Mapping[int, Arrival]) -> None:
        """Put tokens where zeros are.

        Args:
            packs: of each lane; views of those of a round.
            left: what each lane keeps for the next round.

        Raises:
            StateError: a document isn't there, or has fewer tokens than it had.
            SourceError: a file can't be read any more.
        """
        wanted: dict[int, _Pieces] = {}
        for lane, one in packs.items():
            wanted[2 * lane] = _Pieces(
                ids=one.ids, starts=one.starts, lengths=one.stops - one.starts, tokens=one.tokens
            )
        for lane, rest in left.items():
            wanted[2 * lane + 1] = _Pieces(
                ids=rest.ids, starts=rest.firsts, lengths=np.diff(rest.offsets), tokens=rest.tokens
            )
        # A document that came again, in the next epoch, is read again too: its tokens are the same.
        known = {key: np.isin(one.ids, self._waited[key // 2]) for key, one in wanted.items()}
        found = self._intake.waiting(
            {key: _record(one, known[key]) for key, one in wanted.items() if known[key].any()}
        )
        for key, arrival in found.items():
            is_unread = np.repeat(known[key], wanted[key].lengths)
            wanted[key].tokens[is_unread] = arrival.tokens


def _record(pieces: _Pieces, which: npt.NDArray[np.bool_]) -> LaneRecord:
    ids = pieces.ids[which]
    return LaneRecord(
        ids=ids,
        starts=pieces.starts[which],
        lengths=pieces.lengths[which],
        ages=np.zeros(len(ids), np.int32),
        counts=Counts(),
        is_masked=False,
    )

"""Rounds: the packs of several steps, prepared together from claimed chunks; they depend only on data and settings.

::

    input      b0 b1 b2 b3 b4 b5 b6 ...         chunks of blocks, in the order of the epoch
    claims     0  1  2  2  0  1  ...            each to the lane that holds the least
    lane 0     waiting ─► shuffled ─► packed ─► its packs of the round's steps; the rest waits

Rounds don't depend on which rank runs a lane: ranks exchange the lanes' amounts after every set of claims.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from varlen import errors
from varlen.arguments import as_count
from varlen.documents.block_reader import Chunk
from varlen.errors import SourceError, StateError, reading_state
from varlen.feed.exchange import Exchange
from varlen.feed.state import ENDS, MOST
from varlen.feed.streaming.intake import (
    ChunkReader,
    ChunkSequence,
    Claim,
    Claimed,
    PostponedReads,
    ReadChunk,
    RowsHash,
    as_claimed,
    blank_arrival,
    by_lane,
    deal_claims,
)
from varlen.feed.streaming.lane import (
    Arrival,
    Counts,
    Held,
    Lane,
    LanePacks,
    LaneSettings,
    from_record,
    held_by,
    joined,
    to_record,
)
from varlen.files.losses import Losses, total
from varlen.pack.passes import ENOUGH_SHORT, MOST_SPARE_PACKS, SPARE_PACKS
from varlen.types import Ledger

_log = logging.getLogger(__name__)
_MOST_CLAIMS = 64
"""Claims per lane, at most, before lanes are compared again."""
_SOON_BYTES = 2 << 20
"""Bytes of blocks read before they are claimed, to keep processors busy; only where this process runs all lanes."""
_MOST_SOON = 64
"""Maximum number of these blocks."""
_OF_DOCUMENTS = ("empty_documents", "split_documents", "truncated_documents", "dropped_documents")
_FIRST_PACKS = 2
"""Packs per lane in the first round; each further round has twice as many, so the first batch is ready early."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundSettings:
    """Everything that rounds depend on, apart from the data."""

    lanes: int
    step_packs: int
    """Packs per step and lane."""
    lane: LaneSettings
    window_packs: int
    """Packs per round and lane, about."""
    block_bytes: int

    def steps(self, number: int) -> int:
        """Return the number of steps of a round."""
        packs = min(self.window_packs, _FIRST_PACKS << min(number, 32))
        return max(round(packs / self.step_packs), 1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Round:
    """The packs of a round, or of some of its steps if a state is within it."""

    step: int
    """The first step."""
    num_steps: int
    bounds: tuple[int, int]
    """First step of the whole round, and the step after its last."""
    packs: Mapping[int, LanePacks]
    """Packs of the lanes that this process runs."""
    targets: Sequence[int]
    """Number of labels of each step, over all lanes."""
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    """States where the round and the next one begin; the same on every rank."""

    @property
    def accounts(self) -> tuple[Ledger, Losses]:
        """Ledger of the tokens that left the lanes in this round, and losses in files, over all lanes."""
        (counts, waiting), (counts_before, waiting_before) = map(_totals, (self.after, self.before))
        new = {name: counts[name] - counts_before[name] for name in counts}
        settled = new["tokens"] + waiting_before - waiting
        ledger = Ledger(
            tokens_in=settled,
            packed=settled - new["truncated"] - new["dropped"],
            truncated=new["truncated"],
            dropped=new["dropped"],
            documents_in=new["documents"],
            **{name: new[name] for name in _OF_DOCUMENTS},
        )
        return ledger, _losses(self.after) - _losses(self.before)

    def between(self, start: int, stop: int, step_packs: int) -> Round:
        """Return views of the steps [start, stop)."""
        first, last = start - self.step, stop - self.step
        packs = {lane: one.between(first * step_packs, last * step_packs) for lane, one in self.packs.items()}
        return replace(
            self, step=start, num_steps=stop - start, packs=packs, targets=self.targets[first:last]
        )

    @property
    def num_bytes(self) -> int:
        """Memory of its tokens and masks."""
        return sum(
            one.tokens.nbytes + (0 if one.mask is None else one.mask.nbytes) for one in self.packs.values()
        )


def _totals(at: Mapping[str, Any]) -> tuple[dict[str, int], int]:
    """Return the counts over all lanes, and the number of waiting tokens."""
    names = [field.name for field in fields(Counts) if field.name != "losses"]
    counts = {name: sum(record["counts"][name] for record in at["lanes"]) for name in names}
    return counts, sum(record["tokens"] for record in at["lanes"])


def _losses(at: Mapping[str, Any]) -> Losses:
    """Return the losses over all lanes."""
    return total(Counts.losses_in(record["counts"]) for record in at["lanes"])


class Rounds:
    """Prepares rounds one after the other, for the lanes that this process runs."""

    def __init__(
        self,
        sequence: ChunkSequence,
        intake: ChunkReader,
        exchange: Exchange,
        settings: RoundSettings,
        mine: Sequence[int],
        logged: set[Chunk] | None = None,
    ) -> None:
        self._sequence, self._intake, self._exchange = sequence, intake, exchange
        self._settings, self._mine, self._logged = settings, tuple(mine), logged
        self._num_soon = min(_SOON_BYTES // settings.block_bytes, _MOST_SOON)

    def run(self, at: Mapping[str, Any], step: int) -> Iterator[Round]:
        """Yield the rounds from a state to the end of the input; the first one may come in parts, from `step` on."""
        state = round_state_of(at, self._settings.lanes)
        carried, counts, missing = self._restored(state)
        self._sequence.check(state.row_hashes)
        while True:
            lanes = {lane: Lane(self._settings.lane, carried[lane], counts[lane]) for lane in self._mine}
            claimed, has_ended = self._fill(state, lanes)
            whole, next_, carried = self._pack(state, claimed, lanes, has_ended)
            if whole.num_steps:
                yield from self._wanted(whole, carried, missing, step)
            elif next_.records != state.records:  # no pack, but new counts
                yield whole
            if whole.num_steps == 0 and next_.end == state.end:
                return
            missing, state = None, next_
            counts = {lane: one.counts for lane, one in lanes.items()}

    def _restored(
        self, state: RoundState
    ) -> tuple[dict[int, Arrival], dict[int, Counts], PostponedReads | None]:
        """Return each lane's waiting documents and counts; and what is to be read later, if anything."""
        records = {lane: from_record(state.records[lane], self._settings.lane.seed) for lane in self._mine}
        counts = {lane: record.counts for lane, record in records.items()}
        waiting = {lane: record for lane, record in records.items() if len(record.ids)}
        carried = {lane: blank_arrival(record) for lane, record in records.items()}
        if not waiting:
            return carried, counts, None
        if self._intake.can_wait(waiting.values()):
            return carried, counts, PostponedReads(self._intake, records)
        return {**carried, **self._intake.waiting(waiting)}, counts, None

    def _wanted(
        self, whole: Round, left: Mapping[int, Arrival], missing: PostponedReads | None, step: int
    ) -> Iterator[Round]:
        """Yield a round; if documents are to be read, its first wanted step separately, as soon as they are."""
        if missing is None:
            yield whole
            return
        stop, size = whole.bounds[1], self._settings.step_packs
        at = min(max(step, whole.step), stop)
        if at < stop:
            first = whole.between(at, at + 1, size)
            missing.bring(first.packs, {})
            yield first
        rest = whole.between(min(at + 1, stop), stop, size)
        missing.bring(rest.packs, left)
        if rest.num_steps:
            yield rest

    def _fill(self, state: RoundState, lanes: Mapping[int, Lane]) -> tuple[Claimed, bool]:
        """Claim and read until every lane holds enough; returns the new position, and whether the input has ended."""
        settings, claimed, sequence = self._settings, state.claimed, self._sequence.until(state.end)
        packs = settings.steps(state.number) * settings.step_packs
        held = [
            lanes[lane].held
            if lane in lanes
            else held_by(from_record(record, settings.lane.seed).lengths, settings.lane)
            for lane, record in enumerate(state.records)
        ]
        claims, tokens = (sum(r["counts"][name] for r in state.records) for name in ("claims", "tokens"))
        last_fruitful = claimed.epoch
        for turn in itertools.count():
            brings = max(tokens / claims, 1.0) if claims else settings.block_bytes / 8
            left = sequence.left(claimed)
            targets = self._targets(held, packs, left * brings)
            most = int(min(max(left / (2 * settings.lanes), 1), _MOST_CLAIMS * settings.lanes))
            claiming = deal_claims([one.tokens for one in held], targets, brings, most)
            if not claiming:
                return claimed, False
            taken: list[Claim] = []
            for lane in claiming:
                item, claimed = sequence.next(claimed)
                if item is None:
                    break
                taken.append(Claim(lane=lane, epoch=item[0], chunk=item[1]))
            if taken:
                before = sum(one.tokens for one in held)
                # No reading ahead before the first batch, as it would delay it.
                reads_ahead = len(lanes) == settings.lanes and state.number > 0
                soon = sequence.soon(claimed, self._num_soon) if reads_ahead else []
                held = self._read(f"{state.number}/{turn}", taken, lanes, soon)
                added = sum(one.tokens for one in held) - before
                claims, tokens = claims + len(taken), tokens + added
                last_fruitful = claimed.epoch if added else last_fruitful
            if len(taken) < len(claiming) or claimed.epoch > last_fruitful + 1:  # the end, or an empty epoch
                break
        return claimed, True

    def _targets(self, held: Sequence[Held], packs: int, left_tokens: float) -> list[int]:
        """Return the tokens that each lane needs before its round can be packed."""
        settings = self._settings
        capacity, most_documents = settings.lane.passes.capacity, settings.lane.passes.max_documents
        # The first rounds are small and have fewer spare packs, so that batches are ready early.
        choice = packs if packs < settings.window_packs else 2 * packs
        least, most = ((packs + min(spare, choice)) * capacity for spare in (SPARE_PACKS, MOST_SPARE_PACKS))
        alike = max(most, *(one.tokens for one in held))
        if left_tokens <= 2 * sum(alike - one.tokens for one in held):
            return [alike] * len(held)  # the input ends soon: all lanes get the same target
        targets = []
        for one in held:
            if most_documents is not None and one.pieces >= (packs + SPARE_PACKS) * most_documents:
                targets.append(0)
            elif one.tokens < least:
                targets.append(least)
            else:
                targets.append(0 if one.short >= ENOUGH_SHORT else min(one.tokens + 1, most))
        return targets

    def _read(
        self, key: str, claims: Sequence[Claim], lanes: Mapping[int, Lane], soon: Sequence[Chunk]
    ) -> list[Held]:
        """Read the claims of this process's lanes; returns the amount that every lane then holds."""
        own = [claim for claim in claims if claim.lane in lanes]
        chunks = by_lane(self._intake.read(own, soon), own)
        mine: dict[int, Any] = {}
        for number, lane in lanes.items():
            try:
                for chunk in chunks.get(number, []):
                    if isinstance(chunk, Exception):
                        raise chunk
                    self._log_skipped(chunk)
                    # A file's bad records are the same in every epoch, as a file that changes is refused; they count
                    # once, as with an index. Failures of a disk or server differ between epochs, and always count.
                    lost = chunk.losses if chunk.claim.epoch == 0 else chunk.outside
                    lane.add(chunk.arrival, chunk.claim.epoch, chunk.path, lost)
                mine[number] = lane.held.to_json()
            except Exception as error:
                mine[number] = error
        values = self._agree(key, mine)
        return [Held(**values[lane]) for lane in range(self._settings.lanes)]

    def _log_skipped(self, chunk: ReadChunk) -> None:
        """Log the skipped records of a chunk, once."""
        if not chunk.faults or self._logged is None or chunk.claim.chunk in self._logged:
            return
        self._logged.add(chunk.claim.chunk)
        for fault in chunk.faults:
            _log.warning("skipped: %s", fault)

    def _needed(self, row_hashes: Sequence[RowsHash], records: Sequence[Mapping[str, Any]]) -> list[RowsHash]:
        """Return the hashes that a state needs: up to its position, and up to ends before which documents wait."""
        needed = [one for one in row_hashes if not one[3]]
        ends = [one for one in row_hashes if one[3]]
        if ends:
            ids = [from_record(record, self._settings.lane.seed).ids for record in records]
            read = {block: chunk for block, chunk, _, _ in needed}
            waits = {one.block for one in self._intake.chunks_of(ids) if one.number > read.get(one.block, -1)}
            needed += [one for one in ends if one[0] in waits]
        return needed

    def _agree(self, key: str, mine: Mapping[int, Any]) -> Mapping[int, Any]:
        """Exchange the lanes' values between ranks; an error of one lane is raised on every rank."""
        sent = {
            lane: {"error": type(value).__name__, "message": str(value)}
            if isinstance(value, Exception)
            else value
            for lane, value in mine.items()
        }
        values = self._exchange.all(key, sent)
        for lane in sorted(values):
            if "error" in values[lane]:
                if lane in mine:
                    raise mine[lane]
                kind = getattr(errors, str(values[lane]["error"]), SourceError)
                raise kind(values[lane]["message"])
        return values

    def _pack(
        self, state: RoundState, claimed: Claimed, lanes: Mapping[int, Lane], has_ended: bool
    ) -> tuple[Round, RoundState, dict[int, Arrival]]:
        """Pack the lanes; returns a round of no steps if the input has ended and no document is left."""
        settings, steps = self._settings, self._settings.steps(state.number)
        made = {
            number: lane.pack(None if has_ended else steps * settings.step_packs)
            for number, lane in lanes.items()
        }
        # The waiting documents were read in this epoch, or in the previous one if this one has just begun.
        epochs = [claimed.epoch, max(claimed.epoch - 1, 0)]
        row_hashes = self._sequence.row_hashes(claimed)
        mine = {
            number: {
                "record": to_record(carried, lanes[number].counts, settings.lane.seed, epochs),
                "targets": packs.targets.tolist(),
                **({"prints": [list(one) for one in row_hashes]} if row_hashes else {}),
            }
            for number, (packs, carried) in made.items()
        }
        values = self._agree(f"{state.number}/packed", mine)
        for lane in values.values():
            if [tuple(one) for one in lane.get("prints", ())] != row_hashes:
                raise SourceError(
                    f"{self._sequence.live_name} gives one rank other rows than another; each iterates over all rows "
                    "and takes its share, so they must be the same in the same order: seed the iterable alike"
                )
        targets = [values[lane]["targets"] for lane in range(settings.lanes)]
        records = [values[lane]["record"] for lane in range(settings.lanes)]
        if has_ended:
            steps = -(-max(map(len, targets)) // settings.step_packs)
        size = settings.step_packs
        next_ = replace(
            state,
            number=state.number + 1,
            step=state.step + steps,
            claimed=claimed,
            records=records,
            row_hashes=self._needed(row_hashes, records),
        )
        result = Round(
            step=state.step,
            num_steps=steps,
            bounds=(state.step, state.step + steps),
            packs={number: packs for number, (packs, _) in made.items()},
            targets=[sum(sum(one[s * size : (s + 1) * size]) for one in targets) for s in range(steps)],
            before=state.to_at(),
            after=next_.to_at(),
        )
        return result, next_, {number: carried for number, (_, carried) in made.items()}


# The contents of a streaming state: how far the input is claimed where a round begins, and every lane's record.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundState:
    """The state where a round begins."""

    number: int = 0
    step: int = 0
    claimed: Claimed = field(default_factory=Claimed)
    records: Sequence[Mapping[str, Any]] = ()
    """Records of all lanes."""
    row_hashes: Sequence[RowsHash] = ()
    """Hashes of iterables' rows, to recognize them when they are read again."""
    ends: Sequence[int] = ()
    """Ascending numbers of epochs after which all waiting documents are packed although more epochs follow: a run
    ended there, and its state was continued with more epochs."""

    @property
    def end(self) -> int | None:
        """The next entry of `ends`; None: the end of the loader's epochs."""
        return next((end for end in self.ends if self.claimed.epoch < end), None)

    def to_at(self) -> dict[str, Any]:
        """Return the JSON values for a state."""
        return {
            "round": self.number,
            "step": self.step,
            "claimed": asdict(self.claimed),
            "lanes": list(self.records),
            **({"prints": [list(one) for one in self.row_hashes]} if self.row_hashes else {}),
            **({ENDS: list(self.ends)} if self.ends else {}),
        }


def beginning_of(at: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with which the run of a state began."""
    return {name: at[name] for name in (ENDS,) if name in at}


def round_state_of(at: Mapping[str, Any], lanes: int) -> RoundState:
    """Read the state where a round begins from its JSON values."""
    ends = _ends_of(at)
    if at == beginning_of(at):
        empty = to_record(joined([]), Counts(), None, [0])
        return RoundState(records=[empty] * lanes, ends=ends)
    with reading_state("a loader"):
        number, step = (as_count(at[name], name, 0, MOST) for name in ("round", "step"))
        claimed, records = as_claimed(at["claimed"]), list(at["lanes"])
        row_hashes = [_as_row_hash(*one) for one in at.get("prints", ())]
    if len(records) != lanes:
        raise StateError(
            f"the state has {len(records):,} lanes, this loader {lanes:,}; load it as it was saved"
        )
    return RoundState(
        number=number, step=step, claimed=claimed, records=records, row_hashes=row_hashes, ends=ends
    )


def _as_row_hash(block: Any, chunk: Any, digest: Any, is_end: Any) -> RowsHash:
    return as_count(block, "block", 0, MOST), as_count(chunk, "chunk", 0, MOST), str(digest), bool(is_end)


def _ends_of(at: Mapping[str, Any]) -> list[int]:
    with reading_state("a loader"):
        return [as_count(end, ENDS, 1, MOST) for end in at.get(ENDS, ())]


def check_round_state(at: Mapping[str, Any], lanes: int, seed: int | None, epochs: int | None) -> None:
    """Refuse an invalid state, as far as is known without reading data."""
    state = round_state_of(at, lanes)
    for record in state.records:
        from_record(record, seed)
    ends = list(state.ends)
    if ends != sorted(set(ends)) or (ends and epochs is not None and ends[-1] >= epochs):
        raise StateError(
            f"the state says that its run had ended after {ends} epochs, and this loader has epochs={epochs}; it was "
            "changed. Load it as it was saved, or an earlier one"
        )

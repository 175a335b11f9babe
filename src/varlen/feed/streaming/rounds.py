"""Rounds: some steps' packs of every lane, prepared together out of claimed chunks; a function of data and settings.

::

    input      b0 b1 b2 b3 b4 b5 b6 ...         chunks of blocks, in the order of the epoch
    claims     0  1  2  2  0  1  ...            each to the lane that holds the least
    lane 0     waiting ─► shuffled ─► packed ─► its packs of the round's steps; the rest waits

Which rank runs a lane changes nothing: what others must know of it, they are told after every round of claims.
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
from varlen.feed.agreement import Exchange
from varlen.feed.state import ENDS, MOST
from varlen.feed.streaming.intake import (
    ChunkSequence,
    Claim,
    Claimed,
    Print,
    ReadChunk,
    Reading,
    Unread,
    as_claimed,
    by_lane,
    deal_claims,
    unread,
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
"""Claims a lane that are read before lanes are compared again."""
_SOON_BYTES = 2 << 20
"""Read before it is claimed, where all lanes are run here, so that processors don't wait while lanes are packed."""
_MOST_SOON = 64
"""Blocks."""
_OF_DOCUMENTS = ("empty_documents", "split_documents", "truncated_documents", "dropped_documents")
_FIRST_PACKS = 2
"""Packs a lane in the first round; each next round has twice as many, so that the first batch comes early."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundSettings:
    """What rounds depend on, beside the data."""

    lanes: int
    step_packs: int
    """Packs that a step takes of each lane."""
    lane: LaneSettings
    window_packs: int
    """Packs of each lane in a round, about."""
    block_bytes: int

    def steps(self, number: int) -> int:
        """Return the steps of a round, by its number."""
        packs = min(self.window_packs, _FIRST_PACKS << min(number, 32))
        return max(round(packs / self.step_packs), 1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Round:
    """The packs of some steps: those of a round, or some of them where a state stands within it."""

    step: int
    """The first."""
    num_steps: int
    bounds: tuple[int, int]
    """First step of the whole round, and the step after its last."""
    packs: Mapping[int, LanePacks]
    """Of the lanes that this process runs."""
    targets: Sequence[int]
    """Labels of each step, over all lanes."""
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    """Where the round begins, and the next one: the same on every rank."""

    @property
    def news(self) -> tuple[Ledger, Losses]:
        """What became of the tokens that left the lanes in this round, over all lanes, and what was lost of files."""
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
        """Return the steps [start, stop) alone; views of these."""
        first, last = start - self.step, stop - self.step
        some = {lane: one.between(first * step_packs, last * step_packs) for lane, one in self.packs.items()}
        return replace(self, step=start, num_steps=stop - start, packs=some, targets=self.targets[first:last])

    @property
    def num_bytes(self) -> int:
        """Memory that its tokens take."""
        return sum(
            one.tokens.nbytes + (0 if one.mask is None else one.mask.nbytes) for one in self.packs.values()
        )


def _totals(at: Mapping[str, Any]) -> tuple[dict[str, int], int]:
    """Return what all lanes have counted, and the tokens that wait in them."""
    names = [field.name for field in fields(Counts) if field.name != "losses"]
    counts = {name: sum(record["counts"][name] for record in at["lanes"]) for name in names}
    return counts, sum(record["tokens"] for record in at["lanes"])


def _losses(at: Mapping[str, Any]) -> Losses:
    """Return what all lanes have lost."""
    return total(Counts.losses_in(record["counts"]) for record in at["lanes"])


class Rounds:
    """Prepares one round after the other, for the lanes that this process runs."""

    def __init__(
        self,
        sequence: ChunkSequence,
        intake: Reading,
        exchange: Exchange,
        settings: RoundSettings,
        mine: Sequence[int],
        told: set[Chunk] | None = None,
    ) -> None:
        self._sequence, self._intake, self._exchange = sequence, intake, exchange
        self._settings, self._mine, self._told = settings, tuple(mine), told
        self._num_soon = min(_SOON_BYTES // settings.block_bytes, _MOST_SOON)

    def run(self, at: Mapping[str, Any], step: int) -> Iterator[Round]:
        """Yield the rounds from a place on, to the end of the input; of the first one, the steps that are wanted."""
        place = place_of(at, self._settings.lanes)
        carried, counts, missing = self._restored(place)
        self._sequence.check(place.prints)
        while True:
            lanes = {lane: Lane(self._settings.lane, carried[lane], counts[lane]) for lane in self._mine}
            claimed, has_ended = self._fill(place, lanes)
            whole, next_, carried = self._pack(place, claimed, lanes, has_ended)
            if whole.num_steps:
                yield from self._wanted(whole, carried, missing, step)
            elif next_.records != place.records:  # what has come since gives no pack
                yield whole
            if whole.num_steps == 0 and next_.end == place.end:
                return
            missing, place = None, next_
            counts = {lane: one.counts for lane, one in lanes.items()}

    def _restored(self, place: RoundState) -> tuple[dict[int, Arrival], dict[int, Counts], Unread | None]:
        """Return what waits, read again or with what will read it."""
        records = {lane: from_record(place.records[lane], self._settings.lane.seed) for lane in self._mine}
        counts = {lane: record.counts for lane, record in records.items()}
        waiting = {lane: record for lane, record in records.items() if len(record.ids)}
        carried = {lane: unread(record) for lane, record in records.items()}
        if not waiting:
            return carried, counts, None
        if self._intake.can_wait(waiting.values()):
            return carried, counts, Unread(self._intake, records)
        return {**carried, **self._intake.waiting(waiting)}, counts, None

    def _wanted(
        self, whole: Round, left: Mapping[int, Arrival], missing: Unread | None, step: int
    ) -> Iterator[Round]:
        """Yield a round; where documents of it weren't read, its first wanted step alone, as soon as it is there."""
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

    def _fill(self, place: RoundState, lanes: Mapping[int, Lane]) -> tuple[Claimed, bool]:
        """Claim and read until every lane holds enough; returns what is claimed, and whether the input has ended."""
        settings, claimed, sequence = self._settings, place.claimed, self._sequence.until(place.end)
        packs = settings.steps(place.number) * settings.step_packs
        held = [
            lanes[lane].held
            if lane in lanes
            else held_by(from_record(record, settings.lane.seed).lengths, settings.lane)
            for lane, record in enumerate(place.records)
        ]
        claims, tokens = (sum(r["counts"][name] for r in place.records) for name in ("claims", "tokens"))
        fruitful = claimed.epoch
        for turn in itertools.count():
            brings = max(tokens / claims, 1.0) if claims else settings.block_bytes / 8
            left = sequence.left(claimed)
            targets = self._targets(held, packs, left * brings)
            most = int(min(max(left / (2 * settings.lanes), 1), _MOST_CLAIMS * settings.lanes))
            dealt = deal_claims([one.tokens for one in held], targets, brings, most)
            if not dealt:
                return claimed, False
            taken: list[Claim] = []
            for lane in dealt:
                found, claimed = sequence.next(claimed)
                if found is None:
                    break
                taken.append(Claim(lane=lane, epoch=found[0], chunk=found[1]))
            if taken:
                before = sum(one.tokens for one in held)
                # Before the first batch nothing else is to take the processors' time.
                is_wanted = len(lanes) == settings.lanes and place.number > 0
                soon = sequence.soon(claimed, self._num_soon) if is_wanted else []
                held = self._read(f"{place.number}/{turn}", taken, lanes, soon)
                brought = sum(one.tokens for one in held) - before
                claims, tokens = claims + len(taken), tokens + brought
                fruitful = claimed.epoch if brought else fruitful
            if len(taken) < len(dealt) or claimed.epoch > fruitful + 1:  # ended, or an epoch of nothing
                break
        return claimed, True

    def _targets(self, held: Sequence[Held], packs: int, left_tokens: float) -> list[int]:
        """Return what each lane is to hold before its round can be packed."""
        settings = self._settings
        capacity, most_documents = settings.lane.passes.capacity, settings.lane.passes.max_documents
        # At first no more to choose from than is taken: the first rounds are small, so that batches come early.
        choice = packs if packs < settings.window_packs else 2 * packs
        least, most = ((packs + min(spare, choice)) * capacity for spare in (SPARE_PACKS, MOST_SPARE_PACKS))
        alike = max(most, *(one.tokens for one in held))
        if left_tokens <= 2 * sum(alike - one.tokens for one in held):
            return [alike] * len(held)  # the input ends soon: lanes are filled alike
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
        """Read what this process's lanes have claimed; returns what every lane holds then."""
        own = [claim for claim in claims if claim.lane in lanes]
        brought = by_lane(self._intake.read(own, soon), own)
        told: dict[int, Any] = {}
        for number, lane in lanes.items():
            try:
                for one in brought.get(number, []):
                    if isinstance(one, Exception):
                        raise one
                    self._tell(one)
                    # The same records are lost in every epoch, as a file that changes is refused: they count once, as
                    # with an index. What a disk or a server doesn't give may be lost in any epoch, and counts there.
                    lost = one.losses if one.claim.epoch == 0 else one.outside
                    lane.add(one.arrival, one.claim.epoch, one.path, lost)
                told[number] = lane.held.to_json()
            except Exception as error:
                told[number] = error
        heard = self._agree(key, told)
        return [Held(**heard[lane]) for lane in range(self._settings.lanes)]

    def _tell(self, one: ReadChunk) -> None:
        """Log the records of a chunk that were skipped, once."""
        if not one.faults or self._told is None or one.claim.chunk in self._told:
            return
        self._told.add(one.claim.chunk)
        for fault in one.faults:
            _log.warning("skipped: %s", fault)

    def _needed(self, prints: Sequence[Print], records: Sequence[Mapping[str, Any]]) -> list[Print]:
        """Return the hashes that a state needs: to where it stands, and to ends that documents still wait before."""
        told = [one for one in prints if not one[3]]
        ends = [one for one in prints if one[3]]
        if ends:
            ids = [from_record(record, self._settings.lane.seed).ids for record in records]
            read = {block: chunk for block, chunk, _, _ in told}
            waits = {one.block for one in self._intake.chunks_of(ids) if one.number > read.get(one.block, -1)}
            told += [one for one in ends if one[0] in waits]
        return told

    def _agree(self, key: str, told: Mapping[int, Any]) -> Mapping[int, Any]:
        """Exchange values of lanes; an error of one is raised by all."""
        said = {
            lane: {"error": type(one).__name__, "said": str(one)} if isinstance(one, Exception) else one
            for lane, one in told.items()
        }
        heard = self._exchange.all(key, said)
        for lane in sorted(heard):
            if "error" in heard[lane]:
                if lane in told:
                    raise told[lane]
                kind = getattr(errors, str(heard[lane]["error"]), SourceError)
                raise kind(heard[lane]["said"])
        return heard

    def _pack(
        self, place: RoundState, claimed: Claimed, lanes: Mapping[int, Lane], has_ended: bool
    ) -> tuple[Round, RoundState, dict[int, Arrival]]:
        """Pack the lanes; of no step where the input has ended, and nothing is left."""
        settings, steps = self._settings, self._settings.steps(place.number)
        made = {
            number: lane.pack(None if has_ended else steps * settings.step_packs)
            for number, lane in lanes.items()
        }
        # In which what waits has come, unless one has just begun.
        epochs = [claimed.epoch, max(claimed.epoch - 1, 0)]
        prints = self._sequence.prints(claimed)
        told = {
            number: {
                "record": to_record(carried, lanes[number].counts, settings.lane.seed, epochs),
                "targets": packs.targets.tolist(),
                **({"prints": [list(one) for one in prints]} if prints else {}),
            }
            for number, (packs, carried) in made.items()
        }
        heard = self._agree(f"{place.number}/packed", told)
        for lane in heard.values():
            if [tuple(one) for one in lane.get("prints", ())] != prints:
                raise SourceError(
                    f"{self._sequence.live_name} gives one rank other rows than another; each iterates over all rows "
                    "and takes its share, so they must be the same in the same order: seed the iterable alike"
                )
        each = [heard[lane]["targets"] for lane in range(settings.lanes)]
        if has_ended:
            steps = -(-max(map(len, each)) // settings.step_packs)
        size = settings.step_packs
        next_ = replace(
            place,
            number=place.number + 1,
            step=place.step + steps,
            claimed=claimed,
            records=[heard[lane]["record"] for lane in range(settings.lanes)],
            prints=self._needed(prints, [heard[lane]["record"] for lane in range(settings.lanes)]),
        )
        result = Round(
            step=place.step,
            num_steps=steps,
            bounds=(place.step, place.step + steps),
            packs={number: packs for number, (packs, _) in made.items()},
            targets=[sum(sum(one[s * size : (s + 1) * size]) for one in each) for s in range(steps)],
            before=place.to_at(),
            after=next_.to_at(),
        )
        return result, next_, {number: carried for number, (_, carried) in made.items()}


# Where a round begins: how far the input is claimed, and what waits in every lane; what a streaming state holds.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundState:
    """Where a round begins."""

    number: int = 0
    step: int = 0
    claimed: Claimed = field(default_factory=Claimed)
    records: Sequence[Mapping[str, Any]] = ()
    """Of all lanes."""
    prints: Sequence[Print] = ()
    """Of rows that are given while they are read, to tell them when they are read again."""
    ends: Sequence[int] = ()
    """Numbers of epochs after which all that waits is packed, though more epochs follow, ascending: the data ended
    there when the packs before were made, and a state of that run goes on with more epochs."""

    @property
    def end(self) -> int | None:
        """The epochs after which all that waits is packed next; None for all epochs of the loader."""
        return next((end for end in self.ends if self.claimed.epoch < end), None)

    def to_at(self) -> dict[str, Any]:
        """Return it for a state."""
        return {
            "round": self.number,
            "step": self.step,
            "claimed": asdict(self.claimed),
            "lanes": list(self.records),
            **({"prints": [list(one) for one in self.prints]} if self.prints else {}),
            **({ENDS: list(self.ends)} if self.ends else {}),
        }


def beginning_of(at: Mapping[str, Any]) -> dict[str, Any]:
    """Return the place where the run of a place began."""
    return {name: at[name] for name in (ENDS,) if name in at}


def place_of(at: Mapping[str, Any], lanes: int) -> RoundState:
    """Return where a round begins."""
    ends = _ends_of(at)
    if at == beginning_of(at):
        nothing = to_record(joined([]), Counts(), None, [0])
        return RoundState(records=[nothing] * lanes, ends=ends)
    with reading_state("a loader"):
        number, step = (as_count(at[name], name, 0, MOST) for name in ("round", "step"))
        claimed, records = as_claimed(at["claimed"]), list(at["lanes"])
        prints = [_as_print(*one) for one in at.get("prints", ())]
    if len(records) != lanes:
        raise StateError(f"the state has {len(records):,} lanes, this loader {lanes:,}")
    return RoundState(number=number, step=step, claimed=claimed, records=records, prints=prints, ends=ends)


def _as_print(block: Any, chunk: Any, told: Any, is_end: Any) -> Print:
    """Return a hash of a state."""
    return as_count(block, "block", 0, MOST), as_count(chunk, "chunk", 0, MOST), str(told), bool(is_end)


def _ends_of(at: Mapping[str, Any]) -> list[int]:
    """Return the ends of a place."""
    with reading_state("a loader"):
        return [as_count(end, ENDS, 1, MOST) for end in at.get(ENDS, ())]


def check_place(at: Mapping[str, Any], lanes: int, seed: int | None, epochs: int | None) -> None:
    """Refuse a place where no round can begin, as far as that can be told without reading."""
    place = place_of(at, lanes)
    for record in place.records:
        from_record(record, seed)
    ends = list(place.ends)
    if ends != sorted(set(ends)) or (ends and epochs is not None and ends[-1] >= epochs):
        raise StateError(
            f"the state says that its run had ended after {ends} epochs, and this loader has epochs={epochs}; it was "
            "changed. Load it as it was saved, or an earlier one"
        )

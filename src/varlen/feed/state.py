"""The state of a loader: its position, as a few numbers that are equal on every rank, and the data and settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from varlen.arguments import as_count
from varlen.errors import StateError, reading_state
from varlen.text.identity import mark_in

VERSION = 2
TOKENIZER = "tokenizer"
"""Key in `belongs_to`: tokenizers are compared by the ids that they give, whatever their names."""
PLANS = "plans"
"""Key in a state: how the steps were planned that were read and not yet taken."""
EPOCHS = "epochs"
"""Key in `belongs_to` of streaming: a loader with more epochs may resume from the state."""
ENDS = "ends"
"""Key in a position of streaming: the numbers of epochs after which a run ended before it resumed with more."""
_log = logging.getLogger(__name__)
MOST = 2**63 - 1
Mode = Literal["indexed", "streaming"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedState:
    """What the trainer has taken: whole steps, and batches of the current step."""

    step: int = 0
    """Steps before the current one."""
    micro_batch: int = 0
    """Batches of this step that every rank has taken."""
    at: Mapping[str, Any] = field(default_factory=dict)
    """Where the step, or its round of steps, begins: numbers and lists that the mode defines, equal on every rank;
    empty at the beginning of training."""


def to_json(state: FeedState, mode: Mode, belongs_to: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state for JSON."""
    return {
        "version": VERSION,
        "mode": mode,
        "step": state.step,
        "micro_batch": state.micro_batch,
        "at": dict(state.at),
        "belongs_to": dict(belongs_to),
    }


def from_json(
    state: Mapping[str, Any], mode: Mode, belongs_to: Mapping[str, Any], free: frozenset[str]
) -> FeedState:
    """Return a state that `to_json` wrote."""
    if not isinstance(state, Mapping):
        raise StateError(f"a loader's state is a mapping, got {type(state).__name__}")
    if state.get("version") != VERSION:
        raise StateError(
            f"the state has version {state.get('version')!r}, and this varlen reads version {VERSION}; load it with "
            "the varlen that saved it, or start over"
        )
    if state.get("mode") != mode:
        raise StateError(
            f"the state was saved in mode {state.get('mode')!r}, and this loader is in mode {mode!r}; make it of the "
            f"same data as then, with mode={state.get('mode')!r}, or start over"
        )
    with reading_state("a loader"):
        step, micro_batch = (as_count(state[name], name, 0, MOST) for name in ("step", "micro_batch"))
        at, was = dict(state["at"]), dict(state["belongs_to"])
    _check_same(was, belongs_to, free, micro_batch)
    at = _with_more_epochs(at, was, belongs_to)
    return FeedState(step=step, micro_batch=micro_batch, at=at)


def _with_more_epochs(at: dict[str, Any], was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return a position from which a loader with at least as many epochs resumes.

    At the end of its data a run packs all documents that wait, which it wouldn't do if more followed. The resumed run
    must pack that stretch in the same way, so the position names the epoch at which the earlier run ended.
    """
    if EPOCHS not in was or EPOCHS not in now or was[EPOCHS] == now[EPOCHS]:
        return at
    with reading_state("a loader"):
        before, after = (
            None if one is None else as_count(one, EPOCHS, 1, MOST) for one in (was[EPOCHS], now[EPOCHS])
        )
        ends = [*at.get(ENDS, ()), before]
    if before is None:
        raise StateError(
            f"the state was saved with epochs=None, without an end, and this loader ends after epochs={after:,}; "
            "pass epochs=None (in `varlen train`: run.steps without run.epochs), or start over"
        )
    if after is not None and after < before:
        raise StateError(
            f"the state was saved with epochs={before:,}, and this loader has fewer, epochs={after:,}; pass epochs="
            f"{before} or more (None for no end), or start over"
        )
    return {**at, ENDS: ends}


def check_micro_batch(state: FeedState, micro_batches: int) -> None:
    """Refuse a state by which more batches of a step were taken than it has."""
    if state.micro_batch >= micro_batches:
        raise StateError(
            f"the state says that {state.micro_batch:,} batches of step {state.step:,} were taken, which has "
            f"{micro_batches:,}; it was changed. Load it as it was saved, or an earlier one"
        )


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the one state that the ranks of a job have, from those of some or all of them.

    States are the same on every rank, so any one would do; this makes sure of it, which is worth its microseconds
    where ranks saved their own files.

    Args:
        states: of `PackedLoader.state_dict`, after the same batch.

    Raises:
        StateError: none was given, or they differ: they were saved at different batches, or by other loaders.

    >>> merge_states([{"version": 1, "step": 3}, {"version": 1, "step": 3}])
    {'version': 1, 'step': 3}
    """
    if isinstance(states, Mapping | str) or not isinstance(states, Sequence) or not states:
        raise StateError("pass a list of the states of all ranks, at least one")
    first = states[0]
    for number, state in enumerate(states):
        if not isinstance(state, Mapping):
            raise StateError(f"state {number} is {type(state).__name__}, not a mapping")
        for name in {**first, **state}:
            if name != PLANS and first.get(name) != state.get(name):
                raise StateError(
                    f"states 0 and {number} of {len(states):,} differ in {name} ({first.get(name)!r} and "
                    f"{state.get(name)!r}); save them after the same batch on every rank"
                )
    return dict(first) | _plans_of(states)


def _plans_of(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how steps were planned that some rank had read: ranks read ahead to different steps."""
    plans = [state[PLANS] for state in states if PLANS in state]
    choices: dict[str, Any] = {}
    for number, one in enumerate(plans):
        for step, choice in one["choices"].items():
            if choices.setdefault(step, choice) != choice or one["belongs_to"] != plans[0]["belongs_to"]:
                raise StateError(
                    f"state {number} has another plan of step {step} than one before; save states of one job"
                )
    return {PLANS: {**plans[0], "choices": choices}} if plans else {}


def _check_same(
    was: Mapping[str, Any], now: Mapping[str, Any], free: frozenset[str], within_step: int
) -> None:
    """Require that a state is of the same data and settings; where batches of its step were taken, of all of them."""
    own = {TOKENIZER, EPOCHS} if EPOCHS in was and EPOCHS in now else {TOKENIZER}
    names = [name for name in {**was, **now} if name not in (own if within_step else free | own)]
    others = {
        name: (repr(was.get(name)), repr(now.get(name))) for name in names if was.get(name) != now.get(name)
    }
    before, mark = mark_in(was.get(TOKENIZER)), mark_in(now.get(TOKENIZER))
    if before is not None and mark is not None and before.is_same(mark) is False:
        others[TOKENIZER] = (before.words, mark.words)
    if others:
        words = "; ".join(f"{name} was {before} and is {after}" for name, (before, after) in others.items())
        way_out = "Make the loader with those, or start over"
        if within_step and set(others) <= free:
            way_out = (
                f"These may change where a step begins, and this state is {within_step:,} batches into one: load a "
                "state that was saved at the end of a step, or make the loader with those"
            )
        raise StateError(f"the state was saved with other data or settings: {words}. {way_out}")
    if TOKENIZER not in was and mark is not None:
        _log.warning(
            "the state is of varlen 0.1.0 and doesn't say which tokenizer made its tokens; it is taken to be %s",
            mark.words,
        )

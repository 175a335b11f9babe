"""Evaluations: the loss on documents that aren't trained, by set and by length, and what is best so far."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from varlen.errors import InputError, SettingError, SourceError, StateError
from varlen.feed.loader import PackedLoader
from varlen.feed.plans import GivenPlans
from varlen.train.loaders import num_documents, open_loader
from varlen.train.parallel import Ranks
from varlen.train.settings import EvalSettings, TrainSettings
from varlen.train.step import Gradients
from varlen.train.tokens import RunTokenizer, tokenizer_of_set

EVALUATIONS: Final = "evaluations.jsonl"
"""File in a run's folder with one line an evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthLoss:
    """The loss of a set's documents of some lengths."""

    above: int
    """Tokens; documents are longer."""
    up_to: int | None
    """Tokens; documents are at most so long. None for no limit."""
    documents: int
    targets: float
    """Or the sum of their weights, where rows have weights."""
    loss: float | None
    """Mean over these targets; None without any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetLoss:
    """The loss of a set."""

    loss: float
    """Mean over its targets, in nats."""
    documents: int
    tokens: int
    targets: float
    """Or the sum of their weights, where rows have weights."""
    by_length: tuple[LengthLoss, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The losses after a step."""

    step: int
    """0 before the first."""
    loss: float
    """That decides what is best."""
    is_best: bool
    """Whether no evaluation before had a loss as low."""
    sets: Mapping[str, SetLoss]
    seconds: float

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; inf where it is too large for a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """What a run remembers of its evaluations, in every checkpoint."""

    step: int = -1
    """Of the lowest loss; -1 before the first evaluation."""
    loss: float = math.inf
    since: int = 0
    """Evaluations since the loss fell by more than `least_gain`, for patience."""
    last: int = -1
    """Step of the last evaluation; -1 before the first."""
    reference: float = math.inf
    """The loss that the next one must be lower than, by more than `least_gain`, for patience."""

    def after(self, step: int, loss: float, least_gain: float) -> Best:
        """Return what is best after another evaluation."""
        best = replace(self, step=step, loss=loss) if loss < self.loss else self
        if loss < self.reference - (least_gain if self.reference < math.inf else 0.0):
            return replace(best, since=0, last=step, reference=loss)
        return replace(best, since=self.since + 1, last=step)

    def to_json(self) -> dict[str, Any]:
        """Return it for a manifest; losses of inf are left out."""
        return {name: value for name, value in asdict(self).items() if value != math.inf}

    @classmethod
    def from_json(cls, found: Any, *, is_same: bool = True) -> Best:
        """Return what a manifest holds; the initial state for none, and for losses of other documents."""
        if found is None or not is_same:
            return cls()
        try:
            loss = float(found.get("loss", math.inf))
            reference = float(found.get("reference", loss))  # older manifests have one loss for both
            numbers = {name: int(found[name]) for name in ("step", "since", "last")}
            return cls(loss=loss, reference=reference, **numbers)
        except (TypeError, KeyError, ValueError, AttributeError):
            raise StateError(f"a checkpoint's `evaluations` are {found!r:.60}, which no run wrote") from None


class Evaluator:
    """The sets of a run, opened once and read from the beginning by every evaluation."""

    def __init__(
        self,
        settings: TrainSettings,
        config: Any,
        tokenizer: RunTokenizer,
        ranks: Ranks,
        plans: GivenPlans | None,
        stack: ExitStack,
    ) -> None:
        assert settings.eval is not None, "such a run has sets"
        self._settings, self._ranks = settings.eval, ranks
        self._capacity = settings.data.capacity
        self._sets: dict[str, tuple[PackedLoader, Mapping[str, Any]]] = {}
        for name in settings.eval.sets:
            changes: dict[str, Any] = {
                "source": settings.eval.source_of(name),
                "mixture": {},
                "shuffle": False,
            }
            data = replace(settings.data, **changes, worker="thread")  # type: ignore[call-arg] # of the loader
            asked = replace(settings, data=data)
            try:
                of_set = tokenizer_of_set(name, data, tokenizer)
                loader = stack.enter_context(open_loader(asked, config, of_set, ranks, plans, epochs=1))
                self._sets[name] = (loader, loader.state_dict())
                self._check(name)
            except InputError as error:
                table = f"eval.sets.{name}"
                raise SettingError(str(error) if table in str(error) else f"{table}: {error}") from error

    def _check(self, name: str) -> None:
        """Refuse a set without targets before anything is trained; all ranks read alike."""
        loader, begin = self._sets[name]
        if not any(batch.step_num_targets for batch in loader):
            raise SourceError(
                f"eval.sets.{name} ({self._settings.sets[name]}) has no target: no document of two tokens or more, "
                "or no labels; name a set with labels"
            )
        loader.load_state_dict(begin)

    def documents(self) -> dict[str, int | None]:
        """Return the number of documents of each set; None where it isn't known before they are read."""
        return {name: num_documents(loader) for name, (loader, _) in self._sets.items()}

    def is_due(self, step: int, best: Best, *, is_last: bool) -> bool:
        """Return whether there is an evaluation after a step, or before the first."""
        every, is_done = self._settings.every, best.last == step
        is_due = self._settings.at_start if step == 0 else is_last or (every > 0 and step % every == 0)
        return is_due and not is_done

    def evaluate(self, step: int, gradients: Gradients[Any], best: Best) -> tuple[Evaluation, Best]:
        """Evaluate all sets; all ranks call it together."""
        begun = time.perf_counter()
        sets = {name: self._loss_of(name, gradients) for name in self._sets}
        monitored = [sets[self._settings.monitor]] if self._settings.monitor else list(sets.values())
        loss = math.fsum(each.loss * each.targets for each in monitored) / math.fsum(
            each.targets for each in monitored
        )
        now = best.after(step, loss, self._settings.least_gain)
        took_s = time.perf_counter() - begun
        return Evaluation(step=step, loss=loss, is_best=now.step == step, sets=sets, seconds=took_s), now

    def is_over(self, best: Best) -> bool:
        """Return whether the loss hasn't fallen for as long as settings allow."""
        return self._settings.patience is not None and best.since >= self._settings.patience

    def _loss_of(self, name: str, gradients: Gradients[Any]) -> SetLoss:
        """Return the loss of a set, from its first document on."""
        loader, begin = self._sets[name]
        loader.load_state_dict(begin)
        edges = self._settings.lengths
        counted = np.zeros((4, len(edges) + 1))  # documents, tokens, sums of losses and of weights, by length
        for batch in _packs(loader, self._settings, self._capacity):
            found = gradients.evaluate(batch)
            bins = np.array([bisect.bisect_left(edges, length) for length in found.lengths], np.int64)
            is_counted = found.weights > 0
            for row, values in enumerate((is_counted, found.lengths * is_counted, found.sums, found.weights)):
                np.add.at(counted[row], bins, values)
        every = self._ranks.gather(counted.ravel().tolist()).sum(dim=0).reshape(4, -1).tolist()
        documents, tokens, sums, weights = every
        return SetLoss(
            loss=math.fsum(sums) / math.fsum(weights),
            documents=int(sum(documents)),
            tokens=int(sum(tokens)),
            targets=sum(weights),
            by_length=tuple(
                LengthLoss(
                    above=above or 0,
                    up_to=up_to,
                    documents=int(documents[each]),
                    targets=weights[each],
                    loss=sums[each] / weights[each] if weights[each] else None,
                )
                for each, (above, up_to) in enumerate(pairwise((0, *edges, None)))
            ),
        )


def _packs(loader: PackedLoader, settings: EvalSettings, capacity: int) -> Iterator[Any]:
    """Yield the batches of a set, as many on every rank: all, or those of about `tokens`."""
    steps = math.inf
    if settings.tokens is not None:
        steps = max(math.ceil(settings.tokens / (capacity * loader.settings.global_batch_size)), 1)
    for number, batch in enumerate(loader):
        if number >= steps * loader.micro_batches:
            return
        yield batch

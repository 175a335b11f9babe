"""Collating: `vl.collate` beside the flattening collators, and beside a plain copy of as many bytes.

Section `collating`, on one to 64 packs of 8,192 tokens, log-normal and short documents, as flat arrays, Arrow and
lists. The flattening collator's best case is measured, not assumed: a sweep over document lengths, batch sizes and
input forms finds where it is fastest with an output equal to varlen's, and the target is judged there too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import Any

import numpy as np

import varlen as vl
from benchmarks import checks
from benchmarks.inputs import CAPACITY, Documents, lognormal_lengths
from benchmarks.peers import transformers, trl
from benchmarks.rows import Race, Row, Step
from benchmarks.stopwatch import Call, race

ROUNDS = 15
FROM_ARRAYS = 150.0
FROM_LISTS = 10.0
OF_COPY_RATE = 1 / 3
"""What the issue asks for: times as fast as the collator's best case, and share of the memory-copy rate."""


@dataclass(frozen=True)
class Batch:
    """Documents that fill a few packs, and the packing that puts them all into one flat batch."""

    name: str
    documents: Documents
    packing: vl.Packing

    @classmethod
    @cache
    def of(cls, kind: str, num_packs: int) -> Batch:
        """Draw documents that fill about so many packs of 8,192 tokens."""
        budget = num_packs * CAPACITY
        many = (
            lognormal_lengths(budget // 100, seed=1) if kind == "log-normal" else np.full(budget // 200, 200)
        )
        lengths = many[np.cumsum(many) <= budget]
        packing = vl.pack(lengths, capacity=CAPACITY)
        return cls(f"{kind} documents", Documents.draw(lengths), packing)

    def packed(self, form: str) -> list:
        """Return the documents in the order in which they stand in the packs, every time as objects of their own.

        A form is "lists", "numpy" (int64 arrays) or "torch".
        """
        ids = self.packing.document_ids.tolist()
        if form == "lists":
            return [list(self.documents.lists[i]) for i in ids]
        arrays = [self.documents.arrays[i].astype(np.int64) for i in ids]
        if form == "torch":
            import torch

            return [torch.from_numpy(array) for array in arrays]
        return arrays


SMALL, MEDIUM, LARGE = 1, 8, 64
SIZES = (SMALL, MEDIUM, LARGE)
KINDS = ("log-normal", "short")
SWEEPS = 5
_FORMS = {"flat": "flat arrays", "arrow": "Arrow", "lists": "lists"}
_TENSORS = "from flat arrays, then to_torch"


def steps() -> list[Step]:
    return [
        Step("the flattening collator's best cases", _race_best_cases),
        *(
            Step(f"from {of}", partial(_race_collator, "log-normal", MEDIUM, form))
            for form, of in _FORMS.items()
        ),
        Step("its bare minimum, and what a Trainer asks for", _race_other_settings),
        Step("TRL's padding-free collator", _race_trl),
        Step("copying as many bytes", _race_copies),
    ]


def _ours(batch: Batch, form: str, layout: str = "flat", out: Any = None) -> Callable[[], vl.PackedBatch]:
    documents = batch.documents
    given = {
        "flat": (documents.tokens, documents.offsets),
        "arrow": documents.arrow,
        "lists": documents.lists,
    }[form]
    options = {} if out is None else {"out": out}
    return lambda: vl.collate(given, batch.packing, layout=layout, **options)


def _theirs(batch: Batch, form: str, **settings: Any) -> Callable[[], Any]:
    """Return the collator's call on the same documents, in the order in which they are packed."""
    return transformers.collator(batch.packed(form), **settings)


@cache
def _sweep() -> dict[tuple[str, int, str], float]:
    """Return the collator's tokens per second on every batch from every input form, measured in turns."""
    places = [(kind, size, form) for kind in KINDS for size in SIZES for form in transformers.INPUTS]
    calls = {place: _theirs(Batch.of(*place[:2]), place[2], return_tensors="np") for place in places}
    times: dict[tuple[str, int, str], list[float]] = {place: [] for place in places}
    for _ in range(SWEEPS):
        for place, call in calls.items():
            start = time.process_time()
            call()
            times[place].append(time.process_time() - start)
    return {
        place: Batch.of(*place[:2]).documents.num_tokens / median(taken) for place, taken in times.items()
    }


def _best_form(kind: str, size: int) -> str:
    return max(transformers.INPUTS, key=lambda form: _sweep()[kind, size, form])


def _race_best_cases() -> list[Row]:
    """Race on the documents which the collator handles fastest, at each batch size.

    One pack a call carries no target: there most of varlen's time is the fixed cost of a call in Python.
    """
    rows: list[Row] = []
    for size in SIZES:
        kind, _, _ = max((place for place in _sweep() if place[1] == size), key=lambda place: _sweep()[place])
        note = "the collator's fastest documents of this batch size"
        rows += _race_collator(kind, size, "flat", note, is_targeted=size > SMALL)
    return rows


def _race_collator(kind: str, size: int, form: str, note: str = "", is_targeted: bool = True) -> list[Row]:
    """Race `vl.collate` from one input form against the collator from its fastest.

    From lists both get the same lists: there the target is lower, since reading a list of ints is most of
    the work.
    """
    batch = Batch.of(kind, size)
    best = "lists" if form == "lists" else _best_form(kind, size)
    ours, theirs = _ours(batch, form), _theirs(batch, best, return_tensors="np")
    checks.same_batch(ours(), theirs())
    target = (FROM_LISTS if form == "lists" else FROM_ARRAYS) if is_targeted else None
    settings = f'from {best}, return_tensors="np", positions, segments and boundaries'
    peer = (transformers.NAME, settings, theirs)
    return [race_batch(batch, f"from {_FORMS[form]}", ("vl.collate", ours), peer, target, note)]


def _race_other_settings() -> list[Row]:
    """Race the collator at the least it can be asked for, and at what a Trainer asks it for."""
    batch = Batch.of("log-normal", MEDIUM)
    least = _theirs(batch, "lists", return_tensors="np", complete=False)
    trainer = _theirs(batch, "lists", return_tensors="pt")
    ours, name = _ours(batch, "flat"), transformers.NAME
    ours_to_torch = _to_torch(ours)
    checks.same_batch(ours_to_torch(), trainer())
    only_ids = (name, "ids and labels alone, from lists", least)
    as_a_trainer = (name, 'from lists, return_tensors="pt"', trainer)
    more, tensors = (
        "varlen writes positions, segments and boundaries besides",
        "int64 tensors, as a Trainer gets them",
    )
    return [
        race_batch(batch, "from flat arrays", ("vl.collate", ours), only_ids, None, more),
        race_batch(batch, _TENSORS, ("vl.collate", ours_to_torch), as_a_trainer, None, tensors),
    ]


def _to_torch(collate: Callable[[], vl.PackedBatch]) -> Callable[[], vl.PackedBatch]:
    return lambda: collate().to_torch()


def _race_trl() -> list[Row]:
    """Race TRL's padding-free collator from int64 arrays, which it takes fastest; both end in tensors."""
    batch = Batch.of("log-normal", MEDIUM)
    theirs, ours = trl.collator(batch.packed("numpy")), _to_torch(_ours(batch, "flat"))
    checks.same_batch(ours(), theirs())
    peer = (trl.COLLATOR, "from int64 arrays, one a document", theirs)
    return [race_batch(batch, _TENSORS, ("vl.collate", ours), peer, None, "")]


def _race_copies() -> list[Row]:
    """Race `vl.collate` into ready buffers against `np.copyto` of as many bytes into ready arrays."""
    rows: list[Row] = []
    for size in (MEDIUM, LARGE, 8 * LARGE):
        batch = Batch.of("log-normal", size)
        out = _ours(batch, "flat", "rows")()
        ours = _ours(batch, "flat", "rows", out)
        written = (out.input_ids, out.labels, out.position_ids, out.segment_ids)
        sources = [np.ones_like(array) for array in written]
        targets = [np.zeros_like(array) for array in written]

        def copy(sources: list = sources, targets: list = targets) -> None:
            for source, target in zip(sources, targets):
                np.copyto(target, source)

        megabytes = sum(array.nbytes for array in written) / 1e6
        note = f"{megabytes:,.1f} MB a call"
        what = "from flat arrays into rows in the caller's buffers"
        peer = ("np.copyto", "the four arrays copied into ready arrays", copy)
        rows.append(race_batch(batch, what, ("vl.collate", ours), peer, OF_COPY_RATE, note))
    return rows


def race_batch(
    batch: Batch,
    what: str,
    ours: tuple[str, Call],
    theirs: tuple[str, str, Call],
    target: float | None,
    note: str,
) -> Race:
    """Time two calls on a batch that were checked already."""
    num_tokens = batch.documents.num_tokens
    what = f"{len(batch.documents.lengths):,} {batch.name}, {num_tokens:,} tokens a call, {what}"
    return race(what, ours, theirs, rounds=ROUNDS, tokens=num_tokens, target=target, note=note)


SECTIONS = {"collating": steps}

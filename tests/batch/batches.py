"""Documents to collate, and a plain oracle of what a PackedBatch must hold, written apart from varlen."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tests.support.packings import METHODS, POLICIES, packs_of, rounded

import varlen as vl
from varlen.batch.packed import PackedBatch
from varlen.types import Method, Overlong, Packing

IGNORE = -100
PADDING_SEGMENT = 128


@dataclass(frozen=True)
class Case:
    """One call of vl.collate: lists of everything, from which tests make other forms."""

    documents: list[list[int]]
    packing: Packing
    pack_ids: list[int] | None = None
    labels: list[list[int]] | None = None
    loss_mask: list[list[int]] | None = None
    columns: dict[str, list[list[float]]] = field(default_factory=dict)
    column_pads: dict[str, float] = field(default_factory=dict)
    token_labels: list[list[int]] | None = None
    document_labels: list[int] | None = None
    pad_id: int = 0
    pad_to_multiple_of: int = 1
    layout: str = "rows"

    def collate(self, **changes: Any) -> PackedBatch:
        given = {
            "documents": self.documents,
            "packing": self.packing,
            "pack_ids": self.pack_ids,
            "labels": self.labels,
            "loss_mask": self.loss_mask,
            "columns": self.columns,
            "column_pads": self.column_pads,
            "token_labels": self.token_labels,
            "document_labels": None
            if self.document_labels is None
            else np.array(self.document_labels, np.int64),
            "pad_id": self.pad_id,
            "pad_to_multiple_of": self.pad_to_multiple_of,
            "layout": self.layout,
            "shift_labels": True,
        }
        return vl.collate(**{**given, **changes})


def tokens_like(lengths: list[int], first: int = 1) -> list[list[int]]:
    documents = []
    for length in lengths:
        documents.append(list(range(first, first + length)))
        first += length
    return documents


@st.composite
def cases(draw: st.DrawFn, layouts: tuple[str, ...] = ("rows", "flat")) -> Case:
    """Calls that must succeed, in both layouts, with any packs in any order."""
    multiple = draw(st.sampled_from([1, 1, 2, 4]))
    capacity = multiple * draw(st.integers(1, 12))
    method: Method = draw(st.sampled_from(METHODS))
    overlong: Overlong = draw(st.sampled_from(POLICIES))
    longest = capacity if overlong == "error" and method != "wrapped" else 2 * capacity + 1
    lengths = draw(st.lists(st.integers(0, longest), max_size=10))
    groups = None
    if method != "wrapped" and overlong == "drop" and draw(st.booleans()):
        groups = [draw(st.integers(0, 3)) for _ in lengths]
    packing = vl.pack(
        lengths,
        capacity,
        method,
        overlong,
        document_multiple_of=multiple,
        groups=groups,
        seed=draw(st.sampled_from([None, 3])),
    )
    layout = draw(st.sampled_from(layouts))
    dividing = [number for number in (1, 2, 3, 8) if layout == "flat" or capacity % number == 0]
    pack_ids = None
    if packing.num_packs and draw(st.booleans()):
        pack_ids = draw(st.lists(st.integers(0, packing.num_packs - 1), max_size=5))
    documents = tokens_like(lengths, draw(st.sampled_from([0, 1, 50_000])))
    values = st.sampled_from([IGNORE, IGNORE, 0, 7, 90])
    labels = [[draw(values) for _ in part] for part in documents] if draw(st.booleans()) else None
    mask = [[draw(st.integers(0, 1)) for _ in part] for part in documents] if draw(st.booleans()) else None
    weighted = any(lengths) and draw(st.booleans())
    columns = {"weight": [[token / 8 for token in part] for part in documents]} if weighted else {}
    classes = [[(token * 7) % 5 for token in part] for part in documents] if draw(st.booleans()) else None
    whole = overlong != "split" and method != "wrapped" and draw(st.booleans())
    return Case(
        token_labels=classes,
        document_labels=[3 * number for number in range(len(documents))] if whole else None,
        documents=documents,
        packing=packing,
        pack_ids=pack_ids,
        labels=labels,
        loss_mask=mask,
        columns=columns,
        column_pads=draw(st.sampled_from([{}, {"weight": -0.5}])) if columns else {},
        pad_id=draw(st.sampled_from([0, 1, 99])),
        pad_to_multiple_of=draw(st.sampled_from(dividing)),
        layout=layout,
    )


class Oracle:
    """Lays a case out position by position, as plainly as can be."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.multiple = case.packing.document_multiple_of
        self.rows: list[list[tuple[int, ...]]] = [[]]
        self.segments: dict[str, list[int]] = {name: [] for name in ("ids", "starts", "lengths", "targets")}
        self.logical, self.physical, self.offsets = [0], [0], [0]
        self.given = dict(case.columns)
        self.pads = dict(case.column_pads)
        if case.token_labels is not None:
            self.given["token_labels"], self.pads["token_labels"] = case.token_labels, IGNORE
        self.columns: dict[str, list[Any]] = {name: [] for name in self.given}

    def pad(self, count: int, *, bounds: bool) -> None:
        """Write padding, with boundaries of its own unless it fills up a slot."""
        for _ in range(count):
            self.rows[-1].append((self.case.pad_id, IGNORE, 0, -1))
            for name, column in self.columns.items():
                column.append(self.pads.get(name, 0))
        while bounds and count:
            part = min(count, max(self.multiple, PADDING_SEGMENT // self.multiple * self.multiple))
            self.logical.append(self.logical[-1] + part)
            self.physical.append(self.physical[-1] + part)
            count -= part

    def place(self, document: int, start: int, stop: int, number: int) -> None:
        """Write one piece and the rest of its slot."""
        case, targets, slot = self.case, 0, rounded(stop - start, self.multiple)
        for place, at in enumerate(range(start, stop)):
            label = (case.labels or case.documents)[document][at]
            if place == 0 or (case.loss_mask is not None and not case.loss_mask[document][at]):
                label = IGNORE
            targets += label != IGNORE
            self.rows[-1].append((case.documents[document][at], label, place, number))
            for name, column in self.columns.items():
                column.append(self.given[name][document][at])
        for name, value in zip(self.segments, (document, start, stop - start, targets)):
            self.segments[name].append(value)
        self.logical.append(self.logical[-1] + stop - start)
        self.physical.append(self.physical[-1] + slot)
        self.pad(slot - (stop - start), bounds=False)

    def lay_out(self, wanted: list[int]) -> None:
        """Write the packs wanted and the padding after them."""
        case, packs = self.case, packs_of(self.case.packing)
        for turn, pack in enumerate(wanted):
            if case.layout == "rows" and turn:
                self.rows.append([])
            first = 0 if case.layout == "rows" else len(self.segments["ids"])
            for number, piece in enumerate(packs[pack], first):
                self.place(*piece, number)
            if case.layout == "rows":
                self.pad(case.packing.capacity - len(self.rows[-1]), bounds=True)
            self.offsets.append(len(self.segments["ids"]))
        if case.layout == "flat":
            width = len(self.rows[-1])
            together = int(np.lcm(self.multiple, case.pad_to_multiple_of))
            self.pad(rounded(width, together) - width, bounds=True)
        elif not wanted:
            self.rows = []


def expected(case: Case) -> dict[str, Any]:
    packing = case.packing
    wanted = list(range(packing.num_packs)) if case.pack_ids is None else case.pack_ids
    page = Oracle(case)
    page.lay_out(wanted)
    segments = page.segments
    shape = (len(page.rows), packing.capacity if case.layout == "rows" else len(page.rows[0]))

    def array(index: int) -> np.ndarray:
        flat = [entry[index] for row in page.rows for entry in row]
        return np.array(flat, np.int32).reshape(shape)

    input_ids, labels, position_ids, segment_ids = (array(index) for index in range(4))
    shifted = np.full(shape, IGNORE, np.int32)
    shifted[:, :-1] = labels[:, 1:]
    targets = int((labels != IGNORE).sum())
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": position_ids,
        "segment_ids": segment_ids,
        "shift_labels": shifted,
        "cu_seqlens": np.array(page.logical, np.int32),
        "cu_seqlens_padded": None if page.logical == page.physical else np.array(page.physical, np.int32),
        "max_seqlen": max(segments["lengths"], default=0),
        "document_ids": np.array(segments["ids"], np.int64),
        "document_starts": np.array(segments["starts"], np.int32),
        "document_lengths": np.array(segments["lengths"], np.int32),
        "document_targets": np.array(segments["targets"], np.int32),
        "pack_ids": np.array(wanted, np.int64),
        "pack_offsets": np.array(page.offsets, np.int64),
        "layout": case.layout,
        "pad_id": case.pad_id,
        "max_token_id": int(input_ids[segment_ids >= 0].max(initial=-1)),
        "num_targets": targets,
        "step_num_targets": targets,
        "dp_world_size": 1,
        "document_groups": None if packing.groups is None else packing.groups[segments["ids"]],
        "document_labels": None
        if case.document_labels is None
        else np.array([case.document_labels[document] for document in segments["ids"]], np.int64),
        "plan": None,
        "columns": {
            name: np.array(values, np.int32 if name == "token_labels" else np.float64).reshape(shape)
            for name, values in page.columns.items()
        },
    }


def check_batch(batch: PackedBatch, fields: dict[str, Any]) -> None:
    """Every field of a batch has the value, the shape and the dtype that it must have."""
    assert set(fields) == set(PackedBatch.__dataclass_fields__)
    for name, value in fields.items():
        check_field(name, getattr(batch, name), value)


def check_field(name: str, seen: Any, value: Any) -> None:
    if isinstance(value, dict):
        assert list(seen) == list(value), name
        for key in value:
            check_field(f"{name}[{key!r}]", seen[key], value[key])
    elif isinstance(value, np.ndarray):
        assert isinstance(seen, np.ndarray), name
        assert (seen.dtype, seen.shape) == (value.dtype, value.shape), name
        assert seen.tolist() == value.tolist(), name
    else:
        assert type(seen) is type(value), name
        assert seen == value, name


def same_batch(first: PackedBatch, second: PackedBatch) -> None:
    check_batch(first, {name: getattr(second, name) for name in PackedBatch.__dataclass_fields__})

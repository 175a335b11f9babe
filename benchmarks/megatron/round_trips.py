"""Round trips with what megatron-bridge 0.3.1's own code writes, reads and collates: equal, or the run fails.

PyPI has 0.3.0 and 0.3.1 alone, which speak the dialect "0.4"; code of 0.5 and 0.6 can't be run here. Values that they
gave are recorded in the tests.
"""

from __future__ import annotations

import json
import pickle
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.checks import WrongResultError
from benchmarks.megatron.chats import EOS, Chats
from benchmarks.megatron.offline import tokens_of
from benchmarks.megatron.rows import RELEASE, lists
from benchmarks.peers import megatron_bridge, megatron_published
from benchmarks.rows import Limit, Row, Step
from varlen.adapters import megatron

PACK = 512
COUNT = 1500
NAMES = ("input_ids", "loss_mask", "seq_start_id")
_NUMPY_1, _NUMPY_2 = b"cnumpy.core.multiarray\n", b"cnumpy._core.multiarray\n"
_NOTE = "0.5 and 0.6 aren't on PyPI, so their own code isn't run here"
Rows = list[dict[str, Any]]


@dataclass
class Comparison:
    """How many values two sides gave, and how many of them differ."""

    what: str
    values: int = 0
    differing: int = 0
    first: str = ""

    def equal(self, ours: Any, theirs: Any, name: str) -> None:
        """Compare arrays, lists, numbers or tensors; another shape or type counts as one that differs."""
        mine, other = np.asarray(ours), np.asarray(theirs)
        is_comparable = mine.shape == other.shape and _kind(mine) == _kind(other)
        wrong = int(np.count_nonzero(mine != other)) if is_comparable else 1
        self.values += max(other.size, 1)
        self.differing += wrong
        if wrong and not self.first:
            self.first = name

    def rows(self) -> list[Row]:
        """Return the figure."""
        if self.differing or not self.values:
            raise WrongResultError(
                f"{self.what}: {self.differing:,} of {self.values:,} values differ, first {self.first or 'none'}"
            )
        what = f"{self.what}: differing of {self.values:,} values"
        return [Limit(what=what, value=self.differing, unit="values", limit=0, note=_NOTE)]


def steps() -> list[Step]:
    return [
        Step(f"round trip, prepared by {RELEASE}, pad_seq_to_mult={m}", partial(prepared, m)) for m in (1, 8)
    ] + [
        Step("round trip, packed by varlen as the release would", packed_alike),
        Step(f"round trip, packed by varlen and read by {RELEASE}", read_back),
        Step("round trip, pickles of NumPy 1 and 2", pickles),
    ]


def prepared(multiple: int) -> list[Row]:
    """Let the release prepare a training and a validation file; read, replay and make them again."""
    found = Comparison(
        f"{RELEASE} prepares .npy and metadata, varlen reads and replays, pad_seq_to_mult={multiple}"
    )
    release = megatron_bridge.package()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        metadata = folder / f"{PACK}_metadata.jsonl"
        for seed, split in enumerate(("training", "validation")):
            text, packed = folder / f"{split}.jsonl", folder / f"{split}_{PACK}.npy"
            write_instructions(text, COUNT >> seed, seed)
            settings = {
                "max_seq_length": PACK,
                "seed": seed,
                "dataset_kwargs": {"memmap_workers": 1},
                "pad_seq_to_mult": multiple,
            }
            numbers = megatron_bridge.Numbers(EOS)
            np.random.seed(seed)  # noqa: NPY002 - the generator that the release draws from
            release.packed_sequence.prepare_packed_sequence_data(
                text, packed, metadata, PACK, numbers, **settings
            )
            theirs = list(np.load(packed, allow_pickle=True))
            compare_rows(found, megatron.open_packed(packed), theirs)
            documents = release.packed_sequence.tokenize_dataset(text, numbers, **settings)
            _compare_replay(found, list(documents), theirs, seed)
            _compare_functions(found, documents, theirs, json.loads(metadata.read_text())[-1], seed)
        written = json.loads(metadata.read_text())
        found.equal(len(megatron.read_metadata(metadata, pack_size=PACK)), 2, "metadata, two runs")
        for ours, theirs in zip(megatron.read_metadata(metadata), written):
            _compare_entries(found, dict(ours), theirs)
    return found.rows()


def write_instructions(path: Path, count: int, seed: int) -> None:
    """Write documents as the release reads them before it packs: an input and an output, numbers for words."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, PACK // 5, (count, 2))
    lines = (
        json.dumps({"input": _words(rng, size), "output": _words(rng, other)})
        for size, other in sizes.tolist()
    )
    path.write_text("\n".join(lines) + "\n")


def _words(rng: np.random.Generator, count: int) -> str:
    return " ".join(map(str, rng.integers(EOS + 1, 50_000, count).tolist()))


def _compare_replay(found: Comparison, documents: Rows, theirs: Rows, seed: int) -> None:
    """Make the release's rows from lengths and its seed alone."""
    positions = [len(document["input_ids"]) - 1 for document in documents]
    packing = megatron.replay_packs(positions, PACK, seed)
    found.equal(packing.num_packs, len(theirs), "replay, packs")
    for ids, row in zip(packing.to_lists(), theirs):
        pieces = [documents[number] for number in ids]
        tokens = [token for piece in pieces for token in piece["input_ids"]]
        mask = [
            place >= piece["answer_start_idx"] - 1
            for piece in pieces
            for place in range(len(piece["input_ids"]))
        ]
        starts = np.cumsum([0, *(len(piece["input_ids"]) for piece in pieces)])[:-1]
        for name, values in zip(NAMES, (tokens, mask, starts)):
            found.equal(values, row[name], f"replay, {name}")


def _compare_functions(
    found: Comparison, documents: Any, theirs: Rows, entry: dict[str, Any], seed: int
) -> None:
    np.random.seed(seed)  # noqa: NPY002
    sequences, histogram = megatron.create_hist(documents, PACK)
    packs, ours = megatron.create_packing_strategy(histogram, PACK, megatron_bridge.ALGORITHM)
    rows = megatron.fill_packing_strategy(packs, sequences, PACK, EOS)
    found.equal(len(rows), len(theirs), "functions, packs")
    for row, other in zip(rows, theirs):
        for name in NAMES:
            found.equal(row[name], other[name], f"functions, {name}")
    _compare_entries(found, ours, entry)


def _compare_entries(found: Comparison, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    found.equal(list(ours), list(theirs), "metadata, keys")
    for name, value in theirs.items():
        found.equal(ours.get(name), value, f"metadata, {name}")


def packed_alike() -> list[Row]:
    """Pack chats from a token store as the release packs them from memory: the same rows, in a file of its schema."""
    found = Comparison(
        f"pack_for_megatron at a seed writes the rows of {RELEASE}, in the schema of later ones"
    )
    chats = Chats.draw(COUNT, PACK)
    release = megatron_bridge.package().packing_utils
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = megatron.MegatronPackSettings(
            pack_size=PACK, algorithm="first_fit_shuffle", seed=3, pad_id=EOS
        )
        megatron.pack_for_megatron(tokens_of(COUNT, folder, PACK), folder / "packed", settings)
        path = folder / "packed" / f"training_{PACK}.idx.parquet"
        np.random.seed(3)  # noqa: NPY002
        sequences, histogram = release.create_hist(chats.examples(), PACK)
        packs, entry = release.create_packing_strategy(histogram, PACK, megatron_bridge.ALGORITHM)
        theirs = release.fill_packing_strategy(packs, sequences, PACK, EOS)
        compare_rows(found, megatron.open_packed(path), theirs)
        (ours,) = json.loads((folder / "packed" / f"{PACK}_metadata.jsonl").read_text())
        _compare_entries(found, ours, entry)
        other = folder / "other.idx.parquet"
        megatron_published.write(theirs, other)
        compare_rows(found, megatron.open_packed(other), theirs)
        compare_rows(found, megatron.open_packed(path), lists(path))
        schema, wanted = pq.read_schema(path), pq.read_schema(other)
        for column in NAMES:
            found.equal(str(schema.field(column).type), str(wanted.field(column).type), f"schema, {column}")
    return found.rows()


def read_back() -> list[Row]:
    """Pack with varlen, hand the rows to the release's data set as `.npy`, and compare what both collate."""
    found = Comparison(f"rows that varlen packed, batches of {RELEASE}'s GPTSFTPackedDataset and of varlen's")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = tokens_of(COUNT, folder, PACK)
        for multiple in (1, 8):
            out = folder / f"packed{multiple}"
            settings = megatron.MegatronPackSettings(pack_size=PACK, multiple=multiple, pad_id=EOS)
            megatron.pack_for_megatron(store, out, settings)
            path, packed = out / f"training_{PACK}.idx.parquet", out / "packed.npy"
            np.save(packed, lists(path))  # type: ignore[arg-type]  # as the release itself saves them
            for more in (
                {},
                {"pad_to_max_length": True},
                {"pad_to_max_length": True, "pad_cu_seqlens": True},
                {"answer_only_loss": False},
                {"max_num_samples": 20, "seed": 5},
            ):
                _compare_batches(found, path, packed, out / f"{PACK}_metadata.jsonl", multiple, more)
    return found.rows()


def _compare_batches(
    found: Comparison, path: Path, packed: Path, metadata: Path, multiple: int, more: dict[str, Any]
) -> None:
    """Compare batches of one and of several rows, one that only completes a batch among them."""
    theirs = megatron_bridge.dataset(
        packed, seq_length=PACK, eos_id=EOS, metadata_path=metadata, pad_seq_to_mult=multiple, **more
    )
    ours = megatron.GPTSFTPackedDataset(
        path,
        megatron_bridge.Numbers(EOS),
        pad_seq_to_mult=multiple,
        pack_metadata_file_path=metadata,
        max_seq_length=PACK,
        dialect="0.4",
        compatible=True,
        **more,
    )
    found.equal(len(ours), len(theirs), "data set, length")
    for numbers in ([0], [1, 2, 3], [len(theirs) - 1, -1]):
        batch = ours.collate_fn(ours.__getitems__(numbers))
        other = theirs.collate_fn([theirs[number] for number in numbers])
        found.equal(list(batch), list(other), f"{more}: keys")
        for name, value in other.items():
            found.equal(str(getattr(batch.get(name), "dtype", "")), str(getattr(value, "dtype", "")), name)
            found.equal(
                batch.get(name), value, f"{more}, pad_seq_to_mult={multiple}: {name} of rows {numbers}"
            )


def pickles() -> list[Row]:
    found = Comparison(".npy files of NumPy 1 and 2, read without unpickling")
    rows = [
        {"input_ids": [5, 70_000, 6, EOS], "loss_mask": [False, True, True, False], "seq_start_id": [0]},
        {"input_ids": [7, EOS, 8, 9, EOS], "loss_mask": [1, 0, 1, 1, 0], "seq_start_id": [0, 2]},
    ]
    array = np.empty(len(rows), object)
    array[:] = rows
    with tempfile.TemporaryDirectory() as name:
        for protocol in (2, 3, 4, 5):
            content = pickle.dumps(array, protocol)
            spellings = {"numpy 2": content}
            if protocol < 4:  # later ones say how long a name is
                spellings["numpy 1"] = content.replace(_NUMPY_2, _NUMPY_1)
                if spellings["numpy 1"] == content:
                    raise WrongResultError("NumPy spells its pickles otherwise now; the fixture must follow")
            for spelling, data in spellings.items():
                path = Path(name, f"{spelling}_{protocol}.npy")
                with path.open("wb") as file:
                    np.lib.format.write_array_header_1_0(
                        file, {"descr": "|O", "fortran_order": False, "shape": (len(rows),)}
                    )
                    file.write(data)
                compare_rows(found, megatron.open_packed(path), rows)
    return found.rows()


def compare_rows(found: Comparison, reader: megatron.PackedReader, theirs: Rows) -> None:
    """Compare what varlen's reader gives with rows of lists; masks by whether they train."""
    with reader:
        found.equal(reader.num_rows, len(theirs), "rows")
        for index, row in enumerate(theirs[: reader.num_rows]):
            ours = reader[index]
            for name in NAMES:
                values = [int(value) for value in row[name]]
                found.equal(ours[name], values, f"{name} of row {index}")


def _kind(array: np.ndarray) -> str:
    """Return what values are, widths left aside: they are compared by name where they count."""
    return {"b": "number", "i": "number", "u": "number", "f": "number"}.get(
        array.dtype.kind, array.dtype.kind
    )

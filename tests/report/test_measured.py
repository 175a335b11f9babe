"""What an inspection says of each way to pack is what that way does: the same packs, counted after doing it."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.support.command_line import asked
from tests.support.rarely import mostly

import varlen as vl
from varlen.documents.source import open_source
from varlen.offline.index import index_source
from varlen.offline.pack import PackSettings, pack_source
from varlen.report.inspection import inspect_lengths
from varlen.report.inspection import packs_of as written_packs
from varlen.report.inspection_figures import (
    METHODS,
    MOST_STREAMED,
    MOST_STREAMED_PACKS,
    Given,
    by_index,
    by_lengths,
    by_pack,
    by_stream,
)

RNG = np.random.default_rng(0)
SETS = {
    "lognormal": RNG.lognormal(4, 0.6, 1_500).astype(int),
    "with empty ones": RNG.integers(0, 3, 900) * RNG.integers(1, 200, 900),
    "one length": np.full(700, 85),
    "overlong": RNG.integers(200, 900, 60),
    "few": np.array([5, 0, 300, 17]),
}
CAPACITY = 256


def written(lengths, folder, files=1):
    """Texts of so many bytes, which are the tokens, in a few files."""
    for number, part in enumerate(np.array_split(lengths, files)):
        lines = [json.dumps({"text": "x" * int(length)}) + "\n" for length in part]
        (folder / f"{number}.jsonl").write_text("".join(lines))
    return open_source([str(path) for path in sorted(folder.glob("*.jsonl"))], "bytes", append_eos=False)


def given(lengths, parts=None):
    return Given(lengths=lengths.astype(np.int32), ids=np.arange(lengths.size), parts=parts, bytes_a_token=1)


def packs_of(found):
    """Which pieces stand together: documents and lengths, pack by pack."""
    ends = found.offsets[1:-1]
    return list(zip(np.split(found.document_ids, ends), np.split(found.lengths, ends), strict=True))


@pytest.mark.parametrize("method", mostly(["best_fit", "balanced", "wrapped"], METHODS))
@pytest.mark.parametrize("name", SETS)
def test_varlen_pack_writes_the_rows_that_were_foretold(name, method, tmp_path):
    lengths = SETS[name]
    source = written(lengths, tmp_path)

    found = by_pack(given(lengths), CAPACITY, method)
    done = pack_source(source, tmp_path / "out", PackSettings(capacity=CAPACITY, method=method, trace=True))

    rows = pq.read_table(sorted((tmp_path / "out").glob("*.parquet"))).to_pylist()
    assert found.num_packs == done.manifest["num_packs"] == len(rows)
    assert [list(map(int, ids)) for ids, _ in packs_of(found)] == [row["document_ids"] for row in rows]
    assert [list(map(int, sizes)) for _, sizes in packs_of(found)] == [row["seq_lengths"] for row in rows]
    assert found.split_documents == done.manifest["ledger"]["split_documents"]


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("name", SETS)
def test_a_loader_of_a_store_makes_the_packs_that_were_foretold(name, files, tmp_path):
    lengths = SETS[name]
    source = written(lengths, tmp_path, files)
    store, _ = index_source(source, tmp_path / "store")

    found = by_index(given(lengths, np.bincount(store.parts, store.documents)), CAPACITY)
    with vl.PackedLoader(
        store.folder, capacity=CAPACITY, global_batch_size=1, dp_rank=0, dp_world_size=1, worker="thread"
    ) as loader:
        batches = [np.bincount(batch.segment_ids[batch.segment_ids >= 0]) for batch in loader]

    trained = [part for part in np.split(found.lengths, found.offsets[1:-1]) if (part > 1).any()]
    assert [part.tolist() for part in batches] == [part.tolist() for part in trained]


@pytest.mark.parametrize("name", ["lognormal", "one length", "overlong"])
def test_a_loader_that_streams_makes_about_as_many_packs_as_were_foretold(name, tmp_path):
    lengths = SETS[name]
    written(lengths, tmp_path)

    found = by_stream(given(lengths), CAPACITY)
    with vl.PackedLoader(
        str(tmp_path / "0.jsonl"), "bytes", capacity=CAPACITY, global_batch_size=8, append_eos=False,
        dp_rank=0, dp_world_size=1, mode="streaming", worker="thread",
    ) as loader:  # fmt: skip
        batches = list(loader)
        masked = loader.stats().masked_packs

    made = 8 * len(batches) - masked
    assert found.lengths.sum() == lengths.sum() == sum(batch.num_tokens for batch in batches)
    assert found.lengths.max() <= CAPACITY
    assert abs(found.num_packs - made) <= max(8, 0.02 * made)


@pytest.mark.parametrize(("documents", "capacity"), [(30_000, 100_000), (30_000, 256), (40, 8), (3, 100_000)])
def test_streaming_is_measured_on_bounded_samples(documents, capacity):
    some = given(RNG.integers(1, 200, documents)).streamed(capacity)

    filled = some.sum() / capacity
    assert some.size <= MOST_STREAMED
    assert filled <= MOST_STREAMED_PACKS * 1.1
    assert some.size == documents or some.size == MOST_STREAMED or filled > MOST_STREAMED_PACKS * 0.9


def test_packs_of_a_sample_are_estimated_for_all_documents(monkeypatch):
    lengths = RNG.lognormal(4, 0.6, 1_500).astype(int)
    whole = inspect_lengths(lengths, capacities=[CAPACITY]).capacities[0]
    monkeypatch.setattr("varlen.report.inspection_figures.MOST_STREAMED_PACKS", 120)

    part = inspect_lengths(lengths, capacities=[CAPACITY]).capacities[0]

    told = {row.name: written_packs(row, part) for row in part.packings}
    sampled, exact = part.packing("loader_streaming"), whole.packing("loader_streaming")
    assert sampled.packs < 0.5 * exact.packs
    assert told["loader_streaming"][0] == "\u2248"
    assert abs(int(told["loader_streaming"][1:].replace(",", "")) / exact.packs - 1) < 0.1
    assert [name for name, text in told.items() if text[0] == "\u2248"] == ["loader_streaming"]


@pytest.mark.parametrize("method", METHODS)
def test_vl_pack_is_measured_in_the_order_of_the_lengths(method):
    lengths = SETS["overlong"]

    found = by_lengths(given(lengths), CAPACITY, method)

    packing = vl.pack(lengths, CAPACITY, method, "split")
    assert found.lengths.tolist() == packing.lengths.tolist()
    assert found.offsets.tolist() == packing.offsets.tolist()


def test_the_advised_command_writes_as_many_rows_as_the_table_says(tmp_path):
    written(RNG.lognormal(5.0, 0.45, 4_000).astype(int), tmp_path)

    told = json.loads(
        asked("inspect", "0.jsonl", "--no-eos", "--capacity", 1024, "--json", cwd=tmp_path).stdout
    )
    command = told["advice"]["command"].split()
    rows = [
        json.loads(asked(*words, "--overwrite", "--json", cwd=tmp_path).stdout)["num_packs"]
        for words in (command[1:], ["pack", "0.jsonl", "-o", "packed", "--no-eos", "--capacity", "1024"])
    ]

    figures = {one["name"]: one for one in told["capacities"][0]["packings"]}
    assert rows[0] == figures[told["advice"]["packing"]]["packs"]
    assert rows[0] <= rows[1] == figures["pack_best_fit"]["packs"]

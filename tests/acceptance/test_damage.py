"""What can't be read costs itself alone, is counted in its unit, and every entry point says the same of it."""

import gzip
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.rarely import mostly

import varlen as vl
from varlen.documents import blocks
from varlen.documents.source import open_source
from varlen.errors import SourceError
from varlen.files.losses import Losses
from varlen.offline import index as index_module
from varlen.offline.crew import Crew
from varlen.offline.index import index_source
from varlen.offline.pack import PackSettings, pack_source
from varlen.store.lengths import read_lengths
from varlen.store.store import open_store

COUNT = 60
RNG = np.random.default_rng(0)
TEXTS = [f"{n:03}" + bytes(RNG.integers(97, 123, 200, dtype=np.uint8)).decode() for n in range(COUNT)]
"""Long enough for row groups to be read in parts, and different in every byte."""


def but(*gone):
    return [text for number, text in enumerate(TEXTS) if number not in gone]


def lines(rows, end="\n"):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + end for row in rows).encode()


def objects(**odd):
    """Rows as objects, and others in the place of some."""
    return [odd.get(f"r{number}", {"text": text}) for number, text in enumerate(TEXTS)]


def table():
    return pa.table({"text": TEXTS, "id": range(COUNT)})


def parquet(group, **options):
    """Six row groups, of which one is damaged in its values."""
    sink = pa.BufferOutputStream()
    settings = {
        "row_group_size": 10,
        "compression": "none",
        "use_dictionary": False,
        "write_page_checksum": True,
    }
    pq.write_table(table(), sink, **{**settings, **options})
    content = bytearray(sink.getvalue().to_pybytes())
    if group is not None:
        column = pq.ParquetFile(pa.BufferReader(bytes(content))).metadata.row_group(group).column(0)
        content[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    return bytes(content)


def size_of(content, start):
    """Bytes of the header of a message."""
    return int.from_bytes(content[start + 4 : start + 8], "little")


def arrow(batch, where, *, is_file=True, cut=0):
    """Six record batches, of which one is damaged in its values or in its header."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with (pa.ipc.new_file if is_file else pa.ipc.new_stream)(sink, table().schema, options=options) as writer:
        writer.write_table(table(), max_chunksize=10)
    content = bytearray(sink.getvalue().to_pybytes())
    if batch is not None:
        start = 8 if is_file else 0
        for _ in range(1 + batch):  # the schema's header comes first
            message = pa.ipc.read_message(pa.BufferReader(bytes(content[start:])))
            start += 8 + size_of(content, start) + (message.body.size if message.body else 0)
        at = start + 8 + (0 if where == "header" else size_of(content, start))
        content[at : at + 40] = bytes(byte ^ 0x5A for byte in content[at : at + 40])
    return bytes(content[: len(content) - cut])


def arrays(kept):
    import io

    sink = io.BytesIO()
    ids = np.frombuffer("".join(TEXTS).encode(), np.uint8).astype(np.uint16)
    np.savez(sink, input_ids=ids, offsets=np.arange(COUNT + 1) * len(TEXTS[0]))
    return sink.getvalue()[:kept]


def rows_of_csv(**odd):
    return ["text,id", *(odd.get(f"r{n}", f"{text},{n}") for n, text in enumerate(TEXTS))]


ARRAY = [json.dumps({"text": text, "more": [{"text": "inner"}]}) for text in TEXTS]


def array(join, **odd):
    rows = [odd.get(f"r{number}", row) for number, row in enumerate(ARRAY)]
    return ("[" + join[1:] + join.join(rows) + "]").encode()


def half(content):
    return content[: len(content) // 2]


def flipped(content, *places):
    """Some bytes changed."""
    found = bytearray(content)
    for place in places:
        found[place] ^= 0xFF
    return bytes(found)


def zstd(content):
    return pa.compress(content, codec="zstd", asbytes=True)


RECORD = Losses(records=1)
PACKED = gzip.compress(lines(objects()))
CASES = {
    "odd_first.jsonl": (lines(objects(r0={"source": "crawl"})), but(0), RECORD),
    "odd_kind.jsonl": (lines(objects(r0={"messages": [{"role": "user", "content": "a"}]})), but(0), RECORD),
    "odd_first.json": (lines(objects(r0={"source": "crawl"})), but(0), RECORD),
    "odd_many.jsonl": (
        lines(objects(r0={"a": 1}, r1=[], r2="{", r3={}, r30={"messages": 1})),
        but(0, 1, 2, 3, 30),
        Losses(records=5),
    ),
    "half_line.jsonl": (lines(objects())[:-30], but(59), RECORD),
    "bytes.jsonl": (lines(objects()).replace(TEXTS[7].encode(), b"\xff"), but(7), RECORD),
    "nul.json": (array(",", r9='{"text": nul}'), but(9), RECORD),
    "quote.json": (array(",", r9='{"text": "a}'), but(9), RECORD),
    "first.json": (array(",", r0='{"text": "a}'), but(0), RECORD),
    "last.json": (array(",", r59='{"text": "a" 5}'), but(59), RECORD),
    "lines.json": (array(",\n", r9='{"text": "a', r30='{"text": [}'), but(9, 30), Losses(records=2)),
    "closed.json": (array(",\n", r9='{"text": "a"}}'), but(9), RECORD),
    "pretty.json": (json.dumps(objects(), indent=2).replace(f'{TEXTS[9]}"', TEXTS[9]).encode(), but(9), RECORD),
    "bytes.json": (array(",").replace(TEXTS[7].encode(), b"\xff"), but(7), RECORD),
    "run.json": (lines([*ARRAY[:9], '{"text": "a}', *ARRAY[10:]], " "), but(9), RECORD),
    "arrays.json": (array(",") + array(",\n"), TEXTS, Losses(num_bytes=len(array(",\n")))),
    "open.json": (array(",")[:-1], TEXTS, Losses(cut_files=1)),
    "quote.csv": ("\n".join(rows_of_csv(r9='"a,9')).encode(), but(9), RECORD),
    "last_quote.csv": ("\n".join(rows_of_csv(r59='"a,9')).encode(), but(59), RECORD),
    "quotes.csv": (
        "\n".join(rows_of_csv(r9='"a,9', r11='b"c",9,"', r12='"x" y,2', r40='z,"')).encode(),
        but(9, 11, 12, 40),
        Losses(records=4),
    ),
    "fields.csv": ("\n".join(rows_of_csv(r9="a,b,c", r10="a")).encode(), but(9, 10), Losses(records=2)),
    "bytes.csv": ("\n".join(rows_of_csv()).encode().replace(TEXTS[7].encode(), b"\xff"), but(7), RECORD),
    "bytes.tsv": (
        "\n".join(rows_of_csv()).replace(",", "\t").encode().replace(TEXTS[7].encode(), b"\xff"),
        but(7),
        RECORD,
    ),
    "one.csv": ("\n".join(["text", *TEXTS[:9], '"a', *TEXTS[10:]]).encode(), but(9), RECORD),
    "several.csv": (
        'text,id\n"a\nb",1\n' + "\n".join(f"{text},2" for text in TEXTS) + '\n"cut\noff',
        ["a\nb", *TEXTS],
        Losses(num_bytes=8),
    ),
    "group.parquet": (parquet(2), but(*range(20, 30)), Losses(rows=10)),
    "zstd.parquet": (parquet(0, compression="zstd"), but(*range(10)), Losses(rows=10)),
    "last.parquet": (parquet(5, data_page_version="2.0"), but(*range(50, 60)), Losses(rows=10)),
    "one_group.parquet": (parquet(0, row_group_size=60), [], Losses(rows=60)),
    "footer.parquet": (parquet(None)[:-1], [], Losses(num_bytes=len(parquet(None)) - 1)),
    "values.arrow": (arrow(2, "values"), but(*range(20, 30)), Losses(rows=10)),
    "header.arrow": (arrow(2, "header"), but(*range(20, 30)), None),
    "stream.arrow": (arrow(2, "values", is_file=False), but(*range(20, 30)), Losses(rows=10)),
    "stream_header.arrow": (arrow(2, "header", is_file=False), TEXTS[:20], None),
    "cut.arrow": (arrow(None, "", is_file=False, cut=400), but(*range(50, 60)), Losses(rows=10, cut_files=1)),
    "cut.npz": (arrays(-9), [], None),
    "cut.jsonl.gz": (half(gzip.compress(lines(objects(), " " * 19_990 + "\n" * 10))), None, Losses(cut_files=1)),
    "cut.csv.gz": (half(gzip.compress(("\n" * 3_000).join(rows_of_csv()).encode())), None, Losses(cut_files=1)),
    "tail.jsonl.gz": (PACKED[:-6], TEXTS, Losses(cut_files=1)),
    "small.jsonl.gz": (half(PACKED), None, Losses(cut_files=1)),
    "small.csv.gz": (half(gzip.compress("\n".join(rows_of_csv()).encode())), None, Losses(cut_files=1)),
    "members.jsonl.gz": (PACKED + PACKED[:40], TEXTS, Losses(cut_files=1)),
    "sum.jsonl.gz": (flipped(PACKED, -8), TEXTS, Losses(num_bytes=5)),
    "behind.jsonl.gz": (PACKED + b"\0\0" + b"behind", TEXTS, Losses(num_bytes=6)),
    "zeros.jsonl.gz": (PACKED + bytes(600), TEXTS, Losses()),
    "members.jsonl.zst": (zstd(lines(objects())) + zstd(b"x" * 99)[:-3], TEXTS, Losses(cut_files=1)),
    "behind.jsonl.zst": (zstd(lines(objects())) + b"behind", TEXTS, None),
    "whole.jsonl": (lines(objects()), TEXTS, Losses()),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "FEWEST_BLOCK_BYTES", 700)


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    content, texts, losses = CASES[request.param]
    folder = tmp_path / "data"
    folder.mkdir()
    path = folder / request.param
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    beside = folder / "zz.jsonl"
    beside.write_bytes(lines([{"text": "beside"}]))
    return folder, texts, losses


def texts_in(store):
    shards = [store.shard(index) for index in range(len(store.shards))]
    found = []
    for shard in shards:
        with shard:
            ids = shard.read_tokens(0, shard.counts.num_tokens).astype(np.uint16)
        found += [bytes(one[one < 256].tolist()).decode() for one in np.split(ids, shard.offsets[1:-1])]
    return found


def loaded(folder, cache, **settings):
    """The texts of a loader's batches, its losses, and its ledger."""
    given = {"capacity": 4096, "global_batch_size": 1, "on_error": "skip", "cache": cache, "worker": "thread"}
    with vl.PackedLoader(folder, "bytes", **{**given, **settings}) as loader:
        texts = []
        for batch in loader:
            for row in range(len(batch.input_ids)):
                for segment in range(int(batch.segment_ids[row].max()) + 1):
                    ids = batch.input_ids[row][batch.segment_ids[row] == segment]
                    texts.append(bytes(ids[ids < 256].astype(np.uint8).tolist()).decode())
        return sorted(texts), loader.stats()


def test_every_entry_point_reads_what_is_sound_and_counts_what_is_not(case, tmp_path):
    folder, texts, losses = case
    source = open_source(folder, on_error="skip")

    store, _ = index_source(source, tmp_path / "store", crew=Crew(processes=1))
    lengths = read_lengths(source, lambda *_: None)
    streamed, stats = loaded(folder, tmp_path / "cache", mode="streaming")
    indexed, stored = loaded(folder, tmp_path / "cache", mode="indexed")
    packed = pack_source(source, tmp_path / "packed", PackSettings(capacity=4096), crew=Crew(processes=1))

    found = texts_in(store)
    if texts is None:  # as far as the packed stream goes
        assert 9 < len(found) - 1 < COUNT
        assert found[:-1] == TEXTS[: len(found) - 1]
    else:
        assert found == [*texts, "beside"]
    assert streamed == indexed == sorted(found)
    assert len(lengths.lengths) == len(found) == packed.manifest["ledger"]["documents_in"]
    if losses is not None:
        assert store.losses == losses
    assert store.losses.of_reading > 0 or len(found) == COUNT + 1
    assert store.losses == lengths.losses == stats.losses == stored.losses
    assert store.losses == Losses.from_json(packed.manifest["losses"])
    assert stats.skipped == store.losses.num_rows == store.manifest["num_skipped"]
    if store.losses.of_reading:
        logged = (tmp_path / "packed" / ".skipped.log").read_text().splitlines()
        assert sorted(logged) == sorted(lengths.skipped)


@pytest.mark.soak
def test_several_processes_lose_what_one_does(tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "PART_BYTES", 4000)  # many parts
    for name, (content, _, _) in CASES.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    source = open_source([tmp_path / name for name in CASES], on_error="skip")
    made = []
    for processes in (1, 2):
        out = tmp_path / f"packed-{processes}"
        crew = Crew(processes=processes)
        manifest = pack_source(source, out, PackSettings(capacity=4096), crew=crew).manifest
        logged = (out / ".skipped.log").read_text().splitlines()
        made.append((manifest["losses"], manifest["ledger"], manifest["num_skipped"], logged))

    lengths = read_lengths(source, lambda *_: None)

    assert made[0] == made[1]
    assert Losses.from_json(made[0][0]) == lengths.losses
    assert sorted(made[0][3]) == sorted(lengths.skipped)
    assert made[0][1]["documents_in"] == len(lengths.lengths)


def test_where_nothing_may_be_skipped_the_error_names_file_and_place(case, tmp_path):
    folder, _, losses = case
    if losses == Losses():
        return
    name = next(path.name for path in folder.iterdir() if path.name != "zz.jsonl")
    said = []
    for read in (
        lambda: read_lengths(open_source(folder), lambda *_: None),
        lambda: loaded(folder, tmp_path, mode="streaming", on_error="raise"),
    ):
        with pytest.raises(SourceError) as raised:
            read()
        said.append(str(raised.value))
    assert all(name in one for one in said)
    if losses is not None and losses.num_rows:
        assert all(re.search(r"(line|value|row|rows) \d|ends at byte|begins with", one) for one in said), said


@pytest.mark.parametrize(
    "name",
    mostly(
        ["group.parquet", "cut.jsonl.gz"],
        ["group.parquet", "values.arrow", "odd_first.jsonl", "quotes.csv", "cut.jsonl.gz"],
    ),
)
def test_the_lines_that_are_printed_say_what_is_lost_first(tmp_path, verb, name):
    content, texts, losses = CASES[name]
    (tmp_path / name).write_bytes(content)

    done = [
        verb(*words, "--on-error", "skip")
        for words in (["index", name, "-o", "store"], ["pack", name, "-o", "packed"], ["inspect", name])
    ]

    assert [code for code, _, _ in done] == [0, 0, 0]
    indexed, packed, inspected = done[0][1].splitlines(), done[1][1].splitlines(), done[2][2]

    stretches, count = losses.stretches(), int(open_store(tmp_path / "store").documents.sum())
    for said in (indexed, packed):
        assert said[: len(stretches)] == stretches
        assert said[len(stretches)].startswith(f"{count} documents, ")
    assert texts is None or count == len(texts)
    for said in stretches:
        assert said in inspected
    if losses.records:
        assert f"  {losses.records} record{'s' * (losses.records > 1)} skipped:" in packed
        assert f"{losses.records} record{'s' * (losses.records > 1)} that could not be read" in inspected


def test_pieces_of_one_file_that_cannot_be_read_count_it_once(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines([{"body": text} for text in TEXTS]))
    size = (tmp_path / "a.jsonl").stat().st_size
    source = open_source(tmp_path, on_error="skip")

    every = [one for part in source.parts(500) for one in source.read(part)]

    assert len(source.parts(500)) > 5
    assert sum((one.losses for one in every), Losses()) == Losses(num_bytes=size)
    with pytest.raises(SourceError, match=f"{size:,} bytes can't be read, nor the rows in them be counted"):
        loaded(tmp_path, tmp_path / "cache", mode="streaming")
    with pytest.raises(SourceError, match=f"{size:,} bytes can't be read, nor the rows in them be counted"):
        loaded(tmp_path, tmp_path / "cache", mode="indexed")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.jsonl.bz2", b"BZh91AY&SY", "is compressed (bzip2); unpack it"),
        ("a.jsonl", lines([{"body": "a"}] * 3), "has no column of documents"),
        ("a.csv", b"body\na\n", "has no column of documents"),
        ("a.parquet", parquet(0, row_group_size=60), "rows 1 to 60"),
        ("a.txt", "a".encode("utf-16"), "text in UTF-16"),
        ("a.jsonl", b'{"text": 5}\n' * 3, "line 1 holds number in `text`"),
    ],
)
def test_where_nothing_is_left_every_verb_says_the_first_reason(tmp_path, verb, name, content, why):
    (tmp_path / name).write_bytes(content)

    for words in (["inspect", name], ["pack", name, "-o", "packed"], ["index", name, "-o", "store"]):
        code, _, said = verb(*words, "--on-error", "skip")

        assert code == 2
        last = said.splitlines()[-1]
        assert last.startswith(f"varlen: {name} holds no document; ")
        assert f"; the first: {name} " in last
        assert why in last
        assert sorted(path.name for path in tmp_path.iterdir()) == [name]

"""Files of few bytes that decode to many: all values are Arrow's own, and memory stays bounded."""

import gzip
import itertools
import subprocess
import sys
import zipfile
from itertools import product

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.listed_files import find_files
from tests.support.rarely import mostly

from varlen.documents.blocks import cut_blocks
from varlen.documents.source import open_source
from varlen.errors import SourceError
from varlen.files.formats import record_batches, row_groups, tables
from varlen.files.formats.decoded import list_counts, plain, row_sizes
from varlen.files.formats.record_batches import blocks_of
from varlen.files.rows import as_list

PEAK = """def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
"""


"""What a process of its own calls; what `resource` says begins with the peak of the process that started it."""


MB = 1 << 20


def text_column(texts, indices):
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), pa.array(texts))


def chats(rows, per_row, texts, indices):
    """A column of messages whose contents are shared."""
    count = rows * per_row
    roles = text_column(["user", "assistant"], np.arange(count) % 2)
    messages = pa.StructArray.from_arrays([roles, text_column(texts, indices)], ["role", "content"])
    return pa.ListArray.from_arrays(pa.array(np.arange(0, count + 1, per_row), pa.int32()), messages)


def write(path, column, *, name="text", is_dictionary=False, **named):
    """Write a column; unless it is to be read as a dictionary, with no word of how it was made."""
    table = pa.table({name: column})
    pq.write_table(table, path, store_schema=is_dictionary, **named)
    return path


def undone(kind):
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_list(kind):
        return pa.list_(undone(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, undone(field.type)) for field in kind])
    return kind


def rows_of(path):
    (file,) = find_files(path)
    names = tables.column_names(file)
    found = []
    for rows in tables.read(file, names):
        found += zip(*(as_list(rows.columns[name]) for name in names)) if len(rows) else []
    return [row[0] for row in found] if len(names) == 1 else found


LIMITED = (
    PEAK
    + """
import sys
from varlen.files.formats import tables
from varlen.files.finding import find
from varlen.files.rows import as_list
import pyarrow.parquet, numpy
before = peak()
(file,) = find(sys.argv[1]).files
names = tables.column_names(file)
count = size = most = 0
for rows in tables.read(file, names):
    values = as_list(rows.columns[names[0]]) if len(rows) else []
    sizes = [len(v) if isinstance(v, (str, bytes)) else sum(len(m["content"]) for m in v) for v in values]
    count, size, most = count + len(rows), size + sum(sizes), max(most, sum(sizes))
    if count >= int(sys.argv[2]):
        break
    del values, rows
print(count, size, most, (peak() - before) // 1024)
"""
)


def read_apart(path, rows=1 << 40):
    """Read in a process of its own; returns rows, bytes, bytes of the largest batch, and megabytes of memory."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path), str(rows)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return tuple(map(int, done.stdout.split()))


LONG = "x" * MB


@pytest.mark.parametrize(
    ("compression", "is_dictionary"),
    mostly([("none", True), ("zstd", False)], product(("none", "zstd"), (False, True))),
)
def test_long_texts_that_many_rows_share_are_read_a_few_megabytes_at_a_time(
    tmp_path, compression, is_dictionary
):
    texts = [LONG, "short", "y" * 300_000]
    indices = np.arange(3000) % 3
    path = write(
        tmp_path / "a.parquet",
        text_column(texts, indices),
        compression=compression,
        is_dictionary=is_dictionary,
    )

    rows, size, most, grown = read_apart(path)

    assert (rows, size) == (3000, 1000 * sum(map(len, texts)))
    assert most < 10 * MB
    assert grown < 700
    assert compression == "none" or path.stat().st_size < 20_000


def test_a_terabyte_of_one_text_is_streamed(tmp_path):
    path = write(
        tmp_path / "a.parquet", text_column([LONG], np.zeros(1 << 20, dtype=np.int32)), row_group_size=1 << 20
    )
    assert pq.ParquetFile(path).num_row_groups == 1

    rows, _, most, grown = read_apart(path, rows=2000)

    assert rows >= 2000
    assert most < 10 * MB
    assert grown < 700


def test_where_long_texts_follow_short_ones_no_batch_is_as_large_as_the_ones_before_let_expect(tmp_path):
    indices = np.concatenate([np.zeros(60_000), np.ones(1500)]).astype(np.int32)
    path = write(tmp_path / "a.parquet", text_column(["short", LONG], indices))

    rows, size, most, grown = read_apart(path)

    assert (rows, size) == (61_500, 300_000 + 1500 * MB)
    assert most < 10 * MB
    assert grown < 700


def test_messages_that_share_a_text_are_read_a_few_megabytes_at_a_time(tmp_path):
    column = chats(1500, 2, ["Why?", LONG], np.arange(3000) % 2)

    rows, _, most, grown = read_apart(write(tmp_path / "a.parquet", column, name="messages"))

    assert rows == 1500
    assert most < 10 * MB
    assert grown < 700


def test_single_rows_of_many_messages_are_read_alone_and_what_no_array_holds_is_one_fault(tmp_path):
    counts = [2, 300, 3000, 2, 1, 3]  # of a megabyte: the third is more than lists of strings hold
    bounds = np.concatenate([[0], np.cumsum(counts)])
    roles = text_column(["user"], np.zeros(bounds[-1]))
    messages = pa.StructArray.from_arrays(
        [roles, text_column([LONG], np.zeros(bounds[-1]))], ["role", "content"]
    )
    column = pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), messages)
    path = write(tmp_path / "a.parquet", column, name="messages")

    rows, size, most, grown = read_apart(path)

    assert (rows, size, most) == (5, 308 * MB, 300 * MB)
    assert grown < 1500
    (file,) = find_files(path)
    faults = [str(fault) for rows in tables.read(file, ["messages"]) for fault in rows.faults]
    assert len(faults) == 1
    assert faults[0].startswith(
        f"{path} row 3 decodes to 3,145,740,000 bytes, more than an array of strings holds"
    )


@pytest.mark.parametrize("is_dictionary", [False, True])
@pytest.mark.parametrize("encoding", ["dictionary", "PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
@pytest.mark.parametrize("kind", ["text", "null", "chat", "long chat", "mixed"])
def test_values_are_arrows_own_however_they_are_encoded(tmp_path, monkeypatch, kind, encoding, is_dictionary):
    for name, size in (("_MOST_BYTES", 20_000), ("_MOST_ROW_BYTES", 4000), ("_SHORT_BYTES", 0)):
        monkeypatch.setattr(row_groups, name, size)
    monkeypatch.setattr(row_groups, "BATCH_BYTES", 1000)
    rng = np.random.default_rng(0)
    texts = ["", "ż🦆", *("ab" * n for n in rng.integers(0, 300, 40))]
    picked = rng.integers(0, len(texts), 900)
    text = text_column(texts, picked)
    if kind == "text":
        columns = {"text": text}
    elif kind == "null":
        columns = {"text": text_column(texts, [None if n % 3 == 0 else n for n in picked.tolist()])}
    elif kind == "mixed":
        numbers = pa.array([[7] * (n % 5) if n % 7 else None for n in range(900)], pa.list_(pa.int32()))
        columns = {
            "n": numbers,
            "text": text,
            "chat": chats(900, 2, texts, rng.integers(0, len(texts), 1800)),
        }
    else:
        column = chats(300, 3, texts, picked)
        if kind == "long chat":  # skewed: one row holds most
            bounds = np.sort(np.concatenate([[0, 900, 100, 800], rng.integers(0, 100, 60)]))
            column = pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), column.values)
        columns = {"chat": column}
    if encoding != "dictionary":
        columns = {name: plain(column, undone(column.type)) for name, column in columns.items()}
    table = pa.table(columns)
    named = {} if encoding == "dictionary" else {"use_dictionary": False}
    if encoding.startswith("DELTA"):
        paths = [f for f in ("text", "chat.list.element.content") if f.split(".")[0] in columns]
        named["column_encoding"] = dict.fromkeys(paths, encoding)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=250, store_schema=is_dictionary, **named)

    found = rows_of(tmp_path / "a.parquet")

    wanted = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert found == [tuple(row.values()) if len(row) > 1 else next(iter(row.values())) for row in wanted]


TYPES = {
    "large strings": (pa.large_string(), lambda text: text),
    "binary": (pa.binary(), lambda text: text.encode()),
    "large lists": (pa.large_list(pa.large_string()), lambda text: [text, "", text]),
    "lists of one length": (pa.list_(pa.string(), 2), lambda text: [text, "b"]),
    "maps": (pa.map_(pa.string(), pa.string()), lambda text: [("k", text), ("l", "m")]),
    "structs": (pa.struct([("a", pa.struct([("b", pa.string())]))]), lambda text: {"a": {"b": text}}),
    "lists of lists": (pa.list_(pa.list_(pa.string())), lambda text: [[text], [], [text, "x"]]),
    "lists of categories": (pa.list_(pa.dictionary(pa.int32(), pa.string())), lambda text: [text, "x"]),
    "lists of structs": (
        pa.list_(pa.struct([("a", pa.list_(pa.string())), ("n", pa.int8())])),
        lambda text: [{"a": [text], "n": 1}, {"a": [], "n": None}],
    ),
}


@pytest.mark.parametrize("store_schema", [False, True])
@pytest.mark.parametrize("least", [0, 1 << 30])
@pytest.mark.parametrize("name", TYPES)
def test_values_of_any_type_are_arrows_own(tmp_path, monkeypatch, name, least, store_schema):
    monkeypatch.setattr(row_groups, "_MOST_ROW_BYTES", least)
    monkeypatch.setattr(row_groups, "_MOST_BYTES", 5000)
    kind, value = TYPES[name]
    texts = ["ab" * (n % 37) for n in range(500)]
    column = pa.array([None if n % 11 == 0 else value(text) for n, text in enumerate(texts)], kind)
    pq.write_table(
        pa.table({"a": column}), tmp_path / "a.parquet", row_group_size=120, store_schema=store_schema
    )

    (file,) = find_files(tmp_path / "a.parquet")
    arrays = [rows.columns["a"] for rows in tables.read(file, ["a"])]

    wanted = pq.read_table(tmp_path / "a.parquet")["a"]
    assert pa.chunked_array(arrays).to_pylist() == wanted.to_pylist()
    assert {array.type for array in arrays} == {wanted.type}


def arrow_file(path, table, **options):
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as file:
        file.write_table(table)
    return path


@pytest.mark.parametrize("kind", mostly(["zstd"], ["dictionary", "runs", "zstd"]))
def test_arrow_files_are_cut_by_what_they_decode_to(tmp_path, kind):
    if kind == "dictionary":
        table, options = pa.table({"text": text_column([LONG, "b"], np.arange(2000) % 2)}), {}
    elif kind == "runs":
        runs = pa.RunEndEncodedArray.from_arrays(pa.array([1999, 2000], pa.int32()), pa.array([LONG, "b"]))
        table, options = pa.table({"text": runs}), {}
    else:
        table, options = (
            pa.table({"text": pa.array(["x" * 50_000] * 4000, pa.large_string())}),
            {"compression": "zstd"},
        )
    path = arrow_file(tmp_path / "a.arrow", table, **options)

    rows, size, most, grown = read_apart(path)

    assert (rows, size) == (len(table), sum(row_sizes(chunk).sum() for chunk in table["text"].chunks))
    assert most < 10 * MB
    assert grown < 700
    (file,) = find_files(path)
    assert sum(tables.stretch_sizes(file, ["text"])) > size // 2


@pytest.mark.parametrize("groups", [1, 40])
@pytest.mark.parametrize("form", ["text", "chat"])
def test_blocks_are_cut_by_what_row_groups_decode_to(tmp_path, form, groups):
    text, count = "x" * (MB // 8), 8000
    if form == "text":
        path = write(
            tmp_path / "a.parquet", text_column([text], np.zeros(count)), row_group_size=count // groups
        )
    else:
        column = chats(count // 2, 2, ["", text], np.arange(count) % 2)
        path = write(tmp_path / "a.parquet", column, name="messages", row_group_size=count // 2 // groups)

    blocks = cut_blocks(open_source(path), 2)

    assert blocks.sizes.sum() >= count * len(text) // (1 if form == "text" else 2)
    assert blocks.sizes.max() <= MB
    assert not blocks.is_cached


def test_blocks_of_plain_arrow_files_are_shares_of_the_file(tmp_path):
    table = pa.table({"text": ["a" * n for n in range(1000)], "n": range(1000)})
    for name, options in (("plain", {}), ("lz4", {"compression": "lz4"})):
        path = tmp_path / f"{name}.arrow"
        with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as file:
            file.write_table(table, max_chunksize=100)
        (file,) = find_files(path)
        with path.open("rb") as stored:
            assert {block.is_compressed for block in blocks_of(stored)} == {name == "lz4"}
        if name == "plain":
            assert tables.stretch_sizes(file, ["text"]) == [path.stat().st_size // 10] * 10


def test_blocks_of_ordinary_files_are_those_of_their_encoded_sizes(tmp_path):
    rng = np.random.default_rng(0)
    texts = [
        bytes(rng.integers(97, 123, rng.integers(5, 3000), dtype=np.uint8)).decode() for _ in range(4000)
    ]
    roles = text_column(["user", "assistant"], np.arange(4000) % 2)
    pq.write_table(pa.table({"text": texts, "role": roles}), tmp_path / "a.parquet", row_group_size=900)
    (file,) = find_files(tmp_path / "a.parquet")
    metadata = pq.ParquetFile(tmp_path / "a.parquet").metadata

    sizes = tables.stretch_sizes(file, ["text", "role"])

    groups = map(metadata.row_group, range(metadata.num_row_groups))
    assert sizes == [sum(group.column(index).total_uncompressed_size for index in (0, 1)) for group in groups]


def test_streaming_a_file_of_shared_texts_takes_little_memory(tmp_path):
    path = write(tmp_path / "a.parquet", text_column([LONG, "b"], np.arange(2000) % 2), compression="zstd")
    program = f"""{PEAK}
import itertools
import varlen as vl
before = peak()
settings = dict(capacity=1 << 16, global_batch_size=2, mode="streaming", worker="thread")
with vl.PackedLoader({str(path)!r}, "bytes", **settings) as loader:
    tokens = sum(batch.num_tokens for batch in itertools.islice(loader, 300))
print(tokens, (peak() - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stderr[-2000:]
    tokens, grown = map(int, done.stdout.split())
    assert tokens > 300 * 2 * (1 << 15)
    assert grown < 1500


@pytest.mark.parametrize("groups", [1, 4])
def test_damage_in_shared_texts_is_counted_and_no_cause_to_refuse_the_file(tmp_path, groups):
    path = write(tmp_path / "a.parquet", text_column([LONG], np.zeros(4000)), row_group_size=4000 // groups)
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(0)
    content = bytearray(path.read_bytes())
    content[chunk.dictionary_page_offset : chunk.data_page_offset] = bytes(
        chunk.data_page_offset - chunk.dictionary_page_offset
    )
    path.write_bytes(content)
    (file,) = find_files(path)

    found = list(itertools.islice(tables.read(file, ["text"]), 3))

    assert [fault.covers for rows in found for fault in rows.faults] == [4000 // groups]
    assert sum(map(len, found)) > 0 or groups == 1
    assert len(tables.stretch_sizes(file, ["text"])) == groups


def test_counting_the_rows_of_a_stretch_reads_the_headers_of_its_batches_alone(tmp_path, monkeypatch):
    table = pa.table({"text": [f"{number}" for number in range(400)]})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=10)
    (file,) = find_files(tmp_path / "a.arrow")
    looked, block = [], record_batches._block
    monkeypatch.setattr(record_batches, "_block", lambda *place: looked.append(place) or block(*place))

    counted = [tables.count_rows(file, start, start + 4) for start in range(0, 40, 4)]

    assert counted == [40] * 10
    assert len(looked) == 40


def size_of(value):
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(size_of, value))
    return len(value.encode() if isinstance(value, str) else value) if value is not None else 0


NESTED = pa.array([["a", "bcd", None], None, [], ["xy"] * 3])
ARRAYS = {
    "strings": pa.array(["a", "bb", None, "cccc"]),
    "large strings": pa.array(["a", "bb", None, "cccc"], pa.large_string()),
    "views": pa.array(["a" * 30, "bb", None, "cccc"], pa.string_view()),
    "dictionary": pa.array(["a", "bb", "a", "a"]).dictionary_encode(),
    "runs": pa.compute.run_end_encode(pa.array(["aa", "aa", "b", "b", "cccc"])),
    "lists": NESTED,
    "large lists": NESTED.cast(pa.large_list(pa.string())),
    "lists of a dictionary": NESTED.cast(pa.list_(pa.dictionary(pa.int32(), pa.string()))),
    "lists of one length": pa.array([["a", "bb"], ["", "cccc"], ["d", "e"]], pa.list_(pa.string(), 2)),
    "structs": pa.array([{"a": "x", "b": "yz"}, {"a": "", "b": "long"}, {"a": "q", "b": None}]),
    "maps": pa.array([[("k", "vv")], [], [("a", "b"), ("c", "d")]], pa.map_(pa.string(), pa.string())),
    "nothing": pa.array([], pa.list_(pa.string())),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_the_sizes_of_rows_are_those_of_their_values(name):
    array = ARRAYS[name]

    for some in (array, array.slice(1), array.slice(1, 2), array.slice(0, 0)):
        assert row_sizes(some).tolist() == [size_of(value) for value in some.to_pylist()]


def test_sizes_of_damaged_offsets_are_no_error():
    offsets = pa.py_buffer(np.array([0, 2_000_000_000, -5, 3], dtype=np.int32))
    array = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"abc")])

    assert (row_sizes(array) >= 0).all()


@pytest.mark.parametrize("start", [0, 1, 2])
def test_dictionaries_are_undone_and_lists_counted_wherever_they_begin(start):
    column = chats(4, 2, ["a", "bb", ""], [0, 1, 2, 1, None, 0, 0, 1]).slice(start)

    decoded = plain(column, undone(column.type))

    decoded.validate(full=True)
    assert decoded.type == undone(column.type)
    assert decoded.to_pylist() == column.to_pylist()
    assert list_counts(column).tolist() == [2] * (4 - start)


LIMIT = 6 * MB
READ = (
    PEAK
    + f"""
import sys
from varlen.files.formats import json, jsonl, text
for module, name in (
    (jsonl, "MOST_RECORD_BYTES"), (json, "MOST_RECORD_BYTES"), (text, "_MOST_DOCUMENT_BYTES")
):
    setattr(module, name, {LIMIT})
from varlen.files.formats import csv
csv._MOST_FIELD_CHARACTERS = {LIMIT}
from varlen.documents.source import open_source
before = peak()
source = open_source(sys.argv[1], on_error="skip")
count = lost = 0
for part in source.parts():
    for documents in source.read(part):
        count, lost = count + len(documents), lost + documents.losses.of_reading
print(count, lost, (peak() - before) // 1024)
"""
)
FILL = b"a" * MB
LINE = b"a" * 1023 + b"\n"
FINE = b'{"text": "fine"}'
TIMES = 64
BOMBS = {
    "line.jsonl.gz": ([FINE + b'\n{"text": "', *[FILL] * TIMES, b'"}\n', FINE], 1),
    "no_end.txt.gz": ([FILL] * TIMES, 0),
    "paragraph.txt.gz": ([LINE * 1024] * TIMES, 0),
    "value.json.gz": ([b"[" + FINE + b',{"text": "', *[FILL] * TIMES, b'"},' + FINE + b"]"], 1),
    "open.json.gz": ([b"[" + FINE + b',{"text": "', *[FILL] * TIMES], 1),
    "escapes.json.gz": ([b"[" + FINE + b',{"text": "', *[b'\\"' * (MB // 2)] * TIMES], 1),
    "brackets.json.gz": ([b"[" + FINE + b",", *[b"[" * MB] * TIMES], 1),
    "blank.json.gz": ([b"[" + FINE + b",", *[b"\n" * MB] * TIMES, FINE + b"]"], 2),
    "field.csv.gz": ([b"text\nfine\n", *[FILL] * TIMES, b"\nfine\n"], 1),
    "quote.csv.gz": ([b'text,id\nfine,1\n"', *[LINE * 1024] * TIMES], 1),
}


@pytest.mark.parametrize("name", mostly(["line.jsonl.gz", "brackets.json.gz", "field.csv.gz"], BOMBS))
def test_a_text_that_unpacks_to_far_more_is_refused_or_read_in_bounded_memory(tmp_path, name):
    pieces, count = BOMBS[name]
    path = tmp_path / name
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.writelines(pieces)
    assert path.stat().st_size < 3 * MB

    done = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, timeout=240
    )

    assert done.returncode == 0, done.stderr[-2000:]
    found, lost, grown = map(int, done.stdout.split())
    assert found == count
    assert lost > 0 or name == "blank.json.gz"
    assert grown < 12 * LIMIT // MB


READING = (
    PEAK
    + """
import sys
from varlen.documents.source import open_source
source = open_source(sys.argv[1])
before = peak()
documents = tokens = 0
for part in source.parts():
    for found in source.read(part):
        documents, tokens = documents + len(found), tokens + len(found.tokens)
print(documents, tokens, (peak() - before) // 1024)
"""
)


@pytest.mark.parametrize(
    "form", mostly(["short documents"], ["empty documents", "short documents", "one document"])
)
def test_an_npz_that_unpacks_to_much_is_read_in_little_memory(tmp_path, form):
    count = 40_000_000
    offsets = {
        "empty documents": np.zeros(count, dtype=np.int64),
        "short documents": np.arange(0, count + 1, 1000),
        "one document": np.array([0, count]),
    }[form]
    ids = np.zeros(0 if form == "empty documents" else count, dtype=np.int64)
    np.savez_compressed(tmp_path / "a.npz", input_ids=ids, offsets=offsets)
    assert (tmp_path / "a.npz").stat().st_size < 1_000_000

    done = subprocess.run(
        [sys.executable, "-c", READING, str(tmp_path / "a.npz")], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr[-2000:]
    documents, tokens, grown = map(int, done.stdout.split())
    assert documents == len(offsets) - 1
    assert tokens == len(ids)
    assert grown < (900 if form == "one document" else 250)


def test_ids_that_need_more_than_32_bits_are_still_told_in_a_long_document(tmp_path):
    ids = np.zeros(3 << 20, dtype=np.int64)
    ids[2_500_000] = 1 << 40
    np.savez_compressed(tmp_path / "a.npz", input_ids=ids, offsets=np.array([0, len(ids)]))
    source = open_source(tmp_path / "a.npz")

    with pytest.raises(SourceError, match=f"{1 << 40}|{1 << 40:,}"):
        list(source.read(source.parts()[0]))


def test_an_npz_that_holds_fewer_values_than_it_says_is_refused_before_they_are_read(tmp_path):
    count = 1_900_000_000
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for name, shape, values in (("input_ids", count, [1] * 9), ("offsets", 2, [0, count])):
            with archive.open(f"{name}.npy", "w") as member:
                described = {"descr": "<i8", "fortran_order": False, "shape": (shape,)}
                np.lib.format.write_array_header_1_0(member, described)
                member.write(np.array(values, dtype=np.int64).tobytes())
    source = open_source(tmp_path / "a.npz")

    with pytest.raises(SourceError, match=r"a\.npz: `input_ids` ends too early"):
        list(source.read(source.parts()[0]))

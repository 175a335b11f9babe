"""Every format, plain and packed, gives the documents that another writer put in, in parts of any size."""

import base64
import csv
import gzip
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.cli.options import ReadAs
from varlen.documents.source import Source, open_source
from varlen.errors import SourceError
from varlen.files.formats import jsonl
from varlen.files.paths import FORMAT_NAMES, FORMATS, Format
from varlen.offline.crew import Crew
from varlen.offline.index import build_store
from varlen.store.lengths import read_lengths

TEXTS = ["one", 'two\nlines, "quoted"', "żółć 🦆\ttab", "", "last\r\nline"]


def texts_of(data, **options) -> list[str]:
    source = open_source(data, append_eos=False, **options)
    found = []
    for part in source.parts():
        for documents in source.read(part):
            bounds = documents.offsets.tolist()
            found += [bytes(documents.tokens[a:b].tolist()).decode() for a, b in zip(bounds, bounds[1:])]
    return found


def rows_of() -> list[dict[str, object]]:
    return [{"id": number, "text": text} for number, text in enumerate(TEXTS)]


def as_csv(delimiter: str) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["id", "text"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows_of())
    return text.getvalue().encode()


def as_arrow(opened: Callable[..., pa.ipc.RecordBatchStreamWriter]) -> bytes:
    sink, table = io.BytesIO(), pa.Table.from_pylist(rows_of())
    with opened(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue()


def as_feather(compression: str) -> bytes:
    sink = io.BytesIO()
    feather.write_feather(pa.Table.from_pylist(rows_of()), sink, compression=compression)
    return sink.getvalue()


def as_parquet(**options) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows_of()), sink, row_group_size=2, **options)
    return sink.getvalue()


def as_arrays() -> bytes:
    sink = io.BytesIO()
    np.savez(sink, ids=[1], offsets=[0, 1])
    return sink.getvalue()


def as_lines(end: str = "\n") -> bytes:
    return "".join(json.dumps(row) + end for row in rows_of()).encode()


def saved_by_hugging_face():
    try:
        import datasets
    except ImportError:
        pytest.skip("the library that saves data sets is not installed")
    return datasets


FILES = {
    "a.jsonl": as_lines(),
    "crlf.jsonl": as_lines("\r\n"),
    "blank.ndjson": b"\n" * 1500 + as_lines("\n\n \n"),
    "bom.jsonl": b"\xef\xbb\xbf" + as_lines(),
    "no_end.jsonl": as_lines().rstrip(b"\n"),
    "a.json": json.dumps(rows_of()).encode(),
    "pretty.json": json.dumps(rows_of(), indent=4, ensure_ascii=False).encode(),
    "bom.json": b"\xef\xbb\xbf" + json.dumps(rows_of()).encode(),
    "lines.json": as_lines(),
    "spaced.json": b" " * (3 << 20) + as_lines("\n" * 9999),
    "a.csv": as_csv(","),
    "bom.csv": b"\xef\xbb\xbf" + as_csv(","),
    "a.tsv": as_csv("\t"),
    "a.parquet": as_parquet(),
    "zstd.parquet": as_parquet(compression="zstd", use_dictionary=False),
    "summed.parquet": as_parquet(write_page_checksum=True, data_page_version="2.0"),
    "file.arrow": as_arrow(pa.ipc.new_file),
    "stream.arrow": as_arrow(pa.ipc.new_stream),
    "a.feather": as_feather("lz4"),
    "plain.feather": as_feather("uncompressed"),
}


def packed(content: bytes, suffix: str) -> bytes:
    if suffix == ".gz":  # of two members
        return gzip.compress(content[:9]) + gzip.compress(content[9:])
    codec = pa.Codec("zstd")  # two frames
    return (
        b"".join(codec.compress(piece, asbytes=True) for piece in (content[:9], content[9:]))
        if suffix
        else content
    )


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", list(FILES))
def test_every_format_gives_the_texts_that_were_written(tmp_path, name, suffix):
    (tmp_path / f"{name}{suffix}").write_bytes(packed(FILES[name], suffix))

    assert texts_of(tmp_path) == TEXTS


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("name", ["input_ids", "ids", "tokens"])
def test_arrays_of_ids_are_cut_at_their_offsets(tmp_path, save, name, suffix):
    sink = io.BytesIO()
    save(sink, offsets=[0, 2, 2, 5], seq_lengths=[9], **{name: np.array([1, 2, 3, 4, 5], ">u2")})
    (tmp_path / f"a.npz{suffix}").write_bytes(packed(sink.getvalue(), suffix))

    source = open_source(tmp_path)
    [documents] = source.read(source.parts()[0])

    assert documents.tokens.tolist() == [1, 2, 3, 4, 5]
    assert documents.offsets.tolist() == [0, 2, 2, 5]


def test_every_list_of_formats_has_all_of_them():
    formats = get_args(Format)

    assert set(FORMAT_NAMES) == set(formats) == {*FORMATS.values(), "text"}
    assert [name for name in formats if name not in ReadAs.__metadata__[0].help] == []


def test_one_object_alone_is_one_document(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"text": "alone"}, indent=2))

    assert texts_of(tmp_path) == ["alone"]


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ("auto", ["a\nb", "c"]),
        ("file", ["a\r\nb\r\n \r\nc\n"]),
        ("paragraph", ["a\nb", "c"]),
        ("line", ["a", "b", "c"]),
    ],
)
def test_a_text_file_is_cut_as_asked(tmp_path, cut, expected):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\r\n \r\nc\n")

    assert texts_of(tmp_path, text_cut=cut) == expected


@pytest.mark.parametrize("scheme", ["file", "memory"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "file.arrow", "a.csv"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_urls_give_the_same_by_file_folder_and_glob(tmp_path, scheme, name, suffix):
    folder = f"file://{tmp_path}/in" if scheme == "file" else f"memory://{tmp_path.name}"
    for inner in ("x", "y"):
        with fsspec.open(f"{folder}/{inner}/{name}{suffix}", "wb") as sink:
            sink.write(packed(FILES[name], suffix))

    assert texts_of(f"{folder}/x/{name}{suffix}") == TEXTS
    assert texts_of(folder) == TEXTS * 2
    assert texts_of(f"{folder}/*/{name}{suffix}") == TEXTS * 2


@pytest.mark.parametrize("rows", [1, 3])
def test_a_data_set_saved_by_its_own_library_is_read_and_what_was_cached_in_it_is_not(tmp_path, rows):
    datasets = saved_by_hugging_face()
    datasets.Dataset.from_list(rows_of()).save_to_disk(tmp_path / "in", num_shards=rows)
    (tmp_path / "in" / "cache-0.arrow").write_bytes(FILES["stream.arrow"])

    assert texts_of(tmp_path / "in") == TEXTS
    assert texts_of(f"file://{tmp_path}/in") == TEXTS


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl.gz", gzip.compress(as_lines())[:-9], "ends too early: the compressed file is truncated"),
        ("a.jsonl.zst", packed(as_lines(), ".zst")[:-9], "ends too early: the compressed file is truncated"),
        ("a.jsonl.gz", gzip.compress(as_lines())[:-8] + b"\0" * 8, "is damaged: CRC check failed"),
        ("a.jsonl.gz", as_lines(), "is not a gzip file, though its name says so"),
        ("a.parquet", as_parquet()[:-9], "is not a Parquet file, or is damaged"),
        ("a.parquet", as_lines(), "holds JSON lines, though its name says Parquet; rename it, or say"),
        ("a.parquet", b"nothing of the kind", "is not a Parquet file, or is damaged"),
        ("a.arrow", as_arrow(pa.ipc.new_file)[:-9], "is not an Arrow file, or is damaged"),
        ("a.arrow", as_arrow(pa.ipc.new_stream)[:700], "rows 3 to 4 .record batch 2. can't be read, as it is"),
        ("a.npz", as_arrays().replace(b"ids.npy", b"x" * 7, 1), "File name in directory 'ids.npy' and header"),
        ("a.npz", as_lines(), "holds JSON lines, though its name says npz"),
        ("a.npz", b"no zip", "is not a readable .npz file: File is not a zip file"),
        ("a.csv", b"text\na\n\"b\n", "line 3 is not valid CSV: unexpected end of data"),
        ("a.csv", b"text,id\na,1\nb\n", "line 3 has 1 fields, but the first line names 2: `text`, `id`"),
        ("a.csv", b'text,text\na,"b\n', "has 2 columns called `text`"),
        ("a.csv", b'text\na\n"\n\n"\n\xff\n', "line 6 is not valid UTF-8 .byte 0xff."),
        ("a.json", b'[{"text": "a"}, {"text": "b"}', "value 3 is missing, and so is the ] of its array"),
        ("a.json", b'[{"text": "a"}, ', "value 2 is not valid JSON: Expecting value"),
        ("a.json", b'[{"text": "a"}, {"te', "value 2 is not valid JSON: Unterminated string"),
        ("a.json", b'[{"text": "a"}] 5', "goes on after the end of its array"),
        ("a.json", b'[{"text": "a"}, {"text": "\xff"}]', "value 2 is not valid UTF-8 .byte 0xff"),
        ("a.json", b'[{"text": "a"}, {"body": "b"}]', "value 2 has no `text`; it has `body`"),
        ("a.json", b"[1, 2]", "value 1 is a JSON number, not an object"),
        ("a.txt", b"\xff\xfea\0", "a.txt holds text in UTF-16; convert it to UTF-8"),
        ("a.jsonl", b"\xfe\xff\0{", "a.jsonl holds text in UTF-16; convert it to UTF-8"),
        ("a.csv", b"\xff\xfe\0\0t\0\0\0", "a.csv holds text in UTF-32; convert it to UTF-8"),
        ("a.txt", b"\xe9t\xe9", "line 1 is not UTF-8 text .byte 0 is 0xe9."),
        ("a.jsonl.lz4", b"\x04\x22\x4d\x18\x40\x40", "is compressed .lz4.; unpack it"),
        ("a.jsonl.sz", b"\xff\x06\x00\x00sNaPpY\x00", "is compressed .snappy.; unpack it"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xed\xa0\x80"}\n', "line 2 is not valid UTF-8"),
        ("a.parquet", b"", "is empty .0 bytes."),
        ("a.npz", b"PK\x05\x06" + bytes(18), "has no column of documents: .* found none"),
    ],
)  # fmt: skip
def test_a_faulty_file_is_named_and_what_is_wrong_with_it(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)

    for url in (str(tmp_path / name), f"file://{tmp_path / name}"):
        with pytest.raises(SourceError, match=said) as caught:
            texts_of(url)
        assert str(tmp_path / name) in str(caught.value)


def test_what_was_read_before_a_fault_is_kept_where_faults_are_skipped(tmp_path):
    lines = "".join(json.dumps({"text": f"{n:09}"}) + "\n" for n in range(20_000)).encode()
    contents = {
        "a.jsonl.gz": gzip.compress(lines)[:-2000],
        "a.json": b"[" + lines.replace(b"\n", b",") + b"\xff",
        "a.csv": b"text\n" + b"".join(b"%09d\n" % n for n in range(20_000)) + b'"',
    }
    for name, content in contents.items():
        folder: Path = tmp_path / name.partition(".")[2]
        folder.mkdir()
        (folder / name).write_bytes(content)

        texts = texts_of(folder, on_error="skip")

        assert texts == [f"{n:09}" for n in range(len(texts))]
        assert len(texts) > (8000 if name == "a.jsonl.gz" else 19_999), (name, len(texts))


def test_an_arrow_file_whose_text_points_out_of_it_is_refused_by_row(tmp_path):
    bounds = pa.py_buffer(np.array([0, 2, 1_000_000_000, 4], dtype=np.int32))
    column = pa.Array.from_buffers(pa.string(), 3, [None, bounds, pa.py_buffer(b"abcd")])
    batch = pa.record_batch([column], names=["text"])
    with pa.ipc.new_stream(tmp_path / "a.arrow", batch.schema) as writer:
        writer.write_batch(batch)

    source = open_source(tmp_path, on_error="skip", append_eos=False)
    [documents] = source.read(source.parts()[0])

    assert bytes(documents.tokens.tolist()) == b"ab"
    assert [str(fault).split("arrow ")[1].split(":")[0] for fault in documents.faults] == [
        "row 2 is damaged",
        "row 3 is damaged",
    ]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_a_truncated_compressed_file_says_how_far_it_was_read(tmp_path, name, suffix):
    count = 50_000
    texts = [f"{number * 7919 % 100_003}" * 9 for number in range(count)]
    lines = {
        "a.jsonl": "\n".join(json.dumps({"text": text}) for text in texts),
        "a.json": json.dumps([{"text": text} for text in texts]),
        "a.csv": "\n".join(["text", *texts]),
        "a.txt": "\n\n".join(texts),
    }[name]
    whole = packed(lines.encode(), suffix)
    (tmp_path / (name + suffix)).write_bytes(whole[: len(whole) * 3 // 4])
    read: list[str] = []

    def read_on():
        source = open_source(tmp_path / (name + suffix), append_eos=False)
        for documents in source.read(source.parts()[0]):
            bounds = documents.offsets.tolist()
            read.extend(bytes(documents.tokens[a:b].tolist()).decode() for a, b in zip(bounds, bounds[1:]))

    with pytest.raises(SourceError, match=r"truncated.*\(after (line|value) [0-9,]+\)$") as raised:
        read_on()

    last = int(str(raised.value).rpartition(" ")[2].strip(")").replace(",", ""))
    rows = {"a.csv": last - 1, "a.txt": last // 2 + 1}.get(name, last)
    assert read == texts[:rows]
    assert 0 < rows < count


def test_masks_of_booleans_in_arrays_keep_their_places(tmp_path):
    flags = {"loss_mask": np.array([0, 1, 1, 0, 1, 0, 1, 1, 1, 0], bool), "attention_mask": np.ones(10, bool)}
    rows = {"input_ids": np.arange(10, dtype=np.int32), "offsets": np.array([0, 3, 10])}
    np.savez(tmp_path / "a.npz", **rows, **flags)
    np.savez(tmp_path / "b.npz", input_ids=np.ones(3, bool), offsets=np.array([0, 3]))

    source = open_source(tmp_path / "a.npz")
    (documents,) = [d for part in source.parts() for d in source.read(part)]

    assert documents.tokens.tolist() == list(range(10))
    assert documents.offsets.tolist() == [0, 3, 10]
    assert documents.loss_mask.tolist() == flags["loss_mask"].astype(int).tolist()
    wrong = open_source(tmp_path / "b.npz")
    with pytest.raises(SourceError, match="row 1"):
        list(wrong.read(wrong.parts()[0]))


ANY_TEXTS = st.lists(st.text(st.sampled_from("ab\n\r\ufeffż🦆\u2028"), max_size=12), min_size=1, max_size=12)
BLANKS = st.lists(st.sampled_from(["", " ", "\t", "\r", "\ufeff"]), min_size=12, max_size=12)


def read_texts(source: Source, target_bytes: int) -> tuple[list[str], list[str]]:
    texts, faults = [], []
    for part in source.parts(target_bytes):
        for documents in source.read(part):
            bounds = documents.offsets.tolist()
            texts += [bytes(documents.tokens[a:b].tolist()).decode() for a, b in zip(bounds, bounds[1:])]
            faults += [str(fault) for fault in documents.faults]
    return texts, faults


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("parts")


ENDS = st.sampled_from(["\n", "\r\n"])


@given(ANY_TEXTS, BLANKS, ENDS, st.booleans(), st.integers(1, 90))
def test_a_jsonl_file_cut_anywhere_gives_each_line_once_and_in_order(folder, texts, blanks, end, ended, size):
    path = folder / "a.jsonl"
    rows = [json.dumps({"text": text}, ensure_ascii=False) + end for text in texts]
    content = "".join(row + (blank + end if blank else "") for row, blank in zip(rows, blanks))
    path.write_bytes(content.encode() if ended else content.rstrip().encode())
    source = open_source(path, append_eos=False)

    assert read_texts(source, size) == (texts, [])


@given(ANY_TEXTS, st.integers(1, 4), st.sampled_from([1, 100, 200, 1000]))
def test_tables_cut_at_row_groups_or_batches_give_each_row_once_and_in_order(
    folder, texts, rows, target_bytes
):
    table = pa.table({"text": texts})
    pq.write_table(table, folder / "a.parquet", row_group_size=rows)
    with pa.ipc.new_file(folder / "a.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=rows)

    for name in ("a.parquet", "a.arrow"):
        source = open_source(folder / name, append_eos=False)
        assert read_texts(source, target_bytes) == (texts, [])
        assert len(source.parts(1)) == -(-len(texts) // rows)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 300))
def test_a_fault_in_the_middle_of_a_cut_file_is_named_by_its_line(folder, are_good, target_bytes):
    path = folder / "b.jsonl"
    rows = ['{"text": "first"}', *('{"text": "good"}' if good else '{"text": 5}' for good in are_good)]
    path.write_text("\n\n".join(rows) + "\n{}")
    bad = [2 * n + 3 for n, good in enumerate(are_good) if not good]
    source = open_source(path, append_eos=False, on_error="skip")

    texts, faults = read_texts(source, target_bytes)

    assert texts == ["first"] + ["good"] * sum(are_good)
    expected = [f"{path} line {n} holds number in `text`, which must be a string" for n in bad]
    assert faults == [*expected, f"{path} line {2 * len(rows)} has no `text`; it has none"]
    with pytest.raises(SourceError) as caught:
        read_texts(replace(source, on_error="raise"), target_bytes)
    way_out = 'on_error="skip" (--on-error skip) leaves such records out and counts them'
    assert str(caught.value) == f"{faults[0]}; {way_out}"


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_fault_in_the_middle_of_a_cut_table_is_named_by_its_row(tmp_path, name):
    table = pa.table({"text": [None if n in (7, 123) else "abc" * 9 for n in range(200)]})
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name, row_group_size=10)
    else:
        with pa.ipc.new_file(tmp_path / name, table.schema) as file:
            file.write_table(table, max_chunksize=10)
    source = open_source(tmp_path / name, on_error="skip", append_eos=False)

    texts, faults = read_texts(source, 300)

    assert len(source.parts(300)) > 5
    assert len(texts) == 198
    assert [fault.split(" holds")[0] for fault in faults] == [f"{tmp_path / name} row {n}" for n in (8, 124)]


def test_the_first_fault_of_a_batch_is_raised_whoever_found_it(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": 5}\n{\n{"text": null}\n')

    with pytest.raises(SourceError, match="line 2 holds number"):
        read_texts(open_source(tmp_path), 1 << 20)
    faults = read_texts(open_source(tmp_path, append_eos=False, on_error="skip"), 1 << 20)[1]
    assert [fault.split("line ")[1][0] for fault in faults] == ["2", "3", "4"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_first_object_without_fields_is_a_fault_and_hides_no_other_row(tmp_path, name):
    (tmp_path / name).write_text('{}\n{"text": "a"}\n')

    texts, faults = read_texts(open_source(tmp_path, on_error="skip", append_eos=False), 1 << 20)

    assert texts == ["a"]
    assert faults[0].endswith(" 1 has no `text`; it has none")
    (tmp_path / name).write_text("{}")
    with pytest.raises(SourceError, match="begins with an object without any field"):
        read_texts(open_source(tmp_path), 1 << 20)


def test_small_files_share_a_part_and_large_ones_are_cut_in_the_order_of_their_names(tmp_path):
    for name, size in (("a", 10), ("b", 10), ("c", 400), ("d", 10), ("e", 60), ("f", 60)):
        lines = [json.dumps({"text": f"{name}{n}"}) + "\n" for n in range(size // 10)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    source = open_source(tmp_path, append_eos=False)

    parts = source.parts(150)

    assert [[span.file for span in part] for part in parts][:2] == [[0, 1], [2]]
    assert [len(part) for part in parts][-2:] == [2, 1]
    assert (
        read_texts(source, 150)[0]
        == read_texts(source, 1 << 20)[0]
        == sorted(read_texts(source, 1)[0], key=_place)
    )


def _place(text: str) -> tuple[str, int]:
    return text[0], int(text[1:])


def test_a_line_that_is_too_long_is_refused_by_the_part_that_it_begins_in_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "MOST_RECORD_BYTES", 1000)
    long = json.dumps({"text": "x" * 3000})
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + long + '\n{"text": "b"}\n')

    texts, faults = read_texts(open_source(tmp_path, append_eos=False, on_error="skip"), 500)

    assert texts == ["a", "b"]
    assert len(faults) == 1
    assert "holds a line of more than" in faults[0]


def test_a_broken_file_among_others_is_skipped_when_files_are_cut(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.parquet").write_bytes(b"PAR1" + bytes(500) + b"PAR1")

    texts, faults = read_texts(open_source(tmp_path, append_eos=False, on_error="skip"), 100)

    assert texts == ["a"]
    assert [fault.split(":")[0] for fault in faults] == [f"{tmp_path / 'b.parquet'} (what is left of it)"]
    with pytest.raises(SourceError, match=r"b\.parquet is not a Parquet file, or is damaged"):
        open_source(tmp_path).parts(100)


def test_an_encrypted_column_is_a_fault_and_the_columns_beside_it_are_read(tmp_path):
    class Keys(encryption.KmsClient):
        def wrap_key(self, key, name):
            return base64.b64encode(key)

    settings = encryption.EncryptionConfiguration("f", column_keys={"c": ["text"]}, plaintext_footer=True)
    factory = encryption.CryptoFactory(lambda _: Keys())
    keys = factory.file_encryption_properties(encryption.KmsConnectionConfig(), settings)
    table = pa.table({"text": ["abc"] * 3, "note": ["a", "b", "c"]})
    pq.write_table(table, tmp_path / "a.parquet", encryption_properties=keys)
    closed, beside = (
        open_source(tmp_path, columns={"text": name}, append_eos=False, on_error="skip")
        for name in table.schema.names
    )

    assert read_texts(beside, 100) == (["a", "b", "c"], [])
    assert ["Cannot decrypt" in fault for fault in read_texts(closed, 100)[1]] == [True]


def test_a_packed_table_is_one_part_since_each_would_unpack_it_whole(tmp_path):
    pq.write_table(pa.table({"text": ["abc"] * 100}), tmp_path / "a.parquet", row_group_size=10)
    packed = gzip.compress((tmp_path / "a.parquet").read_bytes())
    (tmp_path / "a.parquet").rename(tmp_path / "b.parquet.gz")
    (tmp_path / "b.parquet.gz").write_bytes(packed)

    source = open_source(tmp_path, append_eos=False)

    assert len(source.parts(100)) == 1
    assert read_texts(source, 100)[0] == ["abc"] * 100


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow"])
def test_large_batches_are_cut_without_losing_a_row_and_their_faults_are_numbered(tmp_path, name):
    texts = [None if n in (8200, 17_000, 19_998) else f"{n:05}" for n in range(20_000)]
    table = pa.table({"text": texts})
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name, row_group_size=16_000)
    else:
        opened = pa.ipc.new_file if name == "file.arrow" else pa.ipc.new_stream
        with opened(tmp_path / name, table.schema) as file:
            file.write_table(table, max_chunksize=16_000)

    found, faults = read_texts(open_source(tmp_path, on_error="skip", append_eos=False), 1 << 30)

    assert found == [text for text in texts if text]
    assert [fault.split(" holds")[0].split(" row ")[1] for fault in faults] == ["8,201", "17,001", "19,999"]


def test_a_table_that_breaks_off_says_after_which_row(tmp_path):
    table = pa.table({"text": ["abc" * 9] * 90})
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=30)
    content = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(content[:-300])

    with pytest.raises(
        SourceError, match=r"rows 61 to 90 \(record batch 3\) can't be read, as it is damaged: "
    ):
        read_texts(open_source(tmp_path, append_eos=False), 1 << 30)


def test_progress_moves_within_a_file_that_cannot_be_cut(tmp_path):
    random = np.random.default_rng(0)
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(4):
            file.write(json.dumps({"text": random.bytes(1 << 20).hex()}).encode() + b"\n")
    size = (tmp_path / "a.jsonl.gz").stat().st_size
    source, packed, looked_at = open_source(tmp_path / "a.jsonl.gz"), [], []

    read_lengths(source, lambda done, total, text: looked_at.append((done, total)))
    with Crew(processes=2).started() as team:
        build_store(
            source, tmp_path / "store", {}, team=team, on_progress=lambda *said: packed.append(said[:2])
        )

    for said in (looked_at, packed):
        assert said == sorted(said)
        assert (said[0], said[-1]) == ((0, size), (size, size))
        assert len({done for done, _ in said}) >= 4


def test_progress_counts_what_is_read_once_however_often_it_is_opened(tmp_path):
    for number in range(20):
        (tmp_path / f"{number:02}.jsonl").write_text(json.dumps({"text": "a" * 5000}) + "\n")
    sizes = [file.stat().st_size for file in sorted(tmp_path.iterdir())]
    seen = []

    read_lengths(open_source(tmp_path), lambda done, total, text: seen.append(done))

    assert sorted(set(seen)) == np.cumsum([0, *sizes]).tolist()

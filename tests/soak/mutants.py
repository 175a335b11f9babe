"""Files of every format with something wrong in them, read in a process of their own: a crash must not end the tests.

`python -m tests.soak.mutants FIRST COUNT FOLDER` reads so many files, each made from its number alone, and prints a
JSON object of counts; the number and the bytes of the file at hand lie in FOLDER for whoever asks why it crashed.
"""

import csv
import gzip
import io
import json
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from tests.support.listed_files import find_files

from varlen.documents.documents import Documents
from varlen.documents.source import Source, open_source
from varlen.errors import VarlenError

TEXTS = ["one", "", "two\nlines", 'say "hi", you', "żółć 🦆", "tab\there", "x" * 40, "a\\b", "[1]", "5"]
WORDS = [b'"', b"\\", b"\n", b",", b"{", b"}", b"[", b"]", b"null", b"\\ud800", b"\xff", b"\xef\xbb\xbf"]
WORDS += [b"1e999", b'"text"', b"\r\n", b"\r", b"\t", b'""', b":", b"\x00", b"-1", b"9" * 30, b"true"]
WORDS += [b"{" * 50, b"\xed\xa0\x80"]
LONGEST_S = 20
"""One file must be read within this time."""


def _rows(rng: Random) -> list[dict[str, Any]]:
    return [{"id": n, "text": rng.choice(TEXTS)} for n in range(rng.randint(1, 6))]


def _chats(rng: Random) -> list[dict[str, Any]]:
    def say(role: str) -> dict[str, str]:
        return {"role": role, "content": rng.choice(TEXTS) + "!"}

    return [
        {"messages": [say("user"), say("assistant")] * rng.randint(1, 2)} for _ in range(rng.randint(1, 4))
    ]


def _ids(rng: Random) -> list[dict[str, Any]]:
    rows = []
    for _ in range(rng.randint(1, 5)):
        ids = [rng.randrange(1000) for _ in range(rng.randint(0, 9))]
        rows.append({"input_ids": ids, "loss_mask": [rng.randrange(2) for _ in ids]})
    return rows


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _csv(rows: list[dict[str, Any]], delimiter: str) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=2, **options)
    return sink.getvalue()


def _arrow(rows: list[dict[str, Any]], *, is_file: bool) -> bytes:
    sink = io.BytesIO()
    table = pa.Table.from_pylist(rows)
    with (pa.ipc.new_file if is_file else pa.ipc.new_stream)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue()


def _feather(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    feather.write_feather(pa.Table.from_pylist(rows), sink, compression="lz4")
    return sink.getvalue()


def _npz(rows: list[dict[str, Any]], save: Callable[..., None]) -> bytes:
    sink = io.BytesIO()
    offsets = np.cumsum([0, *(len(row["input_ids"]) for row in rows)])
    ids, mask = ([n for row in rows for n in row[name]] for name in ("input_ids", "loss_mask"))
    save(sink, ids=np.array(ids, np.uint16), loss_mask=np.array(mask, np.uint8), offsets=offsets)
    return sink.getvalue()


KINDS: dict[str, Callable[[Random], bytes]] = {
    "text.jsonl": lambda rng: _lines(_rows(rng)),
    "text.json": lambda rng: json.dumps(_rows(rng), indent=rng.choice([None, 1])).encode(),
    "lines.json": lambda rng: _lines(_rows(rng)),
    "text.csv": lambda rng: _csv(_rows(rng), ","),
    "text.tsv": lambda rng: _csv(_rows(rng), "\t"),
    "text.txt": lambda rng: "\n".join(row["text"] for row in _rows(rng)).encode(),
    "chats.jsonl": lambda rng: _lines(_chats(rng)),
    "ids.jsonl": lambda rng: _lines(_ids(rng)),
    "text.parquet": lambda rng: _parquet(_rows(rng), compression=rng.choice(["none", "snappy", "zstd"])),
    "chats.parquet": lambda rng: _parquet(_chats(rng), use_dictionary=rng.random() < 0.5),
    "ids.parquet": lambda rng: _parquet(_ids(rng), write_page_checksum=rng.random() < 0.3),
    "text.arrow": lambda rng: _arrow(_rows(rng), is_file=True),
    "chats.arrow": lambda rng: _arrow(_chats(rng), is_file=False),
    "ids.arrow": lambda rng: _arrow(_ids(rng), is_file=rng.random() < 0.5),
    "text.feather": lambda rng: _feather(_rows(rng)),
    "ids.npz": lambda rng: _npz(_ids(rng), np.savez),
    "packed.npz": lambda rng: _npz(_ids(rng), np.savez_compressed),
}


def packed(content: bytes, compression: str) -> bytes:
    if compression == ".gz":
        return gzip.compress(content, mtime=0)
    return bytes(pa.Codec("zstd").compress(content, asbytes=True)) if compression else content


def mutated(content: bytes, other: bytes, rng: Random) -> bytes:
    """Break a file in one place, or a few."""
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        content = _broken(content, other, rng)
    return content


def _broken(content: bytes, other: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    stop = min(at + rng.choice([1, 2, 4, 8, 40]), len(content))
    before, some, after = content[:at], content[at:stop], content[stop:]
    ways: list[Callable[[], bytes]] = [
        lambda: before + bytes(byte ^ 1 << rng.randrange(8) for byte in some[:1]) + some[1:] + after,
        lambda: before + bytes(rng.randrange(256) for _ in some) + after,
        lambda: before + rng.choice([b"\x00", b"\xff", b"\x7f"]) * len(some) + after,
        lambda: before,
        lambda: before + after,
        lambda: before + some + some + after,
        lambda: before + other[rng.randrange(len(other) + 1) :],
        lambda: before + rng.choice(WORDS) + some + after,
        lambda: before + rng.choice(WORDS) + after,
    ]
    return rng.choice(ways)()


def mutant(number: int) -> tuple[str, bytes]:
    """Make one file from its number: its name and its bytes. One in ten is whole."""
    rng = Random(number)
    kind = list(KINDS)[number % len(KINDS)]
    content, other = KINDS[kind](rng), KINDS[rng.choice([kind, kind, *KINDS])](rng)
    compression = rng.choice(["", "", ".gz", ".zst"])
    is_late = rng.random() < 0.5  # what is packed is broken before, or after
    if not is_late:
        content = packed(content, compression)
    if rng.random() < 0.9:
        content = mutated(content, other, rng)
    return kind + compression, packed(content, compression) if is_late else content


def read_one(path: Path, content: bytes, cut: int, settings: Source) -> Counter[str]:
    """Read a file in both ways of taking errors, and check what comes out."""
    path.write_bytes(content)
    counts: Counter[str] = Counter(files=1)
    if not content:
        with pytest.raises(VarlenError, match=r"is empty \(0 bytes\)"):
            find_files(path)
        return counts
    source = replace(settings, files=tuple(find_files(path)))
    for on_error in ("raise", "skip"):
        outcome = check(replace(source, on_error=on_error), content, cut)
        counts[f"{on_error}: {outcome}"] += 1
    return counts


def main(first: int, count: int, folder: Path) -> int:
    """Read files; returns 1 at the first that is read wrongly."""
    counts: Counter[str] = Counter()
    (folder / "whole.jsonl").write_bytes(_lines([{"text": "a"}]))
    settings = open_source(folder / "whole.jsonl", append_eos=False, text_cut="line")
    with (folder / "at.txt").open("w") as note:
        for number in range(first, first + count):
            name, content = mutant(number)
            note.seek(0)
            note.write(f"{number:>10} {name:<20}")
            note.flush()
            signal.alarm(LONGEST_S)  # ends the process, wherever it hangs
            try:
                counts += read_one(folder / name, content, number % 2, settings)
            except BaseException:
                said = f"file {number} ({name}) is read wrongly:\n{content!r}\n{traceback.format_exc()}"
                print(said, file=sys.stderr)
                return 1
    signal.alarm(0)
    print(json.dumps(counts))
    return 0


BLANKS = b"\xef\xbb\xbf \t\r\n"
GONE = object()  # a record that is no text
OTHERS = {"input_ids", "messages", "conversations"}
OTHER = object()  # what a splice has made rows of ids or chats


def check(source: Source, content: bytes, cut: int) -> str:
    """Read a source of one file, in one part or in many, and compare.

    Oracles: JSON lines by `json.loads` line by line, other JSON by `json` value by value, CSV by `csv` row by row,
    text by its line ends: every text that is right, in order, none else, and as many faults as records are wrong; an
    error in place of the first fault where errors are raised. npz: what `numpy.load` gives, where it gives anything.
    Chats, Parquet and Arrow, which keep no check on their bytes: an error, or documents of consistent shape. What
    doesn't unpack: an error, or at least one fault.
    """
    path = source.files[0].path
    batches, said = everything(source, 64 if cut else 1 << 20)
    if batches is None:
        assert path in said, f"names no file: {said}"
        assert len(said) < 2000, f"is no sentence: {said}"
    else:
        assert_shapes(batches)
    faults = [fault for documents in batches or [] for fault in documents.faults]
    assert all(str(fault).startswith(path) for fault in faults), faults
    if source.on_error == "skip":
        assert batches is not None, "raises though errors are to be skipped"
    plain = unpacked(content)
    if plain is None:
        assert batches is None or faults, "what doesn't unpack is read without a word"
    elif source.files[0].name.startswith(
        ("text.jsonl", "text.json", "lines.json", "text.csv", "text.tsv", "text.txt")
    ):
        found = list(records(source, plain))
        # Behind a damaged value, a JSON file's reader takes the form of what follows.
        is_other = source.files[0].format == "json" and any(name.encode() in plain for name in OTHERS)
        if OTHER not in found and not is_other:
            compare(source, found, batches, len(faults))
    elif source.files[0].format == "npz" and batches is not None and not faults:
        compare_arrays(plain, batches)
    return "error" if batches is None else "faults" if faults else "read"


def everything(source: Source, target_bytes: int) -> tuple[list[Documents] | None, str]:
    """Read all parts; returns what comes out, or None and what the error says."""
    try:
        parts = source.parts(target_bytes)
        return [documents for part in parts for documents in source.read(part)], ""
    except VarlenError as error:
        return None, str(error)


def assert_shapes(batches: list[Documents]) -> None:
    for documents in batches:
        offsets, tokens = documents.offsets, documents.tokens
        assert (tokens.dtype, offsets.dtype) == (np.int32, np.int64)
        assert (offsets[0], offsets[-1]) == (0, len(tokens))
        assert (np.diff(offsets) >= 0).all()
        assert len(tokens) == 0 or tokens.min() >= 0
        if documents.loss_mask is not None:
            assert documents.loss_mask.shape == tokens.shape
            assert set(documents.loss_mask.tolist()) <= {0, 1}


def unpacked(content: bytes) -> bytes | None:
    if content.startswith(b"\x1f\x8b"):
        try:
            return gzip.decompress(content)
        except Exception:
            return None
    if content.startswith(b"\x28\xb5\x2f\xfd"):
        try:
            return bytes(pa.input_stream(pa.BufferReader(content), compression="zstd").read())
        except OSError:
            return None
    return content


def records(source: Source, plain: bytes) -> Iterator[Any]:
    """Yield each record's text, GONE for one that is none, and an exception where the rest can't be read."""
    file = source.files[0]
    if file.suffix_compression and plain and not _is_packed(file.path):
        yield ValueError("not compressed, though its name says so")
        return
    readers = {"jsonl": of_lines, "json": of_values, "csv": of_csv, "tsv": of_csv, "text": of_text}
    reader = readers[file.format]
    yield from reader(plain, "\t" if file.format == "tsv" else ",") if reader is of_csv else reader(plain)


def _is_packed(path: str) -> bool:
    with open(path, "rb") as file:  # noqa: PTH123
        return file.read(4).startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd"))


def compare(source: Source, found: list[Any], batches: list[Documents] | None, num_faults: int) -> None:
    """Require the right texts, and a fault for each wrong record."""
    texts = [record for record in found if isinstance(record, str)]
    wrong = len(found) - len(texts)
    if source.on_error == "raise" or batches is None:
        assert (batches is None) == (wrong > 0), (
            f"{wrong} records are wrong, and an error is {batches is None}"
        )
    if batches is not None:
        ours = [text for documents in batches for text in decoded(documents)]
        is_whole = not any(isinstance(record, Exception) for record in found)
        assert ours == texts if is_whole else ours[: len(texts)] == texts, (ours, texts)
        if not found or not isinstance(found[-1], Exception):
            assert num_faults == wrong, (num_faults, wrong)


def decoded(documents: Documents) -> list[str]:
    bounds = documents.offsets.tolist()
    return [documents.tokens[a:b].astype(np.uint8).tobytes().decode() for a, b in zip(bounds, bounds[1:])]


def text_of(row: Any) -> Any:
    text = row.get("text", GONE) if isinstance(row, dict) else GONE
    if not isinstance(text, str):
        return GONE
    try:
        text.encode()
    except UnicodeEncodeError:
        return GONE
    return text


def with_names(rows: list[Any]) -> Iterator[Any]:
    """Yield the texts of rows, of which the first object must have one."""
    objects = [row for row in rows if isinstance(row, dict) and row]
    told = [row for row in objects if "text" in row or OTHERS.intersection(row)]
    names = next(iter([*told, *objects]), None)
    if any(OTHERS.intersection(row) for row in told):
        yield OTHER
        return
    if rows and (names is None or "text" not in names):
        yield ValueError("no column of documents")
    else:
        yield from (row if isinstance(row, Exception) else text_of(row) for row in rows)


def of_lines(plain: bytes) -> Iterator[Any]:
    """JSON lines, each by itself."""
    rows: list[Any] = []
    for line in plain.split(b"\n"):
        if line.strip(BLANKS):
            try:
                rows.append(json.loads(line.removeprefix(b"\xef\xbb\xbf").decode()))
            except (ValueError, RecursionError):
                rows.append(GONE)
    return with_names(rows)


def of_values(plain: bytes) -> Iterator[Any]:
    """An array, or values one after the other, with commas or without."""
    bad: Exception | None = None
    try:
        text = plain.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = error.start + (3 if plain.startswith(b"\xef\xbb\xbf") else 0)
        text, bad = plain[:start].decode("utf-8-sig"), error
    rows: list[Any] = []
    at, decoder = _blank(text, 0), json.JSONDecoder()
    is_array = text[at : at + 1] == "["
    at = _blank(text, at + is_array)
    while at < len(text):
        if is_array and text[at] == "]":
            rest = _blank(text, at + 1)
            if rest < len(text) or bad:
                rows.append(bad or ValueError("goes on"))
            return with_names(rows)
        if rows and text[at] == ",":
            at = _blank(text, at + 1)
        try:
            row, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            return with_names([*rows, error])
        end, at = at, _blank(text, at)
        odd = (text[at : at + 1] or "?" * bool(bad)) * (text[end : end + 1] != ",")
        if odd and (odd not in ",]{[" and "\n" not in text[end:at] if isinstance(row, dict) else odd in ":}"):
            return with_names([*rows, ValueError("an object goes on behind its end")])
        rows.append(row)
    if bad or is_array:
        rows.append(bad or ValueError("no ]"))
    return with_names(rows)


def _blank(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip(" \t\r\n"))


def of_csv(plain: bytes, delimiter: str) -> Iterator[Any]:
    """Rows of a table, the first of them names."""
    bad: Exception | None = None
    text = plain.decode("utf-8-sig", "surrogateescape")
    rows: list[list[str]] = []
    try:
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True):
            rows += [row] if row else []
    except csv.Error as error:
        bad = error
    if not rows:
        return iter([bad] if bad else [])
    names = rows[0]
    if len(set(names)) < len(names) or "text" not in names:
        return iter([bad or ValueError("names")])
    place = names.index("text")
    are_whole = [len(row) == len(names) and text_of({"text": "".join(row)}) is not GONE for row in rows]
    found: list[Any] = [row[place] if is_whole else GONE for row, is_whole in zip(rows, are_whole)][1:]
    return iter([*found, *([bad] if bad else [])])


def of_text(plain: bytes) -> Iterator[Any]:
    """Lines that aren't blank."""
    for number, line in enumerate(plain.split(b"\n")):
        ended = line[:-1] if line.endswith(b"\r") and number < plain.count(b"\n") else line
        if line.strip(BLANKS if number == 0 else None):
            try:
                text = ended.decode()
                if "\0" in text:
                    raise ValueError("no text")
                yield text.removeprefix("\ufeff") if number == 0 else text
            except ValueError:
                yield GONE


def compare_arrays(plain: bytes, batches: list[Documents]) -> None:
    """Require what numpy reads, where it reads anything."""
    try:
        with np.load(io.BytesIO(plain), allow_pickle=False) as arrays:
            ids, offsets, mask = (arrays[name] for name in ("ids", "offsets", "loss_mask"))
    except Exception:
        return
    tokens = np.concatenate([documents.tokens for documents in batches]) if batches else np.zeros(0)
    assert np.array_equal(tokens, ids)
    assert [n for d in batches for n in d.lengths.tolist()] == np.diff(offsets).tolist()
    marks = [np.ones(len(d.tokens)) if d.loss_mask is None else d.loss_mask for d in batches]
    assert np.array_equal(np.concatenate(marks) if marks else np.zeros(0), mask)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))

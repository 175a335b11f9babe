"""What must come out of a broken file, said by plain readers of the standard library."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from varlen.documents.documents import Documents
from varlen.documents.source import Source
from varlen.errors import VarlenError

BLANKS = b"\xef\xbb\xbf \t\r\n"
GONE = object()
"""A record that is no text."""
OTHERS = {"input_ids", "messages", "conversations"}
OTHER = object()
"""What a splice has made rows of ids or chats."""


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
        if OTHER not in found:
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
    """Require that arrays fit each other."""
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
    """Return what a file holds, or None where it doesn't unpack."""
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
    """Return the texts of byte tokens."""
    bounds = documents.offsets.tolist()
    return [documents.tokens[a:b].astype(np.uint8).tobytes().decode() for a, b in zip(bounds, bounds[1:])]


def text_of(row: Any) -> Any:
    """Return a row's text, or GONE."""
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
        rows.append(row)
        at = _blank(text, at)
    if bad or is_array:
        rows.append(bad or ValueError("no ]"))
    return with_names(rows)


def _blank(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def of_csv(plain: bytes, delimiter: str) -> Iterator[Any]:
    """Rows of a table, the first of them names."""
    bad: Exception | None = None
    try:
        text = plain.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = error.start + (3 if plain.startswith(b"\xef\xbb\xbf") else 0)
        text, bad = plain[: plain.rfind(b"\n", 0, start) + 1].decode("utf-8-sig"), error
    rows: list[list[str]] = []
    try:
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True):
            rows += [row] if row else []
    except csv.Error as error:
        bad = bad or error
    if not rows:
        return iter([bad] if bad else [])
    names = rows[0]
    if len(set(names)) < len(names) or "text" not in names:
        return iter([bad or ValueError("names")])
    place = names.index("text")
    found: list[Any] = [row[place] if len(row) == len(names) else GONE for row in rows[1:]]
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

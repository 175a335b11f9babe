"""Files of every format with something wrong in them, read in a process of their own: a crash must not end the tests.

Run as a script: `mutants.py FIRST COUNT FOLDER` reads so many files, each made from its number alone, and prints a
JSON object of counts; the number and the bytes of the file at hand lie in FOLDER for whoever asks why it crashed.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from tests.soak.reading_oracle import check

from varlen.documents.source import Source, open_source
from varlen.errors import VarlenError
from varlen.files.finding import find_files

TEXTS = ["one", "", "two\nlines", 'say "hi", you', "żółć 🦆", "tab\there", "x" * 40, "a\\b", "[1]", "5"]
WORDS = [
    b'"',
    b"\\",
    b"\n",
    b",",
    b"{",
    b"}",
    b"[",
    b"]",
    b"null",
    b"\\ud800",
    b"\xff",
    b"\xef\xbb\xbf",
    b"1e999",
]
WORDS += [
    b'"text"',
    b"\r\n",
    b"\r",
    b"\t",
    b'""',
    b":",
    b"\x00",
    b"-1",
    b"9" * 30,
    b"true",
    b"{" * 50,
    b"\xed\xa0\x80",
]
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
    """Compress a file."""
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


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))

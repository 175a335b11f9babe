"""Reading and tokenizing files: what they take beside the bare tokenizer on the same text, in one process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.checks import WrongResultError
from benchmarks.rows import Contestant, Race, Row
from benchmarks.step import Step
from benchmarks.stopwatch import alternate
from varlen.documents.source import open_source
from varlen.documents.texts import interpreter_texts
from varlen.text.load_tokenizer import train_bpe

SECTION = "reading"
VOCABULARY = 16_384
CHARACTERS = 12_000_000
ROUNDS = 5
TARGET = 1 / 1.15
"""At most 15 % over the bare tokenizer."""
FORMS = ("JSON lines", "JSON lines, zstd", "Parquet", "CSV")


def steps() -> list[Step]:
    """Return what this section measures."""
    return [*(Step(form, partial(_race_texts, form)) for form in FORMS), Step("chats", _race_chats)]


@cache
def source_texts() -> list[str]:
    """Return Python sources, functions and whole modules, without the carriage returns that CSV would normalize."""
    texts, characters = [], 0
    for text in interpreter_texts():
        texts.append(text)
        characters += len(text)
        if characters >= CHARACTERS:
            break
    return texts


@cache
def trained_tokenizer() -> Any:
    return train_bpe(source_texts()[:: max(len(source_texts()) // 4000, 1)], VOCABULARY)


def _race_texts(form: str) -> list[Row]:
    """Race reading a file against the tokenizer on texts that stand in memory."""
    with _file(form, [{"text": text} for text in source_texts()]) as path:
        return [_race(f"read and tokenize {form}", path, source_texts(), append_eos=False)]


def _race_chats() -> list[Row]:
    """Race chats: finding out what the assistant says counts as reading."""
    texts = source_texts()
    chats = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in zip(texts[::2], texts[1::2])
    ]
    rendered = [
        "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat) for chat in chats
    ]
    with _file("JSON lines", [{"messages": chat} for chat in chats]) as path:
        what = "read and tokenize chats, ChatML, with the mask of what is supervised"
        return [_race(what, path, rendered, append_eos=True)]


def _race(what: str, path: Path, texts: list[str], *, append_eos: bool) -> Race:
    tokenizer = trained_tokenizer()
    source = open_source(path, tokenizer, append_eos=append_eos, text_cut="file")

    def read() -> int:
        return sum(len(some.tokens) for part in source.parts() for some in source.read(part))

    def bare() -> int:
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return sum(len(encoding.ids) for encoding in encodings)

    ours, theirs = read(), bare()
    if not 0.98 * theirs <= ours <= 1.02 * theirs or (not append_eos and ours != theirs):
        raise WrongResultError(f"{ours:,} tokens were read, {theirs:,} made by the tokenizer")
    samples = alternate(read, bare, rounds=ROUNDS)
    size = f"{sum(map(len, texts)) / 1e6:.0f} MB of Python sources"
    return Race(
        section=SECTION,
        what=what,
        ours=Contestant(name="varlen", call="open_source(file).read", samples=samples[0]),
        peer=Contestant(
            name="tokenizers", call="encode_batch_fast and the ids, texts in memory", samples=samples[1]
        ),
        tokens=theirs,
        target=TARGET,
        note=f"{size}, vocabulary of {VOCABULARY:,}, one thread",
    )


@contextmanager
def _file(form: str, rows: list[dict[str, Any]]) -> Iterator[Path]:
    """Write rows to a temporary file."""
    import csv

    import pyarrow as pa
    import pyarrow.parquet as pq

    with tempfile.TemporaryDirectory() as folder:
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        if form == "Parquet":
            path = Path(folder, "data.parquet")
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1000)
        elif form == "CSV":
            path = Path(folder, "data.csv")
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        elif form.endswith("zstd"):
            path = Path(folder, "data.jsonl.zst")
            with pa.CompressedOutputStream(str(path), "zstd") as file:
                file.write(lines)
        else:
            path = Path(folder, "data.jsonl")
            path.write_bytes(lines)
        yield path

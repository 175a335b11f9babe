"""Documents to pack offline, what rows say they hold, and runs that end too early."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from varlen.documents.source import Source, open_source
from varlen.offline import index as index_module
from varlen.offline.crew import Crew
from varlen.offline.pack import PackedSet, PackSettings, pack_source

WORDS = ["tokens", "of", "a", "document", "that", "nobody", "loses,", "wherever", "it", "is", "cut"]


def write_texts(path: Path, count: int = 60, seed: int = 0) -> list[str]:
    """Write a JSONL file of texts of 1 to 24 words; returns them."""
    random = np.random.default_rng(seed)
    texts = [f"{n} " + " ".join(random.choice(WORDS, random.integers(1, 24))) for n in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return texts


def write_chats(path: Path, count: int = 24) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n} + {n}?"},
                {"role": "assistant", "content": "It is " + " ".join([str(2 * n)] * (1 + n % 5))},
            ]
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def small_parts(monkeypatch: Any, tokens: int = 1 << 24) -> None:
    """Have sources cut into parts of 2 kB, and shards closed early."""
    monkeypatch.setattr(index_module, "PART_BYTES", 2000)
    monkeypatch.setattr(index_module, "SHARD_TOKENS", tokens)


def pack(data: Any, output: Path, *, processes: int = 1, tokenizer: Any = None, **settings: Any) -> PackedSet:
    """Pack texts with the byte tokenizer into rows of 256, several parts."""
    source = data if isinstance(data, Source) else open_source(data, tokenizer, append_eos=tokenizer is None)
    more = {name: settings.pop(name) for name in ("tokens", "overwrite", "crew") if name in settings}
    more.setdefault("crew", Crew(processes=processes))
    chosen = PackSettings(**{"capacity": 256, "part_tokens": 1000, **settings})
    return pack_source(source, output, chosen, **more)


def table_of(folder: Path) -> pa.Table:
    tables = []
    for path in sorted(folder.glob("part-*")):
        if path.suffix == ".parquet":
            tables.append(pq.read_table(path))
        else:
            with pa.OSFile(str(path)) as file:
                tables.append(pa.ipc.open_stream(file).read_all())
    return pa.concat_tables(tables)


def documents_of(folder: Path) -> list[tuple[list[int], list[int]]]:
    found = []
    for row in table_of(folder).to_pylist():
        at = 0
        for length in row["seq_lengths"]:
            found.append((row["input_ids"][at : at + length], row["labels"][at : at + length]))
            at += length
        assert at == len(row["input_ids"]) == len(row["labels"])
    return found


def text_ids(text: str) -> list[int]:
    return [*text.encode(), 256]


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class DyingTokenizer:
    """Bytes of a text; ends its process, by a signal, at a text that begins so, as long as a file is there."""

    def __init__(self, first: str, trigger: Path) -> None:
        self._first, self._trigger = first, trigger

    def __call__(self, texts: list[str]) -> list[list[int]]:
        if self._trigger.exists() and any(text.startswith(self._first) for text in texts):
            self._trigger.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return [list(text.encode()) for text in texts]


class RefusingTokenizer:
    """Fails when it is asked for anything but to be tried."""

    def __call__(self, texts: list[str]) -> list[list[int]]:
        if len(texts) > 1:  # a first text is tried when a function is handed over
            raise AssertionError("nothing is to be tokenized")
        return [[1]]


def main() -> None:
    """Pack data, output and processes of the arguments; says when something is finished, and goes on when told."""

    def wait(done: int, total: int, text: str) -> None:
        if done:
            print("something is finished", flush=True)
            sys.stdin.read()

    index_module.PART_BYTES = 2000
    settings = PackSettings(capacity=256, part_tokens=1000)
    data, output, processes = sys.argv[1:]
    crew = Crew(processes=int(processes))
    pack_source(open_source(data), Path(output), settings, crew=crew, on_progress=wait)


if __name__ == "__main__":
    main()

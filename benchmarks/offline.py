"""`varlen pack` beside `datasets` and TRL, from files to files, on all cores: what counts is when they are done.

Section `offline`: 100,000 tokenized documents from Parquet to Parquet, and Python sources from JSON lines to Parquet.
Whole processes are timed, with fresh caches, in alternating rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.checks import WrongResultError, fill_of_rows
from benchmarks.inputs import CAPACITY, VOCABULARY, lognormal_lengths, source_texts, trained_tokenizer
from benchmarks.rows import Race, Row, Samples, Step
from benchmarks.stopwatch import every_core, output

ROUNDS = 3
COUNT = 100_000
TOKENS_TARGET = 5.0
TEXT_TARGET = 1.0
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

_PEER = """
import sys, time
form, path, out, tokenizer, capacity, processes = sys.argv[1:7]
from datasets import disable_progress_bars, load_dataset
from transformers import PreTrainedTokenizerFast
from trl import pack_dataset
disable_progress_bars()
start = time.perf_counter()
many = int(processes)
if form == "text":
    encode = PreTrainedTokenizerFast(tokenizer_file=tokenizer, eos_token="<|endoftext|>")
    data = load_dataset("json", data_files=path, split="train", num_proc=1)
    end = encode.eos_token
    def tokenize(rows):
        ids = encode([text + end for text in rows["text"]], return_attention_mask=False)["input_ids"]
        return {"input_ids": ids, "labels": ids}
    data = data.map(tokenize, batched=True, remove_columns=data.column_names, num_proc=many)
else:
    data = load_dataset("parquet", data_files=path, split="train")
    if form == "tokens":
        data = data.map(lambda rows: {"labels": rows["input_ids"]}, batched=True, num_proc=many)
    else:
        data = data.add_column("labels", data.with_format("arrow")[:]["input_ids"])
packed = pack_dataset(data, int(capacity), "bfd", map_kwargs={"num_proc": many})
packed.to_parquet(out)
print(time.perf_counter() - start)
"""


@dataclass(frozen=True)
class _Contest:
    """What is packed, and how the peer does it."""

    what: str
    form: str
    """Of the peer's program: "tokens", "column" or "text"."""
    processes: int
    """Of the peer."""
    settings: str
    target: float | None


_TOKENS = f"pack {COUNT:,} tokenized documents, Parquet to Parquet"
_TEXT = "tokenize and pack text, JSON lines to Parquet"
_BY_MAP = "load_dataset, map that adds labels, pack_dataset, to_parquet; one process"
_BY_THREADS = "load_dataset, map that tokenizes on all cores' threads, pack_dataset, to_parquet"
_ALIKE = f"the same with num_proc={CORES}"
_CONTESTS = (
    _Contest(_TOKENS, "tokens", 1, _BY_MAP, TOKENS_TARGET),
    _Contest(_TOKENS, "tokens", CORES, f"{_ALIKE}, which changes the packs", TOKENS_TARGET),
    _Contest(
        _TOKENS, "column", CORES, f"{_ALIKE} and labels added as a ready column instead of by map", None
    ),
    _Contest(_TEXT, "text", 1, _BY_THREADS, TEXT_TARGET),
    _Contest(_TEXT, "text", CORES, _ALIKE, TEXT_TARGET),
)


def steps() -> list[Step]:
    return [Step(f"{c.form}, {c.processes} of theirs", partial(_race, c)) for c in _CONTESTS]


def _race(contest: _Contest) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        path, tokenizer, tokens, offsets = _input(contest.form, place)
        ours: list[tuple[float, float]] = []
        theirs: list[tuple[float, float]] = []
        after_imports: list[float] = []
        fills = (0.0, 0.0)
        for number in range(ROUNDS):
            _settle(path)
            ours.append(_run_ours(path, tokenizer, place / f"ours{number}"))
            _settle(path)
            times, after = _run_peer(contest, path, tokenizer, place / f"peer{number}.parquet")
            theirs.append(times)
            after_imports.append(after)
            if number == 0 and tokens is not None:
                fills = (
                    _fill(sorted((place / "ours0").glob("*.parquet")), tokens, offsets),
                    _fill([place / "peer0.parquet"], tokens, offsets),
                )
            elif number == 0:
                fills = _same_tokens(place)
    call = f"varlen pack, {CORES} processes"
    peer = ("datasets + TRL pack_dataset", contest.settings, _samples(theirs))
    more = {"target": contest.target, "note": _note(ours, after_imports), "by_wall": True}
    return [Race.of(contest.what, (call, _samples(ours)), peer, fills, **more)]


def _settle(path: Path) -> None:
    """Begin every run alike: nothing is left to be written, and the input is in memory."""
    os.sync()  # or ours, which waits until its rows are on the disk, waits for the peer's too
    path.read_bytes()


def _note(ours: list[tuple[float, float]], after_imports: list[float]) -> str:
    """Say what is counted, and what the race would be if the peer's imports were free and ours were not."""
    seconds = statistics.median(after_imports)
    ratio = statistics.median(after / wall for after, (wall, _) in zip(after_imports, ours))
    return (
        f"wall time of whole processes; once the peer has imported its libraries it takes {seconds:.1f} s, "
        f"{ratio:.1f}x our whole process"
    )


def _input(form: str, folder: Path) -> tuple[Path, Path | None, np.ndarray | None, np.ndarray]:
    if form == "text":
        path, tokenizer = folder / "data.jsonl", folder / "tokenizer.json"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in source_texts()))
        made = trained_tokenizer()
        made.add_special_tokens(["<|endoftext|>"])
        made.save(str(tokenizer))
        return path, tokenizer, None, np.zeros(1)
    path = folder / "data.parquet"
    offsets = np.concatenate([[0], np.cumsum(lognormal_lengths(COUNT), dtype=np.int64)])
    rng = np.random.default_rng(0)
    # Frequencies as of words: uniform ids would make files that nothing compresses.
    ranks = np.minimum(rng.zipf(1.3, offsets[-1]), VOCABULARY - 1)
    tokens = rng.permutation(VOCABULARY).astype(np.int32)[ranks]
    column = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(tokens))
    pq.write_table(pa.table({"input_ids": column}), path, row_group_size=10_000)
    return path, None, tokens, offsets


def _run_ours(path: Path, tokenizer: Path | None, out: Path) -> tuple[float, float]:
    command = ["-m", "varlen", "pack", path, "-o", out, "--capacity", CAPACITY, "--overlong", "truncate"]
    if tokenizer is not None:
        command += ["--tokenizer", tokenizer]
    return _timed(command, every_core())[0]


def _run_peer(
    contest: _Contest, path: Path, tokenizer: Path | None, out: Path
) -> tuple[tuple[float, float], float]:
    """Run the peer in a fresh interpreter with a fresh cache; returns as `_run_ours`, and seconds after imports."""
    arguments = ["-c", _PEER, contest.form, path, out, tokenizer or "", CAPACITY, contest.processes]
    with tempfile.TemporaryDirectory() as cache:
        times, printed = _timed(arguments, {**every_core(), "HF_HOME": cache})
    return times, float(printed.splitlines()[-1])


def _timed(arguments: list[object], environment: dict[str, str]) -> tuple[tuple[float, float], str]:
    """Run Python; returns wall and processor seconds of it and of all that it waits for, and what it prints."""
    before, start = os.times(), time.perf_counter()
    printed = output(arguments, environment)
    wall, after = time.perf_counter() - start, os.times()
    return (wall, sum(after[2:4]) - sum(before[2:4])), printed


def _fill(files: list[Path], tokens: np.ndarray, offsets: np.ndarray) -> float:
    """Return how full written rows are, after checking that every document stands in one of them, unharmed."""
    table = pa.concat_tables([pq.read_table(file, columns=["input_ids", "seq_lengths"]) for file in files])
    columns = [table[name].combine_chunks() for name in ("input_ids", "seq_lengths")]
    rows = ((ids.values.to_numpy(), lengths.values.to_numpy()) for ids, lengths in zip(*columns))
    return fill_of_rows(rows, tokens, offsets, CAPACITY)


def _same_tokens(place: Path) -> tuple[float, float]:
    """Return how full both are, after checking that both hold the same documents up to cuts."""
    sums = []
    for files in ([place / "peer0.parquet"], sorted((place / "ours0").glob("*.parquet"))):
        table = pa.concat_tables([pq.read_table(file, columns=["input_ids"]) for file in files])
        values = table["input_ids"].combine_chunks().values.to_numpy()
        sums.append((len(values), len(table), np.bincount(values, minlength=70_000)))
    (peer, peer_rows, peer_counts), (ours, our_rows, our_counts) = sums
    if ours != peer or not np.array_equal(peer_counts, our_counts):
        raise WrongResultError(f"{ours:,} tokens were written by varlen, {peer:,} by the peer")
    return ours / (our_rows * CAPACITY), peer / (peer_rows * CAPACITY)


def _samples(times: list[tuple[float, float]]) -> Samples:
    return Samples(wall_s=[wall for wall, _ in times], cpu_s=[cpu for _, cpu in times])


SECTIONS = {"offline": steps}

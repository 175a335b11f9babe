"""The files that data names, and their common fingerprint, in one call each."""

from collections.abc import Sequence
from pathlib import Path

from varlen.files.finding import Naming, find
from varlen.files.fingerprints import WHOLE_BYTES, file_fingerprints, joint_fingerprint
from varlen.files.paths import Data, File
from varlen.files.retry import Retry

REAL_TEXTS = (
    "c4_demo.jsonl",
    "code_sample.parquet",
    "gsm8k_train.jsonl",
    "oasst_en100_paths.parquet",
    "python_peps.parquet",
    "rust_rfcs.parquet",
    "taskmaster4.jsonl",
    "tau_bench_airline.parquet",
)
"""In the folder `text` of the real data."""


def find_files(data: Data, leave_out: Sequence[Path] = (), retry: Retry | None = None) -> list[File]:
    return list(find(data, Naming(leave_out=leave_out, retry=retry or Retry())).files)


def fingerprint_files(files: Sequence[File], *, whole_bytes: int = WHOLE_BYTES) -> str:
    return joint_fingerprint(files, file_fingerprints(files, whole_bytes=whole_bytes))

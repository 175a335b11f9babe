"""Rules about files that a configuration names: packed rows that are there, and metadata that belong to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.megatron_configs import packed

from varlen.adapters.megatron import check_config


def only(cfg: Any, kind: str, **settings: Any) -> Any:
    """The one finding of a kind."""
    (found,) = [finding for finding in check_config(cfg, **settings) if finding.kind == kind]
    return found


def kinds(cfg: Any, **settings: Any) -> set[str]:
    """The kinds of all findings."""
    return set(check_config(cfg, **settings).kinds)


def test_packed_files_that_are_not_there_stop(tmp_path: Path) -> None:
    found = only(
        packed(specs__packed_train_data_path=str(tmp_path / "none" / "a.idx.parquet")), "packed_file"
    )

    assert found.outcome == "stops"
    assert "there is nothing at this path; neither is the folder" in found.what
    assert check_config(packed(specs__packed_train_data_path="msc://bucket/a.idx.parquet")).ok
    assert check_config(packed(specs__packed_train_data_path="a.parquet"), files=False).ok


@pytest.mark.parametrize("path", ["a.idx.parquet", "*.parquet", "", "b", "A.PQ"])
def test_packed_files_that_are_there_pass(path: str, tmp_path: Path) -> None:
    for name in ("a.idx.parquet", "b.bin", "b.idx", "A.PQ"):
        (tmp_path / name).touch()

    assert check_config(packed(specs__packed_train_data_path=str(tmp_path / path))).ok


def test_pickled_files_are_deprecated_and_others_refused(tmp_path: Path) -> None:
    for name in ("a.npy", "a.jsonl"):
        (tmp_path / name).touch()

    assert only(packed(specs__packed_train_data_path=tmp_path / "a.npy"), "npy_file").level == "warning"
    assert only(packed(specs__packed_train_data_path=tmp_path / "a.jsonl"), "packed_file").level == "error"
    old = packed("0.4", specs__packed_train_data_path=str(tmp_path / "a.npy"))
    assert not kinds(old, dialect="0.3.1") & {"npy_file", "packed_file"}
    (tmp_path / "a.parquet").touch()
    newer = packed("0.4", specs__packed_train_data_path=tmp_path / "a.parquet")
    assert only(newer, "packed_file", dialect="0.3").limit == "a .npy file before release 0.4"
    assert "packed_file" not in kinds(newer, dialect="0.4")


ENTRY = {"pack_size": 512, "dataset_max_seqlen": 500, "max_samples_per_bin": 9, "min_packed_seqlen": 400}


@pytest.mark.parametrize(
    ("text", "level", "words"),
    [
        (json.dumps([ENTRY]), None, ""),
        (json.dumps([ENTRY, ENTRY]), None, ""),
        (json.dumps([ENTRY, {**ENTRY, "pack_size": 1024}]), "error", "packs of 1024"),
        (json.dumps([{"pack_size": 512}]), "error", "without dataset_max_seqlen, max_samples_per_bin"),
        (json.dumps(ENTRY), "error", "pack_size"),
        ("[]", "error", "it holds []"),
        ("{", "error", "isn't JSON"),
    ],
)
def test_metadata_belong_to_the_packs(text: str, level: str | None, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.idx.parquet").touch()
    (tmp_path / "metadata.jsonl").write_text(text, encoding="utf-8")
    static = {"specs__pad_cu_seqlens": True, "dataset__dataset_kwargs": {"pad_to_max_length": True}}
    cfg = packed(
        **static,
        specs__packed_train_data_path=str(tmp_path / "a.idx.parquet"),
        specs__packed_metadata_path=str(tmp_path / "metadata.jsonl"),
    )

    if level is None:
        assert check_config(cfg).findings == ()
    else:
        found = only(cfg, "metadata")
        assert found.level == level
        assert words in found.what


def test_metadata_that_are_missing_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.idx.parquet").touch()
    there = {"specs__packed_train_data_path": str(tmp_path / "a.idx.parquet")}
    static = {"specs__pad_cu_seqlens": True, "dataset__dataset_kwargs": {"pad_to_max_length": True}}

    assert only(packed(**there, specs__packed_metadata_path="none.jsonl"), "metadata").level == "error"
    assert only(packed(**there, **static), "metadata").level == "warning"
    assert "metadata" not in kinds(packed(**there))

"""Weights of rows in token stores and packed sets: what is kept, what is read again, and what stays as it was."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.weighted_rows import chats, expected, read, write

from varlen.documents.source import open_source
from varlen.errors import SettingError, SourceError
from varlen.offline.index import index_source
from varlen.offline.pack import PackSettings, pack_source
from varlen.store.store import open_store

ON = {"row_weights": True}


def stored(store: Any) -> list[Any]:
    """Every document of a store, with what its tokens weigh."""
    found = []
    for shard in range(len(store.shards)):
        count = int(store.documents[shard])
        shards, numbers = np.full(count, shard), np.arange(count)
        lengths = store.lengths(shards, numbers)
        for n, length in zip(numbers, lengths):
            tokens, mask = store.gather(shards[:1], np.array([n]), np.zeros(1, np.int64), np.array([length]))
            weights = np.ones(len(tokens)) if mask is None else mask
            found.append((tuple(tokens.tolist()), tuple(map(float, weights))))
    return found


def test_a_store_holds_weights_and_counts_labels(tmp_path: Path) -> None:
    rows = chats(40)
    write(tmp_path / "a.jsonl", rows)

    store, _ = index_source(open_source(tmp_path / "a.jsonl", **ON), tmp_path / "store")

    wanted = expected(rows)
    assert stored(store) == wanted
    labels = [sum(weight > 0 for weight in weights[1:]) for _, weights in wanted]
    assert store.manifest["num_targets"] == sum(labels)
    shards, numbers = np.zeros(40, np.int64), np.arange(40)
    lengths = store.lengths(shards, numbers)
    assert store.count_targets(shards, numbers, np.zeros(40, np.int64), lengths).tolist() == labels
    starts, stops = lengths // 3, lengths - 1
    cut = [sum(w > 0 for w in weights[a + 1 : b]) for (_, weights), a, b in zip(wanted, starts, stops)]
    assert store.count_targets(shards, numbers, starts, stops).tolist() == cut
    assert not (tmp_path / "store" / "00000-0000" / "loss_mask.bin").exists()


def test_pieces_of_shards_with_masks_weights_and_neither_are_read_together(tmp_path: Path) -> None:
    files = {
        "0.jsonl": chats(3, 1, weights=(1,)),
        "1.jsonl": chats(9, 2, weights=(0, 1)),
        "2.jsonl": chats(9, 3),
    }
    for name, rows in files.items():
        write(tmp_path / name, rows)
    (tmp_path / "3.txt").write_text("text " * 9)  # all of whose tokens are trained on
    for number, name in enumerate([*files, "3.txt"]):
        index_source(open_source(tmp_path / name, **ON), tmp_path / f"s{number}")
    source = open_source([str(tmp_path / name) for name in [*files, "3.txt"]], **ON)
    store, _ = index_source(source, tmp_path / "store")
    wanted = [one for rows in files.values() for one in expected(rows)] + read(tmp_path / "3.txt")

    assert stored(store) == wanted
    draw = np.random.default_rng(0)
    owners = np.repeat(np.arange(len(store.documents)), store.documents)
    numbers = np.concatenate([np.arange(n) for n in store.documents])
    for _ in range(20):
        some = draw.integers(0, len(wanted), 8)
        lengths = store.lengths(owners[some], numbers[some])
        starts = draw.integers(0, lengths)
        tokens, mask = store.gather(owners[some], numbers[some], starts, lengths - starts)
        held = [wanted[n] for n in some]
        assert tokens.tolist() == [t for (ids, _), a in zip(held, starts) for t in ids[a:]]
        marks = np.ones(len(tokens)) if mask is None else mask
        assert marks.tolist() == [w for (_, weights), a in zip(held, starts) for w in weights[a:]]


def test_a_store_without_other_weights_is_what_it_was_to_the_byte(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", chats(20, weights=(0, 1)))

    index_source(open_source(tmp_path / "a.jsonl"), tmp_path / "off")
    index_source(open_source(tmp_path / "a.jsonl", **ON), tmp_path / "on")

    for name in ("tokens.bin", "loss_mask.bin", "offsets.npy", "targets.npy", "shard.json"):
        one, other = (tmp_path / store / "00000-0000" / name for store in ("off", "on"))
        assert one.read_bytes() == other.read_bytes(), name
    off, on = (json.loads((tmp_path / store / "manifest.json").read_text()) for store in ("off", "on"))
    assert "row_weights" not in off["source"]
    assert on["source"]["row_weights"] is True
    assert off["format"] == on["format"] == 1
    assert "has_weights" not in json.dumps(off)


def test_a_reader_that_knows_no_weights_refuses_a_store_with_some(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", chats(20))
    index_source(open_source(tmp_path / "a.jsonl", **ON), tmp_path / "store")

    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())

    assert manifest["format"] == 2  # version 0.1.0 takes 1 alone
    (tmp_path / "store" / "00000-0000" / "loss_weights.bin").write_bytes(b"1234")
    with pytest.raises(SourceError, match="is damaged"):
        stored(open_store(tmp_path / "store"))


def test_the_option_makes_another_store_and_off_it_makes_the_same(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", chats(6, weights=(0, 1)))
    usual, off, on = (
        open_source(tmp_path / "a.jsonl", **s).fingerprint for s in ({}, {"row_weights": False}, ON)
    )

    assert usual == off != on


@pytest.mark.parametrize("format_", ["parquet", "arrow"])
@pytest.mark.parametrize("overlong", ["split", "truncate"])
def test_a_packed_set_holds_weights_that_are_read_again(format_: Any, overlong: Any, tmp_path: Path) -> None:
    rows = chats(40)
    write(tmp_path / "a.jsonl", rows)
    source = open_source(tmp_path / "a.jsonl", **ON)
    settings_ = PackSettings(capacity=700, overlong=overlong, format=format_)

    made = pack_source(source, tmp_path / "packed", settings_)

    wanted = sorted((ids, (0.0, *weights[1:])) for ids, weights in expected(rows))
    assert sorted(read(made.folder, **ON)) == wanted
    assert made.manifest["num_targets"] == sum(w > 0 for _, weights in wanted for w in weights)
    with pytest.raises(SourceError, match=r"of `loss_weights`; only 0 and 1 can be kept.*row_weights=True"):
        read(made.folder)
    write(tmp_path / "a.jsonl", chats(40, weights=(0, 1)))
    with pytest.raises(SettingError, match="holds a set made from other data or settings"):
        pack_source(open_source(tmp_path / "a.jsonl"), made.folder, settings_)


def test_a_packed_set_with_weights_is_a_data_set_like_any_other(tmp_path: Path) -> None:
    from datasets import load_dataset

    rows = chats(30)
    write(tmp_path / "a.jsonl", rows)
    settings_ = PackSettings(capacity=256, overlong="split")
    pack_source(open_source(tmp_path / "a.jsonl", **ON), tmp_path / "packed", settings_)

    folder, cache = str(tmp_path / "packed"), str(tmp_path / "cache")
    held = load_dataset("parquet", data_dir=folder, split="train", cache_dir=cache)

    assert held.column_names == ["input_ids", "labels", "seq_lengths", "loss_weights"]
    for row in held:
        assert [label != -100 for label in row["labels"]] == [weight > 0 for weight in row["loss_weights"]]
    assert sorted(read(held, **ON)) == sorted(read(tmp_path / "packed", **ON))

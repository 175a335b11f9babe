"""Packed sets on disk: every token in one place, rows and parts as said; refusals; other capacities."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.offline_packs import (
    RefusingTokenizer,
    contents,
    documents_of,
    pack,
    small_parts,
    table_of,
    text_ids,
    write_chats,
    write_texts,
)

from varlen.documents import order as order_module
from varlen.documents.source import open_source
from varlen.errors import OverlongDocumentError, SettingError, SourceError
from varlen.offline import pack as plan_module
from varlen.offline.crew import Crew
from varlen.offline.pack import PackSettings, PartPlans, pack_source


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "a.jsonl"
    write_texts(path)
    return path


@pytest.mark.parametrize("format_", ["parquet", "arrow"])
def test_rows_hold_the_documents_that_went_in(tmp_path, format_):
    texts = write_texts(tmp_path / "a.jsonl")

    done = pack(tmp_path / "a.jsonl", tmp_path / "out", format=format_)

    found = documents_of(tmp_path / "out")
    assert sorted(ids for ids, _ in found) == sorted(map(text_ids, texts))
    assert all(labels == [-100, *ids[1:]] for ids, labels in found)
    rows = table_of(tmp_path / "out")
    assert rows.column_names == ["input_ids", "labels", "seq_lengths"]
    assert all(field.type == pa.list_(pa.int32()) for field in rows.schema)
    assert max(map(len, rows["input_ids"])) <= 256
    manifest = done.manifest
    assert manifest == json.loads((tmp_path / "out" / ".manifest.json").read_bytes())
    assert manifest["num_packs"] == len(rows) == sum(part["num_packs"] for part in manifest["parts"])
    assert manifest["num_tokens"] == sum(len(ids) for ids, _ in found) == manifest["ledger"]["tokens_in"]
    assert manifest["num_targets"] == sum(len(ids) - 1 for ids, _ in found)
    assert manifest["fill_ratio"] == manifest["num_tokens"] / (256 * len(rows))
    assert manifest["ledger"]["documents_in"] == 60
    names = [f"part-0000{n}.{format_}" for n in range(len(manifest["parts"]))]
    assert len(names) > 2
    digests = contents(tmp_path / "out")
    assert sorted(digests) == [".manifest.json", *names]
    assert [part["sha256"] for part in manifest["parts"]] == [digests[name] for name in names]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]


def test_the_manifest_says_what_went_in_and_how(tmp_path, data):
    import varlen

    manifest = pack(data, tmp_path / "out", seed=3).manifest

    assert manifest["varlen"] == varlen.__version__
    assert manifest["settings"]["capacity"] == 256
    assert manifest["settings"]["seed"] == 3
    (file,) = manifest["source"]["files"]
    assert (file["name"], file["size"]) == ("a.jsonl", data.stat().st_size)
    assert file["fingerprint"] == f"sha256:{contents(tmp_path)['a.jsonl']}"
    assert manifest["source"]["tokenizer"]["name"] == "bytes"


def test_positions_and_the_documents_of_the_pieces_are_written_where_asked(tmp_path):
    texts = write_texts(tmp_path / "a.jsonl")

    pack(tmp_path / "a.jsonl", tmp_path / "out", capacity=64, overlong="split", position_ids=True, trace=True)

    joined = {}
    for row in table_of(tmp_path / "out").to_pylist():
        at = 0
        for length, document, start in zip(row["seq_lengths"], row["document_ids"], row["document_starts"]):
            assert row["position_ids"][at : at + length] == list(range(length))
            assert row["labels"][at] == -100
            joined.setdefault(document, {})[start] = row["input_ids"][at : at + length]
            at += length
    whole = [[id_ for start in sorted(p) for id_ in p[start]] for _, p in sorted(joined.items())]
    assert whole == list(map(text_ids, texts))
    assert all(
        sorted(p) == np.cumsum([0, *(len(p[s]) for s in sorted(p))][:-1]).tolist() for p in joined.values()
    )


def test_of_chats_the_answers_alone_are_labels(tmp_path):
    write_chats(tmp_path / "a.jsonl")

    manifest = pack(tmp_path / "a.jsonl", tmp_path / "out", capacity=512).manifest

    said = []
    for ids, labels in documents_of(tmp_path / "out"):
        assert all(label in (-100, id_) for id_, label in zip(ids, labels))
        said.append(bytes(label for label in labels if 0 <= label < 256).decode().strip())
    assert sorted(said) == sorted("It is " + " ".join([str(2 * n)] * (1 + n % 5)) for n in range(24))
    trained = sum(label != -100 for _, labels in documents_of(tmp_path / "out") for label in labels)
    assert manifest["num_targets"] == trained > 0


def test_in_order_means_in_the_order_of_the_files(tmp_path):
    (tmp_path / "in").mkdir()
    texts = [text for name in "ab" for text in write_texts(tmp_path / "in" / f"{name}.jsonl", seed=ord(name))]

    pack(tmp_path / "in", tmp_path / "out", shuffle=False, method="next_fit")
    pack(tmp_path / "in", tmp_path / "mixed", method="next_fit")

    assert [ids for ids, _ in documents_of(tmp_path / "out")] == list(map(text_ids, texts))
    mixed = [ids for ids, _ in documents_of(tmp_path / "mixed")]
    assert mixed != list(map(text_ids, texts))
    assert sorted(mixed) == sorted(map(text_ids, texts))


def test_ids_beyond_sixteen_bits_and_masks_that_begin_late_are_kept(tmp_path, monkeypatch):
    small_parts(monkeypatch, tokens=4000)
    random = np.random.default_rng(0)
    rows = []
    for n in range(300):
        ids = random.integers(0, 100 if n < 290 else 2**31 - 1, random.integers(1, 40)).tolist()
        rows.append(
            {
                "input_ids": ids,
                "labels": ids if n < 150 else [*[-100] * (len(ids) // 2), *ids[len(ids) // 2 :]],
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=50)

    pack(tmp_path / "a.parquet", tmp_path / "out", processes=2, capacity=100)

    expected = sorted((row["input_ids"], [-100, *row["labels"][1:]]) for row in rows)
    assert sorted(documents_of(tmp_path / "out")) == expected


def test_tokens_kept_are_packed_again_without_tokenizing(tmp_path, data):
    first = pack(data, tmp_path / "out", tokens=tmp_path / "tokens")
    store = contents(tmp_path / "tokens")
    source = open_source(data)
    object.__setattr__(source.encoding, "tokenizer", Refusing(source.encoding.tokenizer))

    again = pack(source, tmp_path / "wide", capacity=1024, tokens=tmp_path / "tokens")
    alone = pack_source(
        tmp_path / "tokens", tmp_path / "alone", PackSettings(capacity=1024, part_tokens=1000)
    )

    assert sorted(documents_of(tmp_path / "wide")) == sorted(documents_of(tmp_path / "out"))
    assert again.manifest["num_packs"] < first.manifest["num_packs"]
    assert contents(tmp_path / "tokens") == store
    parts = [
        {n: d for n, d in contents(tmp_path / o).items() if n != ".manifest.json"} for o in ("wide", "alone")
    ]
    assert parts[0] == parts[1]
    assert alone.manifest["source"]["files"] == again.manifest["source"]["files"]


class Refusing:
    """A tokenizer that says who it is, and encodes nothing."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        assert name != "encode", "nothing is to be tokenized"
        return getattr(self._tokenizer, name)


def test_a_packed_set_is_packed_again_without_tokenizing(tmp_path, data):
    pack(data, tmp_path / "out", tokenizer=lambda text: list(text.encode()))

    again = pack(tmp_path / "out", tmp_path / "wide", capacity=1024, tokenizer=RefusingTokenizer())

    assert sorted(documents_of(tmp_path / "wide")) == sorted(documents_of(tmp_path / "out"))
    assert again.manifest["ledger"]["documents_in"] == 60


def test_a_packed_set_with_cut_documents_is_refused_as_input(tmp_path, data):
    pack(data, tmp_path / "out", capacity=64, overlong="split")

    with pytest.raises(
        SourceError, match=r"out was packed with \d+ documents cut into pieces, .*--tokens FOLDER"
    ):
        pack(tmp_path / "out", tmp_path / "wide", capacity=1024)
    with pytest.raises(SourceError, match="cut into pieces"):
        pack(tmp_path / "out" / "*.parquet", tmp_path / "wide", capacity=1024)
    assert not (tmp_path / "wide").exists()


def test_a_finished_set_is_not_made_again(tmp_path, data):
    first = pack(data, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}

    again = pack(data, tmp_path / "out")

    assert (first.was_there, again.was_there) == (False, True)
    assert again.manifest == first.manifest
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_a_set_of_other_data_or_settings_is_replaced_only_when_told(tmp_path, data):
    pack(data, tmp_path / "out")
    before = contents(tmp_path / "out")

    with pytest.raises(SettingError, match=r"made from other data or settings; .* --overwrite"):
        pack(data, tmp_path / "out", capacity=300)
    texts = write_texts(data, seed=1)
    with pytest.raises(SettingError, match="made from other data or settings"):
        pack(data, tmp_path / "out")
    with pytest.raises(SettingError, match="made from other data or settings"):
        pack(data, tmp_path / "out", tokenizer=len_of_words)
    assert contents(tmp_path / "out") == before

    pack(data, tmp_path / "out", capacity=300, overwrite=True)
    assert sorted(ids for ids, _ in documents_of(tmp_path / "out")) == sorted(map(text_ids, texts))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]


def len_of_words(text):
    return [len(word) for word in text.split()]


def test_data_that_changed_is_read_anew_by_the_same_process(tmp_path, data):
    tokens = tmp_path / "tokens"
    pack(data, tmp_path / "out", tokens=tokens)
    texts = write_texts(data, seed=1)

    pack(data, tmp_path / "new", tokens=tokens, overwrite=True)

    assert sorted(ids for ids, _ in documents_of(tmp_path / "new")) == sorted(map(text_ids, texts))


def test_places_that_hold_something_else_are_refused_and_left_alone(tmp_path, data, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("a")
    before = contents(tmp_path)
    monkeypatch.chdir(tmp_path)
    refused = {
        "full": "holds other files; name a new folder",
        "file": "is a file; name a folder",
        "out.parquet": "names a file, but a packed set is a folder of them; pass",
        ".": "has no name that a result could take; name a new folder",
        "..": "has no name",
    }

    for name, said in refused.items():
        with pytest.raises(SettingError, match=said):
            pack(data, type(tmp_path)(name), overwrite=True)
    with pytest.raises(SettingError, match="are the same folder"):
        pack(data, tmp_path / "out", tokens=tmp_path / "out")
    with pytest.raises(SettingError, match="holds other files"):
        pack(data, tmp_path / "out", tokens=tmp_path / "full")

    assert contents(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "file", "full"]


def test_an_empty_folder_and_a_link_to_one_are_places_like_any(tmp_path, data):
    (tmp_path / "out").mkdir()
    (tmp_path / "disk" / "far").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "far")

    pack(data, tmp_path / "out")
    pack(data, tmp_path / "link")

    assert contents(tmp_path / "disk" / "far") == contents(tmp_path / "out")
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["far"]


def test_what_is_written_is_never_read_as_data(tmp_path):
    (tmp_path / "in").mkdir()
    write_texts(tmp_path / "in" / "a.jsonl")
    pack(tmp_path / "in", tmp_path / "in" / "out")
    pack(tmp_path / "in" / "a.jsonl", tmp_path / "out", tokens=tmp_path / "tokens")

    with pytest.raises(
        SettingError, match=r"is to be read, but .*out is to be written; name an output outside"
    ):
        pack(tmp_path / "in" / "out", tmp_path / "in" / "out", overwrite=True)
    with pytest.raises(SourceError, match="in/out is a packed set"):
        pack(tmp_path / "in", tmp_path / "in" / "out", overwrite=True)
    (tmp_path / "in" / "out").rename(tmp_path / "in" / "out.partial")
    with pytest.raises(SettingError, match="is to be written"):
        pack(tmp_path / "in" / "out.partial", tmp_path / "in" / "out")
    with pytest.raises(SettingError, match="is to be written"):
        pack(tmp_path / "tokens", tmp_path / "tokens", overwrite=True)


@pytest.mark.parametrize(
    ("lines", "settings", "said"),
    [
        (['{"body": "a"}'], {}, "found `body`"),
        (['{"text": ""}', '{"text": ""}'], {}, "holds 2 empty documents"),
        (['{"text": "a"}', "{"], {}, "line 2"),
        (['{"text": "' + 300 * "a" + '"}'], {"overlong": "error"}, "has 301 tokens but capacity is 256"),
        (
            ['{"text": "' + 300 * "a" + '"}'],
            {"overlong": "drop"},
            r"no document is left to pack: 1 document is longer",
        ),
    ],
)
def test_data_that_cannot_be_packed_is_refused_and_nothing_of_it_stays(tmp_path, lines, settings, said):
    (tmp_path / "a.jsonl").write_text("\n".join(lines))

    with pytest.raises(ValueError, match=said):
        pack(tmp_path / "a.jsonl", tmp_path / "out", **settings)

    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.iterdir())
    assert left in (["a.jsonl"], ["a.jsonl", "out.partial"])
    assert ("tokens" in said or "longer" in said) == (len(left) == 2)  # tokens are kept for another setting


def test_tokens_survive_a_change_of_settings_after_documents_were_too_long(tmp_path, data):
    for too_small in ({"capacity": 20, "overlong": "error"}, {"capacity": 1, "overlong": "drop"}):
        with pytest.raises(
            OverlongDocumentError,
            match=r"larger --capacity; the tokens are kept in \S+/out\.partial, so that the same run with one of",
        ):
            pack(data, tmp_path / "out", **too_small)
    source = open_source(data)
    object.__setattr__(source.encoding, "tokenizer", Refusing(source.encoding.tokenizer))

    done = pack(source, tmp_path / "out", capacity=20, overlong="split")

    assert done.manifest["ledger"]["split_documents"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]


def test_no_file_stays_open_after_a_run(tmp_path, data):
    pack(data, tmp_path / "first")  # what libraries open once
    before = len(list(Path("/dev/fd").iterdir()))

    pack(data, tmp_path / "out")

    assert len(list(Path("/dev/fd").iterdir())) == before


def test_a_damaged_store_is_refused_by_name(tmp_path, data):
    pack(data, tmp_path / "out", tokens=tmp_path / "tokens")
    path = tmp_path / "tokens" / "00000-0000" / "tokens.bin"
    path.write_bytes(path.read_bytes()[:-2])

    with pytest.raises(
        SourceError, match=r"00000-0000 is damaged: it doesn't hold the [\d,]+ tokens of 60 documents"
    ):
        pack_source(tmp_path / "tokens", tmp_path / "wide", PackSettings(capacity=512))
    shutil.rmtree(path.parent)
    with pytest.raises(SourceError, match=re.escape("00000-0000 is not a finished shard")):
        pack_source(tmp_path / "tokens", tmp_path / "wide", PackSettings(capacity=512))


def test_a_crew_of_nobody_is_refused():
    with pytest.raises(SettingError, match="processes must be at least 1, got 0"):
        Crew(processes=0)


class Lengths:
    def __init__(self, lengths):
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


class Store:
    """Stands in for a token store of known lengths, shard by shard."""

    def __init__(self, shards):
        self.shards = shards
        self.documents = np.array([len(lengths) for lengths in shards], dtype=np.int64)

    def shard(self, index):
        return Lengths(self.shards[index])

    def will_need(self, shards, documents):
        pass  # nothing is read

    def lengths(self, shards, documents):
        return np.array([self.shards[s][d] for s, d in zip(shards, documents)], dtype=np.int64)


def planned(shards, **settings):
    plan = PartPlans(Store(shards), PackSettings(**settings))
    parts = list(plan)
    return parts, plan.ledger.check()


def pieces_of(parts):
    return [
        piece
        for part in parts
        for piece in zip(*(a.tolist() for a in (part.shards, part.documents, part.starts, part.stops)))
    ]


def row_sizes(part):
    return np.add.reduceat(part.stops - part.starts, part.offsets[:-1])


def tokens_kept(shards, capacity, overlong):
    """The oracle: how many tokens of each document are to stand in rows."""
    kept = {}
    for shard, lengths in enumerate(shards):
        for document, length in enumerate(lengths):
            if length > capacity and overlong == "drop":
                continue
            kept[shard, document] = min(length, capacity) if overlong == "truncate" else length
    return {name: length for name, length in kept.items() if length}


SHARDS = st.lists(st.lists(st.integers(0, 40), max_size=60), max_size=6)


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
@given(
    shards=SHARDS,
    capacity=st.integers(1, 50),
    window=st.integers(1, 40),
    part_tokens=st.integers(1, 300),
    shuffle=st.booleans(),
    method=st.sampled_from(["best_fit", "next_fit", "best_fit_decreasing", "first_fit"]),
    most=st.none() | st.integers(1, 4),
)
def test_every_token_stands_in_one_row_of_one_part(
    overlong, shards, capacity, window, part_tokens, shuffle, method, most
):
    with pytest.MonkeyPatch.context() as patch:
        for module in (order_module, plan_module):
            patch.setattr(module, "STRETCH", 32)
        patch.setattr(order_module, "_RUN", 4)
        parts, ledger = planned(
            shards,
            capacity=capacity,
            window=window,
            part_tokens=part_tokens,
            shuffle=shuffle,
            method=method,
            overlong=overlong,
            max_documents=most,
        )

    held = sorted((s, d, t) for s, d, a, b in pieces_of(parts) for t in range(a, b))
    kept = tokens_kept(shards, capacity, overlong)
    assert held == sorted((s, d, t) for (s, d), length in kept.items() for t in range(length))
    for part in parts:
        assert part.offsets[0] == 0
        assert part.offsets[-1] == len(part.documents)
        assert (np.diff(part.offsets) > 0).all()
        assert (np.diff(part.offsets) <= (most or len(part.documents))).all()
        assert (row_sizes(part) <= capacity).all()
    given_ = sum(map(sum, shards))
    assert ledger.documents_in == sum(map(len, shards))
    assert ledger.tokens_in == given_
    assert ledger.packed == len(held)
    assert ledger.truncated + ledger.dropped == given_ - len(held)
    assert ledger.empty_documents == sum(lengths.count(0) for lengths in shards)


@given(shards=SHARDS, part_tokens=st.integers(1, 300))
def test_parts_are_numbered_and_end_with_the_row_that_fills_them(shards, part_tokens):
    parts, _ = planned(shards, capacity=40, part_tokens=part_tokens)

    assert [part.number for part in parts] == list(range(len(parts)))
    for part in parts[:-1]:
        assert row_sizes(part).sum() >= part_tokens
        assert row_sizes(part)[:-1].sum() < part_tokens
    assert all(row_sizes(part)[:-1].sum() < part_tokens for part in parts[-1:])


@given(shards=SHARDS, capacity=st.integers(1, 50))
def test_wrapped_documents_follow_each_other_and_fill_every_row_but_the_last(shards, capacity):
    parts, ledger = planned(shards, capacity=capacity, method="wrapped", shuffle=False, part_tokens=100)

    tokens = [(s, d, t) for s, d, a, b in pieces_of(parts) for t in range(a, b)]
    assert tokens == [(s, d, t) for s, ls in enumerate(shards) for d, n in enumerate(ls) for t in range(n)]
    sizes = [size for part in parts for size in row_sizes(part).tolist()]
    assert all(size == capacity for size in sizes[:-1])
    assert ledger.packed == len(tokens)


def test_documents_in_order_stay_in_order_where_one_pack_is_open_at_a_time():
    parts, _ = planned([[5, 3, 7], [], [2, 8]], capacity=10, method="next_fit", shuffle=False, part_tokens=10)

    assert pieces_of(parts) == [(0, 0, 0, 5), (0, 1, 0, 3), (0, 2, 0, 7), (2, 0, 0, 2), (2, 1, 0, 8)]
    assert [row_sizes(part).tolist() for part in parts] == [[8, 9], [8]]


def test_the_same_documents_in_other_shards_give_the_same_rows():
    lengths = np.random.default_rng(0).integers(1, 40, 500).tolist()

    one, many = (
        planned(shards, capacity=64, part_tokens=900)[0]
        for shards in ([lengths], [lengths[:99], [], lengths[99:]])
    )

    def numbers(parts, first):
        return [[first[s] + d for s, d in zip(p.shards.tolist(), p.documents.tolist())] for p in parts]

    assert numbers(one, [0]) == numbers(many, [0, 99, 99])
    assert all(np.array_equal(a.offsets, b.offsets) for a, b in zip(one, many))


def test_documents_longer_than_a_row_are_refused_with_the_first_of_them_and_their_number():
    said = (
        "document 3 (counted from 0 in the order of the data) has 12 tokens but capacity is 10 (2 of 6 documents "
        "are too long); pass --overlong split, truncate or drop, or a larger --capacity"
    )

    with pytest.raises(OverlongDocumentError, match=f"^{re.escape(said)}$"):
        planned([[1, 10], [], [3, 12, 4, 11]], capacity=10, overlong="error")
    with pytest.raises(OverlongDocumentError, match="document 0 "):
        planned([[11]], capacity=10, overlong="error")


def test_what_was_cut_and_dropped_is_counted():
    shards = [[25, 4], [11]]

    split = planned(shards, capacity=10, overlong="split")[1]
    truncated = planned(shards, capacity=10, overlong="truncate")[1]
    dropped = planned(shards, capacity=10, overlong="drop")[1]

    assert (split.split_documents, split.packed) == (2, 40)
    assert (truncated.truncated_documents, truncated.truncated, truncated.packed) == (2, 16, 24)
    assert (dropped.dropped_documents, dropped.dropped, dropped.packed) == (2, 36, 4)


@pytest.mark.parametrize("shards", [[], [[]], [[0, 0], []]])
def test_without_a_token_there_is_no_part(shards):
    parts, ledger = planned(shards, capacity=8)

    assert parts == []
    assert ledger.documents_in == ledger.empty_documents == sum(map(len, shards))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"capacity": 0}, "capacity must be a whole number from 1"),
        ({"capacity": 2.5}, "capacity must be a whole number"),
        ({"capacity": 2**31 - 5}, "capacity and part_tokens must be below 2^31 together"),
        ({"max_documents": 0}, "max_documents must be a whole number from 1"),
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"window": 0}, "window must be"),
        ({"method": "any_fit"}, "method must be one of next_fit"),
        ({"overlong": "keep"}, "overlong must be one of error, split, truncate, drop; got 'keep'"),
        ({"format": "csv"}, "format must be one of parquet, arrow; got 'csv'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(SettingError, match=re.escape(said)):
        PackSettings(**{"capacity": 8, **settings})


def test_settings_are_plain_numbers_whatever_they_were_given_as():
    settings = PackSettings(capacity=np.int64(8), max_documents=np.int32(2))

    assert [type(n) for n in (settings.capacity, settings.max_documents)] == [int, int]

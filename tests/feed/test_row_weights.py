"""Weights of rows on every road of the loader: streaming, stores, packed sets, mixtures, processes and resume."""

import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.rarely import mostly
from tests.support.weighted_rows import Weighed, chats, expected, segments, targets, write

import varlen as vl
from varlen.documents.source import open_source
from varlen.errors import SettingError, SourceError, StateError
from varlen.offline.index import index_source
from varlen.offline.pack import PackSettings, pack_source

ON = {"row_weights": True}
ROWS = [*chats(30, 0), *chats(30, 1, weights=(0, 1)), *chats(30, 2)]
"""Of which a third has no weights but 0 and 1."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    write(folder / "a.jsonl", ROWS)
    source = open_source(folder / "a.jsonl", **ON)
    index_source(source, folder / "store")
    pack_source(source, folder / "packed", PackSettings(capacity=512, overlong="split"))
    return folder


def loader_of(source: Any, **changes: Any) -> vl.PackedLoader:
    usual = {"capacity": 512, "global_batch_size": 4, "worker": "thread", "overlong": "error", "epochs": 1}
    return vl.PackedLoader(source, **{**usual, **changes})


def held(loader: vl.PackedLoader) -> Counter[Weighed]:
    """Every segment that a loader gives, with its weights, as often as it comes."""
    return Counter(one for batch in loader for one in segments(batch))


WANTED = Counter(map(targets, expected(ROWS)))
ROADS: dict[str, tuple[str, dict[str, Any]]] = {
    "streaming": ("a.jsonl", {**ON, "mode": "streaming"}),
    "cached": ("a.jsonl", {**ON, "mode": "indexed"}),
    "store": ("store", {}),
    "store by name": ("store", ON),
    "packed": ("packed", ON),
    "packed, cached": ("packed", {**ON, "mode": "indexed"}),
}


CELLS = [*product(ROADS, ("process", "thread"), ("rows", "flat"))]
IN_PROCESSES = [("streaming", "process", "flat"), ("packed, cached", "process", "rows")]


@pytest.mark.parametrize(
    ("road", "worker", "layout"),
    mostly([one for one in CELLS if one[1] == "thread" or one in IN_PROCESSES], CELLS),
)
def test_every_document_comes_with_its_weights(road, worker, layout, data):
    name, changes = ROADS[road]

    with loader_of(data / name, worker=worker, layout=layout, cache=data / "cache", **changes) as loader:
        assert loader.has_weights
        assert held(loader) == WANTED


@pytest.mark.parametrize("road", ["streaming", "store"])
def test_pieces_of_documents_keep_their_own_weights(road, data):
    name, changes = ROADS[road]
    wanted = [one for one in WANTED.elements() if len(one[0]) > 32]
    found = 0
    with loader_of(data / name, capacity=32, overlong="split", **changes) as loader:
        for batch in loader:
            for (tokens, weights), start in zip(segments(batch), batch.document_starts.tolist(), strict=True):
                whole = [own for ids, own in wanted if ids[start : start + len(tokens)] == tokens]
                if start and any(weights):
                    found += 1
                    assert any(weights == (0.0, *own[start + 1 : start + len(tokens)]) for own in whole)

    assert found > 50


@pytest.mark.parametrize("road", ["streaming", "cached", "store", "packed"])
def test_a_resumed_loader_gives_the_same_bytes(road, data):
    name, changes = ROADS[road]
    settings_ = {
        **changes,
        "cache": data / "cache",
        "capacity": 128,
        "overlong": "split",
        "epochs": 2,
        "window": 20,
    }
    if road == "streaming":
        settings_ |= {"window": 4}

    def content(batch: vl.PackedBatch) -> tuple[Any, ...]:
        weights = batch.target_weights
        return (
            batch.input_ids.tobytes(),
            batch.labels.tobytes(),
            None if weights is None else weights.tobytes(),
        )

    with loader_of(data / name, **settings_) as loader:
        states, batches = [loader.state_dict()], []
        for batch in loader:
            batches.append(content(batch))
            states.append(json.loads(json.dumps(loader.state_dict())))
    assert sum(weights is not None for _, _, weights in batches) > len(batches) // 2
    for at in range(0, len(batches), 5):
        with loader_of(data / name, **settings_) as loader:
            loader.load_state_dict(states[at])
            assert [content(batch) for batch in loader] == batches[at:]


def test_weights_that_are_never_0_survive_a_resume(tmp_path):
    """A state takes documents all of whose tokens are trained on for such whose labels needn't be read."""
    rows = [{"input_ids": list(range(n, n + 9)), "loss_weights": [0.5] * 9} for n in range(400)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings_: Any = {**ON, "mode": "streaming", "capacity": 16, "window": 4, "overlong": "split"}

    with loader_of(tmp_path / "a.jsonl", **settings_) as loader:
        states, batches = [], []
        for batch in loader:
            batches.append(batch.loss_weights().tolist())
            states.append(loader.state_dict())
    for at in range(0, len(batches) - 1, 7):
        with loader_of(tmp_path / "a.jsonl", **settings_) as loader:
            loader.load_state_dict(states[at])
            assert [batch.loss_weights().tolist() for batch in loader] == batches[at + 1 :]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_ranks_of_a_stream_share_all_weights(world, data):
    found: Counter[Weighed] = Counter()
    for rank in range(world):
        with loader_of(data / "a.jsonl", **ON, mode="streaming", dp_rank=rank, dp_world_size=world) as loader:
            found += held(loader)

    assert found == WANTED


def test_sources_of_a_mixture_may_weigh_or_not(data, tmp_path):
    write(tmp_path / "b.jsonl", chats(20, 7, weights=(0, 1)))
    (tmp_path / "c.jsonl").write_text(
        "".join(json.dumps({"text": f"text {n} " * 5}) + "\n" for n in range(20))
    )
    index_source(open_source(tmp_path / "b.jsonl"), tmp_path / "plain")
    sources = {"weighed": data / "store", "plain": tmp_path / "plain", "texts": tmp_path / "c.jsonl"}
    mixture = vl.Mixture(sources, weights=dict.fromkeys(sources, 1), until="all")

    with loader_of(mixture, cache=tmp_path / "cache") as loader:
        assert loader.has_weights
        found = dict(held(loader).keys())

    wanted = dict(map(targets, [*expected(ROWS), *expected(chats(20, 7, weights=(0, 1)))]))
    texts = {tokens: weights for tokens, weights in found.items() if tokens not in wanted}
    assert {tokens: weights for tokens, weights in found.items() if tokens in wanted} == wanted
    assert len(texts) == 20
    assert all(weights == (0.0, *[1.0] * (len(tokens) - 1)) for tokens, weights in texts.items())


def test_a_mixture_without_weights_says_so(tmp_path):
    write(tmp_path / "b.jsonl", chats(20, 7, weights=(0, 1)))
    mixture = vl.Mixture({"a": tmp_path / "b.jsonl"}, weights={"a": 1})

    with loader_of(mixture, cache=tmp_path / "cache") as loader:
        assert not loader.has_weights


def test_without_the_option_nothing_weighs(data, tmp_path):
    write(tmp_path / "a.jsonl", chats(20, weights=(0, 1)))

    with loader_of(tmp_path / "a.jsonl", mode="streaming") as loader:
        assert not loader.has_weights
        assert all(batch.target_weights is None for batch in loader)
    with (
        loader_of(data / "a.jsonl", mode="streaming") as loader,
        pytest.raises(SourceError, match=r"row_weights=True, --row-weights"),
    ):
        list(loader)
    with loader_of(data / "a.jsonl", mode="streaming", on_error="skip") as loader:
        assert held(loader) == Counter(map(targets, expected([row for row in ROWS if plain(row)])))


def plain(row: list[dict[str, Any]]) -> bool:
    return all(message.get("weight", 1) in (0, 1) for message in row)


def test_a_store_without_weights_is_given_none_by_the_option(tmp_path):
    write(tmp_path / "a.jsonl", chats(20, weights=(0, 1)))
    index_source(open_source(tmp_path / "a.jsonl"), tmp_path / "store")

    with pytest.raises(SettingError, match=r"without weights.*varlen index --row-weights"):
        loader_of(tmp_path / "store", **ON)


def test_a_piece_that_cannot_be_read_is_masked_among_weights(data, tmp_path):
    import shutil

    shutil.copytree(data / "store", tmp_path / "store")
    weights = tmp_path / "store" / "00000-0000" / "loss_weights.bin"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])

    with loader_of(tmp_path / "store", on_error="skip", shuffle=False) as loader:
        found = held(loader)
        skipped = loader.stats().skipped

    read = {tokens: weights for tokens, weights in found if any(weights)}
    assert 0 < skipped < len(WANTED)
    assert read.items() <= dict(WANTED.keys()).items()
    assert len(read) + skipped == len(WANTED)


def test_the_option_is_a_part_of_what_a_stream_s_state_belongs_to(data, tmp_path):
    write(tmp_path / "a.jsonl", chats(20, weights=(0, 1)))
    with loader_of(tmp_path / "a.jsonl", mode="streaming") as loader:
        next(loader)
        state = loader.state_dict()

    with (
        loader_of(tmp_path / "a.jsonl", mode="streaming", **ON) as loader,
        pytest.raises(StateError, match="data"),
    ):
        loader.load_state_dict(state)


@given(st.integers(0, 99), st.sampled_from([64, 200, 900]), st.booleans())
@settings(max_examples=10, deadline=None)
def test_the_sum_of_all_weights_is_that_of_the_rows(seed, capacity, shuffle):
    rows = chats(12, seed)
    total = sum(sum(weights[1:]) for _, weights in expected(rows))

    with loader_of([{"messages": row} for row in rows], **ON, capacity=4096, shuffle=shuffle) as loader:
        found = [float(np.sum(batch.loss_weights(), dtype=np.float64)) for batch in loader]

    assert sum(found) == pytest.approx(total, rel=1e-12)

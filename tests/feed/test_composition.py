"""What is in a pack: full ones, of lengths that are no more alike than where documents are dealt at random."""

import json

import numpy as np
import pytest

import varlen as vl
from varlen.documents import blocks
from varlen.pack.score import length_correlation

DEALT = 40
"""Times that the same documents are dealt at random: packs no more alike than all these but one are at random."""


def encode(text):
    """A text says how long it is."""
    return [1] * (int(text) - 1 if text.isdigit() else 1)


def lengths_of(name, request):
    """Lengths in the order of the data, and a capacity."""
    if name == "log-normal":
        return np.random.default_rng(1).lognormal(5, 1.2, 12_000).clip(2, 4096).astype(int), 4096
    data = request.getfixturevalue("data")
    capacity = {"gsm8k_train": 2048, "mix_sft": 8192, "code_src": 16384}[name]
    lengths = np.load(data / "lengths" / f"{name}.npz")["lengths"].astype(int)
    return lengths[(lengths > 1) & (lengths <= capacity)], capacity


def packed(tmp_path, lengths, capacity, mode, method):
    """The lengths in each pack, as the loader hands them out; without the end, where packs can't be filled."""
    path = tmp_path / "lengths.jsonl"
    path.write_text("".join(json.dumps({"text": f"{length:06}"}) + "\n" for length in lengths))
    packs, ends = {}, [0]
    with vl.PackedLoader(
        path,
        encode,
        eos=0,
        capacity=capacity,
        global_batch_size=4,
        mode=mode,
        method=method,
        worker="thread",
        cache=tmp_path,
    ) as loader:
        for batch in loader:
            at = 0
            for number, row in zip(batch.pack_ids.tolist(), batch.segment_ids):
                count = int(row.max()) + 1
                packs[number] = batch.document_lengths[at : at + count]
                at += count
            ends.append(loader.state_dict()["at"].get("step", 0))
    steps = sorted(set(ends))
    last = 4 * steps[-2] if mode == "streaming" else len(packs) - 4
    return [packs[number] for number in range(last)]


def correlation(packs):
    return length_correlation(np.concatenate(packs), np.cumsum([0, *map(len, packs)]))


def at_random(packs, capacity):
    """The correlations where the same documents are dealt in a random order, each to the pack that is open."""
    lengths, found = np.concatenate(packs), []
    for seed in range(DEALT):
        mixed = np.random.default_rng(seed).permutation(lengths)
        dealt = vl.pack(mixed, capacity, "next_fit")
        found.append(length_correlation(mixed[dealt.document_ids], dealt.offsets))
    return np.sort(found)


SETS = ["log-normal", "gsm8k_train", "mix_sft", "code_src"]


@pytest.mark.parametrize("mode", ["streaming", "indexed"])
@pytest.mark.parametrize("name", SETS)
def test_full_packs_hold_lengths_that_are_no_more_alike_than_at_random(
    tmp_path, monkeypatch, request, mode, name
):
    monkeypatch.setattr(blocks, "FEWEST_BLOCK_BYTES", 400)
    lengths, capacity = lengths_of(name, request)

    packs = packed(tmp_path, lengths, capacity, mode, "best_fit")

    assert len(packs) > 100
    assert sum(map(np.sum, packs)) / (len(packs) * capacity) >= 0.995
    assert correlation(packs) <= at_random(packs, capacity)[-2]


def test_packs_sorted_by_length_would_be_seen(tmp_path, monkeypatch, request):
    monkeypatch.setattr(blocks, "FEWEST_BLOCK_BYTES", 400)
    lengths, capacity = lengths_of("log-normal", request)

    for mode in ("streaming", "indexed"):
        packs = packed(tmp_path, lengths, capacity, mode, "best_fit_decreasing")
        assert correlation(packs) > at_random(packs, capacity)[-1] + 0.1

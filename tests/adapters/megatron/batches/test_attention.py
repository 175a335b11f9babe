"""From packed rows to what attention computes: every document what it has alone, every input once."""

import itertools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import varlen as vl
from varlen.adapters.megatron import (
    RowCollator,
    cp_slice,
    get_packed_seq_params,
    get_packed_seq_q_cu_seqlens,
    megatron_batch,
    split_microbatches,
)
from varlen.adapters.megatron.dataset import rows_of_items

WORDS, SIZE, EOS = 60, 8, 2
Values = npt.NDArray[Any]
_rng = np.random.default_rng(7)
_words, _steps = _rng.normal(size=(WORDS, SIZE)), _rng.normal(size=(800, SIZE))
_query, _key, _value, _out = _rng.normal(size=(4, SIZE, SIZE))
_head = _rng.normal(size=(SIZE, WORDS))


def losses(tokens: Values, positions: Values, labels: Values, segments: list[tuple[int, int]]) -> Values:
    """Loss of every place of one causal layer; NaN where no segment, as [begin, end), computes attention."""
    inputs = _words[tokens] + _steps[positions]
    found = np.full(len(tokens), np.nan)
    for begin, end in segments:
        here = inputs[begin:end]
        scores = (here @ _query) @ (here @ _key).T / np.sqrt(SIZE)
        seen = np.exp(scores - scores.max(initial=0)) * np.tri(end - begin)
        hidden = here + seen / seen.sum(1, keepdims=True) @ (here @ _value) @ _out
        logits = hidden @ _head
        sums = np.log(np.exp(logits).sum(1))
        found[begin:end] = sums - logits[np.arange(end - begin), labels[begin:end]]
    return found


class Document(NamedTuple):
    stored: list[int]
    """Real tokens, padding up to the slot, and the last target."""
    mask: list[float]
    real: int

    def loss(self) -> float:
        ids = np.array(self.stored[: self.real + 1])
        alone = losses(ids[:-1], np.arange(self.real), ids[1:], [(0, self.real)])
        return float((alone * self.mask[: self.real]).sum())


def boundaries(micro: dict[str, Any], dialect: str) -> tuple[Values, Values]:
    """Real tokens and places, as a release's `get_packed_seq_params` takes them from its keys."""
    if dialect == "0.6":
        logical = micro["cu_seqlens_q"].squeeze()
        physical = micro.get("cu_seqlens_q_padded")
        return logical.numpy(), (logical if physical is None else physical.squeeze()).numpy()
    assert int(micro["cu_seqlens"].argmin()) == int(micro["cu_seqlens_argmin"])
    physical = micro["cu_seqlens"].squeeze()[: micro["cu_seqlens_argmin"].item()]
    if micro.get("cu_seqlens_unpadded") is None:
        return physical.numpy(), physical.numpy()
    logical = micro["cu_seqlens_unpadded"].squeeze()[: micro["cu_seqlens_unpadded_argmin"].item()]
    return logical.numpy(), physical.numpy()


def places_of(rank: int, ranks: int, bounds: Values) -> Values:
    """Places of a rank: of each segment's 2 · ranks chunks the one from its begin and the one from its end."""
    held = []
    for begin, end in itertools.pairwise(bounds.tolist()):
        chunks = np.arange(begin, end).reshape(2 * ranks, -1)
        held += [*chunks[rank], *chunks[2 * ranks - 1 - rank]]
    return np.array(held, dtype=np.int64)


def packed_losses(micro: dict[str, Any], dialect: str, ranks: int) -> tuple[Values, Values, Values]:
    """Loss times mask of every place, put together from the ranks' shares; and both boundaries."""
    logical, physical = boundaries(micro, dialect)
    names = ("tokens", "position_ids", "labels", "loss_mask")
    whole = {name: np.full(physical[-1], -1.0) for name in names}
    for rank in range(ranks):
        share = cp_slice(micro, rank, ranks)
        held = places_of(rank, ranks, physical) if ranks > 1 else np.arange(physical[-1])
        for name in names:
            whole[name][held] = share[name][0].numpy()
    segments = [(int(b), int(b + n)) for b, n in zip(physical, np.diff(logical))]
    ids = [whole[name].astype(np.int64) for name in names[:3]]
    found, mask = losses(ids[0], ids[1], ids[2], segments), whole["loss_mask"]
    assert not mask[np.isnan(found)].any()
    return np.where(mask == 0, 0, found * mask), logical, physical


def drawn(rng: np.random.Generator, multiple: int, fractions: bool) -> list[list[Document]]:
    rows = []
    for _ in range(rng.integers(1, 4)):
        rows.append([])
        for real in rng.integers(1, 50, rng.integers(1, 6)).tolist():
            slot = -(-real // multiple) * multiple
            stored = [*rng.integers(0, WORDS, real + 1).tolist(), *[EOS] * (slot - real)]
            mask = rng.random(real) if fractions else rng.integers(0, 2, real)
            rows[-1].append(Document(stored, [*mask.tolist(), *[0] * (slot + 1 - real)], real))
    return rows


@pytest.mark.parametrize("dialect", ["0.4", "0.5", "0.6"])
@pytest.mark.parametrize(("multiple", "ranks"), [(1, 1), (3, 1), (4, 2), (12, 3)])
@pytest.mark.parametrize("is_static", [False, True])
def test_a_document_has_the_loss_that_it_has_alone(dialect, multiple, ranks, is_static):
    for seed in range(6):
        rows = drawn(np.random.default_rng(seed), multiple, fractions=seed % 2 == 1)
        entry = {"max_samples_per_bin": 5 + seed % 3, "dataset_max_seqlen": 60, "min_packed_seqlen": 0}
        static = {"max_seq_length": 360, "pad_to_max_length": True, "pad_cu_seqlens": True}
        settings: dict[str, Any] = static | {"pack_metadata": [entry]} if is_static else {}
        items = [
            {
                "input_ids": [token for document in row for token in document.stored],
                "loss_mask": [weight for document in row for weight in document.mask],
                "seq_boundaries": np.cumsum([0, *(len(document.stored) for document in row)]),
                "seq_lengths": [document.real for document in row],
            }
            for row in rows
        ]

        batch = RowCollator(eos_id=EOS, dialect=dialect, pad_seq_to_mult=multiple, **settings)(  # type: ignore[arg-type]
            rows_of_items(items)
        )

        for row, micro in zip(rows, split_microbatches(batch), strict=True):
            found, logical, physical = packed_losses(micro, dialect, ranks)
            assert np.diff(logical)[: len(row)].tolist() == [document.real for document in row]
            got = [found[begin:end].sum() for begin, end in itertools.pairwise(physical.tolist())]
            assert got[: len(row)] == pytest.approx([document.loss() for document in row], rel=1e-5)
            assert not any(got[len(row) :])


@pytest.mark.parametrize("dialect", ["0.4", "0.5", "0.6"])
@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_document_of_varlens_own_batches_has_it_too(dialect, layout, ranks):
    rng = np.random.default_rng(ranks)
    lengths = rng.integers(1, 50, 9).tolist()
    documents = [rng.integers(3, WORDS, length).tolist() for length in lengths]
    packing = vl.pack(lengths, capacity=120, document_multiple_of=2 * ranks if ranks > 1 else 1)

    batch = megatron_batch(vl.collate(documents, packing, layout=layout), dialect)

    found: dict[tuple[int, ...], float] = {}
    for micro in split_microbatches(batch):
        loss, logical, physical = packed_losses(micro, dialect, ranks)
        for begin, end, real in zip(physical, physical[1:], np.diff(logical)):
            found[tuple(micro["tokens"][0, begin : begin + real].tolist())] = loss[begin:end].sum()
    for ids in documents:
        alone = Document([*ids, 0], [*[1] * (len(ids) - 1), 0], len(ids)).loss()
        assert found[tuple(ids)] == pytest.approx(alone, rel=1e-5)


@st.composite
def packs(draw: st.DrawFn, multiple: int) -> list[list[list[int]]]:
    """Stored documents, by row: real tokens of a number that no other has, then EOS up to the slot and its target."""
    sizes = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=3)
    numbers = itertools.count(10)
    return [
        [
            [next(numbers) for _ in range(size)] + [EOS] * (-(-size // multiple) * multiple - size + 1)
            for size in row
        ]
        for row in draw(sizes)
    ]


def items_of(rows: list[list[list[int]]], with_lengths: bool) -> list[dict[str, Any]]:
    """Rows as a data set gives them; every real input is trained."""
    items = []
    for row in rows:
        real = [sum(token != EOS for token in document) for document in row]
        items.append(
            {
                "input_ids": [*itertools.chain(*row)],
                "seq_boundaries": np.cumsum([0, *map(len, row)]).tolist(),
                "loss_mask": [int(token != EOS) for document in row for token in document],
            }
            | ({"seq_lengths": real} if with_lengths else {})
        )
    return items


@given(
    st.data(),
    st.sampled_from([1, 4, 6]),
    st.sampled_from(["0.4", "0.5", "0.6"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_attention_gets_every_document_whole_and_apart(
    data, multiple, dialect, with_lengths, is_static, always
):
    rows = data.draw(packs(multiple))
    settings: dict[str, Any] = {"pad_seq_to_mult": multiple, "always_padded": always, "padding_mask": True}
    if is_static:
        pack_size = 12 * -(-max(sum(map(len, row)) for row in rows) // 12) + data.draw(
            st.sampled_from([0, 12, 600])
        )
        entry = {"max_samples_per_bin": 6, "dataset_max_seqlen": 48, "min_packed_seqlen": 0}
        settings |= {"max_seq_length": pack_size, "pad_to_max_length": True}
        settings |= {"pad_cu_seqlens": True, "pack_metadata": [entry]}
    collator = RowCollator(eos_id=EOS, dialect=dialect, **settings)

    batch = collator(rows_of_items(items_of(rows, with_lengths)))

    for row, micro in zip(rows, split_microbatches(batch), strict=True):
        params = get_packed_seq_params(micro)
        logical, physical = (bounds.tolist() for bounds in get_packed_seq_q_cu_seqlens(params))
        tokens, labels = micro["tokens"][0].tolist(), micro["labels"][0].tolist()
        trained = micro["loss_mask"][0].bool()
        assert len(logical) == len(physical)
        assert physical[0] == logical[0] == 0
        assert physical[-1] == len(tokens)
        for document, begin, real in zip(row, physical, np.diff(logical)):
            kept = [token for token in document if token != EOS]
            assert tokens[begin : begin + real] == kept
            assert labels[begin : begin + real] == [*kept[1:], EOS]
        assert sorted(micro["tokens"][0][trained].tolist()) == sorted(
            token for document in row for token in document if token != EOS
        )
        assert not (trained & micro["padding_mask"][0]).any()
        assert int((~micro["padding_mask"]).sum()) == int(trained.sum())
        is_padded = params.cu_seqlens_q_padded is not None
        assert is_padded == (micro.get("pad_between_seqs", is_padded))
        tail = np.diff(physical)[len(row) :]
        assert all(size % multiple == 0 for size in np.diff(physical)) or multiple == 1
        assert is_static or tail.max(initial=0) <= 128
        assert params.max_seqlen_q is not None
        assert params.max_seqlen_q >= max(np.diff(physical))
        if is_padded:
            assert logical[len(row) :] == logical[-1:] * (len(logical) - len(row))


@given(st.data(), st.sampled_from([1, 2]), st.sampled_from(["0.4", "0.6"]), st.booleans())
def test_ranks_hold_every_place_of_a_collated_row_once(data, ranks, dialect, with_lengths):
    rows = data.draw(packs(2 * ranks))
    collator = RowCollator(eos_id=EOS, dialect=dialect, pad_seq_to_mult=2 * ranks)

    batch = collator(rows_of_items(items_of(rows, with_lengths)))

    for micro in split_microbatches(batch):
        shares = [cp_slice(micro, rank, ranks) for rank in range(ranks)]
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            held = itertools.chain(*(share[name][0].tolist() for share in shares))
            assert sorted(held) == sorted(micro[name][0].tolist())
        assert len({share["tokens"].shape for share in shares}) == 1

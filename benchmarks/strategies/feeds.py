"""The strategies: how documents become optimizer steps, each step with the documents that it trains.

Every strategy gets the same documents in the same random order, and gives one epoch of them. Peers are used as they
are: TRL's `pack_dataset` and its collator. What is said of documents (`Fed`) is what the arrays hold.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import varlen as vl
from benchmarks.strategies.sets import Shape
from varlen.adapters import hf
from varlen.adapters.multipack import MultipackDistributedBatchSampler
from varlen.train.demo.corpus import Documents
from varlen.train.demo.orders import Order, batches_as_packing
from varlen.train.demo.run import StepInputs, padded_inputs
from varlen.types import IntArray

IGNORED = -100
_TOLD = ("input_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass(frozen=True, kw_only=True, eq=False)
class Fed:
    """One optimizer step."""

    inputs: StepInputs
    document_ids: IntArray
    """int64 `[pieces]`: which documents it trains."""
    lengths: IntArray
    """int64 `[pieces]`: how many of their tokens."""


@dataclass(frozen=True, kw_only=True)
class Feed:
    """What to deal to steps, and how."""

    strategy: str
    documents: Documents
    shape: Shape
    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    """Of `vl.PackedLoader`, where they aren't its defaults."""

    @property
    def attention(self) -> str:
        return "sdpa" if self.strategy in _RECTANGLES else "varlen"

    def steps(self, model: Any) -> Iterator[Fed]:
        return STRATEGIES[self.strategy](self, model)


def _padded(feed: Feed, model: Any, *, with_mask: bool = False, by_length: bool = False) -> Iterator[Fed]:
    """Pad minibatches to their longest document; causal attention needs no mask for padding behind it."""
    del model
    lengths = feed.documents.lengths
    batches = np.arange(len(lengths)).reshape(-1, feed.shape.documents)
    if by_length:
        ordered = np.argsort(lengths, kind="stable").reshape(batches.shape)
        batches = np.random.default_rng([feed.seed, 2]).permutation(ordered, axis=0)
    packing = batches_as_packing(lengths, batches, int(lengths.max()))
    order = Order(packing=packing, step_offsets=np.arange(len(batches) + 1))
    for step, ids in enumerate(batches):
        inputs = padded_inputs(feed.documents, order, step, with_mask=with_mask)
        yield Fed(inputs=inputs, document_ids=ids, lengths=lengths[ids])


def _online(feed: Feed, model: Any) -> Iterator[Fed]:
    del model
    batches = np.arange(len(feed.documents.lengths)).reshape(-1, feed.shape.documents)
    return (flattened(feed.documents, ids) for ids in batches)


def _sampled(feed: Feed, model: Any) -> Iterator[Fed]:
    """Let a multipack sampler choose documents that fill a step, and flatten them."""
    del model
    sampler = MultipackDistributedBatchSampler(
        feed.shape.packs * feed.shape.capacity, feed.documents.lengths, num_replicas=1, rank=0, seed=feed.seed
    )
    return (flattened(feed.documents, ids) for ids in sampler)


def flattened(documents: Documents, ids: IntArray) -> Fed:
    features = [
        {"input_ids": documents.tokens[documents.offsets[i] : documents.offsets[i + 1]]} for i in ids.tolist()
    ]
    arguments = hf.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(features)
    return _fed(arguments, arguments["labels"], ids, documents.lengths[ids])


def _offline(feed: Feed, model: Any, *, kind: str, as_tokens: bool = False) -> Iterator[Fed]:
    """Pack everything beforehand with TRL, then train packs in random order.

    `kind` is TRL's strategy. With `as_tokens` a step has the tokens of a minibatch; else as many packs as a
    minibatch has documents.
    """
    del model
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    rows = _packed_by_trl(feed.documents, feed.shape.capacity, kind)
    order = np.random.default_rng([feed.seed, 3]).permutation(len(rows)).tolist()
    is_flat = kind != "wrapped"
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=is_flat)
    size = feed.shape.packs if as_tokens else feed.shape.documents
    for first in range(0, len(order), size):
        chosen = [dict(rows[i]) for i in order[first : first + size]]
        owners = [np.asarray(row.pop("document_ids")) for row in chosen]
        arguments = collate(chosen)
        labels = arguments["labels"].clone()
        labels[:, 0] = IGNORED  # nothing stands before it, and models shift it away
        counted = [np.unique(owner, return_counts=True) for owner in owners]
        yield _fed(
            arguments if is_flat else {"input_ids": arguments["input_ids"]},
            labels,
            np.concatenate([ids for ids, _ in counted]),
            np.concatenate([lengths for _, lengths in counted]),
        )


def _packed_by_trl(documents: Documents, capacity: int, kind: str) -> Any:
    """Return TRL's data set of packs, with the number of each token's document beside it."""
    import datasets
    import pyarrow as pa
    import trl

    datasets.disable_progress_bars()
    owners = np.repeat(np.arange(len(documents.lengths)), documents.lengths)
    columns = {
        name: pa.ListArray.from_arrays(pa.array(documents.offsets.astype(np.int32)), pa.array(values))
        for name, values in (("input_ids", documents.tokens), ("document_ids", owners))
    }
    data = datasets.Dataset(pa.table(columns))
    return trl.pack_dataset(data, capacity, strategy=kind, map_kwargs={"keep_in_memory": True})


def _ours(feed: Feed, model: Any) -> Iterator[Fed]:
    """Take what `vl.PackedLoader` gives: exactly `packs` packs a step, in random order, best fit."""
    with tempfile.TemporaryDirectory() as folder:
        data = write_arrow(feed.documents, Path(folder))
        yield from loaded(data, feed.shape, feed.seed, model, **feed.options)


def loaded(data: Path, shape: Shape, seed: int, model: Any, **options: Any) -> Iterator[Fed]:
    """Give what the loader gives of a file; `options` are more of its settings."""
    settings = {"overlong": "error", "layout": "flat", "worker": "thread", **options}
    with vl.PackedLoader(
        data, capacity=shape.capacity, global_batch_size=shape.packs, seed=seed, **settings
    ) as loader:
        for batch in loader:
            yield _from_batch(batch, model)


def _from_batch(batch: vl.PackedBatch, model: Any) -> Fed:
    arguments = hf.model_inputs(batch.to_torch(), model)
    ids, lengths = (np.asarray(part, np.int64) for part in (batch.document_ids, batch.document_lengths))
    return _fed(arguments, arguments["labels"], ids, lengths)


def write_arrow(documents: Documents, folder: Path) -> Path:
    """Write documents as an Arrow file of token ids, which the loader reads as it is."""
    import pyarrow as pa

    column = pa.ListArray.from_arrays(
        pa.array(documents.offsets.astype(np.int32)), pa.array(documents.tokens)
    )
    table = pa.table({"input_ids": column})
    path = folder / "documents.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def _fed(arguments: Any, labels: torch.Tensor, document_ids: IntArray, lengths: IntArray) -> Fed:
    """Keep the arguments that a model takes, and count."""
    kept = {name: arguments[name] for name in _TOLD if name in arguments}
    inputs = StepInputs(
        arguments={**kept, "use_cache": False},
        labels=labels,
        num_tokens=int(lengths.sum()),
        num_targets=int((labels != IGNORED).sum()),
    )
    return Fed(inputs=inputs, document_ids=document_ids, lengths=lengths)


STRATEGIES: dict[str, Callable[[Feed, Any], Iterator[Fed]]] = {
    "padding_mask": partial(_padded, with_mask=True),
    "padding": _padded,
    "grouped": partial(_padded, by_length=True),
    "online": _online,
    "offline_large": partial(_offline, kind="bfd"),
    "offline": partial(_offline, kind="bfd", as_tokens=True),
    "wrapped": partial(_offline, kind="wrapped", as_tokens=True),
    "sampled": _sampled,
    "ours": _ours,
}
"""By name; `figures.TITLES` has the words for them, and docs/strategies.md says what they are."""
_RECTANGLES = ("padding_mask", "padding", "grouped", "wrapped")

"""The documents that strategies are compared on: a short set and a longer one of real text, and mixed extremes.

The sets lie outside this repository, in `../shared/data`; `quick=True` takes sources of the interpreter instead,
which every machine has, and far fewer of them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks.records import ROOT
from varlen.documents.texts import interpreter_texts
from varlen.text.load_tokenizer import load_tokenizer, train_bpe
from varlen.train.demo.corpus import Documents

TEXTS = ROOT.parent / "shared" / "data" / "text"
VOCABULARY = 1024
_CHARACTERS_OF_TOKEN = 8
"""A text is cut at so many characters for each token that is kept of it, before it is tokenized."""
_LEARNED_CHARACTERS = 8_000
"""Of each text, for the tokenizer to learn from."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How much one optimizer step holds, in each of the two ways to say it."""

    documents: int
    """Of a minibatch drawn at random: as many as fill `packs` on average, so that the two ways are equal."""
    capacity: int
    """Tokens of a pack; documents are cut to as many."""
    packs: int


@dataclass(frozen=True, kw_only=True)
class TextSet:
    """One set, shuffled once: documents for a base, others to train on, and others to validate."""

    name: str
    title: str
    base: Documents
    """What models know before a comparison begins; trained again by nobody."""
    train: Documents
    validation: Documents
    shape: Shape
    cut_share: float
    """Of the documents, how many were longer than a pack and lost their end, for every strategy alike."""

    def draw(self, steps: int, seed: int) -> Documents:
        wanted = steps * self.shape.documents
        available = len(self.train.lengths)
        if wanted > available:
            raise RuntimeError(f"{self.name} has {available:,} documents, {wanted:,} are asked for")
        return self.train.take(np.random.default_rng([seed, 7]).permutation(available)[:wanted])


@cache
def text_sets(quick: bool) -> dict[str, TextSet]:
    """Read, tokenize and cut both sets; one vocabulary is learned from them."""
    if quick:
        texts = list(itertools.islice(interpreter_texts(), 500))
        plans = {
            "short": ("sources, cut short", texts[:250], 128, 4, 24, 4),
            "long": ("sources", texts[250:], 512, 2, 16, 4),
        }
    else:
        if not TEXTS.exists():
            raise RuntimeError("the texts lie outside this repository, and aren't there; --quick needs none")
        plans = {
            "short": ("dialogues, sums and web pages", list(_short_texts()), 1024, 4, 96, 150),
            "long": ("source files", _long_texts(), 2048, 2, 32, 200),
        }
    tokenizer = train_bpe(
        (text[:_LEARNED_CHARACTERS] for plan in plans.values() for text in plan[1]), VOCABULARY
    )
    encode = load_tokenizer(tokenizer).encode
    found = {}
    for name, (title, texts, capacity, packs, held_out, base_steps) in plans.items():
        tokens, offsets = encode([text[: _CHARACTERS_OF_TOKEN * capacity] for text in texts])
        documents = Documents(tokens=tokens, offsets=offsets)
        found[name] = _text_set(name, title, documents, capacity, packs, held_out, base_steps)
    return found


def _text_set(
    name: str, title: str, documents: Documents, capacity: int, packs: int, held_out: int, base_steps: int
) -> TextSet:
    """Cut documents to the capacity, leave out those without a target, shuffle, and deal them."""
    is_cut = documents.lengths > capacity
    usable = np.flatnonzero(documents.lengths >= 2)
    whole = cut(documents, capacity).take(np.random.default_rng(0).permutation(usable))
    mean = float(whole.lengths.mean())
    minibatch = max(2, round(packs * capacity / mean))
    begin = held_out + base_steps * minibatch
    return TextSet(
        name=name,
        title=title,
        base=whole.take(np.arange(held_out, begin)),
        train=whole.take(np.arange(begin, len(usable))),
        validation=whole.take(np.arange(held_out)),
        shape=Shape(documents=minibatch, capacity=capacity, packs=packs),
        cut_share=float(is_cut[usable].mean()),
    )


def cut(documents: Documents, longest: int) -> Documents:
    lengths = np.minimum(documents.lengths, longest)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    places = np.arange(offsets[-1]) + np.repeat(documents.offsets[:-1] - offsets[:-1], lengths)
    return Documents(tokens=documents.tokens[places], offsets=offsets)


def extremes(factor: int, minibatches: int, shape: Shape, base: int, seed: int = 0) -> Documents:
    """Make documents of which one in a minibatch, on average, is `factor` times as long as all others."""
    rng = np.random.default_rng([seed, factor])
    count = minibatches * shape.documents
    lengths = np.full(count, base)
    lengths[rng.permutation(count)[:minibatches]] = base * factor
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = rng.integers(0, VOCABULARY, int(offsets[-1]), dtype=np.int32)
    return Documents(tokens=tokens, offsets=offsets)


def described(found: TextSet) -> dict[str, float | int | str]:
    lengths = found.train.lengths
    return {
        "title": found.title,
        "documents": len(lengths),
        "base_documents": len(found.base.lengths),
        "mean": float(lengths.mean()),
        "median": float(np.median(lengths)),
        "longest": int(lengths.max()),
        "variation": float(lengths.std() / lengths.mean()),
        "cut_share": found.cut_share,
        "capacity": found.shape.capacity,
        "packs": found.shape.packs,
        "minibatch": found.shape.documents,
        "validation_documents": len(found.validation.lengths),
        "validation_tokens": int(found.validation.lengths.sum()),
    }


def _short_texts() -> Iterator[str]:
    """Yield grade-school sums and dialogues, a line a message, and some web pages for the tail."""
    for name in ("gsm8k_train", "taskmaster4", "c4_demo"):
        with (TEXTS / f"{name}.jsonl").open(encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                said = row.get("messages", ())
                yield row["text"] if "text" in row else "\n".join(one["content"] or "" for one in said)


def _long_texts() -> list[str]:
    import pyarrow.parquet as pq

    texts: list[str] = pq.read_table(TEXTS / "code_sample.parquet").column("text").to_pylist()
    return texts

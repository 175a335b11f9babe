"""The demo's documents: tokenization, a held-out validation set, and a random draw for every seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from varlen.documents.texts import interpreter_texts, read_texts
from varlen.errors import SourceError
from varlen.text.load_tokenizer import load_tokenizer, train_bpe
from varlen.train.demo.settings import DemoSettings
from varlen.types import Int32Array, IntArray

MAX_DOCUMENTS = 3000
"""Documents the demo tokenizes; it trains on a few hundred of them and draws the lengths of all."""
MAX_CHARACTERS = 32_000_000
"""Text the demo reads from the user's files, so that a large file doesn't make a newcomer wait."""
BPE_CHARACTERS = 3_000_000
"""Text the tokenizer learns from, about a second's worth."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Documents:
    """Documents as flat arrays: document d is `tokens[offsets[d]:offsets[d + 1]]`."""

    tokens: Int32Array
    """int32 `[num_tokens]`."""
    offsets: IntArray
    """int64 `[num_documents + 1]`."""

    @property
    def lengths(self) -> IntArray:
        """int64 `[num_documents]`: tokens of each document."""
        return np.diff(self.offsets)

    def take(self, ids: IntArray) -> Documents:
        """Return some of the documents, in the given order."""
        pieces = [self.tokens[self.offsets[i] : self.offsets[i + 1]] for i in ids.tolist()]
        offsets = np.concatenate([[0], np.cumsum(self.lengths[ids])]).astype(np.int64)
        return Documents(tokens=np.concatenate(pieces), offsets=offsets)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Corpus:
    """All documents of a demo, and the split into training and validation."""

    settings: DemoSettings
    """The settings, reduced to what these documents allow."""
    documents: Documents
    texts: tuple[str, ...]
    """The text of each document, for pictures."""
    validation_ids: IntArray
    """int64: numbers of the validation documents."""
    train_ids: IntArray
    """int64: numbers of all other documents."""
    vocab_size: int
    description: str
    """What was read, in words."""
    documents_found: int
    """Documents read, of which `MAX_DOCUMENTS` at most were drawn."""
    too_short: int
    """Drawn documents of fewer than two tokens, which hold no target and are left out."""
    is_cut: bool
    """Whether reading stopped at `MAX_CHARACTERS`."""

    @property
    def validation(self) -> Documents:
        """The validation documents."""
        return self.documents.take(self.validation_ids)

    def draw(self, num_documents: int, seed: int) -> IntArray:
        """Draw documents to train on, in random order, with the lengths of the whole set.

        One document is drawn from each of `num_documents` strata of equal size, from the shortest to the
        longest: a hundred documents then have the mean and the tail of thousands, and figures depend
        less on luck.

        Returns:
            int64 `[num_documents]`, distinct, from `train_ids`.
        """
        rng = np.random.default_rng([seed, 1])
        lengths = self.documents.lengths[self.train_ids]
        by_length = self.train_ids[np.argsort(lengths, kind="stable")]
        bounds = np.linspace(0, len(by_length), num_documents + 1).astype(np.int64)
        drawn = by_length[rng.integers(bounds[:-1], bounds[1:])]
        return rng.permutation(drawn)


def read_corpus(data: str | Path | None, settings: DemoSettings) -> Corpus:
    """Read documents, train a tokenizer on them, encode them, and hold some out for validation."""
    rng = np.random.default_rng([settings.seed, 0])
    source = interpreter_texts() if data is None else read_texts(data)
    found, is_cut = _within_limit(source)
    chosen = rng.permutation(len(found))[:MAX_DOCUMENTS]
    texts = [found[i] for i in chosen.tolist()]
    tokenizer = train_bpe(_first_characters(texts, BPE_CHARACTERS), settings.model.vocab_size)
    tokens, offsets = load_tokenizer(tokenizer).encode(texts)
    documents = Documents(tokens=tokens, offsets=offsets)
    usable = np.flatnonzero(documents.lengths >= 2)
    fitted = settings.fitted(documents.lengths[usable]) if len(usable) else settings
    if len(usable) < fitted.num_documents_needed:
        raise SourceError(_too_few(data, len(usable), fitted, is_drawn=len(found) > len(texts) or is_cut))
    return Corpus(
        settings=fitted,
        documents=documents.take(usable),
        texts=tuple(texts[i] for i in usable.tolist()),
        validation_ids=np.arange(fitted.validation_documents),
        train_ids=np.arange(fitted.validation_documents, len(usable)),
        vocab_size=tokenizer.get_vocab_size(),
        description="the Python sources of this interpreter" if data is None else _printable(data),
        documents_found=len(found),
        too_short=len(texts) - len(usable),
        is_cut=is_cut,
    )


def _printable(data: str | Path) -> str:
    """Return a path as UTF-8 text; file names needn't be UTF-8."""
    return str(data).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _within_limit(source: Iterator[str]) -> tuple[list[str], bool]:
    """Return texts of up to `MAX_CHARACTERS`, and whether there were more."""
    texts: list[str] = []
    characters = 0
    for text in source:
        texts.append(text)
        characters += len(text)
        if characters >= MAX_CHARACTERS:
            return texts, next(source, None) is not None
    return texts, False


def _first_characters(texts: Iterable[str], limit: int) -> Iterator[str]:
    """Yield texts until they hold `limit` characters."""
    for text in texts:
        yield text[:limit]
        limit -= len(text)
        if limit <= 0:
            return


def _too_few(data: str | Path | None, found: int, settings: DemoSettings, *, is_drawn: bool) -> str:
    """Return the error message for too few documents, with the number needed and a solution."""
    whose = "this interpreter's sources" if data is None else _printable(data)
    affordable = (found - settings.validation_documents) // settings.batch_documents
    hold = "hold" if data is None else "holds"
    found_text = f"{found:,} {'document' if found == 1 else 'documents'} of two tokens or more"
    steps_text = f"{settings.steps:,} {'step' if settings.steps == 1 else 'steps'}"
    ways = [] if is_drawn else ["more documents"]
    if affordable >= 1:
        ways.append(f"--steps {affordable} at most")
    return (
        (
            f"{whose} {hold} more, but the demo takes {found_text} and needs "
            if is_drawn
            else f"{whose} {hold} {found_text}, but the demo needs "
        )
        + f"{settings.num_documents_needed:,}: {steps_text} of {settings.batch_documents:,} to train on and "
        f"{settings.validation_documents:,} to validate; pass {' or '.join(ways) or 'shorter documents'}"
    )

"""Get a tokenizer: from a file, a folder, an object, a function, or trained on the spot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varlen.errors import SettingError
from varlen.source.identity import function_fingerprint
from varlen.source.tokenizer import (
    ByteTokenizer,
    FastTokenizer,
    FunctionTokenizer,
    Specials,
    Tokenizer,
)
from varlen.source.wrapped import PROBE, wrap_backend, wrap_transformers

if TYPE_CHECKING:
    import tokenizers


def train_bpe(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Train a byte-level BPE, which can spell any text, on the texts given.

    Deterministic. Half a second for 4 million characters.

    Args:
        texts: what to learn from.
        vocab_size: tokens in the vocabulary, at least the 256 bytes; fewer come out where the text is too
            small to learn so many.

    Raises:
        SettingError: a vocabulary smaller than the 256 bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < 256:
        raise SettingError(f"vocab_size must be at least 256, one token for each byte, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(tokenizer: Any = None, *, eos: int | str | None = None) -> Tokenizer:
    """Return what encodes texts.

    Args:
        tokenizer: None or "bytes" for the built-in one; a JSON file of the `tokenizers` library, or a folder
            that holds it; an object of `tokenizers` or transformers; or a function that takes a text, or a list
            of texts, and returns ids.
        eos: the token that ends a document, by id or as text; None for the tokenizer's own.

    Raises:
        SettingError: no such file, not a tokenizer, or `eos` isn't one of its tokens.
        MissingExtraError: it takes transformers, which isn't installed.
    """
    made = _made(tokenizer)
    if eos is None:
        return made
    limit = 2**31 if made.vocab_size is None else made.vocab_size
    eos_id: list[Any] = [eos]
    if isinstance(eos, str):
        eos_id = made.encode([eos.encode(errors="replace").decode()], is_chat=True)[0].tolist()
    is_number = len(eos_id) == 1 and isinstance(eos_id[0], Integral) and not isinstance(eos_id[0], bool)
    if not is_number or not 0 <= eos_id[0] < limit:
        raise SettingError(
            f"eos must be one of the {limit:,} tokens of {made.name}, by id or as its text; got {eos!r}"
            + (f", which is {len(eos_id):,} tokens" if isinstance(eos, str) else "")
        )
    if isinstance(made, ByteTokenizer):
        return replace(made, eos_id=int(eos_id[0]))
    return replace(made, specials=replace(made.specials, eos_id=int(eos_id[0])))  # type: ignore[type-var]


def _made(tokenizer: Any) -> Tokenizer:
    """Return a tokenizer with its own end of text."""
    if tokenizer is None or (isinstance(tokenizer, str) and tokenizer == "bytes"):
        return ByteTokenizer()
    if isinstance(tokenizer, ByteTokenizer | FastTokenizer | FunctionTokenizer):
        return tokenizer
    if isinstance(tokenizer, str | Path):
        from varlen.source.tokenizer_folder import read_tokenizer

        return read_tokenizer(tokenizer)
    if hasattr(tokenizer, "encode_batch_fast"):
        return wrap_backend(tokenizer, type(tokenizer).__name__)
    if hasattr(tokenizer, "special_tokens_map") and hasattr(tokenizer, "convert_tokens_to_ids"):
        return wrap_transformers(tokenizer, str(getattr(tokenizer, "name_or_path", "")) or "tokenizer")
    if callable(tokenizer):
        name = getattr(tokenizer, "__qualname__", type(tokenizer).__name__)
        made = FunctionTokenizer(
            function=_by_batch(tokenizer), name=name, specials=Specials(), fingerprint=""
        )
        try:
            ids = made.encode([PROBE])[0].tolist()
        except SettingError:  # it may know other letters alone
            ids = []
        return replace(made, fingerprint=function_fingerprint(name, ids))
    raise SettingError(
        'tokenizer must be "bytes", a file, a folder, a tokenizer object or a function from text to ids; '
        f"got {type(tokenizer).__name__}"
    )


def _by_batch(function: Callable[..., Any]) -> Callable[[list[str]], Sequence[Sequence[int]]]:
    """Return a function of a list of texts, whichever of both the caller's takes.

    Raises:
        SettingError: it takes neither.
    """
    for batch in (False, True):
        try:
            ids = list(function(["a"]) if batch else function("a"))
        except Exception as error:
            failed: Exception | None = error
            continue
        if ids and not hasattr(ids[0], "__len__") and not batch:
            return _EachText(function)
        if ids and hasattr(ids[0], "__len__") and batch:
            return function
        failed = None
    raise SettingError(
        "a tokenizer function must return a list of ids for a text, or a list of such lists for a list of texts"
        + (f"; it raised {type(failed).__name__}: {failed}" if failed else "")
    )


class _EachText:
    """Calls a function of one text for each of a list; a class, so that other processes can have it."""

    def __init__(self, function: Callable[[str], Sequence[int]]) -> None:
        self._function = function

    def __call__(self, texts: list[str]) -> list[Sequence[int]]:
        return [self._function(text) for text in texts]

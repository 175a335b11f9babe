"""Objects of the tokenizer libraries as varlen's: a serializable backend where there is one, else a function."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from varlen.errors import SettingError
from varlen.text.identity import backend_fingerprint, function_fingerprint
from varlen.text.tokenizer import (
    FastTokenizer,
    FunctionTokenizer,
    Specials,
    Tokenizer,
    backend_faults,
    is_cuttable,
)

if TYPE_CHECKING:
    import tokenizers

_USUAL_EOS = (
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|im_end|>",
    "[EOS]",
    "<|end|>",
)
"""What ends a document in the usual vocabularies: a tokenizer's JSON file alone doesn't say which token does."""
PROBE = "Call me Ishmael. Some years ago - never mind how long\n\tdef f(x): return x**2 + 0.5\nżółć 🦆 你好"
"""A text whose ids tell functions apart."""
_PROBES = (
    PROBE,
    "",
    " a  b ",
    "user\nHello there",
    "It 's , isn't it ? \n\n\n  CAFÉ e\u0301 ﬁ 1234567",
    "\u200b▁x</s><s>",
)
_WORDS = ("a", "the", "A", "1", ".", "user")
"""Texts of which a vocabulary knows one, to see what is put before it."""
_ENCODERS = ("__call__", "_call_one", "_encode_plus", "_batch_encode_plus", "prepare_for_tokenization")
"""Methods of transformers' tokenizers; whose class has its own does more than its backend."""
_STRIPPING = ("lstrip", "rstrip", "single_word")


def wrap_backend(
    backend: tokenizers.Tokenizer,
    name: str,
    *,
    texts: Mapping[str, str] | None = None,
    templates: Mapping[str, str] | None = None,
    marks: Iterable[str] = (),
    is_own: bool = False,
) -> FastTokenizer:
    """Wrap a tokenizer of the `tokenizers` library."""
    from tokenizers import Tokenizer as Backend

    splits = bool(backend.encode_special_tokens)
    with backend_faults(name):
        spelled = backend.to_str()
        own = backend if is_own else Backend.from_str(spelled)
    own.no_truncation()
    own.no_padding()
    own.encode_special_tokens = splits
    spec = json.loads(spelled)
    if spec["model"].get("dropout"):
        raise SettingError(
            f"the tokenizer {name} has dropout {spec['model']['dropout']} and gives other ids each time, so that no "
            "run could be repeated; set its model's dropout to null"
        )
    added = {token["content"]: token for token in spec["added_tokens"]}
    special = {content for content, token in added.items() if token["special"]}
    usual = next((text for text in _USUAL_EOS if text in special), None)
    said = dict(texts) if texts is not None else {} if usual is None else {"eos_token": usual}
    with backend_faults(name):
        # Beside a token that takes blanks with it, or looks at its neighbours, no text can be cut.
        can_be_cut = not any(token[flag] for token in added.values() for flag in _STRIPPING) and is_cuttable(
            lambda text: own.encode(text, add_special_tokens=False).ids
        )
        prefix = _prefix_of(own)
    specials = Specials(
        eos_id=own.token_to_id(said["eos_token"]) if "eos_token" in said else None,
        pad_id=own.token_to_id(said["pad_token"]) if "pad_token" in said else None,
        prefix_ids=prefix,
        texts=said,
        end_marks=frozenset([*special, *marks]),
        chat_templates=dict(templates or {}),
    )
    return FastTokenizer(
        backend=own,
        name=name,
        specials=specials,
        fingerprint=backend_fingerprint(spec, prefix_ids=prefix, splits_specials=splits),
        vocab_size=max(own.get_vocab().values(), default=-1) + 1,
        is_cuttable=can_be_cut,
    )


def put_before(made: FastTokenizer, ids: Sequence[int]) -> FastTokenizer:
    """Return the same tokenizer, which puts these ids before a document."""
    print_ = backend_fingerprint(
        json.loads(made.backend.to_str()),
        prefix_ids=ids,
        splits_specials=bool(made.backend.encode_special_tokens),
    )
    return replace(made, specials=replace(made.specials, prefix_ids=tuple(ids)), fingerprint=print_)


def _prefix_of(backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Return the ids that a tokenizer puts before a text by itself."""
    for text in _WORDS:
        whole, bare = (backend.encode(text, add_special_tokens=more).ids for more in (True, False))
        if bare:
            return prefix(whole, bare)
    return ()


def prefix(whole: Sequence[int], bare: Sequence[int]) -> tuple[int, ...]:
    """Return the ids before a text, from its ids with and without what a tokenizer adds."""
    for start in range(len(whole) - len(bare) + 1):
        if list(whole[start : start + len(bare)]) == list(bare):
            return tuple(whole[:start])
    return ()


def wrap_transformers(tokenizer: Any, name: str, templates: Mapping[str, str] | None = None) -> Tokenizer:
    """Wrap a tokenizer of transformers: its backend where that gives its ids, else its own code."""
    texts = {key: str(text) for key, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    own = named_templates(getattr(tokenizer, "chat_template", None)) or dict(templates or {})
    marks = [str(mark) for mark in tokenizer.all_special_tokens]
    encode = _Calls(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and not _encodes_itself(type(tokenizer)):
        backend.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
        try:
            made = wrap_backend(backend, name, texts=texts, templates=own, marks=marks)
        except SettingError as error:
            if error.__cause__ is None or "serialized" not in str(error.__cause__):
                raise
        else:
            probes = [
                *_PROBES,
                *(f"a {mark} b{mark}\nc" for mark in sorted({*marks, *made.specials.end_marks})[:99]),
            ]
            if _is_equal(made, encode, probes):
                return made
    word = next((word for word in _WORDS if _tried(encode.one, word)), "")
    try:
        whole = tokenizer([word], verbose=False)["input_ids"][0]
        bare, answers = encode.one(word), _tried(encode.one, PROBE)
    except Exception as error:  # whatever it raises, it can't be used
        raise SettingError(
            f"the tokenizer {name} failed: {type(error).__name__}: {str(error)[:200]}"
        ) from error
    specials = Specials(
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        prefix_ids=prefix(whole, bare) if bare else (),
        texts=texts,
        end_marks=frozenset(marks),
        chat_templates=own,
    )
    known = sorted(tokenizer.get_vocab().items())
    kind = type(tokenizer).__name__
    return FunctionTokenizer(
        function=encode,
        name=name,
        specials=specials,
        fingerprint=function_fingerprint(kind, [known, answers, specials.prefix_ids]),
        vocab_size=max((id_ for _, id_ in known), default=-1) + 1,
        is_cuttable=is_cuttable(lambda text: _tried(encode.one, text) or []),
    )


def named_templates(said: Any) -> dict[str, str]:
    """Return chat templates by name, however they are spelled; a single one is `default`."""
    if isinstance(said, str):
        return {"default": said}
    if isinstance(said, list | tuple):
        said = {entry.get("name"): entry.get("template") for entry in said if isinstance(entry, Mapping)}
    if not isinstance(said, Mapping):
        return {}
    return {name: text for name, text in said.items() if isinstance(name, str) and isinstance(text, str)}


def _encodes_itself(kind: type) -> bool:
    """Return whether a class of transformers does something of its own before or after its backend."""
    usual = next(
        (base for base in kind.__mro__ if base.__name__ in ("TokenizersBackend", "PreTrainedTokenizerFast")),
        None,
    )
    return usual is None or any(
        getattr(kind, name, None) is not getattr(usual, name, None) for name in _ENCODERS
    )


def _is_equal(made: FastTokenizer, encode: _Calls, probes: list[str]) -> bool:
    """Return whether a backend gives the ids of the tokenizer around it, or fails where that does."""
    return all(
        _tried(lambda text: made.encode([text])[0].tolist(), text) == _tried(encode.one, text)
        for text in probes
    )


def _tried(encode: Callable[[str], list[int]], text: str) -> list[int] | None:
    """Return the ids of a text; None where that fails, in Python or in Rust."""
    try:
        return list(encode(text))
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException:  # panics of Rust are no Exceptions
        return None


class _Calls:
    """Calls a tokenizer of transformers as its own users do."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def one(self, text: str) -> list[int]:
        """Return the ids of one text."""
        return self([text])[0]

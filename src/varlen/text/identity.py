"""Identify a tokenizer by the ids that it produces, independently of library versions.

A store, a packed set and a loader's state record the tokenizer that made their tokens; where they are used with
another, an error names both.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from varlen.errors import SettingError
from varlen.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
# Prefixes of fingerprints: of ids in canonical form, of a function's results, of the built-in tokenizer.
_IDS, _FUNCTION, _BYTES = "ids:", "function:", "bytes:"
# Defaults of a step's fields that a file may omit. Of fields not listed, null, false and "" are defaults: a library
# that adds a switch leaves it off.
_USUAL: Mapping[str, Mapping[str, Any]] = {
    "ByteLevel": {"add_prefix_space": True, "use_regex": True},
    "Metaspace": {"replacement": "▁", "prepend_scheme": "always", "split": True},
    "Split": {"invert": False},
    "BertNormalizer": {
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    },
    "Strip": {"strip_left": True, "strip_right": True},
    "WordPiece": {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    "WordLevel": {"unk_token": "<unk>"},
    "BPE": {"unk_token": None},
}
_NEVER = {"ByteLevel": ("trim_offsets",)}  # fields that affect only offsets in the text


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerMark:
    """Which tokenizer made tokens, as far as recorded."""

    name: str
    fingerprint: str | None  # None where varlen 0.1.0 wrote one that depends on the library's version
    vocab_size: int | None = None  # all ids are below
    eos_id: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @property
    def are_bytes(self) -> bool:
        """Whether the tokens are bytes."""
        return self.fingerprint is not None and self.fingerprint.startswith(_BYTES)

    @property
    def words(self) -> str:
        """Its name, and the beginning of its fingerprint, since different folders may have the same name."""
        if self.are_bytes:
            return "the built-in one, bytes"
        short = "" if self.fingerprint is None else f" ({self.fingerprint.rpartition(':')[2][:8]})"
        return f"{self.name}{short}"

    def is_same(self, other: TokenizerMark) -> bool | None:
        """Return whether both produce the same ids; None if unknown."""
        if self.fingerprint is None or other.fingerprint is None:
            return False if self.are_bytes or other.are_bytes else None
        if self.fingerprint == other.fingerprint:
            return True
        is_function = [mark.fingerprint.startswith(_FUNCTION) for mark in (self, other) if mark.fingerprint]
        if any(is_function) and not (self.are_bytes or other.are_bytes):
            return None  # a function may call the other tokenizer
        return False


def mark_of(tokenizer: Tokenizer) -> TokenizerMark:
    """Return the mark of a tokenizer."""
    return TokenizerMark(
        name=Path(tokenizer.name).name or tokenizer.name,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.specials.eos_id,
    )


def mark_in(record: object) -> TokenizerMark | None:
    """Return the mark stored in a manifest or a state; None where it names no tokenizer."""
    if not isinstance(record, Mapping) or not record:
        return None
    fingerprint, size, eos = (record.get(key) for key in ("fingerprint", "vocab_size", "eos_id"))
    if fingerprint is None and record.get("name") == "bytes":
        fingerprint = f"{_BYTES}1"
    is_known = isinstance(fingerprint, str) and fingerprint.startswith((_IDS, _FUNCTION, _BYTES))
    return TokenizerMark(
        name=str(record.get("name", "of another name")),
        fingerprint=str(fingerprint).partition(" ")[0] if is_known else None,  # 0.1.0 wrote "bytes:1 eos 7"
        vocab_size=size if isinstance(size, int) else None,
        eos_id=eos if isinstance(eos, int) else None,
    )


def made_by(tokens: object) -> TokenizerMark | None:
    """Return the tokenizer named in a store's or packed set's manifest; None where it names none."""
    manifest = tokens if isinstance(tokens, Mapping) else getattr(tokens, "manifest", None)
    source = manifest.get("source") if isinstance(manifest, Mapping) else None
    return mark_in(source.get("tokenizer")) if isinstance(source, Mapping) else None


def check_same(where: str, made_by: TokenizerMark | None, meant: TokenizerMark, out: str) -> None:
    """Raise if another tokenizer made the tokens; warn if that is unknown."""
    same = None if made_by is None else made_by.is_same(meant)
    if same is True:
        return
    if same is False and made_by is not None:
        raise SettingError(
            f"{where} holds tokens of the tokenizer {made_by.words}, and {meant.words} gives other ids; {out}"
        )
    origin = (
        "doesn't say which tokenizer made its tokens"
        if made_by is None
        else f"names {made_by.words} as its tokenizer"
    )
    _log.warning(
        "%s %s, and whether %s gives the same ids isn't known; it is taken as it is",
        where,
        origin,
        meant.words,
    )


def function_fingerprint(name: str, outputs: object) -> str:
    """Return the fingerprint of a tokenizer that is known only by its ids of some texts."""
    return f"{_FUNCTION}{_digest([name, outputs])}"


def backend_fingerprint(spec: Mapping[str, Any], *, prefix_ids: Sequence[int], splits_specials: bool) -> str:
    """Return the fingerprint of a tokenizer of the `tokenizers` library; equal if it produces equal ids for any text.

    It covers vocabulary, merges, added tokens, normalizer and pre-tokenizer, but not the decoder, truncation,
    padding, insignificant order, or fields at their defaults, which library versions write or omit.
    """
    return f"{_IDS}1:{_digest([canonical(spec, splits_specials=splits_specials), list(prefix_ids)])}"


def canonical(spec: Mapping[str, Any], *, splits_specials: bool = False) -> dict[str, Any]:
    """Return what determines the ids of any text, in canonical form; arguments as in `backend_fingerprint`."""
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    added = [
        [token["id"], token["content"], *(bool(token.get(flag)) for flag in flags)]
        + ([bool(token.get("special"))] if splits_specials else [])
        for token in spec.get("added_tokens") or ()
    ]
    return {
        "added": sorted(added),
        "normalizer": _steps(spec.get("normalizer"), "normalizers"),
        "pre_tokenizer": _steps(spec.get("pre_tokenizer"), "pretokenizers"),
        "model": _model(spec["model"]),
    }


def _model(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model in canonical form: vocabulary by token or in order, merges as pairs."""
    rest = {key: value for key, value in model.items() if key not in ("vocab", "merges")}
    if "type" not in rest:  # old files have none
        rest["type"] = _kind_of(model)
    vocabulary = model.get("vocab") or {}
    made: dict[str, Any] = {
        **_step(rest),
        "vocab": vocabulary,  # serialized by token, or in order
    }
    if rest["type"] == "BPE":
        merges = model.get("merges") or []
        made["merges"] = (
            [merge.split(" ") for merge in merges] if isinstance(next(iter(merges), None), str) else merges
        )
    return made


def _kind_of(model: Mapping[str, Any]) -> str:
    if "merges" in model:
        return "BPE"
    if isinstance(model.get("vocab"), list):
        return "Unigram"
    return "WordPiece" if "continuing_subword_prefix" in model else "WordLevel"


def _steps(step: Mapping[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """Return a normalizer or pre-tokenizer as a flat list of steps."""
    if step is None:
        return []
    if step.get("type") == "Sequence":
        return [made for inner_step in step.get(inner) or () for made in _steps(inner_step, inner)]
    return [_step(step)]


def _step(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step without fields at their defaults."""
    kind = str(step.get("type"))
    usual, never = _USUAL.get(kind, {}), _NEVER.get(kind, ())
    return {
        key: value
        for key, value in step.items()
        if key not in never
        and not (value == usual[key] if key in usual else value is None or value is False or value == "")
    }


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=True).encode()).hexdigest()

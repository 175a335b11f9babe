"""What tells one tokenizer from another: the ids that it gives, in a form that no version of a library changes.

A store, a packed set and a loader's state carry the mark of the tokenizer that made their tokens; where they meet
another one, it is refused by its name.
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
_IDS, _FUNCTION, _BYTES = "ids:", "function:", "bytes:"
"""How fingerprints begin: of ids in canonical form, of a function's answers, of the built-in tokenizer."""
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
"""Values that a step has where a file doesn't say.

Of what isn't listed, null, false and "" are usual: a library that learns a new switch leaves it off."""
_NEVER = {"ByteLevel": ("trim_offsets",)}
"""Settings that change places in the text alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerMark:
    """Which tokenizer made tokens, as far as what holds them says."""

    name: str
    fingerprint: str | None
    """None where varlen 0.1.0 wrote one that its library's version went into."""
    vocab_size: int | None = None
    """All ids are below."""
    eos_id: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it for a manifest or a state."""
        return asdict(self)

    @property
    def are_bytes(self) -> bool:
        """Whether the tokens are bytes."""
        return self.fingerprint is not None and self.fingerprint.startswith(_BYTES)

    @property
    def words(self) -> str:
        """Its name, and the beginning of its fingerprint, since folders share names."""
        if self.are_bytes:
            return "the built-in one, bytes"
        short = "" if self.fingerprint is None else f" ({self.fingerprint.rpartition(':')[2][:8]})"
        return f"{self.name}{short}"

    def is_same(self, other: TokenizerMark) -> bool | None:
        """Return whether two give the same ids; None where that can't be told."""
        if self.fingerprint is None or other.fingerprint is None:
            return False if self.are_bytes or other.are_bytes else None
        if self.fingerprint == other.fingerprint:
            return True
        is_function = [mark.fingerprint.startswith(_FUNCTION) for mark in (self, other) if mark.fingerprint]
        if any(is_function) and not (self.are_bytes or other.are_bytes):
            return None  # a function may well call the other one
        return False


def mark_of(tokenizer: Tokenizer) -> TokenizerMark:
    """Return the mark of a tokenizer."""
    return TokenizerMark(
        name=Path(tokenizer.name).name or tokenizer.name,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.specials.eos_id,
    )


def mark_in(said: object) -> TokenizerMark | None:
    """Return the mark that a manifest or a state holds; None where it names no tokenizer."""
    if not isinstance(said, Mapping) or not said:
        return None
    found, size, eos = (said.get(key) for key in ("fingerprint", "vocab_size", "eos_id"))
    if found is None and said.get("name") == "bytes":
        found = f"{_BYTES}1"
    is_known = isinstance(found, str) and found.startswith((_IDS, _FUNCTION, _BYTES))
    return TokenizerMark(
        name=str(said.get("name", "of another name")),
        fingerprint=str(found).partition(" ")[0] if is_known else None,  # 0.1.0 wrote "bytes:1 eos 7"
        vocab_size=size if isinstance(size, int) else None,
        eos_id=eos if isinstance(eos, int) else None,
    )


def made_by(tokens: object) -> TokenizerMark | None:
    """Return the tokenizer that a store's or packed set's manifest names; None where it names none."""
    manifest = tokens if isinstance(tokens, Mapping) else getattr(tokens, "manifest", None)
    source = manifest.get("source") if isinstance(manifest, Mapping) else None
    return mark_in(source.get("tokenizer")) if isinstance(source, Mapping) else None


def check_same(where: str, made_by: TokenizerMark | None, meant: TokenizerMark, out: str) -> None:
    """Refuse tokens that another tokenizer made; where that can't be told, say so."""
    same = None if made_by is None else made_by.is_same(meant)
    if same is True:
        return
    if same is False and made_by is not None:
        raise SettingError(
            f"{where} holds tokens of the tokenizer {made_by.words}, and {meant.words} gives other ids; {out}"
        )
    who = (
        "doesn't say which tokenizer made its tokens"
        if made_by is None
        else f"names {made_by.words} as its tokenizer"
    )
    _log.warning(
        "%s %s, and whether %s gives the same ids can't be told; it is taken as it is",
        where,
        who,
        meant.words,
    )


def function_fingerprint(name: str, answers: object) -> str:
    """Return the fingerprint of a tokenizer that is known by what it gives for some texts alone."""
    return f"{_FUNCTION}{_digest([name, answers])}"


def backend_fingerprint(spec: Mapping[str, Any], *, prefix_ids: Sequence[int], splits_specials: bool) -> str:
    """Return the fingerprint of a tokenizer of the `tokenizers` library; equal ids of any text, equal fingerprint.

    Vocabulary, merges, added tokens, normalizer and pre-tokenizer decide; the decoder, truncation, padding and the
    order of what has none don't, and neither do fields at their usual values, which versions of the library write or
    leave out.
    """
    return f"{_IDS}1:{_digest([canonical(spec, splits_specials=splits_specials), list(prefix_ids)])}"


def canonical(spec: Mapping[str, Any], *, splits_specials: bool = False) -> dict[str, Any]:
    """Return what decides the ids of any text, in one form; arguments as in `backend_fingerprint`."""
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
    """Return a model in one form: its vocabulary by token or in order, its merges as pairs."""
    rest = {key: value for key, value in model.items() if key not in ("vocab", "merges")}
    if "type" not in rest:  # files of old have none
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
        return [made for one in step.get(inner) or () for made in _steps(one, inner)]
    return [_step(step)]


def _step(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return one step without what is usual."""
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

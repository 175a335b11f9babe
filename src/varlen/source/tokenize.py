"""Get a tokenizer: from a file, a folder, an object, a function, or trained on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varlen.errors import MissingExtraError, SettingError
from varlen.source.tokenizer import (
    ByteTokenizer,
    FastTokenizer,
    FunctionTokenizer,
    Specials,
    Tokenizer,
    backend_faults,
    digest,
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
_PROBE = "Call me Ishmael. Some years ago - never mind how long\n\tdef f(x): return x**2 + 0.5\nżółć 🦆 你好"
"""A text whose ids tell functions apart."""
_FILES = (".json", ".model", ".txt", ".jinja", ".gz", ".zst")
"""Endings of files; a name on a hub may end in another, as `Llama-3.1-8B` does."""
_TEMPLATE_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


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
        return replace(made, eos_id=int(eos_id[0]), fingerprint=f"{made.fingerprint} eos {eos_id[0]}")
    specials = replace(made.specials, eos_id=int(eos_id[0]))
    return replace(made, specials=specials, fingerprint=digest(f"{made.fingerprint} eos {eos_id[0]}"))  # type: ignore[type-var]


def _made(tokenizer: Any) -> Tokenizer:
    """Return a tokenizer with its own end of text."""
    if tokenizer is None or (isinstance(tokenizer, str) and tokenizer == "bytes"):
        return ByteTokenizer()
    if isinstance(tokenizer, ByteTokenizer | FastTokenizer | FunctionTokenizer):
        return tokenizer
    if isinstance(tokenizer, str | Path):
        return _from_path(tokenizer)
    if hasattr(tokenizer, "encode_batch_fast"):
        return _fast(tokenizer, type(tokenizer).__name__, {}, None)
    if hasattr(tokenizer, "special_tokens_map") and hasattr(tokenizer, "convert_tokens_to_ids"):
        return _from_transformers(tokenizer, str(getattr(tokenizer, "name_or_path", "")) or "tokenizer")
    if callable(tokenizer):
        name = getattr(tokenizer, "__qualname__", type(tokenizer).__name__)
        made = FunctionTokenizer(
            function=_by_batch(tokenizer), name=name, specials=Specials(), fingerprint=""
        )
        try:
            ids = made.encode([_PROBE])[0].tolist()
        except SettingError:  # it may know other letters alone
            ids = []
        return replace(made, fingerprint=digest(json.dumps([name, ids])))
    raise SettingError(
        'tokenizer must be "bytes", a file, a folder, a tokenizer object or a function from text to ids; '
        f"got {type(tokenizer).__name__}"
    )


def _from_path(path: str | Path) -> Tokenizer:
    """Load a file or a folder; a name that is neither is one of a hub, which transformers knows."""
    place = Path(path).expanduser()
    if place.is_file():
        return _from_file(place, {}, None)
    if (place / "tokenizer.json").is_file():
        config = {
            **_read_json(place / "special_tokens_map.json"),
            **_read_json(place / "tokenizer_config.json"),
        }
        return _from_file(place / "tokenizer.json", config, _template(place, config))
    looks_local = place.is_absolute() or str(path).count("/") != 1 or place.suffix in _FILES
    if not place.is_dir() and (looks_local or str(path).startswith((".", "~"))):
        raise SettingError(
            f"there is no tokenizer {path}; pass a tokenizer.json, a folder that holds one, a name on the hub "
            '(org/name), or "bytes"'
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError(
            f'{path} holds no tokenizer.json, and takes transformers to be read; run: pip install "varlen[train]"'
        ) from error
    try:
        loaded = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=False, local_files_only=place.is_dir()
        )
    except Exception as error:  # whatever it raises, there is no tokenizer
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SettingError(f"no tokenizer can be loaded from {path}: {said}") from error
    return _from_transformers(loaded, str(path))


def _from_file(path: Path, config: Mapping[str, Any], template: str | None) -> Tokenizer:
    """Load a JSON file of the `tokenizers` library."""
    from tokenizers import Tokenizer as Backend

    try:
        with backend_faults(str(path)):
            backend = Backend.from_file(str(path))
    except SettingError as error:
        raise SettingError(f"{path} is not a tokenizer's JSON file: {str(error.__cause__)[:200]}") from error
    return _fast(backend, str(path.parent if path.name == "tokenizer.json" else path), config, template)


def _fast(
    backend: tokenizers.Tokenizer, name: str, config: Mapping[str, Any], template: str | None
) -> Tokenizer:
    """Wrap a tokenizer of the `tokenizers` library.

    Args:
        backend: copied, since truncation and padding are switched off.
        name: in messages.
        config: special tokens by their usual names, as text or as objects with a `content`.
        template: of chats.
    """
    from tokenizers import Tokenizer as Backend

    spelled = backend.to_str()
    own = Backend.from_str(spelled)
    own.no_truncation()
    own.no_padding()
    named = {key: _content(config.get(key)) for key in _TEMPLATE_NAMES}
    texts = {key: text for key, text in named.items() if text is not None}
    added = {token.content: i for i, token in own.get_added_tokens_decoder().items() if token.special}
    if "eos_token" not in texts:
        usual = [text for text in _USUAL_EOS if text in added]
        if usual:
            texts["eos_token"] = usual[0]
    with backend_faults(name):
        whole, bare = (own.encode("a", add_special_tokens=more).ids for more in (True, False))
        can_be_cut = is_cuttable(lambda text: own.encode(text, add_special_tokens=False).ids)
    specials = Specials(
        eos_id=own.token_to_id(texts["eos_token"]) if "eos_token" in texts else None,
        pad_id=own.token_to_id(texts["pad_token"]) if "pad_token" in texts else None,
        prefix_ids=_prefix(whole, bare),
        texts=texts,
        end_marks=frozenset(added),
        chat_templates={} if template is None else {"default": template},
    )
    return FastTokenizer(
        backend=own,
        name=name,
        specials=specials,
        fingerprint=digest(spelled + json.dumps([texts, template], sort_keys=True)),
        vocab_size=max(own.get_vocab().values(), default=-1) + 1,
        is_cuttable=can_be_cut,
    )


def _prefix(whole: Sequence[int], bare: Sequence[int]) -> tuple[int, ...]:
    """Return the ids that a tokenizer puts before a text by itself, from ids with and without them."""
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start])
    return ()


def _from_transformers(tokenizer: Any, name: str) -> Tokenizer:
    """Wrap a transformers tokenizer: its Rust backend where it has one, else its own code."""
    template = getattr(tokenizer, "chat_template", None)
    template = template.get("default") if isinstance(template, dict) else template
    config = {
        key: str(value) for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)
    }
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return _fast(backend, name, config, template)
    marks = frozenset(map(str, tokenizer.all_special_tokens))
    encode = _Slow(tokenizer)
    whole = tokenizer(["a"], add_special_tokens=True, verbose=False)["input_ids"][0]
    specials = Specials(
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        prefix_ids=_prefix(whole, encode(["a"])[0]),
        texts=config,
        end_marks=marks,
        chat_templates={} if template is None else {"default": template},
    )
    return FunctionTokenizer(
        function=encode,
        name=name,
        specials=specials,
        fingerprint=digest(json.dumps([name, sorted(tokenizer.get_vocab().items()), config, template])),
        vocab_size=len(tokenizer),
        is_cuttable=is_cuttable(lambda text: encode([text])[0]),
    )


class _Slow:
    """Calls a transformers tokenizer that is written in Python."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


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


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template of a tokenizer's folder: a file of its own goes before the configuration.

    Raises:
        SettingError: it can't be read.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"the chat template {path} can't be read: {error}") from error
    template = _read_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """Return what a tokenizer's folder says beside its vocabulary; nothing where the file is absent.

    Raises:
        SettingError: it isn't a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise SettingError(f"{path} must hold a JSON object")
    return value


def _content(token: Any) -> str | None:
    """Return a special token's text, however a configuration spells it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None

"""Load a tokenizer from a file, a folder, an object or a function, or train one."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varlen.errors import MissingExtraError, SettingError, described
from varlen.regular import read_regular, read_regular_text
from varlen.text.identity import backend_fingerprint, function_fingerprint
from varlen.text.tokenizer import (
    ByteTokenizer,
    FastTokenizer,
    FunctionTokenizer,
    Specials,
    Tokenizer,
    backend_faults,
    is_cuttable,
)

if TYPE_CHECKING:
    import tokenizers


def train_bpe(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Train a byte-level BPE, which can encode any text, on the given texts.

    Deterministic. Takes half a second for 4 million characters.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < 256:
        raise SettingError(f"vocab_size must be at least 256, one token for each byte, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(tokenizer: Any = None, *, eos: int | str | None = None) -> Tokenizer:
    """Return the tokenizer in varlen's form."""
    made = _made(tokenizer)
    if eos is None:
        return made
    limit = 2**31 if made.vocab_size is None else made.vocab_size
    eos_id: list[Any] = [eos]
    if isinstance(eos, str):
        eos_id = made.encode([eos.encode(errors="replace").decode()], is_chat=True)[0].tolist()
    is_number = len(eos_id) == 1 and isinstance(eos_id[0], Integral) and not isinstance(eos_id[0], bool)
    if not is_number or not 0 <= eos_id[0] < limit:
        known = "tokens" if made.vocab_size is None else f"{limit:,} tokens"
        raise SettingError(
            f"eos must be one of the {known} of {made.name}, by id or as its text; got {eos!r}"
            + (f", which is {len(eos_id):,} tokens" if isinstance(eos, str) else "")
        )
    if isinstance(made, ByteTokenizer):
        return replace(made, eos_id=int(eos_id[0]))
    return replace(made, specials=replace(made.specials, eos_id=int(eos_id[0])))  # type: ignore[type-var]


def _made(tokenizer: Any) -> Tokenizer:
    """Return a tokenizer with its own EOS."""
    if tokenizer is None or (isinstance(tokenizer, str) and tokenizer == "bytes"):
        return ByteTokenizer()
    if isinstance(tokenizer, ByteTokenizer | FastTokenizer | FunctionTokenizer):
        return tokenizer
    if isinstance(tokenizer, str | Path):
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
        except SettingError:  # it may accept other characters only
            ids = []
        return replace(made, fingerprint=function_fingerprint(name, ids))
    raise SettingError(
        'tokenizer must be "bytes", a file, a folder, a tokenizer object or a function from text to ids; '
        f"got {type(tokenizer).__name__}"
    )


def _by_batch(function: Callable[..., Any]) -> Callable[[list[str]], Sequence[Sequence[int]]]:
    """Return a function of a list of texts, from a function of a text or of a list."""
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
        + (f"; it raised {described(failed, kind=True)}" if failed else "")
    )


class _EachText:
    """Applies a function of one text to each of a list; a class, so that it can be pickled."""

    def __init__(self, function: Callable[[str], Sequence[int]]) -> None:
        self._function = function

    def __call__(self, texts: list[str]) -> list[Sequence[int]]:
        return [self._function(text) for text in texts]


# Tokenizers in folders and on hubs: the ids of transformers' `AutoTokenizer`, read without it where that is certain.
#
# A folder is read directly if its `tokenizer.json` alone determines the ids: every file and key that transformers
# reads is known here, and none changes the ids. All others are loaded by transformers, once, in this process; other
# processes receive the result.

_log = logging.getLogger(__name__)
_FILES = (".json", ".model", ".txt", ".jinja", ".gz", ".zst")  # a hub's `Llama-3.1-8B` ends in another
_BACKEND, _CONFIG, _MAP, _ADDED, _MODEL = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
)
_TEMPLATE, _TEMPLATES, _PROCESSORS = "chat_template.jinja", "additional_chat_templates", "chat_template.json"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes that use tokenizer.json as it is
# Models whose tokenizer has such a class if the configuration names one; transformers overrides it for others.
_MODEL_TYPES = frozenset(
    {
        "apertus",
        "arcee",
        "deepseek_v3",
        "exaone4",
        "falcon_h1",
        "glm4",
        "glm4_moe",
        "gpt_oss",
        "granite",
        "granitemoehybrid",
        "lfm2",
        "llama",
        "llama4",
        "nanochat",
        "nemotron_h",
        "olmo2",
        "olmo3",
        "seed_oss",
        "smollm3",
    }
)
# Configuration keys that don't affect ids.
_WITHOUT_EFFECT = frozenset(
    {
        "tokenizer_class",
        "chat_template",
        "model_max_length",
        "clean_up_tokenization_spaces",
        "padding_side",
        "truncation_side",
        "model_input_names",
        "name_or_path",
        "backend",
        "processor_class",
        "max_length",
        "stride",
        "truncation_strategy",
        "pad_to_multiple_of",
        "pad_token_type_id",
        "response_schema",
    }
)
_OTHER_FORMS = ("tekken.json", "tokenizer.model", "tiktoken.model", "spiece.model", "sentencepiece.bpe.model")
# Files that transformers' tokenizers are read from.
_PATTERNS = (
    *(_MAP, _ADDED, _TEMPLATE, _TEMPLATES, _PROCESSORS, "tokenizer*.*", "tokenization*.json", "vocab*"),
    *("merges*.txt", "*.model", "*.spm", "*.tiktoken", "tekken.json", "bpe.codes", "emoji.json"),
)
_PLAIN_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def read_tokenizer(path: str | Path) -> Tokenizer:
    """Load a file or a folder; any other name is loaded from a hub, by transformers."""
    location = Path(path).expanduser()
    if location.is_file():
        if location.name == _BACKEND and (location.parent / _CONFIG).is_file():
            _log.warning(
                "%s is read by itself; %s beside it may add tokens, EOS and a chat template: name the folder to have "
                "what transformers reads there",
                location,
                _CONFIG,
            )
        return wrap_backend(_read_backend(location), str(location), is_own=True)
    if location.is_dir():
        return _from_folder(location, str(path))
    looks_local = location.is_absolute() or str(path).count("/") != 1 or location.suffix in _FILES
    if looks_local or str(path).startswith((".", "~")):
        raise SettingError(
            f"there is no tokenizer {path}; pass a tokenizer.json, a folder that holds one, a name on the hub "
            '(org/name), or "bytes"'
        )
    return _by_transformers(str(path), "is a name on the hub")


def holds_tokenizer(path: str | Path) -> bool:
    """Whether a model's folder holds a tokenizer too; True for a name on a hub."""
    location = Path(path).expanduser()
    return not location.is_dir() or any(
        file.name not in (_TEMPLATE, _TEMPLATES, _PROCESSORS, _MAP) for file in tokenizer_files(location)
    )


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a folder that belong to a tokenizer, and the folder of its templates."""
    return sorted(
        {path for pattern in _PATTERNS for path in folder.glob(pattern) if path.suffix != ".safetensors"}
    )


def _read_backend(path: Path) -> Any:
    """Load a file with the `tokenizers` library."""
    from tokenizers import Tokenizer as Backend

    try:
        with backend_faults(str(path)):
            return Backend.from_file(str(path))
    except SettingError as error:
        raise SettingError(f"{path} is not a tokenizer's JSON file: {str(error.__cause__)[:200]}") from error


def _from_folder(folder: Path, name: str) -> Tokenizer:
    config = _read_json(folder / _CONFIG)
    special_map = _read_json(folder / _MAP)
    templates = _templates(folder, config)
    why = _unread(folder, config)
    if why is not None:
        return _by_transformers(name, why, folder)
    backend = _read_backend(folder / _BACKEND)
    why = _changing(backend, config, special_map, _read_json(folder / _ADDED))
    if why is not None:
        return _by_transformers(name, why, folder)
    special = {**special_map, **config}
    texts = {key: text for key in _NAMED if (text := _content(special.get(key))) is not None}
    return wrap_backend(backend, name, texts=texts, templates=templates, is_own=True)


def _unread(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return which file or key of a folder isn't supported here; None if all are."""
    if not (folder / _BACKEND).is_file():
        return f"holds no {_BACKEND}"
    for other in _OTHER_FORMS:
        if (folder / other).exists():
            return f"holds {other}, which isn't read here"
    kind = config.get("tokenizer_class")
    if kind is not None and kind not in _CLASSES:
        return f"has the tokenizer_class {kind!r} in {_CONFIG}, which may change what {_BACKEND} says"
    if (folder / _MODEL).is_file():
        model = _read_json(folder / _MODEL)
        if kind is None:
            return f"has no tokenizer_class in {_CONFIG}, and {_MODEL} decides"
        if model.get("model_type") not in _MODEL_TYPES or "model_name" in model:
            kind = model.get("model_type")
            return f"has the model_type {kind!r} in {_MODEL}, which may change what {_BACKEND} says"
    known = {*_WITHOUT_EFFECT, *_NAMED, *_LISTS, "added_tokens_decoder"}
    for key, value in config.items():
        is_off = key in ("split_special_tokens", "is_local", "local_files_only", "legacy") and value is False
        if key not in known and not is_off:
            return f"has the key {key!r} in {_CONFIG}, which isn't read here"
    return None


def _changing(
    backend: Any, config: Mapping[str, Any], special_map: Mapping[str, Any], added: Mapping[str, Any]
) -> str | None:
    """Return which setting would change the ids of tokenizer.json; None if none does."""
    if backend.padding is not None:
        return f"has padding in {_BACKEND}, whose token may be another one"
    tokens = {
        token.content: {"id": number, **{flag: getattr(token, flag) for flag in _PLAIN_FLAGS}}
        for number, token in backend.get_added_tokens_decoder().items()
    }
    for where, values in ((_CONFIG, config), (_MAP, special_map)):
        for key, value in values.items():
            if where == _MAP and key not in (*_NAMED, *_LISTS):
                return f"has the key {key!r} in {_MAP}, which isn't read here"
            if where == _MAP and key in config and _contents(config[key]) != _contents(value):
                return f"has another {key} in {_MAP} than in {_CONFIG}"
            if key in (*_NAMED, *_LISTS) and (odd := _odd_token(value, tokens)) is not None:
                return f"names {odd!r} as {key} in {where}, which isn't such a special token in {_BACKEND}"
    decoder = config.get("added_tokens_decoder") or {}
    for number, token in decoder.items() if isinstance(decoder, dict) else [("", None)]:
        known = tokens.get(str(_content(token)))
        if known is None or str(known["id"]) != number or not _has_flags(token, known):
            return f"has {_content(token)!r} in added_tokens_decoder of {_CONFIG}, and not so in {_BACKEND}"
    for content, number in added.items():
        if content not in tokens or tokens[content]["id"] != number:
            return f"has {content!r} in {_ADDED}, and not so in {_BACKEND}"
    return None


def _odd_token(value: Any, tokens: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the first token that isn't a plain special token in tokenizer.json; None where all are."""
    if isinstance(value, Mapping) and "content" not in value:
        return str(next(iter(value), "{}"))  # a model's own names
    for token in value if isinstance(value, list | tuple) else [value]:
        if token is None:
            continue
        content = _content(token)
        known = tokens.get(content) if content is not None else None
        if known is None or any(known.get(flag) != usual for flag, usual in _PLAIN_FLAGS.items()):
            return str(content)
        if isinstance(token, Mapping) and not _has_flags(token, known):
            return str(content)
    return None


def _has_flags(token: Any, known: Mapping[str, Any]) -> bool:
    """Whether a token has the flags of tokenizer.json, which are its defaults."""
    return isinstance(token, Mapping) and all(
        token.get(flag, known.get(flag)) == known.get(flag) for flag in _PLAIN_FLAGS
    )


def _by_transformers(name: str, why: str, folder: Path | None = None) -> Tokenizer:
    """Load a folder or a name on the hub as `AutoTokenizer` does, and never with remote code."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError(
            f'the tokenizer {name} {why}, so it takes transformers to be read; run: pip install "varlen[train]"'
        ) from error
    try:
        loaded = AutoTokenizer.from_pretrained(
            name if folder is None else str(folder),
            trust_remote_code=False,
            local_files_only=folder is not None,
        )
    except Exception as error:  # whatever it raises, there is no tokenizer
        if "trust_remote_code" in str(error):
            raise SettingError(
                f"the tokenizer {name} needs code of its own (auto_map in {_CONFIG}), which varlen never runs; load "
                "it in Python, AutoTokenizer.from_pretrained(..., trust_remote_code=True), and pass the object"
            ) from error
        has_pieces = folder is not None and any(folder.glob("*.model")) and find_spec("sentencepiece") is None
        more = "; its .model takes another package: pip install sentencepiece" if has_pieces else ""
        raise SettingError(f"no tokenizer can be loaded from {name}: {described(error)}{more}") from error
    return wrap_transformers(loaded, name, {} if folder is None else _of_processor(folder))


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return a folder's chat templates by name; template files take precedence over the configuration."""
    files = dict(_template_files(folder))
    return files or named_templates(config.get("chat_template")) or _of_processor(folder)


def _template_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the template files, by name."""
    paths = {"default": folder / _TEMPLATE} if (folder / _TEMPLATE).is_file() else {}
    paths |= {
        path.name.removesuffix(".jinja"): path for path in sorted((folder / _TEMPLATES).glob("*.jinja"))
    }
    for name, path in paths.items():
        try:
            yield name, read_regular_text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"the chat template {path} can't be read: {error}") from error


def _of_processor(folder: Path) -> dict[str, str]:
    """Return the templates in a processor's file, as older versions wrote them."""
    return named_templates(_read_json(folder / _PROCESSORS).get("chat_template"))


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} where the file is absent."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise SettingError(f"{path} must hold a JSON object; it holds a {type(value).__name__}")
    return value


def _content(token: Any) -> str | None:
    """Return a special token's text, in any spelling of a configuration."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _contents(value: Any) -> list[str | None]:
    """Return the texts of a token, or of a list of them."""
    return [_content(token) for token in (value if isinstance(value, list | tuple) else [value])]


# Wrap tokenizer objects: by their serializable backend where there is one, else as a function.

# End-of-document tokens of common vocabularies: a tokenizer's JSON file doesn't name it.
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
# A text whose ids distinguish functions.
PROBE = "Call me Ishmael. Some years ago - never mind how long\n\tdef f(x): return x**2 + 0.5\nżółć 🦆 你好"
_PROBES = (
    PROBE,
    "",
    " a  b ",
    "user\nHello there",
    "It 's , isn't it ? \n\n\n  CAFÉ e\u0301 ﬁ 1234567",
    "\u200b▁x</s><s>",
)
_WORDS = ("a", "the", "A", "1", ".", "user")  # texts of which any vocabulary knows one, to detect the prefix
# Methods of transformers' tokenizers; a class that overrides one does more than its backend.
_ENCODERS = ("__call__", "_call_one", "_encode_plus", "_batch_encode_plus", "prepare_for_tokenization")
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
    texts_by_name = dict(texts) if texts is not None else {} if usual is None else {"eos_token": usual}
    with backend_faults(name):
        # Texts can't be cut beside tokens that strip blanks or match whole words only.
        can_be_cut = not any(token[flag] for token in added.values() for flag in _STRIPPING) and is_cuttable(
            lambda text: own.encode(text, add_special_tokens=False).ids
        )
        prefix = _prefix_of(own)
    specials = Specials(
        eos_id=own.token_to_id(texts_by_name["eos_token"]) if "eos_token" in texts_by_name else None,
        pad_id=own.token_to_id(texts_by_name["pad_token"]) if "pad_token" in texts_by_name else None,
        prefix_ids=prefix,
        texts=texts_by_name,
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
    """Return the tokenizer with other prefix ids."""
    fingerprint = backend_fingerprint(
        json.loads(made.backend.to_str()),
        prefix_ids=ids,
        splits_specials=bool(made.backend.encode_special_tokens),
    )
    return replace(made, specials=replace(made.specials, prefix_ids=tuple(ids)), fingerprint=fingerprint)


def _prefix_of(backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Return the ids that a tokenizer prepends to a text."""
    for text in _WORDS:
        whole, bare = (backend.encode(text, add_special_tokens=more).ids for more in (True, False))
        if bare:
            return prefix(whole, bare)
    return ()


def prefix(whole: Sequence[int], bare: Sequence[int]) -> tuple[int, ...]:
    """Return the prepended ids, given a text's ids with and without special tokens."""
    for start in range(len(whole) - len(bare) + 1):
        if list(whole[start : start + len(bare)]) == list(bare):
            return tuple(whole[:start])
    return ()


def wrap_transformers(tokenizer: Any, name: str, templates: Mapping[str, str] | None = None) -> Tokenizer:
    """Wrap a tokenizer of transformers: by its backend if that produces the same ids, else by its own code."""
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
        bare, probe_ids = encode.one(word), _tried(encode.one, PROBE)
    except Exception as error:  # whatever it raises, it can't be used
        raise SettingError(f"the tokenizer {name} failed: {described(error, kind=True)}") from error
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
        fingerprint=function_fingerprint(kind, [known, probe_ids, specials.prefix_ids]),
        vocab_size=max((id_ for _, id_ in known), default=-1) + 1,
        is_cuttable=is_cuttable(lambda text: _tried(encode.one, text) or []),
    )


def named_templates(given: Any) -> dict[str, str]:
    """Return chat templates by name, from any spelling; a single one is `default`."""
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list | tuple):
        given = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, Mapping)}
    if not isinstance(given, Mapping):
        return {}
    return {name: text for name, text in given.items() if isinstance(name, str) and isinstance(text, str)}


def _encodes_itself(kind: type) -> bool:
    """Whether a class of transformers does something of its own before or after its backend."""
    usual = next(
        (base for base in kind.__mro__ if base.__name__ in ("TokenizersBackend", "PreTrainedTokenizerFast")),
        None,
    )
    return usual is None or any(
        getattr(kind, name, None) is not getattr(usual, name, None) for name in _ENCODERS
    )


def _is_equal(made: FastTokenizer, encode: _Calls, probes: list[str]) -> bool:
    """Whether a backend produces the ids of its tokenizer, or fails on the same texts."""
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
    except BaseException:  # Rust panics aren't Exceptions
        return None


class _Calls:
    """Calls a tokenizer of transformers as users do."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def one(self, text: str) -> list[int]:
        """Return the ids of one text."""
        return self([text])[0]

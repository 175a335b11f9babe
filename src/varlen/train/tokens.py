"""The tokenizer of a run: the model's own unless another is named; and its copy beside the trained model."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from varlen.documents.source import Mixture, open_source
from varlen.errors import SettingError, VarlenError
from varlen.store.open import open_tokens
from varlen.store.store import TEMPLATES
from varlen.store.tokens import TokenDocuments
from varlen.text.chat_template import ChatTemplate, chat_template, end_of_turn
from varlen.text.identity import TokenizerMark, check_same, made_by, mark_of
from varlen.text.load_tokenizer import holds_tokenizer, load_tokenizer, tokenizer_files
from varlen.text.tokenizer import ByteTokenizer, FastTokenizer, Tokenizer
from varlen.train.settings import DataSettings, ModelSettings

_log = logging.getLogger(__name__)
_TEMPLATE, _TEMPLATES = "chat_template.jinja", "additional_chat_templates"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTokenizer:
    """The tokenizer of a run, as far as is known before the data is read."""

    made: Tokenizer | None = None
    """None for bytes, and for data of tokens whose tokenizer isn't compared."""
    origin: str | None = None
    """The folder, file or name from which it was loaded."""
    tokens: TokenDocuments | None = None
    """The opened data if it is tokens already; the loader then gets no tokenizer."""
    vocab_size: int | None = None
    """Size of the vocabulary; None if it isn't known before the data is read."""
    mark: TokenizerMark | None = None
    """Of the tokenizer that made the data, if the data is tokens and says so."""
    words: tuple[str, ...] = ()
    """Sentences to show at the start of the run."""

    @property
    def is_of_bytes(self) -> bool:
        """Whether tokens are bytes, of the built-in tokenizer."""
        if self.made is None and self.mark is not None:
            return self.mark.is_same(mark_of(ByteTokenizer())) is True
        return isinstance(self.made, ByteTokenizer) or (self.made is None and self.tokens is None)

    @property
    def for_loader(self) -> Tokenizer | None:
        """The loader's tokenizer; None for data of tokens."""
        return None if self.tokens is not None else self.made


def run_tokenizer(data: DataSettings, model: ModelSettings) -> RunTokenizer:
    """Return the tokenizer of a run: the one that is named, else the model's own, else bytes."""
    own = model.path if model.path is not None and holds_tokenizer(model.path) else None
    origin = data.tokenizer if data.tokenizer is not None else own
    of_folders: dict[str, Any] = {"split": data.split, "format": data.format}
    if data.mixture:
        return _of_mixture(data, model, origin)
    tokens = _tokens_of(data.source, data)
    if tokens is not None:
        return _of_tokens(tokens, data, model, origin)
    made = None if origin is None else _loaded(origin, own if data.tokenizer is None else None)
    words: tuple[str, ...] = ()
    if data.tokenizer is not None and own is not None and made is not None and own != data.tokenizer:
        words = _unlike(made, own)
    if made is not None and not isinstance(made, ByteTokenizer):
        return RunTokenizer(made=made, origin=origin, vocab_size=made.vocab_size, words=words)
    mark = None
    if model.type is not None:
        mark = open_source(
            _listed(data.source), columns=data.columns, on_error=data.on_error or "raise", **of_folders
        ).made_by()
    return RunTokenizer(made=made, vocab_size=None if mark is None else mark.vocab_size, words=words)


def _tokens_of(source: str | Sequence[str], data: DataSettings) -> TokenDocuments | None:
    """Return a source opened as tokens; None if it holds none, or is read as a stream."""
    if data.mode == "streaming":
        return None
    check_tokens = data.on_error != "skip"
    return open_tokens(_listed(source), check_tokens=check_tokens, split=data.split, format=data.format)


def _of_mixture(data: DataSettings, model: ModelSettings, origin: str | None) -> RunTokenizer:
    """Return the tokenizer of several sources, which may be tokens of it, documents, or both."""
    made = None if origin is None else _loaded(origin, model.path if data.tokenizer is None else None)
    marks: list[TokenizerMark] = []
    is_tokens = True
    for name, part in data.mixture.items():
        tokens = _tokens_of(part["source"], data)
        mark = None if tokens is None else made_by(tokens)
        if tokens is not None and made is not None:
            check_same(
                f"data.mixture.{name}", mark, mark_of(made), f"index it again with --tokenizer {origin}"
            )
        if tokens is None and made is None:
            is_tokens = False
            mark = open_source(
                _listed(part["source"]),
                columns=data.columns,
                on_error=data.on_error or "raise",
                split=data.split,
                format=data.format,
            ).made_by()
        marks += [] if mark is None else [mark]
    if made is not None:
        return RunTokenizer(made=made, origin=origin, vocab_size=made.vocab_size)
    sizes = [mark.vocab_size for mark in marks if mark.vocab_size is not None]
    first = marks[0] if marks and is_tokens else None
    return RunTokenizer(vocab_size=max(sizes, default=None), mark=first)


def _of_tokens(
    tokens: TokenDocuments, data: DataSettings, model: ModelSettings, origin: str | None
) -> RunTokenizer:
    """Compare data of tokens with the tokenizer that `origin` names."""
    mark = made_by(tokens)
    size = None if mark is None else mark.vocab_size
    if origin is None:
        return RunTokenizer(tokens=tokens, vocab_size=size, mark=mark)
    try:
        made = load_tokenizer(origin)
    except VarlenError as error:
        if data.tokenizer is not None:
            raise
        words: tuple[str, ...] = (f"whether the data is of the model's own tokenizer isn't known: {error}",)
        return RunTokenizer(tokens=tokens, vocab_size=size, mark=mark, words=words)
    out = f"index the documents again with --tokenizer {origin}"
    if data.tokenizer is None:
        out += ", or name the tokenizer that made them as data.tokenizer, if the model is to learn its ids"
    check_same(str(data.source), mark, mark_of(made), out)
    words = _unlike(made, model.path) if data.tokenizer is not None and model.path is not None else ()
    return RunTokenizer(made=made, origin=origin, tokens=tokens, vocab_size=size, mark=mark, words=words)


def _loaded(origin: str, own: str | None) -> Tokenizer:
    try:
        return load_tokenizer(origin)
    except SettingError as error:
        if own is None:
            raise
        raise SettingError(
            f"{error}. model.path {own} names the tokenizer too, unless data.tokenizer names another, or "
            '"bytes"'
        ) from error


def _unlike(made: Tokenizer, path: str) -> tuple[str, ...]:
    """Return a sentence if the model's own tokenizer is known to differ."""
    if not holds_tokenizer(path):
        return ()
    try:
        own = mark_of(load_tokenizer(path))
    except VarlenError:
        return ()
    if mark_of(made).is_same(own) is not False:
        return ()
    return (f"the model's own tokenizer, {own.words}, isn't used: data.tokenizer is {mark_of(made).words}",)


def templates_of(data: DataSettings, tokenizer: RunTokenizer) -> Mapping[str, str]:
    """Return the chat templates, by name, that rendered the chats of a run's data; {} if it holds none."""
    made = ByteTokenizer() if tokenizer.is_of_bytes else tokenizer.made
    if made is None:
        return {}
    for each in [part["source"] for part in data.mixture.values()] or [data.source]:
        if (tokens := tokenizer.tokens or _tokens_of(each, data)) is not None:
            found = getattr(tokens, "manifest", {}).get(TEMPLATES)
            if isinstance(found, Mapping) and all(isinstance(text, str) for text in found.values()):
                return {str(name): text for name, text in found.items()}
            continue
        source = open_source(
            _listed(each),
            made,
            columns=data.columns,
            chat_template=data.chat_template,
            on_error=data.on_error or "raise",
            split=data.split,
            format=data.format,
        )
        if source.holds_chats():
            return source.templates
    return {}


def template_of(
    templates: Mapping[str, str], data: DataSettings, tokenizer: RunTokenizer
) -> ChatTemplate | None:
    """Return chat templates by name as one that renders; None for none."""
    specials = (tokenizer.made or ByteTokenizer()).specials
    tokens: dict[str, Any] = {"special_tokens": specials.texts, "end_marks": specials.end_marks}
    return chat_template(templates, **tokens, variables=data.chat_template_kwargs) if templates else None


def stop_ids(templates: Mapping[str, str], data: DataSettings, tokenizer: RunTokenizer) -> tuple[int, ...]:
    """Return the ids at which generation ends: the EOS, and a turn's end if it is one token; () without chats."""
    template, made = template_of(templates, data, tokenizer), tokenizer.made or ByteTokenizer()
    if template is None:
        return ()
    _, ids = end_of_turn(template, made)
    ends = (made.specials.eos_id, *(ids if len(ids) == 1 else ()))
    return tuple(dict.fromkeys(end for end in ends if end is not None))


def tokenizer_of_set(name: str, data: DataSettings, tokenizer: RunTokenizer) -> RunTokenizer:
    """Return what reads another set of documents as a run's own are read.

    Args:
        name: of the set, in `[eval.sets]`.
        data: with the set's source.
        tokenizer: of the run.
    """
    tokens = _tokens_of(data.source, data)
    if tokens is None:
        if tokenizer.made is None and not tokenizer.is_of_bytes:
            raise SettingError(
                f"eval.sets.{name} is of documents, and the data of tokens, whose tokenizer isn't named; set "
                "data.tokenizer to it, or index the set with it (varlen index)"
            )
        return replace(tokenizer, tokens=None, words=())
    own = tokenizer.mark if tokenizer.made is None else mark_of(tokenizer.made)
    if own is not None:
        out = "index the set again with the tokenizer of the run"
        check_same(f"eval.sets.{name}", made_by(tokens), own, out)
    return replace(tokenizer, tokens=tokens, words=())


def as_data(data: DataSettings, *, is_endless: bool = False) -> str | list[str] | Mixture:
    """Return a configuration's source as an argument of the loader.

    Args:
        data: of the configuration.
        is_endless: whether a mixture that doesn't say when it ends never does.
    """
    if not data.mixture:
        return _listed(data.source)
    return Mixture(
        {name: _listed(part["source"]) for name, part in data.mixture.items()},
        {name: part.get("weight", 1) for name, part in data.mixture.items()},
        unit=data.unit,
        until=data.until or ("endless" if is_endless else "first"),
    )


def _listed(source: str | Sequence[str]) -> str | list[str]:
    return source if isinstance(source, str) else list(source)


def write_tokenizer(tokenizer: RunTokenizer, templates: Mapping[str, str], folder: Path) -> None:
    """Write a run's tokenizer beside its model, so that `AutoTokenizer` gives the ids of training.

    Args:
        tokenizer: of the run.
        templates: by name, that rendered the chats of its data; {} for data without.
        folder: of the model.
    """
    made, origin = tokenizer.made, tokenizer.origin
    if made is None or origin is None or isinstance(made, ByteTokenizer):
        return
    source = Path(origin).expanduser()
    if source.is_dir():
        for path in tokenizer_files(source):
            copy = shutil.copytree if path.is_dir() else shutil.copyfile
            copy(path, folder / path.name)
    elif isinstance(made, FastTokenizer):
        _write_plain(made, folder)
    if templates and templates != made.specials.chat_templates:
        shutil.rmtree(folder / _TEMPLATES, ignore_errors=True)
        (folder / _TEMPLATE).unlink(missing_ok=True)
        _write_templates(templates, folder)
    if _is_same(made, folder):
        return
    if isinstance(made, FastTokenizer):  # with this model's configuration, the copied files give other ids
        for path in tokenizer_files(folder):
            if path.name not in (_TEMPLATE, _TEMPLATES):
                path.unlink()
        _write_plain(made, folder)
        if _is_same(made, folder):
            return
    _log.warning(
        "AutoTokenizer doesn't read %s as the tokenizer of this run, %s; load that one",
        folder,
        mark_of(made).words,
    )


def _is_same(made: Tokenizer, folder: Path) -> bool:
    """Return whether transformers loads a tokenizer of the same ids from a folder."""
    try:
        return mark_of(load_tokenizer(folder)).is_same(mark_of(made)) is not False
    except VarlenError:
        return False


def _write_plain(made: FastTokenizer, folder: Path) -> None:
    """Write a tokenizer as its library serializes it, and a configuration that adds nothing."""
    made.backend.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **made.specials.texts}
    if made.backend.encode_special_tokens:
        config["split_special_tokens"] = True
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    if not (folder / _TEMPLATE).is_file():
        _write_templates(made.specials.chat_templates, folder)


def _write_templates(templates: Mapping[str, str], folder: Path) -> None:
    for name, text in templates.items():
        path = folder / _TEMPLATE if name == "default" else folder / _TEMPLATES / f"{Path(name).name}.jinja"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")

"""A source: files, what to read from them and how to encode it; cut into parts that can be read concurrently."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args

from varlen.arguments import check_options, option
from varlen.counts import many
from varlen.documents.documents import Documents, Encoding, Supervise, encode_rows, eos_of, none_of
from varlen.documents.memory import spooled
from varlen.errors import SettingError, SourceError
from varlen.files.columns import Columns, check_named
from varlen.files.formats.reader import columns_of, cut_points, rows_of
from varlen.files.formats.text import Cut
from varlen.files.paths import Data, File, Format, LeftOut, unread
from varlen.files.retry import USUAL, Retry
from varlen.files.rows import as_list
from varlen.files.written import read_manifest, split_documents
from varlen.text.chat_template import CHATML, end_of_turn, template_text
from varlen.text.chat_template import chat_template as make_template
from varlen.text.identity import TokenizerMark, check_same, made_by, mark_of
from varlen.text.load_tokenizer import load_tokenizer
from varlen.text.rendering import TWIN, training_twin
from varlen.text.tokenizer import BYTE_EOS, ByteTokenizer, Tokenizer, digest

OnError = Literal["raise", "skip"]
TextCut = Literal["auto", "file", "paragraph", "line"]
_LOOKED_AT = 16  # files whose columns show whether anything needs a tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A stretch of one file."""

    file: int  # index among the source's files
    start: int = 0  # in bytes, row groups or record batches, depending on the format
    stop: int | None = None  # None: to the end


Part = tuple[Span, ...]  # a unit of work: a stretch of a large file, or several small files


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Documents in files, and how they become tokens. Cheap to send to another process."""

    files: tuple[File, ...]
    encoding: Encoding
    left_out: tuple[LeftOut, ...] = field(default=(), compare=False)  # other splits, caches
    taken: tuple[str, ...] = field(default=(), compare=False)  # splits chosen from folders with several
    on_error: OnError = "raise"
    text_cut: Cut = "file"  # what a document is in text files
    # By name, what renders chats at inference.
    templates: Mapping[str, str] = field(default_factory=dict, compare=False)
    packed_by: TokenizerMark | None = None  # the tokenizer in the manifests of packed sets among the files
    fingerprint: str = field(default="", compare=False)  # of everything but the files' contents

    def parts(self, target_bytes: int = 64 << 20) -> list[Part]:
        """Cut the files into parts of about as many bytes; deterministic for the same files.

        Files that can't be cut (compressed, CSV, JSON arrays) are one span, however large.
        """
        parts: list[Part] = []
        small: list[Span] = []
        filled = 0
        for index, file in enumerate(self.files):
            cuts = self._cuts(file, target_bytes)
            if cuts is None and 0 <= file.size <= target_bytes:
                if filled + file.size > target_bytes and small:
                    parts.append(tuple(small))
                    small, filled = [], 0
                small.append(Span(file=index))
                filled += file.size
                continue
            if small:
                parts.append(tuple(small))
                small, filled = [], 0
            bounds = [0, None] if cuts is None else [*cuts[:-1], None]
            parts += [(Span(file=index, start=a or 0, stop=b),) for a, b in zip(bounds, bounds[1:])]
        return [*parts, tuple(small)] if small else parts

    def _cuts(self, file: File, target_bytes: int) -> list[int] | None:
        try:
            return cut_points(file, target_bytes)
        except SourceError:
            if self.on_error == "raise":
                raise
            return None  # reading reports it

    def part_bytes(self, part: Part, target_bytes: int = 64 << 20) -> int:
        """Estimate the bytes of a part: of whole files, or of a stretch made by `parts`."""
        sizes = [max(self.files[span.file].size, 1) for span in part]
        is_stretch = len(part) == 1 and (part[0].start > 0 or part[0].stop is not None)
        return min(sizes[0], target_bytes) if is_stretch else sum(sizes)

    def watched(self, on_read: Callable[[str, int, int], None]) -> Source:
        """Return the same source with a callback for bytes read; for this process only."""
        return replace(self, files=tuple(replace(file, on_read=on_read) for file in self.files))

    def unread(self) -> str | None:
        """Return a note on the split that is read and the files that aren't; None if all are read."""
        return unread(self.left_out, self.taken)

    def counts_bytes(self) -> bool:
        """Whether texts or chats will become bytes: no tokenizer is given, and not all rows are token ids."""
        if not isinstance(self.encoding.tokenizer, ByteTokenizer):
            return False
        return any(columns.kind != "tokens" for columns in self._first_columns())

    def template_note(self) -> str | None:
        """Return a note where chats are written as ChatML, as neither tokenizer nor caller gives a chat template."""
        tokenizer = self.encoding.tokenizer
        # Another text may equal it: an export has the template that its data was written with.
        is_usual = self.templates.get("default") is CHATML
        if not is_usual or isinstance(tokenizer, ByteTokenizer):
            return None
        if not self.holds_chats():
            return None
        mark, ids = end_of_turn(self.encoding.template, tokenizer)
        several = (
            f". {mark}, the end of a turn, is {len(ids)} tokens of this tokenizer, so generation doesn't stop at it "
            f'by itself: pass stop_strings="{mark}" to it'
        )
        return (
            f"the tokenizer {tokenizer.name} has no chat template, so chats are written as ChatML; name the model's "
            "own by chat_template (--chat-template FILE; in varlen train: data.chat_template)"
            f"{several if len(ids) > 1 else ''}"
        )

    def holds_chats(self) -> bool:
        """Whether one of the first files holds conversations, which the chat template renders."""
        return any(self._has_chat(file) for file in self.files[:_LOOKED_AT])

    def _has_chat(self, file: File) -> bool:
        """Whether a file's first row is a conversation, except of a file that can't be read."""
        try:
            columns = columns_of(file, self.encoding.columns)
            if columns is None or columns.kind != "prompt":
                return columns is not None and columns.kind in ("messages", "instruction")
            rows, _ = next(rows_of(file, self.encoding.columns, self.text_cut))
        except SourceError:
            return False
        prompts = as_list(rows.columns[columns.names["prompt"]]) if len(rows) else []
        return bool(prompts) and (not isinstance(prompts[0], str) or prompts[0].startswith("[{"))

    def made_by(self) -> TokenizerMark | None:
        """Return the tokenizer that makes the tokens, or made those that exist; None if unknown."""
        tokenizer = self.encoding.tokenizer
        if not isinstance(tokenizer, ByteTokenizer) or self.counts_bytes():
            return mark_of(tokenizer)
        return self.packed_by

    def check_eos(self) -> None:
        """Raise if texts need an EOS and the tokenizer has none, before they are read."""
        if not self.encoding.append_eos or self.encoding.tokenizer.specials.eos_id is not None:
            return
        if any(columns.kind == "text" for columns in self._first_columns()):
            eos_of(self.encoding)

    def _first_columns(self) -> Iterator[Columns]:
        """Yield the columns of the first files, except unreadable ones; sufficient to see what a source holds."""
        for file in self.files[:_LOOKED_AT]:
            try:
                columns = columns_of(file, self.encoding.columns)
            except SourceError:
                continue
            if columns is not None:
                yield columns

    def read(self, part: Part) -> Iterator[Documents]:
        """Yield the documents of a part, in file order, a few megabytes at a time."""
        for span in part:
            yield from self._read_span(span)

    def _read_span(self, span: Span) -> Iterator[Documents]:
        file = self.files[span.file]
        for rows, columns in rows_of(file, self.encoding.columns, self.text_cut, span.start, span.stop):
            if columns is None or not len(rows):
                documents = none_of(rows.faults)
            else:
                documents = encode_rows(rows, columns, self.encoding)
            if documents.faults and self.on_error == "raise":
                raise documents.faults[0].raised(may_skip=True)
            yield documents


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How documents are found, read and made tokens; the one declaration of these options."""

    columns: Mapping[str, str] | None = option(
        None, 'names of columns by role, such as {"text": "body"}, where they aren\'t the usual ones.'
    )
    chat_template: str | Path | None = option(
        None,
        "jinja, a file of it, or \"trl-training\", TRL's twin of the tokenizer's; None: its own or ChatML.",
    )
    chat_template_kwargs: Mapping[str, Any] | None = option(
        None, 'what the template sees beside the chat, such as {"enable_thinking": False}.'
    )
    allow_unwritten: bool = option(
        False, "count what the template leaves out of an assistant's own turn; else it is an error."
    )
    eos: int | str | None = option(
        None, "the token that ends a document, by id or text; None for the tokenizer's own."
    )
    append_eos: bool = option(True, "end texts with it.")
    supervise: Supervise = option(
        "assistant",
        'of chats "assistant": what the model is to say; "last": of that the last turn; "all": everything.',
    )
    row_weights: bool = option(
        False, "take weights of messages and tokens as those of their losses; else 0 and 1 alone are read."
    )
    text_cut: TextCut = option(
        "auto",
        'what a document is in a text file: "file", "paragraph" or "line"; "auto": a paragraph where there is '
        "one file, else a file.",
    )
    split: str | None = option(None, 'of folders with several, the split that is read, or "all".')
    format: Format | None = option(None, "what every file is read as, whatever its name.")
    binary_as_text: bool = option(False, "read binary columns of Parquet and Arrow as UTF-8.")
    on_error: OnError = option(
        "raise",
        '"raise" at the first bad record, or "skip" it, counted the same on all ranks. "skip" masks tokens that '
        "can't be read on the rank that reads them: `pad_id` without a label; all else stays, so it may differ "
        "from that of a state. What packs are made of (lengths, labels of cut documents) is always an error.",
    )
    retry: Retry | None = option(None, "how reads of remote files are tried again; None for the usual way.")

    def __post_init__(self) -> None:
        """Refuse what can't be."""
        check_options(self)
        if self.split is not None and not (isinstance(self.split, str) and self.split):
            raise SettingError(f'split must be the name of one, or "all", got {self.split!r}')


def open_source(
    data: Data,
    tokenizer: Any = None,
    *,
    vocab_size: int | None = None,
    leave_out: Sequence[Path] = (),
    cache: str | Path | None = None,
    **options: Any,
) -> Source:
    """Find the documents' files, and how they become tokens (`Reading`); reads only names so far."""
    reading = Reading(**options)
    named = dict(reading.columns or {})
    check_named(named)
    from varlen.files.finding import Naming, find  # workers don't need it

    naming = Naming(
        split=reading.split,
        format=reading.format,
        binary_as_text=reading.binary_as_text,
        fields=tuple(named.values()),
        leave_out=leave_out,
        retry=reading.retry or USUAL,
    )
    files = (resolved := find(spooled(data, named, cache), naming)).files
    _refuse_cut_rows(files)
    made = load_tokenizer(tokenizer, eos=reading.eos)
    specials = made.specials
    named_templates = _templates(reading.chat_template, specials.chat_templates)
    template = make_template(
        named_templates,
        special_tokens=specials.texts,
        end_marks=specials.end_marks,
        variables=reading.chat_template_kwargs,
    )
    is_given = tokenizer is not None and tokenizer != "bytes"
    packed_by = _packed_by(files, made if is_given else None)
    known = made.vocab_size if is_given else None
    encoding = Encoding(
        tokenizer=made,
        template=template,
        append_eos=reading.append_eos,
        supervise=reading.supervise,
        allow_unwritten=bool(reading.allow_unwritten),
        row_weights=bool(reading.row_weights),
        vocab_size=known if vocab_size is None else vocab_size,
        columns=named,
    )
    usual: Cut = "paragraph" if len(files) == 1 else "file"
    cut: Cut = usual if reading.text_cut == "auto" else reading.text_cut
    matters: Cut = cut if any(file.format == "text" for file in files) else "file"
    # The vocabulary decides which records are refused, and so with on_error="skip" which are left out.
    ends = reading.append_eos, reading.supervise
    deciding = _reading(made), template.fingerprint, *ends, sorted(named.items()), matters
    # Switches and a format that aren't given change nothing, so that sources of versions without them stay known.
    given = [name for name in ("allow_unwritten", "binary_as_text", "row_weights") if getattr(reading, name)]
    given += [reading.format] if reading.format else []
    settings = (*deciding, encoding.vocab_size, *given)
    return Source(
        files=files,
        encoding=encoding,
        left_out=resolved.left_out,
        taken=resolved.taken,
        on_error=reading.on_error,
        text_cut=cut,
        templates=specials.chat_templates if reading.chat_template == TWIN else named_templates,
        packed_by=packed_by,
        fingerprint=digest(repr(settings)),
    )


def _reading(tokenizer: Tokenizer) -> str:
    """Return what changes with the ids of documents, including their EOS."""
    eos, usual = tokenizer.specials.eos_id, isinstance(tokenizer, ByteTokenizer)
    return tokenizer.fingerprint if usual and eos == BYTE_EOS else f"{tokenizer.fingerprint} eos {eos}"


def _refuse_cut_rows(files: Sequence[File]) -> None:
    """Raise for a packed set with split documents: their pieces would be taken for documents."""
    for folder in sorted({file.folder for file in files if file.folder is not None}):
        if cut := split_documents(folder):
            raise SourceError(
                f"{folder} was packed with {many(cut, 'document')} cut into pieces, which can't be distinguished "
                "from documents; pack the data again, with --tokens FOLDER to keep the tokens for the next time"
            )


def _packed_by(files: Sequence[File], given: Tokenizer | None) -> TokenizerMark | None:
    """Return the tokenizer that made the packed sets among files; None where none names it."""
    earlier: tuple[Path, TokenizerMark] | None = None
    for folder in sorted({file.folder for file in files if file.folder is not None}):
        manifest = read_manifest(folder)
        mark = made_by(manifest)
        if manifest is None:
            continue
        if given is not None:
            check_same(
                str(folder), mark, mark_of(given), "leave the tokenizer out, or pack the data with that one"
            )
        if mark is None:
            continue
        if earlier is not None:
            check_same(str(folder), mark, earlier[1], f"which made those in {earlier[0]}: read the two apart")
        earlier = earlier or (folder, mark)
    return None if earlier is None else earlier[1]


def _templates(chosen: str | Path | None, own: Mapping[str, str]) -> Mapping[str, str]:
    """Return the chosen chat template, those of the tokenizer, or ChatML, by name."""
    if chosen is None:
        return own or {"default": CHATML}
    return {"default": training_twin(own.get("default")) if chosen == TWIN else template_text(chosen)}


# A mixture: several sources of documents, and their shares.

Unit = Literal["tokens", "documents"]
Until = Literal["first", "all", "endless"]


@dataclass(frozen=True, slots=True)
class Mixture:
    """Sources and their shares; a source for `vl.PackedLoader`.

    The next document comes from a source that isn't ahead of its share, so each source always stays within one
    longest document of its share. Every source has its own shuffle and epochs, and each of its epochs contains each
    of its documents once; tokens of later epochs are counted as `repeated`.

    Args:
        sources: token stores or documents, by name.
        weights: a positive number for each source, by name; only their proportions matter.
        unit: whether shares are of "tokens" or of "documents".
        until: the mixture ends when the "first" source ends, when "all" have been read once, or never ("endless").

    Raises:
        SettingError: there is no source, names don't match, or a weight isn't a positive number.

    >>> Mixture({"web": "web/*.jsonl", "code": "code-store"}, {"web": 3, "code": 1}).shares
    (0.75, 0.25)
    """

    sources: Mapping[str, Data]
    weights: Mapping[str, float]
    unit: Unit = "tokens"
    until: Until = "first"

    def __post_init__(self) -> None:
        if not isinstance(self.sources, Mapping) or not self.sources:
            raise SettingError(
                'a mixture takes sources by name, such as {"web": "web/*.jsonl", "code": "code-store"}'
            )
        if not isinstance(self.weights, Mapping) or set(self.weights) != set(self.sources):
            raise SettingError(
                f"a mixture takes a weight for each source ({_listed(self.sources)}), got {_listed(self.weights)}"
            )
        for name, weight in self.weights.items():
            is_number = isinstance(weight, Real) and not isinstance(weight, bool)
            if not is_number or not (math.isfinite(weight) and weight > 0):
                raise SettingError(f"the weight of {name} must be a positive number, got {weight!r}")
        for name, value, known in (
            ("unit", self.unit, get_args(Unit)),
            ("until", self.until, get_args(Until)),
        ):
            if value not in known:
                raise SettingError(f"{name} must be one of {', '.join(known)}; got {value!r}")

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of each source, in their order; they add up to 1."""
        whole = math.fsum(float(weight) for weight in self.weights.values())
        return tuple(float(self.weights[name]) / whole for name in self.sources)


def _listed(names: Any) -> str:
    return ", ".join(map(str, names)) if isinstance(names, Mapping | Sequence) else type(names).__name__

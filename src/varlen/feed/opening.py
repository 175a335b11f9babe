"""From data and settings to a feed: over tokens that exist, over a store made in the cache, or over lanes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from varlen.arguments import in_words, options_of
from varlen.counts import many
from varlen.documents.memory import spooled
from varlen.documents.source import Mixture, Reading, Source, open_source
from varlen.errors import SettingError, SourceError, VarlenError
from varlen.feed.batches import BatchSettings, check_first_ids
from varlen.feed.exchange import OpenNumbered, StoreExchange, job_store, name_of
from varlen.feed.indexed.stream import IndexedFeed
from varlen.feed.indexed.windows import PARTS_A_GROUP, WindowSettings
from varlen.feed.lookup import IndexedLookup, StreamingLookup
from varlen.feed.mixture.stream import MixSettings
from varlen.feed.prefetch import AheadSettings
from varlen.feed.settings import LoaderSettings
from varlen.feed.spec import IndexedSpec, MixtureSpec, Spec, StreamingSpec, reopen_tokens
from varlen.feed.state import TOKENIZER, Mode
from varlen.feed.streaming.feed import StreamingFeed, StreamingSettings
from varlen.files.fingerprints import file_fingerprints, joint_fingerprint
from varlen.files.losses import NO_LOSSES, Losses
from varlen.files.paths import Data, File, entries_of, is_url
from varlen.offline.index import indexed_in_cache
from varlen.pack.pieces import POLICIES, AnyInts, applied, check_fit
from varlen.store.growing import PartialStore
from varlen.store.open import is_megatron, is_token_store, open_tokens
from varlen.store.store import TokenStore, weighs
from varlen.store.token_files import FileTokens
from varlen.store.tokens import TokenDocuments, lengths_in_order
from varlen.text.identity import TokenizerMark, check_same, made_by, mark_in, mark_of
from varlen.text.load_tokenizer import load_tokenizer
from varlen.text.tokenizer import digest
from varlen.types import Ledger
from varlen.workers.processors import processors

if TYPE_CHECKING:
    from varlen.feed.plans import Plans

_log = logging.getLogger(__name__)
_WINDOW, _WINDOW_PACKS = 1 << 16, 32
_FEWEST_THREADS, _MOST_THREADS = 2, 8
"""Threads that read and tokenize blocks; a tokenizer may start more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """What a loader runs, and the data and settings of its state."""

    mode: Mode
    spec: Spec
    feed: IndexedFeed | StreamingFeed
    """The feed of the trainer's process, for lookups; the worker has its own."""
    belongs_to: dict[str, Any]
    has_weights: bool
    """Whether labels may have weights: rows are read, or were, with `row_weights`."""
    open_exchange: OpenNumbered | None = None
    """How ranks exchange values; None where they don't."""
    plans: Plans | None = None
    """Plans of the loader's steps; None without."""
    overlong_settled: bool = False
    """Whether batches needn't be watched for documents longer than a pack."""
    held: tuple[TokenDocuments, ...] = ()
    """Documents that are open, which a thread beside the trainer may read too."""

    @property
    def remembers(self) -> bool:
        """Whether steps are found by what was taken; those of a single store are found without."""
        return not isinstance(self.spec, IndexedSpec)

    def losses(self) -> Losses:
        """Return what was lost when tokens were made; streaming reports losses as it reads."""
        return self.feed.losses() if isinstance(self.feed, IndexedFeed) else NO_LOSSES

    def lookup(self) -> IndexedLookup | StreamingLookup:
        """Return the lookup of steps."""
        return IndexedLookup(self.feed) if isinstance(self.feed, IndexedFeed) else StreamingLookup(self.feed)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenTokens:
    """Documents that were opened before their loader is made, which takes this in the place of its source."""

    data: Data
    """As `open_tokens` took it."""
    tokens: TokenDocuments


def open_data(data: Data | Mixture | OpenTokens, tokenizer: Any, settings: LoaderSettings) -> Opened:
    """Open the data, and decide how it is fed."""
    if isinstance(data, Mixture):
        opened = open_mixture(replace(data, sources=spooled_in(data, settings)), tokenizer, settings)
    elif isinstance(data, OpenTokens):
        _log_note(getattr(data.tokens, "unread", None), settings)
        refuse_reading(data.tokens, data.data, settings)
        opened = open_indexed(data.tokens, absolute(data.data), settings)
    else:
        opened = _open_one(spooled_for(data, settings), tokenizer, settings)
    warn_of_bytes(opened.belongs_to[TOKENIZER], settings.ranks[0])
    return opened


def _open_one(data: Data, tokenizer: Any, settings: LoaderSettings) -> Opened:
    """Open data that is no mixture; arguments and errors as of `open_data`."""
    tokens = None if tokenizer is not None or settings.mode == "streaming" else tokens_of(data, settings)
    if tokens is not None:
        refuse_reading(tokens, data, settings)
        return open_indexed(tokens, data, settings)
    source = _open_documents(data, tokenizer, settings)
    if settings.mode != "indexed" and settings.scope != "all":
        check_vocabulary(source.made_by(), settings)
        source.check_eos()
        return open_streaming(source, settings)
    folder, tokens = _indexed(source, settings)
    return open_indexed(tokens, folder, settings)


def _indexed(source: Source, settings: LoaderSettings) -> tuple[Path, TokenDocuments]:
    """Tokenize documents into the cache; returns the store's folder, and the store."""
    check_vocabulary(source.made_by(), settings)  # before indexing, which may take hours
    folder = indexed_in_cache(source, settings.cache, settings.patience_s)
    return folder, reopen_tokens(folder, settings.patience_s, settings.on_error)


def open_mixture(mixture: Mixture, tokenizer: Any, settings: LoaderSettings) -> Opened:
    """Return the feed of several sources; those that aren't tokens are indexed in the cache."""
    if settings.mode == "streaming" or settings.scope == "all":
        given = 'mode="streaming"' if settings.mode == "streaming" else 'scope="all"'
        raise SettingError(f"a mixture is fed by known lengths, window by window; leave {given} out")
    if settings.epochs is None and mixture.until != "endless":
        raise SettingError('a mixture without end says until="endless"; epochs=None goes with no other')
    sources: list[Data] = []
    held: list[TokenDocuments] = []
    gives_labels = has_weights = False
    marks: dict[str, TokenizerMark | None] = {}
    for name, data in mixture.sources.items():
        tokens = tokens_of(data, settings)
        if tokens is None:
            data, tokens = _indexed(source_of(data, tokenizer, settings), settings)
        marks[name] = made_by(tokens)
        _check_documents(tokens, name, settings)
        gives_labels = gives_labels or has_label(tokens, settings)
        has_weights = has_weights or weighs(tokens)
        sources.append(data)
        held.append(tokens)
    if not gives_labels:
        raise SourceError(NO_LABEL.format(count=many(len(sources), "source")))
    spec = MixtureSpec(
        sources=tuple(sources),
        windows=window_settings(settings, usual_window(settings)),
        mix=MixSettings(
            shares=mixture.shares, unit=mixture.unit, until=mixture.until, epochs=settings.epochs or 1
        ),
        batches=batch_settings(settings),
        rank=settings.ranks[0],
        patience_s=settings.patience_s,
        on_error=settings.on_error,
        **of_folders(settings),
        planned_ahead=_planned_ahead(settings),
    )
    belongs_to = {
        **settings.deciding(spec.windows.window),
        "sources": list(mixture.sources),
        "shares": list(mixture.shares),
        "unit": mixture.unit,
        "until": mixture.until,
        TOKENIZER: one_tokenizer(marks, tokenizer),
    }
    plans, open_exchange = _plans(job_store(), belongs_to, settings, None)
    return Opened(
        mode="indexed",
        spec=spec,
        feed=spec.open(held=held),
        held=_shared(held),
        belongs_to=belongs_to,
        has_weights=has_weights,
        open_exchange=open_exchange,
        plans=plans,
    )


def _open_documents(data: Data, tokenizer: Any, settings: LoaderSettings) -> Source:
    """Return the documents to tokenize."""
    entries = entries_of(data)
    # A folder may hold texts beside the files that Megatron made of them; then the texts are meant.
    stores = [e for e in entries if is_token_store(e) or (is_megatron(e) and not _is_folder(e))]
    failed: SourceError | None = None
    if not stores:
        try:
            return source_of(data, tokenizer, settings)
        except SourceError as error:
            failed, stores = error, list(filter(is_megatron, entries))
    if failed is not None and not stores:
        raise failed
    given = 'mode="streaming"' if tokenizer is None else "a tokenizer"
    out = 'mode="streaming"' if tokenizer is None else "tokenizer"
    raise SettingError(
        f"{stores[0]} holds tokens already, which {given} can't change; leave {out} out"
        + differing(stores[0], tokenizer)
    ) from failed


def _is_folder(entry: str | Path | File) -> bool:
    return not isinstance(entry, File) and not is_url(entry) and Path(entry).expanduser().is_dir()


def batch_settings(settings: LoaderSettings) -> BatchSettings:
    """Return how a step becomes batches."""
    whole, micro = settings.batch_sizes
    return BatchSettings(
        capacity=settings.capacity,
        global_batch_size=whole,
        micro_batch_size=micro,
        dp_world_size=settings.dealt_ranks,
        layout=settings.batch_layout,
        pad_id=settings.pad_id,
        pad_to_multiple_of=settings.pad_to_multiple_of,
        document_multiple_of=settings.document_multiple_of,
        vocab_size=settings.vocab_size,
        in_order=not settings.shuffle,
    )


def open_indexed(tokens: TokenDocuments, data: Data, settings: LoaderSettings) -> Opened:
    """Return the feed of documents that are tokens already."""
    _check_documents(tokens, str(data), settings)
    overlong_settled = warn_overlong(tokens, str(data), settings)
    is_all = settings.scope == "all"
    if is_all:
        tokens.wait_for(tokens.num_parts)
    # The state names the data part by part: a store may grow, and ranks agree at each epoch on its number of parts.
    window = max(int(tokens.documents.sum()), 1) if is_all else usual_window(settings)
    mark = made_by(tokens)
    belongs_to = {
        **settings.deciding(None if is_all else window),
        TOKENIZER: None if mark is None else mark.to_json(),
    }
    rank, world = settings.ranks
    job = job_store() if world > 1 or settings.plan is not None else None
    open_exchange = _open_exchange(job, belongs_to, settings) if world > 1 else None
    first_parts = tokens.num_parts
    if open_exchange is not None and isinstance(tokens, TokenStore):
        first_parts = int(min(open_exchange(0).all("parts", {rank: first_parts}).values()))
    spec = IndexedSpec(
        data=data,
        parts_a_group=max(first_parts, 1) if is_all else PARTS_A_GROUP,
        windows=window_settings(settings, window),
        batches=batch_settings(settings),
        epochs=settings.epochs,
        rank=rank,
        num_ranks=world,
        first_parts=first_parts,
        patience_s=settings.patience_s,
        on_error=settings.on_error,
        **of_folders(settings),
        planned_ahead=_planned_ahead(settings),
        only_plans=open_exchange is None,
    )
    plans, open_exchange = _plans(job, belongs_to, settings, open_exchange)
    return Opened(
        mode="indexed",
        spec=spec,
        feed=spec.open(held=[tokens]),
        held=_shared([tokens]),
        belongs_to=belongs_to,
        has_weights=weighs(tokens),
        open_exchange=open_exchange,
        plans=plans,
        overlong_settled=overlong_settled,
    )


def _shared(held: Sequence[TokenDocuments]) -> tuple[TokenDocuments, ...]:
    """Return documents that several threads may read; where a store is being written, each looks for parts itself."""
    return () if any(isinstance(tokens, PartialStore) for tokens in held) else tuple(held)


def _check_documents(tokens: TokenDocuments, data: str, settings: LoaderSettings) -> None:
    """Refuse ids that the model doesn't know, and documents that are to fit and don't, as far as they are there."""
    check_known_ids(tokens, settings)
    check_positions(None if isinstance(tokens, PartialStore) else lengths_in_order(tokens), settings)
    if applied(settings.method, settings.overlong) == "error":
        check_fit(lengths_in_order(tokens), settings.capacity, lambda n: f"document {n:,} of {data}")


def window_settings(settings: LoaderSettings, window: int) -> WindowSettings:
    """Return the settings that packs depend on, for windows of so many documents."""
    return WindowSettings(
        capacity=settings.capacity,
        window=window,
        method=settings.method,
        overlong=settings.overlong,
        max_documents=1 if settings.scope == "minibatch" else settings.max_documents,
        document_multiple_of=settings.document_multiple_of,
        seed=settings.order_seed,
    )


def usual_window(settings: LoaderSettings) -> int:
    """Return the documents that are packed together where lengths are known."""
    return settings.window or _WINDOW


def streaming_settings(settings: LoaderSettings) -> StreamingSettings:
    """Return the settings that packs depend on in streaming."""
    return StreamingSettings(
        lanes=settings.lanes or settings.batch_sizes[0],
        seed=settings.order_seed,
        epochs=settings.epochs,
        method=settings.method,
        overlong=settings.overlong,
        max_documents=1 if settings.scope == "minibatch" else settings.max_documents,
        window_packs=settings.window or _WINDOW_PACKS,
        ahead=AheadSettings(seconds=settings.read_ahead_s),
        threads=min(max(processors(), _FEWEST_THREADS), _MOST_THREADS),
    )


def open_streaming(source: Source, settings: LoaderSettings) -> Opened:
    """Return the feed of documents that are read from their files."""
    rank, world = settings.ranks
    if settings.plan is not None:
        raise SettingError(
            "plans need the lengths of coming steps, which streaming reads first; index the documents (varlen index) "
            'and name the store, or pass mode="indexed"'
        )
    check_passes(source, settings)
    check_positions(None, settings)
    prints = file_fingerprints(source.files)
    # Readers compare with these where a file seems to have been replaced since it was listed.
    source = replace(source, files=tuple(replace(f, known=p) for f, p in zip(source.files, prints)))
    spec = StreamingSpec(
        source=source, settings=streaming_settings(settings), batches=batch_settings(settings), rank=rank
    )
    feed = spec.open()
    mark = source.made_by()
    belongs_to = {
        TOKENIZER: None if mark is None else mark.to_json(),
        "data": digest(source.fingerprint + joint_fingerprint(source.files, prints))[:32],
        "on_error": source.on_error,
        "lanes": spec.settings.lanes,
        "epochs": settings.epochs,
        **settings.deciding(spec.settings.window_packs),
    }
    if world > 1:
        warn_of_shared_reads(feed.read_by_all, source, world)
    _log.info(
        "lanes: %d, over blocks of %s KB; masked packs fill only the end of the last epoch, at most "
        "1 + (a block + the longest document) / capacity a lane",
        spec.settings.lanes,
        f"{feed.block_bytes / 1e3:,.0f}",
    )
    job = job_store() if world > 1 else None
    if world > 1 and job is None:
        _log.warning(
            "there is no process group, so this one of %s ranks reads the lanes of all of them, to know how many "
            "labels a step has; call torch.distributed.init_process_group before the loader is made",
            f"{world:,}",
        )
    open_exchange = _open_exchange(job, belongs_to, settings)
    return Opened(
        mode="streaming",
        spec=spec,
        feed=feed,
        belongs_to=belongs_to,
        has_weights=source.encoding.row_weights,
        open_exchange=open_exchange,
    )


def _planned_ahead(settings: LoaderSettings) -> int | None:
    """Return how far ahead steps are planned; None where they have no plans."""
    if settings.plan is None:
        return None
    # Not imported without plans: the planner is slow to import.
    from varlen.feed.plans import ahead_of, check_given

    check_given(settings.plan)
    return ahead_of(settings.plan)


def _plans(
    job: Any, belongs_to: dict[str, Any], settings: LoaderSettings, open_exchange: OpenNumbered | None
) -> tuple[Plans | None, OpenNumbered | None]:
    """Return the plans of a loader, and what opens an exchange through which workers request them too."""
    if settings.plan is None:
        return None, open_exchange
    from varlen.feed.plans import Plans

    rank, world = settings.ranks
    plans = Plans(
        settings.plan,
        rank=rank,
        num_ranks=world,
        job=job,
        name=name_of(_agreed(belongs_to, settings), "plans "),
        patience_s=settings.patience_s,
    )
    return plans, plans.opening(open_exchange)


def _open_exchange(job: Any, belongs_to: dict[str, Any], settings: LoaderSettings) -> OpenNumbered | None:
    """Return what opens an exchange of ranks through the job's store; None without a store."""
    if job is None:
        return None
    rank, world = settings.ranks
    name = name_of(_agreed(belongs_to, settings))
    return lambda run: StoreExchange(job, f"{name}/{run}", rank, world, settings.patience_s)


def _agreed(belongs_to: dict[str, Any], settings: LoaderSettings) -> dict[str, Any]:
    """Return what must be the same on all ranks for their loaders to meet: what one agrees upon, others wait for."""
    return {**belongs_to, "planned_ahead": _planned_ahead(settings)}


# The data that a loader is given: rows in memory become files, and paths become absolute.


def spooled_for(data: Data, settings: LoaderSettings) -> Data:
    """Return data as paths and files that workers open; iterables as files of their rows where they are streamed."""
    is_streamed = settings.mode != "indexed" and settings.scope != "all"
    return absolute(spooled(data, settings.columns, settings.cache, is_streamed=is_streamed))


def spooled_in(mixture: Mixture, settings: LoaderSettings) -> dict[str, Data]:
    """Return the sources of a mixture as paths and files that workers open; arguments and errors as above."""
    columns = settings.columns
    return {name: absolute(spooled(one, columns, settings.cache)) for name, one in mixture.sources.items()}


def absolute(data: Data) -> Data:
    """Return data by absolute paths: the trainer may change its folder before a worker is started."""
    if isinstance(data, File):
        return data
    if isinstance(data, str | os.PathLike):
        data = data if isinstance(data, str) else Path(data)
        # "~" doesn't depend on the current folder.
        if is_url(data) or not str(data) or str(data).startswith("~"):
            return data
        return str(Path(data).absolute())
    return [absolute(one) for one in entries_of(data)]


def check_passes(source: Source, settings: LoaderSettings) -> None:
    """Refuse several epochs of an iterator that can be read once."""
    once = [file for file in source.files if file.live is not None and file.live.is_once]
    if once and settings.epochs != 1:
        raise SettingError(
            f"{once[0]} can be iterated over once, and epochs is {settings.epochs}; pass a function that makes it: "
            "PackedLoader(lambda: rows(), ...), or epochs=1"
        )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {many(len(names) - 1, 'more file')}"


def warn_of_shared_reads(names: list[str], source: Source, world: int) -> None:
    """Warn of files that each of several ranks must read whole."""
    if not names:
        return
    is_live = any(file.live is not None for file in source.files)
    _log.warning(
        "%s can't be cut, so each of %s ranks reads all of it%s",
        _listed(names),
        f"{world:,}",
        " and takes the packs of its lanes" if is_live else "; `varlen index` reads it once",
    )


# Opening a loader's data as its settings say, and reporting the files that aren't read.


def tokens_of(data: Data, settings: LoaderSettings) -> TokenDocuments | None:
    """Open documents that are tokens already; None if they aren't."""
    tokens = open_tokens(
        data,
        patience_s=settings.patience_s,
        check_tokens=settings.on_error == "raise",
        **of_folders(settings),
    )
    _log_note(getattr(tokens, "unread", None), settings)
    return tokens


def source_of(data: Data, tokenizer: Any, settings: LoaderSettings) -> Source:
    """Open documents to tokenize, and report which files are read."""
    source = open_source(data, tokenizer, **settings.reading)
    _log_note(source.unread(), settings)
    if (note := source.template_note()) is not None:
        _log_once(note, is_first=settings.ranks[0] == 0)
    return source


@lru_cache(maxsize=64)
def _log_once(note: str, *, is_first: bool) -> None:
    """Log a sentence on a tokenizer: a run reads several sets with one."""
    _log.log(logging.WARNING if is_first else logging.DEBUG, "%s", note)


def _log_note(note: str | None, settings: LoaderSettings) -> None:
    """Log a sentence about a source: as a warning on rank 0, else for debugging."""
    if note is not None:
        _log.log(logging.WARNING if settings.ranks[0] == 0 else logging.DEBUG, "%s", note)


def of_folders(settings: LoaderSettings) -> dict[str, Any]:
    """Return the settings that say which files of folders are tokens."""
    return {"split": settings.split, "format": settings.format}


_OF_TOKENS = {"on_error", "retry", "row_weights"}
"""Options of reading that tokens take too; and of files of tokens, those of folders."""


def refuse_reading(tokens: TokenDocuments, data: Data, settings: LoaderSettings) -> None:
    """Refuse settings that say how documents become tokens, where they are tokens already."""
    if settings.row_weights and not weighs(tokens):
        raise SettingError(
            f"{data} holds tokens already, without weights, which row_weights can't give them; leave it out, or "
            "index the rows again with it (varlen index --row-weights)"
        )
    taken = _OF_TOKENS | ({"split", "format"} if isinstance(tokens, FileTokens) else set())
    for name, option in options_of(Reading).items():
        if name not in taken and getattr(settings, name) != option.default:
            raise SettingError(f"{data} holds tokens already, which {name} can't change; leave it out")


# One tokenizer for all data of a loader: several are refused by name, and the one of bytes is logged.


def one_tokenizer(marks: Mapping[str, TokenizerMark | None], given: Any) -> dict[str, Any] | None:
    """Require that the sources of a mixture hold tokens of one tokenizer, and return its mark."""
    named = [(name, mark) for name, mark in marks.items() if mark is not None]
    if not named:
        return None
    first, meant = named[0]
    for name, mark in named[1:]:
        if mark.is_same(meant) is False:
            raise SettingError(
                f"the sources {first} and {name} of the mixture hold tokens of different tokenizers, {meant.words} "
                f"and {mark.words}, and a model knows the ids of one; make both with the same"
            )
    if given is not None:
        meant = mark_of(load_tokenizer(given))
        for name, mark in named:
            check_same(f"the source {name}", mark, meant, "make both with the same")
    return meant.to_json()


def differing(store: str | Path, given: Any) -> str:
    """Return a sentence that names a store's tokenizer if it is known to differ from the given one, else ""."""
    if given is None:
        return ""
    try:
        mark, meant = made_by(open_tokens(store, check_tokens=False)), mark_of(load_tokenizer(given))
    except (VarlenError, OSError):
        return ""
    if mark is None or mark.is_same(meant) is not False:
        return ""
    return f". They were made by {mark.words}, and {meant.words} gives other ids: make them anew for that one"


def warn_of_bytes(mark: Mapping[str, Any] | None, rank: int) -> None:
    """Log on rank 0 that tokens are bytes."""
    found = mark_in(mark)
    if rank == 0 and found is not None and found.are_bytes:
        _log.warning(
            "tokens are bytes, of the built-in tokenizer; for a model that has its own, pass that one"
        )


# Checks of documents that are tokens already: vocabulary, labels, overlong documents.

_CHUNK = 1 << 20
"""Number of documents whose lengths are read at a time."""
_MOST_COUNTED = 1 << 22
"""Overlong documents are counted in advance in data of at most so many documents (a fraction of a second)."""
NO_LABEL = (
    "the mixture holds nothing to train on: none of its {count} has a document with a label. A document of one token "
    "has none, nor has one that is dropped as too long, or what a loss mask or `supervise` leaves out"
)


def has_label(tokens: TokenDocuments, settings: LoaderSettings) -> bool:
    """Return whether any document has a label; True if a shard can't be read, as building its batch reports that.

    Cost: reading the first million lengths of a shard; more only while no label is found.
    """
    retained = POLICIES[settings.overlong].retained
    try:
        for shard, documents in enumerate(tokens.documents.tolist()):
            for start in range(0, documents, _CHUNK):
                numbers = np.arange(start, min(start + _CHUNK, documents))
                shards = np.full(len(numbers), shard)
                lengths = tokens.lengths(shards, numbers)
                stops = retained(lengths, settings.capacity)
                if tokens.count_targets(shards, numbers, np.zeros_like(lengths), stops).any():
                    return True
    except SourceError:
        return True
    return False


def check_vocabulary(mark: TokenizerMark | None, settings: LoaderSettings) -> None:
    """Refuse tokens of a tokenizer that gives more ids than the model knows."""
    known = settings.vocab_size
    if known is not None and mark is not None and mark.vocab_size is not None and mark.vocab_size > known:
        raise SettingError(
            f"the tokenizer {mark.name} has {mark.vocab_size:,} tokens, but the model knows {known:,}; take the "
            "model's own tokenizer, or resize the model's embeddings"
        )


def check_known_ids(tokens: TokenDocuments, settings: LoaderSettings) -> None:
    """Refuse tokens that the model doesn't know: by their tokenizer's vocabulary, or else by the first documents."""
    mark = made_by(tokens)
    check_vocabulary(mark, settings)
    if settings.vocab_size is None or (mark is not None and mark.vocab_size is not None):
        return
    try:
        check_first_ids(tokens, settings.vocab_size)
    except SourceError:
        if settings.on_error == "raise":  # otherwise unreadable documents are masked
            raise


def check_positions(lengths: Iterable[AnyInts] | None, settings: LoaderSettings) -> None:
    """Refuse pieces that may be longer than the model's positions, which begin anew in each.

    Args:
        lengths: of all documents, part by part; None where they aren't known.
    """
    positions, capacity = settings.positions, settings.capacity
    if positions is None or capacity <= positions:
        return
    seen, way_out = (
        "lengths of documents aren't known here, so that one may fill a pack",
        "; or index the documents",
    )
    if lengths is not None:
        retained = POLICIES[applied(settings.method, settings.overlong)].retained
        longest = max((int(retained(part, capacity).max(initial=0)) for part in lengths), default=0)
        if longest <= positions:
            return
        seen, way_out = f"a document has {longest:,} tokens", ""
    raise SettingError(
        f"capacity {capacity:,} is longer than the {positions:,} positions of the model, and {seen}; take capacity="
        f"{positions} at most{way_out}"
    )


def warn_overlong(tokens: TokenDocuments, data: str, settings: LoaderSettings) -> bool:
    """Log how many documents, of how many tokens, are overlong; returns whether batches needn't be watched too."""
    counts = tokens.documents
    if settings.ranks[0] or settings.method == "wrapped" or settings.overlong == "error":
        return True
    if int(counts.sum()) > _MOST_COUNTED:
        return False
    count = long_tokens = 0
    try:
        for shard, documents in enumerate(counts.tolist()):
            lengths = tokens.lengths(np.full(documents, shard), np.arange(documents))
            long = lengths[lengths > settings.capacity]
            count, long_tokens = count + len(long), long_tokens + int(long.sum())
    except SourceError:  # building the batch reports it
        return False
    if count:
        _log_overlong(
            f"{many(count, 'document')} of {many(int(counts.sum()), 'document')} in {data}, with "
            f"{many(long_tokens, 'token')}, {'is' if count == 1 else 'are'}",
            settings,
        )
    return True


def warn_overlong_read(ledger: Ledger, settings: LoaderSettings) -> bool:
    """Log how many of the documents read so far exceed the capacity, if any; returns whether any do."""
    count = ledger.split_documents + ledger.truncated_documents + ledger.dropped_documents
    if count and not settings.ranks[0] and settings.method != "wrapped":
        _log_overlong(
            f"{many(count, 'document')} of the first {many(ledger.documents_in, 'document')} "
            f"{'was' if count == 1 else 'were'}",
            settings,
        )
    return count > 0


def _log_overlong(which: str, settings: LoaderSettings) -> None:
    others = [name for name in POLICIES if name != settings.overlong]
    _log.warning(
        "%s longer than capacity %s, and %s; overlong=%s does otherwise",
        which,
        f"{settings.capacity:,}",
        POLICIES[settings.overlong].becomes,
        in_words(others),
    )

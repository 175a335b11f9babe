"""The settings of a loader: each option is declared once, and checked before anything is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from varlen.arguments import as_count, check_multiple, explained, in_words, option, options_of
from varlen.batch.packed import Layout
from varlen.documents.source import Mixture, Reading
from varlen.errors import SettingError
from varlen.feed.state import MOST, Mode
from varlen.files.paths import Data
from varlen.launch import launched, num_dataloader_workers
from varlen.types import Method, Overlong

if TYPE_CHECKING:
    from varlen.feed.plans import GivenPlans
else:
    GivenPlans = Any  # not imported without plans: the planner is slow to import

Scope = Literal["minibatch", "window", "all"]
WorkerKind = Literal["process", "thread"]


@dataclass(frozen=True, kw_only=True)
class LoaderSettings(Reading):
    """Everything but the data: the one declaration of the options of `vl.PackedLoader`.

    The loader's signature and documentation, `[data]` of `varlen train`, and what torchtitan's and axolotl's
    configurations take are made of these fields.
    """

    capacity: int = field(metadata=explained("tokens of a pack.", least=1))
    global_batch_size: int = field(
        metadata=explained("packs of a step (an optimizer update), over all ranks and batches.", least=1)
    )
    micro_batch_size: int | None = option(
        None, "packs of a batch; None for all that a rank takes in a step.", least=1
    )
    dp_rank: int | None = option(
        None,
        "this rank among those with different data; tensor, pipeline and context parallel peers pass the same.",
    )
    dp_world_size: int | None = option(
        None, "number of such ranks; both may be left out in a job of one process."
    )
    mode: Literal["auto"] | Mode = option(
        "auto",
        '"indexed" knows all lengths (documents are tokenized once into a store in the cache), "streaming" '
        'tokenizes on the fly and writes nothing; "auto" takes the first for a token store, else the second.',
    )
    scope: Scope = option(
        "window",
        '"window" packs a window of documents at a time; "all" the whole data set at once; "minibatch" packs '
        'nothing: `global_batch_size` documents make a step, each a pack of its own, flattened (`layout="flat"`).',
    )
    window: int | None = option(
        None,
        "documents packed at a time (indexed, 65,536 unless given), or packs a lane (streaming, 32).",
        least=1,
    )
    lanes: int | None = option(
        None,
        "of streaming; the packs of a step unless given. The number of ranks must divide it. Where lengths are "
        "known there are none, and the same arguments serve both modes.",
        least=1,
    )
    method: Method = option(
        "best_fit", 'of `vl.pack`; "best_fit" in shuffled order keeps the composition of packs random.'
    )
    overlong: Overlong = option(
        "split", f"what becomes of documents longer than a pack: {in_words(get_args(Overlong))}."
    )
    max_documents: int | None = option(None, "most pieces a pack may hold.", least=1)
    document_multiple_of: int = option(
        1, "what the space of each document is rounded up to a multiple of.", least=1
    )
    shuffle: bool = option(
        True, "in random order, another one in each epoch; False keeps the order of the data."
    )
    seed: int = option(0, "of the shuffle.", least=0, most=MOST)
    epochs: int | None = option(1, "passes over the data; None for no end.", least=1)
    layout: Layout = option("rows", '"rows" or "flat", as in `vl.collate`.')
    pad_id: int = option(0, "token id at padding.", least=0)
    pad_to_multiple_of: int = option(
        1, "what the width of the flat layout is rounded up to a multiple of.", least=1
    )
    device: Any = option(None, "where torch tensors are wanted; None for numpy arrays in host memory.")
    worker: WorkerKind = option(
        "process", '"process", or "thread" within this process: the same bytes, for debugging.'
    )
    ring_slots: int = option(
        4, "batches made ahead at most; in a process they lie in shared memory.", least=2
    )
    read_ahead_s: float = option(10.0, "of streaming: stalls of the storage that are to be ridden out.")
    deadline_s: float = option(600.0, "longest wait for a batch before StalledError says what is missing.")
    cache: str | Path | None = option(None, "folder for stores made here; None for the user's cache.")
    model: Any = option(
        None,
        "a transformers model or configuration; its vocabulary must suffice, and its positions for the longest "
        "document, or where lengths aren't known for a whole pack.",
    )
    plan: GivenPlans | None = option(
        None,
        "plans of the steps, which need known lengths: a list or mapping by step, a function of the step and its "
        "lengths (int32), or a `vl.Planner` made without lengths. Each step is then one flat batch for "
        "`SliceEngine.step`: the documents of which `batch.plan` gives this rank slices. One rank plans each step "
        "and sends the plan through the job's store; `global_batch_size` needn't be a multiple of the ranks.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_multiple(self.capacity, self.document_multiple_of, "document_multiple_of")
        if self.layout == "rows":
            check_multiple(self.capacity, self.pad_to_multiple_of, "pad_to_multiple_of")
        if self.scope == "all" and self.mode == "streaming":
            raise SettingError(
                'scope="all" packs the whole data set at once, which mode="streaming" never holds'
            )
        if self.scope == "all" and self.window is not None:
            raise SettingError(
                f'scope="all" packs the whole data set at once, which window={self.window} can\'t change; leave '
                'window out, or take scope="window"'
            )
        if self.scope == "minibatch" and self.max_documents is not None:
            raise SettingError(
                'scope="minibatch" makes each document a pack of its own, which max_documents='
                f'{self.max_documents} can\'t change; leave max_documents out, or take scope="window"'
            )
        if self.scope == "minibatch" and self.layout == "rows":
            raise SettingError(
                'scope="minibatch" flattens the documents of a batch, which needs layout="flat": rows of one '
                "document each would be padding"
            )
        if self.plan is not None and self.micro_batch_size is not None:
            raise SettingError(
                f"a step with a plan is one batch a rank, which micro_batch_size={self.micro_batch_size:,} can't "
                "divide; leave it out: the plan says what is computed at a time"
            )
        _ = self.batch_sizes  # and so the ranks
        self.check_reader()
        _check_model(self)

    @property
    def reading(self) -> dict[str, Any]:
        """What `open_source` takes beside the data and the tokenizer."""
        return {name: getattr(self, name) for name in options_of(Reading)}

    @property
    def ranks(self) -> tuple[int, int]:
        """The data-parallel rank and world size."""
        return as_ranks(self.dp_rank, self.dp_world_size)

    def check_reader(self) -> None:
        """Refuse to read where several processes would get the same data."""
        check_reader(is_ranked=self.dp_rank is not None)

    @property
    def batch_sizes(self) -> tuple[int, int]:
        """Packs of a step, and packs of a batch; with a plan both are the whole step, of which a batch has a part."""
        return as_batch_sizes(self.global_batch_size, self.micro_batch_size, self.dealt_ranks)

    @property
    def batch_layout(self) -> Layout:
        """The layout of batches; with a plan they are flat, since most of a rank's rows would be padding."""
        return self.layout if self.plan is None else "flat"

    @property
    def dealt_ranks(self) -> int:
        """Ranks that whole packs are dealt to; a plan deals documents instead."""
        return self.ranks[1] if self.plan is None else 1

    @property
    def vocab_size(self) -> int | None:
        """How many ids the model knows, if one was given that says so."""
        return _of_model(self.model, "vocab_size")

    @property
    def positions(self) -> int | None:
        """How many positions the model has, if one was given that says so; they begin anew in each document."""
        return _of_model(self.model, "max_position_embeddings")

    @property
    def patience_s(self) -> float:
        """Seconds to wait for other ranks: less than `deadline_s`, so that the error that names one comes first."""
        return 0.9 * self.deadline_s

    @property
    def order_seed(self) -> int | None:
        """The seed of the shuffle; None for documents in their order."""
        return self.seed if self.shuffle else None

    def deciding(self, window: int | None) -> dict[str, Any]:
        """Return the settings that the bytes depend on."""
        whole, micro = self.batch_sizes
        names = ("capacity", "scope", "method", "overlong", "max_documents", "document_multiple_of", "layout")
        return {
            **{name: getattr(self, name) for name in (*names, "pad_id", "pad_to_multiple_of")},
            "global_batch_size": whole,
            "window": window,
            "seed": self.order_seed,
            "dp_world_size": self.ranks[1],
            "micro_batch_size": micro,
        }


@dataclass(frozen=True)
class LoaderArguments(LoaderSettings):
    """All arguments of `vl.PackedLoader`, for its signature and documentation."""

    source: Data | Mixture = field(
        metadata=explained(
            "a token store (`varlen index`), or documents: a file, folder, glob or URL, rows in memory (a list of "
            "dicts, a `datasets.Dataset`, a table ...), or a list of these; or a `vl.Mixture` of such sources."
        )
    )
    tokenizer: Any = option(
        None,
        '"bytes" or None for the built-in one, a file or folder, an object, or a function; of documents.',
    )


FREE = frozenset({"dp_world_size", "micro_batch_size"})
"""What may change where a step begins."""


def _check_model(settings: LoaderSettings) -> None:
    """Refuse a token for padding that the model doesn't know."""
    known = settings.vocab_size
    if known is not None and settings.pad_id >= known:
        raise SettingError(
            f"pad_id {settings.pad_id:,} is none of the {known:,} ids that the model knows; take one below, such as "
            "pad_id=0: padding is masked, whatever its id"
        )


def _of_model(model: Any, name: str) -> int | None:
    """Return a number of a transformers configuration, or of a model that has one."""
    config = getattr(model, "config", model)
    inner = getattr(config, "get_text_config", None)
    value = getattr(inner() if callable(inner) else config, name, None)
    return value if isinstance(value, int) else None


# Which data-parallel rank this is, and how the packs of a step divide among ranks and batches.


def as_ranks(dp_rank: int | None, dp_world_size: int | None) -> tuple[int, int]:
    """Return the data-parallel rank and world size."""
    if dp_rank is None and dp_world_size is None:
        return 0, 1
    if dp_rank is None or dp_world_size is None:
        given = "dp_rank" if dp_world_size is None else "dp_world_size"
        raise SettingError(f"only {given} was given; pass both dp_rank and dp_world_size, or neither")
    size = as_count(dp_world_size, "dp_world_size")
    return as_count(dp_rank, "dp_rank", 0, size - 1), size


def check_reader(*, is_ranked: bool) -> None:
    """Refuse to read where several processes would get the same data."""
    workers = num_dataloader_workers()
    if workers > 1 or (workers and not is_ranked):
        raise SettingError(
            f"this is one of {workers:,} worker processes of a DataLoader, each of which would get the same data; a "
            "PackedLoader makes its batches ahead in a process of its own: iterate it, or wrap it by "
            "DataLoader(dataset, batch_size=None, num_workers=0)"
        )
    launch = None if is_ranked else launched()
    if launch is not None:
        raise SettingError(
            f"{launch.words}, and each would get the same data; pass {launch.arguments}, or those of the "
            "data-parallel group where tensor, pipeline or context parallelism is used; where this process reads "
            "alone, pass dp_rank=0, dp_world_size=1"
        )


def as_batch_sizes(
    global_batch_size: int, micro_batch_size: int | None, dp_world_size: int
) -> tuple[int, int]:
    """Return the packs of a step, and those of a batch."""
    whole = as_count(global_batch_size, "global_batch_size")
    micro = None if micro_batch_size is None else as_count(micro_batch_size, "micro_batch_size")
    at_once = dp_world_size * (micro or 1)
    if whole % at_once:
        below, above = whole // at_once * at_once, -(-whole // at_once) * at_once
        nearest = f"{below:,} or {above:,}" if below else f"{above:,}"
        by = f"{dp_world_size:,} ranks" + (f" with batches of {micro:,}" if micro else "")
        raise SettingError(
            f"global_batch_size {whole:,} doesn't divide among {by}; pass a multiple of {at_once:,}: {nearest}"
        )
    return whole, micro or whole // dp_world_size

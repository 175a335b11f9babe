"""What a loader is asked for, checked before anything is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from varlen.arguments import as_choice, as_count, check_multiple
from varlen.batch.packed import Layout
from varlen.documents.source import OnError
from varlen.errors import SettingError
from varlen.feed.state import MOST, Mode
from varlen.launch import launched, loading_workers
from varlen.types import Method, Overlong

Scope = Literal["minibatch", "window", "all"]
WorkerKind = Literal["process", "thread"]
_OPTIONAL = ("micro_batch_size", "window", "lanes", "max_documents", "epochs")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSettings:
    """Everything but the data; the fields are the keywords of `vl.PackedLoader`, which says what they mean."""

    capacity: int
    global_batch_size: int
    micro_batch_size: int | None = None
    dp_rank: int | None = None
    dp_world_size: int | None = None
    mode: Literal["auto"] | Mode = "auto"
    scope: Scope = "window"
    window: int | None = None
    lanes: int | None = None
    method: Method = "best_fit"
    overlong: Overlong = "split"
    max_documents: int | None = None
    document_multiple_of: int = 1
    shuffle: bool = True
    seed: int = 0
    epochs: int | None = 1
    layout: Layout = "rows"
    pad_id: int = 0
    pad_to_multiple_of: int = 1
    device: Any = None
    worker: WorkerKind = "process"
    ring_slots: int = 4
    read_ahead_s: float = 10.0
    deadline_s: float = 600.0
    reading: Mapping[str, Any] = field(default_factory=dict)
    """What `open_source` takes beside the data and the tokenizer."""
    cache: Path | None = None
    model: Any = None
    plan: Any = None

    def __post_init__(self) -> None:
        for name, choices in (
            ("mode", ("auto", *get_args(Mode))),
            ("scope", get_args(Scope)),
            ("method", get_args(Method)),
            ("overlong", get_args(Overlong)),
            ("layout", get_args(Layout)),
            ("worker", get_args(WorkerKind)),
            ("on_error", get_args(OnError)),
        ):
            as_choice(getattr(self, name), name, choices)
        for name, least in (
            ("capacity", 1),
            ("document_multiple_of", 1),
            ("pad_to_multiple_of", 1),
            ("ring_slots", 2),
            ("pad_id", 0),
            ("global_batch_size", 1),
            *((name, 1) for name in _OPTIONAL),
        ):
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                # Python's own integer: numpy's can't go into a state for JSON.
                object.__setattr__(self, name, as_count(value, name, least))
        object.__setattr__(self, "seed", as_count(self.seed, "seed", 0, MOST))
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
        for name in ("deadline_s", "read_ahead_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                raise SettingError(f"{name} must be a positive number of seconds, and finite, got {value!r}")
        if self.plan is not None and self.micro_batch_size is not None:
            raise SettingError(
                f"a step with a plan is one batch a rank, which micro_batch_size={self.micro_batch_size:,} can't "
                "divide; leave it out: the plan says what is computed at a time"
            )
        _ = self.batch_sizes  # and so the ranks
        self.check_reader()
        _check_model(self)

    @property
    def on_error(self) -> OnError:
        """What becomes of what can't be read.

        No state depends on it where lengths are known: what can be read stays where it is.
        """
        found: OnError = self.reading.get("on_error", "raise")
        return found

    @property
    def ranks(self) -> tuple[int, int]:
        """The data-parallel rank and world size."""
        return as_ranks(self.dp_rank, self.dp_world_size)

    def check_reader(self) -> None:
        """Refuse to read where several processes would get the same data."""
        check_reader(is_ranked=self.dp_rank is not None)

    @property
    def batch_sizes(self) -> tuple[int, int]:
        """Packs of a step, and packs of a batch; with a plan, those that a batch has a part of."""
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
    def patience_s(self) -> float:
        """How long to wait for others: less than the trainer does for its batch, so that it hears who is missing."""
        return 0.9 * self.deadline_s

    @property
    def order_seed(self) -> int | None:
        """The seed of the shuffle; None for documents in their order."""
        return self.seed if self.shuffle else None

    def deciding(self, window: int | None) -> dict[str, Any]:
        """Return the settings that the bytes depend on."""
        whole, micro = self.batch_sizes
        return {
            "capacity": self.capacity,
            "global_batch_size": whole,
            "scope": self.scope,
            "window": window,
            "method": self.method,
            "overlong": self.overlong,
            "max_documents": self.max_documents,
            "document_multiple_of": self.document_multiple_of,
            "seed": self.order_seed,
            "layout": self.layout,
            "pad_id": self.pad_id,
            "pad_to_multiple_of": self.pad_to_multiple_of,
            "dp_world_size": self.ranks[1],
            "micro_batch_size": micro,
        }


FREE = frozenset({"dp_world_size", "micro_batch_size"})
"""What may change where a step begins."""


def check_vocabulary(vocab_size: int | None, name: str, settings: LoaderSettings) -> None:
    """Refuse tokens that the model doesn't know."""
    known = settings.vocab_size
    if known is not None and vocab_size is not None and vocab_size > known:
        raise SettingError(
            f"the tokenizer {name} has {vocab_size:,} tokens, but the model knows {known:,}; take the model's own "
            "tokenizer, or resize the model's embeddings"
        )


def _check_model(settings: LoaderSettings) -> None:
    """Refuse packs longer than the model's positions, and a token for padding that it doesn't know."""
    known = settings.vocab_size
    if known is not None and settings.pad_id >= known:
        raise SettingError(
            f"pad_id {settings.pad_id:,} is none of the {known:,} ids that the model knows; take one below, such as "
            "pad_id=0: padding is masked, whatever its id"
        )
    positions = _of_model(settings.model, "max_position_embeddings")
    if positions is not None and settings.capacity > positions:
        raise SettingError(
            f"capacity {settings.capacity:,} is longer than the {positions:,} positions of the model; take capacity="
            f"{positions} at most"
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
    workers = loading_workers()
    if workers > 1 or (workers and not is_ranked):
        raise SettingError(
            f"this is one of {workers:,} worker processes of a DataLoader, each of which would get the same data; a "
            "PackedLoader makes its batches ahead in a process of its own: iterate it, or wrap it by "
            "DataLoader(dataset, batch_size=None, num_workers=0)"
        )
    launch = None if is_ranked else launched()
    if launch is not None:
        raise SettingError(
            f"{launch.said}, and each would get the same data; pass {launch.arguments}, or those of the "
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

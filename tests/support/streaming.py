"""What tests of the streaming feed share: a feed in a line, ranks side by side in threads, and what batches hold."""

import json
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from varlen.documents.source import Source
from varlen.errors import WorkerDiedError
from varlen.feed.batches import BatchSettings
from varlen.feed.exchange import Exchange
from varlen.feed.prefetch import AheadSettings
from varlen.feed.protocol import Made
from varlen.feed.state import FeedState
from varlen.feed.streaming.feed import StreamingFeed, StreamingSettings

NAMES = ("input_ids", "labels", "position_ids", "segment_ids", "document_ids", "document_starts", "pack_ids")


class Meeting:
    """An exchange between threads: whoever comes last lets all go on."""

    def __init__(self, lanes: int, run: int = 0) -> None:
        self._lanes, self._run = lanes, run
        self._values: dict[str, dict[int, Any]] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def all(self, key: str, mine: Mapping[int, Any]) -> Mapping[int, Any]:
        with self._changed:
            found = self._values.setdefault(key, {})
            assert not set(found) & set(mine), "a key is used once"
            found.update(json.loads(json.dumps(dict(mine)), object_hook=_whole))
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(found) == self._lanes or self._is_closed, timeout=60):
                raise WorkerDiedError(f"nobody came to {key}")
            if len(found) < self._lanes:
                raise WorkerDiedError("closed while waiting")
            return found

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def _whole(found: dict[str, Any]) -> dict[Any, Any]:
    return {int(key) if key.isdigit() else key: value for key, value in found.items()}


def feed_of(
    source: Source,
    ranks: int = 1,
    rank: int = 0,
    *,
    lanes: int = 4,
    size: int = 4,
    micro: int = 1,
    capacity: int = 64,
    exchange: Exchange | None = None,
    **more: Any,
) -> StreamingFeed:
    named = {"overlong": "split", "window_packs": 8, "ahead": AheadSettings(seconds=0), **more}
    multiple = named.pop("document_multiple_of", 1)
    batch = BatchSettings(
        capacity=capacity,
        global_batch_size=size,
        micro_batch_size=micro,
        dp_world_size=ranks,
        document_multiple_of=multiple,
    )
    settings = StreamingSettings(lanes=lanes, **named)
    return StreamingFeed(source, settings, batch, rank, None if exchange is None else lambda: exchange)


def new_arrays() -> None:
    return None


def run(feed: StreamingFeed, state: FeedState | None = None) -> list[Made]:
    """The batches that follow a state, without what comes behind them."""
    return [one for one in feed.batches(state or FeedState(), new_arrays) if isinstance(one, Made)]


def side_by_side(source: Source, ranks: int, state: FeedState, meets: bool, **more: Any) -> list[list[Made]]:
    """The batches of all ranks; where they meet, each reads its own lanes alone."""
    meeting = Meeting(more.get("lanes", 4)) if meets else None
    feeds = [feed_of(source, ranks, rank, exchange=meeting, **more) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda feed: run(feed, state), feeds))


def content(made: Made) -> tuple[bytes, ...]:
    arrays = (getattr(made.batch, name).tobytes() for name in NAMES)
    return (*arrays, str(made.batch.step_num_targets).encode())


def rows(made: Made) -> list[tuple[int, bytes, bytes]]:
    """Each pack of a batch: its number, tokens and labels, whoever has it."""
    batch = made.batch
    return [
        (int(number), batch.input_ids[row].tobytes(), batch.labels[row].tobytes())
        for row, number in enumerate(batch.pack_ids)
    ]


def pieces(made: list[Made]) -> list[tuple[int, int, bytes]]:
    """Each piece of a document: the document, the first of its tokens, and the tokens."""
    found = []
    for one in made:
        at = 0
        ids, segments = one.batch.input_ids.ravel(), one.batch.segment_ids
        width = segments.shape[1]
        for row in range(len(segments)):
            for segment in range(int(segments[row].max(initial=-1)) + 1):
                where = np.flatnonzero(segments[row] == segment) + row * width
                found.append(
                    (
                        int(one.batch.document_ids[at]),
                        int(one.batch.document_starts[at]),
                        ids[where].tobytes(),
                    )
                )
                at += 1
    return found


def tokens(made: list[Made]) -> Counter[tuple[int, int, int]]:
    """How often each token of each document came."""
    found: Counter[tuple[int, int, int]] = Counter()
    for document, start, content_ in pieces(made):
        found.update((document, start + n, int(t)) for n, t in enumerate(np.frombuffer(content_, np.int32)))
    return found


def times(count: int, once: Counter[Any]) -> Counter[Any]:
    """The same, so many times."""
    return Counter({token: count * number for token, number in once.items()})


def documents(made: list[Made]) -> list[bytes]:
    """The tokens of each document that batches hold, put together again, sorted."""
    whole: dict[int, list[tuple[int, bytes]]] = {}
    for document, start, tokens in pieces(made):
        whole.setdefault(document, []).append((start, tokens))
    return sorted(b"".join(tokens for _, tokens in sorted(parts)) for parts in whole.values())


def tokens_of(texts: list[str]) -> list[bytes]:
    """What documents of the built-in tokenizer hold, sorted."""
    return sorted(np.array([*text.encode(), 256], dtype=np.int32).tobytes() for text in texts if text)


def write_texts(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def some_texts(seed: int, count: int, longest: int = 120) -> list[str]:
    """Different texts of random lengths."""
    rng = np.random.default_rng(seed)
    return [
        f"{n}." + "".join(rng.choice(list("abcdef"), size=rng.integers(0, longest))) for n in range(count)
    ]

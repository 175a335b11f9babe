"""TRL's best-fit-decreasing packing, with and without moving tokens, and its padding-free collator."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

ALGORITHM = "TRL bfd, algorithm alone"
PACK_DATASET = "TRL pack_dataset"
COLLATOR = "TRL DataCollatorForLanguageModeling(padding_free)"

_FIRST = "lengths = pc.make_struct"
"""How the statement begins that prepares the sort of the lengths; what stands before it moves tokens."""
_PLACING = "segment_tree.search"
"""What the loop that fills the bins calls; what stands after it moves tokens."""


def algorithm(lengths: np.ndarray, capacity: int) -> Callable[[], list[list[int]]]:
    """Return a call of the statements inside TRL's `_pack_bfd` that decide which document goes where.

    They are taken from the installed function at run time, from the sort of the lengths to the end of the
    loop that fills the bins, and run unchanged, in the module's own namespace.
    """
    import pyarrow as pa
    from trl import data_utils

    function = ast.parse(textwrap.dedent(inspect.getsource(data_utils._pack_bfd))).body[0]
    assert isinstance(function, ast.FunctionDef)
    steps = [ast.unparse(step) for step in function.body]
    starts = [i for i, step in enumerate(steps) if step.startswith(_FIRST)]
    loops = [i for i, step in enumerate(steps) if step.startswith("for ") and _PLACING in step]
    if len(starts) != 1 or len(loops) != 1:
        raise RuntimeError(
            "TRL's _pack_bfd has changed: its sort and the loop that fills bins were not found"
        )

    place = ast.parse("def place(lengths, ids, seq_length):\n    return bins").body[0]
    assert isinstance(place, ast.FunctionDef)
    place.body = function.body[starts[0] : loops[0] + 1] + place.body
    namespace = dict(vars(data_utils))
    exec(compile(ast.fix_missing_locations(ast.Module([place], [])), "trl.data_utils", "exec"), namespace)
    arrow_lengths, ids = pa.array(lengths), np.arange(len(lengths))

    def place_all() -> list[list[int]]:
        return namespace["place"](arrow_lengths, ids, capacity)

    return place_all


def pack_dataset(arrow: Any, capacity: int, *, window: int | None) -> Callable[[], Any]:
    """Return a call of `pack_dataset` on a data set of one Arrow column, its result kept in memory.

    `window` documents are packed at a time; None is TRL's default of 1,000.
    """
    import datasets
    import pyarrow as pa
    import trl

    datasets.disable_caching()
    datasets.disable_progress_bars()
    data = datasets.Dataset(pa.table({"input_ids": arrow}))
    options: dict[str, Any] = {"keep_in_memory": True}
    if window is not None:
        options["batch_size"] = window

    def pack() -> Any:
        return trl.pack_dataset(data, capacity, strategy="bfd", map_kwargs=dict(options))

    return pack


def collator(documents: list) -> Callable[[], Mapping[str, Any]]:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    features = [{"input_ids": document} for document in documents]

    def flatten() -> Mapping[str, Any]:
        return collate(features)

    return flatten


@cache
def packed_dataset(parquet: str, capacity: int, processes: int) -> tuple[Any, float]:
    """Pack a file of tokens as `SFTTrainer` does, in memory; returns the data set and the seconds that it took."""
    import datasets
    import trl

    datasets.disable_progress_bars()
    data = datasets.load_dataset("parquet", data_files=parquet, split="train", keep_in_memory=True)
    datasets.disable_caching()
    options = {"num_proc": processes if processes > 1 else None, "keep_in_memory": True}
    start = time.perf_counter()
    packed = trl.pack_dataset(data, capacity, strategy="bfd", map_kwargs=options)
    return packed, time.perf_counter() - start


def batches(data: Any, rows: int, epochs: int | None, *, workers: int, form: str | None) -> Iterator[Any]:
    """Yield flattened batches of packs, as `SFTTrainer` gets them.

    `form` is that in which the data set gives rows, such as "numpy"; None for lists. `epochs=None` never ends.
    """
    from torch.utils.data import DataLoader
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    options: dict[str, Any] = {"prefetch_factor": 4, "persistent_workers": True} if workers else {}
    loader = DataLoader(
        data.with_format(form), batch_size=rows, num_workers=workers, collate_fn=collate, **options
    )
    for _ in itertools.count() if epochs is None else range(epochs):
        yield from loader

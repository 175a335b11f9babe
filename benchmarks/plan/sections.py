"""Sections of docs/planning-results.md on what the comparison stands on.

How well each method is predicted, methods that move documents between steps, published rates, WLB-LLM's choice
between two ways to share micro-batches, and asymmetry. A section without records is left out.
"""

from __future__ import annotations

from statistics import mean, median
from typing import Any

from benchmarks.pages import table
from benchmarks.plan.figures import (
    ATTENTION_SHARES,
    DECILES,
    LARGE_MESH,
    TITLES,
    TUNED_OTHERS,
    Record,
    deciles,
    number,
    over_best_other,
    records_of,
    speedups,
    spread,
    tuned,
)


def errors(result: dict[str, Any]) -> list[str]:
    """Say how far the simulator is off for each method, and in which direction."""
    records = records_of(result, "accuracy")
    if not records:
        return []
    rows = []
    for name, title in TITLES.items():
        cells = []
        for record in records:
            found = [step["error"] for step in record["steps"] if step["method"] == name]
            cells.append(f"{mean(found):+.1%} ({min(found):+.1%} to {max(found):+.1%})" if found else "-")
        rows.append((title, *cells))
    head = ("method", *(record["mesh"] for record in records))
    repeats = ", ".join(f"{record['repeat_mape']:.1%} on {record['mesh']}" for record in records)
    return [
        "## Prediction errors",
        table(head, rows),
        "Simulated over measured step time, less one: mean (least to most). **Below zero a method is simulated "
        "faster than it runs.** Real steps of a small Llama on two processes of one core each, over gloo, with "
        "messages, waits and the sums of gradients, at rates and links measured meanwhile: as two stages, and as two "
        "ranks with a document of more work than a rank's share, which all but packs as users run them may share. "
        f"Half of the rounds against the other half: {repeats}. No GPU ran.",
        table(("steps", "best other over micropack, simulated", "measured"), _gains(records)),
        "The best other method by measured time, in both columns: where the first is larger, the simulator favours "
        "micropack.",
    ]


def _gains(records: list[Record]) -> list[tuple[str, ...]]:
    rows = []
    for record in records:
        groups: dict[str, dict[str, Record]] = {}
        for step in record["steps"]:
            groups.setdefault(step["documents"], {})[step["method"]] = step
        for documents, by_method in groups.items():
            ours = by_method["micropack"]
            other = min((by_method[name] for name in TUNED_OTHERS), key=lambda step: step["measured_s"])
            ratios = (f"{number(other[key] / ours[key])}x" for key in ("predicted_s", "measured_s"))
            rows.append((f"{record['mesh']}, {documents}, {TITLES[other['method']]}", *ratios))
    return rows


def delayed(result: dict[str, Any]) -> list[str]:
    """Compare methods that move documents between steps, over all steps of a run."""
    records = records_of(result, "delayed")
    if not records:
        return []
    names = list(dict.fromkeys(name for record in records for name in record["ways"]))
    rows, ratios = [], {name: [] for name in names}  # type: dict[str, list[float]]
    for record in records:
        ours = record["ways"]["micropack"].get("seconds")
        cells = []
        for name in names:
            found = record["ways"][name]
            if "seconds" not in found or not ours:
                cells.append("-")
                continue
            ratios[name].append(found["seconds"] / ours)
            cp = f", cp {found['cp']}" if found["cp"] > 1 else ""
            cells.append(f"{found['seconds'] / ours:.3f}x{cp}")
        waits = [way for way in record["ways"].values() if "waiting_share" in way]
        share = max((way["waiting_share"] for way in waits), default=0.0)
        rows.append((record["key"].replace("/", ", "), number(ours, " s"), *cells, f"{share:.1%}"))
    rows.append(("**median**", "", *(f"{number(_median(ratios[name]))}x" for name in names), ""))
    steps = " and ".join(str(count) for count in sorted({record["steps"] for record in records}))
    return [
        "## Moving documents between steps",
        table(("cell", "micropack, seconds", *names, "documents that wait, most"), rows),
        f"Step time over that of micropack, summed over {steps} steps of the same documents: every way has trained "
        "on equal tokens in the end. *Delayed* ways hold long documents back (outlier delay of WLB-LLM, "
        "`vl.delay_outliers`, 8 steps at most), so that a step's documents are other ones than were drawn: this is "
        "no comparison of plans of one step, and counts nowhere else on this page. Context parallelism, the "
        "threshold (a half or a quarter of the capacity) and how many go together (dp, or four times as many) are "
        "the fastest of the first eight steps. The last step takes all that still wait.",
    ]


def published(result: dict[str, Any]) -> list[str]:
    """Say what the conclusions are at other rates of attention than those measured."""
    records, grid = records_of(result, "published"), records_of(result, "grid")
    if not records:
        return []
    cells = {_drawn(record) for record in records}
    groups = {"measured": [record for record in grid if _drawn(record) in cells]}
    for share in ATTENTION_SHARES:
        groups[f"{share:g} of published"] = [r for r in records if r["cell"]["attention_share"] == share]
    rows = []
    for title, values_of in (("best other", over_best_other), ("packed, tuned", _over_packs)):
        for rates, some in groups.items():
            values = values_of(some)
            rows.append((f"{title}, {rates}", f"{len(values)}", *map(number, deciles(values))))
    return [
        "## Published rates",
        table(("over, rates", "cells", *DECILES), rows),
        "Step time over that of micropack, in every sixth cell, at the rates measured, and at shares of those that "
        "are published of FlashAttention 3 on an H100, with a planning default for layers. PyTorch's own kernel, "
        "which the engine takes where no other is installed, reaches half of them. One chunk of layers a GPU.",
    ]


def _drawn(record: Record) -> tuple[Any, ...]:
    """Return what tells cells apart but for their rates."""
    cell = record["cell"]
    return tuple(
        cell.get(name) for name in ("lengths", "capacity", "documents", "model", "dp", "pp", "tp", "seed")
    )


def _over_packs(records: list[Record]) -> list[float]:
    return speedups(records, "packed")


def sharding(result: dict[str, Any]) -> list[str]:
    """Say what WLB-LLM's choice between two ways to share micro-batches brings."""
    plans = [plan for record in records_of(result, "sharding") for plan in record["plans"]]
    if not plans:
        return []
    rows = []
    for cp in sorted({plan["cp"] for plan in plans}):
        some = [plan for plan in plans if plan["cp"] == cp]
        sums = {name: sum(plan[name] for plan in some) for name in some[0]}
        rows.append(
            (
                f"{cp}",
                f"{sums['micro_batches']:,}",
                f"{sums['faster_as_sequence']:,}",
                f"{sums['by_sequence_s'] / sums['by_document_s']:.3f}x",
                f"{sums['adaptive_s'] / sums['by_document_s']:.3f}x",
            )
        )
    return [
        "## Adaptive sharding",
        table(("cp", "micro-batches", "faster as a sequence", "all as sequences", "adaptive"), rows),
        "WLB-LLM shares each micro-batch among the ranks of context parallelism document by document or as one "
        "sequence (each rank the first and the last of equal parts), whichever it predicts to be faster. Here every "
        "document is divided exactly evenly, and kernels run at the rate of all rows that a rank has in the "
        "micro-batch, however short its documents: even work at full rates, the best of both ways. So the choice "
        "gains nothing over what `balanced` is priced at, and `balanced` stands for WLB-LLM at its best. Layer time "
        "of the micro-batches of balanced plans over that of sharing by document; exchanges, the same both ways, "
        "aren't counted.",
    ]


def asymmetry(records: list[Record]) -> list[str]:
    """Say what asymmetry, SlimPack's idea, brings, from the records of the ablation."""
    found = []
    for setting in dict.fromkeys(record["setting"] for record in records):
        plans = [record["plans"] for record in records if record["setting"] == setting]
        both = [p for p in plans if all("step_s" in p.get(name, {}) for name in ("asymmetry", "everything"))]
        values = [p["asymmetry"]["step_s"] / p["everything"]["step_s"] for p in both]
        if values:
            gaining = sum(value >= 1.005 for value in values)
            found.append(
                f"{setting} {spread(values, 'x')}, {gaining} of {len(values)} cells faster by 0.5 % or more"
            )
    if not found:
        return []
    return [
        "**Asymmetry**, MicroPacks of the backward pass that are cut apart from those of the forward pass, is the "
        "central idea of SlimPack. Step time without it over step time with it, median (least to most): "
        + "; ".join(found)
        + ". It needs recomputation of all layers, and is kept where the simulator gains at least 1 %."
    ]


MARKS = ("<!-- planning figures -->", "<!-- end of planning figures -->")
"""Between these stands one sentence of the results."""


def told(before: str, result: dict[str, Any]) -> str:
    """Return a text with what stands between the marks renewed.

    It stays where other methods weren't tuned over context parallelism: such ratios aren't worth a sentence.
    """
    cells = tuned(result)
    if not any("cp" in record["methods"].get("sliced", {}) for record in cells):
        return before
    start, stop = before.index(MARKS[0]) + len(MARKS[0]), before.index(MARKS[1])
    wide = [r for r in cells if r["cell"]["dp"] * r["cell"]["pp"] >= LARGE_MESH]
    best, packs = over_best_other(wide), speedups(wide, "packed")
    words = (
        f"simulated, {len(best)} steps on {LARGE_MESH} ranks and more: {spread(best, 'x')} over the best other "
        f"method at its best on the same GPUs, {spread(packs, 'x')} over tuned packs; median, least and most."
    )
    return before[:start] + words + before[stop:]


def _median(values: list[float]) -> float | None:
    return median(values) if values else None

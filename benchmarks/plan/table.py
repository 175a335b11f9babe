"""docs/planning-results.md from the newest result of the planning benchmark; needs nothing but Python.

`python -m benchmarks.plan.table` writes the page, and one sentence of it into README.md and docs/planning.md;
`--check` only says whether they are up to date, with exit code 1 if not.
"""

from __future__ import annotations

import itertools
import sys
from statistics import median
from typing import Any

from benchmarks import pages
from benchmarks.pages import table
from benchmarks.plan import sections
from benchmarks.plan.figures import (
    DECILES,
    EXACT_HEAD,
    LARGE_MESH,
    MORE_CHUNKS,
    OTHERS,
    PLANNING_S,
    RUNS_HEAD,
    TITLES,
    TUNED_OTHERS,
    Record,
    Verdict,
    best_other,
    deciles,
    exact,
    exact_words,
    load_exact,
    load_newest,
    middle,
    number,
    over_best_other,
    ratios,
    records_of,
    runs,
    speedup,
    speedups,
    spread,
    step_times,
    tuned,
    verdicts,
)
from benchmarks.records import ROOT

PAGE = ROOT / "docs" / "planning-results.md"
TOLD = (ROOT / "README.md", ROOT / "docs" / "planning.md")
"""Pages with one sentence of the results, between marks."""
WORST = 12
ABLATION_TITLES = {
    "tuning": "tuning packs (capacity, ranks, order)",
    "balance": "balancing whole documents, over tuned packs",
    "slicing": "slicing",
    "graded sizes": "graded sizes",
    "zero-bubble": "zero-bubble (split backward)",
    "DP-Merge": "DP-Merge",
    "asymmetry": "asymmetry",
    "order": "order of documents",
    "exact solving": "exact solving",
}
_CHIEF = "micropack"
_FAIR = (
    "These methods keep each global batch: no document moves to another step. On the same GPUs each has the context "
    "parallelism that is best for it (1, 2, 4, 8 or 16 ranks share every document), and separate weight gradients; "
    "micropack tries all of that by itself, and contains their plans. `vl.delay_outliers` moves documents between "
    "steps and stands apart. Exchanges of shared documents cost what the engine takes, which doesn't hide them; "
    "*hidden* is the other end, where they cost nothing. Attention and layers run at rates measured on one H100, of "
    "PyTorch's variable-length kernel and of transformers' layers; *published rates* has those of FlashAttention 3. "
    "Links are the maker's figures."
)
_PLANNING = (
    "Processor time of one thread: each step is planned three times, and its median counts. 512 documents on 4x4 are "
    "six sets at three capacities, 8,192 on 64x16 six sets at 128K. Where memory is short (a step then "
    "recomputes, or shares documents to save memory), several steps of recomputation are planned: that takes longer."
)
TUNED = ("packed", "balanced", "dynamic_cp", "sliced", "micropack")


def main(arguments: list[str] | None = None) -> int:
    fresh = {PAGE: lambda _: page(load_newest(), load_exact())}
    fresh |= {path: lambda before: sections.told(before, load_newest()) for path in TOLD}
    return max(
        pages.write("benchmarks.plan.table", __doc__, path, of, arguments) for path, of in fresh.items()
    )


def page(result: dict[str, Any], solved: dict[str, Any] | None = None) -> str:
    cells = tuned(result)
    parts = [
        *_beginning(result, cells),
        "## Methods",
        _methods(cells),
        "Step time over the plan's own bound, where the method fits; bubble, imbalance (busiest rank over the mean), "
        "peak memory and planning time are medians. Planning time is of this process alone while another ran beside "
        "it. *Doesn't fit*: memory holds no plan of the method, even with recomputation.",
        "## Speed-up of micropack",
        _by_mesh(cells),
        "Median (least to most) of the cells that both fit, by capacity and dp x pp. Packs as users run them are "
        "shown where every rank has a pack.",
        _by_set(cells),
        "## What each idea brings",
        _ablation(records_of(result, "ablation")),
        "Step time without the idea over step time with it: median (least to most) of 24 cells each: 512 documents "
        "of six sets, 128K and 256K, 7B, tp 8, on 4x4 and 8x8. Below 1 the idea would have been better left out. "
        "*Tuning* and *balancing* are of packs of whole documents, which slicing then takes apart. *Exact solving* "
        "is tried in six cells.",
        *sections.asymmetry(records_of(result, "ablation")),
        "## Planning times",
        _planning(records_of(result, "times")),
        "## Equal rates",
        _equal(records_of(result, "equal_rates")),
        *(("## Exact solvers", table(EXACT_HEAD, exact(solved)), exact_words(solved)) if solved else ()),
        "## Interleaved stages",
        _interleaved(result),
        "Several chunks of layers a GPU fill a pipeline sooner, which helps most where a step has little work beside "
        "filling. Over one: step time with one chunk a GPU over that with more, median (least to most), of the cells "
        "that fit both ways. *Tuned* is each cell at the number that suits the method, which is what counts "
        "everywhere else on this page, save under *what each idea brings* and *equal rates*: there it is one.",
        "## Worst cells",
        "Furthest from their own bound:",
        _worst(cells, lambda record: record["methods"][_CHIEF].get("ratio", 0.0)),
        "Nearest to, or behind, the best other method:",
        _worst(cells, lambda record: -min((v for n in OTHERS if (v := speedup(record, n))), default=1e9)),
        "## Every cell",
        "Step time of micropack, its ratio to its own bound, and its speed-up over the others; - where a plan "
        "doesn't fit.",
        _cells(sorted(cells, key=lambda record: str(record["key"]))),
    ]
    return "\n\n".join(parts) + "\n"


def _beginning(result: dict[str, Any], cells: list[Record]) -> list[str]:
    held = result["machine"]
    return [
        "# Planning: results",
        "For people who compare ways of planning a step. Written by `python -m benchmarks.plan.table` from the "
        "newest file of `make bench-plan`; nothing here is typed. Simulated: no GPU ran. Every method plans the same "
        "steps; one simulator runs all plans, at the same "
        "rates, with the same memory. Every method is at the best setting that the simulator finds for it in each "
        "cell: context parallelism, capacity, number of micro-batches, assignment to ranks, order, split backward, "
        "and in every third cell 1, 2 or 3 chunks of layers a GPU (interleaved stages); all but `packed, as users "
        "run it`, which is best-fit-decreasing at the capacity, dealt round robin, 1F1B.",
        f"Last run on {result['date']}: {held['cores']} cores, Python {held['python']}, varlen "
        f"{result['versions']['varlen']}; below stands for each part when and on what it was run, and the "
        f"machine's load meanwhile. Of the grid: {len(cells):,} of {result['total_cells']:,} cells, drawn the same "
        "way every time (`benchmarks/plan/grid.py`): of each set and mesh as many, with capacities, numbers of "
        "documents, models and seeds taking turns.",
        table(RUNS_HEAD, runs(result)),
        _FAIR,
        "## Over the best other method",
        _over_best(cells, records_of(result, "hidden")),
        "Step time of the other method over that of micropack, by dp x pp. The best other method is the fastest of "
        "the tuned ones in each cell; deciles are of cells.",
        _best_others(cells, records_of(result, "hidden")),
        "In how many cells each is the best other method, and with which context parallelism.",
        *sections.published(result),
        *sections.errors(result),
        *sections.delayed(result),
        *sections.sharding(result),
        "## Targets",
        table(
            ("what must hold", "found", "target", "cells", "met"),
            (_verdict(found) for found in verdicts(result)),
        ),
        "A cell is large enough with at least 10 (pp - 1) 2,048 tokens a data-parallel rank. A plan's *own bound* "
        "counts work at the highest rates over all rows, without launches; filling the pipeline with a unit of 2,048 "
        "rows is part of it (at equal rates a plan that begins with fewer rows may be a little below), and so is "
        "what the plan recomputes: a plan that recomputes more, to fit or because it is faster so, has more to do. "
        "`varlen plan` prints another one, *over bound*, which is one for all methods: no plan recomputes less than "
        "it counts, and pipelines fill with a single row. It is lower, so that a plan stands further above it.",
    ]


def _over_best(cells: list[Record], hidden: list[Record]) -> str:
    """Return the distribution of step times over micropack's, of the best other method and of tuned packs."""
    rows = []
    for exchanges, records in (("as measured", cells), ("hidden", hidden)):
        for low, high, text in (
            (0, LARGE_MESH, f"below {LARGE_MESH}"),
            (LARGE_MESH, 10**6, f"{LARGE_MESH} and more"),
        ):
            some = [r for r in records if low <= r["cell"]["dp"] * r["cell"]["pp"] < high]
            for title, values in (
                ("best other", over_best_other(some)),
                ("packed, tuned", speedups(some, "packed")),
            ):
                found = [number(value) for value in deciles(values)]
                rows.append((f"{title}, exchanges {exchanges}, {text}", f"{len(values)}", *found))
    return table(("over", "cells", *DECILES), rows)


def _best_others(cells: list[Record], hidden: list[Record]) -> str:
    rows = []
    for exchanges, records in (("as measured", cells), ("hidden", hidden)):
        best = [(found[0], record) for record in records if (found := best_other(record))]
        for name in TUNED_OTHERS:
            degrees = [record["methods"][name].get("cp", 1) for other, record in best if other == name]
            counts = ", ".join(f"{degrees.count(cp)} at cp {cp}" for cp in sorted(set(degrees)))
            rows.append((f"{TITLES[name]}, exchanges {exchanges}", f"{len(degrees)}", counts or "-"))
    return table(("method", "cells", "context parallelism"), rows)


def _verdict(found: Verdict) -> tuple[str, ...]:
    sign = "at least" if found.is_least else "at most"
    met = {True: "yes", False: "**no**", None: "not run"}[found.met]
    return (
        found.what,
        number(found.value, found.unit, digits=4),
        f"{sign} {number(found.target, found.unit, digits=4)}",
        f"{found.cells:,}",
        met,
    )


def _methods(cells: list[Record]) -> str:
    rows = []
    for name, title in TITLES.items():
        figures = [record["methods"].get(name, {}) for record in cells]
        fitting = [figure for figure in figures if "step_s" in figure]
        columns = ("bubble", "imbalance", "peak_gb", "planning_s")
        medians = (number(middle([figure[column] for figure in fitting])) for column in columns)
        over = spread(ratios(cells, name)), spread(ratios(_large(cells), name))
        rows.append((title, *over, *medians, f"{len(figures) - len(fitting)}"))
    head = ("method", "over own bound, all cells", "large enough cells", "bubble", "imbalance", "peak GB")
    return table((*head, "planning s", "doesn't fit"), rows)


def _large(cells: list[Record]) -> list[Record]:
    return [record for record in cells if record["is_large"]]


def _beside_others(cells: list[Record]) -> list[str]:
    """Return speed-ups over all other methods, and the step time over the own bound."""
    return [*(spread(speedups(cells, name)) for name in OTHERS), spread(ratios(cells))]


_OTHERS_HEAD = (*(TITLES[name] for name in OTHERS), "over own bound")


def _by_mesh(cells: list[Record]) -> str:
    rows = []
    for capacity in sorted({record["cell"]["capacity"] for record in cells}):
        of_capacity = [record for record in cells if record["cell"]["capacity"] == capacity]
        for low, high, text in ((0, 32, "below 32"), (32, 64, "32 to 63"), (64, 10**6, "64 and more")):
            some = [r for r in of_capacity if low <= r["cell"]["dp"] * r["cell"]["pp"] < high]
            rows.append([f"{capacity // 1024}K, {text}", f"{len(some)}", *_beside_others(some)])
    return table(("capacity, dp x pp", "cells", *_OTHERS_HEAD), rows)


def _by_set(cells: list[Record]) -> str:
    """Return speed-ups by set, and what truncation took."""
    groups: dict[tuple[str, int], list[Record]] = {}
    for record in cells:
        groups.setdefault((record["cell"]["lengths"], record["cell"]["capacity"]), []).append(record)
    rows = []
    names, capacities = ({key[at] for key in groups} for at in (0, 1))
    for name, capacity in itertools.product(sorted(names), sorted(capacities)):
        some = groups.get((name, capacity), [])
        if not some:
            continue
        lost = middle([100 * record["truncated_share"] for record in some])
        rows.append([f"{name}, {capacity // 1024}K", f"{number(lost)} %", *_beside_others(some)])
    return table(("set, capacity", "truncated", *_OTHERS_HEAD), rows)


def _ablation(records: list[Record]) -> str:
    settings = list(dict.fromkeys(record["setting"] for record in records))
    pairs = {
        "tuning": ("as_run", "packed"),
        "balance": ("packed", "balanced"),
        **{name: (name, "everything") for name in ABLATION_TITLES if name not in ("tuning", "balance")},
        "exact solving": ("everything", "exact solving"),
    }
    rows = []
    for idea, title in ABLATION_TITLES.items():
        without, with_it = pairs[idea]
        row = [title]
        for setting in settings:
            plans = [record["plans"] for record in records if record["setting"] == setting]
            both = [p for p in plans if "step_s" in p.get(without, {}) and "step_s" in p.get(with_it, {})]
            row.append(spread([p[without]["step_s"] / p[with_it]["step_s"] for p in both]))
        rows.append(row)
    return table(("idea", *settings), rows)


def _planning(records: list[Record]) -> str:
    """Return a row a model and tp: median and worst planning time, and how many take too long; and what they are."""
    rows = []
    for record in records:
        taken, limit = step_times(record), PLANNING_S[record["size"]]
        more = sum(step["recompute"] != "none" for step in record["steps"])
        rows.append(
            (
                f"{record['size']}, {record['model']}, tp {record['tp']}",
                f"{len(taken)}",
                f"{more}",
                f"{1e3 * median(taken):,.0f}",
                f"{1e3 * max(taken):,.0f}",
                f"{sum(seconds > limit for seconds in taken)} over {1e3 * limit:,.0f}",
            )
        )
    shown = table(("steps", "number", "recompute", "median ms", "worst ms", "too long"), rows)
    return f"{shown}\n\n{_PLANNING}"


def _equal(records: list[Record]) -> str:
    rows = []
    for capacity in sorted({record["cell"]["capacity"] for record in records}):
        some = [record for record in records if record["cell"]["capacity"] == capacity]
        row = (f"{capacity // 1024}K, 4x4, 7B", f"{len(some)}", spread(ratios(some)))
        rows.append((*row, spread(speedups(some, "packed"))))
    return table(("cells", "number", "over own bound", "speed-up over packed, tuned"), rows)


def _interleaved(result: dict[str, Any]) -> str:
    ones, best = records_of(result, "grid"), tuned(result)
    woven = {record["key"]: record for record in records_of(result, "interleaved")}
    rows = [("1", ones)]
    for count in MORE_CHUNKS:
        found = [(record, woven.get(f"{record['key']}/virtual_stages={count}")) for record in ones]
        more = [{**record, "methods": other["methods"]} for record, other in found if other]
        rows.append((str(count), more))
    rows.append(("tuned", best))
    return table(
        (
            "chunks a GPU",
            "cells",
            "over own bound, large enough",
            *(f"over one, {TITLES[name]}" for name in TUNED),
        ),
        (
            (
                title,
                f"{len(cells)}",
                spread(ratios(_large(cells))),
                *(spread(_over_one(cells, ones, name)) for name in TUNED),
            )
            for title, cells in rows
        ),
    )


def _over_one(cells: list[Record], ones: list[Record], name: str) -> list[float]:
    """Return a method's step time with one chunk of layers a GPU over that of some records of the same cells."""
    first = {record["key"]: record["methods"].get(name, {}) for record in ones}
    pairs = [(first[record["key"]], record["methods"].get(name, {})) for record in cells]
    return [one["step_s"] / other["step_s"] for one, other in pairs if "step_s" in one and "step_s" in other]


def _worst(cells: list[Record], badness: Any) -> str:
    fitting = [record for record in cells if "step_s" in record["methods"][_CHIEF]]
    return _cells(sorted(fitting, key=badness, reverse=True)[:WORST])


def _recomputed(figures: dict[str, Any]) -> str:
    share = figures.get("recompute_share", 1)
    text = f"{figures.get('recompute', '-')}" + (f", {share:.0%} of layers" if share < 1 else "")
    return text + (" + offload" if figures.get("offload", "none") != "none" else "")


def _cells(records: list[Record]) -> str:
    rows = []
    for record in records:
        ours = record["methods"][_CHIEF]
        seconds = f"{number(ours.get('step_s'))} s" if "step_s" in ours else "-"
        row = [record["key"].replace("/", ", "), f"{record['tokens'] / 1e6:.2f} M", seconds]
        row += [number(ours.get("ratio")), number(ours.get("bubble")), _recomputed(ours)]
        rows.append([*row, *(number(speedup(record, name)) for name in OTHERS)])
    head = ("cell", "tokens", "step", "over own bound", "bubble", "recompute")
    return table((*head, *(TITLES[name] for name in OTHERS)), rows)


if __name__ == "__main__":
    sys.exit(main())

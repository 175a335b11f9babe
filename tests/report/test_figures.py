"""Figures on the pages of `varlen plan` and `varlen inspect`, and on a terminal, are those of `--json`."""

import random
import re
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.printed import Page, cells_of, differ, figures, plain, printed, unknown
from tests.support.rarely import examples, mostly

from varlen.cost.hardware import Hardware
from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape
from varlen.report.inspect_page import inspect_page
from varlen.report.inspection import SHORT_TITLES, inspect_lengths, inspect_table
from varlen.report.plan import TITLES, compare, step_documents
from varlen.report.plan_page import plan_page
from varlen.report.plan_sweep import sweep, sweep_table
from varlen.report.plan_table import plan_table
from varlen.step_plan import Mesh

UNBROKEN = 3_000
"""A width of a terminal at which no line breaks."""
BILLION = [r"10⁹"]


# --- plans ---

GIVES = {
    "cp": "cp",
    "step": "step_s",
    "times the fastest": "fastest_ratio",
    "over bound": "lower_bound_ratio",
    "tokens/s and GPU": "tokens_per_s_and_gpu",
    "MFU": "mfu",
    "GPU-hours per 10⁹": "gpu_hours_per_billion_tokens",
}
TAKES = {
    "computing": "computing_ratio",
    "exposed": "exposed_ratio",
    "bubble": "bubble_ratio",
    "imbalance": "imbalance",
    "peak": "peak_bytes",
    "recompute": "recompute_share",
    "planned in": "planning_s",
}
CHOICES = {
    "step": "step_s",
    "change": "change",
    "MFU": "mfu",
    "peak": "peak_bytes",
    "recompute": "recompute_share",
}
CASES = {
    "usual": {},
    "a price, no truncation": {"seed": 1, "price": 2.35, "capacity": 65_536},
    "little memory": {
        "seed": 2,
        "dp": 1,
        "pp": 3,
        "model": "llama-2-70b",
        "documents": 12,
        "capacity": 16_384,
    },
    "one GPU": {"seed": 3, "dp": 1, "pp": 1, "tp": 1, "documents": 6, "hardware": "b200"},
    "one rate": {"seed": 4, "mode": "flops", "dp": 4, "pp": 1, "alternatives": False},
}


@cache
def plans(name):
    """A comparison of plans, and what a reader of its JSON sees."""
    usual = {
        "seed": 0, "documents": 24, "capacity": 4_096, "dp": 2, "pp": 2, "tp": 8, "model": "llama-2-7b",
        "hardware": "h100", "mode": "calibrated", "price": None, "alternatives": True,
    }  # fmt: skip
    case = usual | CASES[name]
    lengths = np.random.default_rng(case["seed"]).lognormal(7.5, 1.3, 40).clip(16, 40_000).astype(np.int64)
    documents = step_documents(
        lengths, documents=case["documents"], step=0, capacity=case["capacity"], seed=case["seed"]
    )
    cost = CostModel(
        model=ModelShape.named(case["model"]), hardware=Hardware.named(case["hardware"]), mode=case["mode"]
    )
    mesh = Mesh(dp=case["dp"], pp=case["pp"], tp=case["tp"])
    kept = {key: case[key] for key in ("price", "alternatives")}
    found = compare(documents, cost=cost, mesh=mesh, name="chats 7", **kept)
    return found, plain(found.to_json())


def wanted(row, names):
    """The values of a row of the JSON under some heads: a share of recomputed layers stands there if it isn't all."""
    return [
        None if key not in row or (key == "recompute_share" and row[key] == 1) else row[key]
        for key in names.values()
    ]


def rows_of_plans(tree):
    """Each table's heads, and its rows as the JSON has them, by title."""
    planned = [row for row in tree["methods"] if "refusal" not in row]
    methods = {TITLES[row["method"]]: row for row in planned}
    choices = {"as planned": planned[0] | {"change": 0.0}}
    choices |= {row["choice"]: row for row in tree["alternatives"]}
    found = [(GIVES, methods), (TAKES, methods)]
    return [*found, (CHOICES, choices)] if tree["alternatives"] else found


def wrong_on_plan_page(page, tree):
    """What of a page isn't in the JSON, or stands at another place."""
    read, wrong = Page(page), []
    for names, rows in rows_of_plans(tree):
        (table,) = read.table("", *names)
        wrong += [] if table.keys() == rows.keys() else [(names, table.keys() ^ rows.keys())]
        for title, row in rows.items():
            cells = table.get(title, [])
            wrong += [(title, differ(cells, wanted(row, names)))] if cells else []
    facts = [cell for rows in read.tables if rows[0][0] != "" for row in rows for cell in row]
    texts = unknown("\n".join([*read.texts, *facts]), tree, BILLION)
    return [one for one in wrong if one[1]] + texts


@pytest.mark.parametrize("name", CASES)
def test_every_figure_of_the_plan_page_is_in_the_json(name):
    found, tree = plans(name)

    assert wrong_on_plan_page(plan_page(found), tree) == []


@pytest.mark.parametrize("name", CASES)
def test_every_figure_that_is_printed_about_plans_is_in_the_json(name):
    found, tree = plans(name)

    text = printed(plan_table(found), UNBROKEN)

    places = {}
    for names, rows in rows_of_plans(tree):
        for title, row in rows.items():
            place = places[title] = places.get(title, -1) + 1
            cells = cells_of(text, title)[place]
            values = [value for value in wanted(row, names) if value is not None]
            assert len(cells) == len(values), (title, names)
            assert [(one, value) for one, value in zip(cells, values) if not one.is_of(value)] == []
    assert unknown(text, tree, BILLION) == []


def test_what_the_fastest_plan_costs_stands_beside_its_json():
    found, tree = plans("a price, no truncation")
    (best, other, *_) = tree["methods"]

    facts = {row[0]: row[1] for rows in Page(plan_page(found)).tables for row in rows if len(row) == 2}

    assert differ([facts["memory"].partition(" on ")[0]], [best["peak_bytes"]]) == []
    assert [one.is_of(value) for one, value in zip(figures(facts["memory"]), [
        best["peak_bytes"], tree["limit_bytes"], tree["kept_free_bytes"], tree["memory_bytes"],
    ], strict=True)] == [True] * 4  # fmt: skip
    hours = [row["gpu_hours_per_billion_tokens"] for row in (best, other)]
    prices = [row["cost_per_billion_tokens"] for row in (best, other)]
    words = facts["GPU-hours"].replace("10⁹", "") + facts["price"].replace("10⁹", "")
    values = [best["gpu_hours"], *hours, prices[0], 2.35, prices[1]]
    shown = figures(re.sub(r"at cp \d+", "", words))
    assert [one.is_of(value) for one, value in zip(shown, values, strict=True)] == [True] * 6
    assert prices == [pytest.approx(2.35 * value) for value in hours]


def test_the_json_of_plans_agrees_with_itself():
    for name in CASES:
        _, tree = plans(name)
        best = tree["methods"][0]
        for row in [*tree["methods"], *tree["alternatives"]]:
            if "refusal" in row:
                continue
            step_s, gpus = row["step_s"], tree["gpus"]
            assert row["mfu"] == pytest.approx(tree["model_flops"] / (step_s * tree["peak_flops"]))
            assert row["tokens_per_s_and_gpu"] == pytest.approx(tree["tokens"] / step_s / gpus)
            assert row["gpu_hours"] == pytest.approx(step_s * gpus / 3600)
            assert row["gpu_hours_per_billion_tokens"] == pytest.approx(
                1e9 / row["tokens_per_s_and_gpu"] / 3600
            )
            assert row["fastest_ratio"] == pytest.approx(step_s / best["step_s"])
            assert row["lower_bound_ratio"] == pytest.approx(step_s / tree["lower_bound_s"])
            parts = row["computing_ratio"] + row["exposed_ratio"] + row["bubble_ratio"]
            assert parts == pytest.approx(1)
            assert row["margin_bytes"] == tree["limit_bytes"] - row["peak_bytes"] >= 0
            assert (row["recomputed_ratio"] > 0) == (row["recompute"] == "full")


def test_every_figure_of_a_sweep_is_in_the_json():
    lengths = np.random.default_rng(0).lognormal(7.5, 1.3, 40).clip(16, 40_000).astype(np.int64)
    steps = [step_documents(lengths, documents=20, step=0, capacity=size, seed=0) for size in (2_048, 4_096)]
    cost = CostModel(model=ModelShape.named("llama-2-7b"), hardware=Hardware.named("h100"))

    found = sweep(steps, cost=cost, num_gpus=4, price=1.9)
    tree = plain(found.to_json())

    lines = printed(sweep_table(found), UNBROKEN).splitlines()
    first = next(number for number, line in enumerate(lines) if line.split()[:2] == ["dp", "pp"]) + 1
    sizes = ("capacity",) * (len({row["capacity"] for row in tree["best"]}) > 1)
    keys = (
        *sizes,
        "step_s",
        "tokens_per_s_and_gpu",
        "mfu",
        "bubble_ratio",
        "exposed_ratio",
        "peak_bytes",
    )
    for line, row in zip(lines[first:], tree["best"]):
        shown = figures(line.replace("×", " "))
        chunks = [row["virtual_stages"]] if row["virtual_stages"] > 1 else []
        values = [row["dp"], row["pp"], *chunks, row["cp"], row["tp"], *(row[key] for key in keys)]
        assert [one.is_of(value) for one, value in zip(shown, values)] == [True] * len(values), line
    text = "\n".join(line for line in lines if "--virtual-stages" not in line)
    assert unknown(text, tree, [*BILLION, r"\d+×\d+"]) == []


# --- inspections ---

BY_CAPACITY = {
    "documents longer": lambda at, _: at["overlong_documents"],
    "of all documents": lambda at, _: at["overlong_share"],
    "tokens beyond it, lost by truncating": lambda at, _: at["truncation_share"],
    "tokens lost by dropping": lambda at, _: at["dropping_share"],
    "supervised tokens lost by dropping": lambda at, _: of(at, "axolotl_multipack")["lost_targets_share"],
    "documents cut by wrapping": lambda at, _: of(at, "wrapped")["cut_share"],
    "packs, as advised": lambda at, advised: packs(of(at, advised)),
    "padding in them": lambda at, advised: of(at, advised)["padding_share"],
    "work of the heaviest over the mean": lambda at, advised: of(at, advised)["work_imbalance"],
}
DETAILS = {
    "documents": "documents",
    "packs": "packs",
    "fill": "fill",
    "tokens lost": "lost_share",
    "documents cut": "cut_share",
    "dropped": "dropped_share",
    "work, max / mean": "work_imbalance",
    "attention, max / mean": "attention_imbalance",
    "likeness of lengths": "length_correlation",
}
FILES = {
    "documents": "documents",
    "tokens": "tokens",
    "of all": "tokens_share",
    "median": "median",
    "longest": "longest",
    "longer": "overlong_documents",
    "beyond": "truncation_share",
}
EXPLANATIONS = [
    r"longest 1 % of", r"90 %(, 99 % are)? up to", r"99 % up to", r"width 4,096", r"begin at 0", r"and [\d,]+ more",
    r"steps have 8 packs", r"at most 10,000 documents or about 4,000 packs", r"0 where packs are random, 1 where",
    r"groups of 100,000 documents, at most 200",
]  # fmt: skip
"""What the pages and the terminal say of the way in which was measured."""


def of(at, name):
    return next(row for row in at["packings"] if row["name"] == name)


def packs(row):
    return row["packs"] if row["estimated_packs"] is None else row["estimated_packs"]


def fills(tree, name):
    return [row["fill"] if row["packs"] else None for row in (of(at, name) for at in tree["capacities"])]


def wrong_on_inspect_page(page, tree):
    """What of a page isn't in the JSON, or stands at another place."""
    read, wrong = Page(page), []

    def compare_(title, cells, values, key=""):
        wrong.extend((title, one) for one in differ(cells, values, key))

    capacities = [f"{at['capacity']:,}" for at in tree["capacities"]]
    fill, costs = read.table("", *capacities)
    for row in tree["capacities"][0]["packings"]:
        compare_(row["title"], fill[row["title"]], fills(tree, row["name"]), "fill")
    for title, cells in costs.items():
        value = BY_CAPACITY[title]
        compare_(title, cells, [value(at, tree["advice"]["packing"]) for at in tree["capacities"]])
    (padding,) = read.table("", "tokens", "slots", "padding", "slots per token", "packing saves")
    for way in tree["padding"]:
        keys = ("tokens", "slots", "padding_share", "slots_per_token", "saved_share")
        compare_(way["title"], padding[way["title"]], [way[key] for key in keys])
    for at, table in zip(tree["capacities"], read.table("", *DETAILS), strict=True):
        for row in at["packings"]:
            values = row | {"packs": packs(row), "fill": None}
            cells = table[row["title"]]
            compare_(
                row["title"],
                cells[:2] + cells[3:],
                [values[key] for key in DETAILS.values() if key != "fill"],
            )
            compare_(row["title"], cells[2:3], [row["fill"] if row["packs"] else None], "fill")
    for table in read.table("", *FILES):
        for one in tree["sources"]:
            compare_(one["name"], table[one["name"]], [one[key] for key in FILES.values()])
    facts = [cell for rows in read.tables if rows[0][0] != "" for row in rows for cell in row]
    return wrong + unknown("\n".join([*read.texts, *facts]), tree, EXPLANATIONS)


LENGTHS = st.one_of(
    st.lists(st.integers(0, 400), min_size=1, max_size=200).filter(any),
    st.integers(0, 2**31).map(lambda seed: np.random.default_rng(seed).lognormal(5, 1, 400).astype(int) + 1),
)


@st.composite
def inspections(draw):
    """An inspection of random lengths, and what a reader of its JSON sees."""
    lengths = np.array(draw(LENGTHS))
    cuts = sorted(draw(st.lists(st.integers(0, lengths.size), max_size=3)))
    bounds = [0, *cuts, lengths.size]
    files = [(f"part {number}.jsonl", int(b - a)) for number, (a, b) in enumerate(zip(bounds, bounds[1:]))]
    found = inspect_lengths(
        lengths,
        capacities=draw(st.sampled_from([None, [64], [100, 1_000], [16, 300, 4_096]])),
        targets=draw(st.sampled_from([None, lengths // 3])),
        batch_documents=draw(st.integers(1, 9)),
        name="chats 7",
        arguments=draw(st.sampled_from([(), ("chats.jsonl", "-o", "packed")])),
        sources=files,
    )
    return found, plain(found.to_json())


@examples(12, 300)
@given(inspections())
def test_every_figure_of_the_inspect_page_is_in_the_json(inspection):
    found, tree = inspection

    assert wrong_on_inspect_page(inspect_page(found), tree) == []


@examples(12, 300)
@given(inspections())
def test_every_figure_that_is_printed_about_lengths_is_in_the_json(inspection):
    found, tree = inspection

    text = printed(inspect_table(found), UNBROKEN)

    advised = next(at for at in tree["capacities"] if at["capacity"] == tree["advice"]["capacity"])
    keys = ("lost_share", "work_imbalance", "attention_imbalance", "length_correlation")
    for row in advised["packings"]:
        *_, fill, details = cells_of(text, SHORT_TITLES.get(row["name"], row["title"]))
        known = [value for value in fills(tree, row["name"]) if value is not None]
        assert [one.is_of(value, "fill") for one, value in zip(fill, known, strict=True)] == [True] * len(
            known
        )
        values = [packs(row), *([row["fill"]] if row["packs"] else []), *(row[key] for key in keys)]
        checked = zip(details, values, strict=True)
        assert all(one.is_of(value, "fill" if value == row["fill"] else "") for one, value in checked), row[
            "title"
        ]
    for title, value in BY_CAPACITY.items():
        for cells in cells_of(text, title):
            values = [value(at, tree["advice"]["packing"]) for at in tree["capacities"]]
            assert [one.is_of(wanted) for one, wanted in zip(cells, values, strict=True)] == [True] * len(
                values
            )
    for one in tree["sources"] if len(tree["sources"]) > 1 else ():
        (cells,) = cells_of(text, one["name"])
        values = [one[key] for key in FILES.values()]
        assert [shown.is_of(value) for shown, value in zip(cells, values, strict=True)] == [True] * len(
            values
        )
    assert unknown(text, tree, EXPLANATIONS) == []


# --- what these tests find ---


def changed(page, seed):
    """The page with a digit of one cell of a table changed, and that cell."""
    rows = re.finditer(r'<tr class="[^"]*"><th.*?</tr>', page)
    cells = [
        (row.start() + cell.start(1), cell[1])
        for row in rows
        for cell in re.finditer(r"<td[^>]*>([^<]*)</td>", row[0])
        if figures(cell[1])
    ]
    start, cell = random.Random(seed).choice(cells)
    at = start + re.search(r"\d", cell).start()
    return page[:at] + str((int(page[at]) + 1) % 10) + page[at + 1 :], cell


@pytest.mark.parametrize("seed", mostly(range(8), range(200)))
def test_a_figure_that_is_changed_is_found(seed):
    found, tree = plans("usual")
    inspection = inspect_lengths(
        np.random.default_rng(0).lognormal(5, 1, 500).astype(int) + 1, capacities=[512]
    )
    for page, whole, wrong in (
        (plan_page(found), tree, wrong_on_plan_page),
        (inspect_page(inspection), plain(inspection.to_json()), wrong_on_inspect_page),
    ):
        assert wrong(page, whole) == []
        other, cell = changed(page, seed)
        assert wrong(other, whole), cell

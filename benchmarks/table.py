"""The tables of docs/benchmarks.md from the newest result file; needs nothing but Python.

`python -m benchmarks.table` rewrites the part between the markers; `--check` only says whether it is up to
date, with exit code 1 if not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.records import RESULTS, ROOT, newest
from benchmarks.rows import Contestant, Limit, Race, Row, from_json

PAGE = ROOT / "docs" / "benchmarks.md"
START = "<!-- benchmarks: start, written by `python -m benchmarks.table` -->"
END = "<!-- benchmarks: end -->"

TITLES = {
    "packing": "Packing",
    "padded": "Padded batches",
    "collating": "Collating",
    "adapters": "By frameworks' names",
    "scale": "A hundred million lengths",
    "feed_scale": "A thousand million documents to train on",
    "demo": "The demo",
    "windows": "Packing by windows",
    "reading": "Reading and tokenizing",
    "chats": "Chats",
    "offline": "Packing files",
    "fast_axolotl": "fast-axolotl",
    "megatron": "Megatron",
    "utilization": "Utilization",
    "feeding": "Feeding",
    "startup": "Starting up",
}


def main(arguments: list[str] | None = None) -> int:
    def fresh(page: str) -> str:
        return spliced(page, render(*results(RESULTS)))

    return pages.write("benchmarks.table", __doc__, PAGE, fresh, arguments)


def results(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the newest result of all sections, and by section those that were measured apart since.

    A section that was run alone has its own results in a folder of its name.
    """
    whole = json.loads(newest(folder).read_text())
    measured = {row["section"] for row in whole["rows"]}
    apart = {}
    for section in TITLES:
        if (folder / section).is_dir():
            alone = json.loads(newest(folder / section).read_text())
            if section not in measured or alone["date"] > whole["date"]:
                apart[section] = alone
    return whole, apart


def spliced(page: str, part: str) -> str:
    """Return the page with the part between its markers replaced."""
    if page.count(START) != 1 or page.count(END) != 1 or page.index(START) > page.index(END):
        raise ValueError(f"the page must hold {START!r} and then {END!r}, once each")
    head, _, rest = page.partition(START)
    return f"{head}{START}\n\n{part}\n{END}{rest.partition(END)[2]}"


def render(result: dict[str, Any], apart: Mapping[str, dict[str, Any]] | None = None) -> str:
    """Return the markdown for one result file: where it was measured, the score, and a table a section.

    Sections in `apart` are shown from results of their own, each with its own origin.
    """
    apart = apart or {}
    rows = [from_json(row) for row in result["rows"] if row["section"] not in apart]
    others = {name: [from_json(row) for row in alone["rows"]] for name, alone in apart.items()}
    parts = [_origin(result), _score([*rows, *(row for alone in others.values() for row in alone)])]
    for section, title in TITLES.items():
        mine = others.get(section) or [row for row in rows if row.section == section]
        if not mine:
            continue
        origin = f"This section apart. {_origin(apart[section])}\n\n" if section in apart else ""
        parts.append(f"### {title}\n\n{origin}{table(mine)}")
    absent = [*result.get("absent", []), *(entry for alone in apart.values() for entry in alone["absent"])]
    if absent:
        parts.append(
            "### Not measured\n\n" + "\n".join(f"- {entry['what']}: {entry['why']}" for entry in absent)
        )
    return "\n\n".join(parts) + "\n"


def table(rows: Iterable[Row]) -> str:
    listed = list(rows)
    races = [row for row in listed if isinstance(row, Race)]
    limits = worst_of_groups([row for row in listed if isinstance(row, Limit)])
    lines = []
    if races:
        has_fill = any(row.peer.fill is not None for row in races)
        fill = " fill, ours / theirs |" if has_fill else ""
        lines += [
            f"| what | varlen | peer | ratio |{fill} target | met |",
            "|---|---|---|---:|" + "---|" * (2 + has_fill),
        ]
        lines += [race_line(row, has_fill) for row in races]
    if limits:
        if lines:
            lines.append("")
        lines += ["| what | measured | limit | met |", "|---|---:|---:|---|"]
        lines += [limit_line(row) for row in limits]
    return "\n".join(lines)


def race_line(row: Race, has_fill: bool) -> str:
    cells = [
        row.what + (f" ({row.note})" if row.note else ""),
        f"`{row.ours.call}`<br>{_times(row.ours, row.tokens)}",
        f"{row.peer.name}: {row.peer.call}<br>{_times(row.peer, row.tokens)}",
        f"{ratio_text(row.ratio)}",
    ]
    if has_fill:
        fills = (row.ours.fill, row.peer.fill)
        texts = ["" if fill is None else f"{100 * fill:.3f} %" for fill in fills]
        cells.append(" / ".join(texts) if any(texts) else "")
    cells += ["" if row.target is None else ratio_text(row.target), verdict(row.met)]
    return "| " + " | ".join(cells) + " |"


def limit_line(row: Limit) -> str:
    measured = quantity(row.value, row.unit)
    if len(row.samples) > 1:
        measured += f" ({quantity(min(row.samples), row.unit)} to {quantity(max(row.samples), row.unit)})"
    if row.base is not None:
        measured += f", against {quantity(row.base, row.unit)} ({100 * (row.value / row.base - 1):+.3f} %)"
    limit = row.limit_text or ("" if row.limit is None else quantity(row.limit, row.unit))
    what = row.what + (f" ({row.note})" if row.note else "")
    return f"| {what} | {measured} | {limit} | {verdict(row.met)} |"


def verdict(met: bool | None) -> str:
    return "" if met is None else ("yes" if met else "**no**")


def ratio_text(ratio: float) -> str:
    """Return a ratio with three digits that count."""
    return f"{ratio:,.0f}x" if ratio >= 100 else f"{ratio:.3g}x"


def quantity(value: float, unit: str) -> str:
    if unit == "s":
        for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if value >= scale:
                return f"{value / scale:.3g} {name}"
        return f"{value / 1e-6:.3g} µs"
    if unit == "packs":
        return f"{value:,.0f} packs"
    return f"{value:.3g} {unit}"


def _times(contestant: Contestant, tokens: int | None) -> str:
    walls = contestant.samples.wall_s
    middle = contestant.samples.median_s
    text = quantity(middle, "s")
    if len(walls) > 1:
        text += f" ({quantity(min(walls), 's')} to {quantity(max(walls), 's')})"
    if tokens is None:
        return text
    rate = tokens / middle
    return f"{text}, {rate / 1e6:,.3g} M tokens/s" if rate >= 1e6 else f"{text}, {rate:,.0f} tokens/s"


def _origin(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], dict(result["versions"])
    ours = f"varlen {versions.pop('varlen')} ({versions.pop('commit')})"
    others = ", ".join(f"{name} {version}" for name, version in versions.items())
    load = " to ".join(str(value) for value in result["load"])
    return (
        f"Measured on {result['date']}: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, {machine['system']}, Python {machine['python']}. {ours}; {others}. "
        f"One core and one thread each, where not said otherwise; load of the machine from start to end {load}."
    )


def _score(rows: list[Row]) -> str:
    """Say how many targets were reached, and name those that were not."""
    judged = [row for row in rows if row.met is not None]
    missed = [row for row in judged if not row.met]
    text = f"**{len(judged) - len(missed)} of {len(judged)} targets met.**"
    if missed:
        text += " Missed: " + "; ".join(_title(row) for row in missed) + "."
    return text


def _title(row: Row) -> str:
    if isinstance(row, Limit):
        return f"{row.what} ({quantity(row.value, row.unit)})"
    ratios = f"{ratio_text(row.ratio)} of {ratio_text(row.target or 0)}"
    return f"{row.what} against {row.peer.name} ({ratios})"


def worst_of_groups(limits: list[Limit]) -> list[Limit]:
    """Return rows without a group, and of each group the one furthest over, or least under, its limit."""
    kept: dict[object, Limit] = {}
    for number, row in enumerate(limits):
        key = row.group or number
        if key not in kept or _excess(row) > _excess(kept[key]):
            kept[key] = row
    return list(kept.values())


def _excess(row: Limit) -> float:
    """Return how far a value lies over its limit; negative under it."""
    return row.value - (row.limit if row.limit is not None else row.value)


if __name__ == "__main__":
    sys.exit(main())

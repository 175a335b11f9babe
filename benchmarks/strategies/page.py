"""The tables of docs/strategies.md from the newest result of the strategies; needs nothing but Python.

`python -m benchmarks.strategies.page` rewrites what stands between the page's markers; `--check` only says whether it
is up to date, with exit code 1 if not.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import pages
from benchmarks.pages import table
from benchmarks.records import ROOT
from benchmarks.strategies.figures import (
    BASE,
    FAMILIES,
    TITLES,
    Estimate,
    Speed,
    above_base,
    by_setting,
    differences,
    estimate,
    figures,
    largest_difference_of_step_losses,
    losses,
    newest,
    runs_of,
    speed,
)
from benchmarks.table import ratio_text

PAGE = ROOT / "docs" / "strategies.md"
ALIKE = ("offline", "sampled", "ours")
"""Strategies that pack, with as many tokens a step as a minibatch holds."""
_PART = re.compile(
    r"(?P<start><!-- (?P<name>\w+): written by `python -m benchmarks.strategies.page` -->\n)"
    r".*?(?P<end><!-- end -->)",
    re.DOTALL,
)


def main(arguments: list[str] | None = None) -> int:
    return pages.write(
        "benchmarks.strategies.page", __doc__, PAGE, lambda page: written(page, newest()), arguments
    )


def written(page: str, result: dict[str, Any]) -> str:
    return _PART.sub(lambda part: f"{part['start']}\n{TABLES[part['name']](result)}\n\n{part['end']}", page)


def signed(found: Estimate | None) -> str:
    """Return a difference with its interval; in bold where that leaves zero out."""
    if found is None:
        return ""
    text = f"{found.mean:+.3f}"
    if found.half_width is not None:
        text += f" ± {found.half_width:.3f}"
    return f"**{text}**" if found.is_clear else text


def _origin(result: dict[str, Any]) -> str:
    """Say on what and when everything was measured; parts may have been run on different days."""
    by_origin: dict[str, list[str]] = {}
    for name, part in result["parts"].items():
        told = f"{name} {part['seconds'] / 60:.0f} min (load {part['load'][0]} to {part['load'][1]})"
        by_origin.setdefault(_measured(part.get("measured", result)), []).append(told)
    return " ".join(
        f"Measured on {origin}. Parts, with the load average of the machine: {', '.join(parts)}."
        for origin, parts in by_origin.items()
    )


def _measured(origin: dict[str, Any]) -> str:
    held, versions = origin["machine"], origin["versions"]
    names = ("torch", "transformers", "trl", "peft", "axolotl", "datasets", "numpy")
    return (
        f"{origin['date']}: {held['cpu']}, {held['cores']} cores, {held['memory_gib']} GiB, "
        f"{held['system']}, Python {held['python']}; varlen {versions['varlen']} ({versions['commit']}), "
        + ", ".join(f"{name} {versions.get(name, 'absent')}" for name in names)
    )


def _sets(result: dict[str, Any]) -> str:
    head = (
        "set", "documents", "tokens, mean", "median", "longest", "std / mean", "cut", "capacity", "packs a step",
        "documents a minibatch", "validation",
    )  # fmt: skip
    return table(
        head,
        (
            (
                f"{name}: {of_set['title']}",
                f"{of_set['documents']:,}",
                f"{of_set['mean']:,.0f}",
                f"{of_set['median']:,.0f}",
                f"{of_set['longest']:,}",
                f"{of_set['variation']:.2f}",
                f"{100 * of_set['cut_share']:.1f} %",
                f"{of_set['capacity']:,}",
                f"{of_set['packs']}",
                f"{of_set['minibatch']}",
                f"{of_set['validation_documents']} documents",
            )
            for name, of_set in result["sets"].items()
        ),
    )


def _comparison(result: dict[str, Any], set_name: str) -> str:
    """Return the losses of one set: the base's as they are, all others as differences from it."""
    # Those that were trained.
    found = [family for family in FAMILIES if runs_of(result, set_name, family, BASE)]
    head = ["strategy", "steps", "tokens a step"]
    head += [f"{FAMILIES[family]}, equal {what}" for family in found for what in ("steps", "tokens")]
    rows = []
    for label, title in TITLES.items():
        runs = runs_of(result, set_name, found[0], label) if found else {}
        if not runs or label == "padding":
            continue
        least = min(run["step_tokens"][0] for run in runs.values())
        most = max(run["step_tokens"][1] for run in runs.values())
        steps = sorted({run["steps"] for run in runs.values()})
        row = [
            "padding; online minibatch" if label == BASE else title,
            str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}",
            f"{least:,} to {most:,}",
        ]
        for family in found:
            for what in ("steps", "tokens"):
                if label == BASE:
                    level = losses(result, set_name, family, label, what)
                    row.append(f"{level.mean:.3f}" if level else "")
                else:
                    row.append(signed(differences(result, set_name, family, label, what)))
        rows.append(row)
    return table(head, rows)


def _seeds(result: dict[str, Any]) -> str:
    """Say how many runs there are, after which step they are compared, and how well padding is matched."""
    counts = ", ".join(
        f"{len(runs_of(result, 'short', family, BASE))} of {title}" for family, title in FAMILIES.items()
    )
    at = {run["set"]: set() for run in figures(result, "comparison")}  # type: dict[str, set[int]]
    for run in figures(result, "comparison"):
        at[run["set"]].add(run["at_step"])
    steps = ", ".join(
        f"step {min(found)} to {max(found)}, by seed, on the {name} set"
        if len(found) > 1
        else f"step {min(found)} on the {name} set"
        for name, found in sorted(at.items(), reverse=True)
    )
    apart = largest_difference_of_step_losses(result)
    return (
        f"Seeds: {counts}. “Equal steps” means after {steps}. Online minibatches have the losses of padding: over "
        f"all steps trained both ways, the largest difference is {apart:.1e} nats."
    )


def _clear(result: dict[str, Any]) -> str:
    """Say which intervals of the strategies with equal tokens a step leave zero out, and how many would by chance."""
    found = [
        (label, set_name, family, what, one)
        for label in ALIKE
        for set_name in result["sets"]
        for family in FAMILIES
        for what in ("steps", "tokens")
        if (one := differences(result, set_name, family, label, what)) is not None
        and one.half_width is not None
    ]
    named = [
        f"{TITLES[label]} on {FAMILIES[family]}, {set_name} set, equal {what} ({signed(one).strip('*')})"
        for label, set_name, family, what, one in found
        if one.is_clear
    ]
    ends = [
        end
        for *_, what, one in found
        if what == "tokens"
        for end in (one.mean - (one.half_width or 0), one.mean + (one.half_width or 0))
    ]
    titles = ", ".join(TITLES[label] for label in ALIKE)
    return (
        f"Of the {len(found)} intervals of {titles}, chance alone would make about "
        f"{len(found) / 20:.0f} leave zero out. {len(named)} do: {'; '.join(named) or 'none'}. At equal tokens "
        f"all lie between {min(ends, default=0):+.3f} and {max(ends, default=0):+.3f}."
    )


def _throughput(result: dict[str, Any], set_name: str) -> str:
    found = [race for race in figures(result, "throughput") if race["set"] == set_name]
    head = ["strategy", "positions a token"]
    head += [f"{FAMILIES[race['family']]}: tokens/s" for race in found]
    head += [f"{FAMILIES[race['family']]}: peak MB" for race in found]
    rows = []
    for name in [contestant["strategy"] for contestant in found[0]["contestants"]] if found else []:
        speeds = [speed(race["contestants"], name) for race in found]
        row = [TITLES[name], f"{speeds[0].slots_per_token:.2f}"]
        row += [_rate(name, one) for one in speeds]
        row += [f"{one.memory_mb:,.0f}" for one in speeds]
        rows.append(row)
    return table(head, rows)


def _rate(name: str, found: Speed) -> str:
    """Return a rate, and its ratio to padding's with the least and the most."""
    low, high = map(ratio_text, found.ratios)
    beside = "" if name == "padding" else f", **{ratio_text(found.ratio)}** ({low} to {high})"
    return f"{found.tokens_per_s:,.0f}{beside}"


def _density(result: dict[str, Any]) -> str:
    found = by_setting(result)
    rows = []
    for label, records in found.items():
        record, is_base = records[0], label == BASE
        steps = estimate(one["steps"] for one in records).mean
        composition = "next fit" if label == "next_fit" else ("sorted" if record["is_sorted"] else "random")
        rows.append(
            (
                "random minibatches" if is_base else composition,
                "" if is_base else f"{record['capacity']:,}",
                "" if is_base else ("all" if record["window"] is None else f"{record['window']:,}"),
                "" if is_base else f"{100 * estimate(one['fill'] for one in records).mean:.1f} %",
                f"{steps:.1f}",
                f"{estimate(one['loss'] for one in records).mean:.3f}"
                if is_base
                else signed(above_base(found, label)),
            )
        )
    return table(("composition", "capacity", "window", "full", "steps", "validation loss"), rows)


def _ranks(result: dict[str, Any]) -> str:
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for record in figures(result, "ranks"):
        groups.setdefault((record["sampler"], record["ranks"]), []).append(record)
    rows = []
    for (sampler, world), records in groups.items():
        alone = {record["seed"]: record["losses"] for record in groups[sampler, 1]}
        apart = max(abs(a - b) for record in records for a, b in zip(record["losses"], alone[record["seed"]]))
        level = estimate(record["validation_loss"] for record in records)
        steps = sorted({record["steps"] for record in records})
        rows.append(
            (
                sampler,
                str(world),
                str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}",
                ", ".join(str(record["dropped"]) for record in records),
                ", ".join(str(record["repeated"]) for record in records),
                f"{level.mean:.3f} ± {level.half_width or 0:.3f}",
                "" if world == 1 else f"{apart:.1e}",
                "" if world == 1 else f"{_mean(records, 'tokens_imbalance'):.3f}",
                "" if world == 1 else f"{_mean(records, 'work_imbalance'):.2f}",
            )
        )
    head = (
        "sampler", "ranks", "steps", "dropped, by seed", "repeated, by seed", "validation loss",
        "largest difference of a step's loss from 1 rank", "tokens, most / mean", "attention, most / mean",
    )  # fmt: skip
    return table(head, rows)


def _mean(records: list[dict[str, Any]], name: str) -> float:
    return estimate(record[name] for record in records).mean


def _lora(result: dict[str, Any]) -> str:
    if not figures(result, "lora"):
        return ""
    (found,) = figures(result, "lora")
    contestants = found["contestants"]
    total, adapters = contestants[0]["parameters"]
    rows = []
    for contestant in contestants:
        one = speed(contestants, contestant["strategy"])
        rows.append(
            (
                TITLES[contestant["strategy"]],
                str(len(contestant["steps"])),
                f"{one.slots_per_token:.2f}",
                _rate(contestant["strategy"], one),
                f"{one.memory_mb:,.0f}",
                f"{contestant['validation_loss']:.4f}",
            )
        )
    head = ("strategy", "steps", "positions a token", "tokens/s", "peak MB", "validation loss")
    return (
        f"{adapters:,} of {total:,} numbers are trained (rank {found['rank']}), at a rate of "
        f"{found['learning_rate']}; before, the base's loss is {found['base_loss']:.4f}.\n\n"
        + table(head, rows)
    )


def _extreme(result: dict[str, Any]) -> str:
    rows = []
    for race in figures(result, "extreme"):
        for contestant in race["contestants"]:
            one = speed(race["contestants"], contestant["strategy"])
            rows.append(
                (
                    f"{race['factor']:,}x",
                    TITLES[contestant["strategy"]],
                    f"{one.slots_per_token:.2f}",
                    f"{one.tokens_per_s:,.0f}"
                    + ("" if contestant["strategy"] == "padding" else f", **{ratio_text(one.ratio)}**"),
                    f"{one.memory_mb:,.0f}",
                    f"{one.slowest:,.0f}" if one.slowest >= 10 else f"{one.slowest:.1f}",
                )
            )
    head = ("longer by", "strategy", "positions a token", "tokens/s", "peak MB", "slowest / median step")
    return table(head, rows)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "origin": _origin,
    "sets": _sets,
    "seeds": _seeds,
    "clear": _clear,
    "losses_short": lambda result: _comparison(result, "short"),
    "losses_long": lambda result: _comparison(result, "long"),
    "throughput_short": lambda result: _throughput(result, "short"),
    "throughput_long": lambda result: _throughput(result, "long"),
    "density": _density,
    "ranks": _ranks,
    "lora": _lora,
    "extreme": _extreme,
}
"""By the name in a page's marker."""


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks.running.page`: docs/running-results.md from the newest file of benchmarks.running."""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks import pages
from benchmarks.pages import table
from benchmarks.records import RESULTS, ROOT
from benchmarks.table import verdict

PAGE = ROOT / "docs" / "running-results.md"


def _made(result: dict[str, Any], part: str) -> str:
    made = result["parts"][part]
    return (
        f"{made.get('date', result['date'])}, commit {made['versions']['commit']}, load {made['load'][0]} to "
        f"{made['load'][1]}, torch {made['versions']['torch']}."
    )


def overhead(result: dict[str, Any]) -> str:
    found = result["overhead"]
    rows = [
        [
            f"{each['slice_tokens']:,}",
            f"{each['seconds']:.2f} s",
            f"{each['over_unsliced']:.3f}",
            f"{each['over_one_slice']:.3f}",
            f"{each['peak_bytes'] / 1e6:,.0f} MB",
            verdict(each["over_unsliced"] <= 1.05) if each["slice_tokens"] >= 4096 else "",
        ]
        for each in found["slices"]
    ]
    return (
        "## Slices beside the unsliced step\n\n"
        f"One document of {found['tokens']:,} tokens, float32, one core. Unsliced, with each layer computed again "
        f"and a loss in chunks, it takes {found['unsliced_s']:.2f} s and {found['unsliced_peak_bytes'] / 1e6:,.0f} "
        f"MB; as one slice of the engine {found['one_slice_s']:.2f} s and "
        f"{found['one_slice_peak_bytes'] / 1e6:,.0f} MB. What must hold: at most 1.05 times unsliced for slices of "
        f"4,096 rows or more. {_made(result, 'overhead')}\n\n"
        + table(["rows of a slice", "step", "over unsliced", "over one slice", "peak", "met"], rows)
        + "\n"
    )


def _beside(steps: list[dict[str, Any]]) -> str:
    rows = [
        [
            f"{each['documents']}, {each['method']}",
            f"{each['tokens']:,}",
            " / ".join(map(str, each["micropacks"])),
            f"{each['predicted_s']:.3f} s",
            f"{each['measured_s']:.3f} s",
            f"{each['error']:+.1%}",
            f"{each['gain_predicted']:.2f}x",
            f"{each['gain_measured']:.2f}x",
        ]
        for each in steps
    ]
    head = ["documents, plan", "tokens", "MicroPacks, forward / backward", "simulated", "measured"]
    return table([*head, "error", "gain, simulated", "gain, measured"], rows) + "\n"


def pipelines(result: dict[str, Any]) -> str:
    found = result["pipelines"]
    return (
        "## Pipelines beside the simulator\n\n"
        "Two stages of one core each, real steps of a small Llama over gloo, each layer computed again. Gains are "
        "over packs as users run them (1F1B). `symmetric` and `asymmetric` have the same forward MicroPacks; the "
        f"latter's backward pass is cut into half as many again. Mean absolute error {found['mape']:.1%}, repeat to "
        f"repeat {found['repeat_mape']:.1%}; what must hold: at most {found['limit']:.1%} (5 % or 1.5 times the "
        f"repeats): {verdict(found['met'])}. "
        f"{_made(result, 'pipelines')}\n\n" + _beside(found["steps"])
    )


def merging(result: dict[str, Any]) -> str:
    found = result["merging"]
    errors = {
        is_shared: [
            abs(each["error"]) for each in found["steps"] if (each["method"] == "shared") == is_shared
        ]
        for is_shared in (False, True)
    }
    return (
        "## A document that two ranks share\n\n"
        "Two data-parallel ranks of one core each, and a document with more work than either's share of the step: "
        "on one rank, whatever else is balanced, or shared by both (DP-Merge). Gains are over packs as users run "
        f"them. Steps that share nothing are simulated within {max(errors[False]):.1%}; shared ones are off by "
        f"{min(errors[True]):.1%} to {max(errors[True]):.1%}, so that a shared document gains less here than is "
        f"simulated. Repeat to repeat {found['repeat_mape']:.1%}. "
        f"{_made(result, 'merging')}\n\n" + _beside(found["steps"])
    )


def waits(result: dict[str, Any]) -> str:
    rows = [
        [
            f"dp {each['mesh'][0]} x pp {each['mesh'][1]}, {each['mesh'][2]} a GPU, {each['method']}",
            f"{each['tasks']:,}",
            f"{each['predicted_s']:.3f} s",
            f"{each['waited_s']:.3f} s",
            f"{each['error']:+.1%}",
        ]
        for each in result["waits"]
    ]
    return (
        "## Many stages, in timed waits\n\n"
        "The real executor and real messages over gloo, but **each task waits as long as the cost model says "
        "instead of computing**: this checks order, dependencies and what the executor adds, and no kernel. Plans "
        f"are of an 8B model on H100s, stretched to seconds. {_made(result, 'waits')}\n\n"
        + table(["mesh, chunks of layers, plan", "tasks", "simulated", "took", "error"], rows)
        + "\n"
    )


def ahead(result: dict[str, Any]) -> str:
    found = result["ahead"]
    return (
        "## Plans made ahead\n\n"
        f"{found['steps']} steps of documents like {found['documents']}, planned by another process while slices "
        f"run. The first step waited {found['first_wait_s']:.2f} s for its plan, later ones "
        f"{found['wait_s'] * 1e6:,.0f} µs in the median and {found['longest_wait_s'] * 1e3:,.1f} ms at most: "
        f"{found['wait_over_step']:.4%} of the steps' time. A step took {found['step_s']:.2f} s in the median "
        f"beside the planner, and {found['step_s_without_planner']:.2f} s without. {_made(result, 'ahead')}\n"
    )


def longest(result: dict[str, Any]) -> str:
    found = result["longest"]
    kinds = [
        (f"{each['shape']} ({kind}), by formula", each["cells"]) for kind, each in found["formula"].items()
    ]
    kinds += [(f"small {kind} model, measured", each["cells"]) for kind, each in found["measured"].items()]
    rows = [
        [
            f"{name}: {cell['name']}",
            f"{cell['tokens']:,}",
            f"{cell['over_a']:.1f}",
            f"{cell['over_b']:.1f}",
            f"{cell['host_bytes'] / 1e9:,.2f}" if cell["host_bytes"] else "",
        ]
        for name, cells in kinds
        for cell in cells
        if cell["host_bytes"] <= found["host_bytes"]
    ]
    targets = ", ".join(
        f"{part}: {each['device_over_a']:.1f} ({verdict(each['device_met'])}) and {each['host_over_b']:.1f} "
        f"({verdict(each['host_met'])})"
        for part, each in found["targets"].items()
    )
    budgets = ", ".join(
        f"{each['budget_bytes'] / 1e6:,.0f} MB ({kind})" for kind, each in found["measured"].items()
    )
    return (
        "## The longest document\n\n"
        f"By formula: {found['card_bytes'] / 1e9:.1f} GB of a card and {found['host_bytes'] / 1e9:.0f} GB of host "
        "memory for each (2 TB for eight cards, half of it used, since PyTorch rounds pinned blocks up to powers of "
        f"two), states divided among {found['mesh']['dp']} cards, slices of {found['slice_tokens']:,} rows. "
        "Measured: all tensors of small models in bfloat16 "
        f"counted, slices of {found['small_slice_tokens']:,} rows, in as many bytes as (a) takes for its tokens, "
        f"{budgets}; the arithmetic of slices' attention is left out, and its tensors are not. What must hold with "
        "grouped heads (GQA): 8 times (a) on the device, 8 times (b) with keys and values in host memory; "
        f"{targets}. Other cells have no target. {_made(result, 'longest')}\n\n"
        + table(["model, way", "tokens", "times (a)", "times (b)", "host memory, GB"], rows)
        + "\n"
    )


PARTS = {
    "overhead": overhead,
    "pipelines": pipelines,
    "merging": merging,
    "waits": waits,
    "ahead": ahead,
    "longest": longest,
}


def page() -> str:
    newest: dict[str, dict[str, Any]] = {}
    for file in sorted((RESULTS / "run").glob("2*.json")):
        result = json.loads(file.read_text())
        newest |= {name: result for name in PARTS if name in result}
    machines = {json.dumps(result["machine"], sort_keys=True): result for result in newest.values()}
    said = [
        f"{each['machine']['cpu']}, {each['machine']['cores']} cores, Python {each['machine']['python']}"
        for each in machines.values()
    ]
    return (
        "# Running: results\n\n"
        "For people who want to know how slices and plans run on a CPU. "
        "Written by `python -m benchmarks.running.page` from what `python -m benchmarks.running` measured last; "
        f"nothing here is typed. Measured on a CPU: no GPU ran. Machine: {'; '.join(said)}.\n\n"
        + "\n".join(PARTS[name](newest[name]) for name in PARTS if name in newest)
    )


def main(arguments: list[str] | None = None) -> int:
    return pages.write("benchmarks.running.page", __doc__, PAGE, lambda _: page(), arguments)


if __name__ == "__main__":
    sys.exit(main())

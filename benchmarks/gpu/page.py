"""`python -m benchmarks.gpu.page`: docs/gpu-results.md, each part from the newest file of benchmarks.gpu with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.pages import table
from benchmarks.records import RESULTS, ROOT

PAGE = ROOT / "docs" / "gpu-results.md"
INTRODUCTION = """# Results on a GPU

For engineers who want to know what varlen's engine does on a GPU: every figure here was measured on one by
`python -m benchmarks.gpu FILE`, and this page is written from its files. Parts that need several GPUs (pipelines over
NCCL, shared documents, FSDP2, a killed peer) have not run on GPUs; [Running: results](running-results.md) has them on
a CPU.
"""
SIMULATED = ("seconds", "simulated_s"), ("peak_bytes", "simulated_peak_bytes")


def _ran(rows: Any) -> list[dict[str, Any]]:
    """Return the rows that were measured."""
    found = [rows] if isinstance(rows, dict) else rows
    return [row for row in found if "failed" not in row and "not_run" not in row]


def _way(row: dict[str, Any]) -> str:
    saved = {"stage": ", inputs of a stage kept"}.get(row.get("saved", ""), "")
    offload = ", keys and values in host memory" if row.get("offload") else ""
    return f"{row['recompute']}{saved}{offload}"


def gradients(rows: Any) -> str:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in _ran(rows):
        groups.setdefault((row["family"], row["dtype"]), []).append(row)
    lines = [
        [
            *of,
            ", ".join(sorted({row["kernels"] for row in group})),
            f"{max(row['error'] for row in group):.1e}",
            f"{max(row['unsliced_error'] for row in group):.1e}",
        ]
        for of, group in groups.items()
    ]
    return (
        "## Gradients of slices beside float64\n\n"
        "Documents of 5 to 300 tokens in slices of 96, small models; the error of all gradients together, relative "
        "to float64 on the CPU, of the worst kernel, beside that of transformers' own unsliced step in the same "
        "dtype.\n\n" + table(["family", "dtype", "kernels", "off by", "unsliced off by"], lines)
    )


def waits(rows: Any) -> str:
    ran = _ran(rows)
    places = {place for row in ran for place in row["waits"]}
    found = f"{len(places)} places: {', '.join(sorted(places))}" if places else "nowhere"
    return (
        "## Waits of the host\n\n"
        "Where a task of a step makes the host wait for the device, by PyTorch's `set_sync_debug_mode`, in "
        f"{len(ran)} steps of a model of 1.1 billion parameters (one long document, short ones, 512 equal ones; each "
        f"way of recomputation and of host memory): **{found}**."
    )


def ways(rows: Any) -> str:
    about, *steps = _ran(rows)
    lines = [
        [
            f"{row['documents']} ({row['count']:,})",
            _way(row),
            *(f"{row[measured] * scale:,.2f} {unit}" for (measured, _), scale, unit in _units()),
            *(f"{row[simulated] / row[measured] - 1:+.1%}" for measured, simulated in SIMULATED),
            f"{row['peak_reserved_bytes'] / row['peak_bytes']:.2f}x",
        ]
        for row in steps
    ]
    return (
        "## Steps beside the simulator\n\n"
        f"Steps of {about['tokens']:,} tokens in MicroPacks of {about['slice_tokens']:,}, a Llama of 1.1 billion "
        "parameters in bfloat16. What `vl.simulate` says with rates calibrated in the same process stands as its "
        "error; peaks are bytes of tensors beside parameters, gradients and their float32 sums, and reserved is what "
        "PyTorch's allocator holds for them.\n\n"
        + table(
            ["documents", "recomputation", "step", "peak", "simulated step", "simulated peak", "reserved"],
            lines,
        )
    )


def _units() -> tuple[tuple[tuple[str, str], float, str], ...]:
    return (SIMULATED[0], 1.0, "s"), (SIMULATED[1], 1e-9, "GB")


def kernels(rows: Any) -> str:
    lines = [
        [
            f"{row['documents']} ({row['count']:,})",
            f"{row['seconds']:.3f} s",
            f"{row['busy_s']:.3f} s",
            f"{row['busy_s'] / row['seconds']:.0%}",
            f"{row['launches']:,}",
        ]
        for row in _ran(rows)
    ]
    return (
        "## Kernels of a step\n\n"
        "8,192 tokens in MicroPacks of 4,096, the same model, each layer computed again. The number of kernels does "
        "not grow with the number of documents. With this few rows the host launches about as fast as the GPU "
        "computes.\n\n" + table(["documents", "step", "GPU busy", "share", "kernels launched"], lines)
    )


def overhead(row: dict[str, Any]) -> str:
    lines = [
        [
            f"{each['slice_tokens']:,}",
            f"{each['seconds']:.3f} s",
            f"{each['over_one_slice']:.2f}",
            f"{each['over_unsliced']:.2f}",
            f"{each['peak_bytes'] / 1e9:.2f} GB",
        ]
        for each in row["slices"]
    ]
    return (
        "## Slices beside the unsliced step\n\n"
        f"One document of {row['tokens']:,} tokens, the same model. Unsliced, with each layer computed again and a "
        f"loss in chunks, it takes {row['unsliced_s']:.3f} s and {row['unsliced_peak_bytes'] / 1e9:.2f} GB in "
        f"PyTorch's dense attention (which is cuDNN's), as one slice {row['one_slice_s']:.3f} s and "
        f"{row['one_slice_peak_bytes'] / 1e9:.2f} GB in its variable-length one (FlashAttention 2).\n\n"
        + table(["rows of a slice", "step", "over one slice", "over unsliced", "peak"], lines)
    )


def steps(row: dict[str, Any]) -> str:
    lines = [
        [
            name,
            f"{row[f'{of}_s']:.2f} s",
            f"{row[f'{way}_tokens_per_s']:,.0f}",
            f"{row[f'{way}_peak_bytes'] / 1e9:.1f} GB",
        ]
        for name, way, of in (
            ("padded, PyTorch's dense attention", "padded", "padded_sdpa"),
            ("packed, `varlen` attention", "packed", "packed_varlen"),
        )
    ]
    return (
        "## Packed beside padded\n\n"
        f"{row['documents']} documents of skewed lengths up to 4,096, {row['tokens']:,} tokens "
        f"({row['padded_tokens']:,} when padded in fours), {row['parameters'] / 1e9:.1f} billion parameters, forward "
        f"and backward, nothing computed again: packed is **{row['ratio']:.2f}x** as fast.\n\n"
        + table(["batches", "all documents", "tokens a second", "peak"], lines)
    )


def race(rows: Any) -> str:
    def rates(found: Any) -> str:
        return f"{found['forward_tflops']:.0f} / {found['backward_tflops']:.0f}"

    lines = [
        [
            row["case"],
            f"{row['heads'][0]}/{row['heads'][1]} of {row['dim']}",
            rates(row["varlen"]),
            rates(row["cudnn"]),
            f"{_both(row['varlen']) / _both(row['cudnn']):.2f}x",
        ]
        for row in _ran(rows)
    ]
    return (
        "## Attention kernels\n\n"
        "TFLOP/s forward / backward of slices, rows by keys of their documents, in bfloat16: PyTorch's "
        "variable-length kernel (FlashAttention 2) and cuDNN's, with the diagonal at the bottom right. "
        '`kernels="auto"` takes cuDNN, where nvidia-cudnn-frontend is installed, for slices with many earlier '
        "tokens. With a window cuDNN's backward pass computes all pairs, so it isn't used.\n\n"
        + table(["slices", "heads", "PyTorch", "cuDNN", "both passes, gain of cuDNN"], lines)
    )


def _both(found: dict[str, float]) -> float:
    return found["forward_s"] + found["backward_s"]


def rates(rows: Any) -> str:
    lines = [
        [
            f"{row['query_heads']}/{row['key_heads']}",
            f"{row['rows']:,}",
            f"{row['keys']:,}",
            f"{row['forward_tflops']:.0f}",
            f"{row['backward_tflops']:.0f}",
        ]
        for row in _ran(rows)
    ]
    return (
        "## Rates of slice attention\n\n"
        "TFLOP/s of PyTorch's variable-length kernel on the last rows of a document, heads of 128, through varlen's "
        "engine. A quarter of the heads, as tensor parallelism of 4 leaves, needs four times the rows.\n\n"
        + table(["heads", "rows", "keys", "forward", "backward"], lines)
    )


def several(rows: Any) -> str:
    lines = []
    for row in _ran(rows):
        of = row.get("mesh") or row.get("gathered") or f"raised after {row['seconds']:.1f} s"
        off = f"{row['gradients_off']:.1e}" if "gradients_off" in row else ""
        timed = row["part"] == "seconds"
        step = f"{row['seconds']:.3f} s" if timed else ""
        error = f"{row['simulated_s'] / row['seconds'] - 1:+.1%}" if timed else ""
        lines.append([row["part"], of, off, step, error])
    return (
        "## Several GPUs\n\n"
        "One process a GPU over NCCL: gradients of a small model in float32 beside one GPU's, with documents that "
        "ranks share where there are cp ranks; a pipeline whose second process is killed; steps of the model of 1.1 "
        "billion parameters.\n\n"
        + table(["part", "mesh", "gradients off by", "step", "simulated step"], lines)
    )


PARTS: dict[str, Callable[[Any], str]] = {
    "steps": steps,
    "ways": ways,
    "waits": waits,
    "gradients": gradients,
    "kernels": kernels,
    "overhead": overhead,
    "kernels_race": race,
    "attention": rates,
    "several": several,
}


def _newest(files: Sequence[Any]) -> list[dict[str, Any]]:
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in (row for rows in files for row in _ran(rows)):
        found.setdefault((row["family"], row["dtype"], row["kernels"]), row)
    return list(found.values())


def _measured(found: Sequence[tuple[dict[str, Any], Path]]) -> str:
    of = found[0][0]
    links = ", ".join(f"[{each['date']}](../benchmarks/results/gpu/{file.name})" for each, file in found)
    return (
        f"Measured on {of['machine']['gpu']}, PyTorch {of['versions']['torch']}, transformers "
        f"{of['versions']['transformers']}: {links}."
    )


def fresh(_before: str = "") -> str:
    files = sorted((RESULTS / "gpu").glob("20*.json"), reverse=True)
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    if not results:
        raise FileNotFoundError(
            "there is no file of benchmarks.gpu; run `python -m benchmarks.gpu FILE` on a GPU"
        )
    sections = []
    for name, render in PARTS.items():
        found = [(result, file) for result, file in zip(results, files) if _ran(result.get(name, []))]
        # Of gradients a file may hold some families; a row counts from the newest that has it.
        found = found if name == "gradients" else found[:1]
        if found:
            rows = found[0][0][name] if len(found) == 1 else _newest([result[name] for result, _ in found])
            sections.append(f"{render(rows)}\n\n{_measured(found)}\n")
    notes = "\n".join(f"- {note}" for note in results[0].get("notes", []))
    return "\n".join([INTRODUCTION, *sections, f"## Notes to the newest file\n\n{notes}\n"])


if __name__ == "__main__":
    sys.exit(pages.write("benchmarks.gpu.page", __doc__, PAGE, fresh, sys.argv[1:]))

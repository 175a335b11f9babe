"""Count the files of varlen that a reader meets on the way through one call.

A trip is one call of the public face, with small inputs. Its files are those of `src/varlen` in which a function is
entered while it runs, in any thread; a module's body doesn't count. Each trip runs once before it is traced, so that
kernels are compiled. Only public names are used, so that one copy of this script measures any checkout:

    python scripts/trips.py                            # a table
    python scripts/trips.py --json before.json         # the files of each trip, too
    python scripts/trips.py --against before.json      # the ratio of each trip to an earlier measurement
    python scripts/trips.py --files plan_step          # the files of one trip, in the order in which they are entered
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

import varlen as vl

ROOT = Path(vl.__file__).resolve().parent
LENGTHS = np.random.default_rng(0).integers(20, 400, 64)
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}

Trip = Callable[[Path], None]
TRIPS: dict[str, Trip] = {}


def trip(function: Trip) -> Trip:
    """Name a trip after its function."""
    TRIPS[function.__name__] = function
    return function


@trip
def pack(folder: Path) -> None:
    vl.pack(LENGTHS, capacity=512)


@trip
def collate(folder: Path) -> None:
    documents = [np.arange(length, dtype=np.int32) for length in LENGTHS]
    vl.collate(documents, vl.pack(LENGTHS, capacity=512))


@trip
def loader_over_a_store(folder: Path) -> None:
    _two_batches(folder / "store", mode="indexed")


@trip
def loader_streaming(folder: Path) -> None:
    _two_batches(folder / "texts.jsonl", mode="streaming", tokenizer="bytes")


@trip
def planned_step(folder: Path) -> None:
    """`varlen train` with `[plan]`, one step."""
    _varlen("train", folder / "run.toml", "--set", f"run.output={_new(folder)}")


@trip
def plan_step(folder: Path) -> None:
    _plan()


@trip
def simulate(folder: Path) -> None:
    vl.simulate(_PLANNED[0], _COST)


@trip
def verify(folder: Path) -> None:
    vl.verify(_model(), backends=("eager", "sdpa"))


@trip
def pack_megatron(folder: Path) -> None:
    """`varlen pack --format megatron`."""
    out = _new(folder)
    _varlen(
        "pack",
        folder / "texts.jsonl",
        "-o",
        out,
        "--format",
        "megatron",
        "--overlong",
        "split",
        "--processes",
        1,
    )


def _two_batches(source: Path, **settings: Any) -> None:
    with vl.PackedLoader(source, capacity=512, global_batch_size=2, worker="thread", **settings) as loader:
        next(loader)
        next(loader)


_COST = vl.CostModel(
    model=vl.ModelShape.named("llama-3-8b"), hardware=vl.Hardware.named("h100"), recompute="full"
)
_PLANNED: list[Any] = []


def _plan() -> Any:
    lengths = LENGTHS.astype(np.int64) * 64
    return vl.plan_step(lengths, cost=_COST, mesh=vl.Mesh(dp=2, pp=4, tp=8), method="micropack")


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=97, **LLAMA))


def _new(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder)) / "out"


def _varlen(*arguments: object) -> None:
    """Run the command line in this process."""
    from varlen.cli import main

    before, sys.argv = sys.argv, ["varlen", *map(str, arguments)]
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            main()
    except SystemExit as end:
        if end.code:
            sys.exit(f"varlen {' '.join(sys.argv[1:])} ended with {end.code}:\n{shown.getvalue()}")
    finally:
        sys.argv = before


def write_inputs(folder: Path) -> None:
    """Write the data and the configuration that trips read."""
    random = np.random.default_rng(1)
    with (folder / "texts.jsonl").open("w") as file:
        for length in random.integers(20, 400, 256):
            print(json.dumps({"text": "".join(map(chr, random.integers(97, 123, length)))}), file=file)
    _varlen("index", folder / "texts.jsonl", "-o", folder / "store", "--processes", 1)
    settings = "\n".join(f"{key} = {value}" for key, value in LLAMA.items())
    (folder / "run.toml").write_text(
        f"""
[data]
source = "{folder / "store"}"
capacity = 512
global_batch_size = 4
worker = "thread"
[model]
type = "llama"
[model.settings]
{settings}
[optimizer]
learning_rate = 1e-3
[run]
output = "run"
steps = 1
threads = 1
parallel = "none"
[plan]
hardware = "h100"
"""
    )
    _PLANNED[:] = [_plan()]


def entered(call: Callable[[], None]) -> dict[str, None]:
    """Return the files in which a function is entered during a call, in the order of their first function."""
    files: dict[str, None] = {}
    known: dict[CodeType, bool] = {}

    def look(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or code in known:
            return
        known[code] = True
        path = Path(code.co_filename)
        if code.co_name != "<module>" and path.is_relative_to(ROOT):
            files.setdefault(path.relative_to(ROOT).as_posix())

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return files


def measure(names: list[str]) -> dict[str, list[str]]:
    """Return the files of each trip."""
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_inputs(folder)
        found = {}
        for name in names:
            call = TRIPS[name]
            call(folder)
            found[name] = list(entered(lambda call=call: call(folder)))  # type: ignore[misc]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="TRIP", help=", ".join(TRIPS))
    parser.add_argument("--json", type=Path, help="write the files of each trip here")
    parser.add_argument("--against", type=Path, help="a file that --json wrote")
    parser.add_argument("--files", action="store_true", help="list the files")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(TRIPS)
    if unknown:
        parser.error(f"no trip is named {', '.join(sorted(unknown))}; trips are {', '.join(TRIPS)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    found = measure(arguments.names or list(TRIPS))
    before = json.loads(arguments.against.read_text()) if arguments.against else {}
    for name, files in found.items():
        rooms = {file.split("/")[0] if "/" in file else "." for file in files}
        ratio = f"  {len(files) / len(before[name]):5.2f} of {len(before[name])}" if name in before else ""
        print(f"{name:22} {len(files):4} files in {len(rooms):2} rooms{ratio}")
        if arguments.files:
            print("".join(f"    {file}\n" for file in files), end="")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

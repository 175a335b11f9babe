"""`varlen inspect`: how long documents are, what padding and packing make of them, and what to choose."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from varlen.arguments import TOKENS, as_tokens
from varlen.cli.options import Data, FiguresAsJson, Report, option_in, print_json, title_of
from varlen.cli.progress import wide_console
from varlen.counts import many

if TYPE_CHECKING:
    from varlen.files.losses import Losses

measuring_option = option_in("Measuring")
_SHOWN_SKIPS = 5
_SHOWN_LINES, _WIDTH = 40, 78
_EXCERPTS = 20_000
"""Documents that a report may show the beginning of; to make text of more would take longer than the rest."""


def inspect_data(
    data: Data,
    *,
    reading: dict[str, Any],
    capacity: Annotated[
        list[str] | None,
        measuring_option(
            metavar="N",
            help=f"Tokens of a pack: {TOKENS}; repeatable.  [dim]\\[default: some that suit the data][/]",
        ),
    ] = None,
    show: Annotated[
        int,
        measuring_option(
            metavar="N",
            min=0,
            help="Print the first N documents as text, [bold]>[/] before what is trained, and stop.",
        ),
    ] = 0,
    batch_documents: Annotated[int, measuring_option(metavar="N", help="Documents of a padded batch.")] = 8,
    output: Report = None,
    as_json: FiguresAsJson = False,
    seed: Annotated[int, measuring_option(help="Of random batches, shuffles and samples.")] = 0,
) -> None:
    """Show how long documents are, what padding wastes, and how full packs become.

    Compares ways of padding, varlen pack, the loader and vl.pack, each with its own packer and order, and the
    default policies of other packers at several capacities, counts what each loses, and says what to choose and
    why. Nothing is trained or written, but for the report that [bold]-o[/] names.

    [bold]Example:[/]  varlen inspect 'chats/*.jsonl' --capacity 4096 --capacity 8192 -o report.html
    """
    from varlen.cli.options import lengths_of, pack_arguments
    from varlen.cli.progress import progress
    from varlen.report.inspection import inspect_lengths
    from varlen.report.page import check_writable, write_page

    if show:
        _print_documents(data, show, reading)
        return
    capacities = [as_tokens(words, "--capacity") for words in capacity or []]
    if output is not None:
        check_writable(output)
    with progress() as on_progress:
        found = lengths_of(data, on_progress, _EXCERPTS if output is not None else 0, **reading)
        inspection = inspect_lengths(
            found.lengths,
            capacities=capacities or None,
            targets=found.targets,
            excerpts=found.excerpts,
            batch_documents=batch_documents,
            seed=seed,
            name=title_of(data),
            arguments=() if found.are_counted else pack_arguments(data, **reading),
            parts=found.parts,
            are_bytes=found.are_bytes,
            sources=found.sources,
            notes=[*found.losses.sentences(), *filter(None, [found.unread])],
            on_progress=on_progress,
        )
    _print_lost(found.losses, found.skipped)
    if output is not None:
        from varlen.report.inspect_page import inspect_page

        write_page(output, inspect_page(inspection))
    if as_json:
        left_out = {"skipped": list(found.skipped), "losses": found.losses.to_json(), "unread": found.unread}
        print_json(inspection.to_json() | left_out)
    else:
        _print_table(inspection, output, were_named=bool(capacity))
    if found.unread is not None:
        print(f"varlen: {found.unread}", file=sys.stderr)


def _print_documents(data: Sequence[str], count: int, reading: dict[str, Any]) -> None:
    """Print the first documents as a model is given them, with a mark at each line that is trained."""
    import numpy as np

    from varlen.cli.options import as_documents
    from varlen.text.tokenizer import with_marks

    source = as_documents(data, **reading)
    tokenizer, number = source.encoding.tokenizer, 0
    for documents in (some for part in source.parts() for some in source.read(part)):
        _print_lost(documents.losses, [str(fault) for fault in documents.faults])
        for start, stop in pairwise(documents.offsets.tolist()):
            if number == count:
                return
            number += 1
            ids, mask = documents.tokens[start:stop], documents.loss_mask
            is_trained = np.ones(len(ids), bool) if mask is None else mask[start:stop] != 0
            print(f"document {number:,}: {many(len(ids), 'token')}, {is_trained.sum():,} of them trained")
            cuts = [0, *(np.flatnonzero(np.diff(is_trained)) + 1).tolist(), len(ids)]
            runs = [
                (is_trained[a], with_marks(tokenizer, ids[a:b].tolist())) for a, b in pairwise(cuts) if a < b
            ]
            print("\n".join(_lines_of(runs)))


def _lines_of(runs: Sequence[tuple[bool, str]]) -> list[str]:
    """Return runs of text as lines of 80 columns, each run on its own, those that are trained marked."""
    lines = []
    for is_trained, text in runs:
        for line in text.removeprefix("\n").splitlines():  # the line ends between two runs anyhow
            parts = textwrap.wrap(line, _WIDTH, drop_whitespace=False, break_on_hyphens=False) or [""]
            lines += [f"{'>' if is_trained else ' '} {part}".rstrip() for part in parts]
    left = len(lines) - _SHOWN_LINES
    return lines if left <= 1 else [*lines[:_SHOWN_LINES], f"  ... {left:,} more lines"]


def _print_table(inspection: Any, output: Path | None, *, were_named: bool) -> None:
    """Print what was found, and where more is to be had."""
    from varlen.report.inspection import inspect_table

    console = wide_console()
    console.print(inspect_table(inspection), crop=False)  # so that commands can be copied whole
    if output is None:
        console.print("\n-o report.html shows this in pictures.", markup=False)
    else:
        console.print(f"\n{output} shows this in pictures.", markup=False)
    if not were_named:
        console.print("--capacity N, repeated, looks at the row lengths that your model and memory can take.")


def _print_lost(losses: Losses, skipped: Sequence[str]) -> None:
    """Print to standard error what the lengths leave out: unreadable records first, the first few by name."""
    notes = losses.stretches()
    if losses.records:
        were = many(
            losses.records, "record that could not be read was", "records that could not be read were"
        )
        notes.append(f"{were} left out")
    if notes:
        more = len(skipped) - _SHOWN_SKIPS
        tail = [f"and {more:,} more"] if more > 0 else []
        shown = "; ".join([*skipped[:_SHOWN_SKIPS], *tail])
        print(f"varlen: {'; '.join(notes)}" + (f": {shown}" if shown else ""), file=sys.stderr)
    for text in losses.texts():
        print(f"varlen: {text}", file=sys.stderr)

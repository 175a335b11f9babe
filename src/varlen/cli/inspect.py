"""`varlen inspect`: how long documents are, what padding and packing make of them, and what to choose."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from varlen.errors import SettingError, SourceError

if TYPE_CHECKING:
    from varlen.types import IntArray

_ERROR_CHOICES = ("raise", "skip")
_SHOWN_SKIPS = 5


class Lengths(NamedTuple):
    """What reading documents comes to."""

    lengths: IntArray
    """Tokens of each document."""
    targets: IntArray | None
    """Supervised tokens of each document, where the data say."""
    excerpts: dict[int, str]
    """How the text of some documents begins."""
    name: str
    """What was read, for headings."""
    skipped: list[str]
    """What couldn't be read and was left out, a sentence each."""


def inspect_data(
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA...",
            show_default=False,
            help="Your documents: files, folders or quoted globs.",
        ),
    ],
    tokenizer: Annotated[
        str, typer.Option(metavar="bytes|FILE|FOLDER", help="What counts tokens; bytes needs no file.")
    ] = "bytes",
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE=NAME", help="Which column holds what, as text=body; repeatable."),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A template for messages, instead of the tokenizer's.")
    ] = None,
    on_error: Annotated[
        str, typer.Option(metavar="raise|skip", help="What becomes of rows that can't be read.")
    ] = "raise",
    capacity: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N", help="Tokens of a pack; repeatable.  [dim]\\[default: some that suit the data][/]"
        ),
    ] = None,
    batch_documents: Annotated[int, typer.Option(metavar="N", help="Documents of a padded batch.")] = 8,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write a report with pictures there, as HTML."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all figures as one JSON object instead of the table.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of random batches, shuffles and samples.")] = 0,
) -> None:
    """Show how long documents are, what padding wastes, and how full packs become.

    Compares ways of padding, seven methods of packing and the default policies of other packers at several
    capacities, counts what each loses, and says what to choose and why. Nothing is trained or written, but
    for the report that [bold]-o[/] names.

    [bold]Example:[/]  varlen inspect 'chats/*.jsonl' --capacity 4096 --capacity 8192 -o report.html
    """
    from varlen.cli.progress import progress
    from varlen.report.inspection import inspect_lengths
    from varlen.report.page import check_writable, write_page

    columns = _as_columns(column or [])
    _check_on_error(on_error)
    if output is not None:
        check_writable(output)
    with progress() as on_progress:
        found = read_lengths(data, tokenizer, columns, chat_template, on_error)
        inspection = inspect_lengths(
            found.lengths,
            capacities=capacity or None,
            targets=found.targets,
            excerpts=found.excerpts,
            batch_documents=batch_documents,
            seed=seed,
            name=found.name,
            on_progress=on_progress,
        )
    if output is not None:
        from varlen.report.inspect_page import inspect_page

        write_page(output, inspect_page(inspection))
    if as_json:
        json.dump(inspection.to_json() | {"skipped": found.skipped}, sys.stdout, indent=1)
        print()
    else:
        _print_table(inspection, output)
    _print_skipped(found.skipped)


def read_lengths(
    data: list[str], tokenizer: str, columns: dict[str, str], chat_template: Path | None, on_error: str
) -> Lengths:
    """Read the length of every document, in order.

    For now lengths are read that were counted before: an `.npz` file with `lengths`, and `targets` if known.

    Args:
        data: files.
        tokenizer: counts tokens.
        columns: the column of each role.
        chat_template: a file, or None.
        on_error: "raise" or "skip", for files that can't be read.

    Raises:
        SourceError: a file is missing or holds no lengths, or files disagree on having targets.
    """
    import numpy as np

    del tokenizer, columns, chat_template  # lengths that were counted before need none of them
    lengths, targets, skipped = [], [], []
    for name in data:
        try:
            with np.load(name, allow_pickle=False) as stored:
                lengths.append(stored["lengths"])
                targets += [stored["targets"]] if "targets" in stored else []
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = (
                "does not exist" if not Path(name).exists() else f"is no .npz file with lengths ({error})"
            )
            if on_error == "raise":
                raise SourceError(f"{name} {reason}; name a file that numpy.savez wrote") from error
            skipped.append(f"{name} {reason}")
    if not lengths or len(targets) not in (0, len(lengths)):
        raise SourceError(
            f"{len(lengths):,} of {len(data):,} files could be read, {len(targets):,} of them with targets; "
            "name files that can be read and agree"
        )
    title = Path(data[0]).stem + (f" and {len(data) - 1:,} more" if len(data) > 1 else "")
    return Lengths(np.concatenate(lengths), np.concatenate(targets) if targets else None, {}, title, skipped)


def _check_on_error(on_error: str) -> None:
    """Require one of two words.

    Raises:
        SettingError: it is another.
    """
    if on_error not in _ERROR_CHOICES:
        raise SettingError(f"--on-error must be one of {', '.join(_ERROR_CHOICES)}; got {on_error!r}")


def _as_columns(columns: list[str]) -> dict[str, str]:
    """Return the column of each role.

    Raises:
        SettingError: one isn't of the form ROLE=NAME, or a role stands twice.
    """
    roles: dict[str, str] = {}
    for pair in columns:
        role, equals, name = pair.partition("=")
        if not (role and equals and name):
            raise SettingError(f"--column must be of the form ROLE=NAME, such as text=body; got {pair!r}")
        if role in roles:
            raise SettingError(f"--column names {role} twice, {roles[role]} and {name}; keep one of them")
        roles[role] = name
    return roles


def _print_table(inspection: Any, output: Path | None) -> None:
    from rich.console import Console

    from varlen.report.inspect_table import inspect_table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    console.print(inspect_table(inspection))
    if output is None:
        console.print("\n-o report.html shows this in pictures.", markup=False)
    else:
        console.print(f"\n{output} shows this in pictures.", markup=False)


def _print_skipped(skipped: list[str]) -> None:
    """Say on standard error what was left out, the first few by name."""
    if not skipped:
        return
    more = len(skipped) - _SHOWN_SKIPS
    tail = f"; and {more:,} more" if more > 0 else ""
    shown = "; ".join(skipped[:_SHOWN_SKIPS])
    print(f"varlen: {len(skipped):,} could not be read and were left out: {shown}{tail}", file=sys.stderr)

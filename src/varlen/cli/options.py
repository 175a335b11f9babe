"""Options that several verbs take: which documents are read, how they become tokens, and who does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DOCUMENTS, OUTPUT, RUNNING = "Documents and tokens", "Output", "Running"
"""Panels of the help; a verb has others of its own."""

_FORMATS = "JSONL, JSON, CSV, text, Parquet, Arrow, npz, saved Hugging Face data sets; plain, .gz or .zst."
Documents = Annotated[
    list[str],
    typer.Argument(metavar="DATA...", help=f"Files, folders, quoted globs or URLs. {_FORMATS}"),
]
Data = Annotated[
    list[str],
    typer.Argument(
        metavar="DATA...", help=f"Files, folders, quoted globs or URLs; or one token store. {_FORMATS}"
    ),
]
Tokenizer = Annotated[
    str,
    typer.Option(
        help="A tokenizer.json, a folder that holds one, or [bold]bytes[/], the built-in one.",
        rich_help_panel=DOCUMENTS,
    ),
]
Column = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ROLE=NAME",
        help="Where a column isn't called as usual: text=body.  Repeatable.",
        rich_help_panel=DOCUMENTS,
    ),
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        help="A jinja file; or trl-training, the twin that TRL has of the tokenizer's.  "
        "[dim]\\[default: the tokenizer's own, else ChatML][/]",
        rich_help_panel=DOCUMENTS,
    ),
]
ChatTemplateKwargs = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="What the chat template sees beside the chat: '{\"enable_thinking\": false}'.",
        rich_help_panel=DOCUMENTS,
    ),
]
AllowUnwritten = Annotated[
    bool,
    typer.Option(
        "--allow-unwritten",
        help="Count what the chat template leaves out of an assistant's own turn, instead of refusing it.",
        rich_help_panel=DOCUMENTS,
    ),
]
Supervise = Annotated[
    str,
    typer.Option(
        help="Of chats, train on [bold]assistant[/] turns, on the last of them, or on all.",
        rich_help_panel=DOCUMENTS,
    ),
]
RowWeights = Annotated[
    bool,
    typer.Option(
        "--row-weights",
        help="Take weights of messages and tokens as those of their losses; else 0 and 1 alone are read.",
        rich_help_panel=DOCUMENTS,
    ),
]
Eos = Annotated[
    str | None,
    typer.Option(
        help="What ends a document: a token or its id.  [dim]\\[default: the tokenizer's][/]",
        rich_help_panel=DOCUMENTS,
    ),
]
NoEos = Annotated[
    bool, typer.Option("--no-eos", help="Leave documents without an end token.", rich_help_panel=DOCUMENTS)
]
TextCut = Annotated[
    str,
    typer.Option(
        help="What a document is in text files: [bold]file[/], [bold]paragraph[/], [bold]line[/].",
        rich_help_panel=DOCUMENTS,
    ),
]
Split = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Of folders with several, the split to read, or [bold]all[/].  [dim]\\[default: train][/]",
        rich_help_panel=DOCUMENTS,
    ),
]
ReadAs = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="What every file is, whatever its name: [bold]jsonl[/], json, csv, tsv, text, parquet, arrow, npz.",
        rich_help_panel=DOCUMENTS,
    ),
]
BinaryAsText = Annotated[
    bool,
    typer.Option(
        "--binary-as-text",
        help="Read binary columns of Parquet and Arrow as UTF-8.",
        rich_help_panel=DOCUMENTS,
    ),
]
OnError = Annotated[
    str,
    typer.Option(
        help="At a bad record: [bold]raise[/], or [bold]skip[/] it and list it.", rich_help_panel=DOCUMENTS
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(help="Side by side.  [dim]\\[default: one a processor][/]", rich_help_panel=RUNNING),
]
Ray = Annotated[
    bool,
    typer.Option(
        "--ray",
        help="Over the Ray cluster of RAY_ADDRESS, whose machines must share the folders, or this machine's.",
        rich_help_panel=RUNNING,
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace a set made from something else.", rich_help_panel=OUTPUT),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the manifest.", rich_help_panel=OUTPUT)]

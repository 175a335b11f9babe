"""Options that several verbs take: which documents are read, how they become tokens, and on which processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from varlen.errors import SettingError
from varlen.parsed import parse_json

if TYPE_CHECKING:
    from varlen.documents.source import Source
    from varlen.offline.crew import Crew
    from varlen.store.lengths import Lengths


def option_in(panel: str) -> Callable[..., Any]:
    """Return `typer.Option` for the options of one panel of the help."""
    return partial(typer.Option, rich_help_panel=panel)


documents_option, output_option = option_in("Documents and tokens"), option_in("Output")
running_option = option_in("Running")

_FORMATS = "JSONL, JSON, CSV, text, Parquet, Arrow, npz, saved Hugging Face data sets; plain, .gz or .zst."
Documents = Annotated[
    list[str], typer.Argument(metavar="DATA...", help=f"Files, folders, quoted globs or URLs. {_FORMATS}")
]
Data = Annotated[
    list[str],
    typer.Argument(
        metavar="DATA...", help=f"Files, folders, quoted globs or URLs; or one token store. {_FORMATS}"
    ),
]
Tokenizer = Annotated[
    str,
    documents_option(
        help="A tokenizer.json, a folder that holds one, a name on the hub, or [bold]bytes[/], the built-in one."
    ),
]
Column = Annotated[
    list[str] | None,
    documents_option(
        metavar="ROLE=NAME", help="Where a column isn't called as usual: text=body.  Repeatable."
    ),
]
ChatTemplate = Annotated[
    Path | None,
    documents_option(
        help="A jinja file; or trl-training, the twin that TRL has of the tokenizer's.  "
        "[dim]\\[default: the tokenizer's own, else ChatML][/]"
    ),
]
ChatTemplateKwargs = Annotated[
    str | None,
    documents_option(
        metavar="JSON", help="What the chat template sees beside the chat: '{\"enable_thinking\": false}'."
    ),
]
AllowUnwritten = Annotated[
    bool,
    documents_option(
        "--allow-unwritten",
        help="Count what the chat template leaves out of an assistant's own turn, instead of refusing it.",
    ),
]
Supervise = Annotated[
    str, documents_option(help="Of chats, train on [bold]assistant[/] turns, on the last of them, or on all.")
]
RowWeights = Annotated[
    bool,
    documents_option(
        "--row-weights",
        help="Take weights of messages and tokens as those of their losses; else 0 and 1 alone are read.",
    ),
]
Eos = Annotated[
    str | None,
    documents_option(help="What ends a document: a token or its id.  [dim]\\[default: the tokenizer's][/]"),
]
NoEos = Annotated[bool, documents_option("--no-eos", help="Leave documents without an end token.")]
TextCut = Annotated[
    str,
    documents_option(help="What a document is in text files: [bold]auto[/], file, paragraph or line."),
]
Split = Annotated[
    str | None,
    documents_option(
        metavar="NAME",
        help="Of folders with several, the split to read, or [bold]all[/].  [dim]\\[default: train][/]",
    ),
]
ReadAs = Annotated[
    str | None,
    documents_option(
        metavar="FORMAT",
        help="What every file is, whatever its name: [bold]jsonl[/], json, csv, tsv, text, parquet, arrow, npz.",
    ),
]
BinaryAsText = Annotated[
    bool, documents_option("--binary-as-text", help="Read binary columns of Parquet and Arrow as UTF-8.")
]
OnError = Annotated[
    str, documents_option(help="At a bad record: [bold]raise[/], or [bold]skip[/] it and list it.")
]
Processes = Annotated[int | None, running_option(help="Side by side.  [dim]\\[default: one per CPU][/]")]
Ray = Annotated[
    bool,
    running_option(
        "--ray",
        help="Over the Ray cluster of RAY_ADDRESS, whose machines must share the folders, or this machine's.",
    ),
]
Overwrite = Annotated[bool, output_option("--overwrite", help="Replace a set made from something else.")]
AsJson = Annotated[bool, output_option("--json", help="Print the manifest.")]
FiguresAsJson = Annotated[
    bool, output_option("--json", help="Print all figures as one JSON object instead of the table.")
]
Report = Annotated[
    Path | None,
    output_option("--output", "-o", metavar="FILE", help="Write a report with pictures there, as HTML."),
]


def read_options(
    tokenizer: Tokenizer = "bytes",
    column: Column = None,
    chat_template: ChatTemplate = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    allow_unwritten: AllowUnwritten = False,
    supervise: Supervise = "assistant",
    row_weights: RowWeights = False,
    eos: Eos = None,
    no_eos: NoEos = False,
    text_cut: TextCut = "auto",
    split: Split = None,
    read_as: ReadAs = None,
    binary_as_text: BinaryAsText = False,
    on_error: OnError = "raise",
) -> dict[str, Any]:
    """Return what the options of reading say, as `as_source` takes it."""
    given = dict(locals())
    given |= {"column": column or [], "append_eos": not given.pop("no_eos"), "format": given.pop("read_as")}
    return given


def reads_documents(verb: Callable[..., None], but: Sequence[str] = ()) -> Callable[..., None]:
    """Add the options of `read_options`, but for some, in place of a verb's `reading`, which gets them as a dict."""
    shared = {name: one for name, one in signature(read_options).parameters.items() if name not in but}

    @wraps(verb)
    def with_options(**given: Any) -> None:
        reading = read_options(**{name: given.pop(name) for name in shared})
        verb(reading={name: value for name, value in reading.items() if name not in but}, **given)

    own = signature(verb).parameters.values()
    parameters = [one for each in own for one in (shared.values() if each.name == "reading" else (each,))]
    hints = get_type_hints(verb, include_extras=True) | get_type_hints(read_options, include_extras=True)
    with_options.__signature__ = Signature(  # type: ignore[attr-defined]
        [one.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[one.name]) for one in parameters]
    )
    return with_options


counts_documents = partial(reads_documents, but=("supervise",))
"""For verbs that train on nothing."""


# What verbs share: turning arguments into a source of documents, and into the processes that do the work.


def as_source(
    data: Sequence[str], *, tokenizer: str, column: Sequence[str], eos: str | None, **more: Any
) -> Source | Path:
    """Return the source that arguments name, or the folder of a token store."""
    from varlen.documents.source import open_source
    from varlen.files.written import read_manifest

    if len(data) == 1 and Path(data[0]).is_dir():
        manifest = read_manifest(Path(data[0]))
        if manifest is not None and manifest.get("kind") == "tokens":
            given = [more.get(name) for name in ("chat_template", "split", "format")]
            if tokenizer != "bytes" or column or eos is not None or any(one is not None for one in given):
                raise SettingError(
                    f"{data[0]} holds tokens already, and --tokenizer, --column, --chat-template, --eos, --split and "
                    "--read-as can't change them; leave these out, or name the documents"
                )
            return Path(data[0])
    if "chat_template_kwargs" in more:
        more["chat_template_kwargs"] = _as_variables(more["chat_template_kwargs"])
    if more.get("chat_template") is not None:
        more["chat_template"] = str(more["chat_template"])  # a file, or the name of a twin
    end: int | str | None = int(eos) if eos is not None and eos.isdecimal() else eos
    source = open_source(data, tokenizer, columns=_as_columns(column), eos=end, **more)
    if (note := source.template_note()) is not None:
        print(f"varlen: {note}", file=sys.stderr)
    return source


def as_documents(data: Sequence[str], **settings: Any) -> Source:
    """Return the source that arguments name; refuses a token store; arguments as in `as_source`."""
    source = as_source(data, **settings)
    if isinstance(source, Path):
        raise SettingError(f"{source} is a token store already; name the documents, or pack it as it is")
    return source


def as_crew(processes: int | None, ray: bool) -> Crew:
    """Return the processes that do the work: as many as asked for, else one per processor that this one may use."""
    from varlen.offline.crew import Crew
    from varlen.workers.processors import processors

    return Crew(processes=processors() if processes is None else processes, ray=ray)


def check_one_store(source: Source | Path, tokens: Path | None) -> None:
    """Refuse a store of tokens as the data where another is named to keep them."""
    if isinstance(source, Path) and tokens is not None and tokens.resolve() != source.resolve():
        raise SettingError(
            f"{source} holds tokens already, and --tokens names {tokens}; leave one of them out"
        )


def lengths_of(
    data: Sequence[str], on_progress: Callable[[int, int, str], None], excerpts: int, **settings: Any
) -> Lengths:
    """Return the lengths of the documents that arguments name."""
    from varlen.store.lengths import counted_lengths, read_lengths, stored_lengths
    from varlen.store.store import open_store

    source = as_source(data, **settings)
    if len(data) == 1 and data[0].endswith(".npz") and Path(data[0]).is_file():
        counted = counted_lengths(Path(data[0]))
        if counted is not None:
            return counted
    return (
        stored_lengths(open_store(source))
        if isinstance(source, Path)
        else read_lengths(source, on_progress, excerpts)
    )


def pack_arguments(data: Sequence[str], **reading: Any) -> list[str]:
    """Return the arguments with which `varlen pack` reads what `read_options` returned; defaults are left out."""
    output = "packed-again" if any(Path(path).name == "packed" for path in data) else "packed"
    given = reading | {"no_eos": not reading["append_eos"], "read_as": reading["format"]}
    words = [*data, "-o", output]
    for name, one in signature(read_options).parameters.items():
        value, option = given.get(name, one.default), f"--{name.replace('_', '-')}"
        if isinstance(value, list):
            words += [word for pair in value for word in (option, pair)]
        elif value != one.default:
            words += [option] if value is True else [option, str(value)]
    return words


def print_json(content: Any) -> None:
    """Print one JSON object."""
    json.dump(content, sys.stdout, indent=1)
    print()


def _as_variables(text: str | None) -> dict[str, Any] | None:
    """Return what a chat template sees beside the chat."""
    if text is None:
        return None
    try:
        found = parse_json(text)
    except ValueError as error:
        raise SettingError(f"--chat-template-kwargs must be a JSON object, got {text!r} ({error})") from error
    if not isinstance(found, dict):
        raise SettingError(f"--chat-template-kwargs must be a JSON object, got {text!r}")
    return found


def title_of(data: list[str]) -> str:
    """Name the data for headings."""
    return Path(data[0]).stem + (f" and {len(data) - 1:,} more" if len(data) > 1 else "")


def print_unread(source: Mapping[str, Any]) -> None:
    """Print which split was read, and what of folders wasn't, as far as the marks of a source hold it."""
    from varlen.files.paths import LeftOut, unread

    left_out = [LeftOut(**{**one, "names": tuple(one["names"])}) for one in source.get("left_out", ())]
    note = unread(left_out, source.get("taken", ()))
    if note is not None:
        print(f"  {note}")


def _as_columns(columns: Sequence[str]) -> dict[str, str]:
    """Return the column of each role."""
    roles: dict[str, str] = {}
    for pair in columns:
        role, equals, name = pair.partition("=")
        if not (role and equals and name):
            raise SettingError(f"--column must be of the form ROLE=NAME, such as text=body; got {pair!r}")
        if role in roles:
            raise SettingError(f"--column names {role} twice, {roles[role]} and {name}; keep one of them")
        roles[role] = name
    return roles

"""`varlen pack`: write a packed data set that a trainer reads as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from varlen.arguments import TOKENS, as_tokens
from varlen.cli.options import (
    AsJson,
    Data,
    Overwrite,
    Processes,
    Ray,
    documents_option,
    option_in,
    output_option,
    print_json,
    print_unread,
)
from varlen.counts import many

if TYPE_CHECKING:
    from varlen.files.losses import Losses
    from varlen.offline.pack import PackedSet

packing_option = option_in("Packing")
_BYTES = (
    "tokens are bytes, as no --tokenizer was given; for a model with a tokenizer, pack again with --tokenizer"
)


def pack(
    data: Data,
    output: Annotated[
        Path, output_option("--output", "-o", metavar="FOLDER", help="Where the packed set goes.")
    ],
    *,
    capacity: Annotated[str, packing_option(metavar="N", help=f"Tokens a row can hold: {TOKENS}.")] = "4096",
    reading: dict[str, Any],  # those of `read_options`, which `reads_documents` puts in its place
    method: Annotated[
        str,
        packing_option(
            help="Of packing; best_fit_decreasing fills rows slightly better. For Megatron-Bridge, "
            "first_fit_shuffle and first_fit_decreasing are its own: the very packs that it makes."
        ),
    ] = "best_fit",
    overlong: Annotated[
        str | None,
        packing_option(
            help="Documents longer than a row: split, truncate, drop or error.  "
            "[dim]\\[default: split; for Megatron-Bridge error, as there][/]"
        ),
    ] = None,
    in_order: Annotated[
        bool, packing_option("--in-order", help="Pack documents as they come instead of shuffled.")
    ] = False,
    seed: Annotated[int, packing_option(help="Of the shuffle.")] = 0,
    max_documents: Annotated[
        int | None, packing_option(help="Most documents of a row.  [dim]\\[default: no limit][/]")
    ] = None,
    format_: Annotated[
        str,
        output_option(
            "--format",
            help="[bold]parquet[/] or [bold]arrow[/]; for Megatron-Bridge [bold]megatron[/], or "
            "[bold]megatron-index[/], which says where tokens stand and writes none again.",
        ),
    ] = "parquet",
    position_ids: Annotated[bool, output_option("--position-ids", help="Write position ids too.")] = False,
    trace: Annotated[
        bool, output_option("--trace", help="Write which document of the data each piece is, too.")
    ] = False,
    tokens: Annotated[
        Path | None,
        documents_option(
            metavar="FOLDER",
            help="Keep the tokens here, or take them from here: pack again without tokenizing.",
        ),
    ] = None,
    pad_to_multiple_of: PadToMultipleOf = None,
    context_parallel: ContextParallel = 1,
    tensor_parallel: TensorParallel = 1,
    sequence_parallel: SequenceParallel = False,
    longest: Longest = None,
    pad_id: PadId = None,
    megatron_split: MegatronSplit = None,
    metadata_of: MetadataOf = None,
    part_tokens: PartTokens = None,
    processes: Processes = None,
    ray: Ray = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a packed data set that a trainer reads as it is, without losing a token.

    Rows have the columns [bold]input_ids[/], [bold]labels[/] and [bold]seq_lengths[/], which TRL's SFTTrainer takes
    with padding_free=True. With --format megatron they are those of Megatron-Bridge's packed sets. A manifest beside
    them accounts for every token. An interrupted run leaves nothing that looks finished; run the same command again
    to continue where it stopped.

    [bold]Example:[/]  varlen pack 'chats/*.jsonl' -o packed --capacity 8192 --tokenizer ./my-model
    """
    from varlen.cli.options import as_crew, as_source, check_one_store
    from varlen.cli.progress import progress
    from varlen.text.identity import made_by

    given: dict[str, Any] = {
        "pad_to_multiple_of": pad_to_multiple_of,
        "context_parallel": context_parallel,
        "tensor_parallel": tensor_parallel,
        "sequence_parallel": sequence_parallel,
        "longest": None if longest is None else as_tokens(longest, "--longest"),
        "pad_id": pad_id,
        "megatron_split": megatron_split,
        "metadata_of": metadata_of,
        "part_tokens": None if part_tokens is None else as_tokens(part_tokens, "--part-tokens"),
    }
    shared: dict[str, Any] = {
        **({} if overlong is None else {"overlong": overlong}),
        "max_documents": max_documents,
        "shuffle": not in_order,
        "seed": seed,
    }
    columns = {"position_ids": position_ids, "trace": trace}
    row_tokens = as_tokens(capacity, "--capacity")
    _check_format(format_)
    if format_ in MEGATRON_FORMATS:
        given["megatron_split"] = megatron_split or split_of(reading["split"])
        packer = megatron_packer(row_tokens, method, format_, given, columns, **shared)
    else:
        refuse_others(given)
        packer = _packer(capacity=row_tokens, method=method, format=format_, **columns, **shared)
    source = as_source(data, **reading, leave_out=[path for path in (output, tokens) if path is not None])
    check_one_store(source, tokens)
    crew = as_crew(processes, ray)
    with progress() as on_progress:
        done = packer(source, output, tokens=tokens, crew=crew, overwrite=overwrite, on_progress=on_progress)
    if as_json:
        print_json(done.manifest)
        return
    mark = made_by(done.manifest)
    are_bytes = mark is not None and mark.are_bytes
    _print_summary(done.manifest, done.folder, was_there=done.was_there, are_bytes=are_bytes)


def _check_format(format_: str) -> None:
    """Refuse a format that rows can't be written in."""
    from varlen.errors import SettingError
    from varlen.files.paths import FORMAT_NAMES

    written = ("parquet", "arrow", *MEGATRON_FORMATS)
    if format_ in written:
        return
    if format_ in FORMAT_NAMES:
        raise SettingError(
            f"--format says how rows are written ({', '.join(written)}); to say that DATA is {format_}, pass "
            f"--read-as {format_}"
        )
    raise SettingError(f"--format must be one of {', '.join(written)}; got {format_!r}")


def _packer(**settings: Any) -> Callable[..., PackedSet]:
    """Return what packs for TRL and others, with settings of `PackSettings`."""
    from varlen.offline.pack import PackSettings, pack_source

    chosen = PackSettings(**settings)
    return lambda source, output, **more: pack_source(source, output, chosen, **more)


def _print_summary(manifest: dict[str, Any], folder: Path, *, was_there: bool, are_bytes: bool) -> None:
    """Print what couldn't be read, what was packed, the ledger, and how to read the output."""
    from varlen.files.losses import stored
    from varlen.files.written import MANIFEST_OF_ROWS, manifest_name, skipped_path

    ledger, settings = manifest["ledger"], manifest["settings"]
    is_megatron = manifest["kind"] != "packed"
    capacity, unit = (settings["pack_size"], "position") if is_megatron else (settings["capacity"], "token")
    if was_there:
        print(f"{folder} was finished already, from the same data and settings:")
    losses = stored(manifest)
    for sentence in losses.stretches():
        print(sentence)
    print(
        f"{many(ledger['documents_in'], 'document')}, {many(ledger['tokens_in'], unit)} -> "
        f"{many(manifest['num_packs'], 'row')} of "
        f"{capacity:,}, {100 * manifest['fill_ratio']:.2f} % full, "
        f"{many(manifest['num_targets'], 'token')} to train on"
    )
    if are_bytes:
        print(f"  {_BYTES}")
    print_unread(manifest["source"])
    longer = f"longer than {many(capacity, unit)}, "
    if "long_tokens" in manifest:  # sets of 0.1.0 don't say it
        longer += f"{many(manifest['long_tokens'], unit)} in all, "
    longer = "" if settings.get("method") == "wrapped" or is_megatron else longer
    notes = {
        "empty_documents": "left out: no tokens",
        "split_documents": f"{longer}cut into pieces",
        "truncated_documents": f"cut short ({many(ledger['truncated'], unit)} lost)",
        "dropped_documents": f"dropped ({many(ledger['dropped'], unit)} lost)",
    }
    for key, words in notes.items():
        if ledger[key]:
            print(f"  {many(ledger[key], 'document')} {words}")
    if manifest["packs_without_target"]:
        print(f"  {many(manifest['packs_without_target'], 'row')} with nothing to train on")
    for sentence in losses.texts():
        print(f"  {sentence}")
    _print_skipped(losses, skipped_path(folder))
    if is_megatron:
        print_reading(manifest, folder)
        return
    name = settings["format"]
    beside = manifest_name(folder)
    print(f"{folder}: {many(len(manifest['parts']), f'{name} file')} and {beside}. To read the rows:")
    named = f'data_dir="{folder}"' if beside == MANIFEST_OF_ROWS else f'data_files="{folder}/*.{name}"'
    print(f'  datasets.load_dataset("{name}", {named}, split="train")')


def _print_skipped(losses: Losses, log: Path) -> None:
    """List what can't be read, the first ten by name."""
    if not losses.of_reading:
        return
    print(f"  {many(losses.records, 'record')} skipped:" if losses.records else "  what can't be read:")
    with log.open(encoding="utf-8") as listed:
        lines = [line.rstrip() for _, line in zip(range(11), listed)]
    for line in lines[:10]:
        print(f"    {line}")
    if len(lines) > 10:
        print(f"    all of them in {log}")


# What `varlen pack --format megatron` takes besides, and what it says of what it wrote.

MEGATRON_FORMATS = {"megatron": "parquet", "megatron-index": "index"}
megatron_option = option_in("Megatron-Bridge")

PadToMultipleOf = Annotated[
    int | None,
    megatron_option(help="pad_seq_to_mult.  [dim]\\[default: what the parallel sizes below need][/]"),
]
ContextParallel = Annotated[int, megatron_option(metavar="CP", help="Ranks that share a sequence.")]
TensorParallel = Annotated[int, megatron_option(metavar="TP", help="Ranks that share a layer.")]
SequenceParallel = Annotated[bool, megatron_option("--sequence-parallel", help="TP divides the sequence.")]
Longest = Annotated[
    str | None,
    megatron_option(metavar="N", help="Most positions of a document.  [dim]\\[default: --capacity][/]"),
]
PadId = Annotated[
    int | None, megatron_option(help="Token of the padding.  [dim]\\[default: the end token][/]")
]
MegatronSplit = Annotated[
    str | None,
    megatron_option(help="Begins the file's name: training or validation.  [dim]\\[default: as --split][/]"),
]
MetadataOf = Annotated[
    list[Path] | None, megatron_option(metavar="FOLDER", help="The other split, whose metadata to write too.")
]
PartTokens = Annotated[
    str | None,
    megatron_option(
        metavar="N", help="Tokens of a file, to write several side by side.  [dim]\\[default: one file][/]"
    ),
]


def split_of(read: str | None) -> str:
    """Return Megatron-Bridge's word for the split that is read."""
    from varlen.files.splits import canonical

    return "validation" if read is not None and canonical(read) == "validation" else "training"


def refuse_others(given: Mapping[str, Any]) -> None:
    """Refuse options of Megatron-Bridge where another form is written."""
    from varlen.errors import SettingError

    for name, value in given.items():
        if value != signature(pack).parameters[name].default:
            raise SettingError(
                f"--{name.replace('_', '-')} goes with --format megatron alone; leave it out, or pass that format"
            )


def megatron_packer(
    capacity: int,
    method: str,
    format_: str,
    given: Mapping[str, Any],
    columns: Mapping[str, bool],
    **shared: Any,
) -> Callable[..., PackedSet]:
    """Return what packs for Megatron-Bridge."""
    from varlen.adapters.megatron.packing.alignment import alignment
    from varlen.adapters.megatron.packing.offline import MegatronPackSettings, pack_for_megatron
    from varlen.errors import SettingError

    for name, is_wanted in columns.items():
        if is_wanted:
            raise SettingError(
                f"--{name.replace('_', '-')} adds a column that Megatron-Bridge doesn't read; leave it out"
            )
    needed = alignment(given["context_parallel"], given["tensor_parallel"], given["sequence_parallel"])
    multiple = needed if given["pad_to_multiple_of"] is None else given["pad_to_multiple_of"]
    if multiple < 1 or multiple % needed:
        raise SettingError(
            f"--pad-to-multiple-of is {multiple:,}, but the parallel sizes need a multiple of {needed:,}; leave "
            "it out"
        )
    chosen: dict[str, Any] = {"algorithm": method, "format": MEGATRON_FORMATS[format_]}
    names = ("longest", "pad_id", "part_tokens")
    settings = MegatronPackSettings(
        pack_size=capacity,
        multiple=multiple,
        split=given["megatron_split"],
        **chosen,
        **{name: given[name] for name in names},
        **shared,
    )
    return lambda source, output, **more: pack_for_megatron(
        source, output, settings, metadata_of=given["metadata_of"] or [], **more
    )


def print_reading(manifest: Mapping[str, Any], folder: Path) -> None:
    """Print the files of the output, and how to read them: `open_index`, or settings of Megatron-Bridge."""
    from varlen.files.written import manifest_name

    settings = manifest["settings"]
    if "index_bytes" in manifest:
        size, where = manifest["index_bytes"], manifest["tokens"]
        print(f"{folder}: an index of {size:,} bytes over the tokens in {where}. To read the rows:")
        print(f'  varlen.adapters.megatron.open_index("{folder}")')
        return
    name = "packed_val_data_path" if settings["split"] == "validation" else "packed_train_data_path"
    files = many(len(manifest["parts"]), "Parquet file")
    print(f"{folder}: {files}, metadata and {manifest_name(folder)}. To train on it:")
    print(f"  PackedSequenceSpecs(packed_sequence_size={settings['pack_size']},")
    print(f'      {name}="{folder}/{manifest["data"]}",')
    print(f'      packed_metadata_path="{folder}/{manifest["metadata"]}",')
    print(f"      pad_seq_to_mult={settings['multiple']})")

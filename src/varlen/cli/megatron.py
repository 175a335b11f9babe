"""What `varlen pack --format megatron` takes besides, and what it says of what it wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from varlen.counts import many

if TYPE_CHECKING:
    from varlen.offline.pack import PackedSet

FORMATS = {"megatron": "parquet", "megatron-index": "index"}
_PANEL = "Megatron-Bridge"

PadToMultipleOf = Annotated[
    int | None,
    typer.Option(
        help="pad_seq_to_mult.  [dim]\\[default: what the parallel sizes below need][/]",
        rich_help_panel=_PANEL,
    ),
]
ContextParallel = Annotated[
    int, typer.Option(metavar="CP", help="Ranks that share a sequence.", rich_help_panel=_PANEL)
]
TensorParallel = Annotated[
    int, typer.Option(metavar="TP", help="Ranks that share a layer.", rich_help_panel=_PANEL)
]
SequenceParallel = Annotated[
    bool, typer.Option("--sequence-parallel", help="They divide the sequence.", rich_help_panel=_PANEL)
]
Longest = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Most positions of a document.  [dim]\\[default: --capacity][/]",
        rich_help_panel=_PANEL,
    ),
]
PadId = Annotated[
    int | None,
    typer.Option(help="Token of the padding.  [dim]\\[default: the end token][/]", rich_help_panel=_PANEL),
]
MegatronSplit = Annotated[
    str | None,
    typer.Option(
        help="Begins the file's name: training or validation.  [dim]\\[default: as --split][/]",
        rich_help_panel=_PANEL,
    ),
]
MetadataOf = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FOLDER", help="The other split, whose metadata to write too.", rich_help_panel=_PANEL
    ),
]
PartTokens = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Tokens of a file, to write several side by side.  [dim]\\[default: one file][/]",
        rich_help_panel=_PANEL,
    ),
]
_USUAL: dict[str, Any] = {
    "pad_to_multiple_of": None,
    "context_parallel": 1,
    "tensor_parallel": 1,
    "sequence_parallel": False,
    "longest": None,
    "pad_id": None,
    "megatron_split": None,
    "metadata_of": [],
    "part_tokens": None,
}


def split_of(read: str | None) -> str:
    """Return Megatron-Bridge's word for the split that is read."""
    from varlen.files.splits import canonical

    return "validation" if read is not None and canonical(read) == "validation" else "training"


def refuse_others(given: Mapping[str, Any]) -> None:
    """Refuse options of Megatron-Bridge where another form is written.

    Raises:
        SettingError: one is given.
    """
    from varlen.errors import SettingError

    for name, value in given.items():
        if value != _USUAL[name]:
            raise SettingError(
                f"--{name.replace('_', '-')} goes with --format megatron; leave one of them out"
            )


def megatron_packer(
    capacity: int,
    method: str,
    format_: str,
    given: Mapping[str, Any],
    columns: Mapping[str, bool],
    **shared: Any,
) -> Callable[..., PackedSet]:
    """Return what packs for Megatron-Bridge.

    Args:
        capacity: positions of a row.
        method: of packing.
        format_: of `FORMATS`.
        given: the options of Megatron-Bridge, by name.
        columns: other columns that were asked for.
        shared: settings that other forms have too.

    Raises:
        SettingError: an option out of its range, or two that contradict each other.
    """
    from varlen.adapters.megatron.packing.alignment import alignment
    from varlen.adapters.megatron.packing.offline import pack_for_megatron
    from varlen.adapters.megatron.packing.settings import MegatronPackSettings
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
    chosen: dict[str, Any] = {"algorithm": method, "format": FORMATS[format_]}
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
        source, output, settings, metadata_of=given["metadata_of"], **more
    )


def print_reading(manifest: Mapping[str, Any], folder: Path) -> None:
    """Say what lies there, and how Megatron-Bridge reads it."""
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

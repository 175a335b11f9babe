"""`varlen index`: tokenize once into a token store, from which packs are made any number of times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from varlen.cli.options import (
    AsJson,
    Documents,
    Overwrite,
    Processes,
    Ray,
    output_option,
    print_json,
    print_unread,
)
from varlen.counts import many


def index(
    data: Documents,
    output: Annotated[
        Path, output_option("--output", "-o", help="Folder of the store; it appears when it is whole.")
    ],
    *,
    reading: dict[str, Any],
    processes: Processes = None,
    ray: Ray = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Tokenize documents once into a token store, shard by shard.

    A store holds tokens, what is trained of them, and the length of every document. `varlen pack` takes it in place
    of documents, and packs it at any capacity without tokenizing again. An interrupted run leaves nothing that looks
    finished; run the same command again to continue where it stopped. To add files, name the same store with more
    files; what it already holds is unchanged.

    [bold]Example:[/]  varlen index 'chats/*.jsonl' -o store --tokenizer ./my-model
    """
    from varlen.cli.options import as_crew, as_documents
    from varlen.cli.progress import progress
    from varlen.offline.index import index_source

    source = as_documents(data, **reading, leave_out=[output])
    with progress() as on_progress:
        store, was_there = index_source(
            source, output, crew=as_crew(processes, ray), overwrite=overwrite, on_progress=on_progress
        )
    if as_json:
        print_json(store.manifest)
        return
    _print_summary(store.manifest, output, was_there=was_there)


def _print_summary(manifest: dict[str, Any], folder: Path, *, was_there: bool) -> None:
    """Print what the store lacks, what it holds, and how to use it."""
    from varlen.files.losses import stored
    from varlen.text.identity import made_by

    if was_there:
        print(f"{folder} was finished already, from the same data and settings:")
    losses = stored(manifest)
    for sentence in losses.stretches():
        print(sentence)
    print(
        f"{many(manifest['num_documents'], 'document')}, {many(manifest['num_tokens'], 'token')} in "
        f"{many(len(manifest['shards']), 'shard')}, {many(manifest['num_targets'], 'token')} to train on"
    )
    if manifest.get("grown") and not was_there:
        print(f"  {many(manifest['grown'][-1]['num_documents'], 'document')} of them were there before")
    print_unread(manifest["source"])
    if (mark := made_by(manifest)) is not None and mark.are_bytes:
        again = "for a model with a tokenizer, index again with --tokenizer"
        print(f"  tokens are bytes, as no --tokenizer was given; {again}")
    if losses.of_reading:
        were = f"{many(losses.records, 'record')} skipped, " if losses.records else ""
        print(f"  {were}listed in skipped.log of each shard")
    for sentence in losses.texts():
        print(f"  {sentence}")
    print(f'To train on it:  varlen train --init config.toml, with data.source = "{folder}"')
    print(f"For other trainers, packed files:  varlen pack {folder} -o packed --capacity 8192")

"""The same two rows in several formats, and the texts that a source gives."""

import io

import pyarrow as pa
import pyarrow.parquet as pq

from varlen.documents.source import open_source

LINES = b'{"text": "one"}\n{"text": "two"}\n'


def parquet(table: pa.Table | None = None) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": ["one", "two"]}) if table is None else table, sink)
    return sink.getvalue()


def arrow(make, table: pa.Table | None = None) -> bytes:
    sink = io.BytesIO()
    table = pa.table({"text": ["one", "two"]}) if table is None else table
    with make(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def texts_of(data, **settings: object) -> list[str]:
    source = open_source(data, append_eos=False, **settings)
    found = []
    for part in source.parts():
        for documents in source.read(part):
            content, bounds = documents.tokens.astype("uint8").tobytes(), documents.offsets.tolist()
            found += [content[a:b].decode() for a, b in zip(bounds, bounds[1:])]
    return found

"""Small compressed files of text that unpack to gigabytes: memory stays bounded, and so does the time of a look."""

import gzip
import subprocess
import sys

import pytest
from tests.files.shared_values import MB, PEAK

LIMIT = 6 * MB
READ = (
    PEAK
    + f"""
import sys
from varlen.files.formats import json, jsonl, text
for module, name in (
    (jsonl, "MOST_RECORD_BYTES"), (json, "MOST_RECORD_BYTES"), (text, "_MOST_DOCUMENT_BYTES")
):
    setattr(module, name, {LIMIT})
from varlen.files.formats import csv
csv._MOST_FIELD_CHARACTERS = {LIMIT}
from varlen.documents.source import open_source
before = peak()
source = open_source(sys.argv[1], on_error="skip")
count = lost = 0
for part in source.parts():
    for documents in source.read(part):
        count, lost = count + len(documents), lost + documents.losses.of_reading
print(count, lost, (peak() - before) // 1024)
"""
)
FILL = b"a" * MB
LINE = b"a" * 1023 + b"\n"
FINE = b'{"text": "fine"}'
TIMES = 64
BOMBS = {
    "line.jsonl.gz": ([FINE + b'\n{"text": "', *[FILL] * TIMES, b'"}\n', FINE], 1),
    "no_end.txt.gz": ([FILL] * TIMES, 0),
    "paragraph.txt.gz": ([LINE * 1024] * TIMES, 0),
    "value.json.gz": ([b"[" + FINE + b',{"text": "', *[FILL] * TIMES, b'"},' + FINE + b"]"], 1),
    "open.json.gz": ([b"[" + FINE + b',{"text": "', *[FILL] * TIMES], 1),
    "escapes.json.gz": ([b"[" + FINE + b',{"text": "', *[b'\\"' * (MB // 2)] * TIMES], 1),
    "brackets.json.gz": ([b"[" + FINE + b",", *[b"[" * MB] * TIMES], 1),
    "blank.json.gz": ([b"[" + FINE + b",", *[b"\n" * MB] * TIMES, FINE + b"]"], 2),
    "field.csv.gz": ([b"text\nfine\n", *[FILL] * TIMES, b"\nfine\n"], 1),
    "quote.csv.gz": ([b'text,id\nfine,1\n"', *[LINE * 1024] * TIMES], 1),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_text_that_unpacks_to_far_more_is_refused_or_read_in_bounded_memory(tmp_path, name):
    pieces, count = BOMBS[name]
    path = tmp_path / name
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.writelines(pieces)
    assert path.stat().st_size < 3 * MB

    done = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, timeout=240
    )

    assert done.returncode == 0, done.stderr[-2000:]
    found, lost, grown = map(int, done.stdout.split())
    assert found == count
    assert lost > 0 or name == "blank.json.gz"
    assert grown < 12 * LIMIT // MB

"""Rows in memory for tests, in every form that an entry point takes, and the same rows in a file."""

import json

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import torch


def _user(text):
    return {"role": "user", "content": text}


CHATS = [
    {"messages": [_user(f"hi {n}"), {"role": "assistant", "content": "yo " * (n % 7 + 1)}]}
    for n in range(150)
]
TEXTS = [{"text": f"abc é {n} " * (n % 9 + 1)} for n in range(200)]
TOKENS = [{"input_ids": list(range(n % 30 + 1))} for n in range(200)]
KINDS = {"chats": CHATS, "texts": TEXTS, "tokens": TOKENS}


class Numbered:
    """Rows by number, as torch's data sets have them."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


class Again:
    """Rows that can be iterated over as often as wanted."""

    def __init__(self, rows):
        self.rows, self.passes = rows, 0

    def __iter__(self):
        self.passes += 1
        return iter(self.rows)


def _shuffled(rows):
    """A data set that gives the rows by indices."""
    order = np.random.default_rng(5).permutation(len(rows))
    return datasets.Dataset.from_list([rows[n] for n in order]).select(np.argsort(order).tolist())


def _filtered(rows):
    mixed = [{**row, "keep": n % 2} for row in rows for n in (0, 1)]
    return datasets.Dataset.from_list(mixed).filter(lambda row: row["keep"] == 1)


def _split(rows):
    return datasets.Dataset.from_list(rows[:70]), datasets.Dataset.from_list(rows[70:])


FORMS = {
    "list": lambda rows: rows,
    "tuple": tuple,
    "dict of columns": lambda rows: {name: [row[name] for row in rows] for name in rows[0]},
    "Dataset": datasets.Dataset.from_list,
    "Dataset by indices": _shuffled,
    "Dataset filtered": _filtered,
    "Datasets joined": lambda rows: datasets.concatenate_datasets(_split(rows)),
    "Dataset as numpy": lambda rows: datasets.Dataset.from_list(rows).with_format("numpy"),
    "Dataset transformed": lambda rows: datasets.Dataset.from_list(rows).with_transform(lambda batch: batch),
    "DatasetDict": lambda rows: datasets.DatasetDict(
        train=datasets.Dataset.from_list(rows), test=datasets.Dataset.from_list(rows[:3])
    ),
    "Table": pa.Table.from_pylist,
    "Table in chunks": lambda rows: pa.concat_tables(
        [pa.Table.from_pylist(rows[:7]), pa.Table.from_pylist(rows[7:])]
    ),
    "RecordBatch": pa.RecordBatch.from_pylist,
    "RecordBatchReader": lambda rows: pa.Table.from_pylist(rows).to_reader(13),
    "DataFrame": pd.DataFrame,
    "map-style": Numbered,
    "list of sources": lambda rows: [rows[:70], rows[70:]],
}
"""By name: what makes a form of a list of dicts."""
ITERABLES = {
    "function": lambda rows: lambda: iter(rows),
    "re-iterable": Again,
    "IterableDataset": lambda rows: datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3),
    "generator": lambda rows: (row for row in rows),
}
OF_ARRAYS = {
    "numpy": lambda rows: [{"input_ids": np.array(row["input_ids"])} for row in rows],
    "torch": lambda rows: [{"input_ids": torch.tensor(row["input_ids"])} for row in rows],
    "Arrow": lambda rows: [{"input_ids": pa.array(row["input_ids"])} for row in rows],
}


def as_file(rows, path):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path

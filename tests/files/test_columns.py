"""Columns mean what the library that made them says; those that can't be read are refused."""

import datetime
import decimal
import importlib.util
import json
import subprocess
import sys
import uuid

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.files.contents import arrow, parquet, texts_of
from tests.support.listed_files import find_files

import varlen as vl
from varlen.documents.source import open_source
from varlen.errors import SourceError
from varlen.files.columns import find_columns
from varlen.files.formats.reader import all_columns
from varlen.files.rows import json_kind
from varlen.files.token_tables import flat_values, list_column
from varlen.store.open import open_tokens


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()])
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_binary_columns_are_text_on_request(tmp_path, kind, name):
    table = pa.table({"text": pa.array(["one", "zwölf".encode(), b"\xff", None, "two"], kind)})
    (tmp_path / name).write_bytes(
        parquet(table) if name.endswith("parquet") else arrow(pa.ipc.new_file, table)
    )

    with pytest.raises(
        SourceError, match=r"holds bytes in `text`, .*--binary-as-text \(binary_as_text=True\)"
    ):
        texts_of(tmp_path / name)
    with pytest.raises(SourceError, match="row 3 holds text that is not valid UTF-8"):
        texts_of(tmp_path / name, binary_as_text=True)
    assert texts_of(tmp_path / name, binary_as_text=True, on_error="skip") == ["one", "zwölf", "two"]


def test_binary_texts_of_chats_are_text_on_request(tmp_path):
    kind = pa.list_(pa.struct([("role", pa.binary()), ("content", pa.large_binary())]))
    messages = [[{"role": b"user", "content": b"hi"}, {"role": b"assistant", "content": b"you"}]]
    (tmp_path / "a.parquet").write_bytes(parquet(pa.table({"messages": pa.array(messages, kind)})))
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]})
    )

    [binary] = list(
        open_source(tmp_path / "a.parquet", binary_as_text=True).read(
            open_source(tmp_path / "a.parquet", binary_as_text=True).parts()[0]
        )
    )
    [plain] = list(open_source(tmp_path / "b.jsonl").read(open_source(tmp_path / "b.jsonl").parts()[0]))

    assert binary.tokens.tolist() == plain.tokens.tolist()


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "s.arrow"])
def test_two_columns_of_one_name_are_refused_where_they_are_read(tmp_path, name):
    table = pa.Table.from_arrays(
        [pa.array(["a"]), pa.array(["b"]), pa.array([1])], names=["text", "text", "id"]
    )
    other = pa.Table.from_arrays([pa.array(["a"]), pa.array([2]), pa.array([1])], names=["text", "id", "id"])
    make = {"a.parquet": parquet, "a.arrow": lambda t: arrow(pa.ipc.new_file, t)}
    write = make.get(name, lambda t: arrow(pa.ipc.new_stream, t))

    (tmp_path / name).write_bytes(write(table))
    with pytest.raises(SourceError, match=r"has 2 columns called `text`; rename all but one"):
        texts_of(tmp_path / name)
    (tmp_path / name).write_bytes(write(other))
    assert texts_of(tmp_path / name) == ["a"]


def test_two_columns_of_ready_tokens_are_refused_in_every_mode(tmp_path):
    ids = pa.array([[1, 2]], pa.list_(pa.int32()))
    table = pa.Table.from_arrays([ids, ids], names=["input_ids", "input_ids"])
    (tmp_path / "a.arrow").write_bytes(arrow(pa.ipc.new_file, table))

    assert open_tokens(tmp_path / "a.arrow") is None
    with pytest.raises(SourceError, match="has 2 columns called `input_ids`"):
        vl.PackedLoader(str(tmp_path / "a.arrow"), capacity=4, global_batch_size=1, mode="indexed", worker="thread",
                        cache=tmp_path / "cache")  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (["prompt", "chosen", "rejected"], r"preference pairs .`chosen` and `rejected`.* --column completion=chosen"),
        (["chosen", "rejected"], r"--column messages=chosen .*text=chosen.*PackedDPOTrainer"),
        (["prompt", "chosen_response", "rejected_response"], "--column completion=chosen_response"),
        (["chosen_input_ids", "rejected_input_ids"], "--column input_ids=chosen_input_ids"),
    ],
)  # fmt: skip
def test_preference_pairs_are_told_what_they_are(columns, said):
    with pytest.raises(SourceError, match=said):
        find_columns(columns, {}, "a.jsonl")


def test_the_better_answers_of_pairs_are_trained_on_where_they_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "2+2=", "chosen": "4", "rejected": "5"}))

    assert texts_of(tmp_path / "a.jsonl", columns={"completion": "chosen"}) == ["2+2=4"]


KINDS = ("file.arrow", "stream.arrow", "zstd.arrow", "a.parquet", "plain.parquet", "v2.parquet")
TEXTS = ['{"a":[1,null]}', None, "null", '"s"', "5"]
MEANT = [{"a": [1, None]}, None, None, "s", 5]


def storage_of(kind):
    """The type in which JSON's texts lie, however deep."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return next((found for found in map(storage_of, inner) if found is not None), None)


def write(folder, kind, table):
    path = folder / kind
    if kind.endswith("parquet"):
        version = "2.0" if kind == "v2.parquet" else "1.0"
        # Slices of views can't be written.
        rows = 1000 if "view" in str(storage_of(table.schema.field(0).type)) else 2
        pq.write_table(
            table, path, row_group_size=rows, store_schema=kind != "plain.parquet", data_page_version=version
        )
        return path
    options = pa.ipc.IpcWriteOptions(compression="zstd" if kind == "zstd.arrow" else None)
    opened = pa.ipc.new_stream if kind == "stream.arrow" else pa.ipc.new_file
    with opened(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def column_of(path):
    return [value for columns, _ in all_columns(find_files(path)[0]) for value in columns["x"]]


def int32(*numbers):
    return pa.array(numbers, type=pa.int32())


def cells(storage):
    return pa.array(TEXTS, type=pa.json_(storage))


def nested(leaf):
    """A column of JSON's type within every other, and what it means."""
    a, *rest = MEANT
    return {
        "alone": (leaf, MEANT),
        "sliced": (pa.concat_arrays([leaf, leaf])[3:8], [*MEANT[3:], *MEANT[:3]]),
        "list": (pa.ListArray.from_arrays(int32(0, 2, 2, 5), leaf), [[a, None], [], rest[1:]]),
        "large": (
            pa.LargeListArray.from_arrays(pa.array([0, 2, 5]), leaf),
            [[a, None], rest[1:]],
        ),
        "fixed": (pa.FixedSizeListArray.from_arrays(leaf, 5), [MEANT]),
        "view": (pa.ListViewArray.from_arrays(int32(3, 0), int32(2, 1), leaf), [["s", 5], [a]]),
        "struct": (
            pa.StructArray.from_arrays([leaf, int32(*range(5))], ["j", "k"]),
            [{"j": value, "k": number} for number, value in enumerate(MEANT)],
        ),
        "map": (
            pa.MapArray.from_arrays(int32(0, 2, 5), pa.array(list("abcde")), leaf),
            [dict(zip("ab", MEANT)), dict(zip("cde", MEANT[2:]))],
        ),
        "deep": (
            pa.ListArray.from_arrays(
                int32(0, 1, 5), pa.StructArray.from_arrays([pa.ListArray.from_arrays(int32(*range(6)), leaf)], ["j"])
            ),
            [[{"j": [a]}], [{"j": [value]} for value in rest]],
        ),
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_json_s_type_is_decoded_wherever_it_stands(tmp_path, kind, storage):
    for number, (name, (column, meant)) in enumerate(nested(cells(storage)).items()):
        (folder := tmp_path / f"{number}").mkdir()
        assert column_of(write(folder, kind, pa.table({"x": column}))) == meant, name


PLAIN = {
    "dictionary": (pa.array(["a", "b", None, "a"]).dictionary_encode(), ["a", "b", None, "a"]),
    "string_view": (pa.array(["a", None], type=pa.string_view()), ["a", None]),
    "large_string": (pa.array(["a", None], type=pa.large_string()), ["a", None]),
    "runs": (pa.RunEndEncodedArray.from_arrays(int32(2, 3), pa.array(["a", "b"])), ["a", "a", "b"]),
    "map": (pa.array([[("a", 1), ("b", None)], None], type=pa.map_("string", "int64")), [{"a": 1, "b": None}, None]),
    "map of maps": (
        pa.array([[("a", [("b", "c")])]], type=pa.map_("string", pa.map_("string", "string"))),
        [{"a": {"b": "c"}}],
    ),
    "tensor": (
        pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int32(), [2]), pa.array([[1, 2]], type=pa.list_(pa.int32(), 2))
        ),
        [[1, 2]],
    ),
    "large_list_view": (pa.array([[1], None], type=pa.large_list_view(pa.int64())), [[1], None]),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["file.arrow", "stream.arrow", "a.parquet", "plain.parquet"])
@pytest.mark.parametrize("name", PLAIN)
def test_other_types_mean_what_arrow_says(tmp_path, kind, name):
    column, meant = PLAIN[name]
    if name == "runs" and kind.endswith("parquet"):
        pytest.skip("Parquet has no such type")
    assert column_of(write(tmp_path, kind, pa.table({"x": column}))) == meant


@pytest.mark.parametrize(
    "column",
    [
        pa.array([uuid.UUID(int=5).bytes], type=pa.uuid()),
        pa.array([datetime.datetime(2020, 1, 1)]),
        pa.array([decimal.Decimal("1.5")]),
        pa.array([datetime.timedelta(3)]),
        pa.array([1], type=pa.bool8()),
        pa.array([b"a"]),
        pa.array([{"de": "a", "en": "b"}]),
        pa.ExtensionArray.from_storage(pa.opaque(pa.binary(), "t", "v"), pa.array([b"x"])),
        pa.array(["7"], type=pa.json_()),
        pa.array(["{"], type=pa.json_()),
        pa.array([[("a", "b")]], type=pa.map_("string", "string")),
    ],
    ids=lambda column: str(column.type),
)
@pytest.mark.parametrize("kind", ["file.arrow", "plain.parquet"])
def test_what_is_no_text_is_a_fault_of_its_row_that_says_what_it_is(tmp_path, column, kind):
    source = open_source(
        write(tmp_path, kind, pa.table({"x": column})), columns={"text": "x"}, on_error="skip"
    )

    (documents,) = [one for part in source.parts() for one in source.read(part)]

    assert len(documents) == 0
    (fault,) = documents.faults
    assert "row 1 holds " in str(fault)
    assert "`x`" in str(fault) or "`text`" in str(fault)


def test_a_text_column_of_json_holds_strings(tmp_path):
    table = pa.table({"text": pa.array(['"a"', "7", None, '"b\\n"', "[", '{"a": 1}'], type=pa.json_())})
    source = open_source(write(tmp_path, "a.parquet", table), on_error="skip", append_eos=False)

    documents = [one for part in source.parts() for one in source.read(part)]

    assert b"".join(bytes(one.tokens.tolist()) for one in documents) == b"ab\n"
    said = [str(fault).split("row ")[1] for one in documents for fault in one.faults]
    assert [one.split(" in `text`")[0] for one in said] == [
        "2 holds number",
        "3 holds null",
        "5 holds text that is not valid JSON (Expecting value at position 1), in a column of JSON",
        "6 holds object",
    ]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text('aé"{\n', max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=2),
    max_leaves=5,
)
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }};"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)


@given(st.lists(st.tuples(st.dictionaries(st.text("ab", min_size=1, max_size=2), VALUES, max_size=3),
                          st.lists(st.dictionaries(st.text("nx", min_size=1, max_size=2), VALUES, max_size=2),
                                   max_size=2)), min_size=1, max_size=4))  # fmt: skip
def test_chats_of_json_s_type_are_those_of_json_lines(tmp_path_factory, drawn):
    folder = tmp_path_factory.mktemp("chats")
    rows = [
        {
            "messages": [
                {"role": "user", "content": "q", "tool_calls": None},
                {
                    "role": "assistant",
                    "content": "a",
                    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
                },
            ],
            "tools": tools,
        }
        for arguments, tools in drawn
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pa.table({"messages": messages_of(rows), "tools": tools_of(rows)})
    found = {}
    for kind in ("a.jsonl", "file.arrow", "a.parquet", "plain.parquet"):
        path = folder / kind if kind == "a.jsonl" else write(folder, kind, table)
        source = open_source(path, chat_template=TEMPLATE, supervise="all", append_eos=False)
        found[kind] = [
            ids.tolist()
            for part in source.parts()
            for documents in source.read(part)
            for ids in np.split(documents.tokens, documents.offsets[1:-1])
        ]
    for kind in found:
        assert found[kind] == found["a.jsonl"], kind


def messages_of(rows):
    """Messages as `datasets` types them where arguments differ: a list of objects whose arguments are JSON's."""
    call = pa.struct(
        [("type", pa.string()), ("function", pa.struct([("name", pa.string()), ("arguments", pa.string())]))]
    )
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))])
    texts = json.loads(json.dumps([row["messages"] for row in rows]))
    for chat in texts:
        for one in chat:
            for made in one["tool_calls"] or []:
                made["function"]["arguments"] = json.dumps(made["function"]["arguments"])
    return as_json_type(pa.array(texts, type=pa.list_(message)), ("arguments",))  # fmt: skip


def tools_of(rows):
    texts = pa.array(
        [[json.dumps(tool) for tool in row["tools"]] for row in rows], type=pa.list_(pa.string())
    )
    return pa.ListArray.from_arrays(texts.offsets, as_json_type(texts.values, None))


def as_json_type(array, names):
    """Give texts JSON's type: all, or those of some fields."""
    if pa.types.is_list(array.type):
        return pa.ListArray.from_arrays(
            array.offsets, as_json_type(array.values, names), mask=array.is_null()
        )
    if pa.types.is_struct(array.type):
        fields = {
            field.name: as_json_type(array.field(field.name), None if field.name in names else names)
            for field in array.type
        }
        return pa.StructArray.from_arrays(list(fields.values()), list(fields), mask=array.is_null())
    if names is None:
        return pa.ExtensionArray.from_storage(pa.json_(), array)
    return array


def test_datasets_own_features_are_read_as_datasets_reads_them(tmp_path):
    try:
        import datasets
    except ImportError:
        pytest.skip("the library that has these types is not installed")
    features = datasets.Features(
        {
            "x": datasets.List({"role": datasets.Value("string"), "said": datasets.Json()}),
            "text": datasets.Value("large_string"),
        }
    )
    rows = [{"x": [{"role": "a", "said": {"k": None, "l": [1, {}]}}], "text": "t"}, {"x": None, "text": "u"}]
    made = datasets.Dataset.from_list(rows, features=features)
    made.save_to_disk(tmp_path / "saved")
    made.to_parquet(tmp_path / "a.parquet")

    for path in (tmp_path / "saved", tmp_path / "a.parquet"):
        assert column_of(path) == made["x"][:]


def test_a_cell_that_is_no_json_is_named_in_json_s_words():
    from varlen.files.rows import NotJson

    assert json_kind(NotJson("text that is not valid JSON")) == "text that is not valid JSON"


_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
rows_of_numbers = st.lists(st.lists(st.integers(0, 127), max_size=5), max_size=6)


@given(rows_of_numbers, st.sampled_from(_INTEGERS))
def test_a_list_column_holds_the_rows_between_its_offsets(rows, dtype):
    """Every dtype of whole numbers, and rows and columns without values."""
    offsets = np.cumsum([0, *map(len, rows)])
    column = list_column(np.array([number for row in rows for number in row], dtype=dtype), offsets)
    column.validate(full=True)
    assert column.type == pa.list_(getattr(pa, dtype)())
    assert column.to_pylist() == rows


@given(st.lists(st.lists(st.booleans(), max_size=11), max_size=6))
def test_booleans_are_a_bit_each_in_arrow_and_keep_their_places(rows):
    """NumPy gives each a byte."""
    values = np.array([flag for row in rows for flag in row], dtype=bool)
    column = list_column(values, np.cumsum([0, *map(len, rows)]))
    column.validate(full=True)
    assert column.type == pa.list_(pa.bool_())
    assert column.to_pylist() == rows


def test_a_list_column_takes_other_strides_and_byte_orders():
    """Neither is a buffer that Arrow could take as it lies."""
    values = np.arange(12, dtype=">i4")[::3]
    assert list_column(values, np.array([0, 1, 4])).to_pylist() == [[0], [3, 6, 9]]


@given(rows_of_numbers, st.sampled_from(_INTEGERS), st.booleans(), st.data())
def test_flat_values_are_those_of_the_slice(rows, dtype, large, data):
    """Rows before and after a slice leave no trace in its values or offsets."""
    kind = (pa.large_list if large else pa.list_)(getattr(pa, dtype)())
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    found = flat_values(pa.array(rows, type=kind).slice(start, stop - start))
    assert found is not None
    values, offsets = found
    assert (values.dtype, offsets.dtype) == (np.dtype(dtype), np.int64)
    assert [values[a:b].tolist() for a, b in zip(offsets, offsets[1:])] == rows[start:stop]
    assert len(offsets) == stop - start + 1
    assert int(offsets[-1]) == len(values)


@pytest.mark.parametrize("rows", [[[1], None], [[1], [None]]])
def test_nulls_have_no_flat_values(rows):
    """A null has no number: what stands in its place in the buffer is not one."""
    assert flat_values(pa.array(rows, type=pa.list_(pa.int32()))) is None
    assert flat_values(pa.array(rows, type=pa.list_(pa.int32())).slice(0, 0)) is not None


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="pandas is not installed")
def test_packing_tokens_imports_no_pandas(tmp_path):
    """Importing it takes longer than packing a small set."""
    program = """
import sys
from pathlib import Path
import numpy as np
from varlen.offline.pack import pack_source
from varlen.offline.pack import PackSettings
from varlen.files.token_tables import list_column
from varlen.documents.source import open_source
from varlen.files.token_tables import write_table
folder = Path(sys.argv[1])
column = list_column(np.arange(100, dtype=np.int32), np.arange(0, 101, 10))
write_table({"input_ids": column}, folder / "tokens.parquet", "parquet", 10)
pack_source(open_source([folder / "tokens.parquet"]), folder / "packed", PackSettings(capacity=64))
assert (folder / "packed" / ".manifest.json").is_file()
print("pandas" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["False"]), done.stderr

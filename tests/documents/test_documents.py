"""Documents from files and rows: what comes out, masks, faults in one sentence each, and their order."""

import bz2
import gzip
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.chats import GEMMA, LLAMA
from tests.support.listed_files import find_files

from varlen.documents import order as order_module
from varlen.documents.documents import Documents, Encoding, encode_rows
from varlen.documents.order import STRETCH, DocumentOrder, hashed
from varlen.documents.source import Source, open_source
from varlen.documents.texts import interpreter_texts, read_texts
from varlen.errors import SettingError, SourceError
from varlen.files.columns import Columns
from varlen.files.rows import Rows
from varlen.text.chat_template import chat_template
from varlen.text.load_tokenizer import load_tokenizer, train_bpe
from varlen.text.tokenizer import FastTokenizer, Specials, Tokenizer

EOS = 256


def encoded(kind, columns, tokenizer: Tokenizer | None = None, **options) -> Documents:
    made = tokenizer or load_tokenizer()
    template = chat_template(None, special_tokens=made.specials.texts, end_marks=made.specials.end_marks)
    rows = Rows(columns=columns, numbers=range(1, 1 + len(next(iter(columns.values())))), path="a.jsonl")
    encoding = Encoding(tokenizer=made, template=template, **options)
    return encode_rows(rows, Columns(kind=kind, names={name: name for name in columns}), encoding)


def each(documents: Documents) -> list[list[int]]:
    bounds = documents.offsets.tolist()
    return [documents.tokens[a:b].tolist() for a, b in zip(bounds, bounds[1:])]


def read_all(source: Source) -> Documents:
    found = [documents for part in source.parts() for documents in source.read(part)]
    masks = [np.ones(len(d.tokens), np.uint8) if d.loss_mask is None else d.loss_mask for d in found]
    return Documents(
        tokens=np.concatenate([d.tokens for d in found]),
        offsets=np.cumsum([0, *(length for d in found for length in d.lengths)]),
        loss_mask=np.concatenate(masks),
        faults=tuple(fault for d in found for fault in d.faults),
    )


def supervised(documents: Documents) -> list[list[int]]:
    mask = np.ones(len(documents.tokens)) if documents.loss_mask is None else documents.loss_mask
    bounds = documents.offsets.tolist()
    return [documents.tokens[a:b][mask[a:b] == 1].tolist() for a, b in zip(bounds, bounds[1:])]


@given(st.lists(st.text(max_size=5)), st.booleans())
def test_a_text_ends_in_one_eos_and_an_empty_one_has_no_token_at_all(texts, append_eos):
    documents = encoded("text", {"text": texts}, append_eos=append_eos)

    ends = [EOS] if append_eos else []
    assert each(documents) == [[*text.encode(), *ends] if text else [] for text in texts]
    assert documents.loss_mask is None


def test_a_text_that_ends_in_the_eos_already_gets_no_second_one():
    tokenizer = load_tokenizer(lambda text: [ord(c) % 7 for c in text], eos=3)

    documents = encoded("text", {"text": ["a", "\x03", "\x03\x03a", "a\x03", ""]}, tokenizer)

    assert each(documents) == [[6, 3], [3], [3, 3, 6, 3], [6, 3], []]


@given(st.lists(st.sampled_from(["ab", "", None, 5, "\ud800", b"", ["a"]])))
def test_what_is_no_text_is_a_fault_of_its_row_and_the_other_rows_are_kept(values):
    documents = encoded("text", {"text": values})

    good = [value for value in values if value in ("ab", "")]
    assert each(documents) == [[97, 98, EOS] if value else [] for value in good]
    bad = [n for n, value in enumerate(values, start=1) if value not in ("ab", "")]
    assert [str(fault).split(" holds")[0] for fault in documents.faults] == [f"a.jsonl row {n}" for n in bad]


CHATS = [
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
    [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "żółć?"},
        {"role": "assistant", "content": "one 🦆"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "two\nlines"},
    ],
]


def test_what_is_supervised_in_chats_decodes_to_the_assistants_words_and_end_marks():
    documents = encoded("messages", {"messages": CHATS})

    end = 259
    assert supervised(documents) == [[*b"hello", end], [*"one 🦆".encode(), end, *b"two\nlines", end]]
    assert [ids.count(EOS) for ids in each(documents)] == [0, 0]


@pytest.mark.parametrize(("template", "end"), [(LLAMA, "<|eot_id|>"), (GEMMA, "<end_of_turn>")])
@pytest.mark.parametrize("is_cuttable", [True, False])
def test_masks_hold_the_assistants_words_whether_a_text_can_be_cut_or_not(
    tmp_path, template, end, is_cuttable
):
    from tokenizers import AddedToken

    backend = train_bpe(["hello one two lines be kind user assistant " * 20], 300)
    backend.add_special_tokens([AddedToken(mark) for mark in ("<s>", end, "</s>")])
    made = load_tokenizer(backend, eos="</s>")
    assert isinstance(made, FastTokenizer)
    specials = Specials(eos_id=made.specials.eos_id, texts={"bos_token": "<s>"}, end_marks=frozenset({end}))
    tokenizer = FastTokenizer(made.backend, "t", specials, "f", made.vocab_size, is_cuttable)
    rows = [{"messages": chat[-2:]} for chat in CHATS]
    (tmp_path / "a.json").write_text(json.dumps(rows))

    documents = read_all(open_source(tmp_path, tokenizer, chat_template=template))

    texts = [tokenizer.decode(ids) for ids in supervised(documents)]
    assert [text.strip() for text in texts] == [f"hello{end}", f"two\nlines{end}"]


def test_a_completion_is_supervised_with_its_eos_and_its_prompt_is_not():
    columns = {"prompt": ["2+2=", ""], "completion": ["4", "a"]}

    documents = encoded("prompt", columns)

    assert each(documents) == [[*b"2+2=4", EOS], [*b"a", EOS]]
    assert supervised(documents) == [[*b"4", EOS], [*b"a", EOS]]
    assert encoded("prompt", columns, supervise="all").loss_mask is None


def test_a_plain_prompt_begins_as_the_tokenizer_says_whatever_stands_beside_it():
    made = load_tokenizer(lambda text: list(text.encode()), eos=0)
    tokenizer = type(made)(made.function, "t", Specials(eos_id=0, prefix_ids=(1, 2)), "f")  # type: ignore[attr-defined, call-arg]
    chat = ([CHATS[0][0]], [CHATS[0][1]])

    alone = encoded("prompt", {"prompt": ["a"], "completion": ["b"]}, tokenizer)
    beside = encoded("prompt", {"prompt": ["a", chat[0]], "completion": ["b", chat[1]]}, tokenizer)

    assert each(alone) == [[1, 2, *b"ab", 0]]
    assert supervised(alone) == [[*b"b", 0]]
    assert each(beside)[0] == each(alone)[0]
    assert each(beside)[1][0] == ord("<")


def test_a_tokenizer_without_eos_is_refused_unless_documents_are_left_without():
    tokenizer = load_tokenizer(lambda text: list(text.encode()))

    with pytest.raises(SettingError, match=r"names no token that ends a document.*--eos.*--no-eos"):
        encoded("text", {"text": ["a"]}, tokenizer)
    assert each(encoded("text", {"text": ["a"]}, tokenizer, append_eos=False)) == [[97]]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "user", "content": "a"}], "no assistant turn"),
        ([{"role": "wizard", "content": "a"}], "unknown role 'wizard'"),
        ([], "empty list"),
        (None, "must be a list of messages, found null"),
        ([{"role": "assistant", "content": "\ud800"}], "lone surrogate"),
    ],
)
def test_a_chat_that_cannot_be_used_is_named_and_skipped_where_that_is_asked_for(tmp_path, messages, said):
    rows = [{"messages": CHATS[0]}, {"messages": messages}, {"messages": CHATS[1]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))

    with pytest.raises(SourceError, match=rf"line 2 can't be used: .*{said}"):
        read_all(open_source(tmp_path))
    documents = read_all(open_source(tmp_path, on_error="skip"))
    assert len(documents) == 2
    assert len(documents.faults) == 1
    assert said in str(documents.faults[0])


def test_all_that_is_skipped_is_listed_with_its_file_and_row(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a"}\n{"text": 5}\n{"body": "b"}\nnothing\n[]\n{"text": "c"}\n'
    )
    (tmp_path / "b.csv").write_text('text,id\n"a\nb",1\nonly\nc,2\n"open')
    (tmp_path / "c.json").write_text('[{"text": "d"}, 7, {"text": "e"}, {"te')
    (tmp_path / "d.parquet").write_text("no table")

    documents = read_all(open_source(tmp_path, on_error="skip", append_eos=False))

    assert [bytes(ids).decode() for ids in each(documents)] == ["a", "c", "a\nb", "c", "d", "e"]
    assert [str(fault).removeprefix(f"{tmp_path}/")[:29] for fault in documents.faults] == [
        "a.jsonl line 2 holds number i",
        "a.jsonl line 3 has no `text`;",
        "a.jsonl line 4 is not valid J",
        "a.jsonl line 5 is a JSON arra",
        "b.csv line 4 has 1 fields, bu",
        "b.csv line 6 is not valid CSV",
        "c.json value 2 is a JSON numb",
        "c.json value 4 is not valid J",
        "d.parquet (what is left of it",
    ]


def test_tools_that_only_some_rows_have_are_given_to_the_template(tmp_path):
    template = "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}"
    template += "{% for m in messages %}{{ m.content }};{% endfor %}"
    tools = [None, [{"name": "add"}], json.dumps([{"name": "sub"}]), ""]
    rows = [{"messages": CHATS[0]}, *({"messages": CHATS[0], "tools": t} for t in tools)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))

    source = open_source(tmp_path, chat_template=template, supervise="all", append_eos=False)
    documents = [ids for part in source.parts() for d in source.read(part) for ids in each(d)]

    starts = [bytes(i for i in ids if i < 256).decode()[:5] for ids in documents]
    assert starts == ["hi;he", "hi;he", "[add]", "[sub]", "hi;he"]


TOOLS_TEMPLATE = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_tools_of_a_prompt_with_a_completion_are_given_to_the_template(tmp_path):
    tools = [{"name": "add"}]
    first, then = CHATS[0][:1], CHATS[0][1:]
    rows = [{"prompt": first, "completion": then}, {"prompt": first, "completion": then, "tools": tools}]
    rows.append({"prompt": "a hammer and", "completion": " nails", "tools": "of texts nothing is said"})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": CHATS[0], "tools": tools}))

    joined, whole = (
        read_all(open_source(tmp_path / name, chat_template=TOOLS_TEMPLATE))
        for name in ("a.jsonl", "b.jsonl")
    )

    assert each(joined)[1] == each(whole)[0] != each(joined)[0]
    assert bytes(each(joined)[2][:-1]) == b"a hammer and nails"


def test_what_a_table_adds_as_null_to_calls_and_tools_is_not_trained_on(tmp_path):
    def row(name, argument):
        call = {"function": {"name": name, "arguments": {argument: 1}}}
        tool = {"name": name, "parameters": {argument: {"type": "integer"}}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        return {"messages": [{"role": "user", "content": "q"}, said], "tools": [tool]}

    rows = [row("f", "x"), row("g", "y")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))

    table, lines = (
        read_all(open_source(tmp_path / name, chat_template=TOOLS_TEMPLATE))
        for name in ("a.parquet", "a.jsonl")
    )

    assert each(table) == each(lines)
    assert supervised(table) == supervised(lines)


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks"])
def test_the_masks_of_trl_beside_ready_tokens_say_what_is_trained_on(tmp_path, name):
    (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": [5, 6, 7], name: [0, 1, 1]}))

    documents = read_all(open_source(tmp_path / "a.jsonl"))

    assert supervised(documents) == [[6, 7]]


def test_a_mask_that_only_later_rows_have_or_two_masks_are_refused(tmp_path):
    row = {"input_ids": [5], "completion_mask": [1]}
    (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": [5]}) + "\n" + json.dumps(row))
    (tmp_path / "b.jsonl").write_text(json.dumps({**row, "assistant_masks": [0]}))

    with pytest.raises(
        SourceError, match=r"line 2 has `completion_mask`, which the file's first row has not"
    ):
        read_all(open_source(tmp_path / "a.jsonl"))
    with pytest.raises(SourceError, match=r"has `completion_mask`, `assistant_masks`, two masks .* name one"):
        read_all(open_source(tmp_path / "b.jsonl"))
    named = open_source(tmp_path / "b.jsonl", columns={"loss_mask": "assistant_masks"})
    assert supervised(read_all(named)) == [[]]


GOLDEN = [[2, 2], [2, 1], [2, 0], [2, 5], [0, 0], [0, 2], [0, 4], [0, 3], [2, 3], [2, 4], [2, 6], [0, 1]]
GOLDEN_DIGEST = "67bc0b1f28829a4a710a180379f26007a566ceb438ae551e76d55933a87cbf86"
GOLDEN_HASHES = [4376055813886386440, 4293584334300442099, 9602929869932826837]


def whole(documents, seed):
    """Shard and number of every document, in order."""
    order = DocumentOrder(np.array(documents, dtype=np.int64), seed)
    stretches = [order.stretch(n) for n in range(order.num_stretches)]
    return np.concatenate([np.zeros((2, 0), dtype=np.int64), *map(np.stack, stretches)], axis=1)


def as_they_lie(documents):
    return np.array([(s, d) for s, count in enumerate(documents) for d in range(count)]).reshape(-1, 2).T


def same_documents(order, documents):
    """Whether every document stands in the order exactly once."""
    return np.array_equal(order[:, np.lexsort(order[::-1])], as_they_lie(documents))


@given(st.lists(st.integers(0, 200), max_size=8), st.none() | st.integers(0, 2**70))
def test_every_document_has_one_place_whatever_the_shards(documents, seed):
    order = whole(documents, seed)

    assert same_documents(order, documents)
    if seed is None:
        assert np.array_equal(order, as_they_lie(documents))


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(0, 2**40))
def test_every_document_has_one_place_where_a_set_is_many_stretches(documents, seed):
    with pytest.MonkeyPatch.context() as patch:  # small ones, so that every corner is met
        patch.setattr(order_module, "_RUN", 4)
        order = DocumentOrder(np.array(documents, dtype=np.int64), seed, stretch=16)
        stretches = [np.stack(order.stretch(n)) for n in range(order.num_stretches)]

    assert all(stretch.shape[1] == 16 for stretch in stretches[:-1])
    assert same_documents(np.concatenate([np.zeros((2, 0), dtype=np.int64), *stretches], axis=1), documents)


@pytest.mark.parametrize(
    "documents", [[0, 70_000, 0, 1, 65, 63, 128_000, 0], [STRETCH], [STRETCH + 1], [1] * 300]
)
def test_large_sets_are_permuted_too_with_empty_shards_among_them(documents):
    order = whole(documents, 3)

    assert same_documents(order, documents)
    assert not np.array_equal(order, as_they_lie(documents))


def test_the_order_of_a_seed_is_the_same_on_every_machine_and_in_every_version():
    assert whole([5, 0, 7], 0).T.tolist() == GOLDEN
    digest = hashlib.sha256(whole([70_000, 130_000, 1], 1).astype("<i8").tobytes()).hexdigest()
    assert digest == GOLDEN_DIGEST
    assert hashed(np.array([0, 1, 2**40]), 5).tolist() == GOLDEN_HASHES


def test_another_seed_gives_another_order():
    orders = {whole([100], seed).tobytes() for seed in range(50)}

    assert len(orders) == 50


def test_neighbours_do_not_stay_together():
    documents = [90_000, 110_000]
    shards, numbers = whole(documents, 0)
    place = np.empty(sum(documents), dtype=np.int64)
    place[numbers + np.array([0, documents[0]])[shards]] = np.arange(sum(documents))

    apart = np.abs(np.diff(place))

    assert (apart < 10).mean() < 0.002  # at random: 20 of 65,536
    assert abs(np.corrcoef(place[:-1], np.arange(len(place) - 1))[0, 1]) < 0.05
    # Each sixteenth of the set is spread over all of the order, not gathered in one stretch of it.
    held = np.bincount(place[: len(place) // 16] // (len(place) // 16 + 1), minlength=16)
    assert held.min() > 0.5 * held.mean()
    assert held.max() < 1.5 * held.mean()


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_rows_of_jsonl_are_documents_in_order_and_empty_ones_are_left_out(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"text": "one"}, {"text": "  "}, {"text": "two"})

    assert list(read_texts(path)) == ["one", "two"]


def test_messages_become_role_and_content_lines(tmp_path):
    chat = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "!"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]},
    ]
    path = write_lines(tmp_path / "a.jsonl", {"messages": chat})

    assert list(read_texts(path)) == ["user: 2 + 2?\nassistant: 4!\nassistant: \n"]


def test_prompt_is_followed_by_its_completion_be_they_strings_or_messages(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl",
        {"prompt": "2 + 2 = ", "completion": "4"},
        {
            "prompt": [{"role": "user", "content": "hi"}],
            "completion": [{"role": "assistant", "content": "ho"}],
        },
    )

    assert list(read_texts(path)) == ["2 + 2 = 4", "user: hi\nassistant: ho\n"]


def test_messages_are_preferred_to_the_text_made_of_them(tmp_path):
    chat = [{"role": "assistant", "content": "chosen"}]
    path = write_lines(tmp_path / "a.jsonl", {"text": "<s>chosen</s>", "messages": chat})

    assert list(read_texts(path)) == ["assistant: chosen\n"]


def test_parquet_rows_are_documents_and_nested_messages_are_read(tmp_path):
    pq.write_table(pa.table({"text": ["one", "two"], "other": [1, 2]}), tmp_path / "a.parquet")
    chats = [[{"role": "user", "content": "hi"}]]
    pq.write_table(pa.table({"messages": chats}), tmp_path / "b.parquet")

    assert list(read_texts(tmp_path)) == ["one", "two", "user: hi\n"]


def test_each_text_file_of_a_folder_is_a_document(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b.md").write_text("second\n\nstill second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\xff\x00")

    assert list(read_texts(tmp_path)) == ["first", "second\n\nstill second"]


def test_a_single_text_file_is_cut_at_blank_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbffirst\r\nline\r\n\r\n \r\nsecond\n\n\n")

    assert list(read_texts(path)) == ["first\nline", "second"]


def test_a_glob_reaches_into_folders(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b.tex").write_text("deep")
    (tmp_path / "a.tex").write_text("high")

    assert list(read_texts(tmp_path / "**" / "*.tex")) == ["high", "deep"]
    assert list(read_texts(tmp_path / "**")) == ["high", "deep"]


def test_a_path_with_brackets_in_its_name_is_not_taken_for_a_pattern(tmp_path):
    path = write_lines(tmp_path / "a[1].jsonl", {"text": "one"})

    assert list(read_texts(path)) == ["one"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", r"empty \(0 bytes\)"),
        (b"\n\n", "holds no text"),
        (b'{"text": ""}\n', "all documents are empty"),
        (b'{"text": "a"}\n{"text": \n', r"line 2 is not valid JSON"),
        (
            b'{"text": "a"}\n{"text": "b\n',
            r"line 2 is not valid JSON: Unterminated string starting at column 10$",
        ),
        (b'{"text": "a"}\n[1, 2]\n', r"line 2 is a JSON array, not an object"),
        (b'{"text": "a"}\n{"text": null}\n', r"line 2 can't be used: `text` must be a string, found null"),
        (b'{"text": 3}\n', r"`text` must be a string, found number"),
        (
            b'{"body": "a", "id": 1}\n',
            r"need `text`, .* found `body`, `id`; name yours: --column text=NAME .* input_ids=NAME for tokens",
        ),
        (b'{"prompt": "a"}\n', r"found `prompt`"),
        (
            b'{"messages": "a"}\n',
            r"line 1 can't be used: a chat must be a list of messages or the JSON text of one",
        ),
        (b'{"messages": [{"content": "a"}]}\n', r"`role` and `content`"),
        (
            b'{"messages": [{"role": "user", "content": 3}]}\n',
            r"message 1 \(user\) must be text or a list of parts of text, found a number",
        ),
        (b'{"text": "\xff"}\n', r"line 1 is not valid UTF-8"),
        (b'{"text": "\\ud800"}\n', r"line 1 can't be used: it holds half a character \(a lone surrogate\)"),
        (b'{"messages": [{"role": "\\ud800", "content": "a"}]}\n', r"unknown role"),
        (b'{"messages": [{"role": "user", "content": [{"text": 5}]}]}\n', r"found a part of type None"),
        (b'{"text": "a", "n": ' + b"1" * 5000 + b"}\n", r"line 1 can't be read: a number of too many digits"),
        (b'{"text": ' + b"[" * 200_000 + b"\n", r"line 1 can't be read: .* brackets nested too deeply"),
        (bz2.compress(b'{"text": "a"}\n'), r"is compressed \(bzip2\); unpack it, or use gzip or zstd"),
    ],
)
def test_a_faulty_jsonl_file_is_named_with_its_line(tmp_path, content, said):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)

    with pytest.raises(SourceError, match=said) as caught:
        list(read_texts(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl"])
def test_a_gzip_file_is_unpacked_whatever_its_name(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b'{"text": "a"}\n'))

    assert list(read_texts(tmp_path / name)) == ["a"]


def test_an_empty_file_beside_others_is_left_out_and_alone_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(SourceError, match=r"empty \(0 bytes\)"):
        list(read_texts(tmp_path))
    (tmp_path / "b.txt").write_text("one")
    (tmp_path / "c.jsonl").write_text("")
    assert list(read_texts(tmp_path)) == ["one"]

    (tmp_path / "d.parquet").write_text("")
    with pytest.raises(SourceError, match=r"d\.parquet is empty \(0 bytes\)"):
        list(read_texts(tmp_path))


def test_what_is_neither_file_nor_folder_is_called_that(tmp_path):
    with pytest.raises(SourceError, match="an empty path"):
        find_files("")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match=r"neither a file nor a folder .*; save it to a file first"):
        find_files(tmp_path / "pipe")


def test_a_truncated_parquet_file_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one"] * 1000}), path)
    path.write_bytes(path.read_bytes()[:-40])

    with pytest.raises(SourceError, match=r"a\.parquet is not a Parquet file, or is damaged"):
        list(read_texts(path))


def test_a_parquet_file_without_text_names_its_columns(tmp_path):
    pq.write_table(pa.table({"body": ["one"]}), tmp_path / "a.parquet")

    with pytest.raises(SourceError, match="found `body`"):
        list(read_texts(tmp_path / "a.parquet"))


def test_a_file_that_is_not_text_is_an_error_that_names_the_byte(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\xff")

    with pytest.raises(SourceError, match=r"byte 3 is 0xff"):
        list(read_texts(path))


@pytest.mark.parametrize(
    ("name", "said"),
    [("missing.jsonl", "does not exist"), ("*.jsonl", "no file matches"), (".", "a folder without any")],
)
def test_where_no_file_is_found_the_way_out_is_named(tmp_path, name, said):
    with pytest.raises(SourceError, match=said):
        find_files(tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_an_error(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"text": "one"})
    path.chmod(0)

    with pytest.raises(SourceError, match="can't be read"):
        list(read_texts(path))


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("gsm8k_train.jsonl", 7473),
        ("taskmaster4.jsonl", 3710),
        ("oasst_en100_paths.parquet", 564),
        ("tau_bench_airline.parquet", 200),
        ("c4_demo.jsonl", 300),
        ("python_peps.parquet", 701),
        ("rust_rfcs.parquet", 639),
    ],
)
def test_every_row_of_real_files_is_read(data, name, rows):
    assert sum(1 for _ in read_texts(data / "text" / name)) == rows


MODULE = '''"""A module."""
import os

@decorated(
    once=True,
)
def first():
    def inner():
        return 1
    return inner

class Second:
    """é"""

    def method(self):
        pass

value = 3
async def third(): pass
'''


def names_that_are_cut(tmp_path, count=4):
    """Write the same module under several names, and return those that were cut to pieces."""
    for index in range(count):
        (tmp_path / f"m{index}.py").write_text(MODULE, encoding="utf-8")
    return list(interpreter_texts(tmp_path))


def test_top_level_functions_and_classes_are_documents_decorators_included(tmp_path):
    texts = names_that_are_cut(tmp_path)

    pieces = [text for text in texts if not text.startswith('"""A module')]
    assert pieces[0].startswith("@decorated(\n    once=True,\n)\ndef first")
    assert pieces[0].endswith("return inner\n")
    assert pieces[1].startswith("class Second:")
    assert pieces[1].endswith("pass\n")
    assert pieces[2] == "async def third(): pass\n"


def test_about_five_percent_of_modules_stay_whole_by_their_names(tmp_path):
    texts = names_that_are_cut(tmp_path, count=400)

    whole = [text for text in texts if text == MODULE]
    assert 8 <= len(whole) <= 36
    assert texts == list(interpreter_texts(tmp_path))


def test_tests_and_installed_packages_are_left_out(tmp_path):
    for folder in ("test", "json/tests", "site-packages/numpy", "idlelib/idle_test"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("def hidden(): pass\n")
    (tmp_path / "kept.py").write_text("def kept(): pass\n")

    assert all("kept" in text for text in interpreter_texts(tmp_path))


def test_files_that_do_not_parse_or_decode_are_left_out(tmp_path):
    (tmp_path / "a.py").write_text("def broken(:\n")
    (tmp_path / "b.py").write_bytes(b"# \xff\ndef f(): pass\n")
    (tmp_path / "c.py").write_bytes(b"def f(): pass\x00\n")
    (tmp_path / "d.py").write_text("def kept(): '\\d'\n")

    assert list(interpreter_texts(tmp_path)) == ["def kept(): '\\d'\n"]


def test_an_interpreter_without_sources_is_an_error_that_names_the_way_out(tmp_path):
    with pytest.raises(SourceError, match="--data"):
        list(interpreter_texts(tmp_path))


def test_this_interpreter_has_thousands_of_documents():
    texts = interpreter_texts()

    assert sum(1 for _, _ in zip(range(300), texts)) == 300

"""Weights of messages and of ready tokens: what each token weighs, where weights are taken, and what is refused."""

import decimal
import functools
import importlib.util
import json
from itertools import product
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.chats import HEAD, TAGGED, TAIL
from tests.support.rarely import mostly
from tests.support.tokenizer_kinds import byte_bpe, split_bpe
from tests.support.weighted_rows import chats, expected, read
from tests.text.trl_chats import FAMILIES, source_of, tokenizer_of, twin_name
from tests.text.trl_conversations import CHATS

from varlen.errors import SourceError
from varlen.text.chat_template import ChatTemplate, chat_template
from varlen.text.load_tokenizer import load_tokenizer
from varlen.text.messages import as_chat
from varlen.text.rendering import Choice

ON = {"row_weights": True}
PLAIN = HEAD + "{{ m.content }}" + TAIL
ENDLESS = "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}"
"""Writes no mark behind a turn, so that the EOS is appended."""
TEMPLATES = {"ChatML": None, "plain": PLAIN, "generation": TAGGED, "no end mark": ENDLESS}


def cut_by_words() -> Any:
    """A tokenizer whose texts can't be cut."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>", "<|im_start|>", "<|im_end|>"], show_progress=False
    )
    backend.train_from_iterator(["chat q0.1.2 a0 a1 a2 user assistant system [ ] 3456789"] * 9, trainer)
    return backend


def off(message: dict[str, Any]) -> dict[str, Any]:
    """A message, switched off where it is the assistant's."""
    return {**message, "weight": 0} if message["role"] == "assistant" else message


TOKENIZERS = {
    "bytes": (lambda: "bytes", None),
    "bytes of GPT-2": (byte_bpe, "</s>"),
    "marks": (split_bpe, "<|im_end|>"),
    "not cuttable": (cut_by_words, "</s>"),
}


CELLS = [*product(TOKENIZERS, TEMPLATES, ("assistant", "last", "all"))]
OFTEN = [one for one in CELLS if one[1] == "ChatML" or (one[0] == "bytes of GPT-2" and one[2] != "last")]


@pytest.mark.parametrize(("kind", "template", "supervise"), mostly(OFTEN, CELLS))
def test_a_turn_weighs_what_its_author_says(kind, template, supervise):
    make, eos = TOKENIZERS[kind]
    options = {"chat_template": TEMPLATES[template], "eos": eos, "supervise": supervise}
    rows = [row for row in chats(24) if supervise != "last" or row[-1].get("weight") != 0]

    found = read([{"messages": row} for row in rows], make(), **options, **ON)

    if supervise == "all":  # what isn't the assistant's weighs 1
        alone = [[{**m, "weight": m.get("weight", 1)} for m in row] for row in rows]
        turns = expected(alone, make(), **{**options, "supervise": "assistant"})
        ones = expected(
            [[{**m, "weight": 1} for m in row] for row in rows],
            make(),
            **{**options, "supervise": "assistant"},
        )
        for (tokens, weights), (same, weighed), (_, marks) in zip(found, turns, ones, strict=True):
            assert tokens == same
            if kind == "not cuttable":  # a token that straddles two turns is of the first
                continue
            assert weights == tuple(w if mark else 1.0 for w, mark in zip(weighed, marks))
        return
    if supervise == "last":
        rows = [
            [{**m, **({"weight": 0} if m["role"] == "assistant" and m is not row[-1] else {})} for m in row]
            for row in rows
        ]
    assert found == expected(rows, make(), **options)


@given(st.lists(st.floats(0, 2**20, width=32), min_size=1, max_size=4), st.data())
@settings(max_examples=30)
def test_any_weight_that_float32_holds_is_kept(weights, data):
    if not any(weights):
        weights = [*weights, 0.5]
    row = [
        message
        for number, weight in enumerate(weights)
        for message in (
            {"role": "user", "content": f"q{number}"},
            {"role": "assistant", "content": "a" * data.draw(st.integers(1, 5)), "weight": weight},
        )
    ]

    assert read([{"messages": row}], **ON) == expected([row])


@pytest.mark.parametrize("key", ["weight", "loss", "loss_mask", "loss_weight", "loss_scale"])
@pytest.mark.parametrize("value", [0.5, "0.5", " 5e-1 ", decimal.Decimal("0.5"), np.float32(0.5)])
def test_a_weight_has_many_spellings(key, value):
    row = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", key: value}]

    assert as_chat(row, keeps_weights=True).weights == {1: 0.5}


BAD = [-1, -0.5, float("nan"), float("inf"), 1e39, 1e-50, 10**400, "half", "1_0", "nan", [1], {"a": 1}]


@pytest.mark.parametrize("value", BAD, ids=repr)
def test_what_can_be_no_weight_is_refused(value):
    row = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": value}]

    with pytest.raises(
        SourceError, match=r"message 2 has the weight .*a weight is a number from 0 that float32"
    ):
        as_chat(row, keeps_weights=True)
    with pytest.raises(SourceError, match=r"message 2 has the weight .*only 0 and 1") as told:
        as_chat(row)
    assert "row_weights" not in str(told.value)


@pytest.mark.parametrize("key", ["train", "training", "trainable", "masked"])
def test_a_switch_is_no_weight(key):
    row = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", key: 0.5}]

    for on in (True, False):
        with pytest.raises(SourceError, match=f"message 2 has the {key} 0.5; only 0 and 1"):
            read([{"messages": row}], row_weights=on)


def test_without_the_option_a_weight_is_refused_and_the_way_out_is_named():
    row = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 2.0}]

    with pytest.raises(SourceError, match=r"the weight 2.0; .*\(row_weights=True, --row-weights\)"):
        read([{"messages": row}])


def test_flags_of_one_message_go_together():
    def one(**flags: Any) -> Any:
        return [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **flags}]

    assert read([{"messages": one(weight=0.5, train=True, loss=1)}], **ON) == expected([one(weight=0.5)])
    assert read([{"messages": one(weight=0.5, loss_weight="0.5")}], **ON) == expected([one(weight=0.5)])
    with pytest.raises(SourceError, match=r"the weight 0.5 and the loss_weight 2, and one weight is meant"):
        read([{"messages": one(weight=0.5, loss_weight=2)}], **ON)
    with pytest.raises(SourceError, match="is switched off"):
        read([{"messages": one(weight=0.5, train=False)}], **ON)


def test_two_messages_that_are_one_turn_have_one_weight():
    said = {"from": "gpt", "value": "Let me see."}
    call = {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {}})}
    rows = [
        {"conversations": [{"from": "human", "value": "q"}, {**said, "weight": 1}, {**call, "weight": 0}]}
    ]

    with pytest.raises(SourceError, match=r"messages 2 and 3 are one turn, and have the weight 1 and 0"):
        read(rows, chat_template=HEAD + "{{ m.content }}{{ m.tool_calls }}" + TAIL)


def test_what_is_not_trained_weighs_nothing_whatever_it_says():
    row = chats(1)[0]
    weighed = [{**message, "weight": 3} if message["role"] == "user" else message for message in row]

    assert read([{"messages": weighed}], **ON) == expected([row])
    with pytest.raises(SourceError, match=r'message 1 \(user\) has the weight 3, and with supervise="all"'):
        read([{"messages": weighed}], supervise="all", **ON)


def test_all_but_the_assistant_switched_off_is_the_assistant_alone():
    rows = chats(12)
    off = [
        [{**m, "weight": m.get("weight", 1) if m["role"] == "assistant" else 0} for m in row] for row in rows
    ]

    found = read([{"messages": row} for row in off], supervise="all", **ON)

    assert found == expected(rows)
    some = [{"role": "system", "content": "s"}, {"role": "user", "content": "q", "train": False}]
    with pytest.raises(SourceError, match=r"message 2 \(user\) has the weight 0, and with supervise"):
        read([{"messages": [*some, {"role": "assistant", "content": "a"}]}], supervise="all")


@pytest.mark.parametrize("form", ["prompt", "instruction", "parquet"])
def test_weights_are_read_in_every_form_of_chats(form, tmp_path):
    rows = [row for row in chats(12) if row[-1].get("weight") != 0]
    data: Any = [{"messages": row} for row in rows]
    if form == "prompt":
        data = [{"prompt": row[:-1], "completion": row[-1:]} for row in rows]
        rows = [
            [*({**m, "weight": 0} if m["role"] == "assistant" else m for m in row[:-1]), row[-1]]
            for row in rows
        ]
    elif form == "instruction":
        rows = [row for row in rows if len(row) > 3 and row[0]["role"] == "user"]
        rows = [[*row[:-1], {"role": "assistant", "content": row[-1]["content"]}] for row in rows]
        data = [
            {"instruction": row[-2]["content"], "output": row[-1]["content"], "history": row[:-2]}
            for row in rows
        ]
    else:  # where every message has the column, null where it isn't said
        pq.write_table(pa.Table.from_pylist(data), tmp_path / "rows.parquet")
        data = str(tmp_path / "rows.parquet")

    assert read(data, **ON) == expected(rows)


# Ready tokens.


def tokens_of(values: Any, *, kind: Any = None, **more: Any) -> Any:
    ids = [list(range(10, 10 + len(row))) for row in values]
    columns: dict[str, Any] = {"input_ids": pa.array(ids, pa.list_(pa.int32())), **more}
    columns["loss_weights"] = pa.array(values, pa.list_(kind or pa.float32()))
    return pa.table(columns)


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64(), "json"], ids=str)
def test_ready_tokens_weigh_what_their_column_says(kind, tmp_path):
    values = [[0.5, 2.0, 0.0], [1.0], [], [1.0, 1.0, 1.0, 0.25]]
    data: Any = tokens_of(values, kind=None if kind == "json" else kind)
    if kind == "json":
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data.to_pylist()))
        data = str(tmp_path / "a.jsonl")

    assert [weights for _, weights in read(data, **ON)] == list(map(tuple, values))


def test_labels_masks_and_padding_go_before_weights():
    values = [[0.5, 2.0, 0.5, 3.0, 1.0]]
    table = tokens_of(
        values,
        labels=pa.array([[-100, 11, 12, 13, 14]]),
        loss_mask=pa.array([[1, 1, 0, 1, 1]]),
        attention_mask=pa.array([[1, 1, 1, 1, 0]]),
        seq_lengths=pa.array([[2, 3]]),
    )

    assert read(table, **ON) == [((10, 11), (0.0, 2.0)), ((12, 13), (0.0, 3.0))]


@pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf"), 1e39, 1e-50])
def test_what_can_be_no_weight_of_a_token_is_refused(value, tmp_path):
    table = tokens_of([[1.0, 1.0], [1.0, value]], kind=pa.float64())

    with pytest.raises(SourceError, match=r"row 2 holds .* at token 1 of `loss_weights` \(a weight is"):
        read(table, **ON)


def test_a_column_of_weights_is_refused_aloud_without_the_option_unless_it_is_a_mask():
    with pytest.raises(
        SourceError, match=r"row 2 holds 0.5 at token 0 of `loss_weights`; only 0 and 1.*row_weights"
    ):
        read(tokens_of([[1.0], [0.5]]))
    assert [weights for _, weights in read(tokens_of([[1.0, 0.0], [1.0, 1.0]]))] == [(1.0, 0.0), (1.0, 1.0)]


def test_weights_of_the_wrong_form_are_refused():
    with pytest.raises(SourceError, match="has 2 `input_ids` but 1 `loss_weights`"):
        read([{"input_ids": [1, 2], "loss_weights": [0.5]}], **ON)
    with pytest.raises(SourceError, match="must be numbers"):
        read([{"input_ids": [1, 2], "loss_weights": ["a", "b"]}], **ON)
    with pytest.raises(SourceError, match="beside `seq_start_id`"):
        read([{"input_ids": [1, 2], "loss_weights": [0.5, 1], "seq_start_id": [0]}], **ON)


# The templates of TRL, with tools, thoughts and parts.


@functools.cache
def template_of(name: str, source: str) -> ChatTemplate:
    specials = load_tokenizer(tokenizer_of(name)).specials
    return chat_template(source, special_tokens=specials.texts, end_marks=specials.end_marks)


@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="trl, whose templates these are, is absent"
)
@pytest.mark.parametrize("which", ["original", "twin"])
@pytest.mark.parametrize("name", FAMILIES)
def test_turns_of_every_template_of_trl_weigh_apart(name, which):
    twin = twin_name(name)
    if which == "twin" and twin is None:
        pytest.skip("TRL has no twin of it")
    template = template_of(name, source_of(name if twin is None or which == "original" else twin))
    compared = 0
    for chat in CHATS.values():
        turns = [n for n, message in enumerate(chat.messages) if message["role"] == "assistant"]
        weights = {number: 2.0 + place for place, number in enumerate(turns)}

        def rendered(flags: dict[int, float], *, weighs: bool, chat: Any = chat) -> Any:
            messages = [
                {**message, **({"weight": flags[n]} if n in flags else {})}
                for n, message in enumerate(chat.messages)
            ]
            choice = Choice(row_weights=weighs, allow_unwritten=True)
            try:
                return template.render(messages, chat.tools, choice=choice)
            except SourceError:
                return None

        found = rendered(weights, weighs=True)
        alone = {number: rendered({n: float(n == number) for n in turns}, weighs=False) for number in turns}
        if found is None or None in alone.values():
            continue  # a template that rewrites earlier turns can't tell them apart, weighed or not
        compared += 1
        wanted = np.zeros(len(found.text))
        for number, one in alone.items():
            assert one.text == found.text
            for start, stop in one.spans:
                wanted[start:stop] += weights[number]
        seen = np.zeros(len(found.text))
        for (start, stop), weight in zip(found.spans, found.weights, strict=True):
            seen[start:stop] += weight
        assert seen.tolist() == wanted.tolist()
    assert compared > 3

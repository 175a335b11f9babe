"""`varlen inspect`: what it prints, what it writes, and one sentence for what is wrong."""

import json
import re
import shlex

import numpy as np
import pytest
from tests.support.command_line import asked, one_sentence, varlen

LENGTHS = np.random.default_rng(0).integers(1, 900, 2_000)
TEXTS = ["abc" * (1 + n % 90) for n in range(300)]


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "chats.npz"
    np.savez(path, lengths=LENGTHS)
    return path


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def without_progress(run):
    run.stderr = "\n".join(line for line in run.stderr.splitlines() if "%  " not in line)
    return run


def test_a_table_is_printed_and_nothing_written(stored):
    run = varlen("inspect", stored, cwd=stored.parent)

    assert run.returncode == 0, run.stderr
    assert "Lengths of chats" in run.stdout
    assert "2,000 documents" in run.stdout
    assert "vl.pack(lengths, capacity=" in run.stdout
    assert "-o report.html shows this in pictures" in run.stdout
    assert "100 %" in run.stderr
    assert [path.name for path in stored.parent.iterdir()] == ["chats.npz"]


def test_documents_are_shown_as_the_model_gets_them_with_what_is_trained(tmp_path):
    long = "a long answer of many words " * 9
    turns = [("user", "Why?"), ("assistant", "So."), ("user", "Who?"), ("assistant", long)]
    chat = {"messages": [{"role": role, "content": text} for role, text in turns]}
    (tmp_path / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 3)
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "one\ntwo"}) + "\n")

    run = asked("inspect", "chats.jsonl", "--show", 2, cwd=tmp_path)

    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert sum(line.startswith("document ") for line in lines) == 2
    assert lines[1:7] == [
        "  <|im_start|>user",
        "  Why?<|im_end|>",
        "  <|im_start|>assistant",
        "> So.<|im_end|>",
        "  <|im_start|>user",
        "  Who?<|im_end|>",
    ]
    trained = len("So.") + len(long) + 2
    assert re.fullmatch(f"document 1: [0-9]+ tokens, {trained} of them trained", lines[0])
    assert max(map(len, lines)) <= 80
    assert "".join(line[2:] for line in lines if line[:2] == "> ").count("many") == 18
    texts = asked("inspect", "texts.jsonl", "--show", 9, cwd=tmp_path)
    assert texts.stdout == "document 1: 8 tokens, 8 of them trained\n> one\n> two<|endoftext|>\n"


def test_the_command_that_is_advised_packs_the_same_documents(texts):
    name = f"my {'long ' * 30}texts.jsonl"
    (texts.parent / name).write_text(texts.read_text().replace('"text"', '"body"'))
    given = (name, "--column", "text=body", "--no-eos", "--on-error", "skip", "--capacity", 128)

    run = asked("inspect", *given, cwd=texts.parent)

    command = next(line for line in run.stdout.splitlines() if line.startswith("varlen pack "))
    assert command == (
        f"varlen pack '{name}' -o packed --column text=body --no-eos --on-error skip --capacity 128 "
        f"--method {command.split('--method ')[1].split()[0]} --overlong split"
    )
    packed = asked(*shlex.split(command)[1:], "--json", cwd=texts.parent)
    assert packed.returncode == 0, packed.stderr
    assert json.loads(packed.stdout)["ledger"]["tokens_in"] == sum(map(len, TEXTS))


def test_it_says_when_bytes_are_counted_and_only_then(texts):
    np.savez(texts.parent / "tokens.npz", input_ids=np.arange(900), offsets=np.arange(0, 901, 30))

    runs = [asked("inspect", name, cwd=texts.parent).stdout for name in ("texts.jsonl", "tokens.npz")]

    assert ["Bytes are counted here" in text for text in runs] == [True, False]
    assert all("varlen pack " in text for text in runs)


def test_a_packed_set_is_not_to_be_packed_over_itself(texts):
    assert asked("pack", texts, "-o", "packed", cwd=texts.parent).returncode == 0

    printed = asked("inspect", "packed", cwd=texts.parent).stdout

    assert "\nvarlen pack packed -o packed-again --capacity" in printed


def test_for_lengths_alone_there_is_no_command_to_pack(stored):
    lines = asked("inspect", stored).stdout.splitlines()

    assert not any(line.startswith("varlen pack ") and "--capacity" in line for line in lines)


def test_one_json_object_is_printed_and_a_report_written_where_it_is_named(texts):
    run = varlen(
        "inspect", texts, "--json", "-o", "out.html", "--capacity", 1024, "--capacity", 4096,
        "--batch-documents", 16, "--seed", 3, cwd=texts.parent,
    )  # fmt: skip

    assert run.returncode == 0, run.stderr
    tree = json.loads(run.stdout)
    assert [at["capacity"] for at in tree["capacities"]] == [1024, 4096]
    assert tree["distribution"]["documents"] == 300
    # A byte a token, and the EOS.
    assert tree["distribution"]["tokens"] == sum(len(text) + 1 for text in TEXTS)
    assert (tree["name"], tree["batch_documents"], tree["seed"]) == ("texts", 16, 3)
    assert tree["skipped"] == []
    page = (texts.parent / "out.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "abcabcabc" in page


def test_supervised_tokens_of_chats_are_counted_and_files_of_all_kinds_may_be_mixed(texts):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (texts.parent / "chat.json").write_text(json.dumps([{"messages": chat}] * 50))

    run = asked("inspect", "texts.jsonl", "chat.json", "--no-eos", "--json", cwd=texts.parent)

    assert run.returncode == 0, run.stderr
    distribution = json.loads(run.stdout)["distribution"]
    assert distribution["documents"] == 350
    assert distribution["targets"] == sum(len(text) - 1 for text in TEXTS) + 50 * (len("hello") + 1)
    assert json.loads(run.stdout)["name"] == "texts and 1 more"


def test_files_are_counted_one_by_one(texts):
    (texts.parent / "few.jsonl").write_text(json.dumps({"text": "abcdefg"}) + "\n")
    (texts.parent / "sub").mkdir()
    (texts.parent / "sub" / "few.jsonl").write_text(json.dumps({"text": "abc"}) + "\n")

    run = asked(
        "inspect", "texts.jsonl", "few.jsonl", "sub/few.jsonl", "--json", "-o", "out.html", cwd=texts.parent
    )
    alone = asked("inspect", "texts.jsonl", "--json", cwd=texts.parent)

    assert run.returncode == 0, run.stderr
    found = [(one["name"], one["documents"], one["tokens"]) for one in json.loads(run.stdout)["sources"]]
    whole = sum(len(text) + 1 for text in TEXTS)
    assert found == [("texts.jsonl", len(TEXTS), whole), ("few.jsonl", 1, 8), ("sub/few.jsonl", 1, 4)]
    assert "sub/few.jsonl" in (texts.parent / "out.html").read_text(encoding="utf-8")
    assert json.loads(alone.stdout)["sources"] == []


def test_the_page_and_the_json_say_what_was_not_read(texts):
    with texts.open("a") as file:
        file.write("{no json\n")

    run = asked("inspect", "texts.jsonl", "--on-error", "skip", "--json", "-o", "out.html", cwd=texts.parent)

    assert json.loads(run.stdout)["notes"] == ["1 record skipped"]
    assert "1 record skipped" in (texts.parent / "out.html").read_text(encoding="utf-8")


def test_what_cannot_be_read_is_left_out_where_that_is_asked_for(texts):
    with texts.open("a") as file:
        file.write("{no json\n")

    run = asked("inspect", "texts.jsonl", "--on-error", "skip", "--json", cwd=texts.parent)

    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["distribution"]["documents"] == 300
    assert json.loads(run.stdout)["skipped"][0].startswith("texts.jsonl line 301 is not valid JSON")
    assert "varlen: 1 record that could not be read was left out: texts.jsonl line 301" in run.stderr


def test_a_tokenizer_that_is_no_file_is_named(texts):
    run = asked("inspect", texts, "--tokenizer", "no.json", cwd=texts.parent)

    assert "there is no tokenizer no.json" in one_sentence(run)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing.npz",), "nothing.npz does not exist"),
        (("bad.npz",), "bad.npz is not a readable .npz file"),
        (("chats.npz", "--capacity", "0"), "capacity must be a whole number"),
        (("chats.npz", "--batch-documents", "0"), "batch_documents must be"),
        (("chats.npz", "--seed", "-1"), "seed must be from 0"),
        (("chats.npz", "--on-error", "ignore"), "on_error must be"),
        (("chats.npz", "--column", "text"), "--column must be of the form ROLE=NAME"),
        (("chats.npz", "--column", "text=a", "--column", "text=b"), "--column names text twice"),
        (("chats.npz", "-o", "no/report.html"), "the folder no doesn't exist"),
        (("empty.npz",), "none of 3 documents holds a token"),
    ],
)
def test_bad_input_ends_in_one_sentence_and_leaves_nothing(stored, arguments, said):
    (stored.parent / "bad.npz").write_text("no archive")
    np.savez(stored.parent / "empty.npz", lengths=np.zeros(3, np.int64))
    before = sorted(stored.parent.iterdir())

    run = asked("inspect", *arguments, cwd=stored.parent)

    assert said in one_sentence(without_progress(run))
    assert sorted(stored.parent.iterdir()) == before

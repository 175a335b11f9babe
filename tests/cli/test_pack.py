"""`varlen pack` on the command line: what it prints and writes, and one sentence for what can't be packed."""

import errno
import json
import os
import resource
import signal
import time

import pyarrow.parquet as pq
import pytest
from tests.support.command_line import refusal, started, varlen
from tests.support.offline_packs import contents, text_ids, write_chats, write_texts

from varlen.adapters.megatron import PackedSequenceSpecs, open_index, open_packed, read_metadata
from varlen.offline import pack as write_module


@pytest.fixture
def pack(verb):
    """Run the verb in one process."""
    return lambda *arguments: verb("pack", *arguments, "--processes", 1)


def test_a_run_says_what_was_packed_and_how_to_read_it(tmp_path, pack):
    texts = write_texts(tmp_path / "a.jsonl")
    tokens = sum(map(len, map(text_ids, texts)))

    code, out, said = pack("a.jsonl", "-o", "packed", "--capacity", 1024)

    assert (code, said) == (0, "")
    rows = json.loads((tmp_path / "packed" / ".manifest.json").read_bytes())["num_packs"]
    first, *_, place, how = out.splitlines()
    assert first == (
        f"60 documents, {tokens:,} tokens -> {rows} rows of 1,024, {100 * tokens / (rows * 1024):.2f} % full, "
        f"{tokens - 60:,} tokens to train on"
    )
    assert "  tokens are bytes, as no --tokenizer was given" in out
    assert place == "packed: 1 parquet file and .manifest.json. To read the rows:"
    assert how == '  datasets.load_dataset("parquet", data_dir="packed", split="train")'
    assert pack("a.jsonl", "-o", "packed", "--capacity", 1024)[1].startswith(
        "packed was finished already, from the same data and settings:\n60 documents"
    )


def test_with_json_the_manifest_alone_is_printed(tmp_path, pack):
    write_texts(tmp_path / "a.jsonl")

    code, out, _ = pack(
        "a.jsonl", "-o", "packed", "--json", "--format", "arrow", "--in-order", "--position-ids"
    )

    assert code == 0
    manifest = json.loads(out)
    assert manifest == json.loads((tmp_path / "packed" / ".manifest.json").read_bytes())
    assert (
        manifest["settings"] | {"format": "arrow", "shuffle": False, "position_ids": True}
        == manifest["settings"]
    )


def test_what_was_skipped_is_counted_and_listed(tmp_path, pack):
    write_chats(tmp_path / "a.jsonl", 3)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.writelines(['{"messages": 3}\n', "{\n", '{"messages": [{"role": "user"}]}\n'])

    code, out, said = pack("a.jsonl", "-o", "packed", "--on-error", "skip")

    assert (code, said) == (0, "")
    lines = out.splitlines()
    at = lines.index("  3 records skipped:")
    for number, line in zip((4, 5, 6), sorted(lines[at + 1 : at + 4])):
        assert f"line {number}" in line
    listed = (tmp_path / "packed" / ".skipped.log").read_text().splitlines()
    assert [line.strip() for line in lines[at + 1 : at + 4]] == listed


def test_where_nothing_is_left_what_was_skipped_is_counted(tmp_path, pack):
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n{"text": ""}\n')
    said = refusal(pack("a.jsonl", "-o", "packed", "--on-error", "skip"))
    first = "the first: a.jsonl line 1 holds number in `text`, which must be a string"
    assert said == f"a.jsonl holds 1 empty document; 1 record skipped; {first}"

    (tmp_path / "a.jsonl").write_text('{"text": 1}\n' * 2)
    said = refusal(pack("a.jsonl", "-o", "packed", "--on-error", "skip"))
    assert said == f"a.jsonl holds no document; 2 records skipped; {first}"


def test_of_many_that_were_skipped_the_first_are_shown(tmp_path, pack):
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n' + '{"text": 1}\n' * 25)

    out = pack("a.jsonl", "-o", "packed", "--on-error", "skip")[1]

    assert "  25 records skipped:" in out
    assert out.count("    a.jsonl line") == 10
    assert "    all of them in packed/.skipped.log" in out
    assert len((tmp_path / "packed" / ".skipped.log").read_text().splitlines()) == 25


def test_what_became_of_long_and_empty_documents_is_said(tmp_path, pack):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "a" * n}) + "\n" for n in (0, 3, 40, 50)))
    long = {
        "split": "  2 documents longer than 16 tokens, 92 tokens in all, cut into pieces",
        "truncate": "  2 documents cut short (60 tokens lost)",
        "drop": "  2 documents dropped (92 tokens lost)",
    }

    for overlong, words in long.items():
        out = pack("a.jsonl", "-o", overlong, "--capacity", 16, "--overlong", overlong)[1]
        assert words in out.splitlines()
        assert "  1 document left out: no tokens" in out.splitlines()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.jsonl", "-o", "out"], "missing.jsonl does not exist"),
        (["b.jsonl", "-o", "out"], "found `body`"),
        (["a.jsonl", "-o", "out", "--column", "text=body"], "has no column `body`"),
        (
            ["a.jsonl", "-o", "out", "--column", "text"],
            "--column must be of the form ROLE=NAME, such as text=body; got 'text'",
        ),
        (["a.jsonl", "-o", "out", "--column", "words=text"], "columns can be named for"),
        (["a.jsonl", "-o", "out", "--capacity", "0"], "--capacity must be a whole number of tokens from 1"),
        (["a.jsonl", "-o", "out", "--max-documents", "0"], "max_documents must be a whole number from 1"),
        (
            ["a.jsonl", "-o", "out", "--capacity", "8", "--overlong", "error"],
            "(57 of 60 documents are too long); pass --overlong split, truncate or drop, or a larger --capacity; the "
            "tokens are kept in out.partial, so that the same run with one of these goes on from there",
        ),
        (["a.jsonl", "-o", "out", "--overlong", "keep"], "overlong must be one of"),
        (["a.jsonl", "-o", "out", "--on-error", "stop"], "on_error must be one of raise, skip; got 'stop'"),
        (["a.jsonl", "-o", "out", "--tokenizer", "no/such/thing"], "there is no tokenizer no/such/thing"),
        (["a.jsonl", "-o", "b.jsonl"], "b.jsonl names a file, but a packed set is a folder of them; pass b"),
        (["a.jsonl", "-o", "out.parquet"], "pass out"),
        (["a.jsonl", "-o", "file"], "file is a file; name a folder"),
        (["a.jsonl", "-o", "file/out"], "file/out can't be written: /"),
        (["a.jsonl", "-o", "."], "name a new folder"),
        (["c.jsonl", "-o", "out"], "line 2"),
    ],
)
def test_what_cannot_be_packed_ends_in_one_sentence_and_exit_code_two(tmp_path, pack, arguments, said):
    write_texts(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text('{"body": "a"}\n')
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "file").write_text("")

    assert said in refusal(pack(*arguments))

    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"a.jsonl", "b.jsonl", "c.jsonl", "file", "out.partial"}
    assert ("out.partial" in left) == ("too long" in said)  # its tokens, for another --overlong


def test_what_was_packed_into_a_folder_of_data_is_not_packed_again_with_it(tmp_path, pack):
    (tmp_path / "data" / "train").mkdir(parents=True)
    write_texts(tmp_path / "data" / "train" / "a.jsonl")
    assert pack("data/train", "-o", "data/packed", "--tokens", "data/tokens")[0] == 0

    said = refusal(pack("data", "-o", "other"))

    assert said.startswith("data/packed is a packed set that varlen wrote (2 such folders lie there)")
    for again in ("data/packed", "data/tokens", "data/train"):
        assert pack(again, "-o", f"from-{again[5:]}")[0] == 0


def test_a_run_whose_output_lies_in_the_data_goes_on_from_its_tokens(tmp_path, pack):
    write_texts(tmp_path / "a.jsonl")
    assert "the tokens are kept in packed.partial" in refusal(
        pack(".", "-o", "packed", "--capacity", 8, "--overlong", "error")
    )

    assert pack(".", "-o", "packed", "--capacity", 8, "--overlong", "split")[0] == 0


def test_a_full_disk_is_one_sentence_and_the_same_command_goes_on(tmp_path, pack, monkeypatch):
    write_texts(tmp_path / "a.jsonl")

    def write_table(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(write_module, "write_table", write_table)
        assert "out.partial can't be written: the disk is full" in refusal(pack("a.jsonl", "-o", "out"))

    assert pack("a.jsonl", "-o", "out")[0] == 0
    assert sorted(contents(tmp_path)) == ["a.jsonl", "out/.manifest.json", "out/part-00000.parquet"]


def test_files_that_may_not_grow_are_one_sentence_in_processes_too(tmp_path):
    write_texts(tmp_path / "a.jsonl", 2000)

    def little():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    for processes in (1, 2):
        ended = varlen(
            "pack", "a.jsonl", "-o", "out", "--processes", processes, cwd=tmp_path, preexec_fn=little
        )
        assert ended.returncode == 2, ended.stderr
        assert ended.stderr.splitlines()[-1].endswith("can't be written: File too large")
        assert "Traceback" not in ended.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_an_interrupt_ends_in_one_line_and_the_same_command_goes_on(tmp_path):
    write_texts(tmp_path / "a.jsonl", 20_000)
    command = ["pack", "a.jsonl", "-o", "out", "--processes", "2", "--capacity", "512"]
    process = started(*command, cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "out.partial" / ".work" / "state.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)

    os.killpg(process.pid, signal.SIGINT)
    out, said = process.communicate(timeout=60)

    assert (process.returncode, out) == (130, "")
    assert said.splitlines()[-1] == "varlen: interrupted; the same command again goes on where it stopped"
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()
    assert (
        varlen("pack", "a.jsonl", "-o", "out", "--processes", 1, "--capacity", 512, cwd=tmp_path).returncode
        == 0
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]


@pytest.mark.parametrize("arguments", [("--tokens", "others"), ("--tokenizer", "no.json"), ("--eos", "1")])
def test_a_store_of_tokens_takes_no_option_that_would_make_other_tokens(tmp_path, pack, arguments):
    write_texts(tmp_path / "a.jsonl")
    pack("a.jsonl", "-o", "packed", "--tokens", "tokens")

    said = refusal(pack("tokens", "-o", "again", *arguments))

    assert said.startswith("tokens holds tokens already")
    assert not (tmp_path / "again").exists()


def test_an_output_inside_the_data_is_resumed_repeated_and_packed_again(pack, tmp_path):
    write_texts(tmp_path / "a.jsonl")
    here = [".", "-o", "packed", "--tokens", "toks", "--capacity"]

    assert pack(*here, 256)[0] == 0
    assert pack(*here, 256)[1].startswith("packed was finished already")
    assert pack(*here, 512)[0] == 2  # packed holds something else
    code, _, said = pack(".", "-o", "wider", "--tokens", "toks", "--capacity", 512)
    assert (code, "packed is a packed set" in said) == (2, True)
    code, _, said = pack("*.jsonl", "-o", "wider", "--tokens", "../" + tmp_path.name + "/wider")
    assert (code, "are the same folder" in said) == (2, True)


def test_a_log_shows_every_phase(tmp_path):
    write_texts(tmp_path / "a.jsonl")
    said = varlen("pack", tmp_path / "a.jsonl", "-o", tmp_path / "out", "--capacity", 256).stderr.splitlines()

    assert [line for line in said if line.startswith("100 %")] == ["100 %  tokenizing", "100 %  packing"]
    assert len(said) < 25


def test_a_manifest_that_is_nearly_one_of_varlens_is_read_over_or_a_damaged_one(pack, tmp_path):
    (tmp_path / "in").mkdir()
    write_texts(tmp_path / "in" / "a.jsonl")
    (tmp_path / "in" / "manifest.json").write_text('{"varlen": "1", "kind": "packed"}')
    assert pack("in", "-o", "out")[0] == 0

    (tmp_path / "in" / "manifest.json").write_text('{"varlen": "1", "kind": "packed", "ledger": [1]}')
    assert "in has a damaged manifest: `settings` is missing" in refusal(pack("in", "-o", "other"))


@pytest.fixture
def pack_chats(verb, tmp_path):
    """Run the verb in one process, in a folder with chats."""
    write_chats(tmp_path / "chats.jsonl")
    return lambda *arguments: verb("pack", *arguments, "--processes", 1)


def test_a_set_is_written_and_said_how_to_train_on(pack_chats, tmp_path):
    code, out, said = pack_chats(
        "chats.jsonl", "-o", "out", "--format", "megatron", "--capacity", 256, "--context-parallel", 2
    )

    assert (code, said) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("24 documents, ")
    assert "positions -> " in lines[0]
    assert lines[2] == "out: 1 Parquet file, metadata and .manifest.json. To train on it:"
    (specs,) = [eval("".join(lines[3:]), {"PackedSequenceSpecs": PackedSequenceSpecs})]
    assert specs.pad_seq_to_mult == 4
    table = pq.read_table(specs.packed_train_data_path)
    assert table.column_names == ["input_ids", "loss_mask", "seq_start_id", "seq_lengths"]
    assert read_metadata(specs.packed_metadata_path)[0]["pack_size"] == 256


def test_a_packed_folder_is_data_without_its_metadata(pack_chats):
    pack_chats("chats.jsonl", "-o", "out", "--format", "megatron", "--capacity", 256, "--context-parallel", 2)

    code, out, said = pack_chats("out", "-o", "again", "--format", "megatron", "--capacity", 512)

    assert (code, said) == (0, "")
    assert out.startswith("24 documents, ")


def test_an_index_of_kept_tokens_is_written_for_another_size(pack_chats):
    shared = ("--format", "megatron", "--capacity", 256)
    assert pack_chats("chats.jsonl", "-o", "out", "--tokens", "tokens", *shared)[0] == 0
    given = ("--capacity", 512, "--method", "first_fit_shuffle", "--seed", 3)
    code, out, _ = pack_chats("tokens", "-o", "index", "--format", "megatron-index", *given)

    assert code == 0
    assert "over the tokens in ../tokens. To read the rows:" in out
    assert open_index("index").num_rows < open_packed("out").num_rows
    assert pack_chats("tokens", "-o", "rows", "--format", "megatron", *given)[0] == 0
    assert list(open_index("index")) == list(open_packed("rows"))


def test_two_splits_share_their_metadata(pack_chats):
    shared = ("--format", "megatron", "--capacity", 256)
    assert (
        pack_chats(
            "chats.jsonl", "-o", "v", "--megatron-split", "validation", "--method", "next_fit", *shared
        )[0]
        == 0
    )
    code, out, _ = pack_chats("chats.jsonl", "-o", "t", "--metadata-of", "v", "--json", *shared)

    assert code == 0
    manifest = json.loads(out)
    assert manifest["kind"] == "megatron"
    assert manifest["data"] == "training_256.idx.parquet"
    assert len(read_metadata("t/256_metadata.jsonl")) == 2
    assert open_packed("v/validation_256.idx.parquet").num_rows > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--context-parallel", 2], "--context-parallel goes with --format megatron"),
        (["--longest", 8], "--longest goes with --format megatron"),
        (["--format", "megatron", "--trace"], "--trace adds a column that Megatron-Bridge doesn't read"),
        (["--format", "megatron", "--position-ids"], "--position-ids adds a column"),
        (["--format", "megatron", "--context-parallel", 0], "context_parallel_size must be"),
        (
            ["--format", "megatron", "--context-parallel", 4, "--pad-to-multiple-of", 12],
            "--pad-to-multiple-of is 12, but the parallel sizes need a multiple of 8",
        ),
        (["--format", "megatron", "--context-parallel", 3], "pack_size is 256, which is no multiple of"),
        (["--format", "megatron", "--method", "wrapped"], "algorithm must be one of best_fit"),
        (["--format", "megatron-index"], "name a folder for them with --tokens"),
        (["--format", "megatron", "--metadata-of", "nowhere"], "nowhere isn't there"),
        (
            ["--format", "megatron", "--pad-to-multiple-of", 128, "--longest", 64],
            "longest is 64, but documents are",
        ),
    ],
)
def test_what_cant_be_packed_is_one_sentence(pack_chats, tmp_path, arguments, words):
    code, out, said = pack_chats("chats.jsonl", "-o", "out", "--capacity", 256, *arguments)

    assert (code, out) == (2, "")
    (line,) = said.strip().splitlines()
    assert line.startswith("varlen: ")
    assert words in line
    assert not (tmp_path / "out").exists()


def test_a_document_too_long_is_one_sentence_and_the_tokens_are_kept(pack_chats, tmp_path):
    write_texts(tmp_path / "texts.jsonl")
    code, _, said = pack_chats("texts.jsonl", "-o", "out", "--format", "megatron", "--capacity", 64)

    assert code == 2
    assert "varlen: document " in said
    assert "the tokens are kept in out.partial" in said
    again = pack_chats(
        "texts.jsonl", "-o", "out", "--format", "megatron", "--capacity", 64, "--overlong", "truncate"
    )
    assert "cut short" in again[1]
    assert "positions lost" in again[1]

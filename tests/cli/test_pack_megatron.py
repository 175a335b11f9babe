"""`varlen pack --format megatron`: what it writes and prints, and one sentence for what can't be packed."""

import json

import pyarrow.parquet as pq
import pytest
from tests.support.offline_packs import write_chats, write_texts

from varlen.adapters.megatron import PackedSequenceSpecs, open_index, open_packed, read_metadata


@pytest.fixture
def pack(verb, tmp_path):
    """Run the verb in one process, in a folder with chats."""
    write_chats(tmp_path / "chats.jsonl")
    return lambda *arguments: verb("pack", *arguments, "--processes", 1)


def test_a_set_is_written_and_said_how_to_train_on(pack, tmp_path):
    code, out, said = pack(
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


def test_a_packed_folder_is_data_without_its_metadata(pack):
    pack("chats.jsonl", "-o", "out", "--format", "megatron", "--capacity", 256, "--context-parallel", 2)

    code, out, said = pack("out", "-o", "again", "--format", "megatron", "--capacity", 512)

    assert (code, said) == (0, "")
    assert out.startswith("24 documents, ")


def test_an_index_of_kept_tokens_is_written_for_another_size(pack):
    shared = ("--format", "megatron", "--capacity", 256)
    assert pack("chats.jsonl", "-o", "out", "--tokens", "tokens", *shared)[0] == 0
    given = ("--capacity", 512, "--method", "first_fit_shuffle", "--seed", 3)
    code, out, _ = pack("tokens", "-o", "index", "--format", "megatron-index", *given)

    assert code == 0
    assert "over the tokens in ../tokens. To read the rows:" in out
    assert open_index("index").num_rows < open_packed("out").num_rows
    assert pack("tokens", "-o", "rows", "--format", "megatron", *given)[0] == 0
    assert list(open_index("index")) == list(open_packed("rows"))


def test_two_splits_share_their_metadata(pack):
    shared = ("--format", "megatron", "--capacity", 256)
    assert (
        pack("chats.jsonl", "-o", "v", "--megatron-split", "validation", "--method", "next_fit", *shared)[0]
        == 0
    )
    code, out, _ = pack("chats.jsonl", "-o", "t", "--metadata-of", "v", "--json", *shared)

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
def test_what_cant_be_packed_is_one_sentence(pack, tmp_path, arguments, words):
    code, out, said = pack("chats.jsonl", "-o", "out", "--capacity", 256, *arguments)

    assert (code, out) == (2, "")
    (line,) = said.strip().splitlines()
    assert line.startswith("varlen: ")
    assert words in line
    assert not (tmp_path / "out").exists()


def test_a_document_too_long_is_one_sentence_and_the_tokens_are_kept(pack, tmp_path):
    write_texts(tmp_path / "texts.jsonl")
    code, _, said = pack("texts.jsonl", "-o", "out", "--format", "megatron", "--capacity", 64)

    assert code == 2
    assert "varlen: document " in said
    assert "the tokens are kept in out.partial" in said
    again = pack(
        "texts.jsonl", "-o", "out", "--format", "megatron", "--capacity", 64, "--overlong", "truncate"
    )
    assert "cut short" in again[1]
    assert "positions lost" in again[1]

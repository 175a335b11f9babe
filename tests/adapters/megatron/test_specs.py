"""PackedSequenceSpecs of Megatron-Bridge: fields, defaults and rules of each dialect, and what contradicts itself."""

import os
import warnings

import numpy as np
import pytest

from varlen.adapters.megatron import PackedSequenceSpecs, metadata_entry, write_metadata
from varlen.errors import SettingError, SourceError


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "training_64.idx.parquet"
    path.write_bytes(b"PAR1")
    return path


@pytest.mark.parametrize("dialect", ["0.4", "0.5", "0.6"])
def test_defaults_are_the_releases_and_switch_packing_off(dialect):
    specs = PackedSequenceSpecs(dialect=dialect)

    assert not specs.is_enabled
    given = specs.to_dialect(dialect)
    assert given.pop("max_single_sequence_length", "absent") == (None if dialect == "0.6" else "absent")
    assert given == {
        "packed_sequence_size": -1,
        "tokenizer_model_name": None,
        "num_tokenizer_workers": -1,
        "packed_train_data_path": None,
        "packed_val_data_path": None,
        "packed_metadata_path": None,
        "pad_cu_seqlens": False,
        "pad_seq_to_mult": 1,
    }


def test_workers_have_the_meaning_of_the_dialect():
    every = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

    for dialect, usual in (("0.4", every), ("0.5", every), ("0.6", 1)):
        found = [PackedSequenceSpecs(num_tokenizer_workers=n, dialect=dialect).workers for n in (-1, 0, 1, 3)]
        assert found == [usual, usual, 1, 3]
    assert PackedSequenceSpecs(dialect="0.4").to_dialect("0.6")["num_tokenizer_workers"] == every
    assert PackedSequenceSpecs().to_dialect("0.4")["num_tokenizer_workers"] == 1
    assert PackedSequenceSpecs().to_dialect("0.6")["num_tokenizer_workers"] == -1
    assert PackedSequenceSpecs(num_tokenizer_workers=3).to_dialect("0.4")["num_tokenizer_workers"] == 3


def test_the_multiple_is_computed_from_parallel_sizes():
    specs = PackedSequenceSpecs.for_parallel(
        4096,
        context_parallel_size=2,
        tensor_model_parallel_size=8,
        sequence_parallel=True,
        pad_cu_seqlens=True,
    )

    assert specs.pad_seq_to_mult == 16
    assert specs.pad_cu_seqlens
    with pytest.raises(SettingError, match="the nearest: 4,092 or 4,104"):
        PackedSequenceSpecs.for_parallel(4100, context_parallel_size=6)


def test_specs_may_be_changed_and_checked_again():
    specs = PackedSequenceSpecs(4096)
    specs.pad_seq_to_mult = None
    assert specs.check().multiple == 1
    specs.pad_seq_to_mult = 24

    with pytest.raises(
        SettingError, match="packed_sequence_size is 4,096, which is no multiple of pad_seq_to_mult, 24"
    ):
        specs.check()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pad_seq_to_mult": 0}, "pad_seq_to_mult must be a positive integer"),
        ({"pad_seq_to_mult": -4}, "pad_seq_to_mult must be a positive integer"),
        ({"pad_seq_to_mult": 128}, "pad_seq_to_mult is 128, more than packed_sequence_size, 64"),
        ({"max_single_sequence_length": 0}, "max_single_sequence_length must be a positive integer"),
        (
            {"max_single_sequence_length": 65},
            "max_single_sequence_length is 65, more than packed_sequence_size, 64",
        ),
        ({"max_single_sequence_length": 8, "dialect": "0.5"}, "known from 0.6 on, not in dialect 0.5"),
        ({"dialect": "0.2"}, "'0.2' names no dialect"),
        ({"packed_sequence_size": "64"}, "packed_sequence_size must be a whole number; got '64'"),
        ({"packed_sequence_size": None}, "packed_sequence_size must be a whole number; got None"),
        ({"pad_seq_to_mult": 2.5}, "pad_seq_to_mult must be a whole number, or None; got 2.5"),
        ({"pad_seq_to_mult": True}, "pad_seq_to_mult must be a whole number, or None; got True"),
        ({"max_single_sequence_length": "8"}, "max_single_sequence_length must be a whole number, or None"),
        ({"num_tokenizer_workers": None}, "num_tokenizer_workers must be a whole number; got None"),
        ({"pad_cu_seqlens": "false"}, "pad_cu_seqlens must be True or False; got 'false'"),
        ({"packed_train_data_path": "rows.jsonl"}, "packed_train_data_path must name packed Parquet"),
        ({"packed_val_data_path": "rows"}, "packed_val_data_path must name packed Parquet"),
    ],
)
def test_what_the_release_refuses_is_refused_by_name(fields, words):
    with pytest.raises(SettingError) as raised:
        PackedSequenceSpecs(**{"packed_sequence_size": 64, **fields})

    assert words in str(raised.value)


def test_a_longest_document_may_stand_without_a_pack_size():
    assert PackedSequenceSpecs(max_single_sequence_length=65).max_single_sequence_length == 65
    with pytest.raises(SettingError, match="set the data set's seq_length"):
        PackedSequenceSpecs(64, max_single_sequence_length=8).to_dialect("0.5")


@pytest.mark.parametrize("spec", ["training_64.idx.parquet", "*.idx.parquet", "."])
def test_packed_data_is_found_by_file_glob_and_folder(tmp_path, parquet, spec):
    path = str(tmp_path / spec)

    assert PackedSequenceSpecs(64, packed_train_data_path=path).packed_train_data_path == path


@pytest.mark.parametrize("name", ["missing.idx.parquet", "missing_*.parquet", "missing.npy"])
def test_packed_data_that_isnt_there_is_named(tmp_path, name):
    with pytest.raises(SourceError) as raised:
        PackedSequenceSpecs(64, packed_val_data_path=tmp_path / name)

    assert "packed_val_data_path" in str(raised.value)
    assert name in str(raised.value)


def test_an_array_is_deprecated_from_0_5_on(tmp_path):
    path = tmp_path / "rows.npy"
    np.save(path, np.zeros(1))

    with pytest.warns(DeprecationWarning, match=r"packed_train_data_path names .*rows\.npy: .* deprecated"):
        specs = PackedSequenceSpecs(64, packed_train_data_path=str(path))
    assert specs.packed_train_data_path == path
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PackedSequenceSpecs(64, packed_train_data_path=str(path), dialect="0.3.1")


def test_constant_boundaries_need_constant_width_and_metadata(tmp_path, parquet):
    specs = PackedSequenceSpecs(64, pad_cu_seqlens=True)
    assert specs.check(pad_to_max_length=True) is specs
    with pytest.raises(SettingError, match=r'set dataset_kwargs\["pad_to_max_length"\] = True'):
        specs.check(pad_to_max_length=False)

    specs.packed_train_data_path = parquet
    with pytest.raises(SettingError, match=r"set packed_metadata_path to 64_metadata\.jsonl"):
        specs.check(pad_to_max_length=True)
    specs.packed_metadata_path = tmp_path / "64_metadata.jsonl"
    with pytest.raises(SettingError, match=r"64_metadata\.jsonl, which isn't there"):
        specs.check()
    specs.packed_metadata_path.write_text("[]")
    with pytest.raises(SourceError, match=r"64_metadata\.jsonl holds no entry"):
        specs.check()
    write_metadata(specs.packed_metadata_path, metadata_entry([20, 12], [0, 2], 32), append=False)
    with pytest.raises(SourceError, match=r"entry 1: `pack_size` is 32, but packed_sequence_size is 64"):
        specs.check()
    write_metadata(specs.packed_metadata_path, metadata_entry([40, 12], [0, 2], 64), append=False)
    assert specs.check().pad_cu_seqlens


def test_settings_of_packing_follow_from_specs():
    specs = PackedSequenceSpecs(64, max_single_sequence_length=32, pad_seq_to_mult=4)

    found = specs.pack_settings(algorithm="first_fit_shuffle", seed=3)

    assert (found.pack_size, found.multiple, found.longest, found.seed) == (64, 4, 32, 3)
    with pytest.raises(SettingError, match="packed_sequence_size is -1, which switches packing off"):
        PackedSequenceSpecs().pack_settings()


def test_a_folder_that_varlen_didnt_pack_gives_no_specs(tmp_path):
    with pytest.raises(SourceError, match="is not a finished set of `varlen pack --format megatron`"):
        PackedSequenceSpecs.from_packed(tmp_path)


def test_0_3_has_fewer_fields_and_reads_arrays_alone(parquet):
    assert set(PackedSequenceSpecs(64).to_dialect("0.3.1")) == {
        "packed_sequence_size",
        "tokenizer_model_name",
        "packed_train_data_path",
        "packed_val_data_path",
        "packed_metadata_path",
        "pad_cu_seqlens",
        "pad_seq_to_mult",
    }
    assert "num_tokenizer_workers" in PackedSequenceSpecs(64).to_dialect("0.4.0")
    with pytest.raises(SettingError, match=r"but 0\.3\.1 reads packed \.npy files alone"):
        PackedSequenceSpecs(64, packed_val_data_path=parquet).to_dialect("0.3.1")


def test_a_pair_is_known_after_0_6_only(tmp_path):
    for end in (".bin", ".idx"):
        (tmp_path / f"training_64.sft{end}").write_bytes(b"")
    prefix = str(tmp_path / "training_64.sft")

    assert PackedSequenceSpecs(64, packed_train_data_path=prefix).packed_train_data_path == prefix
    with pytest.raises(SettingError, match=r"a pair of \.sft\.bin and \.sft\.idx; got"):
        PackedSequenceSpecs(64, packed_train_data_path=prefix, dialect="0.5")

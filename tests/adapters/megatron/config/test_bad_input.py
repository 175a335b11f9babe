"""What is no configuration, or holds values of a wrong kind, is told in one sentence that names it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.megatron_configs import packed

from varlen.adapters.megatron import check_config
from varlen.errors import SettingError, SourceError


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        (
            "model__context_parallel_size",
            "2",
            "model.context_parallel_size must be a whole number of 1 or more; got '2'",
        ),
        ("model__context_parallel_size", 0, "must be a whole number of 1 or more; got 0"),
        (
            "train__micro_batch_size",
            True,
            "train.micro_batch_size must be a whole number of 1 or more; got True",
        ),
        ("train__micro_batch_size", 1.5, "got 1.5"),
        (
            "specs__packed_sequence_size",
            [512],
            "dataset.offline_packing_specs.packed_sequence_size must be a whole",
        ),
        ("specs__pad_cu_seqlens", "yes", "pad_cu_seqlens must be true or false; got 'yes'"),
        ("model__hierarchical_context_parallel_sizes", "4,2", "must be a list of whole numbers"),
        (
            "model__cuda_graph_scope",
            [{"_target_": "a", "_args_": [99]}],
            "must be a name, or a list of names",
        ),
        ("specs__packed_train_data_path", 7, "must be a path; got 7"),
        ("specs__packed_train_data_path", b"a", "must be a path; got b'a'"),
        ("model__hierarchical_context_parallel_sizes", {2: 1}, "must be a list of whole numbers"),
        ("dataset__offline_packing_specs", 512, "must be a mapping or an object of settings; got 512"),
        ("model__moe_aux_loss_coeff", "much", "must be a number"),
    ],
)
def test_a_value_of_a_wrong_kind_is_told_with_its_setting(setting: str, value: Any, words: str) -> None:
    with pytest.raises(SettingError, match=re.escape(words)):
        check_config(packed(**{setting: value}))


def test_all_values_of_wrong_kinds_are_told_at_once() -> None:
    with pytest.raises(
        SettingError, match=r"seq_length must.*micro_batch_size must.*\(2 settings have values"
    ):
        check_config(
            packed(model__seq_length="512", train__micro_batch_size=None, ddp={})
            | {"train": {"micro_batch_size": 0}}
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- a\n- b\n", "holds a list (2 entries), not a mapping of settings"),
        ("just words\n", "holds a str ('just words')"),
        ("model: [1,\n", "line 2: not YAML that can be read safely"),
        ("a: !!python/object/apply:os.system [ls]\n", "line 1: not YAML that can be read safely"),
    ],
)
def test_files_that_hold_no_configuration_are_told(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "cfg.yaml").write_text(text, encoding="utf-8")

    with pytest.raises(SourceError, match=re.escape(words)) as error:
        check_config(tmp_path / "cfg.yaml")
    assert "cfg.yaml" in str(error.value)


def test_paths_that_lead_to_no_text_are_told(tmp_path: Path) -> None:
    (tmp_path / "cfg.yaml").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(SourceError, match="is no text"):
        check_config(tmp_path / "cfg.yaml")
    with pytest.raises(SourceError, match="is a folder"):
        check_config(tmp_path)
    with pytest.raises(SourceError, match=r"none\.yaml: there is no such file"):
        check_config("none.yaml")


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        ({}, "it has nothing"),
        ({"optimizer": {}, "lr": 1}, "it has optimizer, lr"),
        (7, "got int"),
        ([], "got list"),
    ],
)
def test_what_is_no_configuration_is_told(cfg: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        check_config(cfg)


def test_an_unknown_release_and_number_of_processes_are_told() -> None:
    with pytest.raises(SettingError, match=r"'0\.2' names no dialect of Megatron-Bridge"):
        check_config(packed(), dialect="0.2")
    for count in (0, "8", 8.0, True):
        with pytest.raises(SettingError, match=f"world_size must be a whole number .* got {count!r}"):
            check_config(packed(), world_size=count)  # type: ignore[arg-type]

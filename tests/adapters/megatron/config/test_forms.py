"""A configuration is read alike in every form, and what is none is told in one sentence."""

import argparse
import copy
import enum
import re
import subprocess
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.megatron_configs import packed, plain

from varlen.adapters.megatron import PackedSequenceSpecs as Specs
from varlen.adapters.megatron import check_config
from varlen.errors import SettingError, SourceError

WRITTEN = """\
_target_: megatron.bridge.training.config.ConfigContainer
dataset:
  _target_: megatron.bridge.data.builders.hf_dataset.HFDatasetConfig
  dataloader_type: batch
  dataset_kwargs: {pad_to_max_length: true}
  dataset_name: squad
  packed_sequence_specs:
    _target_: megatron.bridge.data.datasets.packed_sequence.PackedSequenceSpecs
    packed_metadata_path: null
    packed_sequence_size: 4096
    packed_train_data_path: null
    pad_cu_seqlens: false
    pad_seq_to_mult: 4
    tokenizer_model_name: null
  process_example_fn:
    _call_: false
    _target_: megatron.bridge.data.hf_processors.squad.process_squad_example
  seed: 5678
  seq_length: 4096
ddp:
  _target_: megatron.bridge.training.config.DistributedDataParallelConfig
  average_in_collective: true
dist: {eval_context_parallel_size: null}
model:
  _target_: megatron.bridge.models.llama.llama_provider.Llama32ModelProvider1B
  calculate_per_token_loss: false
  context_parallel_size: 2
  cuda_graph_impl: transformer_engine
  cuda_graph_scope:
  - _args_: [2]
    _call_: true
    _target_: megatron.core.transformer.enums.CudaGraphScope
  hierarchical_context_parallel_sizes: null
  params_dtype: {_call_: false, _target_: torch.bfloat16}
  seq_length: 4096
train:
  _target_: megatron.bridge.training.config.TrainingConfig
  global_batch_size: 128
  micro_batch_size: 1
"""
"""As Megatron-Bridge writes its run_config.yaml: classes as _target_, enumerations by number."""


def test_yaml_as_megatron_bridge_writes_it_is_read_and_mended(tmp_path):
    path = tmp_path / "run_config.yaml"
    path.write_text(WRITTEN, encoding="utf-8")
    report = check_config(path, dialect="v0.5.1")

    assert {found.kind for found in report.errors} == {
        "per_token_loss",
        "average_in_collective",
        "static_boundaries",
    }
    assert report.packing == "offline packing to 4,096"
    assert report.changes == {
        "model.calculate_per_token_loss": True,
        "ddp.average_in_collective": False,
        "dataset.packed_sequence_specs.pad_cu_seqlens": True,
        "dataset.dataset_kwargs.pad_to_max_length": True,
    }
    assert str(path) in report.head
    assert check_config(str(path), dialect="0.5.1").findings == report.findings
    assert check_config(WRITTEN, dialect="0.5.1").findings == report.findings


@pytest.mark.parametrize(
    ("text", "words"), [(WRITTEN, "0.4 or 0.5"), ("model: {seq_length: 512}", "nothing says")]
)
def test_the_dialect_is_told_by_names_and_what_is_not_known_is_said(text, words):
    assert words in check_config(text + "\n").dialect_words


def test_both_spellings_are_a_contradiction_and_the_release_decides():
    cfg = packed()
    cfg["dataset"]["packed_sequence_specs"] = {"packed_sequence_size": 1024}

    report = check_config(cfg)
    assert (report.dialect, report.kinds) == ("0.6", ("packing_names",))
    assert report.errors[0].outcome == "silently wrong"
    assert report.changes == {"dataset.packed_sequence_specs": None}
    assert check_config(report.fixed(cfg)).ok


def test_an_older_name_set_on_an_object_of_release_0_6_trains_unpacked_and_is_told():
    dataset = GPTSFTDatasetConfig(seq_length=512, enable_offline_packing=False, offline_packing_specs=None)
    dataset.packed_sequence_specs = PackedSequenceSpecs(512)
    report = check_config(SimpleNamespace(model=SimpleNamespace(seq_length=512), dataset=dataset))

    assert (report.dialect, report.kinds, report.errors[0].outcome) == (
        "0.6",
        ("packing_names",),
        "silently wrong",
    )
    assert report.packing == ""
    assert check_config(report.fixed(SimpleNamespace(dataset=dataset))).packing == "offline packing to 512"


def test_specs_of_an_older_release_are_moved_for_a_newer_one():
    cfg = packed("0.5", specs__pad_seq_to_mult=8)
    report = check_config(cfg, dialect="0.6")

    mended = report.fixed(cfg)["dataset"]
    assert mended["packed_sequence_specs"] is None
    assert mended["enable_offline_packing"] is True
    assert mended["offline_packing_specs"]["pad_seq_to_mult"] == 8
    assert check_config(report.fixed(cfg), dialect="0.6").packing == "offline packing to 512"


def test_the_older_switch_of_in_batch_packing_is_not_read_by_release_0_6():
    cfg = plain(dataset__pack_sequences_in_batch=True, train__micro_batch_size=2)

    report = check_config(cfg, dialect="0.6")
    assert report.changes == {
        "dataset.pack_sequences_in_batch": None,
        "dataset.enable_in_batch_packing": True,
    }
    assert check_config(report.fixed(cfg), dialect="0.6").ok


@dataclass
class PackedSequenceSpecs:
    packed_sequence_size: int = -1
    pad_seq_to_mult: int | None = 1
    num_tokenizer_workers: int = 4


@dataclass
class GPTSFTDatasetConfig:
    seq_length: int
    enable_offline_packing: bool = True
    offline_packing_specs: PackedSequenceSpecs | None = field(
        default_factory=lambda: PackedSequenceSpecs(512)
    )
    dataset_kwargs: dict[str, Any] | None = None


class MyOwnDataset(GPTSFTDatasetConfig):
    """A subclass is what its parent is."""


class Scope(enum.Enum):
    attn = 2


@pytest.mark.parametrize("dataset", [GPTSFTDatasetConfig, MyOwnDataset])
def test_objects_with_attributes_are_read_and_copies_mended(dataset):
    cfg = SimpleNamespace(
        model=SimpleNamespace(
            seq_length=512,
            context_parallel_size=2,
            cuda_graph_impl="transformer_engine",
            cuda_graph_scope=[Scope.attn],
            forward=lambda: None,
        ),
        train=SimpleNamespace(micro_batch_size=2, global_batch_size=8),
        dataset=dataset(seq_length=512),
        ddp=SimpleNamespace(average_in_collective=False),
    )
    report = check_config(cfg)

    assert {found.kind for found in report.errors} == {
        "micro_batch_packed",
        "pad_seq_to_mult",
        "per_token_loss",
        "static_width",
        "static_boundaries",
    }
    mended = report.fixed(cfg)
    assert check_config(mended).ok
    assert (mended.train.micro_batch_size, mended.dataset.dataset_kwargs) == (1, {"pad_to_max_length": True})
    assert cfg.train.micro_batch_size == 2


def test_values_that_only_a_class_has_are_read():
    class Model:
        seq_length = 510
        context_parallel_size = 2

    assert check_config(SimpleNamespace(model=Model())).kinds == ("seq_length",)


def test_sizes_one_level_deeper_are_read_and_named_where_they_stand():
    cfg = plain("GPTSFTDatasetConfig")
    cfg["model"] = {
        "seq_length": 512,
        "transformer": {"context_parallel_size": 2, "calculate_per_token_loss": False},
    }

    report = check_config(cfg)
    assert report.errors[0].setting == "model.transformer.calculate_per_token_loss"
    assert check_config(report.fixed(cfg)).ok


def test_dotted_names_and_references_are_resolved():
    cfg = {
        "model.seq_length": 510,
        "model": {"context_parallel_size": 2},
        "dataset.seq_length": "${model.seq_length}",
    }

    report = check_config(cfg)
    assert report.changes == {"model.seq_length": 512, "dataset.seq_length": 512}
    assert check_config(report.fixed(cfg)).ok


def test_references_to_references_are_followed_and_those_that_go_round_are_told():
    cfg = {"n": 510, "model": {"seq_length": "${dataset.seq_length}", "context_parallel_size": 2}}

    report = check_config({**cfg, "dataset": {"seq_length": "${n}"}})
    assert report.changes["model.seq_length"] == 512
    with pytest.raises(SettingError, match=r"model.seq_length must be a whole number .*model.seq_length"):
        check_config({**cfg, "dataset": {"seq_length": "${model.seq_length}"}})


def test_specs_that_are_put_into_an_object_have_every_field_that_a_release_reads():
    data = SimpleNamespace(seq_length=512, enable_offline_packing=True, offline_packing_specs=None)
    cfg = SimpleNamespace(model=SimpleNamespace(seq_length=512), dataset=data)

    specs = check_config(cfg).fixed(cfg).dataset.offline_packing_specs
    wanted = Specs(512)
    names = {field.name for field in fields(wanted)} - {"dialect"}
    assert {name: getattr(specs, name) for name in names} == {name: getattr(wanted, name) for name in names}


@pytest.mark.parametrize("dialect", [0.5, "0.5", "0.5.0rc1"])
def test_a_release_may_be_a_number(dialect):
    assert check_config(packed("0.5"), dialect=dialect).dialect == "0.5"


class MissingMandatoryValue(Exception):
    """What OmegaConf raises for ???."""


class LazyList(Sequence[Any]):
    """A sequence that is no list, as OmegaConf's is none."""

    def __init__(self, held: list[Any]) -> None:
        self.held = held

    def __getitem__(self, place: Any) -> Any:
        return self.held[place]

    def __len__(self) -> int:
        return len(self.held)


class Lazy(MutableMapping[str, Any]):
    """A mapping that keeps copies, and raises for values that must still be given, as OmegaConf's does."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held

    def __getitem__(self, name: str) -> Any:
        value = self.held[name]
        if value == "???":
            raise MissingMandatoryValue
        if isinstance(value, list):
            return LazyList(value)
        return Lazy(value) if isinstance(value, dict) else value

    def __setitem__(self, name: str, value: Any) -> None:
        self.held[name] = copy.deepcopy(value)

    def __delitem__(self, name: str) -> None:
        del self.held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


def test_values_that_must_still_be_given_are_as_if_not_there():
    cfg = packed(train__micro_batch_size="???", specs__packed_train_data_path="???")

    assert check_config(Lazy(cfg)).ok
    assert check_config(cfg).ok
    assert check_config(Lazy(packed(train__micro_batch_size=2))).kinds == ("micro_batch_packed",)


def test_a_mapping_that_keeps_copies_is_mended():
    cfg = Lazy(packed(model__cuda_graph_impl="transformer_engine", dataset__offline_packing_specs=None))

    report = check_config(cfg)
    assert not report.ok
    assert check_config(report.fixed(cfg)).ok


def test_what_packs_nothing_is_said_to_pack_nothing():
    report = check_config(plain("GPTDatasetConfig", model__sequence_parallel=np.bool_(False)))

    assert str(report) == (
        "nothing found in the configuration; Megatron-Bridge 0.6, as nothing says which, no packing"
    )


def test_sequences_that_are_no_lists_are_read():
    graph = {"model__cuda_graph_impl": "transformer_engine", "model__cuda_graph_scope": ["mlp"]}
    cfg = packed(
        **graph, model__hierarchical_context_parallel_sizes=[1], model__moe_aux_loss_coeff=[0.1, 0.0]
    )

    assert check_config(Lazy(cfg)).kinds == ("static_width",)


def test_the_arguments_of_megatron_lm_are_read():
    arguments = argparse.Namespace(
        context_parallel_size=2,
        seq_length=510,
        micro_batch_size=1,
        global_batch_size=4,
        world_size=16,
        lr=1e-4,
    )
    report = check_config(arguments)

    assert report.kinds == ("global_batch", "seq_length")
    assert report.changes == {"global_batch_size": 8, "seq_length": 512}
    assert (
        check_config({"--context-parallel-size": 2, "--seq-length": 510}).errors[0].setting == "--seq-length"
    )


def test_names_that_are_all_but_right_are_told():
    cfg = packed(specs__pad_seq_to_mul=8, model__context_paralel_size=2, model__moe_router_topk=2)

    report = check_config(cfg)
    assert report.ok
    assert set(report.kinds) == {"unknown_setting"}
    assert {found.setting: found.fix.split(",")[0] for found in report} == {
        "model.context_paralel_size": "rename it to model.context_parallel_size",
        "dataset.offline_packing_specs.pad_seq_to_mul": "rename it to dataset.offline_packing_specs.pad_seq_to_mult",
    }


def test_neither_torch_nor_yaml_is_loaded_for_a_mapping():
    script = (
        "import sys; from varlen.adapters.megatron import check_config\n"
        "check_config({'model': {'seq_length': 512}})\n"
        "assert not {'torch', 'yaml', 'numba', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_yaml_without_pyyaml_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)

    with pytest.raises(ImportError, match="PyYAML is not installed; `pip install pyyaml` installs it"):
        check_config(WRITTEN)


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
def test_a_value_of_a_wrong_kind_is_told_with_its_setting(setting, value, words):
    with pytest.raises(SettingError, match=re.escape(words)):
        check_config(packed(**{setting: value}))


def test_all_values_of_wrong_kinds_are_told_at_once():
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
def test_files_that_hold_no_configuration_are_told(text, words, tmp_path):
    (tmp_path / "cfg.yaml").write_text(text, encoding="utf-8")

    with pytest.raises(SourceError, match=re.escape(words)) as error:
        check_config(tmp_path / "cfg.yaml")
    assert "cfg.yaml" in str(error.value)


def test_paths_that_lead_to_no_text_are_told(tmp_path):
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
def test_what_is_no_configuration_is_told(cfg, words):
    with pytest.raises(SettingError, match=words):
        check_config(cfg)


def test_an_unknown_release_and_number_of_processes_are_told():
    with pytest.raises(SettingError, match=r"'0\.2' names no dialect of Megatron-Bridge"):
        check_config(packed(), dialect="0.2")
    for count in (0, "8", 8.0, True):
        with pytest.raises(SettingError, match=f"world_size must be a whole number .* got {count!r}"):
            check_config(packed(), world_size=count)  # type: ignore[arg-type]

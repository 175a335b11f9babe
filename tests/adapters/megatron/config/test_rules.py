"""Rules beyond Megatron-Bridge's own validation: batches, multiples, families, releases, files."""

import json
from typing import Any

import pytest
from tests.support.megatron_configs import changed, in_batch, only, packed, plain

from varlen.adapters.megatron import check_config

SPECS = "dataset.offline_packing_specs"


def kinds(cfg: Any, **settings: Any) -> set[str]:
    return set(check_config(cfg, **settings).kinds)


def test_a_sound_configuration_has_no_finding_at_all():
    assert check_config(packed(), world_size=8).findings == ()
    assert check_config(in_batch(), world_size=8).findings == ()


@pytest.mark.parametrize(
    ("steps", "rows", "processes", "fix"),
    [
        (32, 1, 8, None),
        (32, 1, 12, "24 or 36"),
        (4, 1, 8, "train.global_batch_size = 8"),
        (30, 4, None, "28 or 32"),
    ],
)
def test_the_global_batch_is_a_multiple_of_what_the_ranks_take(steps, rows, processes, fix):
    cfg = plain(train__global_batch_size=steps, train__micro_batch_size=rows)

    if fix is None:
        assert check_config(cfg, world_size=processes).ok
    else:
        assert only(cfg, "global_batch", world_size=processes).fix.startswith(fix)


def test_processes_are_a_multiple_of_the_model_s_ranks():
    cfg = plain(model__tensor_model_parallel_size=4, model__context_parallel_size=2)

    assert only(cfg, "world_size", world_size=12).fix == "start 8 or 16 processes"


def test_evaluation_takes_packed_rows_one_by_one_and_its_own_share():
    assert only(packed(validation__eval_micro_batch_size=2), "eval_micro_batch").fix.endswith("size = 1")
    found = only(packed(validation__eval_global_batch_size=12), "global_batch", world_size=8)
    assert found.fix.startswith("8 or 16")


@pytest.mark.parametrize(
    ("cp", "tp", "sequence_parallel", "multiple"),
    [
        (1, 1, False, 1),
        (2, 1, False, 4),
        (2, 4, True, 8),
        (4, 3, True, 24),
        (1, 4, True, 4),
        (2, 4, False, 4),
    ],
)
def test_the_multiple_of_documents_is_computed(cp, tp, sequence_parallel, multiple):
    parallel = {
        "model__context_parallel_size": cp,
        "model__tensor_model_parallel_size": tp,
        "model__sequence_parallel": sequence_parallel,
    }
    long = {
        "model__seq_length": 48 * 512,
        "dataset__seq_length": 48 * 512,
        "specs__packed_sequence_size": 48 * 512,
    }
    cfg = packed(**parallel, **long)

    if multiple == 1:
        assert "pad_seq_to_mult" not in kinds(cfg)
    else:
        assert only(cfg, "pad_seq_to_mult").changes == {f"{SPECS}.pad_seq_to_mult": multiple}
        assert only(cfg, "pad_seq_to_mult").level == ("error" if cp > 1 else "warning")
    assert "pad_seq_to_mult" not in kinds(packed(**parallel, **long, specs__pad_seq_to_mult=multiple * 2))


def test_model_and_data_set_have_rows_of_one_length():
    found = only(plain("GPTDatasetConfig", model__seq_length=1024), "seq_lengths_differ")

    assert (found.outcome, found.changes) == ("stops", {"model.seq_length": 512})
    assert "seq_lengths_differ" not in kinds(plain("mine.Provider", model__seq_length=1024))


def test_specs_that_a_data_set_of_pre_training_never_reads_are_told():
    cfg = packed("0.5", dataset___target_="megatron.bridge.GPTDatasetConfig", train__micro_batch_size=4)

    report = check_config(cfg, dialect="0.5")
    assert report.kinds == ("packing_ignored",)
    assert "GPTDatasetConfig joins documents to rows by itself" in report.warnings[0].what


def test_a_pack_is_a_multiple_too():
    cfg = packed(model__context_parallel_size=2, specs__packed_sequence_size=1022, specs__pad_seq_to_mult=4)

    assert only(cfg, "pack_size").fix.startswith("1020 or 1024")


def test_documents_longer_than_a_pack_are_told():
    assert only(packed(specs__packed_sequence_size=256), "pack_below_seq_length").fix.endswith("= 512")


@pytest.mark.parametrize("value", [0, -4])
def test_a_multiple_below_one_is_refused_and_null_is_one(value):
    assert only(packed(specs__pad_seq_to_mult=value), "pad_seq_to_mult").outcome == "stops"
    assert not check_config(packed(specs__pad_seq_to_mult=None))


def test_a_pack_size_of_nothing_is_refused_from_release_0_6_and_turns_packing_off_before():
    assert only(packed(specs__packed_sequence_size=-1), "pack_size").level == "error"
    report = check_config(packed("0.5", specs__packed_sequence_size=-1, train__micro_batch_size=4))
    assert (report.ok, report.packing, report.kinds) == (True, "", ("pack_size",))


def test_the_longest_document_is_at_most_a_pack():
    assert only(packed(specs__max_single_sequence_length=600), "max_single_sequence_length").fix.endswith(
        "= 512"
    )


def test_rows_packed_without_a_loss_per_token_are_told_how_targets_weigh():
    found = only(packed(model__calculate_per_token_loss=False), "loss_weighting")

    assert (found.level, found.fix) == ("warning", "model.calculate_per_token_loss = true")


def test_a_loss_per_token_is_never_advised_together_with_averaging():
    cfg = packed(model__calculate_per_token_loss=False, ddp__average_in_collective=True)
    advised = only(cfg, "loss_weighting").changes

    assert advised == {"model.calculate_per_token_loss": True, "ddp.average_in_collective": False}
    assert not check_config(changed(cfg, dict(advised)))


@pytest.mark.parametrize(("dialect", "outcome"), [("0.5", "silently wrong"), ("0.6", "stops")])
def test_graphs_of_packed_rows_are_checked_by_nvidia_from_release_0_6_on(dialect, outcome):
    report = check_config(packed(dialect, model__cuda_graph_impl="transformer_engine"), dialect=dialect)

    assert {(found.kind, found.outcome) for found in report.errors} == {
        ("static_width", outcome),
        ("static_boundaries", outcome),
    }


@pytest.mark.parametrize(
    ("switch", "is_held"), [("enable_cuda_graph", True), ("external_cuda_graph", True), ("none", False)]
)
def test_older_switches_of_graphs_count_before_release_0_6(switch, is_held):
    report = check_config(packed("0.5", **{f"model__{switch}": True}), dialect="0.5")

    assert ("static_boundaries" in report.kinds) == is_held


@pytest.mark.parametrize(
    ("model", "way", "level"),
    [
        ("GLM45AirModelProvider106B", packed, "warning"),
        ("Qwen3NextModelProvider80B_A3B", packed, "warning"),
        ("DeepSeekV4ModelProvider", packed, "warning"),
        ("Qwen35VLModelProvider", in_batch, "warning"),
        ("Qwen3OmniModelProvider", in_batch, "error"),
        ("Qwen3ASRModelProvider", in_batch, "error"),
        ("NemotronNano12Bv2VLModelProvider", in_batch, "error"),
        ("GLM45VModelProvider", packed, None),
        ("Llama3ModelProvider8B", packed, None),
        ("Qwen3OmniModelProvider", packed, None),
    ],
)
def test_families_that_opt_out_are_told_by_their_class(model, way, level):
    report = check_config(way(model___target_=f"megatron.bridge.models.{model}"))

    assert [found.level for found in report if found.kind == "model_family"] == ([level] if level else [])


def test_in_batch_packing_is_turned_off_for_families_that_refuse_it():
    cfg = in_batch(model___target_="a.Qwen3OmniModelProvider")

    assert check_config(cfg).changes == {"dataset.enable_in_batch_packing": False}


def test_families_are_told_by_the_name_of_their_weights_too():
    assert (
        "Qwen/Qwen3-Next-80B-A3B"
        in only(packed(model__hf_model_id="Qwen/Qwen3-Next-80B-A3B"), "model_family").what
    )


def test_qwen3_next_stops_in_core_before_release_0_6():
    cfg = packed("0.4", model___target_="a.Qwen3NextModelProvider80B_A3B")

    assert only(cfg, "model_family", dialect="0.4").outcome == "stops"
    assert check_config(check_config(cfg, dialect="0.4").fixed(cfg)).packing == ""


def test_a_family_s_packing_is_turned_off_switch_and_specs():
    cfg = packed(model___target_="a.GLM45AirModelProvider106B")
    advised = only(cfg, "model_family").changes

    assert advised == {"dataset.offline_packing_specs": None, "dataset.enable_offline_packing": False}
    assert check_config(changed(cfg, dict(advised))).packing == ""


def test_further_targets_are_silently_wrong_where_documents_are_padded():
    assert only(packed(model__mtp_num_layers=1), "mtp").level == "warning"
    assert only(packed(model__mtp_num_layers=1, specs__pad_seq_to_mult=8), "mtp").outcome == "silently wrong"
    assert "mtp" not in kinds(plain(model__mtp_num_layers=1))


@pytest.mark.parametrize(
    "setting", [{"dataset__dataset_kwargs": {"virtual_tokens": 4}}, {"peft": {"virtual_tokens": 4}}]
)
def test_prompts_as_weights_stop_with_packed_rows(setting):
    assert only(packed(**setting), "p_tuning").outcome == "stops"


def test_routers_within_graphs_stop_and_graphs_of_attention_pass():
    graph = {"model__cuda_graph_impl": "transformer_engine", "model__num_moe_experts": 8}
    static = {"dataset__dataset_kwargs": {"pad_to_max_length": True}, "specs__pad_cu_seqlens": True}
    cfg = packed(**graph, **static, model__cuda_graph_scope=["attn", "moe_router"])

    assert only(cfg, "graph_router").changes == {"model.cuda_graph_scope": ("attn",)}
    assert check_config(packed(**graph, **static, model__cuda_graph_scope=["attn"])).ok


def test_local_graphs_of_parts_stop_from_release_0_6_on():
    cfg = plain(model__cuda_graph_impl="local", model__cuda_graph_scope=["attn"])

    assert only(cfg, "cuda_graph_impl", dialect="0.6").changes == {
        "model.cuda_graph_impl": "transformer_engine"
    }
    assert "cuda_graph_impl" not in kinds(cfg, dialect="0.5")


def test_graphs_of_in_batch_packing_are_a_warning():
    assert only(in_batch(model__cuda_graph_impl="transformer_engine"), "graph_in_batch").level == "warning"


def test_padding_counts_among_experts_before_release_0_7():
    cfg = packed(model__num_moe_experts=8, model__moe_aux_loss_coeff=0.01, specs__pad_seq_to_mult=8)

    assert "moe_padding" in kinds(cfg, dialect="0.6.0")
    assert "moe_padding" not in kinds(cfg, dialect="0.7.0")
    experts = {"model__num_moe_experts": 8, "model__moe_aux_loss_coeff": 0.01}
    assert "moe_padding" in kinds(packed(**experts, dataset__dataset_kwargs={"pad_to_max_length": True}))
    assert "moe_padding" not in kinds(packed(**experts))
    assert "moe_padding" not in kinds(packed(model__num_moe_experts=8, specs__pad_seq_to_mult=8))


@pytest.mark.parametrize(
    ("dialect", "level"),
    [("0.4", "error"), ("0.4.2", "error"), ("0.5", None), ("0.5.0", None), (None, "warning")],
)
def test_middle_stages_lose_documents_before_release_0_5(dialect, level):
    cfg = packed("0.5", model__pipeline_model_parallel_size=4)
    found = [finding for finding in check_config(cfg, dialect=dialect) if finding.kind == "middle_stages"]

    assert [finding.level for finding in found] == ([level] if level else [])
    cfg["model"]["pipeline_model_parallel_size"] = 2
    assert "middle_stages" not in kinds(cfg, dialect=dialect)


CUT = {"model__context_parallel_size": 2, "specs__pad_seq_to_mult": 4, "dataset__seed": 7}


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        ("0.3.1", {"boundary_terminators", "packing_seed", "eos_padding"}),
        ("0.4.2", {"boundary_terminators", "parquet_padding", "packing_seed", "eos_padding"}),
        ("0.5.0", {"boundary_terminators", "parquet_padding", "packing_seed", "eos_padding"}),
        ("0.5.1", {"packing_seed", "eos_padding"}),
        ("0.6", {"eos_padding"}),
        ("0.6.0", {"eos_padding"}),
        ("0.6.1", set()),
        ("0.7", set()),
    ],
)
def test_each_release_is_told_what_it_alone_does(dialect, expected):
    report = check_config(
        packed(dialect[:3].replace("0.7", "0.6").replace("0.3", "0.4"), **CUT), dialect=dialect
    )

    assert report.ok
    assert set(report.kinds) == expected


def test_a_release_is_not_blamed_for_what_it_is_not_asked_to_do():
    assert kinds(packed("0.4"), dialect="0.4.2") == set()


def test_one_tokenizer_process_is_told_from_release_0_6_on():
    assert only(packed(specs__num_tokenizer_workers=-1), "tokenizer_workers").level == "warning"
    assert "tokenizer_workers" not in kinds(packed("0.5", specs__num_tokenizer_workers=-1))


@pytest.mark.parametrize(("dialect", "words"), [("0.5", "IndexError"), ("0.6", "left out")])
def test_chats_too_long_for_a_pack_are_told(dialect, words):
    assert words in only(packed(dialect, dataset__dataset_kwargs={"chat": True}), "overlong_samples").what


# Megatron-LM's own arguments.


def test_hybrid_context_parallelism_is_told_what_it_can_not_be_combined_with():
    arguments = {"hybrid_context_parallel": True, "pipeline_model_parallel_size": 2, "micro_batch_size": 1}
    report = check_config({**arguments, "seq_length": 512})

    assert set(report.changes) == {
        "pipeline_model_parallel_size",
        "calculate_per_token_loss",
        "dataloader_type",
        "max_seqlen_per_dp_cp_rank",
    }
    assert check_config(report.fixed({**arguments, "seq_length": 512})).ok
    graphs = check_config({**arguments, "enable_cuda_graph": True, "use_megatron_fsdp": True}).changes
    assert (graphs["enable_cuda_graph"], graphs["use_megatron_fsdp"]) == (False, False)


def test_packed_fine_tuning_of_megatron_lm_takes_one_row_and_names_its_own_arguments():
    arguments = {"sft": True, "micro_batch_size": 2, "global_batch_size": 32, "seq_length": 510}
    report = check_config({**arguments, "context_parallel_size": 2})

    assert {found.setting for found in report.errors} == {"micro_batch_size", "seq_length"}
    assert report.changes == {"micro_batch_size": 1, "seq_length": 512}
    assert report.dialect_words == "Megatron-LM's arguments"


def test_packed_files_that_are_not_there_stop(tmp_path):
    found = only(
        packed(specs__packed_train_data_path=str(tmp_path / "none" / "a.idx.parquet")), "packed_file"
    )

    assert found.outcome == "stops"
    assert "there is nothing at this path, and its folder" in found.what
    assert check_config(packed(specs__packed_train_data_path="msc://bucket/a.idx.parquet")).ok
    assert check_config(packed(specs__packed_train_data_path="a.parquet"), files=False).ok


@pytest.mark.parametrize("path", ["a.idx.parquet", "*.parquet", "", "b", "A.PQ"])
def test_packed_files_that_are_there_pass(path, tmp_path):
    for name in ("a.idx.parquet", "b.bin", "b.idx", "A.PQ"):
        (tmp_path / name).touch()

    assert check_config(packed(specs__packed_train_data_path=str(tmp_path / path))).ok


def test_pickled_files_are_deprecated_and_others_refused(tmp_path):
    for name in ("a.npy", "a.jsonl"):
        (tmp_path / name).touch()

    assert only(packed(specs__packed_train_data_path=tmp_path / "a.npy"), "npy_file").level == "warning"
    assert only(packed(specs__packed_train_data_path=tmp_path / "a.jsonl"), "packed_file").level == "error"
    old = packed("0.4", specs__packed_train_data_path=str(tmp_path / "a.npy"))
    assert not kinds(old, dialect="0.3.1") & {"npy_file", "packed_file"}
    (tmp_path / "a.parquet").touch()
    newer = packed("0.4", specs__packed_train_data_path=tmp_path / "a.parquet")
    assert only(newer, "packed_file", dialect="0.3").limit == "a .npy file before release 0.4"
    assert "packed_file" not in kinds(newer, dialect="0.4")


ENTRY = {"pack_size": 512, "dataset_max_seqlen": 500, "max_samples_per_bin": 9, "min_packed_seqlen": 400}


@pytest.mark.parametrize(
    ("text", "level", "words"),
    [
        (json.dumps([ENTRY]), None, ""),
        (json.dumps([ENTRY, ENTRY]), None, ""),
        (json.dumps([ENTRY, {**ENTRY, "pack_size": 1024}]), "error", "packs of 1024"),
        (json.dumps([{"pack_size": 512}]), "error", "lacks dataset_max_seqlen, max_samples_per_bin"),
        (json.dumps(ENTRY), "error", "pack_size"),
        ("[]", "error", "it holds []"),
        ("{", "error", "isn't JSON"),
    ],
)
def test_metadata_belong_to_the_packs(text, level, words, tmp_path):
    (tmp_path / "a.idx.parquet").touch()
    (tmp_path / "metadata.jsonl").write_text(text, encoding="utf-8")
    static = {"specs__pad_cu_seqlens": True, "dataset__dataset_kwargs": {"pad_to_max_length": True}}
    cfg = packed(
        **static,
        specs__packed_train_data_path=str(tmp_path / "a.idx.parquet"),
        specs__packed_metadata_path=str(tmp_path / "metadata.jsonl"),
    )

    if level is None:
        assert check_config(cfg).findings == ()
    else:
        found = only(cfg, "metadata")
        assert found.level == level
        assert words in found.what


def test_metadata_that_are_missing_are_told(tmp_path):
    (tmp_path / "a.idx.parquet").touch()
    there = {"specs__packed_train_data_path": str(tmp_path / "a.idx.parquet")}
    static = {"specs__pad_cu_seqlens": True, "dataset__dataset_kwargs": {"pad_to_max_length": True}}

    assert only(packed(**there, specs__packed_metadata_path="none.jsonl"), "metadata").level == "error"
    assert only(packed(**there, **static), "metadata").level == "warning"
    assert "metadata" not in kinds(packed(**there))

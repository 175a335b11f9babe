"""What Megatron-Bridge's own tests say of packed configurations holds, and a report's changes mend what they say."""

import math
import re
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.megatron_configs import changed, energon, in_batch, only, packed, plain

from varlen.adapters.megatron import check_config
from varlen.adapters.megatron.config.report import Kind

GPT, SFT, VLM = "GPTDatasetConfig", "GPTSFTDatasetConfig", "HFDatasetConversationProvider"
OLD_AND_NEW = pytest.mark.parametrize("dialect", ["0.4", "0.5", "0.6"])


def kinds(cfg: Any, **settings: Any) -> set[str]:
    return {finding.kind for finding in check_config(cfg, **settings).errors}


# The cases that release 0.4.2 selects for packed_sequence.


@OLD_AND_NEW
def test_packed_rows_in_micro_batches_of_four_stop(dialect):
    found = only(packed(dialect, train__micro_batch_size=4), "micro_batch_packed", dialect=dialect)

    specs = "offline_packing_specs" if dialect == "0.6" else "packed_sequence_specs"
    assert (found.level, found.outcome, found.seen) == ("error", "stops", "train.micro_batch_size = 4")
    assert found.changes == {
        "train.micro_batch_size": 1,
        "train.global_batch_size": 8,
        f"dataset.{specs}.packed_sequence_size": 2048,
    }


@OLD_AND_NEW
def test_packed_rows_in_micro_batches_of_one_pass(dialect):
    assert check_config(packed(dialect), dialect=dialect).ok


def test_micro_batches_of_four_pass_without_specs():
    for specs in ("packed_sequence_specs", "offline_packing_specs"):
        assert not check_config(plain(SFT, train__micro_batch_size=4, **{f"dataset__{specs}": None}))


def test_micro_batches_of_four_pass_with_a_data_set_of_pre_training():
    assert not check_config(plain(GPT, train__micro_batch_size=4))


# pack_sequences_in_batch, enable_in_batch_packing from 0.6 on.


@OLD_AND_NEW
def test_in_batch_packing_of_one_row_stops(dialect):
    found = only(in_batch(dialect, train__micro_batch_size=1), "micro_batch_in_batch", dialect=dialect)

    assert found.changes == {"train.micro_batch_size": 2}
    assert found.limit == "2 or more with in-batch packing"


@OLD_AND_NEW
def test_in_batch_packing_of_four_rows_passes(dialect):
    assert check_config(in_batch(dialect), dialect=dialect).ok


# context_parallel_seq_length_divisibility.


@pytest.mark.parametrize(
    ("length", "cp", "fix"), [(512, 2, None), (510, 2, "508 or 512"), (256, 3, "252 or 258")]
)
def test_rows_are_multiples_of_twice_the_context_parallel_size(length, cp, fix):
    cfg = plain(GPT, model__seq_length=length, dataset__seq_length=length, model__context_parallel_size=cp)
    report = check_config(cfg, world_size=cp)

    assert report.ok == (fix is None)
    if fix is not None:
        assert report.kinds == ("seq_length",)
        assert report.errors[0].fix.startswith(fix)
        assert report.errors[0].limit.endswith(f"= {2 * cp}")


# context_parallel_finetuning_validations: five cases, and release 0.6's further data sets.

TUNED = [
    SFT,
    "DirectHFSFTDatasetConfig",
    "EnergonDatasetConfig",
    "MockVLMSFTDatasetConfig",
    "FinetuningDatasetConfig",
]


@pytest.mark.parametrize("dataset", [*TUNED, VLM])
@pytest.mark.parametrize(
    ("per_token", "averaged", "expected"),
    [(False, False, "per_token_loss"), (True, True, "average_in_collective"), (True, False, None)],
)
def test_fine_tuning_with_context_parallelism_sums_a_loss_per_token(dataset, per_token, averaged, expected):
    cfg = plain(
        dataset,
        model__context_parallel_size=2,
        model__calculate_per_token_loss=per_token,
        ddp__average_in_collective=averaged,
    )

    assert kinds(cfg) == ({expected} if expected else set())


def test_pre_training_with_context_parallelism_may_average():
    cfg = plain(GPT, model__context_parallel_size=2, ddp__average_in_collective=True)

    assert not check_config(cfg)


def test_fine_tuning_without_context_parallelism_may_average():
    assert not check_config(plain(SFT, ddp__average_in_collective=True))


def test_a_loss_per_token_that_is_averaged_stops_in_megatron_core_at_any_size():
    cfg = plain(SFT, model__calculate_per_token_loss=True, ddp__average_in_collective=True)

    assert "Megatron Core stops" in only(cfg, "average_in_collective").what


# What release 0.6 tests besides.


def test_offline_packing_without_specs_gets_them_with_the_multiple_computed():
    cfg = plain(
        SFT,
        dataset__enable_offline_packing=True,
        dataset__offline_packing_specs=None,
        model__context_parallel_size=2,
        model__tensor_model_parallel_size=4,
        model__sequence_parallel=True,
    )

    found = only(cfg, "packing_specs")
    assert found.changes["dataset.offline_packing_specs"] == {
        "packed_sequence_size": 512,
        "pad_seq_to_mult": 8,
    }


def test_specs_without_the_flag_stop():
    found = only(packed(dataset__enable_offline_packing=False), "packing_flag")

    assert found.changes == {"dataset.enable_offline_packing": True}


def test_offline_and_in_batch_packing_together_stop():
    cfg = packed(dataset__enable_in_batch_packing=True, train__micro_batch_size=4)
    report = check_config(cfg)

    assert report.kinds[0] == "packing_switches"
    assert report.changes["dataset.enable_in_batch_packing"] is False
    assert check_config(report.fixed(cfg)).ok


def test_a_custom_data_set_with_packed_rows_stops_in_micro_batches_of_four():
    cfg = packed(train__micro_batch_size=4, dataset___target_="mine.PackedDatasetProvider")

    assert kinds(cfg) == {"micro_batch_packed"}


def test_padded_boundaries_need_rows_of_one_width():
    found = only(packed(specs__pad_cu_seqlens=True), "static_width")

    assert found.changes == {"dataset.dataset_kwargs.pad_to_max_length": True}
    assert check_config(
        packed(specs__pad_cu_seqlens=True, dataset__dataset_kwargs={"pad_to_max_length": True})
    ).ok


FIXED = {"dataset__dataset_kwargs": {"pad_to_max_length": True}}


@pytest.mark.parametrize("scopes", [[], ["attn"], ["attn", "mlp"], "full", "attn,mlp"])
@pytest.mark.parametrize("where", ["cuda_graph_modules", "cuda_graph_scope"])
def test_graphs_of_attention_need_padded_boundaries(scopes, where):
    cfg = packed(**FIXED, model__cuda_graph_impl="transformer_engine", **{f"model__{where}": scopes})

    assert kinds(cfg) == {"static_boundaries"}


def test_a_graph_of_the_mlp_alone_needs_no_padded_boundaries_but_one_width():
    graph = {"model__cuda_graph_impl": "transformer_engine", "model__cuda_graph_modules": ["mlp"]}

    assert check_config(packed(**FIXED, **graph)).ok
    assert kinds(packed(**graph)) == {"static_width"}


def test_one_width_is_asked_for_once():
    cfg = packed(model__cuda_graph_impl="transformer_engine", specs__pad_cu_seqlens=True)

    assert check_config(cfg).kinds == ("static_width",)


@pytest.mark.parametrize(
    "graph",
    [
        {"model__cuda_graph_impl": "full_iteration"},
        {"model__cuda_graph_impl": "local", "model__cuda_graph_scope": ["full_iteration"]},
    ],
)
def test_a_graph_of_the_whole_step_needs_both(graph):
    assert kinds(packed(**FIXED, **graph)) == {"static_boundaries"}
    assert kinds(packed(**graph)) == {"static_width", "static_boundaries"}


def test_the_collator_of_conversations_needs_rows_of_the_whole_multiple():
    sizes = {
        "model__context_parallel_size": 2,
        "model__tensor_model_parallel_size": 4,
        "model__sequence_parallel": True,
        "model__calculate_per_token_loss": True,
    }
    cfg = plain("DirectHFSFTDatasetConfig", model__seq_length=20, dataset__seq_length=20, **sizes)

    found = only(cfg, "seq_length")
    assert (found.setting, found.limit) == ("dataset.seq_length", "a multiple of lcm(2·CP, CP·TP) = 8")
    assert found.fix.startswith("16 or 24")
    assert check_config(plain("DirectHFSFTDatasetConfig", **sizes)).ok


def test_evaluation_with_more_context_parallelism_counts_too():
    cfg = plain("DirectHFSFTDatasetConfig", model__seq_length=18, dataset__seq_length=18)

    assert check_config(cfg).ok
    cfg["dist"] = {"eval_context_parallel_size": 2}
    assert kinds(cfg) == {"seq_length"}


def test_text_packed_in_batch_needs_a_loader_of_micro_batches():
    cfg = in_batch(dataset___target_=f"megatron.bridge.{SFT}")

    assert only(cfg, "dataloader_type").changes == {"dataset.dataloader_type": "single"}
    cfg["dataset"]["dataloader_type"] = "cyclic"
    assert check_config(cfg).ok


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model__calculate_per_token_loss", False),
        ("ddp__average_in_collective", True),
        ("model__cuda_graph_impl", "transformer_engine"),
        ("model__vision_cuda_graph_impl", "transformer_engine"),
        ("model__pipeline_model_parallel_size", 2),
        ("model__mtp_num_layers", 1),
        ("model__dist_train", {"use_dist_train": True}),
        ("dataset__micro_batch_size", 2),
        ("dataset__packing_buffer_size", 0),
    ],
)
def test_energons_packing_stops_with_any_of_what_it_is_not_made_for(setting, value):
    assert check_config(energon()).ok

    report = check_config(energon(**{setting: value}))

    assert not report.ok
    assert check_config(report.fixed(energon(**{setting: value}))).ok


def test_energons_micro_batch_of_evaluation_counts_where_there_is_an_evaluation():
    cfg = energon(validation__eval_micro_batch_size=2)

    assert kinds(cfg) == {"energon"}
    cfg["dataset"]["do_validation"] = False
    assert check_config(cfg).ok


def test_overlap_of_experts_is_a_warning_with_energons_packing():
    report = check_config(energon(comm_overlap__overlap_moe_expert_parallel_comm=True))

    assert report.ok
    assert report.kinds == ("energon",)


def test_energons_packing_is_refused_by_no_release_before_0_6():
    cfg = energon(train__micro_batch_size=2, model__calculate_per_token_loss=False)
    cfg["dataset"]["_target_"] = "megatron.bridge.data.energon.energon_provider.EnergonProvider"

    assert {found.outcome for found in check_config(cfg, dialect="0.5")} == {"advice"}
    tuned = check_config(changed(cfg, {"model.context_parallel_size": 2}), dialect="0.5")
    assert [(found.kind, found.outcome) for found in tuned.errors] == [("per_token_loss", "silently wrong")]
    assert check_config(cfg, dialect="0.6").errors


@pytest.mark.parametrize(
    ("sizes", "cp", "fixed"), [([4, 2], 8, None), ([4, 4], 8, (4, 2)), ([3], 4, (1, 4)), ([8, 2], 16, None)]
)
def test_sizes_of_a_hierarchy_multiply_to_the_context_parallel_size(sizes, cp, fixed):
    cfg = plain(
        GPT,
        model__hierarchical_context_parallel_sizes=sizes,
        model__context_parallel_size=cp,
        model__cp_comm_type="a2a+p2p",
    )
    report = check_config(cfg)

    assert report.ok == (fixed is None)
    assert report.changes.get("model.hierarchical_context_parallel_sizes") == fixed


def test_a_hierarchy_without_sizes_is_silently_wrong():
    cfg = plain(
        GPT, model__context_parallel_size=16, model__cp_comm_type=["p2p", "a2a+p2p"], model__num_layers=2
    )

    found = only(cfg, "cp_sizes")
    assert found.outcome == "silently wrong"
    assert check_config(check_config(cfg).fixed(cfg)).ok


@pytest.mark.parametrize(("cp", "sizes"), [(2, (2, 1)), (3, (3, 1)), (8, (4, 2)), (16, (8, 2))])
def test_sizes_are_offered_for_a_hierarchy(cp, sizes):
    cfg = plain(GPT, model__context_parallel_size=cp, model__cp_comm_type="a2a+p2p")

    assert only(cfg, "cp_sizes").changes == {"model.hierarchical_context_parallel_sizes": sizes}


def test_a_hierarchy_without_context_parallelism_stops_from_release_0_6_on():
    cfg = plain(GPT, model__cp_comm_type="a2a+p2p")

    found = only(cfg, "cp_sizes", dialect="0.6")
    assert (found.outcome, found.changes) == ("stops", {"model.cp_comm_type": "p2p"})
    assert check_config(cfg, dialect="0.5").ok
    assert check_config(changed(cfg, {"model.hierarchical_context_parallel_sizes": [1]})).ok


def test_a_list_of_one_kind_of_communication_is_no_name_but_in_the_arguments_of_megatron_lm():
    cfg = plain(GPT, model__context_parallel_size=2, model__cp_comm_type=["p2p"], model__num_layers=4)

    assert only(cfg, "cp_sizes").changes == {"model.cp_comm_type": "p2p"}
    arguments = SimpleNamespace(
        seq_length=512, micro_batch_size=1, context_parallel_size=2, cp_comm_type=["p2p"], num_layers=4
    )
    assert check_config(arguments).ok


@pytest.mark.parametrize(("layers", "is_right"), [(2, True), (3, False), (None, True)])
def test_kinds_of_communication_are_one_or_one_a_layer(layers, is_right):
    cfg = plain(
        GPT, model__context_parallel_size=2, model__cp_comm_type=["p2p", "a2a"], model__num_layers=layers
    )

    assert ("cp_sizes" not in kinds(cfg)) == is_right


SIZES = st.sampled_from([1, 1, 2, 3, 4])
CLASSES = [
    None,
    "GPTDatasetConfig",
    "GPTSFTDatasetConfig",
    "DirectHFSFTDatasetConfig",
    "EnergonDatasetConfig",
]
SOMETIMES: dict[str, st.SearchStrategy[Any]] = {
    "model.context_parallel_size": SIZES,
    "model.tensor_model_parallel_size": SIZES,
    "model.pipeline_model_parallel_size": SIZES,
    "model.sequence_parallel": st.booleans(),
    "model.seq_length": st.sampled_from([100, 510, 512, 4096]),
    "model.calculate_per_token_loss": st.booleans(),
    "model.hierarchical_context_parallel_sizes": st.sampled_from([[2], [2, 2], [3]]),
    "model.cp_comm_type": st.sampled_from(["p2p", "a2a+p2p", ["p2p"], ["a2a+p2p"] * 2]),
    "model.num_layers": st.sampled_from([1, 2]),
    "model.cuda_graph_impl": st.sampled_from(["none", "local", "transformer_engine", "full_iteration"]),
    "model.cuda_graph_scope": st.sampled_from([["attn"], ["mlp"], ["full_iteration"], ["moe_router"]]),
    "model.cuda_graph_modules": st.sampled_from([[], ["attn", "moe"]]),
    "model.num_moe_experts": st.just(8),
    "model.mtp_num_layers": st.just(1),
    "model._target_": st.sampled_from(["a.Qwen3NextModelProvider", "a.Qwen3OmniModelProvider"]),
    "train.micro_batch_size": st.sampled_from([1, 2, 4]),
    "train.global_batch_size": st.sampled_from([7, 8, 32]),
    "validation.eval_micro_batch_size": st.sampled_from([1, 2]),
    "validation.eval_global_batch_size": st.sampled_from([3, 16]),
    "dataset.seq_length": st.sampled_from([100, 510, 512, 4096]),
    "dataset.micro_batch_size": st.sampled_from([1, 2]),
    "dataset.packing_buffer_size": st.sampled_from([0, 16]),
    "dataset.enable_in_batch_packing": st.booleans(),
    "dataset.pack_sequences_in_batch": st.booleans(),
    "dataset.enable_offline_packing": st.booleans(),
    "dataset.dataloader_type": st.sampled_from(["batch", "single"]),
    "dataset.dataset_kwargs.pad_to_max_length": st.booleans(),
    "dataset.dataset_kwargs.virtual_tokens": st.sampled_from([0, 3]),
    "ddp.average_in_collective": st.booleans(),
    "dist.eval_context_parallel_size": SIZES,
}
SPEC = {
    "packed_sequence_size": st.sampled_from([-1, 0, 100, 512, 4096]),
    "max_single_sequence_length": st.sampled_from([0, 300, 9999]),
    "pad_cu_seqlens": st.booleans(),
    "pad_seq_to_mult": st.sampled_from([-1, 1, 4, 8, 24]),
}
for specs in ("packed_sequence_specs", "offline_packing_specs"):
    SOMETIMES |= {f"dataset.{specs}.{name}": values for name, values in SPEC.items()}


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """Any combination of some settings, sensible or not."""
    names = draw(st.lists(st.sampled_from(sorted(SOMETIMES)), unique=True, max_size=16))
    cfg = changed({"model": {}, "train": {}, "dataset": {}}, {name: draw(SOMETIMES[name]) for name in names})
    target = draw(st.sampled_from(CLASSES))
    if target is not None:
        cfg["dataset"]["_target_"] = f"megatron.bridge.{target}"
    return cfg


RELEASES = st.sampled_from([None, "0.4", "0.4.2", "0.5", "0.5.1", "0.6", "0.6.0", "0.7"])
PROCESSES = st.sampled_from([None, 1, 8, 144])


@given(configurations(), RELEASES, PROCESSES)
def test_the_changes_of_a_report_leave_no_error_that_settings_can_mend(cfg, dialect, processes):
    report = check_config(cfg, dialect=dialect, world_size=processes)
    after = check_config(report.fixed(cfg), dialect=dialect or report.dialect, world_size=processes)

    assert [found for found in after.errors if found.changes] == []
    assert not after.changes
    assert bool(report.changes) == any(found.changes for found in report.errors)
    assert {found.kind for found in after.errors} <= {"world_size", "middle_stages", "cp_sizes", "pack_size"}


@given(configurations(), PROCESSES)
def test_what_megatron_bridge_0_6_refuses_is_an_error_and_what_is_mended_it_takes(cfg, processes):
    report = check_config(cfg, dialect="0.6", world_size=processes)

    if refused(cfg):
        assert not report.ok, refused(cfg)
    mended = report.fixed(cfg)
    assert not refused(mended), refused(mended)


@given(configurations(), RELEASES)
def test_a_report_says_the_same_twice_and_names_what_it_saw(cfg, dialect):
    report = check_config(cfg, dialect=dialect)

    assert report == check_config(cfg, dialect=dialect)
    assert report.findings == (*report.errors, *report.warnings)
    for found in report:
        assert found.setting in found.seen or " of " in found.seen or "processes" in found.seen
        assert found.limit
        assert found.fix


def refused(cfg: dict[str, Any]) -> str:
    """The rule of Megatron-Bridge 0.6 that a configuration breaks first, said once more and plainly; or nothing."""
    model, data, train = cfg.get("model", {}), cfg.get("dataset", {}), cfg.get("train", {})
    specs, kind = data.get("offline_packing_specs"), str(data.get("_target_", "")).rpartition(".")[2]
    offline, in_batch = data.get("enable_offline_packing", False), data.get("enable_in_batch_packing", False)
    energon = kind == "EnergonDatasetConfig" and data.get("packing_buffer_size") is not None
    width = (data.get("dataset_kwargs") or {}).get("pad_to_max_length", False)
    per_token = model.get("calculate_per_token_loss", False)
    averaged = cfg.get("ddp", {}).get("average_in_collective", False)
    cp, tp, rows = (
        model.get("context_parallel_size", 1),
        model.get("tensor_model_parallel_size", 1),
        train.get("micro_batch_size"),
    )
    evaluated = cfg.get("dist", {}).get("eval_context_parallel_size") or cp
    graph, parts = model.get("cuda_graph_impl", "none"), set(model.get("cuda_graph_scope") or ())
    parts |= set(model.get("cuda_graph_modules") or ())
    whole = graph == "full_iteration" or (graph == "local" and "full_iteration" in parts)
    parts -= {"full_iteration"}
    scattered = model.get("sequence_parallel", False) and tp > 1
    multiple = math.lcm(*((2 * n if n > 1 else 1) * 1 for n in (cp, evaluated)))
    multiple = math.lcm(multiple, *(n * tp if scattered else 1 for n in (cp, evaluated)))
    length, sizes = model.get("seq_length"), model.get("hierarchical_context_parallel_sizes")
    kinds = model.get("cp_comm_type", "")
    collated = kind in ("DirectHFSFTDatasetConfig", "EnergonDatasetConfig")
    tuned = collated or kind == "GPTSFTDatasetConfig"
    by_layer = graph == "transformer_engine"
    rules = {
        "both": offline and in_batch,
        "specs": bool(offline) != (specs is not None),
        "size": specs is not None and specs.get("packed_sequence_size", -1) <= 0,
        "multiple": specs is not None and (specs.get("pad_seq_to_mult") or 1) <= 0,
        "boundaries": specs is not None and specs.get("pad_cu_seqlens", False) and not width,
        "width": specs is not None and (whole or by_layer) and not width,
        "attention": specs is not None
        and (whole or (by_layer and (not parts or "attn" in parts)))
        and not specs.get("pad_cu_seqlens", False),
        "local": graph == "local" and not whole,
        "rows": offline and (rows or 1) > 1,
        "row": in_batch and rows == 1,
        "energon": energon and (rows not in (None, 1) or not per_token or averaged or graph != "none"),
        "stages": energon and model.get("pipeline_model_parallel_size", 1) > 1,
        "collated": (collated or (kind == "GPTSFTDatasetConfig" and in_batch))
        and data.get("seq_length", multiple) % multiple != 0,
        "length": cp > 1 and length is not None and length % (2 * cp) != 0,
        "loss": cp > 1 and tuned and (not per_token or averaged),
        "sizes": sizes is not None and math.prod(sizes) != cp,
        "a2a": "a2a+p2p" in kinds and sizes is None,
        "kinds": cp > 1 and isinstance(kinds, list) and len(kinds) != model.get("num_layers", len(kinds)),
        "lengths": (tuned or kind == "GPTDatasetConfig")
        and length is not None
        and data.get("seq_length", length) != length,
    }
    return ", ".join(rule for rule, is_broken in rules.items() if is_broken)


def test_every_kind_of_finding_stands_in_the_table_of_rules_and_no_other(root):
    page = (root / "docs" / "frameworks" / "megatron-config.md").read_text(encoding="utf-8")

    kinds = [kind for table in get_args(Kind) for kind in get_args(table)]
    assert sorted(re.findall(r"^\| `(\w+)`", page, re.MULTILINE)) == sorted(kinds)

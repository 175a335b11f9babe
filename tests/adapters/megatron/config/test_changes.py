"""The changes of a report mend what they say, and what Megatron-Bridge refuses is always an error here."""

import math
import re
from pathlib import Path
from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st
from tests.support.megatron_configs import changed

from varlen.adapters.megatron import check_config
from varlen.adapters.megatron.config.report import Kind

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
def test_the_changes_of_a_report_leave_no_error_that_settings_can_mend(
    cfg: dict[str, Any], dialect: str | None, processes: int | None
) -> None:
    report = check_config(cfg, dialect=dialect, world_size=processes)
    after = check_config(report.fixed(cfg), dialect=dialect or report.dialect, world_size=processes)

    assert [found for found in after.errors if found.changes] == []
    assert not after.changes
    assert bool(report.changes) == any(found.changes for found in report.errors)
    assert {found.kind for found in after.errors} <= {"world_size", "middle_stages", "cp_sizes", "pack_size"}


@given(configurations(), PROCESSES)
def test_what_megatron_bridge_0_6_refuses_is_an_error_and_what_is_mended_it_takes(
    cfg: dict[str, Any], processes: int | None
) -> None:
    report = check_config(cfg, dialect="0.6", world_size=processes)

    if refused(cfg):
        assert not report.ok, refused(cfg)
    mended = report.fixed(cfg)
    assert not refused(mended), refused(mended)


@given(configurations(), RELEASES)
def test_a_report_says_the_same_twice_and_names_what_it_saw(cfg: dict[str, Any], dialect: str | None) -> None:
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


def test_every_kind_of_finding_stands_in_the_table_of_rules_and_no_other(root: Path) -> None:
    page = (root / "docs" / "frameworks" / "megatron-config.md").read_text(encoding="utf-8")

    assert sorted(re.findall(r"^\| `(\w+)`", page, re.MULTILINE)) == sorted(get_args(Kind))

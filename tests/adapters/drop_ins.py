"""Every drop-in and the peer's object that it stands for, and what the peers' sources say of those.

`python tests/adapters/drop_ins.py FOLDER` reads the peers' sources, none of which is imported, and writes
`drop_ins.json`.
`FOLDER` holds a folder for each peer in `PEERS`, with what its wheel or repository holds.
"""

import ast
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FACTS = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Pair:
    """A drop-in, and where its peer's object stands."""

    ours: str
    peer: str
    path: str
    theirs: str = ""
    bases: tuple[tuple[str, str], ...] = ()
    """Classes that the peer's is made of, by file and name."""


PEERS = {
    "axolotl": "axolotl 0.19.0 (wheel)",
    "fast_axolotl": "fast-axolotl 0.2.0 (wheel)",
    "fms_acceleration_aadp": "fms-acceleration-aadp 0.2.2 (wheel)",
    "instructlab_training": "instructlab-training 0.16.2 (wheel)",
    "megatron_bridge": "Megatron-Bridge, commit 067f987 of 2026-08-22",
    "megatron_bridge_0_3": "megatron-bridge 0.3.1 (wheel)",
    "megatron_lm": "Megatron-LM, commit d98e8a6 of 2026-08-22",
    "multipack_sampler": "imoneoi/multipack_sampler, commit 71f0dd5 of 2024-08-10",
    "nemo_rl": "NeMo-RL, commit 7ea279a of 2026-08-22",
    "torchtune": "torchtune 0.6.1 (wheel)",
    "verl": "verl 0.9.1 (wheel)",
}

_BRIDGE, _BRIDGE_3 = "src/megatron/bridge/", "megatron/bridge/"
_SCHEDULE = "megatron/core/datasets/data_schedule.py"
_RL = "megatron/rl/sequence_packing_utils.py"
_SFT = (f"{_BRIDGE}data/datasets/gpt_sft.py", "GPTSFTDataset")
_PACKED_SFT = (f"{_BRIDGE}data/packing/gpt_sft.py", "GPTSFTPackedDataset")


def _of(ours: str, peer: str, path: str, *names: str, bases: tuple[tuple[str, str], ...] = ()) -> list[Pair]:
    return [Pair(f"varlen.adapters.{ours}.{name}", peer, path, name, bases) for name in names]


def _of_bridge(path: str, *names: str, bases: tuple[tuple[str, str], ...] = ()) -> list[Pair]:
    return _of("megatron", "megatron_bridge", _BRIDGE + path, *names, bases=bases)


def _installed(ours: str, theirs: str) -> Pair:
    """Peers that are installed with the tests are named by import path, and compared as they are."""
    return Pair(f"varlen.adapters.{ours}", theirs.partition(".")[0], theirs)


PAIRS = [
    *_of("axolotl", "axolotl", "axolotl/utils/samplers/multipack.py", "MultipackBatchSampler"),
    *_of(
        "fast_axolotl", "fast_axolotl", "fast_axolotl/__init__.py", "pack_sequences", "concatenate_and_pack"
    ),
    *_of("fast_axolotl", "fast_axolotl", "fast_axolotl/__init__.py", "streaming_dataset_reader"),
    *_of("multipack", "multipack_sampler", "multipack_sampler.py", "MultipackDistributedBatchSampler"),
    *_of("torchtune", "torchtune", "torchtune/datasets/_packed.py", "PackedDataset"),
    *_of(
        "verl",
        "verl",
        "verl/utils/seqlen_balancing.py",
        *("calculate_workload", "get_group_balanced_partitions", "get_seqlen_balanced_partitions"),
        *("greedy_partition", "karmarkar_karp", "log_seqlen_unbalance"),
    ),
    *_of(
        "nemo_rl",
        "nemo_rl",
        "nemo_rl/data/packing/algorithms.py",
        *("ConcatenativePacker", "FirstFitDecreasingPacker", "FirstFitShufflePacker"),
        *("ModifiedFirstFitDecreasingPacker", "PackingAlgorithm", "SequencePacker", "get_packer"),
    ),
    *_of("nemo_rl", "nemo_rl", "nemo_rl/data/packing/metrics.py", "PackingMetrics"),
    *_of(
        "megatron.rl",
        "megatron_lm",
        _RL,
        *("PackingContext", "PackingInfo", "SequencePacker", "create_empty_bins", "create_packed_seq_params"),
        *("create_packed_seq_params_for_bin", "distribute_packed_bins", "get_actual_sequence_lengths"),
        *("get_default_packed_seq_params", "get_packing_actual_tokens", "get_packing_avg_seq_length"),
        *("get_packing_compute_tokens", "get_packing_efficiency", "load_packed_data_by_index"),
        *("pack_all_trajectories", "pack_inference_logprobs"),
    ),
    *_of("megatron", "megatron_lm", "megatron/core/packed_seq_params.py", "PackedSeqParams"),
    *_of(
        "megatron",
        "megatron_lm",
        _SCHEDULE,
        "DpBalancedScheduler",
        bases=((_SCHEDULE, "BasePackingScheduler"),),
    ),
    *_of_bridge("data/packing/config.py", "PackedSequenceSpecs"),
    *_of_bridge(
        "data/packing/algorithms.py",
        *("calculate_avg_seqlen", "get_seqlen_list", "create_hist", "create_packing_strategy"),
        *("fill_packing_strategy", "first_fit", "first_fit_decreasing", "first_fit_shuffle"),
    ),
    *_of(
        "megatron",
        "megatron_bridge_0_3",
        f"{_BRIDGE_3}data/datasets/packing_utils.py",
        "find_first_bin_that_fits",
    ),
    *_of("megatron", "megatron_bridge_0_3", f"{_BRIDGE_3}training/vlm_step.py", "pack_batch_sequences"),
    *_of_bridge(
        "data/packing/in_batch.py",
        *("build_mcore_thd_sequence_batch_from_rows", "pack_right_padded_sequence_batch_to_mcore_thd"),
    ),
    *_of_bridge(
        "training/utils/packed_seq_utils.py",
        *("get_packed_seq_params", "get_packed_seq_q_cu_seqlens", "get_packed_seq_cp_partition_indices"),
        *("repack_mcore_thd_position_ids", "unpack_mcore_thd_tensor_for_position_ids"),
    ),
    *_of_bridge(
        "data/packing/paths.py",
        *("is_packed_parquet_file", "is_packed_parquet_spec", "resolve_packed_parquet_paths"),
    ),
    *_of_bridge("data/packing/parquet.py", "write_packed_parquet"),
    *_of_bridge("data/packing/gpt_sft.py", "GPTSFTPackedDataset", bases=(_SFT,)),
    *_of_bridge("data/packing/parquet.py", "GPTSFTPackedParquetDataset", bases=(_PACKED_SFT, _SFT)),
    Pair(
        "varlen.adapters.instructlab.PaddingFreeCollator.__call__",
        "instructlab_training",
        "instructlab/training/sampler.py",
        "mb_collate_fn",
    ),
    _installed("hf.DataCollatorWithFlattening", "transformers.DataCollatorWithFlattening"),
    _installed(
        "trl.DataCollatorForLanguageModeling", "trl.trainer.sft_trainer.DataCollatorForLanguageModeling"
    ),
    _installed("trl.pack_dataset", "trl.data_utils.pack_dataset"),
    _installed("trl.trainer.PackedSFTTrainer", "trl.SFTTrainer"),
    _installed("trl.dpo.PackedDPOTrainer", "trl.DPOTrainer"),
    _installed("hf.trainer.PackedTrainer", "transformers.Trainer"),
    _installed("axolotl.VarlenPlugin", "axolotl.integrations.base.BasePlugin"),
]


PAGES = {
    "axolotl": "axolotl.md",
    "hf": "transformers.md",
    "megatron": "megatron-schedule.md",
    "torchtune": "torchtune.md",
    "trl": "trl.md",
}
"""The page that says what differs, of each room of adapters."""
_RANKS = "Rank, ranks and padding are arguments; there they are looked up in Megatron's global state."
_PASSED_ON = "What transformers passes by `*args` and `**kwargs` is `return_tensors`, by its name here."
_PACKER = "A packer is given, which holds the size of a bin and its most sequences."
DEVIATIONS: dict[str, dict[str, str]] = {
    "varlen.adapters.megatron.rl.distribute_packed_bins": dict.fromkeys(
        ("wants dp_rank besides", "wants dp_size besides", "wants pad_token besides"), _RANKS
    ),
    "varlen.adapters.megatron.rl.pack_all_trajectories": {
        "takes no bin_size": _PACKER,
        "takes no max_sequences_per_bin": _PACKER,
        "packing_algo stands at place 5, not 6": _PACKER,
        "wants packer besides": _PACKER,
        "wants dp_rank besides": _RANKS,
        "wants dp_size besides": _RANKS,
    },
    "varlen.adapters.megatron.DpBalancedScheduler": {
        "has no method run": "`run`, which moves samples between ranks, stays Megatron's: inherit from both."
    },
    "varlen.adapters.hf.DataCollatorWithFlattening": {
        "takes no *args": _PASSED_ON,
        "takes no **kwargs": _PASSED_ON,
    },
}
"""What differs by intent, as the tests find it, and why, in the words of the framework's page."""


def facts(folder: Path) -> dict[str, Any]:
    """Return what the sources say of every object that isn't compared live."""
    return {
        pair.ours: {
            "peer": PEERS[pair.peer],
            "path": pair.path,
            "name": pair.theirs,
            **_read(folder / pair.peer, pair),
        }
        for pair in PAIRS
        if pair.theirs
    }


def _read(root: Path, pair: Pair) -> dict[str, Any]:
    trees = [_find(root / pair.path, pair.theirs), *(_find(root / path, name) for path, name in pair.bases)]
    first = trees[0]
    if isinstance(first, ast.FunctionDef):
        told = [
            [name, kind, _constant(root / pair.path, default)] for name, kind, default in _parameters(first)
        ]
        return {"parameters": told, "raises": _raised(first)}
    inits = [node for tree in trees for node in tree.body if _is(node, "__init__")]
    methods: dict[str, Any] = {}
    attributes: set[str] = set()
    for tree in trees:
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)
                if is_property and not node.name.startswith("_"):
                    attributes.add(node.name)
                elif not node.name.startswith("_") or node.name in (
                    "__call__",
                    "__getitem__",
                    "__len__",
                    "__iter__",
                ):
                    is_static = any(
                        isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list
                    )
                    methods.setdefault(node.name, _parameters(node)[0 if is_static else 1 :])
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
                attributes |= {t.id for t in targets if isinstance(t, ast.Name) and not t.id.startswith("_")}
        attributes |= _set_on_self(tree)
    is_dataclass = any("dataclass" in ast.unparse(d) for d in first.decorator_list)
    told = [_parameters(node)[1:] for node in inits]
    while len(told) > 1 and all(kind.startswith("VAR_") for _, kind, _ in told[0]):  # passed on to the base
        told.pop(0)
    parameters = _fields(first) if is_dataclass else told[0] if told else None
    return {
        "parameters": parameters,
        "methods": methods,
        "attributes": sorted(attributes),
        "raises": sorted({name for tree in trees for name in _raised(tree)}),
    }


_CONSTANTS = {"IGNORE_INDEX": "-100"}
"""That another file of the peer sets."""


def _constant(path: Path, default: str | None) -> str | None:
    """A default's text; of a constant's name what the file sets it to."""
    if default in _CONSTANTS:
        return _CONSTANTS[default]
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == default:
            return ast.unparse(node.value)
    return default


def _find(path: Path, name: str) -> Any:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
    raise LookupError(f"no {name} in {path}")


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == name


def _parameters(node: ast.FunctionDef) -> list[list[Any]]:
    """Name, kind and default's text (None for none) of each parameter."""
    told, found = node.args, []
    places = [*told.posonlyargs, *told.args]
    defaults = [None] * (len(places) - len(told.defaults)) + list(told.defaults)
    for arg, default in zip(places, defaults):
        found.append([arg.arg, "POSITIONAL_OR_KEYWORD", default and ast.unparse(default)])
    if told.vararg:
        found.append([told.vararg.arg, "VAR_POSITIONAL", None])
    for arg, default in zip(told.kwonlyargs, told.kw_defaults):
        found.append([arg.arg, "KEYWORD_ONLY", default and ast.unparse(default)])
    if told.kwarg:
        found.append([told.kwarg.arg, "VAR_KEYWORD", None])
    return found


def _fields(node: ast.ClassDef) -> list[list[Any]]:
    return [
        [each.target.id, "POSITIONAL_OR_KEYWORD", each.value and _default(each.value)]
        for each in node.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and "ClassVar" not in ast.unparse(each.annotation)
        and not (isinstance(each.value, ast.Call) and "init=False" in ast.unparse(each.value))
    ]


def _default(value: ast.expr) -> str:
    """A field's default; of `field(default=...)` what it holds."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
        told = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default" in told:
            return ast.unparse(told["default"])
        if "default_factory" in told:
            return f"{ast.unparse(told['default_factory'])}()"
    return ast.unparse(value)


def _set_on_self(tree: ast.ClassDef) -> set[str]:
    """Public attributes that the constructor sets."""
    return {
        target.attr
        for init in tree.body
        if _is(init, "__init__")
        for node in ast.walk(init)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
        and not target.attr.startswith("_")
    }


def _raised(tree: ast.AST) -> list[str]:
    """Names of the exceptions that code raises, asserts among them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.add("AssertionError")
        elif isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            found.add(ast.unparse(raised).rpartition(".")[2])
    return sorted(found)


if __name__ == "__main__":
    found = facts(Path(sys.argv[1]))
    FACTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{len(found)} objects")

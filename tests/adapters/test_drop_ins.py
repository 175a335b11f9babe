"""Drop-ins have their peers' arguments, defaults, methods and attributes; what differs stands on their page."""

import ast
import builtins
import importlib
import inspect
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.adapters.drop_ins import DEVIATIONS, FACTS, PAGES, PAIRS, Pair

from varlen.adapters.peers import of_kinds
from varlen.errors import DocumentsError, SettingError, SourceError, VarlenError

TOLD = json.loads(FACTS.read_text(encoding="utf-8"))


def named(path: str) -> Any:
    """Return what stands under a dotted path: modules, and attributes of what they hold."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise LookupError(path)


def parameters_of(thing: Any) -> list[list[Any]]:
    found = list(inspect.signature(thing).parameters.values())
    return [
        [p.name, p.kind.name, None if p.default is p.empty else repr(p.default)]
        for p in found
        if p.name != "self"
    ]


def differences(pair: Pair) -> list[str]:
    """What a user of the peer would meet: sentences."""
    ours = named(pair.ours)
    if pair.theirs:
        told = TOLD[pair.ours]
        found = _of_parameters(told["parameters"], parameters_of(ours))
        for name, theirs in told.get("methods", {}).items():
            if name in ("__init__",):
                continue
            if not hasattr(ours, name):
                found.append(f"has no method {name}")
            else:
                found += [
                    f"{name}: {each}" for each in _of_parameters(theirs, parameters_of(getattr(ours, name)))
                ]
        return found
    theirs = named(pair.path)
    found = _of_parameters(parameters_of(theirs), parameters_of(ours))
    if inspect.isclass(theirs):
        found += [
            f"has no {name}" for name in dir(theirs) if not name.startswith("_") and not hasattr(ours, name)
        ]
    return found


def _of_parameters(theirs: list[list[Any]] | None, ours: list[list[Any]]) -> list[str]:
    if theirs is None:
        return []
    named_ours = {name: (kind, default) for name, kind, default in ours if not kind.startswith("VAR_")}
    takes_all = {kind for _, kind, _ in ours if kind.startswith("VAR_")}
    found = []
    places = [name for name, kind, _ in ours if kind in ("POSITIONAL_OR_KEYWORD", "POSITIONAL_ONLY")]
    place = 0
    for name, kind, default in theirs:
        if kind.startswith("VAR_"):
            if kind not in takes_all:
                found.append(f"takes no {'*' if kind == 'VAR_POSITIONAL' else '**'}{name}")
            continue
        if name not in named_ours:
            place += kind == "POSITIONAL_OR_KEYWORD"
            if takes_all != {"VAR_POSITIONAL", "VAR_KEYWORD"} and not (
                "VAR_KEYWORD" in takes_all and kind == "KEYWORD_ONLY"
            ):
                found.append(f"takes no {name}")
            continue
        if kind == "POSITIONAL_OR_KEYWORD":
            if name not in places:
                found.append(f"{name} is keyword-only")
            elif places.index(name) != place:
                found.append(f"{name} stands at place {places.index(name)}, not {place}")
            place += 1
        mine = named_ours[name][1]
        if default is not None and mine is None:
            found.append(f"{name} has no default, there {default}")
        elif default is not None and not _same(default, mine):
            found.append(f"{name} is {mine} by default, there {default}")
    required = [name for name, kind, default in ours if default is None and not kind.startswith("VAR_")]
    known = {name for name, _, _ in theirs}
    found += [f"wants {name} besides" for name in required if name not in known]
    return found


def _same(one: str, other: str) -> bool:
    if one == other or (other == "<factory>" and one.endswith("()")):
        return True
    try:
        return bool(ast.literal_eval(one) == ast.literal_eval(other))
    except (ValueError, SyntaxError):
        return False


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.ours.removeprefix("varlen.adapters."))
def test_arguments_defaults_and_methods_are_the_peers_but_where_the_table_says_why(pair):
    assert sorted(differences(pair)) == sorted(DEVIATIONS.get(pair.ours, {}))


@pytest.mark.parametrize("ours", DEVIATIONS)
def test_every_deviation_stands_with_its_reason_on_the_frameworks_page(ours):
    page = " ".join(Path("docs/frameworks", PAGES[ours.split(".")[2]]).read_text(encoding="utf-8").split())

    for deviation, reason in DEVIATIONS[ours].items():
        assert reason in page, f"{ours}: {deviation}"


def test_every_public_name_of_an_adapter_is_a_drop_in_or_known_to_be_our_own():
    paired = {pair.ours for pair in PAIRS}
    rooms = {".".join(ours.split(".")[:-1]) for ours in paired if not ours.endswith("__call__")}
    rooms = {room for room in rooms if hasattr(importlib.import_module(room), "__all__")}
    unknown = {
        f"{room}.{name}"
        for room in rooms
        for name in importlib.import_module(room).__all__
        if f"{room}.{name}" not in paired and f"{room}.{name}".removeprefix("varlen.adapters.") not in OURS
    }
    assert not unknown, "pair each with what it stands for, or add it to OURS"


CLASSES = [name for name, told in TOLD.items() if "attributes" in told]


@pytest.mark.parametrize("ours", CLASSES, ids=lambda name: name.removeprefix("varlen.adapters."))
def test_attributes_are_there_and_can_be_written_where_the_peers_can(ours, tmp_path):
    thing = made(ours, tmp_path)
    settable = set(TOLD[ours]["attributes"]) - set(COUNTED.get(ours.removeprefix("varlen.adapters."), ()))

    missing = [name for name in TOLD[ours]["attributes"] if not hasattr(thing, name)]
    assert missing == list(WITHOUT.get(ours.removeprefix("varlen.adapters."), ()))
    for name in sorted(settable - set(missing)):
        if not inspect.isclass(thing):
            setattr(thing, name, getattr(thing, name))


WITHOUT = {"torchtune.PackedDataset": ("previous_sample_boundary",)}
"""Attributes of peers that hold the state of their loops."""
COUNTED = {
    "axolotl.MultipackBatchSampler": ("total_token_slots", "total_tokens_used"),
    "multipack.MultipackDistributedBatchSampler": ("eff_total_slots", "eff_total_used"),
    "torchtune.PackedDataset": ("packs",),
}
"""Attributes that are counted from the packs, and not written."""


def test_samplers_pack_by_what_is_written_after_they_were_made():
    from varlen.adapters.axolotl import MultipackBatchSampler
    from varlen.adapters.multipack import MultipackDistributedBatchSampler

    ax = MultipackBatchSampler(range(4), 1, 8, [4, 4, 4, 4], 9)
    multi = MultipackDistributedBatchSampler(8, np.array([4, 4, 4, 4]), 1, 0)
    assert (len(ax), len(multi)) == (2, 2)

    ax.batch_max_len = multi.batch_max_length = 4

    assert (len(list(ax)), len(list(multi))) == (4, 4)
    ax.lengths = multi.lengths = [2, 2, 2, 2]  # type: ignore[assignment]
    assert (len(ax), len(multi)) == (2, 2)


def test_megatrons_batches_are_made_by_what_is_written_after_the_data_set_was_made(tmp_path):
    from varlen.adapters.megatron import GPTSFTPackedParquetDataset

    path = row_file(tmp_path)
    written: dict[str, Any] = {
        "max_seq_length": 32,
        "pad_to_max_length": True,
        "return_cu_seqlen": False,
        "answer_only_loss": False,
        "pad_seq_length_to_mult": 8,
        "ceil_to_power_2": True,
    }
    for name, value in written.items():
        late, early = GPTSFTPackedParquetDataset(path, Tokenizer()), None
        before = late.collate_fn([late[0]])
        setattr(late, name, value)
        early = GPTSFTPackedParquetDataset(path, Tokenizer(), **{name: value})

        ours, theirs = late.collate_fn([late[0]]), early.collate_fn([early[0]])

        assert getattr(late, name) == value
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(np.asarray(ours[key]), np.asarray(theirs[key])) for key in theirs), name
        if name not in ("ceil_to_power_2", "max_seq_length"):  # the others change this batch
            assert any(
                key not in before or not np.array_equal(np.asarray(before[key]), np.asarray(ours[key]))
                for key in ours
            ), name
    late = GPTSFTPackedParquetDataset(path, Tokenizer())
    late.tokenizer = type("Other", (), {"eos_id": 77})()
    assert 77 in late.collate_fn([late[0]])["tokens"]
    late.pad_cu_seqlens = True
    with pytest.raises(AssertionError, match="'pad_to_max_length=True' is required"):
        late.collate_fn([late[0]])


RAISED = {
    name.removeprefix("varlen.adapters."): kinds
    for name, told in TOLD.items()
    if (kinds := sorted({"AssertionError", "RuntimeError", "FileNotFoundError"}.intersection(told["raises"])))
} | {
    "fast_axolotl.streaming_dataset_reader": ["RuntimeError"],
    "trl.pack_dataset": ["AssertionError", "TypeError"],
}
"""Drop-ins whose peers raise what no error of ours is by itself; the last two were seen by running them."""
NOT_OURS = {"megatron.get_seqlen_list", "megatron.fill_packing_strategy"}
"""Whose assertions hold for anything that a caller can give, or guard the peer's own loops."""


@pytest.mark.parametrize("ours", sorted(set(RAISED) - NOT_OURS))
def test_errors_are_of_the_peers_classes_and_of_ours(ours, tmp_path):
    with pytest.raises(VarlenError) as raised:
        broken(ours, tmp_path)()

    for kind in RAISED[ours]:
        assert isinstance(raised.value, getattr(builtins, kind)), kind
    again = pickle.loads(pickle.dumps(raised.value))
    assert (type(again), str(again)) == (type(raised.value), str(raised.value))
    assert raised.value.__suppress_context__


def test_an_error_of_more_classes_keeps_its_name_words_and_trace():
    with pytest.raises(SourceError) as raised:
        raise SourceError("gone")

    made = of_kinds(raised.value, (FileNotFoundError, ValueError))

    assert made.__traceback__ is raised.value.__traceback__
    assert isinstance(made, SourceError)
    assert isinstance(made, FileNotFoundError)
    assert (type(made).__name__, str(made)) == ("SourceError", "gone")
    assert of_kinds(made, (FileNotFoundError,)) is made
    assert not isinstance(SettingError("x"), AssertionError)
    assert not isinstance(DocumentsError("x"), AssertionError)


OURS = {
    *("axolotl.VarlenPlugin", "fast_axolotl.LeakWarning", "fast_axolotl.PackedColumns"),
    *("nemo_rl.BalancedPacker", "nemo_rl.BestFitDecreasingPacker", "verl.micro_batch_partitions"),
    *("megatron.rl.attention_work", "megatron.rl.bins_per_step", "megatron.rl.pack_values"),
    *(
        "megatron.rl.unpack_logprobs",
        "megatron.rl.unpack_sequences",
        "megatron.ConfigReport",
        "megatron.Dialect",
    ),
    *(
        "megatron.MegatronLoader",
        "megatron.MegatronPackSettings",
        "megatron.Microbatches",
        "megatron.PackCounts",
    ),
    *("megatron.PackIndex", "megatron.PackedIndexed", "megatron.PackedIndexedWriter", "megatron.PackedNpy"),
    *(
        "megatron.PackedParquet",
        "megatron.PackedParquetWriter",
        "megatron.PackedReader",
        "megatron.PackedRows",
    ),
    *("megatron.PackedWriter", "megatron.RowCollator", "megatron.alignment", "megatron.balance_microbatches"),
    *("megatron.check_config", "megatron.check_in_batch_packing", "megatron.collate_rows"),
    *("megatron.combined_metadata", "megatron.convert", "megatron.cp_slice", "megatron.create_packed"),
    *("megatron.external_loaders", "megatron.fold_alignment_padding", "megatron.last_checkpoint"),
    *(
        "megatron.loader_batch_size",
        "megatron.mask_dummies",
        "megatron.megatron_batch",
        "megatron.metadata_entry",
    ),
    *("megatron.metadata_path", "megatron.mtp_targets", "megatron.open_index", "megatron.open_packed"),
    *("megatron.pack_for_megatron", "megatron.packed_seq_params", "megatron.read_metadata"),
    *(
        "megatron.read_packed_npy",
        "megatron.replay_packs",
        "megatron.saved_state",
        "megatron.split_microbatches",
    ),
    *(
        "megatron.stage_batch",
        "megatron.stored_lengths",
        "megatron.unpacked_samples",
        "megatron.write_megatron",
    ),
    *("megatron.write_metadata", "megatron.write_packed_indexed_dataset", "hf.accepts"),
    *("hf.document_outputs", "hf.first_position", "hf.pool"),
    *(
        "hf.has_experts",
        "hf.implementation",
        "hf.inputs_without_boundaries",
        "hf.logits_size",
        "hf.model_inputs",
    ),
    *("hf.model_type", "hf.mrope_positions", "hf.plain_inputs", "hf.register", "hf.text_config", "hf.unwrap"),
    *("hf.use_varlen_attention", "hf.vocabulary_size"),
    # Names of releases that are gone, or lists of names, whose values the tests of their rooms hold.
    *("megatron.PACKING_ALGORITHMS", "megatron.PACKING_ALGOS", "megatron.build_uniform_packed_seq_params"),
    *("megatron.build_unpacked_sequence_sample", "megatron.identity_collate"),
}
"""What stands for nothing at a peer, without `varlen.adapters.`."""


def row_file(folder: Path) -> str:
    from varlen.adapters.megatron import PackedParquetWriter
    from varlen.adapters.megatron.dataset import rows_of_items

    path = folder / "rows.idx.parquet"
    items = [{"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 0, 1, 0], "seq_boundaries": [0, 3, 5]}] * 3
    with PackedParquetWriter(path) as writer:
        writer.write(rows_of_items(items))
    return str(path)


class Tokenizer:
    eos_id = 2


def made(ours: str, folder: Path) -> Any:
    from varlen.adapters import axolotl, megatron, multipack, nemo_rl, torchtune
    from varlen.adapters.megatron import rl

    lengths = np.array([3, 2, 4])
    info = rl.PackingInfo([[0]], {0: [0, 2]}, [2], [0], "fifo")
    tensor = torch.zeros(1, 2, dtype=torch.int64)
    samples = [{"tokens": [1, 2], "labels": [1, 2]}]
    by_name: dict[str, Callable[[], Any]] = {
        "axolotl.MultipackBatchSampler": lambda: axolotl.MultipackBatchSampler(range(3), 1, 8, lengths, 9),
        "multipack.MultipackDistributedBatchSampler": lambda: multipack.MultipackDistributedBatchSampler(
            8, lengths, 1, 0
        ),
        "torchtune.PackedDataset": lambda: torchtune.PackedDataset(samples, max_seq_len=4),
        "nemo_rl.PackingAlgorithm": lambda: nemo_rl.PackingAlgorithm,
        "nemo_rl.PackingMetrics": nemo_rl.PackingMetrics,
        "nemo_rl.SequencePacker": lambda: nemo_rl.ConcatenativePacker(8),
        "megatron.rl.PackingInfo": lambda: info,
        "megatron.rl.SequencePacker": lambda: rl.SequencePacker(8, 0),
        "megatron.rl.PackingContext": lambda: rl.PackingContext(
            8, rl.SequencePacker(8, 0), info, tensor, tensor, tensor, tensor, tensor
        ),
        "megatron.PackedSeqParams": megatron.PackedSeqParams,
        "megatron.DpBalancedScheduler": lambda: megatron.DpBalancedScheduler(8, 1, 1, None),
        "megatron.PackedSequenceSpecs": megatron.PackedSequenceSpecs,
        "megatron.GPTSFTPackedDataset": lambda: megatron.GPTSFTPackedDataset(row_file(folder), Tokenizer()),
        "megatron.GPTSFTPackedParquetDataset": lambda: megatron.GPTSFTPackedParquetDataset(
            row_file(folder), Tokenizer()
        ),
    }
    name = ours.removeprefix("varlen.adapters.")
    return by_name[name]() if name in by_name else vars(nemo_rl)[name.removeprefix("nemo_rl.")](8)


def broken(ours: str, folder: Path) -> Callable[[], Any]:
    """What makes a drop-in refuse, by name."""
    from varlen.adapters import axolotl, fast_axolotl, megatron, multipack, trl, verl
    from varlen.adapters.megatron import rl

    info = rl.PackingInfo([[0, 1]], {0: [0]}, [2, 3], [0, 0], "fifo")
    by_name: dict[str, Callable[[], Any]] = {
        "axolotl.MultipackBatchSampler": lambda: axolotl.MultipackBatchSampler(range(3), 1, 0, [3], 9),
        "multipack.MultipackDistributedBatchSampler": lambda: multipack.MultipackDistributedBatchSampler(
            8, [[1]], 1, 0
        ),
        "verl.get_group_balanced_partitions": lambda: verl.get_group_balanced_partitions([1], [0, 1], 2),
        "verl.get_seqlen_balanced_partitions": lambda: verl.get_seqlen_balanced_partitions([1], 2, False),
        "verl.greedy_partition": lambda: verl.greedy_partition([1, 2, 3], 2, True),
        "verl.karmarkar_karp": lambda: verl.karmarkar_karp([1, 2, 3], 2, True),
        "megatron.rl.SequencePacker": lambda: rl.SequencePacker(8, 0, seq_length_multiple=3),
        "megatron.rl.create_packed_seq_params_for_bin": lambda: rl.create_packed_seq_params_for_bin(
            info, 0, 8, 4, torch.device("cpu")
        ),
        "megatron.DpBalancedScheduler": lambda: megatron.DpBalancedScheduler(
            8, 1, 4, None
        ).get_groups_and_subsamples([(0, 3)]),
        "megatron.PackedSequenceSpecs": lambda: megatron.PackedSequenceSpecs(
            8, packed_train_data_path=folder / "none.idx.parquet"
        ),
        "megatron.GPTSFTPackedDataset": lambda: megatron.GPTSFTPackedDataset(
            row_file(folder), Tokenizer(), virtual_tokens=3
        ),
        "megatron.GPTSFTPackedParquetDataset": lambda: megatron.GPTSFTPackedParquetDataset(
            row_file(folder), Tokenizer(), pad_cu_seqlens=True
        ),
        "fast_axolotl.streaming_dataset_reader": lambda: list(
            fast_axolotl.streaming_dataset_reader(folder / "none.jsonl", "jsonl")
        ),
        "trl.pack_dataset": lambda: trl.pack_dataset(_tiny_set(), 0),
    }
    return by_name[ours]


def _tiny_set() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"input_ids": [[1, 2]]})

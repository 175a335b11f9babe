"""What an axolotl configuration says reaches the loader, and what contradicts varlen is refused by name."""

from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from pydantic import ValidationError

import varlen as vl
from varlen.adapters.axolotl.settings import VarlenArguments, count_steps, folder_of, loader_settings, saved
from varlen.errors import SettingError

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries about each other


def rows_of(documents=200, seed=0):
    """A prepared data set, with columns that nobody needs."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, 99, n).tolist() for n in rng.integers(2, 60, documents)]
    labels = [[-100, *row[1:]] for row in ids]
    masks = [[1] * len(row) for row in ids]
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": labels, "attention_mask": masks})


def config_of(folder, varlen=None, **changes):
    """What the plugin asks axolotl's configuration for."""
    made = VarlenArguments(varlen=varlen or {}).varlen.model_dump(exclude_none=True)
    usual = {"sequence_len": 128, "batch_size": 4, "num_epochs": 1.0, "max_steps": None, "seed": 42}
    usual |= {"dataset_prepared_path": str(folder), "output_dir": str(folder), "curriculum_sampling": None}
    return SimpleNamespace(varlen=made, **usual | changes)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sample_packing": True}, "leave out `sample_packing`"),
        ({"rl": "dpo", "streaming": True}, "`rl` .*`streaming`"),
        ({"context_parallel_size": 2}, "context_parallel_size=2 cuts rows"),
        ({"varlen": {"capacty": 8192}}, "capacty"),
        ({"varlen": {"attention": "flash"}}, "attention"),
        ({"varlen": {"loss_weighting": "pair"}}, "must be one of token, document, longalign.*; got 'pair'"),
        ({"varlen": {"capacity": "8q"}}, "varlen.capacity must be a whole number of tokens .*got '8q'"),
    ],
)
def test_a_configuration_that_contradicts_varlen_is_refused_by_name(given, words):
    with pytest.raises(ValidationError, match=words):
        VarlenArguments(**given)


def test_all_settings_may_be_left_out():
    assert loader_settings(config_of("x"))["capacity"] == 128
    assert VarlenArguments(sample_packing=False).varlen.attention == "model"
    assert VarlenArguments(varlen={"capacity": "8k"}).varlen.capacity == 8192


def test_every_setting_is_one_that_the_loader_takes(tmp_path):
    every = {"capacity": 64, "global_batch_size": 4, "window": 50, "scope": "window", "max_documents": 9}
    every |= {"method": "best_fit", "layout": "flat", "worker": "thread", "overlong": "split"}
    cfg = config_of(
        tmp_path, every | {"attention": "varlen", "loss_weighting": "document"}, curriculum_sampling=True
    )

    told = loader_settings(cfg)

    assert set(every) <= set(told)
    assert told["shuffle"] is False
    with vl.PackedLoader(saved(rows_of(), tmp_path), **told) as loader:
        assert next(loader).layout == "flat"


def test_prepared_data_is_written_once_whoever_asks_and_in_whatever_order_it_was_made(tmp_path):
    rows = rows_of()
    twice = datasets.Dataset.from_dict({name: rows[name][::-1] for name in rows.column_names}).select(
        range(199, -1, -1)
    )

    place = saved(rows, tmp_path)
    written = (place / "data-00000-of-00001.arrow").stat().st_mtime_ns

    assert saved(twice, tmp_path) == place
    assert (place / "data-00000-of-00001.arrow").stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == [place.name]
    assert saved(rows_of(seed=1), tmp_path) != place
    assert datasets.load_from_disk(str(place)).column_names == ["input_ids", "labels"]


@pytest.mark.parametrize(
    "dataset", [rows_of().remove_columns("labels"), rows_of().to_iterable_dataset(), [1, 2]], ids=type
)
def test_data_without_ids_labels_or_a_length_is_refused(dataset, tmp_path):
    with pytest.raises(SettingError, match="axolotl has prepared a"):
        saved(dataset, tmp_path)


@pytest.mark.parametrize(("epochs", "most"), [(1.0, None), (2.0, None), (0.5, None), (3.0, 7)])
def test_steps_are_counted_as_the_loader_takes_them(epochs, most, tmp_path):
    cfg = config_of(tmp_path, num_epochs=epochs, max_steps=most)
    whole = int(np.ceil(epochs))
    place = saved(rows_of(), folder_of(cfg))
    settings = {"global_batch_size": 4, "seed": 42, "worker": "thread"}
    with vl.PackedLoader(
        place, epochs=whole, capacity=128, mode="indexed", overlong="error", **settings
    ) as loader:
        steps = sum(1 for _ in loader)

    assert steps > 9 * whole
    assert count_steps(cfg, rows_of()) == most or int(np.ceil(steps * epochs / whole)) == count_steps(
        cfg, rows_of()
    )


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({}, [2, 8]),
        ({"min_sample_len": 3}, [8]),
        ({"excess_length_strategy": "truncate"}, [2, 8, 8]),
        ({"excess_length_strategy": "raise"}, None),
    ],
)
def test_what_axolotl_leaves_out_before_the_plugin_is_what_the_page_says(settings, left):
    from axolotl.utils.data.utils import handle_long_seq_in_dataset
    from axolotl.utils.dict import DictDefault

    ids = [[7] * length for length in (1, 2, 8, 9)]
    rows = datasets.Dataset.from_dict({"input_ids": ids, "labels": ids, "attention_mask": ids})

    def filtered():
        return handle_long_seq_in_dataset(rows, 8, DictDefault(settings))["input_ids"]

    if left is None:
        with pytest.raises(ValueError, match="9 tokens, which exceeds the maximum 8"):
            filtered()
    else:
        assert [len(each) for each in filtered()] == left

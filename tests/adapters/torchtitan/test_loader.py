"""Behind torchtitan's protocol documents stay apart, and finite data ends on all ranks at once."""

import dataclasses
import json
import types

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from tests.adapters.titan import FIRST, numbered_store, numbers, step_rows

import varlen as vl
from varlen.adapters.torchtitan import PackedDataLoader, base_data_loader, check_trainer, trainer_batch
from varlen.errors import OverlongDocumentError, SettingError, StateError

DOCUMENTS, SEQ_LEN, GLOBAL = 90, 64, 8


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return numbered_store(tmp_path_factory.mktemp("data") / "store", DOCUMENTS)


def built(store, rank=0, world=1, rows=1, trainer=None, **changes):
    config = PackedDataLoader.Config(
        **{"source": str(store), "global_batch_size": GLOBAL, "worker": "thread", **changes}
    )
    told = {"tokenizer": None, "seq_len": SEQ_LEN, "local_batch_size": rows, **(trainer or {})}
    return config.build(dp_world_size=world, dp_rank=rank, **told)


def all_ranks(store, world, **changes):
    return [built(store, rank, world, **changes) for rank in range(world)]


def taken(loaders, steps=None):
    """Train as torchtitan does, all ranks in step; returns each step's tokens by rank, and who ended when."""
    found, ended = [], []
    accumulated = loaders[0].loader.micro_batches
    given = [iter(loader) for loader in loaders]
    while steps is None or len(found) < steps:
        step, over = [], []
        for rank, one in enumerate(given):
            try:
                rows = [next(one)[0]["input"].numpy() for _ in range(accumulated)]
                step.append(np.concatenate(rows))
            except StopIteration:
                over.append(rank)
        if over:
            ended = over
            break
        found.append(step)
    return found, ended


@pytest.mark.parametrize(("world", "rows"), [(1, 1), (2, 2), (4, 1), (8, 1)])
def test_finite_data_ends_on_all_ranks_after_the_same_batch_and_every_document_came_once(store, world, rows):
    loaders = all_ranks(store, world, rows=rows)
    steps, ended = taken(loaders)

    assert ended == list(range(world))
    assert len(steps) * loaders[0].loader.micro_batches == len(loaders[0]) == len(loaders[-1])
    assert numbers(np.concatenate([tokens for step in steps for tokens in step])) == list(range(DOCUMENTS))


def test_the_packs_of_a_step_are_the_same_for_every_number_of_ranks(store):
    plans = [[step_rows(step) for step in taken(all_ranks(store, world))[0]] for world in (1, 2, 8)]

    assert plans[0] == plans[1] == plans[2]
    assert len(plans[0]) > 3


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1), (1, 2), (8, 2)])
@pytest.mark.parametrize("mode", ["indexed", "streaming"])
def test_a_run_goes_on_with_another_number_of_ranks_and_no_document_is_lost_or_repeated(
    store, tmp_path, before, after, mode
):
    changes = {}
    if mode == "streaming":
        texts = "".join(json.dumps({"text": f"{n}: " + "ab " * (n % 12)}) + "\n" for n in range(DOCUMENTS))
        (tmp_path / "texts.jsonl").write_text(texts)
        changes = {"source": str(tmp_path / "texts.jsonl"), "text_tokenizer": "bytes", "mode": mode}
    whole, _ = taken(all_ranks(store, 1, **changes))
    first = all_ranks(store, before, **changes)
    begun, _ = taken(first, steps=2)
    states = [loader.state_dict() for loader in first]
    then = all_ranks(store, after, **changes)
    for loader in then:
        loader.load_state_dict(states[before - 1])
    rest, ended = taken(then)

    assert all(state == states[0] for state in states)
    assert ended == list(range(after))
    assert [step_rows(step) for step in begun + rest] == [step_rows(step) for step in whole]


def test_a_distributed_checkpoint_keeps_the_state_as_one_text_that_a_new_loader_finds(store, tmp_path):
    loader = built(store)
    taken([loader], steps=3)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"dataloader": loader}, checkpoint_id=tmp_path / "saved", no_dist=True)
    expected, _ = taken([loader])
    anew = built(store)
    with pytest.warns(UserWarning, match="single process"):
        dcp.load({"dataloader": anew}, checkpoint_id=tmp_path / "saved", no_dist=True)
    found, _ = taken([anew])

    assert list(loader.state_dict()) == ["varlen"]
    assert json.loads(loader.state_dict()["varlen"])["step"] == len(expected) + 3
    assert all(
        np.array_equal(one, other)
        for ones, others in zip(found, expected)
        for one, other in zip(ones, others)
    )
    assert len(found) == len(expected) > 0


def test_the_state_counts_what_was_taken_and_within_a_step_keeps_to_its_ranks(store):
    loader = built(store, rows=2)
    next(iter(loader))
    state = loader.state_dict()
    anew = built(store, rows=2)
    anew.load_state_dict(state)

    assert torch.equal(next(anew)[1], next(loader)[1])
    with pytest.raises(StateError, match="dp_world_size was 1 and is 2"):
        built(store, 0, 2, rows=2).load_state_dict(state)


def test_an_empty_state_begins_anew_and_another_loaders_is_refused(store):
    loader = built(store)
    loader.load_state_dict({})
    with pytest.raises(
        StateError, match=r"another data loader \(dp_rank_0, world_size\).*exclude_from_loading"
    ):
        loader.load_state_dict({"dp_rank_0": b"...", "world_size": 1})
    with pytest.raises(StateError, match="no JSON"):
        loader.load_state_dict({"varlen": "{"})
    with pytest.raises(StateError, match="global_batch_size was 8 and is 4"):
        built(store, global_batch_size=4).load_state_dict(loader.state_dict())

    assert len(taken([loader])[0]) == len(loader) // 8


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop", "error"])
def test_the_overflow_policy_is_the_users(store, overlong):
    short = {"trainer": {"seq_len": 24}, "overlong": overlong}
    if overlong == "error":
        with pytest.raises(OverlongDocumentError, match="24"):
            built(store, **short)
        return
    with vl.PackedLoader(store, capacity=64, global_batch_size=GLOBAL, worker="thread") as loader:
        lengths = np.concatenate([batch.document_lengths for batch in loader])
    with built(store, **short).loader as loader:
        steps, _ = taken([built(store, **short)])
        ledger = [loader.stats().ledger for _ in iter(loader)][-1]
    tokens = np.concatenate([one for step in steps for one in step])
    kept = {
        "split": lengths.sum(),
        "truncate": np.minimum(lengths, 24).sum(),
        "drop": lengths[lengths <= 24].sum(),
    }

    assert int((tokens > 0).sum()) == kept[overlong]
    assert len(numbers(tokens)) == (DOCUMENTS if overlong != "drop" else int((lengths <= 24).sum()))
    assert ledger.dropped + ledger.truncated == lengths.sum() - kept[overlong]


def test_without_a_global_batch_size_a_step_is_one_batch_of_each_rank(store):
    two = all_ranks(store, 2, rows=3, global_batch_size=-1)

    assert two[0].loader.settings.global_batch_size == 6
    assert two[0].loader.micro_batches == 1
    with pytest.raises(StateError, match="global_batch_size was 6 and is 12"):
        built(store, 0, 4, rows=3, global_batch_size=-1).load_state_dict(two[0].state_dict())


def test_a_validators_replace_makes_it_endless_or_finite(store):
    config = PackedDataLoader.Config(source=str(store), worker="thread", epochs=2)
    told = {"dp_world_size": 1, "dp_rank": 0, "tokenizer": None, "seq_len": SEQ_LEN, "local_batch_size": 8}
    endless = dataclasses.replace(config, infinite=True).build(**told)
    finite = dataclasses.replace(config, infinite=False).build(**told)

    assert len(taken([endless], steps=3 * len(finite))[0]) == 3 * len(finite)
    rows, _ = taken([finite])
    assert numbers(np.concatenate([one for step in rows for one in step])) == sorted([*range(DOCUMENTS)] * 2)


def test_batches_counted_in_tokens_are_flat(store):
    told = {"seq_len": None, "local_batch_size": None, "max_context_length": SEQ_LEN}
    flat = built(store, trainer={**told, "num_tokens_per_batch": 2 * SEQ_LEN})
    inputs, labels = next(iter(flat))
    rows, targets = next(iter(built(store, rows=2)))

    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (2 * SEQ_LEN,)
    assert torch.equal(inputs["input"], rows["input"].reshape(-1))
    assert torch.equal(labels, targets.reshape(-1))
    with pytest.raises(
        SettingError, match=r"100 tokens isn't whole packs of max_context_length 64; pass .* 64 or 128"
    ):
        built(store, trainer={**told, "num_tokens_per_batch": 100})
    with pytest.raises(SettingError, match="pass both of one pair"):
        built(store, trainer=told)


def test_a_mixture_is_a_source_like_any_other(store, tmp_path):
    mixture = vl.Mixture(
        {"all": str(store), "again": str(store)}, weights={"all": 3, "again": 1}, until="first"
    )
    ranks = all_ranks(store, 2, source=mixture)
    steps, ended = taken(ranks)
    found = numbers(np.concatenate([one for step in steps for one in step]))

    assert ended == [0, 1]
    assert set(found) == set(range(DOCUMENTS))
    assert 1.1 * DOCUMENTS < len(found) < 1.6 * DOCUMENTS


class Wrapped:
    """A tokenizer as torchtitan wraps it, of bytes and two marks that it puts around a document by itself."""

    def __init__(self):
        from tokenizers import Tokenizer, models, pre_tokenizers

        names = {f"<{n}>": n for n in range(FIRST + DOCUMENTS)} | {"<bos>": 2000, "<eos>": 2001}
        self.tokenizer = Tokenizer(models.WordLevel(names, unk_token="<0>"))
        self.tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        self.bos_id, self.eos_id = 2000, 2001


def test_documents_are_tokenized_as_the_trainer_would_with_its_marks_around_them(tmp_path):
    texts = [f"<{FIRST + n}> " + "<7> " * n for n in range(20)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = PackedDataLoader.Config(source=str(tmp_path / "texts.jsonl"), worker="thread")
    told = {"dp_world_size": 1, "dp_rank": 0, "seq_len": SEQ_LEN, "local_batch_size": 2}
    steps, _ = taken([config.build(tokenizer=Wrapped(), **told)])
    tokens = np.concatenate([one for step in steps for one in step])
    begins = np.argwhere(tokens == 2000)

    assert len(begins) == 20
    for row, at in begins:
        number = tokens[row, at + 1] - FIRST
        assert tokens[row, at + 2 : at + 3 + number].tolist() == [7] * number + [2001]
    with pytest.raises(SettingError, match=r"object.*text_tokenizer"):
        config.build(tokenizer=object(), **told)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": ""}, "dataloader.source is empty"),
        ({"source": None}, "dataloader.source is empty"),
        ({"settings": {"capacity": 9}}, "holds capacity, which torchtitan decides"),
        ({"settings": {"seed": 9}}, "set dataloader.seed"),
        ({"global_batch_size": 6, "world": 4}, "6 doesn't divide among 4 ranks"),
        ({"trainer": {"snapshot_every_n_steps": 12}}, "12 batches of a rank.*step of 8"),
    ],
)
def test_what_would_change_nothing_or_train_something_else_is_refused(store, changes, message):
    with pytest.raises(SettingError, match=message):
        built(store, **changes)


def test_the_name_of_one_of_torchtitans_own_data_sets_is_refused():
    # `dataset` is a field of torchtitan's base class.
    config = types.SimpleNamespace(source="store", settings={}, dataset="c4")
    with pytest.raises(SettingError, match=r"put the path of the data into dataloader\.source"):
        PackedDataLoader(config, dp_world_size=1, dp_rank=0, seq_len=8, local_batch_size=1)


def test_a_trainer_whose_steps_differ_or_whose_attention_gets_no_mask_is_refused(store):
    class ScaledDotProductAttention:
        class Config: ...

    class FlexAttention:
        class Config: ...

    def of(loader=None, size=GLOBAL, attention=FlexAttention):
        layer = types.SimpleNamespace(attention=types.SimpleNamespace(inner_attention=attention.Config()))
        model = types.SimpleNamespace(layers=[layer, layer])
        return types.SimpleNamespace(
            dataloader=loader or PackedDataLoader.Config(source=str(store), global_batch_size=GLOBAL),
            training=types.SimpleNamespace(global_batch_size=size),
            model_spec=types.SimpleNamespace(model=model),
        )

    ScaledDotProductAttention.Config.__qualname__ = "ScaledDotProductAttention.Config"
    FlexAttention.Config.__qualname__ = "FlexAttention.Config"
    check_trainer(of())
    with pytest.raises(SettingError, match=r"set dataloader\.global_batch_size to 16"):
        check_trainer(of(size=16))
    with pytest.raises(SettingError, match=r"8 packs, and one of the trainer one batch of each rank \(-1\)"):
        check_trainer(of(size=-1))
    with pytest.raises(SettingError, match="layer 0 of the model attends by ScaledDotProductAttention"):
        check_trainer(of(attention=ScaledDotProductAttention))
    with pytest.raises(SettingError, match=r"dataloader is a dict; set it to PackedDataLoader.Config"):
        check_trainer(of(loader={"source": 1}))


@pytest.mark.parametrize("home", ["dataloader", "data/loader"])
def test_torchtitans_own_class_is_the_base_where_it_is_installed(tmp_path, monkeypatch, home):
    file = tmp_path / "torchtitan" / "components" / f"{home}.py"
    file.parent.mkdir(parents=True)
    file.write_text("class BaseDataLoader: ...\n")
    for name in ("torchtitan", "torchtitan.components", "torchtitan.components." + home.replace("/", ".")):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    found = base_data_loader()

    assert found.__name__ == "BaseDataLoader"
    assert found.__module__.startswith("torchtitan.components.")
    for name in [name for name in __import__("sys").modules if name.partition(".")[0] == "torchtitan"]:
        monkeypatch.delitem(__import__("sys").modules, name)


LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=12)


def made(lengths, capacity=300, multiple=1, masked=False):
    """A batch of all packs, and the documents it is made of."""
    rng = np.random.default_rng(sum(lengths))
    documents = [rng.integers(1, 50, length) for length in lengths]
    masks = [rng.integers(0, 2, length) for length in lengths] if masked else None
    packing = vl.pack(lengths, capacity=capacity, document_multiple_of=multiple)
    return vl.collate(documents, packing, loss_mask=masks), documents


def read_as_torchtitan(positions):
    """The document of every position, by torchtitan's rule: one begins wherever positions are 0."""
    return np.cumsum(positions == 0, axis=1)


@given(LENGTHS, st.sampled_from([1, 4]), st.booleans())
def test_documents_begin_where_positions_are_zero_and_padding_stands_by_itself(lengths, multiple, masked):
    batch, _ = made(lengths, multiple=multiple, masked=masked)
    inputs, _ = trainer_batch(batch)
    places = inputs["positions"].numpy()
    found = read_as_torchtitan(places)

    assert (places[:, 0] == 0).all()
    for row, segments in enumerate(batch.segment_ids):
        real = segments >= 0
        pairs = {(one, other) for one, other in zip(segments[real].tolist(), found[row, real].tolist())}
        assert len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs})
        assert not set(found[row, real]) & set(found[row, ~real])
        assert np.array_equal(places[row, real], batch.position_ids[row, real])


@given(LENGTHS, st.sampled_from([1, 4]))
def test_padding_is_cut_so_that_no_part_crosses_a_block_of_128_and_no_part_is_shorter_than_it_must(
    lengths, multiple
):
    batch, _ = made(lengths, capacity=300, multiple=multiple)
    inputs, _ = trainer_batch(batch)
    for row, segments in enumerate(batch.segment_ids):
        places = inputs["positions"][row].numpy()
        for at in np.flatnonzero(segments < 0):
            begins = at == 0 or segments[at - 1] >= 0 or at % 128 == 0
            assert places[at] == (0 if begins else places[at - 1] + 1)


@given(LENGTHS, st.booleans(), st.booleans())
def test_a_label_is_the_next_token_of_the_same_document_where_that_is_a_target(lengths, masked, flat):
    batch, _ = made(lengths, masked=masked)
    inputs, labels = trainer_batch(batch, flat=flat)
    expected = np.full(batch.labels.shape, -100)
    for row, column in np.ndindex(batch.labels[:, 1:].shape):
        here, after = batch.segment_ids[row, column : column + 2]
        if here == after >= 0:
            expected[row, column] = batch.labels[row, column + 1]

    shape = (-1,) if flat else batch.labels.shape
    assert np.array_equal(labels.numpy(), expected.reshape(shape))
    assert np.array_equal(inputs["input"].numpy(), batch.input_ids.reshape(shape))
    assert int((labels != -100).sum()) == batch.num_targets
    assert {tensor.dtype for tensor in (*inputs.values(), labels)} == {labels.dtype}
    assert str(labels.dtype) == "torch.int64"


def test_nothing_is_lost_when_the_loader_uses_the_memory_of_a_batch_again():
    batch, _ = made([5, 7, 200])
    inputs, labels = trainer_batch(batch)
    before = [tensor.clone() for tensor in (*inputs.values(), labels)]
    for array in (batch.input_ids, batch.labels, batch.position_ids, batch.segment_ids):
        array[:] = 77

    assert all(bool((one == other).all()) for one, other in zip(before, (*inputs.values(), labels)))


@pytest.mark.parametrize("capacity", [128, 130])
def test_a_row_of_nothing_but_padding_is_many_short_documents_without_a_label(capacity):
    batch, _ = made([capacity], capacity=capacity)
    empty = batch.replace(
        segment_ids=np.full_like(batch.segment_ids, -1),
        position_ids=np.zeros_like(batch.position_ids),
        labels=np.full_like(batch.labels, -100),
    )
    inputs, labels = trainer_batch(empty)

    assert inputs["positions"][0].tolist() == [n % 128 for n in range(capacity)]
    assert bool((labels == -100).all())

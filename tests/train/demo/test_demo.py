"""The demo: documents, orders, layouts that learn the same, a control that leaks, and failures that are told."""

import json
import os
import signal
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.demo_figures import METHODS as FIGURES

from varlen.batch.packed import IGNORE_INDEX
from varlen.errors import LedgerError, SettingError, SourceError, VarlenError
from varlen.train.demo import corpus as corpus_module
from varlen.train.demo.corpus import Documents, read_corpus
from varlen.train.demo.experiment import check_equal_work, run_demo
from varlen.train.demo.job import Job, current_bytes, now, peak_bytes, reset_peak
from varlen.train.demo.orders import batches_as_packing, make_order, most_crowded_pack, step_slots
from varlen.train.demo.run import ATTENTION, Run, add_gradients, mean_loss, small_llama, step_inputs
from varlen.train.demo.settings import METHODS, ORDERS, DemoSettings, ModelSettings
from varlen.train.demo.worker import Worker

CORPUS = DemoSettings(
    steps=2, batch_documents=4, max_length=64, validation_documents=4, model=ModelSettings(vocab_size=300)
)


def write(tmp_path, count, text="word {} and more of it"):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text.format(n) * (1 + n % 7)}) + "\n" for n in range(count)))
    return path


def test_validation_documents_are_never_drawn_for_training(tmp_path):
    corpus = read_corpus(write(tmp_path, 40), CORPUS)

    assert set(corpus.validation_ids).isdisjoint(corpus.train_ids)
    assert len(corpus.validation_ids) + len(corpus.train_ids) == len(corpus.documents.lengths) == 40
    for seed in range(20):
        drawn = corpus.draw(8, seed)
        assert len(set(drawn.tolist())) == 8
        assert set(drawn.tolist()) <= set(corpus.train_ids.tolist())


def test_a_draw_has_the_lengths_of_the_whole_set(tmp_path):
    corpus = read_corpus(write(tmp_path, 75), CORPUS)
    lengths = corpus.documents.lengths

    drawn = np.sort(lengths[corpus.draw(8, seed=3)])

    strata = np.array_split(np.sort(lengths[corpus.train_ids]), 8)
    assert all(low.min() <= length <= high.max() for length, low, high in zip(drawn, strata, strata))


def test_seeds_draw_other_documents_in_another_order(tmp_path):
    corpus = read_corpus(write(tmp_path, 75), CORPUS)

    assert corpus.draw(8, 0).tolist() == corpus.draw(8, 0).tolist()
    assert corpus.draw(8, 0).tolist() != corpus.draw(8, 1).tolist()
    assert corpus.documents.lengths[corpus.draw(8, 0)].tolist() != sorted(
        corpus.documents.lengths[corpus.draw(8, 0)]
    )


def test_texts_and_tokens_belong_together(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ["a", *("ab" * n for n in range(2, 30)), "b"])
    )

    corpus = read_corpus(tmp_path / "a.jsonl", replace(CORPUS, model=ModelSettings(vocab_size=256)))

    assert corpus.too_short == 2
    assert len(corpus.texts) == len(corpus.documents.lengths) == 28
    assert (
        np.argsort(corpus.documents.lengths, kind="stable").tolist()
        == np.argsort([len(text) for text in corpus.texts], kind="stable").tolist()
    )


def test_too_few_documents_are_refused_with_how_many_it_takes(tmp_path):
    with pytest.raises(SourceError, match=r"holds 4 documents .* needs 5: 1 step of 4 .* 1 to validate"):
        read_corpus(write(tmp_path, 4), CORPUS)
    with pytest.raises(SourceError, match=r"holds 10 documents .* needs 14: 3 steps of 4 .* 2 to validate"):
        read_corpus(write(tmp_path, 10), replace(CORPUS, steps=3, exact_steps=True))
    assert len(read_corpus(write(tmp_path, 5), CORPUS).train_ids) == 4


def test_the_way_out_of_too_few_documents_is_one_that_helps(tmp_path, monkeypatch):
    path = write(tmp_path, 40)
    asked = replace(CORPUS, steps=30, exact_steps=True)
    with pytest.raises(SourceError, match=r"holds 40 documents .* pass more documents or --steps 9 at most$"):
        read_corpus(path, asked)
    with pytest.raises(SourceError, match=r"holds 4 documents .* pass more documents$"):
        read_corpus(write(tmp_path, 4), CORPUS)

    monkeypatch.setattr(corpus_module, "MAX_DOCUMENTS", 20)
    with pytest.raises(
        SourceError, match=r"more, but the demo takes 20 documents .* pass --steps 4 at most$"
    ):
        read_corpus(write(tmp_path, 40), asked)


def test_a_file_whose_name_is_not_utf_8_is_described_in_characters_that_can_be_written(tmp_path):
    path = write(tmp_path, 40).rename(tmp_path / os.fsdecode(b"caf\xe9.jsonl"))

    assert (
        read_corpus(path, CORPUS).description.encode().endswith("caf\N{REPLACEMENT CHARACTER}.jsonl".encode())
    )


def test_few_documents_are_trained_on_in_fewer_steps(tmp_path):
    assert read_corpus(write(tmp_path, 40), CORPUS).settings == CORPUS
    few = read_corpus(write(tmp_path, 9), CORPUS).settings
    assert (few.steps, few.validation_documents) == (1, 2)


def test_long_documents_are_trained_on_in_fewer_steps_unless_steps_are_exact():
    long, middling, short = (np.full(500, length) for length in (100_000, 700, 300))

    assert DemoSettings().fitted(short).steps == DemoSettings().steps == 5
    assert DemoSettings().fitted(middling).steps == 4
    assert DemoSettings().fitted(long).steps == 2
    assert DemoSettings(exact_steps=True).fitted(long).steps == 5


def test_documents_without_a_target_do_not_count(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 20)

    with pytest.raises(SourceError, match="holds 0 documents of two tokens or more"):
        read_corpus(tmp_path / "a.jsonl", CORPUS)


def test_reading_stops_at_a_limit_and_says_so(tmp_path, monkeypatch):
    path = write(tmp_path, 400)
    assert not read_corpus(path, CORPUS).is_cut
    monkeypatch.setattr(corpus_module, "MAX_CHARACTERS", 2000)
    monkeypatch.setattr(corpus_module, "MAX_DOCUMENTS", 15)

    corpus = read_corpus(path, CORPUS)

    assert corpus.is_cut
    assert 15 < corpus.documents_found < 400
    assert len(corpus.documents.lengths) == 15


def test_taken_documents_keep_their_tokens():
    documents = Documents(tokens=np.arange(10, dtype=np.int32), offsets=np.array([0, 3, 3, 10]))

    taken = documents.take(np.array([2, 0]))

    assert taken.tokens.tolist() == [3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert taken.lengths.tolist() == [7, 3]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("batch_documents", 1),
        ("max_length", 15),
        ("num_seeds", 0),
        ("seed", -1),
        ("threads", 0),
    ],
)
def test_settings_out_of_range_are_named(name, value):
    with pytest.raises(SettingError, match=f"{name} must be at least"):
        DemoSettings(**{name: value})


STEPS, BATCH, MAX_LENGTH = 3, 4, 64

all_lengths = st.lists(st.integers(2, 300), min_size=STEPS * BATCH, max_size=STEPS * BATCH).map(
    lambda values: np.array(values, dtype=np.int64)
)


@given(lengths=all_lengths, name=st.sampled_from(ORDERS), seed=st.integers(0, 5))
def test_every_order_trains_every_document_once_cut_at_the_same_length(lengths, name, seed):
    order = make_order(name, lengths, steps=STEPS, max_length=MAX_LENGTH, seed=seed)

    packing = order.packing
    assert sorted(packing.document_ids.tolist()) == list(range(len(lengths)))
    kept = np.empty(len(lengths), dtype=np.int64)
    kept[packing.document_ids] = packing.lengths
    assert kept.tolist() == np.minimum(lengths, MAX_LENGTH).tolist()
    assert packing.starts.tolist() == [0] * len(lengths)
    assert packing.ledger.packed == np.minimum(lengths, MAX_LENGTH).sum()
    assert packing.ledger.truncated == np.maximum(lengths - MAX_LENGTH, 0).sum()
    dealt = [order.pack_ids(step).tolist() for step in range(STEPS)]
    assert [pack for packs in dealt for pack in packs] == list(range(packing.num_packs))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert min(map(len, dealt)) >= 1


def test_random_batches_are_neighbours_and_buckets_are_neighbours_in_length():
    lengths = np.array([9, 2, 8, 3, 7, 4, 6, 5, 30, 20, 10, 40])

    random = make_order("random", lengths, steps=STEPS, max_length=MAX_LENGTH, seed=0).packing
    buckets = make_order("bucketed", lengths, steps=STEPS, max_length=MAX_LENGTH, seed=0).packing

    assert random.to_lists() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert sorted(sorted(lengths[ids].tolist()) for ids in buckets.to_lists()) == [
        [2, 3, 4, 5],
        [6, 7, 8, 9],
        [10, 20, 30, 40],
    ]


def test_buckets_are_shuffled_by_the_seed():
    lengths = np.arange(2, 2 + 40)
    orders = {
        tuple(
            make_order("bucketed", lengths, steps=10, max_length=64, seed=seed).packing.document_ids.tolist()
        )
        for seed in range(5)
    }

    assert len(orders) == 5


def test_few_short_documents_still_give_every_step_a_pack():
    order = make_order("packed", np.full(12, 5), steps=3, max_length=2048, seed=0)

    assert order.packing.num_packs >= 3


def test_documents_too_uneven_to_pack_for_so_many_steps_are_refused():
    with pytest.raises(SourceError, match="2 packs, too few for 6 steps"):
        make_order("packed", np.array([2000] + [2] * 11), steps=6, max_length=2048, seed=0)


@pytest.mark.parametrize(
    ("name", "layout", "slots"),
    [
        ("random", "flat", 29),
        ("random", "padded", 2 * 4 + 2 * 20),
        ("random", "padded_with_mask", 2 * 4 + 2 * 20),
        ("bucketed", "padded", 2 * 3 + 2 * 20),
        ("packed", "rows", 2 * 20),
    ],
)
def test_positions_are_counted_by_layout(name, layout, slots):
    order = make_order(name, np.array([2, 4, 20, 3]), steps=2, max_length=20, seed=0)

    assert step_slots(order, layout) == slots


def test_a_batch_that_holds_a_document_twice_does_not_balance():
    with pytest.raises(LedgerError):
        batches_as_packing(np.array([5, 5, 5]), np.array([[0, 1], [1, 2]]), 10)


def test_a_batch_that_leaves_a_document_out_does_not_balance():
    with pytest.raises(LedgerError):
        batches_as_packing(np.array([5, 5, 5]), np.array([[0, 1]]), 10)


def test_the_most_crowded_pack_is_the_first_with_most_documents():
    packing = batches_as_packing(np.array([5, 5, 5, 5]), np.array([[0, 1], [2, 3]]), 10)

    assert most_crowded_pack(packing) == 0


SETTINGS = DemoSettings(
    steps=2,
    batch_documents=5,
    max_length=48,
    num_seeds=1,
    validation_documents=3,
    threads=1,
    model=ModelSettings(vocab_size=97, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48),
)
LENGTHS = (7, 40, 3, 2, 60, 12, 5, 33, 9, 21)


def documents(lengths, seed=0):
    tokens = np.random.default_rng(seed).integers(0, 97, sum(lengths)).astype(np.int32)
    return Documents(tokens=tokens, offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def order(name="random"):
    return make_order(name, np.array(LENGTHS), steps=2, max_length=48, seed=0)


def loss_and_gradients(layout, deal, dtype=torch.float64, step=0):
    model = small_llama(SETTINGS, 97, seed=1, attention=ATTENTION[layout]).to(dtype)
    inputs = step_inputs(layout, model, documents(LENGTHS), deal, step)
    loss = add_gradients(model, inputs.arguments, inputs.labels, inputs.num_targets)
    return inputs, loss, torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("layout", ["padded", "flat", "rows"])
def test_a_batch_has_the_same_loss_and_gradients_in_every_layout(layout, step):
    masked, loss, gradients = loss_and_gradients("padded_with_mask", order(), step=step)
    inputs, other_loss, other_gradients = loss_and_gradients(layout, order(), step=step)

    assert inputs.num_targets == masked.num_targets
    assert inputs.num_tokens == masked.num_tokens
    # Gradients pass through softmax and norms that transformers computes in float32 in any dtype.
    assert other_loss == pytest.approx(loss, abs=1e-6)
    assert torch.allclose(other_gradients, gradients, atol=1e-6 * gradients.abs().max().item(), rtol=1e-4)


def test_packs_without_boundaries_have_the_same_targets_and_another_loss():
    packed, loss, _ = loss_and_gradients("rows", order("packed"))
    control, control_loss, _ = loss_and_gradients("rows_without_boundaries", order("packed"))

    assert torch.equal(control.labels, packed.labels)
    assert torch.equal(control.arguments["input_ids"], packed.arguments["input_ids"])
    assert control.num_targets == packed.num_targets
    assert abs(control_loss - loss) > 1e-4


@pytest.mark.parametrize("layout", list(ATTENTION))
def test_the_loss_in_blocks_is_the_loss_that_transformers_computes(layout):
    inputs, loss, gradients = loss_and_gradients(layout, order("packed" if "rows" in layout else "random"))
    model = small_llama(SETTINGS, 97, seed=1, attention=ATTENTION[layout]).double()

    logits = model(**inputs.arguments).logits[:, :-1].reshape(-1, 97)
    labels = inputs.labels[:, 1:].reshape(-1)
    expected = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)
    expected.backward()

    assert loss == pytest.approx(expected.item(), abs=1e-9)
    assert mean_loss(model, inputs.arguments, inputs.labels, inputs.num_targets) == pytest.approx(
        loss, abs=1e-9
    )
    theirs = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
    assert torch.allclose(gradients, theirs, atol=1e-9)


def test_blocks_of_the_head_cover_every_position(monkeypatch):
    whole = loss_and_gradients("flat", order())
    monkeypatch.setattr("varlen.train.demo.run.HEAD_BLOCK", 7)
    blocks = loss_and_gradients("flat", order())

    assert blocks[1] == pytest.approx(whole[1], abs=1e-9)
    assert torch.allclose(blocks[2], whole[2], atol=1e-9)


def test_no_target_is_the_first_token_of_its_document():
    for layout in ATTENTION:
        inputs, _, _ = loss_and_gradients(layout, order("packed" if "rows" in layout else "random"))
        assert inputs.num_targets == int((inputs.labels != IGNORE_INDEX).sum())
        assert (inputs.labels[:, 0] == IGNORE_INDEX).all()
    padded, _, _ = loss_and_gradients("padded", order())
    assert padded.num_targets == sum(min(length, 48) - 1 for length in LENGTHS[:5])
    assert padded.num_slots == 5 * 48


def run(layout, name="random"):
    job = Job(
        layout=layout,
        order=order(name),
        documents=documents(LENGTHS),
        validation=documents((11, 2, 90), seed=1),
        vocab_size=97,
        seed=1,
        settings=SETTINGS,
    )
    return Run(job)


def test_padded_and_flattened_runs_stay_equal_step_by_step_and_validate_alike():
    padded, flat = run("padded_with_mask"), run("flat")

    for step in range(2):
        one, other = padded.step(step), flat.step(step)
        assert one.loss == pytest.approx(other.loss, abs=2e-6)
        assert (one.num_tokens, one.num_targets) == (other.num_tokens, other.num_targets)
        assert one.num_slots > other.num_slots == other.num_tokens
    assert padded.validate() == pytest.approx(flat.validate(), abs=1e-5)


def test_training_changes_the_loss_and_warming_up_does_not():
    first = run("flat")
    weights = small_llama(SETTINGS, 97, seed=1, attention="varlen").state_dict()

    assert all(torch.equal(value, first.model.state_dict()[name]) for name, value in weights.items())
    before = first.validate()
    first.step(0)
    assert first.validate() != before


def test_no_gradient_is_carried_into_a_step():
    trained = run("flat")

    assert all(parameter.grad is None for parameter in trained.model.parameters())
    trained.step(0)
    assert all(parameter.grad is None for parameter in trained.model.parameters())


def test_validation_is_the_mean_over_targets_of_documents_alone_and_cut():
    trained = run("padded")
    trained.step(0)
    model = small_llama(SETTINGS, 97, seed=1, attention="sdpa")
    model.load_state_dict(trained.model.state_dict())

    losses, targets = 0.0, 0
    for length, start in ((11, 0), (2, 11), (48, 13)):
        tokens = torch.from_numpy(
            documents((11, 2, 90), seed=1).tokens[start : start + length].astype(np.int64)
        )
        logits = model(input_ids=tokens[None]).logits[0, :-1]
        losses += torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum").item()
        targets += length - 1

    assert trained.validate() == pytest.approx(losses / targets, abs=1e-5)


def test_a_step_reports_time_and_the_run_reports_memory():
    trained = run("rows", "packed")

    record = trained.step(0)

    assert record.seconds.wall_s > 0
    assert record.seconds.user_s + record.seconds.system_s >= 0
    assert trained.memory_bytes() >= 0
    assert trained.num_parameters() == sum(p.numel() for p in trained.model.parameters())


def test_isolation_is_proved_on_the_packed_run():
    report = run("rows", "packed").prove_isolation()

    assert report.is_proved
    assert report.verdict == "isolated"
    assert dict(report.rows)["any other document's logits moved by"] == "0 (to the bit)"


def test_isolation_is_proved_on_documents_cut_short_where_packs_hold_one_each():
    alone = replace(run("rows", "packed").job, documents=documents((48,) * 10))
    order = make_order("packed", alone.documents.lengths, steps=2, max_length=48, seed=0)

    report = Run(replace(alone, order=order)).prove_isolation()

    assert order.packing.num_packs == 10
    assert report.is_proved
    assert dict(report.rows)["documents in the row that was tried"] == "4 (48 tokens)"


linux = pytest.mark.skipif(sys.platform != "linux", reason="the peak can be started anew on Linux only")


@linux
def test_the_peak_is_seen_after_the_memory_is_given_back_and_forgotten_on_request():
    reset_peak()
    before = current_bytes()
    block = np.ones(64 << 20, dtype=np.uint8)
    del block

    assert peak_bytes() - before > 60 << 20
    reset_peak()
    assert peak_bytes() - before < 32 << 20


def test_sleeping_takes_time_on_the_wall_and_working_takes_cpu():
    start = now()
    time.sleep(0.05)
    slept = now() - start
    start = now()
    while (now() - start).user_s < 0.05:
        sum(range(1000))
    worked = now() - start

    assert slept.wall_s >= 0.05
    assert slept.user_s < 0.04
    assert worked.user_s >= 0.05
    assert (slept + worked).wall_s == slept.wall_s + worked.wall_s


MODEL = ModelSettings(vocab_size=300, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24)
EXPERIMENT = replace(SETTINGS, batch_documents=4, max_length=96, num_seeds=2, model=MODEL)


@pytest.fixture(scope="module")
def progress():
    return []


@pytest.fixture(scope="module")
def demo(tmp_path_factory, progress):
    rows = [{"text": f"def function_{n}(): " + f"return {n * n}; " * (1 + n * n % 23)} for n in range(60)]
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_demo(path, EXPERIMENT, lambda *told: progress.append(told))


def test_every_method_trains_the_same_documents_targets_and_steps(demo):
    assert [method.name for method in demo.methods] == [method.name for method in METHODS]
    for name in ("steps", "num_documents", "num_tokens", "num_targets"):
        assert len({getattr(method, name) for method in demo.methods}) == 1
    ours = demo.method("flattened")
    assert (ours.steps, ours.num_documents) == (2, 8)
    assert ours.num_targets == ours.num_tokens - ours.num_documents
    assert demo.ledger.packed == ours.num_tokens
    assert demo.ledger.tokens_in == demo.ledger.packed + demo.ledger.truncated


def test_flattened_and_padded_runs_have_equal_losses_and_the_control_another(demo):
    ours = demo.method("flattened")

    for name in ("padded_with_mask", "padded"):
        assert demo.loss_difference(ours, demo.method(name)) < 1e-5
        assert demo.method(name).validation_losses[0] == pytest.approx(ours.validation_losses[0], abs=1e-5)
        assert demo.method(name).validation_losses[1] is None
    assert demo.loss_difference(demo.method("packed"), demo.method("without_boundaries")) > 1e-5


def test_flattened_computes_no_padding_and_padded_does(demo):
    assert demo.method("flattened").slots_per_token == 1.0
    assert demo.method("padded").num_slots == demo.method("padded_with_mask").num_slots
    assert demo.method("padded").slots_per_token > demo.method("bucketed").slots_per_token > 1.0
    assert demo.corpus.padded_ratio > demo.corpus.bucketed_ratio > 1.0


def test_isolation_is_proved_on_the_row_that_is_drawn(demo):
    assert demo.isolation.is_proved
    documents = dict(demo.isolation.rows)["documents in the row that was tried"]
    tokens = sum(piece.num_tokens for piece in demo.picture.row)
    assert documents == f"{len(demo.picture.row)} ({tokens} tokens)"


def test_the_picture_shows_the_text_of_the_documents_it_draws(demo):
    assert len(demo.picture.batch) == 4
    assert all(
        piece.excerpt.startswith("def function_") for piece in (*demo.picture.batch, *demo.picture.row)
    )


def test_progress_rises_to_the_whole_work(progress, demo):
    done = [told[0] for told in progress]
    totals = {told[1] for told in progress[1:]}

    assert done == sorted(done)
    assert len(totals) == 1
    assert done[-1] == totals.pop()


def test_methods_that_trained_other_targets_cannot_be_compared():
    check_equal_work(FIGURES)
    with pytest.raises(LedgerError, match=r"num_targets .*packed 91"):
        check_equal_work(tuple(replace(m, num_targets=91) if m.name == "packed" else m for m in FIGURES))


def small_job(layout="flat", vocab_size=50):
    documents = Documents(tokens=np.arange(40, dtype=np.int32), offsets=np.arange(0, 41, 5, dtype=np.int64))
    return Job(
        layout=layout,
        order=make_order("random", documents.lengths, steps=2, max_length=96, seed=0),
        documents=documents,
        validation=documents,
        vocab_size=vocab_size,
        seed=0,
        settings=EXPERIMENT,
    )


def test_a_run_that_is_killed_is_told_in_a_sentence():
    worker = Worker("flattened", small_job())
    try:
        worker.wait_until_ready()
        os.kill(worker._process.pid, signal.SIGKILL)
        with pytest.raises(
            VarlenError, match="'flattened' was killed by the system, most likely for lack of memory"
        ):
            worker.request("step", 0)
    finally:
        worker.close()


def test_a_run_that_varlen_refuses_says_why():
    worker = Worker("flattened", small_job(vocab_size=10))
    try:
        with pytest.raises(VarlenError, match="can't be done: the batch holds token id"):
            worker.wait_until_ready()
    finally:
        worker.close()


def test_a_run_that_fails_brings_its_traceback():
    worker = Worker("flattened", small_job())
    try:
        worker.wait_until_ready()
        with pytest.raises(VarlenError, match=r"(?s)'flattened' failed.*IndexError"):
            worker.request("step", 7)
    finally:
        worker.close()


def test_closing_a_worker_ends_its_process():
    worker = Worker("flattened", small_job())
    worker.wait_until_ready()
    process = worker._process.pid

    worker.close()

    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{process}") and time.monotonic() < deadline:  # noqa: PTH110
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{process}")  # noqa: PTH110

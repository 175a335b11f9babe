"""The demo: layouts learn the same, only the control leaks, what it took is measured, and failures are told."""

import json
import os
import signal
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.demo_figures import METHODS as FIGURES

from varlen.batch.packed import IGNORE_INDEX
from varlen.errors import LedgerError, VarlenError
from varlen.train.demo.corpus import Documents
from varlen.train.demo.experiment import check_equal_work, run_demo
from varlen.train.demo.job import Job, current_bytes, now, peak_bytes, reset_peak
from varlen.train.demo.orders import ATTENTION, make_order, step_inputs
from varlen.train.demo.run import Run, add_gradients, mean_loss, small_llama
from varlen.train.demo.settings import METHODS, DemoSettings, ModelSettings
from varlen.train.demo.worker import Worker

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


EXPERIMENT = DemoSettings(
    steps=2,
    batch_documents=4,
    max_length=96,
    num_seeds=2,
    validation_documents=3,
    threads=1,
    model=ModelSettings(vocab_size=300, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24),
)


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

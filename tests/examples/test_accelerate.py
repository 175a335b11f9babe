"""The Accelerate example trains every document once, with the gradients of one by one, on any ranks."""

import shutil

import pytest
from tests.support.one_by_one import (
    EXAMPLES,
    GRADIENTS_JOB,
    assert_each_once,
    assert_gradients_of_first_step,
    ids_of,
    loss_and_gradients,
    python,
    seen_in,
)
from tests.support.ranks import as_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries about each other
PROGRAM = EXAMPLES / "accelerate_loop.py"


class Alone:
    """What the example asks an accelerator for."""

    process_index, num_processes = 0, 1


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import accelerate_loop

    return accelerate_loop


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two ranks stopped after 4 of 7 steps; gone on with by two ranks, and, from a copy, by one process."""
    folder = tmp_path_factory.mktemp("runs")
    begun = as_ranks(GRADIENTS_JOB, PROGRAM, folder / "gradients.pt", folder / "two", 4)
    before = seen_in(folder / "two")
    shutil.copytree(folder / "two", folder / "one")
    return folder, begun, before, as_ranks(PROGRAM, folder / "two"), python(PROGRAM, folder / "one")


@pytest.mark.soak
def test_every_document_is_trained_once_over_two_ranks_before_and_after_going_on(runs):
    folder, begun, before, ended, _ = runs

    assert_each_once(begun, before, seen_in(folder / "two"))
    assert "goes on after step 4 of 7" in ended


@pytest.mark.soak
def test_one_process_goes_on_with_the_steps_of_two(runs):
    folder, _, before, of_two, of_one = runs
    first, second = seen_in(folder / "one")

    assert of_one == of_two
    assert [line.split()[1] for line in of_one.splitlines() if line.startswith("step")] == ["5", "6", "7"]
    assert sorted(first + second) == list(range(300))
    assert second == before[1]


@pytest.mark.soak
def test_the_gradients_of_a_step_over_two_ranks_are_those_of_its_documents_one_by_one(runs, example):
    folder, begun, before, _, _ = runs
    loader = example.make_loader(folder / "two", Alone())

    assert_gradients_of_first_step(folder, begun, before, example.make_model(), loader)


def test_the_loss_of_the_batches_of_a_step_adds_up_to_the_mean_one_by_one(tmp_path, example):
    example.write_documents(tmp_path / "texts.jsonl")
    model = example.make_model()
    with example.make_loader(tmp_path, Alone()) as loader:
        batches = [next(loader) for _ in range(loader.micro_batches)]

    numbers = [int(n) for batch in batches for n in batch.document_ids]
    expected, _ = loss_and_gradients(model, ids_of(tmp_path / "texts.jsonl", numbers))

    assert len(batches) == 4
    assert float(sum(example.loss_of(model, batch) for batch in batches)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "settings", [{}, {"dispatch_batches": True}, {"split_batches": True, "even_batches": False}]
)
def test_prepare_hands_the_loader_back_as_it_is(settings, tmp_path, example):
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**settings))
    example.write_documents(tmp_path / "texts.jsonl")
    with example.make_loader(tmp_path, accelerator) as loader:
        before = loader.state_dict()

        assert accelerator.prepare(loader) is loader
        assert loader.state_dict() == before


def test_a_batch_without_targets_counts_for_nothing(tmp_path, example):
    import varlen as vl

    documents = [[1, 2, 3, 4], [5]]
    packing = vl.pack([4, 1], capacity=4)
    targets = [vl.collate(documents, packing, pack_ids=[pack]) for pack in range(packing.num_packs)]
    without = min(targets, key=lambda batch: batch.num_targets).replace(step_num_targets=3)
    model = example.make_model()

    loss = example.loss_of(model, without)
    loss.backward()

    assert without.num_targets == 0
    assert float(loss) == 0.0
    assert all(not p.grad.isnan().any() for p in model.parameters() if p.grad is not None)

"""`vl.losses`: TRL's own values and gradients on the same rows, however occurrences are divided into calls."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.support import tiny_families
from tests.support.forests import agents

import varlen as vl
from varlen.errors import SettingError
from varlen.runtime.forest_inputs import ForestInputs
from varlen.runtime.objective import Objective, called, weights_of_step


@pytest.fixture(autouse=True)
def quiet_trl(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


ROWS, LONGEST = 6, 9


def answers(seed=0):
    """Prompts with answers of several lengths: a tree, and the same as padded tensors."""
    made = np.random.default_rng(seed)
    prompts = [made.integers(0, 50, 5).tolist() for _ in range(3)]
    sizes = made.integers(1, LONGEST + 1, ROWS)
    rows = [prompts[n // 2] + made.integers(0, 50, size).tolist() for n, size in enumerate(sizes)]
    masks = [[0] * 5 + [1] * size for size in sizes]
    old = [(-2 + 0.3 * made.normal(size=len(row))).tolist() for row in rows]
    reference = [(-2 + 0.3 * made.normal(size=len(row))).tolist() for row in rows]
    advantages = made.normal(size=ROWS).tolist()
    columns = {"old_log_probs": old, "ref_log_probs": reference, "advantages": advantages}
    columns["chosen"] = [1, 0, 0, 1, 1, 0]
    forest = vl.fold(rows, columns, groups=[0, 0, 1, 1, 2, 2], loss_mask=masks)
    batch = vl.collate(forest, vl.pack_forest(forest, 40))
    mask = torch.zeros(ROWS, LONGEST, dtype=torch.float64)
    padded = {name: torch.zeros(ROWS, LONGEST, dtype=torch.float64) for name in ("old", "ref")}
    for n, size in enumerate(sizes):
        mask[n, :size] = 1
        padded["old"][n, :size] = torch.tensor(old[n][5:], dtype=torch.float64)
        padded["ref"][n, :size] = torch.tensor(reference[n][5:], dtype=torch.float64)
    return batch, mask, padded, torch.tensor(advantages, dtype=torch.float64)


def loss_within(function, *given):
    """The loss that a method of TRL's computes, before its metrics, which are missing here."""
    with pytest.raises((KeyError, AttributeError)) as ended:
        function(*given)
    frames = [entry.frame for entry in ended.traceback if entry.frame.code.raw is function.__code__]
    return frames[0].f_locals["loss"]


def by_trl(kind, mask, padded, advantages, log_probs, **more):
    """TRL's own GRPO loss, of log-probabilities that are given."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    settings = {
        **{"aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None},
        **{"importance_sampling_level": "token", "beta": 0.0, "loss_type": kind, "epsilon_low": 0.2},
        **{"epsilon_high": 0.28, "use_vllm": False, "current_gradient_accumulation_steps": 1},
        **{"_entropy_bonus_enabled": False, "max_completion_length": LONGEST, "_metrics": {}},
    }
    own = SimpleNamespace(**{**settings, **more})
    own.args = SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1)
    own.model, own.accelerator = (
        SimpleNamespace(training=True),
        SimpleNamespace(num_processes=1, gather=lambda x: x),
    )
    own._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None)
    ids = torch.zeros_like(mask, dtype=torch.long)
    inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask}
    inputs |= {
        "advantages": advantages,
        "old_per_token_logps": padded["old"],
        "ref_per_token_logps": padded["ref"],
    }
    return loss_within(GRPOTrainer._compute_loss, own, own.model, inputs | {"num_items_in_batch": mask.sum()})


CASES = {
    "grpo": (lambda batch: vl.losses.grpo(batch, clip=0.2, clip_high=0.28), {}),
    "grpo with a reference": (lambda batch: vl.losses.grpo(batch, clip_high=0.28, beta=0.3), {"beta": 0.3}),
    "dr_grpo": (lambda batch: vl.losses.grpo(batch, clip_high=0.28, over="constant", longest=LONGEST), {}),
    "dapo": (vl.losses.dapo, {}),
    "cispo": (lambda batch: vl.losses.cispo(batch, clip_high=1.1), {"epsilon_high": 1.1}),
    "grpo of sequences": (
        lambda batch: vl.losses.gspo(batch, clip=0.2, clip_high=0.28),
        {"importance_sampling_level": "sequence"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_trl(case):
    make, more = CASES[case]
    batch, mask, padded, advantages = answers()
    given = -2 + 0.2 * torch.randn(
        ROWS, LONGEST, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    theirs = given.clone().requires_grad_()
    wanted = by_trl(case.split()[0], mask, padded, advantages, theirs, **more)
    wanted.backward()

    loss = make(batch)
    value, gradient = called(loss, given[mask > 0], batch.to_torch().objective_columns())
    assert float(value) == pytest.approx(float(wanted.detach()), abs=1e-12)
    assert torch.allclose(gradient, theirs.grad[mask > 0], atol=1e-12, rtol=0)
    assert (theirs.grad[mask == 0] == 0).all()


def test_dpo_is_that_of_trl():
    from trl.trainer.dpo_trainer import DPOTrainer

    batch, mask, padded, _ = answers()
    given = -2 + 0.2 * torch.randn(
        ROWS, LONGEST, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    theirs = given.clone().requires_grad_()
    order = [0, 3, 4, 1, 2, 5]  # chosen answers, then those rejected
    reference = (padded["ref"] * mask).sum(-1)[order]
    own = SimpleNamespace(
        **{"aux_loss_enabled": False, "ld_alpha": None, "precompute_ref_logps": True, "beta": 0.1},
        **{"f_divergence_type": "reverse_kl", "loss_types": ["sigmoid"], "loss_weights": [1.0]},
        **{"use_weighting": False, "model": SimpleNamespace(training=True)},
        accelerator=SimpleNamespace(device="cpu"),
    )
    inputs = {
        "input_ids": torch.zeros(ROWS, LONGEST + 1, dtype=torch.long),
        "completion_mask": torch.cat([torch.zeros(ROWS, 1), mask[order]], 1),
        "ref_chosen_logps": reference[:3],
        "ref_rejected_logps": reference[3:],
    }
    model = lambda **_: SimpleNamespace(log_probs=(theirs * mask)[order])  # noqa: E731
    wanted = loss_within(DPOTrainer._compute_loss, own, model, inputs, False)
    wanted.backward()
    value, gradient = called(vl.losses.dpo(batch), given[mask > 0], batch.to_torch().objective_columns())
    assert float(value) == pytest.approx(float(wanted.detach()), abs=1e-12)
    assert torch.allclose(gradient, theirs.grad[mask > 0], atol=1e-12, rtol=0)


EVERY = {
    **{case: make for case, (make, _) in CASES.items()},
    "ppo": vl.losses.ppo,
    "reinforce": vl.losses.reinforce,
    "dpo": vl.losses.dpo,
}


@pytest.mark.parametrize("name", EVERY)
def test_calls_of_a_loss_s_own_scope_add_up_to_one_of_the_step(name):
    batch, *_ = answers()
    loss = EVERY[name](batch)
    inputs = ForestInputs(batch)
    occurrences = inputs.occurrences(torch.device("cpu"))
    losses = 2 + 0.2 * torch.rand(
        occurrences.count, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    wanted, value = weights_of_step(loss, "step", losses, occurrences)
    if loss.scope == "target":
        objective = Objective(loss, occurrences)
        found = torch.zeros_like(losses)
        for first in range(0, len(losses), 7):
            numbers = np.arange(first, min(first + 7, len(losses)))
            found[numbers] = objective.weights(losses[numbers], numbers)
        total = float(torch.stack(objective.values).sum())
    else:
        found, total = weights_of_step(loss, loss.scope, losses, occurrences)
    assert total == pytest.approx(value, abs=1e-12)
    assert torch.allclose(found, wanted, atol=1e-12, rtol=0)


def test_distillation_draws_the_policy_to_its_teacher():
    rows, masks = agents()
    made = np.random.default_rng(0)
    teacher = [made.normal(size=len(row)) - 3 for row in rows]
    forest = vl.fold(rows, {"teacher_log_probs": teacher}, loss_mask=masks)
    batch = vl.collate(forest, vl.pack_forest(forest, 300))
    loss = vl.losses.distillation(batch)
    log_probs = torch.full((batch.num_targets,), -3.0, dtype=torch.float64)
    value, gradient = called(loss, log_probs, batch.to_torch().objective_columns())
    advantages = torch.as_tensor(batch.columns["teacher_log_probs"]) + 3
    assert torch.allclose(gradient, -advantages / batch.num_targets)
    assert float(value) == pytest.approx(float(-advantages.mean()))
    stats = vl.SliceEngine(tiny_families.family("llama", torch.float32).eval(), 9).step(
        batch, loss=loss, scope="target"
    )
    assert np.isfinite(stats.loss)


def test_rewards_are_compared_with_those_of_the_others():
    found = vl.losses.leave_one_out([1.0, 0.0, 4.0, 7.0], ["a", "a", "a", "b"])
    assert found.tolist() == [1.0 - 2.0, 0.0 - 2.5, 4.0 - 0.5, 0.0]


def test_columns_and_settings_that_are_missing_are_named():
    forest = vl.fold([[1, 2], [1, 3]], columns={"chosen": [1, 1], "ref_log_probs": [0.0, 0.0]})
    batch = vl.collate(forest, vl.pack_forest(forest, 3)).to_torch()
    log_probs = torch.full((2,), -1.0)
    with pytest.raises(
        SettingError, match="reads the column advantages, and the batch has chosen, ref_log_probs"
    ):
        vl.losses.grpo(batch)(log_probs, batch.objective_columns())
    with pytest.raises(SettingError, match="1 of 1 groups are otherwise"):
        vl.losses.dpo(batch)(log_probs, batch.objective_columns())
    for over, longest in (("words", None), ("constant", None), ("rows", 9)):
        with pytest.raises(SettingError, match=r"over must be .*, and longest goes with the last"):
            vl.losses.grpo(batch, over=over, longest=longest)

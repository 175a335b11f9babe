"""`SliceEngine` on trees, and objectives: gradients are those of every row alone, however trees are cut."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support import tiny_families
from tests.support.forests import agents, row_by_row, rows_with_prefixes
from tests.support.rarely import examples, mostly
from tests.support.tiny_families import SETTINGS, Wide

import varlen as vl
from varlen.batch.tree_batch import segments_of
from varlen.errors import DocumentsError, ModelError, PlanError, SettingError
from varlen.plan.one_gpu import cut_tree, one_gpu_tree_plan
from varlen.step_plan import BACKWARD, FORWARD

SMALL = {"num_hidden_layers": 2}


def columns_of(rows, seed=0):
    made = np.random.default_rng(seed)
    return {
        "advantage": [made.normal(size=len(row)) for row in rows],
        "old": [-4 + 0.3 * made.normal(size=len(row)) for row in rows],
    }


def flat_columns(rows, masks, columns, groups):
    """Columns of all occurrences, as an objective gets them."""
    at = [(r, p) for r, row in enumerate(rows) for p in range(1, len(row)) if masks[r][p]]
    found = {name: torch.tensor([values[r][p] for r, p in at]) for name, values in columns.items()}
    owners = torch.tensor([r for r, _ in at])
    starts = [n for n, (r, _) in enumerate(at) if n == 0 or at[n - 1][0] != r]
    return {
        **found,
        "row": owners,
        "group": torch.tensor([groups[r] for r, _ in at]),
        "position": torch.tensor([p for _, p in at]),
        "row_offsets": torch.tensor([*starts, len(at)]),
    }


def clipped(log_probs, columns):
    """GRPO's sum over targets."""
    ratio = torch.exp(log_probs - columns["old"])
    return (
        -torch.minimum(ratio * columns["advantage"], ratio.clamp(0.9, 1.1) * columns["advantage"]).sum() / 7
    )


def means_of_rows(log_probs, columns):
    sizes = columns["row_offsets"].diff()
    owners = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    sums = torch.zeros(len(sizes), dtype=log_probs.dtype).index_add(
        0, owners, log_probs * columns["advantage"]
    )
    return sums / sizes


def of_groups(log_probs, columns):
    """Couples the rows of a group."""
    assert len(set(columns["group"].tolist())) == 1
    return means_of_rows(log_probs, columns).exp().sum().log()


def of_step(log_probs, columns):
    """Couples everything, by a normaliser that is differentiated too."""
    means = means_of_rows(log_probs, columns)
    return -means.sum() / (means.std() + 1) + 0.01 * (log_probs - columns["old"]).square().mean()


def group_by_group(log_probs, columns):
    total = 0
    for group in sorted(set(columns["group"].tolist())):
        here = columns["group"] == group
        mine = {name: values[here] for name, values in columns.items() if name != "row_offsets"}
        begins = torch.cat([torch.tensor([True]), mine["row"].diff() != 0]).nonzero().flatten()
        mine["row_offsets"] = torch.cat([begins, here.sum()[None]])
        total = total + of_groups(log_probs[here], mine)
    return total


OBJECTIVES = {"target": (clipped, clipped), "group": (of_groups, group_by_group), "step": (of_step, of_step)}
"""By scope: what the engine is given, and the same over all occurrences at once."""


def check(name, rows, masks, groups, capacities, slices, scope, recompute="full", batch_of=None, **more):
    columns = columns_of(rows)
    forest = vl.fold(rows, columns, groups, masks)
    given_to, whole = OBJECTIVES[scope]
    with Wide():
        model = tiny_families.family(name, **more).eval()
        model.set_attn_implementation("eager")
        wanted = whole(row_by_row(model, rows, masks), flat_columns(rows, masks, columns, groups))
        wanted.backward()
        right = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        for capacity, slice_tokens in zip(capacities, slices, strict=True):
            batch = vl.collate(forest, vl.pack_forest(forest, capacity)) if batch_of is None else batch_of()
            model.zero_grad(set_to_none=True)
            engine = vl.SliceEngine(model, slice_tokens, recompute=recompute)
            stats = engine.step(batch, loss=given_to, scope=scope)
            assert abs(stats.loss - float(wanted.detach())) < 1e-12
            assert stats.num_targets == sum(sum(mask[1:]) for mask in masks)
            for key, p in model.named_parameters():
                if key in right:
                    off = float((p.grad - right[key]).norm() / right[key].norm().clamp_min(1e-9))
                    assert off < 1e-11, (key, capacity, slice_tokens)


@pytest.mark.parametrize("scope", OBJECTIVES)
@pytest.mark.parametrize("name", mostly(["llama", "mistral", "gpt_oss", "llama4_text"], ["llama", *SETTINGS]))
def test_any_objective_of_a_tree_has_the_gradients_of_rows_alone(name, scope):
    rows, masks = agents()
    groups = [number % 3 for number in range(len(rows))] if scope == "group" else [0] * len(rows)
    longest = max(map(len, rows))
    check(name, rows, masks, groups, (300, 300, longest), (300, 7, 11), scope)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_what_is_recomputed_and_how_trees_are_cut_changes_nothing(name, recompute):
    rows, masks = agents(seed=5, rollouts=4, turns=4)
    slices = (1, 2, 3, 5, 9, 17, 40)
    check(name, rows, masks, [0] * len(rows), [400] * len(slices), slices, "target", recompute)


@given(rows=rows_with_prefixes(), slice_tokens=st.integers(1, 20), extra=st.integers(0, 30), data=st.data())
@examples(12, 60)
def test_random_forests_are_trained_exactly(rows, slice_tokens, extra, data):
    rows = [row for row in rows if row]
    assume(sum(map(len, rows)) > len(rows))
    masks = [data.draw(st.lists(st.integers(0, 1), min_size=len(row), max_size=len(row))) for row in rows]
    assume(any(any(mask[1:]) for mask in masks))
    assume(len([mask for mask in masks if any(mask[1:])]) > 1)  # one mean has no spread
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    scope = data.draw(st.sampled_from(list(OBJECTIVES)))
    name = data.draw(st.sampled_from(["llama", "mistral"]))
    capacity = max(map(len, rows)) + extra
    check(name, rows, masks, groups, [capacity], [slice_tokens], scope)


def test_without_an_objective_each_occurrence_counts_alike_and_log_probabilities_are_tempered():
    rows, masks = agents()
    forest = vl.fold(rows, loss_mask=masks)
    batch = vl.collate(forest, vl.pack_forest(forest, 300))
    with Wide():
        model = tiny_families.family("gemma3_text").eval()
        model.set_attn_implementation("eager")
        for temperature in (1.0, 0.7):
            model.zero_grad(set_to_none=True)
            found = []
            for row, mask in zip(rows, masks):
                at = [p for p in range(1, len(row)) if mask[p]]
                logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0] / temperature
                found.append(torch.log_softmax(logits, -1)[[p - 1 for p in at], [row[p] for p in at]])
            wanted = -torch.cat(found).mean()
            wanted.backward()
            right = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
            model.zero_grad(set_to_none=True)
            stats = vl.SliceEngine(model, 8).step(batch, temperature=temperature)
            assert abs(stats.loss - float(wanted.detach())) < 1e-12
            for key, gradient in right.items():
                off = model.get_parameter(key).grad - gradient
                assert float(off.norm()) < 1e-11 * max(1.0, float(gradient.norm())), key


@pytest.mark.parametrize("scope", OBJECTIVES)
def test_objectives_serve_documents_that_share_nothing(scope):
    """Documents longer than a slice, and groups of them."""
    made = np.random.default_rng(0)
    rows = [made.integers(0, 60, size).tolist() for size in (23, 4, 9, 17, 1, 6)]
    masks = [[int(made.random() > 0.3) for _ in row] for row in rows]
    masks[4] = [0]
    groups = [5, 5, 2, 2, 9, 9]
    columns = columns_of(rows)

    def packed():
        packing = vl.pack(list(map(len, rows)), 60, groups=groups)
        batch = vl.collate(rows, packing, loss_mask=masks, columns=columns)
        assert batch.document_ids.tolist() == sorted(
            batch.document_ids.tolist()
        )  # so rows are in their order
        return batch

    check("llama", rows, masks, groups, (40, 40), (100, 5), scope, batch_of=packed)


@given(rows=rows_with_prefixes(), slice_tokens=st.integers(1, 12))
@examples(60)
def test_slices_of_a_tree_keep_to_one_path_and_run_after_what_they_continue(rows, slice_tokens):
    assume(any(rows))
    forest = vl.fold([[7, *row] for row in rows])
    ends, positions = forest.subtree_end.astype(np.int64), forest.position_ids.astype(np.int64)
    tree = segments_of(ends[None], positions[None], np.ones((1, len(ends)), bool))
    slices = cut_tree(tree, slice_tokens)
    assert [start for start, *_ in slices] == [0, *(stop for _, stop, _ in slices[:-1])]
    assert slices[-1][1] == forest.num_tokens
    for start, stop, parent in slices:
        assert 0 < stop - start <= slice_tokens
        before = [k for k in range(start) if start < ends[k]]
        assert all(stop <= ends[k] for k in before)  # all of its rows see all of the path before it
        assert parent == (
            -1 if not before else next(n for n, s in enumerate(slices) if s[0] <= before[-1] < s[1])
        )

    plan, parents = one_gpu_tree_plan([tree], slice_tokens)
    forward, backward, has_run, is_done = 0, 0, [], set()
    for task in plan.tasks.tolist():
        if task == FORWARD:
            parent = parents[forward]
            assert parent < 0 or (parent in has_run and parent not in is_done)
            has_run.append(forward)
            forward += 1
        else:
            assert task == BACKWARD
            start = plan.backward.starts[backward]
            one = next(n for n in has_run if plan.forward.starts[n] == start)
            children = [n for n in range(plan.forward.num_micropacks) if parents[n] == one]
            assert set(children) <= is_done
            is_done.add(one)
            backward += 1
    assert len(is_done) == plan.forward.num_micropacks


def test_one_path_is_alive():
    """Keys and values are kept for the longest path, and not for the tree."""
    trunk, made = list(range(30)), np.random.default_rng(0)
    rows = [[*trunk, branch, *made.integers(0, 60, 29).tolist()] for branch in range(20)]
    forest = vl.fold(rows)
    batch = vl.collate(forest, vl.pack_forest(forest, forest.num_tokens))
    model = tiny_families.family("llama", torch.float32).eval()
    widths = []
    from varlen.runtime.tree_slices import TreeCache

    real = TreeCache.write

    def noted(cache, *given):
        real(cache, *given)
        widths.extend(pair[0].shape[2] for pair in cache.pairs.values())

    TreeCache.write = noted
    try:
        vl.SliceEngine(model, 10).step(batch)
    finally:
        TreeCache.write = real
    assert forest.num_tokens == 630
    assert max(widths) <= 60


LLAMA = {"num_hidden_layers": 1}


@pytest.fixture(scope="module")
def small():
    forest = vl.fold([[1, 2, 3, 4], [1, 2, 5, 6]], columns={"w": [[1.0] * 4] * 2})
    model = tiny_families.family("llama", torch.float32).eval()
    return model, vl.collate(forest, vl.pack_forest(forest, 8))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda log_probs, columns: log_probs, r"returned a tensor of shape \[6\]; it must return a scalar"),
        (lambda log_probs, columns: 1.0, "returned float; it must return a scalar tensor"),
        (
            lambda log_probs, columns: (1j * log_probs).sum(),
            "returned a complex number; it must return a scalar",
        ),
        (lambda log_probs, columns: log_probs.detach().sum(), "has no graph to its log-probabilities"),
        (
            lambda log_probs, columns: columns["w"].clone().requires_grad_().sum(),
            "doesn't depend on the log-prob",
        ),
    ],
)
@pytest.mark.parametrize("scope", ["target", "step"])
def test_objectives_without_a_scalar_or_a_graph_are_refused_and_leave_no_gradient(small, loss, words, scope):
    model, batch = small
    model.zero_grad(set_to_none=True)
    with pytest.raises(SettingError, match=words) as refused:
        vl.SliceEngine(model).step(batch, loss=loss, scope=scope)
    assert "\n" not in str(refused.value)
    assert all(p.grad is None for p in model.parameters())


def test_settings_and_batches_that_a_step_of_trees_doesnt_take(small):
    model, batch = small
    engine = vl.SliceEngine(model)
    with pytest.raises(SettingError, match=r'scope=\'row\'; it must be "target", "group" or "step"'):
        engine.step(batch, loss=clipped, scope="row")
    with pytest.raises(SettingError, match="loss=str; it must be a function"):
        engine.step(batch, loss="grpo")
    with pytest.raises(SettingError, match="temperature=0; it must be a number above 0"):
        engine.step(batch, temperature=0)
    with pytest.raises(PlanError, match="makes its plan by itself"):
        engine.step(batch, object())
    with pytest.raises(SettingError, match='offload="kv"'):
        vl.SliceEngine(model, offload="kv").step(batch)
    with pytest.raises(KeyError, match="nothing"):
        engine.step(batch, loss=lambda log_probs, columns: columns["nothing"].sum())
    forest = vl.fold([[1, 2]], loss_mask=[[0, 0]])
    with pytest.raises(DocumentsError, match="none of 2 tokens has a target"):
        engine.step(vl.collate(forest, vl.pack_forest(forest, 2)))
    forest = vl.fold([[1, 999]])
    with pytest.raises(DocumentsError, match="token id 999, and the model knows 0 to"):
        engine.step(vl.collate(forest, vl.pack_forest(forest, 2)))
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 3}
    scaled = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, **factors}
    other = tiny_families.family("llama", torch.float32, rope_parameters=scaled)
    forest = vl.fold([[1, 2], [1, 3, 4, 5]])
    with pytest.raises(ModelError, match="Fold them apart"):
        vl.SliceEngine(other).step(vl.collate(forest, vl.pack_forest(forest, 8)))
    with pytest.raises(SettingError, match=r'scope=\'row\'; it must be "target", "group" or "step"'):
        engine.step(batch, scope="row")
    for run in (engine.step, engine.evaluate):
        with pytest.raises(SettingError, match="a batch of trees has no documents"):
            run(batch, document_losses=True)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(SettingError, match='weighting="document" is of documents'):
        vl.SliceEngine(model, weighting="document").step(batch)
    vl.SliceEngine(model, weighting="document").step(batch, loss=lambda log_probs, columns: log_probs.sum())


def test_an_evaluation_of_trees_gives_log_probabilities_of_occurrences():
    rows, masks = agents()
    forest = vl.fold(rows, loss_mask=masks)
    model = tiny_families.family("llama", torch.float32).eval()
    model.set_attn_implementation("eager")
    alone = row_by_row(model, rows, masks)
    for capacity in (300, max(map(len, rows))):
        batch = vl.collate(forest, vl.pack_forest(forest, capacity))
        found = vl.SliceEngine(model, 7).evaluate(batch, log_probs=True)
        assert torch.allclose(found.log_probs.float(), alone, atol=1e-5)
        assert abs(found.loss + float(alone.detach().mean())) < 1e-5
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("scope", OBJECTIVES)
def test_an_objective_sees_one_dtype_in_every_scope_and_may_overwrite_what_it_is_given(small, scope):
    model, batch = small
    dtypes = set()

    def objective(log_probs, columns):
        dtypes.add(log_probs.dtype)
        columns["w"].mul_(2)
        return log_probs.mul_(columns["w"]).sum()

    documents = vl.collate([[1, 2, 3, 4]], vl.pack([4], 4), columns={"w": [[1.0] * 4]})
    for given_to in (batch, batch.to_torch(), documents, documents.to_torch()):
        found = []
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            found.append(vl.SliceEngine(model, 3).step(given_to, loss=objective, scope=scope).loss)
        assert (
            found[0]
            == found[1]
            == pytest.approx(
                2 * vl.SliceEngine(model).step(given_to, loss=lambda log_probs, _: log_probs.sum()).loss
            )
        )
    assert dtypes == {torch.float32}
    model.zero_grad(set_to_none=True)


@pytest.mark.filterwarnings("error:engine.step adds to gradients")
def test_objectives_add_up_over_steps_and_temperatures_are_of_numpy_too(small):
    model, batch = small
    model.zero_grad(set_to_none=True)
    engine = vl.SliceEngine(model)
    for _ in range(2):
        engine.step(
            batch, loss=lambda log_probs, _: log_probs.sum(), scope="target", temperature=np.float32(0.5)
        )
    model.zero_grad(set_to_none=True)


def test_columns_of_documents_may_be_tensors_of_any_dtype(small):
    model, _ = small
    documents = vl.collate([[1, 2, 3, 4]], vl.pack([4], 4), columns={"w": [[1.0] * 4]}).to_torch()
    for column in (torch.ones(1, 4, dtype=torch.bfloat16), torch.ones(1, 4, requires_grad=True)):
        given_to = dataclasses.replace(documents, columns={"w": column})
        vl.SliceEngine(model).step(given_to, loss=lambda log_probs, columns: (log_probs * columns["w"]).sum())
        assert column.grad is None
    model.zero_grad(set_to_none=True)


def test_columns_put_into_a_batch_by_hand_must_be_beside_its_targets(small):
    model, batch = small
    documents = vl.collate([[1, 2, 3, 4]], vl.pack([4], 4), columns={"w": [[1.0] * 4]})
    for given_to, column, seen in (
        (batch, torch.ones(3), r"\[3\], and this batch has columns of shape \[6\]"),
        (batch, 1.0, r"\[\], and this batch"),
        (documents, torch.ones(4), r"\[4\], and this batch has columns of shape \[1, 4\]"),
    ):
        other = dataclasses.replace(given_to, columns={"w": column})
        with pytest.raises(DocumentsError, match=r"columns\['w'\] is of shape " + seen):
            vl.SliceEngine(model).step(other, loss=clipped, scope="target")
    assert all(p.grad is None for p in model.parameters())


def test_a_step_of_no_targets_is_refused_and_a_function_needs_no_weighting(small):
    model, batch = small
    documents = vl.collate([[1, 2, 3, 4]], vl.pack([4], 4), step_num_targets=9)
    for given_to in (batch, documents):
        none = dataclasses.replace(given_to, step_num_targets=0)
        with pytest.raises(SettingError, match=r"step_num_targets is 0, and the batch has [36] targets"):
            vl.SliceEngine(model).step(none)
    engine = vl.SliceEngine(model, weighting="document")
    engine.step(documents, loss=lambda log_probs, columns: log_probs.sum())
    model.zero_grad(set_to_none=True)

"""`vl.fold`: each shared prefix once, every target of every row, and what a token sees."""

import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles import pack_fold as oracle
from tests.support.forests import rows_with_prefixes, split
from tests.support.rarely import examples

import varlen as vl
from varlen import jit
from varlen.errors import DocumentsError, SettingError
from varlen.pack import kernels_fold


@pytest.mark.parametrize("is_compiled", [True, False])
@given(data=st.data())
@examples(60)
def test_a_forest_is_that_of_the_oracle(is_compiled, data):
    rows = data.draw(rows_with_prefixes())
    number = st.integers(0, 2)
    groups = data.draw(st.lists(number, min_size=len(rows), max_size=len(rows)))
    apart = [data.draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row))) for row in rows]
    uses_identity = data.draw(st.booleans())
    token = jit._in_python.set(not is_compiled)
    try:
        found = vl.fold(
            rows, columns={"apart": apart}, groups=groups, identity=["apart"] if uses_identity else []
        )
    finally:
        jit._in_python.reset(token)
    wanted = oracle.fold(rows, groups, apart if uses_identity else None)

    assert found.token_ids.tolist() == wanted.token_ids
    assert found.position_ids.tolist() == wanted.position_ids
    assert found.subtree_end.tolist() == wanted.subtree_end
    assert split(found.row_tokens, rows) == wanted.row_tokens
    assert [found.tokens_of(row).tolist() for row in range(len(rows))] == wanted.row_tokens
    assert found.num_segments == wanted.num_segments
    assert found.ledger.merged_tokens == wanted.merged_tokens
    assert found.ledger.tokens_in == sum(map(len, rows))
    for query, seen in enumerate(wanted.ancestors):  # the rule that every mask is made of
        assert {key for key in range(query + 1) if query < found.subtree_end[key]} == seen
    if uses_identity:
        flat = [value for row in apart for value in row]
        assert (found.token_columns["apart"][found.row_tokens] == flat).all()
    check_segments(found)


def check_segments(forest: vl.Forest) -> None:
    """Segments are runs between forks: each token but a segment's first follows the one before it."""
    offsets, parents = forest.segment_offsets, forest.segment_parents
    assert offsets[0] == 0
    assert offsets[-1] == forest.num_tokens
    for one, (begin, end) in enumerate(zip(offsets.tolist(), offsets[1:].tolist())):
        assert begin < end
        assert len(set(forest.subtree_end[begin:end].tolist())) == 1
        assert (np.diff(forest.position_ids[begin:end]) == 1).all()
        parent = parents[one]
        assert parent < one
        assert forest.segment_depths[one] == (0 if parent < 0 else forest.segment_depths[parent] + 1)
        before = -1 if parent < 0 else forest.position_ids[offsets[parent + 1] - 1]
        assert forest.segment_positions[one] == before + 1
    followed = parents[parents >= 0]
    assert all((followed == one).sum() >= 2 for one in set(followed.tolist()))
    assert (forest.tree_offsets == [*offsets[:-1][parents < 0], forest.num_tokens]).all()


@given(rows=rows_with_prefixes(), data=st.data())
@examples(40)
def test_kernels_are_their_references(rows, data):
    """Each on what the kernel before it made."""
    ids = np.array([token for row in rows for token in row], np.int32)
    offsets = np.cumsum([0, *map(len, rows)])
    identity = np.array(
        data.draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids))), np.uint8
    )[:, None]
    groups = np.array(
        data.draw(st.lists(st.integers(0, 1), min_size=len(rows), max_size=len(rows))), np.int64
    )
    made = {}
    for name, module in (("kernel", kernels_fold), ("oracle", oracle)):
        segments, last = np.zeros((2 * len(rows), 6), np.int64), np.zeros(len(rows), np.int32)
        table = np.full(1 << 8, -1, np.int32)
        count = module.grow(ids, identity, offsets, groups, table, segments, last)
        segments, order = segments[:count], np.zeros(count, np.int64)
        by_first = np.argsort(segments[:, kernels_fold.FIRST], kind="stable")
        if count:
            module.depth_first(segments, by_first, order)
        number = np.full(count + 1, -1, np.int32)
        number[order] = np.arange(count)
        row, start, stop, parent, *_ = segments[order].T
        parents, bounds = number[np.maximum(parent, -1)], np.concatenate([[0], np.cumsum(stop - start)])
        depths = np.zeros(count, np.int32)
        tokens = [np.zeros(bounds[-1], np.int32) for _ in range(3)]
        starts = np.ascontiguousarray(start)
        module.write_tokens(ids, offsets[row], starts, bounds, parents, depths, *tokens)
        places, targets = np.zeros(len(ids), np.int32), np.zeros(len(ids), np.int64)
        module.write_places(offsets, number[last], starts, bounds, parents, places)
        masks = [identity[:, 0].copy(), np.zeros(0, np.uint8)]
        found = [module.find_targets(offsets, mask, targets) for mask in masks]
        made[name] = [segments, last, order, depths, *tokens, places, targets, found]
    for ours, theirs in zip(made["kernel"], made["oracle"]):
        assert np.array_equal(ours, theirs)


@given(rows=rows_with_prefixes(), data=st.data())
@examples(60)
def test_no_target_is_lost_and_each_has_the_values_of_its_own_row(rows, data):
    mask = [data.draw(st.lists(st.integers(0, 1), min_size=len(row), max_size=len(row))) for row in rows]
    is_masked = data.draw(st.booleans())
    value = [[100 * number + position for position in range(len(row))] for number, row in enumerate(rows)]
    each = [float(number) for number in range(len(rows))]
    found = vl.fold(rows, columns={"value": value, "each": each}, loss_mask=mask if is_masked else None)

    wanted = [
        (number, position)
        for number, row in enumerate(rows)
        for position in range(1, len(row))
        if not is_masked or mask[number][position]
    ]
    assert found.columns["value"].tolist() == [100 * number + position for number, position in wanted]
    assert found.columns["each"].tolist() == [number for number, _ in wanted]
    assert found.target_rows.tolist() == [number for number, _ in wanted]
    predicted, after = found.row_tokens[found.targets], found.row_tokens[found.targets - 1]
    assert found.token_ids[predicted].tolist() == [rows[number][position] for number, position in wanted]
    assert found.position_ids[predicted].tolist() == [position for _, position in wanted]
    assert found.position_ids[after].tolist() == [position - 1 for _, position in wanted]
    assert found.ledger.targets == found.ledger.targets_in == found.num_targets == len(wanted)


@given(rows=rows_with_prefixes())
@examples(20)
def test_rows_in_every_form_give_the_same_forest(rows):
    offsets, flat = (
        np.cumsum([0, *map(len, rows)]),
        np.array([token for row in rows for token in row], np.int32),
    )
    weights = [[token / 2 for token in row] for row in rows]
    kinds = {
        "lists": (rows, weights),
        "arrays": ([np.array(row, np.int64) for row in rows], [np.array(one) for one in weights]),
        "tensors": ([torch.tensor(row) for row in rows], [torch.tensor(one).double() for one in weights]),
        "flat": ((flat, offsets), flat / 2),
        "part": ((np.append([7, 7], flat), offsets + 2), (np.append([0.5, 0.5], flat / 2), offsets + 2)),
        "arrow": (pa.array(rows, pa.list_(pa.int32())), pa.array(weights, pa.list_(pa.float64()))),
        "chunks": (
            pa.chunked_array([pa.array([row], pa.list_(pa.int32())) for row in rows], pa.list_(pa.int32())),
            pa.chunked_array(
                [pa.array([one], pa.list_(pa.float64())) for one in weights], pa.list_(pa.float64())
            ),
        ),
    }
    first = vl.fold(rows, columns={"half": weights})
    for name, (given_rows, given_weights) in kinds.items():
        found = vl.fold(given_rows, columns={"half": given_weights})
        assert found.token_ids.tolist() == first.token_ids.tolist(), name
        assert found.columns["half"].tolist() == first.columns["half"].tolist(), name
        assert found.ledger == first.ledger, name


def test_values_of_several_numbers_and_names_of_groups():
    routes = [np.array([[0, 1], [2, 3]]), np.array([[0, 1], [2, 4]]), np.array([[0, 1], [2, 3]])]
    forest = vl.fold([[5, 6]] * 3, columns={"routes": routes}, groups=["b", "a", "b"], identity=["routes"])
    assert forest.token_columns["routes"].tolist() == [[0, 1], [2, 3], [0, 1], [2, 4]]
    assert forest.columns["routes"].tolist() == [[2, 3], [2, 4], [2, 3]]
    assert forest.row_groups.tolist() == [1, 0, 1]
    assert vl.fold([[5, 6]] * 3, columns={"routes": routes}, identity=["routes"]).num_tokens == 3
    assert vl.fold([[5], [6]], groups=[7, -2]).row_groups.tolist() == [7, -2]


def test_numbers_are_told_apart_bit_by_bit():
    nan, zero = [[float("nan")]] * 2, [[0.0], [-0.0]]
    assert vl.fold([[1]] * 2, columns={"one": nan}, identity=["one"]).num_tokens == 1
    assert vl.fold([[1]] * 2, columns={"one": zero}, identity=["one"]).num_tokens == 2


def test_thousands_of_rows_without_any_prefix_are_folded_at_once():
    """A search among all branches of a fork would take minutes."""
    rows = np.arange(300_000, dtype=np.int32)
    forest = vl.fold((np.repeat(rows, 2), np.arange(0, 600_001, 2)))
    assert (forest.num_trees, forest.num_tokens) == (300_000, 600_000)
    assert forest.segment_depths.max() == 0
    deep = vl.fold([list(range(length, 0, -1)) for length in range(1, 300)])
    assert deep.num_tokens == 299 * 150


def test_a_long_chain_of_forks_is_no_recursion():
    rows = [[0] * length + [1] for length in range(1, 3000)]
    forest = vl.fold(rows)
    assert forest.num_tokens == 2999 + 2999
    assert forest.segment_depths.max() == 2998


def test_a_forest_is_read_only_here_and_in_another_process():
    forest = vl.fold([[1, 2], [1, 3]], columns={"a": [0.5, 1.5]})
    for one in (forest, pickle.loads(pickle.dumps(forest))):
        assert one.columns["a"].tolist() == [0.5, 1.5]
        for array in (one.token_ids, one.row_tokens, one.targets, one.columns["a"]):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0
    assert repr(forest) == "Forest(2 rows in 1 tree, 4 tokens folded to 3, 1.33x fewer, 2 targets)"


def test_a_value_for_each_row_stays_so_where_there_are_as_many_tokens():
    for per_row in ([0.5, 0.7, 0.9], np.array([0.5, 0.7, 0.9]), pa.array([0.5, 0.7, 0.9])):
        forest = vl.fold([[1, 2, 3], [], []], columns={"a": per_row}, loss_mask=[1, 0, 0])
        assert forest.columns["a"].tolist() == [0.5, 0.5]
    flat = vl.fold((np.arange(3), np.array([0, 3, 3, 3])), columns={"a": np.array([0.5, 0.7, 0.9])})
    assert flat.columns["a"].tolist() == [0.7, 0.9]


def test_columns_of_any_byte_order_empty_rows_among_wide_ones_and_names_from_a_generator():
    wide = [[], np.array([[1, 2], [3, 4]]), torch.zeros(0, 2)]
    swapped = np.array([5, 6, 7], ">i4")
    forest = vl.fold([[], [1, 2], []], {"wide": wide, "swapped": swapped}, identity=iter(["wide"]))
    assert forest.columns["wide"].tolist() == [[3, 4]]
    assert forest.columns["swapped"].tolist() == [6]
    assert forest.columns["swapped"].dtype.isnative
    assert forest.token_columns["wide"].tolist() == [[1, 2], [3, 4]]


def test_folding_leaves_what_it_was_given_writable():
    tokens, offsets, weights = np.array([1, 2, 3], np.int32), np.array([0, 3]), np.array([0.5, 1.5, 2.5])
    vl.fold((tokens, offsets), columns={"w": weights}, loss_mask=np.ones(3))
    for array in (tokens, offsets, weights):
        array[0] = 0


@pytest.mark.parametrize(
    ("rows", "more", "words"),
    [
        ([[1, -2]], {}, r"row 0 has the token id -2 at position 1; .* \(1 of 2 tokens are outside\)"),
        ([[1], [2, 2**31]], {}, r"row 1 has the token id 2,147,483,648 at position 1"),
        ([[1.5]], {}, "rows must be whole numbers, got dtype float64"),
        (
            [[1, 2], [3]],
            {"columns": {"a": [[1, 2], [3, 4]]}},
            r"columns\['a'\]: row 1 has 2 values for 1 tokens",
        ),
        (
            [[1, 2], [3]],
            {"columns": {"a": [[1, 2]]}},
            r"columns\['a'\]: 1 rows of values for 2 rows of tokens",
        ),
        ([[1, 2], [3]], {"columns": {"a": [1.0] * 5}}, r"columns\['a'\] has 5 values for 3 tokens in 2 rows"),
        ([[1, 2]], {"columns": {"a": ["x", "y"]}}, r"columns\['a'\]"),
        ([[1, 2]], {"loss_mask": [[1]]}, "loss_mask: row 0 has 1 values for 2 tokens"),
        ([[1, 2]], {"columns": {"a": [1.0]}, "identity": ["b"]}, r"identity names 'b', .* \('a'\)"),
        ([[1, 2]], {"groups": [1, 2]}, "groups must be a whole number or a name for each of the 1 rows"),
        ([[1, 2], [1]], {"groups": [1, None]}, "groups must all be numbers, or all be names"),
        (
            [[1], [1]],
            {"groups": np.array([1, 2**63], np.uint64)},
            "row 1 has the group 9,223,372,036,854,775,808",
        ),
        (None, {}, "rows must be lists of token ids, one a row; got NoneType"),
        (
            [[1, 2]],
            {"columns": {"a": 1.0}},
            r"columns\['a'\] must have a value for each token, .*; got float",
        ),
        ([[1, 2]], {"columns": {"a": pa.array([None], pa.float32())}}, r"columns\['a'\] hold 1 nulls"),
        ([[1, 2]], {"columns": {"a": [1.0]}, "identity": [["a"]]}, r"identity names \['a'\], which is none"),
        (
            [[1], [1]],
            {"columns": {"a": [np.zeros((1, 2)), np.zeros((1, 3))]}},
            r"a token of row 1 has values of shape \[3\], and one of row 0 of \[2\]",
        ),
    ],
)
def test_what_cant_be_folded_is_named_by_row_and_position(rows, more, words):
    with pytest.raises(DocumentsError, match=words) as refused:
        vl.fold(rows, **more)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"identity": "a", "columns": {"a": [1]}}, "identity must be names of columns, in a list"),
        ({"columns": [1]}, "columns must be a mapping"),
        ({"columns": {"row": [1]}}, r"columns\['row'\] has a name that every occurrence has anyway"),
    ],
)
def test_settings_that_mean_nothing_are_refused(more, words):
    with pytest.raises(SettingError, match=words):
        vl.fold([[1]], **more)
    with pytest.raises(SettingError, match="row 1 is none of the 1 rows"):
        vl.fold([[1]]).tokens_of(1)

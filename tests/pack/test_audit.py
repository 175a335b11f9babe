"""No Packing is handed out that loses, repeats or overfills: every fault put into a kernel raises LedgerError."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.oracles import pack as reference
from tests.support.packings import cases, same_packing

import varlen as vl
from varlen.errors import LedgerError, VarlenError
from varlen.pack import kernels, kernels_arrange, pieces
from varlen.types import Ledger

Replace = Callable[[Any, str, Any], None]
LENGTHS = [5, 2, 6, 3, 4, 7, 1]


def all_into_one_pack(slots: Any, sizes: Any, capacity: int, max_documents: int, pack_of: Any) -> int:
    pack_of[:] = 0
    return 1


def forget_a_document(slots: Any, sizes: Any, capacity: int, max_documents: int, pack_of: Any) -> int:
    packs: int = reference.next_fit(slots, sizes, capacity, max_documents, pack_of)
    pack_of[1] = -1
    return packs


def ignore_max_documents(slots: Any, sizes: Any, capacity: int, max_documents: int, pack_of: Any) -> int:
    packs: int = reference.next_fit(slots, sizes, capacity, 2**31 - 1, pack_of)
    return packs


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            all_into_one_pack,
            r"1 of 1 packs hold more than 8 tokens, 0 more than 2 pieces|1 of 1 packs hold more",
        ),
        (forget_a_document, "0 tokens stand twice, and the pieces packed differ from those given"),
        (ignore_max_documents, "0 of 5 packs hold more than 8 tokens, 1 more than 2 pieces"),
    ],
)
def test_a_method_that_breaks_a_limit_or_forgets_a_document_raises(fault, words, replace_kernel):
    replace_kernel(kernels, "next_fit", fault)
    with pytest.raises(LedgerError, match=words) as caught:
        vl.pack([1, 2, 3, 3, 8, 7, 5], capacity=8, method="next_fit", max_documents=2)
    assert isinstance(caught.value, VarlenError)
    assert not isinstance(caught.value, ValueError)


def repeat_a_piece(words: Any, *rest: Any) -> None:
    reference.order_batches(words, *rest)
    words[3], rest[-1][3] = words[0], rest[-1][0]


def swap_two_lengths(words: Any, *rest: Any) -> None:
    reference.order_batches(words, *rest)
    lengths = rest[-1]
    lengths[0], lengths[1] = lengths[1], lengths[0]


def swap_two_pieces(words: Any, *rest: Any) -> None:
    reference.order_batches(words, *rest)
    words[0], words[1] = words[1], words[0]


def cut_a_length(words: Any, *rest: Any) -> None:
    reference.order_batches(words, *rest)
    rest[-1][2] -= 1


def move_a_boundary(words: Any, *rest: Any) -> None:
    reference.order_batches(words, *rest)
    rest[-2][1] += 1


@pytest.mark.parametrize(
    "fault", [repeat_a_piece, swap_two_lengths, swap_two_pieces, cut_a_length, move_a_boundary]
)
def test_packs_laid_out_wrongly_raise(fault, replace_kernel):
    replace_kernel(kernels_arrange, "order_batches", fault)
    with pytest.raises(LedgerError, match="This is a bug in varlen"):
        vl.pack(LENGTHS, capacity=8)


def test_a_repeated_piece_is_counted_in_tokens(replace_kernel):
    replace_kernel(kernels_arrange, "order_batches", repeat_a_piece)
    with pytest.raises(LedgerError, match="5 tokens stand twice"):
        vl.pack([5, 3, 6, 2], capacity=8)


@pytest.mark.parametrize("array", [4, 5, 6])  # documents, starts, stops
@pytest.mark.parametrize("step", [-1, 1])
def test_a_document_cut_wrongly_raises(array, step, replace_kernel):
    def wrapped(*arguments: Any) -> Any:
        result = reference.wrapped(*arguments)
        if len(arguments[array]):
            arguments[array][2] += step
        return result

    replace_kernel(kernels_arrange, "wrapped", wrapped)
    with pytest.raises(LedgerError, match=r"of 8 pieces miss or repeat tokens"):
        vl.pack(LENGTHS, capacity=18, method="wrapped")


def test_a_piece_that_slides_within_its_document_raises(replace_kernel):
    def wrapped(*arguments: Any) -> Any:
        result = reference.wrapped(*arguments)
        for array in arguments[5:7]:
            array[1:2] -= 1
        return result

    replace_kernel(kernels_arrange, "wrapped", wrapped)
    with pytest.raises(LedgerError, match="1 of 3 pieces miss or repeat tokens"):
        vl.pack([9], capacity=4, method="wrapped")


def test_split_pieces_are_held_against_their_documents(monkeypatch):
    seen = []

    def watched(documents: Any, starts: Any, lengths: Any, wholes: Any) -> None:
        seen.append((documents.tolist(), starts.tolist(), lengths.tolist(), wholes.tolist()))

    monkeypatch.setattr(pieces, "audit_cuts", watched)
    vl.pack([9, 0, 2], capacity=4, overlong="split")
    vl.pack([9, 0, 2], capacity=4, method="wrapped")

    assert seen == [
        ([0, 0, 0, 1, 2], [0, 4, 8, 0, 0], [4, 4, 1, 0, 2], [9, 0, 2]),
        ([0, 0, 0, 2], [0, 4, 8, 0], [4, 4, 1, 2], [9, 0, 2]),
    ]


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(0, 9),
    st.sampled_from(["documents", "starts", "lengths", "wholes", "nothing"]),
    st.integers(-3, 3),
)
@example([1], 1, 0, "documents", -1)
def test_misplaced_pieces_are_counted_as_the_reference_counts_them(wholes, part, place, what, change):
    cuts = [(d, at, min(part, n - at)) for d, n in enumerate(wholes) for at in range(0, n, part)]
    arrays = {
        "documents": np.array([d for d, _, _ in cuts], np.int64),
        "starts": np.array([at for _, at, _ in cuts], np.int32),
        "lengths": np.array([n for _, _, n in cuts], np.int32),
        "wholes": np.array(wholes, np.int32),
    }
    changed = what != "nothing" and len(arrays[what]) > 0 and change != 0
    if changed:
        arrays[what][place % len(arrays[what])] += change
    ours = int(kernels_arrange.misplaced(*arrays.values()))

    assert ours == reference.misplaced(*arrays.values())
    assert (ours == 0) == (not changed)


def test_an_auditor_that_miscounts_does_not_go_unseen(replace_kernel):
    def audit(*arguments: Any) -> tuple[int, int, int]:
        tokens, overfull, total = reference.audit(*arguments)
        return tokens - 1, overfull, total

    replace_kernel(kernels_arrange, "audit", audit)
    with pytest.raises(LedgerError, match=r"28 tokens in, but 27 packed .* 1 unaccounted for"):
        vl.pack(LENGTHS, capacity=8)


def test_a_ledger_that_does_not_balance_says_by_how_much():
    with pytest.raises(
        LedgerError, match=r"9 tokens in, but 5 packed .* 1 truncated .* 1 dropped, .*: 2 unaccounted"
    ):
        Ledger(tokens_in=9, packed=5, truncated=1, dropped=1).check()
    with pytest.raises(LedgerError, match="3 duplicated"):
        Ledger(tokens_in=9, packed=9, duplicated=3).check()
    balanced = Ledger(tokens_in=9, packed=7, truncated=1, dropped=1)
    assert balanced.check() is balanced


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_plain_python_gives_the_same_bytes_as_the_kernels(case, plain_python):
    plain_python(False)
    compiled = vl.pack(case.lengths, **case.settings())
    bound = vl.lower_bound(compiled.slot_lengths, case.capacity)
    plain_python(True)

    assert same_packing(compiled, vl.pack(case.lengths, **case.settings()))
    assert vl.lower_bound(compiled.slot_lengths, case.capacity) == bound

"""Packed `.npy`: whatever numpy writes of rows comes back, and nothing that stands in the pickle is ever run."""

import base64
import collections
import os
import pickle
import pickletools
import random
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles import megatron_files as reference
from tests.support.megatron_rows import Row, header, many_rows, packed_rows, plain, saved

from varlen.adapters.megatron import PackedNpy, read_packed_npy
from varlen.adapters.megatron.files import kernels
from varlen.adapters.megatron.files.reader import as_dict
from varlen.errors import DocumentsError, SourceError, VarlenError

NUMPY_1 = base64.b85decode(
    "c-p0r&2Q5{5XILqrHxx!!e@a3=F?j+0mP+3NE{+@sMQo%LJEh-"
    "THA{@BC-8;*GLhK;8Gf&`GaAdI0u9{F^3)P%$xna(f;gzIC}rlB45Z?FXbwc-fP!8Ire<l`;<#9Sr+9o<#qWT8!K+=O0a^PJALKv"
    "`|iyBpK!k0NmfpZX*bCw?@r3G9x*A|)QKcd@=R%2CfWg6s+=rcc3}nN6s?{W!#=~g5NkBB0{ax_8)2%a1$VGMXc0n=53o_q&(IFx"
    "(7+y8rgnnOe!qYC%f#Xc-fC>c)eslx4BK?jHkwgZlsX!v3Ohqwq`}&eZygpLi_{a}_(C(zm5L@zeMV=9OLSh%D?ZpV4aE^D&1C%m"
    "E)Q{q1|(?la)zr^><A(jD_j%C|Md{NjsF{BX?b*jo3-UzA@)|5-"
    "{AJ2mWjrlxa#e$lVxl)x!q*k)o^3cS;6kru=^n%G_Z#aEPjbcHSBQ+&%ngyUl?jIwnZ%LYdndCS?B3L{!Jxp%%lTf?DbZD2%h~wH"
    "^g&Rifyj(BJTbM>vFfq"
)
"""What numpy 1.26.4 saved of the rows in `test_what_numpy_1_saved_comes_back`, compressed."""
GOOD = {"input_ids": [1, 2, 3], "loss_mask": [True, 0, 1], "seq_start_id": [0, 2]}


def rows_of(path: Path) -> list[Row]:
    found = read_packed_npy(path)
    return [plain(as_dict(found, index)) for index in range(found.num_rows)]


def pickled(path: Path, content: bytes, count: int = 1) -> Path:
    path.write_bytes(header(count) + content)
    return path


@given(
    packed_rows(),
    st.integers(2, 5),
    st.sampled_from(["numpy._core", "numpy.core"]),
    st.sampled_from(range(4)),
)
def test_rows_come_back_whatever_protocol_and_numpy_wrote_them(
    tmp_path_factory, rows, protocol, module, kind
):
    path = tmp_path_factory.mktemp("npy") / "a.npy"
    makers = {
        0: dict,
        1: lambda row: {name: np.array(values) for name, values in row.items()},
        2: lambda row: collections.OrderedDict(
            (name, list(map(np.int64, values))) for name, values in row.items()
        ),
        3: lambda row: {name: np.array(values, dtype=">i8") for name, values in row.items()},
    }
    written = [makers[kind](row) for row in rows]
    path.write_bytes(saved([*written, written[0]], protocol, module))

    assert rows_of(path) == [plain(row) for row in [*rows, rows[0]]]


def test_what_numpy_saves_here_comes_back(tmp_path):
    rows = many_rows(9, 3000)
    rows[1]["loss_mask"] = [bool(value) for value in rows[1]["loss_mask"]]
    np.save(tmp_path / "a.npy", rows)

    assert rows_of(tmp_path / "a.npy") == list(map(plain, rows))
    with PackedNpy(tmp_path / "a.npy") as reader:
        assert [i for part in reader.batches() for i in part.input_ids] == [
            i for row in rows for i in row["input_ids"]
        ]
        assert [plain(reader[index]) for index in (8, -9)] == [plain(rows[8]), plain(rows[0])]


def test_what_numpy_1_saved_comes_back(tmp_path):
    (tmp_path / "a.npy").write_bytes(zlib.decompress(NUMPY_1))

    first = {"input_ids": [5, 300, 70000, 2**31 - 1], "loss_mask": [1, 0, 1, 0], "seq_start_id": [0, 2]}
    second = {"input_ids": [7, 8, 9], "loss_mask": [1, 0, 1], "seq_start_id": [0]}
    assert rows_of(tmp_path / "a.npy") == [first, second, first]


@given(
    st.binary(max_size=60) | st.lists(st.integers(-(2**31), 2**31 - 1) | st.booleans()), st.integers(0, 20)
)
def test_the_kernel_reads_the_numbers_that_the_reference_reads(content, most):
    data = content if isinstance(content, bytes) else pickle.dumps(content, protocol=2)[3:]
    data = np.frombuffer(data, dtype=np.uint8)
    for start in range(len(data)):
        found = []
        for one in (kernels.number_run, reference.number_run):
            values = np.full(most, -7, dtype=np.int32)
            found.append((one(data, start, values), values.tolist()))
        assert found[0] == found[1]


class Evil:
    """What would run a command if it were unpickled."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


EVIL = {
    "GLOBAL os.system by REDUCE": (
        b"\x80\x02cos\nsystem\n(X\x04\x00\x00\x00trueR.",
        "names os.system at byte",
    ),
    "STACK_GLOBAL": (pickle.dumps(Evil(os.system, "true"), protocol=4), "names posix.system at byte"),
    "builtins.eval": (pickle.dumps(Evil(eval, "1"), protocol=4), "names builtins.eval at byte"),
    "builtins.list": (b"\x80\x02c__builtin__\nlist\n)R.", "names __builtin__.list at byte"),
    "numpy.load": (b"\x80\x02cnumpy\nload\n)R.", "names numpy.load at byte"),
    "a dotted name": (b"\x80\x04\x8c\x05numpy\x8c\x0cndarray.fill\x93.", "names numpy.ndarray.fill"),
    "INST": (b"\x80\x02(X\x04\x00\x00\x00trueios\nsystem\n.", "holds the pickle opcode INST at byte"),
    "BUILD of a dictionary": (b"\x80\x02}}b.", "holds the pickle opcode BUILD at byte"),
    "REDUCE of a string": (b"\x80\x02X\x07\x00\x00\x00ndarray)R.", "holds the pickle opcode REDUCE at byte"),
    "a call of ndarray": (b"\x80\x02cnumpy\nndarray\n)R.", "names a call of ndarray at byte"),
    "a kind of objects of ours": (
        b"\x80\x02cnumpy\ndtype\nX\x02\x00\x00\x00M8\x85R.",
        "numbers of the kind 'M8'",
    ),
    "an opcode of none": (b"\x80\x02\xff.", "holds the pickle opcode 0xff, which is unknown at byte"),
    "protocol 0": (b"\x80\x00.", "is a pickle of protocol 0; 2 to 5 are read"),
}


@pytest.mark.parametrize("name", EVIL)
def test_whatever_packed_rows_do_not_have_is_refused_by_name_and_place(tmp_path, name):
    content, said = EVIL[name]
    path = pickled(tmp_path / "a.npy", content)

    with pytest.raises(SourceError, match=re.escape(f"{path} ") + ".*" + re.escape(said)):
        read_packed_npy(path)


def test_every_opcode_is_one_that_is_known_or_is_refused(tmp_path):
    known = set(b"KMJ\x88\x89\x80\x95(01N\x8aX\x8c\x8dBC\x8e\x96]})t\x85\x86\x87aesuqr\x94hjc\x93Rb.")
    for opcode in pickletools.opcodes:
        path = pickled(tmp_path / "a.npy", b"\x80\x04" + opcode.code.encode("latin1") + bytes(20))
        with pytest.raises(VarlenError) as caught:
            read_packed_npy(path)
        assert (f"opcode {opcode.name} " in str(caught.value)) == (ord(opcode.code) not in known)


def test_nothing_runs_however_a_file_is_changed(tmp_path, monkeypatch):
    def ran(*_: object) -> None:
        pytest.fail("something of the pickle was run")

    for module, name in (
        (os, "system"),
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "Unpickler"),
        (np, "load"),
    ):
        monkeypatch.setattr(module, name, ran)
    rng, rows = random.Random(0), many_rows(3, 12)
    rows[0]["loss_mask"] = np.array(rows[0]["loss_mask"])
    evil = pickle.dumps([Evil(print, "x")], protocol=4)
    allowed, outcomes = list(map(plain, rows)), collections.Counter[str]()
    for protocol in (2, 4, 5):
        whole = saved(rows, protocol)
        for _ in range(700):
            broken = bytearray(whole)
            at = rng.randrange(len(header(3)), len(whole))
            kind = rng.choice(["flip", "cut", "put", "evil"])
            if kind == "flip":
                broken[at] ^= 1 << rng.randrange(8)
            elif kind == "cut":
                del broken[at : at + rng.randrange(1, 9)]
            elif kind == "put":
                broken[at:at] = rng.randbytes(rng.randrange(1, 5))
            else:
                broken[at:at] = evil[2:-1]
            (tmp_path / "a.npy").write_bytes(broken)
            try:
                found = rows_of(tmp_path / "a.npy")
            except VarlenError:
                outcomes["refused"] += 1
            else:
                outcomes["same" if found == allowed else "other numbers"] += 1
    assert outcomes["refused"] > 1000, outcomes


@pytest.mark.parametrize("text", ["{'descr': '|O', 'shape': (1,", "{'descr': '", "((((", "}", "-"])
def test_a_header_that_is_no_python_is_refused(tmp_path, text):
    header = text.encode()
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)

    with pytest.raises(SourceError, match=r"isn't an array that np\.save wrote, or is cut off"):
        read_packed_npy(tmp_path / "a.npy")


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path):
    path = tmp_path / "a.npy"
    for protocol in (2, 4):
        whole = saved([GOOD, GOOD], protocol)
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(SourceError, match=r"cut off|empty \(0 bytes\)|isn't an array|is damaged"):
                read_packed_npy(path)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([1], "row 2 must be a dictionary with `input_ids`, got a list"),
        (GOOD | {"input_ids": "abc"}, "row 2: `input_ids` must be a list of whole numbers, got a string"),
        (
            GOOD | {"input_ids": [1, "a", 3]},
            "row 2: `input_ids` must be a list of whole numbers, got a list with other",
        ),
        (GOOD | {"input_ids": [1, 2**70, 3]}, "row 2: `input_ids` must be a list of whole numbers"),
        (GOOD | {"input_ids": [1, 2**31, 3]}, "row 2: `input_ids` holds 2147483648 at place 1"),
        (
            GOOD | {"loss_mask": np.zeros((3, 1), dtype=int)},
            "row 2: `loss_mask` must be a list of whole numbers",
        ),
        (GOOD | {"loss_mask": [1, 0]}, "row 2: 3 `input_ids`, but 2 values of `loss_mask`"),
        (GOOD | {"seq_start_id": [0, 3]}, "row 2: `seq_start_id` reaches past the row's 3 tokens"),
        ({"input_ids": [1]}, "row 2 has no `loss_mask`"),
        (GOOD | {"seq_lengths": [1, 0]}, "1 of 2 rows have `seq_lengths`"),
    ],
)
def test_rows_of_something_else_are_refused_by_number(tmp_path, row, said):
    (tmp_path / "a.npy").write_bytes(saved([GOOD, row]))

    with pytest.raises(DocumentsError, match=re.escape(said)):
        read_packed_npy(tmp_path / "a.npy")


def test_arrays_of_something_else_are_refused(tmp_path):
    path = tmp_path / "a.npy"
    for array, said in (
        (np.arange(3), r"holds numbers \(int64\)"),
        (np.array([[GOOD]], dtype=object), "must hold a list of"),
        (np.array([], dtype=object), "holds no row"),
        (np.array(None), "must hold a list of"),
    ):
        np.save(path, array)
        with pytest.raises(SourceError, match=said):
            read_packed_npy(path)
    path.write_bytes(header(2) + pickle.dumps(np.array([GOOD], dtype=object), protocol=4))
    with pytest.raises(SourceError, match=r"must hold a list of \(2,\) rows"):
        read_packed_npy(path)
    path.unlink()
    with pytest.raises(SourceError, match="can't be read"):
        read_packed_npy(path)


def test_an_array_of_another_size_than_it_says_is_refused(tmp_path):
    row = GOOD | {"loss_mask": np.array([1, 0, 1])}
    whole = saved([row], protocol=2)
    (tmp_path / "a.npy").write_bytes(whole)
    assert rows_of(tmp_path / "a.npy")[0]["loss_mask"] == [1, 0, 1]

    assert whole.count(b"K\x03\x85") == 1
    (tmp_path / "a.npy").write_bytes(whole.replace(b"K\x03\x85", b"K\x02\x85"))
    with pytest.raises(SourceError, match=r"is damaged at byte [\d,]+: BUILD doesn't fit"):
        read_packed_npy(tmp_path / "a.npy")


@pytest.mark.parametrize("name", ["input_ids", "loss_mask", "seq_start_id", "seq_lengths"])
def test_a_small_file_that_stands_for_endless_rows_is_refused(tmp_path, name):
    row = {"input_ids": [1], "loss_mask": [1], "seq_start_id": [0]} | {name: [1] * 20_000}
    (tmp_path / "a.npy").write_bytes(saved([row] * 4000))

    with pytest.raises(SourceError, match="it repeats its rows, and no packed file does"):
        read_packed_npy(tmp_path / "a.npy")


def test_memory_beyond_the_rows_stays_within_their_size(tmp_path):
    import tracemalloc

    np.save(tmp_path / "a.npy", many_rows(40, 20_000))
    read_packed_npy(tmp_path / "a.npy")
    tracemalloc.start()
    found = read_packed_npy(tmp_path / "a.npy")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 3 * (found.input_ids.nbytes + found.loss_mask.nbytes)

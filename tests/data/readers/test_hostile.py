"""Files made to mislead: no byte is read that is not theirs, and a small file cannot ask for endless time or memory."""

from __future__ import annotations

import io
import json
import pickle
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import h5py
import lmdb
import numpy as np
import pytest
import torch

from forgefield.data.readers import aselmdb, chunks, read_frames, source_files
from forgefield.errors import ForgefieldError
from forgefield.untrusted.safe_pickle import RefusedPickle, safe_loads


def call(name: str, *arguments: bytes) -> bytes:
    """A piece of pickle that calls a function by name."""
    module, _, function = name.rpartition(".")
    return pickle.GLOBAL + f"{module}\n{function}\n".encode() + several(*arguments) + pickle.REDUCE


def several(*items: bytes) -> bytes:
    return pickle.MARK + b"".join(items) + pickle.TUPLE


def number(n: int) -> bytes:
    return pickle.LONG1 + b"\x10" + n.to_bytes(16, "little", signed=True)


def text(value: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(value)) + value.encode()


def storage(values=(1.0, 2.0), *, zipped: bool = False) -> bytes:
    kept = torch.tensor(values, dtype=torch.float64).untyped_storage()
    typed = torch.storage.TypedStorage(wrap_storage=kept, dtype=torch.float64, _internal=True)
    stream = io.BytesIO()
    torch.save(typed, stream, _use_new_zipfile_serialization=zipped)
    data = stream.getvalue()
    return call("torch.storage._load_from_bytes", pickle.BINBYTES + struct.pack("<I", len(data)) + data)


def tensor(numbers: bytes, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    sizes, strides = several(*map(number, size)), several(*map(number, stride))
    return call("torch._utils._rebuild_tensor_v2", numbers, number(offset), sizes, strides)


def whole(piece: bytes) -> bytes:
    return pickle.PROTO + b"\x03" + piece + pickle.STOP


def changed(item: bytes, slot: str, value: bytes) -> bytes:
    """`item`, one of whose slots is set by the opcode BUILD."""
    return item + several(pickle.NONE, pickle.EMPTY_DICT + text(slot) + value + pickle.SETITEM) + pickle.BUILD


def test_these_pieces_make_tensors():
    np.testing.assert_array_equal(safe_loads(whole(tensor(storage((1, 2, 3, 4)), 0, (2, 2), (1, 2)))), [[1, 3], [2, 4]])
    np.testing.assert_array_equal(safe_loads(whole(tensor(storage(), 1, (1, 1), (5, 1)))), [[2]])
    assert safe_loads(whole(tensor(storage(()), 0, (0, 3), (3, 1)))).shape == (0, 3)


def test_the_storage_of_a_tensor_cannot_be_exchanged():
    """An array of no bytes and of any length would let a tensor look at all of memory. In a process of its own: it crashed."""
    empty = tensor(storage(), 0, (2**20, 0), (1, 1))
    data = whole(tensor(changed(storage(), "values", empty), 0, (4096,), (1,)))
    code = (
        "import sys\n"
        "from forgefield.untrusted.safe_pickle import RefusedPickle, safe_loads\n"
        "try: safe_loads(bytes.fromhex(sys.stdin.read()))\n"
        "except RefusedPickle as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=data.hex(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "it tries to change the numbers of a tensor\n"


@pytest.mark.parametrize(
    ("item", "slot"),
    [
        (call("numpy.dtype", text("f8")), "dtype"),
        (call("numpy.core.multiarray._reconstruct"), "array"),
        (tensor(storage(), 0, (2,), (1,)), "shape"),
        (call("datetime.date", number(2024), number(1), number(1)), "year"),
        (pickle.GLOBAL + b"numpy\ndtype\n", "_function"),
    ],
)
def test_nothing_else_a_pickle_makes_lets_its_slots_be_set(item, slot):
    with pytest.raises(RefusedPickle):
        safe_loads(whole(changed(item, slot, pickle.EMPTY_LIST)))


@pytest.mark.parametrize(
    ("offset", "size", "stride", "message"),
    [
        (0, (30_000_000,), (0,), "repeats its numbers"),
        (0, (3, 1), (0, 0), "repeats its numbers"),
        (0, (2, 2), (1, 0), "repeats its numbers"),
        (1, (2,), (1,), "beyond its numbers"),
        (0, (2,), (2,), "beyond its numbers"),
        (0, (2,), (2**62,), "impossible shape"),
        (0, (2**40, 0), (1, 1), "impossible shape"),
        (2**70, (1,), (1,), "impossible shape"),
        (0, (1, 1), (1,), "impossible shape"),
        (0, (-1,), (1,), "impossible shape"),
        (0, (1,), (-1,), "impossible shape"),
    ],
)
def test_tensors_stay_within_their_numbers_and_are_not_larger(offset, size, stride, message):
    with pytest.raises(RefusedPickle, match=message):
        safe_loads(whole(tensor(storage(), offset, size, stride)))


def test_sizes_that_are_not_whole_numbers_are_refused():
    half = pickle.BINFLOAT + struct.pack(">d", 1.5)
    for sizes in (several(half), several(pickle.NEWTRUE), pickle.EMPTY_LIST + number(1) + pickle.APPEND):
        piece = call("torch._utils._rebuild_tensor_v2", storage(), number(0), sizes, several(number(1)))
        with pytest.raises(RefusedPickle, match="impossible shape"):
            safe_loads(whole(piece))


def test_torch_files_inside_of_pickles_have_the_stated_content():
    """Sizes in zip files are not compared with their content by every torch; a storage may name more than follows."""
    with pytest.raises(RefusedPickle, match="not one of those that pickles of tensors hold"):
        safe_loads(whole(tensor(storage(zipped=True), 0, (2,), (1,))))
    stream = io.BytesIO()
    for part in (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}):
        pickle.dump(part, stream, protocol=2)
    words = several(text("storage"), pickle.GLOBAL + b"torch\nDoubleStorage\n", text("0"), text("cpu"), number(10**6),
                    pickle.NONE)  # fmt: skip
    stream.write(pickle.PROTO + b"\x02" + words + pickle.BINPERSID + pickle.STOP)
    pickle.dump([], stream, protocol=2)  # no storage follows: its memory is whatever was there before
    data = stream.getvalue()
    piece = call("torch.storage._load_from_bytes", pickle.BINBYTES + struct.pack("<I", len(data)) + data)
    with pytest.raises(RefusedPickle, match="more numbers than it has"):
        safe_loads(whole(tensor(piece, 0, (100,), (1,))))


def nested(depth: int, width: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value] * width
    return value


def test_lists_named_many_times_are_settled_once():
    read = safe_loads(pickle.dumps(nested(5, 10)))
    assert read == nested(5, 10)
    assert read[0] is read[1]
    array = np.arange(3.0)
    both = safe_loads(pickle.dumps([{"a": array, "b": (1, {2})}, {"a": array}]))
    np.testing.assert_array_equal(both[1]["a"], array)
    assert both[0]["b"] == (1, {2})


def test_lists_that_unfold_without_end_are_refused_at_once():
    for value in (nested(7, 10), nested(60, 10), {"pos": nested(200, 2)}):
        with pytest.raises(RefusedPickle, match="unfold to more"):
            safe_loads(pickle.dumps(value))
    assert len(safe_loads(pickle.dumps(list(range(1_500_000))))) == 1_500_000  # each of its own may be many
    loop: list = []
    loop.append(loop)
    with pytest.raises(RefusedPickle, match="contains itself"):
        safe_loads(pickle.dumps(loop))


def test_an_ordered_dictionary_with_attributes_is_read_as_its_items():
    items = call("collections.OrderedDict") + text("a") + number(1) + pickle.SETITEM
    assert safe_loads(whole(changed(items, "items", pickle.EMPTY_LIST))) == {"a": 1}


N = 2000
"""Frames of the npz files: enough for their arrays to be mapped."""


def array_file(values: np.ndarray, shape: tuple[int, ...] | None = None) -> bytes:
    """The bytes of a .npy file of `values` whose header says `shape`."""
    stream = io.BytesIO()
    about = {"descr": values.dtype.str, "fortran_order": False, "shape": values.shape if shape is None else shape}
    np.lib.format.write_array_header_1_0(stream, about)
    return stream.getvalue() + values.tobytes()


def write_npz(path: Path, positions: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("R.npy", positions)
        archive.writestr("E.npy", array_file(np.zeros(N)))
        archive.writestr("F.npy", array_file(np.zeros((N, 2, 3))))
        archive.writestr("z.npy", array_file(np.array([1, 1])))
    return path


@pytest.mark.parametrize("rows", [N - 3, N + 3])
def test_an_array_in_npz_has_the_size_in_its_header(tmp_path, rows):
    """Three frames short, it would take the arrays behind it in the file for positions."""
    pair = np.array([[0.0, 0, 0], [0, 0, 1]])
    assert len(read_frames(write_npz(tmp_path / "good.npz", array_file(np.tile(pair, (N, 1, 1)))))) == N
    path = write_npz(tmp_path / "bad.npz", array_file(np.tile(pair, (rows, 1, 1)), (N, 2, 3)))
    message = rf"bad\.npz, array 'R' is .*: shape \({N}, 2, 3\) and type float64 take \d+ bytes, but \d+ are there"
    with pytest.raises(ForgefieldError, match=message):
        read_frames(path)
    (file,) = source_files(path)
    with pytest.raises(ForgefieldError, match=message):
        chunks(file, 100)


def test_negative_shapes_in_npz_are_refused(tmp_path):
    path = write_npz(tmp_path / "bad.npz", array_file(np.zeros((N, 2, 3)), (-N, -2, 3)))
    with pytest.raises(ForgefieldError, match=r"bad\.npz, array 'R': its header states the impossible shape"):
        read_frames(path)


def write_rows(path: Path, rows: dict[str, object]) -> Path:
    environment = lmdb.open(str(path), subdir=False, map_size=2**26, lock=False)
    with environment.begin(write=True) as transaction:
        for key, value in rows.items():
            packed = value if isinstance(value, bytes) else zlib.compress(json.dumps(value).encode())
            transaction.put(key.encode(), packed)
    environment.close()
    return path


ROW = {"numbers": [1], "positions": [[0, 0, 0]], "energy": 1.0}


@pytest.mark.parametrize("end", [10**8, 10**30])
def test_the_next_id_of_an_ase_lmdb_is_not_counted_up_to(tmp_path, end):
    path = write_rows(tmp_path / "a.aselmdb", {"1": ROW, "2": ROW, "4": ROW, "nextid": end, "deleted_ids": [3]})
    with pytest.raises(ForgefieldError, match="row 5 is neither there nor marked as deleted"):
        read_frames(path)
    good = write_rows(tmp_path / "b.aselmdb", {"1": ROW, "2": ROW, "4": ROW, "nextid": 5, "deleted_ids": [3]})
    assert len(read_frames(good)) == 3


@pytest.mark.parametrize(
    ("key", "value"), [("nextid", "x"), ("nextid", [2]), ("nextid", 2.0), ("deleted_ids", 3), ("deleted_ids", [[1]])]
)
def test_ids_of_an_ase_lmdb_are_whole_numbers(tmp_path, key, value):
    path = write_rows(tmp_path / "a.aselmdb", {"1": ROW, key: value})
    with pytest.raises(ForgefieldError, match=rf"a\.aselmdb, {key}: it should hold whole numbers"):
        read_frames(path)
    with pytest.raises(ForgefieldError, match=r"the id of a row must be below 2\*\*63"):
        read_frames(write_rows(tmp_path / "b.aselmdb", {"9" * 30: ROW}))


def test_rows_of_an_ase_lmdb_are_unpacked_to_a_limit(tmp_path, monkeypatch):
    assert aselmdb.LARGEST_VALUE == 256 * 2**20
    size = len(json.dumps(ROW))
    monkeypatch.setattr(aselmdb, "LARGEST_VALUE", size)
    assert len(read_frames(write_rows(tmp_path / "a.aselmdb", {"1": ROW}))) == 1
    large = write_rows(tmp_path / "b.aselmdb", {"1": zlib.compress(json.dumps(ROW).encode() + b" ")})
    with pytest.raises(ForgefieldError, match=rf"frame 0 \(id 1\): it unpacks to more than {size} bytes"):
        read_frames(large)
    short = write_rows(tmp_path / "c.aselmdb", {"1": zlib.compress(json.dumps(ROW).encode())[:-4]})
    with pytest.raises(ForgefieldError, match=r"frame 0 \(id 1\): it is not compressed JSON .*ends too early"):
        read_frames(short)
    monkeypatch.undo()
    deep = write_rows(tmp_path / "d.aselmdb", {"1": zlib.compress(b"[" * 10**6)})
    with pytest.raises(ForgefieldError, match=r"frame 0 \(id 1\): it is not compressed JSON"):
        read_frames(deep)


def test_groups_of_an_hdf5_file_are_visited_once(tmp_path):
    """Each of them is linked into the next twice, and into itself: 2**30 ways lead to the system."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        inner = file
        for _ in range(30):
            following = inner.create_group("x")
            inner["y"] = following
            following["self"] = following
            following["root"] = file["/"]
            inner = following
        inner["positions"], inner["numbers"], inner["energy"] = np.zeros((1, 3)), [1], 2.0
        file["z"] = inner
    code = f"from forgefield.data.readers import read_frames; print(len(read_frames({str(path)!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "1\n", done.stderr


def test_groups_of_an_hdf5_file_are_found_at_any_depth(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        inner = file
        for _ in range(1200):
            inner = inner.create_group("x")
        inner["positions"], inner["numbers"] = np.zeros((1, 3)), [1]
    assert len(read_frames(path)) == 1

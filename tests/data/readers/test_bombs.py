"""Small files that declare huge content are refused with a sentence, in little memory; compressible data is still read."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from forgefield.data.readers import read_frames

SIZE = 264 * 2**20
"""Just more than is unpacked without looking at the size of the file."""
READ = """
import json, resource, sys
from pathlib import Path
import torch, h5py, ase.io  # what is imported anyway does not count
from forgefield.data.readers import read_frames
from forgefield.errors import ForgefieldError
from forgefield.ldos.importer import read_mala
from forgefield.untrusted.torch_files import read_torch_file

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

for name in sys.argv[1:]:
    before, path = peak(), Path(name)
    read = {"mala": read_mala, "ckpt": read_torch_file}.get(path.name.partition("-")[0], read_frames)
    try:
        read(path)
        message = "it was read"
    except ForgefieldError as error:
        message = str(error)
    print(json.dumps([path.name, peak() - before, message]))
"""


def npy_header(shape: tuple[int, ...], order: bool = False) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f8", "fortran_order": order, "shape": shape})
    return stream.getvalue()


def zeros(archive: zipfile.ZipFile, name: str, size: int, start: bytes = b"") -> None:
    """A compressed member: `start` and `size` zero bytes."""
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_DEFLATED
    info._compresslevel = 1
    with archive.open(info, "w", force_zip64=True) as stream:
        stream.write(start)
        for _ in range(size // 2**20):
            stream.write(bytes(2**20))


def compressed_npz(path: Path) -> None:
    """Positions of SIZE bytes in a thousandth of it."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("z.npy", npy_header((0,)))
        zeros(archive, "R.npy", SIZE, npy_header((SIZE // 24, 1, 3)))


def promising_npz(path: Path) -> None:
    """A header that promises 8 TB."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("z.npy", npy_header((0,)))
        archive.writestr("R.npy", npy_header((10**12, 1)) + bytes(24))


def unwritten_hdf5(path: Path) -> None:
    """8 GB of positions of which no chunk was ever written."""
    with h5py.File(path, "w") as file:
        file.create_dataset("a/positions", (2**27, 3, 3), dtype="f8", chunks=(1024, 3, 3))
        file["a/numbers"] = [1, 1, 8]


def many_frames_hdf5(path: Path) -> None:
    """Positions of 100 MB, but four million frames."""
    with h5py.File(path, "w") as file:
        file.create_dataset("a/positions", (4_000_000, 1, 3), dtype="f8", chunks=(1024, 1, 3))
        file["a/numbers"] = [1]


def one_wide_hdf5(path: Path) -> None:
    """One frame whose energy has 8 GB."""
    with h5py.File(path, "w") as file:
        file["a/positions"] = np.zeros((1, 1, 3))
        file["a/numbers"] = [1]
        file.create_dataset("a/energy", (1, 2**30), dtype="f8", chunks=(1, 1024))


def shared_hdf5(path: Path) -> None:
    """One dataset under the names of very many systems."""
    with h5py.File(path, "w") as file:
        file["all/values"] = np.random.default_rng(0).random((2000, 50, 3))
        file["all/species"] = np.ones(50, dtype=int)
        for i in range(1000):
            file[f"s{i}/positions"], file[f"s{i}/numbers"] = file["all/values"], file["all/species"]


def compressed_mala(path: Path) -> None:
    """A network of SIZE bytes in a thousandth of it."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("params", "iscaler", "oscaler"):
            archive.writestr(f"be.{name}.json", "{}")
        zeros(archive, "be.network.pth", SIZE)


def compressed_checkpoint(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        zeros(archive, "archive/data.pkl", SIZE)


BOMBS: dict[str, Callable[[Path], None]] = {
    "compressed.npz": compressed_npz,
    "promising.npz": promising_npz,
    "unwritten.h5": unwritten_hdf5,
    "many.h5": many_frames_hdf5,
    "wide.h5": one_wide_hdf5,
    "shared.h5": shared_hdf5,
    "mala-model.zip": compressed_mala,
    "ckpt-model.ckpt": compressed_checkpoint,
}


def test_small_files_cannot_ask_for_much_memory(tmp_path):
    for name, write in BOMBS.items():
        write(tmp_path / name)
    command = [sys.executable, "-c", READ, *(str(tmp_path / name) for name in BOMBS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, _, _ in answers] == list(BOMBS)
    for name, mebibytes, message in answers:
        assert name in message, message
        assert mebibytes < 150, f"{name} took {mebibytes} MiB"
    remedies = {name: message for name, _, message in answers}
    assert "write it with np.savez" in remedies["compressed.npz"]
    assert "times the" in remedies["unwritten.h5"]


@pytest.mark.parametrize("kind", ["npz", "h5"])
def test_compressible_data_is_read(tmp_path, kind):
    """60 MB of equal frames, which compress several hundred times."""
    positions = np.tile(np.array([[0.0, 0, 0], [0, 0, 1]]), (1_250_000 // 2, 1, 1))[:100_000]
    path = tmp_path / f"a.{kind}"
    if kind == "npz":
        np.savez_compressed(path, z=[1, 1], R=positions, E=np.zeros(len(positions)), F=np.zeros_like(positions))
    else:
        with h5py.File(path, "w") as file:
            file.create_dataset("a/positions", data=positions, compression="gzip")
            file["a/numbers"] = [1, 1]
    assert path.stat().st_size * 25 < positions.nbytes
    assert len(read_frames(path)) == len(positions)

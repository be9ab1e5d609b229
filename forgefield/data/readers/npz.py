"""Reader of npz files of the rMD17 and sGDML kind: one array per quantity, the first axis runs over frames.

Units come from the settings; where the file states its own (`e_unit`, `r_unit`) and they differ, that is an error.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from forgefield.config.schema import UnitOptions
from forgefield.data.expansion import check_expansion
from forgefield.data.npy import read_npy_header
from forgefield.data.readers.blocks import RawBlock, block_ranges
from forgefield.errors import ForgefieldError
from forgefield.physics.units import label_energy_factor, length_factor

NUMBER_KEYS = ("nuclear_charges", "atomic_numbers", "numbers", "z", "Z")
POSITION_KEYS = ("coords", "positions", "R", "pos")
SMALL = 1 << 16
"""Arrays up to this many bytes are read rather than mapped."""
EXTRA_NAMES = {"energy": ("energies", "E"), "forces": ("F",)}


def read_npz(path: Path, units: UnitOptions, start: int = 0, stop: int | None = None) -> Iterator[RawBlock]:
    """Frames start to stop of `path`, in blocks. Arrays stored without compression are mapped, not read."""
    data = _load(path, check=start == 0)
    numbers = _one_of(data, NUMBER_KEYS, path, "atomic numbers")
    positions = _one_of(data, POSITION_KEYS, path, "positions")
    _check_stated_units(data, path, units)
    if positions.ndim != 3 or positions.shape[2] != 3 or 0 in positions.shape:
        raise ForgefieldError(f"{path}: positions have shape {positions.shape}; it should be (frames, atoms, 3)")
    n_frames, n_atoms = positions.shape[:2]
    if numbers.shape not in ((n_atoms,), (n_frames, n_atoms)):
        raise ForgefieldError(
            f"{path}: atomic numbers have shape {numbers.shape}; it should be ({n_atoms},) or ({n_frames}, {n_atoms})"
        )
    cells, periodic = _cells(data, path, n_frames)
    used = (*NUMBER_KEYS, *POSITION_KEYS, "cell", "lattice", "pbc")
    per_frame = {
        key: array
        for key, array in data.items()
        if key not in used and array.ndim and len(array) == n_frames and array.dtype.kind in "fiubc"
    }
    _check_lengths(data, path, n_frames)
    for a, b in block_ranges(start, n_frames if stop is None else min(stop, n_frames), n_atoms):
        values = {key: array[a:b] for key, array in per_frame.items()}
        yield RawBlock(
            positions=positions[a:b],
            numbers=numbers if numbers.shape == (n_atoms,) else numbers[a:b],
            cell=cells[a:b],
            pbc=periodic[a:b],
            source=str(path),
            start=a,
            info=values,
            arrays=values,
            extra_names=EXTRA_NAMES,
        )


def count_npz(path: Path) -> int | None:
    """Number of frames; None where arrays are compressed, so that each part would have to unpack all of it."""
    data = _load(path, check=False)
    if any(not isinstance(array, np.memmap) for array in data.values() if array.nbytes > SMALL):
        return None
    return len(_one_of(data, POSITION_KEYS, path, "positions"))


def _load(path: Path, *, check: bool) -> dict[str, np.ndarray]:
    """Arrays by name. `check`: compare what is there with the checksums of the file."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = _members(path, archive)
            return {name: _array(path, archive, member, check) for name, member in members.items()}
    except ForgefieldError:
        raise
    except Exception as error:  # zipfile, zlib and numpy each have their own
        if isinstance(error, OSError) and error.errno:  # the system cannot read it, whatever it holds
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        raise ForgefieldError(f"{path}: it could not be read as npz; it is damaged or truncated ({reason})") from error


def _members(path: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Arrays of the archive by name, none twice, which together are of a plausible size."""
    members: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        if name in members:
            raise ForgefieldError(f"{path}: it holds the array {name!r} twice; write it again with one of them")
        if member.filename.endswith(".npy") and name != "name":
            members[name] = member
    declared = sum(member.file_size for member in members.values())
    check_expansion(declared, path.stat().st_size, str(path), "write it with np.savez, which does not compress")
    return members


def _array(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, check: bool) -> np.ndarray:
    """One array: mapped where it is stored as it is and not small, else unpacked."""
    name = f"{path}, array {member.filename.removesuffix('.npy')!r}"
    stored = member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1
    if stored and member.file_size > SMALL:
        mapped = _mapped(path, member, name)
        if check:
            _compare_checksum(archive, member)
        return mapped
    with archive.open(member) as stream:
        header = read_npy_header(stream, member.file_size, name)
        values = bytearray(stream.read())  # the checksum is compared at the end
    if len(values) != header.n_bytes:
        raise ForgefieldError(f"{name}: it has {len(values)} of {header.n_bytes} bytes; the file is damaged")
    return np.frombuffer(values, header.dtype).reshape(header.shape, order=header.order)


def _mapped(path: Path, member: zipfile.ZipInfo, name: str) -> np.ndarray:
    """An array stored as it is within the zip file, memory-mapped: nothing beyond the member can be reached."""
    with path.open("rb") as stream:
        stream.seek(member.header_offset + 26)
        name_length, extra_length = struct.unpack("<HH", stream.read(4))
        begin = member.header_offset + 30 + name_length + extra_length
        if member.compress_size != member.file_size or begin + member.file_size > path.stat().st_size:
            raise ForgefieldError(f"{name}: it reaches beyond the end of the file, which is damaged or truncated")
        stream.seek(begin)
        header = read_npy_header(stream, member.file_size, name)
        if header.n_bytes == 0:
            return np.empty(header.shape, header.dtype)
        return np.memmap(path, header.dtype, "r", stream.tell(), header.shape, header.order)


def _compare_checksum(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    with archive.open(member) as stream:  # raises at the end of a member whose checksum is another
        while stream.read(1 << 20):
            pass


def _one_of(data: dict[str, np.ndarray], keys: tuple[str, ...], path: Path, what: str) -> np.ndarray:
    found = [key for key in keys if key in data]
    if not found:
        raise ForgefieldError(f"{path}: no {what}; looked for {', '.join(keys)}, the file has {', '.join(data)}")
    if len(found) > 1 and any(not np.array_equal(data[found[0]], data[key]) for key in found[1:]):
        raise ForgefieldError(f"{path}: {' and '.join(found)} both could be the {what} and disagree; remove one")
    return data[found[0]]


def _check_lengths(data: dict[str, np.ndarray], path: Path, n_frames: int) -> None:
    for key in ("energies", "energy", "E", "forces", "F"):
        if key in data and (data[key].ndim == 0 or len(data[key]) != n_frames):
            raise ForgefieldError(f"{path}: {key} has shape {data[key].shape}, but there are {n_frames} frames")


def _check_stated_units(data: dict[str, np.ndarray], path: Path, units: UnitOptions) -> None:
    for key, setting, factor in (("e_unit", "energy", label_energy_factor), ("r_unit", "length", length_factor)):
        if key not in data:
            continue
        stated, asked = str(data[key]), getattr(units, setting)
        try:
            factors = np.array([factor(stated), factor(asked)])
        except ForgefieldError:
            continue
        if not np.allclose(*factors, rtol=1e-6, atol=0):
            raise ForgefieldError(f"{path}: it says its {setting} is in {stated}; set data.units.{setting}={stated}")


def _cells(data: dict[str, np.ndarray], path: Path, n_frames: int) -> tuple[np.ndarray, np.ndarray]:
    cell = data.get("cell", data.get("lattice"))
    pbc = data.get("pbc", np.full(3, cell is not None))
    cell = np.zeros((3, 3)) if cell is None else cell
    try:
        return (
            np.broadcast_to(cell.reshape(-1, 3, 3), (n_frames, 3, 3)),
            np.broadcast_to(pbc.reshape(-1, pbc.shape[-1] if pbc.ndim else 1), (n_frames, 3)),
        )
    except ValueError:
        raise ForgefieldError(
            f"{path}: cell and pbc have shapes {cell.shape} and {pbc.shape}; they should be (3, 3) and (3,), "
            f"or the same for each of the {n_frames} frames"
        ) from None

"""Reader of npz files of the rMD17 and sGDML kind: one array per quantity, the first axis runs over frames.

Units come from the settings; where the file states its own (`e_unit`, `r_unit`) and they differ, that is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from forgefield.data.frame import RawBlock, block_ranges
from forgefield.data.options import UnitOptions
from forgefield.data.readers.base import Reader, ReadOptions, SourceFile
from forgefield.errors import ForgefieldError
from forgefield.physics.units import label_energy_factor, length_factor
from forgefield.untrusted.archives import FRAME_BYTES, MAPPED_ABOVE, check_expansion, npz_arrays

NUMBER_KEYS = ("nuclear_charges", "atomic_numbers", "numbers", "z", "Z")
POSITION_KEYS = ("coords", "positions", "R", "pos")
REMEDY = "write it with np.savez, which does not compress"
EXTRA_NAMES = {"energy": ("energies", "E"), "forces": ("F",)}


class NpzReader(Reader):
    name = "npz"
    suffixes = (".npz",)

    def read(
        self, source: SourceFile, options: ReadOptions, start: int = 0, stop: int | None = None
    ) -> Iterator[RawBlock]:
        return read_npz(source.path, options.units, start, stop)

    def count(self, source: SourceFile) -> int | None:
        return count_npz(source.path)


def read_npz(path: Path, units: UnitOptions, start: int = 0, stop: int | None = None) -> Iterator[RawBlock]:
    """Frames start to stop of `path`, in blocks. Arrays stored without compression are mapped, not read."""
    data = npz_arrays(path, verify=start == 0, leave_out=("name",))
    numbers = _one_of(data, NUMBER_KEYS, path, "atomic numbers")
    positions = _one_of(data, POSITION_KEYS, path, "positions")
    _check_stated_units(data, path, units)
    if positions.ndim != 3 or positions.shape[2] != 3 or 0 in positions.shape:
        raise ForgefieldError(f"{path}: positions have shape {positions.shape}; it must be (frames, atoms, 3)")
    n_frames, n_atoms = positions.shape[:2]
    check_expansion(n_frames * (FRAME_BYTES + 24 * n_atoms), path.stat().st_size, str(path), REMEDY)
    if numbers.shape not in ((n_atoms,), (n_frames, n_atoms)):
        raise ForgefieldError(
            f"{path}: atomic numbers have shape {numbers.shape}; it must be ({n_atoms},) or ({n_frames}, {n_atoms})"
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
    data = npz_arrays(path, verify=False, leave_out=("name",))
    if any(not isinstance(array, np.memmap) for array in data.values() if array.nbytes > MAPPED_ABOVE):
        return None
    return len(_one_of(data, POSITION_KEYS, path, "positions"))


def _one_of(data: dict[str, np.ndarray], keys: tuple[str, ...], path: Path, what: str) -> np.ndarray:
    present = [key for key in keys if key in data]
    if not present:
        raise ForgefieldError(f"{path}: no {what}; looked for {', '.join(keys)}, the file has {', '.join(data)}")
    if len(present) > 1 and any(not np.array_equal(data[present[0]], data[key]) for key in present[1:]):
        raise ForgefieldError(f"{path}: {' and '.join(present)} both could be the {what} and disagree; remove one")
    return data[present[0]]


def _check_lengths(data: dict[str, np.ndarray], path: Path, n_frames: int) -> None:
    for key in ("energies", "energy", "E", "forces", "F"):
        if key in data and (data[key].ndim == 0 or len(data[key]) != n_frames):
            raise ForgefieldError(f"{path}: {key} has shape {data[key].shape}, but there are {n_frames} frames")


def _check_stated_units(data: dict[str, np.ndarray], path: Path, units: UnitOptions) -> None:
    for key, setting, factor in (("e_unit", "energy", label_energy_factor), ("r_unit", "length", length_factor)):
        if key not in data:
            continue
        stated, requested = str(data[key]), getattr(units, setting)
        try:
            in_file, in_settings = np.array(factor(stated)), np.array(factor(requested))
        except ForgefieldError:
            continue
        if not np.allclose(in_file, in_settings, rtol=1e-6, atol=0):
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
            f"{path}: cell and pbc have shapes {cell.shape} and {pbc.shape}; they must be (3, 3) and (3,), "
            f"or the same for each of the {n_frames} frames"
        ) from None

"""Reader of npz files of the rMD17 and sGDML kind: one array per quantity, the first axis runs over frames.

Units come from the settings; where the file states its own (`e_unit`, `r_unit`) and they differ, that is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from forgefield.config.schema import UnitOptions
from forgefield.data.frame import RawFrame
from forgefield.errors import ForgefieldError
from forgefield.physics.units import energy_factor, length_factor

NUMBER_KEYS = ("nuclear_charges", "atomic_numbers", "numbers", "z", "Z")
POSITION_KEYS = ("coords", "positions", "R", "pos")
EXTRA_NAMES = {"energy": ("energies", "E"), "forces": ("F",)}


def read_npz(path: Path, units: UnitOptions) -> Iterator[RawFrame]:
    """Every frame of `path`."""
    data = _load(path)
    numbers = _one_of(data, NUMBER_KEYS, path, "atomic numbers")
    positions = _one_of(data, POSITION_KEYS, path, "positions")
    _check_stated_units(data, path, units)
    if positions.ndim != 3 or positions.shape[2] != 3:
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
        if key not in used and array.ndim and len(array) == n_frames and array.dtype.kind in "fiub"
    }
    _check_lengths(data, path, n_frames)
    for index in range(n_frames):
        values = {key: array[index] for key, array in per_frame.items()}
        yield RawFrame(
            positions=positions[index],
            numbers=(numbers if numbers.ndim == 1 else numbers[index]).astype(np.int64),
            cell=cells[index],
            pbc=periodic[index],
            source=str(path),
            index=index,
            info=values,
            arrays=values,
            extra_names=EXTRA_NAMES,
        )


def _load(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files if key != "name"}
    except PermissionError:
        raise
    except Exception as error:  # zipfile, zlib and numpy each have their own
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        raise ForgefieldError(f"{path}: it could not be read as npz; it is damaged or truncated ({reason})") from error


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
    for key, setting, factor in (("e_unit", "energy", energy_factor), ("r_unit", "length", length_factor)):
        if key not in data:
            continue
        stated, asked = str(data[key]), getattr(units, setting)
        try:
            stated_factor = factor(stated)
        except ForgefieldError:
            continue
        if abs(stated_factor / factor(asked) - 1) > 1e-6:
            raise ForgefieldError(f"{path}: it says its {setting} is in {stated}; set data.units.{setting}={stated}")


def _cells(data: dict[str, np.ndarray], path: Path, n_frames: int) -> tuple[np.ndarray, np.ndarray]:
    cell = data.get("cell", data.get("lattice"))
    pbc = data.get("pbc", np.full(3, cell is not None))
    cell = np.zeros((3, 3)) if cell is None else cell
    try:
        return (
            np.broadcast_to(cell.reshape(-1, 3, 3), (n_frames, 3, 3)),
            np.broadcast_to(pbc.reshape(-1, pbc.shape[-1] if pbc.ndim else 1), (n_frames, 3)).astype(bool),
        )
    except ValueError:
        raise ForgefieldError(
            f"{path}: cell and pbc have shapes {cell.shape} and {pbc.shape}; they should be (3, 3) and (3,), "
            f"or the same for each of the {n_frames} frames"
        ) from None

"""Snapshots aligned in energy: the LDOS of each is moved by whole levels so that its band begins where a reference's does.

Calculations of different cells have different zeros of energy, so that the same band appears at different levels. The shift
minimises the squared difference of the mean LDOS from that of the reference, near the beginning of the bands, as in MALA. Only
levels that all shifted snapshots have are kept; no value is invented.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from forgefield.errors import ForgefieldError
from forgefield.ldos.data.grid_writer import writing_grid
from forgefield.ldos.data.info import SnapshotInfo
from forgefield.ldos.data.snapshot import Snapshot
from forgefield.ldos.data.snapshot_files import INFO_SUFFIX
from forgefield.ldos.data.units import STANDARD
from forgefield.untrusted.documents import load_json

BLOCK_ROWS = 65536
TRIED = 2
"""Shifts that are tried around the difference of the first levels of the bands, in both directions."""
SHIFTED = ("band", "total", "one_electron")
"""Energies that change with the zero of energy, by the number of electrons times the shift."""


@dataclass(frozen=True)
class Alignment:
    """shifts: levels by which each snapshot is moved down. begin: level of the reference that is the first one of the aligned
    LDOS. levels: number of levels that are kept. first: energy of the first, eV. spacing: eV."""

    shifts: dict[str, int]
    begin: int
    levels: int
    first: float
    spacing: float

    def energies(self) -> str:
        """`data.points.energies` for the aligned snapshots."""
        return f"{{first: {self.first:g}, spacing: {self.spacing:g}, levels: {self.levels}}}"


def align_snapshots(
    snapshots: Sequence[Snapshot],
    folder: Path,
    *,
    first: float,
    spacing: float,
    reference: str | None = None,
    zero: float = 1e-5,
    trim: bool = False,
    last: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Alignment:
    """Write NAME.out.npy and NAME.info.json of each snapshot to a new folder, with links to the files of descriptors.

    The metadata is that of the aligned LDOS: the Fermi energy is lower by the shift, and energies by the number of electrons
    times the shift; `ldos_shift_ev` is the shift.

    Parameters
    ----------
    first, spacing
        Lowest energy and spacing of the levels in the files, eV.
    reference
        Name of the snapshot with which the others are aligned; default: the first.
    zero
        A band begins where the mean LDOS exceeds this fraction of its norm.
    trim
        Leave out the levels below the band of the reference.
    last
        Leave out the levels above this energy of the reference, eV.
    """
    if folder.exists():
        raise ForgefieldError(f"{folder} exists already; delete it or choose another name")
    if not spacing > 0:
        raise ForgefieldError(f"--spacing is the distance of levels in eV; it must be above 0, not {spacing:g}")
    means = _means(snapshots, progress)
    alignment = find_alignment(
        means, first=first, spacing=spacing, reference=reference, zero=zero, trim=trim, last=last
    )
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for number, snapshot in enumerate(snapshots, start=len(snapshots) + 1):
            _write(snapshot, partial, folder, alignment)
            if progress is not None:
                progress(number, 2 * len(snapshots))
        os.replace(partial, folder)
    except OSError as error:
        raise ForgefieldError(f"Could not write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return alignment


def find_alignment(
    means: dict[str, np.ndarray],
    *,
    first: float,
    spacing: float,
    reference: str | None = None,
    zero: float = 1e-5,
    trim: bool = False,
    last: float | None = None,
) -> Alignment:
    """Shifts and common levels of snapshots. means: (levels,), mean LDOS, by name of the snapshot; see `align_snapshots`."""
    name = next(iter(means)) if reference is None else reference
    if name not in means:
        raise ForgefieldError(f"--reference {name}: no snapshot has this name; the snapshots are {', '.join(means)}")
    levels = len(means[name])
    begin = _band_begin(means[name], zero, name)
    shifts = {}
    for other, mean in means.items():
        if len(mean) != levels:
            raise ForgefieldError(
                f"{other} has {len(mean)} levels, {name} has {levels}; aligned snapshots need the same ones"
            )
        shifts[other] = _best_shift(mean, means[name], _band_begin(mean, zero, other), begin)
    low, high = max(0, *(-shift for shift in shifts.values())), levels - max(0, *shifts.values())
    if trim:
        low = max(low, begin)
    if last is not None:
        high = min(high, int(np.sum(first + spacing * np.arange(levels) <= last)))
    if high - low < 2:
        raise ForgefieldError(
            f"the aligned snapshots have {max(0, high - low)} levels in common; at least 2 are needed"
        )
    return Alignment(shifts, low, high - low, first + low * spacing, spacing)


def _band_begin(mean: np.ndarray, zero: float, name: str) -> int:
    above = np.flatnonzero(mean > zero * np.linalg.norm(mean))
    if len(above) == 0:
        raise ForgefieldError(f"{name}: its LDOS is zero")
    return int(above[0])


def _best_shift(mean: np.ndarray, reference: np.ndarray, begin: int, reference_begin: int) -> int:
    """Levels by which to move `mean` down, with the smallest squared difference up to a tenth of the levels above the bands'
    beginning."""
    end = max(begin, reference_begin) + len(mean) // 10
    guess = begin - reference_begin
    tried = range(guess - TRIED, guess + TRIED + 1)
    errors = [float(((_moved(mean, shift) - reference)[:end] ** 2).sum()) for shift in tried]
    return tried[int(np.argmin(errors))]


def _moved(mean: np.ndarray, shift: int) -> np.ndarray:
    moved = np.zeros_like(mean)
    source = np.arange(len(mean)) + shift
    inside = (source >= 0) & (source < len(mean))
    moved[inside] = mean[source[inside]]
    return moved


def _means(snapshots: Sequence[Snapshot], progress: Callable[[int, int], None] | None) -> dict[str, np.ndarray]:
    means: dict[str, np.ndarray] = {}
    for number, snapshot in enumerate(snapshots, start=1):
        if snapshot.name in means:
            raise ForgefieldError(f"two snapshots are called {snapshot.name}; their files would have the same names")
        sums = np.zeros(snapshot.n_targets)
        for start in range(0, snapshot.n_points, BLOCK_ROWS):
            sums += _block(snapshot, start).sum(axis=0, dtype=np.float64)
        means[snapshot.name] = sums / snapshot.n_points
        if progress is not None:
            progress(number, 2 * len(snapshots))
    return means


def _block(snapshot: Snapshot, start: int, rows: int = BLOCK_ROWS) -> np.ndarray:
    """Targets of points from `start` on."""
    assert snapshot.targets is not None
    n = min(rows, snapshot.n_points - start)
    values = np.empty((n, snapshot.n_targets), snapshot.targets.dtype.newbyteorder("="))
    snapshot.read_into(start, None, values)
    return values


def _write(snapshot: Snapshot, partial: Path, folder: Path, alignment: Alignment) -> None:
    assert snapshot.targets is not None
    if snapshot.grid_shape is None:
        raise ForgefieldError(f"{snapshot.name}: its points have no grid, for example because they are shuffled")
    nx, ny, nz = snapshot.grid_shape
    shift = alignment.shifts[snapshot.name]
    levels = slice(alignment.begin + shift, alignment.begin + shift + alignment.levels)
    path = partial / f"{snapshot.name}.out.npy"
    with writing_grid(path, (nx, ny, nz, alignment.levels), snapshot.targets.dtype.newbyteorder("=")) as file:
        planes = max(1, BLOCK_ROWS // (ny * nz))
        for start in range(0, nx, planes):
            block = _block(snapshot, start * ny * nz, planes * ny * nz)
            file.write_planes(start, block[:, levels].reshape(-1, ny, nz, alignment.levels))
    document = json.dumps(_document(snapshot.info, shift * alignment.spacing), indent=1)
    (partial / f"{snapshot.name}{INFO_SUFFIX}").write_text(document)
    if snapshot.inputs is not None:
        source = snapshot.inputs.path
        (partial / source.name).symlink_to(os.path.relpath(source.resolve(), folder.resolve()))


def _document(info: SnapshotInfo, shift: float) -> dict[str, Any]:
    """The `.info.json` of a snapshot whose energies are lower by `shift`, eV; other keys of the original are kept."""
    aligned = replace(info, units=STANDARD["ldos"], energies=dict(info.energies))
    if info.fermi_energy is not None:
        aligned.fermi_energy = info.fermi_energy - shift
    document: dict[str, Any] = {"ldos_shift_ev": shift}
    if info.electrons is not None:
        document["energy_shift_from_qe_ev"] = info.electrons * shift
        for name in SHIFTED:
            if name in info.energies:
                aligned.energies[name] = info.energies[name] - info.electrons * shift
    original = load_json(Path(info.source).read_text()) if info.source.endswith(INFO_SUFFIX) else {}
    return original | aligned.to_json() | document

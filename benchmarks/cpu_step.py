"""CPU time of a training step and of an evaluation of NequIP, with convolutions compiled from C and with PyTorch's operations.

    python benchmarks/cpu_step.py [--cases S M L] [--repeats 8]

One process, one thread, both ways in turns; process CPU time, median. Before timing, gradients of an energy and force loss are
compared. The first step includes compiling the C code, unless it is in the cache.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from ase import Atoms
from ase.build import molecule

from forgefield.data.batch import batch_from_frames
from forgefield.data.readers import frames_from_atoms
from forgefield.data.species import SpeciesTable
from forgefield.models.potential import Potential
from forgefield.models.registry import registered_class
from forgefield.ops.execution import execution

CUTOFF, SPECIES = 4.5, ("O", "H")
CASES = {"S": 4, "M": 3, "L": 3}
"""Preset: molecules along an edge of the box."""


def water(n: int) -> Atoms:
    """n^3 randomly rotated molecules on a grid of 3.1 A."""
    random = np.random.default_rng(0)
    box = Atoms(cell=[3.1 * n] * 3, pbc=True)
    for corner in np.ndindex(n, n, n):
        one = molecule("H2O")
        one.rotate(random.uniform(0, 360), random.normal(size=3))
        one.translate(3.1 * np.array(corner))
        box += one
    return box


def build(preset: str) -> Potential:
    """NequIP of this preset with random weights, float32."""
    architecture = registered_class("nequip")
    options = architecture.Options(**architecture.preset_options(preset, {}))
    statistics = {"mean_neighbours": 20.0, "forces_rms": 1.3, "reference_energies": {"O": -2.0, "H": 0.5}}
    complete = architecture.complete(options, species=SPECIES, cutoff=CUTOFF, statistics=statistics)
    generator = torch.Generator().manual_seed(0)
    return Potential(architecture(complete, species=SPECIES, cutoff=CUTOFF, dtype=torch.float32, generator=generator))


def median_ms(functions: list[Callable[[], None]], repeats: int) -> list[float]:
    """CPU time of each, in turns."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, taken in zip(functions, times):
            start = time.process_time()
            function()
            taken.append(1e3 * (time.process_time() - start))
    return [float(np.median(taken)) for taken in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    parser.add_argument("--repeats", type=int, default=8)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, float32, one thread, CPU ms; gradients: largest relative deviation")
    print("case  atoms  edges |   step   in C ratio | evaluation   in C ratio")
    for case in arguments.cases:
        potential = build(case)
        batch = batch_from_frames(frames_from_atoms([water(CASES[case])]), SpeciesTable(SPECIES), CUTOFF)

        def step(c_code: bool, potential: Potential = potential, batch: dict[str, torch.Tensor] = batch) -> None:
            potential.train().requires_grad_(True).zero_grad()
            with execution(c_code=c_code):
                out = potential(batch)
            (out["forces"].square().mean() + (out["energy"] / len(batch["species"])).square().sum()).backward()

        def evaluate(c_code: bool, potential: Potential = potential, batch: dict[str, torch.Tensor] = batch) -> None:
            potential.eval().requires_grad_(False)
            with execution(c_code=c_code):
                potential(batch)

        step(False)
        expected = [parameter.grad.clone() for parameter in potential.parameters() if parameter.grad is not None]
        start = time.perf_counter()
        step(True)
        first = time.perf_counter() - start
        gradients = [parameter.grad for parameter in potential.parameters() if parameter.grad is not None]
        deviation = max(float((a - b).norm() / b.norm()) for a, b in zip(gradients, expected) if b.norm() > 0)
        assert deviation < 1e-5, deviation
        plain, in_c = median_ms([lambda: step(False), lambda: step(True)], arguments.repeats)
        evaluate(True)
        plain_eval, in_c_eval = median_ms([lambda: evaluate(False), lambda: evaluate(True)], arguments.repeats)
        size = f"{len(batch['species']):5} {batch['edge_index'].shape[1]:6}"
        steps = f"{plain:6.1f} {in_c:6.1f} {plain / in_c:5.2f}"
        evaluations = f"{plain_eval:10.1f} {in_c_eval:6.1f} {plain_eval / in_c_eval:5.2f}"
        print(
            f"{case:5} {size} | {steps} | {evaluations} | gradients {deviation:.1e}, first step {first:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""CPU time of a training step and of an evaluation with compiled C code, with PyTorch's operations, and of `engine: compile`.

    python benchmarks/cpu_step.py [--cases S M L A-S A-M] [--repeats 8] [--compile]

Cases are presets of NequIP, and, after `A-`, of Allegro. One process, one thread, all ways in turns; process CPU time, median.
Before timing, gradients of an energy and force loss are compared. The first step includes compiling the C code, unless it is in
the cache.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from ase import Atoms
from ase.build import molecule

from forgefield.data.batch import Batch, batch_from_frames
from forgefield.data.readers import frames_from_atoms
from forgefield.data.species import SpeciesTable
from forgefield.models.potential import Potential
from forgefield.models.registry import registered_class
from forgefield.ops.execution import C_LATEST, C_NONE
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.options import TargetOptions, TaskOptions
from forgefield.tasks.task import Task
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.step import StepFunction

CUTOFF, SPECIES = 4.5, ("O", "H")
CASES = {"S": 4, "M": 3, "L": 3, "A-S": 4, "A-M": 3}
"""Case: molecules along an edge of the box."""


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


def build(case: str) -> Potential:
    """The model of this case with random weights, float32."""
    architecture = registered_class("allegro" if case.startswith("A-") else "nequip")
    options = architecture.Options(**architecture.preset_options(case.removeprefix("A-"), {}))
    statistics = {"mean_neighbours": 20.0, "forces_rms": 1.3, "reference_energies": {"O": -2.0, "H": 0.5}}
    complete = architecture.complete(options, species=SPECIES, cutoff=CUTOFF, statistics=statistics)
    generator = torch.Generator().manual_seed(0)
    return Potential(architecture(complete, species=SPECIES, cutoff=CUTOFF, dtype=torch.float32, generator=generator))


def labelled_water(case: str) -> Batch:
    """One frame with random labels."""
    batch = batch_from_frames(frames_from_atoms([water(CASES[case])]), SpeciesTable(SPECIES), CUTOFF)
    generator = torch.Generator().manual_seed(1)
    n_atoms = len(batch["species"])
    batch["forces"] = torch.randn(n_atoms, 3, generator=generator, dtype=torch.float64)
    batch["energy"] = torch.randn(1, generator=generator, dtype=torch.float64) - n_atoms
    return batch


def step_function(potential: Potential, c_code: int) -> StepFunction:
    task = Task(TaskOptions(energy=TargetOptions(), forces=TargetOptions()), SPECIES)
    return StepFunction(potential, task, ErrorMetrics(task.names, SPECIES), c_code=c_code)


def median_ms(functions: list[Callable[[], object]], repeats: int) -> list[float]:
    """CPU time of each, in turns."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, taken in zip(functions, times):
            start = time.process_time()
            function()
            taken.append(1e3 * (time.process_time() - start))
    return [float(np.median(taken)) for taken in times]


def gradients(engine: Engine, batch: Batch) -> list[torch.Tensor]:
    found = engine.differentiate(batch).gradients
    return [gradient for gradient in found if gradient is not None]


def deviation(engine: Engine, reference: Engine, batch: Batch) -> float:
    """Largest relative deviation of a gradient from that of the reference."""
    pairs = zip(gradients(engine, batch), gradients(reference, batch), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs if b.norm() > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--compile", action="store_true", help="time the compiled step, too")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, float32, one thread, CPU ms; gradients: largest relative deviation")
    print("case  atoms  edges |   step   in C ratio compile | evaluation   in C ratio")
    for case in arguments.cases:
        batch, potential = labelled_water(case), build(case).train()
        eager, in_c = (Engine(step_function(potential, level)) for level in (C_NONE, C_LATEST))
        start = time.perf_counter()
        in_c.differentiate(batch)
        first = time.perf_counter() - start
        deviations = [deviation(in_c, eager, batch)]
        engines = [eager, in_c]
        if arguments.compile:
            from forgefield.training.engines.compiled import CompileEngine

            engines.append(CompileEngine(step_function(potential, C_LATEST)))
            deviations.append(deviation(engines[-1], eager, batch))
        assert max(deviations) < 1e-5, deviations
        steps = median_ms([partial(engine.differentiate, batch) for engine in engines], arguments.repeats)
        evaluations = median_ms([partial(engine.evaluate, batch) for engine in engines[:2]], arguments.repeats)
        size = f"{len(batch['species']):5} {batch['edge_index'].shape[1]:6}"
        compiled = f"{steps[2]:7.1f}" if arguments.compile else "      -"
        step_columns = f"{steps[0]:6.1f} {steps[1]:6.1f} {steps[0] / steps[1]:5.2f} {compiled}"
        evaluation_columns = f"{evaluations[0]:10.1f} {evaluations[1]:6.1f} {evaluations[0] / evaluations[1]:5.2f}"
        print(
            f"{case:5} {size} | {step_columns} | {evaluation_columns} | "
            f"gradients {deviations[0]:.1e}, first step {first:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()

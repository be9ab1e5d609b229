"""Active learning against random selection: labels needed for a potential of copper-gold alloys, with EMT as the labeller.

Both loops explore with molecular dynamics of the model they have, from the same starting structures, at the same temperatures,
up to the same limit of the uncertainty, and label the same number of structures in each iteration. One selects by uncertainty
and distance in feature space among structures above the threshold, the other draws from all explored structures at random.

Nothing is decided with the test structures. The number of optimiser steps is chosen by

    python benchmarks/active_learning.py --development --out active

with a seed, starting structures and EMT trajectories that the comparison does not use: of `STEPS`, the number with the smallest
force MAE after the last iteration, averaged over both strategies. Everything else was fixed before. Then

    python benchmarks/active_learning.py --out active

runs all loops without test data and tests their models at the end. Runs on one CPU core; every loop is resumed if the command
is repeated.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import yaml
from ase import Atoms
from ase.build import bulk, fcc111
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write

import forgefield
from forgefield.trust.dynamics import Dynamics
from forgefield.trust.loop.learn import Learning
from forgefield.trust.options import DynamicsOptions

SEEDS = (10, 11, 12, 13)
"""Of the comparison: each has its own starting structures, initial weights and random numbers."""
DEVELOPMENT_SEED = 100
DEVELOPMENT_TRAJECTORIES, TEST_TRAJECTORIES = 2000, 5000
"""Seeds of the EMT dynamics from which development and test structures are taken."""
STEPS = (250, 500, 1000)
"""Optimiser steps of an iteration that are tried."""
STRATEGIES = ("active", "random")
ITERATIONS, FRAMES = 5, 10
TEMPERATURES = [300.0, 900.0]
TRAINING = {
    "data": {"val": 0.2, "cutoff": 4.5, "batch": {"frames": 5}},
    "model": {
        "name": "nequip",
        "num_layers": 2,
        "l_max": 1,
        "parity": False,
        "num_features": 8,
        "radial_mlp_width": 16,
    },
    "task": {"energy": {"weight": 1.0, "per_atom": True}, "forces": {"weight": 1.0}},
    "training": {"lr": 0.01, "ema": 0.99, "tensorboard": 0},
    "trainer": {"check_val_every_n_epoch": 10, "accelerator": "cpu", "enable_progress_bar": False},
}
Row = tuple[int, float, float]
"""Labels, energy MAE in meV/atom, force MAE in meV/A."""


def structures(seed: int) -> list[Atoms]:
    """Ten cells of nearly pure copper, and one each of gold, an ordered alloy, a vacancy and a surface, all rattled."""
    random, found = np.random.default_rng(seed), []
    for number in range(10):
        atoms = bulk("Cu", a=3.6, cubic=True).repeat((2, 1, 1))
        atoms.symbols[number % 8] = "Au" if number % 2 else "Cu"
        found.append(atoms)
    ordered = bulk("Cu", a=3.85, cubic=True)
    ordered.symbols[:2] = "Au"
    vacancy = bulk("Au", a=4.0, cubic=True).repeat((2, 1, 1))
    vacancy.symbols[::3] = "Cu"
    del vacancy[0]
    slab = fcc111("Cu", size=(1, 2, 4), a=3.65, vacuum=5.0)
    slab.symbols[:3] = "Au"
    slab.pbc = True
    found += [bulk("Au", a=4.06, cubic=True), ordered, vacancy, slab]
    for number, atoms in enumerate(found):
        atoms.positions += random.normal(0, 0.1, atoms.positions.shape)
        atoms.info["name"] = f"start-{number}"
    return found


def frames_of_dynamics(seed: int) -> list[Atoms]:
    """Structures of EMT's dynamics: four of each start and temperature; of the ten similar starts two are used."""
    frames, starts = [], structures(seed)
    for number, start in enumerate([*starts[:2], *starts[10:]]):
        for temperature in TEMPERATURES:
            atoms = start.copy()
            atoms.calc = EMT()
            options = DynamicsOptions(temperature=temperature, timestep=5.0, thermostat="langevin", seed=seed + number)
            dynamics = Dynamics(atoms, options)
            for step in range(1, 161):
                dynamics.step()
                if step % 40 == 0:
                    frames.append(labelled(atoms))
    return frames


def labelled(atoms: Atoms) -> Atoms:
    image = Atoms(atoms.numbers, positions=atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
    image.calc = SinglePointCalculator(image, energy=atoms.get_potential_energy(), forces=atoms.get_forces())
    return image


def learn(folder: Path, strategy: str, seed: int, steps: int) -> Learning:
    """Run or resume one loop, which sees no test data."""
    name = f"{strategy}-{seed}-{steps}"
    starts, config, path = (folder / f"{name}-starts.extxyz", folder / f"{name}-train.yaml", folder / f"{name}.yaml")
    write(starts, structures(seed))
    trainer = {**TRAINING["trainer"], "max_steps": steps}
    config.write_text(yaml.safe_dump({**TRAINING, "seed": seed, "trainer": trainer}))
    content = {
        "name": name,
        "out": str(folder / "loops"),
        "config": str(config),
        "iterations": ITERATIONS,
        "seed": seed,
        "explore": {
            "structures": str(starts),
            "starts": 6,
            "temperatures": TEMPERATURES,
            "ps": 0.3,
            "timestep": 5.0,
            "every": 5,
            "threshold": 0.1 if strategy == "active" else 1e-6,  # random: every explored structure is a candidate
            "limit": 0.5,
        },
        "select": {"frames": FRAMES, "by": "both" if strategy == "active" else "random"},
        "label": {"calculator": "ase.calculators.emt.EMT", "max_force": 20.0},
    }
    path.write_text(yaml.safe_dump(content))
    began, processor = time.monotonic(), time.process_time()
    result = forgefield.learn(path)
    print(
        f"{name}: {result.labels} labels, {time.monotonic() - began:.0f} s, processor {time.process_time() - processor:.0f} s",
        flush=True,
    )
    return result


def tested(result: Learning, data: Path) -> list[Row]:
    """Errors of the models of all iterations on `data`."""
    rows, labels = [], 0
    for record in result.history:
        labels += record["labelled"]
        if "run" in record:
            errors = forgefield.test(result.folder / "runs" / record["run"], str(data))
            rows.append((labels, errors["energy_mae"], errors["forces_mae"]))
    return rows


def labels_for(rows: list[Row], error: float) -> int | None:
    """The labels of the first model whose force MAE is at most `error`; None if there is none."""
    return next((labels for labels, _, forces in rows if forces <= error), None)


def develop(folder: Path) -> None:
    """Print the errors on development structures for each number of steps."""
    data = folder / "development.extxyz"
    write(data, frames_of_dynamics(DEVELOPMENT_TRAJECTORIES))
    for steps in STEPS:
        finals = []
        for strategy in STRATEGIES:
            rows = tested(learn(folder, strategy, DEVELOPMENT_SEED, steps), data)
            show(f"{strategy}, {steps} steps", rows)
            finals.append(rows[-1][2])
        print(f"{steps} steps: mean force MAE after the last iteration {statistics.mean(finals):.1f} meV/A", flush=True)


def compare(folder: Path, steps: int) -> None:
    """Run all loops, then test all models once, and print means and standard deviations over the seeds."""
    results = {(name, seed): learn(folder, name, seed, steps) for seed in SEEDS for name in STRATEGIES}
    data = folder / "test.extxyz"
    write(data, frames_of_dynamics(TEST_TRAJECTORIES))
    rows = {key: tested(result, data) for key, result in results.items()}
    for (name, seed), of_loop in rows.items():
        show(f"{name}, seed {seed}", of_loop)
    print(f"mean and standard deviation over the seeds {', '.join(map(str, SEEDS))}")
    for name in STRATEGIES:
        for index, title in ((1, "energy MAE, meV/atom"), (2, "force MAE, meV/A")):
            columns = zip(*([row[index] for row in rows[name, seed]] for seed in SEEDS))
            cells = [f"{statistics.mean(values):6.1f} +- {statistics.stdev(values):4.1f}" for values in columns]
            print(f"    {name:6s} {title:20s} " + "   ".join(cells))
    for seed in SEEDS:
        error = rows["random", seed][-1][2]
        needed = labels_for(rows["active", seed], error)
        shown = "not reached" if needed is None else f"with {needed} labels"
        print(
            f"seed {seed}: force MAE of random selection with {rows['random', seed][-1][0]} labels, {error:.1f} meV/A: "
            f"active selection {shown}"
        )


def show(title: str, rows: list[Row]) -> None:
    print(title)
    for labels, energy, forces in rows:
        print(f"    {labels:4d} labels   energy MAE {energy:7.2f} meV/atom   force MAE {forces:7.1f} meV/A", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("active-learning"))
    parser.add_argument("--development", action="store_true", help="choose the number of steps")
    parser.add_argument("--steps", type=int, default=1000, help="optimiser steps of an iteration")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    develop(args.out) if args.development else compare(args.out, args.steps)


if __name__ == "__main__":
    main()

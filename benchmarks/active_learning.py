"""Active learning against random selection: labels needed for a potential of copper-gold alloys, with EMT as the labeller.

Both loops explore with molecular dynamics of the model they have, from the same starting structures at the same temperatures,
and label the same number of structures in each iteration. One selects by uncertainty and distance in feature space, the other
draws from all explored structures at random. Errors are those on structures of EMT's own dynamics.

    python benchmarks/active_learning.py --out active --seeds 0 1

Runs on one CPU core; every loop is resumed if the command is repeated.
"""

from __future__ import annotations

import argparse
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
from forgefield.trust.options import DynamicsOptions

TEMPERATURES = [300.0, 900.0]
TRAINING = {
    "seed": 0,
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
    "trainer": {"max_steps": 500, "check_val_every_n_epoch": 10, "accelerator": "cpu", "enable_progress_bar": False},
}


def structures() -> list[Atoms]:
    """Ten cells of nearly pure copper, and one each of gold, an ordered alloy, a vacancy and a surface."""
    random, found = np.random.default_rng(0), []
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


def test_frames(starts: list[Atoms]) -> list[Atoms]:
    """Structures of EMT's dynamics: four of each start and temperature; of the ten similar starts two are used."""
    frames = []
    for number, start in enumerate([*starts[:2], *starts[10:]]):
        for temperature in TEMPERATURES:
            atoms = start.copy()
            atoms.calc = EMT()
            options = DynamicsOptions(temperature=temperature, timestep=5.0, thermostat="langevin", seed=1000 + number)
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


def loop(folder: Path, strategy: str, seed: int, iterations: int, frames: int) -> list[tuple[int, float, float]]:
    """(labels, energy MAE in meV/atom, force MAE in meV/A) of the models of all iterations."""
    explore = {
        "structures": str(folder / "starts.extxyz"),
        "starts": 6,
        "temperatures": TEMPERATURES,
        "ps": 0.3,
        "timestep": 5.0,
        "every": 5,
        "threshold": 0.1 if strategy == "active" else 1e-6,
        "limit": 0.5 if strategy == "active" else 1e6,
    }
    content = {
        "name": f"{strategy}-{seed}",
        "out": str(folder / "loops"),
        "config": str(folder / f"train-{seed}.yaml"),
        "iterations": iterations,
        "seed": seed,
        "explore": explore,
        "select": {"frames": frames, "by": "both" if strategy == "active" else "random"},
        "label": {"calculator": "ase.calculators.emt.EMT", "max_force": 20.0},
    }
    path = folder / f"{strategy}-{seed}.yaml"
    path.write_text(yaml.safe_dump(content))
    began = time.monotonic()
    result = forgefield.learn(path)
    rows, labels = [], 0
    for record in result.history:
        labels += record["labelled"]
        if "test" in record.get("errors", {}):
            rows.append((labels, record["errors"]["test"]["energy_mae"], record["errors"]["test"]["forces_mae"]))
    print(f"{strategy}, seed {seed}: {time.monotonic() - began:.0f} s", flush=True)
    for labels, energy, forces in rows:
        print(f"    {labels:4d} labels   energy MAE {energy:7.2f} meV/atom   force MAE {forces:7.1f} meV/A", flush=True)
    return rows


def labels_for(rows: list[tuple[int, float, float]], error: float) -> int | None:
    """The labels of the first model whose force MAE is at most `error`; None if there is none."""
    return next((labels for labels, _, forces in rows if forces <= error), None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("active-learning"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--frames", type=int, default=10)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    starts = structures()
    write(args.out / "starts.extxyz", starts)
    write(args.out / "test.extxyz", test_frames(starts))
    summary = []
    for seed in args.seeds:
        config = {**TRAINING, "seed": seed, "data": {**TRAINING["data"], "test": str(args.out / "test.extxyz")}}
        (args.out / f"train-{seed}.yaml").write_text(yaml.safe_dump(config))
        rows = {name: loop(args.out, name, seed, args.iterations, args.frames) for name in ("active", "random")}
        error = min(forces for _, _, forces in rows["random"])
        needed = labels_for(rows["active"], error)
        used = labels_for(rows["random"], error)
        summary.append((seed, error, used, needed))
    for seed, error, used, needed in summary:
        shown = "not reached" if needed is None else f"{needed} labels"
        print(f"seed {seed}: force MAE {error:.1f} meV/A: random {used} labels, active {shown}")


if __name__ == "__main__":
    main()

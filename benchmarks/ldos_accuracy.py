"""Errors of LDOS networks of Be on a held-out snapshot, Forgefield and MALA, over several seeds.

    FORGEFIELD_MALA_PYTHON=mala/bin/python python benchmarks/ldos_accuracy.py [--seeds 4] [--data ../shared/data]

Forgefield trains the be.yaml of docs/guides/ldos.md (91-100-11, relu, batches of 486 points, learning rate 1e-3, 20 epochs) and
variants of it, MALA 1.4.0 the same network with the same settings, on snapshots 0 and 1. Snapshot 2 is predicted. With
`--validation` one of the snapshots 0 and 1 is trained on and the other predicted, both ways: for choosing settings. Nothing is
chosen with it: it is not even a validation set (Forgefield has none here; MALA requires one and gets snapshot 1 for its log),
and the weights are those after the last epoch. One function measures the predictions of both. MALA runs with the interpreter
that FORGEFIELD_MALA_PYTHON names; without it only Forgefield's rows are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from forgefield import api
from forgefield.ldos.electronic.energy_grid import EnergyGrid
from forgefield.ldos.electronic.fermi import band_energy, density, dos_of_ldos, fermi_energy

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Split:
    """Names of snapshots."""

    train: tuple[str, ...]
    held_out: str


TEST = Split(("Be_snapshot0", "Be_snapshot1"), "Be_snapshot2")
VALIDATION = (Split(("Be_snapshot0",), "Be_snapshot1"), Split(("Be_snapshot1",), "Be_snapshot0"))
GRID = EnergyGrid(-5.0, 2.5, 11)
ELECTRONS, ATOMS = 4.0, 2
AS_MALA = "outputs: minmax, relu also on the output"
CASES: dict[str, list[str]] = {
    "be.yaml": [],
    "outputs: minmax": ["++data.points.scaling={outputs: minmax}"],
    AS_MALA: ["model.output_activation=relu"],
    "outputs: feature-wise-minmax": ["++data.points.scaling={outputs: feature-wise-minmax}"],
    "lr 0.01": ["training.lr=0.01"],
    "lr 0.01, batches of 162": ["training.lr=0.01", "data.batch.points=162"],
    "lr 0.01, cosine": ["training.lr=0.01", "training.scheduler={name: cosine_to, stop_lr: 0.0}"],
    "no EMA": ["training.ema=null"],
    "gelu": ["model.activation=gelu"],
    "band energy in the loss, weight 0.001": ["++task.band_energy={weight: 0.001, every: 2}"],
}
"""Overrides of be.yaml."""
TESTED = ("be.yaml", AS_MALA)
"""What is tested on snapshot 2: the documented config, and MALA's settings."""


def page_config(folder: Path, split: Split, out: Path, seed: int) -> dict[str, Any]:
    """The be.yaml of docs/guides/ldos.md with the paths of this machine and without the held-out snapshot."""
    page = (ROOT / "docs" / "guides" / "ldos.md").read_text(encoding="utf-8")
    config: dict[str, Any] = yaml.safe_load(page.split("`be.yaml`:\n\n```yaml\n")[1].split("```")[0])
    config["data"]["train"] = [str(folder / f"{name}.in.npy") for name in split.train]
    config["data"]["val"] = None
    del config["task"]["observables"]  # measured during a training, on validation snapshots
    config["training"]["tensorboard"] = 0
    config["trainer"] |= {"enable_progress_bar": False, "accelerator": "cpu"}
    return {"name": "be", "out": str(out), "seed": seed, **config}


def train(folder: Path, split: Split, out: Path, seed: int, overrides: list[str]) -> np.ndarray:
    """LDOS of the held-out snapshot that Forgefield predicts, (points, levels), 1/(eV A^3)."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        run = api.train(page_config(folder, split, out, seed), *overrides, fresh=True)
    return predict(folder, split, api.load(run, which="last"))


def predict(folder: Path, split: Split, network: Any) -> np.ndarray:
    """LDOS of the held-out snapshot, (points, levels)."""
    inputs = np.load(folder / f"{split.held_out}.in.npy")[..., 3:]
    with torch.no_grad():
        return network(torch.from_numpy(inputs.reshape(-1, inputs.shape[-1]))).numpy()


def train_mala(folder: Path, out: Path, seed: int, *, output_activation: bool) -> np.ndarray:
    """The same of MALA."""
    settings = {
        "folder": str(folder),
        "train": TEST.train,
        "held_out": TEST.held_out,
        "seed": seed,
        "layers": [91, 100, 11],
        "output_activation": output_activation,
        "batch": 486,
        "lr": 1e-3,
        "epochs": 20,
        "energies": [GRID.levels, GRID.spacing, GRID.first],
        "out": str(out),
    }
    script = Path(__file__).with_name("ldos_accuracy_peer.py")
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [os.environ["FORGEFIELD_MALA_PYTHON"], str(script), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, cwd=out)
    if done.returncode:
        raise SystemExit(f"MALA failed:\n{done.stderr[-2000:]}")
    ldos = np.load(out / "mala.npy")
    return ldos.reshape(-1, ldos.shape[-1])


def imported(folder: Path, out: Path, ldos: np.ndarray) -> float:
    """Largest difference of the last model of MALA once it is imported, relative to the largest value of its LDOS."""
    run = api.import_mala(out / "mala.zip", name="imported", out=out)
    return float(np.abs(predict(folder, TEST, api.load(run)) - ldos).max() / np.abs(ldos).max())


def errors(folder: Path, split: Split, predicted: np.ndarray) -> tuple[float, float, float]:
    """MSE of the LDOS, 1/(eV A^3)^2; absolute error of the band energy, meV/atom; mean relative error of the density, %."""
    info = json.loads((folder / f"{split.held_out}.info.json").read_text())
    target = np.load(folder / f"{split.held_out}.out.npy").reshape(predicted.shape)
    voxel, temperature = abs(np.linalg.det(info["voxel"]["array"])), info["temperature"]
    energies, densities = [], []
    for ldos in (torch.from_numpy(values).double() for values in (predicted, target)):
        dos = dos_of_ldos(ldos, voxel)
        fermi = fermi_energy(dos, GRID, temperature, ELECTRONS)
        energies.append(float(band_energy(dos, GRID, temperature, fermi)))
        densities.append(density(ldos, GRID, temperature, fermi))
    squared = float(((predicted.astype(np.float64) - target.astype(np.float64)) ** 2).mean())
    relative = float(((densities[0] - densities[1]) / densities[1]).abs().mean())
    return squared, 1000 * abs(energies[0] - energies[1]) / ATOMS, 100 * relative


def show(who: str, rows: list[tuple[float, float, float]]) -> None:
    """Mean and standard deviation over the seeds, then the values of every seed."""
    values = np.array(rows) * (1e7, 1, 1)
    mean, spread = values.mean(0), values.std(0, ddof=1) if len(rows) > 1 else 0 * values[0]
    cells = [f"{m:6.2f} +- {s:5.2f}" for m, s in zip(mean, spread, strict=True)]
    each = "; ".join(f"{a:.2f}, {b:.0f}, {c:.2f}" for a, b, c in values)
    print(f"{who:62} {cells[0]}   {cells[1]}   {cells[2]}   ({each})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder that holds be2_ldos")
    parser.add_argument("--seeds", type=int, default=4, help="trainings of each case: seeds 0, 1, ...")
    parser.add_argument(
        "--validation", action="store_true", help="compare settings on snapshots 0 and 1; snapshot 2 is not read"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder, seeds = (args.data / "be2_ldos").resolve(), range(args.seeds)
    print(f"torch {torch.__version__}, seeds 0 to {args.seeds - 1}; mean +- standard deviation (each seed)")
    print(f"{'':62} LDOS MSE, 1e-7    band, meV/atom    density, %")
    with tempfile.TemporaryDirectory() as text:
        out = Path(text)
        if args.validation:
            for name, overrides in CASES.items():
                for split in VALIDATION:
                    rows = [errors(folder, split, train(folder, split, out, s, overrides)) for s in seeds]
                    show(f"{name}; predicts {split.held_out}", rows)
            return
        if os.environ.get("FORGEFIELD_MALA_PYTHON"):
            for who, relu in (("MALA, relu also on the output (its default)", True), ("MALA, linear output", False)):
                predictions = [train_mala(folder, out, s, output_activation=relu) for s in seeds]
                show(who, [errors(folder, TEST, ldos) for ldos in predictions])
            print(
                f"the last of these, imported, differs by {imported(folder, out, predictions[-1]):.1e} of the largest LDOS"
            )
        for name in TESTED:
            rows = [errors(folder, TEST, train(folder, TEST, out, s, CASES[name])) for s in seeds]
            show(f"Forgefield, {name}", rows)


if __name__ == "__main__":
    main()

"""Predicted electronic structures as files: arrays (npy), densities (cube), numbers (JSON), structures with energies (extxyz).

A folder contains the predictions for all structures of a source; it is complete or does not exist.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from forgefield.data.labels.label_reader import PREDICTED_BY, LabelReader
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.readers import frames_with_values, source_files
from forgefield.errors import ForgefieldError
from forgefield.files import remove_leftovers, temporary_name
from forgefield.inference.predict import keep_labels, keep_values
from forgefield.inference.xyz_files import write_extxyz
from forgefield.ldos.inference.electrons import ElectronicStructure, ElectronModel
from forgefield.ldos.options import ElectronOptions
from forgefield.physics.units import BOHR
from forgefield.runs import Run

NUMBERS = "results.json"


def predict_run(
    run: Run,
    source: object,
    out: str | os.PathLike[str],
    options: ElectronOptions,
    *,
    which: str,
    device: str,
    units: UnitOptions,
    notify: Callable[[str], None],
) -> Path:
    """Predict all structures of `source` with a run, see `predict_electrons`."""
    model = ElectronModel(
        run,
        which=which,
        device=device,
        grid=options.grid,
        spacing=options.spacing,
        pseudopotentials=options.pseudopotentials,
        electrons=options.electrons,
    )
    return predict_electrons(
        model, source, out, temperature=options.temperature, ldos=options.ldos, units=units, notify=notify
    )


def predict_electrons(
    model: ElectronModel,
    source: object,
    out: str | os.PathLike[str],
    *,
    temperature: float | None,
    ldos: bool = False,
    units: UnitOptions | None = None,
    notify: Callable[[str], None] = lambda text: None,
) -> Path:
    """Predict all structures of `source` and write them to the new folder `out`: `results.json`, `predicted.extxyz`,
    `energies.npy` (levels,) and `dos.npy` (n, levels); of structure i `density-i.npy`, `density-i.cube` and, if requested,
    `ldos-i.npy`. notify: receives a message for each structure.
    """
    out = Path(out)
    if out.exists():
        raise ForgefieldError(f"{out} exists already; predictions are written to a new folder.")
    units = units or UnitOptions()
    reader = LabelReader(LabelOptions(), units)
    frames = [pair for file in source_files(source) for pair in frames_with_values(file, reader, units)]
    partial = temporary_name(out)
    remove_leftovers(out.parent, of=out)
    try:
        partial.mkdir(parents=True)
        rows, images, states = [], [], []
        for number, (frame, raw) in enumerate(frames):
            atoms = Atoms(frame.numbers, frame.positions, cell=frame.cell, pbc=frame.pbc)
            try:
                prediction = model(atoms, temperature)
            except ForgefieldError as error:
                raise ForgefieldError(f"{frame.where}: {error}") from error
            notify(_summary(prediction, number))
            write_arrays(prediction, partial, number, ldos=ldos)
            rows.append({**prediction.numbers(), "source": frame.source, "frame": frame.index})
            images.append(with_results(prediction))
            keep_labels(images[-1], frame)
            if raw is not None:
                keep_values(images[-1], raw, reader)
            states += [prediction.dos.cpu().numpy()] if prediction.dos is not None else []
            if prediction.missing is not None and number == 0:
                notify(f"No free energy: {prediction.missing}.")
        (partial / NUMBERS).write_text(json.dumps(rows, indent=1) + "\n")
        write_extxyz(partial / "predicted.extxyz", images)
        if states:
            assert model.network.energies is not None
            np.save(partial / "dos.npy", np.stack(states))
            np.save(partial / "energies.npy", model.network.energies.energies().numpy())
        os.replace(partial, out)
    except OSError as error:
        raise ForgefieldError(f"Could not write {out}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def write_arrays(prediction: ElectronicStructure, folder: Path, number: int, *, ldos: bool) -> None:
    """Write the arrays of one structure. ldos: also the LDOS, which is the largest."""
    density = prediction.density.cpu().numpy()
    np.save(folder / f"density-{number}.npy", density)
    with (folder / f"density-{number}.cube").open("w") as file:
        write_cube(file, prediction.atoms, density * BOHR**3, "electron density, 1/Bohr^3")
    if ldos and prediction.ldos is not None:
        np.save(folder / f"ldos-{number}.npy", prediction.ldos.cpu().numpy())


def write_cube(file: IO[str], atoms: Atoms, values: np.ndarray, title: str) -> None:
    """values: (nx, ny, nz), in any unit; a file that common viewers read, lengths in Bohr."""
    file.write(f"Forgefield: {title}\n{atoms.get_chemical_formula()}\n")
    file.write(f"{len(atoms):5d}{0:12.6f}{0:12.6f}{0:12.6f}\n")
    for n, vector in zip(values.shape, np.array(atoms.cell) / BOHR):
        file.write(f"{n:5d}" + "".join(f"{x / n:12.6f}" for x in vector) + "\n")
    for number, position in zip(atoms.numbers, atoms.positions / BOHR):
        file.write(f"{number:5d}{float(number):12.6f}" + "".join(f"{x:12.6f}" for x in position) + "\n")
    for row in values.reshape(-1, values.shape[2]):
        for start in range(0, len(row), 6):
            file.write("".join(f"{x:13.5E}" for x in row[start : start + 6]) + "\n")


def with_results(prediction: ElectronicStructure) -> Atoms:
    """The structure with the free energy as its energy, and other numbers in `info`."""
    atoms = prediction.atoms.copy()
    atoms.info[PREDICTED_BY] = "forgefield"
    for name in ("temperature", "fermi_energy", "band_energy", "entropy"):
        value = getattr(prediction, name)
        if value is not None:
            atoms.info[name] = value
    if prediction.free_energy is not None:
        atoms.calc = SinglePointCalculator(atoms, energy=prediction.free_energy, free_energy=prediction.free_energy)
    return atoms


def _summary(prediction: ElectronicStructure, number: int) -> str:
    values = [f"grid {' x '.join(map(str, prediction.grid_shape))}"]
    energies = {
        "Fermi energy": prediction.fermi_energy,
        "band energy": prediction.band_energy,
        "free energy": prediction.free_energy,
    }
    values += [f"{name} {value:.6f} eV" for name, value in energies.items() if value is not None]
    return f"{number}: {prediction.atoms.get_chemical_formula()}, {', '.join(values)}"

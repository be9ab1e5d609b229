"""Labelled frames as a reference: errors of the model on them, and what follows from them without a calculator.

Frames of two atoms are a dimer curve; frames of the evaluated composition, such as a trajectory of ab-initio molecular
dynamics, have a density, radial distribution functions and, with momenta and times, a velocity autocorrelation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ase import Atoms

from forgefield.trust.suites.measurement import Measurement, NotApplicable, Panel, Setting, curve
from forgefield.trust.suites.motion import add_autocorrelation, add_radial_distributions, mass_density

MOST_FRAMES = 500
"""Frames on which the model is evaluated, evenly spaced."""
MOST_POINTS = 3000
"""Points of a figure."""
FEWEST_DISTANCES = 3
"""Distances that make a dimer curve."""


def errors_on_frames(setting: Setting) -> Measurement:
    """Errors of energies and forces on the labelled frames of the reference."""
    frames = [atoms for atoms in setting.labelled if atoms.calc is not None and "energy" in atoms.calc.results]
    if not frames:
        raise NotApplicable("there are no labelled frames to compare with (--reference FILE)")
    if len(frames) > MOST_FRAMES:
        frames = [frames[i] for i in np.linspace(0, len(frames) - 1, MOST_FRAMES).astype(int)]
    energies, forces = [], []
    for atoms in frames:
        image, known = atoms.copy(), atoms.calc.results
        image.calc = setting.calculator
        energies.append((known["energy"] / len(atoms), image.get_potential_energy() / len(atoms)))
        if "forces" in known:
            forces += list(zip(np.ravel(known["forces"]), image.get_forces().ravel()))
    result = Measurement(notes=[f"{len(frames)} frames of {len(setting.labelled)}."])
    reference, model = 1e3 * np.array(energies).T
    error = model - reference
    result.set("energy RMSE", float(np.sqrt(np.square(error).mean())), "meV/atom")
    result.set("energy RMSE without the mean error", float(error.std()), "meV/atom")
    result.panels.append(_parity("Energies", "meV/atom", reference - reference.mean(), model - reference.mean()))
    if forces:
        reference, model = np.array(forces).T
        result.set("force RMSE", 1e3 * float(np.sqrt(np.square(model - reference).mean())), "meV/A")
        result.panels.append(_parity("Forces", "eV/A", reference, model))
    return result


def _parity(title: str, unit: str, reference: np.ndarray, model: np.ndarray) -> Panel:
    chosen = np.linspace(0, len(reference) - 1, min(len(reference), MOST_POINTS)).astype(int)
    limits = [min(reference.min(), model.min()), max(reference.max(), model.max())]
    curves = [curve(reference[chosen], model[chosen], marker=True), curve(limits, limits)]
    return Panel(title, f"label, {unit}", f"model, {unit}", curves)


def measured_on_frames(name: str, setting: Setting) -> Measurement | None:
    """What the labelled frames say about the evaluation of this name; None if they say nothing."""
    if name == "dimers":
        return _dimers(setting.labelled)
    same = _of_composition(setting.labelled, setting.structure)
    result = Measurement(notes=[f"{len(same)} labelled frames of this composition."])
    if not same:
        return None
    if name == "liquid":
        add_radial_distributions(result, same)
        times = [atoms.info.get("time_ps") for atoms in same]
        if None not in times and all(atoms.has("momenta") for atoms in same) and len(same) > 3:
            add_autocorrelation(result, same)
        return result
    if name == "density":
        values = mass_density(same)
        result.set("density", float(values.mean()), "g/cm^3")
        if np.ptp(values) > 1e-9:  # not a trajectory in a fixed cell
            result.set("fluctuation of the density", float(values.std()), "g/cm^3")
        return result
    return None


def _of_composition(frames: Sequence[Atoms], structure: Atoms) -> list[Atoms]:
    """Frames that are periodic and have the same share of each element as a structure."""
    reduced = str(structure.symbols.formula.reduce()[0].convert("hill"))
    return [
        atoms
        for atoms in frames
        if all(atoms.pbc) and str(atoms.symbols.formula.reduce()[0].convert("hill")) == reduced
    ]


def _dimers(frames: Sequence[Atoms]) -> Measurement | None:
    """Energies of frames with two atoms, relative to the largest distance."""
    points: dict[str, list[tuple[float, float]]] = {}
    for atoms in frames:
        if len(atoms) == 2 and not any(atoms.pbc) and atoms.calc is not None and "energy" in atoms.calc.results:
            name = "-".join(sorted(atoms.get_chemical_symbols()))
            points.setdefault(name, []).append((atoms.get_distance(0, 1), atoms.calc.results["energy"]))
    result, curves = Measurement(), []
    for name, pairs in points.items():
        if len(pairs) < FEWEST_DISTANCES:
            continue
        distances, energies = np.array(sorted(pairs)).T
        energies = energies - energies[-1]
        best = int(energies.argmin())
        result.set(f"{name} distance", distances[best], "A")
        result.set(f"{name} depth", -energies[best], "eV")
        shown = energies < max(4 * -energies[best], 2.0)
        curves.append(curve(distances[shown], energies[shown], name))
    result.panels.append(Panel("Dimers", "distance, A", "energy, eV", curves))
    return result if curves else None

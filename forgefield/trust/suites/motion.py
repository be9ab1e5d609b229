"""Molecular dynamics as a test: conservation of energy, stability, structure and diffusion of liquids, density.

Simulations are written to files and continued after an interruption, like those of `forgefield md`.
"""

from __future__ import annotations

from itertools import combinations_with_replacement

import ase.io
import numpy as np
from ase import Atoms, units

from forgefield.trust.options import DynamicsOptions
from forgefield.trust.simulation import EXPLODED, Trajectory, simulate
from forgefield.trust.suites.measurement import Measurement, NotApplicable, Panel, Setting, curve, repeats

BINS = 120
"""Bins of radial distribution functions."""
FRAMES = 400
"""Frames of a trajectory, about."""
G_PER_CM3 = units._amu * 1e3 / 1e-24
"""One u/A^3 in g/cm^3."""


def energy_conservation(setting: Setting) -> Measurement:
    """Drift of the total energy in nve dynamics."""
    result, images, trajectory = _simulation(setting, "nve")
    if trajectory.drift is not None:
        result.set("drift", trajectory.drift, "meV/atom/ps")
    n, times = len(images[0]), [image.info["time_ps"] for image in images]
    totals = np.array([image.get_potential_energy() + image.get_kinetic_energy() for image in images])
    totals = 1e3 * (totals - totals[0]) / n
    result.set("fluctuation", float(totals.std()), "meV/atom")
    result.panels.append(Panel("Energy in nve", "time, ps", "total energy, meV/atom", [curve(times, totals)]))
    return result


def stability(setting: Setting) -> Measurement:
    """How long nvt dynamics stays bounded."""
    return _simulation(setting, "nvt")[0]


def liquid(setting: Setting) -> Measurement:
    """Stability, radial distribution functions, velocity autocorrelation and diffusion in nvt dynamics."""
    result, images, trajectory = _simulation(setting, "nvt")
    if trajectory.status == EXPLODED:
        return result
    images = images[len(images) // 4 :]
    add_radial_distributions(result, images)
    add_autocorrelation(result, images)
    return result


def density(setting: Setting) -> Measurement:
    """Mean density in npt dynamics, without its first quarter."""
    result, images, _ = _simulation(setting, "npt", pressure=setting.options.pressure)
    values = mass_density(images)
    late = values[len(values) // 4 :]
    result.set("density", float(late.mean()), "g/cm^3")
    result.set("fluctuation of the density", float(late.std()), "g/cm^3")
    times = [image.info["time_ps"] for image in images]
    result.panels.append(Panel("Density", "time, ps", "density, g/cm^3", [curve(times, values)]))
    return result


def mass_density(images: list[Atoms]) -> np.ndarray:
    """(n_images,) g/cm^3."""
    return np.array([image.get_masses().sum() / image.get_volume() * G_PER_CM3 for image in images])


def _simulation(setting: Setting, ensemble: str, pressure: float = 0.0) -> tuple[Measurement, list[Atoms], Trajectory]:
    start = setting.structure.copy()
    if ensemble == "npt" and not all(start.pbc):
        raise NotApplicable("the structure is not periodic in all directions")
    if any(start.pbc):
        start = start.repeat(repeats(start, 0.7 * setting.options.supercell))
    start.arrays.pop("momenta", None)
    timestep = setting.options.timestep or (0.5 if 1 in start.numbers else 1.0)
    steps = max(1, round(1e3 * setting.options.ps / timestep))
    options = DynamicsOptions(
        ensemble=ensemble,
        temperature=setting.options.temperature,
        pressure=pressure,
        ps=setting.options.ps,
        timestep=timestep,
        seed=setting.options.seed,
        every=max(1, steps // FRAMES),
    )
    out = setting.folder / f"{setting.stem}.extxyz"
    simulation = simulate([start], setting.calculator, out, options, identity=setting.identity, notify=setting.notify)
    trajectory = simulation.trajectories[0]
    images = list(ase.io.iread(out, index=":"))
    result = Measurement()
    result.set("stable for", trajectory.ps, "ps")
    result.set("mean temperature", trajectory.temperature, "K")
    if trajectory.status == EXPLODED:
        result.notes.append(
            f"The structure exploded after {trajectory.ps:.4g} ps: {trajectory.reason}. The last frame is in {out.name}."
        )
    times = [image.info["time_ps"] for image in images]
    temperatures = [image.get_temperature() for image in images]
    title = f"Temperature in {ensemble}"
    result.panels.append(Panel(title, "time, ps", "temperature, K", [curve(times, temperatures)]))
    return result, images, trajectory


def radial_distribution(
    images: list[Atoms], pair: tuple[str, str], longest: float, bins: int = BINS
) -> tuple[np.ndarray, np.ndarray]:
    """Distances (bins,), A, and the radial distribution function of a pair of elements, averaged over frames.

    longest: the largest distance, at most half of the smallest height of the cell.
    """
    counts, edges = np.zeros(bins), np.linspace(0, longest, bins + 1)
    expected = np.zeros(bins)
    shells = 4 / 3 * np.pi * (edges[1:] ** 3 - edges[:-1] ** 3)
    for atoms in images:
        one, other = (np.flatnonzero(np.array(atoms.symbols) == symbol) for symbol in pair)
        fractions = atoms.get_scaled_positions(wrap=True)
        vectors = fractions[other][None] - fractions[one][:, None]
        vectors -= np.round(vectors)
        distances = np.linalg.norm(vectors @ np.array(atoms.cell), axis=2)
        counts += np.histogram(distances[distances > 1e-6], bins=edges)[0]
        pairs = len(one) * len(other) - (len(one) if pair[0] == pair[1] else 0)
        expected += pairs * shells / atoms.get_volume()
    return (edges[1:] + edges[:-1]) / 2, counts / np.maximum(expected, 1e-300)


def add_radial_distributions(result: Measurement, images: list[Atoms]) -> None:
    """Radial distribution functions of all pairs of elements."""
    cell = np.array(images[0].cell)
    heights = 1 / np.linalg.norm(np.linalg.inv(cell), axis=0)
    curves = []
    for pair in combinations_with_replacement(sorted(set(images[0].get_chemical_symbols())), 2):
        distances, values = radial_distribution(images, pair, float(heights.min()) / 2)
        name = "-".join(pair)
        peak = int(values.argmax())
        result.set(f"first peak of g(r) {name}", distances[peak], "A")
        result.set(f"height of the peak {name}", values[peak], "")
        curves.append(curve(distances, values, name))
    result.panels.append(Panel("Radial distribution", "distance, A", "g(r)", curves))


def velocity_autocorrelation(images: list[Atoms], lags: int) -> np.ndarray:
    """<v(0) v(t)> averaged over atoms and origins, (lags,), in A^2 per squared time unit of ASE."""
    velocities = np.array([image.get_velocities() for image in images])
    velocities -= (velocities * images[0].get_masses()[:, None]).sum(axis=1, keepdims=True) / images[
        0
    ].get_masses().sum()
    n = len(velocities)
    return np.array(
        [
            np.einsum("tai,tai->", velocities[: n - lag], velocities[lag:]) / ((n - lag) * velocities.shape[1])
            for lag in range(lags)
        ]
    )


def add_autocorrelation(result: Measurement, images: list[Atoms]) -> None:
    """Velocity autocorrelation and diffusion coefficient of frames with `time_ps` in `info`."""
    times = np.array([image.info["time_ps"] for image in images])
    steps = np.diff(times)
    images = images[: 1 + int(np.flatnonzero(np.isclose(steps, steps[0]))[-1] + 1)]
    values = velocity_autocorrelation(images, max(2, len(images) // 2))
    between = float(steps[0]) * 1e3 * units.fs
    diffusion = (values.sum() - 0.5 * (values[0] + values[-1])) * between / 3  # A^2 per time unit of ASE
    result.set("diffusion coefficient", diffusion * units.fs * 1e15 * 1e-16, "cm^2/s")
    lags = np.arange(len(values)) * float(steps[0])
    result.panels.append(Panel("Velocity autocorrelation", "time, ps", "normalised", [curve(lags, values / values[0])]))

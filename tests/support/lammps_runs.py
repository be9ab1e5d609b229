"""Small runs, structures and LAMMPS input files, and LAMMPS itself on several MPI processes."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.io.lammpsdata import write_lammps_data

from forgefield.inference.ase import Calculator
from forgefield.inference.lammps.build import find_lammps
from forgefield.models.building import build_model
from forgefield.models.resolving import resolve_model
from forgefield.runs import Run, create_run_from_model
from tests.support.launching import clean_environment
from tests.support.warm_commands import warm_commands

SPECIES = ("Cu", "Au")
CUTOFF = 3.6
FACTS = {"mean_neighbours": 14.0, "forces_rms": 1.0, "reference_energies": {"Cu": -3.1, "Au": -2.2}}
DEEPPOT: dict[str, Any] = {
    "name": "deeppot",
    "fitting_net": {"type": "ener", "neuron": [10, 10]},
    "out_bias": [-3.0, -7.0],
}
ROWS = {
    "davg": [[0.11, 0.0, 0.0, 0.0], [0.17, 0.0, 0.0, 0.0]],
    "dstd": [[0.14, 0.09, 0.09, 0.09], [0.18, 0.11, 0.11, 0.11]],
}
MODELS: dict[str, dict[str, Any]] = {
    "nequip": {"name": "nequip", "num_layers": 3, "l_max": 1, "num_features": 4, "radial_mlp_width": 8, "zbl": True},
    "nequip by species": {
        "name": "nequip",
        "num_layers": 2,
        "l_max": 2,
        "num_features": 3,
        "radial_mlp_width": 8,
        "avg_num_neighbours": {"Cu": 11.0, "Au": 13.0},
        "per_edge_type_cutoff": {"Cu": {"Au": 3.2}},
        "convnet_resnet": True,
    },
    "allegro": {"name": "allegro", "num_layers": 2, "l_max": 1, "num_tensor_features": 2, "num_scalar_features": 4},
    "mace": {"name": "mace", "hidden_irreps": "4x0e + 4x1o", "max_ell": 2, "radial_mlp": [8], "mlp_irreps": "4x0e"},
    "deeppot": {**DEEPPOT, "descriptor": {"type": "se_e2_a", **ROWS, "neuron": [4, 8], "neighbour_norm": 12.0}},
    "deeppot with attention": {
        **DEEPPOT,
        "descriptor": {
            "type": "se_atten_v2",
            **ROWS,
            "neuron": [4, 8],
            "neighbour_norm": 12.0,
            "attn": 8,
            "attn_layer": 1,
            "max_neighbours": 90,
        },
    },
    "deeppot with angles": {
        **DEEPPOT,
        "descriptor": {
            "type": "dpa3",
            "n_dim": 6,
            "e_dim": 4,
            "a_dim": 4,
            "nlayers": 3,
            "update_residual": 0.5,
            "e_rcut_smth": 2.6,
            "e_sel": 200,
            "a_rcut": 3.2,
            "a_rcut_smth": 2.4,
            "a_sel": 200,
            "use_dynamic_sel": True,
            "smooth_edge_update": True,
        },
    },
    "schnet": {"name": "schnet", "num_layers": 3, "num_features": 8},
    "painn": {"name": "painn", "num_layers": 3, "num_features": 6},
    "egnn": {"name": "egnn", "num_layers": 3, "num_features": 6},
    "egnn at rest": {"name": "egnn", "num_layers": 2, "num_features": 6, "update_coordinates": False},
    "cgcnn": {"name": "cgcnn", "num_layers": 3, "num_features": 6},
    "tensornet": {"name": "tensornet", "num_layers": 2, "num_features": 4},
    "m3gnet": {"name": "m3gnet", "num_layers": 3, "num_features": 4},
}


def write_run(folder: Path, model: str = "nequip", precision: str = "float64") -> Run:
    """A run of a model with random weights."""
    resolved = resolve_model(dict(MODELS[model]), species=SPECIES, cutoff=CUTOFF, statistics=FACTS)
    potential = build_model(resolved, precision=precision, seed=1)
    name = model.replace(" ", "_")
    return create_run_from_model(
        name=name, out=folder, resolved=resolved, potential=potential, origin="test", precision=precision
    )


def alloy(repeats: tuple[int, int, int] = (3, 2, 2), *, skewed: bool = False, seed: int = 0) -> Atoms:
    """A disordered fcc alloy."""
    random = np.random.default_rng(seed)
    atoms = bulk("Cu", cubic=True, a=3.7) * repeats
    atoms.symbols[random.permutation(len(atoms))[: len(atoms) // 3]] = "Au"
    if skewed:
        cell = np.array(atoms.cell)
        cell[1, 0], cell[2, 0], cell[2, 1] = 1.3, -0.9, 0.7
        atoms.set_cell(cell, scale_atoms=True)
    atoms.positions += random.normal(0, 0.12, size=atoms.positions.shape)
    return atoms


def cluster() -> Atoms:
    """A few atoms in one corner of a large box without periodic images: most processes have none."""
    atoms = alloy((2, 2, 2), seed=3)
    atoms.positions += 0.5 - atoms.positions.min(0)
    atoms.set_cell([24.0, 25.0, 26.0])
    atoms.pbc = False
    return atoms


def write_structure(path: Path, atoms: Atoms) -> None:
    """A LAMMPS data file, with masses. Atoms are wrapped; ids are those of `atoms`, from 1 on."""
    image = atoms.copy()
    image.wrap()
    write_lammps_data(path, image, specorder=list(SPECIES), masses=True, atom_style="atomic", units="metal")


@dataclass(frozen=True)
class Case:
    """A single point. name: of its files. run: path of the run. options: of the pair style."""

    name: str
    run: Path
    atoms: Atoms
    units: str = "metal"
    options: str = ""


SETUP = """\
clear
units {units}
atom_style atomic
boundary {boundary}
read_data {name}.data
pair_style forgefield {run} {options}
pair_coeff * * Cu Au
"""
SINGLE_POINT = """\
compute pe all pe/atom
compute stress all stress/atom NULL virial
compute total all pressure NULL virial
compute sums all reduce sum c_stress[1] c_stress[2] c_stress[3] c_stress[4] c_stress[5] c_stress[6]
thermo_style custom step pe c_total[1] c_total[2] c_total[3] c_total[4] c_total[5] c_total[6] &
  c_sums[1] c_sums[2] c_sums[3] c_sums[4] c_sums[5] c_sums[6] vol
thermo_modify format float %.16e norm no
dump 1 all custom 1 {name}.dump id fx fy fz c_pe
dump_modify 1 format float %.16e sort id
run 0
"""


def write_input(folder: Path, cases: Sequence[Case], commands: str = SINGLE_POINT) -> None:
    """One input file with all cases, and their structures."""
    text = []
    for case in cases:
        write_structure(folder / f"{case.name}.data", case.atoms)
        values = {"name": case.name, "run": case.run.resolve(), "units": case.units, "options": case.options}
        boundary = " ".join("p" if periodic else "f" for periodic in case.atoms.pbc)
        text.append((SETUP + commands).format(boundary=boundary, **values))
    (folder / "in.lammps").write_text("".join(text))


def launch(
    folder: Path, ranks: int, *arguments: str, timeout: float = 280, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`forgefield lammps -in in.lammps` in `folder`, by the mpirun that belongs to LAMMPS."""
    command = [str(warm_commands() / "forgefield"), "lammps", "-in", "in.lammps", *arguments]
    return launch_command(folder, ranks, *command, timeout=timeout, **environment)


def launch_command(
    folder: Path, ranks: int, *command: str, timeout: float = 280, **environment: str
) -> subprocess.CompletedProcess[str]:
    launcher = [find_lammps().mpirun or "mpirun", "-n", str(ranks)] if ranks > 1 else []
    return subprocess.run(
        [*launcher, *command],
        cwd=folder,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@dataclass(frozen=True)
class Results:
    """energy: eV; forces: (n_atoms, 3), eV/A; energies: (n_atoms,), eV; virial: (6,) xx yy zz xy xz yz, eV, and the same as a
    sum over atoms (`atomic_virial`)."""

    energy: float
    forces: np.ndarray
    energies: np.ndarray
    virial: np.ndarray
    atomic_virial: np.ndarray


BAR_TO_EV_PER_A3 = 1 / 1.6021765e6
"""As in LAMMPS (nktv2p of units metal)."""
KCAL_PER_EV = 23.060549
ATM_TO_KCAL_PER_A3 = 1 / 68568.415
"""As in LAMMPS, for units real."""


def single_points(folder: Path, cases: Sequence[Case]) -> dict[str, Results]:
    """Results of a finished input with these cases, by name, in eV and A."""
    rows = table(folder)
    assert len(rows) == len(cases)
    found = {}
    for case, values in zip(cases, rows):
        energy_unit, pressure_unit = (KCAL_PER_EV, ATM_TO_KCAL_PER_A3 / KCAL_PER_EV)
        if case.units == "metal":
            energy_unit, pressure_unit = 1.0, BAR_TO_EV_PER_A3
        dump = np.loadtxt(folder / f"{case.name}.dump", skiprows=9, ndmin=2)
        pressure = np.array([values[f"c_total[{k}]"] for k in range(1, 7)])
        sums = np.array([values[f"c_sums[{k}]"] for k in range(1, 7)])
        found[case.name] = Results(
            energy=values["PotEng"] / energy_unit,
            forces=dump[:, 1:4] / energy_unit,
            energies=dump[:, 4] / energy_unit,
            virial=pressure * values["Volume"] * pressure_unit,
            atomic_virial=-sums * pressure_unit,
        )
    return found


def by_ase(case: Case) -> Results:
    """The same from Forgefield's ASE calculator."""
    options = dict(zip(case.options.split()[::2], case.options.split()[1::2]))
    atoms = case.atoms.copy()
    atoms.calc = Calculator(case.run, **options)
    virial = -atoms.get_stress()[[0, 1, 2, 5, 4, 3]] * atoms.get_volume()
    return Results(
        atoms.get_potential_energy(), atoms.get_forces(), atoms.get_potential_energies(), virial, atomic_virial=virial
    )


def table(folder: Path) -> list[dict[str, float]]:
    """Rows of thermodynamic output in log.lammps."""
    rows: list[dict[str, float]] = []
    names: list[str] = []
    for line in (folder / "log.lammps").read_text().splitlines():
        words = line.split()
        if words[:1] == ["Step"]:
            names = words
        elif line.startswith("Loop time"):
            names = []
        elif names and len(words) == len(names):
            rows.append(dict(zip(names, map(float, words))))
    return rows

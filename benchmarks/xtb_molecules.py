"""Structures of small molecules at 500 K with energies and forces of GFN2-xTB, for benchmarks/recipes.py.

    pip install tblite rdkit
    python benchmarks/xtb_molecules.py --out FOLDER [--frames 400] [benzene uracil ...]

Structures come from molecular dynamics with the force field MMFF94, one every 50 fs, in random order; GFN2-xTB computes their
energies and forces. The files FOLDER/<molecule>.npz have the format of revised MD17, in kcal/mol and A. They stand for
molecules of that set whose data must not be used for choosing settings.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms, units
from ase.calculators.calculator import Calculator, all_changes
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from rdkit import Chem
from rdkit.Chem import AllChem
from tblite.ase import TBLite

KCAL_PER_MOL = units.kcal / units.mol
TEMPERATURE_K = 500
MOLECULES = {
    "benzene": "c1ccccc1",
    "uracil": "O=C1C=CNC(=O)N1",
    "salicylic": "OC(=O)c1ccccc1O",
    "naphthalene": "c1ccc2ccccc2c1",
    "malonaldehyde": "O=CC=CO",
    "toluene": "Cc1ccccc1",
    "paracetamol": "CC(=O)Nc1ccc(O)cc1",
    "azobenzene": "c1ccccc1/N=N/c1ccccc1",
}
"""SMILES."""


class MMFF(Calculator):
    """The force field MMFF94 of RDKit for one molecule."""

    implemented_properties = ["energy", "forces"]

    def __init__(self, molecule: Any) -> None:
        super().__init__()
        self.molecule, self.properties = (
            molecule,
            AllChem.MMFFGetMoleculeProperties(molecule),
        )  # the field refers to both
        self.field = AllChem.MMFFGetMoleculeForceField(self.molecule, self.properties)

    def calculate(self, atoms: Atoms = None, properties: Any = None, system_changes: Any = all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        positions = [float(x) for x in self.atoms.positions.ravel()]
        energy = self.field.CalcEnergy(positions)  # first: the gradient uses distances that it computes
        gradient = np.array(self.field.CalcGrad(positions)).reshape(-1, 3)
        self.results = {"energy": energy * KCAL_PER_MOL, "forces": -gradient * KCAL_PER_MOL}


def frames(smiles: str, n: int) -> dict[str, np.ndarray]:
    """Arrays of n structures with labels, by the names of revised MD17."""
    rng = np.random.default_rng(3)
    molecule = Chem.AddHs(Chem.MolFromSmiles(smiles))
    AllChem.EmbedMolecule(molecule, randomSeed=1)
    AllChem.MMFFOptimizeMolecule(molecule)
    atoms = Atoms([atom.GetSymbol() for atom in molecule.GetAtoms()], molecule.GetConformer().GetPositions())
    labelled = atoms.copy()
    atoms.calc, labelled.calc = MMFF(molecule), TBLite(method="GFN2-xTB", verbosity=0, accuracy=0.1)
    MaxwellBoltzmannDistribution(atoms, temperature_K=2 * TEMPERATURE_K, rng=rng)
    dynamics = Langevin(atoms, units.fs, temperature_K=TEMPERATURE_K, friction=0.01 / units.fs, rng=rng, fixcm=False)
    dynamics.run(2000)
    positions, energies, forces = [], [], []
    for _ in range(n):
        dynamics.run(50)
        labelled.positions = atoms.positions
        positions.append(labelled.get_positions())
        energies.append(labelled.get_potential_energy())
        forces.append(labelled.get_forces())
    order = rng.permutation(n)
    return {
        "nuclear_charges": atoms.numbers,
        "coords": np.array(positions)[order],
        "energies": np.array(energies)[order] / KCAL_PER_MOL,
        "forces": np.array(forces)[order] / KCAL_PER_MOL,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--frames", type=int, default=400)
    parser.add_argument("molecules", nargs="*", default=list(MOLECULES))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.molecules:
        np.savez(arguments.out / f"{name}.npz", **frames(MOLECULES[name], arguments.frames))
        print(f"{name}: {arguments.frames} structures", flush=True)


if __name__ == "__main__":
    main()

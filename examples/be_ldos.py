"""An LDOS network of beryllium from nothing: Quantum ESPRESSO makes snapshots, Forgefield learns and predicts a new one.

    python examples/be_ldos.py --pseudopotential Be.pbe-n-rrkjus_psl.1.0.0.UPF --snapshots 6 --out be-example

Needs pw.x and pp.x on PATH (Debian: quantum-espresso) and a PBE pseudopotential of beryllium. The last snapshot is kept for the
test, the one before for validation. What was computed is kept: started again, the script goes on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.build import bulk

from forgefield import api
from forgefield.ldos.data.cube import cubes_to_array, level_files
from forgefield.ldos.data.info import read_info
from forgefield.ldos.descriptors import DescriptorOptions, make_descriptors

FIRST, SPACING, LEVELS = -6.0, 0.5, 46
"""Energies of the LDOS, eV."""
DESCRIPTORS = {"type": "bispectrum", "twojmax": 8, "cutoff": 4.67637}
PREFIX = "be"


def structures(n: int) -> list[Atoms]:
    """Hexagonal cells of two atoms, shaken by about as much as at 300 K."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(n):
        atoms = bulk("Be", "hcp", a=2.2859, c=3.5843)
        atoms.positions += 0.08 * rng.standard_normal((2, 3))
        found.append(atoms)
    return found


def scf_input(atoms: Atoms, pseudopotential: Path, kpoints: int) -> str:
    rows = "\n".join(f"Be {x:.10f} {y:.10f} {z:.10f}" for x, y, z in atoms.positions)
    cell = "\n".join(f"{x:.10f} {y:.10f} {z:.10f}" for x, y, z in atoms.cell.array)
    return f"""&control
 calculation='scf', prefix='{PREFIX}', outdir='.', pseudo_dir='{pseudopotential.parent}', verbosity='high'
/
&system
 ibrav=0, nat=2, ntyp=1, ecutwfc=40, ecutrho=160, nbnd=14, nosym=.true., noinv=.true.
 occupations='smearing', smearing='fermi-dirac', degauss=0.0019
/
&electrons
 conv_thr=1e-10
/
ATOMIC_SPECIES
Be 9.0122 {pseudopotential.name}
CELL_PARAMETERS angstrom
{cell}
ATOMIC_POSITIONS angstrom
{rows}
K_POINTS automatic
{kpoints} {kpoints} {kpoints} 0 0 0
"""


def ldos_input() -> str:
    last = FIRST + SPACING * (LEVELS - 1)
    return f"""&inputpp
 prefix='{PREFIX}', outdir='.', plot_num=3, filplot='tmp.pp'
 emin={FIRST}, emax={last}, delta_e={SPACING}, degauss_ldos={2 * SPACING}
/
&plot
 iflag=3, output_format=6, fileout='.cube'
/
"""


def run_program(name: str, text: str, folder: Path, output: Path) -> None:
    program = shutil.which(name)
    if program is None:
        raise SystemExit(f"{name} is not on PATH; on Debian: apt install quantum-espresso")
    (folder / f"{name}.in").write_text(text)
    with output.open("w") as out:
        subprocess.run([program, "-in", f"{name}.in"], cwd=folder, stdout=out, check=True)


def make_snapshot(atoms: Atoms, number: int, out: Path, pseudopotential: Path, kpoints: int) -> Path:
    """Descriptors, LDOS and what is known of the calculation, as three files."""
    base = out / f"Be_snapshot{number}"
    inputs, targets, info = (base.with_name(f"{base.name}{end}") for end in (".in.npy", ".out.npy", ".info.json"))
    if info.exists():
        return inputs
    work = out / f"qe{number}"
    work.mkdir(parents=True, exist_ok=True)
    run_program("pw.x", scf_input(atoms, pseudopotential, kpoints), work, work / "pw.out")
    run_program("pp.x", ldos_input(), work, work / "pp.out")
    shape = cubes_to_array(level_files(str(work / "tmp.pp*.cube")), targets, units="1/(Ry*Bohr^3)")
    known = read_info(work / "pw.out")
    found = known.atoms()
    made = make_descriptors(DescriptorOptions(**DESCRIPTORS), ["Be"]).on_grid(
        found.cell, found.positions, found.numbers, True, shape[:3]
    )
    np.save(inputs, made.numpy().astype(np.float32))
    info.write_text(json.dumps({**known.to_json(), "coordinates_in_inputs": False}, indent=1))
    shutil.rmtree(work)
    print(f"{base.name}: {' x '.join(map(str, shape[:3]))} points, {shape[3]} levels", flush=True)
    return inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pseudopotential", type=Path, required=True)
    parser.add_argument("--snapshots", type=int, default=6)
    parser.add_argument("--kpoints", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("be-example"))
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    upf = args.pseudopotential.resolve()
    shutil.copy(upf, args.out / upf.name)
    files = [
        str(make_snapshot(atoms, number, args.out, upf, args.kpoints))
        for number, atoms in enumerate(structures(args.snapshots))
    ]
    run = api.train(
        {
            "name": f"be-{args.snapshots}",
            "out": str(args.out / "runs"),
            "data": {
                "train": files[:-2],
                "val": files[-2],
                "test": files[-1],
                "batch": {"points": 1000},
                "points": {
                    "energies": {"first": FIRST, "spacing": SPACING, "levels": LEVELS},
                    "descriptors": DESCRIPTORS,
                },
            },
            "model": {"name": "ldos", "hidden": [128, 128], "activation": "silu"},
            "training": {"lr": 2e-3, "monitor": "val/band_energy_mae", "scheduler": {"name": "CosineAnnealingLR"}},
            "trainer": {"max_epochs": args.epochs},
        }
    )
    errors = json.loads((run.path / "test.json").read_text())["errors"]
    print("errors on the snapshot it has not seen:", {name: f"{value:.4g}" for name, value in errors.items()})


if __name__ == "__main__":
    main()

"""Molecular dynamics in ASE with the calculators of other programs: milliseconds per step, for the rows of `evaluation.py`.

    python benchmarks/evaluation_peers.py nequip:192 nequip:1536 mace:192 ...

The same boxes of water, integrator and scaled forces as the row `ase` of `evaluation.py`. Programs:

- `nequip`: NequIP's calculator with a model of the same size (4 layers, l_max 2, 64 features, parity off, float32), as it is,
- `nequip-script`: the same with TorchScript,
- `mace`: mace-torch's calculator (2 layers, 128x0e + 128x1o, l_max 3, correlation 3, float32),
- `mace-cueq`: the same with cuEquivariance.

A row whose program is not installed prints the error, and the others follow. mace-torch needs e3nn 0.4.4, so that the two
programs need different environments (and on torch 2.6 or newer TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1).
"""

from __future__ import annotations

import argparse
import sys
import types
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import units
from ase.calculators.calculator import Calculator
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.evaluation import CUTOFF, MOST_ATOM_STEPS, attempt, box, gibibytes, timed

NEIGHBOURS = 54.0


def nequip(device: torch.device, *, script: bool) -> Calculator:
    import nequip
    from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
    from nequip.integrations.ase import NequIPCalculator
    from nequip.model import NequIPGNNModel
    from nequip.utils.global_state import set_global_state

    set_global_state()
    model = NequIPGNNModel(
        seed=1,
        model_dtype="float32",
        r_max=CUTOFF,
        type_names=["H", "O"],
        num_layers=4,
        l_max=2,
        num_features=64,
        parity=False,
        avg_num_neighbors=NEIGHBOURS,
        per_type_energy_scales=1.0,
        per_type_energy_shifts=0.0,
    )
    model = model.to(device).eval()
    if script:
        from e3nn.util.jit import script as compiled

        model = compiled(model)
    try:
        mapper = ChemicalSpeciesToAtomTypeMapper(model_type_names=["H", "O"])
    except TypeError:  # earlier versions
        mapper = ChemicalSpeciesToAtomTypeMapper(["H", "O"])
    lists = NeighborListTransform(r_max=CUTOFF)
    print(f"nequip {nequip.__version__}", flush=True)
    return NequIPCalculator(model, device, transforms=[mapper, lists])


def mace(device: torch.device, *, fast: bool) -> Calculator:
    for missing in (
        "hostlist",
        "h5py",
        "pandas",
        "orjson",
        "git",
        "prettytable",
        "configargparse",
        "torch_ema",
        "lmdb",
    ):
        try:
            __import__(missing)
        except ImportError:  # used in training only
            sys.modules[missing] = types.ModuleType(missing)
            sys.modules[missing].ExponentialMovingAverage = None  # type: ignore[attr-defined]
    import mace as package
    from e3nn import o3
    from mace import modules
    from mace.calculators import MACECalculator

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    interaction = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    model = modules.ScaleShiftMACE(
        r_max=CUTOFF,
        num_bessel=8,
        num_polynomial_cutoff=5,
        max_ell=3,
        interaction_cls=interaction,
        interaction_cls_first=interaction,
        num_interactions=2,
        num_elements=2,
        hidden_irreps=o3.Irreps("128x0e+128x1o"),
        MLP_irreps=o3.Irreps("16x0e"),
        atomic_energies=np.zeros(2),
        avg_num_neighbors=NEIGHBOURS,
        atomic_numbers=[1, 8],
        correlation=3,
        gate=torch.nn.functional.silu,
        atomic_inter_scale=1.0,
        atomic_inter_shift=0.0,
        radial_MLP=[64, 64, 64],
        radial_type="bessel",
    )
    print(f"mace {getattr(package, '__version__', '?')}", flush=True)
    return MACECalculator(models=[model.to(device)], device=str(device), default_dtype="float32", enable_cueq=fast)


PROGRAMS = {
    "nequip": partial(nequip, script=False),
    "nequip-script": partial(nequip, script=True),
    "mace": partial(mace, fast=False),
    "mace-cueq": partial(mace, fast=True),
}


def row(program: str, n_atoms: int, steps: int, device: torch.device) -> None:
    """Time dynamics with the calculator of a program."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    atoms = box(n_atoms)
    inner = PROGRAMS[program](device)
    calculate, scale = inner.calculate, [1.0]

    def scaled(*arguments: Any, **options: Any) -> None:
        calculate(*arguments, **options)
        inner.results["forces"] = scale[0] * inner.results["forces"]

    inner.calculate = scaled
    atoms.calc = inner
    scale[0] = min(1.0, 1.0 / float(np.abs(atoms.get_forces()).max()))
    MaxwellBoltzmannDistribution(atoms, temperature_K=300, rng=np.random.default_rng(1))
    dynamics = VelocityVerlet(atoms, 0.5 * units.fs)
    forces: list[Any] = [None]

    def advance() -> None:
        forces[0] = dynamics.step(forces[0])

    milliseconds = timed(advance, steps, device)
    print(
        f"{program + ':' + str(n_atoms):22} {len(atoms):8} atoms  ASE step {milliseconds:8.3f} ms  "
        f"{gibibytes(device):6.2f} GiB  in {steps} steps",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", help=f"program:atoms; programs {', '.join(PROGRAMS)}")
    parser.add_argument("--steps", type=int, default=20, help="at most; large systems are timed for fewer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = torch.device(arguments.device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, float32, water, cutoff {CUTOFF} A", flush=True)
    for case in arguments.cases:
        program, _, size = case.partition(":")
        steps = max(2, min(arguments.steps, MOST_ATOM_STEPS // int(size)))
        attempt(case, partial(row, program, int(size), steps, device))


if __name__ == "__main__":
    main()

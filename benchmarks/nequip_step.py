"""CPU time of one training step (energy and force loss, full backward) beside NequIP's eager step, with the same weights.

    python benchmarks/nequip_step.py [--cases small S M] [--repeats 8]

Needs nequip 0.19 in the environment. Both models run in this process, one thread, in turns; process CPU time, median. The model
is made by NequIP and imported, so the outputs must agree before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import ase
import nequip
import numpy as np
import torch
from ase import Atoms
from ase.build import molecule
from nequip.data import AtomicDataDict, from_ase
from nequip.model import NequIPGNNModel
from nequip.utils.global_state import set_global_state

from forgefield.data.batch import batch_from_frames
from forgefield.data.readers import frames_from_atoms
from forgefield.data.species import SpeciesTable
from forgefield.models.building import build_model
from forgefield.models.nequip.importer import read_nequip

CUTOFF = 4.5
S = {"num_layers": 2, "l_max": 1, "num_features": [128, 64], "type_embed_num_features": 32}
CASES = {
    "small": ({"num_layers": 3, "l_max": 1, "num_features": 32}, 3),
    "S": (S, 3),
    "S-192": (S, 4),
    "l2": ({"num_layers": 3, "l_max": 2, "num_features": 32}, 3),
    "M": ({"num_layers": 4, "l_max": 2, "num_features": [128, 64, 32], "type_embed_num_features": 32}, 3),
}


def water(n: int) -> Atoms:
    """n^3 randomly turned molecules on a grid of 3.1 A."""
    rng = np.random.default_rng(0)
    box = Atoms(cell=[3.1 * n] * 3, pbc=True)
    for corner in np.ndindex(n, n, n):
        one = molecule("H2O")
        one.rotate(rng.uniform(0, 360), rng.normal(size=3))
        one.translate(3.1 * np.array(corner))
        box += one
    return box


def loss(forces: torch.Tensor, energy: torch.Tensor) -> torch.Tensor:
    return forces.square().mean() + (energy / forces.shape[0]).square().sum()


def steps(build: Callable[..., torch.nn.Module], read: Callable, settings: dict, atoms: Atoms) -> tuple:
    """One step of each as a function that returns energy and forces, and the number of edges.

    `build`: the peer's model builder for `settings`; `read`: our importer of its state dict.
    """
    theirs = build(seed=1, model_dtype="float32", compile_mode="eager", **settings).train()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(theirs.state_dict(), Path(folder) / "model.pt")
        (Path(folder) / "model.json").write_text(json.dumps({**settings, "model_dtype": "float32"}))
        imported = read(Path(folder) / "model.pt")
    ours = build_model(imported.resolved, precision="float32", seed=0)
    ours.load_state_dict(imported.state)
    ours.train()
    batch = batch_from_frames(frames_from_atoms([atoms]), SpeciesTable(ours.species), settings["r_max"])
    data = from_ase(atoms)
    data[AtomicDataDict.ATOM_TYPE_KEY] = torch.tensor([ours.species.index(s) for s in atoms.get_chemical_symbols()])
    data[AtomicDataDict.EDGE_INDEX_KEY] = batch["edge_index"].flip(0).contiguous()
    data[AtomicDataDict.EDGE_CELL_SHIFT_KEY] = batch["edge_shift"]

    def their_step() -> tuple[torch.Tensor, torch.Tensor]:
        theirs.zero_grad()
        out = theirs(dict(data))
        energy, forces = out[AtomicDataDict.TOTAL_ENERGY_KEY], out[AtomicDataDict.FORCE_KEY]
        loss(forces, energy).backward()
        return energy.detach().reshape(-1), forces.detach()

    def our_step() -> tuple[torch.Tensor, torch.Tensor]:
        ours.zero_grad()
        out = ours(batch)
        loss(out["forces"], out["energy"]).backward()
        return out["energy"].detach(), out["forces"].detach()

    return their_step, our_step, batch["edge_index"].shape[1]


def compare(build: Callable[..., torch.nn.Module], read: Callable, cases: dict[str, tuple[dict, int]]) -> None:
    """Prints a table of the chosen cases, name -> (the peer's settings, molecules along an edge of the box)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=sorted(cases), default=sorted(cases))
    parser.add_argument("--repeats", type=int, default=8)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    set_global_state()
    print(
        f"nequip {nequip.__version__}, torch {torch.__version__}, ase {ase.__version__}, float32, one thread, CPU ms per step"
    )
    print(f"{'case':12} {'atoms':>6} {'edges':>7} {'peer':>8} {'forgefield':>11} {'ratio':>6}")
    for case in arguments.cases:
        settings, n = cases[case]
        atoms = water(n)
        their_step, our_step, n_edges = steps(build, read, settings, atoms)
        (energy_a, forces_a), (energy_b, forces_b) = their_step(), our_step()
        torch.testing.assert_close(energy_a, energy_b, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(forces_a, forces_b, rtol=1e-3, atol=1e-4 * float(forces_a.abs().max()))
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(arguments.repeats):
            for step, taken in zip((their_step, our_step), times):
                start = time.process_time()
                step()
                taken.append(1e3 * (time.process_time() - start))
        a, b = (float(np.median(taken)) for taken in times)
        print(f"{case:12} {len(atoms):6} {n_edges:7} {a:8.0f} {b:11.0f} {a / b:6.2f}", flush=True)


COMMON = {
    "type_names": ["O", "H"],
    "avg_num_neighbors": 20.0,
    "per_type_energy_scales": {"O": 1.3, "H": 1.3},
    "per_type_energy_shifts": {"O": -2.0, "H": 0.5},
}


if __name__ == "__main__":
    common = {**COMMON, "parity": False, "r_max": CUTOFF}
    compare(NequIPGNNModel, read_nequip, {name: (options | common, n) for name, (options, n) in CASES.items()})

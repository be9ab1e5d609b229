"""CPU time of a training step and of an evaluation of MACE, next to mace-torch's.

    python benchmarks/mace_step.py [--channels 128] [--max-l 1] [--peer PYTHON]

PYTHON is the interpreter of an environment with mace-torch 0.3.16 (which pins e3nn 0.4.4). 81 atoms of water, cutoff 5 A,
max_ell 3, correlation 3, two layers, radial MLP 3x64, full basis of polynomials, float32, one thread. A step is energy, forces
and the gradients of a loss of both; the smallest CPU time of three is printed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from ase import Atoms
from ase.build import molecule

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
CUTOFF = 5.0


def water(side: int = 3) -> Atoms:
    """side^3 molecules on a grid, randomly rotated."""
    rng = np.random.default_rng(0)
    box = Atoms(cell=[3.1 * side] * 3, pbc=True)
    for place in np.ndindex(side, side, side):
        one = molecule("H2O")
        one.rotate(rng.uniform(0, 360), rng.normal(size=3))
        one.translate(3.1 * np.array(place))
        box += one
    return box


def peer(irreps: str):
    """Model and batch of mace-torch."""
    os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    sys.path.insert(0, str(SUPPORT))
    import mace_references
    from e3nn import o3
    from mace import modules

    mace_references.NUMBERS[:] = [1, 8]
    kind = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    model = modules.ScaleShiftMACE(
        r_max=CUTOFF, num_bessel=8, num_polynomial_cutoff=5, max_ell=3, interaction_cls=kind, interaction_cls_first=kind,
        num_interactions=2, num_elements=2, hidden_irreps=o3.Irreps(irreps), MLP_irreps=o3.Irreps("16x0e"),
        atomic_energies=np.zeros(2), avg_num_neighbors=50.0, atomic_numbers=[1, 8], correlation=3,
        gate=torch.nn.functional.silu, atomic_inter_scale=1.0, atomic_inter_shift=0.0, use_reduced_cg=False,
    )  # fmt: skip
    batch = mace_references.batch_of([water()], CUTOFF) | {"head": torch.tensor([0])}
    batch = {key: value.float() if value.is_floating_point() else value for key, value in batch.items()}
    return model, lambda training: model(batch, training=training)


def own(irreps: str):
    """Model and batch of Forgefield."""
    from forgefield.data.batch import batch_from_frames
    from forgefield.data.frame import Frame
    from forgefield.data.species import SpeciesTable
    from forgefield.models import build_model, resolve_model

    statistics = {"mean_neighbours": 50.0, "forces_rms": 1.0, "reference_energies": {"H": 0.0, "O": 0.0}}
    section = {"name": "mace", "hidden_irreps": irreps, "use_reduced_cg": False}
    resolved = resolve_model(section, species=("H", "O"), cutoff=CUTOFF, statistics=statistics)
    model = build_model(resolved, precision="float32", seed=0)
    atoms = water()
    frame = Frame(atoms.positions, atoms.numbers, atoms.cell[:], atoms.pbc, None, None, None)
    batch = batch_from_frames([frame], SpeciesTable(("H", "O")), CUTOFF)
    return model, lambda training: model.train(training)(batch)


def measure(name: str, irreps: str) -> None:
    torch.set_num_threads(1)
    model, evaluate = (peer if name == "mace-torch" else own)(irreps)

    def step() -> None:
        outputs = evaluate(True)
        (1e-4 * outputs["energy"].square().sum() + outputs["forces"].square().mean()).backward()

    step()
    times: dict[str, list[float]] = {"step": [], "evaluation": []}
    for _ in range(3):
        for key, function in (("step", step), ("evaluation", lambda: evaluate(False))):
            start = time.process_time()
            function()
            times[key].append(time.process_time() - start)
    weights = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{name:<12} {irreps:<20} {weights:>8} weights  " + "  ".join(f"{k} {min(v):.3f} s" for k, v in times.items())
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--max-l", type=int, default=1)
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--only", choices=["forgefield", "mace-torch"], default="forgefield", help=argparse.SUPPRESS)
    args = parser.parse_args()
    measure(args.only, "+".join(f"{args.channels}x{l}{'eo'[l % 2]}" for l in range(args.max_l + 1)))
    if args.peer:
        options = ["--channels", str(args.channels), "--max-l", str(args.max_l), "--only", "mace-torch"]
        environment = {**os.environ, "PYTHONPATH": "", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
        subprocess.run([args.peer, "-W", "ignore", __file__, *options], env=environment, check=True)


if __name__ == "__main__":
    main()

"""Cost of uncertainties: time and memory of a prediction with and without them, and of the pass that computes them.

    python benchmarks/uncertainty.py RUN [RUN ...]

Times are processor times on one CPU thread, the least of several evaluations of 8 training frames. Memory is by how much that
of a fresh process rises at most while it evaluates a supercell of about 1000 atoms (Linux).
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import time
from pathlib import Path

import numpy as np
import torch
from ase import Atoms

from forgefield.data.batch import batch_from_frames
from forgefield.data.species import SpeciesTable
from forgefield.inference.ase import frame_of_atoms
from forgefield.inference.ensemble import Ensemble
from forgefield.inference.evaluate import evaluate_batch
from forgefield.inference.uncertainty import UncertainPotential, load_uncertainty
from forgefield.models.potential import Potential
from forgefield.runs import Run
from forgefield.trust.uncertainty import FRAMES_AFTER_TRAINING, fit_uncertainty, training_data

FRAMES = 8


def variants(run: Run) -> dict[str, Potential]:
    """Models to compare, by name."""
    potential = run.load_potential()
    uncertainty = load_uncertainty(run)
    return {
        "energies and forces": potential,
        "with uncertainties of energies": UncertainPotential(potential, uncertainty, "energy").eval(),
        "with uncertainties of forces": UncertainPotential(potential, uncertainty, "forces").eval(),
        "ensemble of 4 models": Ensemble([run.load_potential() for _ in range(4)]),
    }


def milliseconds(potential: Potential, batch: dict[str, torch.Tensor], repeats: int = 15) -> float:
    """Processor time of an evaluation for each frame, ms."""
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        evaluate_batch(potential, batch, forces=True, stress=False)
        times.append(time.process_time() - begin)
    return 1000 * min(times) / len(batch["n_atoms"])


def peak_memory(path: Path, name: str) -> float:
    """Additional resident memory of a process that evaluates one batch, MiB."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_memory, (path, name))


def _peak_memory(path: Path, name: str) -> float:
    torch.set_num_threads(1)
    run = Run.open(path)
    batch, potential = supercell(run), variants(run)[name]
    evaluate_batch(potential, first_batch(run), forces=True, stress=False)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest memory so far
    before = _resident("VmRSS")
    evaluate_batch(potential, batch, forces=True, stress=False)
    return (_resident("VmHWM") - before) / 1024


def _resident(name: str) -> float:
    """Resident memory, now (VmRSS) or at most (VmHWM), KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[1])


def first_batch(run: Run) -> dict[str, torch.Tensor]:
    dataset = training_data(run).train
    return dataset.batch(np.argsort(-dataset.n_atoms, kind="stable")[:FRAMES])


def supercell(run: Run) -> dict[str, torch.Tensor]:
    """The largest training frame, repeated along its shortest cell vectors to about 1000 atoms."""
    frames = training_data(run).train.frames
    frame = frames[int(frames.n_atoms.argmax())]
    atoms = Atoms(frame.numbers, positions=frame.positions, cell=frame.cell, pbc=True)
    while len(atoms) < 700:
        repeats = [1, 1, 1]
        repeats[int(np.argmin(atoms.cell.lengths()))] = 2
        atoms = atoms * tuple(repeats)
    return batch_from_frames([frame_of_atoms(atoms)], SpeciesTable(run.species), run.graph)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    torch.set_num_threads(1)
    for name in parser.parse_args().runs:
        run = Run.open(name)
        data, begin = training_data(run), time.process_time()
        made = fit_uncertainty(run, data=data, most_frames=FRAMES_AFTER_TRAINING)
        seconds, batch = time.process_time() - begin, first_batch(run)
        print(
            f"{run.name}: {made.factor.shape[0]} weights in the last layer, {len(batch['species']) // FRAMES} atoms a frame"
        )
        print(
            f"  pass over {len(data.train)} training frames and {len(data.val or ())} validation frames: {seconds:.1f} s"
        )
        for variant, potential in variants(run).items():
            memory = peak_memory(run.path, variant)
            print(f"  {variant:32s} {milliseconds(potential, batch):8.2f} ms/frame {memory:8.0f} MiB")


if __name__ == "__main__":
    main()

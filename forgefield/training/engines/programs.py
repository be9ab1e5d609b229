"""Trained models as programs for C++: AOTInductor packages (`export --to aoti`) and TorchScript (`export --to torchscript`).

Both are made from the trace of one evaluation, forces and stress included, for batches of any size, and contain nothing but
operations of PyTorch: no Python and no library of Forgefield is needed to run them.

Inputs, in this order (`INPUTS`):
    positions: (n_atoms, 3) float64, A
    species: (n_atoms,) int64, index into the list of species that is stored with the program
    frame: (n_atoms,) int64, structure to which the atom belongs
    n_atoms: (n_frames,) int64, atoms of each structure
    cell: (n_frames, 3, 3) float64, A, rows are lattice vectors
    edge_index: (2, n_edges) int64, source and destination atom of all pairs within the cutoff, sorted by destination
    edge_shift: (n_edges, 3) float64, image of the source atom, in lattice vectors
Outputs (`OUTPUTS`): energy (n_frames,), eV; forces (n_atoms, 3), eV/A; stress (n_frames, 3, 3), eV/A^3; atomic_energy
(n_atoms,), eV.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from ase.data import atomic_numbers
from torch import Tensor, nn

from forgefield._version import __version__
from forgefield.data.batch import batch_from_frames
from forgefield.data.frame import Frame
from forgefield.data.neighbours.graph import graph_of
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.files import written_atomically
from forgefield.models.potential import Potential
from forgefield.training.engines.script import scriptable
from forgefield.training.engines.tracing import export_evaluation, trace

Batch = dict[str, Tensor]

INPUTS = ("positions", "species", "frame", "n_atoms", "cell", "edge_index", "edge_shift")
OUTPUTS = ("energy", "forces", "stress", "atomic_energy")
METADATA = "forgefield.json"
"""Name of the description among the extra files of a TorchScript program."""


def _sum_by_pointers(values: Tensor, order: Tensor | None, pointers: Tensor) -> Tensor:
    """`forgefield::sum_by_pointers` in operations of PyTorch."""
    rows = values if order is None else values.index_select(0, order)
    positions = torch.arange(rows.shape[0], device=values.device)
    segment = torch.searchsorted(pointers, positions, right=True) - 1
    return values.new_zeros((pointers.shape[0] - 1, *values.shape[1:])).index_add(0, segment, rows)


def _decompositions() -> dict[object, Callable[..., Tensor]]:
    """Operators of Forgefield in a trace, and functions of PyTorch operations that replace them."""
    return {torch.ops.forgefield.sum_by_pointers.default: _sum_by_pointers}


def write_aoti(potential: Potential, path: str | os.PathLike[str], *, sel: list[int] | None = None) -> Path:
    """Compile a model with AOTInductor for the device it is on, and return the path of the package (`.pt2`).

    Load it in C++ with `torch::inductor::AOTIModelPackageLoader`, in Python with `torch._inductor.aoti_load_package`.
    """
    path = _check(potential, Path(path), ".pt2", sel)
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise ForgefieldError("AOTInductor needs a C++ compiler, and neither g++ nor clang++ is installed.")
    with _frozen(potential):
        exported = export_evaluation(_evaluation(potential), _example(potential), decompositions=_decompositions())
        with written_atomically(path) as partial, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            package = partial.with_suffix(".pt2")
            torch._inductor.aoti_compile_and_package(
                exported,
                package_path=str(package),
                inductor_configs={
                    "aot_inductor.metadata": {key: str(value) for key, value in _describe(potential).items()}
                },
            )
            if package != partial:
                package.replace(partial)
    return path


def write_torchscript(potential: Potential, path: str | os.PathLike[str], *, sel: list[int] | None = None) -> Path:
    """Write a model as TorchScript (`.pt`) and return its path. Its `forward` returns a dictionary of `OUTPUTS`.

    The description of the model is the extra file `forgefield.json`. PyTorch deprecates TorchScript; prefer `write_aoti`.
    """
    path = _check(potential, Path(path), ".pt", sel)
    with _frozen(potential), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluate, example = _evaluation(potential), _example(potential)
        traced = trace(lambda static, batch: evaluate(batch), [], example, decompositions=_decompositions())
        program = torch.jit.script(_Program(scriptable(traced)[0]))
        with written_atomically(path) as partial:
            torch.jit.save(program, str(partial), _extra_files={METADATA: json.dumps(_describe(potential))})
    return path


class _Program(nn.Module):
    """A traced evaluation with named inputs and outputs. Outputs of the trace are in the order of their sorted names."""

    def __init__(self, evaluation: nn.Module) -> None:
        super().__init__()
        self.evaluation = evaluation

    def forward(
        self,
        positions: Tensor,
        species: Tensor,
        frame: Tensor,
        n_atoms: Tensor,
        cell: Tensor,
        edge_index: Tensor,
        edge_shift: Tensor,
    ) -> dict[str, Tensor]:
        atomic_energy, energy, forces, stress = self.evaluation(
            positions, species, frame, n_atoms, cell, edge_index, edge_shift
        )
        return {"energy": energy, "forces": forces, "stress": stress, "atomic_energy": atomic_energy}


def _evaluation(potential: Potential) -> Callable[[Batch], Batch]:
    def evaluate(batch: Batch) -> Batch:
        outputs = potential(batch, forces=True, stress=True)
        return {name: outputs[name] for name in sorted(OUTPUTS)}

    return evaluate


def _check(potential: Potential, path: Path, suffix: str, sel: list[int] | None) -> Path:
    if path.suffix != suffix:
        raise ForgefieldError(f"{path}: the file name must end in {suffix}.")
    if sel is not None:
        raise ForgefieldError("--sel is an option of --to deepmd.")
    graph = graph_of(potential)
    if graph.adaptive_cutoff is not None or graph.max_neighbours is not None:
        raise ForgefieldError(
            "This model uses an adaptive cutoff or a maximum number of neighbours; a program for C++ needs all pairs within "
            "one cutoff."
        )
    if not potential.has_energy or potential.forces_are_direct:
        raise ForgefieldError(
            "This model has no energy whose derivatives are the forces, which a program for C++ needs."
        )
    if potential.inputs:
        raise ForgefieldError(
            f"This model has additional inputs ({', '.join(potential.inputs)}), which is not supported."
        )
    return path


def _describe(potential: Potential) -> dict[str, object]:
    """The description of the model that is stored with the program."""
    return {
        "forgefield": __version__,
        "species": " ".join(potential.species),
        "cutoff": potential.cutoff,
        "units": "eV, A",
        "inputs": " ".join(INPUTS),
        "outputs": " ".join(OUTPUTS),
    }


def _example(potential: Potential) -> Batch:
    """A batch of two structures on the device of the model, as an example of the types."""
    random = np.random.default_rng(0)
    numbers = np.resize([atomic_numbers[symbol] for symbol in potential.species], 6)
    width = 0.9 * potential.cutoff
    frames = [
        Frame(random.uniform(0, width, (6, 3)), numbers, np.eye(3) * width, np.ones(3, dtype=bool)) for _ in range(2)
    ]
    batch = batch_from_frames(frames, SpeciesTable(potential.species), graph_of(potential))
    device = next(potential.parameters()).device
    return {name: batch[name].to(device) for name in INPUTS}


@contextmanager
def _frozen(potential: Potential) -> Iterator[None]:
    """Inside the block the model is in evaluation mode and its weights do not require gradients."""
    was_training = potential.training
    trained = [weight for weight in potential.parameters() if weight.requires_grad]
    potential.eval().requires_grad_(False)
    try:
        yield
    finally:
        potential.train(was_training)
        for weight in trained:
            weight.requires_grad_(True)

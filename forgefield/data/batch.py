"""A batch: atoms of several frames concatenated, as a plain dict of tensors.

| key        | shape           | dtype   | meaning |
|------------|-----------------|---------|---------|
| positions  | (n_atoms, 3)    | float64 | A |
| species    | (n_atoms,)      | int64   | row of the species table |
| frame      | (n_atoms,)      | int64   | frame of each atom, ascending |
| n_atoms    | (n_frames,)     | int64   | atoms of each frame |
| cell       | (n_frames, 3, 3)| float64 | rows are lattice vectors, A; zeros where there is none |
| edge_index | (2, n_edges)    | int64   | row 0 source j (neighbour), row 1 destination i (centre), ascending in i |
| edge_shift | (n_edges, 3)    | float64 | integers S: edge vector = positions[j] + S @ cell[frame[i]] - positions[i] |
| edge_reverse | (n_edges,)    | int64   | number of the edge that leads back: j and i exchanged, S negated |
| energy     | (n_frames,)     | float64 | eV |
| forces     | (n_atoms, 3)    | float64 | eV/A |
| stress     | (n_frames, 3, 3)| float64 | eV/A^3 |
| weight     | (n_frames,)     | float64 | weight in the loss |
| frame_id   | (n_frames,)     | int64   | position in the dataset; -1: a blank frame that counts for nothing |

NaN in a label means that the frame does not carry it; readers refuse NaN in data, so it means nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forgefield.data.frame import Frame
from forgefield.data.neighbours import edge_vectors, neighbour_list, squared_lengths
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.ops.graph import reverse_edges

Batch = dict[str, Tensor]

_PER_ATOM = ("positions", "species", "forces")
_PER_FRAME = ("n_atoms", "cell", "energy", "stress", "weight", "frame_id")
CLOSEST_PAIR = 1e-3
"""Atoms closer than this, A, are taken to be one atom entered twice: a pair without a direction has no physics."""


def frame_to_batch(
    frame: Frame, species: SpeciesTable, cutoff: float, neighbours: str = "auto", frame_id: int = 0
) -> Batch:
    """A batch of this one frame, its neighbour list included."""
    rows = species.index(frame.numbers, frame.where)
    source, destination, shifts = neighbour_list(frame.positions, frame.cell, frame.pbc, cutoff, neighbours)
    _refuse_coinciding_atoms(frame, source, destination, shifts)
    edge_index, edge_shift = (
        torch.from_numpy(np.stack([source, destination])),
        torch.from_numpy(shifts.astype(np.float64)),
    )
    n = len(frame)
    nan = float("nan")
    forces = np.full((n, 3), nan) if frame.forces is None else frame.forces
    stress = np.full((3, 3), nan) if frame.stress is None else frame.stress
    return {
        "positions": torch.tensor(frame.positions, dtype=torch.float64),
        "species": torch.from_numpy(rows.copy()),
        "frame": torch.zeros(n, dtype=torch.int64),
        "n_atoms": torch.tensor([n]),
        "cell": torch.tensor(frame.cell, dtype=torch.float64).reshape(1, 3, 3),
        "edge_index": edge_index,
        "edge_shift": edge_shift,
        "edge_reverse": reverse_edges(edge_index, edge_shift),
        "energy": torch.tensor([nan if frame.energy is None else frame.energy], dtype=torch.float64),
        "forces": torch.tensor(forces, dtype=torch.float64),
        "stress": torch.tensor(stress, dtype=torch.float64).reshape(1, 3, 3),
        "weight": torch.tensor([frame.weight], dtype=torch.float64),
        "frame_id": torch.tensor([frame_id]),
    }


def collate(samples: Sequence[Batch]) -> Batch:
    """One batch from several; frames keep their order and their `frame_id`."""
    if len(samples) == 1:
        return dict(samples[0])
    batch = {key: torch.cat([sample[key] for sample in samples]) for key in (*_PER_ATOM, *_PER_FRAME, "edge_shift")}
    n_atoms = batch["n_atoms"]
    batch["frame"] = torch.repeat_interleave(n_atoms, output_size=len(batch["species"]))
    edges = [sample["edge_index"] for sample in samples]
    batch["edge_index"] = torch.cat(edges, dim=1)
    atoms_in = torch.tensor([len(sample["species"]) for sample in samples])
    edges_in = torch.tensor([edge.shape[1] for edge in edges])
    first_atom = atoms_in.cumsum(0) - atoms_in
    n_edges = batch["edge_index"].shape[1]
    batch["edge_index"] += torch.repeat_interleave(first_atom, edges_in, output_size=n_edges)
    first_edge = edges_in.cumsum(0) - edges_in
    batch["edge_reverse"] = torch.cat([sample["edge_reverse"] for sample in samples])
    batch["edge_reverse"] += torch.repeat_interleave(first_edge, edges_in, output_size=n_edges)
    return batch


def without_labels(batch: Batch) -> Batch:
    """The same structures with nothing to learn from or to measure: no label, no weight, no place in a data set."""
    blank = {name: torch.full_like(batch[name], torch.nan) for name in ("energy", "forces", "stress")}
    return {
        **batch,
        **blank,
        "weight": torch.zeros_like(batch["weight"]),
        "frame_id": torch.full_like(batch["frame_id"], -1),
    }


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    """The batch with every tensor on `device`."""
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}


def batch_from_frames(frames: Sequence[Frame], species: SpeciesTable, cutoff: float, neighbours: str = "auto") -> Batch:
    """Frames straight to one batch, for use outside training."""
    return collate([frame_to_batch(frame, species, cutoff, neighbours, i) for i, frame in enumerate(frames)])


def _refuse_coinciding_atoms(frame: Frame, source: np.ndarray, destination: np.ndarray, shifts: np.ndarray) -> None:
    if len(source) == 0:
        return
    squares = squared_lengths(edge_vectors(frame.positions, frame.cell, source, destination, shifts))
    worst = int(squares.argmin())
    if squares[worst] < CLOSEST_PAIR**2:
        i, j = sorted((int(source[worst]), int(destination[worst])))
        raise ForgefieldError(
            f"{frame.where}: atoms {i} and {j} are at the same place ({squares[worst] ** 0.5:.1e} A apart)"
        )

"""A batch: atoms of several frames concatenated, as a plain dict of tensors.

| key        | shape           | dtype   | meaning |
|------------|-----------------|---------|---------|
| positions  | (n_atoms, 3)    | float64 | A |
| species    | (n_atoms,)      | int64   | row of the species table |
| frame      | (n_atoms,)      | int64   | frame of each atom, ascending |
| n_atoms    | (n_frames,)     | int64   | atoms of each frame |
| cell       | (n_frames, 3, 3)| float64 | rows are lattice vectors, A; zeros where there is none |
| pbc        | (n_frames, 3)   | bool    | which lattice vectors repeat |
| edge_index | (2, n_edges)    | int64   | row 0 source j (neighbour), row 1 destination i (centre), ascending in i |
| edge_shift | (n_edges, 3)    | float64 | integers S: edge vector = positions[j] + S @ cell[frame[i]] - positions[i] |
| edge_reverse | (n_edges,)    | int64   | index of the reverse edge: j and i exchanged, S negated |
| energy     | (n_frames,)     | float64 | eV |
| forces     | (n_atoms, 3)    | float64 | eV/A |
| stress     | (n_frames, 3, 3)| float64 | eV/A^3 |
| weight     | (n_frames,)     | float64 | weight in the loss |
| frame_id   | (n_frames,)     | int64   | row in the dataset; -1: a blank frame, without labels and weight |
| branch     | (n_frames,)     | int64   | branch of the model that a frame is for; only for models with several |
| frame_key  | (n_frames,)     | int64   | training with dropout only: 0 to 2^32, from seed, epoch and position in the epoch |
| denoise    | (n_atoms, 3)    | float64 | training on noise only: displacements that were added to `positions`, A |

`edge_reverse` is left out where an edge need not have a reverse (`data.max_neighbours`). NaN in a label means that it is
missing (readers refuse NaN in data). Fields (`data.labels.fields`) are extra keys, (n_frames, ...) or (n_atoms, ...) float64,
NaN where a frame or an atom has no value.

`BatchSpec` states which of these a batch contains, before the first one is made. Random displacements and keys are functions
of the seed, the epoch and the position of a frame in the order of the epoch: they are the same on any number of ranks, with
any number of threads and after a resume.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forgefield.data.frame import Frame
from forgefield.data.labels.fields import Fields, field_values, fields_of
from forgefield.data.neighbours.edges import EdgeBlock, Geometry, build_block
from forgefield.data.neighbours.graph import GraphOptions
from forgefield.data.species import SpeciesTable
from forgefield.ops.neighbour_lists import batched_neighbours

_TRAINING, _EVALUATION, _KEYS = 1, 2, 3
"""Streams of random numbers: the same position gives independent numbers for each purpose."""


@dataclass(frozen=True)
class Noise:
    """Random displacements of atoms, for a model that learns to predict them.

    sigma: standard deviation along each direction, A. share: fraction of the frames that are displaced. keep_labels: whether
    displaced frames keep their other labels. alone: the displacement is the only target. fixed: the same displacements in
    every epoch, for evaluation.
    """

    sigma: float
    seed: int
    share: float = 1.0
    keep_labels: bool = False
    alone: bool = False
    fixed: bool = False

    def displacements(self, n_atoms: int, *key: int) -> np.ndarray | None:
        """(n_atoms, 3), A, or None for a frame that is not displaced. The mean is zero, because energies are invariant to
        translations. key: identifies the frame, in training (epoch, position in the epoch), in evaluation (row,).
        """
        purpose = _EVALUATION if self.fixed else _TRAINING
        random = np.random.default_rng([self.seed, purpose, *key])
        if not self.fixed and random.random() >= self.share:
            return None
        displacements = self.sigma * random.standard_normal((n_atoms, 3))
        return displacements - displacements.mean(axis=0)


@dataclass(frozen=True)
class BatchSpec:
    """What batches carry in addition to structures and labels, in which order frames come, and for which device.

    targets: names of the fields that are trained on; blank frames have no value for them. frame_keys: training batches carry
    `frame_key`, for dropout. noise: atoms are displaced at random and batches carry `denoise`. on_gpu: batches are copied to a
    GPU, which also builds the neighbour lists that would otherwise be built for each batch. keep_order: training frames come
    in the order of the data, each once per epoch.
    """

    targets: frozenset[str] = frozenset()
    frame_keys: bool = False
    noise: Noise | None = None
    on_gpu: bool = False
    keep_order: bool = False


def frame_keys(seed: int, epoch: int, positions: np.ndarray) -> np.ndarray:
    """(n_frames,) int64 from 0 to 2^32. positions: of the frames in the order of the epoch."""
    keys = [np.random.SeedSequence([seed, _KEYS, epoch, int(p)]).generate_state(1)[0] for p in positions]
    return np.array(keys, dtype=np.int64)


Batch = dict[str, Tensor]

Shapes = dict[str, tuple[str | int, ...]]
SHAPES: Shapes = {
    "positions": ("atoms", 3),
    "species": ("atoms",),
    "frame": ("atoms",),
    "n_atoms": ("frames",),
    "cell": ("frames", 3, 3),
    "pbc": ("frames", 3),
    "edge_index": (2, "edges"),
    "edge_shift": ("edges", 3),
    "edge_reverse": ("edges",),
    "energy": ("frames",),
    "forces": ("atoms", 3),
    "stress": ("frames", 3, 3),
    "weight": ("frames",),
    "frame_id": ("frames",),
    "branch": ("frames",),
    "frame_key": ("frames",),
    "denoise": ("atoms", 3),
}
"""Shape of each key; names stand for sizes that differ between batches."""


def batch_shapes(fields: Fields) -> Shapes:
    """`SHAPES` and the shapes of these fields."""
    return SHAPES | {
        name: ("atoms" if field.per == "atom" else "frames", *field.shape) for name, field in fields.items()
    }


def batch_from_frames(
    frames: Sequence[Frame], species: SpeciesTable, graph: GraphOptions | float | None, fields: Fields | None = None
) -> Batch:
    """A batch of these frames, for use outside training.

    graph: options of the neighbour list, or the cutoff in A; None: no edges, `with_edges` adds them. fields: of the batch; if
    None, all fields of the frames.
    """
    geometry = Geometry(
        n_atoms=np.array([len(frame) for frame in frames], dtype=np.int64),
        positions=np.concatenate([frame.positions for frame in frames]),
        cell=np.stack([frame.cell for frame in frames]),
        pbc=np.stack([frame.pbc for frame in frames]),
    )
    edges = None
    if graph is not None:
        options = graph if isinstance(graph, GraphOptions) else GraphOptions(float(graph))
        edges, _ = build_block(geometry, options, lambda i: frames[i].where)
    fields = fields_of(frames) if fields is None else fields
    return assemble(
        geometry,
        edges,
        species=np.concatenate([species.index(frame.numbers, frame.where) for frame in frames]),
        energy=np.array([np.nan if frame.energy is None else frame.energy for frame in frames]),
        forces=np.concatenate([np.full((len(f), 3), np.nan) if f.forces is None else f.forces for f in frames]),
        stress=np.stack([np.full((3, 3), np.nan) if f.stress is None else f.stress for f in frames]),
        weight=np.array([frame.weight for frame in frames], dtype=np.float64),
        frame_id=np.arange(len(frames)),
        **{name: field_values(frames, name, field) for name, field in fields.items()},
    )


def assemble(geometry: Geometry, edges: EdgeBlock | None, /, **values: np.ndarray) -> Batch:
    """A batch from arrays of its frames.

    edges: None if `with_edges` adds them later. values: all other keys of the table above, and fields.
    """
    n_atoms = geometry.n_atoms
    arrays = {
        "positions": geometry.positions,
        "frame": np.repeat(np.arange(len(n_atoms)), n_atoms),
        "n_atoms": n_atoms,
        "cell": geometry.cell,
        "pbc": geometry.pbc,
        **({} if edges is None else _edges_in_batch(n_atoms, edges)),
        **values,
    }
    return {name: torch.from_numpy(_owned(array)) for name, array in arrays.items()}


def _edges_in_batch(n_atoms: np.ndarray, edges: EdgeBlock) -> dict[str, np.ndarray]:
    """Edges with indices of atoms and edges in the batch."""
    n_edges = edges.n_edges
    first_atom, first_edge = n_atoms.cumsum() - n_atoms, n_edges.cumsum() - n_edges
    edge_index = np.empty((2, len(edges.source)), dtype=np.int64)
    _add_by_frame(edges.source, first_atom, n_edges, edge_index[0])
    edge_index[1] = np.repeat(np.arange(len(edges.degree)), edges.degree)
    arrays = {"edge_index": edge_index, "edge_shift": edges.shift.astype(np.float64)}
    if edges.reverse is not None:
        arrays["edge_reverse"] = np.empty(len(edges.reverse), dtype=np.int64)
        _add_by_frame(edges.reverse, first_edge, n_edges, arrays["edge_reverse"])
    return arrays


def _add_by_frame(values: np.ndarray, addends: np.ndarray, counts: np.ndarray, out: np.ndarray) -> None:
    """out = values + the addend of their frame. Large frames are handled one by one, without an array of addends."""
    if len(values) <= 2048 * len(counts):
        np.add(values, np.repeat(addends, counts), out=out)
        return
    begin = 0
    for addend, count in zip(addends.tolist(), counts.tolist()):
        np.add(values[begin : begin + count], addend, out=out[begin : begin + count])
        begin += count


def with_edges(batch: Batch, cutoff: float) -> Batch:
    """The batch with edges, which are built on its device if it has none. cutoff: A."""
    if "edge_index" in batch:
        return batch
    edge_index, edge_shift, edge_reverse = batched_neighbours(
        batch["positions"], batch["n_atoms"], batch["cell"], batch["pbc"], cutoff
    )
    return {**batch, "edge_index": edge_index, "edge_shift": edge_shift.double(), "edge_reverse": edge_reverse}


def _owned(array: np.ndarray) -> np.ndarray:
    """A contiguous, writable array that does not share its memory."""
    array = np.ascontiguousarray(array)
    return array if array.flags.owndata and array.flags.writeable else array.copy()


def without_labels(batch: Batch, targets: Collection[str] = ()) -> Batch:
    """The same structures without labels, weight and frame id.

    targets: fields that are trained on. The other fields are inputs of a model and stay.
    """
    labels = ["energy", "forces", "stress", *(name for name in targets if name in batch and name not in SHAPES)]
    labels += ["denoise"] if "denoise" in batch else []
    blank = {name: torch.full_like(batch[name], torch.nan) for name in labels}
    return {
        **batch,
        **blank,
        "weight": torch.zeros_like(batch["weight"]),
        "frame_id": torch.full_like(batch["frame_id"], -1),
    }


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    """The batch with every tensor on `device`."""
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}


def halves(batch: Batch, shapes: Shapes = SHAPES) -> tuple[Batch, Batch]:
    """The batch divided into two of about equally many atoms, for batches that exceed the memory."""
    n_atoms = batch["n_atoms"].cpu()
    before = torch.cumsum(n_atoms, 0)
    frames = int(torch.argmin((before[:-1] - before[-1] / 2).abs())) + 1
    atoms = int(before[frames - 1])
    edges = int(torch.searchsorted(batch["edge_index"][1].contiguous(), atoms)) if "edge_index" in batch else 0
    cuts = {"frames": frames, "atoms": atoms, "edges": edges}
    moves = {"frame": frames, "edge_index": atoms, "edge_reverse": edges}
    first, second = {}, {}
    for key, tensor in batch.items():
        dim = int(key == "edge_index")
        at = cuts[next(size for size in shapes[key] if isinstance(size, str))]
        first[key] = tensor.narrow(dim, 0, at)
        rest = tensor.narrow(dim, at, tensor.shape[dim] - at)
        second[key] = rest - moves[key] if key in moves else rest
    return first, second


def repeated(batch: Batch, times: int) -> Batch:
    """The frames of a batch with edges, `times` times one after the other."""
    n_frames, n_atoms = len(batch["n_atoms"]), len(batch["species"])
    moves = {"frame": n_frames, "edge_index": n_atoms, "edge_reverse": batch["edge_index"].shape[1]}
    copies = {}
    for key, tensor in batch.items():
        dim = int(key == "edge_index")
        copies[key] = torch.cat([tensor] * times, dim)
        if key in moves:
            offsets = moves[key] * torch.arange(times, device=tensor.device)
            copies[key] += offsets.repeat_interleave(tensor.shape[dim])
    return copies


_ALLOCATION_ERRORS = ("not enough memory", "out of memory", "can't allocate memory")
"""What torch writes into the plain RuntimeError of a failed allocation on the CPU."""


def is_memory_error(error: BaseException) -> bool:
    """Whether a batch did not fit into the memory of its device."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _ALLOCATION_ERRORS)
    )

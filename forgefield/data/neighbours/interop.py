"""Batches for other libraries and back: PyTorch Geometric, DGL, and padded point clouds.

Every export contains the image shift of each edge, as integers and in A, so that a model written for the other library
gets periodic distances right: edge vector = pos[source] + shift_vec - pos[destination]. The libraries are imported only
if requested.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forgefield.data.batch import Batch
from forgefield.data.labels.fields import Field, Fields
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.ops.graph import reverse_edges
from forgefield.ops.neighbour_lists import batched_neighbours

if TYPE_CHECKING:
    from torch_geometric.data import Data

PADDING = -1
"""Species of a padded slot of a point cloud."""
_LABELS = {"energy": (), "forces": (3,), "stress": (3, 3)}


def to_pyg(batch: Batch, species: SpeciesTable, fields: Fields | None = None) -> Any:
    """A `torch_geometric.data.Batch` with one graph per frame. fields: those of the batch, which go along by their names.

    Per atom: z (atomic numbers), pos, species, forces. Per edge: edge_index (row 0 neighbour, row 1 centre, as PyG's
    source_to_target flow has it), edge_shift (images, integers), shift_vec (the same in A), edge_vec (from centre to
    neighbour, A), edge_weight (length, A). Per frame: cell (rows are lattice vectors, A), pbc, natoms, energy, stress, weight,
    frame_id. NaN marks a label that a frame does not carry.
    """
    try:
        from torch_geometric.data import Batch as GeometricBatch
        from torch_geometric.data import Data
    except ImportError as error:
        raise ForgefieldError("PyTorch Geometric is not installed; pip install torch-geometric") from error
    atoms, edges, frames = _columns(batch, species, fields)
    n_atoms = batch["n_atoms"].tolist()
    n_edges = _edges_per_frame(batch)
    atoms_of, edges_of = _cut(atoms, n_atoms), _cut(edges, n_edges)
    index_of = batch["edge_index"].split(n_edges, dim=1)
    graphs, first = [], 0
    for i, n in enumerate(n_atoms):
        per_frame = {name: column[i : i + 1] for name, column in frames.items()}
        graphs.append(Data(edge_index=index_of[i] - first, natoms=n, **atoms_of[i], **edges_of[i], **per_frame))
        first += n
    return GeometricBatch.from_data_list(graphs)


def from_pyg(data: Data, species: SpeciesTable, fields: Fields | None = None) -> Batch:
    """A batch from a PyG `Data` or `Batch` with z, pos and edge_index (row 0 neighbour, row 1 centre).

    Periodic graphs need cell and edge_shift (images, integers); energy, forces and stress are taken where they are. Without
    pbc, a graph is periodic along the lattice vectors that it has. fields: values to take along, by name; missing ones are NaN.
    Edges are sorted into the order of Forgefield's batches.
    """
    values: dict[str, Tensor | None] = data.to_dict()
    positions, edge_index = values.get("pos"), values.get("edge_index")
    if positions is None or edge_index is None or values.get("z") is None:
        missing = next(name for name in ("z", "pos", "edge_index") if values.get(name) is None)
        raise ForgefieldError(f"the PyG graph has no {missing}; it should have z, pos and edge_index")
    n, first_atoms = positions.shape[0], values.get("ptr")
    frame = values.get("batch")
    frame = torch.zeros(n, dtype=torch.int64, device=positions.device) if frame is None else frame
    n_frames = len(first_atoms) - 1 if first_atoms is not None else int(frame.max()) + 1 if n else 0
    n_atoms = torch.bincount(frame, minlength=n_frames)
    return _from_graph("PyG", values, edge_index, n_atoms, species, fields or {})


def from_dgl(
    graph: Any, species: SpeciesTable, per_frame: Mapping[str, Tensor] | None = None, fields: Fields | None = None
) -> Batch:
    """A batch from a `dgl.DGLGraph`, batched or not, with node data z and pos, and edges from the neighbour to the centre.

    per_frame: cell, pbc, energy, stress and others, as `to_dgl` returns them. Periodic graphs need the cell and the edge data
    edge_shift (images, integers). fields: as in `from_pyg`.
    """
    values: dict[str, Tensor | None] = {**graph.edata, **graph.ndata, **(per_frame or {})}
    for name in ("z", "pos"):
        if values.get(name) is None:
            raise ForgefieldError(f"the DGL graph has no node data {name}; it should have z and pos")
    edge_index = torch.stack(graph.edges()).long()
    return _from_graph("DGL", values, edge_index, graph.batch_num_nodes().long(), species, fields or {})


def _from_graph(
    library: str,
    values: Mapping[str, Tensor | None],
    edge_index: Tensor,
    n_atoms: Tensor,
    species: SpeciesTable,
    fields: Fields,
) -> Batch:
    """A batch from the values of a graph by name: z and pos, and the others where they are."""
    positions, numbers = values["pos"], values["z"]
    assert positions is not None
    assert numbers is not None
    n, n_frames, device = positions.shape[0], n_atoms.shape[0], positions.device
    cell, shift = values.get("cell"), values.get("edge_shift")
    if shift is None and cell is not None and bool((cell != 0).any()):
        raise ForgefieldError(
            f"the {library} graph has a cell but no edge_shift; without image shifts its distances are wrong"
        )
    zeros = torch.zeros(n_frames, 3, 3, dtype=torch.float64, device=device)
    shift = torch.zeros(edge_index.shape[1], 3, dtype=torch.float64, device=device) if shift is None else shift.double()
    index = species.index(numbers.cpu().numpy(), f"the {library} graph").copy()
    batch = {
        "positions": positions.double(),
        "species": torch.from_numpy(index).to(device),
        "frame": torch.repeat_interleave(n_atoms, output_size=n),
        "n_atoms": n_atoms,
        "cell": zeros if cell is None else cell.double().reshape(n_frames, 3, 3),
        **_sorted_edges(edge_index, shift, n),
    }
    pbc = values.get("pbc")
    batch["pbc"] = (batch["cell"] != 0).any(2) if pbc is None else pbc.bool().reshape(n_frames, 3)
    batch |= {name: _field(library, name, fields[name], values.get(name), n, n_frames, device) for name in fields}
    return batch | _labels(values, n, n_frames, device)


def _field(
    library: str, name: str, field: Field, value: Tensor | None, n_atoms: int, n_frames: int, device: torch.device
) -> Tensor:
    shape = (n_atoms if field.per == "atom" else n_frames, *field.shape)
    if value is None:
        return torch.full(shape, torch.nan, dtype=torch.float64, device=device)
    if value.numel() != math.prod(shape):
        raise ForgefieldError(
            f"the {library} graph has {name} of shape {list(value.shape)}; with {n_atoms} atoms and {n_frames} frames it "
            f"should be {list(shape)}"
        )
    return value.double().reshape(shape)


def to_dgl(batch: Batch, species: SpeciesTable, fields: Fields | None = None) -> tuple[Any, dict[str, Tensor]]:
    """A batched `dgl.DGLGraph`, and the values per frame: cell, pbc, energy, stress, weight, frame_id. fields: as above.

    Node data: z, pos, species, forces; edge data: edge_shift, shift_vec, edge_vec, distance, as in `to_pyg`. Edges lead
    from the neighbour to the centre, so messages are summed at the centre.
    """
    try:
        import dgl
    except ImportError as error:
        raise ForgefieldError("DGL is not installed (or not for this torch); see https://www.dgl.ai") from error
    atoms, edges, frames = _columns(batch, species, fields)
    source, destination = batch["edge_index"]
    graph = dgl.graph((source, destination), num_nodes=batch["species"].shape[0])
    edges["distance"] = edges.pop("edge_weight")
    graph.ndata.update(atoms)
    graph.edata.update(edges)
    graph.set_batch_num_nodes(batch["n_atoms"])
    graph.set_batch_num_edges(torch.tensor(_edges_per_frame(batch), device=source.device))
    return graph, frames


def point_clouds(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Padded clouds: positions (n_frames, most, 3), A, species (n_frames, most) and mask, true where there is an atom.

    Slots without an atom have position zero and species -1. Positions keep their gradient.
    """
    n_atoms, frame = batch["n_atoms"], batch["frame"]
    n_frames, most = n_atoms.shape[0], int(n_atoms.max()) if n_atoms.numel() else 0
    slot = torch.arange(frame.shape[0], device=frame.device) - (n_atoms.cumsum(0) - n_atoms).index_select(0, frame)
    positions = batch["positions"].new_zeros(n_frames, most, 3).index_put((frame, slot), batch["positions"])
    species = batch["species"].new_full((n_frames, most), PADDING).index_put((frame, slot), batch["species"])
    mask = torch.arange(most, device=frame.device) < n_atoms.unsqueeze(1)
    return positions, species, mask


def graph_from_point_clouds(
    positions: Tensor,
    species: Tensor,
    mask: Tensor,
    cell: Tensor | None = None,
    pbc: Tensor | None = None,
    *,
    cutoff: float,
) -> Batch:
    """The batch, with its edges within `cutoff` (A), of padded clouds as `point_clouds` makes them.

    positions: (n_frames, most, 3), A; species: (n_frames, most) rows of the species table; mask: (n_frames, most) bool,
    atoms may be in any of the slots; cell: (n_frames, 3, 3), A, and pbc: (n_frames, 3) bool, or None for
    molecules. Works on the device of the positions; labels are missing.
    """
    n_frames, device = positions.shape[0], positions.device
    if positions.shape != (*mask.shape, 3) or species.shape != mask.shape:
        raise ForgefieldError(
            f"point clouds of shapes {tuple(positions.shape)}, {tuple(species.shape)} and {tuple(mask.shape)} do not "
            "belong together; they must be (frames, slots, 3), (frames, slots) and (frames, slots)"
        )
    mask = mask.bool()
    if bool((species[mask] < 0).any()):
        raise ForgefieldError("a slot of a point cloud that is an atom according to the mask has no species")
    if cell is None and pbc is not None and bool(pbc.any()):
        raise ForgefieldError("the point clouds are periodic but have no cell")
    cell = torch.zeros(n_frames, 3, 3, dtype=torch.float64, device=device) if cell is None else cell.double()
    pbc = torch.zeros(n_frames, 3, dtype=torch.bool, device=device) if pbc is None else pbc.bool()
    n_atoms, where = mask.sum(1), positions[mask].double()
    edge_index, edge_shift, edge_reverse = batched_neighbours(where, n_atoms, cell, pbc, cutoff)
    batch = {
        "positions": where,
        "species": species[mask],
        "frame": torch.repeat_interleave(n_atoms, output_size=where.shape[0]),
        "n_atoms": n_atoms,
        "cell": cell,
        "pbc": pbc,
        "edge_index": edge_index,
        "edge_shift": edge_shift.double(),
        "edge_reverse": edge_reverse,
    }
    return batch | _labels({}, where.shape[0], n_frames, device)


def _columns(
    batch: Batch, species: SpeciesTable, fields: Fields | None
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """What other libraries get of each atom, edge and frame."""
    if "edge_index" not in batch:
        raise ForgefieldError("the batch has no edges yet; make them with forgefield.data.batch.with_edges")
    source, destination = batch["edge_index"]
    positions = batch["positions"]
    cells = batch["cell"].index_select(0, batch["frame"].index_select(0, destination))
    shift_vec = (batch["edge_shift"].to(cells.dtype).unsqueeze(1) @ cells).squeeze(1)
    vectors = positions.index_select(0, source) + shift_vec - positions.index_select(0, destination)
    numbers = torch.from_numpy(species.numbers).to(positions.device)
    atoms = {"z": numbers.index_select(0, batch["species"]), "pos": positions, "species": batch["species"]}
    if "forces" in batch:
        atoms["forces"] = batch["forces"]
    edges = {
        "edge_shift": batch["edge_shift"],
        "shift_vec": shift_vec,
        "edge_vec": vectors,
        "edge_weight": torch.linalg.vector_norm(vectors, dim=1),
    }
    frames: dict[str, Tensor] = {}
    for name in ("cell", "pbc", "energy", "stress", "weight", "frame_id"):
        if name in batch:
            frames[name] = batch[name]
    for name, field in (fields or {}).items():
        (atoms if field.per == "atom" else frames)[name] = batch[name]
    return atoms, edges, frames


def _edges_per_frame(batch: Batch) -> list[int]:
    frames = batch["frame"].index_select(0, batch["edge_index"][1])
    return torch.bincount(frames, minlength=batch["n_atoms"].shape[0]).tolist()


def _cut(columns: Mapping[str, Tensor], counts: Sequence[int]) -> list[dict[str, Tensor]]:
    parts = {name: column.split(list(counts)) for name, column in columns.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(len(counts))]


def _sorted_edges(edge_index: Tensor, shift: Tensor, n_atoms: int) -> Batch:
    """In our order; with the reverse of each edge where every edge has one."""
    order = torch.arange(edge_index.shape[1], device=edge_index.device)
    for key in (shift[:, 2], shift[:, 1], shift[:, 0], edge_index[1] * n_atoms + edge_index[0]):
        order = order.index_select(0, torch.argsort(key.index_select(0, order), stable=True))
    edges = {"edge_index": edge_index[:, order], "edge_shift": shift.index_select(0, order)}
    try:
        return edges | {"edge_reverse": reverse_edges(edges["edge_index"], edges["edge_shift"])}
    except ValueError:
        return edges


def _labels(values: Mapping[str, Tensor | None], n_atoms: int, n_frames: int, device: torch.device) -> Batch:
    """The labels among `values`, NaN for the others; weight 1 and consecutive numbers likewise."""
    labels: Batch = {}
    for name, tail in _LABELS.items():
        shape = (n_atoms if name == "forces" else n_frames, *tail)
        value = values.get(name)
        missing = torch.full(shape, torch.nan, dtype=torch.float64, device=device)
        labels[name] = missing if value is None else value.double().reshape(shape)
    weight, frame_id = values.get("weight"), values.get("frame_id")
    ones = torch.ones(n_frames, dtype=torch.float64, device=device)
    labels["weight"] = ones if weight is None else weight.double().reshape(n_frames)
    numbers = torch.arange(n_frames, device=device)
    labels["frame_id"] = numbers if frame_id is None else frame_id.reshape(n_frames)
    return labels

"""Neighbour lists of many frames: held in memory, read from a store, or built whenever a batch needs them.

All three return the same edges. In columns an edge takes a few bytes: numbers of atoms within the frame, shifts as small
integers, the destination by counting.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from forgefield.data.neighbours.graph import Edges, GraphOptions, build_edges, edge_vectors, squared_lengths
from forgefield.data.store.columns import EDGE_FIELDS, copy_ranges, offsets, ranges
from forgefield.data.store.table import FrameTable, RowView
from forgefield.errors import ForgefieldError

CLOSEST_PAIR = 1e-3
"""Atoms closer than this, A, are taken to be one atom entered twice: a pair without a direction has no physics."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class EdgeBlock:
    """Edges of several frames, one after the other; atoms and edges are numbered within their frame."""

    n_edges: np.ndarray
    """(n_frames,) int64."""
    degree: np.ndarray
    """(n_atoms,): edges that end at each atom."""
    source: np.ndarray
    """(n_edges,)."""
    shift: np.ndarray
    """(n_edges, 3)."""
    reverse: np.ndarray | None
    """(n_edges,)."""


@dataclass(frozen=True)
class Geometry:
    """Structures of several frames, as far as a neighbour list needs them."""

    n_atoms: np.ndarray
    positions: np.ndarray
    cell: np.ndarray
    pbc: np.ndarray


def build_block(geometry: Geometry, graph: GraphOptions, where: Callable[[int], str]) -> tuple[EdgeBlock, np.ndarray]:
    """Edges of all frames, and the shortest of each, A. where: names the n-th frame in a message."""
    ends = geometry.n_atoms.cumsum()
    lists, shortest = [], []
    for i, (first, end) in enumerate(zip(ends - geometry.n_atoms, ends)):
        positions, cell = geometry.positions[first:end], geometry.cell[i]
        edges = build_edges(positions, cell, geometry.pbc[i], graph)
        if edges.shortest < CLOSEST_PAIR:
            refuse_coinciding_atoms(positions, cell, edges, where(i))
        lists.append(edges)
        shortest.append(edges.shortest)
    n_edges = np.array([len(edges.source) for edges in lists], dtype=np.int64)
    degrees = [np.bincount(edges.destination, minlength=n) for edges, n in zip(lists, geometry.n_atoms)]
    reverse = None
    if graph.max_neighbours is None:
        reverse = _joined([edges.reverse for edges in lists if edges.reverse is not None], ())
    block = EdgeBlock(
        n_edges=n_edges,
        degree=_joined(degrees, ()),
        source=_joined([edges.source for edges in lists], ()),
        shift=_joined([edges.shifts for edges in lists], (3,)),
        reverse=reverse,
    )
    return block, np.array(shortest)


def _joined(arrays: Sequence[np.ndarray], tail: tuple[int, ...]) -> np.ndarray:
    return np.concatenate(arrays) if len(arrays) else np.zeros((0, *tail), dtype=np.int64)


def refuse_coinciding_atoms(positions: np.ndarray, cell: np.ndarray, edges: Edges, where: str) -> None:
    squares = squared_lengths(edge_vectors(positions, cell, edges.source, edges.destination, edges.shifts))
    worst = int(squares.argmin())
    one, other = sorted((int(edges.source[worst]), int(edges.destination[worst])))
    raise ForgefieldError(
        f"{where}: atoms {one} and {other} are at the same place ({squares[worst] ** 0.5:.1e} A apart)"
    )


def edge_columns(
    block: EdgeBlock, shortest: np.ndarray, n_atoms: np.ndarray, numbers: np.ndarray
) -> dict[str, np.ndarray]:
    """The columns of a block, in the types they are stored in."""
    if np.abs(block.shift).max(initial=0) > np.iinfo(EDGE_FIELDS["edge_shift"].dtype).max:
        raise ForgefieldError(
            "an atom lies tens of thousands of cells away from its neighbours; wrap the positions into the cell"
        )
    if max(n_atoms.max(initial=0), block.n_edges.max(initial=0)) > np.iinfo(EDGE_FIELDS["edge_reverse"].dtype).max:
        raise ForgefieldError(
            "a frame has more than two thousand million edges; take a smaller cutoff or smaller frames"
        )
    frame = np.repeat(np.arange(len(n_atoms)), n_atoms)
    _, component = np.unique(frame * 256 + numbers, return_inverse=True)
    arrays = {
        "degree": block.degree,
        "edge_source": block.source,
        "edge_shift": block.shift,
        "neighbours": np.bincount(component, weights=block.degree),
        "closest": shortest,
        "first_edge": offsets(block.n_edges),
    }
    if block.reverse is not None:
        arrays["edge_reverse"] = block.reverse
    return {name: np.ascontiguousarray(array, dtype=EDGE_FIELDS[name].dtype) for name, array in arrays.items()}


class NeighbourLists(ABC):
    """Neighbour lists of the frames of a table."""

    n_edges: np.ndarray | None
    """(n_frames,), None if the lists would have to be built first."""
    neighbours: np.ndarray | None
    """Neighbours of all atoms of each component of the table, or None."""
    closest: np.ndarray | None
    """(n_frames,) shortest edge of each frame, A, or None."""
    kind: str

    @abstractmethod
    def read(self, view: RowView, geometry: Geometry) -> EdgeBlock | None:
        """Edges of these frames, whose structures are `geometry`; None where others make them."""


class MemoryEdges(NeighbourLists):
    """Made once, at the start."""

    kind = "kept in memory"
    n_edges: np.ndarray

    def __init__(self, table: FrameTable, graph: GraphOptions, progress: Progress | None = None) -> None:
        chunks = [np.arange(begin, min(begin + 64, len(table))) for begin in range(0, len(table), 64)]

        def build(rows: np.ndarray) -> dict[str, np.ndarray]:
            geometry = read_geometry(table, rows)
            block, shortest = build_block(geometry, graph, lambda i: table.where(int(rows[i])))
            return edge_columns(block, shortest, geometry.n_atoms, table.atoms("numbers", rows))

        built: list[dict[str, np.ndarray]] = []
        for chunk in chunks:
            built.append(build(chunk))
            if progress is not None:
                progress(int(chunk[-1]) + 1, len(table))
        columns = {
            name: np.concatenate([arrays[name] for arrays in built]) for name in built[0] if name != "first_edge"
        }
        n_edges = np.concatenate([np.diff(arrays["first_edge"]) for arrays in built])
        if np.abs(columns["edge_shift"]).max(initial=0) < 128:
            columns["edge_shift"] = columns["edge_shift"].astype(np.int8)
        self._columns, self._first_edge, self._first_atom = columns, offsets(n_edges), offsets(table.n_atoms)
        self.n_edges, self.neighbours, self.closest = n_edges, columns["neighbours"], columns["closest"]

    def read(self, view: RowView, geometry: Geometry) -> EdgeBlock:
        n_edges = self.n_edges[view.rows]
        edges = self._first_edge[view.rows], n_edges, n_edges.cumsum() - n_edges
        atoms = self._first_atom[view.rows], view.n_atoms, view.n_atoms.cumsum() - view.n_atoms

        def taken(name: str, first: np.ndarray, counts: np.ndarray, begins: np.ndarray) -> np.ndarray:
            column = self._columns[name]
            out = np.empty((int(counts.sum()), *column.shape[1:]), dtype=column.dtype)
            copy_ranges(column, first, counts, out, begins)
            return out

        return EdgeBlock(
            n_edges=n_edges,
            degree=taken("degree", *atoms),
            source=taken("edge_source", *edges),
            shift=taken("edge_shift", *edges),
            reverse=taken("edge_reverse", *edges) if "edge_reverse" in self._columns else None,
        )


class BuiltEdges(NeighbourLists):
    """Built whenever a batch is prepared."""

    kind = "made for each batch"
    n_edges = neighbours = closest = None

    def __init__(self, table: FrameTable, graph: GraphOptions) -> None:
        self._table, self._graph = table, graph

    def read(self, view: RowView, geometry: Geometry) -> EdgeBlock:
        return build_block(geometry, self._graph, lambda i: self._table.where(int(view.rows[i])))[0]


class DeviceEdges(NeighbourLists):
    """Made where the model runs, when a batch has arrived there (`batch.with_edges`)."""

    kind = "made on the device"
    n_edges = neighbours = closest = None

    def read(self, view: RowView, geometry: Geometry) -> None:
        return None


class StoredEdges(NeighbourLists):
    """Read from stores that were written with neighbour lists of just these options."""

    kind = "read from the store"
    n_edges: np.ndarray

    def __init__(self, table: FrameTable) -> None:
        every = np.arange(len(table))
        self.n_edges = np.empty(len(table), dtype=np.int64)
        self.closest = np.empty(len(table))
        order, counts = [], []
        for part, places, local in table.located(every):
            first, component = (part.columns.column(name) for name in ("first_edge", "first_component"))
            self.n_edges[places] = first[local + 1] - first[local]
            self.closest[places] = part.columns.column("closest")[local]
            n_components = component[local + 1] - component[local]
            order.append(np.repeat(places, n_components))
            counts.append(part.columns.column("neighbours")[ranges(component[local], n_components)])
        frame, self.neighbours = np.concatenate(order), np.concatenate(counts)
        if not (frame[1:] >= frame[:-1]).all():
            self.neighbours = self.neighbours[np.argsort(frame, kind="stable")]

    def read(self, view: RowView, geometry: Geometry) -> EdgeBlock:
        n_edges = self.n_edges[view.rows]

        def edges(name: str) -> np.ndarray:
            return view.ranges(name, EDGE_FIELDS[name], n_edges, "first_edge")

        has_reverse = all(part.columns.has("edge_reverse") for part, _, _ in view.located)
        return EdgeBlock(
            n_edges=n_edges,
            degree=view.ranges("degree", EDGE_FIELDS["degree"], view.n_atoms, "first_atom"),
            source=edges("edge_source"),
            shift=edges("edge_shift"),
            reverse=edges("edge_reverse") if has_reverse else None,
        )


def geometry_of(view: RowView) -> Geometry:
    return Geometry(view.n_atoms, view.atoms("positions"), view.column("cell"), view.column("pbc"))


def read_geometry(table: FrameTable, rows: np.ndarray) -> Geometry:
    return geometry_of(table.find(rows))

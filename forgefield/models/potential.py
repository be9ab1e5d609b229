"""From atomic energies to a potential: edge vectors, total energies, forces and stress by one differentiation.

Every model is a function from a batch with edge vectors to atomic energies. `Potential` wraps one and adds what all of
them share, in float64: forces are the exact derivative of the energy, stress its strain derivative over the volume.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from forgefield.kernels.core.availability import use_kernels
from forgefield.kernels.edges.segments import sums_by_kernel
from forgefield.kernels.edges.vectors import forces_by_kernel, vectors_by_kernel
from forgefield.ops.graph import EdgeGraph, GradientSwitch, Segments, edge_graph, gather, is_traced, segment_sum

Batch = dict[str, Tensor]


@runtime_checkable
class EnergyModel(Protocol):
    """What `Potential` asks of a model, also of a user's own.

    `forward(batch)` gets the batch with the additional key `edge_vectors` (n_edges, 3), A, float64, and returns atomic
    energies (n_atoms,), eV. A model whose energy depends on positions and cell through `edge_vectors` alone may say so
    with a true class attribute `only_edge_vectors`: its derivative is then taken there, which is faster. All others are
    differentiated in positions and strain.
    """

    species: tuple[str, ...]
    cutoff: float

    def forward(self, batch: Batch) -> Tensor: ...


class ExtraOutput(Protocol):
    """What is said of an output beside energy, forces and stress.

    per: `frame` or `atom`, what has a value. shape: of one value. unit: of values, in words. reduce: how the value of a frame
    follows from its atoms', by `sum` (extensive), `mean`, `max` or `attention` (intensive). kind: how it turns with the
    structure, `values` where it does not. scale: how far values usually are from what composition or species say, one number or
    one for each component; losses are measured in it. classes: labels of the classes that the output tells apart; it is then a
    logit for each, else None.
    """

    per: str
    shape: list[int]
    unit: str
    reduce: str
    kind: str
    scale: Any
    classes: list[float] | None


class Potential(nn.Module):
    """Energy, forces and stress of batches, for any energy model.

    max_neighbours: the edge lists it was trained on hold only so many neighbours of each atom; others have to as well.
    """

    has_energy = True
    forces_are_direct = False
    """Whether forces are an output of their own and not the derivative of the energy."""
    reference_energies: Tensor | None
    """(n_species,) eV, added to the model's energies; None for models that have shifts themselves."""

    def __init__(self, model: nn.Module, *, max_neighbours: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.max_neighbours = max_neighbours
        self.register_buffer("reference_energies", None, persistent=False)  # resolved options hold them

    def add_reference_energies(self, energies: Mapping[str, float]) -> None:
        """Add an energy for each atom, by species, eV, to those of the model: for models that have no shifts themselves."""
        self.reference_energies = torch.tensor([float(energies[s]) for s in self.species], dtype=torch.float64)

    @property
    def extra_outputs(self) -> Mapping[str, ExtraOutput]:
        """What it gives beside energy, forces and stress, by name."""
        return {}

    @property
    def needs_keys(self) -> bool:
        """Whether batches of a training have to carry `frame_key`."""
        return False

    @property
    def species(self) -> tuple[str, ...]:
        return tuple(self.model.species)  # type: ignore[arg-type]

    @property
    def cutoff(self) -> float:
        return float(self.model.cutoff)  # type: ignore[arg-type]

    @property
    def adaptive_cutoff(self) -> float | None:
        """Radius up to which isolated atoms look for neighbours, A; edge lists have to be made with it."""
        limit = getattr(self.model, "adaptive_cutoff", None)
        return None if limit is None else float(limit)  # type: ignore[arg-type]

    @property
    def inputs(self) -> dict[str, tuple[str, int]]:
        """Further keys of a batch that the model reads: name -> (per frame or atom, how many numbers)."""
        return dict(getattr(self.model, "inputs", {}))

    @property
    def required_inputs(self) -> list[str]:
        """Those of `inputs` that every frame has to carry."""
        optional = getattr(self.model, "optional_inputs", ())
        return [name for name in self.inputs if name not in optional]

    def forward(self, batch: Batch, *, forces: bool = True, stress: bool = False) -> dict[str, Tensor]:
        """Outputs, all float64: `energy` (n_frames,) eV, `atomic_energy` (n_atoms,) eV, and where asked `forces`
        (n_atoms, 3) eV/A and `stress` (n_frames, 3, 3) eV/A^3, (1/V) dE/dstrain; NaN for a frame without a volume.

        In training mode forces and stress can be differentiated again. Works under `torch.no_grad`.
        """
        if not (forces or stress):
            return self._outputs(*self._encode(batch | {"edge_vectors": edge_vectors(batch)}), batch)
        derive = self._through_edges if getattr(self.model, "only_edge_vectors", False) else self._through_positions
        with torch.enable_grad():
            outputs = derive(batch, forces, stress)
        if self.training or batch["positions"].requires_grad or batch["cell"].requires_grad:
            return outputs
        return {key: value.detach() for key, value in outputs.items()}

    def _encode(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Atomic energies (n_atoms,), eV, float64; and features of atoms where further outputs are made of them."""
        return self._referenced(self.model(batch), batch), None

    def _referenced(self, atomic: Tensor, batch: dict[str, Any]) -> Tensor:
        """Energies of the model (n_atoms,), with the reference energies if there are any; float64."""
        atomic = atomic.reshape(-1).double()
        if self.reference_energies is None:
            return atomic
        return atomic + gather(self.reference_energies, Segments(batch["species"], len(self.species)))

    def _extra_outputs(self, features: Tensor | None, batch: Batch) -> dict[str, Tensor]:
        """Outputs beside energies and their derivatives, by name."""
        return {}

    def _outputs(self, atomic: Tensor, features: Tensor | None, batch: Batch) -> dict[str, Tensor]:
        """All but the derivatives."""
        return {"energy": _frame_sum(atomic, batch), "atomic_energy": atomic, **self._extra_outputs(features, batch)}

    def _through_edges(self, batch: Batch, forces: bool, stress: bool) -> dict[str, Tensor]:
        """Differentiate in the edge vectors; forces and virial are sums of these edge forces."""
        vectors = edge_vectors(batch)
        outer = vectors.requires_grad
        vectors = vectors if outer else vectors.requires_grad_(True)
        switch = GradientSwitch()
        graph = edge_graph(batch)
        private: dict[str, Any] = {"edge_vectors": vectors, "edge_gradient": switch, "edge_graph": graph}
        again = private["differentiated_again"] = self.training or outer
        atomic, features = self._encode(batch | private)
        if again:
            outputs = self._outputs(atomic, features, batch)
        else:  # nobody differentiates them
            outputs = self._outputs(atomic.detach(), None if features is None else features.detach(), batch)
        (slope,) = _derivatives(atomic, [vectors], again)
        switch.off = self.training and not outer
        if forces:
            outputs["forces"] = _edge_forces(slope, graph)
        if stress:
            products = (vectors if outer else vectors.detach()).unsqueeze(2) * slope.unsqueeze(1)
            frame = Segments(batch["frame"][batch["edge_index"][1]], batch["n_atoms"].shape[0], rows_are_sorted=True)
            virial = segment_sum(products, frame)
            outputs["stress"] = _per_volume(0.5 * (virial + virial.transpose(1, 2)), batch["cell"])
        return outputs

    def _through_positions(self, batch: Batch, forces: bool, stress: bool) -> dict[str, Tensor]:
        """Differentiate in positions and in a symmetric strain of positions and cells."""
        positions = batch["positions"]
        outer = positions.requires_grad or batch["cell"].requires_grad
        positions = positions if positions.requires_grad else positions.detach().requires_grad_(True)
        strain = torch.zeros_like(batch["cell"]).requires_grad_(True)
        deformation = 0.5 * (strain + strain.transpose(1, 2))
        moved = positions + rows_times(positions, deformation.index_select(0, batch["frame"]))
        strained = batch | {"positions": moved, "cell": batch["cell"] + batch["cell"] @ deformation}
        atomic, features = self._encode(strained | {"edge_vectors": edge_vectors(strained)})
        outputs = self._outputs(atomic, features, batch)
        slope, virial = _derivatives(atomic, [positions, strain], self.training or outer)
        if forces:
            outputs["forces"] = -slope
        if stress:
            outputs["stress"] = _per_volume(virial, batch["cell"])
        return outputs

    def response(self, batch: Batch, adjoints: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors and their cotangents, with which their gradients in the weights add up to that of sum(adjoint * output) over
        the outputs named in `adjoints`.

        Forces and stress are derivatives of the energy in positions and strain; weighted with their adjoints they are one
        derivative of the energy along one direction, which forward-mode differentiation carries along with the energy. So
        one reverse pass over the result is all: no derivative of a derivative is taken.
        """
        direction = None if self.forces_are_direct else adjoints.get("forces")
        direction = torch.zeros_like(batch["positions"]) if direction is None else -direction
        strain = None
        if "stress" in adjoints:
            volume = volumes(batch["cell"]).view(-1, 1, 1)
            strain = 0.5 * (adjoints["stress"] + adjoints["stress"].transpose(1, 2))
            strain = torch.where(volume > 0, strain / volume, torch.zeros_like(strain))
        with forward_ad.dual_level():
            moving = self._moving(batch, direction, strain)
            moved = self.model.moved(moving) if hasattr(self.model, "moved") else None  # type: ignore[operator]
            if moved is None:
                atomic, features = self._encode(moving)
                energy, slope = forward_ad.unpack_dual(atomic)
                still = None if features is None else forward_ad.unpack_dual(features).primal
        if moved is not None:
            still, energy, slope = self.model.encode_moved(moved, moving)  # type: ignore[operator]
        terms = [] if slope is None else [(slope, torch.ones_like(slope))]
        if "energy" in adjoints:
            terms.append((energy, adjoints["energy"].index_select(0, batch["frame"])))
        for name, value in self._extra_outputs(still, batch).items():
            if name in adjoints:
                terms.append((value, adjoints[name]))
        terms = [(value, cotangent) for value, cotangent in terms if value.requires_grad]
        return [value for value, _ in terms], [cotangent for _, cotangent in terms]

    def _moving(self, batch: Batch, direction: Tensor, strain: Tensor | None) -> dict[str, Any]:
        """The batch with tangents: atoms move along `direction` (n_atoms, 3), all is strained by `strain` (n_frames, 3, 3)."""
        positions, cell = batch["positions"].detach(), batch["cell"].detach()
        d_cell = None
        if strain is not None:
            direction = direction + rows_times(positions, strain.index_select(0, batch["frame"]))
            d_cell = cell @ strain
        if getattr(self.model, "only_edge_vectors", False):
            before: dict[str, Any] = batch.get("memory") or {}  # type: ignore[assignment]
            vectors = before["vectors"] if before else edge_vectors(batch | {"positions": positions, "cell": cell})
            tangents = _edge_vectors(direction, d_cell, batch)  # they are linear in both
            graph = before["graph"] if before else edge_graph(batch)
            return batch | {"edge_vectors": forward_ad.make_dual(vectors, tangents), "edge_graph": graph}
        moved = {"positions": forward_ad.make_dual(positions, direction), "cell": cell}
        if d_cell is not None:
            moved["cell"] = forward_ad.make_dual(cell, d_cell)
        return batch | moved | {"edge_vectors": edge_vectors(batch | moved)}


def edge_vectors(batch: Batch) -> Tensor:
    """(n_edges, 3) from destination (centre) to source (neighbour), A, float64."""
    return _edge_vectors(batch["positions"], batch["cell"], batch)


def _edge_vectors(positions: Tensor, cell: Tensor | None, batch: Batch) -> Tensor:
    """The same for other positions and cells. cell: None for zero."""
    fixed = not (positions.requires_grad or forward_ad.unpack_dual(positions).tangent is not None)
    fixed = fixed and not (cell is not None and cell.requires_grad)
    if fixed and not is_traced(positions) and use_kernels(positions):
        return vectors_by_kernel(positions, cell, *(batch[key] for key in ("frame", "edge_index", "edge_shift")))
    source, destination = batch["edge_index"]
    n_atoms = positions.shape[0]
    to_destination = Segments(destination, n_atoms, rows_are_sorted=True)
    difference = gather(positions, Segments(source, n_atoms)) - gather(positions, to_destination)
    if cell is None:
        return difference
    cells = cell.index_select(0, batch["frame"].index_select(0, destination))
    return difference + rows_times(batch["edge_shift"], cells)


def _edge_forces(slope: Tensor, graph: EdgeGraph) -> Tensor:
    """(n_atoms, 3) from the derivative in every edge vector."""
    if not slope.requires_grad and not is_traced(slope) and use_kernels(slope):
        return forces_by_kernel(slope, graph)
    return segment_sum(slope, graph.by_destination) - segment_sum(slope, graph.by_source)


def rows_times(rows: Tensor, matrices: Tensor) -> Tensor:
    """Each row times its own matrix: (n, 3), (n, 3, 3) -> (n, 3)."""
    return (rows.unsqueeze(2) * matrices).sum(1)


def _frame_sum(atomic: Tensor, batch: Batch) -> Tensor:
    atoms = Segments(batch["frame"], batch["n_atoms"].shape[0], rows_are_sorted=True)
    if not atomic.requires_grad and not is_traced(atomic) and use_kernels(atomic):
        return sums_by_kernel(atomic, atoms.pointers)
    return segment_sum(atomic, atoms)


def _derivatives(atomic: Tensor, variables: list[Tensor], create_graph: bool) -> list[Tensor]:
    """dE/dvariable for each, of the sum of atomic energies; zero where they do not depend on it."""
    if not atomic.requires_grad:
        return [torch.zeros_like(variable) for variable in variables]
    ones = [torch.ones_like(atomic)]
    slopes = torch.autograd.grad([atomic], variables, ones, create_graph=create_graph, allow_unused=True)
    return [torch.zeros_like(v) if slope is None else slope for v, slope in zip(variables, slopes)]


def _per_volume(virial: Tensor, cell: Tensor) -> Tensor:
    """Stress of each frame; NaN without a volume, and no gradient from there."""
    volume = volumes(cell).view(-1, 1, 1)
    has_volume = volume > 0
    stress = virial / torch.where(has_volume, volume, torch.ones_like(volume))
    return torch.where(has_volume, stress, torch.full_like(stress, float("nan")))


def volumes(cell: Tensor) -> Tensor:
    """(n_frames,), A^3; zero where there is no cell. cell: (n_frames, 3, 3)."""
    a, b, c = cell.unbind(1)
    return (a * torch.linalg.cross(b, c)).sum(1).abs()

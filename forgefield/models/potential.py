"""From atomic energies to a potential: edge vectors, total energies, forces and stress by one differentiation.

Every model is a function from a batch with edge vectors to atomic energies. `Potential` wraps one and adds what all of
them share, in float64: forces are the exact derivative of the energy, stress its strain derivative over the volume.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.kernels.core.runtime import use_kernels
from forgefield.kernels.edges.segments import forces_by_kernel, sums_by_kernel
from forgefield.kinds import EVALUATE_ATOMS
from forgefield.models.edges import (
    Batch,
    EdgeContext,
    StepMemory,
    displacements,
    edge_vectors,
    rows_times,
    volumes,
)
from forgefield.models.interface import AtomisticModel, DerivativeOutput, ExtraOutput, LastLayer, declared
from forgefield.ops.graph import EdgeGraph, GradientSwitch, Segments, edge_graph, gather, is_traced, segment_sum


class Potential(nn.Module):
    """Energy, forces and stress of batches, for any energy model.

    max_neighbours: largest number of neighbours per atom in the edge lists of the training; other edge lists need the same
    limit.
    """

    has_energy = True
    forces_are_direct = False
    """Whether forces are an output of their own and not the derivative of the energy."""
    reference_energies: Tensor | None
    """(n_species,) eV, added to the model's energies; None for models that have shifts themselves."""

    model: nn.Module
    interface: AtomisticModel
    """What the model can do: the model itself, or a plain module with the defaults declared."""

    def __init__(self, model: nn.Module, *, max_neighbours: int | None = None) -> None:
        super().__init__()
        self.set_model(model)
        self.max_neighbours = max_neighbours
        self.register_buffer("reference_energies", None, persistent=False)  # resolved options hold them

    def set_model(self, model: nn.Module) -> None:
        """Replace the model by one of the same species and cutoff."""
        self.model = model
        # Not a submodule: weights have the names that they have in the model.
        object.__setattr__(self, "interface", declared(model))

    def add_reference_energies(self, energies: Mapping[str, float]) -> None:
        """Add an energy for each atom, by species, eV, to those of the model: for models that have no shifts themselves."""
        self.reference_energies = torch.tensor([float(energies[s]) for s in self.species], dtype=torch.float64)

    @property
    def extra_outputs(self) -> Mapping[str, ExtraOutput]:
        """Outputs other than energy, forces and stress, by name."""
        return self.derivative_outputs

    @property
    def derivative_outputs(self) -> Mapping[str, DerivativeOutput]:
        """Outputs that are minus the derivative of the energy in an input of atoms, by name."""
        return self.interface.derivative_outputs

    @property
    def uncertainty_outputs(self) -> Mapping[str, str]:
        """Outputs that are uncertainties of others, by name: `frame` or `atom`, what has a value. Default: none."""
        return {}

    @property
    def needs_keys(self) -> bool:
        """Whether batches of a training have to carry `frame_key`."""
        return False

    @property
    def species(self) -> tuple[str, ...]:
        return self.interface.species

    @property
    def type_names(self) -> tuple[str, ...] | None:
        """Other names of the species; None: they have none."""
        return self.interface.type_names

    @property
    def cutoff(self) -> float:
        return self.interface.cutoff

    @property
    def adaptive_cutoff(self) -> float | None:
        """Radius up to which isolated atoms have neighbours, A; edge lists must be built with it."""
        return self.interface.adaptive_cutoff

    @property
    def inputs(self) -> dict[str, tuple[str, int]]:
        """Additional keys of a batch that the model reads: name -> (`frame` or `atom`, how many numbers)."""
        return dict(self.interface.inputs)

    @property
    def required_inputs(self) -> list[str]:
        """Those of `inputs` that every frame has to carry."""
        return [name for name in self.inputs if name not in self.interface.optional_inputs]

    def __call__(self, batch: Batch, **options: Any) -> Any:
        """As `forward`; for `ase.Atoms`, an object with `energy` (eV), `forces` (eV/A) and `stress` (eV/A^3)."""
        if isinstance(batch, Mapping):
            return super().__call__(batch, **options)
        return EVALUATE_ATOMS.load()(self, batch)

    def forward(
        self, batch: Batch, *, forces: bool = True, stress: bool = False, memory: StepMemory | None = None
    ) -> dict[str, Tensor]:
        """Outputs, all float64: `energy` (n_frames,) eV, `atomic_energy` (n_atoms,) eV, and if requested `forces`
        (n_atoms, 3) eV/A and `stress` (n_frames, 3, 3) eV/A^3, (1/V) dE/dstrain; NaN for a frame without a volume.

        In training mode forces and stress can be differentiated again. Works under `torch.no_grad`.
        memory: kept for a `response` to the same batch, which can then reuse this pass.
        """
        calculated = self.interface.calculated(batch, forces=forces, stress=stress)
        if calculated is not None:
            return calculated
        if not (forces or stress or self.derivative_outputs):
            return self._outputs(*self._encode(batch, EdgeContext(edge_vectors(batch), batch, memory=memory)), batch)
        with torch.enable_grad():
            if self.interface.only_edge_vectors:
                outputs = self._through_edges(batch, forces, stress, memory)
            else:
                outputs = self._through_positions(batch, forces, stress)
        if self.training or batch["positions"].requires_grad or batch["cell"].requires_grad:
            return outputs
        return {key: value.detach() for key, value in outputs.items()}

    def atomic_energies(self, batch: Batch, edges: EdgeContext) -> Tensor:
        """(n_atoms,) eV, float64, of edge vectors that the caller differentiates; those of ghost atoms have no meaning."""
        return self._encode(batch, edges)[0]

    def _encode(self, batch: Batch, edges: EdgeContext) -> tuple[Tensor, Tensor | None]:
        """Atomic energies (n_atoms,), eV, float64; and features of atoms for models with heads."""
        return self._referenced(self.interface(batch, edges), batch), None

    def last_layer(self, batch: Batch, edges: EdgeContext) -> LastLayer:
        """Atomic energies as a linear function of the weights of the last layer; refused with the reason for models whose
        energies are not such a function."""
        if not self.has_energy:
            raise ForgefieldError(
                "This model predicts no energy, so it has no last layer that uncertainties are computed from."
            )
        last = self.interface.last_layer(batch, edges)
        return last._replace(offsets=self._referenced(last.offsets, batch))

    def moved_last_layer(self, batch: Batch, direction: Tensor) -> tuple[LastLayer, Tensor]:
        """The last layer, and the derivative of its features (n_atoms, n_weights) when atoms move along `direction`
        (n_atoms, 3)."""
        with forward_ad.dual_level():
            moving, edges = self._moving(batch, direction, None, None)
            last = self.last_layer(moving, edges)
            features, tangent = forward_ad.unpack_dual(last.features)
            weights, offsets = (forward_ad.unpack_dual(part).primal for part in (last.weights, last.offsets))
        return LastLayer(features, weights, offsets), torch.zeros_like(features) if tangent is None else tangent

    def _referenced(self, atomic: Tensor, batch: Batch) -> Tensor:
        """Energies of the model (n_atoms,), with the reference energies if there are any; float64."""
        atomic = atomic.reshape(-1).double()
        if self.reference_energies is None:
            return atomic
        return atomic + gather(self.reference_energies, Segments(batch["species"], len(self.species)))

    def _extra_outputs(self, features: Tensor | None, batch: Batch) -> dict[str, Tensor]:
        """Outputs other than energies and their derivatives, by name."""
        return {}

    def _outputs(self, atomic: Tensor, features: Tensor | None, batch: Batch) -> dict[str, Tensor]:
        """All but the derivatives."""
        return {"energy": _frame_sum(atomic, batch), "atomic_energy": atomic, **self._extra_outputs(features, batch)}

    def _through_edges(self, batch: Batch, forces: bool, stress: bool, memory: StepMemory | None) -> dict[str, Tensor]:
        """Differentiate in the edge vectors; forces and virial are sums of these edge forces."""
        vectors = edge_vectors(batch)
        outer = vectors.requires_grad
        vectors = vectors if outer else vectors.requires_grad_(True)
        batch, variables = self._with_variables(batch)
        switch, graph, again = GradientSwitch(), edge_graph(batch), self.training or outer
        atomic, features = self._encode(batch, EdgeContext(vectors, batch, graph, switch, again, memory))
        if again:
            outputs = self._outputs(atomic, features, batch)
        else:  # nobody differentiates them
            outputs = self._outputs(atomic.detach(), None if features is None else features.detach(), batch)
        slope, *others = _derivatives(atomic, [vectors, *variables.values()], again)
        switch.off = self.training and not outer
        outputs |= self._minus(variables, others)
        if forces:
            outputs["forces"] = _edge_forces(slope, graph)
        if stress:
            products = (vectors if outer else vectors.detach()).unsqueeze(2) * slope.unsqueeze(1)
            frame = Segments(batch["frame"][batch["edge_index"][1]], batch["n_atoms"].shape[0], rows_are_sorted=True)
            virial = segment_sum(products, frame)
            outputs["stress"] = per_volume(0.5 * (virial + virial.transpose(1, 2)), batch["cell"])
        return outputs

    def _through_positions(self, batch: Batch, forces: bool, stress: bool) -> dict[str, Tensor]:
        """Differentiate in positions and in a symmetric strain of positions and cells."""
        outer = batch["positions"].requires_grad or batch["cell"].requires_grad
        batch, variables = self._with_variables(batch)
        moved, positions, strain = strained(batch)
        atomic, features = self._encode(moved, EdgeContext(edge_vectors(moved), moved))
        outputs = self._outputs(atomic, features, batch)
        slope, virial, *others = _derivatives(atomic, [positions, strain, *variables.values()], self.training or outer)
        outputs |= self._minus(variables, others)
        if forces:
            outputs["forces"] = -slope
        if stress:
            outputs["stress"] = per_volume(virial, batch["cell"])
        return outputs

    def _with_variables(self, batch: Batch) -> tuple[Batch, dict[str, Tensor]]:
        """The batch, and the inputs in it, by name, in which the energy is differentiated."""
        names = dict.fromkeys(output.variable for output in self.derivative_outputs.values())
        variables = {
            name: value if (value := batch[name]).requires_grad else value.detach().requires_grad_(True)
            for name in names
            if name in batch
        }
        return batch | variables, variables

    def _minus(self, variables: Mapping[str, Tensor], slopes: Sequence[Tensor]) -> dict[str, Tensor]:
        """Derivative outputs from the derivatives in `variables`."""
        found = dict(zip(variables, slopes, strict=True))
        return {name: -found[output.variable] for name, output in self.derivative_outputs.items()}

    def response(
        self, batch: Batch, adjoints: Mapping[str, Tensor], memory: StepMemory | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors and their cotangents, with which their gradients in the weights add up to that of sum(adjoint * output) over
        the outputs named in `adjoints`.

        Forces and stress are derivatives of the energy in positions and strain; weighted with their adjoints they are one
        derivative of the energy along one direction, which forward-mode differentiation carries along with the energy. So
        one reverse pass over the result is all: no derivative of a derivative is taken.

        memory: what `forward` left for this batch.
        """
        direction = None if self.forces_are_direct else adjoints.get("forces")
        direction = torch.zeros_like(batch["positions"]) if direction is None else -direction
        strain = None
        if "stress" in adjoints:
            volume = volumes(batch["cell"]).view(-1, 1, 1)
            strain = 0.5 * (adjoints["stress"] + adjoints["stress"].transpose(1, 2))
            strain = torch.where(volume > 0, strain / volume, torch.zeros_like(strain))
        with forward_ad.dual_level():
            moving, edges = self._moving(batch, direction, strain, memory)
            moving = moving | {
                output.variable: forward_ad.make_dual(batch[output.variable].detach(), -adjoints[name])
                for name, output in self.derivative_outputs.items()
                if name in adjoints
            }
            tangents = self.interface.tangents(moving, edges)
            if tangents is None:
                atomic, features = self._encode(moving, edges)
                energy, slope = forward_ad.unpack_dual(atomic)
                still = None if features is None else forward_ad.unpack_dual(features).primal
        if tangents is not None:
            still, energy, slope = tangents()
        terms = [] if slope is None else [(slope, torch.ones_like(slope))]
        if "energy" in adjoints:
            terms.append((energy, adjoints["energy"].index_select(0, batch["frame"])))
        for name, value in self._extra_outputs(still, batch).items():
            if name in adjoints:
                terms.append((value, adjoints[name]))
        terms = [(value, cotangent) for value, cotangent in terms if value.requires_grad]
        return [value for value, _ in terms], [cotangent for _, cotangent in terms]

    def _moving(
        self, batch: Batch, direction: Tensor, strain: Tensor | None, memory: StepMemory | None
    ) -> tuple[Batch, EdgeContext]:
        """Batch and edges with tangents: atoms move along `direction` (n_atoms, 3), everything is strained by `strain`
        (n_frames, 3, 3)."""
        positions, cell = batch["positions"].detach(), batch["cell"].detach()
        d_cell = None
        if strain is not None:
            direction = direction + rows_times(positions, strain.index_select(0, batch["frame"]))
            d_cell = cell @ strain
        if self.interface.only_edge_vectors:
            vectors = None if memory is None else memory.vectors
            if vectors is None:
                vectors = edge_vectors(batch | {"positions": positions, "cell": cell})
            tangents = displacements(direction, d_cell, batch)  # they are linear in both
            graph = None if memory is None else memory.graph
            graph = edge_graph(batch) if graph is None else graph
            return batch, EdgeContext(forward_ad.make_dual(vectors, tangents), batch, graph, memory=memory)
        moved = batch | {"positions": forward_ad.make_dual(positions, direction), "cell": cell}
        if d_cell is not None:
            moved["cell"] = forward_ad.make_dual(cell, d_cell)
        return moved, EdgeContext(edge_vectors(moved), moved, memory=memory)


def float64_copy(potential: Potential) -> Potential:
    """An independent copy in evaluation mode that computes in float64.

    Built-in models are rebuilt with the same weights, because the constants of a float32 model are rounded.
    """
    double = copy.deepcopy(potential).to(torch.float64)
    double.set_model(double.interface.in_float64())
    return double.eval()


def strained(batch: Batch) -> tuple[Batch, Tensor, Tensor]:
    """The batch as a function of positions (n_atoms, 3) and of a strain (n_frames, 3, 3) of zero, and both of them.

    Positions and cells are strained by the symmetric part, so that derivatives in the strain are symmetric.
    """
    positions = batch["positions"]
    positions = positions if positions.requires_grad else positions.detach().requires_grad_(True)
    strain = torch.zeros_like(batch["cell"]).requires_grad_(True)
    deformation = 0.5 * (strain + strain.transpose(1, 2))
    moved = positions + rows_times(positions, deformation.index_select(0, batch["frame"]))
    return batch | {"positions": moved, "cell": batch["cell"] + batch["cell"] @ deformation}, positions, strain


def _edge_forces(slope: Tensor, graph: EdgeGraph) -> Tensor:
    """(n_atoms, 3) from the derivative in every edge vector."""
    if not slope.requires_grad and not is_traced(slope) and use_kernels(slope):
        return forces_by_kernel(slope, graph)
    return segment_sum(slope, graph.by_destination) - segment_sum(slope, graph.by_source)


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


def per_volume(virial: Tensor, cell: Tensor) -> Tensor:
    """Stress of each frame; NaN without a volume, and no gradient from there."""
    volume = volumes(cell).view(-1, 1, 1)
    has_volume = volume > 0
    stress = virial / torch.where(has_volume, volume, torch.ones_like(volume))
    return torch.where(has_volume, stress, torch.full_like(stress, float("nan")))

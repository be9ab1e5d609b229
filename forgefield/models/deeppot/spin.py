"""Spins as virtual atoms (DeepSPIN: Yang, Zhao et al., Phys. Rev. B 110, 064427, 2024).

An atom of a magnetic species has a virtual atom at its position plus `virtual_scale` times its spin. Atoms see the real and the
virtual atoms around them, their own virtual atom included, as neighbours of twice the number of species; virtual atoms have no
energy. The energy is therefore a function of positions and spins, and the magnetic force is minus its derivative in the spin.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from forgefield.config.option import option
from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.descriptor import Descriptor
from forgefield.models.deeppot.options import AnyDescriptorOptions, RowOptions
from forgefield.models.edges import Batch, EdgeContext, edge_vectors
from forgefield.models.interface import DerivativeOutput
from forgefield.models.options import check_values, options_of_section
from forgefield.ops.graph import EdgeGraph, gather

SPIN = "spin"
"""The input: the spin of each atom, (n_atoms, 3)."""
FORCE_MAG = "force_mag"
"""The output: magnetic forces, (n_atoms, 3), eV per unit of the spin; zero for species without a spin."""
SUPPORTED = ("se_e2_a", "se_atten", "se_atten_v2")
"""Descriptors that can see virtual atoms."""
TINY = 1e-20
"""Distance of the virtual atom of a spin of zero, A: lengths of zero have no derivative."""


@dataclass
class SpinOptions:
    """Options of the section `model.spin`."""

    use_spin: list[Any] = field(default_factory=list)
    """The magnetic species: true or false for each species, or symbols, or indices."""
    virtual_scale: float | list[float] | None = None
    """Distance of a virtual atom from its atom, A, divided by the length of the spin; one number, or one for each species or
    each magnetic species."""
    rcut: float | None = option(None, above=0, unit="A")
    """Cutoff of the descriptor, A. `data.cutoff` has to be larger by the largest distance of a virtual atom from its atom."""


def spin_options(section: Mapping[str, Any] | SpinOptions) -> SpinOptions:
    """Options of the section `model.spin`, its keys checked."""
    return options_of_section(SpinOptions, section, where="model.spin")


def complete_spin(
    options: SpinOptions, descriptor: Mapping[str, Any], species: Sequence[str], cutoff: float
) -> SpinOptions:
    """The options checked, with one value for each species. descriptor: the section `model.descriptor`. cutoff: A, of the
    neighbour lists."""
    check_values(options, "model.spin")
    kind = descriptor.get("type", "se_e2_a")
    if kind not in SUPPORTED:
        raise ForgefieldError(
            f"model.spin is for the descriptors {', '.join(SUPPORTED)}; model.descriptor.type is {kind}."
        )
    if descriptor.get("exclude_types"):
        raise ForgefieldError(
            "model.descriptor.exclude_types does not apply with model.spin; use model.pair_exclude_types."
        )
    if descriptor.get("use_econf_tebd"):
        raise ForgefieldError(
            "model.descriptor.use_econf_tebd does not apply with model.spin: virtual atoms are not elements; set it to false."
        )
    magnetic = magnetic_species(options.use_spin, species)
    if options.rcut is None or options.rcut >= cutoff:
        raise ForgefieldError(
            f"model.spin.rcut is {options.rcut}; it is the cutoff of the descriptor and has to be below data.cutoff={cutoff:g} "
            "by the largest distance of a virtual atom from its atom (virtual_scale times the length of the spin)."
        )
    return SpinOptions(magnetic, scales(options.virtual_scale, magnetic), float(options.rcut))


def magnetic_species(use_spin: Sequence[Any], species: Sequence[str]) -> list[bool]:
    """Whether each species has a spin. use_spin: the option in any of its forms."""
    if len(use_spin) == len(species) and all(isinstance(flag, bool) for flag in use_spin):
        magnetic = [bool(flag) for flag in use_spin]
    else:
        chosen = [species.index(one) if one in species else one for one in use_spin]
        if any(isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < len(species) for one in chosen):
            raise ForgefieldError(
                f"model.spin.use_spin is {list(use_spin)}; it needs true or false for each of {', '.join(species)}, or names "
                "of these species, or their indices."
            )
        magnetic = [number in chosen for number in range(len(species))]
    if not any(magnetic):
        raise ForgefieldError(f"model.spin.use_spin is {list(use_spin)}; at least one species needs a spin.")
    return magnetic


def scales(virtual_scale: float | Sequence[float] | None, magnetic: Sequence[bool]) -> list[float]:
    """`virtual_scale` for each species; 0 without a spin."""
    values: Any = virtual_scale
    if isinstance(values, (int, float)) and not isinstance(values, bool):
        values = [values] * len(magnetic)
    if isinstance(values, (list, tuple)) and len(values) == sum(magnetic) != len(magnetic):
        of_magnetic = iter(values)
        values = [next(of_magnetic) if has_spin else 0.0 for has_spin in magnetic]
    numbers = isinstance(values, (list, tuple)) and all(isinstance(v, (int, float)) for v in values)
    if not numbers or len(values) != len(magnetic) or any(has and not v > 0 for v, has in zip(values, magnetic)):
        raise ForgefieldError(
            f"model.spin.virtual_scale is {virtual_scale!r}; it needs a positive number, or one for each species or each "
            "magnetic species."
        )
    return [float(value) if has_spin else 0.0 for value, has_spin in zip(values, magnetic)]


def derivative_outputs(magnetic: Sequence[object]) -> dict[str, DerivativeOutput]:
    """The magnetic forces. magnetic: whether each species has a spin, or the magnetic species."""
    without = [number for number, has_spin in enumerate(magnetic) if has_spin is False]
    output = DerivativeOutput("atom", [3], "sum", kind="vector", unit="eV/uB", uncounted=without, variable=SPIN)
    return {FORCE_MAG: output}


def with_virtual(species: Sequence[str]) -> list[str]:
    """Names of the species of real and of virtual atoms."""
    return [*species, *(f"{symbol}_spin" for symbol in species)]


ROWS = ("sel", "davg", "dstd", "most_neighbours")
"""Options of descriptors with one entry for each species."""


def doubled(options: RowOptions) -> RowOptions:
    """Options of a descriptor for real and virtual species, from those for real ones."""
    changed: dict[str, Any] = {}
    for key in ROWS:
        value = getattr(options, key)
        if isinstance(value, list):
            changed[key] = sum(value) if key == "sel" and options.takes_total else [*value, *value]
    return dataclasses.replace(options, **changed)


def halved(options: RowOptions, n_species: int) -> RowOptions:
    """The reverse. Slots for the neighbours of a species are as many as its real or its virtual atoms need."""
    changed: dict[str, Any] = {}
    for key in ROWS:
        value = getattr(options, key)
        if isinstance(value, list):
            changed[key] = value[:n_species]
    if options.most_neighbours is not None:
        most = options.most_neighbours
        changed["most_neighbours"] = [max(pair) for pair in zip(most[:n_species], most[n_species:])]
    return dataclasses.replace(options, **changed)


def complete_descriptor(
    descriptor_class: type[Descriptor[Any]],
    options: AnyDescriptorOptions,
    rcut: float,
    *,
    species: Sequence[str],
    statistics: Mapping[str, Any],
) -> RowOptions:
    """Options of a descriptor that sees virtual atoms, with those of its rows for real species. rcut: its cutoff, A."""
    assert isinstance(options, RowOptions)
    around = tuple(with_virtual(species))
    completed = descriptor_class.complete(doubled(options), species=around, cutoff=rcut, statistics=statistics)
    return halved(completed, len(species))


class VirtualAtoms(nn.Module):
    """Batches and edges with virtual atoms.

    options: completed. cutoff: of the neighbour lists, A.
    """

    scale: Tensor
    magnetic: Tensor
    tiny: Tensor
    far: Tensor

    def __init__(self, options: SpinOptions, cutoff: float) -> None:
        super().__init__()
        assert options.rcut is not None
        self.rcut, self.reach = options.rcut, cutoff - options.rcut
        self.register_buffer("scale", torch.tensor(options.virtual_scale, dtype=torch.float64), persistent=False)
        self.register_buffer("magnetic", torch.tensor(options.use_spin, dtype=torch.bool), persistent=False)
        for name, length in (("tiny", TINY), ("far", 2 * self.rcut)):
            self.register_buffer(name, torch.tensor([[length, 0.0, 0.0]], dtype=torch.float64), persistent=False)

    def displacements(self, batch: Mapping[str, Tensor], *, may_wait: bool) -> Tensor:
        """(n_atoms, 3) from each atom to its virtual atom, A; zero for species without a spin.

        may_wait: whether the host may read values. Spins that are too long are then an error; otherwise they give NaN.
        """
        if SPIN not in batch:
            raise ForgefieldError(
                f"model.spin needs the spins of the atoms, but the data has no field {SPIN}; name it in data.labels.fields "
                f"(with ASE: atoms.arrays['{SPIN}'])."
            )
        species = batch["species"]
        spins = batch[SPIN].reshape(species.shape[0], 3).double()
        has_spin = self.magnetic.index_select(0, species).unsqueeze(1)
        moved = torch.where(has_spin, spins, 0.0) * self.scale.index_select(0, species).unsqueeze(1)
        lengths = torch.linalg.vector_norm(moved.detach(), dim=1)
        if may_wait:
            longest = float(lengths.max()) if len(lengths) else 0.0
            if not longest <= self.reach + 1e-9:
                raise ForgefieldError(
                    f"the virtual atom of a spin is {longest:.4g} A from its atom (virtual_scale times the length of the "
                    f"spin), but neighbour lists have room for {self.reach:.4g} A: data.cutoff minus model.spin.rcut."
                )
            return moved
        return torch.where((lengths <= self.reach + 1e-9).unsqueeze(1), moved, torch.nan)

    def forward(
        self, batch: Batch, edges: EdgeContext, mask: Tensor | None, *, may_wait: bool
    ) -> tuple[Batch, EdgeContext, Tensor | None]:
        """Batch and edges with virtual atoms, which follow the real atoms; edges end at real atoms.

        mask: (n_edges,) of the real edges, 0 for those that are ignored; the third result is that of all edges.

        may_wait: whether edges that are ignored may be left out, which the host has to know.
        """
        species, graph = batch["species"], edges.graph
        n = species.shape[0]
        to_virtual = self.displacements(batch, may_wait=may_wait)
        magnetic = self.magnetic.index_select(0, species)
        own = torch.where((to_virtual == 0).all(1, keepdim=True), self.tiny, to_virtual)
        own = torch.where(magnetic.unsqueeze(1), own, self.far)
        vectors = torch.cat([edges.vectors, edges.vectors + gather(to_virtual, graph.by_source), own])
        real = torch.ones_like(graph.source, dtype=torch.bool) if mask is None else mask > 0
        exists = torch.cat([real, magnetic.index_select(0, graph.source), magnetic])
        seen = exists & (torch.linalg.vector_norm(vectors.detach(), dim=1) < self.rcut)
        atoms = torch.arange(n, device=species.device)
        source = torch.cat([graph.source, graph.source + n, atoms + n])
        destination = torch.cat([graph.destination, graph.destination, atoms])
        if may_wait:
            order = seen.nonzero().squeeze(1)
            order = order.index_select(0, torch.argsort(destination.index_select(0, order), stable=True))
            mask = None
        else:
            order = _interleaved(graph, atoms)
            mask = seen.index_select(0, order).to(vectors.dtype)
        both = {"species": torch.cat([species, species + self.scale.shape[0]])}
        if "frame" in batch:
            # Virtual atoms are in frames of their own, so that frames are sorted.
            both["frame"] = torch.cat([batch["frame"], batch["frame"] + batch["n_atoms"].shape[0]])
        both_edges = EdgeGraph(source.index_select(0, order), destination.index_select(0, order), 2 * n)
        context = dataclasses.replace(
            edges, vectors=vectors.index_select(0, order), batch=both, graph_if_known=both_edges, memory=None
        )
        return both, context, mask

    def statistics_batch(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A batch with virtual atoms as atoms of their own, with the edges that end at real atoms."""
        both, edges, _ = self(dict(batch), EdgeContext(edge_vectors(batch), batch), None, may_wait=True)
        graph = edges.graph
        return {
            **both,
            "positions": torch.zeros(2 * len(batch["species"]), 3, dtype=torch.float64),
            "cell": torch.eye(3, dtype=torch.float64).expand(len(batch["n_atoms"]), 3, 3),
            "edge_index": torch.stack([graph.source, graph.destination]),
            "edge_shift": edges.vectors,
        }


def _interleaved(graph: EdgeGraph, atoms: Tensor) -> Tensor:
    """(2 n_edges + n_atoms,): for edges to real neighbours, to virtual ones, and to the own virtual atoms, one after the other,
    their order by destination: of each atom first its own virtual atom, then every neighbour with its virtual atom."""
    edges = torch.arange(graph.source.shape[0], device=atoms.device)
    first = 2 * edges + graph.destination
    places = torch.cat([first + 1, first + 2, 2 * graph.by_destination.pointers[:-1] + atoms])
    return torch.zeros_like(places).index_copy(0, places, torch.arange(places.shape[0], device=atoms.device))

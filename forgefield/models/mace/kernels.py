"""MACE with generated kernels: the geometry that these need, and the two passes of a step.

`model.py` defines what a layer computes, `passes.py` how it is computed by kernels. Radial weights are read from tables
(`tables.py`) if they depend on the length alone and tables are precise enough; else they are computed for every pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from forgefield.kernels.convolution.dispatch import EdgeHarmonics
from forgefield.kernels.convolution.passes import Motion, Radial
from forgefield.kernels.core.runtime import Concurrent, use_kernels, use_tables
from forgefield.kernels.dense.activated_sum import activated_sum
from forgefield.kernels.dense.products import sort_by_species
from forgefield.kernels.edges.geometry import EdgeGeometry, moved_geometry
from forgefield.kernels.radial.layer import RadialTable
from forgefield.kernels.radial.packing import StoredTable
from forgefield.kernels.radial.table import Intervals
from forgefield.models.edges import Batch, EdgeContext
from forgefield.models.interface import Tangents
from forgefield.models.mace.interaction import EdgeInputs
from forgefield.models.mace.passes import (
    Atoms,
    EdgePass,
    Layer,
    LayerWeights,
    MovedPass,
    compile_layers,
    layer_weights,
)
from forgefield.models.mace.readout import GatedReadout, LinearReadout
from forgefield.models.mace.stacks import Started, awaited, cut_list, linear, moving
from forgefield.models.mace.tables import radial_tables, reads_tables
from forgefield.ops.autograd import carried, side_by_side, tangent_of
from forgefield.ops.execution import current
from forgefield.ops.graph import EdgeGraph, Segments, gather, is_traced, join

if TYPE_CHECKING:
    from forgefield.models.mace.interaction import Interaction
    from forgefield.models.mace.model import MACE


def by_kernels(model: MACE, batch: Batch, edges: EdgeContext) -> bool:
    """Whether a pass uses kernels: its forces are not differentiated again, nothing is traced, no atom is a ghost."""
    if edges.differentiated_again or edges.ghosts is not None or is_traced(batch["positions"]):
        return False
    return use_kernels(model.embedding)


def in_tables(model: MACE) -> bool:
    """Whether radial weights are read from tables."""
    return use_tables(model.embedding) and reads_tables(model)


@dataclass(frozen=True)
class FirstPass:
    """Results of the first pass of a training step for the second one. at, position: with tables, the interval of every edge
    and its position there."""

    layers: list[Layer]
    inputs: EdgeInputs
    tables: list[RadialTable] | None
    at: Intervals | None
    position: Tensor | None


# ---- the first pass


def scalars_at_rest(
    model: MACE, edges: EdgeContext, graph: EdgeGraph, species: Tensor, lengths: Tensor | None
) -> list[Tensor]:
    """(n_atoms, channels) scalars after each layer, with a gradient in the edge vectors and none in the weights.

    lengths: (n_edges,), A, where `needs_lengths`.
    """
    trained = edges.memory is not None
    tables, stored = _start_tables(model, trained) if in_tables(model) else (None, None)
    atoms = _atoms(model, species, trained)
    with torch.set_grad_enabled(torch.is_grad_enabled() and trained):
        weights = layer_weights(model.interactions, model.products)
    parts = zip(model.interactions, model.products, weights)
    layers = [Layer(*part, graph, atoms, first=number == 0) for number, part in enumerate(parts)]
    at = position = direction = None
    if tables is None:
        assert lengths is not None
        inputs = model.edge_inputs(edges.vectors, lengths, species, graph)
        harmonics = inputs.harmonics.harmonics.contiguous()
    else:
        inverse, l_max = model.inverse_cutoff, model.options.max_ell
        harmonics, direction, position, interval = EdgeGeometry.apply(
            edges.vectors, inverse, l_max, current().knots, model.embedding.dtype
        )
        at = Intervals(interval, current().knots)
        at = at.sort() if trained else at
        inputs = _inputs_of_densities(model, edges.vectors, harmonics, lengths, species, graph)
    passes = []
    for number, interaction in enumerate(model.interactions):
        if stored is None:
            passes.append(_by_rows(interaction, inputs, harmonics))
            continue
        assert at is not None
        assert position is not None
        assert direction is not None
        table = stored[number].unfinished()
        radial = Radial(table.words, at.at, position.detach(), table.unit)
        density = _density(interaction, inputs)
        passes.append(EdgePass(harmonics, radial, (position, direction), density))
    if trained:
        compile_layers(layers, passes)
    if stored is not None:
        stored[-1].result()
    blocks, scalars = [_species_table(model).detach()], []
    for layer, edge_pass in zip(layers, passes):
        blocks = layer.at_rest(blocks, edge_pass)
        scalars.append(blocks[0].flatten(0, 2))
    if edges.memory is not None:
        state = FirstPass(layers, inputs, tables, at, None if position is None else position.detach())
        edges.memory.fill(edges.vectors, edges.graph, state)
    return scalars


def read_at_rest(model: MACE, scalars: list[Tensor]) -> Tensor | None:
    """(n_atoms,) sum of the readouts of scalars (n_atoms, channels), without a gradient in the weights; None where there is no
    kernel for them."""
    return _read(model, [x.unsqueeze(0) for x in scalars], trained=False).squeeze(0) if _reads(model) else None


def _reads(model: MACE) -> bool:
    """Whether the readouts have a kernel: one energy, the usual activation, no biases."""
    gated = [readout for readout in model.readouts if isinstance(readout, GatedReadout)]
    return not model.branches and all(readout.gate == "silu" and not readout.has_bias for readout in gated)


def _read(model: MACE, stacks: Sequence[Tensor], *, trained: bool) -> Tensor:
    """(R, n_atoms) sum of the readouts, of stacks of scalars (R, n_atoms, channels)."""
    total: Tensor | None = None
    for readout, x in zip(model.readouts, stacks):
        if isinstance(readout, GatedReadout):
            enter, leave = readout.enter[0], readout.leave[0, :, 0]
            enter, leave = (enter, leave) if trained else (enter.detach(), leave.detach())
            factors = {"inner": readout.enter_scale, "outer": readout.scale * readout.gain}
            value, factor = activated_sum(linear(x, enter), leave, **factors), 1.0
        else:
            assert isinstance(readout, LinearReadout)
            weight = readout.weight if trained else readout.weight.detach()
            value, factor = linear(x, weight).squeeze(2), readout.scale
        if total is None:
            total = value if factor == 1 else factor * value
        else:
            total = torch.add(total, value, alpha=factor)
    assert total is not None
    return total


def needs_lengths(model: MACE) -> bool:
    """Whether the first pass needs lengths of edges with a gradient."""
    has_density = any(interaction.has_density for interaction in model.interactions)
    return has_density or bool(model.options.pair_repulsion) or not in_tables(model)


def _species_table(model: MACE) -> Tensor:
    """(1, n_species, 1, channels)."""
    table: Tensor = model.embedding * model.embedding_scale
    return table.unsqueeze(1).unsqueeze(0)


def _atoms(model: MACE, species: Tensor, trained: bool) -> Atoms:
    n_species = len(model.species)
    numbers = torch.arange(n_species, device=species.device)
    one_hot = (species.unsqueeze(1) == numbers).to(model.embedding.dtype)
    return Atoms(species, one_hot, sort_by_species(species, n_species) if trained and n_species > 1 else None)


def _start_tables(model: MACE, trained: bool) -> tuple[list[RadialTable], list[Concurrent[StoredTable]]]:
    """Start computing tables, concurrently with the geometry."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and trained):
        computed = Concurrent("tables", partial(radial_tables, model, current().knots))
        tables = computed.unfinished()  # subsequent work is on the same stream, or waits for it
        return tables, [Concurrent("tables", table.stored) for table in tables]


def _inputs_of_densities(
    model: MACE, vectors: Tensor, harmonics: Tensor, lengths: Tensor | None, species: Tensor, graph: EdgeGraph
) -> EdgeInputs:
    """With tables, a basis is needed for densities alone."""
    if any(interaction.has_density for interaction in model.interactions):
        assert lengths is not None
        return model.edge_inputs(vectors, lengths, species, graph)
    return EdgeInputs(EdgeHarmonics(harmonics, graph, None), harmonics, None, species)


def _by_rows(interaction: Interaction, inputs: EdgeInputs, harmonics: Tensor) -> EdgePass:
    """Radial weights as rows, one for each pair or edge."""
    graph = inputs.graph
    weights, density = interaction.radial_weights(inputs)
    row = torch.arange(graph.n_edges, device=harmonics.device) if graph.pair is None else graph.pair
    return EdgePass(
        harmonics.detach(), Radial(weights.detach().contiguous(), row), (inputs.harmonics.harmonics, weights), density
    )


def _density(interaction: Interaction, inputs: EdgeInputs) -> Tensor | None:
    return interaction.plain_density(inputs) if interaction.has_density else None


# ---- the second pass


def moved_encoding(model: MACE, batch: Batch, edges: EdgeContext) -> Tangents | None:
    """See `AtomisticModel.tangents`; None where the first pass did not use kernels."""
    first = None if edges.memory is None else edges.memory.state
    if not isinstance(first, FirstPass):
        return None
    species, graph = first.inputs.species, first.inputs.graph
    has_basis = first.tables is None or any(interaction.has_density for interaction in model.interactions)
    basis: list[Tensor] = []
    if has_basis:
        lengths = torch.linalg.vector_norm(edges.vectors, dim=1)
        inputs = model.edge_inputs(edges.vectors, lengths, species, graph)
        basis = [side_by_side(inputs.basis)] + ([] if inputs.envelope is None else [side_by_side(inputs.envelope)])
    if first.tables is None:
        motion = Motion(tangent_of(inputs.harmonics.harmonics).contiguous())
    else:
        value, tangent = forward_ad.unpack_dual(edges.vectors)
        assert first.at is not None
        harmonics, position = moved_geometry(
            value, tangent, model.inverse_cutoff, model.options.max_ell, first.at.count, model.embedding.dtype
        )
        motion = Motion(harmonics, position=position)
    return partial(_encode_moved, model, batch, first, motion, basis)


def _encode_moved(
    model: MACE, batch: Batch, first: FirstPass, motion: Motion, basis: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Features at rest, atomic energies (n_atoms,), eV, float64, and their tangents, all with a gradient in the weights. Terms
    that do not depend on any weight are omitted."""
    blocks, scalars = [_species_table(model)], []
    started = Started()
    weights, tracked = _awaited_weights(first, started)
    for number, layer in enumerate(first.layers):
        edges = _moved_pass(layer.interaction, first, motion, basis, number, tracked)
        blocks = layer.moved(blocks, weights[number], edges, started)
        scalars.append(blocks[0].squeeze(2))
    head = model.heads(batch)
    last = scalars[-len(model.readouts) :]
    if _reads(model):
        atomic = _read(model, last, trained=True)
    else:
        (atomic,) = moving(lambda rows: [model.read(rows, head)], last)
    still, moved = atomic.double().unbind()
    species = first.inputs.species
    scales = model.energy_scales
    if head is not None:
        scales = gather(scales, Segments(head, len(model.branches)))
    energies = model.shifts(species, head) + scales * still
    return join([stack[0] for stack in scalars], 1), energies, scales * moved


def _awaited_weights(first: FirstPass, started: Started) -> tuple[list[LayerWeights], list[list[Tensor]]]:
    """Weights of all layers, and tracked tensors of their tables, whose gradients may be unfinished work."""
    weights = [layer.weights for layer in first.layers]
    tracked = [table.tracked() for table in first.tables or []]
    parts = [part.tensors() for part in weights] + tracked
    *parts, _ = cut_list(awaited(started, [x for part in parts for x in part]), [len(part) for part in parts])
    made = [part.replaced(tensors) for part, tensors in zip(weights, parts)]
    return made, parts[len(weights) :]


def _moved_pass(
    interaction: Interaction,
    first: FirstPass,
    motion: Motion,
    basis: Sequence[Tensor],
    number: int,
    tracked: list[list[Tensor]],
) -> MovedPass:
    inputs = first.inputs

    def at(rows: list[Tensor]) -> EdgeInputs:
        return EdgeInputs(inputs.harmonics, rows[0], rows[1] if len(rows) > 1 else None, inputs.species)

    density = None
    if first.tables is not None:
        if interaction.has_density:
            (density,) = carried(lambda rows: [interaction.plain_density(at(rows))], basis)
        table = first.tables[number]
        curves, matrix = tracked[number]
        return MovedPass(motion, (curves, matrix), density, table, first.at, first.position)
    made = carried(lambda rows: [x for x in interaction.radial_weights(at(rows)) if x is not None], basis)
    weights = made[0]
    density = made[1] if len(made) > 1 else None
    moved = Motion(motion.harmonics, weights=weights[:, 1].detach().contiguous())
    return MovedPass(moved, (weights[:, 0], weights[:, 1]), density)

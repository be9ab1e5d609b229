"""NequIP: E(3)-equivariant message passing (Batzner et al., Nat. Commun. 13, 2453, 2022), as in NequIP 0.19.

Atoms carry features of several rotation orders; each layer convolves them with the harmonics of the edge vectors, weights
from a perceptron of the length, mixes channels and gates. The energy of an atom without neighbours is exactly its
species' shift. Geometry and energies are float64, the interior has the precision of the weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ase.data import atomic_numbers
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.ops.activations import activate
from forgefield.ops.convolution import Block, convolve, list_paths, plan_convolution
from forgefield.ops.graph import EdgeGraph, GradientSwitch, Segments, barrier, pair_graph, segment_sum
from forgefield.ops.harmonics import SphericalHarmonics
from forgefield.ops.linear import Gate, IrrepsLinear, NormActivation, Perceptron, SpeciesLinear, unit_normal
from forgefield.ops.radial import bessel_basis, polynomial_cutoff
from forgefield.physics.zbl import zbl_pair_energy


@dataclass
class Options:
    """Hyperparameters of NequIP. Numbers left `None` are filled in from the statistics of the training data."""

    num_layers: int = 4
    """Interaction layers: each lets an atom see one cutoff further."""
    l_max: int = 1
    """Highest rotation order of features and edge harmonics. 1 is fast, 2 and 3 are more accurate."""
    parity: bool = True
    """Keep features of both mirror parities; without, only those of vectors' kind (0e, 1o, 2e, ...): faster."""
    num_features: int | list[int] = 32
    """Channels of every rotation order, or one number per order."""
    type_embed_num_features: int | None = None
    """Width of the species embedding. Default: channels of order 0."""
    radial_mlp_depth: int = 1
    """Hidden layers of the perceptron that makes radial weights."""
    radial_mlp_width: int = 128
    """Neurons in each of them."""
    num_bessels: int = 8
    """Radial basis functions."""
    bessel_trainable: bool = False
    """Train the frequencies of the radial basis."""
    polynomial_cutoff_p: float = 6
    """Exponent of the envelope; smaller decays earlier."""
    per_edge_type_cutoff: dict[str, Any] | None = None
    """Shorter cutoffs by species of centre and neighbour: {H: 3.0, O: {H: 3.5, O: 4.0}}, A. What is missing has the cutoff."""
    avg_num_neighbours: float | dict[str, float] | None = None
    """Mean number of neighbours, or one per species; sums over edges are divided by its square root."""
    energy_scales: float | dict[str, float] | None = None
    """Energy unit of the network's output, eV, one or per species. Default: root mean square of the forces times 1 A."""
    energy_shifts: float | dict[str, float] | None = None
    """Energy of the isolated atom, eV, one or per species. Default: the reference energies."""
    energy_scales_trainable: bool = False
    """Train the scales."""
    energy_shifts_trainable: bool = False
    """Train the shifts."""
    readout_mlp_depth: int = 0
    """Hidden layers between last features and atomic energy."""
    readout_mlp_width: int | None = None
    """Neurons in each of them. Default: channels of order 0."""
    readout_mlp_nonlinearity: str | None = "silu"
    """silu, mish, gelu, ssp, tanh or null."""
    zbl: bool | dict[str, float] = False
    """Add the ZBL repulsion of nuclei; {polynomial_cutoff_p: 6} sets its envelope."""
    convnet_sc: bool = True
    """Self-connection: a species-dependent linear map of an atom's own features, from the second layer on."""
    convnet_resnet: bool = False
    """Add the features of the layer before, where they are of the same kind."""
    nonlinearity: str = "gate"
    """gate, or norm: the activation of each channel's length."""
    nonlinearity_scalars: str = "silu"
    """Activation of even scalars: silu, ssp or tanh."""
    nonlinearity_odd_scalars: str = "tanh"
    """Activation of odd scalars: an odd function, tanh."""
    nonlinearity_gates: str = "silu"
    """Activation of gates: silu, ssp or tanh."""


PRESETS: dict[str, dict[str, Any]] = {
    name: {
        "num_layers": layers,
        "l_max": len(features) - 1,
        "num_features": features,
        "parity": False,
        "type_embed_num_features": 32,
        "radial_mlp_depth": 1,
        "radial_mlp_width": 128,
    }
    for name, layers, features in (
        ("S", 2, [128, 64]),
        ("M", 4, [128, 64, 32]),
        ("L", 6, [128, 64, 32, 32]),
        ("XL", 6, [320, 96, 64, 32, 32]),
    )
}
"""Sizes of the NequIP foundation models."""


class NequIP(nn.Module):
    """Atomic energies from edge vectors. Built from resolved options: every number is given."""

    only_edge_vectors = True
    Options = Options
    presets = PRESETS

    def __init__(
        self,
        options: Options,
        *,
        species: Sequence[str],
        cutoff: float,
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.species, self.cutoff, self.options = tuple(species), float(cutoff), options
        n_species = len(self.species)
        features = options.num_features
        features = [features] * (options.l_max + 1) if isinstance(features, int) else list(features)
        n_embedding = options.type_embed_num_features or features[0]
        self.type_embedding = nn.Parameter(unit_normal(n_species, n_embedding, generator=generator, dtype=dtype))
        self.one_hot_self_connection = n_species <= n_embedding

        frequencies = torch.arange(1, options.num_bessels + 1, dtype=torch.float64)
        self._hold("bessel_frequencies", frequencies, options.bessel_trainable)
        self.harmonics = SphericalHarmonics(options.l_max)
        self.layers = nn.ModuleList()
        blocks: tuple[Block, ...] = (Block(n_embedding, 0, 1),)
        for number in range(options.num_layers):
            hidden = (
                _hidden_blocks(features, options.parity)
                if number < options.num_layers - 1
                else (Block(features[0], 0, 1),)
            )
            layer = Interaction(blocks, hidden, options, number, n_embedding, generator=generator, dtype=dtype)
            self.layers.append(layer)
            blocks = layer.out_blocks
        width = options.readout_mlp_width or features[0]
        sizes = [features[0], *[width] * options.readout_mlp_depth, 1]
        self.readout = Perceptron(sizes, activation=options.readout_mlp_nonlinearity, generator=generator, dtype=dtype)

        self._hold("energy_scales", self._per_species(options.energy_scales, 1.0), options.energy_scales_trainable)
        self._hold("energy_shifts", self._per_species(options.energy_shifts, 0.0), options.energy_shifts_trainable)
        neighbours = self._per_species(options.avg_num_neighbours, 1.0)
        self.register_buffer("feature_scale", neighbours.rsqrt(), persistent=False)
        self.register_buffer("inverse_cutoff", self._inverse_cutoffs(), persistent=False)
        self.register_buffer("identity", torch.eye(n_species, dtype=dtype), persistent=False)
        numbers = [atomic_numbers.get(symbol, 0) for symbol in self.species]
        self.register_buffer("atomic_numbers", torch.tensor(numbers, dtype=torch.float64), persistent=False)

    def _hold(self, name: str, value: Tensor, trainable: bool) -> None:
        """Part of the model's state either way, a parameter only where it is trained."""
        if trainable:
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

    def _per_species(self, value: float | Mapping[str, float] | None, default: float) -> Tensor:
        """(n_species,) float64."""
        if isinstance(value, Mapping):
            return torch.tensor([float(value[symbol]) for symbol in self.species], dtype=torch.float64)
        return torch.full((len(self.species),), default if value is None else float(value), dtype=torch.float64)

    def _inverse_cutoffs(self) -> Tensor:
        """(n_species^2,) float64, 1/A, by centre then neighbour; a single number where all are equal."""
        table = self.options.per_edge_type_cutoff
        if table is None:
            return torch.tensor([1 / self.cutoff], dtype=torch.float64)
        return torch.tensor(
            [1 / pair_cutoff(table, i, j, self.cutoff) for i in self.species for j in self.species], dtype=torch.float64
        )

    @classmethod
    def complete(
        cls, options: Options, *, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
    ) -> Options:
        """Options checked and with every default explicit; numbers not given come from the statistics."""
        return complete_options(options, species, cutoff, statistics)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """(n_atoms,) atomic energies, eV, float64."""
        vectors, species = batch["edge_vectors"], batch["species"]
        switch: GradientSwitch | None = batch.get("edge_gradient")
        graph = edge_graph(batch)
        lengths = torch.linalg.vector_norm(vectors, dim=1)
        if self.inverse_cutoff.numel() == 1:
            scaled = lengths * self.inverse_cutoff
        else:
            graph = EdgeGraph(graph.source, graph.destination, graph.n_atoms)
            kinds = species[graph.destination] * len(self.species) + species[graph.source]
            scaled = lengths * self.inverse_cutoff.index_select(0, kinds)

        atomic = self._network_energies(vectors, lengths, scaled, species, graph, switch)
        kind = Segments(species, len(self.species))
        scales, shifts = self.energy_scales[kind.index], self.energy_shifts[kind.index]
        energies = torch.addcmul(shifts, scales, atomic.double())
        if self.options.zbl:
            energies = energies + self._repulsion(lengths, scaled, species, graph)
        return energies

    def _network_energies(
        self,
        vectors: Tensor,
        lengths: Tensor,
        scaled: Tensor,
        species: Tensor,
        graph: EdgeGraph,
        switch: GradientSwitch | None,
    ) -> Tensor:
        """(n_atoms,) in units of the energy scale, in the interior precision."""
        dtype = self.type_embedding.dtype
        harmonics = self.harmonics(vectors / lengths.unsqueeze(1)).to(dtype)
        if graph.pair_edge is not None:
            scaled = scaled.index_select(0, graph.pair_edge)
        basis = bessel_basis(scaled, self.bessel_frequencies, self.options.polynomial_cutoff_p)
        radial = self._radial_weights(barrier(basis.to(dtype), switch))

        one_hot = self.identity.index_select(0, species)
        attributes = one_hot if self.one_hot_self_connection else one_hot @ self.type_embedding
        table = self.type_embedding if self.one_hot_self_connection else None
        scale = self.feature_scale.to(dtype).index_select(0, species) if self._neighbours_by_species else None
        blocks: list[Tensor] = []
        couplings: dict[int, Tensor] = {}
        for layer, weights in zip(self.layers, radial):
            if id(layer.plan) not in couplings:
                couplings[id(layer.plan)] = barrier(harmonics @ layer.coupling_matrix, switch)
            x = layer.enter(blocks) if blocks else one_hot @ layer.enter([self.type_embedding.unsqueeze(1)])
            if scale is not None:
                x = x * scale.unsqueeze(1)
            summed = convolve(x, couplings[id(layer.plan)], weights, graph, layer.plan, switch)
            blocks = layer.leave(summed, blocks, attributes, table)
        return self.readout(blocks[0].squeeze(1)).squeeze(1)

    @property
    def _neighbours_by_species(self) -> bool:
        return isinstance(self.options.avg_num_neighbours, Mapping)

    def _radial_weights(self, basis: Tensor) -> list[Tensor]:
        """Weights of every layer, (n_edges or n_pairs, plan.n_weights); their first perceptron layers run as one."""
        first = torch.cat([layer.radial.weights[0] for layer in self.layers], dim=1)
        scale = self.layers[0].radial.scales[0] * 2 * math.pi / self.cutoff**2
        hidden = basis @ (first * scale)
        sizes = [layer.radial.weights[0].shape[1] for layer in self.layers]
        if self.options.radial_mlp_depth == 0:
            return list(hidden.split(sizes, dim=1))
        parts = activate("silu", hidden).split(sizes, dim=1)
        result = []
        for layer, part in zip(self.layers, parts):
            network = layer.radial
            for depth in range(1, len(network.weights)):
                part = activate("silu", part) if depth > 1 else part
                part = part @ (network.weights[depth] * network.scales[depth])
            result.append(part)
        return result

    def _repulsion(self, lengths: Tensor, scaled: Tensor, species: Tensor, graph: EdgeGraph) -> Tensor:
        """(n_atoms,) half of each pair's ZBL energy, eV."""
        p = self.options.zbl.get("polynomial_cutoff_p", 6.0) if isinstance(self.options.zbl, Mapping) else 6.0
        z = self.atomic_numbers.index_select(0, species)
        pair = zbl_pair_energy(lengths, z.index_select(0, graph.destination), z.index_select(0, graph.source))
        return segment_sum(0.5 * pair * polynomial_cutoff(scaled, p), graph.by_destination)


class Interaction(nn.Module):
    """One layer: mix channels, convolve over edges, mix channels and add the self-connection, gate."""

    def __init__(
        self,
        in_blocks: tuple[Block, ...],
        hidden: tuple[Block, ...],
        options: Options,
        number: int,
        n_embedding: int,
        *,
        generator: torch.Generator,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        make = {"generator": generator, "dtype": dtype}
        reachable = frozenset((block.l, block.p) for block in hidden)
        reachable = frozenset((path.l3, path.p3) for path in list_paths(in_blocks, options.l_max, reachable))
        scalars = [block for block in hidden if block.l == 0 and (0, block.p) in reachable]
        gated = [block for block in hidden if block.l > 0 and (block.l, block.p) in reachable]
        if options.nonlinearity == "gate":
            self.nonlinearity: nn.Module = Gate(
                scalars,
                gated,
                even=options.nonlinearity_scalars,
                odd=options.nonlinearity_odd_scalars,
                gate=options.nonlinearity_gates,
            )
        else:
            self.nonlinearity = NormActivation(scalars, gated, even=options.nonlinearity_scalars)
        self.out_blocks: tuple[Block, ...] = self.nonlinearity.out_blocks
        targets = self.nonlinearity.in_blocks
        self.in_blocks = in_blocks
        self.plan = plan_convolution(in_blocks, options.l_max, frozenset((block.l, block.p) for block in targets))
        self.register_buffer("coupling_matrix", self.plan.coupling_matrix().to(dtype), persistent=False)
        self.neighbours = 1.0 if isinstance(options.avg_num_neighbours, Mapping) else options.avg_num_neighbours
        self.targets = tuple(
            (block.l, [i for i, out in enumerate(self.plan.out_blocks) if (out.l, out.p) == (block.l, block.p)])
            for block in targets
        )
        fan_in = [sum(self.plan.out_blocks[i].mul for i in pieces) for _, pieces in self.targets]

        self.linear_in = IrrepsLinear([(block.mul, block.mul) for block in in_blocks], **make)
        widths = [options.radial_mlp_width] * options.radial_mlp_depth
        sizes = [options.num_bessels, *widths, self.plan.n_weights]
        self.radial = Perceptron(sizes, activation="silu", **make)
        self.linear_out = IrrepsLinear(list(zip(fan_in, (block.mul for block in targets))), **make)
        target_of = {(block.l, block.p): i for i, block in enumerate(targets)}
        self.self_pairs = [
            (i, target_of[block.l, block.p]) for i, block in enumerate(in_blocks) if (block.l, block.p) in target_of
        ]
        self.self_connection: SpeciesLinear | None = None
        if options.convnet_sc and number > 0:
            channels = [(in_blocks[i].mul, targets[j].mul) for i, j in self.self_pairs]
            self.self_connection = SpeciesLinear(channels, n_embedding, **make)
        self.resnet = options.convnet_resnet and number > 0 and self.out_blocks == in_blocks

    def enter(self, blocks: Sequence[Tensor]) -> Tensor:
        """Mixed features as rows, divided by sqrt(neighbours): blocks (n, 2l + 1, mul) -> (n, plan.in_dim)."""
        matrices = self.linear_in.matrices(1 / math.sqrt(self.neighbours))
        mixed = [(block @ matrix).flatten(1) for block, matrix in zip(blocks, matrices)]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=1)

    def leave(self, summed: Tensor, blocks: Sequence[Tensor], attributes: Tensor, table: Tensor | None) -> list[Tensor]:
        """New features from the convolution's rows (n, plan.out_dim) and the old blocks.

        `attributes` (n, a) and `table` are what `SpeciesLinear.matrices` asks for.
        """
        pieces = summed.split([block.dim for block in self.plan.out_blocks], dim=1)
        inputs = [[pieces[i].unflatten(1, (2 * l + 1, -1)) for i in numbers] for l, numbers in self.targets]  # noqa: E741
        matrices = [[matrix] for matrix in self.linear_out.matrices()]
        if self.self_connection is not None:
            for (i, target), matrix in zip(self.self_pairs, self.self_connection.matrices(table)):
                one_species = table is not None and table.shape[0] == 1
                product = blocks[i] if one_species else (blocks[i].unsqueeze(3) * attributes[:, None, None]).flatten(2)
                inputs[target].append(product)
                matrices[target].append(matrix)
        mixed = [_join(parts, 2) @ _join(parts_of_matrix, 0) for parts, parts_of_matrix in zip(inputs, matrices)]
        new = self.nonlinearity(mixed)
        return [old + update for old, update in zip(blocks, new)] if self.resnet else new


def complete_options(
    options: Options, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
) -> Options:
    """See `NequIP.complete`."""
    _check(options, species, cutoff)
    features = options.num_features
    features = [features] * (options.l_max + 1) if isinstance(features, int) else features
    filled: dict[str, Any] = {
        "num_features": features,
        "type_embed_num_features": options.type_embed_num_features or features[0],
        "readout_mlp_width": options.readout_mlp_width or features[0],
    }
    if options.avg_num_neighbours is None:
        mean = _from_statistics(statistics, "mean_neighbours", "avg_num_neighbours")
        filled["avg_num_neighbours"] = mean if mean > 0 else 1.0
    if options.energy_scales is None:
        rms = statistics.get("forces_rms") or statistics.get("energy_residual_std")
        filled["energy_scales"] = rms if rms else 1.0
    if options.energy_shifts is None:
        filled["energy_shifts"] = _from_statistics(statistics, "reference_energies", "energy_shifts")
    return dataclasses.replace(options, **filled)


def _from_statistics(statistics: Mapping[str, Any], fact: str, key: str) -> Any:
    if statistics.get(fact) is None:
        raise ForgefieldError(f"model.{key} is not given and there is no training data to take it from.")
    return statistics[fact]


def _check(options: Options, species: tuple[str, ...], cutoff: float) -> None:
    """Raise for options that have no meaning, naming the key."""
    features = options.num_features if isinstance(options.num_features, list) else [options.num_features]
    at_least = {
        "num_layers": 1, "l_max": 0, "type_embed_num_features": 1, "radial_mlp_depth": 0, "radial_mlp_width": 1,
        "num_bessels": 1, "polynomial_cutoff_p": 2, "readout_mlp_depth": 0, "readout_mlp_width": 1,
    }  # fmt: skip
    for key, least in at_least.items():
        value = getattr(options, key)
        if value is not None and value < least:
            raise ForgefieldError(f"model.{key} is {value}; it must be at least {least}.")
    if min(features, default=0) < 1:
        raise ForgefieldError(f"model.num_features is {options.num_features}; every number must be at least 1.")
    if isinstance(options.num_features, list) and len(features) != options.l_max + 1:
        raise ForgefieldError(
            f"model.num_features has {len(features)} numbers; with model.l_max={options.l_max} it needs {options.l_max + 1}."
        )
    choices = {
        "nonlinearity": ("gate", "norm"),
        "nonlinearity_scalars": ("silu", "ssp", "tanh"),
        "nonlinearity_odd_scalars": ("tanh",),
        "nonlinearity_gates": ("silu", "ssp", "tanh"),
        "readout_mlp_nonlinearity": ("silu", "mish", "gelu", "ssp", "tanh", None),
    }
    for key, allowed in choices.items():
        if getattr(options, key) not in allowed:
            words = ", ".join("null" if word is None else word for word in allowed)
            raise ForgefieldError(f"model.{key} is '{getattr(options, key)}'; choose one of {words}.")
    for key in ("avg_num_neighbours", "energy_scales", "energy_shifts"):
        _check_per_species(f"model.{key}", getattr(options, key), species, positive=key != "energy_shifts")
    _check_pair_cutoffs(options.per_edge_type_cutoff, species, cutoff)
    if options.zbl:
        _check_zbl(options.zbl, species)


def _check_per_species(key: str, value: Any, species: tuple[str, ...], positive: bool) -> None:
    if isinstance(value, Mapping) and set(value) != set(species):
        raise ForgefieldError(
            f"{key} names {', '.join(value)}; the species are {', '.join(species)}, give one number each."
        )
    numbers = list(value.values()) if isinstance(value, Mapping) else [] if value is None else [value]
    if positive and any(not number > 0 for number in numbers):
        raise ForgefieldError(f"{key} is {value}; it must be positive.")


def _check_pair_cutoffs(table: Mapping[str, Any] | None, species: tuple[str, ...], cutoff: float) -> None:
    for centre, entry in (table or {}).items():
        for neighbour, value in entry.items() if isinstance(entry, Mapping) else [("", entry)]:
            where = ".".join(filter(None, ("model.per_edge_type_cutoff", centre, neighbour)))
            for symbol in filter(None, (centre, neighbour)):
                if symbol not in species:
                    raise ForgefieldError(f"{where}: {symbol} is not one of the species {', '.join(species)}.")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= cutoff:
                raise ForgefieldError(
                    f"{where} is {value}; it must be a number above 0 and at most data.cutoff={cutoff:g}."
                )


def _check_zbl(zbl: bool | Mapping[str, float], species: tuple[str, ...]) -> None:
    for key, value in zbl.items() if isinstance(zbl, Mapping) else []:
        if key != "polynomial_cutoff_p":
            raise ForgefieldError(f"model.zbl.{key} is not an option; ZBL has polynomial_cutoff_p.")
        if value < 2:
            raise ForgefieldError(f"model.zbl.polynomial_cutoff_p is {value}; it must be at least 2.")
    for symbol in species:
        if not atomic_numbers.get(symbol):
            raise ForgefieldError(f"model.zbl needs chemical elements; {symbol} is not one.")


def _join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def _hidden_blocks(features: Sequence[int], parity: bool) -> tuple[Block, ...]:
    """Blocks by degree; with both parities even comes before odd."""
    return tuple(
        Block(mul, degree, p) for degree, mul in enumerate(features) for p in ((1, -1) if parity else ((-1) ** degree,))
    )


def pair_cutoff(table: Mapping[str, Any], centre: str, neighbour: str, cutoff: float) -> float:
    """Cutoff of an edge from `centre` to `neighbour`, A; what the table does not say has the model's."""
    entry = table.get(centre, cutoff)
    return float(entry.get(neighbour, cutoff) if isinstance(entry, Mapping) else entry)


PAIRS_FROM_EDGES = 20_000
"""On an accelerator computing radial weights once per pair pays from about so many edges on; on a CPU always."""


def edge_graph(batch: dict[str, Any]) -> EdgeGraph:
    """Index lists of a batch; with `edge_reverse` (n_edges,), the number of every edge's reverse, also its pairs."""
    source, destination = batch["edge_index"]
    reverse, n_atoms = batch.get("edge_reverse"), batch["species"].shape[0]
    if reverse is None or (source.is_cuda and source.shape[0] < PAIRS_FROM_EDGES):
        return EdgeGraph(source, destination, n_atoms)
    return pair_graph(source, destination, n_atoms, reverse)

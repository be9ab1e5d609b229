"""Deep Potential: a descriptor of every atom's neighbours, and a fitting network that computes an energy, a dipole, a
polarisability, a density of states or another property from it.

The mathematics and the names of options are those of DeePMD-kit (Wang et al., Comput. Phys. Commun. 228, 178, 2018), so that
weights can be exchanged with it. Geometry and energies are float64, networks have the precision of their weights.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, cast

import torch
from ase.data import atomic_numbers
from torch import Tensor, nn

from forgefield.config.deepmd.types import is_stand_in
from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.descriptor import Descriptor
from forgefield.models.deeppot.fitting import Fitting, branch_of_atoms
from forgefield.models.deeppot.options import (
    DeepPotOptions,
    EnergyFittingOptions,
    FittingOptions,
    RowOptions,
    check_pairs,
    check_parts,
    descriptor_part,
    excluded_kinds,
    fitting_part,
    per_species,
    unseen_species,
)
from forgefield.models.deeppot.short_range import (
    PairEnergies,
    PairTable,
    complete_added_table,
    complete_short_range,
    zbl_energies,
)
from forgefield.models.deeppot.spin import (
    SPIN,
    VirtualAtoms,
    complete_descriptor,
    complete_spin,
    derivative_outputs,
    doubled,
    spin_options,
    with_virtual,
)
from forgefield.models.deeppot.statistics import environment_statistics
from forgefield.models.deeppot.sums import Summand, complete_networks, inputs_of, networks_of
from forgefield.models.deeppot.tensor_fitting import TensorFitting
from forgefield.models.deeppot.variants import (
    check_branches,
    draw_branches,
    extended_options,
    extended_state,
    fitting_section,
    flat_bias,
    owners,
    require_extensible,
    single,
)
from forgefield.models.edges import Batch, EdgeContext
from forgefield.models.interface import DerivativeOutput, DirectOutput, LastLayer, RegisteredModel
from forgefield.models.resolved import TYPE_NAMES
from forgefield.ops.graph import EdgeGraph, Segments, gather, join

DESCRIPTOR_SECTIONS = ("descriptor", "descriptor.list", "networks.descriptor", "networks.descriptor.list")
"""Where options of descriptors are: in the section, or in those of the parts of a hybrid; the same in added networks."""
FITTING_SECTIONS = ("fitting_net", "networks.fitting_net")


BLOCKS = ("repinit", "repformer")
"""Sections within the options of dpa2."""
ROWS = ("davg", "dstd", "three_body_davg", "three_body_dstd")
"""Their options with one entry for each species."""


class DeepPot(RegisteredModel[DeepPotOptions]):
    """Atomic energies from edge vectors, or the outputs of another fitting network. Built from resolved options."""

    only_edge_vectors = True
    Options = DeepPotOptions
    shift_option = "out_bias"
    fits_shifts_to_new_energies = True
    species_options = {
        "pair_exclude_types": "pairs", "atom_exclude_types": "indices", "out_bias": "rows",
        **{f"{part}.atom_ener": "rows" for part in FITTING_SECTIONS},
        **{f"{part}.exclude_types": "pairs" for part in DESCRIPTOR_SECTIONS},
        **{f"{part}.{key}": "rows" for part in DESCRIPTOR_SECTIONS for key in ("sel", "davg", "dstd", "most_neighbours")},
        "spin.use_spin": "rows", "spin.virtual_scale": "rows",
        **{f"{part}.{block}.{key}": "rows" for part in DESCRIPTOR_SECTIONS for block in BLOCKS for key in ROWS},
    }  # fmt: skip
    seed_options = tuple(f"{part}.seed" for part in (*DESCRIPTOR_SECTIONS, *FITTING_SECTIONS))
    training_options = tuple(f"{part}.trainable" for part in (*DESCRIPTOR_SECTIONS, *FITTING_SECTIONS))
    out_bias: Tensor
    pair_seen: Tensor
    atom_seen: Tensor
    atomic_numbers: Tensor

    def __init__(
        self,
        options: DeepPotOptions,
        *,
        species: Sequence[str],
        cutoff: float,
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator,
    ) -> None:
        super().__init__(options, species=species, cutoff=cutoff)
        descriptor_class, of_descriptor = descriptor_part(options.descriptor)
        fitting_class, of_fitting = fitting_part(options.fitting_net)
        self.virtual, around, reach = None, list(self.species), self.cutoff
        if options.spin is not None:
            of_spin = spin_options(options.spin)
            self.virtual, reach = VirtualAtoms(of_spin, self.cutoff), float(of_spin.rcut or self.cutoff)
            assert isinstance(of_descriptor, RowOptions)
            of_descriptor, around = doubled(of_descriptor), with_virtual(self.species)
        self.descriptor: Descriptor[Any] = descriptor_class(
            of_descriptor, species=around, cutoff=reach, dtype=dtype, generator=generator
        )
        self.ghost_atoms = self.descriptor.ghost_atoms if self.virtual is None else None
        specific: dict[str, Any] = {"owners": owners(options.branches) if options.branches else (0,)}
        if issubclass(fitting_class, TensorFitting):
            specific = {"dim_rotation": self.descriptor.dim_rotation}
        self.fitting: Fitting | TensorFitting[Any] = fitting_class(
            of_fitting,
            species=self.species,
            dim_descriptor=self.descriptor.dim_out,
            mixed_types=self.descriptor.mixed_types,
            dtype=dtype,
            generator=generator,
            **specific,
        )
        self.gives_energy = isinstance(self.fitting, Fitting)
        self.descriptor.rotates = not self.gives_energy
        if options.branches and isinstance(self.fitting, Fitting):
            draw_branches(self.fitting, options.branches)
        has_table = options.srtab is not None
        self.table = PairTable(options, len(self.species), self.cutoff) if has_table else None
        self.added = None
        if options.added_table is not None:
            end = self.cutoff if options.pair_table_cutoff is None else options.pair_table_cutoff
            self.added = PairEnergies(options.added_table, len(self.species), end)
        numbers = [atomic_numbers.get(symbol, 0) for symbol in self.species]
        self.register_buffer("atomic_numbers", torch.tensor(numbers, dtype=torch.float64), persistent=False)
        if self.gives_energy:
            bias = flat_bias(options.branches) if options.branches else options.out_bias
            self.register_buffer("out_bias", torch.tensor(bias, dtype=torch.float64))
        pair_seen = torch.tensor(excluded_kinds(options.pair_exclude_types, len(self.species)), dtype=torch.float64)
        self.register_buffer("pair_seen", pair_seen, persistent=False)
        self.unseen = unseen_species(options.atom_exclude_types, of_fitting, len(self.species))
        atom_seen = [float(number not in self.unseen) for number in range(len(self.species))]
        self.register_buffer("atom_seen", torch.tensor(atom_seen, dtype=torch.float64), persistent=False)

        sizes = {name: parameter.size for name, parameter in of_fitting.parameters.items()}
        self.inputs = {name: ("frame" if name == "fparam" else "atom", n) for name, n in sizes.items() if n}
        self.inputs |= self.descriptor.inputs
        self.optional_inputs = ("fparam",) if of_fitting.default_fparam is not None else ()
        self.optional_inputs += self.descriptor.optional_inputs
        summands = [
            Summand(section, species=self.species, cutoff=self.cutoff, dtype=dtype, generator=generator)
            for section in networks_of(options)
        ]
        self.networks = nn.ModuleList(summands)
        self.inputs |= inputs_of(summands)
        kinds = {self.ghost_atoms, *(summand.descriptor.ghost_atoms for summand in summands)}
        self.ghost_atoms = None if None in kinds else "exchange" if "exchange" in kinds else "local"
        if self.virtual is not None:
            self.inputs |= {SPIN: ("atom", 3)}
            self.derivative_outputs = derivative_outputs(self.virtual.magnetic.tolist())
        self.type_names = None if options.type_names is None else tuple(options.type_names)
        self.branches = tuple(sorted(options.branches or ()))
        self.feature_dim = self.descriptor.dim_out + len(self.species)

    @property
    def summands(self) -> list[Summand]:
        """The added networks."""
        return [cast("Summand", network) for network in self.networks]

    @classmethod
    def check_options(cls, section: Mapping[str, Any], *, make: Callable[..., object] | None = None) -> None:
        check_parts(section)
        check_branches(section)

    @classmethod
    def branch_names(cls, section: Mapping[str, Any]) -> list[str]:
        return sorted(section.get("branches") or {})

    @classmethod
    def branch(
        cls, resolved: Mapping[str, Any], state: Mapping[str, Tensor] | None, name: str | None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return single(resolved, state, name)

    @classmethod
    def check_new_species(cls, resolved: Mapping[str, Any], new: Sequence[str], source: str) -> None:
        require_extensible(resolved, new, source)

    @classmethod
    def add_species(
        cls, resolved: Mapping[str, Any], new: Sequence[str], measured: Mapping[str, Any]
    ) -> dict[str, Any]:
        return extended_options(resolved, new, measured["environment"])

    @classmethod
    def add_species_to_state(
        cls, fresh: Mapping[str, Tensor], trained: Mapping[str, Tensor], n_old: int, n_new: int
    ) -> dict[str, Tensor]:
        return extended_state(fresh, trained, n_old, n_new)

    @classmethod
    def set_shifts(cls, resolved: dict[str, Any], values: Sequence[float]) -> None:
        resolved["out_bias"] = list(values)

    @classmethod
    def equivalent(cls, name: str, one: object, other: object, section: Mapping[str, Any]) -> bool:
        """`sel` of some descriptors is a number of neighbours of any species, or a list of which only the sum matters; names of
        types change nothing."""
        if name == TYPE_NAMES:
            return True
        if not re.fullmatch(r"(networks\.)?descriptor\.(list\.)?sel", name):
            return False
        if section.get("type") not in ("se_atten", "se_atten_v2", "se_e3_tebd"):
            return False
        first, second = (sum(value) if isinstance(value, list) else value for value in (one, other))
        return bool(first == second)

    @classmethod
    def isolated_energies(cls, resolved: Mapping[str, Any]) -> None:
        return None

    def species_shifts(self) -> Tensor | None:
        return self.out_bias if self.gives_energy and not self.branches else None

    def counted_species(self) -> Tensor | None:
        return self.atom_seen

    @classmethod
    def measure(
        cls,
        section: Mapping[str, Any],
        batches: Callable[[], Iterable[Batch]],
        *,
        species: tuple[str, ...],
        cutoff: float,
    ) -> dict[str, object]:
        return {"environment": environment_statistics(section, batches(), species=species, cutoff=cutoff)}

    @classmethod
    def complete(
        cls,
        options: DeepPotOptions,
        *,
        species: tuple[str, ...],
        cutoff: float,
        statistics: Mapping[str, Any],
        adaptive_cutoff: float | None = None,
        make: Callable[..., object] | None = None,
    ) -> DeepPotOptions:
        """See `environment_statistics` for the numbers that come from the data."""
        check_pairs("model.pair_exclude_types", options.pair_exclude_types, len(species))
        for number in options.atom_exclude_types:
            if not 0 <= number < len(species):
                raise ForgefieldError(
                    f"model.atom_exclude_types contains {number}; indices of species are from 0 to {len(species) - 1}."
                )
        _check_type_names(options, species)
        _refuse_with_spin(options)
        _refuse_with_networks(options)
        short_range = complete_short_range(options, species, cutoff)
        short_range |= complete_added_table(options, species, cutoff)
        fitting_class, of_fitting = fitting_part(options.fitting_net)
        fitting = fitting_class.complete(of_fitting, species=species, statistics=statistics)
        if issubclass(fitting_class, TensorFitting):
            _refuse_energy_options(options, of_fitting)
        descriptor_class, of_descriptor = descriptor_part(options.descriptor)
        if options.spin is None:
            descriptor = descriptor_class.complete(of_descriptor, species=species, cutoff=cutoff, statistics=statistics)
        else:
            of_spin = complete_spin(spin_options(options.spin), options.descriptor, species, cutoff)
            short_range |= {"spin": dataclasses.asdict(of_spin)}
            rcut = float(of_spin.rcut or cutoff)
            descriptor = complete_descriptor(
                descriptor_class, of_descriptor, rcut, species=species, statistics=statistics
            )
        short_range |= {"networks": complete_networks(options, species, cutoff, statistics)}
        outputs: dict[str, Any] = {"fitting_net": dataclasses.asdict(fitting)}
        if options.branches:
            branches = _complete_branches(options, species, statistics)
            outputs = {"branches": branches, "fitting_net": next(iter(branches.values()))["fitting_net"]}
        elif fitting.type == "ener":
            outputs["out_bias"] = _out_bias(options, fitting, species, statistics)
        return dataclasses.replace(options, descriptor=dataclasses.asdict(descriptor), **outputs, **short_range)

    @classmethod
    def excluded_species(cls, section: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(section.get("atom_exclude_types") or ())

    @classmethod
    def derivatives(cls, section: Mapping[str, Any]) -> dict[str, DerivativeOutput]:
        return derivative_outputs(section["spin"]["use_spin"]) if section.get("spin") else {}

    @classmethod
    def direct_outputs(cls, section: Mapping[str, Any]) -> dict[str, DirectOutput]:
        """None with a fitting network for energies."""
        fitting_class, of_fitting = fitting_part(section.get("fitting_net", {}))
        outputs = fitting_class.describe(of_fitting) if issubclass(fitting_class, TensorFitting) else {}
        excluded = list(cls.excluded_species(section))
        return {name: dataclasses.replace(output, uncounted=excluded) for name, output in outputs.items()}

    def energy_parameters(self) -> Iterator[nn.Parameter]:
        return chain(self.fitting.parameters(), self.networks.parameters())

    def forward(self, batch: Batch, edges: EdgeContext | None = None) -> Tensor:
        """(n_atoms,) atomic energies, eV, float64."""
        _, energies = self._evaluate(batch, edges or EdgeContext.of(batch), energies=True)
        assert energies is not None
        return energies

    def values(self, batch: Batch, edges: EdgeContext, names: Sequence[str]) -> dict[str, Tensor]:
        assert isinstance(self.fitting, TensorFitting)
        _, mask = self._pairs(batch["species"], edges.graph)
        (output,) = self.fitting.outputs
        atomic = self.fitting(*self._described(batch, edges, mask), batch)[output.name]
        if self.unseen:
            seen = self.atom_seen.index_select(0, batch["species"])
            atomic = atomic * seen.view(-1, *[1] * len(output.shape))
        descriptions, results = self.fitting.describe(self.fitting.options), {}
        for name in names:
            values = atomic if descriptions[name].per == "atom" else output.of_frames(atomic, batch)
            results[name] = _running_sums(values) if descriptions[name].cumulative else values
        return results

    def encode(
        self, batch: Batch, edges: EdgeContext | None = None, *, energies: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """The descriptor and the one-hot species of the atom, (n_atoms, feature_dim) in the precision of the descriptor, and
        atomic energies."""
        descriptor, atomic = self._evaluate(batch, edges or EdgeContext.of(batch), energies=energies)
        kinds = torch.eye(len(self.species), dtype=descriptor.dtype, device=descriptor.device)
        return join([descriptor, kinds.index_select(0, batch["species"])], 1), atomic

    def _pairs(self, species: Tensor, graph: EdgeGraph) -> tuple[Tensor | None, Tensor | None]:
        """Pairs of species (n_edges,) if they are used, and a mask (n_edges,), 0 for ignored edges, if there are any."""
        options, kinds, mask = self.options, None, None
        if options.pair_exclude_types or self.table is not None or self.added is not None:
            kinds = species.index_select(0, graph.destination) * len(self.species)
            kinds = kinds + species.index_select(0, graph.source)
        if options.pair_exclude_types and kinds is not None:
            mask = self.pair_seen.index_select(0, kinds)
        return kinds, mask

    def _described(self, batch: Batch, edges: EdgeContext, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Descriptor and rotation of every atom. mask: of `_pairs`."""
        if self.virtual is None:
            described: tuple[Tensor, Tensor | None] = self.descriptor(batch, edges, mask)
            return described
        n_atoms = batch["species"].shape[0]
        waits = self.descriptor.may_wait_for(batch["species"])
        descriptor, _ = self.descriptor(*self.virtual(batch, edges, mask, may_wait=waits))
        return descriptor[:n_atoms], None

    def _evaluate(self, batch: Batch, edges: EdgeContext, *, energies: bool) -> tuple[Tensor, Tensor | None]:
        """Descriptor and atomic energies."""
        kinds, mask = self._pairs(batch["species"], edges.graph)
        descriptor, _ = self._described(batch, edges, mask)
        if not energies:
            return descriptor, None
        atomic = self.fitting(descriptor, batch).squeeze(1).double()
        if self.networks:
            atomic = self.options.network_weight * atomic
            for network in self.networks:
                atomic = atomic + network(batch, edges, mask)
        return descriptor, self._completed(atomic, batch, edges, kinds, mask)

    def last_layer(self, batch: Batch, edges: EdgeContext) -> LastLayer:
        if not isinstance(self.fitting, Fitting):
            return super().last_layer(batch, edges)
        kinds, mask = self._pairs(batch["species"], edges.graph)
        features, weights = self.fitting.last_layer(self._described(batch, edges, mask)[0], batch)
        if self.networks:
            parts = [(self.options.network_weight * features, weights)]
            parts += [summand.last_layer(batch, edges, mask) for summand in self.summands]
            features, weights = (torch.cat(part, 1 - number) for number, part in enumerate(zip(*parts)))
        # All that follows the network is an affine function of its output.
        offsets = self._completed(torch.zeros_like(features[:, 0]), batch, edges, kinds, mask)
        if self.table is not None:
            _, tabulated = self.table(torch.linalg.vector_norm(edges.vectors, dim=1), kinds, edges.graph, mask)
            features = features * (1 - tabulated).unsqueeze(1)
        if self.unseen:
            features = features * self.atom_seen.index_select(0, batch["species"]).unsqueeze(1)
        return LastLayer(features, weights, offsets)

    def _completed(
        self, atomic: Tensor, batch: Batch, edges: EdgeContext, kinds: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        """Atomic energies (n_atoms,), eV, from the output of the fitting network: with tabulated pair energies, bias and
        repulsion, without species that have no energy."""
        species, options, graph, lengths = batch["species"], self.options, edges.graph, None
        if self.table is not None or self.added is not None or options.zbl:
            lengths = torch.linalg.vector_norm(edges.vectors, dim=1)
        if self.table is not None:
            tabulated, weights = self.table(lengths, kinds, graph, mask)
            atomic = (1 - weights) * atomic + weights * tabulated
        kind = species
        if options.branches:
            kind = species + len(self.species) * branch_of_atoms(batch)
        atomic = atomic + gather(self.out_bias, Segments(kind, self.out_bias.shape[0]))
        if self.added is not None and lengths is not None and kinds is not None:
            atomic = atomic + self.added.energies(lengths, kinds, graph, mask)
        if options.zbl and lengths is not None:
            z = self.atomic_numbers.index_select(0, species)
            atomic = atomic + zbl_energies(lengths, z, graph, self.cutoff, options.zbl)
        if self.unseen:
            atomic = atomic * self.atom_seen.index_select(0, species)
        return atomic


def _refuse_with_networks(options: DeepPotOptions) -> None:
    """Raise for options that do not combine with sums of networks."""
    used = {
        "network_weight": not options.networks and options.network_weight != 1,
        "branches": options.networks and options.branches,
        "spin": options.networks and options.spin,
        "use_srtab": options.networks and (options.use_srtab or options.srtab),
        "fitting_net.type": options.networks and options.fitting_net.get("type", "ener") != "ener",
    }
    for key, value in used.items():
        if value:
            where = "needs model.networks" if key == "network_weight" else "cannot be combined with model.networks"
            raise ForgefieldError(
                f"model.{key} {where}; remove one of them." if options.networks else f"model.{key} {where}."
            )


def _refuse_with_spin(options: DeepPotOptions) -> None:
    """Raise for options that do not combine with spins."""
    if options.spin is None:
        return
    used = {
        "branches": options.branches,
        "use_srtab": options.use_srtab or options.srtab,
        "pair_table": options.pair_table or options.added_table,
        "fitting_net.type": options.fitting_net.get("type", "ener") != "ener",
    }
    for key, value in used.items():
        if value:
            raise ForgefieldError(f"model.{key} cannot be combined with model.spin; remove one of them.")


def _check_type_names(options: DeepPotOptions, species: Sequence[str]) -> None:
    names = options.type_names
    stand_ins = [pair for pair in zip(names or (), species) if is_stand_in(*pair)]
    if options.zbl and stand_ins:
        name, symbol = stand_ins[0]
        raise ForgefieldError(
            f"model.zbl reads the element of each species, but {symbol} stands for the type {name} (model.type_names); set "
            "it to false."
        )
    if names is not None and (len(names) != len(species) or len(set(names)) != len(names)):
        raise ForgefieldError(
            f"model.type_names is {list(names)}; it needs a different name for each of {', '.join(species)}, or leave it out."
        )


def _complete_branches(
    options: DeepPotOptions, species: tuple[str, ...], statistics: Mapping[str, Any]
) -> dict[str, Any]:
    """Complete options of the fitting network and bias of each branch."""
    check_branches(dataclasses.asdict(options))
    measured: Mapping[str, Any] = (statistics.get("environment") or {}).get("branches") or {}
    completed = {}
    for name, section in sorted(options.branches.items()):
        fitting_class, of_fitting = fitting_part(fitting_section(options.fitting_net, section, options.branches))
        fitting = fitting_class.complete(of_fitting, species=species, statistics={})
        of_branch = dataclasses.replace(options, out_bias=section.get("out_bias"))
        bias = _out_bias(of_branch, fitting, species, {"environment": measured.get(name) or {}})
        share = {"share": section["share"]} if section.get("share") else {}
        completed[name] = {"fitting_net": dataclasses.asdict(fitting), "out_bias": bias, **share}
    return completed


def _running_sums(values: Tensor) -> Tensor:
    """Cumulative sums along the last axis; a product, because `torch.cumsum` has no fixed order on a GPU."""
    n = values.shape[-1]
    return values @ torch.ones(n, n, dtype=values.dtype, device=values.device).triu()


def _refuse_energy_options(options: DeepPotOptions, fitting: FittingOptions) -> None:
    """Raise for options of energies, for a fitting network of another output."""
    energy_options = {"out_bias": options.out_bias, "zbl": options.zbl}
    for key, value in {
        **energy_options,
        "use_srtab": options.use_srtab,
        "srtab": options.srtab,
        "pair_table": options.pair_table,
    }.items():
        if value:
            there = "; it is part of fitting_net" if key == "out_bias" else ""
            raise ForgefieldError(f"model.{key} does not apply: model.fitting_net.type is {fitting.type}{there}.")
    if fitting.type == "property" and options.atom_exclude_types:
        raise ForgefieldError("model.atom_exclude_types does not apply to a fitting network of type property.")


def _out_bias(
    options: DeepPotOptions, fitting: FittingOptions, species: tuple[str, ...], statistics: Mapping[str, Any]
) -> list[float]:
    """The option, or fitted to the data; energies of isolated atoms are not fitted."""
    bias = options.out_bias
    if bias is None:
        environment: Mapping[str, Any] = statistics.get("environment") or {}
        fitted = environment.get("out_bias") if statistics.get("reference_kind", "fit") == "fit" else None
        energies = fitted if fitted is not None else statistics.get("reference_energies")
        if energies is None:
            raise ForgefieldError("model.out_bias is not set and there is no training data to fit it to.")
        bias = per_species(energies, species)
        atom_energies = fitting.atom_ener if isinstance(fitting, EnergyFittingOptions) else []
        for number, energy in enumerate(atom_energies):
            bias[number] = bias[number] if energy is None else float(energy)
    if len(bias) != len(species):
        raise ForgefieldError(f"model.out_bias has {len(bias)} numbers for {len(species)} species.")
    return [float(value) for value in bias]

"""Deep Potential: a descriptor of every atom's neighbours, and a fitting network that makes an energy of it, or a dipole, a
polarisability, a density of states, any property.

The mathematics and the names of options are those of DeePMD-kit (Wang et al., Comput. Phys. Commun. 228, 178, 2018), so that
weights can be exchanged with it. Geometry and energies are float64, networks have the precision of their weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from ase.data import atomic_numbers
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.branches import check_branches, draw_again, fitting_section, flat_bias, owners, single
from forgefield.models.deeppot.descriptor import Descriptor
from forgefield.models.deeppot.fitting import PARAMETERS, Fitting, branch_of_atoms
from forgefield.models.deeppot.new_species import extended_options, extended_state, require_extensible
from forgefield.models.deeppot.options import (
    DeepPotOptions,
    check_pairs,
    check_parts,
    descriptor_part,
    excluded_kinds,
    fitting_part,
    per_species,
    unseen_species,
)
from forgefield.models.deeppot.short_range import PairTable, complete_short_range, zbl_energies
from forgefield.models.deeppot.statistics import environment_statistics
from forgefield.models.deeppot.tensor_fitting import TensorFitting
from forgefield.models.edges import Batch, EdgeContext
from forgefield.models.interface import DirectOutput, RegisteredModel
from forgefield.ops.graph import EdgeGraph, Segments, gather, join


class DeepPot(RegisteredModel[DeepPotOptions]):
    """Atomic energies from edge vectors, or what another fitting network gives. Built from resolved options: every number is
    given."""

    only_edge_vectors = True
    Options = DeepPotOptions
    shift_option = "out_bias"
    fits_shifts_to_new_energies = True
    species_options = {
        "pair_exclude_types": "pairs", "descriptor.exclude_types": "pairs", "atom_exclude_types": "indices",
        "out_bias": "rows", "fitting_net.atom_ener": "rows", "descriptor.sel": "rows", "descriptor.davg": "rows",
        "descriptor.dstd": "rows", "descriptor.most_neighbours": "rows",
    }  # fmt: skip
    seed_options = ("descriptor.seed", "fitting_net.seed")
    training_options = ("descriptor.trainable", "fitting_net.trainable")
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
        made_of: dict[str, Any] = {"species": self.species, "dtype": dtype, "generator": generator}
        descriptor, of_descriptor = descriptor_part(options.descriptor)
        fitting, of_fitting = fitting_part(options.fitting_net)
        self.descriptor: Descriptor = descriptor(of_descriptor, cutoff=self.cutoff, **made_of)
        dimensions = {"dim_descriptor": self.descriptor.dim_out, "mixed_types": self.descriptor.mixed_types}
        self.gives_energy = not issubclass(fitting, TensorFitting)
        if not self.gives_energy:
            dimensions["dim_rotation"] = self.descriptor.dim_rotation
        if options.branches:
            made_of["owners"] = owners(options.branches)
        self.fitting: Fitting | TensorFitting = fitting(of_fitting, **dimensions, **made_of)
        if options.branches:
            draw_again(self.fitting, options.branches)
        has_table = options.srtab is not None
        self.table = PairTable(options, len(self.species), self.cutoff) if has_table else None
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

        sizes = {name: int(getattr(of_fitting, f"numb_{name}")) for name in PARAMETERS}
        self.inputs = {name: ("frame" if name == "fparam" else "atom", n) for name, n in sizes.items() if n}
        self.optional_inputs = ("fparam",) if of_fitting.default_fparam is not None else ()
        self.branches = tuple(sorted(options.branches or ()))
        self.feature_dim = self.descriptor.dim_out + len(self.species)

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
        """`sel` of se_atten is a number of neighbours of any species, or numbers whose sum counts."""
        if name != "descriptor.sel" or section.get("type") not in ("se_atten", "se_atten_v2"):
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
                    f"model.atom_exclude_types holds {number}; species have numbers from 0 to {len(species) - 1}."
                )
        short_range = complete_short_range(options, species, cutoff)
        kind, given = fitting_part(options.fitting_net)
        fitting = kind.complete(given, species=species, statistics=statistics)
        if issubclass(kind, TensorFitting):
            _refuse_energy_options(options, given)
        kind, given = descriptor_part(options.descriptor)
        descriptor = kind.complete(given, species=species, cutoff=cutoff, statistics=statistics)
        own: dict[str, Any] = {"fitting_net": dataclasses.asdict(fitting)}
        if options.branches:
            branches = _complete_branches(options, species, statistics)
            own = {"branches": branches, "fitting_net": next(iter(branches.values()))["fitting_net"]}
        elif fitting.type == "ener":
            own["out_bias"] = _out_bias(options, fitting, species, statistics)
        return dataclasses.replace(options, descriptor=dataclasses.asdict(descriptor), **own, **short_range)

    @classmethod
    def direct_outputs(cls, section: Mapping[str, Any]) -> dict[str, DirectOutput]:
        """None with a fitting network for energies."""
        kind, of_fitting = fitting_part(section.get("fitting_net", {}))
        facts = kind.facts(of_fitting) if issubclass(kind, TensorFitting) else {}
        excluded = list(section.get("atom_exclude_types") or ())
        return {name: dataclasses.replace(output, uncounted=excluded) for name, output in facts.items()}

    def energy_parameters(self) -> Iterator[nn.Parameter]:
        """What energies depend on and features do not."""
        return self.fitting.parameters()

    def forward(self, batch: Batch, edges: EdgeContext | None = None) -> Tensor:
        """(n_atoms,) atomic energies, eV, float64."""
        _, energies = self._evaluate(batch, edges or EdgeContext.of(batch), energies=True)
        assert energies is not None
        return energies

    def values(self, batch: Batch, edges: EdgeContext, names: Sequence[str]) -> dict[str, Tensor]:
        assert isinstance(self.fitting, TensorFitting)
        _, mask = self._pairs(batch["species"], edges.graph)
        (output,) = self.fitting.outputs
        atomic = self.fitting(*self.descriptor(batch, edges, mask), batch)[output.name]
        if self.unseen:
            seen = self.atom_seen.index_select(0, batch["species"])
            atomic = atomic * seen.view(-1, *[1] * len(output.shape))
        facts, found = self.fitting.facts(self.fitting.options), {}
        for name in names:
            values = atomic if facts[name].per == "atom" else output.of_frames(atomic, batch)
            found[name] = _running_sums(values) if facts[name].cumulative else values
        return found

    def encode(
        self, batch: Batch, edges: EdgeContext | None = None, *, energies: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """The descriptor and which species the atom is, (n_atoms, feature_dim) in the precision of the descriptor, and
        atomic energies."""
        descriptor, atomic = self._evaluate(batch, edges or EdgeContext.of(batch), energies=energies)
        kinds = torch.eye(len(self.species), dtype=descriptor.dtype, device=descriptor.device)
        return join([descriptor, kinds.index_select(0, batch["species"])], 1), atomic

    def _pairs(self, species: Tensor, graph: EdgeGraph) -> tuple[Tensor | None, Tensor | None]:
        """Pairs of species (n_edges,) if anything depends on them, and (n_edges,) 0 for edges that are ignored, if any are."""
        options, kinds, mask = self.options, None, None
        if options.pair_exclude_types or self.table is not None:
            kinds = species.index_select(0, graph.destination) * len(self.species)
            kinds = kinds + species.index_select(0, graph.source)
        if options.pair_exclude_types and kinds is not None:
            mask = self.pair_seen.index_select(0, kinds)
        return kinds, mask

    def _evaluate(self, batch: Batch, edges: EdgeContext, *, energies: bool) -> tuple[Tensor, Tensor | None]:
        """Descriptor and atomic energies."""
        species, options, graph, lengths = batch["species"], self.options, edges.graph, None
        kinds, mask = self._pairs(species, graph)
        descriptor, _ = self.descriptor(batch, edges, mask)
        if not energies:
            return descriptor, None
        atomic = self.fitting(descriptor, batch).squeeze(1).double()
        if self.table is not None or options.zbl:
            lengths = torch.linalg.vector_norm(edges.vectors, dim=1)
        if self.table is not None:
            tabulated, weights = self.table(lengths, kinds, graph, mask)
            atomic = (1 - weights) * atomic + weights * tabulated
        kind = species
        if options.branches:
            kind = species + len(self.species) * branch_of_atoms(batch)
        atomic = atomic + gather(self.out_bias, Segments(kind, self.out_bias.shape[0]))
        if options.zbl and lengths is not None:
            z = self.atomic_numbers.index_select(0, species)
            atomic = atomic + zbl_energies(lengths, z, graph, self.cutoff, options.zbl)
        if self.unseen:
            atomic = atomic * self.atom_seen.index_select(0, species)
        return descriptor, atomic


def _complete_branches(
    options: DeepPotOptions, species: tuple[str, ...], statistics: Mapping[str, Any]
) -> dict[str, Any]:
    """Fitting network and bias of each branch in full."""
    check_branches(dataclasses.asdict(options))
    measured: Mapping[str, Any] = (statistics.get("environment") or {}).get("branches") or {}
    found = {}
    for name, section in sorted(options.branches.items()):
        kind, given = fitting_part(fitting_section(options.fitting_net, section, options.branches))
        fitting = kind.complete(given, species=species, statistics={})
        of_branch = dataclasses.replace(options, out_bias=section.get("out_bias"))
        bias = _out_bias(of_branch, fitting, species, {"environment": measured.get(name) or {}})
        share = {"share": section["share"]} if section.get("share") else {}
        found[name] = {"fitting_net": dataclasses.asdict(fitting), "out_bias": bias, **share}
    return found


def _running_sums(values: Tensor) -> Tensor:
    """Sums along the last axis up to each place; a product, because sums of that kind have no fixed order on a GPU."""
    n = values.shape[-1]
    return values @ torch.ones(n, n, dtype=values.dtype, device=values.device).triu()


def _refuse_energy_options(options: DeepPotOptions, fitting: Any) -> None:
    """Raise for what belongs to energies, beside a fitting network of something else."""
    for key in ("out_bias", "zbl", "use_srtab", "srtab"):
        if getattr(options, key):
            there = "; it is part of fitting_net" if key == "out_bias" else ""
            raise ForgefieldError(f"model.{key} does not apply: model.fitting_net.type is {fitting.type}{there}.")
    if fitting.type == "property" and options.atom_exclude_types:
        raise ForgefieldError("model.atom_exclude_types does not apply to a fitting network of type property.")


def _out_bias(
    options: DeepPotOptions, fitting: Any, species: tuple[str, ...], statistics: Mapping[str, Any]
) -> list[float]:
    """Given, or fitted to the data; energies of isolated atoms are taken as they are."""
    bias = options.out_bias
    if bias is None:
        found: Mapping[str, Any] = statistics.get("environment") or {}
        fitted = found.get("out_bias") if statistics.get("reference_kind", "fit") == "fit" else None
        energies = fitted if fitted is not None else statistics.get("reference_energies")
        if energies is None:
            raise ForgefieldError("model.out_bias is not given and there is no training data to take it from.")
        bias = per_species(energies, species)
        for number, energy in enumerate(fitting.atom_ener):
            bias[number] = bias[number] if energy is None else float(energy)
    if len(bias) != len(species):
        raise ForgefieldError(f"model.out_bias has {len(bias)} numbers for {len(species)} species.")
    return [float(value) for value in bias]

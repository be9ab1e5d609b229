"""Fitting networks: from the descriptor of an atom, and parameters of its frame and of the atom, to what is predicted for it.

Each species has a separate network, unless the descriptor distinguishes species. Parameters (`fparam` of frames, `aparam` of
atoms) are standardised and follow the descriptor in the network's input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.networks import ATOM_BLOCK, Groups, Networks, group_rows
from forgefield.models.deeppot.options import EnergyFittingOptions, FittingOptions, check_fitting
from forgefield.models.deeppot.se_e2 import DTYPES
from forgefield.models.edges import Batch

OptionsT = TypeVar("OptionsT", bound=FittingOptions)


class Fitting(nn.Module):
    """Networks of `dim_out` numbers per atom."""

    Options: ClassVar[type[FittingOptions]]
    """Dataclass of its options, `type` first; defaults are DeePMD-kit's."""
    isolated: Tensor
    default_fparam: Tensor
    first_network: Tensor
    cases: Tensor

    def __init__(
        self,
        options: FittingOptions,
        *,
        species: Sequence[str],
        dim_descriptor: int,
        mixed_types: bool,
        dim_out: int = 1,
        dtype: torch.dtype,
        generator: torch.Generator,
        owners: Sequence[int] = (0,),
    ) -> None:
        """owners: for each branch of the model, the index of its networks; branches may share networks."""
        super().__init__()
        self.options, self.n_species, self.dim_descriptor = options, len(species), dim_descriptor
        if options.seed is not None:
            generator = torch.Generator().manual_seed(options.seed)
        self.per_branch = 1 if mixed_types else len(species)
        self.has_branches = len(owners) > 1
        first = torch.tensor([self.per_branch * owner for owner in owners])
        dim_case = options.dim_case_embd if isinstance(options, EnergyFittingOptions) else 0
        self.register_buffer("cases", torch.eye(dim_case, dtype=torch.float64), persistent=False)
        if self.has_branches and 0 < dim_case < len(owners):
            raise ForgefieldError(
                f"model.fitting_net.dim_case_embd is {dim_case}; it must be at least the number of branches, {len(owners)}."
            )
        self.register_buffer("first_network", first, persistent=False)
        self.networks = Networks(
            self.per_branch * (max(owners) + 1),
            [dim_descriptor + options.numb_fparam + options.numb_aparam + dim_case, *options.neuron, dim_out],
            activation=options.activation_function,
            resnet_dt=options.resnet_dt,
            linear_out=True,
            trainable=options.trainable,
            dtype=DTYPES.get(options.precision, dtype),
            generator=generator,
        )
        for name, parameter in options.parameters.items():
            for which, values in (("avg", parameter.mean), ("std", parameter.deviation)):
                tensor = torch.tensor(values or [], dtype=torch.float64)
                self.register_buffer(f"{name}_{which}", tensor, persistent=False)
        default = torch.tensor(options.default_fparam or [], dtype=torch.float64)
        self.register_buffer("default_fparam", default, persistent=False)
        atom_energies = options.atom_ener if isinstance(options, EnergyFittingOptions) else []
        fixed = [float(value is not None) for value in atom_energies]
        self.has_isolated = any(fixed)
        isolated = torch.tensor(fixed or [0.0] * len(species), dtype=torch.float64)
        self.register_buffer("isolated", isolated, persistent=False)

    @classmethod
    def complete(cls, options: OptionsT, *, species: tuple[str, ...], statistics: Mapping[str, Any]) -> OptionsT:
        """Options checked, with means and deviations of the parameters."""
        check_fitting(options, species)
        environment: Mapping[str, Any] = statistics.get("environment") or {}
        filled: dict[str, Any] = {}
        for name, (count, mean, deviation) in options.parameters.items():
            for key, value in ((f"{name}_avg", mean), (f"{name}_std", deviation)) if count else ():
                value = value or environment.get(key)
                if value is None:
                    raise ForgefieldError(
                        f"model.fitting_net.{key} is not set and cannot be computed without training data."
                    )
                if len(value) != count:
                    raise ForgefieldError(
                        f"model.fitting_net.numb_{name} is {count}, but the data has {len(value)} numbers in {name}."
                    )
                filled[key] = list(value)
        return dataclasses.replace(options, **filled)

    def forward(self, descriptor: Tensor, batch: Batch) -> Tensor:
        """(n_atoms, dim_out) in the networks' precision. descriptor: (n_atoms, dim_descriptor)."""
        return self._applied(self.networks, descriptor, batch)

    def last_layer(self, descriptor: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Features (n_atoms, n_weights) and weights (n_weights,) of the last layer, float64, whose product is the output of
        networks with one number per atom.

        Weights are those of all networks, each with its bias; features of an atom are zero for the networks of other species.
        """
        last, n_networks = self.networks.layers[-1], self.networks.count
        hidden = self._applied(self.networks.hidden, descriptor, batch).double()
        ones = self._applied(lambda x, groups: torch.ones_like(x[..., :1]), descriptor, batch).double()
        extended = torch.cat([hidden, ones], 1)
        chosen = functional.one_hot(self._kinds(batch), n_networks).double()
        features = (chosen.unsqueeze(2) * extended.unsqueeze(1)).flatten(1)
        return features, torch.cat([last.w.squeeze(2), last.b], 1).double().flatten()

    def _kinds(self, batch: Batch) -> Tensor:
        """(n_atoms,) the index of each atom's network."""
        species = batch["species"]
        kinds = torch.zeros_like(species) if self.per_branch == 1 else species
        if self.has_branches:
            kinds = kinds + self.first_network.index_select(0, branch_of_atoms(batch))
        return kinds

    def _applied(self, function: Callable[[Tensor, Groups], Tensor], descriptor: Tensor, batch: Batch) -> Tensor:
        """A function of the networks' inputs, minus its value for an isolated atom where the energy of that is fixed."""
        dtype, groups = self.networks.dtype, group_rows(self._kinds(batch), self.networks.count, ATOM_BLOCK)
        parameters = [*self.parameters_of_atoms(batch), *self._cases_of_atoms(batch)]
        inputs = descriptor.to(dtype)
        if parameters:
            inputs = torch.cat([inputs, *(part.to(dtype) for part in parameters)], 1)
        outputs = groups.collect(function(groups.spread(inputs), groups))
        if not self.has_isolated:
            return outputs
        bare = torch.cat([torch.zeros_like(inputs[:, : self.dim_descriptor]), inputs[:, self.dim_descriptor :]], 1)
        isolated = groups.collect(function(groups.spread(bare), groups))
        return outputs - isolated * self.isolated.to(dtype).index_select(0, batch["species"]).unsqueeze(1)

    def _cases_of_atoms(self, batch: Batch) -> list[Tensor]:
        """The numbers that stand for the branch of every atom, (n_atoms, number) float64; nothing where there are none."""
        n_cases = self.cases.shape[0]
        if n_cases == 0:
            return []
        if self.has_branches:
            return [self.cases.index_select(0, branch_of_atoms(batch))]
        case = self.options.case if isinstance(self.options, EnergyFittingOptions) else None
        row = torch.zeros_like(self.cases[:1]) if case is None else self.cases[case : case + 1]
        return [row.expand(batch["species"].shape[0], n_cases)]

    def parameters_of_atoms(self, batch: Batch) -> list[Tensor]:
        """Standardised parameters of every atom, each (n_atoms, number) float64."""
        result = []
        for name, (count, _, _) in self.options.parameters.items():
            if count == 0:
                continue
            values = batch.get(name)
            if values is None and name == "fparam" and self.options.default_fparam is not None:
                values = self.default_fparam.expand(batch["n_atoms"].shape[0], count)
            if values is None:
                raise ForgefieldError(
                    f"model.fitting_net.numb_{name} is {count}, but the data has no field {name}; name it in "
                    f"data.labels.fields (with ASE: atoms.{'info' if name == 'fparam' else 'arrays'}['{name}'])."
                )
            values = values.reshape(values.shape[0], count)
            if name == "fparam":
                if self.options.default_fparam is not None:
                    values = torch.where(values.isnan(), self.default_fparam, values)
                values = values.index_select(0, batch["frame"])
            result.append((values - self.get_buffer(f"{name}_avg")) / self.get_buffer(f"{name}_std"))
        return result


def branch_of_atoms(batch: Batch) -> Tensor:
    """(n_atoms,) index of the branch of each atom's frame."""
    if "branch" not in batch:
        raise ForgefieldError("this model has several branches; choose one by its name (head=NAME, --head NAME).")
    return batch["branch"].index_select(0, batch["frame"])


class EnergyFitting(Fitting):
    """`ener`: one number, the energy of the atom."""

    Options = EnergyFittingOptions

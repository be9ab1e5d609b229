"""Statistics of the training data that a Deep Potential needs: mean and deviation of rows, neighbours, parameters, outputs.

One pass over batches, sums in float64. With `sel` the statistics are DeePMD-kit's: rows of empty slots, all zero, are included.
Without, they are those of the actual neighbours.

Bias and scale of outputs other than energies are DeePMD-kit's too: the mean of each species if atoms are labelled; otherwise
least squares of the frames' values on compositions, or, if species are not distinguished, mean and deviation of the values
themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.options import (
    DeepPotOptions,
    EnergyFittingOptions,
    FittingOptions,
    PolarOptions,
    PropertyOptions,
    RowOptions,
    descriptor_part,
    fitting_part,
    rcond_of,
    unseen_species,
)
from forgefield.models.deeppot.row_statistics import Moments
from forgefield.models.deeppot.spin import VirtualAtoms, complete_spin, doubled, spin_options, with_virtual
from forgefield.models.deeppot.sums import network_statistics
from forgefield.models.deeppot.tensor_fitting import TensorFitting

ROUNDING = 1e-12
"""A deviation below this fraction of the largest value counts as zero."""


class OutputFit:
    """Bias and scale of an output other than the energy.

    fitting_class, fitting: class and options of the network.
    unseen: species without a value.
    """

    def __init__(
        self,
        fitting_class: type[TensorFitting[Any]],
        fitting: FittingOptions,
        n_species: int,
        unseen: Sequence[int],
    ) -> None:
        self.fitting, self.n = fitting, n_species
        output = fitting_class.output(fitting)
        self.has_bias = fitting_class.has_bias
        self.name, self.of_atoms = output.name, f"{fitting_class.atom_prefix}{output.name}"
        self.size, self.intensive = int(np.prod(output.shape)), output.reduction == "mean"
        self.seen = np.array([float(number not in unseen) for number in range(n_species)])
        self.counts: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.sums, self.numbers = np.zeros((n_species, self.size)), np.zeros(n_species)

    def add(self, batch: Mapping[str, Tensor]) -> None:
        if not self.has_bias:
            return
        if self.name in batch:
            self._add_frames(batch)
        if self.of_atoms in batch:
            values = batch[self.of_atoms].reshape(-1, self.size).numpy()
            has = ~np.isnan(values).any(1)
            species = batch["species"].numpy()[has]
            np.add.at(self.sums, species, values[has])
            self.numbers += np.bincount(species, minlength=self.n)

    def _add_frames(self, batch: Mapping[str, Tensor]) -> None:
        n_frames = batch["n_atoms"].shape[0]
        counts = torch.bincount(batch["frame"] * self.n + batch["species"], minlength=n_frames * self.n)
        values = batch[self.name].reshape(n_frames, -1).numpy()
        if values.shape[1] != self.size:
            return  # an error soon, which names the expected shape
        has = ~np.isnan(values).any(1)
        self.counts.append((counts.view(n_frames, self.n).double().numpy() * self.seen)[has])
        self.values.append(values[has])

    def result(self) -> dict[str, Any]:
        if not self.has_bias:
            return {}
        of_frames = self._of_frames()
        bias = np.full((self.n, self.size), np.nan) if of_frames is None else of_frames[0]
        has = self.numbers > 0
        bias = np.where(has[:, None], self.sums / np.maximum(self.numbers, 1)[:, None], bias)
        if of_frames is None and not has.any():
            return {}
        bias = np.nan_to_num(bias)
        if isinstance(self.fitting, PolarOptions):
            return {"out_bias": (bias.reshape(-1, 3, 3).trace(axis1=1, axis2=2) / 3).tolist()}
        statistics = {"out_bias": bias.tolist()}
        if isinstance(self.fitting, PropertyOptions) and of_frames is not None:
            statistics["out_std"] = np.repeat(of_frames[1][None], self.n, axis=0).tolist()
        return statistics

    def _of_frames(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Bias (n_species, size) and deviation (size,): by composition, or the same for all species."""
        if not sum(map(len, self.values)):
            return None
        counts, values = np.concatenate(self.counts), np.concatenate(self.values)
        fitting = self.fitting
        if isinstance(fitting, PropertyOptions) and not fitting.distinguish_types:
            values = values if self.intensive else values / counts.sum(1, keepdims=True)
            mean, deviation = values.mean(0), values.std(0)
            return np.repeat(mean[None], self.n, axis=0), self._scale(fitting, deviation, values)
        counts = counts / counts.sum(1, keepdims=True) if self.intensive else counts
        bias = np.linalg.lstsq(counts, values, rcond=rcond_of(fitting))[0]
        deviation = (values - counts @ bias).std(0)
        return bias, self._scale(fitting, deviation, values) if isinstance(fitting, PropertyOptions) else deviation

    def _scale(self, fitting: PropertyOptions, deviation: np.ndarray, values: np.ndarray) -> np.ndarray:
        """The deviation; raises if it vanishes."""
        if fitting.out_std is None and not (deviation > ROUNDING * np.abs(values).max(0)).all():
            raise ForgefieldError(
                f"model.fitting_net.out_std: {self.name} follows from the composition in all training data, so its scale would "
                "be zero and there is nothing to learn; check the label, or set out_bias and out_std"
                + (", or distinguish_types: false." if fitting.distinguish_types else ".")
            )
        return deviation


def environment_statistics(
    model: Mapping[str, Any], batches: Iterable[Mapping[str, Tensor]], *, species: Sequence[str], cutoff: float
) -> dict[str, Any]:
    """Statistics that resolved options need: davg, dstd, mean_neighbours, max_neighbours, out_bias, fparam_avg, ...

    model: the `model` section. batches: of training data, with edges. The result can be written as JSON; `DeepPot.complete`
    reads it from the key `environment` of its statistics.
    """
    options = DeepPotOptions(**{key: value for key, value in model.items() if key != "name"})
    descriptor_class, descriptor = descriptor_part(options.descriptor)
    fitting_class, fitting = fitting_part(options.fitting_net)
    virtual, around = None, tuple(species)
    if options.spin is not None:
        completed = complete_spin(spin_options(options.spin), options.descriptor, species, cutoff)
        virtual, cutoff = VirtualAtoms(completed, cutoff), float(completed.rcut or cutoff)
        assert isinstance(descriptor, RowOptions)
        descriptor, around = doubled(descriptor), tuple(with_virtual(species))
    rows = descriptor_class.statistics(
        descriptor, species=around, cutoff=cutoff, pair_exclude_types=options.pair_exclude_types
    )
    added = network_statistics(options, species, cutoff)
    names = sorted(options.branches)
    outputs = _output_statistics(fitting_class, fitting, options, len(species))
    of_branches = {name: EnergyFit(len(species), fitting, index) for index, name in enumerate(names)}
    parameters = {name: ParameterStatistics(name, fitting) for name in ("fparam", "aparam")}
    for batch in batches:
        rows.add(batch if virtual is None else virtual.statistics_batch(batch))
        for others in added:
            others.add(batch)
        for fit in (outputs, *of_branches.values()):
            fit.add(batch)
        for part in parameters.values():
            part.add(batch)
    statistics = rows.result() | outputs.result()
    if added:
        statistics["networks"] = [others.result() for others in added]
    if virtual is not None:
        statistics["mean_neighbours"] *= 2  # virtual atoms are counted as well, and have none
    if of_branches:
        statistics["branches"] = {name: fit.result() for name, fit in of_branches.items()}
    for part in parameters.values():
        statistics |= part.result()
    return statistics


def _output_statistics(
    fitting_class: type, fitting: FittingOptions, options: DeepPotOptions, n_species: int
) -> EnergyFit | OutputFit:
    if not issubclass(fitting_class, TensorFitting):
        return EnergyFit(n_species, fitting)
    return OutputFit(fitting_class, fitting, n_species, unseen_species(options.atom_exclude_types, fitting, n_species))


class EnergyFit:
    """Energies of species by least squares of total energies, as in DeePMD-kit."""

    def __init__(self, n_species: int, fitting: FittingOptions, branch: int | None = None) -> None:
        """branch: only frames of this branch are used."""
        self.n, self.fitting, self.branch = n_species, fitting, branch
        self.counts: list[np.ndarray] = []
        self.energies: list[np.ndarray] = []

    def add(self, batch: Mapping[str, Tensor]) -> None:
        n_frames = batch["n_atoms"].shape[0]
        counts = torch.bincount(batch["frame"] * self.n + batch["species"], minlength=n_frames * self.n)
        has_energy = ~batch["energy"].isnan().numpy()
        if self.branch is not None:
            has_energy = has_energy & (batch["branch"].numpy() == self.branch)
        self.counts.append(counts.view(n_frames, self.n).double().numpy()[has_energy])
        self.energies.append(batch["energy"].numpy()[has_energy])

    def result(self) -> dict[str, Any]:
        counts, energies = np.concatenate(self.counts), np.concatenate(self.energies)
        if not len(energies):
            return {}
        atom_energies: list[float | None] = [None] * self.n
        if isinstance(self.fitting, EnergyFittingOptions) and self.fitting.atom_ener:
            atom_energies = self.fitting.atom_ener
        is_fixed = np.array([energy is not None for energy in atom_energies])
        fixed = np.array([0.0 if energy is None else energy for energy in atom_energies])
        rest = energies - counts @ fixed
        solution = np.linalg.lstsq(counts * ~is_fixed, rest, rcond=rcond_of(self.fitting))[0]
        return {"out_bias": [float(value) for value in np.where(is_fixed, fixed, solution)]}


class ParameterStatistics:
    """Mean and deviation of the parameters of frames or atoms."""

    def __init__(self, name: str, fitting: FittingOptions) -> None:
        self.name, self.count = name, fitting.parameters[name].size
        self.default = fitting.default_fparam if name == "fparam" else None
        self.moments = Moments(self.count)

    def add(self, batch: Mapping[str, Tensor]) -> None:
        if not self.count:
            return
        values = batch.get(self.name)
        if values is None:
            if self.default is not None:
                return
            raise ForgefieldError(
                f"model.fitting_net.numb_{self.name} is {self.count}, but the data has no field {self.name}; "
                "name it in data.labels.fields."
            )
        if values[0].numel() != self.count:
            raise ForgefieldError(
                f"model.fitting_net.numb_{self.name} is {self.count}, but the data has {values[0].numel()} numbers in "
                f"{self.name}."
            )
        table = values.reshape(values.shape[0], self.count).numpy()
        missing = np.isnan(table).any(1)
        if missing.any() and self.default is None:
            raise ForgefieldError(
                f"model.fitting_net.numb_{self.name} is {self.count}, but a training frame has no {self.name}."
            )
        table = table[~missing]
        self.moments.add(len(table), table.sum(0), (table**2).sum(0))

    def result(self) -> dict[str, Any]:
        if not self.count:
            return {}
        return {
            f"{self.name}_avg": self.moments.mean.tolist(),
            f"{self.name}_std": self.moments.deviation.tolist(),
        }

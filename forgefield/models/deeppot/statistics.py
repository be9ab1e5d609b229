"""Statistics of the training data that a Deep Potential needs: mean and deviation of rows, neighbours, parameters, outputs.

One pass over batches, sums in float64. With `sel` the numbers are DeePMD-kit's: rows of the empty places, all zero, are counted
with the others. Without, they are those of the actual neighbours.

Bias and scale of outputs other than energies are DeePMD-kit's too: the mean of each species where atoms are labelled; otherwise
by least squares of the frames' values on compositions, or, where species are not distinguished, mean and deviation of the
values themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.descriptor import environment_rows
from forgefield.models.deeppot.options import (
    DeepPotOptions,
    descriptor_part,
    excluded_kinds,
    fitting_part,
    unseen_species,
)
from forgefield.models.deeppot.tensor_fitting import TensorFitting
from forgefield.models.edges import edge_vectors

ROUNDING = 1e-12
"""A deviation below this share of the largest value is none."""


class OutputFit:
    """kind, fitting: class and options of the network. unseen: species without a value."""

    def __init__(self, kind: type[TensorFitting], fitting: Any, n_species: int, unseen: Sequence[int]) -> None:
        self.fitting, self.n = fitting, n_species
        output = kind.output(fitting)
        self.name, self.of_atoms = output.name, f"{kind.atom_prefix}{output.name}"
        self.size, self.intensive = int(np.prod(output.shape)), output.reduction == "mean"
        self.seen = np.array([float(number not in unseen) for number in range(n_species)])
        self.counts: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.sums, self.numbers = np.zeros((n_species, self.size)), np.zeros(n_species)

    @property
    def is_wanted(self) -> bool:
        """Whether anything is made of the labels; nothing is added to dipoles."""
        result: bool = self.fitting.type != "dipole"
        return result

    def add(self, batch: Mapping[str, Tensor]) -> None:
        if not self.is_wanted:
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
            return  # refused soon, with the shape that is expected
        has = ~np.isnan(values).any(1)
        self.counts.append((counts.view(n_frames, self.n).double().numpy() * self.seen)[has])
        self.values.append(values[has])

    def result(self) -> dict[str, Any]:
        if not self.is_wanted:
            return {}
        of_frames = self._of_frames()
        bias = np.full((self.n, self.size), np.nan) if of_frames is None else of_frames[0]
        has = self.numbers > 0
        bias = np.where(has[:, None], self.sums / np.maximum(self.numbers, 1)[:, None], bias)
        if of_frames is None and not has.any():
            return {}
        bias = np.nan_to_num(bias)
        if self.fitting.type == "polar":
            return {"out_bias": (bias.reshape(-1, 3, 3).trace(axis1=1, axis2=2) / 3).tolist()}
        found = {"out_bias": bias.tolist()}
        if self.fitting.type == "property" and of_frames is not None:
            found["out_std"] = np.repeat(of_frames[1][None], self.n, axis=0).tolist()
        return found

    def _of_frames(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(n_species, size) and (size,): by composition, or of all species alike."""
        if not sum(map(len, self.values)):
            return None
        counts, values = np.concatenate(self.counts), np.concatenate(self.values)
        if self.fitting.type == "property" and not self.fitting.distinguish_types:
            values = values if self.intensive else values / counts.sum(1, keepdims=True)
            mean, deviation = values.mean(0), values.std(0)
            return np.repeat(mean[None], self.n, axis=0), self._spread(deviation, values)
        counts = counts / counts.sum(1, keepdims=True) if self.intensive else counts
        bias = np.linalg.lstsq(counts, values, rcond=getattr(self.fitting, "rcond", None))[0]
        deviation = (values - counts @ bias).std(0)
        return bias, self._spread(deviation, values) if self.fitting.type == "property" else deviation

    def _spread(self, deviation: np.ndarray, values: np.ndarray) -> np.ndarray:
        """The deviation, which must not vanish."""
        if self.fitting.out_std is None and not (deviation > ROUNDING * np.abs(values).max(0)).all():
            raise ForgefieldError(
                f"model.fitting_net.out_std: the composition says all of {self.name} in the training data, so its scale would "
                "be zero and there is nothing to learn; check the label, or give out_bias and out_std"
                + (", or distinguish_types: false." if self.fitting.distinguish_types else ".")
            )
        return deviation


LEAST_DEVIATION = 1e-2
"""Deviations are at least this; DeePMD-kit calls it the protection."""
UNSEEN_DEVIATION = 1e-1
"""Of species that the data does not have."""


class Moments:
    """Sums that mean and deviation of several columns are made of."""

    def __init__(self, columns: int) -> None:
        self.number, self.sum, self.squares = (np.zeros(columns) for _ in range(3))

    def add(self, number: Any, values: Any, squares: Any) -> None:
        self.number += number
        self.sum += values
        self.squares += squares

    @property
    def mean(self) -> np.ndarray:
        return self.sum / np.maximum(self.number, 1)

    @property
    def deviation(self) -> np.ndarray:
        number = np.maximum(self.number, 1)
        found = np.sqrt(np.clip(self.squares / number - (self.sum / number) ** 2, 0, None))
        return np.where(self.number > 0, np.maximum(found, LEAST_DEVIATION), UNSEEN_DEVIATION)


def environment_statistics(
    model: Mapping[str, Any], batches: Iterable[Mapping[str, Tensor]], *, species: Sequence[str], cutoff: float
) -> dict[str, Any]:
    """Numbers that resolved options need: davg, dstd, mean_neighbours, max_neighbours, out_bias, fparam_avg, ...

    model: the `model` section. batches: of training data, with edges. The result is JSON-able; `DeepPot.complete` looks for it
    under the key `environment` of its statistics.
    """
    options = DeepPotOptions(**{key: value for key, value in model.items() if key != "name"})
    _, descriptor = descriptor_part(options.descriptor)
    kind, fitting = fitting_part(options.fitting_net)
    rows = RowStatistics(options, descriptor, len(species), cutoff)
    names = sorted(options.branches)
    outputs = _output_statistics(kind, fitting, options, len(species))
    of_branches = {name: EnergyFit(len(species), fitting, place) for place, name in enumerate(names)}
    parameters = {name: ParameterStatistics(name, fitting) for name in ("fparam", "aparam")}
    for batch in batches:
        rows.add(batch)
        for fit in (outputs, *of_branches.values()):
            fit.add(batch)
        for part in parameters.values():
            part.add(batch)
    found = rows.result() | outputs.result()
    if of_branches:
        found["branches"] = {name: fit.result() for name, fit in of_branches.items()}
    for part in parameters.values():
        found |= part.result()
    return found


def _output_statistics(kind: Any, fitting: Any, options: DeepPotOptions, n_species: int) -> EnergyFit | OutputFit:
    if not issubclass(kind, TensorFitting):
        return EnergyFit(n_species, fitting)
    return OutputFit(kind, fitting, n_species, unseen_species(options.atom_exclude_types, fitting, n_species))


class RowStatistics:
    """Mean and deviation of the rows around atoms of each species."""

    def __init__(self, options: DeepPotOptions, descriptor: Any, n_species: int, cutoff: float) -> None:
        self.options, self.cutoff, self.n = descriptor, cutoff, n_species
        sel = descriptor.sel
        self.places = sum(sel) if isinstance(sel, list) else sel if isinstance(sel, int) else None
        self.columns = 1 if descriptor.type == "se_e2_r" else 4
        self.radial, self.angular = Moments(n_species), Moments(n_species)
        present = torch.tensor(excluded_kinds(options.pair_exclude_types, n_species), dtype=torch.float64)
        self.present = present
        self.seen = present * torch.tensor(excluded_kinds(descriptor.exclude_types, n_species), dtype=torch.float64)
        self.most, self.atoms, self.neighbours = np.zeros(n_species, dtype=int), 0, 0.0

    def add(self, batch: Mapping[str, Tensor]) -> None:
        species, (source, centre) = batch["species"], batch["edge_index"]
        kinds = species[centre] * self.n + species[source]
        seen, present = self.seen[kinds], self.present[kinds]
        start, protection = self.options.rcut_smth, self.options.env_protection
        rows = environment_rows(edge_vectors(dict(batch)), start, self.cutoff, protection) * seen.unsqueeze(1)
        of_centre = species[centre]
        atoms = torch.bincount(species, minlength=self.n).double()
        number = atoms * self.places if self.places is not None else self._by_centre(seen, of_centre)
        self.radial.add(number.numpy(), *self._sums(rows[:, 0], of_centre))
        sums, squares = zip(*(self._sums(rows[:, axis], of_centre) for axis in (1, 2, 3)))
        self.angular.add(3 * number.numpy(), sum(sums), sum(squares))
        counts = torch.zeros(len(species) * self.n, dtype=torch.float64)
        counts.index_add_(0, centre * self.n + species[source], present)
        self.most = np.maximum(self.most, counts.view(-1, self.n).amax(0).int().numpy())
        self.atoms += len(species)
        self.neighbours += float(seen.sum())

    def _by_centre(self, values: Tensor, centre: Tensor) -> Tensor:
        return torch.zeros(self.n, dtype=torch.float64).index_add_(0, centre, values)

    def _sums(self, values: Tensor, centre: Tensor) -> tuple[np.ndarray, np.ndarray]:
        return self._by_centre(values, centre).numpy(), self._by_centre(values.square(), centre).numpy()

    def result(self) -> dict[str, Any]:
        if not self.atoms:
            raise ForgefieldError("there is no training data to take the statistics of the descriptor from.")
        means, radial, angular = self.radial.mean, self.radial.deviation, self.angular.deviation
        return {
            "davg": [[float(mean), 0.0, 0.0, 0.0][: self.columns] for mean in means],
            "dstd": [[float(r), *[float(a)] * 3][: self.columns] for r, a in zip(radial, angular)],
            "mean_neighbours": self.neighbours / self.atoms,
            "max_neighbours": [int(number) for number in self.most],
        }


class EnergyFit:
    """Energies of species by least squares of total energies, as DeePMD-kit makes them."""

    def __init__(self, n_species: int, fitting: Any, branch: int | None = None) -> None:
        """branch: only frames of this one count."""
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
        given = getattr(self.fitting, "atom_ener", None) or [None] * self.n
        known = np.array([energy is not None for energy in given])
        fixed = np.array([0.0 if energy is None else energy for energy in given])
        rest = energies - counts @ fixed
        solution = np.linalg.lstsq(counts * ~known, rest, rcond=getattr(self.fitting, "rcond", None))[0]
        return {"out_bias": [float(value) for value in np.where(known, fixed, solution)]}


class ParameterStatistics:
    """Mean and deviation of the parameters of frames or atoms."""

    def __init__(self, name: str, fitting: Any) -> None:
        self.name, self.count = name, int(getattr(fitting, f"numb_{name}", 0))
        self.default = getattr(fitting, "default_fparam", None) if name == "fparam" else None
        self.moments = Moments(self.count)

    def add(self, batch: Mapping[str, Tensor]) -> None:
        if not self.count:
            return
        values = batch.get(self.name)
        if values is None:
            if self.default is not None:
                return
            raise ForgefieldError(
                f"model.fitting_net.numb_{self.name} is {self.count}, but the data carries no field {self.name}; "
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
                f"model.fitting_net.numb_{self.name} is {self.count}, but a training frame carries no {self.name}."
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

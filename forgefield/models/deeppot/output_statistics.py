"""What the labels of training data say of a fitting network's outputs, beside energies: what is added to them, and their scale.

As DeePMD-kit takes them: mean of each species where atoms are labelled; else by least squares of frames' values on
compositions, or, where species are not told apart, mean and deviation of the values themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.tensor_fitting import TensorFitting

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
        return self.fitting.type != "dipole"

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

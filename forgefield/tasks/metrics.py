"""Errors in physical units, counted once per label: mean absolute, root mean square and, on request, the largest.

The accumulators are sums on the device; nothing is read back until `compute`. They do not depend on losses, loss weights or
normalisation, so a metric means the same whatever is minimised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from forgefield.models.edges import volumes
from forgefield.physics.units import EV_PER_A3_TO_GPA
from forgefield.tasks.classes import class_metrics, class_sums
from forgefield.tasks.options import quantity
from forgefield.tasks.units import CLASS_METRICS

SUMS = 3
"""Columns of the accumulators that are sums. The next one, if there is one, is the largest |error|."""
_FACTORS = {"energy": 1000.0, "energy_total": 1000.0, "forces": 1000.0, "stress": EV_PER_A3_TO_GPA, "virial": 1000.0}


class ErrorMetrics:
    """Sums of |error|, error^2 and counts for each target, and for forces also by species.

    targets: names of targets: energy, forces, stress, virial, or fields.
    species: symbols, in the order of the batch's indices.
    classes: labels of the classes of classified targets, whose sums are described in `classes.py`.
    extensive: targets of frames that are also measured per atom, as `NAME_per_atom`.
    branches: of the model; a target `water.energy` is measured on frames of the branch water.
    uncounted: for targets, indices of species whose atoms do not count, as excluded ones in DeePMD-kit 3.2.
    maxima: whether the largest |error| is kept as well.
    """

    def __init__(
        self,
        targets: tuple[str, ...],
        species: tuple[str, ...],
        device: torch.device | str = "cpu",
        *,
        classes: Mapping[str, Sequence[float]] | None = None,
        extensive: Sequence[str] = (),
        branches: Sequence[str] = (),
        uncounted: Mapping[str, Sequence[int]] | None = None,
        maxima: bool = False,
    ) -> None:
        self.targets = targets
        self.branches = tuple(branches)
        self.extensive = frozenset(extensive)
        self.uncounted = {name: tuple(indices) for name, indices in (uncounted or {}).items() if indices}
        self.species = species
        self.classes = dict(classes or {})
        self._values: dict[tuple[str, torch.device], Tensor] = {}
        self.rows: list[str] = []
        for target in targets:
            self.rows.append(target)
            if quantity(target) == "energy":
                self.rows.append(f"{target}_total")
            if target in self.extensive:
                self.rows.append(f"{target}_per_atom")
            if quantity(target) == "forces":
                self.rows.extend(f"{target}/{symbol}" for symbol in species)
            self.rows.extend(f"{target}/{value:g}" for value in self.classes.get(target, ()))
        self.maxima = maxima
        self.sums = torch.zeros(len(self.rows), SUMS + maxima, dtype=torch.float64, device=device)

    def update(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> None:
        self.add(self.measure(outputs, batch))

    @torch.no_grad()
    def add(self, measured: Tensor) -> None:
        """Add the result of `measure`, from this process or another. The sums before stay as they are, where they are kept."""
        self.sums = merged(self.sums.to(measured.device), measured)

    @torch.no_grad()
    def measure(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        """(n_rows, 3 or 4): the contribution of one batch to `sums`."""
        rows: list[Tensor] = []
        moments = _moments_and_maximum if self.maxima else _moments
        for name in self.targets:
            target = quantity(name)
            label = "stress" if target == "virial" else target
            if target in self.classes:
                values = self._values_on(target, batch[label].device)
                sums = class_sums(outputs[label].detach(), batch[label], values)
                rows += [torch.cat([row, row.new_zeros(1)]) for row in sums] if self.maxima else sums
                continue
            error = self._of_branch(name, _errors(outputs[label].detach(), batch[label]), batch)
            uncounted = self.uncounted.get(name, ())
            if target == "energy":
                rows += [moments(error / counted_atoms(batch, uncounted)), moments(error)]
            elif target == "forces":
                for index in uncounted:
                    error = torch.where((batch["species"] == index).unsqueeze(1), float("nan"), error)
                by_species = _moments_by(error, batch["species"], len(self.species))
                total = by_species.sum(0)
                if self.maxima:
                    largest = _largest_by(error, batch["species"], len(self.species))
                    by_species = torch.cat([by_species, largest.unsqueeze(1)], dim=1)
                    total = torch.cat([total, largest.max().unsqueeze(0)])
                rows += [total, *by_species]
            elif target == "virial":
                rows.append(moments(error * (volumes(batch["cell"]) / counted_atoms(batch, uncounted)).view(-1, 1, 1)))
            else:
                rows.append(moments(error))
                if target in self.extensive:
                    n_atoms = counted_atoms(batch, uncounted)
                    rows.append(moments(error / n_atoms.view(-1, *[1] * (error.dim() - 1))))
        return torch.stack(rows)

    def _of_branch(self, name: str, error: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """The error for frames of the target's branch; NaN, as without a label, for others."""
        branch, dot, _ = name.partition(".")
        if not dot:
            return error
        counts = batch["branch"] == self.branches.index(branch)
        counts = counts.index_select(0, batch["frame"]) if quantity(name) == "forces" else counts
        return torch.where(counts.view(-1, *[1] * (error.dim() - 1)), error, float("nan"))

    def _values_on(self, target: str, device: torch.device) -> Tensor:
        """Labels of the classes, copied to a device once: a copy makes the host wait."""
        if (target, device) not in self._values:
            self._values[target, device] = torch.tensor(self.classes[target], dtype=torch.float64, device=device)
        return self._values[target, device]

    def compute(self, sums: Tensor | None = None) -> dict[str, float]:
        """Metrics of targets with labels, in the units of `UNITS`. Only this method reads from the device.

        sums: summed over several processes; default: those of this object.
        """
        values: dict[str, float] = {}
        numbers = (self.sums if sums is None else sums).tolist()
        for index, (row, (absolute, square, count, *largest)) in enumerate(zip(self.rows, numbers)):
            name, _, symbol = row.partition("/")
            if count == 0 or (symbol and name in self.classes):
                continue
            if name in self.classes:
                metrics = class_metrics([row[:SUMS] for row in numbers][index : index + 1 + len(self.classes[name])])
                values |= {f"{name}_{kind}": value for kind, value in metrics.items()}
                continue
            factor, suffix = _FACTORS.get(quantity(name), 1.0), f"/{symbol}" if symbol else ""
            values[f"{name}_mae{suffix}"] = factor * absolute / count
            values[f"{name}_rmse{suffix}"] = factor * (square / count) ** 0.5
            values |= {f"{name}_max{suffix}": factor * value for value in largest}
        return values

    def names(self) -> list[str]:
        """Names of all metrics that `compute` may return, in order."""
        result = []
        for row in self.rows:
            name, _, symbol = row.partition("/")
            suffix = f"/{symbol}" if symbol else ""
            if name in self.classes:
                result += [] if symbol else [f"{name}_{kind}" for kind in CLASS_METRICS]
                continue
            result += [f"{name}_mae{suffix}", f"{name}_rmse{suffix}", *([f"{name}_max{suffix}"] if self.maxima else [])]
        return result

    def reset(self) -> None:
        self.sums = torch.zeros_like(self.sums)


def merged(first: Tensor, second: Tensor) -> Tensor:
    """(n_rows, n_columns): the accumulators of two sets of labels together."""
    if first.shape[1] == SUMS:
        return first + second
    return torch.cat([(first + second)[:, :SUMS], torch.maximum(first[:, SUMS:], second[:, SUMS:])], dim=1)


def counted_atoms(batch: Mapping[str, Tensor], uncounted: Sequence[int]) -> Tensor:
    """(n_frames,): atoms of each frame that are not of these species; at least 1."""
    n_atoms, species = batch["n_atoms"], batch["species"]
    if not uncounted:
        return n_atoms
    frame = batch.get("frame")
    if frame is None:
        frame = torch.repeat_interleave(n_atoms, output_size=species.shape[0])
    counts = torch.ones_like(species, dtype=torch.float64)
    for index in uncounted:
        counts = torch.where(species == index, 0.0, counts)
    totals = torch.zeros_like(n_atoms, dtype=torch.float64).index_add(0, frame, counts)
    return totals.clamp(min=1)


def _errors(predicted: Tensor, labels: Tensor) -> Tensor:
    """NaN where there is no label; infinite, not missing, where the prediction is NaN."""
    return torch.where(predicted.isnan(), float("inf"), predicted) - labels


def _moments(error: Tensor) -> Tensor:
    """(3,): sum |e|, sum e^2 and count over the elements that are labelled."""
    labelled = ~error.isnan()
    error = torch.where(labelled, error, 0.0)
    return torch.stack([error.abs().sum(), error.square().sum(), labelled.sum().to(error.dtype)])


def _moments_and_maximum(error: Tensor) -> Tensor:
    """(4,): the same and the largest |e|, 0 without labels."""
    return torch.cat([_moments(error), _labelled(error).amax().unsqueeze(0)])


def _labelled(error: Tensor) -> Tensor:
    """(n + 1,): |e|, 0 where there is no label and in the additional last element."""
    return torch.nn.functional.pad(torch.where(error.isnan(), 0.0, error.abs()).flatten(), (0, 1))


def _largest_by(error: Tensor, group: Tensor, n_groups: int) -> Tensor:
    """(n_groups,): the largest |e| of each group of rows."""
    rows = torch.where(error.isnan(), 0.0, error.abs())
    members = torch.arange(n_groups, device=group.device).view(-1, 1, 1) == group.view(1, -1, 1)
    return torch.stack([_labelled(torch.where(member, rows, 0.0)).amax() for member in members])


def _moments_by(error: Tensor, group: Tensor, n_groups: int) -> Tensor:
    """(n_groups, 3): the same for each group of rows."""
    labelled = ~error.isnan()
    error = torch.where(labelled, error, 0.0)
    rows = torch.stack([error.abs().sum(1), error.square().sum(1), labelled.sum(1).to(error.dtype)], dim=1)
    # A product with one-hot columns has a fixed order of summation also on a GPU, in contrast to an indexed add.
    one_hot = torch.nn.functional.one_hot(group, n_groups).to(rows.dtype)
    return one_hot.T @ rows

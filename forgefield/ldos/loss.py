"""The loss of trainings on grid points: errors of the scaled target at each point, and terms for complete snapshots.

The error of a point is that of the scaled target, as in MALA: the loss does not depend on units. Errors are accumulated for
each level, so that level weights, epochs and ranks are arithmetic on sums, and the error in physical units is the same sum
times the scale of its level. Terms for complete snapshots depend on the summed LDOS; see `SnapshotTerms`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.ldos.electronic.energy_grid import EnergyGrid
from forgefield.ldos.electronic.fermi import band_energy, electron_number, fermi_energy
from forgefield.ldos.options import PointTargetOptions, SnapshotTermOptions

TERMS = ("dos", "electrons", "band_energy")
UNITS = {"ldos": "1/(eV A^3)", "density": "1/A^3"}
"""Units of the errors of each target."""


@dataclass(frozen=True)
class PointLoss:
    """kind: mse, mae or huber. delta: of the Huber loss. levels: (n_levels,) float64, weights of the levels."""

    kind: str
    delta: float
    levels: Tensor

    def errors(self, difference: Tensor) -> Tensor:
        """The loss of each element."""
        if self.kind == "mse":
            return difference.square()
        if self.kind == "mae":
            return difference.abs()
        size = difference.abs()
        return torch.where(size < self.delta, 0.5 * difference.square(), self.delta * (size - 0.5 * self.delta))

    def slopes(self, difference: Tensor) -> Tensor:
        """Derivatives of `errors`."""
        if self.kind == "mse":
            return 2.0 * difference
        return difference.sign() if self.kind == "mae" else difference.clamp(-self.delta, self.delta)


class PointTask:
    """target: ldos or density. options: of the target; None: only terms are trained. terms: options of terms for snapshots, by
    name. n_levels: columns of the target."""

    def __init__(
        self,
        target: str,
        options: PointTargetOptions | None,
        terms: dict[str, SnapshotTermOptions],
        n_levels: int,
    ) -> None:
        self.target = target
        self.weight = 0.0 if options is None else float(options.weight)
        self.terms = {name: terms[name] for name in TERMS if name in terms and terms[name].weight > 0}
        if self.weight == 0 and not self.terms:
            raise ForgefieldError("task: every weight is zero, so nothing would be trained.")
        self.names = (target, *self.terms)
        self.n_levels = n_levels
        weights = None if options is None else options.level_weights
        if weights is not None and len(weights) != n_levels:
            raise ForgefieldError(
                f"task.{target}.level_weights has {len(weights)} numbers, but the target has {n_levels} levels."
            )
        levels = torch.ones(n_levels) if weights is None else torch.tensor(list(weights))
        self.loss = PointLoss(
            "mse" if options is None else options.loss,
            1.0 if options is None else float(options.huber_delta),
            levels.to(torch.float64),
        )
        self._levels: dict[torch.device, Tensor] = {}
        self.weights = torch.tensor([self.weight, *(term.weight for term in self.terms.values())], dtype=torch.float64)

    def slope_factor(self, n_points: int) -> Tensor:
        """(n_levels,) float64: factors of `PointLoss.slopes` in a step of `n_points` points over all ranks."""
        return self.weight * self.loss.levels / (n_points * self.loss.levels.sum())

    def sums(self, by_level: Tensor, n_points: float) -> Tensor:
        """(2, n_terms): numerators and denominators of the loss. by_level: (n_levels,), summed errors of `n_points` points."""
        levels = self._levels_on(by_level.device)
        sums = torch.zeros(2, len(self.names), dtype=torch.float64, device=by_level.device)
        sums[0, 0], sums[1, 0] = (levels * by_level).sum(), n_points * levels.sum()
        return sums

    def _levels_on(self, device: torch.device) -> Tensor:
        """Weights of the levels, copied to a device once, because the host waits for such a copy."""
        if device not in self._levels:
            self._levels[device] = self.loss.levels.to(device)
        return self._levels[device]

    def term_sums(self, values: dict[str, Tensor]) -> Tensor:
        """(2, n_terms): contribution of one evaluation of terms for a snapshot."""
        device = next(iter(values.values())).device
        sums = torch.zeros(2, len(self.names), dtype=torch.float64, device=device)
        for name, value in values.items():
            sums[0, self.names.index(name)] = value.detach()
            sums[1, self.names.index(name)] = 1.0
        return sums

    def report(self, sums: Tensor, counts: Tensor) -> float:
        """The loss from summed numerators and denominators, (n_terms,) each."""
        weights = self.weights.to(sums.device)
        return float((weights * sums / torch.where(counts > 0, counts, 1.0)).sum())

    def due(self, step: int) -> list[str]:
        """Names of the terms for snapshots in an optimiser step, counted from 0."""
        return [name for name, term in self.terms.items() if step % term.every == 0]

    def describe(self) -> list[tuple[str, str]]:
        rows = []
        if self.weight:
            varied = bool((self.loss.levels != self.loss.levels[0]).any())
            text = (
                f"weight {self.weight:g}, {self.loss.kind} of the scaled target{', levels weighted' if varied else ''}"
            )
            rows.append((self.target, text))
        for name, term in self.terms.items():
            rows.append((name, f"weight {term.weight:g}, of a complete snapshot every {term.every} steps"))
        return rows


class PointErrors:
    """Errors of the target in physical units. scale: (n_levels,), physical units per scaled unit. metrics: mae, rmse or
    both."""

    def __init__(self, target: str, scale: Tensor, metrics: tuple[str, ...] = ("mae", "rmse")) -> None:
        self.target, self.scale, self.metrics = target, scale.detach().cpu().to(torch.float64), metrics
        self.sums = torch.zeros(3, len(self.scale), dtype=torch.float64)
        """Sums of |error| and error^2 of scaled targets, and number of points, for each level."""

    def names(self) -> list[str]:
        return [f"{self.target}_{kind}" for kind in self.metrics]

    @torch.no_grad()
    def add(self, measured: Tensor) -> None:
        self.sums = self.sums.to(measured.device) + measured

    @staticmethod
    def measure(difference: Tensor, weight: Tensor | None = None) -> Tensor:
        """(3, n_levels): contribution of differences of scaled targets (n, n_levels). weight: (n,), 0 or 1."""
        difference = difference.detach().to(torch.float64)
        difference = difference if weight is None else difference * weight[:, None]
        count = difference.new_full((difference.shape[1],), float(len(difference)))
        count = count if weight is None else weight.to(torch.float64).sum().expand_as(count)
        return torch.stack([difference.abs().sum(0), difference.square().sum(0), count])

    def of_loss(self, kind: str, by_level: Tensor, n_points: float) -> Tensor:
        """(3, n_levels): contribution of a training step, from the errors of its loss if they are those of a metric."""
        measured = torch.zeros(3, len(by_level), dtype=torch.float64, device=by_level.device)
        if kind in ("mse", "mae"):
            measured[1 if kind == "mse" else 0] = by_level
            measured[2] = n_points
        return measured

    def compute(self, sums: Tensor | None = None) -> dict[str, float]:
        absolute, square, count = (self.sums if sums is None else sums).cpu()
        n = float(count.sum())
        if n == 0:
            return {}
        errors = {
            "mae": float((self.scale * absolute).sum()) / n,
            "rmse": float((self.scale.square() * square).sum() / n) ** 0.5,
        }
        return {f"{self.target}_{kind}": errors[kind] for kind in self.metrics}

    def reset(self) -> None:
        self.sums = torch.zeros_like(self.sums)


def metrics_from_loss(kind: str) -> tuple[str, ...]:
    """Metrics that follow from the sums of a loss without additional work."""
    return {"mse": ("rmse",), "mae": ("mae",)}.get(kind, ())


@dataclass(frozen=True)
class SnapshotReference:
    """Observables of the targets of a snapshot. dos: (levels,) 1/eV. fermi: eV, self-consistent. band_energy: eV."""

    dos: Tensor
    fermi: float
    band_energy: float
    electrons: float
    temperature: float
    n_atoms: int
    voxel_volume: float


class SnapshotTerms:
    """Loss terms of a complete snapshot as differentiable functions of its DOS.

    dos: mean over levels of the squared error, per electron. electrons: squared relative error of their number at the Fermi
    energy of the targets. band_energy: squared error per atom, eV^2, at the self-consistent Fermi energy of the prediction.
    """

    def __init__(self, grid: EnergyGrid, task: PointTask) -> None:
        self.grid, self.task = grid, task

    def values(self, names: list[str], dos: Tensor, reference: SnapshotReference) -> dict[str, Tensor]:
        """Each term, (), without its weight. dos: (levels,) 1/eV, predicted."""
        values = {}
        if "dos" in names:
            values["dos"] = ((dos - reference.dos.to(dos.device)) / reference.electrons).square().mean()
        if "electrons" in names:
            number = electron_number(dos, self.grid, reference.temperature, reference.fermi)
            values["electrons"] = ((number - reference.electrons) / reference.electrons).square()
        if "band_energy" in names:
            fermi = fermi_energy(dos, self.grid, reference.temperature, reference.electrons, checked=False)
            energy = band_energy(dos, self.grid, reference.temperature, fermi)
            values["band_energy"] = ((energy - reference.band_energy) / reference.n_atoms).square()
        return values

    def gradient(self, names: list[str], dos: Tensor, reference: SnapshotReference) -> tuple[dict[str, Tensor], Tensor]:
        """The terms, and the derivative of their weighted sum by the DOS, (levels,)."""
        with torch.enable_grad():
            leaf = dos.detach().to(torch.float64).requires_grad_(True)
            values = self.values(names, leaf, reference)
            total = torch.stack([self.task.terms[name].weight * value for name, value in values.items()]).sum()
            (slope,) = torch.autograd.grad(total, leaf)
        return values, slope

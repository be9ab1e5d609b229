"""Observables of whole snapshots during a training and after it: who has which points, what the targets give, what is missing.

Every rank predicts its stretch of the points of each snapshot; sums over ranks make the same numbers on all of them, for any
number of ranks. What the targets give is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.ldos.data import PointTable
from forgefield.ldos.data.units import LDOS_UNITS
from forgefield.ldos.electronic.density_energies import DensityEnergies
from forgefield.ldos.electronic.upf import read_upf
from forgefield.ldos.loss import PointTask, SnapshotReference, SnapshotTerms
from forgefield.ldos.model import LDOSNetwork
from forgefield.ldos.observables import Observables, Observer, SnapshotFacts, mean_absolute, snapshot_reference
from forgefield.ldos.training.data import KeptRows, SnapshotRows, stretch_of
from forgefield.ldos.training.gradient import Written
from forgefield.parallel.ranks import Ranks

NEEDED = {
    "band_energy": ("temperature", "electrons", "voxel_volume", "n_atoms"),
    "total_energy": ("temperature", "electrons", "voxel_volume", "n_atoms", "cell", "positions"),
    "fermi_energy": ("temperature", "electrons", "voxel_volume"),
    "density": ("temperature", "electrons", "voxel_volume"),
    "dos": ("temperature", "electrons", "voxel_volume"),
    "electrons": ("temperature", "electrons", "voxel_volume"),
}
"""What each observable has to know of a snapshot."""


class SnapshotMeasure:
    """Observables `metrics` of the snapshots of a table. fermi: self_consistent or given. pseudopotentials: folder of UPF
    files, or None: beside the snapshots. remember: keep inputs in memory where rows are not kept anyway."""

    def __init__(
        self,
        table: PointTable,
        model: LDOSNetwork,
        metrics: Sequence[str],
        fermi: str,
        ranks: Ranks,
        *,
        kept: KeptRows | None = None,
        pseudopotentials: str | None = None,
        remember: bool = False,
    ) -> None:
        if model.energies is None:
            raise ForgefieldError("observables follow from an LDOS, and this model predicts a density.")
        self.table, self.model, self.ranks = table, model, ranks
        self.rows = SnapshotRows(table, model, kept, remember=remember)
        self.observer = Observer(model.energies, metrics, fermi, self._total)
        self.facts = [self._facts(snapshot, pseudopotentials) for snapshot in table.snapshots]
        self._references: dict[int, Observables] = {}

    def _total(self, tensor: Tensor) -> Tensor:
        return self.ranks.all_reduce(tensor)

    def _facts(self, snapshot: Any, folder: str | None) -> SnapshotFacts:
        info, metrics = snapshot.info, self.observer.metrics
        for name in metrics:
            wanted = NEEDED[name] + (("fermi_energy",) if self.observer.fermi == "given" else ())
            info.require(*wanted, why=f"{name} of snapshot {snapshot.name}")
        needs_density = "total_energy" in metrics
        return SnapshotFacts(
            name=snapshot.name,
            temperature=float(info.temperature),
            electrons=float(info.electrons),
            n_atoms=int(info.n_atoms or 1),
            voxel_volume=float(info.voxel_volume),
            n_points=snapshot.n_points,
            stretch=stretch_of(snapshot.n_points, self.ranks.rank, self.ranks.world_size),
            given_fermi=info.fermi_energy,
            density_energies=(lambda: density_energies(snapshot, folder)) if needs_density else None,
            dft=dict(info.energies),
            unit=min(LDOS_UNITS, key=lambda unit: abs(LDOS_UNITS[unit] - snapshot.factor)),
        )

    def reference(self, number: int) -> Observables:
        """Of the targets of a snapshot; their unit and energies are checked on the way."""
        if number not in self._references:
            facts = self.facts[number]
            self._references[number] = self.observer.observe(
                lambda: self.rows.targets(number, *facts.stretch), facts, of_reference=True
            )
        return self._references[number]

    @torch.no_grad()
    def predicted(self, number: int) -> Observables:
        """Of what the model, as it is, predicts for a snapshot."""
        facts, model = self.facts[number], self.model

        def ldos() -> Any:
            for inputs in self.rows.inputs(number, *facts.stretch):
                outputs = model.network(inputs).to(torch.float64)
                yield outputs * model.output_scale + model.output_shift

        return self.observer.observe(ldos, facts)

    def errors(self) -> list[dict[str, float]]:
        """Of each snapshot, signed, in the units of `OBSERVABLE_UNITS`."""
        return [
            self.observer.errors(self.predicted(number).cpu(), self.reference(number), facts)
            for number, facts in enumerate(self.facts)
        ]

    def values(self) -> dict[str, float]:
        """`NAME_mae` of every metric, over all snapshots."""
        return mean_absolute(self.errors())


def density_energies(snapshot: Any, folder: str | None) -> DensityEnergies:
    """What a density of this snapshot has of Hartree, exchange-correlation and Ewald energy."""
    info = snapshot.info
    beside = snapshot.inputs.path.parent if snapshot.inputs is not None else snapshot.targets.path.parent
    place = Path(folder) if folder is not None else beside
    if not info.pseudopotentials:
        raise ForgefieldError(
            f"{info.source} does not name the pseudopotentials, which total_energy of snapshot {snapshot.name} needs."
        )
    files = {symbol: place / name for symbol, name in info.pseudopotentials.items()}
    for symbol, path in files.items():
        if not path.is_file():
            raise ForgefieldError(
                f"total_energy needs the pseudopotential of {symbol}, {path}, which is not there; say where with "
                "data.points.pseudopotentials."
            )
    return DensityEnergies(
        torch.as_tensor(info.cell),
        torch.as_tensor(info.positions),
        info.numbers.tolist(),
        {symbol: read_upf(path) for symbol, path in files.items()},
        snapshot.grid_shape,
        info.ecutrho,
        electrons=info.electrons,
    )


class TermGradient:
    """Adds the gradient of terms to that of a batch. measure: knows the training snapshots and what their targets give."""

    def __init__(self, model: LDOSNetwork, task: PointTask, measure: SnapshotMeasure, ranks: Ranks) -> None:
        assert model.energies is not None
        self.model, self.task, self.measure, self.ranks = model, task, measure, ranks
        self.terms = SnapshotTerms(model.energies, task)
        self._aside = Written(model, task.loss)
        self._references: dict[int, SnapshotReference] = {}

    def add_to(self, gradients: list[Tensor], names: list[str], step: int) -> Tensor:
        """Add to gradients that ranks will average; returns (2, n_terms), what the terms add to the sums of the loss (on the
        first rank: they are the same on all)."""
        values: dict[str, Tensor] = {}
        for number, together in self._snapshots(names, step).items():
            slope, found = self._slope(number, together, self._reference(number))
            values |= found
            for inputs in self.measure.rows.inputs(number, *self.measure.facts[number].stretch):
                self._aside.pull_back(inputs, slope)
                torch._foreach_add_(gradients, self._aside.gradients)
        sums = self.task.term_sums(values)
        return sums if self.ranks.is_rank_zero else torch.zeros_like(sums)

    def _snapshots(self, names: list[str], step: int) -> dict[int, list[str]]:
        """Terms by the snapshot whose turn it is: each term goes through all of them, however often it comes."""
        turns: dict[int, list[str]] = {}
        for name in names:
            number = (step // self.task.terms[name].every) % len(self.measure.facts)
            turns.setdefault(number, []).append(name)
        return turns

    def _reference(self, number: int) -> SnapshotReference:
        if number not in self._references:
            facts = self.measure.facts[number]
            self._references[number] = snapshot_reference(self.measure.reference(number), facts)
        return self._references[number]

    @torch.no_grad()
    def _slope(self, number: int, names: list[str], of: SnapshotReference) -> tuple[Tensor, dict[str, Tensor]]:
        """Derivative of the terms by each scaled output, (levels,), times the number of ranks; and the terms."""
        model, facts = self.model, self.measure.facts[number]
        sums = torch.zeros_like(model.output_scale)
        for inputs in self.measure.rows.inputs(number, *facts.stretch):
            sums = sums + model.network(inputs).to(torch.float64).sum(0)
        dos = (
            self.ranks.all_reduce(sums) * model.output_scale + facts.n_points * model.output_shift
        ) * facts.voxel_volume
        values, by_dos = self.terms.gradient(names, dos, of)
        slope = by_dos * model.output_scale * facts.voxel_volume * self.ranks.world_size
        return slope.to(model.dtype), values

"""Observables of complete snapshots during and after a training, and gradients of loss terms for them.

Every rank predicts its share of the points of each snapshot; after sums over ranks all have the same numbers, for any number of
ranks. Observables of the targets are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.ldos.data import PointTable, Snapshot
from forgefield.ldos.data.units import LDOS_UNITS
from forgefield.ldos.electronic.density_energies import DensityEnergies
from forgefield.ldos.electronic.upf import read_upf
from forgefield.ldos.loss import PointTask, SnapshotReference, SnapshotTerms
from forgefield.ldos.model import LDOSNetwork
from forgefield.ldos.observables import Observables, Observer, SnapshotFacts, mean_absolute, snapshot_reference
from forgefield.ldos.training.data import ResidentRows, SnapshotRows, rank_range
from forgefield.ldos.training.gradient import ManualGradient
from forgefield.parallel.ranks import Ranks

NEEDED = {
    "band_energy": ("temperature", "electrons", "voxel_volume", "n_atoms"),
    "band_energy_actual_fe": ("temperature", "electrons", "voxel_volume", "n_atoms"),
    "total_energy": ("temperature", "electrons", "voxel_volume", "n_atoms", "cell", "positions"),
    "total_energy_actual_fe": ("temperature", "electrons", "voxel_volume", "n_atoms", "cell", "positions"),
    "fermi_energy": ("temperature", "electrons", "voxel_volume"),
    "density": ("temperature", "electrons", "voxel_volume"),
    "dos": ("temperature", "electrons", "voxel_volume"),
    "electrons": ("temperature", "electrons", "voxel_volume"),
}
"""Metadata of a snapshot that each observable needs."""


class SnapshotMeasure:
    """Observables `metrics` of the snapshots of a table.

    fermi: self_consistent or given. resident: rows of the table in memory, if any. pseudopotentials: folder of UPF files;
    default: next to the snapshots. remember: cache inputs in memory if there are no resident rows. negative: treatment of
    negative predictions.
    """

    def __init__(
        self,
        table: PointTable,
        model: LDOSNetwork,
        metrics: Sequence[str],
        fermi: str,
        ranks: Ranks,
        *,
        resident: ResidentRows | None = None,
        pseudopotentials: str | None = None,
        remember: bool = False,
        negative: Callable[[Tensor], Tensor] = lambda ldos: ldos,
    ) -> None:
        if model.energies is None:
            raise ForgefieldError("observables follow from an LDOS, and this model predicts a density.")
        self.table, self.model, self.ranks, self.negative = table, model, ranks, negative
        self.rows = SnapshotRows(table, model, resident, remember=remember)
        self.observer = Observer(model.energies, metrics, fermi, self._total)
        self.facts = [self._facts(snapshot, pseudopotentials) for snapshot in table.snapshots]
        self._references: dict[int, Observables] = {}

    def _total(self, tensor: Tensor) -> Tensor:
        return self.ranks.all_reduce(tensor)

    def _facts(self, snapshot: Snapshot, folder: str | None) -> SnapshotFacts:
        info, metrics = snapshot.info, self.observer.metrics
        for name in metrics:
            needed = NEEDED[name] + (("fermi_energy",) if self.observer.fermi == "given" else ())
            info.require(*needed, why=f"{name} of snapshot {snapshot.name}")
        assert info.temperature is not None
        assert info.electrons is not None
        assert info.voxel_volume is not None
        return SnapshotFacts(
            name=snapshot.name,
            temperature=float(info.temperature),
            electrons=float(info.electrons),
            n_atoms=int(info.n_atoms or 1),
            voxel_volume=float(info.voxel_volume),
            n_points=snapshot.n_points,
            point_range=rank_range(snapshot.n_points, self.ranks.rank, self.ranks.world_size),
            dft_fermi_energy=info.fermi_energy,
            density_energies=(lambda: density_energies(snapshot, folder)) if self.observer.needs_total else None,
            dft=dict(info.energies),
            unit=min(LDOS_UNITS, key=lambda unit: abs(LDOS_UNITS[unit] - snapshot.factor)),
        )

    def reference(self, number: int) -> Observables:
        """Observables of the targets of a snapshot; their unit and energies are checked."""
        if number not in self._references:
            facts = self.facts[number]
            self._references[number] = self.observer.observe(
                lambda: self.rows.targets(number, *facts.point_range), facts, of_reference=True
            )
        return self._references[number]

    @torch.no_grad()
    def predicted(self, number: int) -> Observables:
        """Observables of the LDOS that the model predicts for a snapshot."""
        facts, model = self.facts[number], self.model

        def ldos() -> Iterator[Tensor]:
            for inputs in self.rows.inputs(number, *facts.point_range):
                outputs = model.network(inputs).to(torch.float64)
                yield self.negative(outputs * model.output_scale + model.output_shift)

        with_reference = "total_energy_actual_fe" in self.observer.metrics
        return self.observer.observe(
            ldos, facts, reference_fermi=self.reference(number).fermi if with_reference else None
        )

    def errors(self) -> list[dict[str, float]]:
        """Signed errors of each snapshot, in the units of `OBSERVABLE_UNITS`."""
        return [
            self.observer.errors(self.predicted(number).cpu(), self.reference(number), facts)
            for number, facts in enumerate(self.facts)
        ]

    def values(self) -> dict[str, float]:
        """`NAME_mae` of every metric, over all snapshots."""
        return mean_absolute(self.errors())


def density_energies(snapshot: Snapshot, folder: str | None) -> DensityEnergies:
    """Hartree, exchange-correlation and Ewald energies of densities of a snapshot. folder: of the pseudopotentials."""
    info, source_folder = snapshot.info, snapshot.folder if folder is None else Path(folder)
    if not info.pseudopotentials:
        raise ForgefieldError(
            f"{info.source} does not name the pseudopotentials, which total_energy of snapshot {snapshot.name} needs."
        )
    files = {symbol: source_folder / name for symbol, name in info.pseudopotentials.items()}
    for symbol, path in files.items():
        if not path.is_file():
            raise ForgefieldError(
                f"total_energy needs the pseudopotential of {symbol}, {path}, which does not exist; set its folder with "
                "data.points.pseudopotentials."
            )
    assert info.numbers is not None
    assert snapshot.grid_shape is not None
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
    """Adds the gradient of loss terms for complete snapshots to that of a batch; exact for any number of ranks.

    Two passes over the points: the first sums the DOS, each rank for its share of the points, so that the derivative of the
    loss by the DOS is equal on all ranks; the second backpropagates that derivative to the weights, piece by piece. measure:
    observables of the training snapshots.
    """

    def __init__(self, model: LDOSNetwork, task: PointTask, measure: SnapshotMeasure, ranks: Ranks) -> None:
        assert model.energies is not None
        self.model, self.task, self.measure, self.ranks = model, task, measure, ranks
        self.terms = SnapshotTerms(model.energies, task)
        self._backward = ManualGradient(model, task.loss)
        self._references: dict[int, SnapshotReference] = {}

    def add_to(self, gradients: list[Tensor], names: list[str], step: int) -> Tensor:
        """Add to gradients that will be averaged over ranks. Returns (2, n_terms), the contribution of the terms to the sums
        of the loss (zero except on rank 0, because all ranks have the same)."""
        values: dict[str, Tensor] = {}
        for number, snapshot_terms in self._terms_by_snapshot(names, step).items():
            slope, term_values = self._output_slope(number, snapshot_terms, self._reference(number))
            values |= term_values
            for inputs in self.measure.rows.inputs(number, *self.measure.facts[number].point_range):
                self._backward.pull_back(inputs, slope)
                torch._foreach_add_(gradients, self._backward.gradients)
        sums = self.task.term_sums(values)
        return sums if self.ranks.is_rank_zero else torch.zeros_like(sums)

    def _terms_by_snapshot(self, names: list[str], step: int) -> dict[int, list[str]]:
        """Terms of this step by snapshot: each term cycles through all snapshots."""
        terms: dict[int, list[str]] = {}
        for name in names:
            number = (step // self.task.terms[name].every) % len(self.measure.facts)
            terms.setdefault(number, []).append(name)
        return terms

    def _reference(self, number: int) -> SnapshotReference:
        if number not in self._references:
            facts = self.measure.facts[number]
            self._references[number] = snapshot_reference(self.measure.reference(number), facts)
        return self._references[number]

    @torch.no_grad()
    def _output_slope(
        self, number: int, names: list[str], reference: SnapshotReference
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Derivative of the terms by each scaled output, (levels,), times the number of ranks; and the values of the terms."""
        model, facts = self.model, self.measure.facts[number]
        sums = torch.zeros_like(model.output_scale)
        for inputs in self.measure.rows.inputs(number, *facts.point_range):
            sums = sums + model.network(inputs).to(torch.float64).sum(0)
        dos = (
            self.ranks.all_reduce(sums) * model.output_scale + facts.n_points * model.output_shift
        ) * facts.voxel_volume
        values, by_dos = self.terms.gradient(names, dos, reference)
        slope = by_dos * model.output_scale * facts.voxel_volume * self.ranks.world_size
        return slope.to(model.dtype), values

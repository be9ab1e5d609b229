"""Statistics of the training data less the ZBL repulsion, for models that add it: what is left for network and shifts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgefield.data.batch import Batch
from forgefield.data.statistics.statistics import Statistics
from forgefield.models.edges import EdgeContext
from forgefield.models.options import TermOptions
from forgefield.models.potential import Potential
from forgefield.models.terms import SpeciesTerms


class ZBL(SpeciesTerms[TermOptions]):
    """The repulsion that the built-in models add, alone: (n_atoms,) eV.

    model: the `model` section; `zbl` and `per_edge_type_cutoff` are read.
    """

    def __init__(
        self, model: Mapping[str, Any], species: tuple[str, ...], cutoff: float, adaptive_cutoff: float | None
    ) -> None:
        options = SimpleNamespace(
            per_edge_type_cutoff=model.get("per_edge_type_cutoff"),
            avg_num_neighbours=1.0,
            energy_scales=1.0,
            energy_shifts=0.0,
            energy_scales_trainable=False,
            energy_shifts_trainable=False,
            zbl=model["zbl"],
        )
        super().__init__(options, species, cutoff, adaptive_cutoff)

    def forward(self, batch: Batch, edges: EdgeContext) -> Tensor:
        species, graph = batch["species"], edges.graph
        pairs = self.pair_lengths(edges.vectors, species, graph)
        return self.repelled(torch.zeros_like(species, dtype=torch.float64), pairs, species, graph)


def less_repulsion(batches: Iterator[Batch], repulsion: Potential) -> Iterator[Batch]:
    """The batches with energies and forces less the repulsion."""
    for batch in batches:
        added = repulsion.eval()(batch)
        yield batch | {name: batch[name] - added[name].detach() for name in ("energy", "forces")}


def statistics_without_repulsion(batches: Iterator[Batch], statistics: Statistics) -> dict[str, Any]:
    """Those of `Statistics` that depend on the repulsion, from batches less it: reference energies where they are a fit, spread
    of energies (eV/atom), root mean square of forces (eV/A)."""
    symbols = list(statistics.reference_energies)
    counts, energies, squares, components = [], [], 0.0, 0
    for batch in batches:
        n_frames, n_species = len(batch["n_atoms"]), len(symbols)
        table = torch.bincount(batch["frame"] * n_species + batch["species"], minlength=n_frames * n_species)
        counts.append(table.view(n_frames, n_species).double().numpy())
        energies.append(batch["energy"].numpy())
        forces = batch["forces"][~batch["forces"].isnan()]
        squares, components = squares + float(forces.square().sum()), components + forces.numel()
    changed: dict[str, Any] = {}
    composition, energy = np.concatenate(counts), np.concatenate(energies)
    composition, energy = composition[~np.isnan(energy)], energy[~np.isnan(energy)]
    if len(energy):
        n_atoms = composition.sum(axis=1)
        values = np.array([statistics.reference_energies[symbol] for symbol in symbols])
        if statistics.reference_kind == "fit":
            values = np.linalg.lstsq(composition / n_atoms[:, None], energy / n_atoms, rcond=None)[0]
            changed["reference_energies"] = dict(zip(symbols, values.tolist()))
        residuals = (energy - composition @ values) / n_atoms
        changed |= {"energy_residual_mean": float(residuals.mean()), "energy_residual_std": float(residuals.std())}
    if components:
        changed["forces_rms"] = (squares / components) ** 0.5
    return changed

"""From a config and its data to the options of a model in full: every number that comes from the data is made explicit.

Some models ask for more than the statistics of the data (`measure` of their class): one pass over the training frames, kept on
disk by a hash of all it depends on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgefield.config.trust import CONFIG
from forgefield.data.batch import Batch, BatchSpec, Noise, with_edges
from forgefield.data.dataset import GraphDataset
from forgefield.data.module import FrameData
from forgefield.data.neighbours.graph import same_graph
from forgefield.data.statistics import Statistics
from forgefield.errors import ForgefieldError
from forgefield.files import cache_folder, remove_leftovers, write_atomically
from forgefield.models.edges import EdgeContext
from forgefield.models.options import TermOptions
from forgefield.models.potential import Potential
from forgefield.models.registry import ARCHITECTURES
from forgefield.models.resolving import (
    branch_names,
    direct_outputs,
    excluded_species,
    extra_outputs_of,
    model_statistics,
    resolve_model,
)
from forgefield.models.terms import SpeciesTerms
from forgefield.settings import Config
from forgefield.tasks.options import DENOISE, TaskOptions, targets_of
from forgefield.tasks.targets import default_task, require_labels
from forgefield.tasks.task import Task
from forgefield.training.problem.heads import has_energy, head_specifications, output_units


class ZBL(SpeciesTerms[TermOptions]):
    """The repulsion that the built-in models add, alone: (n_atoms,) eV.

    model: the `model` section; `zbl` and `per_edge_type_cutoff` are read.
    """

    def __init__(
        self, model: Mapping[str, Any], species: tuple[str, ...], cutoff: float, adaptive_cutoff: float | None
    ) -> None:
        options = TermOptions(
            per_edge_type_cutoff=model.get("per_edge_type_cutoff"),
            avg_num_neighbours=1.0,
            energy_scales=1.0,
            energy_shifts=0.0,
            zbl=model["zbl"],
        )
        super().__init__(options, species, cutoff, adaptive_cutoff)

    def forward(self, batch: Batch, edges: EdgeContext) -> Tensor:
        species, graph = batch["species"], edges.graph
        pairs = self.pair_lengths(edges.vectors, species, graph)
        return self.add_repulsion(torch.zeros_like(species, dtype=torch.float64), pairs, species, graph)


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


EDGES_AT_ONCE = 2_000_000
MOST_FRAMES = 20_000
"""Of larger data sets so many frames are measured, evenly spread."""


def batch_spec(
    task: TaskOptions | Any, potential: Potential, *, seed: int, on_gpu: bool = False, keep_order: bool = False
) -> BatchSpec:
    """What batches must carry for this task and model. task: its options. keep_order: frames are not shuffled."""
    targets, noise = targets_of(task), None
    if DENOISE in targets:
        denoise, alone = targets[DENOISE], len(targets) == 1
        share = denoise.share if denoise.share is not None else 1.0 if alone or denoise.keep_labels else 0.5
        noise = Noise(denoise.sigma, int(seed), share=share, keep_labels=denoise.keep_labels, alone=alone)
    return BatchSpec(frozenset(targets), potential.needs_keys, noise, on_gpu, keep_order)


def resolved_model(config: Config, data: FrameData) -> dict[str, Any]:
    """Options of the config's model with everything explicit; see `models.registry.resolve_model`."""
    task, own = config.task, direct_outputs(config.model, trust=CONFIG)
    return resolve_model(
        config.model,
        species=data.species.symbols,
        cutoff=config.cutoff,
        adaptive_cutoff=config.data.adaptive_cutoff,
        max_neighbours=config.data.max_neighbours,
        statistics=asdict(data.statistics) | _without_repulsion(config, data) | _measured(config, data),
        heads={} if task is None or own else head_specifications(task, data),
        has_energy=task is None or has_energy(task),
        units=output_units(own, task, data) if own else None,
        trust=CONFIG,
    )


def requested_task(config: Config, data: FrameData) -> TaskOptions | Any:
    """The task of the config, or the default one for the labels of the data. The data has all labels that it needs."""
    options = config.task if config.task is not None else default_task(data.statistics.labels, data.label_hints)
    require_labels(targets_of(options), data.statistics.labels, "training", data.label_hints)
    return options


def build_task(options: TaskOptions | Any, resolved: Mapping[str, Any]) -> Task:
    """The task of a model with these resolved options."""
    species, outputs = tuple(resolved["species"]), extra_outputs_of(resolved)
    return Task(options, species, outputs, branch_names(resolved), excluded_species(resolved))


def _measured(config: Config, data: FrameData) -> dict[str, Any]:
    """What the model itself measures on the training data; nothing for most models."""
    species, cutoff, model = data.species.symbols, config.cutoff, config.model
    kept = _place(config, data) if config.data.cache else None
    try:
        if kept is not None:
            return json.loads(kept.read_text())
    except (OSError, ValueError):
        pass  # nothing is there, or it is damaged, which only costs measuring again
    rows = spread(len(data.train), MOST_FRAMES)
    found = model_statistics(
        model,
        lambda: _batches(config, data, rows),
        species=species,
        cutoff=cutoff,
        trust=CONFIG,
    )
    if found and kept is not None:
        with suppress(ForgefieldError, OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(kept.parent)
            write_atomically(kept, json.dumps(found))
    return found


def _repulsion(config: Config, data: FrameData) -> Potential | None:
    """The ZBL term that the config's model adds, if it does."""
    model = config.model
    if model.get("name") not in ARCHITECTURES or not model.get("zbl"):
        return None
    adaptive = config.data.adaptive_cutoff
    return Potential(ZBL(model, data.species.symbols, config.cutoff, adaptive))


def _batches(config: Config, data: FrameData, rows: np.ndarray) -> Iterator[Batch]:
    """Training frames with edges; energies and forces are what the model has to give besides its ZBL term."""
    batches = batches_of_frames(data.train, rows, config.cutoff)
    repulsion = _repulsion(config, data)
    return batches if repulsion is None else less_repulsion(batches, repulsion)


def _without_repulsion(config: Config, data: FrameData) -> dict[str, Any]:
    """Statistics that replace those of the data where the model adds ZBL; none otherwise."""
    if _repulsion(config, data) is None:
        return {}
    rows = spread(len(data.train), MOST_FRAMES)
    return statistics_without_repulsion(_batches(config, data, rows), data.statistics)


def with_fitted_shifts(config: Config, data: FrameData, resolved: Mapping[str, Any]) -> FrameData:
    """The data with the reference energies of the model in its statistics, where they were fitted to energies less ZBL."""
    shifts, statistics = resolved.get("energy_shifts"), data.statistics
    if not resolved.get("zbl") or statistics.reference_kind != "fit" or not isinstance(shifts, Mapping):
        return data
    if config.model.get("energy_shifts") is not None or dict(shifts) == statistics.reference_energies:
        return data
    note = "; ".join(part for part in ("fitted to energies less ZBL", statistics.reference_note) if part)
    return replace(data, statistics=replace(statistics, reference_energies=dict(shifts), reference_note=note))


def _place(config: Config, data: FrameData) -> Path:
    settings = {
        "format": 2 if config.model.get("zbl") else 1,
        "frames": data.train.frames.fingerprint,
        "model": config.model,
        "species": data.species.symbols,
        "graph": asdict(same_graph(data.train.graph)),
        "most": MOST_FRAMES,
    }
    name = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16).hexdigest()
    return cache_folder() / "model-statistics" / f"{name}.json"


def spread(n: int, most: int) -> np.ndarray:
    """All rows of n, or `most` of them, evenly spread."""
    if n <= most:
        return np.arange(n)
    return np.unique(np.linspace(0, n - 1, most).round().astype(np.int64))


def batches_of_frames(
    dataset: GraphDataset, rows: np.ndarray, cutoff: float, *, edges: int = EDGES_AT_ONCE
) -> Iterator[Batch]:
    """These frames in order, with edges, about so many at a time."""
    costs = dataset.n_edges if dataset.n_edges is not None else 100 * dataset.n_atoms
    part = (costs[rows].cumsum() - 1) // edges
    for number in np.unique(part):
        yield with_edges(dataset.batch(rows[part == number]), cutoff)

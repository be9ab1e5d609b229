"""Resolved options of a model, from a config and its data: every number that depends on the data becomes explicit.

Some models need more than the statistics of the data (`measure` of their class): one pass over the training frames, whose
result is cached on disk by a hash of its inputs.
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

from forgefield.config.sources import naming_the_line
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
    derivative_outputs,
    direct_outputs,
    excluded_species,
    extra_outputs_of,
    model_statistics,
    resolve_model,
)
from forgefield.models.terms import SpeciesTerms
from forgefield.settings import Config
from forgefield.tasks.options import TaskOptions, targets_of
from forgefield.tasks.targets import default_task, require_labels
from forgefield.tasks.task import Task
from forgefield.training.problem.heads import has_energy, head_specifications, output_units


class ZBL(SpeciesTerms[TermOptions]):
    """Only the ZBL repulsion of the built-in models: (n_atoms,), eV.

    model: the `model` section, of which `zbl` and `per_edge_type_cutoff` are used.
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


def subtract_repulsion(batches: Iterator[Batch], repulsion: Potential) -> Iterator[Batch]:
    """The batches with energies and forces minus the repulsion."""
    for batch in batches:
        outputs = repulsion.eval()(batch)
        yield batch | {name: batch[name] - outputs[name].detach() for name in ("energy", "forces")}


def statistics_without_repulsion(batches: Iterator[Batch], statistics: Statistics) -> dict[str, Any]:
    """Entries of `Statistics` that depend on the repulsion: fitted reference energies, spread of energies (eV/atom), root mean
    square of forces (eV/A). batches: minus the repulsion."""
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


BATCH_EDGES = 2_000_000
"""Approximate number of edges of a batch."""
MAX_FRAMES = 20_000
"""Maximum number of frames that are measured; of larger data sets an evenly spaced selection."""


def batch_spec(
    task: TaskOptions, potential: Potential, *, seed: int, on_gpu: bool = False, keep_order: bool = False
) -> BatchSpec:
    """The contents of batches for this task and model. keep_order: frames are not shuffled."""
    targets, noise = targets_of(task), None
    if task.denoise is not None:
        denoise, alone = task.denoise, len(targets) == 1
        share = denoise.share if denoise.share is not None else 1.0 if alone or denoise.keep_labels else 0.5
        noise = Noise(denoise.sigma, int(seed), share=share, keep_labels=denoise.keep_labels, alone=alone)
    return BatchSpec(frozenset(targets), potential.needs_keys, noise, on_gpu, keep_order)


def resolved_model(config: Config, data: FrameData) -> dict[str, Any]:
    """Resolved options of the config's model; see `models.resolving.resolve_model`."""
    with naming_the_line(config, "model"):
        task, outputs = config.task, direct_outputs(config.model, trust=CONFIG)
        return resolve_model(
            config.model,
            species=data.species.symbols,
            cutoff=config.cutoff,
            adaptive_cutoff=config.data.adaptive_cutoff,
            max_neighbours=config.data.max_neighbours,
            statistics=asdict(data.statistics) | _without_repulsion(config, data) | _measured(config, data),
            heads={} if task is None or outputs else head_specifications(task, data, derivative_outputs(config.model)),
            has_energy=task is None or has_energy(task),
            units=output_units(outputs, task, data) if outputs else None,
            trust=CONFIG,
        )


def requested_task(config: Config, data: FrameData, *, stress_by_default: bool = True) -> TaskOptions:
    """The task of the config, or the default one for the labels of the data. Raises ForgefieldError for missing labels."""
    options = config.task
    if options is None:
        options = default_task(data.statistics.labels, data.label_hints, stress=stress_by_default)
    require_labels(targets_of(options), data.statistics.labels, "training", data.label_hints)
    return options


def build_task(options: TaskOptions, resolved: Mapping[str, Any]) -> Task:
    """The task of a model with these resolved options."""
    species, outputs = tuple(resolved["species"]), extra_outputs_of(resolved)
    return Task(options, species, outputs, branch_names(resolved), excluded_species(resolved))


def _measured(config: Config, data: FrameData) -> dict[str, Any]:
    """Statistics that the model itself measures on the training data; empty for most models."""
    species, cutoff, model = data.species.symbols, config.cutoff, config.model
    cached = _cache_path(config, data) if config.data.cache else None
    try:
        if cached is not None:
            stored: dict[str, Any] = json.loads(cached.read_text())
            return stored
    except (OSError, ValueError):
        pass  # there is no file, or it is damaged
    rows = evenly_spaced(len(data.train), MAX_FRAMES)
    measured = model_statistics(
        model,
        lambda: _batches(config, data, rows),
        species=species,
        cutoff=cutoff,
        trust=CONFIG,
    )
    if measured and cached is not None:
        with suppress(ForgefieldError, OSError):
            cached.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(cached.parent)
            write_atomically(cached, json.dumps(measured))
    return measured


def _repulsion(config: Config, data: FrameData) -> Potential | None:
    """The ZBL term of the config's model, if it has one."""
    model = config.model
    if model.get("name") not in ARCHITECTURES or not model.get("zbl"):
        return None
    adaptive = config.data.adaptive_cutoff
    return Potential(ZBL(model, data.species.symbols, config.cutoff, adaptive))


def _batches(config: Config, data: FrameData, rows: np.ndarray) -> Iterator[Batch]:
    """Training frames with edges; energies and forces minus the ZBL term of the model."""
    batches = batches_of_frames(data.train, rows, config.cutoff)
    repulsion = _repulsion(config, data)
    return batches if repulsion is None else subtract_repulsion(batches, repulsion)


def _without_repulsion(config: Config, data: FrameData) -> dict[str, Any]:
    """Statistics that replace those of the data if the model has a ZBL term; else empty."""
    if _repulsion(config, data) is None:
        return {}
    rows = evenly_spaced(len(data.train), MAX_FRAMES)
    return statistics_without_repulsion(_batches(config, data, rows), data.statistics)


def with_fitted_shifts(config: Config, data: FrameData, resolved: Mapping[str, Any]) -> FrameData:
    """The data with the reference energies of the model in its statistics, if they were fitted to energies minus ZBL."""
    shifts, statistics = resolved.get("energy_shifts"), data.statistics
    if not resolved.get("zbl") or statistics.reference_kind != "fit" or not isinstance(shifts, Mapping):
        return data
    if config.model.get("energy_shifts") is not None or dict(shifts) == statistics.reference_energies:
        return data
    note = "; ".join(text for text in ("fitted to energies minus ZBL", statistics.reference_note) if text)
    return replace(data, statistics=replace(statistics, reference_energies=dict(shifts), reference_note=note))


def _cache_path(config: Config, data: FrameData) -> Path:
    settings = {
        "format": 2 if config.model.get("zbl") else 1,
        "frames": data.train.frames.fingerprint,
        "model": config.model,
        "species": data.species.symbols,
        "graph": asdict(same_graph(data.train.graph)),
        "most": MAX_FRAMES,
    }
    name = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16).hexdigest()
    return cache_folder() / "model-statistics" / f"{name}.json"


def evenly_spaced(n: int, at_most: int) -> np.ndarray:
    """At most `at_most` evenly spaced indices below n."""
    if n <= at_most:
        return np.arange(n)
    return np.unique(np.linspace(0, n - 1, at_most).round().astype(np.int64))


def batches_of_frames(
    dataset: GraphDataset, rows: np.ndarray, cutoff: float, *, edges: int = BATCH_EDGES
) -> Iterator[Batch]:
    """These frames in order, in batches of about `edges` edges."""
    costs = dataset.n_edges if dataset.n_edges is not None else 100 * dataset.n_atoms
    batch_index = (costs[rows].cumsum() - 1) // edges
    for index in np.unique(batch_index):
        yield with_edges(dataset.batch(rows[batch_index == index]), cutoff)

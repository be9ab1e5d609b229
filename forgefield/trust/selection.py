"""Structures to compute next: those of a pool about which a trained model knows least.

The pool is read twice and never held in memory: first for a few numbers of each frame (its uncertainty and its place in feature
space), then for the structures of the chosen ones. The place of a frame is the mean over its atoms of the features of the last
layer, in the metric of the model's uncertainty: the distance of two frames is the uncertainty of the difference of their
energies per atom, eV. A structure and its supercell are at the same place.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from ase import Atoms

from forgefield.data.batch import Batch, batch_from_frames, to_device
from forgefield.data.dataset import GraphDataset
from forgefield.data.frame import Frame, RawFrame, check_frame
from forgefield.data.labels.label_reader import LabelReader
from forgefield.data.neighbours.graph import graph_of
from forgefield.data.options import DataOptions
from forgefield.data.readers import frames_with_values, source_files
from forgefield.data.reading import label_settings, unit_settings
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.files import written_atomically
from forgefield.inference.ase import frame_of_atoms
from forgefield.inference.evaluate import evaluate_batch, evaluating
from forgefield.inference.uncertainty import FORCES, LastLayerUncertainty, has_uncertainty, load_uncertainty
from forgefield.inference.xyz_files import write_extxyz
from forgefield.models.edges import EdgeContext, edge_vectors
from forgefield.models.potential import Potential
from forgefield.models.resolving import branch_names
from forgefield.report.figures import check_figure_name
from forgefield.runs import Run
from forgefield.text import counted
from forgefield.trust.choosing import METHODS, most_uncertain, typical_distance
from forgefield.trust.selection_figure import draw_selection
from forgefield.trust.structures import labelled_atoms
from forgefield.trust.uncertainty import fit_uncertainty, training_data

BY = ("uncertainty", "distance", "both")
CANDIDATES = 10
"""By both criteria: frames among which the distance decides, for each frame to choose."""
SCORE, SCORE_OF_ENSEMBLES = "energies_uncertainty_max", "forces_uncertainty_max"
"""Names under which chosen structures carry the largest uncertainty of the energy of one of their atoms, eV, or for an ensemble
of the force on one of them, eV/A."""
EMPTY = "The pool is empty: there are no structures to choose from."
BATCH = 16
"""Frames evaluated together."""
MESSAGE_S = 15.0
"""Seconds between messages on progress."""
DUPLICATE = 0.1
"""Frames closer than this to a training frame are near-duplicates, relative to the typical distance of training frames from
their nearest neighbours."""

Pool = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Sequence[Atoms]
"""A file, folder or glob, a list of these, or structures."""


@dataclass(frozen=True)
class Described:
    """What is remembered of each frame. points: (n, n_weights) float32, places in feature space, eV. scores: (n,) the largest
    uncertainty of the energy of one of its atoms, eV."""

    points: np.ndarray
    scores: np.ndarray

    def __len__(self) -> int:
        return len(self.scores)


SHOWN = 10
"""Number of chosen frames that are displayed."""


@dataclass(frozen=True)
class Selection:
    """The result of `select`.

    indices: of the chosen frames in the pool, in the order of choice. frames: the structures. uncertainties: (n,) largest
    uncertainty of the energy of an atom, eV, or for an ensemble of the force on an atom, eV/A. n_pool: frames in the pool.
    tolerance: frames closer than this to a training frame or to one another are not chosen, eV. figure: file of the figure.
    """

    indices: list[int]
    frames: list[Atoms]
    uncertainties: np.ndarray
    n_pool: int
    tolerance: float
    figure: Path | None = field(default=None)

    def __repr__(self) -> str:
        lines = [
            f"  frame {index}: {atoms.get_chemical_formula()}, uncertainty {value:.3g}"
            for index, atoms, value in zip(self.indices, self.frames, self.uncertainties)
        ]
        more = [f"  and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        return "\n".join([f"Selection({len(lines)} of {counted(self.n_pool, 'frame')})", *lines[:SHOWN], *more])


def select_frames(
    run: Run,
    pool: Pool,
    n: int,
    out: str | os.PathLike[str] | None = None,
    *,
    by: str = "both",
    method: str = "farthest",
    tolerance: float | None = None,
    device: str = "cpu",
    figure: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    options: DataOptions | None = None,
    notify: Callable[[str], None] = lambda text: None,
) -> Selection:
    """Choose n frames of a pool; parameters as in `api.select`."""
    _check(n, by, method, tolerance, out, overwrite)
    if figure is not None:
        check_figure_name(Path(figure))
    if branches := branch_names(run.info["model"]):
        raise ForgefieldError(
            f"Run {run.name} has several branches ({', '.join(branches)}); structures are selected with a model that has one."
        )
    data = training_data(run)
    of_features = Run(run.member_path(next(iter(run.members))), trust_code=run.trust_code) if run.members else run
    if not has_uncertainty(of_features):
        notify(f"Computing the uncertainties of run {of_features.name} first ...")
        fit_uncertainty(of_features, data=data, device=device)
    options = options if options is not None else run.data_options()
    describe = _Describer(run.load_potential("best", device), load_uncertainty(of_features), device, notify)
    trained = describe.dataset(data.train)
    described = describe.frames(frame for frame, _ in _pool_frames(pool, options))
    if len(described) == 0:
        raise ForgefieldError(EMPTY)
    limit = DUPLICATE * typical_distance(trained.points) if tolerance is None else tolerance
    indices = choose(described, trained, n, by=by, method=method, tolerance=limit, unit=describe.unit)
    if len(indices) < n:
        notify(
            f"{len(indices)} of {len(described)} frames are chosen, not {n}: the others are closer than {limit:.2g} eV per "
            "atom to a training frame or to a chosen one."
        )
    score = SCORE_OF_ENSEMBLES if run.members else SCORE
    frames = _structures(pool, options, indices, {score: described.scores})
    if out is not None:
        with written_atomically(Path(out)) as partial:
            write_extxyz(partial, frames)
    drawn = None if figure is None else draw_selection(Path(figure), described.points, trained.points, indices)
    return Selection(indices, frames, described.scores[indices], len(described), limit, drawn)


def choose(
    pool: Described, trained: Described, n: int, *, by: str, method: str, tolerance: float, unit: float
) -> list[int]:
    """Indices of the chosen frames of a pool. unit: error of energies per atom, eV, in units of which D-optimality measures."""
    if by == "uncertainty":
        return most_uncertain(pool.points, pool.scores, n, reference=trained.points, tolerance=tolerance)
    rows = np.arange(len(pool))
    if by == "both":
        rows = np.argsort(-pool.scores, kind="stable")[: CANDIDATES * n]
    scale = 1.0 / unit if method == "d-optimal" else 1.0
    chosen = METHODS[method](
        scale * pool.points[rows],
        pool.scores[rows],
        n,
        reference=scale * trained.points,
        tolerance=scale * tolerance,
    )
    return [int(rows[index]) for index in chosen]


def _check(
    n: int, by: str, method: str, tolerance: float | None, out: str | os.PathLike[str] | None, overwrite: bool
) -> None:
    if n < 1:
        raise ForgefieldError(f"The number of frames to choose is {n}; it should be at least 1.")
    for name, value, choices in (("by", by, BY), ("method", method, tuple(METHODS))):
        if value not in choices:
            raise ForgefieldError(f"{name} is '{value}'; choose one of {', '.join(choices)}.")
    if tolerance is not None and not tolerance >= 0:
        raise ForgefieldError(f"tolerance is {tolerance}; it should be 0 or more, in eV per atom.")
    if out is not None and Path(out).suffix not in (".extxyz", ".xyz"):
        raise ForgefieldError(f"{out}: the chosen structures are written as .extxyz or .xyz.")
    if out is not None and Path(out).exists() and not overwrite:
        raise ForgefieldError(
            f"{out} exists already; --force (in Python: overwrite=True) overwrites it, -o FILE names another."
        )


class _Describer:
    """Computes places in feature space and uncertainties.

    potential: the model; for an ensemble, places are those of its first member, and uncertainties are deviations of forces, as
    members divide the same energy differently among atoms. uncertainty: that of the model or first member.
    """

    def __init__(
        self, potential: Potential, uncertainty: LastLayerUncertainty, device: str, notify: Callable[[str], None]
    ) -> None:
        self.potential, self.uncertainty, self.device, self.notify = potential, uncertainty, device, notify
        self.unit = uncertainty.energy_scale * float(uncertainty.about.get("energy_error", 1.0))

    def dataset(self, dataset: GraphDataset) -> Described:
        starts = range(0, len(dataset), BATCH)
        return self._joined(dataset.batch(range(start, min(start + BATCH, len(dataset)))) for start in starts)

    def frames(self, frames: Iterable[Frame]) -> Described:
        iterator, species = iter(frames), SpeciesTable(self.potential.species, trained=True)
        graph = graph_of(self.potential)

        def batches() -> Iterator[Batch]:
            while part := list(islice(iterator, BATCH)):
                yield batch_from_frames(part, species, graph)

        return self._joined(batches())

    def _joined(self, batches: Iterable[Batch]) -> Described:
        parts, n_frames, next_message = [], 0, time.monotonic() + MESSAGE_S
        with evaluating(self.potential, self.device) as place:
            for batch in batches:
                parts.append(self._describe(to_device(batch, place)))
                n_frames += len(batch["n_atoms"])
                if time.monotonic() > next_message:
                    self.notify(f"Evaluated {n_frames} frames ...")
                    next_message = time.monotonic() + MESSAGE_S
        if not parts:
            return Described(np.zeros((0, 1), dtype=np.float32), np.zeros(0))
        return Described(*(np.concatenate(arrays) for arrays in zip(*parts)))

    def _describe(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            features = self.potential.last_layer(batch, EdgeContext(edge_vectors(batch), batch)).features
        n_frames, frame = len(batch["n_atoms"]), batch["frame"]
        rows = features @ self.uncertainty.factor.to(features.device) * self.uncertainty.energy_scale
        means = rows.new_zeros(n_frames, rows.shape[1]).index_add_(0, frame, rows) / batch["n_atoms"].unsqueeze(1)
        if FORCES in self.potential.uncertainty_outputs:
            deviations = evaluate_batch(self.potential, batch, forces=True, stress=False)[0][FORCES]
            of_atoms = torch.linalg.vector_norm(deviations, dim=1)
        else:
            of_atoms = torch.linalg.vector_norm(rows, dim=1)
        scores = of_atoms.new_zeros(n_frames).scatter_reduce(0, frame, of_atoms, "amax", include_self=False)
        return means.float().cpu().numpy(), scores.cpu().numpy()


def _pool_frames(pool: Pool, options: DataOptions) -> Iterator[tuple[Frame, RawFrame | None]]:
    """All frames of a pool, one at a time, with everything that their files hold."""
    if structures := _as_structures(pool):
        yield from ((check_frame(frame_of_atoms(atoms)), None) for atoms in structures)
        return
    units = unit_settings(options.units)
    reader = LabelReader(label_settings(options.labels), units)
    for file in source_files(pool):
        yield from frames_with_values(file, reader, units)


def _as_structures(pool: Pool) -> list[Atoms] | None:
    """The structures of a pool in memory; None for files."""
    if isinstance(pool, (str, os.PathLike)) or not all(isinstance(item, Atoms) for item in pool):
        return None
    if len(pool) == 0:
        raise ForgefieldError(EMPTY)
    return list(pool)  # type: ignore[arg-type]


def _structures(
    pool: Pool, options: DataOptions, indices: Sequence[int], scores: Mapping[str, np.ndarray]
) -> list[Atoms]:
    """The chosen structures in the order of choice. scores: of all structures, by the name under which to keep them."""
    structures, found = _as_structures(pool), {}
    if structures is not None:
        found = {index: _copy(structures[index]) for index in indices}
    else:
        missing = set(indices)
        for index, (frame, raw) in enumerate(_pool_frames(pool, options)):
            if not missing:
                break
            if index in missing:
                missing.remove(index)
                found[index] = labelled_atoms(frame, raw)
    for index, atoms in found.items():
        atoms.info.update({name: float(values[index]) for name, values in scores.items()})
    return [found[index] for index in indices]


def _copy(atoms: Atoms) -> Atoms:
    copied = atoms.copy()
    copied.calc = atoms.calc
    return copied

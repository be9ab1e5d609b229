"""Last-layer prediction rigidity: one pass over the training data, then calibration on the validation frames.

With errors that are normally distributed, the training data determine the weights of the last layer up to a covariance, the
inverse of

    C = sum over energies (f / n)(f / n)^T / s_E^2 + sum over forces g g^T / s_F^2 + regulariser

where f are the features of a frame (summed over its n atoms), g their derivatives in a coordinate, and s_E, s_F the root mean
square errors of the model per atom and per force component. The regulariser is the one that makes the errors of the validation
frames most probable; so are two scales, one for energies and one for forces, which have a closed form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from forgefield.data.batch import Batch, is_memory_error, repeated, to_device, with_edges
from forgefield.data.dataset import GraphDataset
from forgefield.data.module import FrameData, read_data
from forgefield.errors import ForgefieldError
from forgefield.inference.evaluate import evaluate_batch, evaluating
from forgefield.inference.uncertainty import LastLayerUncertainty, has_uncertainty, write_uncertainty
from forgefield.models.edges import EdgeContext, edge_vectors
from forgefield.models.potential import Potential
from forgefield.models.resolving import branch_names
from forgefield.parallel.accelerators import evaluation_device
from forgefield.parallel.ranks import Ranks, single_process
from forgefield.runs import OmittedOptions, PackagedRun, Run
from forgefield.settings import Config
from forgefield.training.fit import TrainingResult
from forgefield.training.run.journal import Journal
from forgefield.trust.suitability import require_suitable_run

DIRECTIONS_PER_WEIGHT = 30
"""Random directions in all frames together, for each weight of the last layer."""
MOST_DIRECTIONS = 10
"""Random directions in one frame."""
FRAMES_AFTER_TRAINING = 5000
"""Training and validation frames, at most, of the pass at the end of a training, evenly spaced, so that it is always short."""
ATOMS_TOGETHER = 1000
"""Atoms of a batch, unless a frame has more."""
EDGES_TOGETHER = {"cpu": 20_000, "cuda": 300_000}
"""Edges of a pass along several directions, by device: small passes take as long as a GPU needs to start their kernels."""
FORCE_ROWS = 2000
"""Force components of validation frames that are compared with their uncertainties."""
REGULARISERS = [10.0**exponent for exponent in range(-14, 1)]
"""Tried values, relative to the largest eigenvalue of C."""


@dataclass
class Curvature:
    """Sums over the training data, (n_weights, n_weights) float64.

    energies: of (f / n)(f / n)^T over frames with an energy. forces: of g g^T over force components.
    n_energies, n_forces: numbers of terms.
    """

    energies: Tensor
    forces: Tensor
    n_energies: int = 0
    n_forces: int = 0

    @classmethod
    def zero(cls, n_weights: int) -> Curvature:
        """No terms yet."""
        sums = torch.zeros(2, n_weights, n_weights, dtype=torch.float64)
        return cls(sums[0].clone(), sums[1].clone())

    def precision(self, energy_error: float, forces_error: float | None) -> Tensor:
        """C without the regulariser. Errors: root mean squares, eV per atom and eV/A."""
        total = self.energies / energy_error**2
        return total if forces_error is None else total + self.forces / forces_error**2


@dataclass
class Residuals:
    """Errors of validation frames and what their uncertainties depend on.

    energy_features: (n_frames, n_weights), summed over atoms. energies: (n_frames,), eV. n_atoms: (n_frames,).
    force_features: (n_components, n_weights), derivatives. forces: (n_components,), eV/A.
    """

    energy_features: Tensor
    energies: Tensor
    n_atoms: Tensor
    force_features: Tensor
    forces: Tensor


def accumulate(
    potential: Potential, batches: Iterable[Batch], n_weights: int, *, directions: int | None, seed: int = 0
) -> Curvature:
    """The sums over training data. n_weights: of the last layer.

    directions: random directions along which the features of each frame are differentiated; None: all coordinates, exactly.
    The expectation of a sum over random directions is the exact sum.
    """
    curvature = Curvature.zero(n_weights)
    generator = torch.Generator().manual_seed(seed)
    for batch in batches:
        features = _features(potential, batch)
        labelled = batch["energy"].isfinite()
        rows = features[labelled] / batch["n_atoms"][labelled].unsqueeze(1)
        curvature.energies += (rows.T @ rows).cpu()
        curvature.n_energies += len(rows)
        has_force = batch["forces"].isfinite()
        curvature.n_forces += int(has_force.sum())
        weight = 1.0 if directions is None else 1.0 / directions
        if has_force.any():
            moves = (direction * has_force for direction in _directions(batch, directions, generator))
            for _, rows in _slopes(potential, batch, moves):
                curvature.forces += weight * (rows.T @ rows).cpu()
    return curvature


def residuals(
    potential: Potential, batches: Iterable[Batch], n_weights: int, *, coordinates: int | None, seed: int = 0
) -> Residuals:
    """Errors of labelled frames, and the features that their uncertainties depend on.

    coordinates: how many force components of each frame are drawn at random; None: all.
    """
    generator, empty = torch.Generator().manual_seed(seed), torch.zeros(0, dtype=torch.float64)
    parts = [
        (torch.zeros(0, n_weights, dtype=torch.float64), empty, empty.long(), empty.new_zeros(0, n_weights), empty)
    ]
    for batch in batches:
        has_force = batch["forces"].isfinite()
        outputs, _ = evaluate_batch(potential, batch, forces=bool(has_force.any()), stress=False)
        labelled = batch["energy"].isfinite()
        of_energies = _features(potential, batch)[labelled]
        error = (outputs["energy"] - batch["energy"])[labelled]
        parts.append((of_energies, error, batch["n_atoms"][labelled], parts[0][3], empty))
        if not has_force.any() or potential.forces_are_direct:
            continue
        errors = torch.where(has_force, outputs["forces"] - batch["forces"], 0.0)
        for direction, rows in _slopes(potential, batch, _coordinates(batch, coordinates, generator)):
            present = (direction * has_force).sum(1) > 0
            parts.append((*parts[0][:3], rows[batch["frame"][present]], (errors * direction).sum(1)[present]))
    return Residuals(*(torch.cat([value.cpu() for value in values]) for values in zip(*parts)))


def calibrate(curvature: Curvature, errors: Residuals) -> LastLayerUncertainty:
    """The distribution of the last weights that makes the errors of the validation frames most probable."""
    if len(errors.energies) == 0:
        raise ForgefieldError("No validation frame has an energy to calibrate uncertainties with.")
    energy_error = _root_mean_square(errors.energies / errors.n_atoms)
    has_forces = len(errors.forces) > 0
    forces_error = _root_mean_square(errors.forces) if has_forces else None
    eigenvalues, vectors = torch.linalg.eigh(curvature.precision(energy_error, forces_error))
    eigenvalues = eigenvalues.clamp(min=0.0)
    sets = [(errors.energy_features @ vectors, errors.energies), (errors.force_features @ vectors, errors.forces)]
    sets = sets[: 1 + has_forces]

    def variances(regulariser: float) -> list[Tensor]:
        return [(rows.square() / (eigenvalues + regulariser)).sum(1) for rows, _ in sets]

    def surprise(regulariser: float) -> float:
        parts = zip(variances(regulariser), sets)
        return sum(_negative_log_likelihood(variance, error) for variance, (_, error) in parts)

    regulariser = min((float(eigenvalues[-1]) * relative for relative in REGULARISERS), key=surprise)
    scales = [_scale(variance, error) for variance, (_, error) in zip(variances(regulariser), sets)]
    return LastLayerUncertainty(
        vectors / (eigenvalues + regulariser).sqrt(),
        scales[0],
        scales[1] if has_forces else None,
        about={
            "regulariser": regulariser / float(eigenvalues[-1]),
            "energy_error": energy_error,
            "forces_error": forces_error,
            "training_energies": curvature.n_energies,
            "training_forces": curvature.n_forces,
            "validation_energies": len(errors.energies),
            "validation_forces": len(errors.forces),
        },
    )


def fit_uncertainty(
    run: Run,
    *,
    data: FrameData | None = None,
    device: str = "cpu",
    directions: int | None = None,
    most_frames: int | None = None,
    ranks: Ranks | None = None,
    head: str | None = None,
) -> LastLayerUncertainty:
    """Compute the uncertainties of the best weights of a run and store them in its folder; returns them.

    Parameters
    ----------
    run
        The run; its training data must be available.
    data
        Its frames, if they have been read already.
    device
        Where to compute.
    directions
        Directions along which the features of each training frame are differentiated; 0: all coordinates, exactly. Default:
        random ones, 30 for each weight of the last layer in all frames together, between 1 and 10 in each frame.
    most_frames
        Training and validation frames that are used at most, evenly spaced. Default: all.
    ranks
        Processes that share the work; rank 0 writes the file.
    head
        Branch of a model with several, whose training and validation frames are used.
    """
    ranks = ranks or single_process()
    require_suitable_run(run)
    run.require_head(head)
    data = training_data(run) if data is None else data
    if data.val is None:
        raise ForgefieldError(
            f"Run {run.name} has no validation frames (data.val), with which uncertainties are calibrated; train it with some."
        )
    potential = run.load_potential("best", device, head=head)
    train, val = (_Rows(dataset, most_frames, ranks, head) for dataset in (data.train, data.val))
    if val.total == 0:
        raise ForgefieldError(f"Branch {head} of run {run.name} has no validation frames, with which it is calibrated.")
    with evaluating(potential, device) as place:
        n_weights = _features(potential, next(train.batches(potential, place, alone=True))).shape[1]
        number = _number_of_directions(directions, n_weights, data.train, train.total)
        part = accumulate(potential, train.batches(potential, place), n_weights, directions=number, seed=ranks.rank)
        drawn = _number_of_coordinates(data.val, val.total)
        errors = residuals(potential, val.batches(potential, place), n_weights, coordinates=drawn, seed=ranks.rank)
    curvature = _summed(part, ranks)
    gathered = ranks.all_gather(errors)
    joined = Residuals(*(torch.cat(values) for values in zip(*(vars(one).values() for one in gathered))))
    uncertainty = calibrate(curvature, joined)
    uncertainty = replace(uncertainty, about={**uncertainty.about, "directions": number})
    if ranks.is_rank_zero:
        sums = {"curvature_energies": curvature.energies, "curvature_forces": curvature.forces}
        write_uncertainty(run, uncertainty, sums | _validation(uncertainty, joined), head)
    return uncertainty


def _validation(uncertainty: LastLayerUncertainty, errors: Residuals) -> dict[str, Tensor]:
    """Errors and uncertainties (n, 2) of validation frames, for the report: of energies per atom, eV, and forces, eV/A."""
    spread = uncertainty.of_features(errors.energy_features)
    found = {"validation_energy": torch.stack([errors.energies, spread], 1) / errors.n_atoms.unsqueeze(1)}
    if uncertainty.forces_scale is not None:
        spread = uncertainty.forces_scale * torch.linalg.vector_norm(errors.force_features @ uncertainty.factor, dim=1)
        found["validation_forces"] = torch.stack([errors.forces, spread], 1)
    return found


def fit_after_training(fitted: TrainingResult, config: Config, journal: Journal, ranks: Ranks) -> None:
    """The uncertainties of a training that has just ended, if they are requested (`training.uncertainty`) and the model has a
    suitable last layer; otherwise a message states the reason."""
    run, data = fitted.run, fitted.data
    if not config.training.uncertainty or not isinstance(data, FrameData):
        return
    device = evaluation_device(config.trainer.get("accelerator"))
    for head in heads_of(run):
        if ranks.broadcast(ranks.is_rank_zero and has_uncertainty(run, head)):
            continue
        try:
            fit_uncertainty(run, data=data, device=device, most_frames=FRAMES_AFTER_TRAINING, ranks=ranks, head=head)
        except ForgefieldError as error:
            if ranks.is_rank_zero:
                journal.notify(f"No uncertainties were computed (training.uncertainty): {error}")


def heads_of(run: Run) -> list[str | None]:
    """The branches of the model of a run; None for a model with one energy."""
    return [*branch_names(run.info["model"])] or [None]


def training_data(run: Run) -> FrameData:
    """The training and validation frames of a run, as it was trained with; an error where they are not available."""
    if isinstance(run, PackagedRun) or "train" not in (run.settings.get("data") or {}):
        raise ForgefieldError(
            f"Run {run.name} does not name its training data (it is a package or was imported), which is needed for this."
        )
    config = run.config
    try:
        branches, defaults = branch_names(run.info["model"]), OmittedOptions.of_run(run.info)
        return read_data(
            config.data,
            config.seed,
            branches=branches,
            keep_species=defaults.keep_species,
            frames_by_default=defaults.frames,
            trust=run.trust,
        )
    except ForgefieldError as error:
        raise ForgefieldError(f"The training data of run {run.name} is not available: {error}") from error


class _Rows:
    """The frames of a data set that this process uses: its share of at most `most` evenly spaced ones.

    branch: use frames of this branch only. total: number of frames that all processes use.
    """

    def __init__(self, dataset: GraphDataset, most: int | None, ranks: Ranks, branch: str | None = None) -> None:
        rows = np.arange(len(dataset))
        if branch is not None:
            rows = np.flatnonzero(dataset.frames.branch_of_frame([branch]) == 0)
        if most is not None and len(rows) > most:
            rows = rows[np.linspace(0, len(rows) - 1, most).astype(np.int64)]
        self.every = rows
        self.dataset, self.total = dataset, len(rows)
        self.rows = rows[ranks.rank :: ranks.world_size]

    def batches(self, potential: Potential, device: torch.device, *, alone: bool = False) -> Iterator[Batch]:
        """alone: a single frame, which every process has."""
        for rows in [self.every[:1]] if alone else self._parts():
            yield with_edges(to_device(self.dataset.batch(rows), device), potential.cutoff)

    def _parts(self) -> Iterator[np.ndarray]:
        """Consecutive rows of up to `ATOMS_TOGETHER` atoms."""
        block = np.cumsum(self.dataset.n_atoms[self.rows]) // ATOMS_TOGETHER
        yield from np.split(self.rows, np.flatnonzero(np.diff(block)) + 1) if len(self.rows) else ()


def _features(potential: Potential, batch: Batch) -> Tensor:
    """(n_frames, n_weights), summed over atoms."""
    with torch.no_grad():
        last = potential.last_layer(batch, EdgeContext(edge_vectors(batch), batch))
    return _frame_sums(last.features, batch)


def _slopes(potential: Potential, batch: Batch, directions: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each direction (n_atoms, 3) and the derivatives (n_frames, n_weights) of the features of frames when atoms move along it.

    Several directions are computed in one pass, over as many copies of the batch.
    """
    limit = EDGES_TOGETHER.get(batch["positions"].device.type, EDGES_TOGETHER["cpu"])
    together = max(1, limit // max(batch["edge_index"].shape[1], batch["species"].shape[0]))
    remaining = iter(directions)
    while group := list(islice(remaining, together)):
        yield from zip(group, _slopes_of_copies(potential, batch, group))


def _slopes_of_copies(potential: Potential, batch: Batch, directions: list[Tensor]) -> list[Tensor]:
    """The derivatives along each direction, in one pass; where memory runs out, in passes over half of them."""
    n = len(directions)
    try:
        copies = repeated(batch, n) if n > 1 else batch
        with torch.no_grad():
            _, slopes = potential.moved_last_layer(copies, torch.cat(directions))
            return list(_frame_sums(slopes, copies).chunk(n))
    except Exception as error:
        if not is_memory_error(error) or n == 1:
            raise
    first, second = directions[: n // 2], directions[n // 2 :]
    return _slopes_of_copies(potential, batch, first) + _slopes_of_copies(potential, batch, second)


def _frame_sums(values: Tensor, batch: Batch) -> Tensor:
    return values.new_zeros(batch["n_atoms"].shape[0], values.shape[1]).index_add_(0, batch["frame"], values)


def _directions(batch: Batch, number: int | None, generator: torch.Generator) -> Iterator[Tensor]:
    """Random directions (n_atoms, 3) with components of 1 and -1, or all coordinates, one of each frame at a time."""
    if number is None:
        yield from _coordinates(batch, None, generator)
        return
    positions = batch["positions"]
    for _ in range(number):
        signs = torch.randint(0, 2, positions.shape, generator=generator)
        yield (2 * signs - 1).to(positions)


def _coordinates(batch: Batch, number: int | None, generator: torch.Generator) -> Iterator[Tensor]:
    """Unit vectors (n_atoms, 3) along one coordinate of each frame: `number` random ones, or all of them in turn."""
    n_atoms, positions = batch["n_atoms"].cpu(), batch["positions"]
    first = n_atoms.cumsum(0) - n_atoms
    for turn in range(3 * int(n_atoms.max()) if number is None else number):
        chosen = torch.full_like(n_atoms, turn)
        if number is not None:
            chosen = (torch.rand(n_atoms.shape, generator=generator, dtype=torch.float64) * 3 * n_atoms).long()
        flat = torch.zeros(positions.numel(), dtype=positions.dtype)
        flat[(3 * first + chosen)[chosen < 3 * n_atoms]] = 1.0
        yield flat.view(positions.shape).to(positions.device)


def _number_of_directions(requested: int | None, n_weights: int, train: GraphDataset, n_frames: int) -> int | None:
    """Random directions of each of n_frames; None for all coordinates."""
    if requested is not None:
        if requested < 0:
            raise ForgefieldError(f"directions is {requested}; it should be 0 (all coordinates) or more.")
        return requested or None
    number = min(max(1, math.ceil(DIRECTIONS_PER_WEIGHT * n_weights / n_frames)), MOST_DIRECTIONS)
    return None if number >= 3 * int(train.n_atoms.max()) else number


def _number_of_coordinates(val: GraphDataset, n_frames: int) -> int | None:
    """Force components to compare of each of n_frames validation frames; None for all."""
    return None if 3 * int(val.n_atoms.sum()) <= FORCE_ROWS else max(1, math.ceil(FORCE_ROWS / n_frames))


def _summed(part: Curvature, ranks: Ranks) -> Curvature:
    """The sum over ranks."""
    parts = ranks.all_gather(part)
    return Curvature(*(sum(values[1:], values[0]) for values in zip(*(vars(one).values() for one in parts))))


def _root_mean_square(values: Tensor) -> float:
    """Not zero, which would make C infinite."""
    return max(float(values.square().mean().sqrt()), 1e-9)


def _scale(variance: Tensor, error: Tensor) -> float:
    """The factor of standard deviations that makes the errors most probable. Predictions that do not depend on the weights,
    as that of an isolated atom, tell nothing."""
    determined = variance > 0
    return float((error[determined].square() / variance[determined]).mean().sqrt()) if determined.any() else 1.0


def _negative_log_likelihood(variance: Tensor, error: Tensor) -> float:
    """Mean over the errors, up to a constant, with the best scale."""
    determined = variance > 0
    if not determined.any():
        return 0.0
    return math.log(max(_scale(variance, error), 1e-300)) + 0.5 * float(variance[determined].log().mean())

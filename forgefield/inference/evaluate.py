"""Evaluation of a potential: one batch, many batches, or a data set.

`forgefield predict`, `forgefield test` and the evaluation at the end of a training use `BatchEvaluator`: on a GPU the
evaluation engine (`inference/engine`), otherwise `evaluate_batch`, which calls the model itself, as the ASE calculator does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice

import numpy as np
import torch
from torch import nn

from forgefield.data.batch import SHAPES, halves, is_memory_error, to_device, with_edges
from forgefield.data.dataset import GraphDataset
from forgefield.inference.engine.batches import BatchEngine
from forgefield.inference.engine.device import may_use_engine
from forgefield.kernels.convolution.dispatch import evaluation
from forgefield.models.potential import Potential

Batch = dict[str, torch.Tensor]
Notify = Callable[[str], None]
EDGES = ("edge_index", "edge_shift", "edge_reverse")
UNCERTAINTIES = {
    "energy_uncertainty": "frame",
    "energies_uncertainty": "atom",
    "forces_uncertainty": "atom",
    "stress_uncertainty": "frame",
}
"""Names of uncertainties, which have a value for each frame or each atom: standard deviations of energies and of atomic
energies, eV, of forces (n_atoms, 3), eV/A, and of stress (n_frames, 3, 3), eV/A^3."""


def predict_dataset(
    potential: Potential,
    loader_or_dataset: GraphDataset | Iterable[Batch],
    *,
    forces: bool = True,
    stress: bool = False,
    device: str | torch.device | None = None,
    batch: int = 16,
    engine: bool | None = None,
) -> dict[str, np.ndarray]:
    """Predict all frames of a data set, `batch` at a time, or all batches of a loader.

    device: where to compute; default: where the model is. engine: as of `evaluate_batches`.

    Returns arrays by name, NaN where a label is missing or was not predicted:

    - energy_pred, energy_ref: (n_frames,), eV
    - forces_pred, forces_ref: (sum of n_atoms, 3), eV/A
    - stress_pred, stress_ref: (n_frames, 3, 3), eV/A^3
    - n_atoms: (n_frames,); species: (sum of n_atoms,), index into species_symbols: (n_species,)
    - NAME_pred, NAME_ref of every extra output of the model: `(n_frames, *shape)` or `(sum of n_atoms, *shape)`; for classes
      the label of the most probable one, and NAME_prob: (..., n_classes), the probabilities of all
    - energy_uncertainty, energies_uncertainty, forces_uncertainty, stress_uncertainty of models that have them, see
      `UNCERTAINTIES`

    A model without an energy gives its extra outputs only.
    """
    batches = _batches(loader_or_dataset, batch) if isinstance(loader_or_dataset, GraphDataset) else loader_or_dataset
    parts = evaluate_batches(potential, batches, forces=forces, stress=stress, device=device, engine=engine)
    merged = join_in_order(parts, per_atom=per_atom_outputs(potential))
    merged["species_symbols"] = np.array(potential.species)
    return merged


def evaluate_batches(
    potential: Potential,
    batches: Iterable[Batch],
    *,
    forces: bool,
    stress: bool,
    device: str | torch.device | None = None,
    engine: bool | None = None,
    notify: Notify = lambda text: None,
) -> list[dict[str, np.ndarray]]:
    """Predictions and labels, batch by batch; `join_in_order` joins them, also those of several processes.

    engine, notify: see `BatchEvaluator`; by default the engine evaluates several batches, and a single one is left to the
    model, which takes less time than a captured graph is made in.
    """
    iterator = iter(batches)
    first = list(islice(iterator, 2))
    engine = False if engine is None and len(first) < 2 else engine
    with evaluating(potential, device) as place:
        evaluator = BatchEvaluator(potential, place, engine=engine, notify=notify)
        predicted = []
        for part in chain(first, iterator):
            kept = {name: value for name, value in part.items() if not (evaluator.builds_edges and name in EDGES)}
            predicted += _predict_in_parts(evaluator, to_device(kept, place), forces=forces, stress=stress)
        return predicted


class BatchEvaluator:
    """Evaluates batches by the evaluation engine, or by the model itself.

    potential: in evaluation mode on `device`. engine: whether the engine is used; an error where that is not possible. Default:
    on a GPU, for models that it supports. notify: receives the deviation of the engine from the eager model in float64, once.
    """

    def __init__(
        self,
        potential: Potential,
        device: torch.device,
        *,
        engine: bool | None = None,
        notify: Notify = lambda text: None,
    ) -> None:
        self.potential = potential
        self.engine = (
            BatchEngine(potential, device, notify=notify) if may_use_engine(potential, device, engine) else None
        )

    @property
    def builds_edges(self) -> bool:
        """Whether the edges of a batch are not used."""
        return self.engine is not None

    def __call__(self, batch: Batch, *, forces: bool, stress: bool) -> tuple[Batch, Batch]:
        """Outputs and extra predictions, as of `evaluate_batch`. batch: on the device, with edges or without."""
        if self.engine is not None:
            return self.engine.evaluate(batch, forces=forces, stress=stress), {}
        return evaluate_batch(self.potential, with_edges(batch, self.potential.cutoff), forces=forces, stress=stress)

    def release(self) -> None:
        """Release memory on the device, after it has run out."""
        if self.engine is not None:
            self.engine.release()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@contextmanager
def evaluating(potential: nn.Module, device: str | torch.device | None) -> Iterator[torch.device]:
    """The model in evaluation mode on `device` (None: where it is), with weights that do not require gradients; yields that
    device and restores the mode."""
    was_training = potential.training
    trained = [parameter for parameter in potential.parameters() if parameter.requires_grad]
    place = device_of(potential) if device is None else torch.device(device)
    potential.to(place).eval().requires_grad_(False)
    try:
        yield place
    finally:
        potential.train(was_training)
        for parameter in trained:
            parameter.requires_grad_(True)


def device_of(model: nn.Module) -> torch.device:
    """Where the weights are; a model without any is on the CPU."""
    return next((tensor.device for tensor in chain(model.parameters(), model.buffers())), torch.device("cpu"))


def _batches(dataset: GraphDataset, frames: int) -> Iterator[Batch]:
    for start in range(0, len(dataset), frames):
        yield dataset.batch(range(start, min(start + frames, len(dataset))))


def _predict_in_parts(
    evaluator: BatchEvaluator, batch: Batch, *, forces: bool, stress: bool
) -> list[dict[str, np.ndarray]]:
    """Predictions of a batch; where memory runs out, of its halves."""
    try:
        return [_predict_batch(evaluator, batch, forces=forces, stress=stress)]
    except Exception as error:
        if not is_memory_error(error) or len(batch["n_atoms"]) == 1:
            raise
    evaluator.release()
    # Extra fields have a row for each frame or each atom; where there are as many of both, either cut is the same.
    shapes = {
        key: SHAPES.get(key, ("frames" if value.shape[0] == len(batch["n_atoms"]) else "atoms",))
        for key, value in batch.items()
    }
    parts = halves(batch, shapes)
    return [found for part in parts for found in _predict_in_parts(evaluator, part, forces=forces, stress=stress)]


def _predict_batch(evaluator: BatchEvaluator, batch: Batch, *, forces: bool, stress: bool) -> dict[str, np.ndarray]:
    out, extra = evaluator(batch, forces=forces, stress=stress)
    potential = evaluator.potential
    n_frames, n_atoms = len(batch["n_atoms"]), len(batch["species"])
    predicted = {}
    if potential.has_energy:
        predicted["energy"] = out["energy"]
        predicted["stress"] = out["stress"] if stress else torch.full((n_frames, 3, 3), torch.nan)
    if potential.has_energy or potential.forces_are_direct:
        predicted["forces"] = out["forces"] if "forces" in out else torch.full((n_atoms, 3), torch.nan)
    predicted |= {name: extra[name] for name in potential.extra_outputs}
    part = {f"{name}_pred": value for name, value in predicted.items()}
    part |= {name: value for name, value in extra.items() if name not in potential.extra_outputs}
    part |= {f"{name}_ref": batch.get(name, torch.full_like(value, torch.nan)) for name, value in predicted.items()}
    part |= {name: out[name] for name in UNCERTAINTIES if name in out}
    part |= {name: batch[name] for name in ("n_atoms", "species", "frame_id")}
    return {name: value.detach().cpu().numpy() for name, value in part.items()}


def evaluate_batch(potential: Potential, batch: Batch, *, forces: bool, stress: bool) -> tuple[Batch, Batch]:
    """Outputs of the model for one batch, and predictions of its extra outputs, by name; all detached.

    Extra predictions are values; for classes the label of the most probable one, and all probabilities as `NAME_prob`.
    """
    with evaluation():
        outputs = potential(batch, forces=forces, stress=stress)
    outputs = {name: value.detach() for name, value in outputs.items()}
    extra: Batch = {}
    for name, output in potential.extra_outputs.items():
        extra[name] = outputs[name]
        if output.classes is not None:
            extra[f"{name}_prob"] = torch.softmax(outputs[name], 1)
            extra[name] = outputs[name].new_tensor(output.classes)[outputs[name].argmax(1)]
    return outputs, extra


def per_atom_outputs(potential: Potential) -> list[str]:
    """Names of the extra outputs that have one row per atom."""
    return [name for name, output in potential.extra_outputs.items() if output.per == "atom"]


def join_in_order(parts: list[dict[str, np.ndarray]], *, per_atom: Collection[str] = ()) -> dict[str, np.ndarray]:
    """Join the batches and sort frames, and their atoms with them, by `frame_id`; blank frames are dropped.

    per_atom: names of the extra outputs with one row per atom.
    """
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    frame_id = joined.pop("frame_id")
    of_atom = np.repeat(frame_id, joined["n_atoms"])
    blank_frames, blank_atoms = int((frame_id < 0).sum()), int((of_atom < 0).sum())
    frames = np.argsort(frame_id, kind="stable")[blank_frames:]
    atoms = np.argsort(of_atom, kind="stable")[blank_atoms:]
    uncertain = (name for name, per in UNCERTAINTIES.items() if per == "atom")
    of_atoms = {
        "species",
        *uncertain,
        *(f"{name}_{kind}" for name in ("forces", *per_atom) for kind in ("pred", "ref", "prob")),
    }
    return {name: value[atoms if name in of_atoms else frames] for name, value in joined.items()}

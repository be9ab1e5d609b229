"""Uncertainties of a trained model from its last layer, and files of them.

Energies are linear in the weights of the last layer (`models.interface.LastLayer`). What the training data leave undetermined
about these weights is a normal distribution, whose covariance follows from one pass over the data: last-layer prediction
rigidity (Bigi et al., Mach. Learn.: Sci. Technol. 5, 045018, 2024). The uncertainty of a prediction is the standard deviation
that this distribution implies for it, times a factor that makes it agree with the errors of validation frames.

`forgefield.trust.uncertainty` computes the covariance; this module evaluates it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.formats import VERSION, Format
from forgefield.inference.evaluate import UNCERTAINTIES
from forgefield.kernels.convolution.dispatch import evaluation
from forgefield.models.edges import Batch, EdgeContext, StepMemory, edge_vectors
from forgefield.models.interface import AtomisticModel, ExtraOutput
from forgefield.models.potential import Potential, per_volume, strained
from forgefield.models.resolving import branch_names
from forgefield.runs import PackagedRun, Run
from forgefield.weights import Weights, write_weights

ENERGY, ENERGIES, FORCES, STRESS = UNCERTAINTIES
LEVELS = ("energy", "forces")
"""What uncertainties are requested: of energies alone, or of forces and stress too, which needs many derivatives."""
MOST_PASSES = 64
"""Uncertainties of forces need one derivative for each weight of the last layer. Where there are more weights, this number of
random combinations of them is used, and standard deviations have a relative error of 1 / sqrt(2 * 64) = 9 %."""
UNCERTAINTY_FILE = Format("a file of uncertainties")


@dataclass(frozen=True)
class LastLayerUncertainty:
    """Distribution of the weights of the last layer of one model.

    factor: (n_weights, n_weights), float64; the covariance of the weights is factor @ factor.T, times the square of a scale.
    energy_scale: scale for energies, from the errors of validation frames.
    forces_scale: the same for forces, used for stress too; None where there are no forces to calibrate with.
    about: how it was made, as plain values.
    """

    factor: Tensor
    energy_scale: float
    forces_scale: float | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def of_features(self, features: Tensor) -> Tensor:
        """(...,) standard deviations of energies, eV, whose features (..., n_weights) are known."""
        return self.energy_scale * torch.linalg.vector_norm(features @ self._on(features), dim=-1)

    def evaluate(
        self, potential: Potential, batch: Batch, *, forces: bool = False, stress: bool = False
    ) -> dict[str, Tensor]:
        """Uncertainties of a batch by name, float64, detached: `energy_uncertainty` (n_frames,), eV,
        `energies_uncertainty` (n_atoms,), eV, with `forces` also `forces_uncertainty` (n_atoms, 3), eV/A, and with `stress`
        also `stress_uncertainty` (n_frames, 3, 3), eV/A^3; NaN for a frame without a volume.

        potential: the model that the distribution belongs to. forces, stress: cost a derivative for each weight (at most 64).
        """
        with torch.set_grad_enabled(forces or stress), evaluation():
            moved, positions, strain = strained(batch) if forces or stress else (batch, None, None)
            features = potential.last_layer(moved, EdgeContext(edge_vectors(moved), moved)).features
            self._require_size(features)
            found = self._of_energies(features.detach(), batch)
            if positions is not None and strain is not None:
                of_forces, of_virial = self._of_derivatives(features, [positions, strain])
                found |= {FORCES: of_forces} if forces else {}
                found |= {STRESS: per_volume(of_virial, batch["cell"])} if stress else {}
        return found

    def _of_energies(self, features: Tensor, batch: Batch) -> dict[str, Tensor]:
        n_frames = batch["n_atoms"].shape[0]
        summed = features.new_zeros(n_frames, features.shape[1]).index_add_(0, batch["frame"], features)
        return {ENERGY: self.of_features(summed), ENERGIES: self.of_features(features)}

    def _of_derivatives(self, features: Tensor, variables: list[Tensor]) -> list[Tensor]:
        """Root of the sum of squared derivatives, in each variable, of all combinations of features."""
        if self.forces_scale is None:
            raise ForgefieldError(
                "The uncertainty of forces was not calibrated, because the validation frames have no forces; request energies "
                "only."
            )
        summed = (features @ self._combinations(features)).sum(0)  # frames do not interact
        variances = [torch.zeros_like(variable) for variable in variables]
        for number, column in enumerate(summed):
            last = number == len(summed) - 1
            slopes = torch.autograd.grad(column, variables, retain_graph=not last, allow_unused=True)
            for variance, slope in zip(variances, slopes):
                variance += 0 if slope is None else slope.square()
        return [self.forces_scale * variance.sqrt() for variance in variances]

    def _combinations(self, like: Tensor) -> Tensor:
        """(n_weights, n) columns whose squared derivatives sum up to variances: all of the factor, or random ones."""
        factor = self._on(like)
        if factor.shape[1] <= MOST_PASSES:
            return factor
        generator = torch.Generator().manual_seed(0)  # the same combinations in every call: forces vary smoothly
        drawn = torch.randn(factor.shape[1], MOST_PASSES, generator=generator, dtype=factor.dtype).to(factor.device)
        return factor @ (drawn / math.sqrt(MOST_PASSES))

    def _on(self, like: Tensor) -> Tensor:
        return self.factor.to(like.device)

    def _require_size(self, features: Tensor) -> None:
        if features.shape[1] != self.factor.shape[0]:
            raise ForgefieldError(
                f"The uncertainty is that of a model with {self.factor.shape[0]} weights in its last layer; this one has "
                f"{features.shape[1]}."
            )


class UncertainPotential(Potential):
    """A potential whose outputs include uncertainties.

    potential: the model. uncertainty: of its last layer. level: `energy`, or `forces` for those of forces and stress too,
    where these are requested.
    """

    def __init__(self, potential: Potential, uncertainty: LastLayerUncertainty, level: str) -> None:
        super().__init__(potential.model, max_neighbours=potential.max_neighbours)
        require_level(level)
        if level == "forces" and potential.forces_are_direct:
            raise ForgefieldError(
                "Forces of this model are not the derivative of its energy (task.forces.direct), so their uncertainty does not "
                "follow from it; request uncertainty='energy'."
            )
        self.base, self.uncertainty, self.level = potential, uncertainty, level
        self.has_energy, self.forces_are_direct = potential.has_energy, potential.forces_are_direct

    @property
    def extra_outputs(self) -> Mapping[str, ExtraOutput]:
        return self.base.extra_outputs

    @property
    def uncertainty_outputs(self) -> Mapping[str, str]:
        return {ENERGY: "frame", ENERGIES: "atom"} | (
            {FORCES: "atom", STRESS: "frame"} if self.level == "forces" else {}
        )

    def forward(
        self, batch: Batch, *, forces: bool = True, stress: bool = False, memory: StepMemory | None = None
    ) -> dict[str, Tensor]:
        """As those of the potential, and uncertainties; see `LastLayerUncertainty.evaluate`."""
        outputs: dict[str, Tensor] = self.base(batch, forces=forces, stress=stress, memory=memory)
        derivatives = self.level == "forces"
        return outputs | self.uncertainty.evaluate(
            self.base, batch, forces=forces and derivatives, stress=stress and derivatives
        )


def with_uncertainty(
    potential: Potential, run: Run, which: str, level: str | None, head: str | None = None
) -> Potential:
    """The potential of a run with uncertainties as additional outputs; as it is without `level` (`energy` or `forces`), and if
    it has uncertainties already, as an ensemble has. head: its branch."""
    require_level(level)
    if level is None or potential.uncertainty_outputs:
        return potential
    return UncertainPotential(potential, load_uncertainty(run, which, head), level).eval().requires_grad_(False)


def has_uncertainty(run: Run, head: str | None = None) -> bool:
    """Whether a run has uncertainties of its best weights, or of their branch `head`, in a file that is not damaged."""
    try:
        stored = run.read_uncertainty(head)
        return stored is not None and _note(stored, run.path)["weights_sha256"] == run.read_weights("best").sha256
    except ForgefieldError:
        return False


def write_uncertainty(
    run: Run, uncertainty: LastLayerUncertainty, tensors: Mapping[str, Tensor], head: str | None = None
) -> Path:
    """Write the uncertainties of a run's best weights, or of their branch `head`; returns the file. tensors: additional ones
    to store."""
    note = {
        VERSION: UNCERTAINTY_FILE.version,
        **uncertainty.about,
        "weights_sha256": run.read_weights("best").sha256,
        "energy_scale": uncertainty.energy_scale,
        "forces_scale": uncertainty.forces_scale,
    }
    path = run.uncertainty_path(head)
    state = {"factor": uncertainty.factor, **tensors}
    write_weights(path, {name: tensor.cpu().contiguous() for name, tensor in state.items()}, {"uncertainty": note})
    return path


def load_uncertainty(run: Run, which: str = "best", head: str | None = None) -> LastLayerUncertainty:
    """The uncertainties of a run's best weights; an error says how to make them where there are none.

    which: the weights that they are to be used with; those of others than the best are refused. head: a branch.
    """
    if which != "best":
        raise ForgefieldError("Uncertainties are those of the best weights of a run; leave which (--which) out.")
    weights = run.read_uncertainty(head)
    if weights is None:
        raise ForgefieldError(f"Run {run.name} has no uncertainties; {_remedy(run)}")
    path = run.path if isinstance(run, PackagedRun) else run.uncertainty_path(head)
    note = _note(weights, path)
    if note["weights_sha256"] != run.read_weights("best").sha256:
        raise ForgefieldError(
            f"{path} was computed for other weights than the run has now; run `forgefield uncertainty {run.path}` again."
        )
    factor = weights.state.get("factor")
    if factor is None or factor.ndim != 2 or factor.dtype != torch.float64:
        raise ForgefieldError(
            f"{path} is damaged: it has no matrix 'factor'; `forgefield uncertainty` writes it again."
        )
    return LastLayerUncertainty(factor, note["energy_scale"], note["forces_scale"], note)


def _remedy(run: Run) -> str:
    """What to do about a run without uncertainties."""
    if run.of_points or not run.has_energy:
        return "they are those of models with an energy."
    branches = branch_names(run.info["model"])
    if (
        type(run.load_potential("best", head=next(iter(branches), None)).interface).last_layer
        is AtomisticModel.last_layer
    ):
        return (
            f"its model {run.info['model']['name']} does not define the last layer from which they are computed. Train several "
            "models and combine them (--ensemble, forgefield.Ensemble)."
        )
    if isinstance(run, PackagedRun):
        return (
            "it is a package, and they are computed from the training data. Run `forgefield uncertainty RUN` with the run that "
            f"it was exported from, then `forgefield export RUN -o {run.path}` again."
        )
    if "train" not in (run.settings.get("data") or {}):
        return "it does not name the training data from which they are computed."
    return f"`forgefield uncertainty {run.path}` computes them from its training data."


def _note(stored: Weights, path: Path) -> dict[str, Any]:
    """The description of uncertainties in `stored`, the content of the file `path`."""
    note = stored.about.get("uncertainty")
    if not isinstance(note, dict):
        raise ForgefieldError(f"{path} is not a file of uncertainties; `forgefield uncertainty` writes it again.")
    note = UNCERTAINTY_FILE.upgrade(note, path)
    for key, kinds in (("weights_sha256", str), ("energy_scale", float), ("forces_scale", (float, type(None)))):
        if key not in note or not isinstance(note[key], kinds):
            raise ForgefieldError(f"{path} is damaged: '{key}' is missing or of a wrong type.")
    return note


def require_level(level: str | None) -> None:
    """Raise for an unknown value of an option `uncertainty`."""
    if level is not None and level not in LEVELS:
        raise ForgefieldError(f"uncertainty is '{level}'; choose one of {', '.join(LEVELS)}, or leave it out.")

"""Which models can have uncertainties of their last layer, decided for a run, or for a config before it is trained."""

from __future__ import annotations

from forgefield.config.trust import CONFIG
from forgefield.errors import ForgefieldError
from forgefield.models.interface import AtomisticModel, no_last_layer
from forgefield.models.resolving import branch_names, check_model, direct_outputs
from forgefield.runs import Run
from forgefield.settings import Config
from forgefield.training.problem.heads import has_energy


def require_suitable_run(run: Run) -> None:
    """Refuse a run whose model predicts no energy, and ensembles."""
    if run.of_points:
        raise ForgefieldError(
            f"Run {run.name} was trained on grid points; uncertainties are those of energies and forces."
        )
    if run.members:
        raise ForgefieldError(
            f"Run {run.name} is an ensemble, whose uncertainties are the deviations of its members, not those of a last layer."
        )
    _require_energy(f"Run {run.name}", run.has_energy)


def require_suitable_config(config: Config, path: str) -> None:
    """Refuse a config of frames, without `model.from`, whose model will have no uncertainties. path: of its file."""
    _, cls, _ = check_model(config.model, trust=CONFIG)
    trains_energy = config.task is None or has_energy(config.task)
    gives_energy = trains_energy and not direct_outputs(config.model, trust=CONFIG)
    _require_energy(f"{path}: the model", gives_energy)
    if branches := branch_names(config.model):
        raise ForgefieldError(
            f"{path}: the model has several branches ({', '.join(branches)}); a learning loop trains models with one."
        )
    if not issubclass(cls, AtomisticModel) or cls.last_layer is AtomisticModel.last_layer:
        raise ForgefieldError(f"{path}: {no_last_layer(cls)}")


def _require_energy(what: str, gives_energy: bool) -> None:
    if not gives_energy:
        raise ForgefieldError(f"{what} predicts no energy; uncertainties are those of energies and forces.")

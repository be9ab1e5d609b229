"""Checks before a training: of settings, and that all ranks have the same settings and data."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import nn

from forgefield.config.sources import naming_the_line
from forgefield.config.template import commented_yaml
from forgefield.config.trust import CONFIG
from forgefield.data.dataset import GraphDataset
from forgefield.data.module import FrameData
from forgefield.errors import ForgefieldError
from forgefield.models.interface import AtomisticModel
from forgefield.models.potential import Potential
from forgefield.models.resolving import check_model
from forgefield.parallel.environment import MPI_LAUNCHERS, check_trainer_options
from forgefield.parallel.ranks import Ranks
from forgefield.parallel.strategies import check_strategy
from forgefield.settings import Config
from forgefield.tasks.options import DENOISE, TaskOptions, quantity, targets_of
from forgefield.tasks.targets import LABELS
from forgefield.training.optim.optimisers import build_optimiser
from forgefield.training.problem.heads import has_energy
from forgefield.training.problem.initial_model import refuse_itself, starts_from_run
from forgefield.training.weighting import weighting_options


def check_model_section(config: Config) -> None:
    """Raise ForgefieldError for a model or an option of it that does not exist, naming the line that sets it."""
    if not starts_from_run(config):
        with naming_the_line(config, "model"):
            check_model(config.model, trust=CONFIG)


def check_settings(config: Config, options: dict[str, Any], ranks: Ranks) -> None:
    """Raise ForgefieldError for settings that cannot work. options: the config's `trainer` section."""
    check_model_section(config)
    if config.training.ensemble is not None:
        raise ForgefieldError(
            "training.ensemble: only forgefield train and forgefield learn train several models; here, set "
            "training.ensemble=null."
        )
    if starts_from_run(config):
        refuse_itself(config)
    else:
        name, cls, _ = check_model(config.model, trust=CONFIG)
        if issubclass(cls, AtomisticModel) and not cls.trainable:
            raise ForgefieldError(
                f"model.name={name}: an ASE calculator has no weights to train. `forgefield import ase "
                f"{config.model['module']} --species ...` makes a run of it, to be tested and compared with trained models."
            )
        uses_kernels = issubclass(cls, AtomisticModel) and (cls.sums_over_edges or cls.convolves)
        if not config.training.kernels.edges and not uses_kernels:
            raise ForgefieldError(
                f"training.kernels.edges=false: {name} has no sums over edges that use kernels or compiled C code; leave this "
                "setting out."
            )
    weighting_options(config.training.weighting)
    optimiser = build_optimiser(config.training.optimizer, [nn.Parameter(torch.zeros(2, 2))], lr=config.training.lr)
    if ranks.world_size > 1 and isinstance(optimiser, torch.optim.LBFGS):
        raise ForgefieldError(
            "training.optimizer: the number of evaluations in a step of LBFGS depends on the loss and would differ between "
            "processes; train in one process or with another optimiser."
        )
    strategy = options.get("strategy")
    check_strategy(strategy, world_size=ranks.world_size)
    if strategy == "ddp_with_mpi" and ranks.launch.launcher not in MPI_LAUNCHERS:
        raise ForgefieldError(
            f"trainer.strategy={strategy} is for processes started by mpirun or mpiexec (found: {ranks.launch.launcher}); "
            "leave it out."
        )
    if ranks.world_size > 1 and not isinstance(options.get("val_check_interval"), (int, float, type(None))):
        raise ForgefieldError(
            "trainer.val_check_interval as a duration is not supported with several processes, because they would not validate "
            "at the same batch; set a number of batches."
        )
    check_trainer_options(
        ranks.launch,
        devices=options.get("devices"),
        num_nodes=options.get("num_nodes"),
        accelerator=options.get("accelerator"),
    )


def require_same_settings(config: Config, ranks: Ranks) -> None:
    """Raise ForgefieldError if ranks have different settings, for example because of environment variables."""
    _require_same("the same settings", commented_yaml(config), ranks)


def require_same_data(fingerprint: str, ranks: Ranks) -> None:
    """Raise ForgefieldError if ranks have different data, of which each uses a part."""
    _require_same("the same data (files must be identical on all nodes)", fingerprint, ranks)


def _require_same(what: str, text: str, ranks: Ranks) -> None:
    hashes = ranks.all_gather(hashlib.sha256(text.encode()).hexdigest())
    for rank, value in enumerate(hashes):
        if value != hashes[0]:
            raise ForgefieldError(f"{ranks.describe(rank)} does not have {what} as {ranks.describe(0)}.")


def require_inputs(potential: Potential, data: FrameData) -> None:
    """Raise ForgefieldError for frames without a value that the model needs as an input."""
    for name in potential.required_inputs:
        for split, dataset in data.splits():
            missing = np.flatnonzero(~dataset.frames.carries(name)) if name in dataset.fields else [0]
            if len(missing):
                raise ForgefieldError(
                    f"The model needs {name} as an input, but {dataset.frames.where(int(missing[0]))} of data.{split} does not "
                    "have it; define it in data.labels.fields, or remove frames without it."
                )


def require_labels_of_branches(task: TaskOptions, train: GraphDataset) -> None:
    """Raise ForgefieldError if the training frames of a branch have none of its labels: nothing would be learnt from them."""
    targets: dict[str, list[str]] = {}
    for name in targets_of(task):
        branch, dot, _ = name.partition(".")
        if dot:
            targets.setdefault(branch, []).append(LABELS.get(quantity(name), quantity(name)))
    for branch, names in targets.items():
        chosen = train.frames.branch_of_frame([branch]) == 0
        if chosen.any() and not any((train.frames.carries(name) & chosen).any() for name in names):
            raise ForgefieldError(
                f"None of the {chosen.sum()} training frames of the branch {branch} carries {' or '.join(names)}; give "
                "labelled frames. (Predictions are labels only if they were written with forgefield predict --as-labels.)"
            )


def require_any_label(task: TaskOptions, split: str, dataset: GraphDataset | None) -> None:
    """Raise ForgefieldError if no frame of a validation or test set has a label of the task."""
    quantities = [quantity(name) for name in targets_of(task) if name != DENOISE]
    names = tuple(dict.fromkeys(LABELS.get(name, name) for name in quantities))
    if not names:
        return
    if split.startswith("test") and has_energy(task):
        names = tuple(dict.fromkeys([*LABELS.values(), *names]))
    if dataset is not None and not any(dataset.frames.carries(name).any() for name in names):
        setting = f"data.{split.replace('-', '.', 1)}"
        instead = f"set {setting}=0" if "-" not in split else "leave this set out"
        raise ForgefieldError(
            f"No frame of {setting} has {', '.join(names)}, so that no error can be measured; use labelled frames, or "
            f"{instead}."
        )

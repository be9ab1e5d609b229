"""Whatever can be known to be wrong before any work is done, and whether all ranks were given the same."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import nn

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
from forgefield.tasks.options import DENOISE, quantity, targets_of
from forgefield.tasks.targets import LABELS
from forgefield.training.optim.optimisers import build_optimiser
from forgefield.training.problem.heads import has_energy
from forgefield.training.problem.initial_model import refuse_itself, starts_from_run
from forgefield.training.weighting import weighting_options


def check_settings(config: Config, options: dict[str, Any], ranks: Ranks) -> None:
    """Refuse settings that cannot work. options: the config's `trainer` section as a plain dict."""
    if starts_from_run(config):
        refuse_itself(config)
    else:
        name, found, _ = check_model(config.model, trust=CONFIG)
        if issubclass(found, AtomisticModel) and not found.trainable:
            raise ForgefieldError(
                f"model.name={name}: an ASE calculator has no weights that could be trained. `forgefield import ase "
                f"{config.model['module']} --species ...` makes a run of it, to be tested and compared with trained models."
            )
        uses_kernels = issubclass(found, AtomisticModel) and (found.sums_over_edges or found.convolves)
        if not config.training.kernels.edges and not uses_kernels:
            raise ForgefieldError(
                f"training.kernels.edges=false: {name} has no sums over edges that use kernels or compiled C code; leave this "
                "setting out."
            )
    weighting_options(config.training.weighting)
    optimiser = build_optimiser(config.training.optimizer, [nn.Parameter(torch.zeros(2, 2))], lr=config.training.lr)
    if ranks.world_size > 1 and isinstance(optimiser, torch.optim.LBFGS):
        raise ForgefieldError(
            "training.optimizer: LBFGS decides by the loss how often it evaluates a step, which each of several processes "
            "would do differently; train in one process or with another optimiser."
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
            "trainer.val_check_interval as a time: the clocks of several processes would not agree on when to validate; "
            "give a number of batches."
        )
    check_trainer_options(
        ranks.launch,
        devices=options.get("devices"),
        num_nodes=options.get("num_nodes"),
        accelerator=options.get("accelerator"),
    )


def require_same_settings(config: Config, ranks: Ranks) -> None:
    """A variable of the environment may differ between nodes, and with it what a config means there."""
    _require_same("the same settings", commented_yaml(config), ranks)


def require_same_data(fingerprint: str, ranks: Ranks) -> None:
    """Ranks divide one list of frames among themselves; on another list the division would mean nothing."""
    _require_same("the same data (files must be alike on all nodes)", fingerprint, ranks)


def _require_same(what: str, text: str, ranks: Ranks) -> None:
    all_gather = ranks.all_gather(hashlib.sha256(text.encode()).hexdigest())
    for rank, other in enumerate(all_gather):
        if other != all_gather[0]:
            raise ForgefieldError(f"{ranks.describe(rank)} does not have {what} as {ranks.describe(0)}.")


def require_inputs(potential: Potential, data: FrameData) -> None:
    """Refuse frames without a value that the model reads: it would be computed with as if it were a number."""
    for name in potential.required_inputs:
        for split, dataset in data.splits():
            missing = np.flatnonzero(~dataset.frames.carries(name)) if name in dataset.fields else [0]
            if len(missing):
                raise ForgefieldError(
                    f"The model reads {name}, and {dataset.frames.where(int(missing[0]))} of data.{split} does not carry it; "
                    f"name it in data.labels.fields, or leave out frames without."
                )


def require_any_label(task: Any, split: str, dataset: GraphDataset | None) -> None:
    """Refuse frames that are meant to measure the model and carry nothing to measure it with. task: its options."""
    given = [quantity(name) for name in targets_of(task) if name != DENOISE]
    names = tuple(dict.fromkeys(LABELS.get(name, name) for name in given))
    if not names:
        return
    if split.startswith("test") and has_energy(task):
        names = tuple(dict.fromkeys([*LABELS.values(), *names]))
    if dataset is not None and not any(dataset.frames.carries(name).any() for name in names):
        setting = f"data.{split.replace('-', '.', 1)}"
        instead = f"{setting}=0" if "-" not in split else "leave this set out"
        raise ForgefieldError(
            f"None of the frames of {setting} carries {', '.join(names)}, so nothing could be measured on them; "
            f"give labelled frames or {instead}."
        )

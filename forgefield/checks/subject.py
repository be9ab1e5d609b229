"""The model and the frames that `forgefield check` examines: those of a run, or a new model for the data of a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forgefield.checks.probe import CheckResult
from forgefield.checks.suite import run_checks
from forgefield.config.loading import load_config, override_config
from forgefield.config.point_checks import require_frames
from forgefield.config.schema import Config
from forgefield.config.trust import CONFIG
from forgefield.data.frame import Frame
from forgefield.data.neighbours.graph import graph_of
from forgefield.data.reading import read_table
from forgefield.data.species import SpeciesTable
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError
from forgefield.models.building import build_model
from forgefield.models.potential import Potential
from forgefield.models.resolving import branch_names, hooks_of, single_branch
from forgefield.runs import Run
from forgefield.training.problem.frames import build_frames_problem


@dataclass(frozen=True)
class Subject:
    """model: its resolved options. frames: to choose from. knots: intervals of the tables from which a training reads radial
    weights; zero where it uses none."""

    potential: Potential
    frames: FrameTable
    model: Mapping[str, Any]
    knots: int

    @classmethod
    def of_run(
        cls,
        name: str,
        overrides: Sequence[str] = (),
        *,
        data: str | None = None,
        which: str = "best",
        head: str | None = None,
        trust_code: bool = False,
    ) -> Subject:
        """The trained model of a run. overrides: settings for reading `data`; default: the training data of the run."""
        run = Run.open(name, trust_code=trust_code)
        run.require_head(head)
        config = run.config
        if overrides:
            config = override_config(config, list(overrides), allowed=("data.labels", "data.units"), verb="check")
        source = data if data is not None else config.data.train
        if source is None:
            raise ForgefieldError(f"Run {run.name} has no record of its training data; name a file with --data FILE.")
        potential = run.load_potential(which, head=head)
        frames = read_table(source, config.data.labels, config.data.units, required=False)
        return cls(potential, frames, run.info["model"], _knots(config))

    @classmethod
    def of_config(
        cls,
        file: str | Path,
        overrides: Sequence[str] = (),
        *,
        data: str | None = None,
        head: str | None = None,
        trust_code: bool = False,
    ) -> Subject:
        """A model with new weights for the data of a config. data: frames to check on; default: the training data."""
        config = load_config(file, list(overrides), trust_code=trust_code)
        require_frames(config, "check", "their gradients are compared with autograd at the start of a training")
        knots = _knots(config)
        config.training.precision, config.training.freeze, config.training.lora = "float64", None, None
        problem = build_frames_problem(config)
        potential, resolved = problem.model, problem.resolved
        if head is not None or branch_names(resolved):
            resolved, _ = single_branch(resolved, None, head)
            potential = build_model(resolved, precision="float64", seed=config.seed, trust=CONFIG)
        frames = problem.data.train.frames
        if data is not None:
            frames = read_table(data, config.data.labels, config.data.units, required=False)
        return cls(potential, frames, resolved, knots)

    def check(self, frames: Sequence[Frame], generator: np.random.Generator) -> list[CheckResult]:
        """The results of all checks on these frames. generator: draws rotations and directions."""
        has_limit = self.potential.interface.isolated_limit
        energies = hooks_of(self.model).isolated_energies(self.model) if has_limit else None
        return run_checks(
            self.potential,
            frames,
            SpeciesTable(self.potential.species),
            graph_of(self.potential).reach,
            generator=generator,
            reference_energies=energies,
        )

    def choose_frames(self, count: int, generator: np.random.Generator) -> list[Frame]:
        """Random frames in the order of the file; single atoms only if there are no others."""
        several = (self.frames.n_atoms > 1).nonzero()[0]
        rows = several if len(several) else (self.frames.n_atoms > 0).nonzero()[0]
        chosen = generator.permutation(len(rows))[:count]
        return list(self.frames.frames(rows[sorted(chosen)]))

    def radial_tables(self) -> str | None:
        """One sentence about the accuracy of the radial tables; None where there are none."""
        return self.potential.interface.radial_table_line(self.knots) if self.knots else None


def _knots(config: Config) -> int:
    kernels = config.training.kernels
    if kernels.radial == "exact" or config.training.precision == "float64":
        return 0
    return kernels.knots

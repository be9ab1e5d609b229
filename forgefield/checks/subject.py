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
from forgefield.data.module import read_data
from forgefield.data.neighbours.graph import graph_of
from forgefield.data.reading import read_table
from forgefield.data.species import SpeciesTable
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.branches import single
from forgefield.models.potential import Potential
from forgefield.models.registry import branch_names, build_model
from forgefield.runs import Run
from forgefield.training.problem.model_options import resolved_model


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
        prepared = read_data(config.data, config.seed, branches=branch_names(config.model))
        resolved = resolved_model(config, prepared)
        if head is not None or branch_names(resolved):
            resolved, _ = single(resolved, None, head)
        frames = prepared.train.frames
        if data is not None:
            frames = read_table(data, config.data.labels, config.data.units, required=False)
        potential = build_model(resolved, precision="float64", seed=config.seed, trust=CONFIG)
        return cls(potential, frames, resolved, _knots(config))

    def check(self, frames: Sequence[Frame], generator: np.random.Generator) -> list[CheckResult]:
        """The results of all checks on these frames. generator: draws rotations and directions."""
        energies = self._isolated_energies() if self.potential.interface.isolated_limit else None
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

    def _isolated_energies(self) -> Mapping[str, float] | None:
        """Energies of isolated atoms that follow from the options of the model; None where they are not fixed."""
        shifts = self.model.get("energy_shifts")
        if shifts is None or self.model.get("energy_shifts_trainable"):
            return None
        return shifts if isinstance(shifts, dict) else dict.fromkeys(self.model["species"], shifts)


def _knots(config: Config) -> int:
    kernels = config.training.kernels
    if kernels.radial == "exact" or config.training.precision == "float64":
        return 0
    return kernels.knots

"""Trainings on grid points that start from the network of another run: `model: {from: RUN, which: best}`.

Options, scalings, levels and weights are those of that run, which was trained here or imported; the new run keeps all of it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.ldos.data import PointTable, Scaling
from forgefield.ldos.model import LDOSNetwork, load_network
from forgefield.parallel.ranks import Ranks
from forgefield.runs import Run
from forgefield.settings import Config

STARTING = ("from", "which", "shifts")
"""Keys of the section that are no options of the model."""


@dataclass(frozen=True)
class InitialNetwork:
    """whose: the run, in words. resolved: its options in full. state: weights to begin with; None where the run has begun, and
    goes on with its own."""

    whose: str
    resolved: dict[str, Any]
    state: dict[str, Tensor] | None

    def settle(self, config: Config) -> Config:
        """The config with what the network decides. Refuses what contradicts it."""
        from forgefield.ldos.electronic.energy_grid import EnergyGrid

        config, model = copy.deepcopy(config), config.model
        if model.get("shifts") != "keep":
            raise ForgefieldError("model.shifts is for energies of potentials; for grid points leave it out.")
        for key, value in model.items():
            if key not in STARTING and value != self.resolved.get(key):
                raise ForgefieldError(
                    f"model.{key} is {value}, and the network of {self.whose} has {self.resolved.get(key)}; leave it out: it "
                    "comes with the network."
                )
        points, known = config.points, self.resolved["points"]
        given = points.energies
        grid = None if given is None else EnergyGrid.from_segments(given if isinstance(given, list) else [given])
        same = grid is None if known["energies"] is None else grid == EnergyGrid.from_dict(known["energies"])
        if points.target != known["target"] or not same:
            raise ForgefieldError(
                f"data.points: target {points.target} and energies {given} are not those of the network of {self.whose}, which "
                f"gives {known['target']} at {known['energies']}."
            )
        config.model["name"] = self.resolved["name"]
        return config

    def options(self, table: PointTable, descriptors: Any) -> dict[str, Any]:
        """Options in full for these data. descriptors: what the config says of them; None: as the network knows them."""
        known = self.resolved["points"]
        for what, has, wants in (
            ("descriptors", table.n_inputs, len(known["inputs"]["shift"])),
            ("target values", table.n_targets, len(known["outputs"]["shift"])),
        ):
            if has != wants:
                raise ForgefieldError(f"data.train has {has} {what} a point, and the network of {self.whose} {wants}.")
        return {**self.resolved, "points": {**known, "descriptors": descriptors or known["descriptors"]}}

    def scaling(self, side: str) -> Scaling:
        """Of inputs or outputs: that of the network, not of the new data."""
        return Scaling.from_dict(self.resolved["points"][side])

    def start(self, model: LDOSNetwork) -> None:
        if self.state is not None:
            model.load_state_dict(self.state)


def initial_network(run: Run, config: Config, ranks: Ranks, *, begun: bool) -> InitialNetwork | None:
    """The network that `model.from` names, read by rank 0 and sent to all; None where the config describes a new one.

    begun: whether `run` has begun, and so has its own copy of the network.
    """
    if "from" not in config.model:
        return None
    return ranks.broadcast(_read(run, config, begun) if ranks.is_rank_zero else None)


def _read(run: Run, config: Config, begun: bool) -> InitialNetwork:
    model = config.model
    if begun:
        return InitialNetwork(f"run {model['from']}", run.info["model"], None)
    first = Run.open(model["from"], out=config.out)
    if not first.of_points:
        raise ForgefieldError(
            f"model.from: run {first.name} is a potential, and data.points says samples are grid points."
        )
    network = load_network(first, model["which"])
    return InitialNetwork(f"run {first.name}", first.info["model"], dict(network.state_dict()))

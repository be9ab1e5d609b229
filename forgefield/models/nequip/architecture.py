"""What differs between the architectures of the NequIP framework when their models are imported."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from forgefield.models.nequip.modules import Describe

SHARED_OPTIONS = {
    "num_layers": "num_layers",
    "l_max": "l_max",
    "parity": "parity",
    "per_edge_type_cutoff": "per_edge_type_cutoff",
    "avg_num_neighbors": "avg_num_neighbours",
    "per_type_energy_scales": "energy_scales",
    "per_type_energy_shifts": "energy_shifts",
    "per_type_energy_scales_trainable": "energy_scales_trainable",
    "per_type_energy_shifts_trainable": "energy_shifts_trainable",
    "readout_mlp_hidden_layers_depth": "readout_mlp_depth",
    "readout_mlp_hidden_layers_width": "readout_mlp_width",
    "readout_mlp_nonlinearity": "readout_mlp_nonlinearity",
}
"""Options that all architectures of the framework have, and Forgefield's names of them."""


def _unchanged(name: str, value: Tensor, resolved: Mapping[str, Any]) -> Tensor:
    return value


@dataclass(frozen=True)
class Architecture:
    """How models of one architecture of the framework are converted.

    name: of Forgefield's model.
    title: for messages.
    builders: its `_target_`s, the default one first.
    embedding: the weight by which the architecture is recognised.
    derived: state that follows from the options.
    renamed: names of options in the framework and in Forgefield.
    refused_unless: options without a counterpart, and the value that has no effect.
    weight_name: from the framework's name of a weight to Forgefield's, None for an unknown weight.
    translate: (file, option, value) -> Forgefield's options, for options that are not only renamed; None for an unknown option.
    describe: arguments of a builder, from the modules of a package.
    radial: weights that multiply the radial basis, which change with the unit of length; None where the basis has no unit.
    arrange: (Forgefield's name, weight, resolved options) -> the weight in Forgefield's order.
    """

    name: str
    title: str
    builders: tuple[str, ...]
    embedding: re.Pattern[str]
    derived: re.Pattern[str]
    renamed: Mapping[str, str]
    weight_name: Callable[[str], str | None]
    translate: Callable[[Path, str, object], dict[str, Any] | None]
    describe: Describe
    refused_unless: Mapping[str, Any]
    radial: re.Pattern[str] | None = None
    arrange: Callable[[str, Tensor, Mapping[str, Any]], Tensor] = _unchanged

"""Hyperparameters of NequIP: their meaning, the presets, and how what is not given is filled in from the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forgefield.config.option import option
from forgefield.errors import ForgefieldError
from forgefield.models.options import ACTIVATIONS, TermOptions, check_values, complete_terms


@dataclass
class NequIPOptions(TermOptions):
    """Hyperparameters of NequIP. Numbers left `None` are filled in from the statistics of the training data."""

    num_layers: int = option(4, at_least=1)
    """Interaction layers: each lets an atom see one cutoff further."""
    l_max: int = option(1, at_least=0)
    """Highest rotation order of features and edge harmonics. 1 is fast, 2 and 3 are more accurate."""
    parity: bool = True
    """Keep features of both mirror parities; without, only those with the parity of the harmonics (0e, 1o, 2e, ...), which is
    faster."""
    num_features: int | list[int] = 32
    """Channels of every rotation order, or one number per order."""
    type_embed_num_features: int | None = option(None, at_least=1)
    """Width of the species embedding. Default: channels of order 0."""
    radial_mlp_depth: int = option(1, at_least=0)
    """Hidden layers of the perceptron that makes radial weights."""
    radial_mlp_width: int = option(128, at_least=1)
    """Neurons in each of them."""
    num_bessels: int = option(8, at_least=1)
    """Radial basis functions."""
    bessel_trainable: bool = False
    """Train the frequencies of the radial basis."""
    polynomial_cutoff_p: float = option(6, at_least=2)
    """Exponent of the envelope; smaller decays earlier."""
    readout_mlp_depth: int = option(0, at_least=0)
    """Hidden layers between last features and atomic energy."""
    readout_mlp_width: int | None = option(None, at_least=1)
    """Neurons in each of them. Default: channels of order 0."""
    readout_mlp_nonlinearity: str | None = option("silu", choices=(*ACTIVATIONS, None))
    """silu, mish, gelu, ssp, tanh or null."""
    convnet_sc: bool = True
    """Self-connection: a species-dependent linear map of an atom's own features, from the second layer on."""
    convnet_resnet: bool = False
    """Add the features of the layer before, where they are of the same kind."""
    nonlinearity: str = option("gate", choices=("gate", "norm"))
    """gate, or norm: the activation of each channel's length."""
    nonlinearity_scalars: str = option("silu", choices=("silu", "ssp", "tanh"))
    """Activation of even scalars: silu, ssp or tanh."""
    nonlinearity_odd_scalars: str = option("tanh", choices=("tanh",))
    """Activation of odd scalars: an odd function, tanh."""
    nonlinearity_gates: str = option("silu", choices=("silu", "ssp", "tanh"))
    """Activation of gates: silu, ssp or tanh."""


PRESETS: dict[str, dict[str, Any]] = {
    name: {
        "num_layers": layers,
        "l_max": len(features) - 1,
        "num_features": features,
        "parity": False,
        "type_embed_num_features": 32,
        "radial_mlp_depth": 1,
        "radial_mlp_width": 128,
    }
    for name, layers, features in (
        ("S", 2, [128, 64]),
        ("M", 4, [128, 64, 32]),
        ("L", 6, [128, 64, 32, 32]),
        ("XL", 6, [320, 96, 64, 32, 32]),
    )
}
"""Sizes of the NequIP foundation models."""


def preset_options(name: str, section: Mapping[str, Any]) -> dict[str, object]:
    """Options of a preset. With another l_max, higher orders get as many channels as the highest one."""
    options = dict(PRESETS[name])
    l_max = section.get("l_max")
    if isinstance(l_max, int) and "num_features" not in section:
        features = options["num_features"]
        options["num_features"] = (features + [features[-1]] * max(l_max, 0))[: l_max + 1]
    return options


def complete_options(
    options: NequIPOptions, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
) -> NequIPOptions:
    """See `NequIP.complete`."""
    check_values(options)
    features = _check_features(options)
    filled: dict[str, Any] = {
        "num_features": features,
        "type_embed_num_features": options.type_embed_num_features or features[0],
        "readout_mlp_width": options.readout_mlp_width or features[0],
    }
    return dataclasses.replace(options, **filled, **complete_terms(options, species, cutoff, statistics))


def _check_features(options: NequIPOptions) -> list[int]:
    """Channels of each rotation order."""
    features = options.num_features
    features = [features] * (options.l_max + 1) if isinstance(features, int) else features
    if min(features, default=0) < 1:
        raise ForgefieldError(f"model.num_features is {options.num_features}; every number must be at least 1.")
    if len(features) != options.l_max + 1:
        raise ForgefieldError(
            f"model.num_features has {len(features)} numbers; "
            f"with model.l_max={options.l_max} it needs {options.l_max + 1}."
        )
    return features

"""Hyperparameters of Allegro: their meaning, the presets, and how what is not given is filled in from the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forgefield.config.option import option
from forgefield.errors import ForgefieldError
from forgefield.models.options import ACTIVATIONS, TermOptions, check_values, complete_terms


@dataclass
class AllegroOptions(TermOptions):
    """Hyperparameters of Allegro. Numbers left `None` are filled in from the statistics of the training data."""

    l_max: int = option(1, at_least=0)
    """Highest rotation order of edge harmonics and tensor features. 1 is fast, 2 and 3 are more accurate."""
    parity: bool = True
    """Keep tensor features of both mirror parities; without, only those with the parity of the harmonics (0e, 1o, 2e, ...)."""
    num_layers: int = option(2, at_least=1)
    """Layers: each couples the features of an edge once more with the environment of its centre."""
    num_scalar_features: int = option(64, at_least=1)
    """Scalar features of every edge and layer."""
    num_tensor_features: int = option(16, at_least=1)
    """Channels of the tensor features."""
    radial_chemical_embed: str = option("bessel", choices=("bessel", "spline"))
    """How length and species of an edge are embedded: bessel, a basis times species factors; spline, one per pair."""
    radial_chemical_embed_dim: int | None = option(None, at_least=1)
    """Width of this embedding; an even number for bessel. Default: num_scalar_features."""
    num_bessels: int | None = option(None, at_least=1)
    """Basis functions of bessel. Default: 8."""
    bessel_trainable: bool | None = None
    """Train the frequencies of bessel. Default: false."""
    polynomial_cutoff_p: float | None = option(None, at_least=2)
    """Exponent of the envelope of bessel; smaller decays earlier. Default: 6."""
    num_splines: int | None = option(None, at_least=1)
    """Basis functions of spline. Default: 16."""
    spline_span: int | None = option(None, at_least=1)
    """How many of them overlap at a grid point of spline; at most num_splines. Default: 12, or num_splines if less."""
    scalar_embed_mlp_depth: int = option(1, at_least=0)
    """Hidden layers of the perceptron after the embedding."""
    scalar_embed_mlp_width: int = option(64, at_least=1)
    """Neurons in each of them."""
    scalar_embed_mlp_nonlinearity: str | None = option("silu", choices=(*ACTIVATIONS, None))
    """silu, mish, gelu, ssp, tanh or null."""
    allegro_mlp_depth: int = option(1, at_least=0)
    """Hidden layers of the perceptron of every layer, which computes its scalars and the weights of the next."""
    allegro_mlp_width: int = option(64, at_least=1)
    """Neurons in each of them."""
    allegro_mlp_nonlinearity: str | None = option("silu", choices=(*ACTIVATIONS, None))
    """silu, mish, gelu, ssp, tanh or null."""
    tp_path_channel_coupling: bool = True
    """A weight for each coupling path and channel; without, all channels share the weight of a path."""
    weight_individual_irreps: bool = True
    """Harmonics of every degree have their own weight in an environment; without, one weight for all degrees."""
    readout_mlp_depth: int = option(1, at_least=0)
    """Hidden layers between all scalar features and the edge's energy."""
    readout_mlp_width: int = option(32, at_least=1)
    """Neurons in each of them."""
    readout_mlp_nonlinearity: str | None = option("silu", choices=(*ACTIVATIONS, None))
    """silu, mish, gelu, ssp, tanh or null."""
    forward_normalize: bool = True
    """Perceptrons preserve the variance of activations; without, that of gradients."""


PRESETS: dict[str, dict[str, Any]] = {
    name: {
        "l_max": l_max,
        "parity": True,
        "num_layers": layers,
        "num_scalar_features": scalars,
        "num_tensor_features": tensors,
        "scalar_embed_mlp_width": scalars,
        "allegro_mlp_width": scalars,
        "readout_mlp_width": scalars // 2,
    }
    for name, l_max, layers, scalars, tensors in (
        ("S", 1, 2, 64, 32),
        ("M", 2, 2, 128, 64),
        ("L", 3, 2, 128, 128),
        ("XL", 3, 3, 256, 128),
    )
}
"""Forgefield's choice of sizes."""
EMBEDDINGS: dict[str, dict[str, Any]] = {
    "bessel": {"num_bessels": 8, "bessel_trainable": False, "polynomial_cutoff_p": 6.0},
    "spline": {"num_splines": 16, "spline_span": 12},
}
"""Options of each embedding and their defaults."""


def preset_options(name: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a preset; the perceptrons follow another number of scalar features."""
    options = dict(PRESETS[name])
    scalars = section.get("num_scalar_features")
    if isinstance(scalars, int):
        options |= {"scalar_embed_mlp_width": scalars, "allegro_mlp_width": scalars}
        options["readout_mlp_width"] = max(1, scalars // 2)
    return options


def complete_options(
    options: AllegroOptions, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
) -> AllegroOptions:
    """See `Allegro.complete`."""
    check_values(options)
    filled = _complete_embedding(options) | complete_terms(options, species, cutoff, statistics)
    return dataclasses.replace(options, **filled)


def _complete_embedding(options: AllegroOptions) -> dict[str, Any]:
    """Options of the embedding with their defaults; options of the other embedding are errors."""
    kind = options.radial_chemical_embed
    for other, defaults in EMBEDDINGS.items():
        for key in defaults if other != kind else ():
            if getattr(options, key) is not None:
                raise ForgefieldError(
                    f"model.{key} is an option of model.radial_chemical_embed={other}; this is {kind}."
                )
    chosen = {key: getattr(options, key) for key in EMBEDDINGS[kind]}
    filled = {key: EMBEDDINGS[kind][key] if value is None else value for key, value in chosen.items()}
    if kind == "spline":
        if chosen["spline_span"] is None:
            filled["spline_span"] = min(filled["spline_span"], filled["num_splines"])
        if filled["spline_span"] > filled["num_splines"]:
            raise ForgefieldError(
                f"model.spline_span is {filled['spline_span']}; it must be at most "
                f"model.num_splines={filled['num_splines']}."
            )
    width = options.radial_chemical_embed_dim or options.num_scalar_features
    if kind == "bessel" and width % 2:
        name = "num_scalar_features" if options.radial_chemical_embed_dim is None else "radial_chemical_embed_dim"
        raise ForgefieldError(
            f"model.{name} is {width}; the bessel embedding needs an even number, half for the centre and half for "
            "the neighbour: change it or set model.radial_chemical_embed_dim."
        )
    return filled | {"radial_chemical_embed_dim": width}

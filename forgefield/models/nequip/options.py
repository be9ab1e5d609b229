"""Hyperparameters of NequIP: their meaning, the presets, and how what is not given is filled in from the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ase.data import atomic_numbers

from forgefield.errors import ForgefieldError


@dataclass
class NequIPOptions:
    """Hyperparameters of NequIP. Numbers left `None` are filled in from the statistics of the training data."""

    num_layers: int = 4
    """Interaction layers: each lets an atom see one cutoff further."""
    l_max: int = 1
    """Highest rotation order of features and edge harmonics. 1 is fast, 2 and 3 are more accurate."""
    parity: bool = True
    """Keep features of both mirror parities; without, only those of vectors' kind (0e, 1o, 2e, ...): faster."""
    num_features: int | list[int] = 32
    """Channels of every rotation order, or one number per order."""
    type_embed_num_features: int | None = None
    """Width of the species embedding. Default: channels of order 0."""
    radial_mlp_depth: int = 1
    """Hidden layers of the perceptron that makes radial weights."""
    radial_mlp_width: int = 128
    """Neurons in each of them."""
    num_bessels: int = 8
    """Radial basis functions."""
    bessel_trainable: bool = False
    """Train the frequencies of the radial basis."""
    polynomial_cutoff_p: float = 6
    """Exponent of the envelope; smaller decays earlier."""
    per_edge_type_cutoff: dict[str, Any] | None = None
    """Shorter cutoffs by species of centre and neighbour, A: {H: 3.0, O: {H: 3.5, O: 4.0}}; others have the cutoff."""
    avg_num_neighbours: float | dict[str, float] | None = None
    """Mean number of neighbours, or one per species; sums over edges are divided by its square root."""
    energy_scales: float | dict[str, float] | None = None
    """Energy unit of the network's output, eV, one or per species. Default: root mean square of the forces, times A."""
    energy_shifts: float | dict[str, float] | None = None
    """Energy of the isolated atom, eV, one or per species. Default: the reference energies."""
    energy_scales_trainable: bool = False
    """Train the scales."""
    energy_shifts_trainable: bool = False
    """Train the shifts."""
    readout_mlp_depth: int = 0
    """Hidden layers between last features and atomic energy."""
    readout_mlp_width: int | None = None
    """Neurons in each of them. Default: channels of order 0."""
    readout_mlp_nonlinearity: str | None = "silu"
    """silu, mish, gelu, ssp, tanh or null."""
    zbl: bool | dict[str, float] = False
    """Add the ZBL repulsion of nuclei; {polynomial_cutoff_p: 6} sets its envelope."""
    convnet_sc: bool = True
    """Self-connection: a species-dependent linear map of an atom's own features, from the second layer on."""
    convnet_resnet: bool = False
    """Add the features of the layer before, where they are of the same kind."""
    nonlinearity: str = "gate"
    """gate, or norm: the activation of each channel's length."""
    nonlinearity_scalars: str = "silu"
    """Activation of even scalars: silu, ssp or tanh."""
    nonlinearity_odd_scalars: str = "tanh"
    """Activation of odd scalars: an odd function, tanh."""
    nonlinearity_gates: str = "silu"
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


def preset_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """NequIPOptions of a preset beside those given: with another l_max, higher orders get as many channels as the highest."""
    options = dict(PRESETS[name])
    l_max = given.get("l_max")
    if isinstance(l_max, int) and "num_features" not in given:
        features = options["num_features"]
        options["num_features"] = (features + [features[-1]] * max(l_max, 0))[: l_max + 1]
    return options


def complete_options(
    options: NequIPOptions, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
) -> NequIPOptions:
    """See `NequIP.complete`."""
    _check(options, species, cutoff)
    features = options.num_features
    features = [features] * (options.l_max + 1) if isinstance(features, int) else features
    filled: dict[str, Any] = {
        "num_features": features,
        "type_embed_num_features": options.type_embed_num_features or features[0],
        "readout_mlp_width": options.readout_mlp_width or features[0],
    }
    if options.avg_num_neighbours is None:
        mean = from_statistics(statistics, "mean_neighbours", "avg_num_neighbours")
        filled["avg_num_neighbours"] = mean if mean > 0 else 1.0
    if options.energy_scales is None:
        rms = statistics.get("forces_rms") or statistics.get("energy_residual_std")
        filled["energy_scales"] = rms if rms else 1.0
    if options.energy_shifts is None:
        filled["energy_shifts"] = from_statistics(statistics, "reference_energies", "energy_shifts")
    return dataclasses.replace(options, **filled)


def from_statistics(statistics: Mapping[str, Any], fact: str, key: str) -> Any:
    if statistics.get(fact) is None:
        raise ForgefieldError(f"model.{key} is not given and there is no training data to take it from.")
    return statistics[fact]


def _check(options: NequIPOptions, species: tuple[str, ...], cutoff: float) -> None:
    """Raise for options that have no meaning, naming the key."""
    features = options.num_features if isinstance(options.num_features, list) else [options.num_features]
    at_least = {
        "num_layers": 1, "l_max": 0, "type_embed_num_features": 1, "radial_mlp_depth": 0, "radial_mlp_width": 1,
        "num_bessels": 1, "polynomial_cutoff_p": 2, "readout_mlp_depth": 0, "readout_mlp_width": 1,
    }  # fmt: skip
    for key, least in at_least.items():
        value = getattr(options, key)
        if value is not None and value < least:
            raise ForgefieldError(f"model.{key} is {value}; it must be at least {least}.")
    if min(features, default=0) < 1:
        raise ForgefieldError(f"model.num_features is {options.num_features}; every number must be at least 1.")
    if isinstance(options.num_features, list) and len(features) != options.l_max + 1:
        raise ForgefieldError(
            f"model.num_features has {len(features)} numbers; "
            f"with model.l_max={options.l_max} it needs {options.l_max + 1}."
        )
    choices = {
        "nonlinearity": ("gate", "norm"),
        "nonlinearity_scalars": ("silu", "ssp", "tanh"),
        "nonlinearity_odd_scalars": ("tanh",),
        "nonlinearity_gates": ("silu", "ssp", "tanh"),
        "readout_mlp_nonlinearity": ("silu", "mish", "gelu", "ssp", "tanh", None),
    }
    for key, allowed in choices.items():
        if getattr(options, key) not in allowed:
            words = ", ".join("null" if word is None else word for word in allowed)
            raise ForgefieldError(f"model.{key} is '{getattr(options, key)}'; choose one of {words}.")
    for key in ("avg_num_neighbours", "energy_scales", "energy_shifts"):
        check_per_species(f"model.{key}", getattr(options, key), species, positive=key != "energy_shifts")
    check_pair_cutoffs(options.per_edge_type_cutoff, species, cutoff)
    if options.zbl:
        check_zbl(options.zbl, species)


def check_per_species(key: str, value: Any, species: tuple[str, ...], positive: bool) -> None:
    if isinstance(value, Mapping) and set(value) != set(species):
        raise ForgefieldError(
            f"{key} names {', '.join(value)}; the species are {', '.join(species)}, give one number each."
        )
    numbers = list(value.values()) if isinstance(value, Mapping) else [] if value is None else [value]
    if positive and any(not number > 0 for number in numbers):
        raise ForgefieldError(f"{key} is {value}; it must be positive.")


def check_pair_cutoffs(table: Mapping[str, Any] | None, species: tuple[str, ...], cutoff: float) -> None:
    for centre, entry in (table or {}).items():
        for neighbour, value in entry.items() if isinstance(entry, Mapping) else [("", entry)]:
            where = ".".join(filter(None, ("model.per_edge_type_cutoff", centre, neighbour)))
            for symbol in filter(None, (centre, neighbour)):
                if symbol not in species:
                    raise ForgefieldError(f"{where}: {symbol} is not one of the species {', '.join(species)}.")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= cutoff:
                raise ForgefieldError(
                    f"{where} is {value}; it must be a number above 0 and at most data.cutoff={cutoff:g}."
                )


def check_zbl(zbl: bool | Mapping[str, float], species: tuple[str, ...]) -> None:
    for key, value in zbl.items() if isinstance(zbl, Mapping) else []:
        if key != "polynomial_cutoff_p":
            raise ForgefieldError(f"model.zbl.{key} is not an option; ZBL has polynomial_cutoff_p.")
        if value < 2:
            raise ForgefieldError(f"model.zbl.polynomial_cutoff_p is {value}; it must be at least 2.")
    for symbol in species:
        if not atomic_numbers.get(symbol):
            raise ForgefieldError(f"model.zbl needs chemical elements; {symbol} is not one.")


def pair_cutoff(table: Mapping[str, Any], centre: str, neighbour: str, cutoff: float) -> float:
    """Cutoff of an edge from `centre` to `neighbour`, A; what the table does not say has the model's."""
    entry = table.get(centre, cutoff)
    return float(entry.get(neighbour, cutoff) if isinstance(entry, Mapping) else entry)

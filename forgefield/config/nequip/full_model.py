"""Options of NequIP's `FullNequIPGNNModel`, which are lists over layers, as those of `NequIPGNNModel`, one for all layers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

FULL_MODEL = "FullNequIPGNNModel"
BY_LAYER = ("radial_mlp_depth", "radial_mlp_width")
_IRREP = re.compile(r"(?:(\d+)x)?(\d+)([eo])")
Irreps = list[tuple[int, int, int]]
"""Channels, degree and parity of each kind of features."""


def options_of_all_layers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `NequIPGNNModel` that make the same model. Raises ValueError, naming the option, if there are none."""
    options = {key: value for key, value in settings.items() if key not in ("irreps_edge_sh", "feature_irreps_hidden")}
    layers = settings.get("feature_irreps_hidden")
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        raise ValueError("feature_irreps_hidden must be a list with the features of every layer")
    for key in BY_LAYER:
        values = settings.get(key)
        if not isinstance(values, Sequence) or len(values) != len(layers):
            raise ValueError(f"{key} must be a list with a number for every layer")
        if len(set(values)) != 1:
            raise ValueError(f"{key} differs between layers, which is not supported: {list(values)}")
        options[key] = values[0]
    l_max = _highest_degree(settings.get("irreps_edge_sh"))
    hidden, last = [parsed_irreps(layer) for layer in layers[:-1]], parsed_irreps(layers[-1])
    if any(layer != hidden[0] for layer in hidden):
        raise ValueError("feature_irreps_hidden differs between layers, which is not supported")
    features, parity = _features(hidden[0], l_max) if hidden else ([mul for mul, _, _ in last] * (l_max + 1), True)
    if last != [(features[0], 0, 1)]:
        raise ValueError(f"feature_irreps_hidden must end in {features[0]}x0e, as many scalars as in the other layers")
    return options | {"num_layers": len(layers), "l_max": l_max, "num_features": features, "parity": parity}


def parsed_irreps(value: object) -> Irreps:
    """Irreps in e3nn's notation, `32x0e + 16x1o`."""
    parts = [part.strip() for part in str(value).split("+")] if str(value).strip() else []
    matches = [_IRREP.fullmatch(part) for part in parts]
    found = [(int(match[1] or 1), int(match[2]), 1 if match[3] == "e" else -1) for match in matches if match]
    if len(found) != len(parts):
        raise ValueError(f"{str(value)!r:.60} is not a sum of irreps such as 32x0e + 16x1o")
    return found


def _highest_degree(value: object) -> int:
    """Highest degree of complete harmonics, which are given as that number or as their irreps."""
    if isinstance(value, int):
        return value
    harmonics = parsed_irreps(value)
    if harmonics != [(1, degree, (-1) ** degree) for degree in range(len(harmonics))] or not harmonics:
        raise ValueError(f"irreps_edge_sh must be all harmonics up to a degree, 1x0e+1x1o+..., not {value}")
    return len(harmonics) - 1


def _features(layer: Irreps, l_max: int) -> tuple[list[int], bool]:
    """Channels of each degree, and whether features of both parities are kept."""
    channels = {degree: mul for mul, degree, _ in layer}
    features = [channels.get(degree, 0) for degree in range(l_max + 1)]
    for parity in (True, False):
        kinds = [(l, p) for l in range(l_max + 1) for p in ((1, -1) if parity else ((-1) ** l,))]
        if layer == [(features[l], l, p) for l, p in kinds]:
            return features, parity
    raise ValueError(
        "feature_irreps_hidden must have features of every degree up to that of irreps_edge_sh in this order, with both "
        f"parities (32x0e+32x0o+32x1e+32x1o) or those of harmonics (32x0e+32x1o), not {layer}"
    )

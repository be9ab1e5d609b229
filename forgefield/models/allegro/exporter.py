"""Writes Allegro models as checkpoints that nequip-allegro 0.8 loads, packages, compiles and trains further."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgefield.models.allegro.importer import EMBEDDINGS, FIXED, OPTIONS, PERCEPTRONS, weight_columns
from forgefield.models.allegro.model import Allegro
from forgefield.models.allegro.options import AllegroOptions
from forgefield.models.allegro.tensors import EnvironmentCoupling, Irrep, harmonic_irreps, layer_irreps
from forgefield.models.nequip.checkpoints import (
    check_exportable,
    perceptron_state,
    shared_settings,
    shared_state,
    write_checkpoint,
)
from forgefield.models.potential import Potential
from forgefield.ops.harmonics import clebsch_gordan
from forgefield.ops.linear import Perceptron


def write_allegro(potential: Potential, path: str | os.PathLike[str], *, sel: Sequence[int] | None = None) -> Path:
    """Write the model to `path`; returns it. sel: only for other programs."""
    path, model = Path(path), potential.model
    check_exportable(potential, path, Allegro, "allegro", sel)
    assert isinstance(model, Allegro)
    return write_checkpoint(path, allegro_settings(model), allegro_state(model))


def allegro_settings(model: Allegro) -> dict[str, Any]:
    """Arguments of Allegro's builder."""
    options = asdict(model.options)
    target, (_, names) = next(item for item in EMBEDDINGS.items() if item[1][0] == options["radial_chemical_embed"])
    embedding = {"_target_": f"allegro.nn.{target}", **{name: options[name] for name in sorted(names)}}
    settings = shared_settings(model, "allegro.model.AllegroModel", OPTIONS)
    return settings | {"radial_chemical_embed": embedding}


def allegro_state(model: Allegro) -> dict[str, Tensor]:
    """Weights and constants by Allegro's names."""
    resolved, state = asdict(model.options), shared_state(model)
    own = {name: value.detach() for name, value in model.state_dict().items()}
    for theirs, ours in FIXED.items():
        if ours in own and theirs not in state:
            state[theirs] = own[ours]
    if "bessel_frequencies" in own:
        name = "radial_chemical_embed.bessel_encode.bessel_weights"
        state[name] = state[name].reshape(1, -1)
    parts = {name for name, _ in model.named_children()}
    networks = {theirs: ours for theirs, ours in PERCEPTRONS.items() if ours in parts}
    networks |= {f"allegro.latents.{number}": f"latents.{number}" for number in range(len(model.latents))}
    for theirs, ours in networks.items():
        network = model.get_submodule(ours)
        assert isinstance(network, Perceptron)
        matrices = perceptron_state(theirs, network)
        state |= {
            name: _by_channel(f"{ours}.weights.{number}", value, resolved)
            for number, (name, value) in enumerate(matrices.items())
        }
    state |= dict(_coupling_state(model))
    if not model.options.weight_individual_irreps:
        state["allegro._env_weighter._rtoi"] = torch.empty(0, dtype=model.weight_dtype())
    return state | _spline_state(model.options, own)


def _by_channel(name: str, value: Tensor, resolved: dict[str, Any]) -> Tensor:
    """The inverse of `importer.arrange`: columns by channel, then degree."""
    columns = weight_columns(name, resolved)
    if columns is None:
        return value
    n_features, degrees = columns
    features, weights = value[:, :n_features], value[:, n_features:]
    by_channel = weights.unflatten(1, (degrees, -1)).transpose(1, 2).flatten(1) if weights.shape[1] else weights
    return torch.cat([features, by_channel], 1)


def _spline_state(options: AllegroOptions, own: dict[str, Tensor]) -> dict[str, Tensor]:
    if "splines" not in own:
        return {}
    number, span = options.num_splines or 16, options.spline_span or 12
    name, lower = "radial_chemical_embed.spline", torch.arange(-span, number - span, dtype=torch.float64) / number
    return {
        f"{name}.class_embed.weight": own["splines"].transpose(1, 2).flatten(1).double(),
        f"{name}.lower": lower,
        f"{name}.upper": lower + (span + 1) / number,
    }


def _coupling_state(model: Allegro) -> Iterator[tuple[str, Tensor]]:
    irreps = layer_irreps(model.options.l_max, model.options.parity, model.options.num_layers)
    environment = harmonic_irreps(model.options.l_max)
    for number, coupling in enumerate(model.couplings):
        weight = coupling.weight.detach().T  # (channels or 1, paths)
        if not model.options.tp_path_channel_coupling:
            weight = weight.squeeze(0)
        one_path = len(coupling.paths) == 1
        table = _coefficients(coupling, (irreps[number], environment, irreps[number + 1]), weight.dtype)
        yield f"allegro.tps.{number}.weights", weight.squeeze(-1) if one_path else weight
        yield f"allegro.tps.{number}.w3j", table.squeeze(0) if one_path else table


def _coefficients(
    coupling: EnvironmentCoupling, irreps: tuple[Sequence[Irrep], Sequence[Irrep], Sequence[Irrep]], dtype: torch.dtype
) -> Tensor:
    """(paths, components of features, of environment, of results); without the axis of the environment where all coefficients
    that are not zero couple a component with the one of the same number. irreps: of features, environment and results."""
    starts = [[sum(ir.dim for ir in part[:n]) for n in range(len(part) + 1)] for part in irreps]
    table = torch.zeros(len(coupling.paths), *(ends[-1] for ends in starts), dtype=dtype)
    for number, path in enumerate(coupling.paths):
        a, b, c = (part[n] for part, n in zip(irreps, path))
        where = tuple(slice(ends[n], ends[n + 1]) for ends, n in zip(starts, path))
        table[number][where] = clebsch_gordan(a.l, b.l, c.l).to(dtype) * c.dim**0.5
    if table.shape[1] == table.shape[2]:
        diagonal = table.diagonal(dim1=1, dim2=2)  # (paths, components of results, of features)
        if diagonal.count_nonzero() == table.count_nonzero():
            return diagonal.transpose(1, 2)
    return table

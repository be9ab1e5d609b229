"""Radial weights of MACE as tables: their computation from the radial networks, and their accuracy."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from forgefield.kernels.core.runtime import use_kernels
from forgefield.kernels.radial.accuracy import COMPARED, Deviation, deviation, line_of_deviations, read_table
from forgefield.kernels.radial.hidden import HiddenCurves, deep_curves
from forgefield.kernels.radial.layer import RadialTable
from forgefield.kernels.radial.packing import pack, unpack
from forgefield.kernels.radial.table import polynomials
from forgefield.ops.autograd import carried, side_by_side

if TYPE_CHECKING:
    from forgefield.models.mace.model import MACE
    from forgefield.models.mace.radial import RadialNetwork

_SHORTEST = 1e-8
"""First knot of a table, in units of the cutoff: at zero the basis has a limit, but its formula no value."""


def radial_tables(model: MACE, n_intervals: int) -> list[RadialTable]:
    """Tables of all layers; the last matrix of each network is applied to polynomials of its hidden channels."""
    basis, envelope = _functions_at_knots(model, n_intervals)
    networks = [interaction.radial for interaction in model.interactions]
    widths = {weight.shape[1] for network in networks for weight in tuple(network.weights)[:-1]}
    if envelope is None and len(widths) == 1 and use_kernels(model.embedding):
        *scales, gain = networks[0].scales
        curves: Iterable[Tensor | HiddenCurves]
        if len(scales) > 1:
            hidden = [tuple(network.weights)[:-1] for network in networks]
            curves = deep_curves(basis, hidden, tuple(scales), gain)
        else:
            curves = [HiddenCurves(basis, network.weights[0], scales[0], gain) for network in networks]
        return [RadialTable(layer_curves, network.weights[-1]) for layer_curves, network in zip(curves, networks)]
    rows = [basis] if envelope is None else [basis, envelope]
    moving = carried(partial(_hidden_channels, networks), rows)
    dtype = model.embedding.dtype
    return [
        RadialTable(polynomials(channels).to(dtype), network.weights[-1] * network.scales[-1])
        for channels, network in zip(moving, networks)
    ]


def _hidden_channels(networks: Sequence[RadialNetwork], rows: list[Tensor]) -> list[Tensor]:
    """Inputs of the last matrix of each network, float64, times the envelope if there is one. rows: basis and envelope."""
    hidden = [network.hidden_in_doubles(rows[0]) for network in networks]
    return hidden if len(rows) == 1 else [channels * rows[1] for channels in hidden]


def _functions_at_knots(model: MACE, n_intervals: int) -> tuple[Tensor, Tensor | None]:
    """(n_intervals + 1, 2, num_bessel) float64: the radial basis and its slope; the same for the envelope, if it is not part of
    the basis. Constant, so computed once."""
    constants = model.radial.constants
    key = (n_intervals, constants.device, constants.data_ptr(), constants._version)
    cached = model.knot_functions
    if cached is None or cached[0] != key:
        x = torch.linspace(0, 1, n_intervals + 1, dtype=torch.float64, device=constants.device).clamp_(min=_SHORTEST)
        cached = model.knot_functions = (key, *_moving_functions(model, x, 1 / n_intervals))
    return cached[1], cached[2]


@torch.no_grad()
def _moving_functions(model: MACE, x: Tensor, speed: float) -> tuple[Tensor, Tensor | None]:
    """(n, 2, ...) float64: basis and envelope at lengths x, in units of the cutoff, and their change as they grow."""
    with forward_ad.dual_level():
        lengths = forward_ad.make_dual(x * model.cutoff, torch.full_like(x, speed * model.cutoff))
        basis, envelope = model.radial(lengths, None)
        return side_by_side(basis), None if envelope is None else side_by_side(envelope)


# ---- accuracy


def reads_tables(model: MACE) -> bool:
    """Whether radial weights depend on the length alone, so that they can be read from tables."""
    return not model.is_directed and model.options.distance_transform is None


@torch.no_grad()
def table_deviation(model: MACE, knots: int) -> tuple[Deviation, Deviation]:
    """Deviation of radial weights in float32 from those of the networks in float64, between 0.05 and 1 of the cutoff: read
    from tables of `knots` intervals, and, for comparison, computed by the networks themselves."""
    single = _in_precision(model, torch.float32)
    exact = _in_precision(single, torch.float64)  # the same rounded weights
    x = torch.linspace(0.05, 1, COMPARED, dtype=torch.float64, device=model.radial.constants.device)
    functions = [rows for rows in _moving_functions(model, x, 1.0) if rows is not None]
    expected = carried(partial(_weights, exact), functions)
    computed = carried(partial(_weights, single), [rows.float() for rows in functions])
    read = [read_table(unpack(pack(table.polynomials())), x) for table in radial_tables(single, knots)]
    return deviation(read, expected), deviation(computed, expected)


def table_line(model: MACE, knots: int) -> str | None:
    """The deviation as a sentence; None for models without tables."""
    return line_of_deviations(*table_deviation(model, knots), knots) if reads_tables(model) else None


def _weights(model: MACE, rows: list[Tensor]) -> list[Tensor]:
    """Radial weights of all layers. rows: basis, and envelope if there is one."""
    weights = [interaction.radial(rows[0]) for interaction in model.interactions]
    return weights if len(rows) == 1 else [values * rows[1] for values in weights]


def _in_precision(model: MACE, dtype: torch.dtype) -> MACE:
    """A copy whose radial networks have this precision. Nothing else of it is used."""
    twin = copy.deepcopy(model)
    twin.embedding = nn.Parameter(twin.embedding.detach().to(dtype))
    for interaction in twin.interactions:
        interaction.radial.to(dtype)
    return twin

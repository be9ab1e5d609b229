"""Radial weights of MACE as tables: their computation from the radial networks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from forgefield.kernels.radial.hidden import HiddenCurves, deep_curves
from forgefield.kernels.radial.layer import RadialTable
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
    if envelope is None and len(widths) == 1:
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
        with torch.no_grad(), forward_ad.dual_level():
            x = torch.linspace(0, 1, n_intervals + 1, dtype=torch.float64, device=constants.device).clamp_(
                min=_SHORTEST
            )
            speed = torch.full_like(x, model.cutoff / n_intervals)
            basis, envelope = model.radial(forward_ad.make_dual(x * model.cutoff, speed), None)
            functions = side_by_side(basis), None if envelope is None else side_by_side(envelope)
        cached = model.knot_functions = (key, *functions)
    return cached[1], cached[2]

"""Radial weights of NequIP as tables: their computation from the radial networks, and their accuracy."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from forgefield.kernels.core.runtime import use_kernels
from forgefield.kernels.cpu.splines import coefficients, collocation_points
from forgefield.kernels.radial.accuracy import COMPARED, Deviation, deviation, line_of_deviations, read_table
from forgefield.kernels.radial.hidden import HiddenCurves, deep_curves
from forgefield.kernels.radial.layer import RadialTable
from forgefield.kernels.radial.packing import pack, unpack
from forgefield.kernels.radial.table import polynomials
from forgefield.ops.autograd import carried, side_by_side
from forgefield.ops.functions import bessel_basis
from forgefield.ops.graph import cut, join

if TYPE_CHECKING:
    from forgefield.models.nequip.model import NequIP

_SHORTEST = 1e-8
"""First knot of a table, in units of the cutoff: at zero the basis has a limit, but its formula no value."""


def radial_tables(model: NequIP, n_intervals: int) -> list[RadialTable]:
    """Tables of all layers. Polynomials are linear in values and slopes at the knots, so they are computed for the last hidden
    layer, which is narrow."""
    basis = _basis_at_knots(model, n_intervals)
    networks = [layer.radial for layer in model.layers]
    has_hidden = model.options.radial_mlp_depth > 0 and not model.options.bessel_trainable
    if has_hidden and use_kernels(model.type_embedding):
        first, *others, gain = networks[0].scales
        scales = (first * model.basis_scale, *others)
        curves: Iterable[Tensor | HiddenCurves]
        if others:
            curves = deep_curves(basis, [tuple(network.weights)[:-1] for network in networks], scales, gain)
        else:
            curves = [HiddenCurves(basis, network.weights[0], scales[0], gain) for network in networks]
        return [RadialTable(layer_curves, network.weights[-1]) for layer_curves, network in zip(curves, networks)]
    moving = carried(lambda rows: model.radial_hidden(rows[0]), [basis])
    layer_polynomials = cut(polynomials(join(moving, 2)).to(model.dtype), [channels.shape[2] for channels in moving], 2)
    return [
        RadialTable(channels, network.weights[-1] * network.scales[-1])
        for channels, network in zip(layer_polynomials, networks)
    ]


def radial_splines(model: NequIP, n_intervals: int) -> list[Tensor]:
    """Tables of splines of all layers, (n_intervals + DEGREE, plan.n_weights) float64."""
    points = collocation_points(n_intervals).clamp_(min=_SHORTEST)
    basis = bessel_basis(points, model.bessel_frequencies, float(model.options.polynomial_cutoff_p))
    hidden = model.radial_hidden(basis)
    networks = [layer.radial for layer in model.layers]
    parts = cut(coefficients(join(hidden, 1)), [part.shape[1] for part in hidden], 1)
    return [part @ (network.weights[-1].double() * network.scales[-1]) for part, network in zip(parts, networks)]


def _basis_at_knots(model: NequIP, n_intervals: int) -> Tensor:
    """(n_intervals + 1, 2, num_bessels) float64: the radial basis and its slope. Cached, unless its frequencies are trained."""
    if model.options.bessel_trainable:
        return _make_basis(model, n_intervals)
    frequencies = model.bessel_frequencies
    key = (n_intervals, frequencies.device, frequencies.data_ptr(), frequencies._version)
    cached = model.knot_basis
    if cached is not None and cached[0] == key:
        return cached[1]
    basis = _make_basis(model, n_intervals)
    if cached is not None and cached[1].shape == basis.shape and cached[1].device == basis.device:
        basis = cached[1].copy_(basis)  # in place: captured graphs read it
    model.knot_basis = (key, basis)
    return basis


def _make_basis(model: NequIP, n_intervals: int) -> Tensor:
    device = model.bessel_frequencies.device
    x = torch.linspace(0, 1, n_intervals + 1, dtype=torch.float64, device=device).clamp_(min=_SHORTEST)
    return _moving_basis(model, x, 1 / n_intervals)


def _moving_basis(model: NequIP, x: Tensor, speed: float) -> Tensor:
    """(n, 2, num_bessels) float64: the radial basis at lengths x, in units of the cutoff, and its change as they grow."""
    with forward_ad.dual_level():
        moving = forward_ad.make_dual(x, torch.full_like(x, speed))
        return side_by_side(bessel_basis(moving, model.bessel_frequencies, float(model.options.polynomial_cutoff_p)))


# ---- accuracy


@torch.no_grad()
def table_deviation(model: NequIP, knots: int) -> tuple[Deviation, Deviation]:
    """Deviation of radial weights in float32 from those of the network in float64, between 0.05 and 1 of the cutoff: read from
    tables of `knots` intervals, and, for comparison, computed by the network itself."""
    single = _in_precision(model, torch.float32)
    exact = _in_precision(
        single, torch.float64
    )  # the same rounded weights, so that only the error of the table is measured
    x = torch.linspace(0.05, 1, COMPARED, dtype=torch.float64, device=model.bessel_frequencies.device)
    basis = _moving_basis(model, x, 1.0)
    expected = _rows(exact, basis)
    read = [read_table(unpack(pack(table.polynomials())), x) for table in radial_tables(single, knots)]
    return deviation(read, expected), deviation(_rows(single, basis.float()), expected)


def table_line(model: NequIP, knots: int) -> str:
    """The deviation as a sentence, for information: before its first step a training with kernels is compared with one without,
    including gradients."""
    return line_of_deviations(*table_deviation(model, knots), knots)


def _in_precision(model: NequIP, dtype: torch.dtype) -> NequIP:
    """A copy whose radial networks have this precision. Nothing else of it is used."""
    twin = copy.deepcopy(model)
    twin.type_embedding = nn.Parameter(twin.type_embedding.detach().to(dtype))
    for layer in twin.layers:
        layer.radial.to(dtype)
    return twin


def _rows(model: NequIP, basis: Tensor) -> list[Tensor]:
    """Weights and slopes of every layer, (n, 2, n_weights)."""
    return carried(lambda inputs: model.radial_weights(inputs[0]), [basis])

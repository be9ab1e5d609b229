"""Names and order of the weights of mace-torch next to Forgefield's: one table, used to read and to write them.

Both have the same numbers in another order: mace-torch sorts the results of a convolution by irrep, Forgefield by path.
Harmonics point from the neighbour to the centre there and in the other direction here, and some Clebsch-Gordan coefficients of
e3nn 0.4.4 have the other sign (`basis.old_sign`); both are signs of radial weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forgefield.models.mace.basis import old_sign
from forgefield.models.mace.interaction import Interaction, Product
from forgefield.models.mace.model import MACE
from forgefield.models.mace.radial import NormalisedNetwork
from forgefield.models.mace.readout import GatedReadout, LinearReadout
from forgefield.ops.convolution_plan import Block

Change = Callable[[Tensor], Tensor]
Kind = tuple[int, int]


@dataclass(frozen=True)
class Weight:
    """ours, theirs: names. read: from mace-torch's shape and order to Forgefield's; write: back."""

    ours: str
    theirs: str
    read: Change
    write: Change


def weight_table(model: MACE) -> Iterator[Weight]:
    """All weights but those of polynomials (`contraction_weights`) and the energies of species and heads."""
    n_species = len(model.species)
    yield _reshaped("embedding", "node_embedding.linear.weight", (n_species, -1), (-1,))
    for number, layer in enumerate(model.interactions):
        yield from _interaction(f"interactions.{number}", layer)
    for number in range(len(model.products)):
        yield _same(f"products.{number}.linear.weight")
    for number, readout in enumerate(model.readouts):
        yield from _readout(f"readouts.{number}", readout)


def _same(name: str, theirs: str | None = None) -> Weight:
    return Weight(name, theirs or name, lambda value: value, lambda value: value)


def _reshaped(ours: str, theirs: str, shape: Sequence[int], back: Sequence[int]) -> Weight:
    return Weight(ours, theirs, lambda value: value.reshape(*shape), lambda value: value.reshape(*back))


def _transposed(ours: str, theirs: str) -> Weight:
    return Weight(ours, theirs, lambda value: value.T, lambda value: value.T)


def _blocks(ours: str, theirs: str, our_sizes: dict[Kind, int], their_sizes: dict[Kind, int]) -> Weight:
    """A flat weight, one part for each irrep, in either order. Parts that only mace-torch has belong to features that are
    zero."""

    def read(value: Tensor) -> Tensor:
        parts = dict(zip(their_sizes, torch.split(value, list(their_sizes.values()))))
        return torch.cat([parts[kind] for kind in our_sizes])

    def write(value: Tensor) -> Tensor:
        parts = dict(zip(our_sizes, torch.split(value, list(our_sizes.values()))))
        return torch.cat([parts.get(kind, value.new_zeros(size)) for kind, size in their_sizes.items()])

    return Weight(ours, theirs, read, write)


def _kind(block: Block) -> Kind:
    return block.l, block.p


def _sizes(ins: Sequence[Block], outs: Sequence[Block], factor: int = 1) -> dict[Kind, int]:
    """Numbers of each irrep in the weights of a map, in the order of e3nn: by input."""
    widths = {_kind(block): block.mul for block in outs}
    return {_kind(block): factor * block.mul * widths[_kind(block)] for block in ins if _kind(block) in widths}


def _ordered(sizes: dict[Kind, int], order: Sequence[Block]) -> dict[Kind, int]:
    return {_kind(block): sizes[_kind(block)] for block in order if _kind(block) in sizes}


def _interaction(name: str, layer: Interaction) -> Iterator[Weight]:
    up = _sizes(layer.in_blocks, layer.sent)
    yield _blocks(f"{name}.linear_up.weight", f"{name}.linear_up.weight", _ordered(up, layer.sent), up)
    kept = _sizes(layer.in_blocks, layer.kept)
    if layer.gate is not None:
        yield _same(f"{name}.linear.weight", f"{name}.linear_1.weight")
        own = _sizes(layer.sent, layer.gate.in_blocks)
        yield _blocks(
            f"{name}.linear_own.weight", f"{name}.linear_res.weight", _ordered(own, layer.gate.in_blocks), own
        )
        yield _same(f"{name}.linear_out.weight", f"{name}.linear_2.weight")
        yield _blocks(f"{name}.skip.weight", f"{name}.skip_tp.weight", _ordered(kept, layer.kept), kept)
        for ours in ("source_embedding", "target_embedding"):
            shape = tuple(getattr(layer, ours).shape)
            yield _reshaped(f"{name}.{ours}", f"{name}.{ours}.weight", shape, (-1,))
        yield from (_same(f"{name}.{ours}") for ours in ("alpha", "beta"))
        yield from _normalised(f"{name}.radial_normalised", f"{name}.conv_tp_weights", layer.radial_normalised, layer)
        yield from _normalised(f"{name}.density_normalised", f"{name}.density_fn", layer.density_normalised, None)
        return
    yield _same(f"{name}.linear.weight")
    n_species = layer.by_species.n_embedding
    if "residual" in layer.kind:
        kept = {kind: size * n_species for kind, size in kept.items()}
        yield _blocks(f"{name}.by_species.weight", f"{name}.skip_tp.weight", _ordered(kept, layer.kept), kept)
    else:
        every = _sizes(layer.targets, layer.targets, n_species)
        yield _blocks(f"{name}.by_species.weight", f"{name}.skip_tp.weight", _ordered(every, layer.summed), every)
    last = len(layer.radial.weights) - 1
    for number in range(last):
        yield _same(f"{name}.radial.weights.{number}", f"{name}.conv_tp_weights.layer{number}.weight")
    read, write = path_order(layer)
    yield Weight(f"{name}.radial.weights.{last}", f"{name}.conv_tp_weights.layer{last}.weight", read, write)
    if layer.has_density:
        yield _same(f"{name}.density.weights.0", f"{name}.density_fn.layer0.weight")


def _normalised(ours: str, theirs: str, network: NormalisedNetwork, layer: Interaction | None) -> Iterator[Weight]:
    """layer: whose paths the last results belong to; None where they do not belong to any."""
    last = len(network.weights) - 1
    read, write = (_same("").read, _same("").write) if layer is None else path_order(layer)
    for number in range(last + 1):
        place = 3 * number  # linear, normalisation, activation
        weight = _transposed(f"{ours}.weights.{number}", f"{theirs}.net.{place}.weight")
        bias = _same(f"{ours}.biases.{number}", f"{theirs}.net.{place}.bias")
        if number == last and layer is not None:
            weight = Weight(weight.ours, weight.theirs, lambda v: read(v.T), lambda v: write(v).T)
            bias = Weight(bias.ours, bias.theirs, read, write)
        yield from (weight, bias)
        if number < last:
            yield _same(f"{ours}.norm_weights.{number}", f"{theirs}.net.{place + 1}.weight")
            yield _same(f"{ours}.norm_biases.{number}", f"{theirs}.net.{place + 1}.bias")


def path_order(layer: Interaction) -> tuple[Change, Change]:
    """Functions from radial weights (..., n_weights) with the order and signs of mace-torch to Forgefield's, and back."""
    plan = layer.plan
    widths = [block.mul for block in plan.out_blocks]
    order = sorted(range(len(plan.paths)), key=lambda number: (plan.paths[number].l3, plan.paths[number].p3))
    inverse = sorted(range(len(order)), key=order.__getitem__)
    signs = [(-1.0) ** path.l2 * old_sign(plan.in_blocks[path.source].l, path.l2, path.l3) for path in plan.paths]

    def read(value: Tensor) -> Tensor:
        parts = torch.split(value, [widths[number] for number in order], -1)
        return torch.cat([parts[inverse[number]] * signs[number] for number in range(len(order))], -1)

    def write(value: Tensor) -> Tensor:
        parts = torch.split(value, widths, -1)
        return torch.cat([parts[number] * signs[number] for number in order], -1)

    return read, write


def _readout(name: str, readout: Any) -> Iterator[Weight]:
    if isinstance(readout, LinearReadout):
        yield _reshaped(f"{name}.weight", f"{name}.linear.weight", tuple(readout.weight.shape), (-1,))
        return
    assert isinstance(readout, GatedReadout)
    heads, channels, width = readout.enter.shape
    yield Weight(
        f"{name}.enter",
        f"{name}.linear_1.weight",
        lambda value: value.reshape(channels, heads, width).transpose(0, 1),
        lambda value: value.transpose(0, 1).reshape(-1),
    )
    yield _diagonal(f"{name}.leave", f"{name}.linear_2.weight", heads, width, 1)
    if readout.has_bias:
        yield _diagonal(f"{name}.middle", f"{name}.linear_mid.weight", heads, width, width)
        yield _reshaped(f"{name}.middle_bias", f"{name}.linear_mid.bias", (heads, width), (-1,))
        yield _same(f"{name}.leave_bias", f"{name}.linear_2.bias")


def _diagonal(ours: str, theirs: str, heads: int, n_in: int, n_out: int) -> Weight:
    """The blocks of each head in a matrix for the neurons of all heads; the others have no effect, heads being masked."""
    every = torch.arange(heads)

    def write(value: Tensor) -> Tensor:
        matrix = value.new_zeros(heads, n_in, heads, n_out)
        matrix[every, :, every] = value
        return matrix.reshape(-1)

    return Weight(ours, theirs, lambda value: value.reshape(heads, n_in, heads, n_out)[every, :, every], write)


@dataclass(frozen=True)
class ContractionWeight:
    """One weight of polynomials. ours: name, or None where they are all zero. theirs: name of the weight; tensor: of its basis.
    product: the layer. output, degree: which polynomials."""

    ours: str | None
    theirs: str
    tensor: str
    product: Product
    output: int
    degree: int


def contraction_weights(model: MACE) -> Iterator[ContractionWeight]:
    """All weights of polynomials."""
    for layer, product in enumerate(model.products):
        number = 0
        for output, described in enumerate(product.plan.outputs):
            name = f"products.{layer}.symmetric_contractions.contractions.{output}"
            for degree, count in enumerate(described.counts, 1):
                place = product.correlation - degree
                theirs = f"{name}.weights_max" if place == 0 else f"{name}.weights.{place - 1}"
                ours = f"products.{layer}.weights.{number}" if count else None
                number += bool(count)
                yield ContractionWeight(ours, theirs, f"{name}.U_matrix_{degree}", product, output, degree)


def bessel_prefactor(cutoff: float) -> float:
    """Factor of mace-torch's Bessel basis."""
    return math.sqrt(2 / cutoff)

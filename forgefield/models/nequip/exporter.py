"""Writes NequIP models as checkpoints that NequIP 0.19 loads, packages, compiles and trains further."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgefield.models.nequip.checkpoints import (
    check_exportable,
    perceptron_state,
    shared_settings,
    shared_state,
    write_checkpoint,
)
from forgefield.models.nequip.importer import OPTIONS
from forgefield.models.nequip.model import Interaction, NequIP
from forgefield.models.potential import Potential
from forgefield.ops.convolution_plan import Block
from forgefield.ops.harmonics import clebsch_gordan
from forgefield.ops.linear import NormActivation


def write_nequip(potential: Potential, path: str | os.PathLike[str], *, sel: Sequence[int] | None = None) -> Path:
    """Write the model to `path`; returns it. sel: only for other programs."""
    path, model = Path(path), potential.model
    check_exportable(potential, path, NequIP, "nequip", sel)
    assert isinstance(model, NequIP)
    return write_checkpoint(path, nequip_settings(model), nequip_state(model))


def nequip_settings(model: NequIP) -> dict[str, Any]:
    """Arguments of NequIP's builder."""
    options = model.options
    odd = {"o": options.nonlinearity_odd_scalars}
    return shared_settings(model, "nequip.model.NequIPGNNModel", OPTIONS) | {
        "convnet_nonlinearity_scalars": {"e": options.nonlinearity_scalars, **odd},
        "convnet_nonlinearity_gates": {"e": options.nonlinearity_gates, **odd},
    }


def nequip_state(model: NequIP) -> dict[str, Tensor]:
    """Weights and constants by NequIP's names."""
    state = shared_state(model) | {
        "type_embed.embed_module.weight": model.type_embedding.detach(),
        "bessel_encode.bessel_weights": model.bessel_frequencies.detach().reshape(1, -1),
    }
    for number, layer in enumerate(model.layers):
        state |= {f"layer{number}_convnet.{name}": value for name, value in _layer_state(layer, model.dtype)}
    return state | perceptron_state("per_atom_energy_readout.mlp_module", model.readout)


def _layer_state(layer: Interaction, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    entered = sum(block.dim for block in layer.in_blocks)
    left = sum(block.dim for block in layer.nonlinearity.in_blocks)
    nothing = torch.empty(0, dtype=dtype)
    masks = {
        "conv.linear_1": entered,
        "conv.linear_2": left,
        "conv.tp_scatter.tp": layer.plan.out_dim,
        **_nonlinearity_masks(layer),
    }
    yield "conv.linear_1.weight", layer.linear_in.weight.detach()
    yield "conv.linear_2.weight", layer.linear_out.weight.detach()
    if layer.self_connection is not None:
        yield "conv.sc.weight", layer.self_connection.weight.detach()
        reached = {layer.nonlinearity.in_blocks[target] for _, target in layer.self_pairs}
        is_norm = isinstance(layer.nonlinearity, NormActivation)
        blocks = layer.nonlinearity.out_blocks if is_norm else layer.nonlinearity.in_blocks
        mask = torch.cat([torch.full((block.dim,), float(block in reached)) for block in blocks])
        yield "conv.sc.output_mask", mask.to(dtype)
    for name, size in masks.items():  # ones: every output is computed
        yield f"{name}.output_mask", torch.ones(size, dtype=dtype)
        yield f"{name}.{'bias' if name.startswith('conv.linear') else 'weight'}", nothing
    yield from perceptron_state("conv.edge_mlp", layer.radial).items()
    degrees = {(layer.in_blocks[path.source].l, path.l2, path.l3) for path in layer.plan.paths}
    for l1, l2, l3 in sorted(degrees):
        if 0 not in (l1, l2, l3):  # those with a zero need no coefficients
            name = f"conv.tp_scatter.tp._compiled_main_left_right._w3j_{l1}_{l2}_{l3}"
            yield name, clebsch_gordan(l1, l2, l3).to(dtype)


def _nonlinearity_masks(layer: Interaction) -> dict[str, int]:
    """Sizes of the outputs of the products of which a nonlinearity consists."""
    blocks: tuple[Block, ...] = layer.nonlinearity.in_blocks
    if isinstance(layer.nonlinearity, NormActivation):
        channels, size = sum(block.mul for block in blocks), sum(block.dim for block in blocks)
        return {"equivariant_nonlin.norm.tp": channels, "equivariant_nonlin.scalar_multiplier": size}
    return {"equivariant_nonlin.mul": sum(block.dim for block in layer.nonlinearity.gated)}

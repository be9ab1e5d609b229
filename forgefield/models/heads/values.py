"""What all heads have in common behind their networks: shift of each species, scale, and the step from atoms to frames."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forgefield.ops.graph import Segments, gather, segment_sum


def hold_scaling(head: nn.Module, options: Any, n_species: int) -> None:
    """Give the head its buffers `shift` (n_species, size) and `scale`, float64. options: `HeadOptions`."""
    size = math.prod(options.output_shape)
    shift = torch.zeros(n_species, size, dtype=torch.float64)
    if options.shift is not None:
        shift = torch.tensor(options.shift, dtype=torch.float64).reshape(n_species, size)
    head.register_buffer("shift", shift)
    head.register_buffer("scale", torch.tensor(options.scale, dtype=torch.float64))


def frame_values(values: Tensor, batch: Mapping[str, Tensor], reduce: str) -> Tensor:
    """(n_atoms, size) -> (n_frames, size), by sum or mean."""
    n_atoms = batch["n_atoms"]
    sums = segment_sum(values, Segments(batch["frame"], n_atoms.shape[0], rows_are_sorted=True))
    return sums / n_atoms.to(values.dtype).unsqueeze(1) if reduce == "mean" else sums


def without_net(values: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """(n_atoms, size): the same less their mean over each frame, so that they add up to zero."""
    atoms = Segments(batch["frame"], batch["n_atoms"].shape[0], rows_are_sorted=True)
    return values - gather(frame_values(values, batch, "mean"), atoms)

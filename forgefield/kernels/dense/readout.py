"""Atomic energies from the features of the last layer by a linear readout, scaled and shifted by species, with their tangents
and all derivatives: one kernel forward and one backward."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from forgefield.ops.graph import Segments, segment_sum

ATOMS, CHANNELS = 16, 64
"""Atoms of one program, and channels that it reads at a time."""


def energies_by_kernel(
    features: Tensor, weight: Tensor, norm: float, species: Tensor, scales: Tensor, shifts: Tensor
) -> Tensor:
    """(n_atoms,) float64: shift + scale * norm * features @ weight, with a gradient in the features alone.

    features: (n_atoms, width), weight: (width, 1). species: (n_atoms,). scales, shifts: (n_species,) float64.
    """
    return _Energies.apply(features, weight.detach(), norm, species, scales.detach(), shifts.detach())


def moved_energies_by_kernel(
    rows: Tensor, weight: Tensor, norm: float, species: Tensor, scales: Tensor, shifts: Tensor
) -> tuple[Tensor, Tensor]:
    """The same and how they change, (n_atoms,) float64 both, with a gradient in everything. rows: (2 n_atoms, width), the
    features of all atoms and then their tangents."""
    return _MovedEnergies.apply(rows, weight, norm, species, scales, shifts)


class _Energies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features, weight, norm, species, scales, shifts):
        ctx.save_for_backward(weight, species, scales)
        ctx.norm = norm
        return _read(features.contiguous(), weight, norm, species, scales, shifts, moves=False)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, to_energies):
        weight, species, scales = ctx.saved_tensors
        return _back(to_energies, None, weight, ctx.norm, species, scales)[0], None, None, None, None, None


class _MovedEnergies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weight, norm, species, scales, shifts):
        rows = rows.contiguous()
        ctx.save_for_backward(rows, weight, species, scales)
        ctx.norm = norm
        return _read(rows, weight, norm, species, scales, shifts, moves=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, to_energies, to_slopes):
        rows, weight, species, scales = ctx.saved_tensors
        to_rows, factors = _back(to_energies, to_slopes, weight, ctx.norm, species, scales)
        to_weight = torch.mm(rows.t(), factors.unsqueeze(1))
        to_scales = to_shifts = None
        kind = Segments(species, scales.shape[0])
        if ctx.needs_input_grad[4]:
            read, moved = ctx.norm * (rows @ weight).double().view(2, -1)
            to_scales = segment_sum(to_energies * read + to_slopes * moved, kind)
        if ctx.needs_input_grad[5]:
            to_shifts = segment_sum(to_energies, kind)
        return to_rows, to_weight, None, None, to_scales, to_shifts


def _read(
    rows: Tensor, weight: Tensor, norm: float, species: Tensor, scales: Tensor, shifts: Tensor, *, moves: bool
) -> tuple[Tensor, Tensor]:
    n_atoms, width = species.shape[0], rows.shape[1]
    energies = scales.new_empty(n_atoms)
    slopes = scales.new_empty(n_atoms if moves else 0)
    if n_atoms:
        _kernels().read[(-(-n_atoms // ATOMS),)](
            rows=rows,
            weight=weight.contiguous(),
            species=species,
            scales=scales,
            shifts=shifts,
            energies=energies,
            slopes=slopes,
            n_atoms=n_atoms,
            width=width,
            norm=norm,
            moves=moves,
            atoms=ATOMS,
            channels=CHANNELS,
            num_warps=4,
        )
    return energies, slopes


def _back(
    to_energies: Tensor, to_slopes: Tensor | None, weight: Tensor, norm: float, species: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """Cotangents of the rows, and the factors that each row has in the weight's gradient."""
    n_atoms, width, moves = species.shape[0], weight.shape[0], to_slopes is not None
    to_rows = weight.new_empty((n_atoms * (2 if moves else 1), width))
    factors = weight.new_empty(to_rows.shape[0])
    if n_atoms:
        _kernels().read_back[(-(-n_atoms // ATOMS),)](
            to_energies=to_energies.contiguous(),
            to_slopes=(to_energies if to_slopes is None else to_slopes).contiguous(),
            weight=weight.contiguous(),
            species=species,
            scales=scales,
            to_rows=to_rows,
            factors=factors,
            n_atoms=n_atoms,
            width=width,
            norm=norm,
            moves=moves,
            atoms=ATOMS,
            channels=CHANNELS,
            num_warps=4,
        )
    return to_rows, factors


@cache
def _kernels() -> SimpleNamespace:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["n_atoms"])
    def read(
        rows,
        weight,
        species,
        scales,
        shifts,
        energies,
        slopes,
        n_atoms,
        width: tl.constexpr,
        norm: tl.constexpr,
        moves: tl.constexpr,
        atoms: tl.constexpr,
        channels: tl.constexpr,
    ):
        atom = tl.program_id(0).to(tl.int64) * atoms + tl.arange(0, atoms)
        inside = atom < n_atoms
        total = tl.zeros([atoms], tl.float64)
        moved = tl.zeros([atoms], tl.float64)
        for first in range(0, width, channels):
            c = first + tl.arange(0, channels)
            both = inside[:, None] & (c < width)[None, :]
            w = tl.load(weight + c, mask=c < width, other=0.0).to(tl.float64)[None, :]
            total += tl.sum(w * tl.load(rows + atom[:, None] * width + c[None, :], mask=both, other=0.0), 1)
            if moves:
                line = (atom + n_atoms)[:, None] * width + c[None, :]
                moved += tl.sum(w * tl.load(rows + line, mask=both, other=0.0), 1)
        kind = tl.load(species + atom, mask=inside, other=0)
        scale = norm * tl.load(scales + kind, mask=inside, other=0.0)
        shift = tl.load(shifts + kind, mask=inside, other=0.0)
        tl.store(energies + atom, shift + scale * total, mask=inside)
        if moves:
            tl.store(slopes + atom, scale * moved, mask=inside)

    @triton.jit(do_not_specialize=["n_atoms"])
    def read_back(
        to_energies,
        to_slopes,
        weight,
        species,
        scales,
        to_rows,
        factors,
        n_atoms,
        width: tl.constexpr,
        norm: tl.constexpr,
        moves: tl.constexpr,
        atoms: tl.constexpr,
        channels: tl.constexpr,
    ):
        atom = tl.program_id(0).to(tl.int64) * atoms + tl.arange(0, atoms)
        inside = atom < n_atoms
        kind = tl.load(species + atom, mask=inside, other=0)
        scale = norm * tl.load(scales + kind, mask=inside, other=0.0)
        value = scale * tl.load(to_energies + atom, mask=inside, other=0.0)
        moved = scale * tl.load(to_slopes + atom, mask=inside, other=0.0)
        tl.store(factors + atom, value, mask=inside)
        if moves:
            tl.store(factors + n_atoms + atom, moved, mask=inside)
        for first in range(0, width, channels):
            c = first + tl.arange(0, channels)
            both = inside[:, None] & (c < width)[None, :]
            w = tl.load(weight + c, mask=c < width, other=0.0).to(tl.float64)[None, :]
            tl.store(to_rows + atom[:, None] * width + c[None, :], value[:, None] * w, mask=both)
            if moves:
                line = (atom + n_atoms)[:, None] * width + c[None, :]
                tl.store(to_rows + line, moved[:, None] * w, mask=both)

    return SimpleNamespace(read=read, read_back=read_back)

"""Couplings of components of atoms as an operator of PyTorch with kernels inside, differentiable any number of times.

`forgefield::couple` computes one factor of a form that is linear in four factors (`coupling_source.py`) from the other three;
its derivatives are the same operator for other factors. Products of pairs of components are never stored.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from forgefield.kernels.core.generation import LaunchArguments, launcher, mark_of_code, module_from, operator
from forgefield.kernels.core.runtime import can_launch
from forgefield.kernels.edges import coupling_source
from forgefield.kernels.edges.coupling_source import (
    ARGUMENTS,
    FACTORS,
    WEIGHT,
    Coupling,
    coupling_of_key,
    write_coupling,
)

PARTS = 512
"""Number of programs, each with different atoms, that sum gradients of weights."""
BLOCK = 128
"""Elements of a component that a program processes, with as many lanes."""


def couple(weights: Tensor, y: Tensor, z: Tensor, key: str) -> Tensor:
    """The first set of components: (components, n_atoms, channels).

    weights: (paths, channels). y, z: (components, n_atoms, channels). key: of `key_of_coupling`.
    """
    return _Couple.apply(key, 1, weights, y, z)


class _Couple(torch.autograd.Function):
    """The factor number `factor`, from the others, in order."""

    @staticmethod
    def forward(ctx, key: str, factor: int, *tensors: Tensor) -> Tensor:
        ctx.key, ctx.factor = key, factor
        ctx.save_for_backward(*tensors)
        return torch.ops.forgefield.couple(*(tensor.contiguous() for tensor in tensors), factor, key)

    @staticmethod
    def backward(ctx, grad: Tensor):
        factors: list[Tensor] = list(ctx.saved_tensors)
        factors.insert(ctx.factor, grad)
        gradients = []
        for factor, needed in zip((n for n in range(4) if n != ctx.factor), ctx.needs_input_grad[2:]):
            others = [tensor for number, tensor in enumerate(factors) if number != factor]
            gradients.append(_Couple.apply(ctx.key, factor, *others) if needed else None)
        return None, None, *gradients


@operator("forgefield::couple")
def _couple(first: Tensor, second: Tensor, third: Tensor, place: int, key: str) -> Tensor:
    """The factor number `place`, from 0 for weights to 3, computed from the other three, in order."""
    if not can_launch(first):
        return torch.ops.forgefield.plain_couple(first, second, third, place, key)
    return _launched(coupling_of_key(key), place, first, second, third)


@torch.library.custom_op("forgefield::plain_couple", mutates_args=())
def _plain_couple(first: Tensor, second: Tensor, third: Tensor, place: int, key: str) -> Tensor:
    """Where kernels cannot run; a single operator, so that compilers do not process its many small operations."""
    return reference_coupling(coupling_of_key(key), place, first, second, third)


def _empty(first: Tensor, second: Tensor, third: Tensor, factor: int, key: str) -> Tensor:
    size = coupling_of_key(key).size(factor)
    return first.new_empty((size, third.shape[2]) if factor == WEIGHT else (size, *third.shape[1:]))


_couple.register_fake(_empty)
_plain_couple.register_fake(_empty)


def _launched(form: Coupling, factor: int, *tensors: Tensor) -> Tensor:
    n_atoms, channels = tensors[2].shape[1:]
    factors = dict(zip((name for name in FACTORS if name != FACTORS[factor]), tensors))
    if factor == WEIGHT:
        few = sum(form.sizes) <= 27 and tensors[0].dtype == torch.float32
        block = 64 if channels > 32 and few else 32  # all components are held in registers
        parts = tensors[0].new_empty((PARTS, form.size(factor), channels))
        kernel = launcher(coupling_kernel(form, factor, channels, block))
        arguments = _arguments(factor, factors, parts, n_atoms)
        kernel[(PARTS, -(-channels // block))](**arguments, num_warps=1, num_stages=1)
        return parts.sum(0)
    out = tensors[0].new_empty((form.size(factor), n_atoms, channels))
    if isinstance(n_atoms, torch.SymInt) or n_atoms:
        kernel = launcher(coupling_kernel(form, factor, channels, BLOCK))
        arguments = _arguments(factor, factors, out, n_atoms)
        kernel[((n_atoms * channels + BLOCK - 1) // BLOCK,)](**arguments, num_warps=BLOCK // 32, num_stages=1)
    return out


def _arguments(factor: int, factors: dict[str, Tensor], out: Tensor, n_atoms: int) -> LaunchArguments:
    """The computed factor is not read."""
    values = {**factors, "out": out, "n_atoms": n_atoms}
    used = [name for name in ARGUMENTS if name != FACTORS[factor]]
    return ARGUMENTS.bind("couple", values, unused=next(reversed(factors.values())), used=used)


@lru_cache(maxsize=128)
def coupling_kernel(form: Coupling, factor: int, channels: int, block: int) -> Any:
    """The Triton function; compiled when it is first launched."""
    return module_from(write_coupling(form, factor, channels, block)).couple


def reference_coupling(form: Coupling, factor: int, *tensors: Tensor) -> Tensor:
    """The same by reference operations, one path after the other."""
    shape = tensors[2].shape[1:]
    out = tensors[0].new_zeros((form.size(factor), *(shape[1:] if factor == WEIGHT else shape)))
    all_factors = list(tensors)
    all_factors.insert(factor, out)
    for n, path in enumerate(form.paths):
        for i, j, k, value in path.terms():
            at = (n, i, j, k)
            factors = [all_factors[number][at[number]] for number in range(4) if number != factor]
            term = value * factors[0] * factors[1] * factors[2]
            out[at[factor]] += term.sum(0) if factor == WEIGHT else term
    return out


def mark() -> str:
    """The entry `code` of keys."""
    return mark_of_code(coupling_source, _launched)

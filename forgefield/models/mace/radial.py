"""Functions of distance in MACE: basis, transforms by covalent radii, repulsion of nuclei, and the networks of radial weights.

Distances are in A and everything up to the networks is float64. Constants that files of mace-torch contain are state, so that
an imported model computes with the numbers of its file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from ase.data import covalent_radii
from torch import Tensor, nn

from forgefield.models.mace.options import MACEOptions
from forgefield.ops.functions import activate, bessel_basis, polynomial_cutoff, second_moment_scale
from forgefield.ops.graph import Segments, cut, gather
from forgefield.ops.linear import unit_normal
from forgefield.ops.products import product

TRANSFORMS: dict[str, tuple[float, ...]] = {"Agnesi": (0.9183, 4.5791, 1.0805), "Soft": (4.0,)}
"""Constants of each transform: q, p and a; steepness."""
_ZBL_EXPONENTS = (3.2, 0.9423, 0.4028, 0.2016)
_ZBL_COEFFICIENTS = (0.1818, 0.5099, 0.2802, 0.02817)
_ZBL_LENGTH, _ZBL_POWER, _COULOMB = 0.4543 * 0.529, 0.300, 14.3996


class RadialBasis(nn.Module):
    """Basis functions of edge lengths, and the envelope that ends all interactions."""

    constants: Tensor
    transform: Tensor

    def __init__(self, options: MACEOptions, cutoff: float) -> None:
        super().__init__()
        self.kind, self.transformation, self.cutoff = options.radial_type, options.distance_transform, cutoff
        self.power, self.apply_cutoff = float(options.num_polynomial_cutoff), options.apply_cutoff
        numbers = torch.arange(1, options.num_bessel + 1, dtype=torch.float64)
        if self.kind == "gaussian":
            numbers = torch.linspace(0.0, cutoff, options.num_bessel, dtype=torch.float64)
        self.register_buffer("constants", numbers)
        """Bessel: frequencies in units of pi / cutoff. Gaussians: centres. Chebyshev: degrees."""
        self.register_buffer(
            "transform", torch.tensor(TRANSFORMS.get(self.transformation or "", ()), dtype=torch.float64)
        )

    def forward(self, lengths: Tensor, radii: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Basis (n, num_bessel), and the envelope (n, 1) if it is not part of the basis; float64.

        lengths: (n,), A. radii: (n,) sum of the covalent radii of both atoms, A, where distances are transformed.
        """
        if self.kind == "bessel" and radii is None and self.apply_cutoff:
            basis = bessel_basis(lengths / self.cutoff, self.constants, self.power)
            return basis * (math.sqrt(2 / self.cutoff) * math.pi / self.cutoff), None
        envelope = polynomial_cutoff(lengths / self.cutoff, self.power).unsqueeze(1)
        distance = lengths if radii is None else self._transformed(lengths, radii)
        basis = self._functions(distance.unsqueeze(1))
        return (basis * envelope, None) if self.apply_cutoff else (basis, envelope)

    def _functions(self, x: Tensor) -> Tensor:
        if self.kind == "bessel":
            return torch.sin(x * (self.constants * (math.pi / self.cutoff))) * (math.sqrt(2 / self.cutoff) / x)
        if self.kind == "gaussian":
            width = self.cutoff / (self.constants.shape[0] - 1)
            return torch.exp(-0.5 / width**2 * (x - self.constants).square())
        values = [x, 2 * x * x - 1]
        while len(values) < self.constants.shape[0]:
            values.append(2 * x * values[-1] - values[-2])
        return torch.cat(values[: self.constants.shape[0]], 1)

    def _transformed(self, lengths: Tensor, radii: Tensor) -> Tensor:
        """Agnesi: from one at distance zero to zero; Soft: constant at short distances and the distance itself at long ones."""
        if self.transformation == "Agnesi":
            q, p, a = self.transform.unbind()
            x = lengths / (0.5 * radii)
            return 1 / (1 + a * x**q / (1 + x ** (q - p)))
        low, high = 0.75 * radii, (4 / 3) * radii
        share = 0.5 * (1 + torch.tanh(self.transform[0] / (high - low) * (lengths - 0.5 * (low + high))))
        return low + (lengths - low) * share

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RadialBasis:
        """Moves between devices but stays float64, as all geometry does."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in before.items():
            setattr(self, name, value.to(self.get_buffer(name).device))
        return self


def pair_radii(numbers: Sequence[int]) -> Tensor:
    """(n_species^2,) float64: sum of the covalent radii of each pair of species, A. numbers: atomic numbers."""
    radii = torch.tensor([float(covalent_radii[number]) for number in numbers], dtype=torch.float64)
    return (radii.unsqueeze(1) + radii).flatten()


def repulsion(lengths: Tensor, z_i: Tensor, z_j: Tensor, radii: Tensor, p: float) -> Tensor:
    """(n,) half of each pair's ZBL energy with the constants and the envelope of mace-torch, eV.

    lengths: (n,), A. z_i, z_j: (n,) atomic numbers, float64. radii: (n,) where it ends, A. p: exponent of the envelope.
    """
    x = lengths * (z_i**_ZBL_POWER + z_j**_ZBL_POWER) / _ZBL_LENGTH
    screening = sum(c * torch.exp(-d * x) for c, d in zip(_ZBL_COEFFICIENTS, _ZBL_EXPONENTS))
    return 0.5 * _COULOMB * z_i * z_j / lengths * screening * polynomial_cutoff(lengths / radii, p)


class RadialNetwork(nn.Module):
    """e3nn's network of scalars: weights of unit variance, and activations scaled to unit second moment between them."""

    def __init__(self, sizes: Sequence[int], *, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(unit_normal(n_in, n_out, generator=generator, dtype=dtype))
            for n_in, n_out in itertools.pairwise(sizes)
        )
        gain = second_moment_scale("silu")
        self.scales = [(1.0 if i == 0 else gain) / math.sqrt(n_in) for i, n_in in enumerate(sizes[:-1])]

    def forward(self, x: Tensor) -> Tensor:
        last = self.weights[-1] * self.scales[-1]
        if len(self.weights) == 1:  # geometry enters here
            result: Tensor = x @ last
            return result
        return product(self.hidden(x), last)

    def hidden(self, x: Tensor) -> Tensor:
        """The input of the last layer."""
        for number, (weight, scale) in enumerate(zip(tuple(self.weights)[:-1], self.scales)):
            x = x @ (weight * scale) if number == 0 else product(x, weight * scale)
            x = activate("silu", x)
        return x

    def hidden_in_doubles(self, x: Tensor) -> Tensor:
        """The same in float64, from x in float64."""
        for weight, scale in zip(tuple(self.weights)[:-1], self.scales):
            x = activate("silu", torch.matmul(x, weight.double() * scale))
        return x


class NormalisedNetwork(nn.Module):
    """Network of scalars with biases and layer normalisation before each activation."""

    def __init__(self, sizes: Sequence[int], *, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(sizes))
        draw = [
            (torch.rand(n_in + 1, n_out, generator=generator, dtype=torch.float64) * 2 - 1) / n_in**0.5
            for n_in, n_out in pairs
        ]
        self.weights = nn.ParameterList(nn.Parameter(values[:-1].to(dtype)) for values in draw)
        self.biases = nn.ParameterList(nn.Parameter(values[-1].to(dtype)) for values in draw)
        self.norm_weights = nn.ParameterList(nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes[1:-1])
        self.norm_biases = nn.ParameterList(nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes[1:-1])

    def forward(self, basis: Tensor, tables: Sequence[Tensor], ends: Sequence[Tensor]) -> Tensor:
        """(n, sizes[-1]). The inputs of an edge are its basis (n, num_bessel) and, for each of its ends, the row of the atom's
        species in a table (n_species, c), whose part of the first layer is computed once for each species.

        ends: (n,) species.
        """
        last = len(self.weights) - 1
        by_basis, *by_table = cut(self.weights[0], [basis.shape[1], *(table.shape[1] for table in tables)], 0)
        x = basis @ by_basis + self.biases[0]
        for table, weight, species in zip(tables, by_table, ends):
            x = x + gather(table @ weight, Segments(species, table.shape[0]))
        for number in range(last):
            x = activate("silu", _normalised(x) * self.norm_weights[number] + self.norm_biases[number])
            x = product(x, self.weights[number + 1]) + self.biases[number + 1]
        result: Tensor = x
        return result


def _normalised(x: Tensor) -> Tensor:
    """Each row (..., c) with zero mean and unit variance."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)

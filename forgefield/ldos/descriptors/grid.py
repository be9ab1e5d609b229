"""Descriptors of a structure on a grid or at any points.

Points are processed in chunks of nearby points, so that memory is bounded and few atoms are candidates for neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch
from ase.data import atomic_numbers, chemical_symbols
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.ldos.descriptor_options import DescriptorOptions
from forgefield.ldos.descriptors.bispectrum import Bispectrum, bispectrum_triples
from forgefield.ldos.descriptors.neighbourhoods import AtomImages, GaussianDensity, default_sigma

Values: TypeAlias = ArrayLike | Tensor
"""Numbers as lists, arrays or tensors."""


def make_descriptors(options: DescriptorOptions, species: Sequence[str | int]) -> GridDescriptors:
    """Descriptors for structures of the `species` (chemical symbols or atomic numbers, in the order of columns unless
    `options.species` is set)."""
    return GridDescriptors(options, species)


def require_fitting(options: DescriptorOptions, species: Sequence[str], n_columns: int | None) -> None:
    """Refuse settings that cannot produce inputs of `n_columns` columns, or that leave their order undefined.

    species: of the structures, in any order; nothing is checked if it is empty. n_columns: None: not compared.
    """
    if not species:
        return
    where = "data.points.descriptors"
    if options.type == "gaussian" and options.species is None and len(species) > 1:
        raise ForgefieldError(
            f"{where}.species is missing: the elements of the {len(species)} columns, in order. MALA and LAMMPS "
            f"order them by symbol, species: [{', '.join(sorted(species))}]; forgefield data descriptors by atomic number, "
            f"species: [{', '.join(sorted(species, key=atomic_numbers.__getitem__))}]."
        )
    size = make_descriptors(options, species).size
    if n_columns is not None and size != n_columns:
        raise ForgefieldError(
            f"{where} produces {size} columns, but the inputs of data.train have {n_columns}; use the settings with which "
            "those files were computed, or remove the section if the run does not predict from structures."
        )


class GridDescriptors:
    """Descriptors of points of structures. Independent of any structure; tables are created once per device."""

    def __init__(self, options: DescriptorOptions, species: Sequence[str | int]) -> None:
        self.options = options
        self.species = _ordered(options, _symbols(species))
        self._weights = _weights(options, self.species)
        self._bispectra: dict[torch.device, Bispectrum] = {}

    @property
    def columns(self) -> list[str]:
        """Names: B(j1,j2,j) with twice the angular momenta, in the order of LAMMPS, or density(X) of element X."""
        if self.options.type == "gaussian":
            return [f"density({symbol})" for symbol in self.species]
        return ["B({},{},{})".format(*triple) for triple in bispectrum_triples(self.options.twojmax)]

    @property
    def size(self) -> int:
        """Number of columns."""
        return len(self.columns)

    def on_grid(
        self,
        cell: Values,
        positions: Values,
        numbers: Values,
        pbc: Values,
        grid_shape: Sequence[int],
        device: torch.device | str | None = None,
        chunk: int | None = None,
    ) -> Tensor:
        """Descriptors at the points (i/nx, j/ny, k/nz) of a cell: (nx, ny, nz, size).

        Arguments:
            cell: (3, 3), A, one vector per row; positions: (n_atoms, 3), A; numbers: (n_atoms,), atomic numbers; pbc: one or
                three truth values. Arrays or tensors.
            grid_shape: nx, ny, nz.
            device: where to compute, and where the result is; default: that of `positions`, else the CPU.
            chunk: points per chunk; it bounds memory and does not affect the result.
        """
        shape = _grid_shape(grid_shape)
        structure = self._structure(cell, positions, numbers, pbc, device)
        points = grid_points(structure["cell"].detach(), shape)
        sigma = self._sigma(lambda: default_sigma(structure["cell"], shape))
        return self._compute(points, sigma, chunk, **structure).reshape(*shape, self.size)

    def at_points(
        self,
        points: Values,
        cell: Values,
        positions: Values,
        numbers: Values,
        pbc: Values,
        device: torch.device | str | None = None,
        chunk: int | None = None,
    ) -> Tensor:
        """Descriptors (n, size) at any `points` (n, 3), A; the other arguments are those of `on_grid`."""
        structure = self._structure(cell, positions, numbers, pbc, device)
        where = torch.as_tensor(points, dtype=torch.float64, device=structure["cell"].device).detach()
        if where.ndim != 2 or where.shape[1] != 3:
            raise ForgefieldError(f"points have shape {tuple(where.shape)}; it must be (n, 3): x, y, z of each, A")
        return self._compute(where, self._sigma(None), chunk, **structure)

    def _sigma(self, default: Callable[[], float] | None) -> float:
        if self.options.type != "gaussian":
            return math.nan
        if self.options.sigma is not None:
            return self.options.sigma
        if default is None:
            raise ForgefieldError(
                "sigma: there is no default for points that are not a grid; give the width of the Gaussians, A"
            )
        return default()

    def _structure(
        self, cell: Values, positions: Values, numbers: Values, pbc: Values, device: torch.device | str | None
    ) -> dict[str, Tensor]:
        """The structure as tensors on one device, float64, checked."""
        if device is None:
            device = positions.device if isinstance(positions, Tensor) else "cpu"
        kind = torch.float64
        cell, positions = (torch.as_tensor(_array(x), dtype=kind, device=device) for x in (cell, positions))
        number = np.asarray(torch.as_tensor(_array(numbers)).cpu()).reshape(-1)
        if cell.shape != (3, 3):
            raise ForgefieldError(f"cell has shape {tuple(cell.shape)}; it must be (3, 3), one vector per row, A")
        if positions.ndim != 2 or positions.shape != (len(number), 3):
            raise ForgefieldError(
                f"positions have shape {tuple(positions.shape)}; for {len(number)} atomic numbers it must be "
                f"({len(number)}, 3)"
            )
        for name, values in (("cell", cell), ("positions", positions)):
            if not bool(torch.isfinite(values).all()):
                raise ForgefieldError(f"{name} contains values that are not finite numbers")
        periodic = torch.as_tensor(_array(pbc), dtype=torch.bool, device=device).expand(3)
        return {"cell": cell, "positions": positions, "species": self._rows(number).to(device), "pbc": periodic}

    def _rows(self, numbers: np.ndarray) -> Tensor:
        numbers_of_species = [atomic_numbers[symbol] for symbol in self.species]
        for number in np.unique(numbers).tolist():
            if number not in numbers_of_species:
                name = chemical_symbols[number] if 0 < number < len(chemical_symbols) else f"atomic number {number}"
                raise ForgefieldError(
                    f"the structure contains {name}; these descriptors are for {', '.join(self.species)}"
                )
        return torch.tensor([numbers_of_species.index(number) for number in numbers.tolist()], dtype=torch.int64)

    def _calculator(self, device: torch.device, sigma: float) -> Bispectrum | GaussianDensity:
        if self.options.type == "gaussian":
            return GaussianDensity(self.options, len(self.species), sigma)
        if device not in self._bispectra:
            self._bispectra[device] = Bispectrum(self.options, self._weights, device)
        return self._bispectra[device]

    def _compute(
        self,
        points: Tensor,
        sigma: float,
        chunk: int | None,
        *,
        cell: Tensor,
        positions: Tensor,
        species: Tensor,
        pbc: Tensor,
    ) -> Tensor:
        if chunk is not None and chunk < 1:
            raise ForgefieldError(f"chunk must be a number of points, at least 1, not {chunk}")
        if not points.shape[0]:
            return points.new_zeros(0, self.size, dtype=getattr(torch, self.options.precision))
        calculator = self._calculator(points.device, sigma)
        calculator.ready(points.shape[0])
        count = calculator.points_at_once if chunk is None else chunk
        environment = AtomImages(cell, positions, species, pbc, self.options.cutoff)
        points = environment.wrapped(points)
        order = _spatial_order(points, count, self.options.cutoff)
        differentiable = torch.is_grad_enabled() and (positions.requires_grad or cell.requires_grad)

        def of(chunk_points: Tensor) -> Tensor:
            return calculator.of(environment.neighbours(chunk_points, calculator.closest))

        with full_precision():
            chunks = points[order].split(count)
            values = [
                checkpoint(of, chunk_points, use_reentrant=False) if differentiable else of(chunk_points)
                for chunk_points in chunks
            ]
        return torch.cat(values)[torch.argsort(order)]


def grid_points(cell: Tensor, grid_shape: tuple[int, int, int]) -> Tensor:
    """Points (i/nx, j/ny, k/nz) of a cell (3, 3), k fastest: (nx ny nz, 3), A."""
    axes = [torch.arange(n, dtype=torch.float64, device=cell.device) / n for n in grid_shape]
    return torch.cartesian_prod(*axes) @ cell


def _spatial_order(points: Tensor, chunk: int, cutoff: float) -> Tensor:
    """Order (n,) in which consecutive points are in small boxes of about `chunk` points each."""
    low, high = points.amin(0), points.amax(0)
    volume = float((high - low).clamp(min=1e-3).prod())
    edge = min(max((volume * chunk / points.shape[0]) ** (1 / 3), 1e-3), cutoff)
    box = ((points - low) / edge).to(torch.int64)
    counts = box.amax(0) + 1
    return torch.argsort((box[:, 0] * counts[1] + box[:, 1]) * counts[2] + box[:, 2], stable=True)


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of float32 matrices in full precision, whatever is set for the process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _array(values: Values) -> Tensor | np.ndarray:
    """Tensors unchanged, everything else (lists, arrays, ASE's cells) as an array."""
    return values if isinstance(values, Tensor) else np.asarray(values)


def _grid_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    integers = [int(n) for n in shape]
    if len(integers) != 3 or min(integers) < 1 or integers != list(shape):
        raise ForgefieldError(f"grid_shape must be three numbers of points, such as [18, 18, 27], not {list(shape)}")
    return integers[0], integers[1], integers[2]


def _symbols(species: Sequence[str | int]) -> tuple[str, ...]:
    symbols = tuple(entry if isinstance(entry, str) else chemical_symbols[int(entry)] for entry in species)
    for symbol in symbols:
        if symbol not in atomic_numbers or symbol == "X":
            raise ForgefieldError(f"species: {symbol!r} is not a chemical element (write for instance 'Al')")
    if not symbols or len(set(symbols)) != len(symbols):
        raise ForgefieldError(f"species: {list(symbols)} should name at least one element, and each only once")
    return symbols


def _ordered(options: DescriptorOptions, species: tuple[str, ...]) -> tuple[str, ...]:
    """Elements in the order of columns: that of the options, else unchanged."""
    if options.species is None:
        return species
    for symbol in species:
        if symbol not in options.species:
            raise ForgefieldError(
                f"species: [{', '.join(options.species)}] has no {symbol}, which is among the elements"
            )
    return tuple(options.species)


def _weights(options: DescriptorOptions, species: tuple[str, ...]) -> list[float]:
    if options.element_weights is None:
        return [1.0] * len(species)
    weights = dict(options.element_weights)
    for symbol in weights:
        if symbol not in species:
            raise ForgefieldError(
                f"element_weights.{symbol}: there is no such element among {', '.join(species)}.{did_you_mean(symbol, species)}"
            )
    missing = [symbol for symbol in species if symbol not in weights]
    if missing:
        raise ForgefieldError(
            f"element_weights has no weight of {', '.join(missing)}; give one for each of {', '.join(species)}"
        )
    return [float(weights[symbol]) for symbol in species]

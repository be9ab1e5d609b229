"""Products of blocks with matrices, all of a layer in one launch, and the gradients of its matrices in two.

All fields are in one tensor, the arena, and all matrices in another, so that a product is described by a few integers, which a
program reads and which do not depend on the batch. Matrices of species are applied to atoms sorted by species, so that a
program has one or two species.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forgefield.kernels.core.fields import TANGENT, VALUE
from forgefield.kernels.core.runtime import interpreted, rounds_to_tf32
from forgefield.ops.products import product

FEW_ROWS = 4096
"""With fewer rows of all blocks together, tiles of products are small, so that there is one for every processor."""


@dataclass(frozen=True)
class Tile:
    """rows, columns: of the result of one program. depth: summed at a time; warps, stages: of Triton's launch."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


LARGE = {
    ("float64", False): Tile(128, 32, 16, 4, 3),
    ("float64", True): Tile(128, 32, 32, 4, 3),
    ("else", False): Tile(64, 64, 16, 4, 3),
    ("else", True): Tile(64, 32, 32, 4, 3),
}
"""Tiles for many rows, by precision, and whether there are matrices of species."""
SMALL = Tile(16, 32, 32, 4, 4)
"""Tile for few rows."""
MANY_ROWS, MIDDLE = 32768, Tile(64, 32, 32, 4, 3)
"""Tile for fewer rows than `MANY_ROWS`, in float64 and with matrices of species."""
GRADIENT = {False: Tile(64, 64, 64, 4, 3), True: Tile(32, 64, 32, 4, 4)}
"""Tiles for gradients of matrices, by whether rows are few."""
GRADIENT_IN_DOUBLES = Tile(32, 32, 16, 2, 4)
"""Tile for gradients where float32 is multiplied in float64."""
CHUNK = {False: 768, True: 384}
"""Rows that a program sums for the gradient of a matrix, by whether rows are few."""
SUMMED = 512
"""Numbers of a gradient that a program sums over the chunks."""
FAR = 2**31
"""Length from which on offsets in a block need 64 bits."""
SEVERAL = 16
"""Minimum length of the tables of first programs, so that layers share a compiled kernel."""
EXACT = "tf32x3"
"""Precision of products of float32 with matrices: three products of tensor cores, of leading bits and remainders of both
factors. The alternative is `tf32`: leading bits only."""
WITH_DOUBLES = ((8, 0), (9, 0), (10, 0))
"""Compute capabilities of GPUs whose tensor cores multiply float64 as fast as others multiply float32."""
EXACT_GRADIENT = "bf16x6"
"""Precision of gradients where tensor cores have no fast float64: six products of the three 16-bit components of numbers.
Alternatives: `bf16x3`, of two components; `float64`, `tf32x3`, `ieee`."""


@dataclass(frozen=True)
class Product:
    """One block of a result: out = a @ b + species_input @ species_matrix[species] + add.

    components: 2l + 1; width: channels of the result. out, a, species_input, add: offset of a block in the arena, in numbers of
    an atom; a negative `add`: none. depth, species_depth: channels of a and species_input, zero if there is no such term. b,
    species_matrix: offsets of the packed matrices (`matrices.py`): element (k, n) is at b + n * pitch + k; for matrices of
    species with species_pitch, and species_step from one species to the next.
    """

    components: int
    width: int
    out: int
    a: int
    depth: int
    b: int
    pitch: int
    species_input: int = 0
    species_depth: int = 0
    species_matrix: int = 0
    species_pitch: int = 0
    species_step: int = 0
    add: int = -1


@dataclass(frozen=True)
class Gradient:
    """Gradient of one matrix (depth, width), or of one for every species: a^T g, summed over values and tangents.

    components: 2l + 1. a, g: blocks, as in `Product`. out, pitch, step: offset among the gradients, and strides of rows and of
    species; n_species: zero if the matrix is the same for all. slots: one if there are values and no tangents.
    """

    components: int
    depth: int
    width: int
    a: int
    g: int
    out: int
    pitch: int
    n_species: int = 0
    step: int = 0
    slots: int = 2


@dataclass(frozen=True)
class AtomsBySpecies:
    """Atoms sorted by species. order: (n_atoms,), atoms; species: (n_atoms,), their species; pointers: (n_species + 1,), first
    atom of each species in `order`. All int32."""

    order: Tensor
    species: Tensor
    pointers: Tensor


def sort_by_species(species: Tensor, n_species: int) -> AtomsBySpecies:
    """Sort atoms by species (n_atoms,), stable."""
    n_atoms = species.shape[0]
    order, sorted_species = (torch.empty(n_atoms, dtype=torch.int32, device=species.device) for _ in range(2))
    pointers = torch.empty(n_species + 1, dtype=torch.int32, device=species.device)
    wide = max(2, 1 << (n_species - 1).bit_length())
    block = max(16, min(1024, 16384 // wide))
    _kernels().sort_kinds[(1,)](
        species=species,
        order=order,
        kinds=sorted_species,
        pointers=pointers,
        n_atoms=n_atoms,
        n_kinds=n_species,
        wide=wide,
        block=block,
        num_warps=8,
    )
    return AtomsBySpecies(order, sorted_species, pointers)


class Products:
    """Products that are computed in one launch. Their descriptions are never freed, because captured graphs read them."""

    def __init__(self, parts: Sequence[Product]) -> None:
        self.parts = tuple(parts)
        self.has_species = any(part.species_depth for part in parts)
        self.adds = any(part.add >= 0 for part in parts)
        self.aligned = _aligned(parts)
        self._largest = max(part.components * max(part.width, part.depth, part.species_depth) for part in parts)
        self._tables: dict[torch.device, Tensor] = {}

    def make(
        self,
        fields: Tensor,
        matrices: Tensor,
        sorted_atoms: AtomsBySpecies | None,
        n_atoms: int,
        slot: int,
        *,
        precise: bool = False,
        tile: Tile | None = None,
    ) -> None:
        """fields: the arena. matrices: packed. sorted_atoms: needed for matrices of several species. slot: values or tangents
        of all blocks. precise: in float64, or without tensor cores if those of the GPU are slow in float64. It is needed for
        energies and forces: gradients depend on their small differences from the labels, and tensor cores truncate sums in
        float32, always towards zero."""
        if not n_atoms:
            return
        precision = precision_of(fields, _precise(fields.device) if precise else EXACT, "tf32")
        if tile is None:
            tile = self._tile(n_atoms * sum(part.components for part in self.parts), precision == "float64")
        table = self._tables.get(fields.device)
        if table is None:
            table = self._tables[fields.device] = _on(fields.device, [astuple(part) for part in self.parts])
        n_tiles = max(
            -(-n_atoms * part.components // tile.rows) * -(-part.width // tile.columns) for part in self.parts
        )
        in_order = self.has_species and sorted_atoms is not None
        _kernels().multiply[(n_tiles, len(self.parts))](
            fields=fields,
            matrices=matrices,
            order=table if sorted_atoms is None else sorted_atoms.order,
            kinds=table if sorted_atoms is None else sorted_atoms.species,
            table=table,
            n_atoms=n_atoms,
            place=slot,
            low=matrices.shape[0] // 4,
            columns=table.shape[1],
            by_species=self.has_species,
            in_order=in_order,
            adds=self.adds,
            aligned=self.aligned,
            far=_far(n_atoms * self._largest),
            precision=precision,
            bm=tile.rows,
            bn=tile.columns,
            bk=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def _tile(self, n_rows: int, doubles: bool) -> Tile:
        if n_rows < FEW_ROWS:
            return SMALL
        if doubles and self.has_species and n_rows < MANY_ROWS:
            return MIDDLE
        return LARGE["float64" if doubles else "else", self.has_species]

    def make_by_reference(self, fields: Tensor, matrices: Tensor, one_hot: Tensor, n_atoms: int, slot: int) -> None:
        """The same by reference operations, in the precision that `products_in` requests. one_hot: (n_atoms, n_species)."""
        if not n_atoms:
            return
        for term in self.parts:
            matrix = _unpacked(matrices, term.b, (term.depth, term.width), (1, term.pitch))
            total = product(_rows(fields, term.a, n_atoms, term.components, term.depth, slot), matrix)
            if term.species_depth:
                n_species = one_hot.shape[1]
                shape = (n_species, term.species_depth, term.width)
                species_matrix = _unpacked(
                    matrices, term.species_matrix, shape, (term.species_step, 1, term.species_pitch)
                )
                rows = _rows(fields, term.species_input, n_atoms, term.components, term.species_depth, slot)
                species_rows = rows.view(n_atoms, term.components, 1, -1) * one_hot.view(n_atoms, 1, n_species, 1)
                total = total + product(species_rows.view(total.shape[0], -1), species_matrix.reshape(-1, term.width))
            if term.add >= 0:
                total = total + _rows(fields, term.add, n_atoms, term.components, term.width, slot)
            _rows(fields, term.out, n_atoms, term.components, term.width, slot).copy_(total)


class Starts(NamedTuple):
    """First program of every gradient, of tiles (for each chunk) and of sums, and their total numbers."""

    tiles: Tensor
    sums: Tensor
    n_tiles: int
    n_sums: int


class Gradients:
    """Gradients of matrices, computed in two launches: sums over chunks of rows, then over chunks in a fixed order."""

    def __init__(self, parts: Sequence[Gradient]) -> None:
        self.parts = tuple(parts)
        self.has_species = any(part.n_species for part in parts)
        self.aligned = _aligned(parts)
        self._largest = 2 * max(part.components * max(part.width, part.depth) for part in parts)
        rows, self._by_chunk, self._besides = [], 0, 0
        for part in parts:
            rows.append((*astuple(part), self._by_chunk, self._besides))
            self._by_chunk += part.components * part.depth * part.width
            self._besides += max(0, part.n_species - 1) * part.depth * part.width
        self._rows = rows
        self._tables: dict[torch.device, Tensor] = {}
        self._starts: dict[tuple[torch.device, Tile], Starts] = {}

    def make(
        self,
        fields: Tensor,
        sorted_atoms: AtomsBySpecies | None,
        n_atoms: int,
        out: Tensor,
        tile: Tile | None = None,
        chunk: int | None = None,
    ) -> None:
        """Compute the gradients from values and tangents of all blocks, into `out`."""
        if not n_atoms:
            out.zero_()
            return
        table = self._tables.get(fields.device)
        if table is None:
            table = self._tables[fields.device] = _on(fields.device, self._rows)
        few = n_atoms * max(part.components for part in self.parts) < FEW_ROWS
        doubles = _precise(fields.device) == "float64"
        precision = precision_of(fields, "float64" if doubles else EXACT_GRADIENT, "bf16x3")
        if tile is None:
            # In float64 the large tile exceeds the shared memory of many GPUs.
            large = GRADIENT[few or fields.dtype == torch.float64]
            tile = GRADIENT_IN_DOUBLES if precision == "float64" else large
        n_chunks = -(-2 * n_atoms // (chunk or CHUNK[few]))
        parts = fields.new_empty(n_chunks * self._by_chunk + self._besides)
        starts = self._where(fields.device, tile)
        order, species, pointers = (
            (table,) * 3 if sorted_atoms is None else (sorted_atoms.order, sorted_atoms.species, sorted_atoms.pointers)
        )
        _kernels().contract[(starts.n_tiles * n_chunks,)](
            fields=fields,
            parts=parts,
            order=order,
            kinds=species,
            pointers=pointers,
            table=table,
            starts=starts.tiles,
            n_atoms=n_atoms,
            n_chunks=n_chunks,
            columns=table.shape[1],
            by_species=self.has_species,
            aligned=self.aligned,
            far=_far(n_atoms * self._largest),
            precision=precision,
            bm=tile.rows,
            bn=tile.columns,
            bk=tile.depth,
            several=starts.tiles.shape[0],
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        _kernels().add_parts[(starts.n_sums,)](
            parts=parts,
            out=out,
            pointers=pointers,
            table=table,
            starts=starts.sums,
            n_atoms=n_atoms,
            n_chunks=n_chunks,
            columns=table.shape[1],
            block=SUMMED,
            several=starts.sums.shape[0],
            num_warps=4,
        )

    def _where(self, device: torch.device, tile: Tile) -> Starts:
        """First programs of every gradient, for both launches."""
        if (device, tile) not in self._starts:
            tiles = [-(-p.depth // tile.rows) * -(-p.width // tile.columns) * p.components for p in self.parts]
            sums = [-(-p.depth * p.width // SUMMED) for p in self.parts]
            starts = Starts(_starts(device, tiles), _starts(device, sums), sum(tiles), sum(sums))
            self._starts[device, tile] = starts
        return self._starts[device, tile]

    def make_by_reference(self, fields: Tensor, one_hot: Tensor, n_atoms: int, out: Tensor) -> None:
        """The same by reference operations, in the precision that `products_in` requests. one_hot: (n_atoms, n_species)."""
        for gradient in self.parts:
            weights = one_hot.unbind(1) if gradient.n_species else [None]
            for species, weight in enumerate(weights):
                total = _view(
                    out, gradient.out + species * gradient.step, (gradient.depth, gradient.width), (gradient.pitch, 1)
                ).zero_()
                # Separately: rounded factors are scaled by their largest entry, and tangents may be far smaller than values.
                for slot in (VALUE, TANGENT)[: gradient.slots]:
                    a = _rows(fields, gradient.a, n_atoms, gradient.components, gradient.depth, slot)
                    g = _rows(fields, gradient.g, n_atoms, gradient.components, gradient.width, slot)
                    if weight is not None:
                        g = g * weight.repeat_interleave(gradient.components).unsqueeze(1)
                    total += product(a.t(), g)


def _rows(fields: Tensor, start: int, n_atoms: int, components: int, width: int, slot: int) -> Tensor:
    """Values or tangents of a block, (n_atoms * components, width)."""
    length = n_atoms * components * width
    begin = 2 * n_atoms * start + slot * length
    return fields[begin : begin + length].view(-1, width)


def _view(matrices: Tensor, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    return matrices.as_strided(shape, strides, matrices.storage_offset() + start)


def _unpacked(matrices: Tensor, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """The sum of leading bits and remainders."""
    rest = start + matrices.shape[0] // 4
    return _view(matrices, start, shape, strides) + _view(matrices, rest, shape, strides)


def _aligned(parts: Sequence[Product] | Sequence[Gradient]) -> bool:
    """Whether offsets of rows, blocks and matrices are multiples of 16 numbers, so that wide loads are possible."""
    counts = ("components", "n_species", "slots")
    return all(n % 16 == 0 for part in parts for name, n in vars(part).items() if n > 0 and name not in counts)


def _kernels() -> Any:
    from forgefield.kernels.dense import product_source

    return product_source


@cache
def _precise(device: torch.device) -> str:
    """Precision of products of float32 where tensor cores for shorter numbers are not precise enough."""
    if interpreted() or torch.cuda.get_device_capability(device) in WITH_DOUBLES:
        return "float64"
    return "ieee"


def _far(length: int) -> bool:
    """Whether offsets in a block of this length need 64 bits; with 32 bits programs need fewer registers."""
    return length >= FAR


def precision_of(fields: Tensor, exact: str, rounded: str) -> str:
    """Precision of products in Triton: exact, or rounded if the training uses tf32."""
    if fields.dtype != torch.float32:
        return "ieee"
    chosen = rounded if rounds_to_tf32() else exact
    if interpreted() and chosen.startswith("bf16"):
        return "ieee"  # the interpreter does not multiply numbers of 16 bits
    return chosen


def _starts(device: torch.device, counts: Sequence[int]) -> Tensor:
    """First programs, padded with an unreachable number, so that one compiled kernel serves all layers."""
    length = max(SEVERAL, 1 << (len(counts) - 1).bit_length())
    firsts = list(accumulate(counts, initial=0))[:-1]
    return torch.tensor(firsts + [2**40] * (length - len(counts)), dtype=torch.int64, device=device)


def _on(device: torch.device, rows: Sequence[tuple[int, ...]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)

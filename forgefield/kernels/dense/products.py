"""Products of blocks with matrices, all of a layer in one launch, and the gradients of its matrices in two.

Fields that take part lie in one stretch of memory, the arena, and matrices in another, so that a product is described by a few
whole numbers, which a program reads. Nothing of them depends on the batch. Matrices that belong to a species are applied to
atoms sorted by species: a program meets one or two of these, however many there are.
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
"""Below so many rows of all blocks together the tiles of products are small, so that there is one for every processor."""


@dataclass(frozen=True)
class Tile:
    """rows, columns: of the result of one program. depth: summed at a time; warps, stages: as Triton takes them."""

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
"""Of many rows, by how they are multiplied, and whether there are matrices of species."""
SMALL = Tile(16, 32, 32, 4, 4)
"""Of few rows."""
MANY_ROWS, MIDDLE = 32768, Tile(64, 32, 32, 4, 3)
"""Of fewer rows than this, in float64 and with matrices of species."""
GRADIENT = {False: Tile(64, 64, 64, 4, 3), True: Tile(32, 64, 32, 4, 4)}
"""Of gradients of matrices, by whether rows are few."""
GRADIENT_IN_DOUBLES = Tile(32, 32, 16, 2, 4)
"""The same where float32 is multiplied in float64."""
CHUNK = {False: 768, True: 384}
"""Rows that one program sums for the gradient of a matrix, likewise."""
SUMMED = 512
"""Numbers of a gradient that one program adds up from the chunks."""
FAR = 2**31
"""Length from which on places in a block are counted with 64 bits."""
SEVERAL = 16
"""Parts of a layer, at least: tables of where their programs begin have room for so many."""
EXACT = "tf32x3"
"""How float32 is multiplied with matrices: as three products of tensor cores, of leading bits and rests of both factors.
The other: `tf32`, leading bits alone."""
WITH_DOUBLES = ((8, 0), (9, 0), (10, 0))
"""Generations of GPUs whose tensor cores multiply float64 as fast as others multiply float32."""
EXACT_GRADIENT = "bf16x6"
"""How it is for gradients, where tensor cores do not multiply float64, which is faster: as six products of parts of 16 bits, of
three that make up a number. Others: `bf16x3`, of two parts; `float64`, `tf32x3`, `ieee`."""


@dataclass(frozen=True)
class Product:
    """One block of a result: out = a @ b, plus own @ b of the species, plus what is at `add`.

    components: 2l + 1; width: channels of the result. out, a, own, add: where a block begins in the arena, in numbers of an
    atom; a negative `add`: nothing. depth, own_depth: channels of a and own, zero where there is no such part. b, own_b: where
    the matrices begin, as they lie packed (`matrices.py`) or transposed there: number (k, n) lies at b + n * pitch + k, with
    own_pitch for those of species, and own_step from one species to the next.
    """

    components: int
    width: int
    out: int
    a: int
    depth: int
    b: int
    pitch: int
    own: int = 0
    own_depth: int = 0
    own_b: int = 0
    own_pitch: int = 0
    own_step: int = 0
    add: int = -1


@dataclass(frozen=True)
class Gradient:
    """Of one matrix (depth, width), or of one for every species: a^T g over values and tangents.

    components: 2l + 1. a, g: blocks, as in `Product`. out, pitch, step: where it begins among the gradients, from one row to
    the next and from one species to the next; n_kinds: zero where it is the same for all. places: one where there are values
    and no tangents.
    """

    components: int
    depth: int
    width: int
    a: int
    g: int
    out: int
    pitch: int
    n_kinds: int = 0
    step: int = 0
    places: int = 2


@dataclass(frozen=True)
class Kinds:
    """Atoms by species. order: (n_atoms,) atoms, sorted; kinds: (n_atoms,) their species; pointers: (n_kinds + 1,) where each
    species begins there. All int32."""

    order: Tensor
    kinds: Tensor
    pointers: Tensor


def sort_kinds(species: Tensor, n_kinds: int) -> Kinds:
    """Of species (n_atoms,), stable."""
    n_atoms = species.shape[0]
    order, kinds = (torch.empty(n_atoms, dtype=torch.int32, device=species.device) for _ in range(2))
    pointers = torch.empty(n_kinds + 1, dtype=torch.int32, device=species.device)
    wide = max(2, 1 << (n_kinds - 1).bit_length())
    block = max(16, min(1024, 16384 // wide))
    _kernels().sort_kinds[(1,)](
        species=species,
        order=order,
        kinds=kinds,
        pointers=pointers,
        n_atoms=n_atoms,
        n_kinds=n_kinds,
        wide=wide,
        block=block,
        num_warps=8,
    )
    return Kinds(order, kinds, pointers)


class Products:
    """Products that are made in one launch. Descriptions stay on the device for good: captured graphs read them."""

    def __init__(self, parts: Sequence[Product]) -> None:
        self.parts = tuple(parts)
        self.own = any(part.own_depth for part in parts)
        self.adds = any(part.add >= 0 for part in parts)
        self.aligned = _aligned(parts)
        self._largest = max(part.components * max(part.width, part.depth, part.own_depth) for part in parts)
        self._tables: dict[torch.device, Tensor] = {}

    def make(
        self,
        fields: Tensor,
        matrices: Tensor,
        kinds: Kinds | None,
        n_atoms: int,
        place: int,
        *,
        precise: bool = False,
        tile: Tile | None = None,
    ) -> None:
        """fields: the arena. matrices: packed. kinds: needed where matrices belong to species, and there is more than one.
        place: values or tangents of all blocks. precise: in float64, or without tensor cores where a GPU has no fast ones
        for it. What energies and forces come from is multiplied so: gradients are made of their small differences from the
        labels, and tensor cores cut off what they add to float32, always towards zero."""
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
        in_order = self.own and kinds is not None
        _kernels().multiply[(n_tiles, len(self.parts))](
            fields=fields,
            matrices=matrices,
            order=table if kinds is None else kinds.order,
            kinds=table if kinds is None else kinds.kinds,
            table=table,
            n_atoms=n_atoms,
            place=place,
            low=matrices.shape[0] // 4,
            columns=table.shape[1],
            own=self.own,
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
        if doubles and self.own and n_rows < MANY_ROWS:
            return MIDDLE
        return LARGE["float64" if doubles else "else", self.own]

    def make_plainly(self, fields: Tensor, matrices: Tensor, one_hot: Tensor, n_atoms: int, place: int) -> None:
        """The same by operations of torch, in the precision that `products_in` asks for. one_hot: (n_atoms, n_kinds)."""
        if not n_atoms:
            return
        for part in self.parts:
            matrix = _unpacked(matrices, part.b, (part.depth, part.width), (1, part.pitch))
            total = product(_rows(fields, part.a, n_atoms, part.components, part.depth, place), matrix)
            if part.own_depth:
                n_kinds = one_hot.shape[1]
                sides = (n_kinds, part.own_depth, part.width)
                own_b = _unpacked(matrices, part.own_b, sides, (part.own_step, 1, part.own_pitch))
                rows = _rows(fields, part.own, n_atoms, part.components, part.own_depth, place)
                own = rows.view(n_atoms, part.components, 1, -1) * one_hot.view(n_atoms, 1, n_kinds, 1)
                total = total + product(own.view(total.shape[0], -1), own_b.reshape(-1, part.width))
            if part.add >= 0:
                total = total + _rows(fields, part.add, n_atoms, part.components, part.width, place)
            _rows(fields, part.out, n_atoms, part.components, part.width, place).copy_(total)


class Starts(NamedTuple):
    """Where the programs of every part begin, those of tiles for each chunk, and how many there are in all."""

    tiles: Tensor
    sums: Tensor
    n_tiles: int
    n_sums: int


class Gradients:
    """Gradients of matrices that are made in two launches: chunks of rows first, then sums over chunks in their order."""

    def __init__(self, parts: Sequence[Gradient]) -> None:
        self.parts = tuple(parts)
        self.own = any(part.n_kinds for part in parts)
        self.aligned = _aligned(parts)
        self._largest = 2 * max(part.components * max(part.width, part.depth) for part in parts)
        rows, self._by_chunk, self._besides = [], 0, 0
        for part in parts:
            rows.append((*astuple(part), self._by_chunk, self._besides))
            self._by_chunk += part.components * part.depth * part.width
            self._besides += max(0, part.n_kinds - 1) * part.depth * part.width
        self._rows = rows
        self._tables: dict[torch.device, Tensor] = {}
        self._starts: dict[tuple[torch.device, Tile], Starts] = {}

    def make(
        self,
        fields: Tensor,
        kinds: Kinds | None,
        n_atoms: int,
        out: Tensor,
        tile: Tile | None = None,
        chunk: int | None = None,
    ) -> None:
        """From values and tangents of all blocks, to out."""
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
            # In float64 the large tile is more than many GPUs have room for.
            large = GRADIENT[few or fields.dtype == torch.float64]
            tile = GRADIENT_IN_DOUBLES if precision == "float64" else large
        n_chunks = -(-2 * n_atoms // (chunk or CHUNK[few]))
        parts = fields.new_empty(n_chunks * self._by_chunk + self._besides)
        starts = self._where(fields.device, tile)
        order, of_atoms, pointers = (table,) * 3 if kinds is None else (kinds.order, kinds.kinds, kinds.pointers)
        _kernels().contract[(starts.n_tiles * n_chunks,)](
            fields=fields,
            parts=parts,
            order=order,
            kinds=of_atoms,
            pointers=pointers,
            table=table,
            starts=starts.tiles,
            n_atoms=n_atoms,
            n_chunks=n_chunks,
            columns=table.shape[1],
            own=self.own,
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
        """Where the programs of every part begin, of both launches."""
        if (device, tile) not in self._starts:
            tiles = [-(-p.depth // tile.rows) * -(-p.width // tile.columns) * p.components for p in self.parts]
            sums = [-(-p.depth * p.width // SUMMED) for p in self.parts]
            found = Starts(_starts(device, tiles), _starts(device, sums), sum(tiles), sum(sums))
            self._starts[device, tile] = found
        return self._starts[device, tile]

    def make_plainly(self, fields: Tensor, one_hot: Tensor, n_atoms: int, out: Tensor) -> None:
        """The same by operations of torch, in the precision that `products_in` asks for. one_hot: (n_atoms, n_kinds)."""
        for part in self.parts:
            weights = one_hot.unbind(1) if part.n_kinds else [None]
            for kind, weight in enumerate(weights):
                total = _view(out, part.out + kind * part.step, (part.depth, part.width), (part.pitch, 1)).zero_()
                # One by one: rounded factors are scaled by their largest entry, and tangents may be far smaller than values.
                for place in (VALUE, TANGENT)[: part.places]:
                    a = _rows(fields, part.a, n_atoms, part.components, part.depth, place)
                    g = _rows(fields, part.g, n_atoms, part.components, part.width, place)
                    if weight is not None:
                        g = g * weight.repeat_interleave(part.components).unsqueeze(1)
                    total += product(a.t(), g)


def _rows(fields: Tensor, start: int, n_atoms: int, components: int, width: int, place: int) -> Tensor:
    """Values or tangents of a block, (n_atoms * components, width)."""
    length = n_atoms * components * width
    begin = 2 * n_atoms * start + place * length
    return fields[begin : begin + length].view(-1, width)


def _view(matrices: Tensor, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    return matrices.as_strided(shape, strides, matrices.storage_offset() + start)


def _unpacked(matrices: Tensor, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Leading bits and the rest together."""
    rest = start + matrices.shape[0] // 4
    return _view(matrices, start, shape, strides) + _view(matrices, rest, shape, strides)


def _aligned(parts: Sequence[Product] | Sequence[Gradient]) -> bool:
    """Whether rows, blocks and matrices begin at multiples of 16 numbers, so that they can be read in wide pieces."""
    counts = ("components", "n_kinds", "places")
    return all(n % 16 == 0 for part in parts for name, n in vars(part).items() if n > 0 and name not in counts)


def _kernels() -> Any:
    from forgefield.kernels.dense import product_source

    return product_source


@cache
def _precise(device: torch.device) -> str:
    """How float32 is multiplied where tensor cores for short numbers are not precise enough."""
    if interpreted() or torch.cuda.get_device_capability(device) in WITH_DOUBLES:
        return "float64"
    return "ieee"


def _far(length: int) -> bool:
    """Whether places in a block of this length need whole numbers of 64 bits; with 32, programs need fewer registers."""
    return length >= FAR


def precision_of(fields: Tensor, exact: str, rounded: str) -> str:
    """How Triton is to multiply: exactly, or rounded where trainings are told tf32."""
    if fields.dtype != torch.float32:
        return "ieee"
    chosen = rounded if rounds_to_tf32() else exact
    if interpreted() and chosen.startswith("bf16"):
        return "ieee"  # the interpreter does not multiply numbers of 16 bits
    return chosen


def _starts(device: torch.device, counts: Sequence[int]) -> Tensor:
    """Filled up with what no program reaches, so that one compiled kernel serves all layers."""
    room = max(SEVERAL, 1 << (len(counts) - 1).bit_length())
    begun = list(accumulate(counts, initial=0))[:-1]
    return torch.tensor(begun + [2**40] * (room - len(counts)), dtype=torch.int64, device=device)


def _on(device: torch.device, rows: Sequence[tuple[int, ...]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)

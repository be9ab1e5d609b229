"""Products of blocks with matrices, all of a layer in one launch, and the gradients of all matrices of a network in two.

Fields that take part lie in one stretch of memory, the arena, and matrices in another, so that a product is described by a few
whole numbers, which a program reads. Nothing of them depends on the batch. Matrices that belong to a species are applied to
atoms sorted by species: a program meets one or two of these, however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

FEW_ROWS = 8192
"""Below so many rows of all blocks together the tiles of products are small, so that there is one for every processor."""


@dataclass(frozen=True)
class Tile:
    """rows, columns: of the result of one program. depth: summed at a time; warps, stages: as Triton takes them."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


LARGE = Tile(64, 64, 32, 4, 3)
SMALL = Tile(32, 32, 32, 4, 4)
GRADIENT = Tile(64, 64, 32, 4, 3)
CHUNK = 2048
"""Rows that one program sums for the gradient of a matrix."""
SUMMED = 512
"""Numbers of a gradient that one program adds up from the chunks."""
EXACT = "tf32x3"
"""How Triton multiplies float32: three products of tensor cores, as precise as one of float32; `ieee`: without them."""


@dataclass(frozen=True)
class Product:
    """One block of a result: out = a @ b, plus own @ b of the species, plus what is at `add`.

    components: 2l + 1; width: channels of the result. out, a, own, add: where a block begins in the arena, in numbers of an
    atom; a negative `add`: nothing. depth, own_depth: channels of a and own, zero where there is no such part. b, own_b: where
    the matrices begin, pitch, own_pitch: from one of their rows to the next, own_step: from one species to the next.
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
    the next and from one species to the next; n_kinds: zero where it is the same for all.
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
    _kernels().sort_kinds[(1,)](species, order, kinds, pointers, n_atoms, n_kinds, wide, block, num_warps=8)
    return Kinds(order, kinds, pointers)


class Products:
    """Products that are made in one launch. turned: matrices are transposed. Descriptions stay on the device for good: captured
    graphs read them."""

    def __init__(self, parts: Sequence[Product], *, turned: bool) -> None:
        self.parts, self.turned = tuple(parts), turned
        self.own = any(part.own_depth for part in parts)
        self.adds = any(part.add >= 0 for part in parts)
        self.aligned = _aligned(parts)
        self._tables: dict[torch.device, Tensor] = {}

    def make(
        self, fields: Tensor, matrices: Tensor, kinds: Kinds | None, n_atoms: int, place: int, tile: Tile | None = None
    ) -> None:
        """fields: the arena. kinds: needed where matrices belong to species, and there is more than one. place: values or
        tangents of all blocks."""
        if not n_atoms:
            return
        if tile is None:
            tile = SMALL if n_atoms * sum(part.components for part in self.parts) < FEW_ROWS else LARGE
        table = self._tables.get(fields.device)
        if table is None:
            table = self._tables[fields.device] = _on(fields.device, [astuple(part) for part in self.parts])
        n_tiles = max(
            -(-n_atoms * part.components // tile.rows) * -(-part.width // tile.columns) for part in self.parts
        )
        precision = _precision(fields)
        in_order = self.own and kinds is not None
        _kernels().multiply[(n_tiles, len(self.parts))](
            fields,
            matrices,
            table if kinds is None else kinds.order,
            table if kinds is None else kinds.kinds,
            table,
            n_atoms,
            place,
            table.shape[1],
            self.turned,
            self.own,
            in_order,
            self.adds,
            self.aligned,
            precision,
            tile.rows,
            tile.columns,
            tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


class Gradients:
    """Gradients of matrices that are made in two launches: chunks of rows first, then sums over chunks in their order."""

    def __init__(self, parts: Sequence[Gradient]) -> None:
        self.parts = tuple(parts)
        self.own = any(part.n_kinds for part in parts)
        self.aligned = _aligned(parts)
        rows, self._by_chunk, self._besides = [], 0, 0
        for part in parts:
            rows.append((*astuple(part), self._by_chunk, self._besides))
            self._by_chunk += part.components * part.depth * part.width
            self._besides += max(0, part.n_kinds - 1) * part.depth * part.width
        self._rows = rows
        self._tables: dict[torch.device, Tensor] = {}

    def make(
        self, fields: Tensor, kinds: Kinds | None, n_atoms: int, out: Tensor, tile: Tile = GRADIENT, chunk: int = CHUNK
    ) -> None:
        """From values and tangents of all blocks, to out."""
        if not n_atoms:
            out.zero_()
            return
        table = self._tables.get(fields.device)
        if table is None:
            table = self._tables[fields.device] = _on(fields.device, self._rows)
        n_chunks = -(-2 * n_atoms // chunk)
        parts = fields.new_empty(n_chunks * self._by_chunk + self._besides)
        n_tiles = max(
            -(-part.depth // tile.rows) * -(-part.width // tile.columns) * part.components for part in self.parts
        )
        order, of_atoms, pointers = (table,) * 3 if kinds is None else (kinds.order, kinds.kinds, kinds.pointers)
        precision = _precision(fields)
        _kernels().contract[(n_tiles * n_chunks, len(self.parts))](
            fields,
            parts,
            order,
            of_atoms,
            pointers,
            table,
            n_atoms,
            n_chunks,
            table.shape[1],
            self.own,
            self.aligned,
            precision,
            tile.rows,
            tile.columns,
            tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        largest = max(part.depth * part.width for part in self.parts)
        _kernels().add_parts[(-(-largest // SUMMED), len(self.parts))](
            parts, out, pointers, table, n_atoms, n_chunks, table.shape[1], SUMMED, num_warps=4
        )


def _aligned(parts: Sequence[Product] | Sequence[Gradient]) -> bool:
    """Whether rows, blocks and matrices begin at multiples of 16 numbers, so that they can be read in wide pieces."""
    counts = ("components", "n_kinds")
    return all(n % 16 == 0 for part in parts for name, n in vars(part).items() if n > 0 and name not in counts)


def _precision(fields: Tensor) -> str:
    """How Triton is to multiply."""
    if fields.dtype != torch.float32:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else EXACT


def _on(device: torch.device, rows: Sequence[tuple[int, ...]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)


class Kernels:
    """The functions of this file, made when Triton is first needed."""

    multiply: Any
    contract: Any
    add_parts: Any
    sort_kinds: Any


@cache
def _kernels() -> Kernels:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["n_atoms", "place"])
    def multiply(
        fields,
        matrices,
        order,
        kinds,
        table,
        n_atoms,
        place,
        columns: tl.constexpr,
        turned: tl.constexpr,
        own: tl.constexpr,
        in_order: tl.constexpr,
        adds: tl.constexpr,
        aligned: tl.constexpr,
        precision: tl.constexpr,
        bm: tl.constexpr,
        bn: tl.constexpr,
        bk: tl.constexpr,
    ):
        about = table + tl.program_id(1) * columns
        components = tl.load(about).to(tl.int32)
        width = tl.load(about + 1)
        n_rows = n_atoms * components
        across = tl.cdiv(width.to(tl.int32), bn)
        first = tl.program_id(0) // across * bm
        if first < n_rows:
            out = tl.load(about + 2)
            a_start = tl.load(about + 3)
            depth = tl.load(about + 4)
            b_start = tl.load(about + 5)
            pitch = tl.load(about + 6)
            if aligned:
                width = tl.multiple_of(width, 16)
                depth = tl.multiple_of(depth, 16)
                pitch = tl.multiple_of(pitch, 16)
            twice = n_atoms.to(tl.int64) * 2
            here = n_atoms.to(tl.int64) * components * place  # rows before those of this place
            a_start = a_start * twice + here * depth
            number = first + tl.arange(0, bm)
            inside = number < n_rows
            row = number
            if in_order:
                at = number // components
                row = tl.load(order + at, mask=inside, other=0) * components + number % components
                kind = tl.load(kinds + at, mask=inside, other=-1)
            row = row.to(tl.int64)
            n_steps = tl.cdiv(depth.to(tl.int32), bk)
            n_all = n_steps
            if own:
                own_start = tl.load(about + 7)
                own_depth = tl.load(about + 8)
                own_b = tl.load(about + 9)
                own_pitch = tl.load(about + 10)
                own_step = tl.load(about + 11)
                own_start = own_start * twice + here * own_depth
                own_steps = tl.cdiv(own_depth.to(tl.int32), bk)
                low = 0
                high = 0
                if in_order:
                    low = tl.load(kinds + first // components)
                    high = tl.load(kinds + (tl.minimum(first + bm, n_rows) - 1) // components)
                n_all += (high - low + 1) * own_steps
                own_steps = tl.maximum(own_steps, 1)
            column = tl.program_id(0) % across * bn + tl.arange(0, bn)
            known = column < width
            total = tl.zeros([bm, bn], fields.dtype.element_ty)
            for step in range(n_all):
                begin = step * bk
                read = inside
                if own:
                    late = step >= n_steps
                    which = low + (step - n_steps) // own_steps
                    begin = tl.where(late, (step - n_steps) % own_steps * bk, begin)
                    from_a = tl.where(late, own_start, a_start)
                    limit = tl.where(late, own_depth, depth)
                    from_b = tl.where(late, own_b + which * own_step, b_start)
                    b_pitch = tl.where(late, own_pitch, pitch)
                    if in_order:
                        read = inside & ((kind == which) | (step < n_steps))
                else:
                    from_a = a_start
                    limit = depth
                    from_b = b_start
                    b_pitch = pitch
                if aligned:
                    from_a = tl.multiple_of(from_a, 16)
                    limit = tl.multiple_of(limit, 16)
                    from_b = tl.multiple_of(from_b, 16)
                    b_pitch = tl.multiple_of(b_pitch, 16)
                k = begin + tl.arange(0, bk)
                a = tl.load(
                    fields + from_a + row[:, None] * limit + k[None, :],
                    mask=read[:, None] & (k < limit)[None, :],
                    other=0.0,
                )
                if turned:
                    line = k[:, None] + column[None, :] * b_pitch
                else:
                    line = k[:, None] * b_pitch + column[None, :]
                b = tl.load(matrices + from_b + line, mask=(k < limit)[:, None] & known[None, :], other=0.0)
                total = tl.dot(a, b, total, input_precision=precision, out_dtype=fields.dtype.element_ty)
            result = row[:, None] * width + column[None, :]
            write = inside[:, None] & known[None, :]
            if adds:
                add = tl.load(about + 12)
                more = fields + add * twice + here * width + result
                total += tl.load(more, mask=write & (add >= 0), other=0.0)
            tl.store(fields + out * twice + here * width + result, total, mask=write)

    @triton.jit(do_not_specialize=["n_atoms", "n_chunks"])
    def contract(
        fields,
        parts,
        order,
        kinds,
        pointers,
        table,
        n_atoms,
        n_chunks,
        columns: tl.constexpr,
        own: tl.constexpr,
        aligned: tl.constexpr,
        precision: tl.constexpr,
        bm: tl.constexpr,
        bn: tl.constexpr,
        bk: tl.constexpr,
    ):
        about = table + tl.program_id(1) * columns
        components = tl.load(about).to(tl.int32)
        depth = tl.load(about + 1)
        width = tl.load(about + 2)
        across = tl.cdiv(width.to(tl.int32), bn)
        tiles = tl.cdiv(depth.to(tl.int32), bm) * across
        chunk = tl.program_id(0) // tiles
        tile = tl.program_id(0) % tiles
        if chunk < n_chunks * components:
            a_start = tl.load(about + 3)
            g_start = tl.load(about + 4)
            n_kinds = tl.load(about + 7)
            slot = tl.load(about + 9) * n_chunks + tl.load(about + 10)
            if aligned:
                depth = tl.multiple_of(depth, 16)
                width = tl.multiple_of(width, 16)
                a_start = tl.multiple_of(a_start, 16)
                g_start = tl.multiple_of(g_start, 16)
            twice = n_atoms.to(tl.int64) * 2
            a_from = fields + a_start * twice
            g_from = fields + g_start * twice
            n_rows = n_atoms * components
            length = tl.cdiv(2 * n_atoms, n_chunks)
            first = chunk * length
            last = tl.minimum(first + length, 2 * n_rows)
            m = tile // across * bm + tl.arange(0, bm)
            n = tile % across * bn + tl.arange(0, bn)
            target = parts + slot + m[:, None] * width + n[None, :]
            write = (m < depth)[:, None] & (n < width)[None, :]
            if n_kinds == 0:
                total = tl.zeros([bm, bn], fields.dtype.element_ty)
                for begin in range(first, last, bk):
                    r = begin + tl.arange(0, bk)
                    row = r.to(tl.int64)
                    a = tl.load(
                        a_from + row[:, None] * depth + m[None, :],
                        mask=(r < last)[:, None] & (m < depth)[None, :],
                        other=0.0,
                    )
                    g = tl.load(
                        g_from + row[:, None] * width + n[None, :],
                        mask=(r < last)[:, None] & (n < width)[None, :],
                        other=0.0,
                    )
                    total = tl.dot(tl.trans(a), g, total, input_precision=precision, out_dtype=fields.dtype.element_ty)
                tl.store(target + depth * width * chunk, total, mask=write)
            elif own:
                # rows by species, then atom, place, component; a chunk may hold the end of one species and the start of others
                share = 2 * components
                if first < last:
                    low = tl.load(kinds + first // share)
                    high = tl.load(kinds + (last - 1) // share)
                    for kind in range(low, high + 1):
                        since = tl.maximum(first, tl.load(pointers + kind) * share)
                        until = tl.minimum(last, tl.load(pointers + kind + 1) * share)
                        total = tl.zeros([bm, bn], fields.dtype.element_ty)
                        for begin in range(since, until, bk):
                            r = begin + tl.arange(0, bk)
                            rest = r % share
                            atom = tl.load(order + r // share, mask=r < until, other=0)
                            row = rest // components * n_rows + atom * components + rest % components
                            row = row.to(tl.int64)
                            a = tl.load(
                                a_from + row[:, None] * depth + m[None, :],
                                mask=(r < until)[:, None] & (m < depth)[None, :],
                                other=0.0,
                            )
                            g = tl.load(
                                g_from + row[:, None] * width + n[None, :],
                                mask=(r < until)[:, None] & (n < width)[None, :],
                                other=0.0,
                            )
                            total = tl.dot(
                                tl.trans(a), g, total, input_precision=precision, out_dtype=fields.dtype.element_ty
                            )
                        # the steps of a stair: no two of (chunk, kind) have the same sum
                        tl.store(target + depth * width * (chunk + kind), total, mask=write)

    @triton.jit(do_not_specialize=["n_atoms", "n_chunks"])
    def add_parts(parts, out, pointers, table, n_atoms, n_chunks, columns: tl.constexpr, block: tl.constexpr):
        about = table + tl.program_id(1) * columns
        components = tl.load(about).to(tl.int32)
        width = tl.load(about + 2)
        size = tl.load(about + 1) * width
        e = tl.program_id(0) * block + tl.arange(0, block)
        if tl.program_id(0) * block < size:
            inside = e < size
            start = tl.load(about + 5)
            pitch = tl.load(about + 6)
            n_kinds = tl.load(about + 7).to(tl.int32)
            step = tl.load(about + 8)
            source = parts + tl.load(about + 9) * n_chunks + tl.load(about + 10) + e
            target = out + start + e // width * pitch + e % width
            length = tl.cdiv(2 * n_atoms, n_chunks)
            share = 2 * components
            for kind in range(0, tl.maximum(n_kinds, 1)):
                since = 0
                until = (n_atoms * share + length - 1) // length
                if n_kinds > 0:
                    begin = tl.load(pointers + kind) * share
                    end = tl.load(pointers + kind + 1) * share
                    since = begin // length
                    until = tl.where(end > begin, (end + length - 1) // length, since)
                total = tl.zeros([block], parts.dtype.element_ty)
                for chunk in range(since, until):
                    total += tl.load(source + size * (chunk + kind), mask=inside, other=0.0)
                tl.store(target + kind * step, total, mask=inside)

    @triton.jit(do_not_specialize=["n_atoms", "n_kinds"])
    def sort_kinds(species, order, kinds, pointers, n_atoms, n_kinds, wide: tl.constexpr, block: tl.constexpr):
        kind = tl.arange(0, wide)
        count = tl.zeros([wide], tl.int32)
        for begin in range(0, n_atoms, block):
            atom = begin + tl.arange(0, block)
            found = tl.load(species + atom, mask=atom < n_atoms, other=-1).to(tl.int32)
            count += tl.sum((found[:, None] == kind[None, :]).to(tl.int32), 0)
        seen = tl.cumsum(count, 0) - count
        tl.store(pointers + kind, seen, mask=kind < n_kinds)
        tl.store(pointers + n_kinds, n_atoms)
        for begin in range(0, n_atoms, block):
            atom = begin + tl.arange(0, block)
            found = tl.load(species + atom, mask=atom < n_atoms, other=-1).to(tl.int32)
            same = (found[:, None] == kind[None, :]).to(tl.int32)
            place = tl.sum((tl.cumsum(same, 0) - 1 + seen[None, :]) * same, 1)
            tl.store(order + place, atom, mask=atom < n_atoms)
            tl.store(kinds + place, found, mask=atom < n_atoms)
            seen += tl.sum(same, 0)

    found = Kernels()
    found.multiply, found.contract, found.add_parts, found.sort_kinds = multiply, contract, add_parts, sort_kinds
    return found

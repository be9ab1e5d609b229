"""Packed tables: three words for each polynomial, the last of which holds its two highest coefficients.

A polynomial c0 + t c1 + t^2 c2 + t^3 c3 describes one short interval, with t from -1/2 to 1/2, so that its last terms are
small: for tables of 1024 intervals c2 needs about 14 bits and c3 about 9 where c0 and c1 need 24. The lowest `BITS` bits of c2
therefore store c3, as an integer multiple of a unit. Each interval has its own unit, such that the largest c3 of all weights is
the largest integer. Kernels read c2 including these bits; its other bits are chosen such that the result is as close to c2 as
possible. At both ends of an interval t^2 is 1/4 and t^3 is t/4: a quarter of the rounding errors of c2 and c3 is added to c0
and c1, so that polynomials are still continuous at the knots. Slopes there change by about 1e-7 of their typical size.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forgefield.kernels.core.runtime import interpreted, storage_type, use_kernels

BITS = 9
"""Bits of c3. One more for it is one less for c2; with 9 the slopes are most accurate, for 1024 and for 2048 intervals."""
HALF, MASK = 1 << (BITS - 1), (1 << BITS) - 1
"""The integer of c3 is stored with `HALF` added, so that it is not negative."""
SMALLEST = 1e-30
"""Highest coefficients of an interval that are all smaller are stored as zero."""
ROUNDING = 1.5 * 2.0**23
"""Added to a float32 it leaves the nearest integer in the lowest bits."""
COLUMNS = 1024
"""Columns of an interval that a program processes at a time."""


class StoredTable(NamedTuple):
    """words: (n_intervals, 3, n_weights) float32, c0, c1, and c2 with c3. unit: (n_intervals,) float32, of c3; None for a table
    that is not packed, whose words are the coefficients, (n_intervals, 4, n_weights)."""

    words: Tensor
    unit: Tensor | None = None


def stored_table(polynomials: Tensor) -> StoredTable:
    """Polynomials (n_intervals, 4, n_weights), packed where they are stored in float32."""
    if polynomials.dtype != torch.float32 or storage_type(torch.float32) != torch.float32:
        return StoredTable(polynomials)
    return pack(polynomials)


def pack(polynomials: Tensor) -> StoredTable:
    by = pack_by_kernel if use_kernels(polynomials) else pack_by_operations
    return by(polynomials)


def pack_by_operations(polynomials: Tensor, bits: int = BITS) -> StoredTable:
    """The same by reference operations. bits: of c3; kernels read `BITS`."""
    half, mask = 1 << (bits - 1), (1 << bits) - 1
    c0, c1, c2, c3 = polynomials.unbind(1)
    largest = c3.abs().amax(1, keepdim=True)
    unit = torch.where(largest > SMALLEST, largest / (half - 1), 0)
    over = torch.where(unit > 0, 1 / torch.where(unit > 0, unit, 1), 0)
    rounded = c3 * over + ROUNDING
    number = (rounded.view(torch.int32) + half) & mask
    all_bits = c2.contiguous().view(torch.int32)
    size = all_bits & 0x7FFFFFFF
    near = ((size - number + half).clamp(min=0) & ~mask) | number
    word = (all_bits - size + near).view(torch.float32)
    c1 = c1 + 0.25 * (c3 - unit * (rounded - ROUNDING))
    return StoredTable(torch.stack([c0 + 0.25 * (c2 - word), c1, word], 1), unit.squeeze(1))


def unpack(table: StoredTable, bits: int = BITS) -> Tensor:
    """(n_intervals, 4, n_weights): coefficients as kernels read them from a packed table."""
    assert table.unit is not None
    c0, c1, c2 = table.words.unbind(1)
    number = (c2.contiguous().view(torch.int32) & ((1 << bits) - 1)) - (1 << (bits - 1))
    return torch.stack([c0, c1, c2, table.unit.unsqueeze(1) * number], 1)


def pack_by_kernel(polynomials: Tensor) -> StoredTable:
    n_intervals, _, columns = polynomials.shape
    words = polynomials.new_empty((n_intervals, 3, columns))
    unit = polynomials.new_empty((n_intervals,))
    block = min(COLUMNS, 1 << (columns - 1).bit_length())
    rows = 1024 if interpreted() else 1  # the interpreter takes time for every program, not for every element
    _kernel()[(-(-n_intervals // rows),)](
        table=polynomials.contiguous(),
        words=words,
        unit=unit,
        n_intervals=n_intervals,
        columns=columns,
        bits=BITS,
        smallest=SMALLEST,
        rounding=ROUNDING,
        rows=rows,
        block=block,
        num_warps=4,
    )
    return StoredTable(words, unit)


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def pack_intervals(
        table,
        words,
        unit,
        n_intervals,
        columns: tl.constexpr,
        bits: tl.constexpr,
        smallest: tl.constexpr,
        rounding: tl.constexpr,
        rows: tl.constexpr,
        block: tl.constexpr,
    ):
        half: tl.constexpr = 1 << (bits - 1)
        mask: tl.constexpr = (1 << bits) - 1
        interval = tl.program_id(0) * rows + tl.arange(0, rows)
        valid = interval < n_intervals
        largest = tl.zeros([rows], tl.float32)
        for first in tl.static_range(0, columns, block):
            c = first + tl.arange(0, block)
            inside = valid[:, None] & (c < columns)[None, :]
            coefficients = table + interval[:, None] * (4 * columns) + c[None, :]
            c3 = tl.load(coefficients + 3 * columns, mask=inside, other=0.0)
            largest = tl.maximum(largest, tl.max(tl.abs(c3), 1))
        of = tl.where(largest > smallest, largest / (half - 1.0), 0.0)
        tl.store(unit + interval, of, mask=valid)
        over = tl.where(of > 0.0, 1.0 / tl.where(of > 0.0, of, 1.0), 0.0)
        for first in tl.static_range(0, columns, block):
            c = first + tl.arange(0, block)
            inside = valid[:, None] & (c < columns)[None, :]
            coefficients = table + interval[:, None] * (4 * columns) + c[None, :]
            c0 = tl.load(coefficients, mask=inside, other=0.0)
            c1 = tl.load(coefficients + columns, mask=inside, other=0.0)
            c2 = tl.load(coefficients + 2 * columns, mask=inside, other=0.0)
            c3 = tl.load(coefficients + 3 * columns, mask=inside, other=0.0)
            rounded = c3 * over[:, None] + rounding
            number = (rounded.to(tl.int32, bitcast=True) + half) & mask
            all_bits = c2.to(tl.int32, bitcast=True)
            size = all_bits & 0x7FFFFFFF
            near = (tl.maximum(size - number + half, 0) & ~mask) | number
            word = (all_bits - size + near).to(tl.float32, bitcast=True)
            made = words + interval[:, None] * (3 * columns) + c[None, :]
            tl.store(made, c0 + 0.25 * (c2 - word), mask=inside)
            tl.store(made + columns, c1 + 0.25 * (c3 - of[:, None] * (rounded - rounding)), mask=inside)
            tl.store(made + 2 * columns, word, mask=inside)

    return pack_intervals

"""The Triton functions behind `matrices.py`, which imports this file when it first launches one: it needs Triton.

make_matrices: all matrices of a network from its weights. matrices_to_weights: cotangents of the weights and, in parts, of the
embedding from those of the matrices. add_embedding: the sum of these parts. Programs read their task from a table of integers,
one row each (`Programs` of `matrices.py`); `places` has the offsets of the weights of every matrix.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_species", "n_embedding", "length"])
def make_matrices(
    weights,
    places,
    embedding,
    constants,
    table,
    out,
    packed,
    n_species,
    n_embedding,
    length,
    columns: tl.constexpr,
    aligned: tl.constexpr,
    down: tl.constexpr,
    across: tl.constexpr,
    eight: tl.constexpr,
):
    about = table + tl.program_id(0) * columns
    of_species = tl.load(about)
    number = tl.load(about + 1)
    rows = tl.load(about + 2).to(tl.int32)
    width = tl.load(about + 3).to(tl.int32)
    start = tl.load(about + 5)
    place = tl.load(places + number)
    if aligned:
        width = tl.multiple_of(width, 4)
        start = tl.multiple_of(start, 4)
        place = tl.multiple_of(place, 4)
    row = tl.multiple_of(tl.load(about + 6).to(tl.int32), down) + tl.arange(0, down)
    column = tl.multiple_of(tl.load(about + 7).to(tl.int32), across) + tl.arange(0, across)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    constant = tl.load(constants + number)
    weights += place
    out += start
    packed += start
    if of_species == 0:
        weight = tl.load(weights + (row[:, None] * width + column[None, :]), mask=inside, other=0.0)
        put(out, packed, constant * weight.to(tl.float64), length, row, column, 0, rows, width, 1, inside)
    else:
        line = row[:, None] * (n_embedding * width) + column[None, :]
        for kind in range(0, n_species, 2):  # two at a time: weights are read for both
            one = tl.zeros([down, across], tl.float64)
            two = tl.zeros([down, across], tl.float64)
            both = kind + 1 < n_species
            for begin in range(0, n_embedding, eight):
                for step in tl.static_range(eight):
                    v = begin + step
                    valid = v < n_embedding
                    weight = tl.load(weights + (line + v * width), mask=inside & valid, other=0.0).to(tl.float64)
                    entry = embedding + kind * n_embedding + v
                    one += weight * tl.load(entry, mask=valid, other=0.0).to(tl.float64)
                    two += weight * tl.load(entry + n_embedding, mask=valid & both, other=0.0).to(tl.float64)
            put(out, packed, constant * one, length, row, column, kind, rows, width, n_species, inside)
            put(out, packed, constant * two, length, row, column, kind + 1, rows, width, n_species, inside & both)


@triton.jit
def put(out, packed, total, length, row, column, kind, rows, width, n_kinds, inside):
    """Store numbers of the matrix of a species, float64: rounded, and packed, transposed and not, as leading bits and
    remainder."""
    single = total.to(out.dtype.element_ty)
    high = single
    if out.dtype.element_ty == tl.float32:  # to the nearest number of tensor cores
        high = ((single.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        high = tl.where(single == single, high, single)  # the bits of a NaN may become those of zero
    low = single - high
    same = (row[:, None] * n_kinds + kind) * width + column[None, :]
    transposed = row[:, None] + (kind * width + column[None, :]) * rows
    tl.store(out + same, single, mask=inside)
    tl.store(packed + 2 * length + same, high, mask=inside)
    tl.store(packed + 3 * length + same, low, mask=inside)
    tl.store(packed + transposed, high, mask=inside)
    tl.store(packed + length + transposed, low, mask=inside)


@triton.jit(do_not_specialize=["n_species", "n_embedding"])
def matrices_to_weights(
    weights,
    places,
    embedding,
    constants,
    table,
    to_out,
    to_weights,
    parts,
    n_species,
    n_embedding,
    columns: tl.constexpr,
    aligned: tl.constexpr,
    sums: tl.constexpr,
    wide: tl.constexpr,
    across: tl.constexpr,
):
    about = table + tl.program_id(0) * columns
    of_species = tl.load(about)
    number = tl.load(about + 1)
    width = tl.load(about + 3).to(tl.int32)
    to_place = tl.load(about + 4)
    start = tl.load(about + 5)
    place = tl.load(places + number)
    first = tl.load(about + 6).to(tl.int32)
    last = tl.load(about + 8).to(tl.int32)
    if aligned:
        width = tl.multiple_of(width, 4)
        to_place = tl.multiple_of(to_place, 4)
        start = tl.multiple_of(start, 4)
        place = tl.multiple_of(place, 4)
    constant = tl.load(constants + number).to(to_weights.dtype.element_ty)
    weights += place
    to_weights += to_place
    to_out += start
    if of_species == 0:
        e = tl.multiple_of(first, wide * across) + tl.arange(0, wide * across)
        tl.store(to_weights + e, constant * tl.load(to_out + e, mask=e < last, other=0.0), mask=e < last)
    else:
        column = tl.multiple_of(tl.load(about + 7).to(tl.int32), across) + tl.arange(0, across)
        inside = column < width
        v = tl.arange(0, wide)
        valid = v < n_embedding
        both = valid[:, None] & inside[None, :]
        line = v[:, None] * width + column[None, :]
        step = n_embedding * width
        for row in range(first, last):
            total = tl.zeros([wide, across], to_weights.dtype.element_ty)
            for kind in range(n_species):
                cotangent = tl.load(to_out + (row * n_species + kind) * width + column, mask=inside, other=0.0)
                total += (
                    tl.load(embedding + kind * n_embedding + v, mask=valid, other=0.0)[:, None] * cotangent[None, :]
                )
            tl.store(to_weights + (row * step + line), constant * total, mask=both)
        if sums:
            for kind in range(n_species):
                total = tl.zeros([wide, across], to_weights.dtype.element_ty)
                for row in range(first, last):
                    cotangent = tl.load(to_out + (row * n_species + kind) * width + column, mask=inside, other=0.0)
                    total += tl.load(weights + (row * step + line), mask=both, other=0.0) * cotangent[None, :]
                slot = tl.program_id(0) * n_species + kind
                tl.store(parts + slot * n_embedding + v, constant * tl.sum(total, 1), mask=valid)


@triton.jit(do_not_specialize=["n_parts", "n_embedding"])
def add_embedding(parts, out, n_parts, n_embedding, many: tl.constexpr, wide: tl.constexpr):
    kind = tl.program_id(0)
    step = tl.num_programs(0) * n_embedding
    v = tl.arange(0, wide)
    total = tl.zeros([many, wide], parts.dtype.element_ty)
    for begin in range(0, n_parts, many):
        part = begin + tl.arange(0, many)
        valid = (part < n_parts)[:, None] & (v < n_embedding)[None, :]
        total += tl.load(parts + part[:, None] * step + (kind * n_embedding + v)[None, :], mask=valid, other=0.0)
    tl.store(out + kind * n_embedding + v, tl.sum(total, 0), mask=v < n_embedding)

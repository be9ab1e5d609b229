"""The Triton functions behind `matrices.py`, which imports this file when it first launches one: it needs Triton.

make_matrices: all matrices of a network from its weights. matrices_to_weights, matrices_to_embedding: cotangents of the weights
and, in parts, of the embedding from those of the matrices.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_species", "n_embedding", "length"])
def make_matrices(
    weights,
    embedding,
    constants,
    out,
    packed,
    table,
    numbers,
    n_species,
    n_embedding,
    length,
    columns: tl.constexpr,
    block: tl.constexpr,
    across: tl.constexpr,
    wide: tl.constexpr,
    eight: tl.constexpr,
):
    about = table + tl.program_id(1) * columns
    of_species = tl.load(about)
    rows = tl.load(about + 1).to(tl.int32)
    width = tl.load(about + 2).to(tl.int32)
    weights += tl.load(about + 3)
    start = tl.load(about + 4)
    constant = tl.load(constants + tl.program_id(1))
    begin = tl.program_id(0) * block
    e = begin + tl.arange(0, block)
    n_kinds = tl.where(of_species == 0, 1, n_species)
    size = rows * width * n_kinds
    if begin < size:
        inside = e < size
        column = e % width
        kind = e // width % n_kinds
        row = e // (width * n_kinds)
        if of_species == 0:
            total = tl.load(weights + e, mask=inside, other=0.0)
        else:
            total = tl.zeros([block], out.dtype.element_ty)
            for first in range(0, n_embedding, eight):
                v = first + tl.arange(0, eight)[:, None]
                known = inside[None, :] & (v < n_embedding)
                line = (row[None, :] * n_embedding + v) * width + column[None, :]
                weight = tl.load(weights + line, mask=known, other=0.0)
                given = tl.load(embedding + kind[None, :] * n_embedding + v, mask=known, other=0.0)
                total += tl.sum(weight * given, 0)
        total *= constant
        high = total
        if out.dtype.element_ty == tl.float32:  # to the nearest number of tensor cores
            high = ((total.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
            high = tl.where(total == total, high, total)  # the bits of a NaN may become those of zero
        turned = (kind * width + column) * rows + row
        packed += start
        tl.store(out + start + e, total, mask=inside)
        tl.store(packed + turned, high, mask=inside)
        tl.store(packed + length + turned, total - high, mask=inside)
        tl.store(packed + 2 * length + e, high, mask=inside)
        tl.store(packed + 3 * length + e, total - high, mask=inside)


@triton.jit(do_not_specialize=["n_species", "n_embedding", "length"])
def matrices_to_weights(
    weights,
    embedding,
    constants,
    to_out,
    to_weights,
    table,
    numbers,
    n_species,
    n_embedding,
    length,
    columns: tl.constexpr,
    block: tl.constexpr,
    across: tl.constexpr,
    wide: tl.constexpr,
    eight: tl.constexpr,
):
    about = table + tl.program_id(1) * columns
    of_species = tl.load(about)
    width = tl.load(about + 2).to(tl.int32)
    size = tl.load(about + 1).to(tl.int32) * width
    to_weights += tl.load(about + 3)
    to_out += tl.load(about + 4)
    constant = tl.load(constants + tl.program_id(1))
    begin = tl.program_id(0) * block
    e = begin + tl.arange(0, block)
    if of_species == 0:
        if begin < size:
            tl.store(to_weights + e, constant * tl.load(to_out + e, mask=e < size, other=0.0), mask=e < size)
    elif begin < size * n_embedding:
        inside = e < size * n_embedding
        column = e % width
        v = e // width % n_embedding
        row = e // (width * n_embedding)
        total = tl.zeros([block], to_weights.dtype.element_ty)
        for species in range(n_species):
            given = tl.load(to_out + (row * n_species + species) * width + column, mask=inside, other=0.0)
            total += given * tl.load(embedding + species * n_embedding + v, mask=inside, other=0.0)
        tl.store(to_weights + e, constant * total, mask=inside)


@triton.jit(do_not_specialize=["n_species", "n_embedding", "length"])
def matrices_to_embedding(
    weights,
    embedding,
    constants,
    to_out,
    parts,
    table,
    numbers,
    n_species,
    n_embedding,
    length,
    columns: tl.constexpr,
    block: tl.constexpr,
    across: tl.constexpr,
    wide: tl.constexpr,
    eight: tl.constexpr,
):
    row = tl.program_id(0)
    species = tl.program_id(2)
    number = tl.load(numbers + tl.program_id(1))
    about = table + number * columns
    n_rows = tl.load(about + 1)
    width = tl.load(about + 2).to(tl.int32)
    weights += tl.load(about + 3)
    to_out += tl.load(about + 4) + (row * n_species + species) * width
    v = tl.arange(0, wide)
    known = v < n_embedding
    total = tl.zeros([wide], parts.dtype.element_ty)
    if row < n_rows:
        for begin in range(0, width, across):
            column = begin + tl.arange(0, across)
            inside = column < width
            given = tl.load(to_out + column, mask=inside, other=0.0)
            line = (row * n_embedding + v)[:, None] * width + column[None, :]
            weight = tl.load(weights + line, mask=known[:, None] & inside[None, :], other=0.0)
            total += tl.sum(weight * given[None, :], 1)
    total = total * tl.load(constants + number)
    slot = (row * tl.num_programs(1) + tl.program_id(1)) * n_species + species
    tl.store(parts + slot * n_embedding + v, total, mask=known)

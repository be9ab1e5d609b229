"""The Triton functions behind `products.py`, which imports this file when it first launches one: it needs Triton.

multiply: products of blocks with matrices. contract, add_parts: gradients of matrices, in chunks, and their sums. sort_kinds:
atoms by species. A program reads its task from a table of integers, one row for each product, so that one function serves the
layers of all models.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_atoms", "place", "low"])
def multiply(
    fields,
    matrices,
    order,
    kinds,
    table,
    n_atoms,
    place,
    low,
    columns: tl.constexpr,
    by_species: tl.constexpr,
    in_order: tl.constexpr,
    adds: tl.constexpr,
    aligned: tl.constexpr,
    far: tl.constexpr,
    precision: tl.constexpr,
    bm: tl.constexpr,
    bn: tl.constexpr,
    bk: tl.constexpr,
):
    about = table + tl.program_id(1) * columns
    components = tl.load(about).to(tl.int32)
    width = tl.load(about + 1).to(tl.int32)
    n_rows = n_atoms * components
    across = tl.cdiv(width, bn)
    first = tl.program_id(0) // across * bm
    if first < n_rows:
        out = tl.load(about + 2)
        a_start = tl.load(about + 3)
        depth = tl.load(about + 4).to(tl.int32)
        b_start = tl.load(about + 5)
        pitch = tl.load(about + 6).to(tl.int32)
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
        if far:
            row = row.to(tl.int64)
        n_steps = tl.cdiv(depth, bk)
        n_all = n_steps
        if by_species:
            own_start = tl.load(about + 7)
            own_depth = tl.load(about + 8).to(tl.int32)
            own_b = tl.load(about + 9)
            own_pitch = tl.load(about + 10).to(tl.int32)
            own_step = tl.load(about + 11)
            own_start = own_start * twice + here * own_depth
            own_steps = tl.cdiv(own_depth, bk)
            lowest = 0
            highest = 0
            if in_order:
                lowest = tl.load(kinds + first // components)
                highest = tl.load(kinds + (tl.minimum(first + bm, n_rows) - 1) // components)
            n_all += (highest - lowest + 1) * own_steps
            own_steps = tl.maximum(own_steps, 1)
        column = tl.program_id(0) % across * bn + tl.arange(0, bn)
        valid = column < width
        split: tl.constexpr = fields.dtype.element_ty == tl.float32 and precision != "tf32"
        total = tl.zeros([bm, bn], tl.float64 if precision == "float64" else fields.dtype.element_ty)
        for step in range(n_all):
            begin = step * bk
            read = inside
            if by_species:
                late = step >= n_steps
                which = lowest + (step - n_steps) // own_steps
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
                fields + from_a + (row[:, None] * limit + k[None, :]),
                mask=read[:, None] & (k < limit)[None, :],
                other=0.0,
            )
            b_line = k[:, None] + column[None, :] * b_pitch
            b_valid = (k < limit)[:, None] & valid[None, :]
            b = tl.load(matrices + from_b + b_line, mask=b_valid, other=0.0)
            # b: leading bits of float32; the remainders follow after `low` numbers
            if split:
                from_low = from_b + low
                if aligned:
                    from_low = tl.multiple_of(from_low, 16)
                b_low = tl.load(matrices + from_low + b_line, mask=b_valid, other=0.0)
            if precision == "float64":
                b = (b + b_low).to(tl.float64)  # the sum is the number that was split
                total = tl.dot(a.to(tl.float64), b, total, out_dtype=tl.float64)
            elif precision == "ieee":
                b = b + b_low if split else b
                total = tl.dot(a, b, total, input_precision="ieee", out_dtype=fields.dtype.element_ty)
            else:
                # tensor cores would truncate longer numbers
                a_high = ((a.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
                if precision == "tf32x3":
                    part = tl.dot(a - a_high, b, input_precision="tf32")
                    part = tl.dot(a_high, b_low, part, input_precision="tf32")
                    total += tl.dot(a_high, b, part, input_precision="tf32")
                else:
                    a_high = tl.where(a == a, a_high, a)  # the bits of a NaN may become those of zero
                    total = tl.dot(a_high, b, total, input_precision="tf32")
        result = row[:, None] * width + column[None, :]
        write = inside[:, None] & valid[None, :]
        if adds:
            add = tl.load(about + 12)
            more = fields + add * twice + here * width + result
            total += tl.load(more, mask=write & (add >= 0), other=0.0)
        tl.store(fields + out * twice + here * width + result, total, mask=write)


@triton.jit
def parts_of_16_bits(x):
    """Three numbers of 16 bits that make up each of float32, the largest first: rounded, then what is left, then what is left
    of that. Two at a time, as the GPU rounds them; Triton would do it one by one, at a quarter of the rate."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 low, high;
            .reg .f32 rest_low, rest_high;
            cvt.rn.bf16x2.f32 $0, $4, $3;
            shl.b32 low, $0, 16;
            and.b32 high, $0, 0xffff0000;
            sub.f32 rest_low, $3, low;
            sub.f32 rest_high, $4, high;
            cvt.rn.bf16x2.f32 $1, rest_high, rest_low;
            shl.b32 low, $1, 16;
            and.b32 high, $1, 0xffff0000;
            sub.f32 rest_low, rest_low, low;
            sub.f32 rest_high, rest_high, high;
            cvt.rn.bf16x2.f32 $2, rest_high, rest_low;
        }
        """,
        "=&r,=&r,=&r,f,f",
        [x],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def add_transposed(total, a, g, valid, precision: tl.constexpr):
    """total + a^T g, of tiles a (rows, bm) and g (rows, bn)."""
    if precision == "bf16x6":
        # The mask is applied once more, because Triton reads a tile number by number where nothing but arithmetic stands
        # between it and the product.
        a1, a2, a3 = parts_of_16_bits(tl.where(valid, a, 0.0))
        g1, g2, g3 = parts_of_16_bits(g)
        part = tl.dot(tl.trans(a3), g1)
        part = tl.dot(tl.trans(a1), g3, part)
        part = tl.dot(tl.trans(a2), g2, part)
        part = tl.dot(tl.trans(a2), g1, part)
        part = tl.dot(tl.trans(a1), g2, part)
        total += tl.dot(tl.trans(a1), g1, part)
    elif precision == "bf16x3":
        a1, a2, a3 = parts_of_16_bits(tl.where(valid, a, 0.0))
        g1, g2, g3 = parts_of_16_bits(g)
        part = tl.dot(tl.trans(a2), g1)
        part = tl.dot(tl.trans(a1), g2, part)
        total += tl.dot(tl.trans(a1), g1, part)
    elif precision == "float64":
        total = tl.dot(tl.trans(a).to(tl.float64), g.to(tl.float64), total, out_dtype=tl.float64)
    else:
        total = tl.dot(tl.trans(a), g, total, input_precision=precision, out_dtype=total.dtype)
    return total


@triton.jit
def which_part(starts, times, several: tl.constexpr):
    """The part that this program belongs to, and its number there. Part i has its programs from times * starts[i] on."""
    program = tl.program_id(0)
    begun = program >= tl.load(starts + tl.arange(0, several)) * times
    part = tl.sum(begun.to(tl.int32), 0) - 1
    return part, program - (tl.load(starts + part) * times).to(tl.int32)


@triton.jit(do_not_specialize=["n_atoms", "n_chunks"])
def contract(
    fields,
    parts,
    order,
    kinds,
    pointers,
    table,
    starts,
    n_atoms,
    n_chunks,
    columns: tl.constexpr,
    by_species: tl.constexpr,
    aligned: tl.constexpr,
    far: tl.constexpr,
    precision: tl.constexpr,
    bm: tl.constexpr,
    bn: tl.constexpr,
    bk: tl.constexpr,
    several: tl.constexpr,
):
    part, program = which_part(starts, n_chunks, several)
    about = table + part * columns
    components = tl.load(about).to(tl.int32)
    depth = tl.load(about + 1).to(tl.int32)
    width = tl.load(about + 2).to(tl.int32)
    across = tl.cdiv(width, bn)
    tiles = tl.cdiv(depth, bm) * across
    chunk = program // tiles
    tile = program % tiles
    a_start = tl.load(about + 3)
    g_start = tl.load(about + 4)
    n_kinds = tl.load(about + 7)
    slot = tl.load(about + 10) * n_chunks + tl.load(about + 11)
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
    last = tl.minimum(first + length, tl.load(about + 9).to(tl.int32) * n_rows)
    m = tile // across * bm + tl.arange(0, bm)
    n = tile % across * bn + tl.arange(0, bn)
    target = parts + slot + (m[:, None] * width + n[None, :])
    write = (m < depth)[:, None] & (n < width)[None, :]
    if n_kinds == 0:
        total = tl.zeros([bm, bn], tl.float64 if precision == "float64" else fields.dtype.element_ty)
        for begin in range(first, last, bk):
            r = begin + tl.arange(0, bk)
            row = r
            if far:
                row = row.to(tl.int64)
            valid = (r < last)[:, None] & (m < depth)[None, :]
            a = tl.load(a_from + (row[:, None] * depth + m[None, :]), mask=valid, other=0.0)
            g = tl.load(
                g_from + (row[:, None] * width + n[None, :]),
                mask=(r < last)[:, None] & (n < width)[None, :],
                other=0.0,
            )
            total = add_transposed(total, a, g, valid, precision)
        tl.store(target + (depth * width).to(tl.int64) * chunk, total, mask=write)
    elif by_species:
        # atoms by species: a chunk may hold the end of one and the start of others
        length = tl.cdiv(n_atoms, n_chunks * components)
        first = chunk * length
        last = tl.minimum(first + length, n_atoms)
        if first < last:
            low = tl.load(kinds + first)
            high = tl.load(kinds + last - 1)
            for kind in range(low, high + 1):
                since = tl.maximum(first, tl.load(pointers + kind))
                until = tl.minimum(last, tl.load(pointers + kind + 1))
                n_blocks = tl.cdiv(tl.maximum(until - since, 0), bk)
                total = tl.zeros([bm, bn], tl.float64 if precision == "float64" else fields.dtype.element_ty)
                for step in range(n_blocks * components * 2):
                    at = since + step % n_blocks * bk + tl.arange(0, bk)
                    atom = tl.load(order + at, mask=at < until, other=0)
                    pair = step // n_blocks  # place, then component
                    row = atom * components + pair % components + pair // components * n_rows
                    if far:
                        row = row.to(tl.int64)
                    valid = (at < until)[:, None] & (m < depth)[None, :]
                    a = tl.load(a_from + (row[:, None] * depth + m[None, :]), mask=valid, other=0.0)
                    g = tl.load(
                        g_from + (row[:, None] * width + n[None, :]),
                        mask=(at < until)[:, None] & (n < width)[None, :],
                        other=0.0,
                    )
                    total = add_transposed(total, a, g, valid, precision)
                # the steps of a stair: no two of (chunk, kind) have the same sum
                tl.store(target + (depth * width).to(tl.int64) * (chunk + kind), total, mask=write)


@triton.jit(do_not_specialize=["n_atoms", "n_chunks"])
def add_parts(
    parts,
    out,
    pointers,
    table,
    starts,
    n_atoms,
    n_chunks,
    columns: tl.constexpr,
    block: tl.constexpr,
    several: tl.constexpr,
):
    part, program = which_part(starts, 1, several)
    about = table + part * columns
    components = tl.load(about).to(tl.int32)
    width = tl.load(about + 2)
    size = tl.load(about + 1) * width
    e = program * block + tl.arange(0, block)
    inside = e < size
    start = tl.load(about + 5)
    pitch = tl.load(about + 6)
    n_kinds = tl.load(about + 7).to(tl.int32)
    step = tl.load(about + 8)
    source = parts + tl.load(about + 10) * n_chunks + tl.load(about + 11) + e
    target = out + start + e // width * pitch + e % width
    length = tl.cdiv(n_atoms, n_chunks * components)
    for kind in range(tl.maximum(n_kinds, 1)):
        since = 0
        until = n_chunks * components
        if n_kinds > 0:
            begin = tl.load(pointers + kind)
            end = tl.load(pointers + kind + 1)
            since = begin // length
            until = tl.where(end > begin, tl.cdiv(end, length), since)
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

"""Source of the kernels in `lists.py`, which imports it when they are first launched: it needs Triton."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_atoms"])
def place_atoms(
    positions,
    system,
    inverse,
    heights,
    periodic,
    first_blank,
    along,
    cells,
    n_atoms,
    block: tl.constexpr,
):
    """Coordinates of atoms along the normals of the faces of their cell, moved into it where it is periodic."""
    atom = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = atom < n_atoms
    of = tl.load(system + atom, mask=inside, other=0)
    x = tl.load(positions + atom * 3, mask=inside, other=0.0)
    y = tl.load(positions + atom * 3 + 1, mask=inside, other=0.0)
    z = tl.load(positions + atom * 3 + 2, mask=inside, other=0.0)
    for k in tl.static_range(3):
        fraction = x * tl.load(inverse + of * 9 + k, mask=inside, other=0.0)
        fraction += y * tl.load(inverse + of * 9 + 3 + k, mask=inside, other=0.0)
        fraction += z * tl.load(inverse + of * 9 + 6 + k, mask=inside, other=0.0)
        wraps = tl.load(periodic + of * 3 + k, mask=inside, other=0) != 0
        cell = tl.where(wraps, tl.floor(fraction), 0.0)
        height = tl.load(heights + of * 3 + k, mask=inside, other=0.0)
        tl.store(along + atom * 3 + k, (fraction - cell) * height, mask=inside)
        tl.store(cells + atom * 3 + k, cell.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["n_atoms", "last_bin"])
def bin_atoms(
    along,
    system,
    low,
    width,
    n_bins,
    first_bin,
    first_blank,
    last_bin,
    bins,
    bin_of,
    n_atoms,
    block: tl.constexpr,
):
    """Bin of each atom along each axis, and its number; blank atoms are in the last bin."""
    atom = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = atom < n_atoms
    of = tl.load(system + atom, mask=inside, other=0)
    number = tl.zeros([block], tl.int32)
    for k in tl.static_range(3):
        count = tl.load(n_bins + of * 3 + k, mask=inside, other=1)
        height = tl.load(along + atom * 3 + k, mask=inside, other=0.0) - tl.load(
            low + of * 3 + k, mask=inside, other=0.0
        )
        at = tl.floor(height / tl.load(width + of * 3 + k, mask=inside, other=1.0)).to(tl.int32)
        at = tl.minimum(tl.maximum(at, 0), count - 1)
        tl.store(bins + atom * 3 + k, at, mask=inside)
        number = number * count + at
    number += tl.load(first_bin + of, mask=inside, other=0).to(tl.int32)
    number = tl.where(atom < tl.load(first_blank), number, last_bin)
    tl.store(bin_of + atom, number, mask=inside)


@triton.jit
def wrapped(bin_at, count, periodic):
    """Bin inside the cell, the image it is in, and whether it exists."""
    image = bin_at // count
    image = tl.where(bin_at - image * count < 0, image - 1, image)  # towards minus infinity
    image = tl.where(periodic != 0, image, 0)
    at = bin_at - image * count
    return at, image, (at >= 0) & (at < count)


@triton.jit(do_not_specialize=["capacity"])
def list_atoms(
    positions,
    cell,
    system,
    cells,
    bins,
    n_bins,
    first_bin,
    reach_bins,
    periodic,
    order,
    bin_pointers,
    first_blank,
    pointers,
    counts,
    keys,
    status,
    reach: tl.constexpr,
    capacity,
    fill: tl.constexpr,
    block: tl.constexpr,
):
    """Count the neighbours of an atom, or write their keys: source, then shift."""
    atom = tl.program_id(0).to(tl.int64)
    of = tl.load(system + atom)
    real = (atom < tl.load(first_blank)).to(tl.int32)
    h0, h1, h2 = tl.load(cell + of * 9), tl.load(cell + of * 9 + 1), tl.load(cell + of * 9 + 2)
    h3, h4, h5 = tl.load(cell + of * 9 + 3), tl.load(cell + of * 9 + 4), tl.load(cell + of * 9 + 5)
    h6, h7, h8 = tl.load(cell + of * 9 + 6), tl.load(cell + of * 9 + 7), tl.load(cell + of * 9 + 8)
    x, y, z = tl.load(positions + atom * 3), tl.load(positions + atom * 3 + 1), tl.load(positions + atom * 3 + 2)
    c0, c1, c2 = tl.load(cells + atom * 3), tl.load(cells + atom * 3 + 1), tl.load(cells + atom * 3 + 2)
    b0, b1, b2 = tl.load(bins + atom * 3), tl.load(bins + atom * 3 + 1), tl.load(bins + atom * 3 + 2)
    n0, n1, n2 = tl.load(n_bins + of * 3), tl.load(n_bins + of * 3 + 1), tl.load(n_bins + of * 3 + 2)
    p0, p1, p2 = tl.load(periodic + of * 3), tl.load(periodic + of * 3 + 1), tl.load(periodic + of * 3 + 2)
    r0 = tl.load(reach_bins + of * 3) * real
    r1 = tl.load(reach_bins + of * 3 + 1)
    r2 = tl.load(reach_bins + of * 3 + 2)
    base = tl.load(first_bin + of).to(tl.int32)
    free = tl.load(pointers + atom)
    total = tl.zeros([block], tl.int32)
    outside = tl.zeros([block], tl.int32)
    width0, width1, width2 = 2 * r0 + real, 2 * r1 + 1, 2 * r2 + 1
    for number in range(width0 * width1 * width2):
        a0, i0, exists0 = wrapped(b0 - r0 + number // (width1 * width2), n0, p0)
        a1, i1, exists1 = wrapped(b1 - r1 + (number // width2) % width1, n1, p1)
        a2, i2, exists2 = wrapped(b2 - r2 + number % width2, n2, p2)
        exists = exists0 & exists1 & exists2
        where = tl.where(exists, base + (a0 * n1 + a1) * n2 + a2, 0)
        begin = tl.load(bin_pointers + where)
        end = tl.where(exists, tl.load(bin_pointers + where + 1), begin)
        for first in range(begin, end, block):
            at = first + tl.arange(0, block)
            inside = at < end
            j = tl.load(order + at, mask=inside, other=0)
            s0 = i0 + c0 - tl.load(cells + j * 3, mask=inside, other=0)
            s1 = i1 + c1 - tl.load(cells + j * 3 + 1, mask=inside, other=0)
            s2 = i2 + c2 - tl.load(cells + j * 3 + 2, mask=inside, other=0)
            f0, f1, f2 = s0.to(tl.float64), s1.to(tl.float64), s2.to(tl.float64)
            dx = tl.load(positions + j * 3, mask=inside, other=0.0) - x
            dy = tl.load(positions + j * 3 + 1, mask=inside, other=0.0) - y
            dz = tl.load(positions + j * 3 + 2, mask=inside, other=0.0) - z
            dx += f0 * h0 + f1 * h3 + f2 * h6
            dy += f0 * h1 + f1 * h4 + f2 * h7
            dz += f0 * h2 + f1 * h5 + f2 * h8
            near = inside & (dx * dx + dy * dy + dz * dz <= reach * reach)
            near = near & ((j != atom) | (s0 != 0) | (s1 != 0) | (s2 != 0))
            if fill:
                s0 = tl.minimum(tl.maximum(s0, -2048), 2047)
                s1 = tl.minimum(tl.maximum(s1, -2048), 2047)
                s2 = tl.minimum(tl.maximum(s2, -2048), 2047)
                far = (tl.abs(s0) > 2046) | (tl.abs(s1) > 2046) | (tl.abs(s2) > 2046)
                outside += (near & far).to(tl.int32)
                key = ((j * 4096 + (s0 + 2048)) * 4096 + (s1 + 2048)) * 4096 + (s2 + 2048)
                rank = tl.cumsum(near.to(tl.int32), 0)
                to = free + rank - 1
                tl.store(keys + to, key, mask=near & (to < capacity))
                free += tl.sum(near.to(tl.int32), 0)
            else:
                total += near.to(tl.int32)
    if fill:
        if tl.sum(outside, 0) > 0:
            tl.atomic_add(status, 1)
    else:
        tl.store(counts + atom, tl.sum(total, 0).to(tl.int64))


@triton.jit
def sort_listed(pointers, keys, ordered, source, shift, block: tl.constexpr):
    """Sort the neighbours of an atom by rank: the number of smaller keys."""
    atom = tl.program_id(0).to(tl.int64)
    begin = tl.load(pointers + atom)
    end = tl.load(pointers + atom + 1)
    for first in range(begin, end, block):
        at = first + tl.arange(0, block)
        inside = at < end
        key = tl.load(keys + at, mask=inside, other=0)
        rank = tl.zeros([block], tl.int64)
        for other in range(begin, end):
            rank += (tl.load(keys + other) < key).to(tl.int64)
        to = begin + rank
        tl.store(ordered + to, key, mask=inside)
        tl.store(source + to, (key >> 36).to(tl.int32), mask=inside)
        tl.store(shift + to * 3, (((key >> 24) & 4095) - 2048).to(tl.int16), mask=inside)
        tl.store(shift + to * 3 + 1, (((key >> 12) & 4095) - 2048).to(tl.int16), mask=inside)
        tl.store(shift + to * 3 + 2, ((key & 4095) - 2048).to(tl.int16), mask=inside)


@triton.jit
def reverse_listed(pointers, ordered, reverse, steps: tl.constexpr, block: tl.constexpr):
    """Find the edge back by bisection among the sorted neighbours of each neighbour."""
    atom = tl.program_id(0).to(tl.int64)
    begin = tl.load(pointers + atom)
    end = tl.load(pointers + atom + 1)
    for first in range(begin, end, block):
        at = first + tl.arange(0, block)
        inside = at < end
        key = tl.load(ordered + at, mask=inside, other=0)
        j = key >> 36
        s0, s1, s2 = (key >> 24) & 4095, (key >> 12) & 4095, key & 4095
        wanted = ((atom * 4096 + (4096 - s0)) * 4096 + (4096 - s1)) * 4096 + (4096 - s2)
        low = tl.load(pointers + j, mask=inside, other=0)
        high = tl.load(pointers + j + 1, mask=inside, other=0)
        for _ in range(steps):
            middle = (low + high) // 2
            searching = inside & (low < high)
            less = searching & (tl.load(ordered + middle, mask=searching, other=0) < wanted)
            low = tl.where(less, middle + 1, low)
            high = tl.where(searching & ~less, middle, high)
        position = tl.minimum(low, tl.load(pointers + j + 1, mask=inside, other=1) - 1)
        tl.store(reverse + at, tl.maximum(position, 0).to(tl.int32), mask=inside)

"""Source of the kernels in `near.py`, which imports it when they are first launched: it needs Triton."""

import triton
import triton.language as tl


@triton.jit
def edge_vector(positions, source, shift, number, inside, c, h):
    """Vector from an atom at c to the sources of listed edges. c: its three coordinates; h: its cell, row by row."""
    j = tl.load(source + number, mask=inside, other=0).to(tl.int64)
    s0 = tl.load(shift + number * 3, mask=inside, other=0).to(tl.float64)
    s1 = tl.load(shift + number * 3 + 1, mask=inside, other=0).to(tl.float64)
    s2 = tl.load(shift + number * 3 + 2, mask=inside, other=0).to(tl.float64)
    x = tl.load(positions + j * 3, mask=inside, other=0.0) - c[0]
    y = tl.load(positions + j * 3 + 1, mask=inside, other=0.0) - c[1]
    z = tl.load(positions + j * 3 + 2, mask=inside, other=0.0) - c[2]
    x += s0 * h[0] + s1 * h[3] + s2 * h[6]
    y += s0 * h[1] + s1 * h[4] + s2 * h[7]
    z += s0 * h[2] + s1 * h[5] + s2 * h[8]
    return j, x, y, z


@triton.jit
def load_9(at):
    return (
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
        tl.load(at + 4),
        tl.load(at + 5),
        tl.load(at + 6),
        tl.load(at + 7),
        tl.load(at + 8),
    )


@triton.jit
def load_3(at):
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def count_near(
    positions,
    cell,
    frame,
    pointers,
    source,
    shift,
    cutoff: tl.constexpr,
    old_positions,
    old_cell,
    inverse,
    counts,
    status,
    skin: tl.constexpr,
    unit: tl.constexpr,
    closest: tl.constexpr,
    block: tl.constexpr,
):
    atom = tl.program_id(0).to(tl.int64)
    number_of_frame = tl.load(frame + atom)
    h = load_9(cell + number_of_frame * 9)
    c = load_3(positions + atom * 3)
    begin, end = tl.load(pointers + atom), tl.load(pointers + atom + 1)
    count = tl.zeros([block], tl.int32)
    same = tl.zeros([block], tl.int32)
    for first in range(begin, end, block):
        number = first + tl.arange(0, block)
        inside = number < end
        _, x, y, z = edge_vector(positions, source, shift, number, inside, c, h)
        square = x * x + y * y + z * z
        count += (inside & (square <= cutoff * cutoff)).to(tl.int32)
        same += (inside & (square < closest * closest)).to(tl.int32)
    tl.store(counts + atom, tl.sum(count, 0).to(tl.int64))
    if tl.sum(same, 0) > 0:
        tl.atomic_add(status + 1, 1)
    # With the deformation D of the cell, an old position p has become p D. A pair that is not listed was further apart than
    # cutoff + skin, and is so by at least the smallest singular value of D, which is 1 - |D - 1| or more.
    o = load_9(old_cell + number_of_frame * 9)
    i = load_9(inverse + number_of_frame * 9)
    p = load_3(old_positions + atom * 3)
    affine = tl.abs(i[0]) + tl.abs(i[1]) + tl.abs(i[2]) + tl.abs(i[3]) + tl.abs(i[4])
    affine += tl.abs(i[5]) + tl.abs(i[6]) + tl.abs(i[7]) + tl.abs(i[8])
    e0, e1, e2, e3 = h[0] - o[0], h[1] - o[1], h[2] - o[2], h[3] - o[3]
    e4, e5, e6, e7, e8 = h[4] - o[4], h[5] - o[5], h[6] - o[6], h[7] - o[7], h[8] - o[8]
    d0 = i[0] * e0 + i[1] * e3 + i[2] * e6
    d1 = i[0] * e1 + i[1] * e4 + i[2] * e7
    d2 = i[0] * e2 + i[1] * e5 + i[2] * e8
    d3 = i[3] * e0 + i[4] * e3 + i[5] * e6
    d4 = i[3] * e1 + i[4] * e4 + i[5] * e7
    d5 = i[3] * e2 + i[4] * e5 + i[5] * e8
    d6 = i[6] * e0 + i[7] * e3 + i[8] * e6
    d7 = i[6] * e1 + i[7] * e4 + i[8] * e7
    d8 = i[6] * e2 + i[7] * e5 + i[8] * e8
    strain = d0 * d0 + d1 * d1 + d2 * d2 + d3 * d3 + d4 * d4 + d5 * d5 + d6 * d6 + d7 * d7 + d8 * d8
    change = e0 * e0 + e1 * e1 + e2 * e2 + e3 * e3 + e4 * e4 + e5 * e5 + e6 * e6 + e7 * e7 + e8 * e8
    u0 = c[0] - (p[0] + (p[0] * d0 + p[1] * d3 + p[2] * d6))
    u1 = c[1] - (p[1] + (p[0] * d1 + p[1] * d4 + p[2] * d7))
    u2 = c[2] - (p[2] + (p[0] * d2 + p[1] * d5 + p[2] * d8))
    moved = tl.sqrt(u0 * u0 + u1 * u1 + u2 * u2)
    allowed = 0.5 * ((cutoff + skin) * (1.0 - tl.sqrt(strain)) - cutoff)
    # Written so that NaN is not within the limit.
    valid = (moved <= allowed) & ((affine > 0.0) | (change == 0.0))
    if valid == 0:
        tl.atomic_add(status, 1)
    share = tl.where(allowed > 0.0, tl.minimum(moved / tl.where(allowed > 0.0, allowed, 1.0), 2.0), 0.0)
    travel = (share / unit).to(tl.int64)
    if travel > tl.load(status + 4):  # few atoms are the first to have moved so far
        tl.atomic_max(status + 4, travel)


@triton.jit(do_not_specialize=["n_edges"])
def fill_near(
    positions,
    cell,
    frame,
    pointers,
    source,
    shift,
    cutoff: tl.constexpr,
    ends,
    counts,
    index,
    vectors,
    place,
    n_edges,
    block: tl.constexpr,
):
    atom = tl.program_id(0).to(tl.int64)
    h = load_9(cell + tl.load(frame + atom) * 9)
    c = load_3(positions + atom * 3)
    begin, end = tl.load(pointers + atom), tl.load(pointers + atom + 1)
    free = tl.load(ends + atom) - tl.load(counts + atom)
    for first in range(begin, end, block):
        number = first + tl.arange(0, block)
        inside = number < end
        j, x, y, z = edge_vector(positions, source, shift, number, inside, c, h)
        near = inside & (x * x + y * y + z * z <= cutoff * cutoff)
        rank = tl.cumsum(near.to(tl.int32), 0)
        at = free + rank - 1
        fits = near & (at < n_edges)
        tl.store(place + number, tl.where(near, at, -1).to(tl.int32), mask=inside)
        tl.store(index + at, j, mask=fits)
        tl.store(index + n_edges + at, j * 0 + atom, mask=fits)
        tl.store(vectors + at * 3, x, mask=fits)
        tl.store(vectors + at * 3 + 1, y, mask=fits)
        tl.store(vectors + at * 3 + 2, z, mask=fits)
        free += tl.sum(near.to(tl.int32), 0)


@triton.jit(do_not_specialize=["n_atoms", "n_edges"])
def finish_near(
    ends,
    pointers,
    list_reverse,
    place,
    index,
    vectors,
    reverse,
    status,
    n_atoms,
    n_edges,
    first_blank,
    invalid,
    far: tl.constexpr,
    block: tl.constexpr,
):
    """Reverse edges, and edges of blank atoms: all edges where they do not fit or the lists are invalid."""
    number = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    total = tl.load(ends + n_atoms - 1)
    is_invalid = tl.load(invalid)
    if tl.program_id(0) == 0:
        tl.store(status + 2, total)
        tl.store(status + 3, is_invalid)
    count = tl.where((total <= n_edges) & (is_invalid == 0), total, 0)
    listed = number < tl.load(pointers + n_atoms)
    at = tl.load(place + number, mask=listed, other=-1)
    back = tl.load(list_reverse + number, mask=listed, other=0)
    to = tl.load(place + back, mask=listed, other=0).to(tl.int64)
    fits = listed & (at >= 0) & (at < count)
    tl.store(reverse + at, tl.minimum(tl.maximum(to, 0), n_edges - 1), mask=fits)
    blank = (number >= count) & (number < n_edges)
    first = tl.load(first_blank)
    pair = tl.maximum(number - count, 0) // 2
    n_pairs = tl.maximum((n_edges - count) // 2, 1)
    owner = tl.minimum(first + pair * (n_atoms - first) // n_pairs, n_atoms - 1)
    tl.store(index + number, owner, mask=blank)
    tl.store(index + n_edges + number, owner, mask=blank)
    tl.store(reverse + number, number ^ 1, mask=blank)
    tl.store(vectors + number * 3, tl.where(number % 2 == 0, far, -far).to(tl.float64), mask=blank)
    tl.store(vectors + number * 3 + 1, number.to(tl.float64) * 0.0, mask=blank)
    tl.store(vectors + number * 3 + 2, number.to(tl.float64) * 0.0, mask=blank)


@triton.jit
def atom_sums(slope, vectors, pointers, reverse, forces, virials, block: tl.constexpr):
    atom = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(pointers + atom), tl.load(pointers + atom + 1)
    x = tl.zeros([block], tl.float64)
    y = tl.zeros([block], tl.float64)
    z = tl.zeros([block], tl.float64)
    xx = tl.zeros([block], tl.float64)
    xy = tl.zeros([block], tl.float64)
    xz = tl.zeros([block], tl.float64)
    yx = tl.zeros([block], tl.float64)
    yy = tl.zeros([block], tl.float64)
    yz = tl.zeros([block], tl.float64)
    zx = tl.zeros([block], tl.float64)
    zy = tl.zeros([block], tl.float64)
    zz = tl.zeros([block], tl.float64)
    for first in range(begin, end, block):
        edge = first + tl.arange(0, block)
        inside = edge < end
        back = tl.load(reverse + edge, mask=inside, other=0)
        sx = tl.load(slope + edge * 3, mask=inside, other=0.0)
        sy = tl.load(slope + edge * 3 + 1, mask=inside, other=0.0)
        sz = tl.load(slope + edge * 3 + 2, mask=inside, other=0.0)
        x += sx - tl.load(slope + back * 3, mask=inside, other=0.0)
        y += sy - tl.load(slope + back * 3 + 1, mask=inside, other=0.0)
        z += sz - tl.load(slope + back * 3 + 2, mask=inside, other=0.0)
        vx = tl.load(vectors + edge * 3, mask=inside, other=0.0)
        vy = tl.load(vectors + edge * 3 + 1, mask=inside, other=0.0)
        vz = tl.load(vectors + edge * 3 + 2, mask=inside, other=0.0)
        xx += vx * sx
        xy += vx * sy
        xz += vx * sz
        yx += vy * sx
        yy += vy * sy
        yz += vy * sz
        zx += vz * sx
        zy += vz * sy
        zz += vz * sz
    tl.store(forces + atom * 3, tl.sum(x, 0))
    tl.store(forces + atom * 3 + 1, tl.sum(y, 0))
    tl.store(forces + atom * 3 + 2, tl.sum(z, 0))
    at = virials + atom * 9
    off_xy = 0.5 * (tl.sum(xy, 0) + tl.sum(yx, 0))
    off_xz = 0.5 * (tl.sum(xz, 0) + tl.sum(zx, 0))
    off_yz = 0.5 * (tl.sum(yz, 0) + tl.sum(zy, 0))
    tl.store(at, tl.sum(xx, 0))
    tl.store(at + 1, off_xy)
    tl.store(at + 2, off_xz)
    tl.store(at + 3, off_xy)
    tl.store(at + 4, tl.sum(yy, 0))
    tl.store(at + 5, off_yz)
    tl.store(at + 6, off_xz)
    tl.store(at + 7, off_yz)
    tl.store(at + 8, tl.sum(zz, 0))


@triton.jit(do_not_specialize=["n_shares"])
def share_sums(atomic, virials, first_atoms, parts, n_shares, block: tl.constexpr):
    frame = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1).to(tl.int64)
    begin, end = tl.load(first_atoms + frame), tl.load(first_atoms + frame + 1)
    length = (end - begin + n_shares - 1) // n_shares
    begin += share * length
    end = tl.minimum(begin + length, end)
    column = tl.arange(0, 16)
    energies = tl.zeros([block], tl.float64)
    total = tl.zeros([block, 16], tl.float64)
    for first in range(begin, end, block):
        atom = first + tl.arange(0, block)
        energies += tl.load(atomic + atom, mask=atom < end, other=0.0)
        inside = (atom < end)[:, None] & (column < 9)[None, :]
        total += tl.load(virials + atom[:, None] * 9 + column[None, :], mask=inside, other=0.0)
    out = parts + (frame * n_shares + share) * 10
    tl.store(out, tl.sum(energies, 0))
    tl.store(out + 1 + column, tl.sum(total, 0), mask=column < 9)


@triton.jit(do_not_specialize=["n_shares"])
def frame_sums(parts, cell, energy, stress, n_shares, block: tl.constexpr):
    frame = tl.program_id(0).to(tl.int64)
    h = load_9(cell + frame * 9)
    volume = h[0] * (h[4] * h[8] - h[5] * h[7])
    volume += h[1] * (h[5] * h[6] - h[3] * h[8])
    volume += h[2] * (h[3] * h[7] - h[4] * h[6])
    volume = tl.abs(volume)
    column = tl.arange(0, 16)
    total = tl.zeros([block, 16], tl.float64)
    for first in range(0, n_shares, block):
        share = first + tl.arange(0, block)
        inside = (share < n_shares)[:, None] & (column < 10)[None, :]
        total += tl.load(parts + ((frame * n_shares + share) * 10)[:, None] + column[None, :], mask=inside, other=0.0)
    sums = tl.sum(total, 0)
    tl.store(energy + frame + column, sums, mask=column < 1)
    value = tl.where(volume > 0.0, sums / tl.where(volume > 0.0, volume, 1.0), float("nan"))
    tl.store(stress + frame * 9 + column - 1, value, mask=(column > 0) & (column < 10))

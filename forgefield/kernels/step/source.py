"""The Triton functions of `copies.py` and `update.py`, which import this file when they first launch one: it needs Triton.

fill: fills many tensors. adam: a step of Adam or AdamW and of the average of the weights, for all weights of all groups.
add_squares: sums of squares of gradients, in parts. A program reads its task from a table of integers with one row per program,
which contains the addresses of tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fill(table, sources, columns: tl.constexpr, block: tl.constexpr):
    about = table + tl.program_id(0) * columns
    number = tl.load(about)
    size = tl.load(about + 1)
    to = tl.load(about + 2)
    rest = tl.load(about + 3)
    begin = tl.load(about + 4)
    length = tl.load(about + 5)
    source = tl.load(sources + 2 * number)
    n = tl.load(sources + 2 * number + 1)
    if size == 8:
        copy(to, source, rest, begin, n, length, tl.int64, block)
    elif size == 4:
        copy(to, source, rest, begin, n, length, tl.int32, block)
    elif size == 2:
        copy(to, source, rest, begin, n, length, tl.int16, block)
    else:
        copy(to, source, rest, begin, n, length, tl.int8, block)


@triton.jit
def copy(to, source, rest, begin, n, length, word: tl.constexpr, block: tl.constexpr):
    """Words from `begin` on: the first n of a tensor are its source's, the others those of the rest."""
    place = tl.pointer_type(word)
    e = begin + tl.arange(0, block)
    inside = e < length
    given = tl.load(source.to(place) + e, mask=inside & (e < n), other=0)
    others = tl.load(rest.to(place) + e, mask=inside & (e >= n), other=0)
    tl.store(to.to(place) + e, tl.where(e < n, given, others), mask=inside)


@triton.jit(do_not_specialize=["n_counts", "n_parts"])
def adam(
    table,
    groups,
    counts,
    done,
    share,
    found_inf,
    limit,
    parts,
    n_counts,
    n_parts,
    averages: tl.constexpr,
    clip: tl.constexpr,
    columns: tl.constexpr,
    settings: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
):
    real = tl.pointer_type(tl.float32)
    about = table + tl.program_id(0) * columns
    weight = tl.load(about).to(real)
    gradient = tl.load(about + 1)
    mean = tl.load(about + 2).to(real)
    square = tl.load(about + 3).to(real)
    average = tl.load(about + 4)
    count = tl.load(about + 5).to(real)
    rate = tl.load(about + 6).to(real)
    group = groups + tl.load(about + 7) * settings
    e = tl.arange(0, block)
    inside = e < tl.load(about + 8)
    moves = gradient != 0
    wanted = tl.load(found_inf).to(tl.int32) != 1
    # Everything is asked for before the first wait.
    n = tl.load(count, mask=moves, other=0.0)
    lr = tl.load(rate, mask=moves, other=0.0)
    w = tl.load(weight + e, mask=inside, other=0.0)
    g = tl.load(gradient.to(real) + e, mask=inside & moves, other=0.0)
    m = tl.load(mean + e, mask=inside & moves, other=0.0)
    v = tl.load(square + e, mask=inside & moves, other=0.0)
    if averages:
        a = tl.load(average.to(real) + e, mask=inside & (average != 0), other=0.0)
    first = tl.load(group)
    second = tl.load(group + 1)
    log_first = tl.load(group + 2)
    log_second = tl.load(group + 3)
    eps = tl.load(group + 4).to(tl.float32)
    pull = tl.load(group + 5).to(tl.float32)
    shrink = tl.load(group + 6).to(tl.float32)
    # Counts are raised by the program that is the last to have read one: then nobody needs the old ones any more. The barrier
    # is for the warps of a program, each of which reads them for itself.
    tl.debug_barrier()
    is_last = tl.atomic_add(done, 1) == tl.num_programs(0) - 1
    if wanted & moves:
        if clip == "norm":
            g = g * coefficient(parts, limit, n_parts, lanes)
        if clip == "value":
            most = tl.load(limit).to(tl.float32)
            g = tl.where(g > most, most, tl.where(g < -most, -most, g))
        g += w * pull
        w -= w * lr * shrink
        # Not beta m + (1 - beta) g: the two factors, each rounded, would not add up to 1.
        m += (g - m) * first.to(tl.float32)
        # Where squares have become infinite this gives NaN, which is noticed; torch's would leave such a weight as it is.
        v += g * second.to(tl.float32) * g - v * second.to(tl.float32)
        # Powers are taken in float64: they are near 1, and subtracted from it.
        n_now = n.to(tl.float64) + 1.0
        size = tl.div_rn(lr, (1.0 - tl.exp(n_now * log_first)).to(tl.float32))
        root = tl.sqrt_rn((1.0 - tl.exp(n_now * log_second)).to(tl.float32))
        w -= tl.div_rn(size * root * m, tl.sqrt_rn(v) + eps * root)
        tl.store(weight + e, w, mask=inside)
        tl.store(mean + e, m, mask=inside)
        tl.store(square + e, v, mask=inside)
    if averages:
        part = tl.load(share)
        near, far = a + part * (w - a), w - (1.0 - part) * (w - a)
        follows = inside & wanted & (average != 0)
        tl.store(average.to(real) + e, tl.where(part < 0.5, near, far), mask=follows)
    if is_last:
        tl.store(done, 0)
        if wanted:
            for begin in range(0, n_counts, lanes):
                number = begin + tl.arange(0, lanes)
                known = number < n_counts
                place = tl.load(counts + number, mask=known, other=0).to(real)
                tl.store(place, tl.load(place, mask=known, other=0.0) + 1.0, mask=known)


@triton.jit
def coefficient(parts, limit, n_parts, lanes: tl.constexpr):
    """What gradients are multiplied with so that their norm is within the limit: 1 where it is, NaN where it is NaN."""
    total = tl.zeros([lanes], tl.float64)
    for begin in range(0, n_parts, lanes):
        part = begin + tl.arange(0, lanes)
        total += tl.load(parts + part, mask=part < n_parts, other=0.0)
    found = tl.load(limit) / (tl.sqrt(tl.sum(total, 0)) + 1e-6)
    return tl.where(found > 1.0, 1.0, found).to(tl.float32)


@triton.jit(do_not_specialize=["chunk"])
def add_squares(table, parts, chunk, columns: tl.constexpr, block: tl.constexpr):
    about = table + tl.program_id(0) * columns
    gradient = tl.load(about).to(tl.pointer_type(tl.float32))
    length = tl.load(about + 1)
    total = tl.zeros([block], tl.float64)
    for begin in range(0, chunk, block):
        e = begin + tl.arange(0, block)
        g = tl.load(gradient + e, mask=e < length, other=0.0).to(tl.float64)
        total += g * g
    tl.store(parts + tl.program_id(0), tl.sum(total, 0))

"""The Triton function behind `copies.py`, which imports this file when it first launches it: it needs Triton.

fill: every program fills one stretch of one tensor, which it finds in a table of whole numbers.
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

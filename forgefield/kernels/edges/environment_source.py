"""Generates Triton code for sums of weighted harmonics over the edges of an atom, for their adjoint, and for derivatives of
both.

All come from one form, with a row Q of the atom, harmonics Y and weights W of an edge, degree l of component k, and a factor p
of the edge, which is one in environments:

    F = sum over k of  Q[k, c] Y[k] W[l, c] p[c]

An environment is dF/dQ, summed over edges; a projection is dF/dp. One program processes one atom and a chunk of channels, holds
rows and sums of the atom in registers and loops over its edges, as many at a time as it has warps (`AT_ONCE`; on an H200 one is
fastest). Nothing is added atomically. The first harmonic is one: it is not read and has no derivative.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forgefield.kernels.core.generation import ArgumentTable

AT_ONCE = 1
"""Edges that a program processes at a time, one for each of its warps."""


@dataclass(frozen=True)
class EdgePass:
    """What a kernel computes, and for which shapes.

    projection: with a factor p of the edge.
    order: 0, the values; 1, from their cotangents those of the inputs; 2, from directions of these the cotangents of all inputs
        of the cotangents.
    harmonics: cotangents of harmonics are computed.
    shared: all degrees have the same weight.
    tile: channels of a program, a power of two, at least 32.
    edges: processed at a time, one by each warp.
    """

    projection: bool
    order: int
    harmonics: bool
    l_max: int
    channels: int
    shared: bool
    tile: int
    edges: int = AT_ONCE

    @property
    def name(self) -> str:
        of = "projection" if self.projection else "environment"
        return of + ("", "_backward", "_double_backward")[self.order] + ("_harmonics" if self.harmonics else "")

    @property
    def n_harmonics(self) -> int:
        return (self.l_max + 1) ** 2

    @property
    def n_weights(self) -> int:
        return 1 if self.shared else self.l_max + 1

    @property
    def n_chunks(self) -> int:
        """Programs that share the channels of an atom."""
        return -(-self.channels // self.tile)

    @property
    def sums(self) -> bool:
        """Whether something is summed over the edges of an atom."""
        return self.order == 2 or self.projection == (self.order == 1)

    @property
    def rows(self) -> bool:
        """Whether there are rows of atoms."""
        return self.projection or self.order > 0

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments that the kernel uses; it is launched with any tensor for the others."""
        conditions = {
            "q": self.rows,
            "aq": self.projection and self.order == 2,
            "ay": self.order == 2,
            "w": self.projection or self.order != 1 or self.harmonics,
            "aw": self.order == 2,
            "p": self.projection and self.order > 0,
            "out": self.sums,
            "to_w": self.order > 0,
            "to_y": self.harmonics,
            "to_p": self.projection and self.order != 1,
        }
        return tuple(name for name in ARGUMENTS if conditions.get(name, True))

    def degree(self, component: int) -> int:
        return next(l for l in range(self.l_max + 1) if component < (l + 1) ** 2)

    def components(self, degree: int) -> range:
        return range(degree**2, (degree + 1) ** 2)


ARGUMENTS = ArgumentTable(
    q="(components, n_atoms, channels), rows of atoms",
    aq="as q, a direction of them",
    y="(n_edges, components), harmonics",
    ay="as y, a direction of them",
    w="(n_edges, weights x channels), weights",
    aw="as w, a direction of them",
    p="(n_edges, channels), factors of edges",
    out="as q, sums over edges",
    to_w="as w, cotangents",
    to_y="(chunks, n_edges, components), cotangents of harmonics",
    to_p="as p, values of a projection or cotangents of p",
    pointers="(n_atoms + 1,), first edge of each atom",
    n_edges="number of edges",
)
"""Arguments of every kernel of this family."""


def write_pass(of: EdgePass) -> str:
    """Source of a module with one kernel, `of.name`, whose grid is (n_atoms, of.n_chunks), with `of.edges` warps."""
    lines = ["import triton", "import triton.language as tl", "", ""]
    lines += ["@triton.jit(do_not_specialize=['n_edges'])", f"def {of.name}({ARGUMENTS.signature}):"]
    return "\n".join([*lines, *_indented(_body(of))]) + "\n"


def _body(of: EdgePass) -> list[str]:
    inside = "" if of.channels % of.tile == 0 else " & inside"
    lines = [
        "atom = tl.program_id(0).to(tl.int64)",
        f"plane = tl.num_programs(0).to(tl.int64) * {of.channels}",
        "begin = tl.load(pointers + atom)",
        "end = tl.load(pointers + atom + 1)",
        f"lane = tl.arange(0, {of.tile})[None, :]",
        f"c = tl.program_id(1) * {of.tile} + lane",
        f"row = atom * {of.channels} + c",
    ]
    if inside:
        lines.append(f"inside = c < {of.channels}")
    rows = ["q"] * of.rows + ["aq"] * (of.projection and of.order == 2)
    guard = ", mask=inside, other=0.0" if inside else ""
    for name in rows:
        lines += [f"{name}{k} = tl.load({name} + {k} * plane + row{guard})" for k in range(of.n_harmonics)]
    if of.sums:
        zeros = f"tl.zeros([{of.edges}, {of.tile}], y.dtype.element_ty)"
        lines += [f"o{k} = {zeros}" for k in range(of.n_harmonics)]
    lines += _walk(of, inside)
    if of.sums:
        guard = ", mask=inside" if inside else ""
        sums = "tl.sum(o{k}, 0, keep_dims=True)"
        lines += [f"tl.store(out + {k} * plane + row, {sums.format(k=k)}{guard})" for k in range(of.n_harmonics)]
    return lines


def _walk(of: EdgePass, inside: str) -> list[str]:
    """The loop over edges."""
    loop = [f"edge = first + tl.arange(0, {of.edges})[:, None]", "here = edge < end"]
    loop += [f"{name} = {text}" for name, text in _loads(of, inside).items()]
    loop += _projection(of) if of.projection else _environment(of)
    loop += _stores(of, inside)
    return [f"for first in range(begin, end, {of.edges}):", *_indented(loop)]


def _loads(of: EdgePass, inside: str) -> dict[str, str]:
    """Loads of an edge by the name of the variable."""
    n_y, n_w, loads = of.n_harmonics, of.n_weights, {}
    weights = ["w"] * (of.projection or of.order != 1 or of.harmonics) + ["aw"] * (of.order == 2)
    for name in weights:
        for n in range(n_w):
            where = f"edge * {n_w * of.channels} + {n * of.channels} + c"
            loads[f"{name}{n}"] = f"tl.load({name} + {where}, mask=here{inside}, other=0.0)"
    if of.projection and of.order > 0:
        loads["p0"] = f"tl.load(p + edge * {of.channels} + c, mask=here{inside}, other=0.0)"
    for name in ["y"] + ["ay"] * (of.order == 2):
        for k in range(1, n_y):
            loads[f"{name}{k}"] = f"tl.load({name} + edge * {n_y} + {k}, mask=here, other=0.0)"
    return loads


# ---- computation for one edge


def _environment(of: EdgePass) -> list[str]:
    """o: sums. t: cotangents of weights. z: summands of those of harmonics."""
    lines: list[str] = []
    for k in range(of.n_harmonics) if of.order != 1 else ():
        n = _weight(of, k)
        y, ay = ("", None) if k == 0 else (f" * y{k}", f" * ay{k}")
        if of.order == 0:
            lines.append(f"o{k} += w{n}{y}")
        else:
            lines.append(f"o{k} += aw{n}{y}" + (f" + w{n}{ay}" if ay else ""))
    if of.order > 0:
        by = "y" if of.order == 1 else "ay"
        parts = {degree: _dot(of, degree, [("q", by)]) for degree in range(of.l_max + 1)}
        lines += _cotangents(of, parts)
    if of.harmonics:
        w = "w" if of.order == 1 else "aw"
        lines += [f"z{k} = q{k} * {w}{_weight(of, k)}" for k in range(1, of.n_harmonics)]
    return lines


def _projection(of: EdgePass) -> list[str]:
    """u: rows times harmonics, v: its change along the direction of both. f, h: weights and their direction times p."""
    degrees = range(of.l_max + 1)
    lines = [f"u{degree} = {_dot(of, degree, [('q', 'y')])}" for degree in degrees]
    if of.order == 2:
        lines += [f"v{degree} = {_dot(of, degree, [('aq', 'y'), ('q', 'ay')])}" for degree in degrees]
    if of.order == 0:
        return [*lines, f"s = {_sum(f'w{_of_degree(of, degree)} * u{degree}' for degree in degrees)}"]
    lines += [f"f{n} = p0 * w{n}" for n in range(of.n_weights)]
    if of.order == 1:
        for k in range(of.n_harmonics):
            lines.append(f"o{k} += f{_weight(of, k)}" + (f" * y{k}" if k else ""))
        lines += _cotangents(of, {degree: f"u{degree}" for degree in degrees}, "p0")
        if of.harmonics:
            lines += [f"z{k} = q{k} * f{_weight(of, k)}" for k in range(1, of.n_harmonics)]
        return lines
    lines += [f"h{n} = p0 * aw{n}" for n in range(of.n_weights)]
    by_degree = ((_of_degree(of, degree), degree) for degree in degrees)
    lines.append(f"s = {_sum(f'w{n} * v{degree} + aw{n} * u{degree}' for n, degree in by_degree)}")
    for k in range(of.n_harmonics):
        n = _weight(of, k)
        lines.append(f"o{k} += h{n}" + (f" * y{k} + f{n} * ay{k}" if k else ""))
    lines += _cotangents(of, {degree: f"v{degree}" for degree in degrees}, "p0")
    if of.harmonics:
        each = ((k, _weight(of, k)) for k in range(1, of.n_harmonics))
        lines += [f"z{k} = aq{k} * f{n} + q{k} * h{n}" for k, n in each]
    return lines


def _cotangents(of: EdgePass, parts: dict[int, str], factor: str = "") -> list[str]:
    """Cotangents of weights, from the part of each degree."""
    texts = [_sum(part for part in parts.values() if part)] if of.shared else list(parts.values())
    zero = f"tl.zeros([{of.edges}, {of.tile}], y.dtype.element_ty)"
    return [
        f"t{n} = " + (zero if not text else f"{factor} * ({text})" if factor else text) for n, text in enumerate(texts)
    ]


def _dot(of: EdgePass, degree: int, pairs: Iterable[tuple[str, str]]) -> str:
    """Sum over the components of a degree of products of rows and harmonics, whose first is one and does not change."""
    terms = []
    for row, other in pairs:
        if degree == 0:
            terms += [f"{row}0"] if other == "y" else []
        else:
            terms += [f"{row}{k} * {other}{k}" for k in of.components(degree)]
    return _sum(terms)


def _stores(of: EdgePass, inside: str) -> list[str]:
    lines, n_w = [], of.n_weights
    if of.order > 0:
        for n in range(n_w):
            where = f"to_w + edge * {n_w * of.channels} + {n * of.channels} + c"
            lines.append(f"tl.store({where}, {_filled(of, f't{n}')}, mask=here{inside})")
    if of.projection and of.order != 1:
        lines.append(f"tl.store(to_p + edge * {of.channels} + c, s, mask=here{inside})")
    if of.harmonics:
        lines.append(f"z = tl.zeros([{of.edges}, {of.tile}], y.dtype.element_ty)")
        summed = "tl.sum(z{k}, 1, keep_dims=True)"
        lines += [f"z = tl.where(lane == {k}, {summed.format(k=k)}, z)" for k in range(1, of.n_harmonics)]
        where = f"to_y + (tl.program_id(1) * tl.cast(n_edges, tl.int64) + edge) * {of.n_harmonics} + lane"
        lines.append(f"tl.store({where}, z, mask=here & (lane < {of.n_harmonics}))")
    return lines


def _filled(of: EdgePass, name: str) -> str:
    """Broadcast to the shape of a tile: values computed from rows alone are the same for all edges."""
    return f"tl.broadcast_to({name}, ({of.edges}, {of.tile}))"


def _weight(of: EdgePass, component: int) -> int:
    return _of_degree(of, of.degree(component))


def _of_degree(of: EdgePass, degree: int) -> int:
    return 0 if of.shared else degree


def _sum(terms: Iterable[str]) -> str:
    return " + ".join(terms)


def _indented(lines: Iterable[str]) -> list[str]:
    return ["    " + line for line in lines]

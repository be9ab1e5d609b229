"""Writes Triton code for the convolution and its derivatives, all from one description of the trilinear form.

One program is one warp: it takes one atom and up to 128 channels of one source block, walks over the atom's edges and keeps
what it sums in registers. Harmonics are scalars there, Clebsch-Gordan coefficients are literals. Nothing is added atomically:
what belongs to the source of an edge is written for every edge and summed afterwards, in a fixed order.

With a prime for a tangent and M_ik = sum_j C_ijk y_j, an edge adds
    o = w x M    and    p = (w x' + w' x) M + w x M'
to the output and its tangent. Given cotangents o and p of these, with s = M o + M' p and u = M p,
    to_x = w s + w' u,    to_w = x' u + x s,    to_w' = x u.
The cotangent of x' would be w u: what the backward pass of the values alone gives for cotangents p. A training has made that
pass already, for the forces, so it is not computed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forgefield.ops.kernels.fields import TANGENT, VALUE
from forgefield.ops.kernels.form import Form, FormBlock, FormPath


@dataclass(frozen=True)
class Kind:
    """What a kernel computes.

    dual, backward: neither, the values of the output; `backward` alone, from the cotangents of the output's tangents, which
    are those of a total of the values, those of features, harmonics and weights; `dual` alone, the tangents of the output;
    both, from cotangents of values and tangents those of features, weights and tangents of weights.
    table: weights are read from a table of cubic polynomials, at the place of each edge in it, which then has the cotangent
    that rows of weights would have in a backward pass of the values. still: features have no tangents. features: their
    cotangents are wanted.
    """

    dual: bool = False
    backward: bool = False
    table: bool = False
    still: bool = False
    features: bool = True

    @property
    def name(self) -> str:
        flags = [word for word in self.__dataclass_fields__ if getattr(self, word)]
        return "convolution_" + "_".join(flags)

    @property
    def geometry(self) -> bool:
        """Whether harmonics have cotangents."""
        return self.backward and not self.dual

    @property
    def weights(self) -> bool:
        """Whether weights have cotangents for every edge."""
        return self.backward and (self.dual or not self.table)

    @property
    def places(self) -> list[tuple[str, int]]:
        """Outputs by the letter of their accumulators, and which place of the field they lie in: o values, p tangents."""
        if not self.backward:
            return [("p", TANGENT)] if self.dual else [("o", VALUE)]
        return [("o", VALUE), ("p", TANGENT)] if self.dual else [("o", TANGENT)]


ARGUMENTS = (
    *("x", "y", "dy", "w", "dw", "u", "du", "g", "out", "to_x", "to_w", "to_dw", "to_y"),
    *("source", "pointers", "row", "n_atoms", "n_edges"),
)
"""Of every kernel, in this order; a kernel is given any tensor for those that it does not use.

x: field of features. y, dy: (n_edges, n_harmonics) and their tangents. w, dw: (n_rows, n_weights) and their tangents or, a
table, w (n_intervals, 4, n_weights). u, du: (n_edges,) where in its interval of the table an edge lies, from 0 to 1, and its
tangent. g, out: fields of outputs. to_x: (n_edges, dim of features). to_w, to_dw: (n_edges, n_weights). to_y: (n_chunks,
n_edges, n_harmonics), with a table one column more. source: (n_edges,). pointers: (n_atoms + 1,). row: (n_edges,) the row of
weights of an edge, or its interval in the table.
"""


SEPARATE = 4
"""From so many blocks on each is compiled as a function of its own: the kernel is a little slower, and made several times
faster."""


class _Writer:
    """Lines of code at an indentation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def __call__(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def add(self, name: str, terms: Iterable[str], *, to: bool = False) -> None:
        """name = sum of the terms, or += where `to` is set. Nothing where there are none and it is added to."""
        text = " + ".join(terms).replace("+ -", "- ")
        if text or not to:
            self(f"{name} {'+=' if to else '='} {text or '0.0'}")


def write_kernel(form: Form, kind: Kind) -> str:
    """Source of a module with one kernel, `kind.name`, whose grid is (n_atoms * form.n_chunks,)."""
    write = _Writer()
    write("import triton")
    write("import triton.language as tl")
    for block in form.blocks:
        write("")
        write("")
        _write_block(write, form, block, kind)
    arguments = ", ".join(ARGUMENTS)
    write("")
    write("")
    write("@triton.jit(do_not_specialize=['n_atoms', 'n_edges'], do_not_specialize_on_alignment=['to_y'])")
    write(f"def {kind.name}({arguments}):")
    write.depth = 1
    write("program = tl.program_id(0)")
    write("n_atoms = tl.cast(n_atoms, tl.int64)")
    write(f"atom = (program // {form.n_chunks}).to(tl.int64)")
    write(f"chunk = program % {form.n_chunks}")
    for number, block in enumerate(form.blocks):
        if len(form.blocks) > 1:
            last = number == len(form.blocks) - 1
            branch = "if" if number == 0 else "elif"
            write("else:" if last else f"{branch} chunk < {block.chunk + block.n_chunks}:")
            write.depth = 2
        write(f"block_{block.chunk}(atom, chunk, {arguments})")
        write.depth = 1
    return "\n".join(write.lines) + "\n"


def _write_block(write: _Writer, form: Form, block: FormBlock, kind: Kind) -> None:
    write("@triton.jit(noinline=True)" if len(form.blocks) >= SEPARATE else "@triton.jit")
    write(f"def block_{block.chunk}(atom, chunk, {', '.join(ARGUMENTS)}):")
    write.depth = 1
    write("begin = tl.load(pointers + atom)")
    write("end = tl.load(pointers + atom + 1)")
    write(f"c = (chunk - {block.chunk}) * {block.tile} + tl.arange(0, {block.tile})")
    if _masked(block):
        write(f"inside = c < {block.channels}")
    dim = block.n_in * block.channels
    write(f"x_values = x + {block.start if block.row else f'n_atoms * {2 * block.start}'} + c")
    if _moves(kind):
        write(f"x_tangents = x_values + n_atoms * {block.row or dim}")
    for name, where in _outputs(block, kind):
        if kind.backward:
            _load(write, block, name, f"g + {where}")
        else:
            write(f"{name} = tl.zeros([{block.tile}], x.dtype.element_ty)")
    write(
        "next_in = tl.load(source + begin, mask=begin < end, other=0)"
    )  # one edge ahead: the next loads depend on them
    write("next_at = tl.load(row + begin, mask=begin < end, other=0)")
    write("for edge in range(begin, end):")
    write.depth = 2
    write("atom_in, at = next_in.to(tl.int64), next_at.to(tl.int64)")
    write("next_in = tl.load(source + edge + 1, mask=edge + 1 < end, other=0)")
    write("next_at = tl.load(row + edge + 1, mask=edge + 1 < end, other=0)")
    _write_loads(write, form, block, kind)
    for number, path in enumerate(block.paths):
        _write_path(write, form, block, kind, number, path)
    if kind.backward:
        _write_cotangents(write, form, block, kind)
    write.depth = 1
    if not kind.backward:
        for name, where in _outputs(block, kind):
            _store(write, block, f"out + {where}", name)
    write.depth = 0


def _moves(kind: Kind) -> bool:
    """Whether tangents of features are read."""
    return kind.dual and not kind.still


def _masked(block: FormBlock) -> bool:
    return block.channels % block.tile != 0


def _load(write: _Writer, block: FormBlock, name: str, where: str) -> None:
    write(f"{name} = tl.load({where}, mask=inside, other=0.0)" if _masked(block) else f"{name} = tl.load({where})")


def _store(write: _Writer, block: FormBlock, where: str, value: str) -> None:
    write(f"tl.store({where}, {value}{', mask=inside' if _masked(block) else ''})")


def _outputs(block: FormBlock, kind: Kind) -> list[tuple[str, str]]:
    """Names of what belongs to each component of the outputs, and where it lies."""
    found = []
    for row, (name, place) in enumerate(kind.places):
        for number, path in enumerate(block.paths):
            dim = path.n_out * path.width
            base = f"n_atoms * {2 * path.start + place * dim} + atom * {dim}"
            if path.row:
                base = f"{path.start} + (n_atoms * {row} + atom) * {path.row}"
            found += [
                (f"{name}{number}_{k}", f"({base} + {k * path.width + path.column} + c)") for k in range(path.n_out)
            ]
    return found


def _write_loads(write: _Writer, form: Form, block: FormBlock, kind: Kind) -> None:
    for prefix, base in (("", "x_values"), ("d", "x_tangents"))[: 2 if _moves(kind) else 1]:
        for i in range(block.n_in):
            where = f"{base} + atom_in * {block.row or block.n_in * block.channels} + {i * block.channels}"
            _load(write, block, f"{prefix}x{i}", where)
    for prefix in ("", "d")[: 2 if kind.dual else 1]:
        for j in block.harmonics:
            write(f"{prefix}y{j} = tl.load({prefix}y + edge * {form.n_harmonics} + {j})")
    if kind.table:
        write("t = tl.load(u + edge)")
        if kind.dual:
            write("dt = tl.load(du + edge)")
    for number, path in enumerate(block.paths):
        if kind.table:
            for q in range(4):
                _load(write, block, f"c{q}", f"w + (at * 4 + {q}) * {form.n_weights} + {path.weight} + c")
            write(f"w{number} = c0 + t * (c1 + t * (c2 + t * c3))")
            if kind.dual or kind.geometry:
                slope = "c1 + t * (2.0 * c2 + 3.0 * t * c3)"
                write(f"dw{number} = dt * ({slope})" if kind.dual else f"dw{number} = {slope}")
            continue
        for prefix in ("", "d")[: 2 if kind.dual else 1]:
            _load(write, block, f"{prefix}w{number}", f"{prefix}w + at * {form.n_weights} + {path.weight} + c")


def _write_path(write: _Writer, form: Form, block: FormBlock, kind: Kind, number: int, path: FormPath) -> None:
    m = _write_couplings(write, path, "m", "y")
    dm = _write_couplings(write, path, "n", "dy") if kind.dual else {}
    w, dw = f"w{number}", f"dw{number}"
    if not kind.backward or kind.geometry:
        for i in range(block.n_in):
            write(f"a{i} = {w} * x{i}")
            if kind.dual:
                write(f"e{i} = {w} * dx{i} + {dw} * x{i}" if _moves(kind) else f"e{i} = {dw} * x{i}")
    if not kind.backward:
        for k in range(path.n_out):
            sources = [i for i in range(block.n_in) if (i, k) in path.terms]
            if kind.dual:
                moved = [f"e{i} * {m[i, k]}" for i in sources]
                moved += [f"a{i} * {dm[i, k]}" for i in sources if (i, k) in dm]
                write.add(f"p{number}_{k}", moved, to=True)
            else:
                write.add(f"o{number}_{k}", [f"a{i} * {m[i, k]}" for i in sources], to=True)
        return
    _write_path_backward(write, form, block, kind, number, path, m, dm)


def _write_couplings(write: _Writer, path: FormPath, name: str, harmonic: str) -> dict[tuple[int, int], str]:
    """Names of M_ik (or of its tangent), as scalars; a lone harmonic with coefficient one goes by its own name.

    The first harmonic is one everywhere: it is not read, and has no tangent.
    """
    names = {}
    for (i, k), terms in path.terms.items():
        if terms[0][1] == 0:
            if harmonic == "y":
                names[i, k] = repr(terms[0][0])
            continue
        (value, j), *more = terms
        if not more and abs(value - 1) < 1e-12:
            names[i, k] = f"{harmonic}{j}"
        else:
            names[i, k] = f"{name}{i}_{k}"
            write.add(names[i, k], [f"{value!r} * {harmonic}{j}" for value, j in terms])
    return names


def _write_path_backward(
    write: _Writer,
    form: Form,
    block: FormBlock,
    kind: Kind,
    number: int,
    path: FormPath,
    m: dict[tuple[int, int], str],
    dm: dict[tuple[int, int], str],
) -> None:
    w, dw, later = f"w{number}", f"dw{number}", number > 0
    components = range(block.n_in)
    for i in components:
        targets = [k for k in range(path.n_out) if (i, k) in path.terms]
        back = [f"{m[i, k]} * o{number}_{k}" for k in targets]
        if kind.dual:
            back += [f"{dm[i, k]} * p{number}_{k}" for k in targets if (i, k) in dm]
            write.add(f"v{i}", [f"{m[i, k]} * p{number}_{k}" for k in targets])
        write.add(f"s{i}", back)
        if kind.features:
            write.add(f"tx{i}", [f"{w} * s{i} + {dw} * v{i}" if kind.dual else f"{w} * s{i}"], to=later)
    write.add("tw", [f"dx{i} * v{i} + x{i} * s{i}" if _moves(kind) else f"x{i} * s{i}" for i in components])
    if kind.dual:
        write.add("td", [f"x{i} * v{i}" for i in components])
    if kind.weights:
        line = f"edge * {form.n_weights} + {path.weight} + c"
        _store(write, block, f"to_w + {line}", "tw")
        if kind.dual:
            _store(write, block, f"to_dw + {line}", "td")
    if kind.geometry:
        _write_geometry(write, block, kind, number, path)


def _write_geometry(write: _Writer, block: FormBlock, kind: Kind, number: int, path: FormPath) -> None:
    """Cotangents of harmonics, and of the place in the table, are sums over channels, made when all paths are through."""
    seen = {j for earlier in block.paths[:number] for terms in earlier.terms.values() for _, j in terms}
    for (i, k), terms in path.terms.items():
        if terms[0][1] == 0:
            continue
        write(f"z = a{i} * o{number}_{k}")
        for value, j in terms:
            write.add(f"ty{j}", [f"{value!r} * z"], to=j in seen)
            seen.add(j)
    if kind.table:
        write.add("tp", [f"tw * dw{number}"], to=number > 0)


def _write_cotangents(write: _Writer, form: Form, block: FormBlock, kind: Kind) -> None:
    if kind.features:
        for i in range(block.n_in):
            column = block.start + i * block.channels
            _store(write, block, f"to_x + edge * {form.features.dim} + {column} + c", f"tx{i}")
    if not kind.geometry:
        return
    columns = form.n_harmonics + (1 if kind.table else 0)
    used = set(block.harmonics)
    write(f"line = (chunk.to(tl.int64) * n_edges + edge) * {columns}")
    for j in range(form.n_harmonics):
        write(f"tl.store(to_y + line + {j}, {f'tl.sum(ty{j}, 0)' if j in used else '0.0'})")
    if kind.table:
        write(f"tl.store(to_y + line + {form.n_harmonics}, tl.sum(tp, 0))")

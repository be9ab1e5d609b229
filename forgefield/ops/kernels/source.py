"""Writes Triton code for the convolution and its derivatives, all from one description of the trilinear form.

One program is one warp: it takes one atom and up to 128 channels of one source block, walks over the atom's edges and keeps
what it sums in registers. Harmonics are scalars there, Clebsch-Gordan coefficients are literals. Nothing is added atomically:
what belongs to the source of an edge is written for every edge and summed afterwards, in a fixed order.

With a prime for a tangent and M_ik = sum_j C_ijk y_j, an edge adds
    o = w x M    and    p = (w x' + w' x) M + w x M'
to the output and its tangent. Given cotangents o and p of these, with s = M o + M' p and u = M p,
    to_x = w s + w' u,    to_x' = w u,    to_w = x' u + x s,    to_w' = x u,
so the double backward of the plain form is the backward of the form with tangents, without o.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forgefield.ops.kernels.form import Form, FormBlock, FormPath


@dataclass(frozen=True)
class Kind:
    """What a kernel computes.

    dual: every row of features, harmonics and weights is followed by its tangent, so that rows are twice as long. backward:
    cotangents in place of outputs. value: with a dual, whether values are made (or have cotangents) beside tangents.
    geometry: also cotangents of the harmonics. weights: also those of the weights. table: weights are read from a table of
    cubic polynomials, at the place of each edge in it; then geometry includes the cotangent of the place.
    """

    dual: bool = False
    backward: bool = False
    value: bool = True
    geometry: bool = False
    weights: bool = False
    table: bool = False

    @property
    def name(self) -> str:
        flags = [word for word in self.__dataclass_fields__ if getattr(self, word)]
        return "convolution_" + "_".join(flags)

    @property
    def rows(self) -> int:
        """How many rows an atom or edge has among inputs: its own and that of the tangent."""
        return 2 if self.dual else 1

    @property
    def streams(self) -> list[str]:
        """Outputs by the letter of their accumulators: o values, p tangents; in the order of their rows."""
        return [*(["o"] if self.value else []), *(["p"] if self.dual else [])]


ARGUMENTS = (
    *("x", "y", "w", "g", "out", "to_x", "to_w", "to_y"),
    *("source", "pointers", "row", "place", "n_edges"),
)
"""Of every kernel, in this order; a kernel is given any tensor for those that it does not use.

With R rows to an atom or edge (a value, or a value and its tangent) and S rows of outputs: x (n_atoms, R, in_dim), y
(n_edges, R, n_harmonics), w (n_rows, R, n_weights) or, a table, (n_intervals, 4, n_weights); g and out (n_atoms, S,
out_dim); to_x (n_edges, R, in_dim), to_w (n_edges, R, n_weights), to_y (n_chunks, n_edges, R, n_harmonics), with a table
one column more. source (n_edges,), pointers (n_atoms + 1,). row: (n_edges,) the row of weights of an edge, or its interval
in the table. place: (n_edges, R) where in that interval it lies, from 0 to 1.
"""


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
    write("@triton.jit(do_not_specialize=['n_edges'])")
    write(f"def {kind.name}({arguments}):")
    write.depth = 1
    write("program = tl.program_id(0)")
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
    write("@triton.jit")
    write(f"def block_{block.chunk}(atom, chunk, {', '.join(ARGUMENTS)}):")
    write.depth = 1
    write("begin = tl.load(pointers + atom)")
    write("end = tl.load(pointers + atom + 1)")
    write(f"c = (chunk - {block.chunk}) * {block.tile} + tl.arange(0, {block.tile})")
    if _masked(block):
        write(f"inside = c < {block.channels}")
    _write_before_edges(write, form, block, kind)
    write("for edge in range(begin, end):")
    write.depth = 2
    _write_loads(write, form, block, kind)
    for number, path in enumerate(block.paths):
        _write_path(write, form, block, kind, number, path)
    if kind.backward:
        _write_cotangents(write, form, block, kind)
    write.depth = 1
    if not kind.backward:
        for name, where in _outputs(form, block, kind):
            _store(write, block, f"out + {where}", name)
    write.depth = 0


def _masked(block: FormBlock) -> bool:
    return block.channels % block.tile != 0


def _load(write: _Writer, block: FormBlock, name: str, where: str) -> None:
    write(f"{name} = tl.load({where}, mask=inside, other=0.0)" if _masked(block) else f"{name} = tl.load({where})")


def _store(write: _Writer, block: FormBlock, where: str, value: str) -> None:
    write(f"tl.store({where}, {value}{', mask=inside' if _masked(block) else ''})")


def _outputs(form: Form, block: FormBlock, kind: Kind) -> list[tuple[str, str]]:
    """Names of what belongs to each component of the outputs, and where it lies."""
    length = len(kind.streams) * form.out_dim
    return [
        (f"{name}{number}_{k}", f"atom * {length} + {stream * form.out_dim + path.out + k * block.channels} + c")
        for stream, name in enumerate(kind.streams)
        for number, path in enumerate(block.paths)
        for k in range(path.n_out)
    ]


def _write_before_edges(write: _Writer, form: Form, block: FormBlock, kind: Kind) -> None:
    """Sums begin at zero; cotangents of the atom's outputs are read once."""
    for name, where in _outputs(form, block, kind):
        if kind.backward:
            _load(write, block, name, f"g + {where}")
        else:
            write(f"{name} = tl.zeros([{block.tile}], x.dtype.element_ty)")


def _write_loads(write: _Writer, form: Form, block: FormBlock, kind: Kind) -> None:
    write("atom_in = tl.load(source + edge)")
    for prefix, row in (("", 0), ("d", 1))[: kind.rows]:
        for i in range(block.n_in):
            column = row * form.in_dim + block.features + i * block.channels
            _load(write, block, f"{prefix}x{i}", f"x + atom_in * {kind.rows * form.in_dim} + {column} + c")
        for j in block.harmonics:
            line = f"edge * {kind.rows * form.n_harmonics} + {row * form.n_harmonics + j}"
            write(f"{prefix}y{j} = tl.load(y + {line})")
    write("at = tl.load(row + edge)")
    if kind.table:
        _write_place(write, kind)
    for number, path in enumerate(block.paths):
        if kind.table:
            for q in range(4):
                _load(write, block, f"c{q}", f"w + (at * 4 + {q}) * {form.n_weights} + {path.weight} + c")
            write(f"w{number} = c0 + u * (c1 + u * (c2 + u * c3))")
            if _needs_slope(kind):
                slope = "c1 + u * (2.0 * c2 + 3.0 * u * c3)"
                write(f"dw{number} = du * ({slope})" if kind.dual else f"dw{number} = {slope}")
            continue
        for prefix, row in (("", 0), ("d", 1))[: kind.rows]:
            line = f"at * {kind.rows * form.n_weights} + {row * form.n_weights + path.weight} + c"
            _load(write, block, f"{prefix}w{number}", f"w + {line}")


def _needs_slope(kind: Kind) -> bool:
    return kind.dual or (kind.backward and kind.geometry)


def _write_place(write: _Writer, kind: Kind) -> None:
    """u: place of the edge in its interval; du: its tangent."""
    write(f"u = tl.load(place + edge * {kind.rows})")
    if kind.dual:
        write("du = tl.load(place + edge * 2 + 1)")


def _write_path(write: _Writer, form: Form, block: FormBlock, kind: Kind, number: int, path: FormPath) -> None:
    m = _write_couplings(write, path, "m", "y")
    dm = _write_couplings(write, path, "n", "dy") if kind.dual else {}
    w, dw = f"w{number}", f"dw{number}"
    if not kind.backward or kind.geometry:
        for i in range(block.n_in):
            write(f"a{i} = {w} * x{i}")
            if kind.dual:
                write(f"e{i} = {w} * dx{i} + {dw} * x{i}")
    if not kind.backward:
        for k in range(path.n_out):
            sources = [i for i in range(block.n_in) if (i, k) in path.terms]
            if kind.value:
                write.add(f"o{number}_{k}", [f"a{i} * {m[i, k]}" for i in sources], to=True)
            if kind.dual:
                moved = [f"e{i} * {m[i, k]} + a{i} * {dm[i, k]}" for i in sources]
                write.add(f"p{number}_{k}", moved, to=True)
        return
    _write_path_backward(write, form, block, kind, number, path, m, dm)


def _write_couplings(write: _Writer, path: FormPath, name: str, harmonic: str) -> dict[tuple[int, int], str]:
    """Names of M_ik (or of its tangent), as scalars; a lone harmonic with coefficient one goes by its own name."""
    names = {}
    for (i, k), terms in path.terms.items():
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
    w, dw, first = f"w{number}", f"dw{number}", number == 0
    components = range(block.n_in)
    targets = {i: [k for k in range(path.n_out) if (i, k) in path.terms] for i in components}
    for i in components:
        back = [f"{m[i, k]} * o{number}_{k}" for k in targets[i]] if kind.value else []
        if not kind.dual:
            write.add(f"t{i}", back)
            write.add(f"tx{i}", [f"{w} * t{i}"], to=not first)
            continue
        write.add(f"s{i}", [*back, *(f"{dm[i, k]} * p{number}_{k}" for k in targets[i])])
        write.add(f"u{i}", [f"{m[i, k]} * p{number}_{k}" for k in targets[i]])
        write.add(f"tx{i}", [f"{w} * s{i} + {dw} * u{i}"], to=not first)
        write.add(f"td{i}", [f"{w} * u{i}"], to=not first)
    if kind.weights or (kind.table and kind.geometry):
        if kind.dual:
            write.add("tw", [f"dx{i} * u{i} + x{i} * s{i}" for i in components])
            write.add("tv", [f"x{i} * u{i}" for i in components])
        else:
            write.add("tw", [f"x{i} * t{i}" for i in components])
    if kind.weights:
        for name, row in (("tw", 0), ("tv", 1))[: kind.rows]:
            line = f"edge * {kind.rows * form.n_weights} + {row * form.n_weights + path.weight} + c"
            _store(write, block, f"to_w + {line}", name)
    if kind.geometry:
        _write_geometry(write, block, kind, number, path)


def _write_geometry(write: _Writer, block: FormBlock, kind: Kind, number: int, path: FormPath) -> None:
    """Cotangents of harmonics, and of the place in the table, are sums over channels, made when all paths are through."""
    seen = {j for earlier in block.paths[:number] for terms in earlier.terms.values() for _, j in terms}
    for (i, k), terms in path.terms.items():
        parts = [f"a{i} * o{number}_{k}"] if kind.value else []
        if kind.dual:
            parts.append(f"e{i} * p{number}_{k}")
            write(f"zd = a{i} * p{number}_{k}")
        write(f"z = {' + '.join(parts)}")
        for value, j in terms:
            write.add(f"ty{j}", [f"{value!r} * z"], to=j in seen)
            if kind.dual:
                write.add(f"tz{j}", [f"{value!r} * zd"], to=j in seen)
            seen.add(j)
    if kind.table and not kind.dual:
        write.add("tp", [f"tw * dw{number}"], to=number > 0)


def _write_cotangents(write: _Writer, form: Form, block: FormBlock, kind: Kind) -> None:
    for name, row in (("tx", 0), ("td", 1))[: kind.rows]:
        for i in range(block.n_in):
            column = row * form.in_dim + block.features + i * block.channels
            _store(write, block, f"to_x + edge * {kind.rows * form.in_dim} + {column} + c", f"{name}{i}")
    if not kind.geometry:
        return
    columns = form.n_harmonics + (1 if kind.table else 0)
    used = set(block.harmonics)
    write(f"line = (chunk.to(tl.int64) * n_edges + edge) * {kind.rows * columns}")
    for name, row in (("ty", 0), ("tz", 1))[: kind.rows]:
        for j in range(form.n_harmonics):
            value = f"tl.sum({name}{j}, 0)" if j in used else "0.0"
            write(f"tl.store(to_y + line + {row * columns + j}, {value})")
    if kind.table:
        write(f"tl.store(to_y + line + {form.n_harmonics}, tl.sum(tp, 0))")

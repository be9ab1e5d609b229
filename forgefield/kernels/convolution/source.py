"""Generates Triton code for the convolution and its derivatives, all from one description of the trilinear form.

One program is one warp: it processes one atom and up to 128 channels of one source block, loops over the atom's edges and
keeps sums in registers. Harmonics are scalars there, Clebsch-Gordan coefficients are literals. Nothing is added atomically:
contributions to the source of an edge are written for every edge and summed afterwards, in a fixed order.

With a prime for a tangent and M_ik = sum_j C_ijk y_j, an edge adds
    o = w x M    and    p = (w x' + w' x) M + w x M'
to the output and its tangent. Given cotangents o and p of these, with s = M o + M' p and u = M p,
    to_x = w s + w' u,    to_w = x' u + x s,    to_w' = x u.
The cotangent of x' would be w u, which is what the backward pass of the values gives for cotangents p. A training has run
that pass already, for the forces, so it is not computed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isqrt

from forgefield.kernels.convolution.form import ARGUMENTS, Form, FormBlock, FormPath, Kind
from forgefield.kernels.radial.packing import HALF, MASK
from forgefield.ops.harmonics import lowering_terms

SEPARATE = 4
"""With at least this many blocks each is compiled as a separate function: the kernel is slightly slower and compiles several
times faster."""
TOGETHER = 16
"""This number of harmonics, which are those up to degree 3, is read at once and split; fewer are as fast one by one, and other
counts are not powers of two."""


class _Writer:
    """Lines of code at an indentation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def __call__(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def add(self, name: str, terms: Iterable[str], *, to: bool = False) -> None:
        """name = sum of the terms; with `to` name += sum, or no line if there are no terms."""
        text = " + ".join(terms).replace("+ -", "- ")
        if text or not to:
            self(f"{name} {'+=' if to else '='} {text or '0.0'}")


def write_kernel(form: Form, kind: Kind) -> str:
    """Source of a module with one kernel, `kind.name`, whose grid is (n_atoms * kind.shares * form.n_chunks,)."""
    write = _Writer()
    write("import triton")
    write("import triton.language as tl")
    for block in form.blocks:
        write("")
        write("")
        _write_block(write, form, block, kind)
    write("")
    write("")
    write(
        "@triton.jit(do_not_specialize=['n_atoms', 'n_edges', 'first_edge', 'end_edge'], "
        "do_not_specialize_on_alignment=['to_y'])"
    )
    write(f"def {kind.name}({ARGUMENTS.signature}):")
    write.depth = 1
    write("program = tl.program_id(0)")
    write("n_atoms = tl.cast(n_atoms, tl.int64)")
    _write_numbers(write, form, kind)
    for number, block in enumerate(form.blocks):
        if len(form.blocks) > 1:
            last = number == len(form.blocks) - 1
            branch = "if" if number == 0 else "elif"
            write("else:" if last else f"{branch} chunk < {block.chunk + block.n_chunks}:")
            write.depth = 2
        write(f"block_{block.chunk}(atom, chunk, share, {ARGUMENTS.signature})")
        write.depth = 1
    return "\n".join(write.lines) + "\n"


def _write_numbers(write: _Writer, form: Form, kind: Kind) -> None:
    """Atom, chunk of channels and share of edges of a program. In the pass of values, programs that run at the same time have
    the same chunk, so that they read the same part of the table; in the others they have the same atom, of which more is read
    or written."""
    if kind.pass_name == "values" and kind.shares == 1:
        write("atom = program % n_atoms")
        write("chunk = (program // n_atoms).to(tl.int32)")
        write("share = 0")
        return
    first = f" + {form.blocks[0].chunk}" if form.blocks[0].chunk else ""
    write(f"atom = (program // {kind.shares * form.n_chunks}).to(tl.int64)")
    write(f"chunk = program % {form.n_chunks}{first}")
    write(f"share = (program // {form.n_chunks}) % {kind.shares}" if kind.shares > 1 else "share = 0")


def _write_block(write: _Writer, form: Form, block: FormBlock, kind: Kind) -> None:
    write("@triton.jit(noinline=True)" if len(form.blocks) >= SEPARATE else "@triton.jit")
    write(f"def block_{block.chunk}(atom, chunk, share, {ARGUMENTS.signature}):")
    write.depth = 1
    write("begin = tl.load(pointers + atom)")
    write("end = tl.load(pointers + atom + 1)")
    if kind.shares > 1:
        write(f"length = (end - begin + {kind.shares - 1}) // {kind.shares}")
        write("begin += share * length")
        write("end = tl.minimum(begin + length, end)")
    if kind.ranged:
        write("begin = tl.maximum(begin, first_edge)")
        write("end = tl.minimum(end, end_edge)")
    write(f"c = (chunk - {block.chunk}) * {block.tile} + tl.arange(0, {block.tile})")
    if _masked(block):
        write(f"inside = c < {block.channels}")
    write(f"x_values = x + {block.start if block.row else f'n_atoms * {2 * block.start}'} + c")
    if kind.moves:
        write(f"x_tangents = x_values + n_atoms * {block.row or block.dim}")
    for name, where in _outputs(block, kind):
        if kind.backward:
            _load(write, block, name, f"g + {where}")
        else:
            write(f"{name} = tl.zeros([{block.tile}], y.dtype.element_ty)")
    _write_edges(write, form, block, kind)
    if not kind.backward:
        if kind.shares > 1:
            write(f"out += share * n_atoms * {2 * form.outputs.dim}")
        for name, where in _outputs(block, kind):
            _store(write, block, f"out + {where}", name)
    write.depth = 0


def _write_edges(write: _Writer, form: Form, block: FormBlock, kind: Kind) -> None:
    """The loop over edges. Indices are read one edge ahead, since other reads depend on them; all reads precede computation and
    writes, since the compiler does not move a read before a write."""
    _write_next(write, "begin")
    write("for edge in range(begin, end):")
    write.depth = 2
    write("atom_in, at = next_in.to(tl.int64), next_at.to(tl.int64)")
    _write_next(write, "edge + 1")
    _write_loads(write, form, block, kind)
    _write_weights(write, block, kind)
    for number, path in enumerate(block.paths):
        _write_path(write, form, block, kind, number, path)
    if kind.backward:
        _write_cotangents(write, form, block, kind)
    write.depth = 1


def _write_next(write: _Writer, edge: str) -> None:
    for name, indices in (("next_in", "source"), ("next_at", "row")):
        write(f"{name} = tl.load({indices} + {edge}, mask={edge} < end, other=0)")


def _masked(block: FormBlock) -> bool:
    return block.channels % block.tile != 0


def _load(
    write: _Writer, block: FormBlock, name: str, where: str, *, narrow: bool = False, again: bool = False
) -> None:
    """again: it is read many times and should stay in the cache."""
    more = ", mask=inside, other=0.0" if _masked(block) else ""
    more += ", eviction_policy='evict_last'" if again else ""
    write(f"{name} = tl.load({where}{more}){'.to(tl.float32)' if narrow else ''}")


def _store(write: _Writer, block: FormBlock, where: str, value: str, *, once: bool = False) -> None:
    """once: it is large and not read again soon, so it need not stay in the cache."""
    more = ", mask=inside" if _masked(block) else ""
    more += ", eviction_policy='evict_first'" if once else ""
    write(f"tl.store({where}, {value}{more})")


def _outputs(block: FormBlock, kind: Kind) -> list[tuple[str, str]]:
    """Variable of each component of the outputs, and its address."""
    outputs = []
    for row, (name, place) in enumerate(kind.output_slots):
        for number, path in enumerate(block.paths):
            dim = path.n_out * path.width
            base = f"n_atoms * {2 * path.start + place * dim} + atom * {dim}"
            if path.row:
                base = f"{path.start} + (n_atoms * {row} + atom) * {path.row}"
            outputs += [
                (f"{name}{number}_{k}", f"({base} + {k * path.width + path.column} + c)") for k in range(path.n_out)
            ]
    return outputs


def _write_loads(write: _Writer, form: Form, block: FormBlock, kind: Kind) -> None:
    for prefix, base in (("", "x_values"), ("d", "x_tangents"))[: 2 if kind.moves else 1]:
        for i in range(block.n_in):
            where = f"{base} + atom_in * {block.row or block.dim} + {i * block.channels}"
            _load(write, block, f"{prefix}x{i}", where, narrow=kind.narrow)
    for prefix in ("", "d")[: 2 if kind.dual else 1]:
        _write_harmonics(write, form, f"{prefix}y", _read_harmonics(block, kind))
    if kind.table:
        _write_place(write, kind)
    rows = 3 if kind.packed else 4
    for number, path in enumerate(block.paths):
        if kind.table:
            for q in range(rows):
                where = f"w + (at * {rows} + {q}) * {form.n_weights} + {path.weight} + c"
                _load(write, block, f"c{number}_{q}", where, narrow=kind.narrow, again=kind.backward)
            continue
        for prefix in ("", "d")[: 2 if kind.dual else 1]:
            _load(write, block, f"{prefix}w{number}", f"{prefix}w + at * {form.n_weights} + {path.weight} + c")


def _write_place(write: _Writer, kind: Kind) -> None:
    """Factors of the coefficients, for weights and for their tangents or derivatives; a packed c3 counts units."""
    write("t = tl.load(u + edge)")
    write(f"t_last = {'t * tl.load(unit + at)' if kind.packed else 't'}")
    if kind.dual:
        write("dt = tl.load(du + edge)")
        write("t2, t3 = 2.0 * dt * t, 3.0 * dt * t * t_last")
    elif kind.geometry:
        write("t2, t3 = 2.0 * t, 3.0 * t * t_last")


def _write_harmonics(write: _Writer, form: Form, name: str, indices: list[int]) -> None:
    n = form.n_harmonics
    if n != TOGETHER:
        for j in indices:
            write(f"{name}{j} = tl.load({name} + edge * {n} + {j})")
    elif indices:
        write(f"of_{name} = tl.load({name} + edge * {n} + tl.arange(0, {n}))")
        _write_halves(write, f"of_{name}", name, n, 0, 1)


def _write_halves(write: _Writer, tensor: str, name: str, size: int, first: int, step: int) -> None:
    """A tensor of the elements first, first + step and so on, halved until each is a scalar variable."""
    if size == 2:
        write(f"{name}{first}, {name}{first + step} = tl.split({tensor})")
        return
    write(f"{tensor}0, {tensor}1 = tl.split(tl.reshape({tensor}, [{size // 2}, 2]))")
    _write_halves(write, f"{tensor}0", name, size // 2, first, 2 * step)
    _write_halves(write, f"{tensor}1", name, size // 2, first + step, 2 * step)


def _write_weights(write: _Writer, block: FormBlock, kind: Kind) -> None:
    """Weights from the coefficients in the table, and their tangents or, in the pass of the forces, their derivatives."""
    for number in range(len(block.paths) if kind.table else 0):
        c0, c1, c2, c3 = (f"c{number}_{q}" for q in range(4))
        if kind.packed:  # as the last bits of 2^23
            bits = f"({c2}.to(tl.int32, bitcast=True) & {MASK}) | 0x4B000000"
            write(f"{c3} = ({bits}).to(tl.float32, bitcast=True) - {2.0**23 + HALF!r}")
        write(f"w{number} = {c0} + t * ({c1} + t * ({c2} + t_last * {c3}))")
        if kind.dual or kind.geometry:
            write(f"dw{number} = {'dt * ' if kind.dual else ''}{c1} + t2 * {c2} + t3 * {c3}")


def _write_path(write: _Writer, form: Form, block: FormBlock, kind: Kind, number: int, path: FormPath) -> None:
    m = _write_couplings(write, path, "m", "y")
    dm = _write_couplings(write, path, "n", "dy") if kind.dual else {}
    w, dw = f"w{number}", f"dw{number}"
    if not kind.backward or kind.geometry:
        for i in range(block.n_in):
            write(f"a{i} = {w} * x{i}")
            if kind.dual:
                write(f"e{i} = {w} * dx{i} + {dw} * x{i}" if kind.moves else f"e{i} = {dw} * x{i}")
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
    """Names of M_ik (or of its tangent), as scalars; a single harmonic with coefficient one is used directly.

    The first harmonic is one everywhere: it is not read and has no tangent.
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
    w, dw = f"w{number}", f"dw{number}"
    components = range(block.n_in)
    for i in components:
        targets = [k for k in range(path.n_out) if (i, k) in path.terms]
        back = [f"{m[i, k]} * o{number}_{k}" for k in targets]
        if kind.dual:
            back += [f"{dm[i, k]} * p{number}_{k}" for k in targets if (i, k) in dm]
            write.add(f"v{i}", [f"{m[i, k]} * p{number}_{k}" for k in targets])
        write.add(f"s{i}", back)
        if kind.features:
            before = [f"tx{i}"] if number > 0 else []  # first in the sum, so that every term is one multiply-add
            write.add(f"tx{i}", [*before, f"{w} * s{i} + {dw} * v{i}" if kind.dual else f"{w} * s{i}"])
    write.add("tw", [f"dx{i} * v{i} + x{i} * s{i}" if kind.moves else f"x{i} * s{i}" for i in components])
    if kind.dual:
        write.add("td", [f"x{i} * v{i}" for i in components])
    if kind.weights:
        length, first = form.n_weights, path.weight
        if kind.apart:
            length, first = len(block.columns), number * block.channels
        line = f"edge * {length} + {first} + c"
        _store(write, block, f"to_w + {line}", "tw", once=True)
        if kind.dual:
            _store(write, block, f"to_dw + {line}", "td", once=True)
    if kind.geometry:
        _write_geometry(write, block, kind, number, path)


def _write_geometry(write: _Writer, block: FormBlock, kind: Kind, number: int, path: FormPath) -> None:
    """Cotangents of harmonics and of the position in the table are summed over channels after the last path."""
    seen = {j for earlier in block.paths[:number] for terms in earlier.terms.values() for _, j in terms}
    for products, terms in _products_of_couplings(path, number):
        write.add("z", products)
        for value, j in terms:
            write.add(f"ty{j}", [f"{value!r} * z"], to=j in seen)
            seen.add(j)
    if kind.table:
        write.add("tp", [f"tw * dw{number}"], to=number > 0)


def _products_of_couplings(path: FormPath, number: int) -> list[tuple[list[str], tuple[tuple[float, int], ...]]]:
    """For each M_ik except those of the first harmonic, the products whose sum is its cotangent. Couplings that are equal up to
    their sign are merged."""
    by_coupling: dict[tuple[tuple[float, int], ...], tuple[list[str], tuple[tuple[float, int], ...]]] = {}
    for (i, k), terms in path.terms.items():
        if terms[0][1] == 0:
            continue
        key, opposite = (tuple((sign * round(value, 9), j) for value, j in terms) for sign in (1, -1))
        if opposite in by_coupling:
            by_coupling[opposite][0].append(f"-a{i} * o{number}_{k}")
        else:
            by_coupling.setdefault(key, ([], terms))[0].append(f"a{i} * o{number}_{k}")
    return list(by_coupling.values())


def _write_cotangents(write: _Writer, form: Form, block: FormBlock, kind: Kind) -> None:
    if kind.features:
        length, first = (block.dim, 0) if kind.apart else (form.features.dim, block.start)
        row = "(edge - first_edge)" if kind.ranged else "edge"
        for i in range(block.n_in):
            line = f"{row} * {length} + {first + i * block.channels} + c"
            _store(write, block, f"to_x + {line}", f"tx{i}", once=True)
    if not kind.geometry:
        return
    write(f"line = (chunk.to(tl.int64) * n_edges + edge) * {4 if kind.table else form.n_harmonics}")
    if kind.table:
        _write_direction(write, block)
        write("tl.store(to_y + line + 3, tl.sum(tp, 0))")
        return
    used = set(block.harmonics)
    for j in range(form.n_harmonics):
        write(f"tl.store(to_y + line + {j}, {f'tl.sum(ty{j}, 0)' if j in used else '0.0'})")


def _write_direction(write: _Writer, block: FormBlock) -> None:
    """Cotangents of the direction from those of harmonics, before the sum over channels: that takes three sums instead of one
    for each harmonic."""
    for direction in range(3):
        terms = []
        for j in block.harmonics:
            degree = isqrt(j)
            lowered = lowering_terms(degree)[j - degree**2, direction]
            if lowered and degree == 1:  # of the first harmonic, which is one
                terms.append(f"{lowered[0][1]!r} * ty{j}")
            elif lowered:
                write.add(f"q{j}_{direction}", [f"{value!r} * y{(degree - 1) ** 2 + i}" for i, value in lowered])
                terms.append(f"q{j}_{direction} * ty{j}")
        write.add(f"tu{direction}", terms)
        write(f"tl.store(to_y + line + {direction}, {f'tl.sum(tu{direction}, 0)' if terms else '0.0'})")


def _read_harmonics(block: FormBlock, kind: Kind) -> list[int]:
    """Indices of the harmonics that the programs of a block read; for cotangents of directions also those of the next lower
    degree."""
    indices = set(block.harmonics)
    if kind.geometry and kind.table:
        for degree in {isqrt(j) for j in block.harmonics} - {1}:
            indices |= set(range((degree - 1) ** 2, degree**2))
    return sorted(indices)

"""Generates Triton code for the symmetric contraction: the statements of `program.py` on the channels of one atom.

A thread computes one channel: everything between the features it reads and the results it writes is in registers, so that
memory is read and written once. Clebsch-Gordan coefficients are literals. The last pass processes atoms sorted by species,
several in a program, and sums the cotangents of the weights of each species in registers; `add_by_species` sums those of all
programs, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from forgefield.kernels.contraction.program import Statement, program
from forgefield.kernels.core.generation import ArgumentTable
from forgefield.ops.symmetric_contraction import ContractionPlan


@cache
def arguments(n_inputs: int, n_outputs: int) -> ArgumentTable:
    """Arguments of all kernels for these numbers of irreps; those of irreps end in their number."""
    table = {f"a_{b}": "(n_atoms, 2l + 1, channels), features of an irrep" for b in range(n_inputs)}
    table |= {f"da_{b}": "tangents of a" for b in range(n_inputs)}
    table |= {f"to_{b}": "cotangents of a" for b in range(n_inputs)}
    table |= {f"b_{b}": "(n_atoms, 2l + 1, channels), results of an irrep, or their tangents" for b in range(n_outputs)}
    table |= {f"g_{b}": "cotangents of b; in the last pass those of its tangents" for b in range(n_outputs)}
    table |= {f"dg_{b}": "in the last pass, cotangents of b" for b in range(n_outputs)}
    return ArgumentTable(
        **table,
        weights="(n_rows, n_weights, channels), a row for each species, or one for all",
        species="(n_atoms,), species of each atom; in the last pass of the atoms in `order`",
        order="(n_atoms,), atoms sorted by species",
        pointers="(n_species + 1,), first atom of each species in `order`",
        parts="(n_programs + n_species - 1, n_weights, channels), cotangents of weights",
        n_atoms="number of atoms",
        several="atoms of a program in the last pass",
    )


def used(plan: ContractionPlan, kind: str) -> tuple[str, ...]:
    """Names of the arguments that the kernel of a pass uses."""
    prefixes = {"values": "a b", "forces": "a g to", "tangents": "a da b", "back": "a da g dg to"}[kind].split()
    names = [
        f"{prefix}_{b}"
        for prefix in prefixes
        for b in range(len(plan.outputs if prefix in ("b", "g", "dg") else plan.inputs))
    ]
    sums = ("order", "pointers", "parts", "several") if kind == "back" else ()
    return (*names, "weights", "species", "n_atoms", *sums)


def write_kernel(plan: ContractionPlan, kind: str, channels: int, *, by_species: bool) -> str:
    """Source of a module with the kernel `contraction_{kind}`. by_species: there is a row of weights for each species."""
    tile = tile_of(channels)
    chunks = -(-channels // tile)
    lines = [
        f"program = tl.program_id(0).to(tl.int64) // {chunks}",
        f"c = (tl.program_id(0) % {chunks}) * {tile} + tl.arange(0, {tile})",
    ]
    if channels % tile:
        lines.append(f"inside = c < {channels}")
    write = _write_back if kind == "back" else _write_pass
    lines += write(plan, kind, channels, by_species)
    signature = arguments(len(plan.inputs), len(plan.outputs)).signature
    head = ["import triton", "import triton.language as tl", "", ""]
    head += ["@triton.jit(do_not_specialize=['n_atoms', 'several'])", f"def contraction_{kind}({signature}):"]
    return "\n".join([*head, *(f"    {line}" for line in lines)]) + "\n"


def tile_of(channels: int) -> int:
    """Channels of one program, one for each thread."""
    return max(32, min(128, 1 << (channels - 1).bit_length()))


def _write_pass(plan: ContractionPlan, kind: str, channels: int, by_species: bool) -> Iterator[str]:
    statements = program(plan, kind)
    yield "atom = program"
    yield f"row = {'tl.load(species + atom).to(tl.int64)' if by_species else '0'}"
    yield from _read_weights(plan, statements, channels)
    yield from _read_features(plan, kind, statements, channels)
    yield from _compute(statements)
    if kind == "forces":
        yield from _write(_named(plan.inputs, "to", "ta"), statements, channels)
    else:
        outputs = [output.irrep for output in plan.outputs]
        yield from _write(_named(outputs, "b", "b" if kind == "values" else "db"), statements, channels)


def _write_back(plan: ContractionPlan, kind: str, channels: int, by_species: bool) -> Iterator[str]:
    """The loop over the atoms of a program, species by species. Sums of a program p for a species s are row p + s of `parts`:
    both do not decrease from one program to the next, so that no two sums have the same row, and those of a species follow
    each other."""
    statements = program(plan, kind)
    yield "begin = program * several"
    yield "end = tl.minimum(begin + several, n_atoms)"
    yield "first = tl.load(species + begin).to(tl.int64)" if by_species else "first = 0"
    yield "last = tl.load(species + end - 1).to(tl.int64)" if by_species else "last = 0"
    yield "for row in range(first, last + 1):"
    loop = []
    if by_species:
        loop += ["from_atom = tl.maximum(begin, tl.load(pointers + row).to(tl.int64))"]
        loop += ["to_atom = tl.minimum(end, tl.load(pointers + row + 1).to(tl.int64))"]
    else:
        loop += ["from_atom, to_atom = begin, end"]
    loop += _read_weights(plan, statements, channels)
    tile = tile_of(channels)
    loop += [f"sum{k} = tl.zeros([{tile}], weights.dtype.element_ty)" for k in range(plan.n_weights)]
    loop.append("for position in range(from_atom, to_atom):")
    body = [f"atom = {'tl.load(order + position).to(tl.int64)' if by_species else 'position'}"]
    body += _read_features(plan, kind, statements, channels)
    body += _compute(statements)
    body += _write(_named(plan.inputs, "to", "dta"), statements, channels)
    body += [f"sum{k} += dtw{k}" for k in range(plan.n_weights) if _has_terms(statements, f"dtw{k}")]
    loop += [f"    {line}" for line in body]
    for k in range(plan.n_weights):
        where = f"parts + ((program + row) * {plan.n_weights} + {k}) * {channels} + c"
        loop.append(f"tl.store({where}, sum{k}{_mask(channels)})")
    yield from (f"    {line}" for line in loop)


def _mask(channels: int) -> str:
    return ", mask=inside" if channels % tile_of(channels) else ""


def _read_weights(plan: ContractionPlan, statements: Iterable[Statement], channels: int) -> Iterator[str]:
    read = _names(statements)
    for k in range(plan.n_weights):
        if f"w{k}" in read:
            where = f"weights + (row * {plan.n_weights} + {k}) * {channels} + c"
            yield f"w{k} = tl.load({where}{_other(channels)})"


def _read_features(plan: ContractionPlan, kind: str, statements: Iterable[Statement], channels: int) -> Iterator[str]:
    read = _names(statements)
    outputs = [output.irrep for output in plan.outputs]
    for irreps, prefix in ((plan.inputs, "a"), (plan.inputs, "da"), (outputs, "g"), (outputs, "dg")):
        for argument, dim, component, name in _named(irreps, prefix, prefix):
            if name in read:
                yield f"{name} = tl.load({_place(argument, dim, component, channels)}{_other(channels)})"


def _other(channels: int) -> str:
    return ", mask=inside, other=0.0" if channels % tile_of(channels) else ""


def _named(irreps: Iterable[Any], argument: str, prefix: str) -> list[tuple[str, int, int, str]]:
    """For each component of each irrep the argument that holds it, the irrep's dimension, the component's number there, and the
    name of its value."""
    components = [(b, irrep.dim, k) for b, irrep in enumerate(irreps) for k in range(irrep.dim)]
    return [(f"{argument}_{b}", dim, k, f"{prefix}{number}") for number, (b, dim, k) in enumerate(components)]


def _place(argument: str, dim: int, component: int, channels: int) -> str:
    return f"{argument} + (atom * {dim} + {component}) * {channels} + c"


def _names(statements: Iterable[Statement]) -> set[str]:
    return {name for statement in statements for _, names in statement.terms for name in names}


def _has_terms(statements: Iterable[Statement], name: str) -> bool:
    return any(statement.name == name and statement.terms for statement in statements)


def _compute(statements: Iterable[Statement]) -> Iterator[str]:
    for name, terms in statements:
        if terms:
            yield f"{name} = {_sum(terms)}"


def _sum(terms: Iterable[tuple[float, tuple[str, ...]]]) -> str:
    texts = []
    for c, names in terms:
        product = " * ".join(names)
        texts.append(product if c == 1.0 else f"-{product}" if c == -1.0 else f"{c!r} * {product}")
    return " + ".join(texts).replace("+ -", "- ")


def _write(
    places: Iterable[tuple[str, int, int, str]], statements: Iterable[Statement], channels: int
) -> Iterator[str]:
    """Every element is written, zero where nothing contributes."""
    written = {statement.name for statement in statements if statement.terms}
    mask = _mask(channels)
    for argument, dim, component, name in places:
        value = name if name in written else f"tl.zeros([{tile_of(channels)}], weights.dtype.element_ty)"
        yield f"tl.store({_place(argument, dim, component, channels)}, {value}{mask})"


@cache
def add_by_species() -> Any:
    """The kernel that sums the parts of each species."""
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["n_atoms", "several"])
    def add_parts(
        parts,
        pointers,
        out,
        n_atoms,
        several,
        columns,
        is_sorted: tl.constexpr,
        rows: tl.constexpr,
        block: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        begin = tl.zeros([], tl.int64)
        end = begin + n_atoms
        if is_sorted:
            begin = tl.load(pointers + row).to(tl.int64)
            end = tl.load(pointers + row + 1).to(tl.int64)
        c = tl.program_id(1) * block + tl.arange(0, block)
        inside = c < columns
        first = begin // several + row
        last = tl.where(end > begin, (end - 1) // several + row + 1, first)
        total = tl.zeros([block], out.dtype.element_ty)
        for start in range(first, last, rows):
            part = start + tl.arange(0, rows)
            where = parts + part[:, None] * columns + c[None, :]
            total += tl.sum(tl.load(where, mask=(part < last)[:, None] & inside[None, :], other=0.0), 0)
        tl.store(out + row * columns + c, total, mask=inside)

    return add_parts

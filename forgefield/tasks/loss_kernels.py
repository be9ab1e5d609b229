"""The loss of energies, forces and stress, its slopes in them and all errors by two generated kernels, where plain operations
take a hundred.

The first sums what each program has of its rows; the second adds these parts in a fixed order and, now that the denominators
are known, writes the slopes. What they compute is written in `task.py`, `losses.py` and `metrics.py`, which they are compared
with; other losses and targets than they know are computed there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forgefield.kernels.core.availability import use_kernels
from forgefield.kernels.core.modules import module_from
from forgefield.ops.graph import is_traced
from forgefield.tasks.losses import ElementLoss, huber, mae, mse
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.task import Target, Task

ROWS = 128
"""Frames or atoms that one program takes."""
COLUMNS = {"energy": 1, "forces": 3, "stress": 9, "virial": 9}
"""Numbers of a frame or an atom."""


class LossAndSlopes(NamedTuple):
    """sums: (2, n_targets), sums and counts of the loss. errors: (n_rows, 3), as `ErrorMetrics.measure` gives them. slopes: of
    the loss in each output."""

    loss: Tensor
    sums: Tensor
    errors: Tensor
    slopes: dict[str, Tensor]


@dataclass(frozen=True)
class _Term:
    """What the code for a target depends on."""

    quantity: str
    loss: str
    delta: float
    per_atom: bool | str
    weighs_species: bool
    n_species: int

    @property
    def columns(self) -> int:
        return COLUMNS[self.quantity]

    @property
    def of_atoms(self) -> bool:
        return self.quantity == "forces"

    @property
    def n_errors(self) -> int:
        """Rows of errors: per atom and in total for energies, of all atoms and of each species for forces."""
        return {"energy": 2, "forces": 1 + self.n_species}.get(self.quantity, 1)


def kernels_know(task: Task, errors: ErrorMetrics, batch: dict[str, Tensor]) -> bool:
    """Whether kernels are in use and know every target of the task, and the errors are those of its targets."""
    weight = batch["weight"]
    if is_traced(weight) or not use_kernels(weight) or errors.targets != task.names:
        return False
    labels = [target.label for target in task.targets]
    if len(set(labels)) < len(labels):  # slopes of two targets in one output would have to be added
        return False
    return all(_is_known(target, batch) for target in task.targets)


def _is_known(target: Target, batch: dict[str, Tensor]) -> bool:
    plain = target.branch is None and target.classes is None
    return (
        plain
        and target.name in COLUMNS
        and _name(target.loss) is not None
        and batch[target.label].dtype == torch.float64
    )


def _name(loss: ElementLoss) -> tuple[str, float] | None:
    """Name and delta of a loss that the kernels know."""
    if isinstance(loss, partial) and loss.func is huber:
        return "huber", float(loss.keywords["delta"])
    return next(((name, 0.0) for name, known in (("mse", mse), ("mae", mae)) if loss is known), None)


def loss_by_kernels(
    task: Task,
    errors: ErrorMetrics,
    outputs: dict[str, Tensor],
    batch: dict[str, Tensor],
    target_weights: Tensor,
    denominators: Tensor | None,
) -> LossAndSlopes:
    """target_weights, denominators: (n_targets,), see `StepFunction.differentiate`."""
    weight = batch["weight"]
    n_frames, n_atoms = weight.shape[0], batch["species"].shape[0]
    terms = tuple(_term(target, len(errors.species)) for target in task.targets)
    n_targets, n_rows = len(terms), sum(term.n_errors for term in terms)
    n_programs = sum(-(-(n_atoms if term.of_atoms else n_frames) // ROWS) for term in terms)
    parts = weight.new_empty((n_programs, 2 + 3 * max(term.n_errors for term in terms)))
    out = weight.new_empty(1 + 2 * n_targets + 3 * n_rows)
    slopes = {target.label: torch.empty_like(batch[target.label]) for target in task.targets}
    by_species = task.species_weights_on(weight.device)
    given: list[Tensor] = []
    for target, known in zip(task.targets, by_species):
        rows = [outputs[target.label].contiguous(), batch[target.label].contiguous(), slopes[target.label]]
        given += [*rows, weight if known is None else known]
    given += [batch[name].contiguous() for name in ("weight", "frame", "species", "n_atoms", "cell")]
    given += [target_weights, weight if denominators is None else denominators, parts, out]
    add_up, finish = _kernels(terms, denominators is not None)
    if n_programs:
        add_up[(n_programs,)](*given, n_frames, n_atoms, num_warps=4)
    finish[(n_programs + 1,)](*given, n_frames, n_atoms, num_warps=4)
    sums, found = out[1:].split([2 * n_targets, 3 * n_rows])
    return LossAndSlopes(out[0], sums.view(2, n_targets), found.view(-1, 3), slopes)


def _term(target: Target, n_species: int) -> _Term:
    known = _name(target.loss)
    assert known is not None
    return _Term(target.quantity, *known, target.per_atom, target.species_weights is not None, n_species)


# ---- the code


@lru_cache(maxsize=64)
def _kernels(terms: tuple[_Term, ...], given_denominators: bool) -> tuple[Any, Any]:
    module = module_from(write_loss(terms, given_denominators))
    return module.add_up, module.finish


_HEAD = """import triton
import triton.language as tl


@triton.jit
def total(parts, begin, end, width: tl.constexpr, column: tl.constexpr):
    found = tl.zeros([64], tl.float64)
    for first in range(begin, end, 64):
        part = first + tl.arange(0, 64)
        found += tl.load(parts + part * width + column, mask=part < end, other=0.0)
    return tl.sum(found, 0)
"""


def write_loss(terms: Sequence[_Term], given_denominators: bool) -> str:
    """Source of a module with the kernels `add_up` and `finish`. given_denominators: they are not the sums of this batch."""
    names = [f"{what}{i}" for i in range(len(terms)) for what in ("output", "label", "slope", "of_species")]
    names += ["weight", "frames", "species", "sizes", "cell", "target_weights", "denominators", "parts", "out"]
    width = 2 + 3 * max(term.n_errors for term in terms)
    head = f"({', '.join(names)}, n_frames, n_atoms):"
    jit = "@triton.jit(do_not_specialize=['n_frames', 'n_atoms'])"
    add_up, finish = ["program = tl.program_id(0)", "end = 0"], ["program = tl.program_id(0)", "end = 0", "loss = 0.0"]
    row = 0
    for i, term in enumerate(terms):
        n_rows = "n_atoms" if term.of_atoms else "n_frames"
        bounds = ["begin = end", f"end = begin + ({n_rows} + {ROWS - 1}) // {ROWS}"]
        own = "if (program >= begin) & (program < end):"
        add_up += [*bounds, own, *_indented(_add_up(term, i, width, n_rows))]
        finish += [*bounds, f"divisor = {_divisor(i, width, given_denominators)}"]
        finish += ["divisor = tl.where(divisor > 0, divisor, 1.0)", f"share = tl.load(target_weights + {i}) / divisor"]
        finish += [own, *_indented(_slopes(term, i, n_rows))]
        finish += [f"loss += share * total(parts, begin, end, {width}, 0)"]
        last = "if program == tl.num_programs(0) - 1:"
        finish += [last, *_indented(_collect(term, i, row, len(terms), width))]
        row += term.n_errors
    finish += ["if program == tl.num_programs(0) - 1:", "    tl.store(out, loss)"]
    bodies = (
        f"{jit}\ndef {name}{head}\n" + "\n".join(_indented(lines))
        for name, lines in (("add_up", add_up), ("finish", finish))
    )
    return "\n\n".join([_HEAD, *bodies]) + "\n"


def _indented(lines: Sequence[str]) -> Iterator[str]:
    return (f"    {line}" for line in lines)


def _divisor(i: int, width: int, given: bool) -> str:
    return f"tl.load(denominators + {i})" if given else f"total(parts, begin, end, {width}, 1)"


def _rows(term: _Term, i: int, n_rows: str) -> list[str]:
    """Rows of a program, and what is the same for all numbers of a row."""
    lines = [
        f"row = (program - begin).to(tl.int64) * {ROWS} + tl.arange(0, {ROWS})",
        f"inside = row < {n_rows}",
        "frame = tl.load(frames + row, mask=inside, other=0)" if term.of_atoms else "frame = row",
        "w = tl.load(weight + frame, mask=inside, other=0.0)",
    ]
    if term.of_atoms:
        lines += ["kind = tl.load(species + row, mask=inside, other=-1)"]
        if term.weighs_species:
            lines += [f"w = w * tl.load(of_species{i} + kind, mask=inside, other=0.0)"]
    if term.quantity in ("energy", "virial"):
        lines += ["size = tl.load(sizes + row, mask=inside, other=1).to(tl.float64)"]
    if term.quantity == "virial":
        lines += [f"c{k} = tl.load(cell + row * 9 + {k}, mask=inside, other=0.0)" for k in range(9)]
        lines += ["volume = c0 * (c4 * c8 - c5 * c7) + c1 * (c5 * c6 - c3 * c8) + c2 * (c3 * c7 - c4 * c6)"]
        lines += ["volume = tl.abs(volume)"]
    return lines


def _factor(term: _Term) -> str | None:
    """What label and output are multiplied with."""
    size = {True: "size", "root": "tl.sqrt(size)", False: None}[term.per_atom]
    if term.quantity == "virial":
        return "-volume" if size is None else f"-volume / {size}"
    return None if size is None or term.quantity != "energy" else f"1.0 / {size}"


def _difference(term: _Term, i: int, column: int) -> list[str]:
    """Of one number of each row: whether it has a label, and how far off it is in units of the loss."""
    place = f"row * {term.columns} + {column}"
    lines = [
        f"p = tl.load(output{i} + {place}, mask=inside, other=0.0)",
        f"y = tl.load(label{i} + {place}, mask=inside, other=0.0)",
        "labelled = inside & (y == y)",
    ]
    difference = "p - y" if _factor(term) is None else "p * factor - y * factor"
    return [*lines, f"d = tl.where(labelled, {difference}, 0.0)"]


_LOSSES = {
    "mse": ("d * d", "2.0 * d"),
    "mae": ("tl.abs(d)", "tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, d))"),
    "huber": (
        "tl.where(tl.abs(d) < {delta}, 0.5 * d * d, {delta} * (tl.abs(d) - 0.5 * {delta}))",
        "tl.where(tl.abs(d) < {delta}, d, tl.where(d > 0, {delta}, tl.where(d < 0, -{delta}, d)))",
    ),
}
"""Of a difference d, its loss and that loss' slope."""


def _formula(term: _Term, order: int) -> str:
    return _LOSSES[term.loss][order].format(delta=repr(term.delta))


def _add_up(term: _Term, i: int, width: int, n_rows: str) -> list[str]:
    """Parts of a program: the loss' sum and count; of every row of errors, the sums of |e| and e^2 and a count."""
    lines = _rows(term, i, n_rows)
    factor = _factor(term)
    lines += [] if factor is None else [f"factor = {factor}"]
    lines += [f"{name} = tl.zeros([{ROWS}], tl.float64)" for name in ("sums", "counts", "size_1", "size_2", "known")]
    if term.quantity == "energy":
        lines += [f"{name} = tl.zeros([{ROWS}], tl.float64)" for name in ("each_1", "each_2")]
    for column in range(term.columns):
        lines += _difference(term, i, column)
        lines += [f"sums += tl.where(labelled, w * ({_formula(term, 0)}), 0.0)", "counts += tl.where(labelled, w, 0.0)"]
        lines += ["e = (p - y) * (volume / size)" if term.quantity == "virial" else "e = p - y"]
        lines += ["counts_here = inside & (e == e)", "e = tl.where(counts_here, e, 0.0)"]
        lines += ["size_1 += tl.abs(e)", "size_2 += e * e", "known += counts_here.to(tl.float64)"]
        if term.quantity == "energy":
            lines += ["each = e / size", "each_1 += tl.abs(each)", "each_2 += each * each"]
    lines += [
        f"part = parts + program * {width}",
        "tl.store(part, tl.sum(sums, 0))",
        "tl.store(part + 1, tl.sum(counts, 0))",
    ]
    groups = [["each_1", "each_2", "known"]] if term.quantity == "energy" else []
    groups += [["size_1", "size_2", "known"]]
    for number, name in enumerate(name for group in groups for name in group):
        lines += [f"tl.store(part + {2 + number}, tl.sum({name}, 0))"]
    if term.of_atoms:
        lines += [f"for number in range({term.n_species}):", "    mine = kind == number"]
        for k, name in enumerate(groups[0]):
            lines += [f"    tl.store(part + {5 + k} + 3 * number, tl.sum(tl.where(mine, {name}, 0.0), 0))"]
    return lines


def _slopes(term: _Term, i: int, n_rows: str) -> list[str]:
    """Slopes of the loss in the outputs; `share` is what the target's sum is multiplied with."""
    lines = _rows(term, i, n_rows)
    factor = _factor(term)
    lines += [] if factor is None else [f"factor = {factor}"]
    scale = "w * share" if factor is None else "w * share * factor"
    for column in range(term.columns):
        lines += _difference(term, i, column)
        lines += [f"g = tl.where(labelled, {scale} * ({_formula(term, 1)}), 0.0)"]
        lines += [f"tl.store(slope{i} + row * {term.columns} + {column}, g, mask=inside)"]
    return lines


def _collect(term: _Term, i: int, row: int, n_targets: int, width: int) -> list[str]:
    """All parts of a target added up: the loss, then sums, counts and rows of errors, in this order."""
    n_columns = 2 + 3 * term.n_errors
    return [
        f"for first in range(0, {n_columns}, 16):",
        "    column = first + tl.arange(0, 16)",
        f"    wanted = column < {n_columns}",
        "    found = tl.zeros([64, 16], tl.float64)",
        "    for first_part in range(begin, end, 64):",
        "        part = first_part + tl.arange(0, 64)",
        "        read = (part < end)[:, None] & wanted[None, :]",
        f"        found += tl.load(parts + part[:, None] * {width} + column[None, :], mask=read, other=0.0)",
        f"    place = tl.where(column < 2, 1 + {i} + {n_targets} * column, {1 + 2 * n_targets + 3 * row - 2} + column)",
        "    tl.store(out + place, tl.sum(found, 0), mask=wanted)",
    ]

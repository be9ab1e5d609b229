"""The loss of energies, forces and stress, its derivatives (slopes) in the outputs, and all errors, by two generated kernels
where reference operations take a hundred.

In the first every program sums over its rows; the second adds these partial sums in a fixed order and, now that the
denominators are available, writes the slopes. The reference is in `task.py`, `losses.py` and `metrics.py`; it is also used for
losses without a kernel formula and for targets that the kernels do not support.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forgefield.kernels.core.generation import ArgumentTable, LaunchArguments, module_from
from forgefield.kernels.core.runtime import use_kernels
from forgefield.ops.graph import is_traced
from forgefield.tasks.losses import KernelFormula
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.targets import Target
from forgefield.tasks.task import Task

ROWS = 128
"""Frames or atoms of one program."""
COLUMNS = {"energy": 1, "forces": 3, "stress": 9, "virial": 9}
"""Number of components of the label of a frame or an atom."""


class LossAndSlopes(NamedTuple):
    """loss: what is minimised. sums: (2, n_targets), sums and counts of the loss. errors: (n_rows, 3), as from
    `ErrorMetrics.measure`. slopes: derivatives of the loss in each output."""

    loss: Tensor
    sums: Tensor
    errors: Tensor
    slopes: dict[str, Tensor]


@dataclass(frozen=True)
class _Term:
    """Everything that the code of a target depends on."""

    quantity: str
    loss: KernelFormula
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
        """Number of rows of errors: per atom and total for energies, all atoms and each species for forces."""
        return {"energy": 2, "forces": 1 + self.n_species}.get(self.quantity, 1)


def kernels_support(task: Task, errors: ErrorMetrics, batch: dict[str, Tensor]) -> bool:
    """Whether kernels are in use and support every target of the task, and the errors are those of its targets."""
    weight = batch["weight"]
    if is_traced(weight) or not use_kernels(weight) or errors.targets != task.names:
        return False
    labels = [target.label for target in task.targets]
    if len(set(labels)) < len(labels):  # slopes of two targets in the same output would have to be added
        return False
    return all(_is_supported(target, batch) for target in task.targets)


def _is_supported(target: Target, batch: dict[str, Tensor]) -> bool:
    return (
        target.branch is None
        and target.classes is None
        and target.name in COLUMNS
        and target.loss.kernel is not None
        and batch[target.label].dtype == torch.float64
    )


def loss_by_kernels(
    task: Task,
    errors: ErrorMetrics,
    outputs: dict[str, Tensor],
    batch: dict[str, Tensor],
    target_weights: Tensor,
    denominators: Tensor | None,
) -> LossAndSlopes:
    """The loss of one batch. target_weights, denominators: (n_targets,), see `StepFunction.differentiate`."""
    weight = batch["weight"]
    n_frames, n_atoms = weight.shape[0], batch["species"].shape[0]
    terms = tuple(_term(target, len(errors.species)) for target in task.targets)
    n_targets, n_rows = len(terms), sum(term.n_errors for term in terms)
    n_programs = sum(-(-(n_atoms if term.of_atoms else n_frames) // ROWS) for term in terms)
    partial_sums = weight.new_empty((n_programs, 2 + 3 * max(term.n_errors for term in terms)))
    out = weight.new_empty(1 + 2 * n_targets + 3 * n_rows)
    slopes = {target.label: torch.empty_like(batch[target.label]) for target in task.targets}
    by_species = task.species_weights_on(weight.device)
    values: LaunchArguments = {}
    for i, (target, species_weights) in enumerate(zip(task.targets, by_species)):
        values[f"output{i}"] = outputs[target.label].contiguous()
        values[f"label{i}"] = batch[target.label].contiguous()
        values[f"slope{i}"] = slopes[target.label]
        values[f"of_species{i}"] = weight if species_weights is None else species_weights
    values |= {argument: batch[key].contiguous() for argument, key in BATCH_ARGUMENTS.items()}
    values |= {"target_weights": target_weights, "denominators": weight if denominators is None else denominators}
    values |= {"parts": partial_sums, "out": out, "n_frames": n_frames, "n_atoms": n_atoms}
    arguments = loss_arguments(n_targets).bind("loss", values)
    add_up, finish = _kernels(terms, denominators is not None)
    if n_programs:
        add_up[(n_programs,)](**arguments, num_warps=4)
    finish[(n_programs + 1,)](**arguments, num_warps=4)
    sums, measured = out[1 : 1 + 2 * n_targets], out[1 + 2 * n_targets :]
    return LossAndSlopes(out[0], sums.view(2, n_targets), measured.view(-1, 3), slopes)


def _term(target: Target, n_species: int) -> _Term:
    assert target.loss.kernel is not None
    weighs_species = target.species_weights is not None
    return _Term(target.quantity, target.loss.kernel, target.per_atom, weighs_species, n_species)


# ---- the code


BATCH_ARGUMENTS = {"weight": "weight", "frames": "frame", "species": "species", "sizes": "n_atoms", "cell": "cell"}
"""Arguments that are tensors of a batch, and their keys there."""


@lru_cache(maxsize=64)
def loss_arguments(n_targets: int) -> ArgumentTable:
    """Arguments of both kernels for this number of targets."""
    of_targets = {
        "output": "predictions of a target",
        "label": "labels of a target",
        "slope": "derivatives of the loss in the predictions",
        "of_species": "(n_species,), weights of species",
    }
    names = {f"{name}{i}": text for i in range(n_targets) for name, text in of_targets.items()}
    names |= {argument: f"`{key}` of the batch" for argument, key in BATCH_ARGUMENTS.items()}
    return ArgumentTable(
        **names,
        target_weights="(n_targets,), weights of targets",
        denominators="(n_targets,), where they are not the sums of this batch",
        parts="(n_programs, 2 + 3 x rows of errors), partial sums of every program",
        out="the loss; sums and counts of targets; rows of errors",
        n_frames="number of frames",
        n_atoms="number of atoms",
    )


@lru_cache(maxsize=64)
def _kernels(terms: tuple[_Term, ...], external_denominators: bool) -> tuple[Any, Any]:
    module = module_from(write_loss(terms, external_denominators))
    return module.add_up, module.finish


_HEAD = """import triton
import triton.language as tl


@triton.jit
def total(parts, begin, end, width: tl.constexpr, column: tl.constexpr):
    sums = tl.zeros([64], tl.float64)
    for first in range(begin, end, 64):
        index = first + tl.arange(0, 64)
        sums += tl.load(parts + index * width + column, mask=index < end, other=0.0)
    return tl.sum(sums, 0)
"""


def write_loss(terms: Sequence[_Term], external_denominators: bool) -> str:
    """Source of a module with the kernels `add_up` and `finish`. external_denominators: denominators are not the sums of this
    batch but an argument."""
    width = 2 + 3 * max(term.n_errors for term in terms)
    head = f"({loss_arguments(len(terms)).signature}):"
    jit = "@triton.jit(do_not_specialize=['n_frames', 'n_atoms'])"
    add_up, finish = ["program = tl.program_id(0)", "end = 0"], ["program = tl.program_id(0)", "end = 0", "loss = 0.0"]
    row = 0
    for i, term in enumerate(terms):
        n_rows = "n_atoms" if term.of_atoms else "n_frames"
        bounds = ["begin = end", f"end = begin + ({n_rows} + {ROWS - 1}) // {ROWS}"]
        in_range = "if (program >= begin) & (program < end):"
        add_up += [*bounds, in_range, *_indented(_add_up(term, i, width, n_rows))]
        finish += [*bounds, f"divisor = {_divisor(i, width, external_denominators)}"]
        finish += ["divisor = tl.where(divisor > 0, divisor, 1.0)", f"share = tl.load(target_weights + {i}) / divisor"]
        finish += [in_range, *_indented(_slopes(term, i, n_rows))]
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


def _divisor(i: int, width: int, external: bool) -> str:
    return f"tl.load(denominators + {i})" if external else f"total(parts, begin, end, {width}, 1)"


def _rows(term: _Term, i: int, n_rows: str) -> list[str]:
    """Rows of a program, and values that all components of a row share."""
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
    """Factor of label and output; None for one."""
    size = {True: "size", "root": "tl.sqrt(size)", False: None}[term.per_atom]
    if term.quantity == "virial":
        return "-volume" if size is None else f"-volume / {size}"
    return None if size is None or term.quantity != "energy" else f"1.0 / {size}"


def _difference(term: _Term, i: int, column: int) -> list[str]:
    """For one component of each row: whether it is labelled, and its difference d from the label in units of the loss."""
    offset = f"row * {term.columns} + {column}"
    lines = [
        f"p = tl.load(output{i} + {offset}, mask=inside, other=0.0)",
        f"y = tl.load(label{i} + {offset}, mask=inside, other=0.0)",
        "labelled = inside & (y == y)",
    ]
    difference = "p - y" if _factor(term) is None else "p * factor - y * factor"
    return [*lines, f"d = tl.where(labelled, {difference}, 0.0)"]


def _add_up(term: _Term, i: int, width: int, n_rows: str) -> list[str]:
    """Partial sums of a program: sum and count of the loss; for every row of errors, the sums of |e| and e^2 and a count."""
    lines = _rows(term, i, n_rows)
    factor = _factor(term)
    lines += [] if factor is None else [f"factor = {factor}"]
    lines += [f"{name} = tl.zeros([{ROWS}], tl.float64)" for name in ("sums", "counts", "size_1", "size_2", "n_labels")]
    if term.quantity == "energy":
        lines += [f"{name} = tl.zeros([{ROWS}], tl.float64)" for name in ("each_1", "each_2")]
    for column in range(term.columns):
        lines += _difference(term, i, column)
        lines += [f"sums += tl.where(labelled, w * ({term.loss.error}), 0.0)", "counts += tl.where(labelled, w, 0.0)"]
        lines += ["e = (p - y) * (volume / size)" if term.quantity == "virial" else "e = p - y"]
        lines += ["counts_here = inside & (e == e)", "e = tl.where(counts_here, e, 0.0)"]
        lines += ["size_1 += tl.abs(e)", "size_2 += e * e", "n_labels += counts_here.to(tl.float64)"]
        if term.quantity == "energy":
            lines += ["each = e / size", "each_1 += tl.abs(each)", "each_2 += each * each"]
    lines += [
        f"row_sums = parts + program * {width}",
        "tl.store(row_sums, tl.sum(sums, 0))",
        "tl.store(row_sums + 1, tl.sum(counts, 0))",
    ]
    groups = [["each_1", "each_2", "n_labels"]] if term.quantity == "energy" else []
    groups += [["size_1", "size_2", "n_labels"]]
    for number, name in enumerate(name for group in groups for name in group):
        lines += [f"tl.store(row_sums + {2 + number}, tl.sum({name}, 0))"]
    if term.of_atoms:
        lines += [f"for number in range({term.n_species}):", "    mine = kind == number"]
        for k, name in enumerate(groups[0]):
            lines += [f"    tl.store(row_sums + {5 + k} + 3 * number, tl.sum(tl.where(mine, {name}, 0.0), 0))"]
    return lines


def _slopes(term: _Term, i: int, n_rows: str) -> list[str]:
    """Derivatives of the loss in the outputs; `share` is the factor of the target's sum."""
    lines = _rows(term, i, n_rows)
    factor = _factor(term)
    lines += [] if factor is None else [f"factor = {factor}"]
    scale = "w * share" if factor is None else "w * share * factor"
    for column in range(term.columns):
        lines += _difference(term, i, column)
        lines += [f"g = tl.where(labelled, {scale} * ({term.loss.slope}), 0.0)"]
        lines += [f"tl.store(slope{i} + row * {term.columns} + {column}, g, mask=inside)"]
    return lines


def _collect(term: _Term, i: int, row: int, n_targets: int, width: int) -> list[str]:
    """Sum of the partial sums of a target: the loss, then sums, counts and rows of errors, in this order."""
    n_columns = 2 + 3 * term.n_errors
    return [
        f"for first in range(0, {n_columns}, 16):",
        "    column = first + tl.arange(0, 16)",
        f"    valid = column < {n_columns}",
        "    totals = tl.zeros([64, 16], tl.float64)",
        "    for first_row in range(begin, end, 64):",
        "        index = first_row + tl.arange(0, 64)",
        "        read = (index < end)[:, None] & valid[None, :]",
        f"        totals += tl.load(parts + index[:, None] * {width} + column[None, :], mask=read, other=0.0)",
        f"    offset = tl.where(column < 2, 1 + {i} + {n_targets} * column, {1 + 2 * n_targets + 3 * row - 2} + column)",
        "    tl.store(out + offset, tl.sum(totals, 0), mask=valid)",
    ]

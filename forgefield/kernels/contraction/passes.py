"""The symmetric contraction by generated kernels, in the four passes of a training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from forgefield.kernels.contraction.program import n_terms
from forgefield.kernels.contraction.source import add_by_species, arguments, tile_of, used, write_kernel
from forgefield.kernels.core.compiling import CompileOnly, compile_concurrently
from forgefield.kernels.core.generation import Launchable, TritonFunction, module_from
from forgefield.kernels.core.runtime import interpreted
from forgefield.kernels.dense.products import AtomsBySpecies
from forgefield.ops.symmetric_contraction import ContractionPlan

LONGEST = 8192
"""Terms of the longest pass up to which kernels are generated; compilers take minutes for more."""
PROGRAMS, MOST_ATOMS = 1024, 16
"""Programs that the last pass should have at least, and atoms that one of them processes at most."""
ROWS, COLUMNS = 16, 64
"""Parts of a species, and columns, that a program sums at a time."""


def contraction_refusal(plan: ContractionPlan) -> str | None:
    """Why there are no kernels for a plan; None where there are."""
    terms = n_terms(plan)
    return (
        None if terms <= LONGEST else f"its polynomials have {terms} terms; kernels are generated for up to {LONGEST}"
    )


@lru_cache(maxsize=256)
def kernel(plan: ContractionPlan, kind: str, channels: int, by_species: bool) -> TritonFunction:
    """The Triton function of a pass; Triton compiles it when it is first launched."""
    function: TritonFunction = getattr(
        module_from(write_kernel(plan, kind, channels, by_species=by_species)), f"contraction_{kind}"
    )
    return function


@dataclass(frozen=True)
class Contraction:
    """A contraction for the atoms of a batch.

    weights: (n_species or 1, plan.n_weights, channels). species: (n_atoms,). All features, results, tangents and cotangents are
    contiguous (n_atoms, 2l + 1, channels), one for each irrep; those that are returned are written into `out`.
    """

    plan: ContractionPlan
    weights: Tensor
    species: Tensor

    def values(self, a: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        self._launch("values", {"a": a, "b": out}, {"species": self.species})

    def forces(self, a: Sequence[Tensor], g: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Cotangents of features, from those of the results."""
        self._launch("forces", {"a": a, "g": g, "to": out}, {"species": self.species})

    def tangents(self, a: Sequence[Tensor], da: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Tangents of the results, from those of the features."""
        self._launch("tangents", {"a": a, "da": da, "b": out}, {"species": self.species})

    def back(
        self,
        a: Sequence[Tensor],
        da: Sequence[Tensor],
        to_values: Sequence[Tensor],
        to_tangents: Sequence[Tensor],
        out: Sequence[Tensor],
        atoms: AtomsBySpecies | None,
    ) -> Tensor:
        """Cotangents of the features' values, from those of the results' values and tangents. Returns those of the weights.

        atoms: sorted by species; None where there is one row of weights.
        """
        n_atoms, (n_rows, n_weights, channels) = self.species.shape[0], self.weights.shape
        to_weights = torch.empty_like(self.weights)
        if not n_atoms:
            return to_weights.zero_()
        several = min(MOST_ATOMS, -(-n_atoms // PROGRAMS))
        n_programs = -(-n_atoms // several)
        parts = self.weights.new_empty((n_programs + n_rows - 1, n_weights, channels))
        sums = {"order": self.species, "pointers": self.species, "species": self.species}
        if n_rows > 1:
            assert atoms is not None
            sums = {"order": atoms.order, "pointers": atoms.pointers, "species": atoms.species}
        blocks = {"a": a, "da": da, "g": to_tangents, "dg": to_values, "to": out}
        self._launch("back", blocks, {**sums, "parts": parts}, n_programs, several)
        columns = n_weights * channels
        self.launcher(add_by_species())[(n_rows, -(-columns // COLUMNS))](
            parts=parts,
            pointers=sums["pointers"],
            out=to_weights,
            n_atoms=n_atoms,
            several=several,
            columns=columns,
            is_sorted=n_rows > 1,
            rows=ROWS,
            block=COLUMNS,
            num_warps=2,
        )
        return to_weights

    def _launch(
        self,
        kind: str,
        blocks: dict[str, Sequence[Tensor]],
        tensors: dict[str, Tensor],
        n_programs: int | None = None,
        several: int = 1,
    ) -> None:
        n_atoms, (n_rows, _, channels) = self.species.shape[0], self.weights.shape
        if not n_atoms:
            return
        values: dict[str, object] = {"weights": self.weights, **tensors, "n_atoms": n_atoms, "several": several}
        for name, parts in blocks.items():
            for number, tensor in enumerate(parts):
                if not tensor.is_contiguous():
                    raise RuntimeError(f"contraction_{kind}: the argument {name}_{number} is not contiguous")
                values[f"{name}_{number}"] = tensor
        needed = used(self.plan, kind)
        table = arguments(len(self.plan.inputs), len(self.plan.outputs))
        if kind != "back":
            values.pop("several")
        bound = table.bind(f"contraction_{kind}", values, unused=self.weights, used=needed)
        if kind != "back":
            bound["several"] = several
        tile = tile_of(channels)
        grid = ((n_atoms if n_programs is None else n_programs) * -(-channels // tile),)
        function = self.launcher(kernel(self.plan, kind, channels, n_rows > 1))
        function[grid](**bound, num_warps=tile // 32, num_stages=1)

    def launcher(self, kernel: TritonFunction) -> Launchable:
        return kernel


class _Compiled(Contraction):
    """A contraction whose passes compile their kernels and compute nothing."""

    def launcher(self, kernel: TritonFunction) -> Launchable:
        return CompileOnly(kernel)


_compiled_keys: set[Any] = set()


def compile_contractions(contractions: Sequence[Contraction], atoms: AtomsBySpecies | None) -> None:
    """Compile the kernels of these contractions for a training, unless this process has done so. atoms: as in `back`."""
    jobs: dict[Any, Callable[[], object]] = {}
    for contraction in contractions:
        weights, n_atoms = contraction.weights, contraction.species.shape[0]
        key = (contraction.plan, weights.shape[0] > 1, weights.shape[2], weights.dtype, weights.device)
        if weights.is_cuda and not interpreted() and n_atoms and key not in _compiled_keys:
            jobs[key] = partial(_compile, _Compiled(contraction.plan, weights, contraction.species), atoms)
    if jobs and compile_concurrently(list(jobs.values())):
        _compiled_keys.update(jobs)


def _compile(contraction: _Compiled, atoms: AtomsBySpecies | None) -> None:
    n_atoms, (_, _, channels) = contraction.species.shape[0], contraction.weights.shape
    a, b = (
        [contraction.weights.new_empty((n_atoms, irrep.dim, channels)) for irrep in irreps]
        for irreps in (contraction.plan.inputs, [output.irrep for output in contraction.plan.outputs])
    )
    contraction.back(a, a, b, b, a, atoms)  # takes longest
    contraction.tangents(a, a, b)
    contraction.forces(a, b, a)
    contraction.values(a, b)

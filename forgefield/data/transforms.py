"""Functions of the user that change frames after they have been read, before labels are selected (`data.transforms`).

A function takes a structure of ASE with the values of the file in `info`, `arrays` and its calculator, in the units of the
file, and returns it, changed or not, or None to leave it out. Labels, units and checks apply to what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from forgefield.config.components import check_signature, import_function
from forgefield.config.trust import Trust
from forgefield.data.frame import RawFrame
from forgefield.data.readers.ase_files import raw_from_atoms
from forgefield.errors import ForgefieldError

SETTING = "data.transforms"
FrameTransform = Callable[[RawFrame], RawFrame | None]


def frame_transform(specs: Sequence[object] | None, trust: Trust) -> FrameTransform | None:
    """All functions of `data.transforms`, one after the other; None if there are none.

    specs: import paths, or {name: import path, argument: value}. trust: whether code may be imported.
    """
    functions = [_function(spec, trust) for spec in specs or ()]
    return partial(_transformed, functions=functions) if functions else None


def _function(spec: object, trust: Trust) -> tuple[str, Callable[[Atoms], object]]:
    """A function with its arguments, and its name."""
    arguments = {str(key): value for key, value in spec.items()} if isinstance(spec, Mapping) else {"name": spec}
    name = str(arguments.pop("name"))
    function = import_function(name, where=SETTING, trust=trust)
    check_signature(function, arguments, where=SETTING)
    return name, partial(function, **arguments)


def _transformed(raw: RawFrame, functions: Sequence[tuple[str, Callable[[Atoms], object]]]) -> RawFrame | None:
    atoms = _structure(raw)
    for name, function in functions:
        try:
            result = function(atoms)
        except Exception as error:
            raise ForgefieldError(f"{raw.where}: {SETTING}: {name} raised {type(error).__name__}: {error}") from error
        if result is None:
            return None
        if not isinstance(result, Atoms):
            raise ForgefieldError(
                f"{raw.where}: {SETTING}: {name} returned {type(result).__name__}; it must return ase.Atoms, or None for a "
                "frame that is left out"
            )
        atoms = result
    changed = raw_from_atoms(atoms, raw.source, raw.index)
    return replace(changed, extra_names=raw.extra_names, comment=raw.comment)


def _structure(raw: RawFrame) -> Atoms:
    atoms = Atoms(numbers=raw.numbers, positions=raw.positions, cell=raw.cell, pbc=raw.pbc)
    atoms.info = dict(raw.info)
    for name, values in raw.arrays.items():
        atoms.set_array(name, np.asarray(values))
    if raw.results:
        atoms.calc = SinglePointCalculator(atoms)
        atoms.calc.results.update(raw.results)
    if raw.constraints:
        atoms.set_constraint(list(raw.constraints))
    return atoms

"""Small models with extra outputs, and changes of a frame under which outputs transform in a known way."""

from __future__ import annotations

import dataclasses
from typing import Any

import ase
import numpy as np

from forgefield.data.frame import Frame
from forgefield.models import Potential
from tests.support.deeppots import section
from tests.support.structures import TINY, make_batch

SMALL = {
    "nequip": TINY,
    "allegro": {"name": "allegro", "l_max": 2, "num_tensor_features": 3, "num_scalar_features": 4},
    "deeppot": section(),
}


def values(model: Potential, *frames: Frame) -> dict[str, np.ndarray]:
    found = model(make_batch(*frames), forces=False)
    return {name: tensor.detach().numpy() for name, tensor in found.items()}


def moved(frame: Frame, **changes: Any) -> Frame:
    return dataclasses.replace(frame, **changes)


def doubled(frame: Frame) -> Frame:
    atoms = ase.Atoms(frame.numbers, positions=frame.positions, cell=frame.cell, pbc=frame.pbc) * (2, 1, 1)
    return moved(frame, positions=atoms.positions, numbers=atoms.numbers.astype(np.int64), cell=atoms.cell.array)

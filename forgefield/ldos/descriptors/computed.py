"""Descriptors of snapshots that are named by their `.info.json`: computed once, and kept in the cache folder.

The name of a file in the cache is a hash of structure, grid and settings, so that a change of any of them makes a new one.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase.data import chemical_symbols

from forgefield.data.reading import locked
from forgefield.errors import ForgefieldError
from forgefield.files import cache_folder, written_atomically
from forgefield.ldos.data.info import SnapshotInfo
from forgefield.ldos.descriptor_options import DescriptorOptions
from forgefield.ldos.descriptors.grid import make_descriptors

log = logging.getLogger(__name__)

VERSION = 1
_HOW = ("kernel",)
"""Settings that change how descriptors are computed, but not their values."""


def input_maker(settings: Mapping[str, Any] | None) -> Callable[[SnapshotInfo], Path]:
    """A function that returns the file with the descriptors of a snapshot. settings: `data.points.descriptors`."""

    def make(info: SnapshotInfo) -> Path:
        if settings is None:
            raise ForgefieldError(
                f"{info.source}: this snapshot has no file of descriptors; set data.points.descriptors, for example "
                "{type: bispectrum, twojmax: 10, cutoff: 4.67637}, to compute them, or write them with `forgefield data "
                f"descriptors {info.source}`"
            )
        return computed_inputs(info, DescriptorOptions.from_mapping(settings, "data.points.descriptors"))

    return make


def computed_inputs(info: SnapshotInfo, options: DescriptorOptions) -> Path:
    """The file with the descriptors of a snapshot, float32, computed unless it is in the cache."""
    info.require("numbers", "positions", "cell", "grid_shape", why="the computation of descriptors")
    assert info.grid_shape is not None
    path = cache_folder() / "descriptors" / f"{_key(info, options)}.npy"
    with locked(path.with_suffix(".lock")):
        if not path.is_file():
            log.info("%s: computing descriptors, kept in %s", info.source, path)
            atoms = info.atoms()
            species = [chemical_symbols[number] for number in sorted(set(atoms.numbers.tolist()))]
            device = "cuda" if torch.cuda.is_available() else "cpu"
            descriptors = make_descriptors(options, species)
            values = descriptors.on_grid(atoms.cell, atoms.positions, atoms.numbers, atoms.pbc, info.grid_shape, device)
            with written_atomically(path) as partial:
                np.save(partial, values.cpu().numpy().astype(np.float32))
    return path


def _key(info: SnapshotInfo, options: DescriptorOptions) -> str:
    settings = {name: value for name, value in asdict(options).items() if name not in _HOW}
    text = json.dumps([VERSION, info.grid_shape, settings], sort_keys=True, default=list)
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for array in (info.cell, info.positions, info.numbers):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()

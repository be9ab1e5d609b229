"""Writes a store of any size quickly: `python -m tests.support.large_store FOLDER GIGABYTES`."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np

from forgefield.data.frame import Frame
from forgefield.data.store.columns import FIELDS
from forgefield.data.store.store import FORMAT, MANIFEST, VERSION, manifest_hash
from forgefield.data.store.writer import ABOUT, PartStatistics, PartWriter

ATOMS = 216
FRAMES_PER_PART = 4096


def write_large_store(folder: Path, n_bytes: float) -> int:
    """Crystals of 216 atoms, shaken, with energies and forces of springs to their sites. Returns the number of frames.

    The parts are copies of the first: other files on the disk and in the memory of the kernel, though of equal content.
    """
    rng = np.random.default_rng(0)
    sites = np.stack(np.meshgrid(*[np.arange(6)] * 3), -1).reshape(-1, 3) * 2.6
    numbers = np.where(np.arange(ATOMS) % 2, 29, 79)
    cell, pbc = 15.6 * np.eye(3), np.ones(3, dtype=bool)
    shifts = rng.normal(0, 0.1, (256, ATOMS, 3))
    energies = 0.5 * (shifts**2).sum(axis=(1, 2)) - 3.0 * ATOMS
    frames = [
        Frame(sites + shift, numbers, cell, pbc, float(energy), -shift, None, 1.0, "large", i)
        for i, (shift, energy) in enumerate(zip(shifts, energies))
    ]
    writer = PartWriter(folder / "part-00000")
    for _ in range(FRAMES_PER_PART // len(frames)):
        writer.add(frames)
    first = writer.finish()
    n_parts = math.ceil(n_bytes / sum(entry["bytes"] for entry in first["columns"].values()))
    parts = [{**first, "name": f"part-{number:05d}"} for number in range(n_parts)]
    for part in parts[1:]:
        shutil.copytree(folder / "part-00000", folder / part["name"])
        (folder / part["name"] / ABOUT).write_text(json.dumps(part))
    statistics = PartStatistics()
    for part in parts:
        statistics.merge(PartStatistics.from_dict(part.pop("statistics")))
    n_frames = len(parts) * FRAMES_PER_PART
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "n_frames": n_frames,
        "n_atoms": n_frames * ATOMS,
        "n_edges": None,
        "fields": {name: {"unit": field.unit} for name, field in FIELDS.items()},
        "graph": None,
        "statistics": statistics.to_dict(),
        "parts": parts,
    }
    manifest["hash"] = manifest_hash(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return n_frames


if __name__ == "__main__":
    print(write_large_store(Path(sys.argv[1]), float(sys.argv[2]) * 2**30))

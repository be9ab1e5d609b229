"""Random DeePMD-kit systems, as folders and as HDF5 groups."""

from __future__ import annotations

from pathlib import Path

import numpy as np

N_ATOMS = 4
TYPES = [1, 0, 1, 1]
"""Of the map O H."""


def arrays(n_frames: int, seed: int = 0, n_atoms: int = N_ATOMS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "coord": rng.uniform(0, 8, size=(n_frames, 3 * n_atoms)),
        "box": np.tile(np.array([[9.0, 0, 0], [1, 8, 0], [0, 0.5, 7]]).reshape(1, 9), (n_frames, 1)),
        "energy": rng.normal(size=(n_frames, 1)),
        "force": rng.normal(size=(n_frames, 3 * n_atoms)),
        "virial": rng.normal(size=(n_frames, 9)),
    }


def write_system(folder: Path, *sets: dict[str, np.ndarray], types=TYPES, type_map="O\nH\n") -> Path:
    folder.mkdir(parents=True)
    (folder / "type.raw").write_text("\n".join(map(str, types)) + "\n")
    if type_map is not None:
        (folder / "type_map.raw").write_text(type_map)
    for i, columns in enumerate(sets):
        (folder / f"set.{i:03d}").mkdir()
        for name, values in columns.items():
            np.save(folder / f"set.{i:03d}" / f"{name}.npy", values)
    return folder


def write_group(group, *sets, types=TYPES, type_map=(b"O", b"H")):
    group["type.raw"] = np.array(types)
    group["type_map.raw"] = np.array(type_map)
    for i, columns in enumerate(sets):
        for name, values in columns.items():
            group[f"set.{i:03d}/{name}.npy"] = values

"""LMDB files with pickled samples."""

from __future__ import annotations

import pickle
from pathlib import Path

import lmdb
import numpy as np
import torch


def write_lmdb(path: Path, values: dict[str, object], *, subdir: bool = False) -> Path:
    environment = lmdb.open(str(path), subdir=subdir, map_size=2**24, lock=False)
    with environment.begin(write=True) as transaction:
        for key, value in values.items():
            transaction.put(key.encode(), value if isinstance(value, bytes) else pickle.dumps(value))
    environment.close()
    return path


def sample(energy: float = 1.0, **rest) -> dict[str, object]:
    return {
        "pos": torch.tensor([[0.0, 0, 0], [0, 0, 1.5]]),
        "cell": np.eye(3, dtype=np.float32) * 5,
        "atomic_numbers": torch.tensor([3, 16]),
        "energy": np.float64(energy),
        "force": torch.arange(6.0).reshape(2, 3),
        "pbc": np.array([1, 1, 1]),
        **rest,
    }

"""Batches of the engine tests on a GPU."""

from __future__ import annotations

from tests.support.engine_cases import labelled

SIZES = [(5, 4), (1,), (6, 1, 3), (20, 30, 20)]


def on_gpu(*atoms: int, seed: int = 0):
    return {key: tensor.cuda() for key, tensor in labelled(*atoms, seed=seed, box=6.0).items()}

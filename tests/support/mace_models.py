"""Models of mace-torch as the tests store them (see mace_references.py), and the numbers that it predicts with them."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import torch

from forgefield.data.frame import Frame
from forgefield.models import Potential, build_model
from forgefield.models.importing import ImportedModel
from forgefield.models.mace.importer import read_mace
from tests.support.structures import make_batch

FOLDER = Path(__file__).parents[1] / "fixtures" / "mace"
CASES = ["residual", "plain", "density", "nonlinear", "single", "parity", "four", "reduced"]
"""Cases in which mace-torch's forces are the derivative of its energy; with Chebyshev polynomials they are not."""
SPECIES = ("H", "C", "O")


def reference(case: str) -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / f"{case}.npz"))


def settings(case: str) -> dict[str, object]:
    """Arguments of mace-torch's constructor."""
    return json.loads(str(reference(case)["options"]))


def import_case(case: str, folder: Path) -> ImportedModel:
    """From the state dict and its options."""
    options = folder / f"{case}.json"
    options.write_text(json.dumps(settings(case)))
    return read_mace(FOLDER / f"{case}.npz", options)


def write_module(case: str, folder: Path) -> Path:
    """The file that mace-torch wrote, `CASE.model` in the folder."""
    path = folder / f"{case}.model"
    path.write_bytes(lzma.decompress((FOLDER / f"{case}.model.xz").read_bytes()))
    return path


def load(imported: ImportedModel) -> Potential:
    potential = build_model(imported.resolved, precision=imported.precision, seed=1)
    potential.load_state_dict(imported.state)
    return potential


def batch_of(case: str) -> dict[str, torch.Tensor]:
    """Both structures; with several heads the first has the first head, and the second the last."""
    stored = reference(case)
    keys = ("positions", "numbers", "cell", "pbc")
    frames = [
        Frame(**{key: stored[f"frame{i}/{key}"] for key in keys}, energy=None, forces=None, stress=None) for i in (0, 1)
    ]
    batch = make_batch(*frames, cutoff=float(settings(case)["r_max"]), species=SPECIES)
    heads = settings(case).get("heads") or [None]
    return batch | ({"branch": torch.tensor([0, len(heads) - 1])} if len(heads) > 1 else {})

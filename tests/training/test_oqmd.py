"""Real crystals of the OQMD, learnt by a small NequIP: formation energies of held-out ones, far better than their mean."""

from __future__ import annotations

import numpy as np
import pytest
from ase.data import chemical_symbols

from forgefield import api
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.reading import read_table
from tests.support.helpers import SHARED_DATA

SOURCE = SHARED_DATA / "matsciml_lmdb" / "oqmd"


@pytest.mark.slow
@pytest.mark.skipif(not SOURCE.is_dir(), reason="the OQMD crystals of Open MatSciML are not beside the checkout")
def test_formation_energies_of_held_out_crystals_are_learnt(tmp_path):
    numbers = np.unique(read_table(str(SOURCE), LabelOptions(), UnitOptions()).components.number)
    fields = {"delta_e": {"unit": "eV/atom"}, "band_gap": {"unit": "eV"}}
    config = {
        "name": "oqmd",
        "out": str(tmp_path),
        "seed": 2,
        "data": {
            "train": str(SOURCE),
            "val": 40,
            "cutoff": 4.5,
            "species": [chemical_symbols[int(number)] for number in numbers],
            "labels": {"fields": fields},
        },
        "model": {"name": "nequip", "num_layers": 2, "l_max": 1, "num_features": [32, 8], "radial_mlp_width": 16},
        "task": {"delta_e": {"loss": "mae"}, "band_gap": {"loss": "mae", "weight": 0.3}},
        "training": {"lr": 5e-3, "tensorboard": 0, "engine": "eager", "scheduler": {"name": "CosineAnnealingLR"}},
        "trainer": {"max_epochs": 15, "enable_progress_bar": False, "accelerator": "cpu"},
    }
    run = api.train(config)
    with np.load(run.path / "predictions" / "val.npz") as found:
        reference, predicted = found["delta_e_ref"], found["delta_e_pred"]
    mean = run.heads["delta_e"]["shift"][0][0]
    assert np.abs(predicted - reference).mean() < 0.55 * np.abs(mean - reference).mean()

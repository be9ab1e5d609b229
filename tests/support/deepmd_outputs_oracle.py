"""Runs inside an environment with deepmd-kit: statistics, predictions and losses of models that do not predict energies.

usage: python deepmd_outputs_oracle.py JOB.json. For each case of the job: the input file `input`, our export of a trained model
`model`, where to write a checkpoint of that model (`checkpoint`) and `results` (.npz).
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from deepmd.dpmodel.utils.serialization import load_dp_model
from deepmd.pt.model.model import get_model
from deepmd.pt.model.model.model import BaseModel
from deepmd.pt.train.training import get_loss
from deepmd.pt.train.wrapper import ModelWrapper

torch.set_default_device("cpu")
ATOMIC = ("atomic_dipole", "atom_dos")


def system(folder: str, n_types: int) -> dict:
    """All frames of a system, in the form in which statistics are taken."""
    place = Path(folder)
    arrays = {file.stem: torch.tensor(np.load(file)) for file in (place / "set.000").glob("*.npy")}
    types = np.loadtxt(place / "type.raw", dtype=int)
    n = len(arrays["coord"])
    found = {"coord": arrays["coord"].view(n, -1, 3), "box": arrays["box"], "atype": torch.tensor(types).repeat(n, 1)}
    counts = [len(types), len(types), *np.bincount(types, minlength=n_types)]
    found["natoms"] = torch.tensor(counts).repeat(n, 1)
    for name, values in arrays.items():
        name = name.replace("atomic_", "atom_")
        values = values.view(n, len(types), -1) if name.startswith("atom_") else values
        found |= {name: values, f"find_{name}": torch.tensor(1.0)} if name not in found else {}
    return found


def wanted(sample: dict, loss: dict) -> dict:
    """Labels of atoms are read where the loss asks for them."""
    asks = loss.get("pref_atomic", 0) or loss.get("start_pref_ados", 0) or loss.get("start_pref_acdf", 0)
    return sample if asks else {key: value for key, value in sample.items() if "atom_" not in key}


for case in json.loads(Path(sys.argv[1]).read_text()):
    given = json.loads(Path(case["input"]).read_text())
    systems = given["training"]["training_data"]["systems"]
    samples = [wanted(system(folder, len(given["model"]["type_map"])), given["loss"]) for folder in systems]
    fresh = get_model(json.loads(json.dumps(given["model"])))
    fresh.atomic_model.compute_or_load_stat(lambda found=samples: found, None)
    results = {f"stat_{name}": getattr(fresh.atomic_model, name)[0].numpy() for name in ("out_bias", "out_std")}
    model = BaseModel.deserialize(load_dp_model(case["model"])["model"])
    torch.save({"model": ModelWrapper(model, model_params=given["model"]).state_dict()}, case["checkpoint"])
    frames = {key: samples[1][key] for key in ("coord", "box", "atype")}
    labels = {key: value for key, value in samples[1].items() if key not in frames}
    loss = get_loss(dict(given["loss"]), 0.005, 2, model)
    for batch in case["batches"]:
        inputs = {key: value[batch] for key, value in frames.items()}
        label = {k: v if k.startswith("find_") else v[batch].clone() for k, v in labels.items()}
        label = {k: v.reshape(len(batch), -1) if "gap" in k and v.dim() > 1 else v for k, v in label.items()}
        _, total, more = loss(inputs, model, label, inputs["atype"].shape[1], learning_rate=0.4 * 0.005)
        results[f"loss_{len(batch)}"] = float(total)
        results |= {f"more_{name}_{len(batch)}": float(value) for name, value in more.items()}
    results |= {f"pred_{name}": value.detach().numpy() for name, value in model(**frames).items() if value is not None}
    np.savez(case["results"], **results)

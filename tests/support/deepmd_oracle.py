"""Runs inside an environment with deepmd-kit: makes models there and evaluates models, for tests that compare with it.

usage: python deepmd_oracle.py make|evaluate|statistics|bias JOB.json. A job names the files to write; arrays are .npz.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch


def main(what: str, path: str) -> None:
    job = json.loads(Path(path).read_text())
    {"make": make, "evaluate": evaluate, "statistics": statistics, "bias": bias}[what](job)


def _set_statistics(block: torch.nn.Module, rng: np.random.Generator, *, zero_mean: bool) -> None:
    n, _, columns = block.mean.shape
    mean = np.zeros((n, 1, columns))
    if not zero_mean:
        mean[:, :, 0] = rng.uniform(0.02, 0.2, (n, 1))
    deviation = np.empty((n, 1, columns))
    deviation[:, :, :1] = rng.uniform(0.1, 0.2, (n, 1, 1))
    deviation[:, :, 1:] = rng.uniform(0.05, 0.1, (n, 1, 1))
    block.mean[:] = torch.tensor(mean)
    block.stddev[:] = torch.tensor(deviation)


def make(job: dict) -> None:
    """Models with random weights and statistics: written as `model`, their predictions for `frames` as `results`."""
    from deepmd.dpmodel.utils.serialization import save_dp_model
    from deepmd.pt.model.model import get_model

    for case in job["cases"]:
        torch.manual_seed(case["seed"])
        model = get_model(case["params"])
        atomic = getattr(model.atomic_model, "models", [model.atomic_model])[0]
        descriptor = atomic.descriptor
        rng = np.random.default_rng(case["seed"])
        for block in descriptor.modules():
            if "mean" in dict(block.named_buffers(recurse=False)):
                _set_statistics(block, rng, zero_mean=bool(case["params"]["descriptor"].get("set_davg_zero")))
        n = len(model.get_type_map())
        model.atomic_model.out_bias[:] = torch.tensor(rng.normal(size=(1, n, 1))) * case.get("bias", 1.0)
        for name in ("fparam", "aparam"):
            if case["params"]["fitting_net"].get(f"numb_{name}"):
                getattr(atomic.fitting_net, f"{name}_avg")[:] = 0.3
                getattr(atomic.fitting_net, f"{name}_inv_std")[:] = 1.7
        if "model" in case:
            save_dp_model(case["model"], {"model": model.serialize(), "backend": "PyTorch"})
        if "checkpoint" in case:
            from deepmd.pt.train.wrapper import ModelWrapper

            state = ModelWrapper(model, model_params=case["params"]).state_dict()
            torch.save({"model": state, "optimizer": {}}, case["checkpoint"])
        _predict(model, case["frames"], case["results"])


def evaluate(job: dict) -> None:
    """Predictions of the model in `model` for `frames`, as `results`."""
    from deepmd.dpmodel.utils.serialization import load_dp_model
    from deepmd.pt.model.model.model import BaseModel

    for case in job["cases"]:
        model = BaseModel.deserialize(load_dp_model(case["model"])["model"])
        _predict(model, case["frames"], case["results"])


def statistics(job: dict) -> None:
    """davg, dstd and out_bias of a model's descriptor for the systems in `frames`."""
    from deepmd.pt.model.model import get_model

    model = get_model(job["params"])
    model.atomic_model.compute_or_load_stat(lambda: [_sample(job["frames"], len(job["params"]["type_map"]))], None)
    block = getattr(model.atomic_model.descriptor, "sea", model.atomic_model.descriptor)
    np.savez(
        job["results"],
        davg=block.mean[:, 0].numpy(),
        dstd=block.stddev[:, 0].numpy(),
        out_bias=model.atomic_model.out_bias.numpy().ravel(),
    )


def bias(job: dict) -> None:
    """out_bias of the model in `model` as fine-tuning on `frames` would begin with."""
    from deepmd.dpmodel.utils.serialization import load_dp_model
    from deepmd.pt.model.model.model import BaseModel

    model = BaseModel.deserialize(load_dp_model(job["model"])["model"])
    model.change_out_bias([_sample(job["frames"], len(model.get_type_map()))], bias_adjust_mode="change-by-statistic")
    np.savez(job["results"], out_bias=model.get_out_bias().numpy().ravel())


def _sample(frames: str, n_types: int) -> dict:
    """A system in the form in which DeePMD-kit takes statistics of it."""
    given = np.load(frames)
    return {
        "coord": torch.tensor(given["coord"]),
        "atype": torch.tensor(given["atype"]),
        "box": torch.tensor(given["box"]) if "box" in given else None,
        "energy": torch.tensor(given["energy"]).view(-1, 1),
        "find_energy": torch.tensor(1.0),
        "natoms": torch.tensor([[len(a), len(a), *np.bincount(a, minlength=n_types)] for a in given["atype"]]),
    }


def _predict(model: torch.nn.Module, frames: str, results: str) -> None:
    given = np.load(frames)
    more = {name: torch.tensor(given[name]) for name in ("fparam", "aparam") if name in given}
    coord = torch.tensor(given["coord"])
    box = torch.tensor(given["box"]) if "box" in given else None
    model.eval()
    found = model(coord, torch.tensor(given["atype"]), box, do_atomic_virial=False, **more)
    names = {"energy": "energy", "atom_energy": "atomic_energy", "force": "forces", "virial": "virial"}
    np.savez(results, **{ours: found[theirs].detach().numpy() for theirs, ours in names.items() if theirs in found})


main(*sys.argv[1:])

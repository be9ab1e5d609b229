"""Writes checkpoints (.ckpt) of the NequIP framework, of models of any of its architectures.

A checkpoint holds options from which NequIP builds the model again, and its complete state: weights, and constants that follow
from the options, which NequIP requires as well. It contains plain values and tensors, no code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.files import written_atomically
from forgefield.models.interface import AtomisticModel
from forgefield.models.options import TermOptions
from forgefield.models.potential import Potential
from forgefield.models.terms import SpeciesTerms
from forgefield.ops.linear import Perceptron
from forgefield.physics.zbl import COULOMB

SUFFIX = ".ckpt"
VERSIONS = {"nequip": "0.19.1", "allegro": "0.8.3"}
"""Versions whose options and names of weights are written."""
_MODULE = "nequip.train.NequIPLightningModule"
_ROOT = "model.sole_model.model."


def check_exportable(
    potential: Potential, path: Path, wanted: type[AtomisticModel], program: str, sel: Sequence[int] | None
) -> None:
    """Raise unless `potential` is a model of the class `wanted` whose every output the program computes too."""
    model = potential.model
    if sel is not None:
        raise ForgefieldError("--sel is an option of --to deepmd.")
    if path.suffix != SUFFIX:
        raise ForgefieldError(f"{path}: checkpoints of {program} end in {SUFFIX}.")
    if not isinstance(model, wanted):
        raise ForgefieldError(
            f"a {type(model).__name__} cannot be exported to {program}, only a model with model.name={program}."
        )
    if potential.extra_outputs or potential.forces_are_direct:
        names = ", ".join(potential.extra_outputs) or "forces that are not the derivative of its energy"
        raise ForgefieldError(f"this model also predicts {names}, which {program} does not support.")
    if model.adaptive_cutoff is not None:
        raise ForgefieldError(
            f"this model has an adaptive cutoff (data.adaptive_cutoff), which {program} does not have."
        )
    if model.weight_dtype() not in (torch.float32, torch.float64):
        raise ForgefieldError(f"weights of type {model.weight_dtype()} are not supported by {program}.")


def shared_settings(model: SpeciesTerms[Any], target: str, names: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of the builder `target`. names: of its arguments, and of Forgefield's options that they are."""
    assert isinstance(model.options, TermOptions)
    values, weights = asdict(model.options), model.state_dict()
    settings: dict[str, Any] = {
        "_target_": target,
        "seed": 0,
        "model_dtype": str(model.weight_dtype()).removeprefix("torch."),
        "type_names": list(model.species),
        "r_max": model.cutoff,
        **{theirs: values[ours] for theirs, ours in names.items() if ours in values},
    }
    for term in ("scales", "shifts"):  # as they are now, not as they were before the training
        current = weights[f"energy_{term}"].tolist()
        settings[f"per_type_energy_{term}"] = dict(zip(model.species, current))
    zbl = model.options.zbl
    if zbl:
        envelope = {"polynomial_cutoff_p": 6.0, **(zbl if isinstance(zbl, dict) else {})}
        target = "nequip.nn.pair_potential.ZBL"
        settings["pair_potential"] = {
            "_target_": target,
            "chemical_species": list(model.species),
            "units": "metal",
            **envelope,
        }
    return settings


def shared_state(model: SpeciesTerms[Any]) -> dict[str, Tensor]:
    """State of the modules that all architectures have."""
    cutoffs = model.inverse_cutoff.detach()
    state = {
        "edge_norm._rmax_recip": cutoffs if model.options.per_edge_type_cutoff else cutoffs.reshape(()),
        "per_type_energy_scale_shift.scales": model.energy_scales.detach().reshape(-1, 1),
        "per_type_energy_scale_shift.shifts": model.energy_shifts.detach().reshape(-1, 1),
    }
    if model.options.zbl:
        state["pair_potential.atomic_numbers"] = model.atomic_numbers.to(model.weight_dtype())
        state["pair_potential._qqr2exesquare"] = torch.tensor(COULOMB / 2, dtype=torch.float64)
    return state


def perceptron_state(name: str, network: Perceptron) -> dict[str, Tensor]:
    """Matrices of the framework's perceptron `name`, which counts activations as layers; one without any is a list."""
    weights = [weight.detach() for weight in network.weights]
    if network.activation is None and len(weights) > 1:
        return {f"{name}.mlp.weights.{number}": weight for number, weight in enumerate(weights)}
    return {f"{name}.mlp.{2 * number}.weight": weight for number, weight in enumerate(weights)}


def write_checkpoint(path: str | os.PathLike[str], settings: Mapping[str, Any], state: Mapping[str, Tensor]) -> Path:
    """Write the checkpoint of a model with these options and this state, by the framework's names of modules."""
    path = Path(path)
    complete = {"run_stage": torch.zeros(1, dtype=torch.long)}
    complete[f"{_ROOT}_empty"] = torch.empty(0, dtype=getattr(torch, settings["model_dtype"]))
    complete |= {f"{_ROOT}func.{name}": value.detach().cpu().clone().contiguous() for name, value in state.items()}
    training_module = {"_target_": _MODULE, "model": dict(settings)}
    content = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": complete,
        "hyper_parameters": {
            "model": dict(settings),
            "num_datasets": {"train": 1, "val": 0, "test": 0, "predict": 0},
            "optimizer": None,
            "lr_scheduler": None,
            "loss": None,
            "train_metrics": None,
            "val_metrics": None,
            "test_metrics": None,
            "info_dict": {
                "versions": VERSIONS,
                "data": _example_data(settings),
                "training_module": training_module,
            },
        },
    }
    with written_atomically(path) as temporary:
        torch.save(content, temporary)
    return path


def _example_data(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Data for `nequip-package` and `nequip-compile`, which trace the model on a structure: copper atoms that NequIP makes
    itself, taken for atoms of the first type."""
    names = settings["type_names"]
    transforms: list[dict[str, Any]] = [
        {
            "_target_": "nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper",
            "model_type_names": names,
            "chemical_species_to_atom_type_map": {"Cu": names[0]},
        },
        {"_target_": "nequip.data.transforms.NeighborListTransform", "r_max": settings["r_max"]},
    ]
    dataset = {"_target_": "nequip.data.dataset.EMTTestDataset", "num_frames": 2, "transforms": transforms}
    return {
        "_target_": "nequip.data.datamodule.NequIPDataModule",
        "seed": 0,
        **{f"{part}_dataset": {**dataset, "supercell": [2, 2, 2]} for part in ("train", "val")},
        "train_dataloader": {"_target_": "torch.utils.data.DataLoader", "batch_size": 1},
    }

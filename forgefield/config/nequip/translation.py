"""From a config of NequIP or Allegro to a Forgefield config of the same training.

Every key is translated, has no effect for a reason in the notes, or is refused with the reason. Nothing in the file is
executed: `_target_` is a name that is looked up in tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgefield.config.deepmd.translation import Translation
from forgefield.config.nequip.data import DataTranslation
from forgefield.config.nequip.loss import weighted_sum
from forgefield.config.nequip.model import ModelTranslation, translate_model
from forgefield.config.nequip.resolving import resolved
from forgefield.config.nequip.section import NequIPSection
from forgefield.config.nequip.training import translate_module, translate_trainer
from forgefield.errors import ForgefieldError

BY_TYPE = ("per_edge_type_cutoff", "energy_scales", "avg_num_neighbours")
"""Model options whose keys are names of types."""
SECTIONS = ("data", "trainer", "training_module")
COMMENTS = {
    "model": "The network, with NequIP's names; its r_max is data.cutoff, its type_names data.species.",
    "task": "Coefficients of the loss divided by their sum, as NequIP does.",
    "training.monitor_weights": "val/weighted_sum is the sum of errors that NequIP monitors, in eV and A.",
}
"""Comments on settings in a converted config."""


def is_nequip_config(content: object) -> bool:
    """Whether this is a config of NequIP: its three sections, and a training module with a `_target_`."""
    if not isinstance(content, Mapping) or not all(isinstance(content.get(name), Mapping) for name in SECTIONS):
        return False
    return "_target_" in content["training_module"]


def nequip_translation(content: Mapping[str, Any], file: Path) -> Translation:
    """The Forgefield config of a config of NequIP, with what the user should know. file: where it was read."""
    values = resolved(content, file)
    notes = _unused(content, file)
    names = [str(name) for name in _network(values).get("type_names") or []]
    _check_run(values.get("run"), file)
    data_section, trainer_section, module = (
        NequIPSection(values[name], file, name, notes) for name in ("data", "trainer", "training_module")
    )
    data = DataTranslation(data_section, _network(values)).values
    training, loss = translate_module(module, names)
    model_section = module.below("model")
    if model_section is None:
        raise ForgefieldError(f"{file}: 'training_module.model' is missing.")
    model = translate_model(model_section)
    if training["optimizer"]["name"] == "Muon" and model.options["name"] != "nequip":
        raise module.refused(
            "optimizer",
            "is MuonWithAuxAdam for a model other than NequIPGNNModel, whose matrices have other names; use "
            "training.optimizer: {name: Muon}",
        )
    symbols = _symbols(data, model, file)
    weights = weighted_sum(module.below("val_metrics"), symbols)
    module.finish()
    trainer = translate_trainer(trainer_section, training, loss, model.precision)
    if data["val"] is not None and weights:
        first = "val-0" if isinstance(data["val"], dict) else "val"  # NequIP monitors the first set
        training |= {"monitor": f"{first}/weighted_sum", "monitor_weights": weights}
    if model.engine is not None:
        training["engine"] = model.engine
    data |= {"cutoff": model.cutoff, "reference_energies": _by_symbol(model.references, symbols)}
    model.options |= {key: _by_symbol(model.options[key], symbols) for key in BY_TYPE if key in model.options}
    config: dict[str, Any] = {"name": file.stem}
    seed = model.seed if model.seed is not None else values["data"].get("seed")
    config |= {} if seed is None else {"seed": seed}
    if values["data"].get("seed") is not None:
        data["split_seed"] = values["data"]["seed"]
    config |= {"data": data, "model": model.options, "task": loss.task, "training": training, "trainer": trainer}
    return Translation(config, notes)


def _check_run(value: object, file: Path) -> None:
    steps = value if isinstance(value, list) else [value]
    for step in steps:
        if step not in ("train", "val", "test"):
            raise ForgefieldError(f"{file}: 'run' must be a list of train, val and test; it has {step!r}.")
    if "train" not in steps:
        raise ForgefieldError(
            f"{file}: 'run' does not train; test a trained model with `forgefield test RUN --data FILE`."
        )


def _unused(content: Mapping[str, Any], file: Path) -> dict[str, str]:
    """Notes about keys of the file that nothing refers to."""
    if content.get("ckpt_path") is not None:
        raise ForgefieldError(
            f"{file}: 'ckpt_path' is not supported: run the same command again to resume a training, or import the checkpoint "
            "(`forgefield import nequip FILE.ckpt --name NAME`) and train with --finetune runs/NAME."
        )
    text = str(content)
    names = [name for name in content if name not in (*SECTIONS, "run", "ckpt_path")]
    unused = [
        name
        for name in names
        if not re.search(r"\$\{\s*" + re.escape(name) + r"\b|:\s*" + re.escape(name) + r"\s*\}", text)
    ]
    return dict.fromkeys(unused, "nothing in the file refers to it.")


def _network(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping of the model's builder, inside of its modifiers."""
    model = values["training_module"].get("model")
    while isinstance(model, Mapping) and isinstance(model.get("model"), Mapping):
        model = model["model"]
    return model if isinstance(model, Mapping) else {}


def _symbols(data: dict[str, Any], model: ModelTranslation, file: Path) -> dict[str, str]:
    """Chemical symbol of each type name of the model."""
    symbols = data.setdefault("species", model.species)
    if len(symbols) != len(model.species):
        raise ForgefieldError(f"{file}: 'training_module.model.type_names' has other types than the data.")
    if model.pair_species not in (None, symbols):
        raise ForgefieldError(
            f"{file}: 'training_module.model.pair_potential.chemical_species' is {model.pair_species}, but the types are "
            f"{symbols} in the data."
        )
    return dict(zip(model.species, symbols, strict=True))


def _by_symbol(value: Any, symbols: Mapping[str, str]) -> Any:
    """Values by type name as values by chemical symbol, also inside of values."""
    if not isinstance(value, Mapping):
        return value
    return {symbols.get(str(name), str(name)): _by_symbol(item, symbols) for name, item in value.items()}

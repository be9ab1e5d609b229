"""From a DeePMD-kit input to a Forgefield config of the same run.

Every key of DeePMD-kit's schema is translated, has no effect for a reason in `Translation.notes`, or is refused
with that reason. The config consists of plain values and can be stored, changed and trained like any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forgefield.config.deepmd.data import translate_data
from forgefield.config.deepmd.labels import drop_missing_virial
from forgefield.config.deepmd.learning import translate_learning_rate, translate_optimiser
from forgefield.config.deepmd.loss import translate_loss
from forgefield.config.deepmd.model import Model, translate_model
from forgefield.config.deepmd.old_forms import updated
from forgefield.config.deepmd.outputs import OutputTask
from forgefield.config.deepmd.run import (
    precision,
    refuse_epochs_of_draws,
    translate_length,
    translate_run,
    translate_validating,
)
from forgefield.config.deepmd.section import Section
from forgefield.config.deepmd.several import Branches
from forgefield.config.deepmd.spin import FORCE_MAG, cutoff_with_spins, spin_fields
from forgefield.config.sources import read_text, read_yaml
from forgefield.errors import ForgefieldError
from forgefield.untrusted.documents import load_json

COMMENTS = {
    "model": "The network, with DeePMD-kit's names; its rcut is data.cutoff, its type_map data.species.",
    "trainer.max_steps": "Optimiser steps.",
    "trainer.val_check_interval": "Steps between two validations; each is over all validation frames.",
    "trainer.check_val_every_n_epoch": "Validations are counted in steps, not in epochs.",
    "callbacks": "The learning curve as DeePMD-kit writes it, a row for each validation.",
}
"""Comments on settings in a converted config."""


@dataclass(frozen=True)
class Translation:
    """config: as a YAML file would hold it. notes: dotted key of the input -> what became of it, where it is not plain."""

    config: dict[str, Any]
    notes: dict[str, str] = field(default_factory=dict)


def is_deepmd_input(content: object) -> bool:
    """Whether this is an input of DeePMD-kit: a training, and a model without a name but with a type map or a descriptor, or
    several, or settings for NVNMD hardware."""
    if not isinstance(content, Mapping) or not isinstance(content.get("training"), Mapping):
        return False
    if "nvnmd" in content:
        return True
    model = content.get("model")
    if not isinstance(model, Mapping) or "name" in model or "from" in model:
        return False
    return any(key in model for key in ("type_map", "descriptor", "model_dict", "models"))


def translate(content: Mapping[str, Any], file: Path, species: Sequence[str] | None = None) -> dict[str, Any]:
    """The Forgefield config of an input.

    file: where it was read, for messages and relative paths. species: elements of the atom types, in their order, where the
    user gave them.
    """
    return translation(content, file, species).config


def translation(content: Mapping[str, Any], file: Path, species: Sequence[str] | None = None) -> Translation:
    """The same, with what the user should know."""
    root = Section(updated(content, file), file)
    root.only("nvnmd", None, "training for NVNMD hardware is of DeePMD-kit's TensorFlow alone")
    model_section, training = root.below("model"), root.below("training")
    if model_section is None or training is None:
        raise ForgefieldError(f"{file}: an input of DeePMD-kit needs the sections 'model' and 'training'.")
    model, data, learnt = _parts(root, model_section, training, species)
    length, task = translate_length(training, data), learnt.task
    refuse_epochs_of_draws(training, length, data)
    weights = precision(training, model.precision)
    run = translate_run(training, length, learnt, validates=data["val"] is not None)
    learning = translate_learning_rate(root.below("learning_rate"), file, length.get("max_steps"))
    optimiser = translate_optimiser(root.below("optimizer"))
    best = translate_validating(root.below("validating"), list(task))
    root.finish()
    config = {
        "name": file.stem,
        "seed": run["seed"],
        "data": data,
        "model": model.options,
        "task": task,
        "training": {**learning, "optimizer": optimiser, "precision": weights, **run["training"], **best},
        "trainer": run["trainer"],
        "callbacks": run["callbacks"],
    }
    return Translation(config, root.notes)


def _parts(
    root: Section, model_section: Section, training: Section, species: Sequence[str] | None
) -> tuple[Model, dict[str, Any], OutputTask]:
    """Model, our `data` section, and what is learnt; of one model or of several branches."""
    if "model_dict" in model_section.names():
        branches = Branches(root, model_section, training, species)
        model, data, learnt = branches.model(), branches.data(), OutputTask(branches.task())
        root.only("loss", None, "with 'model.model_dict' losses are given in 'loss_dict'")
        return model, {"species": model.species, "cutoff": model.cutoff, **data}, learnt
    _refuse_several(root, model_section, training)
    model = translate_model(model_section, species)
    data = {"species": model.species, "cutoff": model.cutoff}
    data |= {"reference_energies": "fit"} if model.fitting["type"] == "ener" else {}
    data |= translate_data(training, model.species, model.type_names)
    loss = root.below("loss") or Section({}, root.file, "loss", root.notes)
    learnt = translate_loss(
        loss,
        model.fitting,
        model.species,
        data["batch"],
        model.options.get("atom_exclude_types", ()),
        has_spins=bool(model.spin),
    )
    drop_missing_virial(root, learnt.task, data["train"])
    if "virial" not in learnt.task:
        for column in ("rmse_v", "mae_v"):
            learnt.columns.pop(column, None)
    if model.spin:
        data["cutoff"] = cutoff_with_spins(model.spin, data, root.file)
    fields = {**model.fields, **learnt.fields}
    fields |= spin_fields(model.spin, model.species, labelled=FORCE_MAG in learnt.task)
    if fields:
        data["labels"] = {"fields": fields}
    return model, data, learnt


def _refuse_several(root: Section, model: Section, training: Section) -> None:
    """What belongs to several models trained together, in an input of one."""
    why = "it belongs to several models (model.model_dict), and there is one"
    for section, name in ((model, "shared_dict"), (root, "loss_dict"), (training, "data_dict")):
        section.only(name, None, why)
    for name in ("model_prob", "num_epoch_dict"):
        if training.take(name):
            raise training.refused(name, f"has no meaning: {why}")


def read_input(file: Path) -> Any:
    """The content of a file, JSON by its name or else YAML; bad syntax and keys given twice are refused."""
    if file.suffix != ".json":
        return read_yaml(file)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs if not name.startswith("_")]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ForgefieldError(f"{file}: '{twice}' is given twice in one section.")
        return dict(pairs)

    try:
        return load_json(read_text(file), object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ForgefieldError(f"{file}, line {error.lineno}: this is not valid JSON: {error.msg}.") from error
    except ValueError as error:
        raise ForgefieldError(f"{file}: this is not valid JSON: {error}.") from error

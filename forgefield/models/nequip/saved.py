"""Files of the NequIP framework: checkpoints, packages, and the files that a fine-tuned model was trained from.

A checkpoint (.ckpt) has the options and the state of a model. A package (.nequip.zip) has the modules themselves, next to code
that is not read. The options of a fine-tuned model name the checkpoint or package that it started from, which is read as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.module_records import children_of, tensors_of
from forgefield.models.nequip.architecture import Architecture
from forgefield.models.nequip.importer_checks import (
    CUTOFF,
    apply_modifiers,
    builder_settings,
    match_averages,
    schedule_free_averages,
)
from forgefield.models.nequip.modules import TERMS, by_type, module_settings, scale_shift_settings
from forgefield.untrusted.documents import load_yaml
from forgefield.untrusted.torch_files import Record, open_torch_package, read_torch_file

PACKAGE = ".nequip.zip"
SOLE = "sole_model"
SOURCES = {"ModelFromCheckpoint": "checkpoint_path", "ModelFromPackage": "package_path"}
"""Builders that load a model, and the option that names its file."""
SCHEDULE_FREE = "schedulefree_optimizer_state_dict"
"""Key of a checkpoint with the state of a schedule-free optimiser."""
_MAPPER = "ChemicalSpeciesToAtomTypeMapper"
_DEEPEST = 10
"""Models that were fine-tuned one from another."""


@dataclass(frozen=True)
class SavedModel:
    """settings: arguments of the builder of the model. tensors: its state by the framework's names of modules. origin: what was
    read, for the user. elements: chemical symbols of types, as far as the file has them."""

    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    origin: str
    elements: dict[str, str] = field(default_factory=dict)


def read_saved(kind: Architecture, path: Path, weights: str, source: Path | None = None, depth: int = 0) -> SavedModel:
    """The model in a checkpoint or package. weights: `ema` or `raw`. source: the file from which it was trained further, if
    that is not where it was."""
    if depth > _DEEPEST:
        raise ForgefieldError(f"{path}: it was trained from a file that was trained from it.")
    if path.name.endswith(PACKAGE):
        return _from_package(kind, path)
    content = read_torch_file(path)
    if not isinstance(content, Mapping) or "state_dict" not in content or "hyper_parameters" not in content:
        raise ForgefieldError(f"{path} is neither a checkpoint nor a package of {kind.title}.")
    return _from_checkpoint(kind, path, content, weights, source, depth)


def _from_checkpoint(
    kind: Architecture, path: Path, content: Mapping[str, Any], weights: str, source: Path | None, depth: int
) -> SavedModel:
    hyper = content["hyper_parameters"]
    info = hyper.get("info_dict") or {}
    settings = hyper.get("model")
    if not isinstance(settings, Mapping):
        raise ForgefieldError(f"{path} does not contain the options of its model (hyper_parameters.model).")
    base = _base(kind, path, settings, source, depth)
    settings = apply_modifiers(path, settings, None if base is None else base.settings)
    state = content["state_dict"]
    tensors = model_tensors(kind, path, state)
    averages = sorted((int(key.rsplit("_", 1)[1]), key) for key in state if key.startswith("ema.ema_weight_"))
    extra = state.get("ema._extra_state", {})
    average_is_apart = not isinstance(extra, Mapping) or extra.get("is_holding_ema_weights", True)
    if averages and average_is_apart == (weights == "ema"):
        tensors |= match_averages(path, tensors, [state[name] for _, name in averages], settings)
    elif SCHEDULE_FREE in content and weights == "ema":
        averages = averages or [(0, SCHEDULE_FREE)]
        tensors |= schedule_free_averages(path, tensors, content[SCHEDULE_FREE], settings)
    which = ("averaged" if weights == "ema" else "last") if averages else "last"
    versions = info.get("versions", {})
    origin = f"{kind.title} {versions.get(kind.name, versions.get('nequip', 'unknown'))}, {which} weights"
    elements = _elements(info.get("data"))
    if base is not None:
        origin += f", trained from {base.origin}"
        elements = base.elements | elements
    return SavedModel(dict(settings), tensors, origin, elements)


def _from_package(kind: Architecture, path: Path) -> SavedModel:
    with open_torch_package(path) as package:
        config = load_yaml(package.text("model/config.yaml"))
        metadata = load_yaml(package.text("model/package_metadata.txt"))
        model = _sole(path, package.records("model/eager_model.pkl"))
    config, metadata = (value if isinstance(value, Mapping) else {} for value in (config, metadata))
    try:
        tensors = model_tensors(kind, path, dict(tensors_of(model, persistent=True)))
        settings = _plain_builder(config)
        if settings is None:
            settings = module_settings(path, model, kind.describe)
        else:  # a package may have been modified after the training
            settings = settings | scale_shift_settings(path, model, settings.get("type_names") or [])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ForgefieldError(
            f"{path}: its modules are not of a supported version of {kind.title} ({error!r})."
        ) from error
    versions = metadata.get("versions") or {}
    version = versions.get(kind.name, versions.get("nequip", "unknown"))
    return SavedModel(settings, tensors, f"{kind.title} {version}, package", _elements(config.get("data")))


def _sole(path: Path, models: object) -> Record:
    """The model of a package, which may hold several."""
    found = children_of(models) if isinstance(models, Record) else {}
    if SOLE not in found:
        names = ", ".join(found) or "none"
        raise ForgefieldError(f"{path}: a package with one model is expected; its models are: {names}.")
    return found[SOLE]


def _plain_builder(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The builder's arguments in a config; None if the model was loaded from another file."""
    module = config.get("training_module")
    model = module.get("model") if isinstance(module, Mapping) else None
    settings = builder_settings(model) if isinstance(model, Mapping) else {}
    return dict(settings) if "type_names" in settings and not _source_option(settings) else None


def _source_option(settings: Mapping[str, Any]) -> str | None:
    """The option that names the file from which a model is loaded, if it is."""
    return SOURCES.get(str(settings.get("_target_", "")).rsplit(".", 1)[-1])


def _base(
    kind: Architecture, path: Path, settings: Mapping[str, Any], source: Path | None, depth: int
) -> SavedModel | None:
    """The model that `settings` load, with its scales and shifts as they are in its file; None if they build a new one."""
    settings = builder_settings(settings)
    option = _source_option(settings)
    if option is None:
        if source is not None:
            raise ForgefieldError(f"{path} has all options of its model; leave --options out.")
        return None
    stored = Path(str(settings.get(option)))
    candidates = [source] if source is not None else [stored, path.parent / stored, path.parent / stored.name]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise ForgefieldError(
            f"{path} was trained from {candidates[0]}, which is not there and has the options of the model; give that "
            "checkpoint or package with --options FILE."
        )
    base = read_saved(kind, file, "ema", depth=depth + 1)
    constants = {
        f"per_type_energy_{term}": by_type(
            base.tensors.get(f"per_type_energy_scale_shift.{term}"), base.settings["type_names"]
        )
        for term in TERMS
    }
    return replace(base, settings=base.settings | constants)


def model_tensors(kind: Architecture, path: Path, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """State of the energy network by the framework's module names, without what follows from the options."""
    tensors: dict[str, Tensor] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or key.startswith(("ema.", "loss.", "run_stage")) or "metrics" in key:
            continue
        name = re.sub(r"^(weight/)?(model\.)*(sole_model\.)?(model\.)*(func\.)*", "", key)
        if name == CUTOFF:
            tensors[name] = value
            continue
        if kind.derived.fullmatch(name):
            if value.numel() and name.endswith((".bias", "tp.weight", "mul.weight", "multiplier.weight")):
                raise ForgefieldError(f"{path}: {key} has weights that this kind of model does not have.")
            continue
        if value.numel() or not name.startswith("per_type_energy_scale_shift."):  # empty where there is no such term
            tensors[name] = value
    if not any(kind.embedding.fullmatch(name) for name in tensors):
        raise ForgefieldError(f"{path} does not contain a model of {kind.title} (it has no embedding of species).")
    return tensors


def _elements(data: object) -> dict[str, str]:
    """Chemical symbol of each type, where the transforms of the data name exactly one."""
    elements: dict[str, str] = {}
    several: set[str] = set()
    for mapper in _mappers(data):
        for symbol, name in (mapper.get("chemical_species_to_atom_type_map") or {}).items():
            if elements.setdefault(str(name), str(symbol)) != str(symbol):
                several.add(str(name))
    return {name: symbol for name, symbol in elements.items() if name not in several}


def _mappers(value: object, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The transforms in the section `data` that map species to types."""
    if depth > _DEEPEST:
        return
    if isinstance(value, Mapping):
        if str(value.get("_target_", "")).endswith(_MAPPER):
            yield value
        for item in value.values():
            yield from _mappers(item, depth + 1)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _mappers(item, depth + 1)

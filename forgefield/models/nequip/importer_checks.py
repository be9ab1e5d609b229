"""Consistency of files of the NequIP framework: modifiers around a model, averaged weights, constants against the options.

A file contains weights under the names of modules and, separately, the options that the modules were built from. Both must
describe the same model. Averaged weights have numbers instead of names; which tensors are trained decides what they belong to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError

CUTOFF = "edge_norm._rmax_recip"
"""State of the framework's models: the inverse of the cutoff, or of those of all pairs of species, 1/A."""
SCALE_SHIFT = "modify_PerTypeScaleShift"
_NEUTRAL = {
    "enable_OpenEquivariance",
    "enable_CuEquivariance",
    "enable_TritonContracter",
    "enable_CuEquivarianceContracter",
    "enable_ForceStressOutput",
    "disable_ForceStressOutput",
}
"""Modifiers that change how a model runs but not its weights."""
_TERMS = ("scales", "shifts")


def apply_modifiers(
    path: Path, settings: Mapping[str, Any], base: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """Options of the model inside `modify` sections, with what the modifiers change; unknown modifiers are refused.

    base: options of the model in another file, if the innermost section loads that.
    """
    if not _is_modification(settings):
        return settings if base is None else base
    inner = dict(apply_modifiers(path, settings["model"], base))
    modifiers = settings.get("modifiers") or []
    if isinstance(modifiers, Mapping):  # by name of the model; a file holds one
        modifiers = [modifier for of_model in modifiers.values() for modifier in of_model]
    for modifier in modifiers:
        name = modifier.get("modifier")
        if name == SCALE_SHIFT:
            inner |= _scale_shift(path, inner, modifier)
        elif name not in _NEUTRAL:
            raise ForgefieldError(
                f"{path}: the model was changed by the modifier {name}, which is not supported; "
                f"{SCALE_SHIFT} and {', '.join(sorted(_NEUTRAL))} can be imported."
            )
    return inner


def builder_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options of the builder inside `modify` sections, without what the modifiers change."""
    while _is_modification(settings):
        settings = settings["model"]
    return settings


def _is_modification(settings: Mapping[str, Any]) -> bool:
    name = str(settings.get("_target_", "")).rsplit(".", 1)[-1]
    return name == "modify" and isinstance(settings.get("model"), Mapping)


def _scale_shift(path: Path, settings: Mapping[str, Any], modifier: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the modifier replaces; left out, `*_trainable` is false, whatever the model had before."""
    species = [str(symbol) for symbol in settings.get("type_names", [])]
    changed: dict[str, Any] = {}
    for term in _TERMS:
        key = f"per_type_energy_{term}"
        changed[f"{key}_trainable"] = bool(modifier.get(f"{term}_trainable", False))
        old, new = settings.get(key), modifier.get(term)
        if new is not None:
            before = old if isinstance(old, Mapping) else dict.fromkeys(species, old)
            changed[key] = {**before, **(new if isinstance(new, Mapping) else dict.fromkeys(species, new))}
    unknown = set(modifier) - {"modifier", *_TERMS, *(f"{term}_trainable" for term in _TERMS)}
    if unknown:
        raise ForgefieldError(f"{path}: {SCALE_SHIFT} has the argument {min(unknown)}, which is not supported.")
    return changed


def schedule_free_averages(
    path: Path, tensors: Mapping[str, Tensor], optimiser: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Averaged weights by name, from the weights and the state of a schedule-free optimiser.

    In the middle of a training, the weights are y = beta x + (1 - beta) z: x is the average, z is in the state.
    """
    groups, state = optimiser["param_groups"], optimiser["state"]
    if len(groups) != 1:
        raise ForgefieldError(f"{path}: the weights were trained in {len(groups)} groups, which is not supported.")
    group = groups[0]
    if not group.get("train_mode", False) or not state:
        return {}
    beta = float(group["betas"][0] if "betas" in group else group["momentum"])
    trained = _trained(path, tensors, len(group["params"]), settings)
    ends = [state.get(index, {}).get("z") for index in group["params"]]  # none where there was no gradient
    return {name: torch.lerp(tensors[name], end, 1 - 1 / beta) for name, end in zip(trained, ends) if end is not None}


def match_averages(
    path: Path, tensors: Mapping[str, Tensor], averages: Sequence[Tensor], settings: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Averaged weights by name. They are stored in the order of the parameters, which is that of the state."""
    trained = _trained(path, tensors, len(averages), settings)
    for name, average in zip(trained, averages):
        if average.shape != tensors[name].shape or average.dtype != tensors[name].dtype:
            raise ForgefieldError(
                f"{path}: the averaged weight for {name} has shape {tuple(average.shape)} ({average.dtype}) instead of "
                f"{tuple(tensors[name].shape)} ({tensors[name].dtype}). Options and weights are not of the same model; "
                "--weights raw imports the last weights."
            )
    return dict(zip(trained, averages))


def _trained(path: Path, tensors: Mapping[str, Tensor], count: int, settings: Mapping[str, Any]) -> list[str]:
    """Names of the tensors that are trained, of which there have to be `count` averages."""
    trained = [name for name in tensors if _is_parameter(name, settings)]
    if len(trained) != count:
        constant = ", ".join(name for name in tensors if name not in trained) or "none"
        raise ForgefieldError(
            f"{path} has {count} averaged weights, and by its options {len(trained)} tensors are trained (not trained: "
            f"{constant}). Options and weights are not of the same model; --weights raw imports the last weights."
        )
    return trained


def _is_parameter(name: str, settings: Mapping[str, Any]) -> bool:
    if name == CUTOFF:
        return False
    if name.endswith("bessel_encode.bessel_weights"):
        radial = settings.get("radial_chemical_embed", settings)
        return bool(radial.get("bessel_trainable", False))
    for term in _TERMS:
        if name == f"per_type_energy_scale_shift.{term}":
            return bool(settings.get(f"per_type_energy_{term}_trainable", False))
    return True


def cutoff_in_file(path: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> list[str]:
    """Compare the stored cutoff with r_max, if there is one cutoff. Returns names of what was checked."""
    stored = tensors.get(CUTOFF)
    if stored is None or stored.numel() != 1 or settings.get("per_edge_type_cutoff") is not None:
        return []
    reach = 1 / float(stored)
    if not math.isclose(reach, float(settings["r_max"]), rel_tol=1e-5):
        raise ForgefieldError(
            f"{path}: the model was built with a cutoff of {reach:g} A, but r_max is {settings['r_max']} in its options."
        )
    return ["the cutoff"]


def check_constants(
    path: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], species: Sequence[str]
) -> list[str]:
    """Require that scales, shifts and Bessel frequencies that are not trained have the values of the options. Returns names of
    what was checked."""
    checked = []
    for name, stored in tensors.items():
        if name == CUTOFF or _is_parameter(name, settings):
            continue
        if name.endswith("bessel_weights"):
            expected = torch.arange(1, stored.numel() + 1, dtype=torch.float64)  # in units of pi
            what, option = "Bessel frequencies", "bessel_trainable"
        else:
            term = name.rpartition(".")[2]
            option_value = settings.get(f"per_type_energy_{term}")
            values = [option_value] * stored.numel()
            if isinstance(option_value, Mapping):
                values = [option_value[symbol] for symbol in species]
            if any(not isinstance(value, (int, float)) for value in values):
                continue
            expected = torch.tensor(values, dtype=torch.float64)
            what, option = f"energy {term}", f"per_type_energy_{term}_trainable"
        constants = stored.reshape(-1).double()
        if constants.shape != expected.shape or not torch.allclose(constants, expected, rtol=1e-5, atol=1e-8):
            raise ForgefieldError(
                f"{path}: {name} is {_short(constants)}, but constant in the options, {_short(expected)}. If it was trained, "
                f"set {option}: true in the options; otherwise options and weights are not of the same model."
            )
        checked.append(what)
    return checked


def describe_checks(count: int, compared: Sequence[str]) -> str:
    """A sentence for the user."""
    constants = f" {', '.join(dict.fromkeys(compared))} agree with the options;" if compared else ""
    return (
        f"Checked: all {count:,} numbers of the file are used and no weight is missing;{constants} the file contains no "
        "predictions to compare with."
    )


def _short(values: Tensor) -> str:
    return ", ".join(f"{value:.6g}" for value in values[:6].tolist()) + (", ..." if values.numel() > 6 else "")

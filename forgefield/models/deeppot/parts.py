"""The parts a Deep Potential is made of, by DeePMD-kit's names, and the check of what was written for them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.models.options import check_keys

DESCRIPTORS = {
    "se_e2_a": "se_e2_a.SeE2A",
    "se_e2_r": "se_e2_r.SeE2R",
    "se_atten": "se_atten.SeAtten",
    "se_atten_v2": "se_atten.SeAttenV2",
}
"""Where the class of each descriptor is; it has `Options` and `complete`."""
FITTINGS = {
    "ener": "fitting.EnergyFitting",
    "property": "tensor_fitting.PropertyFitting",
    "dos": "tensor_fitting.DosFitting",
    "dipole": "tensor_fitting.DipoleFitting",
    "polar": "tensor_fitting.PolarFitting",
}
"""Where the class of each fitting network is; likewise."""
ALIASES = {"se_a": "se_e2_a", "se_r": "se_e2_r", "dpa1": "se_atten"}
_ELSEWHERE = {"rcut": "data.cutoff", "type_map": "data.species", "ntypes": "data.species"}
_WITHOUT_MEANING = {
    "dim_case_embd": "a model has one fitting network",
    "use_aparam_as_mask": "atoms that are not there are left out of the data",
    "layer_name": "networks do not share layers by name",
    "spin": "spins are not part of this model",
}


def descriptor_part(section: Mapping[str, Any]) -> tuple[Any, Any]:
    """Class and options of the section `model.descriptor`."""
    return _part(section, "model.descriptor", "se_e2_a", DESCRIPTORS)


def fitting_part(section: Mapping[str, Any]) -> tuple[Any, Any]:
    """Class and options of the section `model.fitting_net`."""
    return _part(section, "model.fitting_net", "ener", FITTINGS)


def check_parts(given: Mapping[str, Any]) -> None:
    """Raise for what can be seen to be wrong in the sections of a model's parts."""
    if "descriptor" in given:
        descriptor_part(given["descriptor"])
    if "fitting_net" in given:
        fitting_part(given["fitting_net"])


def _part(section: Mapping[str, Any], where: str, default: str, known: Mapping[str, str]) -> tuple[Any, Any]:
    name = section.get("type", default)
    name = ALIASES.get(name, name)
    if name not in known:
        raise ForgefieldError(
            f"{where}.type is '{name}'; choose one of {', '.join(known)}.{did_you_mean(str(name), known)}"
        )
    module, _, class_name = known[name].rpartition(".")
    found = getattr(import_module(f"forgefield.models.deeppot.{module}"), class_name)
    options = {key: value for key, value in section.items() if key != "type"}
    for key in options:
        if key in _ELSEWHERE:
            raise ForgefieldError(f"{where}.{key} is not set here: it is {_ELSEWHERE[key]}.")
        if key in _WITHOUT_MEANING:
            raise ForgefieldError(f"{where}.{key} has no meaning here: {_WITHOUT_MEANING[key]}; remove it.")
    check_keys(found.Options, options, where=where, what=name)
    return found, found.Options(**options, type=name)

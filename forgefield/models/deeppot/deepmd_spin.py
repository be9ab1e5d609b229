"""Models of spins in DeePMD-kit's files: a model of real and virtual types, `backbone_model`, in which real types come first.

Virtual atoms have no energy there either, so that only the descriptor has networks and statistics for their types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.deepmd_networks import Tree
from forgefield.models.deeppot.options import ALIASES
from forgefield.models.deeppot.spin import SUPPORTED, magnetic_species, scales, with_virtual

REACH = 1.0
"""Largest distance of a virtual atom from its atom, A, for which imported models have neighbour lists."""
PROTECTION = 0.01
"""`env_protection` of models of spins without one, A."""


def split_spin(model: Mapping[str, Any]) -> tuple[Tree, Tree]:
    """The model of the real types, in which only the descriptor has virtual types as well, and the section `model.spin` without
    the cutoff. model: of type spin_ener."""
    backbone, spin = dict(model["backbone_model"]), model["spin"]
    n = len(backbone["type_map"]) // 2
    magnetic = [bool(flag) for flag in spin["use_spin"]]
    variables = {
        key: None if array is None else np.asarray(array)[:, :n] for key, array in backbone["@variables"].items()
    }
    descriptor, fitting = dict(backbone["descriptor"]), dict(backbone["fitting"])
    pairs = _of_real_types(backbone.get("pair_exclude_types") or [], n)
    others = [pair for pair in _of_real_types(descriptor.pop("exclude_types", []), n) if pair not in pairs]
    if others:
        raise ForgefieldError(
            f"descriptor.exclude_types contains {others}, which has no counterpart in a model of spins."
        )
    networks = fitting["nets"]["networks"]
    inner = dict(fitting["@variables"])
    if inner.get("bias_atom_e") is not None:
        inner["bias_atom_e"] = np.asarray(inner["bias_atom_e"])[:n]
    excluded = [number for number in backbone.get("atom_exclude_types") or [] if number < n]
    fitting |= {
        "nets": {"networks": networks[:n] if len(networks) == 2 * n else networks},
        "exclude_types": excluded,
        "atom_ener": (fitting.get("atom_ener") or [])[:n],
        "@variables": inner,
    }
    standard = {
        **backbone,
        "type_map": backbone["type_map"][:n],
        "atom_exclude_types": excluded,
        "pair_exclude_types": pairs,
        "@variables": variables,
        "descriptor": {**descriptor, "exclude_types": []},
        "fitting": fitting,
    }
    return standard, {"use_spin": magnetic, "virtual_scale": scales(_numbers(spin["virtual_scale"]), magnetic)}


def _of_real_types(pairs: Sequence[Sequence[int]], n: int) -> list[list[int]]:
    return [[int(number) for number in pair] for pair in pairs if max(pair) < n]


def _numbers(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def real_rows(options: Tree, n: int) -> Tree:
    """Options of a descriptor of n real and n virtual types, as those of the real types."""
    changed = {key: options[key][:n] for key in ("davg", "dstd")}
    sel = options.get("sel")
    if isinstance(sel, list) and len(sel) == 2 * n:
        if sel[:n] != sel[n:]:
            raise ForgefieldError(f"descriptor.sel is {sel}; virtual types should have the same numbers as real ones.")
        changed["sel"] = sel[:n]
    return {**options, **changed}


def backbone_settings(settings: Mapping[str, Any]) -> Tree:
    """Settings of the model of real and virtual types, from those of an input or checkpoint."""
    descriptor, types = dict(settings["descriptor"]), [str(name) for name in settings["type_map"]]
    kind = ALIASES.get(str(descriptor.get("type", "se_e2_a")), str(descriptor.get("type", "se_e2_a")))
    if kind not in SUPPORTED:
        raise ForgefieldError(f"a model of spins with the descriptor {kind}; supported are {', '.join(SUPPORTED)}.")
    descriptor["env_protection"] = descriptor.get("env_protection") or PROTECTION
    if kind == "se_e2_a":
        descriptor["sel"] = [*descriptor["sel"], *descriptor["sel"]]
    pairs = settings.get("pair_exclude_types") or []
    descriptor["exclude_types"] = pairs
    others = {key: value for key, value in settings.items() if key != "spin"}
    return {**others, "type_map": with_virtual(types), "pair_exclude_types": pairs, "descriptor": descriptor}


def spin_section(settings: Mapping[str, Any]) -> Tree:
    """use_spin and virtual_scale for every type, from the section `spin` of an input or checkpoint."""
    types, spin = [str(name) for name in settings["type_map"]], settings["spin"]
    magnetic = magnetic_species(list(spin["use_spin"]), types)
    return {"use_spin": magnetic, "virtual_scale": scales(spin.get("virtual_scale"), magnetic)}


def joined_spin(standard: Tree, spin: Mapping[str, Any]) -> Tree:
    """The model as DeePMD-kit's type spin_ener. standard: the model, in which only the descriptor has virtual types."""
    types, magnetic = standard["type_map"], spin["use_spin"]
    n = len(types)
    unused = [n + number for number in range(n) if not magnetic[number]]
    pairs = [[number, other] for number in unused for other in range(2 * n)] + standard["pair_exclude_types"]
    excluded = [*standard["atom_exclude_types"], *range(n, 2 * n)]
    fitting = dict(standard["fitting"])
    collection, inner = dict(fitting["nets"]), dict(fitting["@variables"])
    if collection["ndim"]:
        collection["networks"] = [*collection["networks"], *collection["networks"]]
    inner["bias_atom_e"] = np.concatenate([inner["bias_atom_e"]] * 2)
    fitting |= {
        "ntypes": 2 * n,
        "exclude_types": excluded,
        "nets": {**collection, "ntypes": 2 * n},
        "@variables": inner,
    }
    fitting["atom_ener"] = None if fitting["atom_ener"] is None else [*fitting["atom_ener"], *[None] * n]
    backbone = {
        **standard,
        "atom_exclude_types": excluded,
        "pair_exclude_types": pairs,
        "@variables": {key: np.concatenate([value] * 2, 1) for key, value in standard["@variables"].items()},
        "descriptor": {**standard["descriptor"], "exclude_types": pairs},
        "fitting": fitting,
    }
    settings = {"use_spin": list(magnetic), "virtual_scale": list(spin["virtual_scale"])}
    return {"type": "spin_ener", "backbone_model": backbone, "spin": settings}

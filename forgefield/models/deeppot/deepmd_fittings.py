"""DeePMD-kit's backend-free form of the fittings beside the energy, there and back.

There a fitting's numbers are scaled and shifted by the atomic model around it; here that is part of the fitting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.deepmd_networks import (
    Arrays,
    Tree,
    collection_tree,
    numpy_of,
    precision_of,
    refuse,
    stacked_state,
)
from forgefield.models.deeppot.tensor_fitting import PolarFitting, PropertyFitting, TensorFitting

TYPES = ("dipole", "polar", "dos", "property")
_SAME = ("neuron", "resnet_dt", "numb_fparam", "numb_aparam", "activation_function", "precision")
"""Settings with the same name and meaning in both forms."""
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "dim_case_embd": (0,),
    "tot_ener_zero": (False,),
    "use_aparam_as_mask": (False,),
    "spin": (),
    "layer_name": (),
}


class _Applied(NamedTuple):
    """What is done to the numbers of the network, float64: `inner` (n_species, dim_out) is added to them, the outputs are
    multiplied with `std` and shifted by `bias`, each (n_species, numbers) or None for nothing."""

    inner: np.ndarray
    bias: np.ndarray | None
    std: np.ndarray | None


def from_deepmd(
    section: Mapping[str, Any],
    out_bias: np.ndarray | None = None,
    out_std: np.ndarray | None = None,
    excluded: Sequence[int] = (),
) -> tuple[Tree, Arrays]:
    """Options and state of a fitting of type dipole, polar, dos or property.

    out_bias, out_std: (n_species, numbers), what the atomic model applies to the fitting's outputs. excluded: species without
    a value, which that model says too.
    """
    kind = section["type"]
    if kind not in TYPES:
        raise ForgefieldError(f"fitting.type is {kind}; known here are {', '.join(TYPES)}.")
    refuse("fitting", section, _HARMLESS | {"exclude_types": ([], list(excluded))})
    variables = section["@variables"]
    trainable = section.get("trainable")
    options = {key: section[key] for key in _SAME}
    options |= {"type": kind, "trainable": True if trainable is None else trainable}
    options["default_fparam"] = section.get("default_fparam")
    for name in ("fparam", "aparam"):
        if section[f"numb_{name}"]:
            options[f"{name}_avg"] = np.ravel(variables[f"{name}_avg"]).astype(float).tolist()
            options[f"{name}_std"] = (1 / np.ravel(variables[f"{name}_inv_std"]).astype(float)).tolist()
    state = stacked_state("network.networks", section["nets"]["networks"])
    inner = np.asarray(variables["bias_atom_e"], dtype=np.float64).reshape(int(section["ntypes"]), -1)
    more, numbers = _READERS[kind](section, state, _Applied(inner, out_bias, out_std))
    return options | more, state | numbers


def _read_dipole(section: Mapping[str, Any], state: Arrays, applied: _Applied) -> tuple[Tree, Arrays]:
    return {}, _into_last_layer(state, applied.inner)


def _read_polar(section: Mapping[str, Any], state: Arrays, applied: _Applied) -> tuple[Tree, Arrays]:
    variables, n = section["@variables"], len(applied.inner)
    diagonal = np.ravel(variables["constant_matrix"]).astype(float)
    if applied.bias is not None:
        diagonal = diagonal + np.reshape(applied.bias, (n, 3, 3)).trace(axis1=1, axis2=2) / 3
    scale = np.ravel(variables["scale"]).astype(float)
    options = {"scale": scale.tolist(), "out_bias": diagonal.tolist()}
    options |= {key: section[key] for key in ("fit_diag", "shift_diag")}
    return options, _into_last_layer(state, applied.inner) | {"scale": scale, "out_bias": diagonal}


def _read_dos(section: Mapping[str, Any], state: Arrays, applied: _Applied) -> tuple[Tree, Arrays]:
    total = applied.inner
    if applied.bias is not None:
        total = total + np.reshape(applied.bias, total.shape)
    options = {"numb_dos": section["dim_out"], "rcond": section["rcond"], "out_bias": total.tolist()}
    return options, {"out_bias": total}


def _read_property(section: Mapping[str, Any], state: Arrays, applied: _Applied) -> tuple[Tree, Arrays]:
    """Where species are not told apart, the numbers of the first are those of all."""
    inner = applied.inner
    bias = np.zeros_like(inner) if applied.bias is None else np.reshape(applied.bias, inner.shape).astype(float)
    std = np.ones_like(inner) if applied.std is None else np.reshape(applied.std, inner.shape).astype(float)
    if not section.get("distinguish_types", False):
        bias, std = (np.repeat(values[:1], len(inner), 0) for values in (bias, std))
    bias = bias + inner * std
    apart = bool(np.ptp(bias, axis=0).any() or np.ptp(std, axis=0).any())
    options = {"property_name": section["var_name"], "out_bias": bias.tolist(), "out_std": std.tolist()}
    options |= {"distinguish_types": apart or bool(section.get("distinguish_types", False))}
    options |= {key: section[key] for key in ("task_dim", "intensive")}
    return options, {"out_bias": bias, "out_std": std}


_READERS = {"dipole": _read_dipole, "polar": _read_polar, "dos": _read_dos, "property": _read_property}


def _into_last_layer(state: Arrays, inner: np.ndarray) -> Arrays:
    """The constants of the last layer with `inner` added, of each species' own network or of the one of all."""
    name = max((key for key in state if key.endswith(".b")), key=lambda key: int(key.split(".")[-2]))
    b = state[name]
    if len(b) == 1 and np.ptp(inner, axis=0).any():
        raise ForgefieldError(
            "fitting.bias_atom_e differs between species of one network, which has no counterpart here."
        )
    return {name: b + inner[: len(b)].astype(b.dtype)}


def to_deepmd(fitting: TensorFitting, excluded: Sequence[int] = ()) -> tuple[Tree, np.ndarray, np.ndarray]:
    """The fitting as DeePMD-kit's class `Fitting`, and what the atomic model around it has to apply to its outputs:
    out_bias and out_std, each (n_species, numbers). excluded: species without a value."""
    options, network, networks = fitting.options, fitting.network, fitting.network.networks
    n, kind = len(fitting.species), options.type
    variables: Tree = {"bias_atom_e": np.zeros((n, networks.sizes[-1])), "case_embd": None}
    for name in ("fparam", "aparam"):
        given = bool(getattr(options, f"numb_{name}"))
        variables[f"{name}_avg"] = numpy_of(getattr(network, f"{name}_avg")) if given else None
        variables[f"{name}_inv_std"] = 1 / numpy_of(getattr(network, f"{name}_std")) if given else None
    tree: Tree = {"@class": "Fitting", "type": kind, "@version": {"polar": 5, "property": 6}.get(kind, 4)}
    tree |= {key: getattr(options, key) for key in _SAME}
    tree |= {
        "var_name": "polar" if kind == "polar" else fitting.outputs[0].name,
        "ntypes": n,
        "dim_descrpt": network.dim_descriptor,
        "dim_case_embd": 0,
        "default_fparam": options.default_fparam,
        "rcond": getattr(options, "rcond", None),
        "precision": precision_of(networks),
        "mixed_types": networks.count == 1,
        "exclude_types": list(excluded),
        "nets": collection_tree(networks, n, "fitting_network"),
        "type_map": list(fitting.species),
        "tot_ener_zero": False,
        "trainable": [layer.w.requires_grad for layer in networks.layers],
        "layer_name": None,
        "use_aparam_as_mask": False,
        "spin": None,
        "@variables": variables,
    }
    return _with_own_keys(fitting, tree), *_applied_outside(fitting)


def _with_own_keys(fitting: TensorFitting, tree: Tree) -> Tree:
    """The tree with what fittings of its type have beside the others."""
    options, kind = fitting.options, fitting.options.type
    if kind in ("dipole", "polar"):
        tree["embedding_width"] = fitting.dim_rotation
    else:
        tree |= {"dim_out": fitting.network.networks.sizes[-1], "atom_ener": None}
    if kind == "dipole":
        tree |= {"r_differentiable": True, "c_differentiable": True}
    if kind == "property":
        tree |= {key: getattr(options, key) for key in ("task_dim", "intensive", "distinguish_types")}
    if isinstance(fitting, PolarFitting):
        n = len(fitting.species)
        tree |= {key: getattr(options, key) for key in ("fit_diag", "shift_diag")}
        tree["@variables"] |= {"scale": numpy_of(fitting.scale).reshape(n, 1), "constant_matrix": np.zeros(n)}
    return tree


def _applied_outside(fitting: TensorFitting) -> tuple[np.ndarray, np.ndarray]:
    n, size = len(fitting.species), int(np.prod(fitting.outputs[0].shape))
    bias, std = np.zeros((n, size)), np.ones((n, size))
    if isinstance(fitting, PolarFitting):
        bias = (numpy_of(fitting.out_bias).reshape(n, 1, 1) * np.eye(3)).reshape(n, size)
    elif hasattr(fitting, "out_bias"):
        bias = numpy_of(fitting.out_bias).reshape(n, size)
    if isinstance(fitting, PropertyFitting):
        std = numpy_of(fitting.out_std).reshape(n, size)
    return bias, std

"""Reads options and weights off a pickled module of mace-torch, which has been read as inert records.

Options are named as the arguments of mace-torch's constructors, so that a file of options for a state dict looks the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.mace.weights import bessel_prefactor
from forgefield.models.module_records import attribute, children_of, class_name, irreps_text, tensors_of
from forgefield.untrusted.torch_files import Record

MODELS = ("ScaleShiftMACE", "MACE")
_RADIAL = {"BesselBasis": "bessel", "GaussianBasis": "gaussian", "ChebychevBasis": "chebyshev"}
_TRANSFORMS = {"AgnesiTransform": "Agnesi", "SoftTransform": "Soft"}
_FLAGS = {
    "apply_cutoff": True, "use_reduced_cg": False, "use_so3": False, "use_agnostic_product": False,
    "use_last_readout_only": False, "use_edge_irreps_first": False,
}  # fmt: skip
"""Attributes of the module, and what they mean where an older version did not have them."""


def content_of(path: Path, module: Record) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """Arguments of the constructor, parameters and buffers by name, and a description of the module."""
    if module.origin.endswith("operator.getitem"):
        return *_exported(path, module), "ScaleShiftMACE, exported by Forgefield"
    return settings_of(path, module), dict(tensors_of(module)), class_name(module)


def _exported(path: Path, module: Record) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments and tensors of a file of `forgefield.models.mace.exporter`: the calls that make the module, and its weights."""
    try:
        steps = module.args[0]
        arguments, state = steps[2].args[0].state[2], steps[4]
        settings = {key: value.args[-1] if isinstance(value, Record) else value for key, value in arguments.items()}
        return settings, state | _tensors_of_arguments(settings)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ForgefieldError(
            f"{path} is not a model that this version of forgefield export wrote; export it again from its run, or import "
            "what mace-torch saves after loading it."
        ) from error


def _tensors_of_arguments(settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Buffers of mace-torch's module that follow from the arguments of its constructor."""
    radial = "radial_embedding"
    names = {
        "r_max": "r_max",
        "num_interactions": "num_interactions",
        "atomic_numbers": "atomic_numbers",
        "num_polynomial_cutoff": f"{radial}.cutoff_fn.p",
        "atomic_energies": "atomic_energies_fn.atomic_energies",
        "atomic_inter_scale": "scale_shift.scale",
        "atomic_inter_shift": "scale_shift.shift",
    }
    tensors = {name: torch.tensor(settings[key], dtype=torch.float64) for key, name in names.items()}
    if settings["radial_type"] == "bessel":
        tensors[f"{radial}.bessel_fn.prefactor"] = torch.tensor(
            bessel_prefactor(settings["r_max"]), dtype=torch.float64
        )
    elif settings["radial_type"] == "chebyshev":
        tensors[f"{radial}.bessel_fn.n"] = torch.arange(1, settings["num_bessel"] + 1, dtype=torch.float64)
    return tensors


def settings_of(path: Path, module: Record) -> dict[str, Any]:
    """Arguments of the constructor that the module was made with."""
    name = class_name(module)
    if name not in MODELS:
        raise ForgefieldError(
            f"{path} contains a {name or type(module).__name__}; {' and '.join(MODELS)} can be imported."
        )
    parts = children_of(module)
    for part, argument in (("joint_embedding", "embedding_specs"), ("embedding_readout", "use_embedding_readout")):
        if part in parts:
            raise ForgefieldError(f"{path}: the model was made with {argument}, which is not supported.")
    interactions, products, readouts = (
        list(children_of(parts[key]).values()) for key in ("interactions", "products", "readouts")
    )
    _require_e3nn(path, [*interactions, *products])
    radial = children_of(parts["radial_embedding"])
    first, last = (
        irreps_text(children_of(product)["linear"].state["irreps_out"]) for product in (products[0], products[-1])
    )
    readout = readouts[-1]
    settings: dict[str, Any] = {
        "model": name,
        "num_interactions": len(interactions),
        "max_ell": int(attribute(path, parts["spherical_harmonics"], "_lmax")),
        "interaction_cls_first": class_name(interactions[0]),
        "interaction_cls": class_name(interactions[-1]),
        "hidden_irreps": first,
        "keep_last_layer_irreps": len(products) > 1 and "+" in first and last == first,
        "avg_num_neighbors": float(attribute(path, interactions[0], "avg_num_neighbors")),
        "radial_type": _RADIAL.get(class_name(radial["bessel_fn"]), class_name(radial["bessel_fn"])),
        "distance_transform": None,
        "pair_repulsion": "pair_repulsion_fn" in parts,
        "readout_cls": class_name(readout),
        "gate": _gate(readout),
        "heads": [str(head) for head in module.state.get("heads") or ["Default"]],
    }
    settings |= {key: bool(module.state.get(key, default)) for key, default in _FLAGS.items()}
    if "distance_transform" in radial:
        transform = class_name(radial["distance_transform"])
        settings["distance_transform"] = _TRANSFORMS.get(transform, transform)
    edges = module.state.get("edge_irreps")
    settings["edge_irreps"] = None if edges is None else irreps_text(edges)
    if any(class_name(layer) != settings["interaction_cls"] for layer in interactions[1:]):
        raise ForgefieldError(f"{path}: the layers after the first are of several classes, which is not supported.")
    return settings


def _gate(readout: Record) -> str | None:
    """Name of the activation of the last readout."""
    activation = children_of(readout).get("non_linearity")
    if activation is None:
        return "silu"  # a linear readout has none
    acts = list(children_of(children_of(activation)["acts"]).values()) if "acts" in children_of(activation) else []
    if not acts:
        return None
    function = acts[0].state.get("f")
    if isinstance(function, Record):  # getattr(namespace, name)
        return str(function.args[-1])
    return class_name(function)


def _require_e3nn(path: Path, parts: list[Record]) -> None:
    """Raise for weights in the layouts of cuEquivariance or OpenEquivariance."""
    for part in parts:
        for key, program, convert in (
            ("cueq_config", "cuEquivariance", "mace_cueq_to_e3nn"),
            ("oeq_config", "OpenEquivariance", "mace.cli.convert_oeq_e3nn"),
        ):
            config = part.state.get(key)
            enabled = (
                config.state.get("enabled", True)
                if isinstance(config, Record) and isinstance(config.state, Mapping)
                else False
            )
            if enabled:
                raise ForgefieldError(
                    f"{path}: the model is in the layout of {program} ({key}); convert it with mace-torch first ({convert})."
                )

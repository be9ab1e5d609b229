"""Reads the options of NequIP's builders off a pickled module, which has been read as inert records.

Packages of fine-tuned models do not contain the options with which the first model was built. The values of scales and shifts
are those of the module, also after a modifier has changed them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ase.data import chemical_symbols
from torch import Tensor

from forgefield.config.nequip.full_model import FULL_MODEL
from forgefield.errors import ForgefieldError
from forgefield.models.module_records import attribute, children_of, class_name, irreps_text
from forgefield.untrusted.torch_files import Record

Parts = Mapping[str, Record]
"""Modules of an energy network by name."""
Describe = Callable[[Path, Parts, Sequence[str]], dict[str, Any]]
"""Arguments of a builder that depend on the architecture, from the file, the modules and the names of types."""
TERMS = ("scales", "shifts")
_AFTER = ("per_type_energy_scale_shift", "pair_potential", "cutoff", "total_energy_sum")
_NONLINEARITIES = {"SiLU": "silu", "Mish": "mish", "GELU": "gelu", "ShiftedSoftplus": "ssp", "Tanh": "tanh"}
_FUNCTIONS = {"silu": "silu", "tanh": "tanh", "shifted_softplus": "ssp"}
COULOMB = {"metal": 14.399645, "real": 332.06371}
"""e^2 / (4 pi epsilon_0) in the two systems of units of the ZBL repulsion: eV A, and kcal/mol A."""


def module_settings(path: Path, model: Record, describe: Describe) -> dict[str, Any]:
    """Arguments of the builder of a `GraphModel`. describe: those that depend on the architecture."""
    force_output = children_of(model).get("model")
    network = None if force_output is None else children_of(force_output).get("func")
    if network is None:
        raise ForgefieldError(f"{path}: {class_name(model) or 'the object'} is not a model of the NequIP framework.")
    parts = children_of(network)
    names = [str(name) for name in attribute(path, model, "type_names")]
    edges = attribute(path, parts["edge_norm"], "_buffers")["_rmax_recip"]
    reach = float(attribute(path, parts["edge_norm"], "r_max"))
    return {
        **describe(path, parts, names),
        "type_names": names,
        "r_max": reach,
        "model_dtype": class_name(attribute(path, model, "model_dtype")),
        "per_edge_type_cutoff": _pair_cutoffs(edges, names, reach) if edges.numel() > 1 else None,
        "pair_potential": _pair_potential(path, parts.get("pair_potential")),
        **scale_shift_settings(path, model, names),
    }


def scale_shift_settings(path: Path, model: Record, names: Sequence[str]) -> dict[str, Any]:
    """Scales and shifts as they are in the module, and whether they are trained."""
    network = children_of(children_of(model)["model"])["func"]
    module = children_of(network)["per_type_energy_scale_shift"]
    tensors = {**attribute(path, module, "_parameters"), **attribute(path, module, "_buffers")}
    settings: dict[str, Any] = {}
    for term in TERMS:
        settings[f"per_type_energy_{term}"] = by_type(tensors.get(term), names)
        settings[f"per_type_energy_{term}_trainable"] = bool(attribute(path, module, f"{term}_trainable"))
    return settings


def by_type(values: Tensor | None, names: Sequence[str]) -> float | dict[str, float] | None:
    """Values of types as NequIP's options have them: one number, or one for each name; None if there are none."""
    if values is None or values.numel() == 0:
        return None
    numbers = values.double().flatten().tolist()
    return numbers[0] if len(numbers) == 1 else dict(zip(names, numbers, strict=True))


def require_parts(path: Path, parts: Parts, known: Sequence[str], layers: str = "") -> None:
    """Raise for a module that the architecture does not have. layers: beginning of the names of layers."""
    for name, part in parts.items():
        if name not in (*known, *_AFTER) and not (layers and name.startswith(layers)):
            raise ForgefieldError(f"{path}: the model has the module {name} ({class_name(part)}), which is unknown.")


def neighbours(path: Path, norm: Record, names: Sequence[str]) -> float | dict[str, float]:
    """The option `avg_num_neighbors`, from the factor of a sum over edges. names: of the types."""
    factor = attribute(path, norm, "_buffers")["norm_const"]
    digits = 14 if factor.dtype.itemsize == 8 else 7
    values = [float(f"{1 / float(one) ** 2:.{digits}g}") for one in factor.flatten()]
    return values[0] if len(values) == 1 else dict(zip(names, values, strict=True))


def perceptron(path: Path, module: Record) -> tuple[list[int], str | None]:
    """Sizes of all layers, and the name of the activation; None without any."""
    if attribute(path, module, "bias"):
        raise ForgefieldError(f"{path}: a perceptron of the model has a bias, which is not supported.")
    sizes = [int(size) for size in attribute(path, module, "dims")]
    classes = [class_name(layer) for layer in children_of(children_of(module)["mlp"]).values()]
    functions = set(classes) - {"ScalarLinearLayer"}
    if not functions:
        return sizes, None
    if len(functions) > 1 or functions - set(_NONLINEARITIES):
        raise ForgefieldError(f"{path}: a perceptron of the model has {', '.join(functions)}, which is not supported.")
    return sizes, _NONLINEARITIES[functions.pop()]


def depth_and_width(sizes: Sequence[int], default: int | None = None) -> tuple[int, int | None]:
    """Number of hidden layers, and their width."""
    return len(sizes) - 2, sizes[1] if len(sizes) > 2 else default


def readout_settings(path: Path, module: Record, first: str) -> dict[str, Any]:
    """Options of the perceptron `first` that computes energies. A linear one has no activation to read off."""
    sizes, function = perceptron(path, children_of(module)["mlp_module"])
    depth, width = depth_and_width(sizes)
    options: dict[str, Any] = {f"{first}_hidden_layers_depth": depth}
    if depth:
        options |= {f"{first}_hidden_layers_width": width, f"{first}_nonlinearity": function}
    return options


def _pair_cutoffs(inverse: Tensor, names: Sequence[str], reach: float) -> dict[str, dict[str, float]]:
    """Cutoffs of pairs of types, A, from their inverses."""
    rows = [[min(float(f"{1 / float(one):.14g}"), reach) for one in row] for row in inverse.view(len(names), -1)]
    return {name: dict(zip(names, row)) for name, row in zip(names, rows)}


def _pair_potential(path: Path, module: Record | None) -> dict[str, Any] | None:
    if module is None:
        return None
    if class_name(module) != "ZBL":
        raise ForgefieldError(f"{path}: the model has the pair potential {class_name(module)}; ZBL is supported.")
    buffers = attribute(path, module, "_buffers")
    coulomb = 2 * float(buffers["_qqr2exesquare"])
    units = min(COULOMB, key=lambda name: abs(COULOMB[name] - coulomb))
    exponent = attribute(path, children_of(module)["cutoff"], "p")
    return {
        "_target_": "nequip.nn.pair_potential.ZBL",
        "units": units,
        "chemical_species": [chemical_symbols[int(number)] for number in buffers["atomic_numbers"].flatten()],
        "polynomial_cutoff_p": float(exponent),
    }


def bessel_settings(path: Path, module: Record) -> dict[str, Any]:
    """Options of a Bessel basis."""
    return {
        "num_bessels": int(attribute(path, module, "num_bessels")),
        "bessel_trainable": bool(attribute(path, module, "trainable")),
        "polynomial_cutoff_p": float(attribute(path, children_of(module)["cutoff"], "p")),
    }


# ---- NequIP


def nequip_settings_of_modules(path: Path, parts: Parts, names: Sequence[str]) -> dict[str, Any]:
    """Arguments of `FullNequIPGNNModel` that depend on the network."""
    known = ("type_embed", "spharm", "edge_norm", "bessel_encode", "factor", "per_atom_energy_readout")
    require_parts(path, parts, known, "layer")
    if attribute(path, parts["type_embed"], "do_categorical_graph_field_embed"):
        raise ForgefieldError(f"{path}: the model embeds fields of frames (categorical_graph_field_embed), which is not "
                              "supported.")  # fmt: skip
    embedding = children_of(parts["type_embed"])["embed_module"]
    layers = [parts[f"layer{number}_convnet"] for number in range(sum(name.startswith("layer") for name in parts))]
    convolutions = [children_of(layer)["conv"] for layer in layers]
    if attribute(path, convolutions[0], "use_sc") or attribute(path, layers[0], "resnet"):
        raise ForgefieldError(f"{path}: the model was built with learnable_shift, which is not supported.")
    networks = [perceptron(path, children_of(layer)["edge_mlp"])[0] for layer in convolutions]
    shapes = [depth_and_width(sizes, default=128) for sizes in networks]
    return {
        "_target_": f"nequip.model.{FULL_MODEL}",
        "irreps_edge_sh": irreps_text(attribute(path, parts["spharm"], "irreps_edge_sh")),
        "type_embed_num_features": int(attribute(path, embedding, "embedding_dim")),
        "feature_irreps_hidden": [irreps_text(attribute(path, layer, "feature_irreps_hidden")) for layer in layers],
        "radial_mlp_depth": [depth for depth, _ in shapes],
        "radial_mlp_width": [width for _, width in shapes],
        "avg_num_neighbors": neighbours(path, children_of(convolutions[0])["avg_num_neighbors_norm"], names),
        "convnet_sc": len(layers) == 1 or bool(attribute(path, convolutions[-1], "use_sc")),
        "convnet_resnet": any(attribute(path, layer, "resnet") for layer in layers),
        **bessel_settings(path, parts["bessel_encode"]),
        **readout_settings(path, parts["per_atom_energy_readout"], "readout_mlp"),
        **_nonlinearity(path, layers),
    }


def _nonlinearity(path: Path, layers: Sequence[Record]) -> dict[str, Any]:
    """Options of the activations of a layer, from the first that has each of them."""
    gates = [children_of(layer)["equivariant_nonlin"] for layer in layers]
    if class_name(gates[0]) != "Gate":
        function = _function(path, attribute(path, gates[0], "scalar_nonlinearity"))
        scalars = {"e": function, "o": "tanh"}
        return {"convnet_nonlinearity_type": "norm", "convnet_nonlinearity_scalars": scalars}
    scalars, of_gates = {"e": "silu", "o": "tanh"}, {"e": "silu", "o": "tanh"}
    for gate in reversed(gates):
        for name, found in (("act_scalars", scalars), ("act_gates", of_gates)):
            activation = children_of(gate)[name]
            entries = attribute(path, activation, "paths")
            functions = children_of(children_of(activation)["acts"])
            for number, (_, irrep, _) in enumerate(entries):
                parity = irrep[1] if isinstance(irrep, tuple) else irrep.args[-1]
                if str(number) in functions:
                    function = attribute(path, functions[str(number)], "f")
                    found["e" if parity == 1 else "o"] = _function(path, function)
    return {
        "convnet_nonlinearity_type": "gate",
        "convnet_nonlinearity_scalars": scalars,
        "convnet_nonlinearity_gates": of_gates,
    }


def _function(path: Path, stored: object) -> str:
    """NequIP's name of an activation function."""
    name = class_name(stored)
    if name not in _FUNCTIONS:
        raise ForgefieldError(f"{path}: the model has the activation {name}, which is not supported.")
    return _FUNCTIONS[name]

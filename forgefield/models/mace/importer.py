"""Reads models of mace-torch without executing anything: modules (.model), and state dicts or checkpoints with their options.

Anything without a counterpart here is refused by name, never dropped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from ase.data import chemical_symbols, covalent_radii
from torch import Tensor

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.models.building import build_model
from forgefield.models.importing import ImportedModel, Importer, ImportRequest
from forgefield.models.mace.basis import full_tensor, map_of_tensor
from forgefield.models.mace.model import MACE
from forgefield.models.mace.records import content_of
from forgefield.models.mace.weights import bessel_prefactor, contraction_weights, weight_table
from forgefield.models.module_records import irreps_text
from forgefield.models.resolving import resolve_model
from forgefield.ops.symmetric_contraction import Irrep
from forgefield.untrusted.archives import npz_arrays
from forgefield.untrusted.documents import load_json
from forgefield.untrusted.torch_files import Record, read_torch_records

INTERACTIONS = {
    "RealAgnosticInteractionBlock": "plain",
    "RealAgnosticResidualInteractionBlock": "residual",
    "RealAgnosticDensityInteractionBlock": "density",
    "RealAgnosticDensityResidualInteractionBlock": "density_residual",
    "RealAgnosticResidualNonLinearInteractionBlock": "nonlinear",
}
READOUTS = {"LinearReadoutBlock": False, "NonLinearReadoutBlock": False, "NonLinearBiasReadoutBlock": True}
_SAME = (
    "num_interactions", "max_ell", "radial_type", "pair_repulsion", "apply_cutoff", "use_agnostic_product",
    "use_last_readout_only", "use_edge_irreps_first", "keep_last_layer_irreps", "edge_irreps", "hidden_irreps",
)  # fmt: skip
"""Options of the same name and meaning."""
_FROM_STATE = (
    "r_max", "num_bessel", "num_polynomial_cutoff", "num_elements", "atomic_numbers", "atomic_energies", "radial_MLP",
    "correlation", "MLP_irreps", "atomic_inter_scale", "atomic_inter_shift", "use_reduced_cg",
)  # fmt: skip
"""Options whose values follow from the weights."""
_REQUIRED = ("hidden_irreps", "max_ell", "avg_num_neighbors", "interaction_cls", "interaction_cls_first")
_ALL = (
    *_SAME, *_FROM_STATE, *_REQUIRED, "model", "gate", "heads", "readout_cls", "distance_transform", "use_so3",
    "cueq_config", "oeq_config", "lammps_mliap", "embedding_specs", "use_embedding_readout",
)  # fmt: skip
_DERIVED = (
    "output_mask", "bias", "conv_tp.weight", "covalent_radii", "_zeroed", "num_interactions", "atomic_numbers", "r_max",
    "cutoff_fn.p", "prefactor", "pair_repulsion_fn.p", "pair_repulsion_fn.c", "a_exp", "a_prefactor",
)  # fmt: skip
"""Endings of names of tensors that follow from options; a bias counts only where it is empty."""


class MaceImporter(Importer):
    """Reads models of mace-torch."""

    accepts = ("options", "head")

    def read(self, request: ImportRequest) -> ImportedModel:
        return read_mace(request.source, request.options, request.head)

    reasons = {"weights": "its files hold one set of weights (averages, where the training had them)"}


IMPORTER = MaceImporter()


def read_mace(
    path: str | os.PathLike[str], options: str | os.PathLike[str] | None = None, head: str | None = None
) -> ImportedModel:
    """Model in a file of mace-torch: a module (.model), or a checkpoint (.pt) or state dict (.pt, .npz) with `options`.

    options: JSON file with the arguments of the model's constructor, or a .model of the same training; default: the same name
    with `.json`. head: take one of several heads; without it all of them are branches of one model.
    """
    path = Path(path)
    content = _npz(path) if path.suffix == ".npz" else read_torch_records(path)
    if isinstance(content, Record):
        settings, tensors, kind = content_of(path, content)
    else:
        tensors = _state_dict(path, content)
        settings, kind = _read_options(path, options), "state dict"
    try:
        imported = _assemble(path, settings, tensors, kind)
    except (KeyError, TypeError, IndexError, AttributeError, RuntimeError, ValueError) as error:
        raise ForgefieldError(f"{path} is not a model as mace-torch writes them: {error!r}.") from error
    return imported if head is None else _one_head(path, imported, head)


def _one_head(path: Path, imported: ImportedModel, head: str) -> ImportedModel:
    if not imported.resolved.get("branches"):
        raise ForgefieldError(f"{path}: the model has one head; leave --head out.")
    resolved, state = MACE.branch(imported.resolved, imported.state, head)
    return ImportedModel(resolved, state, imported.precision, f"{imported.origin}, head {head}", imported.checked)


def _npz(path: Path) -> dict[str, Tensor]:
    arrays = npz_arrays(path)
    prefixed = [key for key in arrays if key.startswith("weight/")]
    return {key.removeprefix("weight/"): torch.from_numpy(arrays[key].copy()) for key in prefixed or arrays}


def _state_dict(path: Path, content: object) -> dict[str, Tensor]:
    """Tensors of a checkpoint of `mace_run_train`, or of a state dict."""
    if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
        content = content["model"]
    tensors = {k: v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, Mapping) else {}
    if "node_embedding.linear.weight" not in tensors:
        raise ForgefieldError(f"{path} contains neither a module nor a checkpoint of mace-torch.")
    return tensors


def _read_options(path: Path, options: str | os.PathLike[str] | None) -> dict[str, Any]:
    where = path.with_suffix(".json") if options is None else Path(options)
    if where.suffix == ".model":
        module = read_torch_records(where)
        if not isinstance(module, Record):
            raise ForgefieldError(f"{where} does not contain a module of mace-torch.")
        return content_of(where, module)[0]
    try:
        settings = load_json(where.read_text())
    except FileNotFoundError as error:
        raise ForgefieldError(
            f"{path} contains only weights. Write the arguments of the model's constructor ({', '.join(_REQUIRED)}, ...) as "
            f"JSON to {where}, or pass a .model of the same training with --options."
        ) from error
    except (OSError, ValueError) as error:
        raise ForgefieldError(f"{where} cannot be read: {error}.") from error
    if not isinstance(settings, dict):
        raise ForgefieldError(f"{where} should contain a mapping: the arguments of the model's constructor.")
    for key in settings:
        if key not in _ALL:
            raise ForgefieldError(f"{where}: {key} is not an argument of a MACE model.{did_you_mean(key, _ALL)}")
    for key in _REQUIRED:
        if key not in settings:
            raise ForgefieldError(f"{where}: {key} is missing, and it does not follow from the weights.")
    return settings


def translate_options(path: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Forgefield's `model` section from the arguments of mace-torch's constructor and the shapes of the weights."""
    for key, name in (("use_so3", "use_so3"), ("embedding_specs", "embedding_specs"), ("cueq_config", "cueq_config")):
        if settings.get(key):
            raise ForgefieldError(f"{path}: the model was made with {name}, which is not supported.")
    section: dict[str, Any] = {"name": "mace"}
    section |= {key: settings[key] for key in _SAME if settings.get(key) is not None}
    for ours, theirs in (("interaction", "interaction_cls"), ("interaction_first", "interaction_cls_first")):
        section[ours] = _named(path, theirs, str(settings[theirs]), INTERACTIONS)
    section["readout_bias"] = _named(
        path, "readout_cls", settings.get("readout_cls", "NonLinearReadoutBlock"), READOUTS
    )
    transform = settings.get("distance_transform")
    section["distance_transform"] = (
        None
        if transform in (None, "None")
        else _named(path, "distance_transform", str(transform), {"Agnesi": "Agnesi", "Soft": "Soft"})
    )
    gate = settings.get("gate", "silu")
    section["gate"] = (
        None
        if gate in (None, "None")
        else _named(path, "gate", str(gate), {"silu": "silu", "tanh": "tanh", "abs": "abs"})
    )
    heads = [str(head) for head in settings.get("heads") or ["Default"]]
    section["branches"] = heads if len(heads) > 1 else None
    section["avg_num_neighbours"] = float(settings["avg_num_neighbors"])
    return section | _options_of_weights(path, tensors, section, len(heads))


def _named(path: Path, key: str, value: str, supported: Mapping[str, Any]) -> Any:
    if value not in supported:
        raise ForgefieldError(
            f"{path}: {key} is {value}, which is not supported; supported are {', '.join(supported)}."
        )
    return supported[value]


def _options_of_weights(
    path: Path, tensors: Mapping[str, Tensor], section: Mapping[str, Any], n_heads: int
) -> dict[str, Any]:
    if any(key.endswith("symmetric_contractions.weight") for key in tensors):
        raise ForgefieldError(
            f"{path}: the weights are in the layout of cuEquivariance; convert the model with mace-torch first "
            "(mace_cueq_to_e3nn)."
        )
    found: dict[str, Any] = {"num_polynomial_cutoff": int(tensors["radial_embedding.cutoff_fn.p"])}
    n_layers = int(tensors["num_interactions"])
    basis = [key for key in tensors if key.startswith("radial_embedding.bessel_fn.")]
    counts = [tensors[key].numel() for key in basis if key.endswith(("bessel_weights", "gaussian_weights", ".n"))]
    found["num_bessel"] = counts[0]
    network = "interactions.0.conv_tp_weights."
    sizes = [value.shape[1] for key, value in tensors.items() if key.startswith(f"{network}layer")]
    if not sizes:
        linear = [value for key, value in tensors.items() if key.startswith(network) and value.dim() == 2]
        sizes = [value.shape[0] for value in linear]
    found["radial_mlp"] = sizes[:-1]
    found["correlation"] = [
        1 + sum(key.startswith(f"products.{layer}.symmetric_contractions.contractions.0.weights.") for key in tensors)
        for layer in range(n_layers)
    ]
    readouts = [key for key in tensors if key.startswith("readouts.") and key.endswith("linear_1.weight")]
    if readouts:
        n_species = tensors["atomic_numbers"].numel()
        channels = tensors["node_embedding.linear.weight"].numel() // n_species
        found["mlp_irreps"] = f"{tensors[readouts[0]].numel() // (channels * n_heads)}x0e"
    return found | {"use_reduced_cg": not _is_full(tensors, section, found["correlation"])}


def _is_full(tensors: Mapping[str, Tensor], section: Mapping[str, Any], correlation: list[int]) -> bool:
    """Whether polynomials of the first layer with more than one factor are those of the full basis."""
    if max(correlation) == 1:
        return False
    layer, degree = next((layer, degree) for layer, degree in enumerate(correlation) if degree > 1)
    name = f"products.{layer}.symmetric_contractions.contractions.0"
    tensor = tensors.get(f"{name}.U_matrix_{degree}")
    if tensor is None:
        return True
    both = layer > 0 and "0o" in irreps_text(section["hidden_irreps"])
    inputs = [Irrep(l, p) for l in range(section["max_ell"] + 1) for p in ((-1, 1) if both else ((-1) ** l,))]
    full = full_tensor(inputs, Irrep(0, 1), degree)
    return full.shape == tensor.shape and bool((full - tensor.double()).abs().max() < 1e-5)


def _assemble(path: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], kind: str) -> ImportedModel:
    section = translate_options(path, settings, tensors)
    numbers = [int(number) for number in tensors["atomic_numbers"]]
    if any(not 0 < number < len(chemical_symbols) for number in numbers):
        raise ForgefieldError(f"{path}: {numbers} are not all atomic numbers.")
    species, cutoff = [chemical_symbols[number] for number in numbers], float(tensors["r_max"])
    section |= _energies(path, tensors, section["branches"] or (), species)
    weights = tensors["node_embedding.linear.weight"].dtype
    precision = str(weights).removeprefix("torch.")
    if precision not in ("float32", "float64"):
        raise ForgefieldError(f"{path}: the weights are {precision}; float32 and float64 can be imported.")
    _check_radii(path, tensors)
    resolved = resolve_model(section, species=species, cutoff=cutoff)
    potential = build_model(resolved, precision=precision, seed=0)
    model = potential.model
    assert isinstance(model, MACE)
    state = potential.state_dict()
    used = _read_weights(path, tensors, model, state)
    unknown = [key for key, value in tensors.items() if key not in used and not _is_derived(key, value)]
    if unknown:
        raise ForgefieldError(f"{path}: {unknown[0]} is not a weight of a model with these options.")
    checked = (
        f"Checked: all {sum(tensors[key].numel() for key in used):,} numbers of the file are used and no weight is missing; "
        "the file contains no predictions to compare with."
    )
    return ImportedModel(resolved, state, precision, f"{path.name}: mace-torch {kind}", checked)


def _energies(path: Path, tensors: Mapping[str, Tensor], heads: Any, species: list[str]) -> dict[str, Any]:
    """Scales and shifts, the latter with the energies of isolated atoms."""
    n_heads = max(1, len(heads))
    energies = torch.atleast_2d(tensors["atomic_energies_fn.atomic_energies"].double())
    scale, shift = (
        torch.atleast_1d(tensors.get(f"scale_shift.{name}", torch.tensor(value)).double()).flatten()
        for name, value in (("scale", 1.0), ("shift", 0.0))
    )
    if energies.shape != (n_heads, len(species)):
        raise ForgefieldError(
            f"{path}: there are {tuple(energies.shape)} energies of atoms for {n_heads} heads and {len(species)} elements."
        )
    scales, offsets = (
        value.expand(n_heads).tolist() if value.numel() == 1 else value.tolist() for value in (scale, shift)
    )
    shifts = [dict(zip(species, (row + offset).tolist())) for row, offset in zip(energies, offsets, strict=True)]
    if heads:
        return {"energy_scales": dict(zip(heads, scales, strict=True)), "energy_shifts": dict(zip(heads, shifts))}
    return {"energy_scales": scales[0], "energy_shifts": shifts[0]}


def _check_radii(path: Path, tensors: Mapping[str, Tensor]) -> None:
    expected = torch.tensor(covalent_radii, dtype=torch.float64)
    for key, value in tensors.items():
        if key.endswith("covalent_radii"):
            n = min(len(expected), value.numel())
            if not torch.allclose(value.double()[:n], expected[:n], rtol=1e-6, atol=1e-6):
                raise ForgefieldError(
                    f"{path}: {key} are not the covalent radii of ASE; the model cannot be imported exactly."
                )


def _is_derived(key: str, value: Tensor) -> bool:
    if key.endswith("bias"):
        return value.numel() == 0
    return key.endswith(_DERIVED) or "U_matrix" in key or "_compiled" in key or "_w3j" in key or value.numel() == 0


def _read_weights(path: Path, tensors: Mapping[str, Tensor], model: MACE, state: dict[str, Tensor]) -> list[str]:
    """Fill `state` with the weights of the file. Returns their names there."""
    used = ["atomic_energies_fn.atomic_energies", *(k for k in tensors if k.startswith("scale_shift."))]

    def put(ours: str, theirs: str, value: Tensor) -> None:
        key = f"model.{ours}"
        if value.numel() != state[key].numel():
            raise ForgefieldError(
                f"{path}: {theirs} has {tensors[theirs].numel()} numbers; with these options it needs {state[key].numel()}."
            )
        state[key] = value.reshape(state[key].shape).to(state[key].dtype).clone()
        used.append(theirs)

    for weight in weight_table(model):
        if weight.theirs not in tensors:
            raise ForgefieldError(f"{path} does not contain the weights {weight.theirs}.")
        value = tensors[weight.theirs]
        expected = weight.write(state[f"model.{weight.ours}"]).numel()
        if value.numel() != expected:
            raise ForgefieldError(
                f"{path}: {weight.theirs} has {value.numel()} numbers; with these options it needs {expected}."
            )
        put(weight.ours, weight.theirs, weight.read(value))
    for entry in contraction_weights(model):
        if entry.theirs not in tensors:
            raise ForgefieldError(f"{path} does not contain the weights {entry.theirs}.")
        if entry.ours is None:
            used.append(entry.theirs)
            continue
        put(entry.ours, entry.theirs, _contraction_weight(entry, tensors, model))
    _read_radial(tensors, model, state, used)
    return used


def _contraction_weight(entry: Any, tensors: Mapping[str, Tensor], model: MACE) -> Tensor:
    """The weight in Forgefield's basis."""
    value, product = tensors[entry.theirs], entry.product
    if entry.degree == 1 or not model.options.use_reduced_cg:
        return value
    matrix = map_of_tensor(
        tensors[entry.tensor],
        product.inputs,
        product.outputs,
        product.correlation,
        product.outputs[entry.output],
        entry.degree,
    )
    return torch.matmul(matrix, value.double())


def _read_radial(tensors: Mapping[str, Tensor], model: MACE, state: dict[str, Tensor], used: list[str]) -> None:
    """Constants of the basis and of the transform of distances."""
    name, cutoff = "radial_embedding.bessel_fn", model.cutoff
    if f"{name}.bessel_weights" in tensors:
        frequencies = tensors[f"{name}.bessel_weights"].double() * (cutoff / torch.pi)
        whole = torch.round(frequencies)  # the file may have rounded them to float32
        state["model.radial.constants"] = whole if torch.allclose(frequencies, whole, rtol=1e-6) else frequencies
        used.append(f"{name}.bessel_weights")
        _scale_first_layers(float(tensors[f"{name}.prefactor"]) / bessel_prefactor(cutoff), model, state)
    for key in ("gaussian_weights", "n"):
        if f"{name}.{key}" in tensors:
            state["model.radial.constants"] = tensors[f"{name}.{key}"].double().flatten()
            used.append(f"{name}.{key}")
    names = {"Agnesi": ("q", "p", "a"), "Soft": ("alpha",)}.get(model.options.distance_transform or "", ())
    keys = [f"radial_embedding.distance_transform.{key}" for key in names]
    if keys:
        state["model.radial.transform"] = torch.stack([tensors[key].double() for key in keys])
        used.extend(keys)


def _scale_first_layers(factor: float, model: MACE, state: dict[str, Tensor]) -> None:
    """Multiply the basis by a factor that is one but for rounding, in the weights that read it."""
    if factor == 1.0:
        return
    rows = model.options.num_bessel
    for number in range(len(model.interactions)):
        for network in ("radial", "density", "radial_normalised", "density_normalised"):
            key = f"model.interactions.{number}.{network}.weights.0"
            if key in state:
                state[key][:rows] *= factor

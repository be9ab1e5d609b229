"""The section `training_module.model`: builders of NequIP and Allegro, and modifiers around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forgefield.config.nequip.section import NequIPSection, statistic

NEQUIP = ("NequIPGNNModel", "PresetNequIPGNNModel")
ALLEGRO = ("AllegroModel",)
SAVED = ("ModelFromCheckpoint", "ModelFromPackage")
MODIFIERS = {
    "enable_OpenEquivariance": "Forgefield's kernels are used instead.",
    "enable_CuEquivariance": "Forgefield's kernels are used instead.",
    "enable_CuEquivarianceContracter": "Forgefield's kernels are used instead.",
    "enable_TritonContracter": "Forgefield's kernels are used instead.",
}
SHARED = {
    "num_layers": "num_layers",
    "l_max": "l_max",
    "parity": "parity",
    "per_edge_type_cutoff": "per_edge_type_cutoff",
    "per_type_energy_scales_trainable": "energy_scales_trainable",
    "per_type_energy_shifts_trainable": "energy_shifts_trainable",
    "readout_mlp_hidden_layers_depth": "readout_mlp_depth",
    "readout_mlp_hidden_layers_width": "readout_mlp_width",
    "readout_mlp_nonlinearity": "readout_mlp_nonlinearity",
}
"""Options of all models, and Forgefield's names."""
OF_NEQUIP = {
    name: name
    for name in (
        "num_features", "type_embed_num_features", "radial_mlp_depth", "radial_mlp_width", "num_bessels",
        "bessel_trainable", "polynomial_cutoff_p", "convnet_sc", "convnet_resnet",
    )
} | {"convnet_nonlinearity_type": "nonlinearity"}  # fmt: skip
OF_ALLEGRO = {
    name: name
    for name in (
        "num_scalar_features", "num_tensor_features", "radial_chemical_embed_dim", "tp_path_channel_coupling",
        "weight_individual_irreps", "forward_normalize", "scalar_embed_mlp_nonlinearity", "allegro_mlp_nonlinearity",
    )
} | {
    f"{part}_mlp_hidden_layers_{size}": f"{part}_mlp_{size}"
    for part in ("scalar_embed", "allegro")
    for size in ("depth", "width")
}  # fmt: skip
EMBEDDINGS = {"TwoBodyBesselScalarEmbed": "bessel", "TwoBodySplineScalarEmbed": "spline"}


@dataclass
class ModelTranslation:
    """options: Forgefield's `model` section. precision, engine: of `training`. seed: of the weights. species: type names as
    they are written. cutoff: A. references: `data.reference_energies`. pair_species: elements of the pair potential."""

    options: dict[str, Any]
    precision: str
    engine: str | None
    seed: int | None
    species: list[str]
    cutoff: float
    references: Any
    pair_species: list[str] | None


def translate_model(section: NequIPSection) -> ModelTranslation:
    """Translate the builder of a model."""
    kind = section.target((*NEQUIP, *ALLEGRO, "modify", *SAVED))
    if kind in SAVED:
        raise section.refused(
            "_target_",
            f"is {kind}, which loads weights; import the model first (`forgefield import nequip FILE.ckpt --name NAME`) and "
            "give the run as model.from, or train with --finetune runs/NAME",
        )
    if kind == "modify":
        return _modified(section)
    name = "allegro" if kind in ALLEGRO else "nequip"
    options: dict[str, Any] = {"name": name}
    if kind == "PresetNequIPGNNModel":
        options["preset"] = section.choice("preset", "", ("S", "M", "L", "XL"))
    for theirs, ours in (SHARED | (OF_ALLEGRO if name == "allegro" else OF_NEQUIP)).items():
        value = section.take(theirs)
        if value is not None:
            options[ours] = value
    if name == "allegro":
        options |= _embedding(section)
    else:
        _gates(section, options)
        section.only("learnable_shift", False, "no shift is learnt per layer")
        section.only("categorical_graph_field_embed", None, "fields of frames are not embedded")
    pair, pair_species = _pair_potential(section)
    options |= pair
    options |= _neighbours(section) | _scales(section)
    species = [str(symbol) for symbol in section.take("type_names") or []]
    references = _shifts(section, species)
    precision = section.choice("model_dtype", "float32", ("float32", "float64"))
    compiled = section.choice("compile_mode", "eager", ("eager", "compile"))
    section.only("do_derivatives", True, "forces are always derivatives of the energy")
    translation = ModelTranslation(
        options,
        precision,
        "compile" if compiled == "compile" else None,
        section.integer("seed", at_least=0),
        species,
        section.number("r_max", 0.0, above=0),
        references,
        pair_species,
    )
    section.finish()
    return translation


def _modified(section: NequIPSection) -> ModelTranslation:
    inner = section.below("model")
    if inner is None:
        raise section.refused("model", "is missing; it is the model that is modified")
    translation = translate_model(inner)
    for item in section.objects("modifiers"):
        name = str(item.text("modifier", ""))
        if name not in MODIFIERS:
            raise item.refused("modifier", f"is {name}, which is not translated; supported are {', '.join(MODIFIERS)}")
        item.notes[item.path("modifier")] = MODIFIERS[name]
        item.finish()
    section.finish()
    return translation


def _embedding(section: NequIPSection) -> dict[str, Any]:
    embed = section.below("radial_chemical_embed")
    if embed is None:
        return {}
    kind = EMBEDDINGS[embed.target(EMBEDDINGS)]
    names = (
        ("num_bessels", "bessel_trainable", "polynomial_cutoff_p")
        if kind == "bessel"
        else ("num_splines", "spline_span")
    )
    values = {name: embed.take(name) for name in names}
    embed.finish()
    return {"radial_chemical_embed": kind} | {name: value for name, value in values.items() if value is not None}


def _gates(section: NequIPSection, options: dict[str, Any]) -> None:
    scalars, gates = section.mapping("convnet_nonlinearity_scalars"), section.mapping("convnet_nonlinearity_gates")
    names = {"nonlinearity_scalars": scalars.get("e"), "nonlinearity_odd_scalars": scalars.get("o")}
    names["nonlinearity_gates"] = gates.get("e")
    for key, values in (("convnet_nonlinearity_scalars", scalars), ("convnet_nonlinearity_gates", gates)):
        unknown = [name for name in values if name not in ("e", "o")]
        if unknown:
            raise section.refused(key, f"has {unknown[0]}; the parities are e and o")
    if gates.get("o") is not None:
        section.notes[section.path("convnet_nonlinearity_gates")] = (
            "gates are even, so that the function of odd ones is not used."
        )
    options |= {name: value for name, value in names.items() if value is not None}


def _pair_potential(section: NequIPSection) -> tuple[dict[str, Any], list[str] | None]:
    """The option `zbl`, and the elements of the types."""
    pair = section.below("pair_potential")
    if pair is None:
        return {}, None
    pair.target(("ZBL",))
    units = pair.choice("units", "metal", ("metal", "real"))
    if units != "metal":
        raise pair.refused("units", "is real (kcal/mol); energies are in eV, which is metal")
    species = pair.take("chemical_species")
    pair.agree("type_names", section.peek("type_names"), "training_module.model.type_names")
    exponent = pair.number("polynomial_cutoff_p", at_least=2)
    pair.finish()
    return {"zbl": True if exponent is None else {"polynomial_cutoff_p": exponent}}, species


def _neighbours(section: NequIPSection) -> dict[str, Any]:
    value = section.take("avg_num_neighbors")
    name = statistic(value)
    if name == "per_type_num_neighbors_mean":
        return {"avg_num_neighbours_by_species": True}
    if name not in (None, "num_neighbors_mean"):
        raise section.refused("avg_num_neighbors", f"is the statistic {name}, which is not computed here")
    if name is None and value is None:
        return {"avg_num_neighbours": 1.0}
    return {} if name is not None else {"avg_num_neighbours": value}


def _scales(section: NequIPSection) -> dict[str, Any]:
    value = section.take("per_type_energy_scales")
    name = statistic(value)
    if name == "per_type_forces_rms":
        return {"energy_scales_by_species": True}
    if name not in (None, "forces_rms"):
        raise section.refused(
            "per_type_energy_scales", f"is the statistic {name}, which is not computed here; give numbers"
        )
    if name is not None:
        return {}
    return {"energy_scales": 1.0 if value is None else value}


def _shifts(section: NequIPSection, species: list[str]) -> Any:
    """The setting `data.reference_energies`."""
    value = section.take("per_type_energy_shifts")
    name = statistic(value)
    if name == "per_atom_energy_mean":
        return "mean"
    if name is not None:
        raise section.refused("per_type_energy_shifts", f"is the statistic {name}, which is not an energy per atom")
    if isinstance(value, (int, float)):
        return dict.fromkeys(species, float(value))
    return "none" if value is None else dict(value)

"""The `model` section: descriptor and fitting network keep DeePMD-kit's names; type map and cutoff belong to `data`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forgefield.config.deepmd.descriptors import STRIPPED, networks_of, translate_descriptor
from forgefield.config.deepmd.linear import Sum, parts_of_sum, within
from forgefield.config.deepmd.section import MISSING, Section, is_number
from forgefield.config.deepmd.spin import translate_spin
from forgefield.config.deepmd.types import describe_types, elements_of_types, is_stand_in, renamed
from forgefield.config.deepmd.values import NETWORK, PRECISIONS, kind_of, written_values
from forgefield.errors import ForgefieldError
from forgefield.files import find_path

_NOT_HERE = "a fitting that is not supported"
_TENSORFLOW = "a fitting of DeePMD-kit's TensorFlow backend alone"
OTHER_FITTINGS = {
    **dict.fromkeys(("dpa4_ener", "sezm_ener", "population"), _NOT_HERE),
    **dict.fromkeys(("global_polar", "wfc"), _TENSORFLOW),
}
"""Fittings that are not supported, and why."""
_DPA4 = "an architecture that is not available here; `dp --pt train` trains it"
OTHER_MODELS = {
    **dict.fromkeys(("dpa4", "DPA4", "dpa4c", "SeZM", "sezm"), _DPA4),
    "frozen": "a trained model; import its file (forgefield import deepmd FILE) and train with --init-model",
    "pairtab": "a table without a network; a table with a network is model.use_srtab or linear_ener",
    "pairwise_dprc": "of DeePMD-kit's TensorFlow backend alone",
    "linear_ener": "a sum of models, and model.models does not list them",
}
"""Other types of models, and what they are."""
PARAMETERS = ("numb_fparam", "numb_aparam", "default_fparam")
FITTING_KEYS = {
    "ener": (*NETWORK, *PARAMETERS, "rcond", "atom_ener", "dim_case_embd"),
    "property": (*NETWORK, *PARAMETERS, "task_dim", "intensive", "distinguish_types", "property_name"),
    "dos": (*NETWORK, *PARAMETERS, "rcond", "numb_dos"),
    "dipole": (*NETWORK, *PARAMETERS, "sel_type"),
    "polar": (*NETWORK, *PARAMETERS, "fit_diag", "scale", "shift_diag", "sel_type"),
}
TAKE_TYPES = ("se_e2_a", STRIPPED, "se_atten", "se_atten_v2")
"""Descriptors that read the embedding of types in `model.type_embedding`."""
WITHOUT_EFFECT = {
    "data_stat_nbatch": "statistics of the training data are taken once and kept",
    "data_bias_nsample": "it is used by `dp change-bias` and fine-tuning alone",
    "info": "metadata for DeePMD-kit's own tools",
}
"""Keys of the model without an effect on this run, and why."""


@dataclass(frozen=True)
class Model:
    """A translated section `model`. options: of Forgefield's section `model`. cutoff: A. precision: of the networks."""

    options: dict[str, Any]
    species: list[str]
    cutoff: float
    precision: str
    fields: dict[str, Any]
    """Additional values that the network reads from the data (`data.labels.fields`)."""
    type_names: dict[str, str] = field(default_factory=dict)
    """Elements of atom types that have other names."""

    @property
    def fitting(self) -> dict[str, Any]:
        fitting: dict[str, Any] = self.options["fitting_net"]
        return fitting

    @property
    def spin(self) -> dict[str, Any]:
        """Options of the spins; empty for a model without."""
        spin: dict[str, Any] = self.options.get("spin", {})
        return spin


def translate_model(section: Section, elements: Sequence[str] | None = None) -> Model:
    """elements: of the atom types, in their order, where the user gave them."""
    parts = parts_of_sum(section) if "models" in section.names() else Sum(section, [], [1.0], None)
    section, table = parts.first, parts.table
    _refuse_other_kinds(section)
    types = _types(section, elements)
    species = elements_of_types(str(section.file), section.path("type_map"), types, elements)
    type_names = renamed(types, species)
    descriptor, cutoff = translate_descriptor(section)
    descriptor = _with_type_embedding(section, descriptor)
    spin = translate_spin(section, descriptor, cutoff, types)
    fitting = _fitting(section)
    networks = [_added_network(other) for other in parts.others]
    precision = _agree_on_precision([descriptor, *(n[0] for n in networks)], [fitting, *(n[1] for n in networks)])
    reach = max(cutoff, *(network[2] for network in networks), 0.0 if table is None else table.cutoff)
    descriptor, cutoff = within(descriptor, cutoff, reach), reach
    options: dict[str, Any] = {"name": "deeppot", "descriptor": descriptor, "fitting_net": fitting}
    for name in ("pair_exclude_types", "atom_exclude_types"):
        if value := section.take(name, []):
            options[name] = value
    options |= _short_range(section) | _preset_bias(section, len(species)) | ({} if table is None else table.options())
    if networks:
        options["networks"] = [
            {"descriptor": within(of_network, rcut, reach), "fitting_net": of_fitting, "weight": weight}
            for (of_network, of_fitting, rcut), weight in zip(networks, parts.weights[1:], strict=True)
        ]
    if parts.weights[0] != 1:
        options["network_weight"] = parts.weights[0]
    if spin:
        options["spin"] = spin
    if any(is_stand_in(name, element) for name, element in type_names.items()):
        _refuse_configurations(section, descriptor)
    if type_names:
        options["type_names"] = types
        section.notes[section.path("type_map")] = (
            f"{describe_types(type_names)} in structures; training does not depend on these elements (data.species). "
            "Systems, files for DeePMD-kit and LAMMPS have the names (model.type_names)."
        )
    section.finish()
    return Model(options, species, cutoff, precision, _parameter_fields(fitting), type_names)


def _refuse_other_kinds(section: Section) -> None:
    kind = section.take("type", "standard")
    if isinstance(kind, str) and kind in OTHER_MODELS:
        raise section.refused("type", f"is '{kind}', {OTHER_MODELS[kind]}")
    if kind != "standard":
        raise section.wrong("type", kind, "standard")
    section.only(
        "bridging_method", "None", "bridging by an inner potential is not supported; model.zbl adds a ZBL term"
    )
    section.only("bridging_r_inner", 0.5, "there is no bridging")
    section.only("bridging_r_outer", 0.8, "there is no bridging")
    section.only("srtab_add_bias", True, "the bias of the data is always added to the table's energies")
    section.only("data_stat_protect", 1e-2, "deviations are always protected by 0.01, DeePMD-kit's default")
    section.only("model_branch_alias", [], "this is for several models trained together")
    section.only("finetune_head", None, "this is for several models trained together")
    section.only("modifier", None, "data modifiers (long-range electrostatics) are not supported here")
    section.only("compress", None, "models are not compressed here; `dp compress` compresses an exported one")
    for name, why in WITHOUT_EFFECT.items():
        section.note(name, f"no effect: {why}.", unless=[{}])


def _refuse_configurations(section: Section, descriptor: dict[str, Any]) -> None:
    """Raise for descriptors that read elements, where elements are stand-ins."""
    for part in networks_of(descriptor):
        if part.get("use_econf_tebd"):
            raise section.refused(
                "descriptor.use_econf_tebd",
                "reads the element of each type, which the names in 'model.type_map' do not tell",
            )


def _with_type_embedding(section: Section, descriptor: dict[str, Any]) -> dict[str, Any]:
    """The descriptor with `model.type_embedding` inside: without attention, `se_atten` is se_e2_a that reads an embedding."""
    embedding, parts = section.below("type_embedding"), networks_of(descriptor)
    if embedding is None:
        if any(part["type"] == STRIPPED for part in parts):
            raise section.refused("type_embedding", f"is missing; the descriptor {STRIPPED} reads it")
        return descriptor
    neuron = written_values(embedding, (*NETWORK, "use_tebd_bias")).get("neuron", [8])
    embedding.only("use_econf_tebd", False, "electronic configurations are an option of the descriptor here")
    embedding.finish()
    if other := next((part["type"] for part in parts if part["type"] not in TAKE_TYPES), None):
        raise section.refused("type_embedding", f"is given with the descriptor {other}, which reads no types here")
    embedded = [_embedding_types(part, neuron[-1]) for part in parts]
    for part in embedded[1:]:
        part["concat_output_tebd"] = False
    section.notes[section.path("type_embedding")] = (
        f"types are {neuron[-1]} numbers (descriptor.tebd_dim), which are trained directly instead of the network that "
        "computes them from the index of the type; se_e2_a that reads them is se_atten with attn_layer: 0."
        + (" Each part of the hybrid has its own." if len(parts) > 1 else "")
    )
    return {**descriptor, "list": embedded} if descriptor["type"] == "hybrid" else embedded[0]


def _embedding_types(part: dict[str, Any], tebd_dim: int) -> dict[str, Any]:
    kind, others = part["type"], {key: value for key, value in part.items() if key != "type"}
    if kind.startswith("se_atten"):
        return {"type": kind, **others, "tebd_dim": tebd_dim}
    mode = "strip" if kind == STRIPPED else "concat"
    options = {
        "type": "se_atten",
        "attn_layer": 0,
        "tebd_dim": tebd_dim,
        "tebd_input_mode": mode,
        "set_davg_zero": False,
    }
    if others.get("exclude_types") and isinstance(others.get("sel"), list):  # excluded neighbours would need slots
        others["neighbour_norm"] = float(sum(others.pop("sel")))
    return {**options, **others}


def _types(section: Section, elements: Sequence[str] | None) -> list[str]:
    """Names of the atom types. elements: where the user gave them."""
    names = section.take("type_map", elements)
    if names is None and (count := _types_of_sel(section)):
        return [f"type_{number}" for number in range(count)]
    if names is None:
        raise section.refused(
            "type_map",
            "is missing; name each atom type, such as ['O', 'H'], or give data.species=[O,H] (convert-config: --species)",
        )
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise section.wrong("type_map", names, "a list of names such as ['O', 'H']")
    if len(set(names)) != len(names):
        raise section.wrong("type_map", names, "a list of different names")
    return names


def _types_of_sel(section: Section) -> int:
    """Number of types of an input that does not name them, from the slots of its descriptor; 0 if that is unknown."""
    descriptor = section.peek("descriptor")
    sel = descriptor.get("sel") if isinstance(descriptor, Mapping) else None
    return len(sel) if isinstance(sel, list) else 0


def _fitting(section: Section) -> dict[str, Any]:
    inner = section.below("fitting_net")
    if inner is None:
        raise ForgefieldError(f"{section.file}: 'model.fitting_net' is missing.")
    kind = kind_of(inner, "ener", tuple(FITTING_KEYS), {}, OTHER_FITTINGS)
    options = written_values(inner, FITTING_KEYS[kind])
    if kind == "property" and not isinstance(options.get("property_name"), str):
        raise inner.refused("property_name", "is missing: it is the name of the property's files")
    if kind != "ener":
        inner.only("dim_case_embd", 0, "only branches with energies have one here")
    else:
        inner.only("layer_name", None, "networks do not share layers here")
        inner.only("use_aparam_as_mask", False, "atoms are not masked by their parameters")
    inner.finish()
    return {"type": kind, **options}


def _added_network(section: Section) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Descriptor, fitting network and cutoff, A, of another network of a sum."""
    section.choice("type", "standard", ("standard",))
    descriptor, cutoff = translate_descriptor(section)
    fitting = _fitting(section)
    if fitting["type"] != "ener":
        raise section.refused("fitting_net.type", f"is {fitting['type']}; only energies are added")
    section.finish()
    return descriptor, fitting, cutoff


def _agree_on_precision(descriptors: list[dict[str, Any]], fittings: list[dict[str, Any]]) -> str:
    """One precision for the training if all networks have the same; else each keeps its setting."""
    parts = [part for descriptor in descriptors for part in networks_of(descriptor)] + fittings
    precisions = [PRECISIONS[part.pop("precision", "default")] for part in parts]
    if len(set(precisions)) == 1:
        return precisions[0]
    for part, precision in zip(parts, precisions):
        part["precision"] = precision
    return "float64"


def _short_range(section: Section) -> dict[str, Any]:
    table = section.text("use_srtab")
    values = {name: section.number(name, above=0) for name in ("smin_alpha", "sw_rmin", "sw_rmax")}
    if table is None:
        if unused := [name for name, value in values.items() if value is not None]:
            raise section.refused(unused[0], "has an effect only with 'model.use_srtab', which is not given")
        return {}
    for name, value in values.items():
        if value is None:
            raise section.refused(name, "is missing; 'model.use_srtab' needs it")
    path = find_path(table, [Path.cwd(), section.file.absolute().parent])
    return {"use_srtab": path, **values}


def _preset_bias(section: Section, n_species: int) -> dict[str, Any]:
    preset = section.below("preset_out_bias")
    if preset is None:
        return {}
    bias = preset.take("energy", MISSING)
    preset.finish()
    numbers = isinstance(bias, list) and all(is_number(value) for value in bias)
    if not numbers or len(bias) != n_species:
        raise preset.refused(
            "energy", f"is {bias!r:.60}; here it gives the energy of each of the {n_species} types, or none"
        )
    return {"out_bias": [float(value) for value in bias]}


def _parameter_fields(fitting: dict[str, Any]) -> dict[str, Any]:
    sizes = {name: fitting.get(f"numb_{name}", 0) for name in ("fparam", "aparam")}
    per = {"fparam": "frame", "aparam": "atom"}
    return {name: {"per": per[name], "shape": [size]} for name, size in sizes.items() if size}

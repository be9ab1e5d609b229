"""The `model` section: descriptor and fitting network keep DeePMD-kit's names; type map and cutoff belong to `data`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgefield.config.deepmd.section import MISSING, Section, is_number
from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.files import find_path

DESCRIPTORS = {"se_a": "se_e2_a", "se_r": "se_e2_r", "dpa1": "se_atten"}
"""Other names of descriptors that are read."""
OTHER_DESCRIPTORS = (
    *("loc_frame", "se_e3", "se_at", "se_a_3be", "se_t", "se_e3_tebd", "se_a_tpe", "se_a_ebd", "se_a_ebd_v2"),
    *("se_a_tpe_v2", "se_a_mask", "dpa2", "dpa3", "dpa4", "dpa4c", "se_zm", "SeZM", "hybrid"),
)
OTHER_FITTINGS = ("dpa4_ener", "sezm_ener", "population", "global_polar", "wfc")
_DPA4 = "an architecture that is not available here; `dp --pt train` trains it"
OTHER_MODELS = {
    **dict.fromkeys(("dpa4", "DPA4", "dpa4c", "SeZM", "sezm"), _DPA4),
    "frozen": "a trained model; import its file (forgefield import deepmd FILE) and train with --init-model",
    "pairtab": "a table without a network; a table with a network is model.use_srtab",
    "pairwise_dprc": "of DeePMD-kit's TensorFlow backend alone",
    "linear_ener": "a weighted sum of models; a network with a table of pair energies is model.use_srtab",
}
"""Other types of models, and what they are."""
PRECISIONS = {
    "default": "float64",
    "float64": "float64",
    "double": "float64",
    "float32": "float32",
    "single": "float32",
}
"""DeePMD-kit's names of precisions that Forgefield has; its default is float64."""

NETWORK = ("neuron", "activation_function", "resnet_dt", "trainable", "seed", "precision")
SE_E2_R = (*NETWORK, "sel", "rcut_smth", "type_one_side", "exclude_types", "env_protection", "set_davg_zero")
SE_ATTEN_V2 = (
    *SE_E2_R,
    *("axis_neuron", "attn", "attn_layer", "attn_dotr", "attn_mask", "trainable_ln", "ln_eps", "tebd_dim"),
    *("use_econf_tebd", "use_tebd_bias", "scaling_factor", "normalize", "temperature", "concat_output_tebd"),
)
DESCRIPTOR_KEYS = {
    "se_e2_r": SE_E2_R,
    "se_e2_a": (*SE_E2_R, "axis_neuron"),
    "se_atten": (*SE_ATTEN_V2, "smooth_type_embedding", "tebd_input_mode"),
    "se_atten_v2": SE_ATTEN_V2,
}
PARAMETERS = ("numb_fparam", "numb_aparam", "default_fparam")
FITTING_KEYS = {
    "ener": (*NETWORK, *PARAMETERS, "rcond", "atom_ener"),
    "property": (*NETWORK, *PARAMETERS, "task_dim", "intensive", "distinguish_types", "property_name"),
    "dos": (*NETWORK, *PARAMETERS, "rcond", "numb_dos"),
    "dipole": (*NETWORK, *PARAMETERS, "sel_type"),
    "polar": (*NETWORK, *PARAMETERS, "fit_diag", "scale", "shift_diag", "sel_type"),
}
FLAGS = (
    *("resnet_dt", "type_one_side", "set_davg_zero", "attn_dotr", "attn_mask", "smooth_type_embedding", "trainable_ln"),
    *(
        "use_econf_tebd",
        "use_tebd_bias",
        "normalize",
        "concat_output_tebd",
        "intensive",
        "distinguish_types",
        "fit_diag",
    ),
    "shift_diag",
)
COUNTS = ("seed", "axis_neuron", "attn", "attn_layer", "tebd_dim", "numb_fparam", "numb_aparam", "task_dim", "numb_dos")
NUMBERS = ("rcut_smth", "env_protection", "scaling_factor", "temperature", "ln_eps", "rcond")
ALIASES = {
    "axis_neuron": ("n_axis_neuron",),
    "neuron": ("n_neuron",),
    "smooth_type_embedding": ("smooth_type_embdding",),
    "sel_type": ("pol_type", "dipole_type"),
}
TYPE_EMBEDDING = (
    "only DeePMD-kit's TensorFlow backend has a type embedding outside the descriptor; use the descriptor se_atten with "
    "attn_layer 0, which has one inside (descriptor.tebd_dim)"
)
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

    @property
    def fitting(self) -> dict[str, Any]:
        fitting: dict[str, Any] = self.options["fitting_net"]
        return fitting


def translate_model(section: Section) -> Model:
    _refuse_other_kinds(section)
    species = _species(section)
    descriptor, cutoff = _descriptor(section)
    fitting = _fitting(section)
    precision = _agree_on_precision(descriptor, fitting)
    options: dict[str, Any] = {"name": "deeppot", "descriptor": descriptor, "fitting_net": fitting}
    for name in ("pair_exclude_types", "atom_exclude_types"):
        if value := section.take(name, []):
            options[name] = value
    options |= _short_range(section) | _preset_bias(section, len(species))
    section.finish()
    return Model(options, species, cutoff, precision, _parameter_fields(fitting))


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
    section.only("spin", None, "magnetic moments are not supported")
    section.only("modifier", None, "data modifiers are of DeePMD-kit's TensorFlow alone")
    section.only("compress", None, "models are compressed when they are exported, not by the input")
    section.only("type_embedding", None, TYPE_EMBEDDING)
    for name, why in WITHOUT_EFFECT.items():
        section.note(name, f"no effect: {why}.", unless=[{}])


def _species(section: Section) -> list[str]:
    names = section.take("type_map")
    if names is None:
        raise section.refused("type_map", "is missing; name the element of each atom type, such as ['O', 'H']")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise section.wrong("type_map", names, "a list of elements such as ['O', 'H']")
    if len(set(names)) != len(names):
        raise section.wrong("type_map", names, "a list of different elements")
    from ase.data import chemical_symbols

    for name in names:
        if name not in chemical_symbols[1:]:
            raise section.refused(
                "type_map",
                f"names '{name}', and types are chemical elements here{_aside(name, chemical_symbols[1:])}; name the element "
                "in the input and in type_map.raw",
            )
    return names


def _descriptor(section: Section) -> tuple[dict[str, Any], float]:
    inner = section.below("descriptor")
    if inner is None:
        raise ForgefieldError(f"{section.file}: 'model.descriptor' is missing.")
    kind = _kind(inner, MISSING, DESCRIPTOR_KEYS, DESCRIPTORS, OTHER_DESCRIPTORS, "descriptor")
    cutoff = inner.number("rcut", 6.0, above=0)
    options = _set_values(inner, DESCRIPTOR_KEYS[kind])
    if kind.startswith("se_atten"):
        inner.only("lmax", None, f"{kind} has moments of degree 1 here; leave it out")
        stripped = inner.take("stripped_type_embedding")
        if stripped is not None:  # wins over the newer key, as in DeePMD-kit
            options["tebd_input_mode"] = "strip" if stripped else "concat"
    if isinstance(options.get("sel"), str):
        _check_auto_sel(inner, options.pop("sel"))
    inner.finish()
    return {"type": kind, **options}, cutoff


def _check_auto_sel(section: Section, value: str) -> None:
    """`auto` asks for room for all neighbours there are, and here no room has to be made."""
    word, colon, factor = value.partition(":")
    try:
        good = word == "auto" and (not colon or float(factor) >= 1)
    except ValueError:
        good = False
    if not good:
        raise section.wrong(
            "sel", value, "a list of numbers of neighbours, auto, or auto:FACTOR with a factor of at least 1"
        )


def _fitting(section: Section) -> dict[str, Any]:
    inner = section.below("fitting_net")
    if inner is None:
        raise ForgefieldError(f"{section.file}: 'model.fitting_net' is missing.")
    kind = _kind(inner, "ener", FITTING_KEYS, {}, OTHER_FITTINGS, "fitting")
    options = _set_values(inner, FITTING_KEYS[kind])
    if kind == "property" and not isinstance(options.get("property_name"), str):
        raise inner.refused("property_name", "is missing: it is the name of the property's files")
    inner.only("dim_case_embd", 0, "this is for several models trained together")
    if kind == "ener":
        inner.only("layer_name", None, "networks do not share layers here")
        inner.only("use_aparam_as_mask", False, "atoms are not masked by their parameters")
    inner.finish()
    return {"type": kind, **options}


def _kind(
    section: Section,
    default: object,
    supported: dict[str, Any],
    aliases: dict[str, str],
    others: tuple[str, ...],
    word: str,
) -> str:
    kind = section.take("type", default)
    kind = aliases.get(kind, kind) if isinstance(kind, str) else kind
    if kind in tuple(supported):
        return kind
    if kind in others:
        raise section.refused(
            "type", f"is '{kind}', a {word} that is not supported; supported are {', '.join(supported)}"
        )
    hint = did_you_mean(str(kind), [*supported, *aliases])
    raise ForgefieldError(
        f"{section.file}: '{section.path('type')}' must be one of {', '.join(supported)}, not {kind!r}.{hint}"
    )


def _set_values(section: Section, names: tuple[str, ...]) -> dict[str, Any]:
    """What the user wrote, under the first of its names; the model has DeePMD-kit's defaults for the rest."""
    order = section.names()
    values = {name: _value(section, name) for name in names}
    precision = values.get("precision")
    if precision is not None and precision not in tuple(PRECISIONS):
        raise section.wrong("precision", precision, "float64 or float32 (double, single, default)")
    names_set = [name for name in names if values[name] is not None]
    return {name: values[name] for name in sorted(names_set, key=lambda name: order.index(section.written(name)))}


def _value(section: Section, name: str) -> Any:
    """The value of an option, with its type checked; None if it is not set."""
    also = ALIASES.get(name, ())
    if name in FLAGS:
        return section.flag(name, None, also=also)
    if name in COUNTS:
        return section.integer(name, at_least=0, also=also)
    if name in NUMBERS:
        return section.number(name, at_least=0, also=also)
    value = section.take(name, also=also)
    if name == "neuron" and value is not None:
        if not isinstance(value, list) or not all(is_number(width) and width == int(width) > 0 for width in value):
            raise section.wrong(name, value, "a list of positive whole numbers")
        return [int(width) for width in value]
    return value


def _agree_on_precision(descriptor: dict[str, Any], fitting: dict[str, Any]) -> str:
    """One precision for the training if both networks have the same; else each keeps its setting."""
    first, second = (PRECISIONS[part.pop("precision", "default")] for part in (descriptor, fitting))
    if first == second:
        return first
    descriptor["precision"], fitting["precision"] = first, second
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


def _aside(name: str, candidates: Sequence[str]) -> str:
    hint = did_you_mean(name, candidates).strip()
    return f" ({hint[0].lower()}{hint[1:]})" if hint else ""

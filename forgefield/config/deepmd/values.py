"""Settings that descriptors and fitting networks have in common: their types, and what kind of value each key has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forgefield.config.deepmd.section import Section, is_number
from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError

PRECISIONS = {
    "default": "float64",
    "float64": "float64",
    "double": "float64",
    "float32": "float32",
    "single": "float32",
}
"""DeePMD-kit's names of precisions that Forgefield has; its default is float64."""

NETWORK = ("neuron", "activation_function", "resnet_dt", "trainable", "seed", "precision")
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
COUNTS = (
    "seed",
    "axis_neuron",
    "attn",
    "attn_layer",
    "tebd_dim",
    "numb_fparam",
    "numb_aparam",
    "dim_case_embd",
    "task_dim",
    "numb_dos",
)
NUMBERS = ("rcut_smth", "env_protection", "scaling_factor", "temperature", "ln_eps", "rcond")
ALIASES = {
    "axis_neuron": ("n_axis_neuron",),
    "neuron": ("n_neuron",),
    "smooth_type_embedding": ("smooth_type_embdding",),
    "sel_type": ("pol_type", "dipole_type"),
}


def kind_of(
    section: Section,
    default: object,
    supported: Sequence[str],
    aliases: Mapping[str, str],
    others: Mapping[str, str],
) -> str:
    """The type of a section, under its usual name. others: types that are refused, and what they are."""
    kind = section.take("type", default)
    kind = aliases.get(kind, kind) if isinstance(kind, str) else kind
    if kind in tuple(supported):
        return str(kind)
    if isinstance(kind, str) and kind in others:
        raise section.refused("type", f"is '{kind}', {others[kind]}; supported are {', '.join(supported)}")
    hint = did_you_mean(str(kind), [*supported, *aliases])
    raise ForgefieldError(
        f"{section.file}: '{section.path('type')}' must be one of {', '.join(supported)}, not {kind!r}.{hint}"
    )


def written_values(section: Section, names: Sequence[str]) -> dict[str, Any]:
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

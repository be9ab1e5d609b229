"""The section `model.descriptor`: keys keep DeePMD-kit's names; the cutoff belongs to `data`."""

from __future__ import annotations

from typing import Any

from forgefield.config.deepmd.section import MISSING, Section
from forgefield.config.deepmd.values import NETWORK, kind_of, written_values
from forgefield.errors import ForgefieldError

STRIPPED = "se_a_ebd_v2"
"""se_e2_a that reads an embedding of types through a separate network."""
DESCRIPTORS = {
    "se_a": "se_e2_a",
    "se_r": "se_e2_r",
    "se_t": "se_e3",
    "se_at": "se_e3",
    "se_a_3be": "se_e3",
    "dpa1": "se_atten",
    "se_a_tpe_v2": STRIPPED,
}
"""Other names of descriptors that are read."""
_TENSORFLOW = "a descriptor of DeePMD-kit's TensorFlow backend alone"
_TYPE_EMBEDDED = (
    "a descriptor of DeePMD-kit's TensorFlow backend alone; se_e2_a or se_a_ebd_v2 with model.type_embedding, and se_atten "
    "without attention (attn_layer: 0), read types as well"
)
_NOT_HERE = "a descriptor that is not supported"
OTHER_DESCRIPTORS = {
    **dict.fromkeys(("loc_frame", "se_a_mask"), _TENSORFLOW),
    **dict.fromkeys(("se_a_tpe", "se_a_ebd"), _TYPE_EMBEDDED),
    **dict.fromkeys(("se_e3_tebd",), _NOT_HERE),
    **dict.fromkeys(("dpa2", "dpa3", "dpa4", "dpa4c", "se_zm", "SeZM"), _NOT_HERE),
}
"""Descriptors that are not supported, and why."""
SE_E3 = (*NETWORK, "sel", "rcut_smth", "exclude_types", "env_protection", "set_davg_zero")
SE_E2_R = (*SE_E3, "type_one_side")
SE_ATTEN_V2 = (
    *SE_E2_R,
    *("axis_neuron", "attn", "attn_layer", "attn_dotr", "attn_mask", "trainable_ln", "ln_eps", "tebd_dim"),
    *("use_econf_tebd", "use_tebd_bias", "scaling_factor", "normalize", "temperature", "concat_output_tebd"),
)
DESCRIPTOR_KEYS = {
    "se_e2_r": SE_E2_R,
    "se_e2_a": (*SE_E2_R, "axis_neuron"),
    STRIPPED: (*SE_E2_R, "axis_neuron"),
    "se_e3": SE_E3,
    "se_atten": (*SE_ATTEN_V2, "smooth_type_embedding", "tebd_input_mode"),
    "se_atten_v2": SE_ATTEN_V2,
}


def translate_descriptor(section: Section) -> tuple[dict[str, Any], float]:
    """Forgefield's `model.descriptor`, and the cutoff, A. section: `model`."""
    inner = section.below("descriptor")
    if inner is None:
        raise ForgefieldError(f"{section.file}: 'model.descriptor' is missing.")
    kind = kind_of(inner, MISSING, (*DESCRIPTOR_KEYS, "hybrid"), DESCRIPTORS, OTHER_DESCRIPTORS)
    return _hybrid(inner) if kind == "hybrid" else _single(inner, kind)


def _hybrid(section: Section) -> tuple[dict[str, Any], float]:
    """Several descriptors, each with its cutoff. The neighbour lists reach as far as the longest."""
    sections = section.below_each("list")
    section.finish()
    if not sections:
        raise section.refused("list", "is empty or missing; it lists the descriptors of the hybrid")
    parts = [
        _single(part, kind_of(part, MISSING, tuple(DESCRIPTOR_KEYS), DESCRIPTORS, OTHER_DESCRIPTORS))
        for part in sections
    ]
    return {"type": "hybrid", "list": [{**options, "rcut": cutoff} for options, cutoff in parts]}, max(
        cutoff for _, cutoff in parts
    )


def _single(section: Section, kind: str) -> tuple[dict[str, Any], float]:
    cutoff = section.number("rcut", 6.0, above=0)
    options = written_values(section, DESCRIPTOR_KEYS[kind])
    if kind.startswith("se_atten"):
        section.only("lmax", None, f"{kind} has moments of degree 1 here; leave it out")
        stripped = section.take("stripped_type_embedding")
        if stripped is not None:  # wins over the newer key, as in DeePMD-kit
            options["tebd_input_mode"] = "strip" if stripped else "concat"
    if isinstance(options.get("sel"), str):
        _check_auto_sel(section, options.pop("sel"))
    section.finish()
    return {"type": kind, **options}, cutoff


def networks_of(descriptor: dict[str, Any]) -> list[dict[str, Any]]:
    """The sections of `model.descriptor` that have networks: the parts of a hybrid, or itself."""
    parts: list[dict[str, Any]] = descriptor["list"] if descriptor["type"] == "hybrid" else [descriptor]
    return parts


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

"""The section `model.descriptor` of type dpa2. The cutoff of its first block is that of the neighbour lists."""

from __future__ import annotations

from typing import Any

from forgefield.config.deepmd.section import MISSING, Section
from forgefield.config.deepmd.values import check_auto_sel, written_values
from forgefield.errors import ForgefieldError

DPA2 = (
    *("concat_output_tebd", "smooth", "add_tebd_to_repinit_out", "use_econf_tebd", "use_tebd_bias"),
    *("exclude_types", "env_protection", "trainable", "seed", "precision"),
)
REPINIT = (
    *("rcut_smth", "nsel", "neuron", "axis_neuron", "tebd_dim", "tebd_input_mode", "set_davg_zero"),
    *("activation_function", "resnet_dt", "type_one_side", "use_three_body", "three_body_neuron", "three_body_rcut"),
    *("three_body_rcut_smth", "three_body_sel"),
)
REPFORMER = (
    *("rcut", "rcut_smth", "nsel", "nlayers", "g1_dim", "g2_dim", "axis_neuron", "direct_dist", "update_g1_has_conv"),
    *("update_g1_has_drrd", "update_g1_has_grrg", "update_g1_has_attn", "update_g2_has_g1g1", "update_g2_has_attn"),
    *("update_h2", "attn1_hidden", "attn1_nhead", "attn2_hidden", "attn2_nhead", "attn2_has_gate"),
    *("activation_function", "update_style", "update_residual", "update_residual_init", "set_davg_zero"),
    *("trainable_ln", "use_sqrt_nnei", "g1_out_conv", "g1_out_mlp", "ln_eps"),
)
REQUIRED = ("rcut", "rcut_smth", "nsel")
THREE_BODY_SEL = 40
"""DeePMD-kit's default of `three_body_sel`."""


def translate_dpa2(section: Section) -> tuple[dict[str, Any], float]:
    """Options of the descriptor, and the cutoff, A."""
    blocks = {}
    for name, keys in (("repinit", REPINIT), ("repformer", REPFORMER)):
        block = section.below(name)
        if block is None:
            raise ForgefieldError(f"{section.file}: '{section.path(name)}' is missing.")
        blocks[name] = _block(block, keys)
    cutoff = float(blocks["repinit"].pop("rcut"))
    options = written_values(section, DPA2)
    section.finish()
    return {"type": "dpa2", **options, **blocks}, cutoff


def _block(section: Section, keys: tuple[str, ...]) -> dict[str, Any]:
    missing = [key for key in REQUIRED if key not in section.names()]
    if missing:
        raise ForgefieldError(f"{section.file}: '{section.path(missing[0])}' is missing.")
    cutoff = section.number("rcut", MISSING, above=0)
    options = {"rcut": cutoff, **written_values(section, tuple(key for key in keys if key != "rcut"))}
    for key in ("nsel", "three_body_sel"):
        if isinstance(options.get(key), str):
            check_auto_sel(section, options.pop(key), key)
        elif key in keys and key not in options:
            options[key] = THREE_BODY_SEL
    section.finish()
    return options

"""The descriptor `dpa3`: keys of its section `repflow` become options of the descriptor, and e_rcut the cutoff of `data`."""

from __future__ import annotations

from typing import Any

from forgefield.config.deepmd.section import MISSING, Section, is_number
from forgefield.config.deepmd.values import written_values
from forgefield.errors import ForgefieldError

OUTER = (
    *("activation_function", "trainable", "seed", "precision", "exclude_types", "env_protection"),
    *("concat_output_tebd", "use_econf_tebd", "use_tebd_bias"),
)
COUNTS = {
    **dict.fromkeys(
        ("n_dim", "e_dim", "a_dim", "nlayers", "axis_neuron", "n_multi_edge_message", "a_compress_e_rate"), 1
    ),
    "a_compress_rate": 0,
}
"""Whole numbers, and their lower bounds."""
FLAGS = {
    "a_compress_use_split": (),
    "update_angle": (),
    "sequential_update": (),
    "smooth_edge_update": (),
    "edge_init_use_dist": ("edge_use_dist",),
    "use_exp_switch": ("use_env_envelope",),
    "use_dynamic_sel": (),
}
"""True or false, and their other names."""
LENGTHS = ("e_rcut_smth", "a_rcut", "a_rcut_smth")
NUMBERS = ("update_residual", "sel_reduce_factor", "fix_stat_std")
TEXTS = ("update_style", "update_residual_init")
FIXED_STD = 0.3
"""What `skip_stat` sets."""


def translate_repflow(section: Section) -> tuple[dict[str, Any], float]:
    """Forgefield's `model.descriptor`, and the cutoff, A. section: `model.descriptor`."""
    inner = section.below("repflow")
    if inner is None:
        raise ForgefieldError(f"{section.file}: '{section.path('repflow')}' is missing.")
    options = written_values(section, OUTER)
    section.note("use_loc_mapping", "no effect: neighbours are always those of the periodic structure.", unless=[True])
    section.only("add_chg_spin_ebd", False, "embeddings of the total charge and spin are not supported")
    section.only("default_chg_spin", None, "embeddings of the total charge and spin are not supported")
    section.finish()
    cutoff = inner.number("e_rcut", MISSING, above=0)
    values: dict[str, Any] = {name: inner.number(name, MISSING, above=0) for name in LENGTHS}
    values |= {name: inner.integer(name, None, at_least=least) for name, least in COUNTS.items()}
    values |= {name: inner.flag(name, None, also=also) for name, also in FLAGS.items()}
    values |= {name: inner.number(name, None, at_least=0) for name in NUMBERS}
    values |= {name: inner.text(name) for name in TEXTS}
    values |= {name: _sel(inner, name) for name in ("e_sel", "a_sel")}
    if inner.flag("skip_stat", False):
        values["fix_stat_std"] = FIXED_STD
    inner.note("optim_update", "no effect: results are the same, and the faster form is always used.", unless=[True])
    if not values["use_dynamic_sel"] and isinstance(values["a_sel"], int):
        inner.notes[inner.path("a_sel")] = (
            f"of an atom with more neighbours within a_rcut only the nearest {values['a_sel']} have angles, as in DeePMD-kit; "
            "energies are then discontinuous."
        )
    inner.finish()
    written = {name: value for name, value in values.items() if value is not None}
    return {"type": "dpa3", **options, **written}, cutoff


def _sel(section: Section, name: str) -> int | str:
    """A number of neighbours, or `auto`, which the model resolves."""
    value = section.take(name, MISSING)
    if isinstance(value, str):
        return value
    if not is_number(value) or value != int(value) or value < 1:
        raise section.wrong(name, value, "a whole number of at least 1, auto, or auto:FACTOR")
    return int(value)

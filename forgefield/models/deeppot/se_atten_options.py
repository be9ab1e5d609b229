"""Options of the attention descriptors, with DeePMD-kit's names and defaults, their checks, and what data fills in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.options import SeE2AOptions
from forgefield.models.deeppot.se_e2_a import SeE2A
from forgefield.models.deeppot.type_embedding import occupations

MODES = ("concat", "strip")
MARGIN = 1.1
"""Compiled layouts of neighbours have room for so much more than the fullest atom of the training data."""


@dataclass
class SeAttenV2Options(SeE2AOptions):
    """Attention descriptor whose species go through a network of their own."""

    type: str = "se_atten_v2"
    sel: int | list[int] | str | None = None  # type: ignore[assignment]
    """Neighbours that DeePMD-kit makes room for; of a list the sum counts. Empty places enter the result as they do there. Left
    out or `auto`: no room is needed."""
    tebd_dim: int = 8
    """Numbers that stand for a species."""
    attn: int = 128
    """Length of queries, keys and values."""
    attn_layer: int = 2
    """Attention layers; 0 for none."""
    attn_dotr: bool = True
    """Multiply attention with the cosine of the angle between neighbours."""
    attn_mask: bool = False
    """A neighbour does not look at itself."""
    scaling_factor: float = 1.0
    """Products of queries and keys are divided by the root of `attn` times this."""
    normalize: bool = True
    """Queries, keys and values have length one."""
    temperature: float | None = None
    """What products of queries and keys are multiplied with; default: see `scaling_factor`."""
    trainable_ln: bool = True
    """Train scale and shift of the layer normalisations."""
    ln_eps: float | None = None
    """Added to their variances; default 1e-5."""
    concat_output_tebd: bool = True
    """The numbers of the atom's species are part of its descriptor."""
    use_econf_tebd: bool = False
    """Make them from the electronic configuration of the element."""
    use_tebd_bias: bool = False
    """With a constant."""
    max_neighbours: int | None = None
    """Neighbours that traced and captured steps have room for. Default: from the training data, a tenth more than needed."""
    tebd_input_mode: ClassVar[str] = "strip"
    smooth_type_embedding: ClassVar[bool] = True


@dataclass
class SeAttenOptions(SeAttenV2Options):
    """Attention descriptor of DPA-1."""

    type: str = "se_atten"
    set_davg_zero: bool = True
    tebd_input_mode: str = "concat"  # type: ignore[misc]
    """How species enter: `concat`, beside the distance, or `strip`, through a network of their own that scales the other's."""
    smooth_type_embedding: bool = False  # type: ignore[misc]
    """Neighbours enter attention smoothly at the cutoff; with false they enter at once, and forces jump."""


def complete_options(options: Any, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]) -> Any:
    """Options checked, with every number explicit."""
    _check(options, species)
    room = room_for(options.sel)
    filled = SeE2A.complete(replace(options, sel=None), species=species, cutoff=cutoff, statistics=statistics)
    found: Mapping[str, Any] = statistics.get("environment") or {}
    most = found.get("max_neighbours")
    needed = None if most is None else sum(most)
    width = options.max_neighbours or (None if needed is None else max(1, math.ceil(MARGIN * needed)))
    if room is not None:
        width = room if width is None else min(width, room)
    if width is None:
        raise ForgefieldError(
            "model.descriptor.max_neighbours is not given and there is no training data to take it from."
        )
    norm = options.neighbour_norm or (filled.neighbour_norm if room is None else float(room))
    return replace(
        filled,
        sel=None if room is None else options.sel,
        neighbour_norm=norm,
        max_neighbours=width,
        ln_eps=1e-5 if options.ln_eps is None else options.ln_eps,
    )


def room_for(sel: int | list[int] | str | None) -> int | None:
    """Slots of each atom; None where there is no such number."""
    if isinstance(sel, list):
        return sum(sel)
    return None if sel is None or isinstance(sel, str) else sel


def _check(options: Any, species: tuple[str, ...]) -> None:
    where = "model.descriptor"
    sel = options.sel
    if isinstance(sel, str) and not sel.startswith("auto"):
        raise ForgefieldError(f"{where}.sel is '{sel}'; give a number, or auto.")
    room = room_for(sel)
    if room is not None and (room < 1 or (isinstance(sel, list) and min(sel) < 0)):
        raise ForgefieldError(f"{where}.sel is {sel}; there must be room for at least one neighbour.")
    if options.tebd_input_mode not in MODES:
        raise ForgefieldError(
            f"{where}.tebd_input_mode is '{options.tebd_input_mode}'; choose one of {', '.join(MODES)}."
        )
    for key, least in (("tebd_dim", 1), ("attn", 1), ("attn_layer", 0), ("max_neighbours", 1)):
        value = getattr(options, key)
        if value is not None and value < least:
            raise ForgefieldError(f"{where}.{key} is {value}; it must be at least {least}.")
    for key in ("scaling_factor", "ln_eps"):
        value = getattr(options, key)
        if value is not None and not value > 0:
            raise ForgefieldError(f"{where}.{key} is {value:g}; it must be above 0.")
    if options.use_econf_tebd:
        for symbol in species:
            occupations(symbol)

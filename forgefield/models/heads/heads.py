"""Heads: small networks that make further outputs of the features of atoms, in the unit of their labels.

An atom's value is `shift + scale * network(features)`, with a shift of its species and one scale, both part of the model. The
value of a frame is the sum of its atoms' (extensive) or their mean (intensive), so it does not depend on how a crystal is cut
into cells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.models.heads.equivariant import EdgeGeometry, EdgeHead
from forgefield.models.heads.network import NORMS, HeadNetwork
from forgefield.models.heads.values import frame_values, hold_scaling
from forgefield.ops.graph import Segments, gather, segment_sum
from forgefield.ops.pooling import segment_max, segment_softmax

ACTIVATIONS = ("silu", "mish", "gelu", "ssp", "tanh")


@dataclass
class HeadOptions:
    """A head. Those of `CHOSEN` are the user's to choose (`model.heads.NAME`); the rest follows from task and data."""

    hidden: list[int] = field(default_factory=lambda: [64])
    """Widths of its hidden layers."""
    activation: str = "silu"
    """Between layers: silu, mish, gelu, ssp or tanh."""
    norm: str = "none"
    """Of hidden layers, before their activation: none, or layer (mean zero and variance one over the values of an atom)."""
    residual: bool = False
    """Add the input of a hidden layer to its output, from the second one on; all have to be of one width."""
    dropout: float = 0.0
    """Share of the values of hidden layers that are left out in training, drawn anew for every frame, epoch and layer."""
    per: str = "frame"
    """What has a value: frame or atom."""
    shape: list[int] = field(default_factory=list)
    """Of one value."""
    unit: str = ""
    """In words."""
    reduce: str = "mean"
    """How the value of a frame follows from its atoms': sum or mean of their values; max or attention: the last layer reads the
    largest of each feature over the atoms, or their mean with learnt weights."""
    kind: str = "values"
    """How values turn with the structure: values (not at all), vector, symmetric or tensor (3 x 3)."""
    net_zero: bool = False
    """Vectors of atoms: their mean over a frame is taken off, so that they add up to zero."""
    neighbours: float = 1.0
    """Vectors and tensors: neighbours of an atom on average, by whose root sums over them are divided."""
    shift: list[list[float]] | None = None
    """(n_species, size of a value): added to the values of atoms. Default: zero."""
    scale: float = 1.0
    """What the network's output is multiplied by."""
    classes: list[float] | None = None
    """Labels of the classes that it tells apart; its output are then logits, one for each. Default: none, its output is a
    value."""

    @property
    def output_shape(self) -> list[int]:
        """Of the output for one frame or atom."""
        return self.shape if self.classes is None else [len(self.classes)]

    @property
    def network(self) -> dict[str, Any]:
        """Options of its layers."""
        return {name: getattr(self, name) for name in CHOSEN}


CHOSEN = ("hidden", "activation", "norm", "residual", "dropout")
"""Options that a config may set."""
POOLED = ("max", "attention")
"""Ways to reduce that make one set of features of those of a frame's atoms."""


def check_heads(given: Any) -> dict[str, dict[str, Any]]:
    """The section `model.heads`, or one sentence on what is wrong with it."""
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise ForgefieldError(
            f"model.heads is {given!r}; it should be a mapping such as {{band_gap: {{hidden: [64]}}}}."
        )
    return {str(name): _check_head(name, section) for name, section in given.items()}


def _check_head(name: str, given: Any) -> dict[str, Any]:
    """The section `model.heads.NAME`, or one sentence on what is wrong with it."""
    where = f"model.heads.{name}"
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise ForgefieldError(f"{where} is {given!r}; it should be a section with the keys {', '.join(CHOSEN)}.")
    for key in given:
        if key not in CHOSEN:
            raise ForgefieldError(f"{where}.{key} is not an option of a head.{did_you_mean(str(key), CHOSEN)}")
    hidden = given.get("hidden", [])
    if not isinstance(hidden, list) or not all(
        isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in hidden
    ):
        raise ForgefieldError(f"{where}.hidden is {hidden!r}; it should be a list of widths, such as [64, 64].")
    if given.get("activation", "silu") not in ACTIVATIONS:
        raise ForgefieldError(f"{where}.activation is {given['activation']!r}; choose one of {', '.join(ACTIVATIONS)}.")
    _check_layers(where, given, hidden)
    return dict(given)


def _check_layers(where: str, given: Mapping[str, Any], hidden: list[int]) -> None:
    if given.get("norm", "none") not in NORMS:
        raise ForgefieldError(f"{where}.norm is {given['norm']!r}; choose one of {', '.join(NORMS)}.")
    residual, dropout = given.get("residual", False), given.get("dropout", 0.0)
    if not isinstance(residual, bool):
        raise ForgefieldError(f"{where}.residual is {residual!r}; it is true or false.")
    if residual and (len(hidden) < 2 or len(set(hidden)) > 1):
        raise ForgefieldError(
            f"{where}.residual needs at least two hidden layers of one width, such as {where}.hidden=[64, 64]; "
            f"hidden is {hidden or HeadOptions().hidden}."
        )
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise ForgefieldError(f"{where}.dropout is {dropout!r}; it is a share, from 0 to below 1.")
    without = [name for name in ("norm", "dropout") if given.get(name) not in (None, "none", 0, 0.0)]
    if given.get("hidden") == [] and without:
        raise ForgefieldError(f"{where}.{without[0]} is for hidden layers, and {where}.hidden is empty.")


class Head(HeadNetwork):
    """From features (n_atoms, n_features) to values (n_frames, *shape) or (n_atoms, *shape), float64, that do not turn with the
    structure. seed, name: its first weights depend on these alone, whatever other heads there are.
    """

    shift: Tensor
    scale: Tensor

    def __init__(
        self, name: str, options: HeadOptions, *, n_features: int, n_species: int, dtype: torch.dtype, seed: int
    ) -> None:
        size = math.prod(options.output_shape)
        super().__init__(name, n_in=n_features, n_out=size, **options.network, dtype=dtype, seed=seed)
        self.options, self.n_species = options, n_species
        if options.reduce == "attention":
            self.attention = nn.Parameter(torch.zeros(self.last_width, dtype=dtype))
        hold_scaling(self, options, n_species)

    def forward(self, features: Tensor, batch: Mapping[str, Tensor], edges: EdgeGeometry | None = None) -> Tensor:
        x = self.hidden(features.to(self.dtype), batch)
        shift = gather(self.shift, Segments(batch["species"], self.n_species))
        if self.options.per == "frame" and self.options.reduce in POOLED:
            values = frame_values(shift, batch, "mean") + self.scale * self.last(self._pooled(x, batch)).double()
        else:
            values = shift + self.scale * self.last(x).double()
            if self.options.per == "frame":
                values = frame_values(values, batch, self.options.reduce)
        return values.reshape(-1, *self.options.output_shape)

    def _pooled(self, x: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """(n_frames, width): the last hidden layer of a frame."""
        atoms = Segments(batch["frame"], batch["n_atoms"].shape[0], rows_are_sorted=True)
        if self.options.reduce == "max":
            return segment_max(x, atoms)
        weights = segment_softmax((x @ self.attention).double(), atoms).to(x.dtype)
        return segment_sum(x * weights.unsqueeze(1), atoms)


def build_head(
    name: str,
    options: HeadOptions,
    *,
    n_features: int,
    n_species: int,
    dtype: torch.dtype,
    seed: int,
) -> Head | EdgeHead:
    """The head that these options ask for."""
    make: dict[str, Any] = {"n_features": n_features, "n_species": n_species, "dtype": dtype, "seed": seed}
    return Head(name, options, **make) if options.kind == "values" else EdgeHead(name, options, **make)


def head_options(given: Mapping[str, Mapping[str, Any]]) -> dict[str, HeadOptions]:
    """Resolved options of several heads, by name in alphabetical order."""
    return {name: HeadOptions(**given[name]) for name in sorted(given)}


def complete_heads(given: Any, facts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Options of every head in full. given: the section `model.heads`. facts: what task and data say of each output."""
    checked = check_heads(given)
    for name in checked:
        if name not in facts:
            known = f"its further targets are {', '.join(facts)}" if facts else "it has no further targets"
            raise ForgefieldError(f"model.heads.{name}: the task has no target of that name; {known}.")
        if checked[name].get("dropout") and facts[name].get("kind", "values") != "values":
            raise ForgefieldError(
                f"model.heads.{name}.dropout does not apply: {name} is a {facts[name]['kind']}, whose network works on pairs "
                "of atoms."
            )
    return {name: asdict(HeadOptions(**{**facts[name], **checked.get(name, {})})) for name in sorted(facts)}

"""Heads: small networks that make further outputs of the features of atoms, in the unit of their labels.

An atom's value is `shift + scale * network(features)`, with a shift of its species and one scale, both part of the model. The
value of a frame is the sum of its atoms' (extensive) or their mean (intensive), so it does not depend on how a crystal is cut
into cells.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.ops.activations import activate
from forgefield.ops.graph import Segments, gather, segment_sum
from forgefield.ops.linear import unit_normal
from forgefield.ops.products import product

ACTIVATIONS = ("silu", "mish", "gelu", "ssp", "tanh")


@dataclass
class HeadOptions:
    """A head. `hidden` and `activation` are the user's to choose (`model.heads.NAME`); the rest follows from task and data."""

    hidden: list[int] = field(default_factory=lambda: [64])
    """Widths of its hidden layers."""
    activation: str = "silu"
    """Between layers: silu, mish, gelu, ssp or tanh."""
    per: str = "frame"
    """What has a value: frame or atom."""
    shape: list[int] = field(default_factory=list)
    """Of one value."""
    unit: str = ""
    """In words."""
    reduce: str = "mean"
    """How the value of a frame follows from its atoms': sum or mean."""
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


CHOSEN = ("hidden", "activation")
"""Options that a config may set."""


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
    return dict(given)


class Head(nn.Module):
    """From features (n_atoms, n_features) to values (n_frames, *shape) or (n_atoms, *shape), float64.

    seed, name: its first weights depend on these alone, whatever other heads there are.
    """

    shift: Tensor
    scale: Tensor

    def __init__(
        self, name: str, options: HeadOptions, *, n_features: int, n_species: int, dtype: torch.dtype, seed: int
    ) -> None:
        super().__init__()
        self.options, self.n_species = options, n_species
        size = math.prod(options.output_shape)
        sizes = [n_features, *options.hidden, size]
        generator = torch.Generator().manual_seed((seed << 32) ^ zlib.crc32(name.encode()))
        self.weights = nn.ParameterList(
            nn.Parameter(unit_normal(n_in, n_out, generator=generator, dtype=dtype) / math.sqrt(n_in))
            for n_in, n_out in itertools.pairwise(sizes)
        )
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(n_out, dtype=dtype)) for n_out in sizes[1:])
        shift = torch.zeros(n_species, size, dtype=torch.float64)
        if options.shift is not None:
            shift = torch.tensor(options.shift, dtype=torch.float64).reshape(n_species, size)
        self.register_buffer("shift", shift)
        self.register_buffer("scale", torch.tensor(options.scale, dtype=torch.float64))

    def forward(self, features: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        values = self._of_atoms(features, batch["species"])
        if self.options.per == "frame":
            n_atoms = batch["n_atoms"]
            values = segment_sum(values, Segments(batch["frame"], n_atoms.shape[0], rows_are_sorted=True))
            if self.options.reduce == "mean":
                values = values / n_atoms.to(values.dtype).unsqueeze(1)
        return values.reshape(-1, *self.options.output_shape)

    def _of_atoms(self, x: Tensor, species: Tensor) -> Tensor:
        """(n_atoms, size) float64."""
        x, last = x.to(self.weights[0].dtype), len(self.weights) - 1
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases)):
            x = (x @ weight if number == last else product(x, weight)) + bias
            x = activate(self.options.activation, x) if number < last else x
        return gather(self.shift, Segments(species, self.n_species)) + self.scale * x.double()


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
    return {name: asdict(HeadOptions(**{**facts[name], **checked.get(name, {})})) for name in sorted(facts)}

"""A network that predicts the local density of states (or the density) at a point from the descriptors of that point.

A multilayer perceptron between two scalings that are part of the model: from raw descriptors to values in physical units.
Scalings are float64; their results are rounded once, to the type of the weights. `network` is the perceptron alone, from scaled
inputs to scaled outputs, which trainings use directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forgefield.config.nearest import did_you_mean
from forgefield.config.trust import NO_CODE, Trust
from forgefield.errors import ForgefieldError
from forgefield.ldos.electronic.energy_grid import EnergyGrid
from forgefield.models.building import PRECISIONS
from forgefield.ops.products import is_lowered, product
from forgefield.runs import Run

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "leakyrelu": F.leaky_relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "elu": F.elu,
}


@dataclass(frozen=True)
class LDOSOptions:
    """Options of an LDOS network."""

    hidden: list[int] = field(default_factory=lambda: [400, 400, 400])
    """Widths of the hidden layers."""
    activation: str | list[str] = "relu"
    """Activation after each hidden layer: relu, leakyrelu, silu, gelu, tanh, sigmoid, softplus or elu; or a list with one for
    each of them."""
    output_activation: str | None = None
    """Activation of the scaled outputs, as MALA has by default; null: outputs are linear."""

    def __post_init__(self) -> None:
        if not self.hidden or any(width < 1 for width in self.hidden):
            raise ForgefieldError(
                f"model.hidden is {self.hidden}; give the width of each hidden layer, such as [400, 400]."
            )
        if not isinstance(self.activation, str) and len(self.activation) != len(self.hidden):
            raise ForgefieldError(
                f"model.activation has {len(self.activation)} entries for {len(self.hidden)} hidden layers; give one for each, "
                "or a single name."
            )
        for number, value in enumerate(self.activations):
            if value is not None and value not in ACTIVATIONS:
                name = "activation" if number < len(self.hidden) else "output_activation"
                raise ForgefieldError(
                    f"model.{name} is '{value}'; choose one of {', '.join(ACTIVATIONS)}.{did_you_mean(value, ACTIVATIONS)}"
                )

    @property
    def activations(self) -> list[str | None]:
        """Activation after each layer, the last of which is the output."""
        hidden = [self.activation] * len(self.hidden) if isinstance(self.activation, str) else self.activation
        return [*hidden, self.output_activation]


@dataclass(frozen=True)
class LinearScale:
    """A value x in column i becomes (x - shift[i]) / scale[i]. kind, constant: how it was determined and which columns were
    constant, for information only."""

    kind: str
    shift: list[float]
    scale: list[float]
    constant: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class PointFacts:
    """Properties of a model that follow from data and settings. target: ldos or density. energies: the grid of an LDOS as
    `EnergyGrid.to_dict`. descriptors: options of the descriptors of a structure, if known."""

    target: str
    inputs: LinearScale
    outputs: LinearScale
    energies: dict[str, Any] | None = None
    descriptors: dict[str, Any] | None = None


NEGATIVE: dict[str, Callable[[Tensor], Tensor]] = {"keep": lambda x: x, "zero": torch.relu, "absolute": torch.abs}


class LDOSNetwork(nn.Module):
    """(..., descriptors) -> (..., levels), 1/(eV A^3); of a density (..., 1), 1/A^3."""

    samples = "points"
    Options = LDOSOptions
    weights_are_out_in = True
    """Shapes of weight matrices are (out, in), as in torch's layers."""

    def __init__(
        self, options: LDOSOptions, facts: PointFacts, *, dtype: torch.dtype, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.options, self.facts = options, facts
        self.target = facts.target
        self.energies = None if facts.energies is None else EnergyGrid.from_dict(facts.energies)
        widths = [len(facts.inputs.shift), *options.hidden, len(facts.outputs.shift)]
        if self.energies is not None and self.energies.levels != widths[-1]:
            raise ForgefieldError(
                f"data.points.energies has {self.energies.levels} levels, but the target files have {widths[-1]} columns."
            )
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for size, width in pairwise(widths):
            bound = 1.0 / math.sqrt(size)
            for parameters, shape in ((self.weights, (width, size)), (self.biases, (width,))):
                values = torch.rand(shape, dtype=torch.float64, generator=generator)
                parameters.append(nn.Parameter(((2 * values - 1) * bound).to(dtype)))
        for name, scaling in (("input", facts.inputs), ("output", facts.outputs)):
            self.register_buffer(f"{name}_shift", torch.tensor(scaling.shift, dtype=torch.float64))
            self.register_buffer(f"{name}_scale", torch.tensor(scaling.scale, dtype=torch.float64))

    input_shift: Tensor
    input_scale: Tensor
    output_shift: Tensor
    output_scale: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.weights[0].dtype

    def forward(self, descriptors: Tensor) -> Tensor:
        """Raw descriptors to physical units, in the type of the weights."""
        return self.physical(self.network(self.scaled_inputs(descriptors)))

    def network(self, x: Tensor) -> Tensor:
        """The layers: scaled inputs (n, descriptors) to scaled outputs (n, levels)."""
        for weight, bias, name in zip(self.weights, self.biases, self.options.activations):
            x = product(x, weight.t()) + bias if is_lowered(x) else F.linear(x, weight, bias)
            x = x if name is None else ACTIVATIONS[name](x)
        return x

    def scaled_inputs(self, descriptors: Tensor) -> Tensor:
        """Inputs of the layers: computed in float64 and rounded once."""
        return ((descriptors.to(torch.float64) - self.input_shift) / self.input_scale).to(self.dtype)

    def scaled_targets(self, values: Tensor) -> Tensor:
        """Targets of the layers: computed in float64 and rounded once."""
        return ((values.to(torch.float64) - self.output_shift) / self.output_scale).to(self.dtype)

    def physical(self, outputs: Tensor) -> Tensor:
        """Scaled outputs in physical units, computed in float64, in the type of the weights."""
        return (outputs.to(torch.float64) * self.output_scale + self.output_shift).to(outputs.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LDOSNetwork:
        """As in PyTorch, but scalings stay float64 when the type is changed."""
        buffers = dict(self.named_buffers())
        nn.Module._apply(self, fn, recurse)
        for name, before in buffers.items():
            moved = self.get_buffer(name)
            if moved.dtype != torch.float64:
                setattr(self, name, before.to(moved.device))
        return self


def resolve(options: Mapping[str, Any], facts: PointFacts) -> dict[str, Any]:
    """The model section with every number explicit; JSON-compatible. options: checked, without the name."""
    return {"name": "ldos", **asdict(LDOSOptions(**options)), "points": asdict(facts)}


def build_network(resolved: Mapping[str, Any], *, precision: str, seed: int, trust: Trust = NO_CODE) -> LDOSNetwork:
    """The network of resolved options; its initial weights depend on `seed` alone.

    precision: type of the weights, `float32` or `float64`. trust: not used, since these options cannot name code.
    """
    options = {key: value for key, value in resolved.items() if key not in ("name", "points")}
    stored = resolved["points"]
    scales = {side: LinearScale(**stored[side]) for side in ("inputs", "outputs")}
    facts = PointFacts(**{**stored, **scales})
    generator = torch.Generator().manual_seed(seed)
    return LDOSNetwork(LDOSOptions(**options), facts, dtype=PRECISIONS[precision], generator=generator)


def negative_values(info: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """Treatment of negative predictions by a run: none, or as set for an imported model of MALA. info: record of the run."""
    return NEGATIVE[info.get("negative", "keep")]


def load_network(run: Run, which: str = "best", device: str | torch.device = "cpu") -> LDOSNetwork:
    """The trained network of a run, in evaluation mode: raw descriptors in, physical units out."""
    model = run.load_model(which, device)
    if not isinstance(model, LDOSNetwork):
        raise ForgefieldError(f"Run {run.name} was trained on frames: its model does not predict an LDOS.")
    return model

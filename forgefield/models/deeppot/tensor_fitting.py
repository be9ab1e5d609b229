"""Fitting networks beside the energy: dipoles, polarisabilities, densities of states, and properties of any kind.

Each is a module from the descriptor of an atom, its rotation (T without its first column) and the batch to named numbers of
that atom, and says how those of a frame follow from them. The mathematics is DeePMD-kit's, the numbers are float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.fitting import Fitting
from forgefield.ops.graph import Segments, segment_sum

REDUCTIONS = ("sum", "mean")


@dataclass(frozen=True)
class Output:
    """A quantity that a fitting predicts. shape: of one atom's value. reduction: how a frame's value follows from its atoms',
    by `sum` (extensive) or `mean` (intensive)."""

    name: str
    shape: tuple[int, ...]
    reduction: str = "sum"

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"there is no reduction '{self.reduction}'")

    def of_frames(self, values: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """(n_atoms, *shape) -> (n_frames, *shape)."""
        n_atoms = batch["n_atoms"]
        total = segment_sum(values, Segments(batch["frame"], n_atoms.shape[0], rows_are_sorted=True))
        if self.reduction == "sum":
            return total
        return total / n_atoms.to(total.dtype).view(-1, *[1] * len(self.shape))


@dataclass
class FittingOptions:
    """What all fitting networks have."""

    type: str = ""
    neuron: list[int] = field(default_factory=lambda: [120, 120, 120])
    """Widths of its hidden layers."""
    resnet_dt: bool = True
    """Residual layers with trained step sizes."""
    activation_function: str = "tanh"
    """As in the descriptor."""
    numb_fparam: int = 0
    """Numbers per frame that the network reads beside the descriptor: the field `fparam` of the data."""
    numb_aparam: int = 0
    """Numbers per atom that it reads: the field `aparam`."""
    default_fparam: list[float] | None = None
    """Taken for frames that carry no `fparam`."""
    trainable: bool | list[bool] = True
    """Train the network; or one flag for each hidden layer and one for the last."""
    seed: int | None = None
    """Of its first weights; default: the seed of the run."""
    precision: str = "default"
    """float32 or float64; default: that of the training."""
    fparam_avg: list[float] | None = None
    """Means of `fparam`, from the training data."""
    fparam_std: list[float] | None = None
    """Deviations of `fparam`, from the training data."""
    aparam_avg: list[float] | None = None
    """Means of `aparam`, from the training data."""
    aparam_std: list[float] | None = None
    """Deviations of `aparam`, from the training data."""
    atom_ener: ClassVar[tuple[float, ...]] = ()


@dataclass
class DipoleOptions(FittingOptions):
    """Fitting network of atomic dipoles."""

    type: str = "dipole"


@dataclass
class PolarOptions(FittingOptions):
    """Fitting network of atomic polarisabilities."""

    type: str = "polar"
    fit_diag: bool = True
    """The network gives the diagonal of a matrix in the space of the rotation's rows, not all of it."""
    scale: float | list[float] = 1.0
    """What polarisabilities are multiplied with; one number, or one for each species."""
    shift_diag: bool = True
    """Add `out_bias` to the diagonal."""
    out_bias: list[float] | None = None
    """A third of the trace of each species' polarisability, before `scale`. Default: zero."""


@dataclass
class DosOptions(FittingOptions):
    """Fitting network of atomic densities of states."""

    type: str = "dos"
    numb_dos: int = 300
    """Points of the energy grid."""
    rcond: float | None = None
    """Singular values below this share of the largest are left out of the fit of `out_bias`."""
    out_bias: list[list[float]] | None = None
    """Density of each species that is added to the network's. Default: zero."""


@dataclass
class PropertyOptions(FittingOptions):
    """Fitting network of a property that does not turn with the frame."""

    type: str = "property"
    property_name: str = "property"
    """Its name among outputs and labels."""
    task_dim: int = 1
    """How many numbers it has."""
    intensive: bool = False
    """The property of a frame is the mean over its atoms, not the sum."""
    distinguish_types: bool = True
    """`out_bias` and `out_std` differ between species."""
    out_bias: list[list[float]] | None = None
    """Added to the network's numbers, for each species. Default: zero."""
    out_std: list[list[float]] | None = None
    """What the network's numbers are multiplied with, for each species. Default: one."""


class TensorFitting(nn.Module, ABC):
    """Base of these fittings. dim_rotation: rows of the rotation."""

    Options: ClassVar[type]
    out_bias: Tensor

    def __init__(
        self,
        options: Any,
        *,
        species: Sequence[str],
        dim_descriptor: int,
        dim_rotation: int,
        mixed_types: bool,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.options, self.species, self.dim_rotation = options, tuple(species), dim_rotation
        self.network = Fitting(
            options,
            species=species,
            dim_descriptor=dim_descriptor,
            mixed_types=mixed_types,
            dim_out=self._dim_out(),
            dtype=dtype,
            generator=generator,
        )

    @classmethod
    def complete(cls, options: Any, *, species: tuple[str, ...], statistics: Mapping[str, Any]) -> Any:
        """Options checked, with every number given."""
        return Fitting.complete(options, species=species, statistics=statistics)

    @property
    @abstractmethod
    def outputs(self) -> tuple[Output, ...]:
        """What it gives."""

    @abstractmethod
    def forward(self, descriptor: Tensor, rotation: Tensor | None, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Values of every atom by name, (n_atoms, *shape) float64. descriptor: (n_atoms, dim_descriptor); rotation:
        (n_atoms, dim_rotation, 3); batch: with `species`, and `frame`, `fparam`, `aparam` where the network reads them."""

    @abstractmethod
    def _dim_out(self) -> int:
        """Numbers of the network."""

    def _table(self, name: str, values: Any, shape: tuple[int, ...], default: float) -> None:
        """State `name`, (n_species, *shape) float64, that options give or that is `default` everywhere."""
        full = torch.full((len(self.species), *shape), default, dtype=torch.float64)
        self.register_buffer(name, full if values is None else torch.tensor(values, dtype=torch.float64))

    def _rotation(self, rotation: Tensor | None) -> Tensor:
        if rotation is None:
            raise ForgefieldError(
                f"model.fitting_net.type is {self.options.type}, which needs directions, but the descriptor has none; "
                "take se_e2_a or se_atten."
            )
        return rotation.double()


class DipoleFitting(TensorFitting):
    """`dipole`: a combination of the rotation's rows."""

    Options = DipoleOptions

    @property
    def outputs(self) -> tuple[Output, ...]:
        return (Output("dipole", (3,)),)

    def _dim_out(self) -> int:
        return self.dim_rotation

    def forward(self, descriptor: Tensor, rotation: Tensor | None, batch: dict[str, Any]) -> dict[str, Tensor]:
        weights = self.network(descriptor, batch).double()
        return {"dipole": torch.bmm(weights.unsqueeze(1), self._rotation(rotation)).squeeze(1)}


class PolarFitting(TensorFitting):
    """`polar`: a symmetric matrix between the rotation's rows, and a multiple of the unit matrix."""

    Options = PolarOptions
    scale: Tensor

    def __init__(self, options: PolarOptions, **made_of: Any) -> None:
        super().__init__(options, **made_of)
        scale = options.scale if isinstance(options.scale, list) else [options.scale] * len(self.species)
        self._table("scale", scale, (), 1.0)
        self._table("out_bias", options.out_bias, (), 0.0)

    @classmethod
    def complete(cls, options: PolarOptions, *, species: tuple[str, ...], statistics: Mapping[str, Any]) -> Any:
        for key in ("scale", "out_bias"):
            values = getattr(options, key)
            if isinstance(values, list):
                _check_rows(f"model.fitting_net.{key}", [[value] for value in values], 1, species)
        return super().complete(options, species=species, statistics=statistics)

    @property
    def outputs(self) -> tuple[Output, ...]:
        return (Output("polarizability", (3, 3)),)

    def _dim_out(self) -> int:
        return self.dim_rotation if self.options.fit_diag else self.dim_rotation**2

    def forward(self, descriptor: Tensor, rotation: Tensor | None, batch: dict[str, Any]) -> dict[str, Tensor]:
        rotation, species = self._rotation(rotation), batch["species"]
        matrix = self.network(descriptor, batch).double()
        if self.options.fit_diag:
            turned = matrix.unsqueeze(2) * rotation
        else:
            matrix = matrix.unflatten(1, (self.dim_rotation, self.dim_rotation))
            turned = torch.bmm(0.5 * (matrix + matrix.transpose(1, 2)), rotation)
        values = torch.bmm(rotation.transpose(1, 2), turned)
        if self.options.shift_diag:
            unit = torch.eye(3, dtype=values.dtype, device=values.device)
            values = values + self.out_bias.index_select(0, species).view(-1, 1, 1) * unit
        return {"polarizability": values * self.scale.index_select(0, species).view(-1, 1, 1)}


class DosFitting(TensorFitting):
    """`dos`: the density of states on a grid of energies."""

    Options = DosOptions

    def __init__(self, options: DosOptions, **made_of: Any) -> None:
        super().__init__(options, **made_of)
        self._table("out_bias", options.out_bias, (options.numb_dos,), 0.0)

    @classmethod
    def complete(cls, options: DosOptions, *, species: tuple[str, ...], statistics: Mapping[str, Any]) -> Any:
        _check_size("numb_dos", options.numb_dos)
        _check_rows("model.fitting_net.out_bias", options.out_bias, options.numb_dos, species)
        return super().complete(options, species=species, statistics=statistics)

    @property
    def outputs(self) -> tuple[Output, ...]:
        return (Output("dos", (self.options.numb_dos,)),)

    def _dim_out(self) -> int:
        return self.options.numb_dos

    def forward(self, descriptor: Tensor, rotation: Tensor | None, batch: dict[str, Any]) -> dict[str, Tensor]:
        values = self.network(descriptor, batch).double()
        return {"dos": values + self.out_bias.index_select(0, batch["species"])}


class PropertyFitting(TensorFitting):
    """`property`: `task_dim` numbers under a name of the user's."""

    Options = PropertyOptions
    out_std: Tensor

    def __init__(self, options: PropertyOptions, **made_of: Any) -> None:
        super().__init__(options, **made_of)
        self._table("out_bias", options.out_bias, (options.task_dim,), 0.0)
        self._table("out_std", options.out_std, (options.task_dim,), 1.0)

    @classmethod
    def complete(cls, options: PropertyOptions, *, species: tuple[str, ...], statistics: Mapping[str, Any]) -> Any:
        _check_size("task_dim", options.task_dim)
        filled: dict[str, Any] = {}
        for key in ("out_bias", "out_std"):
            rows = getattr(options, key)
            _check_rows(f"model.fitting_net.{key}", rows, options.task_dim, species)
            if rows is not None and not options.distinguish_types:
                filled[key] = [list(rows[0]) for _ in species]
        return super().complete(replace(options, **filled), species=species, statistics=statistics)

    @property
    def outputs(self) -> tuple[Output, ...]:
        reduction = "mean" if self.options.intensive else "sum"
        return (Output(self.options.property_name, (self.options.task_dim,), reduction),)

    def _dim_out(self) -> int:
        return self.options.task_dim

    def forward(self, descriptor: Tensor, rotation: Tensor | None, batch: dict[str, Any]) -> dict[str, Tensor]:
        values, species = self.network(descriptor, batch).double(), batch["species"]
        bias, deviation = self.out_bias.index_select(0, species), self.out_std.index_select(0, species)
        return {self.options.property_name: torch.addcmul(bias, values, deviation)}


def _check_size(key: str, size: int) -> None:
    if size < 1:
        raise ForgefieldError(f"model.fitting_net.{key} is {size}; it must be at least 1.")


def _check_rows(where: str, rows: Sequence[Sequence[float]] | None, size: int, species: Sequence[str]) -> None:
    if rows is not None and (len(rows) != len(species) or any(len(row) != size for row in rows)):
        numbers = "a number" if size == 1 else f"{size} numbers"
        raise ForgefieldError(f"{where} needs {numbers} for each of {len(species)} species ({', '.join(species)}).")

"""Fitting networks for outputs other than energies: dipoles, polarisabilities, densities of states, and other properties.

Each maps the descriptor of an atom, its rotation (T without its first column) and the batch to named values of that atom;
`describe` describes the outputs of a model with it for frames and atoms. The mathematics is DeePMD-kit's, in float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.fitting import Fitting, OptionsT
from forgefield.models.deeppot.options import (
    DipoleOptions,
    DosOptions,
    FittingOptions,
    PolarOptions,
    PropertyOptions,
)
from forgefield.models.edges import Batch
from forgefield.models.interface import DirectOutput
from forgefield.models.options import check_values
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

    def of_frames(self, values: Tensor, batch: Batch) -> Tensor:
        """(n_atoms, *shape) -> (n_frames, *shape)."""
        n_atoms = batch["n_atoms"]
        total = segment_sum(values, Segments(batch["frame"], n_atoms.shape[0], rows_are_sorted=True))
        if self.reduction == "sum":
            return total
        return total / n_atoms.to(total.dtype).view(-1, *[1] * len(self.shape))


class TensorFitting(nn.Module, ABC, Generic[OptionsT]):
    """Base of these fittings. dim_rotation: rows of the rotation."""

    options: OptionsT
    Options: ClassVar[type[FittingOptions]]
    kind: ClassVar[str] = "values"
    """How values transform under rotations."""
    atom_prefix: ClassVar[str] = "atom_"
    """What the name of an atom's value begins with, as in DeePMD-kit's files."""
    has_bias: ClassVar[bool] = True
    """Whether there is the state `out_bias` (n_species, ...), which is added to the outputs."""
    out_bias: Tensor

    def __init__(
        self,
        options: OptionsT,
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
        self._add_buffers(options)

    def _add_buffers(self, options: OptionsT) -> None:
        """Register buffers that outputs are shifted and scaled with."""

    @classmethod
    def complete(cls, options: OptionsT, *, species: tuple[str, ...], statistics: Mapping[str, Any]) -> OptionsT:
        """Options checked, with every number explicit."""
        return Fitting.complete(options, species=species, statistics=statistics)

    @classmethod
    @abstractmethod
    def output(cls, options: OptionsT) -> Output:
        """The output for an atom."""

    @classmethod
    def describe(cls, options: OptionsT) -> dict[str, DirectOutput]:
        """Outputs of a model for frames and atoms, by name. options: resolved."""
        output = cls.output(options)
        shape, scale = list(output.shape), cls.scale_of(options)
        return {
            output.name: DirectOutput(
                "frame", shape, output.reduction, cls.kind, scale, per_atom_errors=output.reduction == "sum"
            ),
            f"{cls.atom_prefix}{output.name}": DirectOutput("atom", shape, output.reduction, cls.kind, scale),
        }

    @classmethod
    def scale_of(cls, options: OptionsT) -> float | list[float]:
        """Unit of losses: one number, or one for each component."""
        return 1.0

    @property
    def outputs(self) -> tuple[Output, ...]:
        return (self.output(self.options),)

    @abstractmethod
    def forward(self, descriptor: Tensor, rotation: Tensor | None, batch: Batch) -> dict[str, Tensor]:
        """Values of every atom by name, (n_atoms, *shape) float64. descriptor: (n_atoms, dim_descriptor); rotation:
        (n_atoms, dim_rotation, 3); batch: with `species`, and `frame`, `fparam`, `aparam` where the network reads them."""

    @abstractmethod
    def _dim_out(self) -> int:
        """Number of outputs of the network."""

    def _register(self, name: str, values: Sequence[object] | None, shape: tuple[int, ...], default: float) -> None:
        """Register the buffer `name`, (n_species, *shape) float64, with these values; None: `default` everywhere."""
        full = torch.full((len(self.species), *shape), default, dtype=torch.float64)
        self.register_buffer(name, full if values is None else torch.tensor(values, dtype=torch.float64))

    def _rotation(self, rotation: Tensor | None) -> Tensor:
        if rotation is None:
            raise ForgefieldError(
                f"model.fitting_net.type is {self.options.type}, which needs directions, but the descriptor has none; "
                "use se_e2_a or se_atten."
            )
        return rotation.double()


class DipoleFitting(TensorFitting[DipoleOptions]):
    """`dipole`: a combination of the rotation's rows."""

    has_bias = False
    kind = "vector"
    Options = DipoleOptions
    atom_prefix = "atomic_"

    @classmethod
    def complete(
        cls, options: DipoleOptions, *, species: tuple[str, ...], statistics: Mapping[str, Any]
    ) -> DipoleOptions:
        options = replace(options, sel_type=_selected(options.sel_type, species))
        return super().complete(options, species=species, statistics=statistics)

    @classmethod
    def output(cls, options: DipoleOptions) -> Output:
        return Output("dipole", (3,))

    def _dim_out(self) -> int:
        return self.dim_rotation

    def forward(self, descriptor: Tensor, rotation: Tensor | None, batch: Batch) -> dict[str, Tensor]:
        weights = self.network(descriptor, batch).double()
        return {"dipole": torch.bmm(weights.unsqueeze(1), self._rotation(rotation)).squeeze(1)}


class PolarFitting(TensorFitting[PolarOptions]):
    """`polar`: a symmetric matrix between the rotation's rows, and a multiple of the unit matrix."""

    kind = "symmetric"
    Options = PolarOptions
    atom_prefix = "atomic_"
    scale: Tensor

    def _add_buffers(self, options: PolarOptions) -> None:
        scale = options.scale if isinstance(options.scale, list) else [options.scale] * len(self.species)
        self._register("scale", scale, (), 1.0)
        self._register("out_bias", options.out_bias, (), 0.0)

    @classmethod
    def complete(
        cls, options: PolarOptions, *, species: tuple[str, ...], statistics: Mapping[str, Any]
    ) -> PolarOptions:
        for key, values in (("scale", options.scale), ("out_bias", options.out_bias)):
            if isinstance(values, list):
                _check_rows(f"model.fitting_net.{key}", [[value] for value in values], 1, species)
        filled: dict[str, Any] = {"sel_type": _selected(options.sel_type, species)}
        if options.out_bias is None and options.shift_diag:
            filled["out_bias"] = _measured("out_bias", statistics)
        options = replace(options, **filled)
        return super().complete(options, species=species, statistics=statistics)

    @classmethod
    def output(cls, options: PolarOptions) -> Output:
        return Output("polarizability", (3, 3))

    def _dim_out(self) -> int:
        return self.dim_rotation if self.options.fit_diag else self.dim_rotation**2

    def forward(self, descriptor: Tensor, rotation: Tensor | None, batch: Batch) -> dict[str, Tensor]:
        rotation, species = self._rotation(rotation), batch["species"]
        matrix = self.network(descriptor, batch).double()
        if self.options.fit_diag:
            rotated = matrix.unsqueeze(2) * rotation
        else:
            matrix = matrix.unflatten(1, (self.dim_rotation, self.dim_rotation))
            rotated = torch.bmm(0.5 * (matrix + matrix.transpose(1, 2)), rotation)
        values = torch.bmm(rotation.transpose(1, 2), rotated)
        if self.options.shift_diag:
            unit = torch.eye(3, dtype=values.dtype, device=values.device)
            values = values + self.out_bias.index_select(0, species).view(-1, 1, 1) * unit
        return {"polarizability": values * self.scale.index_select(0, species).view(-1, 1, 1)}


class DosFitting(TensorFitting[DosOptions]):
    """`dos`: the density of states on a grid of energies."""

    Options = DosOptions

    def _add_buffers(self, options: DosOptions) -> None:
        self._register("out_bias", options.out_bias, (options.numb_dos,), 0.0)

    @classmethod
    def complete(cls, options: DosOptions, *, species: tuple[str, ...], statistics: Mapping[str, Any]) -> DosOptions:
        check_values(options, "model.fitting_net")
        _check_rows("model.fitting_net.out_bias", options.out_bias, options.numb_dos, species)
        if options.out_bias is None:
            options = replace(options, out_bias=_measured("out_bias", statistics))
        return super().complete(options, species=species, statistics=statistics)

    @classmethod
    def output(cls, options: DosOptions) -> Output:
        return Output("dos", (options.numb_dos,))

    @classmethod
    def describe(cls, options: DosOptions) -> dict[str, DirectOutput]:
        """The density of states, and its running sum (the number of states) where that is trained."""
        outputs = super().describe(options)
        for name, per in (("cdf", "frame"), ("atom_cdf", "atom")):
            by_atom = per == "frame"
            outputs[name] = DirectOutput(
                per, [options.numb_dos], "sum", cumulative=True, always=False, per_atom_errors=by_atom
            )
        return outputs

    def _dim_out(self) -> int:
        return self.options.numb_dos

    def forward(self, descriptor: Tensor, rotation: Tensor | None, batch: Batch) -> dict[str, Tensor]:
        values = self.network(descriptor, batch).double()
        return {"dos": values + self.out_bias.index_select(0, batch["species"])}


class PropertyFitting(TensorFitting[PropertyOptions]):
    """`property`: `task_dim` numbers with a name chosen by the user."""

    Options = PropertyOptions
    out_std: Tensor

    def _add_buffers(self, options: PropertyOptions) -> None:
        self._register("out_bias", options.out_bias, (options.task_dim,), 0.0)
        self._register("out_std", options.out_std, (options.task_dim,), 1.0)

    @classmethod
    def complete(
        cls, options: PropertyOptions, *, species: tuple[str, ...], statistics: Mapping[str, Any]
    ) -> PropertyOptions:
        check_values(options, "model.fitting_net")
        filled: dict[str, Any] = {}
        for key, rows in (("out_bias", options.out_bias), ("out_std", options.out_std)):
            _check_rows(f"model.fitting_net.{key}", rows, options.task_dim, species)
            if rows is None:
                filled[key] = rows = _measured(key, statistics)
            if rows is not None and not options.distinguish_types:
                filled[key] = [list(rows[0]) for _ in species]
        return super().complete(replace(options, **filled), species=species, statistics=statistics)

    @classmethod
    def output(cls, options: PropertyOptions) -> Output:
        return Output(options.property_name, (options.task_dim,), "mean" if options.intensive else "sum")

    @classmethod
    def scale_of(cls, options: PropertyOptions) -> float | list[float]:
        return 1.0 if options.out_std is None else list(options.out_std[0])

    def _dim_out(self) -> int:
        return self.options.task_dim

    def forward(self, descriptor: Tensor, rotation: Tensor | None, batch: Batch) -> dict[str, Tensor]:
        values, species = self.network(descriptor, batch).double(), batch["species"]
        bias, deviation = self.out_bias.index_select(0, species), self.out_std.index_select(0, species)
        return {self.options.property_name: torch.addcmul(bias, values, deviation)}


def _check_rows(where: str, rows: Sequence[Sequence[float]] | None, size: int, species: Sequence[str]) -> None:
    if rows is not None and (len(rows) != len(species) or any(len(row) != size for row in rows)):
        numbers = "a number" if size == 1 else f"{size} numbers"
        raise ForgefieldError(f"{where} needs {numbers} for each of {len(species)} species ({', '.join(species)}).")


def _measured(key: str, statistics: Mapping[str, Any]) -> Any:
    """A statistic of the training data, None where there is none."""
    return (statistics.get("environment") or {}).get(key)


def _selected(sel_type: int | list[int] | None, species: Sequence[str]) -> list[int] | None:
    if sel_type is None:
        return None
    chosen = [sel_type] if isinstance(sel_type, int) else list(sel_type)
    if not chosen or any(not 0 <= number < len(species) for number in chosen):
        raise ForgefieldError(
            f"model.fitting_net.sel_type is {sel_type}; it contains indices of species, from 0 to {len(species) - 1}."
        )
    return sorted(set(chosen))

"""Options of the fitting networks beside the energy, with DeePMD-kit's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass

from forgefield.models.deeppot.options import FittingOptions


@dataclass
class DipoleOptions(FittingOptions):
    """Fitting network of atomic dipoles."""

    type: str = "dipole"
    sel_type: int | list[int] | None = None
    """Species, by number, whose atoms have a dipole. Default: all."""


@dataclass
class PolarOptions(FittingOptions):
    """Fitting network of atomic polarisabilities."""

    type: str = "polar"
    sel_type: int | list[int] | None = None
    """Species, by number, whose atoms have a polarisability. Default: all."""
    fit_diag: bool = True
    """The network gives the diagonal of a matrix in the space of the rotation's rows, not all of it."""
    scale: float | list[float] = 1.0
    """What polarisabilities are multiplied with; one number, or one for each species."""
    shift_diag: bool = True
    """Add `out_bias` to the diagonal."""
    out_bias: list[float] | None = None
    """A third of the trace of each species' polarisability, before `scale`. From the training data."""


@dataclass
class DosOptions(FittingOptions):
    """Fitting network of atomic densities of states."""

    type: str = "dos"
    numb_dos: int = 300
    """Points of the energy grid."""
    rcond: float | None = None
    """Singular values below this share of the largest are left out of the fit of `out_bias`."""
    out_bias: list[list[float]] | None = None
    """Density of each species that is added to the network's. From the training data."""


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
    """Added to the network's numbers, for each species. From the training data."""
    out_std: list[list[float]] | None = None
    """What the network's numbers are multiplied with, for each species. From the training data; losses are measured in
    those of the first."""

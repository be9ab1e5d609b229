"""Models of atoms: their interface, and what turns atomic energies into energies, forces and stress."""

from forgefield.models.edges import EdgeContext
from forgefield.models.interface import AtomisticModel
from forgefield.models.potential import Potential
from forgefield.models.registry import build_model, model_class, resolve_model

__all__ = ["AtomisticModel", "EdgeContext", "Potential", "build_model", "model_class", "resolve_model"]

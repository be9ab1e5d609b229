"""Potentials: energy models and what turns their atomic energies into energies, forces and stress."""

from forgefield.models.potential import EnergyModel, Potential
from forgefield.models.registry import build_model, model_class, resolve_model

__all__ = ["EnergyModel", "Potential", "build_model", "model_class", "resolve_model"]

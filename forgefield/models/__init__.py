"""Models of atoms: their interface, and what turns atomic energies into energies, forces and stress.

The names below are imported when they are first used: the registry alone needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forgefield.models.building import build_model
    from forgefield.models.edges import EdgeContext
    from forgefield.models.interface import AtomisticModel, RegisteredModel
    from forgefield.models.potential import Potential
    from forgefield.models.resolving import model_class, resolve_model

__all__ = [
    "AtomisticModel",
    "EdgeContext",
    "Potential",
    "RegisteredModel",
    "build_model",
    "model_class",
    "resolve_model",
]

_MODULES = {
    "AtomisticModel": "interface",
    "EdgeContext": "edges",
    "Potential": "potential",
    "RegisteredModel": "interface",
    "build_model": "building",
    "model_class": "resolving",
    "resolve_model": "resolving",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"forgefield.models.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'forgefield.models' has no attribute '{name}'")

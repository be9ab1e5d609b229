"""The `loss` section: prefactors that follow the learning rate become weights with a schedule, norms become `per_atom`.

DeePMD-kit's terms of an energy loss, N atoms in a frame, means over frames and components:

| | energy, virial | forces |
|---|---|---|
| mse | (dE)^2 / N, or / N^2 where `intensive_ener_virial` | (dF)^2 |
| mae | abs(dE) / N | abs(dF) |
| Huber | of dE / N | of dF |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forgefield.config.deepmd.outputs import OutputTask, dos_task, property_task, tensor_task
from forgefield.config.deepmd.section import Section, is_number

TERMS = {"energy": ("e", 0.02, 1.0), "forces": ("f", 1000.0, 1.0), "virial": ("v", 0.0, 0.0)}
"""Target -> how its prefactors are called, and their defaults at the start and in the limit."""
OTHER_TERMS = {
    "ae": "energies of single atoms are not trained here",
    "pf": "forces are weighted by frame (config_weight) or species (task.forces.species_weights), not atom by atom",
    "gf": "generalised forces are not trained here",
    "h": "second derivatives are not trained here",
}
SPIN_TERMS = {
    "energy": ("e", 0.02, 1.0),
    "forces": ("fr", 1000.0, 1.0),
    "force_mag": ("fm", 10000.0, 10.0),
    "virial": ("v", 0.0, 0.0),
}
"""The same for `ener_spin`."""
OTHER_LOSSES = ("dens", "denoise", "population")
LOSS_OF_FITTING = {"ener": "ener", "property": "property", "dos": "dos", "dipole": "tensor", "polar": "tensor"}


def translate_loss(
    section: Section,
    fitting: dict[str, Any],
    species: list[str],
    batch: dict[str, Any],
    excluded: Sequence[int] = (),
    *,
    has_spins: bool = False,
) -> OutputTask:
    """Forgefield's `task` section and what belongs to it. fitting: what the network is fitted to. batch: its `data.batch`.
    excluded: numbers of the species that have no value (`atom_exclude_types`). has_spins: whether the model has `spin`."""
    kind = section.take("type", LOSS_OF_FITTING[fitting["type"]])
    kind = "ener" if kind == "ener_hess" else kind
    if kind in OTHER_LOSSES:
        raise section.refused("type", f"is '{kind}', which is not supported")
    if kind == "ener_spin":
        if not has_spins:
            raise section.refused("type", "is 'ener_spin', but the model has no section 'spin'")
        return _energy_of_spins(section)
    if kind not in LOSS_OF_FITTING.values():
        raise section.wrong("type", kind, f"one of {', '.join(dict.fromkeys(LOSS_OF_FITTING.values()))}")
    if kind != LOSS_OF_FITTING[fitting["type"]]:
        raise section.wrong(
            "type", kind, f"{LOSS_OF_FITTING[fitting['type']]}, because 'model.fitting_net.type' is {fitting['type']}"
        )
    if kind == "tensor":
        return tensor_task(section, fitting, species, excluded)
    if kind == "dos":
        return dos_task(section, fitting, species, excluded)
    return property_task(section, fitting, batch) if kind == "property" else OutputTask(_energy(section))


def _energy(section: Section) -> dict[str, Any]:
    shape = _shape(section)
    for name, why in OTHER_TERMS.items():
        for end in ("start", "limit"):
            section.only(f"{end}_pref_{name}", 0.0, why)
    section.only("use_default_pf", False, OTHER_TERMS["pf"])
    section.only("relative_f", None, "errors of forces are not divided by their size here")
    section.only("enable_atom_ener_coeff", False, "energies are plain sums over atoms here")
    section.only("numb_generalized_coord", 0, OTHER_TERMS["gf"])
    task: dict[str, Any] = {}
    for target, (letter, start, limit) in TERMS.items():
        first = section.number(f"start_pref_{letter}", start, at_least=0)
        last = section.number(f"limit_pref_{letter}", limit, at_least=0)
        if first or last:
            task[target] = _weight(float(first), float(last)) | shape[target]
    section.finish()
    if not task:
        raise section.refused("start_pref_e", "and all other prefactors are 0, so nothing would be trained")
    return task


def _energy_of_spins(section: Section) -> OutputTask:
    """Energies, forces, magnetic forces (averaged over atoms with a spin) and virials of a model of spins."""
    shape = _shape(section)
    for end in ("start", "limit"):
        section.only(f"{end}_pref_ae", 0.0, OTHER_TERMS["ae"])
    section.only("enable_atom_ener_coeff", False, "energies are plain sums over atoms here")
    task: dict[str, Any] = {}
    error = "mae" if shape["forces"]["loss"] == "mae" else "rmse"
    columns = {"rmse": "loss"}
    for target, (letter, start, limit) in SPIN_TERMS.items():
        first = section.number(f"start_pref_{letter}", start, at_least=0)
        last = section.number(f"limit_pref_{letter}", limit, at_least=0)
        if first or last:
            task[target] = _weight(float(first), float(last)) | shape.get(target, shape["forces"])
            columns[f"{error}_{letter}"] = f"{target}_{error}"
    section.finish()
    if not task:
        raise section.refused("start_pref_e", "and all other prefactors are 0, so nothing would be trained")
    return OutputTask(task, columns=columns)


def _weight(first: float, last: float) -> dict[str, Any]:
    """A weight that goes from the one to the other as the learning rate goes to zero."""
    return {"weight": first} if first == last else {"weight": first, "schedule": {"kind": "lr", "to": last}}


def _shape(section: Section) -> dict[str, dict[str, Any]]:
    """How errors are measured, by target."""
    kind = section.choice("loss_func", "mse", ("mse", "mae"))
    huber = section.flag("use_huber")
    by_atom = section.flag("intensive_ener_virial")
    section.only("f_use_norm", False, "errors of forces are counted by component here")
    deltas = _deltas(section)
    if huber and kind == "mae":
        raise section.refused("use_huber", "and loss_func mae contradict each other; keep one")
    if huber:
        return {
            target: {"loss": "huber", "huber_delta": delta} | ({} if target == "forces" else {"per_atom": True})
            for target, delta in zip(TERMS, deltas)
        }
    per_atom = True if kind == "mae" or by_atom else "root"
    extensive = {"loss": kind, "per_atom": per_atom}
    return {"energy": extensive, "forces": {"loss": kind}, "virial": extensive}


def _deltas(section: Section) -> list[float]:
    """Of energy, forces and virial."""
    delta = section.take("huber_delta", 0.01)
    deltas = delta if isinstance(delta, list) else [delta] * 3
    if len(deltas) != 3 or not all(is_number(value) and value > 0 for value in deltas):
        raise section.wrong("huber_delta", delta, "a positive number, or three of them for energy, force and virial")
    return [float(value) for value in deltas]

"""Losses of fitting networks for quantities other than the energy: `tensor`, `dos` and `property` of the `loss` section.

DeePMD-kit's terms, N atoms in a frame; means are over frames (atoms) and components, s is the deviation of the labels:

| | of frames | of atoms |
|---|---|---|
| tensor, dos | (dy)^2 | (dy)^2 |
| property | added up over frames and components: dy / s, extensive ones per atom: its square, size, or Huber's / beta | |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forgefield.config.deepmd.section import MISSING, Section

TENSORS = {"dipole": ("dipole", [3], "dipole"), "polar": ("polarizability", [3, 3], "polar")}
"""Fitting -> name of labels, shape of a value, name of columns."""
DENSITIES = {"dos": ("dos", 0.0), "cdf": ("cdf", 0.0), "ados": ("atom_dos", 1.0), "acdf": ("atom_cdf", 0.0)}
"""Prefactors of a density of states -> target, and their default."""
NUMB_DOS = 300
METRICS = ("mae", "mse", "rmse")
LOSSES = ("smooth_mae", "mae", "mse", "rmse")


@dataclass(frozen=True)
class OutputTask:
    """Our `task`, the labels that it needs (`data.labels.fields`) and, by name, the columns of the learning curve."""

    task: dict[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)


def tensor_task(
    section: Section, fitting: dict[str, Any], species: list[str], excluded: Sequence[int] = ()
) -> OutputTask:
    """Dipoles and polarisabilities, of frames and of atoms. excluded: `atom_exclude_types`."""
    label, shape, column = TENSORS[fitting["type"]]
    weights = [float(section.number(name, MISSING, at_least=0)) for name in ("pref", "pref_atomic")]
    section.only("enable_atomic_weight", False, "atoms are not weighted one by one")
    section.finish()
    if not any(weights):
        raise section.refused("pref", "and 'loss.pref_atomic' are both 0, so nothing would be trained")
    output = OutputTask({})
    if weights[0]:
        output.task[label] = {"weight": weights[0], "loss": "mse", "reduce": "sum", "per_atom": False}
        output.fields[label] = {"shape": shape}
        output.columns[f"rmse_global_{column}"] = f"{label}_per_atom_rmse"
    if weights[1]:
        name = f"atomic_{label}"
        output.task[name] = {"weight": weights[1], "loss": "mse"}
        output.fields[name] = {"per": "atom", "shape": shape, **_of_selected(fitting, species, excluded)}
        output.columns[f"rmse_local_{column}"] = f"{name}_rmse"
    return output


def _of_selected(fitting: dict[str, Any], species: list[str], excluded: Sequence[int]) -> dict[str, Any]:
    """Labels of atoms count for selected species alone, and not for excluded ones: means are over the remaining atoms."""
    chosen = fitting.get("sel_type")
    chosen = [chosen] if isinstance(chosen, int) else chosen
    if any(not 0 <= number < len(species) for number in (*(chosen or ()), *excluded)):
        return {}  # refused where the model is completed
    remaining = [number for number in chosen or range(len(species)) if number not in excluded]
    return {"species": [species[number] for number in remaining]} if chosen or excluded else {}


def dos_task(section: Section, fitting: dict[str, Any], species: list[str], excluded: Sequence[int] = ()) -> OutputTask:
    """Densities of states and their running sums. excluded: `atom_exclude_types`."""
    shape, output = [fitting.get("numb_dos", NUMB_DOS)], OutputTask({})
    for short, (name, default) in DENSITIES.items():
        first = float(section.number(f"start_pref_{short}", default, at_least=0))
        last = float(section.number(f"limit_pref_{short}", default, at_least=0))
        if not (first or last):
            continue
        of_atoms, kind = short.startswith("a"), "cdf" if short.endswith("cdf") else "dos"
        schedule = {} if first == last else {"schedule": {"kind": "lr", "to": last}}
        output.task[name] = {"weight": first, "loss": "mse", **schedule}
        output.task[name] |= {} if of_atoms else {"reduce": "sum", "per_atom": False}
        of_species = {"per": "atom", **_of_selected({}, species, excluded)}
        output.fields[name] = {"shape": shape} | (of_species if of_atoms else {})
        if kind == "cdf":
            output.fields[name] |= {"key": "atom_dos" if of_atoms else "dos", "cumulative": True}
        suffix, metric = ("local", name) if of_atoms else ("global", f"{name}_per_atom")
        output.columns[f"rmse_{suffix}_{kind}"] = f"{metric}_rmse"
    section.finish()
    if not output.task:
        raise section.refused("start_pref_dos", "and all other prefactors are 0, so nothing would be trained")
    return output


def property_task(section: Section, fitting: dict[str, Any], batch: dict[str, Any]) -> OutputTask:
    """A property of frames. batch: our `data.batch`."""
    name, size = fitting["property_name"], int(fitting.get("task_dim", 1))
    kind = section.choice("loss_func", "smooth_mae", LOSSES)
    beta = float(section.number("beta", 1.0, above=0))
    metrics = section.take("metric", ["mae"])
    if not isinstance(metrics, list) or not metrics or not all(metric in METRICS for metric in metrics):
        raise section.wrong("metric", metrics, f"a list of {', '.join(METRICS)}")
    section.finish()
    terms = size * int(batch.get("frames") or 1)
    target: dict[str, Any] = {"weight": float(terms), "loss": kind}
    if kind == "smooth_mae":
        target = {"weight": terms / beta, "loss": "huber", "huber_delta": beta}
    if kind == "rmse":
        target["weight"] = 1.0
        if batch.get("frames") != 1:
            section.notes[section.path("loss_func")] = "the root is taken frame by frame, not of the mean of a batch."
    extensive = not fitting.get("intensive", False)
    target |= {"reduce": "sum", "per_atom": True} if extensive else {"reduce": "mean"}
    metric = f"{name}_per_atom" if extensive else name
    columns = {word: f"{metric}_{word}" for word in metrics}
    return OutputTask({name: target}, {name: {"shape": [size]}}, columns)

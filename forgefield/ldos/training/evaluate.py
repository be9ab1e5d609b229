"""A trained network of points on snapshots: errors of its target and of every observable that can be had, kept in the run.

Ranks share the points; rank 0 writes `predictions/SPLIT-points.npz`: DOS, energies and a sample of the density of each
snapshot, predicted and as the targets give them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from forgefield.errors import ForgefieldError
from forgefield.files import written_whole
from forgefield.ldos.data import PointTable, Selection, StreamLoader
from forgefield.ldos.loss import PointErrors
from forgefield.ldos.model import LDOSNetwork
from forgefield.ldos.observables import OBSERVABLE_UNITS, Observables, mean_absolute
from forgefield.ldos.training.data import EVALUATED
from forgefield.ldos.training.observing import NEEDED, SnapshotMeasure, density_energies
from forgefield.parallel.ranks import Ranks
from forgefield.runs import Run

SAMPLED = 4000
"""Points of a snapshot whose density is kept for figures, about."""


def possible_observables(
    table: PointTable, model: LDOSNetwork, fermi: str, pseudopotentials: str | None
) -> tuple[list[str], dict[str, str]]:
    """Observables that these snapshots tell enough for, and of the others why not."""
    found, missing = [], {}
    for name in OBSERVABLE_UNITS:
        try:
            if model.energies is None:
                raise ForgefieldError("the model predicts a density, and no LDOS")
            for snapshot in table.snapshots:
                wanted = NEEDED[name] + (("fermi_energy",) if fermi == "given" else ())
                snapshot.info.require(*wanted, why=name)
                if name == "total_energy":
                    density_energies(snapshot, pseudopotentials)
            found.append(name)
        except ForgefieldError as error:
            missing[name] = str(error).rstrip(".")
    return found, missing


def evaluate_points(
    run: Run,
    model: LDOSNetwork,
    table: PointTable,
    split: str,
    ranks: Ranks,
    *,
    selection: Selection | None = None,
    batch: int = EVALUATED,
    fermi: str = "self_consistent",
    pseudopotentials: str | None = None,
) -> tuple[dict[str, float], dict[str, str]]:
    """Errors by name, and observables that could not be had with the reason. selection: the points, where they are not all of
    the snapshots; there are no observables then."""
    require_fit(model, table)
    errors = _target_errors(model, table, selection, batch, ranks)
    if selection is not None:
        return errors, dict.fromkeys(OBSERVABLE_UNITS, "these are not all points of the snapshots")
    metrics, missing = possible_observables(table, model, fermi, pseudopotentials)
    if not metrics:
        return errors, missing
    measure = SnapshotMeasure(table, model, metrics, fermi, ranks, pseudopotentials=pseudopotentials)
    pairs = [(measure.predicted(number), measure.reference(number)) for number in range(len(table.snapshots))]
    pairs = [
        (predicted._replace(dos=predicted.dos.cpu(), density=_host(predicted.density)), ref) for predicted, ref in pairs
    ]
    each = [measure.observer.errors(*pair, facts) for pair, facts in zip(pairs, measure.facts)]
    _keep(run.path / "predictions" / f"{split}-points.npz", measure, pairs, each, ranks)
    return errors | mean_absolute(each), missing


def require_fit(model: LDOSNetwork, table: PointTable) -> None:
    """Refuse snapshots that the model was not made for."""
    for what, has, wants in (
        ("descriptors", table.n_inputs, len(model.input_shift)),
        ("target values", table.n_targets, len(model.output_shift)),
    ):
        if has != wants:
            raise ForgefieldError(
                f"snapshot {table.snapshots[0].name} has {has} {what} a point, and the model was made for {wants}."
            )


def _host(density: torch.Tensor | None) -> torch.Tensor | None:
    return None if density is None else density.cpu()


@torch.no_grad()
def _target_errors(
    model: LDOSNetwork, table: PointTable, selection: Selection | None, batch: int, ranks: Ranks
) -> dict[str, float]:
    device = model.weights[0].device
    loader = StreamLoader(
        table, batch, selection=selection, rank=ranks.rank, world_size=ranks.world_size, dtype=torch.float64
    )
    errors = PointErrors(model.target, model.output_scale)
    for part in loader:
        outputs = model.network(model.scaled_inputs(part["inputs"].to(device))).to(torch.float64)
        targets = (part["targets"].to(device) - model.output_shift) / model.output_scale
        errors.add(PointErrors.measure(outputs - targets, part["weight"].to(device)).cpu())
    return errors.compute(ranks.sum(errors.sums))


def _keep(
    path: Path,
    measure: SnapshotMeasure,
    pairs: list[tuple[Observables, Observables]],
    errors: list[dict[str, float]],
    ranks: Ranks,
) -> None:
    facts, grid = measure.facts, measure.model.energies
    assert grid is not None
    arrays: dict[str, Any] = {
        "names": np.array([fact.name for fact in facts]),
        "energies": grid.energies().numpy(),
        "n_atoms": np.array([fact.n_atoms for fact in facts]),
    }
    for kind, observed in zip(("pred", "ref"), zip(*pairs)):
        arrays[f"dos_{kind}"] = np.stack([each.dos.numpy() for each in observed])
        for name in ("fermi", "band_energy", "total"):
            values = [getattr(each, name) for each in observed]
            if None not in values:
                arrays[f"{name}_{kind}"] = np.array(values, dtype=np.float64)
    arrays |= {
        f"{name}_dft": np.array([(fact.dft or {}).get(name, np.nan) for fact in facts]) for name in ("band", "total")
    }
    arrays |= {f"error_{name}": np.array([each[name] for each in errors]) for name in errors[0]}
    samples = ranks.gather([_sample(pair, fact) for pair, fact in zip(pairs, facts)])
    if not ranks.is_first:
        return
    if samples[0][0] is not None:
        for number in range(len(facts)):
            arrays[f"density_{number}"] = np.concatenate([of_rank[number] for of_rank in samples], axis=1)
    path.parent.mkdir(exist_ok=True)
    with written_whole(path) as partial:
        np.savez_compressed(partial, allow_pickle=False, **arrays)


def _sample(pair: tuple[Observables, Observables], facts: Any) -> np.ndarray | None:
    """(2, n): density of some of this rank's points, predicted and of the targets, 1/A^3."""
    predicted, reference = (observed.density for observed in pair)
    if predicted is None or reference is None:
        return None
    every = max(1, facts.n_points // SAMPLED)
    first = -facts.stretch[0] % every
    return np.stack([values[first::every].numpy() for values in (predicted, reference)])

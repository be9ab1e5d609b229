"""Errors of LDOS runs on snapshots: of the target at each point, and of every observable that the snapshots allow.

`measure_points` evaluates at the end of a training, `test_points` on other snapshots. Ranks share the points; rank 0 writes
`predictions/SPLIT-points.npz` to the run: density of states, energies and a sample of the density of each snapshot, predicted
and computed from the targets.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgefield.data.options import DataOptions
from forgefield.errors import ForgefieldError
from forgefield.evaluation import load_shared, write_test
from forgefield.files import written_atomically
from forgefield.ldos.data import PointTable, Selection, StreamLoader, find_snapshots
from forgefield.ldos.descriptors.computed import input_maker
from forgefield.ldos.loss import PointErrors
from forgefield.ldos.model import LDOSNetwork, negative_values
from forgefield.ldos.observable_units import OBSERVABLE_UNITS
from forgefield.ldos.observables import Observables, SnapshotFacts, mean_absolute
from forgefield.ldos.training.data import EVALUATED, PointData
from forgefield.ldos.training.snapshots import NEEDED, SnapshotMeasure, density_energies
from forgefield.parallel.accelerators import evaluation_device
from forgefield.parallel.ranks import Ranks
from forgefield.report.page import write_report
from forgefield.runs import Run
from forgefield.settings import Config
from forgefield.tasks.options import TaskOptions
from forgefield.training.problem.preflight import require_same_data
from forgefield.training.run.journal import Journal
from forgefield.training.run.summary import end_summary

SAMPLED = 4000
"""Approximate number of points of a snapshot whose density is stored for figures."""


def measure_points(run: Run, config: Config, data: PointData, journal: Journal, ranks: Ranks) -> None:
    """Evaluate the best weights on the validation and test snapshots of a training; rank 0 writes errors and the report."""
    device = evaluation_device(config.trainer.get("accelerator"))
    model = _network(run, "best", device, ranks)
    results: dict[str, dict[str, float]] = {}
    by_snapshot: dict[str, list[dict[str, Any]]] = {}
    for split, point_split in (("val", data.val), ("test", data.test)):
        if point_split is None:
            continue
        selection = None if point_split.is_complete else point_split.selection
        results[split], missing, by_snapshot[split] = _evaluate(
            run, model, point_split.table, split, config.data, config.task, ranks, selection=selection
        )
        if point_split.is_complete:
            _report_missing(missing, journal.notify)
    if not ranks.is_rank_zero:
        return
    if data.test is not None:
        write_test(
            run,
            results["test"],
            name="test",
            data=config.data.test,
            which="best",
            points=len(data.test),
            details={"snapshots": by_snapshot["test"]},
        )
    write_report(run.path)
    hints = [f"forgefield test {run.path} --data SNAPSHOTS", f"report: {run.path / 'report.html'}"]
    units, note = run.units | OBSERVABLE_UNITS, run.info.get("stopped_early")
    journal.show(lambda console: end_summary(console, run.path, results, hints, units=units, note=note))


def test_points(
    run: Run,
    data: object,
    options: DataOptions,
    name: str,
    *,
    which: str,
    device: str,
    labels_required: bool,
    head: str | None,
    ranks: Ranks,
) -> dict[str, float]:
    """Errors of a run on other snapshots, by name; predictions and errors are written to the run as `name`.

    data: snapshots, as in `data.train`. options: target, units and batch size of that data. labels_required, head: not used,
    since snapshots always have targets and these models have one output.
    """
    points = options.points
    assert points is not None, "a run on points has this section"
    settings = points.descriptors or run.info["model"]["points"]["descriptors"]
    table = PointTable(
        find_snapshots(
            data,
            target=points.target,
            units=points.units,
            setting="--data",
            make_inputs=input_maker(settings),
        )
    )
    require_same_data(table.fingerprint, ranks)
    model = _network(run, which, device, ranks)
    errors, missing, by_snapshot = _evaluate(run, model, table, name, options, run.config.task, ranks)
    if ranks.is_rank_zero:
        _report_missing(missing, print)
        for snapshot in by_snapshot:
            print(_snapshot_text(snapshot))
        details = {"snapshots": by_snapshot}
        write_test(run, errors, name=name, data=data, which=which, points=table.n_points, details=details)
    return ranks.broadcast(errors)


def _network(run: Run, which: str, device: str, ranks: Ranks) -> LDOSNetwork:
    model = load_shared(run, which, device, ranks)
    assert isinstance(model, LDOSNetwork), "runs on points have no other model"
    return model


def _evaluate(
    run: Run,
    model: LDOSNetwork,
    table: PointTable,
    split: str,
    options: DataOptions,
    task: TaskOptions | None,
    ranks: Ranks,
    *,
    selection: Selection | None = None,
) -> tuple[dict[str, float], dict[str, str], list[dict[str, Any]]]:
    """`evaluate_points` with the batch size, Fermi energy and pseudopotentials of a config."""
    batch = options.eval_batch
    observables = task.points.observables if task is not None and task.points is not None else None
    return evaluate_points(
        run,
        model,
        table,
        split,
        ranks,
        selection=selection,
        batch=int(batch["points"] if isinstance(batch, dict) else batch or EVALUATED),
        fermi=observables.fermi if observables is not None else "self_consistent",
        pseudopotentials=None if options.points is None else options.points.pseudopotentials,
    )


def _report_missing(missing: dict[str, str], notify: Callable[[str], None]) -> None:
    """Name the observables that were not measured, once for each reason."""
    for reason in dict.fromkeys(missing.values()):
        names = [name for name, why in missing.items() if why == reason]
        notify(f"Not measured: {', '.join(names)}; {reason}.")


def possible_observables(
    table: PointTable, model: LDOSNetwork, fermi: str, pseudopotentials: str | None
) -> tuple[list[str], dict[str, str]]:
    """Observables that can be computed for these snapshots, and for the others the reason why not."""
    possible: list[str] = []
    missing: dict[str, str] = {}
    for name in OBSERVABLE_UNITS:
        try:
            if model.energies is None:
                raise ForgefieldError("the model predicts a density, not an LDOS")
            for snapshot in table.snapshots:
                needed = NEEDED[name] + (("fermi_energy",) if fermi == "given" else ())
                snapshot.info.require(*needed, why=name)
                if name == "total_energy":
                    density_energies(snapshot, pseudopotentials)
            if name == "total_energy_actual_fe" and "total_energy" in missing:
                raise ForgefieldError(missing["total_energy"])
            possible.append(name)
        except ForgefieldError as error:
            missing[name] = str(error).rstrip(".")
    return possible, missing


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
) -> tuple[dict[str, float], dict[str, str], list[dict[str, Any]]]:
    """Errors by name, for each observable that was not measured the reason, and `snapshot_result` of each snapshot.

    selection: points to evaluate; default all of the snapshots. Observables need all points. batch: points evaluated together.
    fermi: `self_consistent` or `given`. pseudopotentials: folder of UPF files; default next to the snapshots.
    """
    _require_widths(model, table)
    negative = negative_values(run.info)
    errors = _target_errors(model, table, selection, batch, ranks, negative)
    if selection is not None:
        return errors, dict.fromkeys(OBSERVABLE_UNITS, "these are not all points of the snapshots"), []
    metrics, missing = possible_observables(table, model, fermi, pseudopotentials)
    if not metrics:
        return errors, missing, []
    measure = SnapshotMeasure(table, model, metrics, fermi, ranks, pseudopotentials=pseudopotentials, negative=negative)
    pairs = [(measure.predicted(number).cpu(), measure.reference(number)) for number in range(len(table.snapshots))]
    each = [measure.observer.errors(*pair, facts) for pair, facts in zip(pairs, measure.facts)]
    _write_predictions(run.path / "predictions" / f"{split}-points.npz", measure, pairs, each, ranks)
    results = [snapshot_result(*pair, facts, signed) for pair, facts, signed in zip(pairs, measure.facts, each)]
    return errors | mean_absolute(each), missing, results


def snapshot_result(
    predicted: Observables, reference: Observables, facts: SnapshotFacts, errors: dict[str, float]
) -> dict[str, Any]:
    """Energies of a snapshot, eV, predicted, from the targets and of the calculation; and signed errors in
    `OBSERVABLE_UNITS`."""

    def energies(observed: Observables) -> dict[str, float]:
        values = {
            "fermi_energy": observed.fermi,
            "band_energy": observed.band_energy,
            "entropy": observed.entropy,
            "total_energy": observed.total,
        }
        return {name: value for name, value in values.items() if value is not None}

    dft = {
        "fermi_energy": facts.dft_fermi_energy,
        "band_energy": (facts.dft or {}).get("band"),
        "total_energy": (facts.dft or {}).get("total"),
    }
    return {
        "name": facts.name,
        "n_atoms": facts.n_atoms,
        "predicted": energies(predicted),
        "reference": energies(reference),
        "dft": {name: value for name, value in dft.items() if value is not None},
        "errors": errors,
    }


def _snapshot_text(result: dict[str, Any]) -> str:
    """Signed errors of a snapshot in one line."""
    errors = (
        f"{name.replace('_', ' ')} {value:{'.4g' if name in ('density', 'dos') else '+.4g'}} {OBSERVABLE_UNITS[name]}"
        for name, value in result["errors"].items()
    )
    return f"{result['name']}: {', '.join(errors)}"


def _require_widths(model: LDOSNetwork, table: PointTable) -> None:
    """Refuse snapshots with other numbers of descriptors or target values than those of the training."""
    for quantity, actual, expected in (
        ("descriptors", table.n_inputs, len(model.input_shift)),
        ("target values", table.n_targets, len(model.output_shift)),
    ):
        if actual != expected:
            raise ForgefieldError(
                f"snapshot {table.snapshots[0].name} has {actual} {quantity} per point; the model has {expected}."
            )


@torch.no_grad()
def _target_errors(
    model: LDOSNetwork,
    table: PointTable,
    selection: Selection | None,
    batch: int,
    ranks: Ranks,
    negative: Callable[[Tensor], Tensor],
) -> dict[str, float]:
    device = model.weights[0].device
    loader = StreamLoader(
        table, batch, selection=selection, rank=ranks.rank, world_size=ranks.world_size, dtype=torch.float64
    )
    errors = PointErrors(model.target, model.output_scale)
    for points in loader:
        outputs = model.network(model.scaled_inputs(points["inputs"].to(device))).to(torch.float64)
        physical = outputs * model.output_scale + model.output_shift
        outputs = outputs + (negative(physical) - physical) / model.output_scale
        targets = (points["targets"].to(device) - model.output_shift) / model.output_scale
        errors.add(PointErrors.measure(outputs - targets, points["weight"].to(device)).cpu())
    return errors.compute(ranks.all_reduce(errors.sums))


def _write_predictions(
    path: Path,
    measure: SnapshotMeasure,
    pairs: list[tuple[Observables, Observables]],
    errors: list[dict[str, float]],
    ranks: Ranks,
) -> None:
    facts, grid = measure.facts, measure.model.energies
    assert grid is not None
    arrays: dict[str, np.ndarray] = {
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
    if not ranks.is_rank_zero:
        return
    if samples[0][0] is not None:
        for number in range(len(facts)):
            arrays[f"density_{number}"] = np.concatenate([rank_samples[number] for rank_samples in samples], axis=1)
    path.parent.mkdir(exist_ok=True)
    with written_atomically(path) as partial:
        np.savez_compressed(partial, allow_pickle=False, **arrays)


def _sample(pair: tuple[Observables, Observables], facts: SnapshotFacts) -> np.ndarray | None:
    """(2, n): density at some of this rank's points, predicted and computed from the targets, 1/A^3."""
    predicted, reference = (observed.density for observed in pair)
    if predicted is None or reference is None:
        return None
    every = max(1, facts.n_points // SAMPLED)
    first = -facts.point_range[0] % every
    return np.stack([values[first::every].numpy() for values in (predicted, reference)])

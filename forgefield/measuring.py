"""Errors of trained models: at the end of a training and on other data, of frames and of grid points.

Every rank predicts a share; rank 0 adds up, writes predictions and errors into the run, and says them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from forgefield.config.trust import code_of_model
from forgefield.data.dataset import GraphDataset
from forgefield.data.points import PointTable, find_snapshots
from forgefield.data.readers import plain
from forgefield.data.sampling.batching import evaluation_budget
from forgefield.data.sampling.loader import FrameLoader
from forgefield.data.sampling.plan import Budget
from forgefield.deploy.evaluate import in_order, outputs_of_atoms, predict_batches
from forgefield.errors import ForgefieldError
from forgefield.files import write_whole, written_whole
from forgefield.models.deeppot.branches import single
from forgefield.models.ldos import LDOSNetwork
from forgefield.models.potential import Potential
from forgefield.models.registry import branch_names
from forgefield.parallel.accelerators import evaluation_device
from forgefield.parallel.group import Ranks
from forgefield.report.page import write_report
from forgefield.runs import Run, built
from forgefield.tasks.classes import auroc
from forgefield.tasks.ldos_observables import OBSERVABLE_UNITS
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.task import LABELS
from forgefield.training.fit import Fitted
from forgefield.training.journal import Journal
from forgefield.training.points.data import EVALUATED
from forgefield.training.points.evaluate import evaluate_points
from forgefield.training.preflight import require_same_data
from forgefield.training.summary import end_summary


def is_unmeasured(fitted: Fitted) -> bool:
    """A complete run whose measurement was interrupted, or is asked for with other test data."""
    if fitted.outcome != "complete" or fitted.data is None:
        return False
    needs_test = fitted.data.test is not None and not (fitted.run.path / "test.json").exists()
    return needs_test or not (fitted.run.path / "report.html").exists() or "data.test" in fitted.changed


def measure(fitted: Fitted, config: DictConfig, journal: Journal, ranks: Ranks) -> None:
    """Errors of the best model on validation and test frames, each frame predicted by one rank; rank 0 writes."""
    run, data = fitted.run, fitted.data
    assert data is not None
    if run.of_points:
        _measure_points(run, config, data, journal, ranks)
        return
    batch = evaluation_budget(config.data)
    device = evaluation_device(config.trainer.get("accelerator"))
    results: dict[str, dict[str, float]] = {}
    for split, dataset in (("val", data.val), ("test", data.test)):
        if dataset is not None and has_outputs(run):
            results[split] = evaluate(run, dataset, split, which="best", device=device, batch=batch, ranks=ranks)
    if not ranks.is_first:
        return
    if "test" in results:
        assert data.test is not None
        write_test(run, results["test"], name="test", source=str(config.data.test), which="best", frames=len(data.test))
    write_report(run.path)
    branches = branch_names(run.info["model"])
    head, flag = (f", head={branches[0]!r}", f" --head {branches[0]}") if branches else ("", "")
    if any(code_of_model(run.info["model"])):
        head, flag = f"{head}, trust_code=True", f"{flag} --trust-code"
    hints = [
        *(
            [f"from forgefield import Calculator; atoms.calc = Calculator({str(run.path)!r}{head})"]
            if run.has_energy
            else []
        ),
        *([] if has_outputs(run) else [f"train further: model: {{from: {run.name}}}"]),
        *([f"forgefield predict {run.path} structures.extxyz -o predicted.extxyz{flag}"] if has_outputs(run) else []),
        f"report: {run.path / 'report.html'}",
    ]
    journal.show(
        lambda console: end_summary(
            console,
            run.path,
            results,
            hints,
            units=run.units,
            statistics=run.info.get("statistics"),
            note=run.info.get("stopped_early"),
        )
    )


def _measure_points(run: Run, config: DictConfig, data: Any, journal: Journal, ranks: Ranks) -> None:
    """The same for a run of grid points: errors of the target and of all observables of whole snapshots."""
    device = evaluation_device(config.trainer.get("accelerator"))
    model: Any = load_shared(run, "best", device, ranks)
    results: dict[str, dict[str, float]] = {}
    for split, part in (("val", data.val), ("test", data.test)):
        if part is None:
            continue
        selection = None if part.is_whole else part.selection
        results[split], missing = _evaluated_points(run, model, part.table, split, config, ranks, selection=selection)
        if part.is_whole:
            _say_missing(missing, journal.say)
    if not ranks.is_first:
        return
    if data.test is not None:
        source = str(config.data.test)
        write_test(run, results["test"], name="test", source=source, which="best", points=len(data.test))
    write_report(run.path)
    hints = [f"forgefield test {run.path} --data SNAPSHOTS", f"report: {run.path / 'report.html'}"]
    units, note = run.units | OBSERVABLE_UNITS, run.info.get("stopped_early")
    journal.show(lambda console: end_summary(console, run.path, results, hints, units=units, note=note))


def evaluate_snapshots(
    run: Run, data: Any, settings: Any, *, which: str, device: str, ranks: Ranks
) -> dict[str, float]:
    points = settings.points
    table = PointTable(find_snapshots(data, target=points.target, units=points.units, setting="--data"))
    require_same_data(table.fingerprint, ranks)
    model: Any = load_shared(run, which, device, ranks)
    name = name_of_test(run, data)
    config = OmegaConf.merge(run.config, {"data": {"points": settings.points, "eval_batch": settings.eval_batch}})
    errors, missing = _evaluated_points(run, model, table, name, config, ranks)
    if ranks.is_first:
        _say_missing(missing, print)
        write_test(run, errors, name=name, source=str(data), which=which, points=table.n_points)
        write_report(run.path)
    return ranks.share(errors)


def _evaluated_points(
    run: Run, model: Any, table: PointTable, split: str, config: Any, ranks: Ranks, *, selection: Any = None
) -> tuple[dict[str, float], dict[str, str]]:
    task, given = config.get("task"), plain(config.data.get("eval_batch"))
    observables = (task.get("points") or task).get("observables") if task is not None else None
    return evaluate_points(
        run,
        model,
        table,
        split,
        ranks,
        selection=selection,
        batch=int(given["points"] if isinstance(given, dict) else given or EVALUATED),
        fermi=observables.fermi if observables is not None else "self_consistent",
        pseudopotentials=config.data.points.get("pseudopotentials"),
    )


def _say_missing(missing: dict[str, str], say: Callable[[str], None]) -> None:
    """Which observables were not measured, once for each reason."""
    for reason in dict.fromkeys(missing.values()):
        names = [name for name, why in missing.items() if why == reason]
        say(f"Not measured: {', '.join(names)}; {reason}.")


def evaluate(
    run: Run,
    dataset: GraphDataset,
    split: str,
    *,
    which: str,
    device: str,
    batch: Budget,
    ranks: Ranks,
    head: str | None = None,
    hints: Mapping[str, str] | None = None,
) -> dict[str, float]:
    """Predict a data set, keep the predictions in the run, give the errors (on rank 0; the others only predict).

    hints: for labels that may be missing, a sentence on values of other names.
    """
    potential: Any = load_shared(run, which, device, ranks, head)
    ours = [name for name in dict.fromkeys(LABELS.values()) if potential.has_energy or name == "forces"]
    ours = ours if potential.has_energy or potential.forces_are_direct else []
    outputs = [*ours, *potential.further]
    if not outputs:
        raise ForgefieldError(ONLY_NOISE.format(run.name))
    labels = [name for name in outputs if name in _labels_of(dataset) and dataset.frames.carries(name).any()]
    if not labels:
        seen = "".join(f"{hint}, or " for name, hint in (hints or {}).items() if name in outputs)
        raise ForgefieldError(
            f"None of these frames carries {', '.join(outputs[:-1])}{' or ' if outputs[1:] else ''}{outputs[-1]}, so there "
            f"is nothing to compare with; {seen}use forgefield predict."
        )
    loader = FrameLoader(dataset, batch, rank=ranks.rank, world_size=ranks.world_size)
    parts = predict_batches(
        potential,
        loader,
        forces="forces" in labels,
        stress="stress" in labels,
        device=device,
    )
    everyone = ranks.gather(parts)
    if not ranks.is_first:
        return {}
    arrays = in_order([part for of_rank in everyone for part in of_rank], per_atom=outputs_of_atoms(potential))
    arrays["species_symbols"] = np.array(run.species)
    (run.path / "predictions").mkdir(exist_ok=True)
    with written_whole(run.path / "predictions" / f"{split}.npz") as partial:
        np.savez_compressed(partial, allow_pickle=False, **arrays)
    names = tuple(labels)
    classes = {name: values for name, values in run.classes.items() if name in names}
    metrics = ErrorMetrics(names, run.species, classes=classes, extensive=run.extensive)
    tensors = {key: torch.from_numpy(np.ascontiguousarray(arrays[key])) for key in arrays if key != "species_symbols"}
    logits = {name: tensors[f"{name}_prob"].clamp(min=1e-300).log() for name in classes}
    metrics.update(
        {name: tensors[f"{name}_pred"] for name in names} | logits,
        {
            **{name: tensors[f"{name}_ref"] for name in names},
            "n_atoms": tensors["n_atoms"],
            "species": tensors["species"],
        },
    )
    return metrics.compute() | _auroc(arrays, classes)


ONLY_NOISE = "Run {} learnt noise alone and predicts nothing; train it further (model.from)."


def has_outputs(run: Run) -> bool:
    """Whether its model predicts anything; one that learnt noise alone does not."""
    return run.has_energy or run.forces_are_direct or bool(run.heads)


def _auroc(arrays: dict[str, np.ndarray], classes: dict[str, list[float]]) -> dict[str, float]:
    """Of targets with two classes; the second is the positive one."""
    found = {}
    for name, values in classes.items():
        labelled = ~np.isnan(arrays[f"{name}_ref"])
        area = auroc(arrays[f"{name}_prob"][labelled, -1], arrays[f"{name}_ref"][labelled] == values[-1])
        if len(values) == 2 and area is not None:
            found[f"{name}_auroc"] = area
    return found


def _labels_of(dataset: GraphDataset) -> set[str]:
    """What its frames may carry."""
    return {*LABELS.values(), *dataset.fields}


def load_shared(run: Run, which: str, device: str, ranks: Ranks, head: str | None = None) -> Potential | LDOSNetwork:
    """The trained model (one branch of it) on every rank, read from the disk by rank 0 alone."""
    if ranks.world_size == 1:
        return run.load_model(which, device, head=head)
    potential = run.load_model(which, "cpu", head=head) if ranks.is_first else None
    resolved = run.info["model"] if head is None else single(run.info["model"], None, head)[0]
    recipe = ranks.share((resolved, run.info["precision"], potential.state_dict()) if potential else None)
    if potential is None:
        potential = built(recipe[0], recipe[1], run.trust)
        potential.load_state_dict(recipe[2])
    return potential.to(device).eval()


def name_of_test(run: Run, data: Any) -> str:
    """`test` for a run without test frames of its own, so that its report has them; else the name of the file."""
    if run.config.get("data", {}).get("test") in (None, 0):
        return "test"
    first = data[0] if isinstance(data, (list, tuple)) else data
    return f"test-{re.sub(r'[^A-Za-z0-9_.-]+', '-', Path(str(first)).stem)}"


def write_test(run: Run, errors: dict[str, float], *, name: str, source: str, which: str, **counts: int) -> None:
    """counts: how many samples there were, by what they are."""
    source = source.replace(f"{Path.cwd()}{os.sep}", "")  # shorter, and no business of a report's reader
    content = {"source": source, "weights": which, **counts, "errors": errors}
    write_whole(run.path / f"{name}.json", json.dumps(content, indent=1) + "\n")

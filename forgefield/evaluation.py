"""Errors of trained models, at the end of a training and on other data.

Every rank predicts a share of the samples; rank 0 combines them and writes predictions, errors and the report to the run
folder. This module evaluates frames and contains what all kinds of samples share; `kinds` names the evaluation of other kinds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from forgefield.config.trust import code_of_model
from forgefield.data.batch import BatchSpec
from forgefield.data.dataset import GraphDataset
from forgefield.data.labels.label_reader import LabelReader
from forgefield.data.module import FrameData
from forgefield.data.options import DataOptions
from forgefield.data.paths import test_sets
from forgefield.data.readers import with_type_map
from forgefield.data.reading import label_settings, read_table, unit_settings
from forgefield.data.sampling.batching import default_frames, evaluation_budget, sized
from forgefield.data.sampling.loader import FrameLoader
from forgefield.data.sampling.plan import Budget
from forgefield.data.species import SpeciesTable
from forgefield.data.splits import is_lazy
from forgefield.data.transforms import frame_transform
from forgefield.errors import ForgefieldError
from forgefield.files import write_atomically, written_atomically
from forgefield.inference.evaluate import evaluate_batches, join_in_order, per_atom_outputs
from forgefield.inference.uncertainty import (
    LastLayerUncertainty,
    UncertainPotential,
    has_uncertainty,
    load_uncertainty,
    require_level,
)
from forgefield.models.potential import Potential
from forgefield.models.resolving import branch_names, excluded_species, single_branch
from forgefield.parallel.accelerators import evaluation_device
from forgefield.parallel.ranks import Ranks
from forgefield.parallel.session import stop_all_ranks
from forgefield.report.page import write_parity_png, write_report
from forgefield.runs import Run, build_from_options
from forgefield.settings import Config
from forgefield.tasks.calibration import calibration_metrics
from forgefield.tasks.classes import auroc
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.targets import LABELS
from forgefield.training.fit import TrainingResult, code_after
from forgefield.training.options import measures_maxima
from forgefield.training.problem.preflight import require_same_data
from forgefield.training.run.journal import Journal, with_progress
from forgefield.training.run.signals import StopControl, StopNow
from forgefield.training.run.summary import end_summary


def is_unmeasured(fitted: TrainingResult) -> bool:
    """Whether results of a complete run are missing, were computed with other weights, or are for other test data."""
    if fitted.outcome != "complete" or fitted.data is None:
        return False
    run = fitted.run
    needs_test = any(not (run.path / f"{name}.json").exists() for name in fitted.data.tests)
    if needs_test or not (run.path / "report.html").exists():
        return True
    info = run.info
    if "measured" not in info:  # a run of an earlier version, which did not record it
        return "data.test" in fitted.changed
    return bool(info["measured"] != _measured_record(run, run.config))


def _measured_record(run: Run, config: Config) -> dict[str, str]:
    """The best weights and the test data, on which the results of a run depend, as stored in `run.json`."""
    return {"weights_sha256": run.read_weights("best").sha256, "test": str(config.data.test)}


Preparation = Callable[[TrainingResult, Config, Journal, Ranks], None]


def evaluate_training(
    fitted: TrainingResult, config: Config, journal: Journal, ranks: Ranks, prepare: Preparation | None = None
) -> TrainingResult:
    """Evaluate the best weights on validation and test data and return the outcome of the training.

    prepare: called before the evaluation; all ranks take part.

    Rank 0 writes the results and the report. A request to stop ends the evaluation at once; the same command then finishes it.
    """
    requeue_exit = config.training.checkpoint.requeue_exit
    try:
        with StopControl(None, requeue_exit=requeue_exit) as stop, stop.at_once():
            if prepare is not None:
                prepare(fitted, config, journal, ranks)
            measure(fitted, config, journal, ranks)
    except StopNow as stopped:
        reason = stopped.request.reason
        message = f"Stopped during the final evaluation: {reason}. Run the same command to finish it."
        if ranks.is_rank_zero:
            journal.notify(message)
        code = code_after(stopped.request, requeue_exit, ranks, journal)
        stop_all_ranks(ranks, message, code)
        return replace(fitted, outcome="stopped", exit_code=code)
    return fitted


def measure(fitted: TrainingResult, config: Config, journal: Journal, ranks: Ranks) -> None:
    """Evaluate the best weights on validation and test data; rank 0 writes the results and the report."""
    run, data = fitted.run, fitted.data
    assert data is not None
    run.kind.measure.load()(run, config, data, journal, ranks)
    if ranks.is_rank_zero:  # last, because results are valid only when all of them have been written
        run.write_info(measured=_measured_record(run, config))


def measure_frames(run: Run, config: Config, data: FrameData, journal: Journal, ranks: Ranks) -> None:
    """Evaluate the best weights on validation and test frames, each predicted by one rank; rank 0 writes the results."""
    batch = evaluation_budget(data.options)
    device = evaluation_device(config.trainer.get("accelerator"))
    data = data.serve(BatchSpec(on_gpu=device.startswith("cuda"))).data
    results: dict[str, dict[str, float]] = {}
    for split, dataset in data.splits():
        if split != "train" and run.has_outputs:
            results[split] = evaluate(
                run, dataset, split, which="best", device=device, batch=batch, ranks=ranks, journal=journal
            )
    if not ranks.is_rank_zero:
        return
    sources = test_sets(config.data.test)
    for name in data.tests.keys() & results.keys():
        write_test(run, results[name], name=name, data=sources[name], which="best", frames=len(data.tests[name]))
    write_report(run.path)
    hints = _usage_hints(run)
    journal.show(
        lambda console: end_summary(
            console,
            run.path,
            results,
            hints,
            units=run.units,
            names=run.names_of_species,
            statistics=run.info.get("statistics"),
            note=run.info.get("stopped_early"),
        )
    )


def _usage_hints(run: Run) -> list[str]:
    """Commands and code that use the model of a run, for the summary at the end of a training."""
    branches = branch_names(run.info["model"])
    argument, flag = (f", head={branches[0]!r}", f" --head {branches[0]}") if branches else ("", "")
    if any(code_of_model(run.info["model"])):
        argument, flag = f"{argument}, trust_code=True", f"{flag} --trust-code"
    hints = []
    if run.has_energy:
        hints.append(f"from forgefield import Calculator; atoms.calc = Calculator({str(run.path)!r}{argument})")
    if run.has_outputs:
        hints.append(f"forgefield predict {run.path} structures.extxyz -o predicted.extxyz{flag}")
    else:
        hints.append(f"train further: model: {{from: {run.name}}}")
    return [*hints, f"report: {run.path / 'report.html'}"]


def test_frames(
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
    uncertainty: str | None = None,
) -> dict[str, float]:
    """Errors of a run on other frames, by name; predictions, errors and a parity plot are written to the run as `name`.

    data: a file, folder, glob or list of them. options: labels, units and batch size of that data. Other arguments as in
    `api.test`.
    """
    labels, units = label_settings(options.labels), unit_settings(options.units)
    reader = LabelReader(labels, units)
    frames = read_table(
        with_type_map(data, run.type_map, run.type_names),
        labels,
        units,
        lazy=is_lazy(options),
        required=labels_required,
        reader=reader,
        transform=frame_transform(options.transforms, run.trust),
    )
    require_same_data(frames.fingerprint, ranks)
    dataset = GraphDataset(frames, SpeciesTable(run.species, trained=True), run.graph)
    frames_by_default = default_frames(float(frames.n_atoms.mean()), len(frames))
    batch = evaluation_budget(sized(options, frames_by_default))
    errors = evaluate(
        run,
        dataset,
        name,
        which=which,
        device=device,
        batch=batch,
        ranks=ranks,
        head=head,
        hints=reader.hints(),
        uncertainty=uncertainty,
    )
    if ranks.is_rank_zero:
        write_test(run, errors, name=name, data=data, which=which, head=head, frames=len(frames))
        if any("_mae" in error for error in errors):
            write_parity_png(run.path, name)
    return ranks.broadcast(errors)


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
    journal: Journal | None = None,
    uncertainty: str | None = None,
) -> dict[str, float]:
    """Predict a data set, store the predictions in the run as `split`, and return the errors by name; empty on other ranks
    than 0.

    Parameters
    ----------
    which, device, head
        Weights, device and branch, as in `api.load`.
    batch
        Size of a batch.
    hints
        For labels that may be missing, a sentence about similar values with other names.
    journal
        Where to show progress.
    uncertainty
        `energy` or `forces`, whose uncertainties are compared with the errors. Default: of energies, if the run has any.
    """
    potential = load_shared(run, which, device, ranks, head)
    assert isinstance(potential, Potential), "runs on frames have no other model"
    potential = _with_stored_uncertainty(potential, run, which, head, uncertainty, ranks)
    run.require_outputs()
    labels = _labels_to_compare(potential, dataset, hints or {})
    loader = FrameLoader(dataset, batch, rank=ranks.rank, world_size=ranks.world_size)
    batches = loader if journal is None else with_progress(loader, len(loader), journal, f"{split} frames")
    parts = evaluate_batches(
        potential,
        batches,
        forces="forces" in labels,
        stress="stress" in labels,
        device=device,
        notify=journal.notify if journal is not None else print if ranks.is_rank_zero else lambda text: None,
    )
    gathered = ranks.gather(parts)
    if not ranks.is_rank_zero:
        return {}
    arrays = join_in_order([part for of_rank in gathered for part in of_rank], per_atom=per_atom_outputs(potential))
    arrays["species_symbols"] = np.array(run.species)
    arrays |= _origins(dataset)
    (run.path / "predictions").mkdir(exist_ok=True)
    with written_atomically(run.path / "predictions" / f"{split}.npz") as partial:
        np.savez_compressed(partial, allow_pickle=False, **arrays)
    return _errors(run, tuple(labels), arrays)


def _with_stored_uncertainty(
    potential: Potential, run: Run, which: str, head: str | None, level: str | None, ranks: Ranks
) -> Potential:
    """The potential with the uncertainties of its run; as it is if none are requested and the run has none."""
    stored: LastLayerUncertainty | None = None
    require_level(level)
    if potential.uncertainty_outputs:  # an ensemble
        return potential
    if ranks.is_rank_zero and (level is not None or (which == "best" and has_uncertainty(run, head))):
        stored = load_uncertainty(run, which, head)
    stored = ranks.broadcast(stored)
    if stored is None:
        return potential
    return UncertainPotential(potential, stored, level or "energy").eval()


def _labels_to_compare(potential: Potential, dataset: GraphDataset, hints: Mapping[str, str]) -> list[str]:
    """Outputs of the model for which the data has labels; an error where there are none."""
    outputs = list(potential.extra_outputs)
    if potential.has_energy:
        outputs = [*dict.fromkeys(LABELS.values()), *outputs]
    elif potential.forces_are_direct:
        outputs = ["forces", *outputs]
    possible = {*LABELS.values(), *dataset.fields}
    labels = [name for name in outputs if name in possible and dataset.frames.carries(name).any()]
    if not labels:
        similar = "".join(f"{hint}, or " for name, hint in hints.items() if name in outputs)
        names = " or ".join(filter(None, (", ".join(outputs[:-1]), outputs[-1])))
        raise ForgefieldError(
            f"None of these frames has {names}, so there is nothing to compare with; {similar}use forgefield predict."
        )
    return labels


def _errors(run: Run, names: tuple[str, ...], arrays: dict[str, np.ndarray]) -> dict[str, float]:
    """Errors of predictions by name. arrays: as returned by `inference.evaluate.predict_dataset`."""
    classes = {name: values for name, values in run.classes.items() if name in names}
    uncounted = {name: excluded_species(run.info["model"]) for name in ("energy", "forces", "virial")}
    uncounted |= {name: head.get("uncounted") or () for name, head in run.heads.items()}
    maxima = measures_maxima(run.config.training)
    metrics = ErrorMetrics(
        names, run.species, classes=classes, extensive=run.extensive, uncounted=uncounted, maxima=maxima
    )
    tensors = {
        key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in arrays.items() if value.dtype.kind != "U"
    }
    logits = {name: tensors[f"{name}_prob"].clamp(min=1e-300).log() for name in classes}
    metrics.update(
        {name: tensors[f"{name}_pred"] for name in names} | logits,
        {
            **{name: tensors[f"{name}_ref"] for name in names},
            "n_atoms": tensors["n_atoms"],
            "species": tensors["species"],
        },
    )
    return metrics.compute() | _auroc(arrays, classes) | _calibration(arrays)


def _calibration(arrays: dict[str, np.ndarray]) -> dict[str, float]:
    """How well uncertainties agree with errors, for energies per atom (eV) and components of forces (eV/A)."""
    calibration: dict[str, float] = {}
    for name, per_atom in (("energy", arrays["n_atoms"]), ("forces", 1)):
        uncertainty = arrays.get(f"{name}_uncertainty")
        if uncertainty is not None:
            error = (arrays[f"{name}_pred"] - arrays[f"{name}_ref"]) / per_atom
            metrics = calibration_metrics(error.ravel(), (uncertainty / per_atom).ravel())
            calibration |= {f"{name}_{metric}": value for metric, value in metrics.items()}
    return calibration


def _auroc(arrays: dict[str, np.ndarray], classes: dict[str, list[float]]) -> dict[str, float]:
    """Areas under the ROC curve of targets with two classes, of which the second is the positive one."""
    areas = {}
    for name, values in classes.items():
        labelled = ~np.isnan(arrays[f"{name}_ref"])
        area = auroc(arrays[f"{name}_prob"][labelled, -1], arrays[f"{name}_ref"][labelled] == values[-1])
        if len(values) == 2 and area is not None:
            areas[f"{name}_auroc"] = area
    return areas


def load_shared(run: Run, which: str, device: str, ranks: Ranks, head: str | None = None) -> nn.Module:
    """The trained model, or one branch of it, on every rank; only rank 0 reads it from disk, unless it is an ensemble."""
    if ranks.world_size == 1 or run.members:
        return run.load_model(which, device, head=head)
    potential = run.load_model(which, "cpu", head=head) if ranks.is_rank_zero else None
    resolved = run.info["model"] if head is None else single_branch(run.info["model"], None, head)[0]
    recipe = ranks.broadcast((resolved, run.info["precision"], potential.state_dict()) if potential else None)
    if potential is None:
        potential = build_from_options(recipe[0], recipe[1], run.trust)
        potential.load_state_dict(recipe[2])
    return potential.to(device).eval()


def _origins(dataset: GraphDataset) -> dict[str, np.ndarray]:
    """The file of each frame, as an index into a list of files, and the index of the frame in that file."""
    origins = dataset.frames.origins(np.arange(len(dataset)))
    files = list(dict.fromkeys(file for file, _ in origins))
    number = {file: i for i, file in enumerate(files)}
    return {
        "files": np.array([_short(file) for file in files], dtype=np.str_),
        "frame_file": np.array([number[file] for file, _ in origins], dtype=np.int64),
        "frame_index": np.array([index for _, index in origins], dtype=np.int64),
    }


def require_test_data(
    run: Run, configured: float | str | list[Any] | dict[str, Any] | None
) -> str | list[Any] | dict[str, Any]:
    """`configured`, the `data.test` of a run or of a command line; raises if it does not name data."""
    advice = f"name {'snapshots with --data SNAPSHOTS' if run.of_points else 'files with --data FILE'}."
    if configured is None or configured == []:
        raise ForgefieldError(f"Run {run.name} has no data.test; {advice}")
    if isinstance(configured, (int, float)):
        samples = "points" if run.of_points else "frames"
        raise ForgefieldError(
            f"data.test={configured} of run {run.name} holds back {samples} of data.train, which were evaluated at the end of "
            f"the training (test.json); for other data, {advice}"
        )
    return configured


def name_of_test(run: Run, data: object, *, which: str, head: str | None = None, title: str = "") -> str:
    """Name under which results on `data` are stored.

    For the data of `data.test` it is the name of that set, otherwise the title or the first file of the data. A number is added
    if there are results of other data or weights with this name, so that they are not overwritten.
    """
    identity = _identity(data, which, head)
    configured = run.config.data.test
    names = [name for name, files in test_sets(configured).items() if _identity(files, "best", None) == identity]
    if names:
        return names[0]
    first = data[0] if isinstance(data, (list, tuple)) else data
    first = first.get("path", first) if isinstance(first, dict) else first
    words = [
        title or Path(str(first)).stem,
        *([head] if head is not None else []),
        *([which] if which != "best" else []),
    ]
    stem = "test-" + re.sub(r"[^A-Za-z0-9_.+-]+", "-", "-".join(words))
    candidates = chain(
        ["test"] if configured in (None, 0) and not title else [], [stem], (f"{stem}-{number}" for number in count(2))
    )
    return next(name for name in candidates if _is_free(run, name, identity, data))


def _is_free(run: Run, name: str, identity: str, data: object) -> bool:
    """Whether there are no results of that name, or they are of the same data and weights."""
    try:
        stored = json.loads((run.path / f"{name}.json").read_text())
    except FileNotFoundError:
        return name not in test_sets(run.config.data.test) or name == "test"
    except (OSError, ValueError):
        return True  # damaged, so nothing is lost
    if "identity" not in stored:  # written by an earlier version
        return bool(stored.get("source") == _short(str(data)))
    return bool(stored["identity"] == identity)


def _identity(data: object, which: str, head: str | None) -> str:
    """A digest of files, weights and branch that does not depend on the working directory."""
    words = json.dumps([_absolute(data), which, head], default=str)
    return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()


def _absolute(data: object) -> object:
    """Data with absolute paths; a list of one path is that path."""
    if isinstance(data, (str, os.PathLike)):
        return os.path.abspath(data)
    if isinstance(data, (list, tuple)):
        parts = [_absolute(item) for item in data]
        return parts[0] if len(parts) == 1 else parts
    return {key: _absolute(value) for key, value in data.items()} if isinstance(data, dict) else data


def _short(text: str) -> str:
    """A path relative to the working directory, if it is inside."""
    return text.replace(f"{Path.cwd()}{os.sep}", "")


def _source(data: object) -> str | list[str]:
    """The files of a test as `test.json` names them: one, or a list."""
    if isinstance(data, (list, tuple)):
        parts = [str(_source(item)) for item in data]
        return parts[0] if len(parts) == 1 else parts
    return _short(str(data.get("path", data) if isinstance(data, dict) else data))


def write_test(
    run: Run,
    errors: dict[str, float],
    *,
    name: str,
    data: object,
    which: str,
    head: str | None = None,
    details: dict[str, Any] | None = None,
    **counts: int,
) -> None:
    """Write errors to `NAME.json` of a run. details: other results, by key. counts: number of samples, as in `frames=100`."""
    content = {
        "source": _source(data),
        "weights": which,
        "weights_sha256": run.read_weights(which).sha256,
        **({} if head is None else {"head": head}),
        **counts,
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
        "identity": _identity(data, which, head),
        "errors": errors,
        **(details or {}),
    }
    write_atomically(run.path / f"{name}.json", json.dumps(content, indent=1) + "\n")

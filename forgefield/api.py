"""The verbs of Forgefield as Python functions: what the command line does, callable."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from forgefield.config.loading import load_config, require_training_data
from forgefield.config.schema import DataOptions
from forgefield.data.dataset import GraphDataset
from forgefield.data.readers import read_frames
from forgefield.data.species import SpeciesTable
from forgefield.deploy.ase import Calculator
from forgefield.deploy.evaluate import predict_dataset
from forgefield.deploy.predict import predict_file
from forgefield.errors import ForgefieldError
from forgefield.files import write_whole, written_whole
from forgefield.models.potential import Potential
from forgefield.report.page import write_parity_png, write_report
from forgefield.runs import Run, run_exists
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.task import TARGETS
from forgefield.training.fit import Fitted, fit
from forgefield.training.journal import Journal
from forgefield.training.summary import end_summary

__all__ = ["Calculator", "Run", "load", "load_run", "predict", "report", "run_exists", "test", "train", "train_example"]


def train(config: str | Path | dict[str, Any] | DictConfig, *overrides: str, fresh: bool = False) -> Run:
    """Train as a config says and return the run. Calling it again continues the run where it was.

    config: a YAML file, a dictionary or an OmegaConf config. overrides: `key=value` strings, as on the command line.
    fresh: start over even if the run exists; the old one is moved aside.
    """
    loaded = load_config(config, list(overrides))
    require_training_data(loaded)
    return train_with_outcome(loaded, fresh=fresh).run


def train_with_outcome(config: DictConfig, *, fresh: bool = False) -> Fitted:
    """Train, measure the best model on validation and test frames, write the report."""
    journal = Journal()
    try:
        fitted = fit(config, fresh=fresh, journal=journal)
        if fitted.outcome == "finished" or _is_unmeasured(fitted):
            _measure(fitted, config, journal)
        return fitted
    finally:
        journal.close()


def train_example(overrides: list[str] | None = None, *, fresh: bool = False) -> Fitted:
    """The built-in example: make a small data set from real physics and train on it."""
    from importlib.resources import as_file, files

    from forgefield.data.example import make_example

    with as_file(files("forgefield.config") / "presets" / "example.yaml") as path:
        folder = Path(OmegaConf.load(path).data.train).parent
        if not all((folder / name).exists() for name in ("train.extxyz", "test.extxyz")):
            print(f"Making a small data set with ASE's EMT (copper-gold alloys) in {folder} ...", flush=True)
            make_example(folder, seed=0)
        config = load_config(path, list(overrides or []))
    return train_with_outcome(config, fresh=fresh)


def load(run: str | os.PathLike[str] | Run, *, which: str = "best", device: str = "cpu") -> Potential:
    """The trained model of a run, in evaluation mode."""
    return (run if isinstance(run, Run) else Run.open(run)).load_potential(which, device)


def load_run(name: str | os.PathLike[str], *, out: str | os.PathLike[str] = "runs") -> Run:
    """The run of that name (or path): its config, metrics, statistics and model."""
    return Run.open(name, out=out)


def test(
    run: str | os.PathLike[str] | Run,
    data: Any,
    *,
    options: DataOptions | DictConfig | None = None,
    which: str = "best",
    device: str = "cpu",
    labels_required: bool = False,
) -> dict[str, float]:
    """Errors of a run's model on labelled frames, in meV/atom, meV/A and GPa, with a parity plot, kept in the run.

    data: a file, folder, glob or list of them. options: labels and units of that data; default: as in training.
    labels_required: whether every label that `options` names must be found in the data.
    """
    run = run if isinstance(run, Run) else Run.open(run)
    options = options if options is not None else _data_options(run)
    frames = read_frames(data, options.labels, options.units, required=labels_required)
    dataset = GraphDataset(frames, SpeciesTable(run.species), run.cutoff, options.neighbours)
    batch = options.eval_batch or options.batch.frames
    name = _test_name(run, data)
    errors = _evaluate(run, dataset, name, which=which, device=device, batch=batch)
    _write_test(run, errors, name=name, source=str(data), which=which, n_frames=len(frames))
    write_parity_png(run.path, name)
    write_report(run.path)
    return errors


def predict(
    run: str | os.PathLike[str] | Run,
    source: Any,
    out: str | os.PathLike[str],
    *,
    options: DataOptions | DictConfig | None = None,
    which: str = "best",
    device: str = "cpu",
    labels_required: bool = False,
) -> Path:
    """Write the structures of `source` with predicted energies, forces and stress to `out`.

    options: units and labels of `source`, which needs none; labels that are there are kept beside the predictions.
    labels_required: whether every label that `options` names must be there.
    """
    run = run if isinstance(run, Run) else Run.open(run)
    options = options if options is not None else _data_options(run)
    potential = run.load_potential(which, device)
    return predict_file(
        potential, source, Path(out), labels=options.labels, units=options.units, labels_required=labels_required
    )


def report(run: str | os.PathLike[str] | Run) -> Path:
    """Write `report.html` of a run anew."""
    run = run if isinstance(run, Run) else Run.open(run)
    return write_report(run.path)


# ---- after training


def _is_unmeasured(fitted: Fitted) -> bool:
    """A complete run whose measurement was interrupted, or is asked for with other test data."""
    if fitted.outcome != "complete":
        return False
    needs_test = fitted.data.test is not None and not (fitted.run.path / "test.json").exists()
    return needs_test or not (fitted.run.path / "report.html").exists() or "data.test" in fitted.changed


def _measure(fitted: Fitted, config: DictConfig, journal: Journal) -> None:
    run, data = fitted.run, fitted.data
    batch = config.data.eval_batch or config.data.batch.frames
    device = "cuda" if torch.cuda.is_available() and config.trainer.get("accelerator", "auto") != "cpu" else "cpu"
    results: dict[str, dict[str, float]] = {}
    for split, dataset in (("val", data.val), ("test", data.test)):
        if dataset is not None:
            results[split] = _evaluate(run, dataset, split, which="best", device=device, batch=batch)
    if data.test is not None:
        _write_test(
            run, results["test"], name="test", source=str(config.data.test), which="best", n_frames=len(data.test)
        )
    write_report(run.path)
    hints = [
        f"from forgefield import Calculator; atoms.calc = Calculator({str(run.path)!r})",
        f"forgefield predict {run.path} structures.extxyz -o predicted.extxyz",
        f"report: {run.path / 'report.html'}",
    ]
    journal.show(lambda console: end_summary(console, run.path, results, hints))


def _evaluate(run: Run, dataset: GraphDataset, split: str, *, which: str, device: str, batch: int) -> dict[str, float]:
    """Predict a data set, keep the predictions in the run, give the errors."""
    if not any(getattr(frame, name) is not None for frame in dataset.frames for name in TARGETS):
        raise ForgefieldError(
            "None of these frames carries energy, forces or stress, so there is nothing to compare with; "
            "use forgefield predict."
        )
    labels = {
        name for name in ("energy", "forces", "stress") if any(getattr(f, name) is not None for f in dataset.frames)
    }
    arrays = predict_dataset(
        run.load_potential(which, device),
        dataset,
        forces="forces" in labels,
        stress="stress" in labels,
        device=device,
        batch=batch,
    )
    (run.path / "predictions").mkdir(exist_ok=True)
    with written_whole(run.path / "predictions" / f"{split}.npz") as partial:
        np.savez_compressed(partial, allow_pickle=False, **arrays)
    names = tuple(name for name in ("energy", "forces", "stress") if name in labels)
    metrics = ErrorMetrics(names, run.species)
    tensors = {key: torch.from_numpy(np.ascontiguousarray(arrays[key])) for key in arrays if key != "species_symbols"}
    metrics.update(
        {name: tensors[f"{name}_pred"] for name in names},
        {
            **{name: tensors[f"{name}_ref"] for name in names},
            "n_atoms": tensors["n_atoms"],
            "species": tensors["species"],
        },
    )
    return metrics.compute()


def _test_name(run: Run, data: Any) -> str:
    """`test` for a run without test frames of its own, so that its report has them; else the name of the file."""
    if run.config.get("data", {}).get("test") in (None, 0):
        return "test"
    first = data[0] if isinstance(data, (list, tuple)) else data
    return f"test-{re.sub(r'[^A-Za-z0-9_.-]+', '-', Path(str(first)).stem)}"


def _write_test(run: Run, errors: dict[str, float], *, name: str, source: str, which: str, n_frames: int) -> None:
    source = source.replace(f"{Path.cwd()}{os.sep}", "")  # shorter, and no business of a report's reader
    content = {"source": source, "weights": which, "frames": n_frames, "errors": errors}
    write_whole(run.path / f"{name}.json", json.dumps(content, indent=1) + "\n")


def _data_options(run: Run) -> Any:
    """The data section of the run; for an imported model, the defaults."""
    stored = run.config.get("data")
    return stored if stored is not None else OmegaConf.structured(DataOptions)

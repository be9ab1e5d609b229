"""`forgefield learn`: explore, select, label and train until the model is certain wherever it goes.

All results are files in the folder of the loop, each written atomically when it is complete; the loop looks for the first one
that is missing. It can therefore be killed at any moment and resumed by the same command, without computing a label twice.

    OUT/NAME/loop.json                         options
    OUT/NAME/iteration-03/explore/             candidates and records of all simulations
    OUT/NAME/iteration-03/selected.extxyz      structures to label
    OUT/NAME/iteration-03/labels/              one file per label, or the reason why there is none
    OUT/NAME/iteration-03/labelled.extxyz      all labels of the iteration
    OUT/NAME/runs/iteration-03                 the model trained with them
    OUT/NAME/history.json, learning.html       the learning history
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from rich.console import Console

from forgefield.config.loading import load_config
from forgefield.data.options import LabelOptions as LabelNames
from forgefield.data.options import UnitOptions
from forgefield.errors import ForgefieldError
from forgefield.files import write_atomically, written_atomically
from forgefield.inference.uncertainty import has_uncertainty
from forgefield.inference.xyz_files import write_extxyz
from forgefield.parallel.ranks import single_process
from forgefield.report.analysis import errors, predictions_from_npz
from forgefield.runs import Run
from forgefield.settings import Config
from forgefield.text import counted
from forgefield.training.run.journal import Journal
from forgefield.training.trainer import requested_processes
from forgefield.trust.ensembles import UNFINISHED, train_run
from forgefield.trust.loop.explore import Explored, explore, unit_of
from forgefield.trust.loop.history import write_learning_page
from forgefield.trust.loop.label import label_structures
from forgefield.trust.loop.options import RANDOM, LoopOptions, load_loop
from forgefield.trust.selection import select_frames
from forgefield.trust.structures import read_structures
from forgefield.trust.suitability import require_suitable_config
from forgefield.trust.uncertainty import fit_uncertainty
from forgefield.tuning.options import override

FREE_TO_CHANGE = ("iterations",)
"""Options that may be changed when a loop is resumed."""


@dataclass
class Learning:
    """The result of `forgefield.learn`. run: the last model. history: one record per iteration."""

    folder: Path
    run: Run
    converged: bool
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def labels(self) -> int:
        """Number of labels that were computed."""
        return sum(record["labelled"] for record in self.history)

    def __repr__(self) -> str:
        state = "converged" if self.converged else "not converged"
        rows = "".join(f"\n  {describe(record)}" for record in self.history)
        return f"Learning({str(self.folder)!r}, {state}, {counted(self.labels, 'label')}){rows}"


def run_loop(
    source: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    device: str = "cpu",
    notify: Callable[[str], None] = lambda text: None,
) -> Learning:
    """Run or resume the loop of a file; see `forgefield.learn`."""
    options = load_loop(Path(source), overrides)
    loop = _Loop(options, device, notify)
    loop.open()
    run = loop.first_model()
    for iteration in range(1, options.iterations + 1):
        if not loop.improve(run, iteration):
            notify(
                f"No structure exceeds the threshold: the loop has converged after {counted(iteration - 1, 'iteration')}."
            )
            return Learning(options.folder, run, True, loop.history)
        run = loop.train(iteration)
    ended = counted(options.iterations, "iteration")
    notify(f"The loop ended after {ended}; set iterations to a larger number to continue.")
    return Learning(options.folder, run, False, loop.history)


class _Loop:
    """The stages of a loop; each returns at once where its result exists."""

    def __init__(self, options: LoopOptions, device: str, notify: Callable[[str], None]) -> None:
        self.options, self.device, self.notify = options, device, notify
        self.folder = options.folder
        self.history: list[dict[str, Any]] = []
        self.base = load_config(str(options.config))
        self.starts: list[Atoms] = []

    def open(self) -> None:
        """Check everything that can be checked, and that the folder belongs to this loop."""
        _check_config(self.base, str(self.options.config))
        forces = self.base.task.forces if self.base.task is not None else None
        if self.options.explore.measure == "forces" and forces is not None and forces.direct:
            raise ForgefieldError(
                f"{self.options.config}: forces that are not derivatives of the energy (task.forces.direct) have no "
                "uncertainty; use explore.measure: energy."
            )
        self.starts = read_structures(self.options.explore.structures)
        for index, atoms in enumerate(self.starts):
            if self.options.explore.pressures and not all(atoms.pbc):
                raise ForgefieldError(
                    f"explore.pressures: starting structure {index} is not periodic in all directions."
                )
        self.folder.mkdir(parents=True, exist_ok=True)
        described = json.loads(json.dumps(dataclasses.asdict(self.options)))
        stored = self.folder / "loop.json"
        if not stored.exists():
            write_atomically(stored, json.dumps(described, indent=1))
            return
        before = _flat(json.loads(stored.read_text()))
        for key, value in _flat(described).items():
            if before.get(key) != value and key not in FREE_TO_CHANGE:
                raise ForgefieldError(
                    f"The loop {self.folder} was started with {key} {before.get(key)}, now it is {value}. Use the former to "
                    "resume it, or another name."
                )

    def place(self, iteration: int) -> Path:
        return self.folder / f"iteration-{iteration:02d}"

    def first_model(self) -> Run:
        """The model of iteration 0: trained on the data of the config, or on labels of the starting structures."""
        if self.base.data.train is None:
            self.notify(f"Labelling {counted(len(self.starts), 'starting structure')} ...")
            self.label(self.starts, 0)
        else:
            self._record(0)
        return self.train(0)

    def improve(self, run: Run, iteration: int) -> bool:
        """Explore with a model, select and label; False if no structure is uncertain."""
        place, began = self.place(iteration), time.monotonic()
        self.notify(f"Iteration {iteration}: exploring with {run.name} ...")
        records = explore(
            run, self.starts, self.options, iteration, place / "explore", device=self.device, notify=self._indented
        )
        self._record(iteration, records, seconds_exploring=time.monotonic() - began)
        if not any(record.candidates for record in records):
            self._write_page()
            return False
        selected = self.select(run, iteration)
        self.label(selected, iteration)
        return True

    def select(self, run: Run, iteration: int) -> list[Atoms]:
        """The structures to label."""
        path, options = self.place(iteration) / "selected.extxyz", self.options.select
        pool = [
            atoms
            for file in sorted((self.place(iteration) / "explore").glob("*.extxyz"))
            if file.stat().st_size
            for atoms in read_structures(file)
        ]
        if not path.exists():
            if options.by == RANDOM:
                random = np.random.default_rng([self.options.seed, iteration, 1])
                chosen = [pool[index] for index in np.sort(random.permutation(len(pool))[: options.frames])]
            else:
                chosen = select_frames(
                    run,
                    pool,
                    options.frames,
                    by=options.by,
                    method=options.method,
                    tolerance=options.tolerance,
                    device=self.device,
                    notify=self._indented,
                ).frames
            if not chosen:
                raise ForgefieldError(
                    f"Iteration {iteration}: all {len(pool)} uncertain structures are near-duplicates of the training data, so "
                    "that labels would not help. Raise explore.threshold, or lower select.tolerance."
                )
            with written_atomically(path) as partial:
                write_extxyz(partial, chosen)
        return read_structures(path)

    def label(self, structures: Sequence[Atoms], iteration: int) -> None:
        """Label structures and write `labelled.extxyz`."""
        place = self.place(iteration)
        place.mkdir(exist_ok=True)
        self.notify(f"Iteration {iteration}: labelling {counted(len(structures), 'structure')} ...")
        labelled, failed = label_structures(structures, self.options.label, place / "labels", notify=self._indented)
        if not labelled:
            reason = next(iter(failed.values()), "")
            raise ForgefieldError(
                f"Iteration {iteration}: none of {counted(len(structures), 'structure')} could be labelled. The first reason: "
                f"{reason}. Correct it, delete {place / 'labels'}, and run the same command again."
            )
        if not (place / "labelled.extxyz").exists():
            with written_atomically(place / "labelled.extxyz") as partial:
                write_extxyz(partial, labelled)
        self._record(iteration, labelled=len(labelled), failed=failed)

    def train(self, iteration: int) -> Run:
        """Train with all labels so far, and compute the uncertainties of the model."""
        config = self._config(iteration)
        run, began = Run(config.folder), time.monotonic()
        self.notify(f"Iteration {iteration}: training on {', '.join(map(_short, _as_list(config.data.train)))} ...")
        with open(os.devnull, "w") as discarded:
            silent = Console(file=discarded, force_jupyter=False)
            fitted = train_run(
                config,
                fresh=False,
                new_journal=lambda: Journal(silent),
                ranks=single_process(),
                trust_code=True,
            )
        if fitted.outcome in UNFINISHED:
            raise ForgefieldError(
                f"The training {'was stopped' if fitted.outcome == 'stopped' else 'failed'}; messages are in {run.path}. Run "
                "the same command to resume the loop."
            )
        if not run.members and not has_uncertainty(run):
            fit_uncertainty(run, device=self.device)
        self._record(iteration, errors=_errors(run), run=run.name, seconds_training=time.monotonic() - began)
        self.notify(describe(self.history[-1]))
        self._write_page()
        return run

    def _config(self, iteration: int) -> Config:
        sources = _as_list(self.base.data.train)
        sources += [
            str((self.place(number) / "labelled.extxyz").absolute())
            for number in range(iteration + 1)
            if (self.place(number) / "labelled.extxyz").exists()
        ]
        changes = {"name": f"iteration-{iteration:02d}", "out": str(self.folder / "runs"), "data.train": sources}
        if iteration > 0 and self.options.start == "weights":
            changes["model.from"] = str((self.folder / "runs" / f"iteration-{iteration - 1:02d}").absolute())
        return load_config(str(self.options.config), [override(key, value) for key, value in changes.items()])

    def _record(self, iteration: int, records: Sequence[Explored] = (), **values: Any) -> None:
        """Add to the record of an iteration, which is part of the history."""
        while len(self.history) <= iteration:
            self.history.append({"iteration": len(self.history), "labelled": 0, "failed": {}, "selected": 0})
        record = self.history[iteration]
        if records:
            uncertainties = [value for each in records for value in each.uncertainties]
            record |= {
                "simulations": len(records),
                "exploded": sum(each.status == "exploded" for each in records),
                "ended": sum(each.status == "uncertain" for each in records),
                "ps": sum(each.ps for each in records),
                "examined": len(uncertainties),
                "candidates": sum(each.candidates for each in records),
                "largest": max(uncertainties),
                "median": float(np.median(uncertainties)),
                "unit": unit_of(self.options.explore),
                "threshold": self.options.explore.threshold,
            }
        record |= values

    def _write_page(self) -> None:
        content = {"name": self.options.name, "history": self.history}
        write_atomically(self.folder / "history.json", json.dumps(content, indent=1))
        write_learning_page(self.folder, content)

    def _indented(self, text: str) -> None:
        self.notify(f"    {text}")


def describe(record: dict[str, Any]) -> str:
    """One line about an iteration."""
    parts = [f"iteration {record['iteration']}"]
    if "candidates" in record:
        parts.append(
            f"{record['candidates']} of {record['examined']} structures above the threshold (largest uncertainty "
            f"{record['largest']:.3g} {record['unit']})"
        )
    if record["labelled"]:
        failed = f", {len(record['failed'])} failed" if record["failed"] else ""
        parts.append(f"{counted(record['labelled'], 'label')}{failed}")
    measured = record.get("errors", {})
    names = {"energy_mae": "energy MAE", "forces_mae": "force MAE"}
    for split in ("val", "test"):
        shown = [
            f"{names[name]} {value:.3g} {_UNITS[name]}"
            for name, value in measured.get(split, {}).items()
            if name in names
        ]
        parts += [f"{'validation' if split == 'val' else 'test'} {', '.join(shown)}"] if shown else []
    return "; ".join(parts)


_UNITS = {"energy_mae": "meV/atom", "forces_mae": "meV/A"}


def _errors(run: Run) -> dict[str, dict[str, float]]:
    """Errors of a run on validation and test data."""
    files = {split: run.path / "predictions" / f"{split}.npz" for split in ("val", "test")}
    return {split: errors(predictions_from_npz(path)) for split, path in files.items() if path.exists()}


def _check_config(config: Config, path: str) -> None:
    """Refuse configs to which labels in eV and A under the usual names cannot be added."""
    if config.data.labels != LabelNames():
        raise ForgefieldError(
            f"{path}: data.labels is not supported in a learning loop, whose labels have the usual names."
        )
    if config.data.units != UnitOptions():
        raise ForgefieldError(f"{path}: data.units is not supported in a learning loop, whose labels are in eV and A.")
    if config.data.points is not None:
        raise ForgefieldError(f"{path}: grid points (data.points) cannot be explored with molecular dynamics.")
    if config.data.val is None:
        raise ForgefieldError(f"{path}: data.val is needed: uncertainties are calibrated with validation frames.")
    if "from" in config.model:
        raise ForgefieldError(
            f"{path}: model.from is not supported in a learning loop; it starts from weights by itself."
        )
    require_suitable_config(config, path)
    if requested_processes(config) > 1 and config.trainer.get("devices") not in (None, "auto", -1, "-1"):
        raise ForgefieldError(f"{path}: trainer.devices: a learning loop trains in one process.")


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [] if value is None else [value]


def _short(source: Any) -> str:
    """The path of data, relative to the present folder if it is inside."""
    path = Path(str(source["path"] if isinstance(source, dict) else source))
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat

"""Errors and predictions of trained models: `test` and `predict`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ase import Atoms
from ase.io import iread

from forgefield.api.sources import RunSource, Source, Structures, require_first_rank
from forgefield.data.options import DataOptions
from forgefield.data.paths import is_named
from forgefield.errors import ForgefieldError
from forgefield.evaluation import name_of_test
from forgefield.inference.ensemble import Ensemble
from forgefield.inference.predict import predict_file
from forgefield.inference.structures import as_files, has_structures
from forgefield.inference.uncertainty import with_uncertainty
from forgefield.ldos.inference.files import predict_run
from forgefield.ldos.options import ElectronOptions
from forgefield.models.potential import Potential
from forgefield.parallel.session import abort_all_on_error, current_ranks
from forgefield.report.page import write_report
from forgefield.results import Errors
from forgefield.runs import Run


def test(
    run: RunSource,
    data: Source | Structures | Mapping[str, Source | Structures],
    *,
    options: DataOptions | None = None,
    which: str = "best",
    device: str = "cpu",
    labels_required: bool = False,
    head: str | None = None,
    trust_code: bool = False,
    uncertainty: str | None = None,
) -> dict[str, Any]:
    """Errors of a run's model on labelled frames, in meV/atom, meV/A and GPa. They are stored in the run with a parity plot.

    Parameters
    ----------
    run
        Name or path of a run.
    data
        A file, folder, glob or list of them, or a list of `ase.Atoms` with labels, which are stored in the run; or several
        sets by name, `{"300K": "a.xyz", "600K": "b.xyz"}`, whose errors are then returned by name.
    options
        Labels and units of the data; default: as in training.
    which, device, head, trust_code
        As in `load`.
    labels_required
        Whether every label that `options` names must be in the data.
    uncertainty
        `energy` or `forces`, whose uncertainties are compared with the errors. Default: of energies, if the run has any.
    """
    ranks = current_ranks()
    with abort_all_on_error(ranks):
        run = Run.open(run, trust_code=trust_code)
        if uncertainty is not None and run.of_points:
            raise ForgefieldError(f"Run {run.name} was trained on grid points; it has no uncertainties of energies.")
        run.require_head(head)
        if ranks.is_rank_zero:
            run.writable()
        ranks.barrier()
        run = run.writable()
        if has_structures(data):
            data = as_files(data, run.path / "structures", write=ranks.is_rank_zero)
            ranks.barrier()
        options = options if options is not None else run.data_options()
        sets: Mapping[str, object] = data if isinstance(data, Mapping) and is_named(data) else {"": data}
        test_data, errors = run.kind.test.load(), {}
        for name, files in sets.items():
            results_name = name_of_test(run, files, which=which, head=head, title=name)
            errors[name] = test_data(
                run,
                files,
                options,
                results_name,
                which=which,
                device=device,
                labels_required=labels_required,
                head=head,
                ranks=ranks,
                **({} if uncertainty is None else {"uncertainty": uncertainty}),
            )
        if ranks.is_rank_zero:
            write_report(run.path)
        units = run.units | (run.kind.error_units.load() if run.kind.error_units is not None else {})
        shown = {name: Errors(values, units) for name, values in errors.items()}
        return shown if is_named(data) else shown[""]


def predict(
    run: RunSource,
    source: Source | Structures,
    out: str | os.PathLike[str] | None = None,
    *,
    options: DataOptions | None = None,
    which: str = "best",
    device: str = "cpu",
    labels_required: bool = False,
    head: str | None = None,
    electrons: ElectronOptions | None = None,
    overwrite: bool = False,
    batch: int | None = None,
    notify: Callable[[str], None] = lambda text: None,
    trust_code: bool = False,
    uncertainty: str | None = None,
    ensemble: Sequence[RunSource] = (),
    model_devi: str | os.PathLike[str] | None = None,
    as_labels: bool = False,
) -> Path | list[Atoms]:
    """Predict the structures of `source` and return the path of the result, or without `out` the structures with predictions.

    Without `out`, the predictions are the calculator results of the structures: `atoms.get_potential_energy()` (eV),
    `atoms.get_forces()` (eV/A), `atoms.get_stress()`; labels are kept as `REF_energy` and so on.
    With `out`, a potential writes the structures with energies, forces and stress to that file; an LDOS run writes densities,
    DOS and energies to that new folder.

    Parameters
    ----------
    run
        Name or path of a run.
    source
        A file, folder, glob or list of them, or a list of `ase.Atoms`. Labels are not needed; labels and other values are kept.
    out
        File or folder to write. Default: none, for a potential.
    options
        Labels and units of `source`; default: as in training.
    which, device, head, trust_code
        As in `load`.
    labels_required
        Whether every label that `options` names must be in the data.
    electrons
        For an LDOS run, temperature and grid.
    overwrite
        Replace the file `out` if it exists.
    batch
        Number of frames predicted together; default: 16.
    notify
        Receives messages: of an LDOS run, about its predictions; on a GPU, the deviation of the evaluation engine from the
        eager model in float64.
    uncertainty
        `energy` or `forces`: also write uncertainties of energies, or of energies and forces, as `energy_uncertainty`,
        `energies_uncertainty` (of atoms) and `forces_uncertainty`. The run must have them (`forgefield uncertainty RUN`).
    as_labels
        Write training data: the predictions are read as labels, and labels of `source` are left out.
    ensemble
        Additional runs; predictions are the means of all of them, with uncertainties and DeePMD-kit's deviations.
    model_devi
        File for the deviations of an ensemble, in DeePMD-kit's format.
    """
    require_first_rank("predict")
    run = Run.open(run, trust_code=trust_code)
    run.require_head(head)
    if out is None and run.of_points:
        raise ForgefieldError(
            f"Run {run.name} was trained on grid points; name a folder for its predictions: out=FOLDER."
        )
    options = options if options is not None else run.data_options()
    with tempfile.TemporaryDirectory(prefix="forgefield-") as folder:
        files = as_files(source, Path(folder)) if has_structures(source) else source
        file = Path(folder) / "predicted.extxyz" if out is None else Path(out)
        if run.of_points:
            _refuse_options_of_potentials(run, uncertainty or ensemble, overwrite=overwrite, batch=batch)
            electrons = electrons or ElectronOptions()
            return predict_run(
                run, files, file, electrons, which=which, device=device, units=options.units, notify=notify
            )
        if electrons is not None and (changed := electrons.changed()):
            raise ForgefieldError(f"{changed[0]} is for LDOS runs; run {run.name} is a potential without electrons.")
        run.require_outputs()
        written = predict_file(
            _potential(run, ensemble, which, device, head, uncertainty, trust_code),
            files,
            file,
            batch or 16,
            labels=options.labels,
            units=options.units,
            labels_required=labels_required,
            overwrite=overwrite,
            model_devi=model_devi,
            as_labels=as_labels,
            type_map=run.type_map,
            type_names=run.type_names,
            notify=notify,
        )
        return list(iread(file, index=":")) if out is None else written


def _refuse_options_of_potentials(run: Run, uncertainty: object, *, overwrite: bool, batch: int | None) -> None:
    """Raise an error for options that do not apply to a run of grid points."""
    if uncertainty:
        raise ForgefieldError(f"Run {run.name} was trained on grid points; it has no uncertainties of energies.")
    if overwrite:
        raise ForgefieldError(f"--force: run {run.name} was trained on grid points and writes to a new folder only.")
    if batch is not None:
        raise ForgefieldError(
            f"data.batch.frames: run {run.name} was trained on grid points and predicts one structure at a time."
        )


def _potential(
    run: Run,
    ensemble: Sequence[RunSource],
    which: str,
    device: str,
    head: str | None,
    uncertainty: str | None,
    trust_code: bool,
) -> Potential:
    """The model of a run, with uncertainties if requested, or that of an ensemble."""
    if not ensemble:
        return with_uncertainty(run.load_potential(which, device, head=head), run, which, uncertainty, head)
    if head is not None:
        raise ForgefieldError("--head: the members of an ensemble have one energy each.")
    return Ensemble([run, *ensemble], which=which, device=device, trust_code=trust_code)

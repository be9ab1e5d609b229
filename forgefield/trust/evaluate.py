"""`forgefield evaluate`: properties of crystals, molecules or liquids with a model and a reference, as JSON and a page.

Every finished evaluation is stored in a file, so that an interrupted command resumes after the last one; simulations inside an
evaluation are continued exactly. Stored results of another model, structure, option or reference are not used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ase import Atoms
from ase.build import bulk
from ase.calculators.calculator import BaseCalculator
from ase.calculators.calculator import CalculatorError as AseError
from ase.data import atomic_numbers, reference_states

from forgefield.config.checking import typed_section
from forgefield.config.components import import_class
from forgefield.config.nearest import did_you_mean
from forgefield.config.trust import CONFIG
from forgefield.data.options import DataOptions
from forgefield.errors import ForgefieldError
from forgefield.files import write_atomically
from forgefield.report.evaluation_page import write_evaluation_page
from forgefield.runs import Run, run_exists
from forgefield.trust.dynamics import forget_structures
from forgefield.trust.structures import digest, read_labelled, read_structures, require_species
from forgefield.trust.suites import crystal, labelled, molecule, motion, pairs
from forgefield.trust.suites.measurement import Evaluation, EvaluationOptions, Measurement, NotApplicable, Setting
from forgefield.trust.verbs import Arguments, model_identity, open_calculator

_LABELS = Evaluation("labels", "Labelled frames", labelled.errors_on_frames, per_structure=False)
_DIMERS = Evaluation("dimers", "Dimers", pairs.dimers, per_structure=False)
_NVE = Evaluation("nve", "Energy conservation", motion.energy_conservation)
_NVT = Evaluation("nvt", "Stability", motion.stability)
SUITES: dict[str, tuple[Evaluation, ...]] = {
    "crystal": (
        _LABELS,
        _DIMERS,
        Evaluation("eos", "Equation of state", crystal.equation_of_state),
        Evaluation("elastic", "Elastic constants", crystal.elastic_constants),
        Evaluation("phonons", "Phonons", crystal.phonons),
        Evaluation("vacancy", "Vacancy", crystal.vacancy),
        Evaluation("surfaces", "Surfaces", crystal.surfaces),
        Evaluation("relaxation", "Relaxation of a shaken cell", crystal.shaken_crystal),
        _NVE,
        _NVT,
    ),
    "molecule": (
        _LABELS,
        _DIMERS,
        Evaluation("relaxation", "Relaxation of a shaken molecule", molecule.shaken_molecule),
        Evaluation("vibrations", "Vibrations", molecule.vibrations),
        Evaluation("dihedrals", "Dihedral scans", molecule.dihedral_scans),
        _NVE,
        _NVT,
    ),
    "liquid": (
        _LABELS,
        _DIMERS,
        _NVE,
        Evaluation("liquid", "Liquid in nvt", motion.liquid),
        Evaluation("density", "Density in npt", motion.density),
    ),
}
DEFAULT_FRAMES = 1
"""Structures taken from the training data if none are named."""


@dataclass
class EvaluationReport:
    """The result of `forgefield.evaluate`. results: one dictionary per requested evaluation and structure, as in
    `evaluation.json`, which has the stored results of other evaluations as well."""

    folder: Path
    suite: str
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failed(self) -> list[dict[str, Any]]:
        """The evaluations that ended with an error."""
        return [result for result in self.results if result["status"] == "failed"]

    @property
    def page(self) -> Path:
        return self.folder / "evaluation.html"

    def values(self) -> dict[str, float]:
        """All numbers of the model, by `EVALUATION.STRUCTURE.NAME`."""
        return {
            f"{result['key']}.{value['name']}": value["model"]
            for result in self.results
            for value in result["values"]
            if value["model"] is not None
        }

    def __repr__(self) -> str:
        rows = "".join(f"\n  {line}" for result in self.results for line in summary_lines(result))
        return f"EvaluationReport({self.suite}, {str(self.page)!r}){rows}"


class Reference:
    """What results are compared with: a calculator, labelled frames, or numbers that are known.

    options: labels and units of frames.
    """

    def __init__(
        self, source: str | None, options: DataOptions, *, device: str = "cpu", trust_code: bool = False
    ) -> None:
        self.source, self.calculator, self.numbers = source, None, dict[str, float]()
        self.frames: list[Atoms] = []
        self.name = source or ""
        if source is None:
            return
        if source.endswith(".json"):
            self.numbers = _stored_numbers(Path(source))
        elif run_exists(source):
            run = Run.open(source, trust_code=trust_code)
            self.calculator, self.name = open_calculator(run, device=device), f"run {run.name}"
        elif Path(source).exists() or any(sign in source for sign in "/*?"):
            self.frames = read_labelled(source, options)
            if not any(atoms.calc is not None for atoms in self.frames):
                raise ForgefieldError(f"--reference {source}: none of {len(self.frames)} frames has labels.")
        else:
            make = import_class(source, BaseCalculator, where="--reference", trust=CONFIG, factories=True)
            self.calculator = make()

    def measure(self, evaluation: Evaluation, setting: Setting) -> Measurement | None:
        """The same evaluation with the reference calculator, or from labelled frames; None if there is nothing to compare."""
        if self.frames:
            return labelled.measured_on_frames(evaluation.name, setting)
        if self.calculator is None or evaluation is _LABELS:
            return None
        forget_structures(self.calculator)
        stem = f"{setting.stem}-reference"
        identity = f"{self.source} of {setting.identity}"
        return evaluation.measure(
            dataclasses.replace(setting, calculator=self.calculator, stem=stem, identity=identity)
        )


def run_evaluation(
    run: Run,
    options: Mapping[str, Any],
    *,
    suite: str | None = None,
    structures: Any = None,
    reference: str | None = None,
    only: Sequence[str] = (),
    out: Path | None = None,
    which: str = "best",
    device: str = "cpu",
    head: str | None = None,
    notify: Callable[[str], None] = lambda text: None,
) -> EvaluationReport:
    """Evaluate the model of a run; see `forgefield.evaluate`."""
    settings = typed_section(EvaluationOptions, options, Arguments())
    calculator = open_calculator(run, which=which, device=device, head=head)
    species = tuple(run.info["species"])
    starts, named = _structures(run, structures, suite, species)
    suite = suite or ("crystal" if all(atoms.pbc.all() for atoms in starts) else "molecule")
    evaluations = _chosen(suite, only)
    _require_kind(suite, starts)
    require_species(calculator.species, starts, named)
    compared = Reference(reference, run.data_options(), device=device, trust_code=run.trust_code)
    if not compared.frames and _LABELS.name not in only:
        evaluations = [evaluation for evaluation in evaluations if evaluation is not _LABELS]
    folder = (Path(out) if out is not None else run.writable().path / "evaluation") / suite
    folder.mkdir(parents=True, exist_ok=True)
    notify(f"{suite}: {', '.join(names := _labels(starts))} ({named}); results in {folder}")
    report = EvaluationReport(folder, suite)
    identity = model_identity(run, which, head)
    shown: list[dict[str, Any]] = []
    for evaluation in SUITES[suite]:
        for index in range(len(starts) if evaluation.per_structure else 1):
            label = names[index] if evaluation.per_structure else ""
            setting = Setting(
                structure=starts[index],
                calculator=calculator,
                options=settings,
                folder=folder,
                stem=f"{evaluation.name}-{index}",
                species=species,
                cutoff=float(run.info["cutoff"]),
                identity=identity,
                notify=lambda text: notify(f"    {text}"),
                labelled=compared.frames,
            )
            description = _description(setting, compared)
            stored = _stored_result(setting.folder / f"{setting.stem}.json", description)
            if evaluation not in evaluations:
                shown += [stored] if stored is not None else []
                continue
            result = stored or _evaluate(evaluation, setting, compared, label, description)
            report.results.append(result)
            shown.append(result)
            for line in summary_lines(result, stored=stored is not None):
                notify(line)
    about = {"run": run.name, "suite": suite, "weights": which, "reference": compared.name, "structures": names}
    content = {**about, "options": dataclasses.asdict(settings), "results": shown}
    write_atomically(folder / "evaluation.json", json.dumps(content, indent=1))
    write_evaluation_page(folder)
    return report


def _description(setting: Setting, reference: Reference) -> str:
    """A text that is different for different models, structures, options and references."""
    described = json.dumps(
        [
            setting.identity,
            digest([setting.structure]),
            dataclasses.asdict(setting.options),
            reference.source,
            reference.numbers,
            *([digest(reference.frames)] if reference.frames else []),
        ]
    )
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _evaluate(
    evaluation: Evaluation, setting: Setting, reference: Reference, label: str, description: str
) -> dict[str, Any]:
    """The result of an evaluation, which is stored unless it failed."""
    path = setting.folder / f"{setting.stem}.json"
    marker = _remove_other_trajectories(setting, description)
    began = time.monotonic()
    result: dict[str, Any] = {
        "key": f"{evaluation.name}.{label}" if label else evaluation.name,
        "name": evaluation.name,
        "title": evaluation.title,
        "structure": label,
        "description": description,
        "status": "done",
        "values": [],
        "panels": [],
        "notes": [],
    }
    try:
        forget_structures(setting.calculator)
        measured = evaluation.measure(setting)
        compared = reference.measure(evaluation, setting)
        result |= _paired(result["key"], measured, compared, reference)
    except NotApplicable as reason:
        result |= {"status": "skipped", "notes": [f"Skipped: {reason}."]}
    except (ForgefieldError, AseError, RuntimeError, ValueError, NotImplementedError) as error:
        result |= {
            "status": "failed",
            "notes": [f"Failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"],
        }
    result["seconds"] = time.monotonic() - began
    if result["status"] != "failed":
        write_atomically(path, json.dumps(result))
        marker.unlink()
    return result


def _remove_other_trajectories(setting: Setting, description: str) -> Path:
    """Delete trajectories of other evaluations, unless this one was interrupted: then a file has its description.

    Returns the path of that file, which is to be deleted when the evaluation is finished.
    """
    marker = setting.folder / f"{setting.stem}.started"
    if marker.exists() and marker.read_text() == description:
        return marker
    for path in setting.folder.glob(f"{setting.stem}*.extxyz*"):
        path.unlink()
    return write_atomically(marker, description)


def _paired(key: str, model: Measurement, reference: Measurement | None, numbers: Reference) -> dict[str, Any]:
    """Values and panels of the model next to those of the reference."""
    values = []
    for name, (value, unit) in model.values.items():
        other = reference.values.get(name, (None, unit))[0] if reference else numbers.numbers.get(f"{key}.{name}")
        values.append({"name": name, "unit": unit, "model": value, "reference": other})
    panels = []
    for panel in model.panels:
        described = dataclasses.asdict(panel)
        titles = [other.title for other in reference.panels] if reference else []
        matching = reference.panels[titles.index(panel.title)] if reference and panel.title in titles else None
        described["reference"] = [dataclasses.asdict(each) for each in matching.curves] if matching else []
        panels.append(described)
    notes = list(model.notes) + [f"Reference: {note}" for note in (reference.notes if reference else [])]
    return {"values": values, "panels": panels, "notes": notes}


def summary_lines(result: dict[str, Any], *, stored: bool = False) -> list[str]:
    """Lines about one evaluation for the terminal. stored: whether it was done by an earlier call."""
    title = f"{result['title']}{', ' if result['structure'] else ''}{result['structure']}"
    duration = "stored" if stored else f"{result.get('seconds', 0.0):.1f} s"
    lines = [f"{title} ({duration})"]
    for value in result["values"]:
        shown = "none" if value["model"] is None else f"{value['model']:.6g} {value['unit']}".rstrip()
        other = "" if value["reference"] is None else f"   (reference {value['reference']:.6g})"
        lines.append(f"    {value['name']}: {shown}{other}")
    return lines + [f"    {note}" for note in result["notes"]]


# ---- input


def _chosen(suite: str, only: Sequence[str]) -> list[Evaluation]:
    if suite not in SUITES:
        raise ForgefieldError(f"--suite {suite}: there is no such suite; use {', '.join(SUITES)}.")
    names = [evaluation.name for evaluation in SUITES[suite]]
    for name in only:
        if name not in names:
            hint = did_you_mean(name, names) or f" The suite {suite} has {', '.join(names)}."
            raise ForgefieldError(f"--only {name}: there is no such evaluation.{hint}")
    return [evaluation for evaluation in SUITES[suite] if not only or evaluation.name in only]


def _structures(run: Run, named: Any, suite: str | None, species: Sequence[str]) -> tuple[list[Atoms], str]:
    """What to evaluate, and where it is from."""
    if named is not None:
        found = read_structures(named)
        if not found:
            raise ForgefieldError("--structures: there are no structures to evaluate.")
        return found, str(named) if not isinstance(named, (list, Atoms)) else "structures"
    if suite in (None, "crystal") and (crystals := elemental_crystals(species)):
        return crystals, "crystals of the elements; name others with --structures"
    source = run.config.data.train
    if not source:
        raise ForgefieldError(f"Name structures to evaluate: --structures FILE. Run {run.name} has no training data.")
    return read_structures(source, DEFAULT_FRAMES), "first frame of the training data; name others with --structures"


def elemental_crystals(species: Sequence[str]) -> list[Atoms]:
    """Primitive cells of those elements whose crystals are simple, with experimental lattice constants."""
    found = []
    for symbol in species:
        state = reference_states[atomic_numbers[symbol]]
        if state and state["symmetry"] in ("fcc", "bcc", "hcp", "diamond"):
            found.append(bulk(symbol))
    return found


def _require_kind(suite: str, structures: Sequence[Atoms]) -> None:
    for index, atoms in enumerate(structures):
        if suite in ("crystal", "liquid") and not all(atoms.pbc):
            raise ForgefieldError(
                f"structure {index}: the suite {suite} needs structures that are periodic in all directions."
            )
        if suite == "molecule" and any(atoms.pbc):
            raise ForgefieldError(
                f"structure {index}: the suite molecule needs structures without periodic directions."
            )


def _labels(structures: Sequence[Atoms]) -> list[str]:
    """A name for each structure: that in its file, or its formula; numbered where they are equal."""
    names = [
        str(atoms.info.get("name") or atoms.get_chemical_formula(empirical=bool(atoms.pbc.all())))
        for atoms in structures
    ]
    return [name if names.count(name) == 1 else f"{name} {index}" for index, name in enumerate(names)]


def _stored_result(path: Path, description: str) -> dict[str, Any] | None:
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return stored if isinstance(stored, dict) and stored.get("description") == description else None


def _stored_numbers(path: Path) -> dict[str, float]:
    """Numbers by `EVALUATION.STRUCTURE.NAME`: of an `evaluation.json`, or a mapping of such names to numbers."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ForgefieldError(f"--reference {path}: the file cannot be read as JSON.") from error
    if isinstance(content, dict) and isinstance(content.get("results"), list):
        return EvaluationReport(path.parent, "", content["results"]).values()
    if not isinstance(content, dict) or not all(isinstance(value, (int, float)) for value in content.values()):
        raise ForgefieldError(
            f"--reference {path}: it should be an evaluation.json, or a mapping such as {{'eos.Cu.volume': 11.8}}."
        )
    return {str(name): float(value) for name, value in content.items()}

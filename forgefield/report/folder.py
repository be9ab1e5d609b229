"""What a run folder holds, read for the report.

Every file may be absent, cut off or damaged. Reading never fails for that reason: what could not be read is left out
and listed in `RunData.notes` with what is wrong and what makes the file. Nothing is unpickled.
"""

from __future__ import annotations

import csv
import json
import math
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from forgefield.config.test_sets import title
from forgefield.config.trust import code_of_model
from forgefield.diagnosis.records import read_records
from forgefield.errors import ForgefieldError
from forgefield.kinds import FRAMES, KINDS, POINTS, SampleKind
from forgefield.report.numbers import shorten
from forgefield.runs import RUN_JSON
from forgefield.untrusted.archives import npz_arrays
from forgefield.untrusted.documents import load_yaml
from forgefield.weights import read_weights

SPLITS = ("test", "val")
Row = dict[str, float]


@dataclass(frozen=True)
class Note:
    """One file that is not (wholly) there. `remedy` is a command or a sentence that makes it."""

    file: str
    problem: str
    remedy: str
    is_command: bool = False


@dataclass(frozen=True)
class Predictions:
    """Predictions and references of one split; an array is None where the file has none, NaN where a label is missing.

    energy_*: (n_frames,), eV. forces_*: (n_atoms, 3), eV/A. stress_*: (n_frames, 3, 3), eV/A^3.
    species: (n_atoms,), index into `symbols`. n_atoms: (n_frames,).
    """

    n_atoms: np.ndarray
    species: np.ndarray | None
    symbols: tuple[str, ...]
    energy_pred: np.ndarray | None
    energy_ref: np.ndarray | None
    forces_pred: np.ndarray | None
    forces_ref: np.ndarray | None
    stress_pred: np.ndarray | None
    stress_ref: np.ndarray | None
    extra_outputs: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """Prediction and reference of further outputs, by name."""
    files: tuple[str, ...] = ()
    frame_file: np.ndarray | None = None
    frame_index: np.ndarray | None = None
    """(n_frames,) each: the file of a frame, an index into `files`, and its index in that file."""

    def origin(self, frame: int) -> tuple[str, int]:
        """File of a frame and its index there; an empty name where only its place among the predictions is known."""
        if self.frame_file is None or self.frame_index is None:
            return "", frame
        return self.files[self.frame_file[frame]], int(self.frame_index[frame])

    def frame_of_atom(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.n_atoms)), self.n_atoms)


@dataclass
class RunData:
    path: Path
    info: dict[str, Any] = field(default_factory=dict)
    config_text: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[Row] = field(default_factory=list)
    timing: list[Row] = field(default_factory=list)
    predictions: dict[str, Predictions] = field(default_factory=dict)
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What `test.json` and every `test-NAME.json` hold, by their stem: where the data came from, which weights, the errors."""
    diagnosis: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Records of diagnosis callbacks, by name."""
    notes: list[Note] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def argument(self) -> str:
        """The run as one would name it on the command line."""
        return f"{self.path.parent.name}/{self.path.name}" if self.path.parent.name else self.path.name

    @property
    def splits(self) -> list[str]:
        """Data with errors to show: the tests, then validation."""
        return [*self.tests, *(["test"] if "test" in self.predictions and "test" not in self.tests else []), "val"]

    def test_errors(self, name: str) -> dict[str, float]:
        """Errors of one test by bare name (`forces_mae`)."""
        return _errors_of(self.tests.get(name, {}))

    @property
    def monitor(self) -> str:
        training = self.config.get("training")
        monitor = training.get("monitor") if isinstance(training, dict) else None
        return monitor if isinstance(monitor, str) else "val/loss"

    @property
    def kind(self) -> SampleKind:
        """The kind of samples that it was trained on."""
        return KINDS.get(str(self.info.get("samples")), FRAMES)

    @property
    def of_points(self) -> bool:
        """Whether it was trained on points of a grid."""
        return self.kind is POINTS

    @property
    def needs_code(self) -> bool:
        """Whether its model is code that is not Forgefield's, so that opening it needs permission."""
        model = self.info.get("model")
        return isinstance(model, dict) and any(code_of_model(model))

    @property
    def has_energy(self) -> bool:
        return not self.of_points and self._predicted("energy") is not False

    @property
    def heads(self) -> dict[str, str]:
        """Further outputs of the model that are values, and their units; of points, everything that is measured."""
        if self.kind.error_units is not None:
            units, stored = self.kind.error_units.load(), self.info.get("units")
            return units | ({str(k): str(v) for k, v in stored.items()} if isinstance(stored, dict) else {})
        found = self._predicted("heads")
        if not isinstance(found, dict):
            return {}
        values = {
            name: head
            for name, head in found.items()
            if isinstance(head, dict) and head.get("classes") is None and name not in ("forces", "denoise")
        }
        return {str(name): str(head.get("unit", "")) for name, head in values.items()}

    def _predicted(self, what: str) -> Any:
        """What `run.json` says of a model with further outputs."""
        found: Any = self.info
        for key in ("model", "predicts", what):
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def note(self, file: str) -> Note | None:
        return next((note for note in self.notes if note.file == file), None)


def read_run(path: Path) -> RunData:
    """All there is in the folder; raises only where the folder itself is not there."""
    path = Path(path).resolve()
    if not path.is_dir():
        raise ForgefieldError(f"{path} is not a run folder; `forgefield train` makes one under `runs/`.")
    run = RunData(path)
    run.info = _read_info(run)
    _read_config(run)
    run.metrics = _read_metrics(run)
    run.timing = _read_csv(run, "timing.csv", "`forgefield train` adds a row after every epoch")
    # The files count epochs from zero; people, and the progress display, count from one.
    for row in (*run.metrics, *run.timing):
        if "epoch" in row:
            row["epoch"] += 1
    _read_tests(run)
    for split in [*run.tests, "val"] if not run.of_points else []:
        _read_predictions(run, split)
    run.diagnosis = read_records(run.path)
    return run


def _read_tests(run: RunData) -> None:
    """Results of all tests that were computed with the weights the run has now; those without a name come first."""
    named = sorted(path.name for path in run.path.glob("test-*.json"))
    if (run.path / "test.json").exists() or not named:
        named.insert(0, "test.json")
    outdated = False
    for name in named:
        content = _read_json(run, name, _test_command(run), is_command=True)
        if _is_outdated(run, content):
            outdated = True
            note = "was computed with earlier weights of this run"
            run.notes.append(Note(name, note, _test_command(run), is_command=True))
        elif content or (name == "test.json" and (run.path / "predictions" / "test.npz").exists()):
            run.tests[name.removesuffix(".json")] = content
    if not run.tests and not run.of_points and not outdated:
        _read_predictions(run, "test")


def _is_outdated(run: RunData, test: dict[str, Any]) -> bool:
    """Whether results were computed with other weights than the run has now."""
    stored, which = test.get("weights_sha256"), test.get("weights")
    if not isinstance(stored, str) or which not in ("best", "last"):
        return False
    try:
        return read_weights(run.path / "checkpoints" / f"{which}.safetensors").sha256 != stored
    except ForgefieldError:
        return False


def predictions_from_npz(file: str | os.PathLike[str]) -> Predictions:
    """Read and check one predictions file; raises ForgefieldError that names the array that does not fit."""
    file = Path(file)
    try:
        arrays = npz_arrays(file)
    except (OSError, ForgefieldError) as error:
        reason = type(error).__name__
        raise ForgefieldError(f"{file.name} cannot be read ({reason}); it is cut off or damaged") from error
    if "n_atoms" not in arrays:
        raise ForgefieldError(f"{file.name} has no array `n_atoms`")
    n_atoms = arrays["n_atoms"]
    if n_atoms.ndim != 1 or n_atoms.dtype.kind not in "iu" or (n_atoms < 0).any():
        raise ForgefieldError(f"{file.name}: `n_atoms` is not a list of whole numbers")
    frames, atoms = len(n_atoms), int(n_atoms.sum())
    shapes = {"energy": (frames,), "forces": (atoms, 3), "stress": (frames, 3, 3)}
    labels: dict[str, Any] = {}
    for quantity, shape in shapes.items():
        for kind in ("pred", "ref"):
            key = f"{quantity}_{kind}"
            array = arrays.get(key)
            # A quantity nobody predicted may be stored as an empty array.
            labels[key] = None if array is None or array.size == 0 else _checked(file, key, array, shape)
    species = arrays.get("species")
    symbols = tuple(str(symbol) for symbol in np.atleast_1d(arrays.get("species_symbols", [])))
    if species is not None:
        _checked(file, "species", species, (atoms,))
        if atoms and (species.dtype.kind not in "iu" or species.min() < 0 or species.max() >= len(symbols)):
            raise ForgefieldError(f"{file.name}: `species` does not index the {len(symbols)} `species_symbols`")
    extra_outputs = _extra_outputs(file, arrays, known=tuple(shapes), rows=(frames, atoms))
    return Predictions(
        n_atoms=n_atoms.astype(np.int64),
        species=species,
        symbols=symbols,
        extra_outputs=extra_outputs,
        **labels,
        **_origins(arrays, frames),
    )


def _origins(arrays: dict[str, np.ndarray], frames: int) -> dict[str, Any]:
    """Where frames come from; nothing where that was not stored, or does not fit."""
    file, index, names = (arrays.get(key) for key in ("frame_file", "frame_index", "files"))
    if file is None or index is None or names is None or {file.shape, index.shape} != {(frames,)}:
        return {}
    fits = file.dtype.kind in "iu" and index.dtype.kind in "iu" and names.ndim == 1 and names.dtype.kind == "U"
    if not fits or (frames and not 0 <= file.min() <= file.max() < len(names)):
        return {}
    return {"files": tuple(map(str, names)), "frame_file": file, "frame_index": index}


def _extra_outputs(
    file: Path, arrays: dict[str, np.ndarray], *, known: tuple[str, ...], rows: tuple[int, int]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Pairs of arrays `NAME_pred` and `NAME_ref` beside the known ones; rows: numbers of frames and atoms."""
    found = {}
    for key in sorted(arrays):
        name = key.removesuffix("_pred")
        if name == key or name in known or f"{name}_ref" not in arrays:
            continue
        predicted = arrays[key]
        if predicted.ndim == 0 or len(predicted) not in rows:
            raise ForgefieldError(
                f"{file.name}: `{key}` has shape {predicted.shape}, expected a row for each frame or atom"
            )
        shape = predicted.shape
        found[name] = (
            _checked(file, key, predicted, shape),
            _checked(file, f"{name}_ref", arrays[f"{name}_ref"], shape),
        )
    return found


def split_title(split: str, *, first: bool = False) -> str:
    """How the page names data: `test`, `test 300K`, `validation`. first: as the first word of a line, `Test 300K`."""
    words = "validation" if split == "val" else shorten(title(split), 60)
    return words[:1].upper() + words[1:] if first else words


def _test_command(run: RunData) -> str:
    return f"forgefield test {shlex.quote(run.argument)} --data FILE"


def _checked(file: Path, key: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if array.shape != shape or array.dtype.kind not in "fiu":
        raise ForgefieldError(f"{file.name}: `{key}` has shape {array.shape}, expected numbers of shape {shape}")
    return array


def _read_predictions(run: RunData, split: str) -> None:
    name = f"predictions/{split}.npz"
    if split.startswith("test"):
        remedy = Note(name, "is not there", _test_command(run), is_command=True)
    else:
        remedy = Note(name, "is not there", "`forgefield train` writes it when the training ends")
    if not (run.path / name).exists():
        run.notes.append(remedy)
        return
    try:
        run.predictions[split] = predictions_from_npz(run.path / name)
    except ForgefieldError as error:
        run.notes.append(Note(name, str(error), remedy.remedy, remedy.is_command))


def _read_text(run: RunData, name: str, remedy: str, *, is_command: bool = False) -> str | None:
    try:
        return (run.path / name).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        run.notes.append(Note(name, "is not there", remedy, is_command))
    except OSError as error:
        run.notes.append(Note(name, f"cannot be read: {error.strerror}", remedy, is_command))
    return None


def _read_json(run: RunData, name: str, remedy: str, *, is_command: bool = False) -> dict[str, Any]:
    content = _read_text(run, name, remedy, is_command=is_command)
    if content is None:
        return {}
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        run.notes.append(Note(name, "is cut off or not JSON, so it was left out", remedy, is_command))
        return {}
    return value


def _read_info(run: RunData) -> dict[str, Any]:
    info = _read_json(run, "run.json", "`forgefield train` writes it at its start")
    try:
        return RUN_JSON.upgrade(info, "run.json") if info else info
    except ForgefieldError as error:
        run.notes.append(Note("run.json", f"was left out: {error}", "install a newer version of Forgefield"))
        return {}


def _read_config(run: RunData) -> None:
    run.config_text = _read_text(run, "config.yaml", "`forgefield train` writes it at its start")
    if run.config_text is None:
        return
    try:
        value = load_yaml(run.config_text)
    except yaml.YAMLError:
        run.notes.append(Note("config.yaml", "is not valid YAML; it is shown below as it is", "mend the file by hand"))
        return
    run.config = value if isinstance(value, dict) else {}


def _read_metrics(run: RunData) -> list[Row]:
    remedy = "`forgefield train` adds a row after every validation"
    if not (run.path / "metrics.jsonl").exists():
        return _read_csv(run, "metrics.csv", remedy)
    rows: list[Row] = []
    damaged: list[int] = []
    for number, line in enumerate((_read_text(run, "metrics.jsonl", remedy) or "").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            rows.append(_numbers(value))
        else:
            damaged.append(number)
    _note_rows(run, "metrics.jsonl", rows, damaged, remedy)
    return rows


def _read_csv(run: RunData, name: str, remedy: str) -> list[Row]:
    content = _read_text(run, name, remedy)
    if content is None:
        return []
    rows: list[Row] = []
    damaged: list[int] = []
    try:
        table = list(csv.reader(content.replace("\0", "").splitlines()))
    except csv.Error:
        table = []
    header = table[0] if table else []
    # The last number of a row may be cut and still look like one; only the line's end tells that it is whole.
    unfinished = 0 if content.endswith("\n") else len(table)
    for number, cells in enumerate(table[1:], start=2):
        if not cells:
            continue
        if len(cells) == len(header) and number != unfinished:
            rows.append(_numbers(dict(zip(header, cells))))
        else:
            damaged.append(number)
    _note_rows(run, name, rows, damaged, remedy)
    return rows


def _note_rows(run: RunData, name: str, rows: list[Row], damaged: list[int], remedy: str) -> None:
    if damaged:
        lines = ", ".join(str(number) for number in damaged[:5]) + (" and more" if len(damaged) > 5 else "")
        plural = len(damaged) > 1
        problem = f"line{'s' if plural else ''} {lines} {'are' if plural else 'is'} cut off or damaged and left out"
        run.notes.append(Note(name, problem, remedy))
    elif not rows and run.note(name) is None:
        run.notes.append(Note(name, "has no rows yet", remedy))


def _numbers(row: dict[str, Any]) -> Row:
    """The entries of a row that are finite numbers."""
    result: Row = {}
    for key, value in row.items():
        number = as_number(value)
        if number is not None:
            result[str(key)] = number
    return result


def as_number(value: Any) -> float | None:
    """The value as a finite float, or None."""
    if value is None or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _errors_of(stored: dict[str, Any]) -> dict[str, float]:
    """Test errors by bare name (`forces_mae`), whether they were stored with `test/` in front or one level down."""
    found = _numbers(stored)
    for value in stored.values():
        if isinstance(value, dict):
            found = {**_numbers(value), **found}
    errors = {key.removeprefix("test/"): value for key, value in found.items()}
    known = ("_mae", "_rmse", "_accuracy", "_f1", "_auroc", "_cross_entropy")
    return {key: value for key, value in errors.items() if any(kind in key for kind in known)}

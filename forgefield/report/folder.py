"""The content of a run folder, read for the report.

Any file may be missing, truncated or damaged. Reading does not fail for that reason: such a file is left out and listed in
`RunData.notes` with the problem and the command that writes the file. Nothing is unpickled.
"""

from __future__ import annotations

import csv
import json
import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from forgefield.config.trust import code_of_model
from forgefield.data.paths import title
from forgefield.diagnosis.records import read_records
from forgefield.errors import ForgefieldError
from forgefield.kinds import FRAMES, KINDS, POINTS, SampleKind
from forgefield.report.analysis import Predictions, predictions_from_npz
from forgefield.report.markup import shorten
from forgefield.runs import MEMBERS, RUN_JSON
from forgefield.tasks.calibration import METRICS as CALIBRATION
from forgefield.untrusted.documents import load_yaml
from forgefield.weights import read_weights

SPLITS = ("test", "val")
Row = dict[str, float]


@dataclass(frozen=True)
class Note:
    """A file that is missing, damaged or outdated. remedy: a command that writes it, or a sentence."""

    file: str
    problem: str
    remedy: str
    is_command: bool = False


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
    """Content of `test.json` and every `test-NAME.json`, by stem: source of the data, weights and errors."""
    uncertainties: dict[str, np.ndarray] = field(default_factory=dict)
    """Of `energy` and `forces`: errors and uncertainties of validation frames (n, 2), eV per atom and eV/A."""
    diagnosis: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Records of diagnosis callbacks, by name."""
    members: dict[str, RunData] = field(default_factory=dict)
    """The runs of an ensemble, by name."""
    notes: list[Note] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def argument(self) -> str:
        """The run as an argument of a command."""
        return f"{self.path.parent.name}/{self.path.name}" if self.path.parent.name else self.path.name

    @property
    def splits(self) -> list[str]:
        """Splits whose errors are shown: the tests, then validation."""
        return [*self.tests, *(["test"] if "test" in self.predictions and "test" not in self.tests else []), "val"]

    def test_errors(self, name: str) -> dict[str, float]:
        """Errors of one test by name, without the split (`forces_mae`)."""
        return errors_of(self.tests.get(name, {}))

    @property
    def monitor(self) -> str:
        training = self.config.get("training")
        monitor = self.info.get("monitor") or (training.get("monitor") if isinstance(training, dict) else None)
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
        """Whether its model is user-defined code, so that loading it needs `--trust-code`."""
        model = self.info.get("model")
        return isinstance(model, dict) and any(code_of_model(model))

    @property
    def has_energy(self) -> bool:
        return not self.of_points and self._predicts("energy") is not False

    @property
    def heads(self) -> dict[str, str]:
        """Units of the model's extra outputs, by name; for points, of all quantities that are measured."""
        if self.kind.error_units is not None:
            units, stored = self.kind.error_units.load(), self.info.get("units")
            return units | ({str(k): str(v) for k, v in stored.items()} if isinstance(stored, dict) else {})
        heads = self._predicts("heads")
        if not isinstance(heads, dict):
            return {}
        values = {
            name: head
            for name, head in heads.items()
            if isinstance(head, dict) and head.get("classes") is None and name not in ("forces", "denoise")
        }
        return {str(name): str(head.get("unit", "")) for name, head in values.items()}

    def _predicts(self, entry: str) -> object:
        """An entry of `model.predicts` in `run.json`; None for a model without extra outputs."""
        value: object = self.info
        for key in ("model", "predicts", entry):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def note(self, file: str) -> Note | None:
        return next((note for note in self.notes if note.file == file), None)


def read_run(path: Path) -> RunData:
    """Everything in the folder; raises only where the folder does not exist."""
    path = Path(path).resolve()
    if not path.is_dir():
        raise ForgefieldError(f"{path} is not a run folder; `forgefield train` creates one under `runs/`.")
    run = RunData(path)
    run.info = _read_info(run)
    _read_config(run)
    members = run.info.get(MEMBERS)
    if isinstance(members, dict) and members:
        run.members = {name: read_run(folder) for name in members if (folder := path / MEMBERS / str(name)).is_dir()}
        run.timing = [row for member in run.members.values() for row in member.timing]
    else:
        _read_history(run)
    _read_tests(run)
    for split in [*run.tests, "val"] if not run.of_points else []:
        _read_predictions(run, split)
    run.diagnosis = read_records(run.path)
    run.uncertainties = _read_uncertainties(run)
    return run


def _read_history(run: RunData) -> None:
    """The rows of metrics and of times."""
    run.metrics = _read_metrics(run)
    run.timing = _read_csv(run, "timing.csv", "`forgefield train` adds a row after every epoch")
    # The files count epochs from zero; the page counts from one, as the progress display does.
    for row in (*run.metrics, *run.timing):
        if "epoch" in row:
            row["epoch"] += 1


def _read_uncertainties(run: RunData) -> dict[str, np.ndarray]:
    """Errors and uncertainties of validation frames; empty for a run without uncertainties of its current weights."""
    path = run.path / "uncertainty.safetensors"
    if not path.exists():
        return {}
    try:
        stored = read_weights(path)
        current = read_weights(run.path / "checkpoints" / "best.safetensors").sha256
    except ForgefieldError:
        run.notes.append(Note(path.name, "is damaged", f"forgefield uncertainty {shlex.quote(run.argument)}", True))
        return {}
    note = stored.about.get("uncertainty")
    if not isinstance(note, dict) or note.get("weights_sha256") != current:
        return {}
    found = {name: stored.state.get(f"validation_{name}") for name in ("energy", "forces")}
    return {
        name: values.numpy()
        for name, values in found.items()
        if values is not None and values.ndim == 2 and values.shape[1] == 2
    }


def _read_tests(run: RunData) -> None:
    """Read the results of all tests that used the current weights; the unnamed one comes first."""
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
    """Whether results were computed with other weights than the current ones."""
    stored, which = test.get("weights_sha256"), test.get("weights")
    if not isinstance(stored, str) or which not in ("best", "last"):
        return False
    try:
        return read_weights(run.path / "checkpoints" / f"{which}.safetensors").sha256 != stored
    except ForgefieldError:
        return False


def split_title(split: str, *, first: bool = False) -> str:
    """Name of a split on the page: `test`, `test 300K`, `validation`. first: capitalise it, `Test 300K`."""
    name = "validation" if split == "val" else shorten(title(split), 60)
    return name[:1].upper() + name[1:] if first else name


def _test_command(run: RunData) -> str:
    return f"forgefield test {shlex.quote(run.argument)} --data FILE"


def _read_predictions(run: RunData, split: str) -> None:
    name = f"predictions/{split}.npz"
    if split.startswith("test"):
        remedy = Note(name, "does not exist", _test_command(run), is_command=True)
    else:
        remedy = Note(name, "does not exist", "`forgefield train` writes it when the training ends")
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
        run.notes.append(Note(name, "does not exist", remedy, is_command))
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
        run.notes.append(Note(name, "is truncated or not JSON and was left out", remedy, is_command))
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
        run.notes.append(Note("config.yaml", "is not valid YAML; it is shown below unchanged", "correct the file"))
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
            rows.append(numbers_of(value))
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
    # A truncated last number still looks like a number: a row is complete only if its line ends.
    unfinished = 0 if content.endswith("\n") else len(table)
    for number, cells in enumerate(table[1:], start=2):
        if not cells:
            continue
        if len(cells) == len(header) and number != unfinished:
            rows.append(numbers_of(dict(zip(header, cells))))
        else:
            damaged.append(number)
    _note_rows(run, name, rows, damaged, remedy)
    return rows


def _note_rows(run: RunData, name: str, rows: list[Row], damaged: list[int], remedy: str) -> None:
    if damaged:
        lines = ", ".join(str(number) for number in damaged[:5]) + (" and more" if len(damaged) > 5 else "")
        plural = len(damaged) > 1
        problem = f"line{'s' if plural else ''} {lines} {'are' if plural else 'is'} truncated or damaged and left out"
        run.notes.append(Note(name, problem, remedy))
    elif not rows and run.note(name) is None:
        run.notes.append(Note(name, "has no rows yet", remedy))


def numbers_of(row: dict[str, Any]) -> Row:
    """The entries of a row that are finite numbers."""
    result: Row = {}
    for key, value in row.items():
        number = as_number(value)
        if number is not None:
            result[str(key)] = number
    return result


def as_number(value: object) -> float | None:
    """The value as a float; None where it is not a finite number."""
    if type(value) is float:  # almost all
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool):
        return None
    try:
        number = float(value) if isinstance(value, (str, int, float)) else float(str(value))
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def errors_of(stored: dict[str, Any]) -> dict[str, float]:
    """Test errors by name (`forces_mae`), whether they were stored with the prefix `test/` or one level down."""
    numbers = numbers_of(stored)
    for value in stored.values():
        if isinstance(value, dict):
            numbers = {**numbers_of(value), **numbers}
    errors = {key.removeprefix("test/"): value for key, value in numbers.items()}
    endings = (
        "_mae",
        "_rmse",
        "_max",
        "_accuracy",
        "_f1",
        "_auroc",
        "_cross_entropy",
        *(f"_{name}" for name in CALIBRATION),
    )
    return {key: value for key, value in errors.items() if any(kind in key for kind in endings)}

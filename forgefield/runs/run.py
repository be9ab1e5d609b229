"""A run: the folder that contains a training and everything needed to use, test or resume it.

The model is rebuilt from `run.json` and the weights, without the data it was trained on. User-defined classes named in
`run.json` are imported only with `trust_code=True`; nothing in the folder is ever executed. PyTorch is imported when weights or
a model are used, not by lists of runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from forgefield.config.checking import stored_config
from forgefield.config.nearest import did_you_mean
from forgefield.config.sources import Sources, read_yaml
from forgefield.config.trust import Trust, refuse_interpolations
from forgefield.data.neighbours.graph import GraphOptions
from forgefield.data.options import DataOptions
from forgefield.errors import ForgefieldError
from forgefield.files import write_atomically
from forgefield.formats import VERSION
from forgefield.kinds import ENSEMBLE, PLOT_RUN, POINTS, RUN_HTML, SampleKind, kind_of_model
from forgefield.models.resolved import FORCES, HEADS, NOISE, PREDICTS, TYPE_NAMES
from forgefield.results import Metrics, Predictions
from forgefield.runs.record import MEMBERS, RUN_JSON, SCALES, RunInfo
from forgefield.settings import Config
from forgefield.text import notebook_cell
from forgefield.untrusted.archives import npz_arrays
from forgefield.untrusted.documents import load_json
from forgefield.weights import Weights, read_weights

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from torch import nn

    from forgefield.models.potential import Potential

WEIGHTS = ("best", "last")
UNCERTAINTY = "uncertainty.safetensors"
"""Name of the file of a run's uncertainties, in its folder."""
PACKAGE_SUFFIX = ".ff"


class Run:
    """One run folder; open it with `Run.open(name)` or `Run.open(path)`."""

    def __init__(self, path: Path, *, trust_code: bool = False) -> None:
        self.path = Path(path)
        self.trust_code = trust_code
        """Whether code that the run names may be imported."""
        self._printed_in: int | None = None

    def results_are_printed(self) -> None:
        """The cell of a notebook that is being executed has printed the errors: they are not displayed there again."""
        self._printed_in = notebook_cell()

    def __repr__(self) -> str:
        try:
            info = self.info
        except ForgefieldError:
            return f"Run({str(self.path)!r})"
        facts = {"status": info.get("status"), "epochs": info.get("epochs"), "parameters": info.get("parameters")}
        shown = "".join(f", {name}={value}" for name, value in facts.items() if value is not None)
        return f"Run({str(self.path)!r}{shown})"

    def _repr_html_(self) -> str | None:
        if self._printed_in is not None and self._printed_in == notebook_cell():
            return None
        return str(RUN_HTML.load()(self.path))

    @classmethod
    def open(
        cls,
        run: str | os.PathLike[str] | Run,
        *,
        out: str | os.PathLike[str] = "runs",
        trust_code: bool = False,
    ) -> Run:
        """The run of that name in the folder `out`, or at that path; a `Run` is returned as it is.

        trust_code: whether code that the run names (a user's model) may be imported.
        """
        if isinstance(run, Run):
            return type(run)(run.path, trust_code=True) if trust_code else run
        name_or_path = run
        if Path(name_or_path).suffix == PACKAGE_SUFFIX and Path(name_or_path).is_file():
            from forgefield.runs.package import PackagedRun

            return PackagedRun(Path(name_or_path), trust_code=trust_code)
        for path in (Path(name_or_path), Path(out) / name_or_path):
            if (path / "run.json").is_file():
                return cls(path, trust_code=trust_code)
        names = sorted(p.parent.name for p in Path(out).glob("[!.]*/run.json"))
        hint = did_you_mean(str(name_or_path), names) or (f" Runs in {out}: {', '.join(names)}." if names else "")
        raise ForgefieldError(f"There is no run '{name_or_path}', neither as a path nor in the folder {out}.{hint}")

    @property
    def exists(self) -> bool:
        return (self.path / "run.json").is_file()

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def config(self) -> Config:
        """The settings of the run; settings that its version did not have yet are at their defaults."""
        return stored_config(self.settings, Sources(main=self.path / "config.yaml"))

    def data_options(self) -> DataOptions:
        """The section `data` of the config, with the fields that the model predicts, which a store may have declared."""
        options = self.config.data
        if options.labels.fields is None and self.heads:
            options.labels.fields = {
                name: {"per": head["per"], "shape": head["shape"], "unit": head["unit"]}
                for name, head in self.heads.items()
            }
        return options

    @property
    def settings(self) -> dict[str, Any]:
        """The content of `config.yaml`, without defaults."""
        content = read_yaml(self.path / "config.yaml")
        refuse_interpolations(content, self.path / "config.yaml")
        return content

    @property
    def trust(self) -> Trust:
        """Whether code that `run.json` names may be imported."""
        return Trust(f"run {self.name} ({self.path})", self.trust_code, never_from=self.path)

    @property
    def info(self) -> dict[str, Any]:
        """The content of `run.json`, that is versions, species, all options of the model, statistics and status."""
        path = self.path / "run.json"
        try:
            content = load_json(path.read_text())
        except (OSError, ValueError) as error:
            raise ForgefieldError(f"{path} cannot be read: {error}.") from error
        return RunInfo(path, RUN_JSON.upgrade(content, path) if isinstance(content, dict) else content)

    @property
    def species(self) -> tuple[str, ...]:
        return tuple(self.info["species"])

    @property
    def type_map(self) -> tuple[str, ...] | None:
        """Elements of the atom types of DeePMD systems that do not name them, as in the training; None if that is unknown.

        The type map of the training's sources, or else the species, where a config or an imported model states their order.
        """
        data = self.config.data
        entries = [
            entry
            for sources in (data.train, data.val)
            for entry in (sources if isinstance(sources, list) else [sources])
        ]
        stated = {
            tuple(entry["type_map"])
            for entry in entries
            if isinstance(entry, Mapping) and isinstance(entry.get("type_map"), Sequence)
        }
        if stated:
            return stated.pop() if len(stated) == 1 else None
        return self.species if data.species is not None or self.info.get("status") == "imported" else None

    @property
    def type_names(self) -> dict[str, str]:
        """Elements of atom types in DeePMD systems, by names that are not those of the elements."""
        names = (self.info.get("model") or {}).get(TYPE_NAMES) or self.species
        return {name: symbol for name, symbol in zip(names, self.species) if name != symbol}

    @property
    def names_of_species(self) -> dict[str, str]:
        """Names of atom types by element, of those that have other names."""
        return {symbol: name for name, symbol in self.type_names.items()}

    @property
    def cutoff(self) -> float:
        return float(self.info["cutoff"])

    @property
    def graph(self) -> GraphOptions:
        """Cutoff and other options of the neighbour lists of its model."""
        model = self.info["model"]
        return GraphOptions(
            self.cutoff, adaptive_cutoff=model.get("adaptive_cutoff"), max_neighbours=model.get("max_neighbours")
        )

    @property
    def heads(self) -> dict[str, dict[str, Any]]:
        """Options of the heads that predict other outputs than energy, forces and stress, by name."""
        heads = self.info["model"].get(PREDICTS, {}).get(HEADS, {})
        return {name: head for name, head in heads.items() if name not in (FORCES, NOISE)}

    @property
    def forces_are_direct(self) -> bool:
        return FORCES in self.info["model"].get(PREDICTS, {}).get(HEADS, {})

    @property
    def has_energy(self) -> bool:
        return bool(self.info["model"].get(PREDICTS, {}).get("energy", True))

    @property
    def has_outputs(self) -> bool:
        """Whether the model predicts anything; one that was only trained to predict noise does not."""
        return self.has_energy or self.forces_are_direct or bool(self.heads)

    def require_outputs(self) -> None:
        """Raise an error for a model that predicts nothing."""
        if not self.has_outputs:
            raise ForgefieldError(
                f"Run {self.name} was trained to predict noise only and has no other output; train it further (model.from)."
            )

    @property
    def kind(self) -> SampleKind:
        """The kind of samples that it was trained on: frames, or points of a grid."""
        return kind_of_model(self.info["model"].get("name"))

    @property
    def of_points(self) -> bool:
        """Whether it was trained on points of a grid, not on frames."""
        return self.kind is POINTS

    @property
    def units(self) -> dict[str, str]:
        """Units of the outputs of its heads, or of the target on grid points."""
        if self.of_points:
            return dict(self.info.get("units", {}))
        return {name: head["unit"] for name, head in self.heads.items() if head.get("classes") is None}

    @property
    def classes(self) -> dict[str, list[float]]:
        """Labels of the classes that its heads distinguish."""
        return {name: head["classes"] for name, head in self.heads.items() if head.get("classes") is not None}

    @property
    def extensive(self) -> list[str]:
        """Names of the outputs of frames whose errors are also measured per atom."""
        return [name for name, head in self.heads.items() if head.get("per_atom_errors")]

    @property
    def members(self) -> dict[str, dict[str, Any]]:
        """Options of the models of an ensemble by the name of their run; empty for a single model."""
        members: dict[str, dict[str, Any]] = self.info.get(MEMBERS, {})
        return members

    @property
    def _scales(self) -> tuple[float, float]:
        """Factors of the uncertainties of energies and forces of an ensemble; 1 if they were not calibrated."""
        stored = self.info.get(SCALES) or {}
        return float(stored.get("energy", 1.0)), float(stored.get("forces", 1.0))

    def require_single_model(self, purpose: str) -> None:
        """Raise an error for an ensemble. purpose: what needs a single model, `exported to deepmd`."""
        if names := list(self.members):
            member = self.member_path(names[0])
            advice = f"; name one of its members, {member}" if member.is_dir() else ""
            raise ForgefieldError(f"Run {self.name} is an ensemble, which cannot be {purpose}{advice}.")

    def member_path(self, name: str) -> Path:
        """The run folder of a member of an ensemble."""
        return self.path / MEMBERS / name

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def metrics(self) -> Metrics:
        """The rows of `metrics.jsonl`: a list of dictionaries. `metrics()["val/loss"]` is a column as an array, and
        `metrics().dataframe()` a pandas DataFrame."""
        path = self.path / "metrics.jsonl"
        return Metrics(json.loads(line) for line in path.read_text().splitlines()) if path.exists() else Metrics()

    def plot(self) -> Figure:
        """A matplotlib figure of the loss and of the errors over the training, in physical units."""
        return cast("Figure", PLOT_RUN.load()(self.path))

    def predictions(self, split: str = "test") -> Predictions:
        """Predictions and references of a split as arrays by name: `energy_pred`, `energy_ref` (eV), `forces_pred`,
        `forces_ref` (eV/A), `n_atoms`, ...

        split: `test`, `val`, or the name of other results (`test-NAME`).
        """
        folder = self.path / "predictions"
        suffix = "-points" if self.of_points else ""
        path = folder / f"{split}{suffix}.npz"
        if not path.is_file():
            stored = (
                ", ".join(sorted(file.stem.removesuffix(suffix) for file in folder.glob(f"*{suffix}.npz"))) or "none"
            )
            raise ForgefieldError(
                f"Run {self.name} has no predictions of '{split}'; there are: {stored}. forgefield.test(run, data) "
                "computes them."
            )
        return Predictions(npz_arrays(path), f"{split}, run {self.name}")

    def write_info(self, **changes: object) -> None:
        """Change keys of `run.json`, atomically."""
        path = self.path / "run.json"
        info = {VERSION: RUN_JSON.version, **(self.info if path.exists() else {}), **changes}
        write_atomically(path, json.dumps(info, indent=1) + "\n")

    def require_head(self, head: str | None) -> None:
        """Raise an error for a branch that the model does not have, or if none is selected and it has several."""
        from forgefield.models.resolving import branch_names, single_branch

        if head is not None or branch_names(self.info["model"]):
            single_branch(self.info["model"], None, head)

    def load_potential(
        self,
        which: str = "best",
        device: str | torch.device = "cpu",
        *,
        head: str | None = None,
        precision: str | None = None,
    ) -> Potential:
        """The trained model of frames in evaluation mode; for an ensemble, `inference.ensemble.Ensemble`.

        which: `best` (by validation) or `last`. head: a branch of a model with several, which is returned as a separate model.
        precision: of the weights and the arithmetic, `float32` or `float64`; default: as trained.
        """
        from forgefield.models.potential import Potential

        model = self.load_model(which, device, head=head, precision=precision)
        if not isinstance(model, Potential):
            raise ForgefieldError(
                f"Run {self.name} was trained on {self.kind.name}: it does not predict energies and forces."
            )
        return model

    def load_model(
        self,
        which: str = "best",
        device: str | torch.device = "cpu",
        *,
        head: str | None = None,
        precision: str | None = None,
    ) -> nn.Module:
        """The trained model in evaluation mode, for any kind of samples. Parameters: as in `load_potential`."""
        import torch

        from forgefield.runs.members import member_state

        if which not in WEIGHTS:
            raise ForgefieldError(f"Weights are 'best' or 'last', not '{which}'.")
        try:
            device = torch.device(device)
        except RuntimeError as error:
            raise ForgefieldError(f"'{device}' is not a device of torch; use cpu, cuda or cuda:0.") from error
        path, state = self.weights_path(which), self.read_weights(which).state
        info, members = self.info, self.members
        resolved, precision = info["model"], precision or info["precision"]
        try:
            if not members:
                return self._build(resolved, state, precision, head).to(device).eval()
            models = [
                self._build(resolved, member_state(state, number), precision, head).to(device).eval()
                for number, resolved in enumerate(members.values())
            ]
            return cast("nn.Module", ENSEMBLE.load()(models, device=device, scales=self._scales))
        except ForgefieldError:
            raise
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise ForgefieldError(f"{path} is damaged or belongs to another model: {reason}") from error

    def _build(
        self, resolved: dict[str, Any], state: Mapping[str, torch.Tensor], precision: str, head: str | None
    ) -> nn.Module:
        if head is not None:
            from forgefield.models.resolving import single_branch

            resolved, state = single_branch(resolved, state, head)
        _refuse_impossible_sizes(resolved, state, self.path / "run.json")
        model = build_from_options(resolved, precision, self.trust)
        model.load_state_dict(state)
        return model

    def weights_path(self, which: str) -> Path:
        return self.checkpoints / f"{which}.safetensors"

    def writable(self, out: str | os.PathLike[str] = "runs") -> Run:
        """This run; a package is unpacked first, so that results can be stored with it."""
        return self

    def read_weights(self, which: str) -> Weights:
        """The trained weights, verified against their checksum."""
        path = self.weights_path(which)
        if not path.exists():
            raise ForgefieldError(
                f"Run {self.name} has no {which} weights yet ({path} is missing); they are written at its first validation."
            )
        return read_weights(path)

    def uncertainty_path(self, head: str | None = None) -> Path:
        """The file of uncertainties; each branch of a model with several (head) has one."""
        return self.path / (UNCERTAINTY if head is None else f"uncertainty-{quote(head, safe='')}.safetensors")

    def read_uncertainty(self, head: str | None = None) -> Weights | None:
        """The content of the file of uncertainties, verified against its checksum; None if there is none."""
        path = self.uncertainty_path(head)
        return read_weights(path) if path.is_file() else None


def _refuse_impossible_sizes(
    resolved: object, state: Mapping[str, torch.Tensor], file: Path, name: str = "model"
) -> None:
    """Refuse options of a model that is far larger than its weights: building it could exhaust memory or take forever."""
    if isinstance(resolved, Mapping):
        for key, value in resolved.items():
            _refuse_impossible_sizes(value, state, file, f"{name}.{key}")
    elif isinstance(resolved, list):
        for value in resolved:
            _refuse_impossible_sizes(value, state, file, name)
    elif type(resolved) is int and "seed" not in name:
        values = sum(tensor.numel() for tensor in state.values())
        most = max(100, len(state)) if name.endswith("num_layers") else max(1000, values)
        if resolved > most:
            raise ForgefieldError(
                f"{file}: '{name}' is {resolved}, too large for the {values} numbers in the weights; one of the two files was "
                "changed. Restore the run from a backup."
            )


def build_from_options(resolved: dict[str, Any], precision: str, trust: Trust) -> nn.Module:
    """A model with initial weights. resolved: all its options."""
    build: Callable[..., nn.Module] = kind_of_model(resolved.get("name")).build_model.load()
    return build(resolved, precision=precision, seed=0, trust=trust)


def run_exists(name: str | os.PathLike[str], *, out: str | os.PathLike[str] = "runs") -> bool:
    """Whether there is a run of that name (or path) to load or resume."""
    return any((path / "run.json").is_file() for path in (Path(name), Path(out) / name))

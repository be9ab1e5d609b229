"""A run: the folder that holds a training and everything needed to use, test or continue its model.

The model is rebuilt from `run.json` and the weights, without the data it was trained on. Only Forgefield's own classes are
used, unless whoever opens the run allows the code that it names (`trust_code`); nothing in the folder is ever executed.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from forgefield._version import __version__
from forgefield.config.checking import stored_config
from forgefield.config.nearest import did_you_mean
from forgefield.config.schema import Config
from forgefield.config.sources import Sources, read_yaml
from forgefield.config.template import plain_yaml
from forgefield.config.trust import Trust, refuse_interpolations
from forgefield.data.neighbours.graph import GraphOptions
from forgefield.errors import ForgefieldError
from forgefield.files import write_atomically
from forgefield.formats import VERSION, Format
from forgefield.kinds import POINTS, SampleKind, kind_of_model
from forgefield.models.potential import Potential
from forgefield.models.predictor import FORCES, NOISE
from forgefield.models.resolving import HEADS, PREDICTS, branch_names, single_branch
from forgefield.untrusted.documents import load_json
from forgefield.weights import Weights, read_weights, write_weights

WEIGHTS = ("best", "last")


def _explicit_defaults(info: dict[str, Any]) -> dict[str, Any]:
    """Version 1 of `run.json` to version 2: what the first runs did not record, whose split could
    leave a species out of training."""
    return {"keep_species": False, **info}


RUN_JSON = Format("the record of a run", (_explicit_defaults,))
"""The format of `run.json`."""


class RunInfo(dict[str, Any]):
    """Content of a `run.json`, whose entries have the right types; a missing one is an error when it is asked for."""

    TYPES: ClassVar[dict[str, tuple[type | tuple[type, ...], str]]] = {
        "model": (dict, "a mapping of options"),
        "species": (list, "a list of elements"),
        "cutoff": ((int, float), "a number"),
        "precision": (str, "text"),
        "status": (str, "text"),
    }

    def __init__(self, path: Path, content: Any) -> None:
        self._path = path
        if not isinstance(content, dict):
            raise ForgefieldError(f"{path} is not the record of a run: it should hold a mapping.")
        for name, (kind, expected) in self.TYPES.items():
            value = content.get(name)
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise ForgefieldError(f"{path} is damaged: '{name}' should be {expected}, not {value!r:.60}.")
        predicts = (content.get("model") or {}).get(PREDICTS, {})
        heads = predicts.get(HEADS, {}) if isinstance(predicts, dict) else None
        if not isinstance(heads, dict) or not all(isinstance(head, dict) for head in heads.values()):
            raise ForgefieldError(f"{path} is damaged: 'model.{PREDICTS}' should describe heads by name.")
        super().__init__({key: value for key, value in content.items() if value is not None or key not in self.TYPES})

    def __missing__(self, key: str) -> Any:
        raise ForgefieldError(
            f"{self._path} has no '{key}': the training has not come that far, or the file was changed. Train on, or take the "
            "run from a copy."
        )


class Run:
    """One run folder. Make it with `Run.open(name)` or `Run.open(path)`."""

    def __init__(self, path: Path, *, trust_code: bool = False) -> None:
        self.path = Path(path)
        self.trust_code = trust_code
        """Whether code that the run names may be imported."""

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

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
            return cls(run.path, trust_code=True) if trust_code else run
        name_or_path = run
        for path in (Path(name_or_path), Path(out) / name_or_path):
            if (path / "run.json").is_file():
                return cls(path, trust_code=trust_code)
        known = sorted(p.parent.name for p in Path(out).glob("*/run.json"))
        hint = did_you_mean(str(name_or_path), known) or (f" Runs in {out}: {', '.join(known)}." if known else "")
        raise ForgefieldError(f"There is no run '{name_or_path}', neither as a path nor in the folder {out}.{hint}")

    @property
    def exists(self) -> bool:
        return (self.path / "run.json").is_file()

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def config(self) -> Config:
        """The settings the run was made with; those that its version did not have yet are at their defaults."""
        return stored_config(self.settings, Sources(main=self.path / "config.yaml"))

    @property
    def settings(self) -> dict[str, Any]:
        """The content of `config.yaml`: only what was written there."""
        content = read_yaml(self.path / "config.yaml")
        refuse_interpolations(content, self.path / "config.yaml")
        return content

    @property
    def trust(self) -> Trust:
        """Whether code that `run.json` names may be imported."""
        return Trust(f"run {self.name} ({self.path})", self.trust_code, never_from=self.path)

    @property
    def info(self) -> dict[str, Any]:
        """What is in `run.json`: versions, species, model options with every number explicit, statistics, status."""
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
    def cutoff(self) -> float:
        return float(self.info["cutoff"])

    @property
    def graph(self) -> GraphOptions:
        """Which pairs of atoms its model sees."""
        model = self.info["model"]
        return GraphOptions(
            self.cutoff, adaptive_cutoff=model.get("adaptive_cutoff"), max_neighbours=model.get("max_neighbours")
        )

    @property
    def heads(self) -> dict[str, dict[str, Any]]:
        """What its model predicts beside energy, forces and stress: options of each head, by name."""
        heads = self.info["model"].get(PREDICTS, {}).get(HEADS, {})
        return {name: head for name, head in heads.items() if name not in (FORCES, NOISE)}

    @property
    def forces_are_direct(self) -> bool:
        return FORCES in self.info["model"].get(PREDICTS, {}).get(HEADS, {})

    @property
    def has_energy(self) -> bool:
        return self.info["model"].get(PREDICTS, {}).get("energy", True)

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
        """Units of the values that its heads predict, or of what is measured on points."""
        if self.of_points:
            return dict(self.info.get("units", {}))
        return {name: head["unit"] for name, head in self.heads.items() if head.get("classes") is None}

    @property
    def classes(self) -> dict[str, list[float]]:
        """Labels of the classes that its heads tell apart."""
        return {name: head["classes"] for name, head in self.heads.items() if head.get("classes") is not None}

    @property
    def extensive(self) -> list[str]:
        """Names of the outputs of frames whose errors are also measured per atom."""
        return [name for name, head in self.heads.items() if head.get("per_atom_errors")]

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`."""
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def write_info(self, **changes: Any) -> None:
        """Change keys of `run.json`, atomically."""
        path = self.path / "run.json"
        info = {VERSION: RUN_JSON.version, **(self.info if path.exists() else {}), **changes}
        write_atomically(path, json.dumps(info, indent=1) + "\n")

    def require_head(self, head: str | None) -> None:
        """Refuse a branch that the model does not have, and none where it has several."""
        if head is not None or branch_names(self.info["model"]):
            single_branch(self.info["model"], None, head)

    def load_potential(
        self, which: str = "best", device: str | torch.device = "cpu", *, head: str | None = None
    ) -> Potential:
        """The trained model of frames, in evaluation mode. which: `best` (by validation) or `last`. head: one branch of a model
        that has several, as a model of its own."""
        model = self.load_model(which, device, head=head)
        if not isinstance(model, Potential):
            raise ForgefieldError(
                f"Run {self.name} was trained on {self.kind.name}: it does not predict energies and forces."
            )
        return model

    def load_model(
        self, which: str = "best", device: str | torch.device = "cpu", *, head: str | None = None
    ) -> nn.Module:
        """The trained model in evaluation mode, whatever it was trained on."""
        if which not in WEIGHTS:
            raise ForgefieldError(f"Weights are 'best' or 'last', not '{which}'.")
        try:
            device = torch.device(device)
        except RuntimeError as error:
            raise ForgefieldError(f"'{device}' is not a device of torch; use cpu, cuda or cuda:0.") from error
        path, state = self.weights_path(which), self.read_weights(which).state
        info = self.info
        resolved = info["model"]
        try:
            if head is not None:
                resolved, state = single_branch(resolved, state, head)
            _refuse_impossible_sizes(resolved, state, self.path / "run.json")
            potential = built(resolved, info["precision"], self.trust)
            potential.load_state_dict(state)
        except ForgefieldError:
            raise
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise ForgefieldError(f"{path} is damaged or belongs to another model: {reason}") from error
        return potential.to(device).eval()

    def weights_path(self, which: str) -> Path:
        return self.checkpoints / f"{which}.safetensors"

    def read_weights(self, which: str) -> Weights:
        """The trained weights, verified against their checksum."""
        path = self.weights_path(which)
        if not path.exists():
            raise ForgefieldError(
                f"Run {self.name} has no {which} weights yet ({path} is missing); they are written at its first validation."
            )
        return read_weights(path)


def _refuse_impossible_sizes(resolved: Any, state: Mapping[str, torch.Tensor], file: Path, name: str = "model") -> None:
    """Refuse options of a model that is far larger than its weights: building it could take all memory, or forever."""
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
                "changed. Take the run from a copy."
            )


def built(resolved: dict[str, Any], precision: str, trust: Trust) -> nn.Module:
    """A model of resolved options, with first weights."""
    build = kind_of_model(resolved.get("name")).build_model.load()
    return build(resolved, precision=precision, seed=0, trust=trust)


def run_exists(name: str | os.PathLike[str], *, out: str | os.PathLike[str] = "runs") -> bool:
    """Whether there is a run of that name (or path) to load or to continue."""
    return any((path / "run.json").is_file() for path in (Path(name), Path(out) / name))


def create_run_from_model(
    *,
    name: str,
    out: str | os.PathLike[str],
    resolved: dict[str, Any],
    potential: nn.Module,
    origin: str,
    precision: str,
    settings: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
) -> Run:
    """A run folder around a model that was trained elsewhere; it can be tested, used, reported on and trained further.

    settings: further sections of its config. facts: further values of its `run.json`; of a model of points also species and
    cutoff.
    """
    path = Path(out) / name
    if path.exists():
        raise ForgefieldError(f"{path} exists already; choose another name.")
    run = Run(path)
    run.checkpoints.mkdir(parents=True)
    state = {key: tensor.detach().cpu().contiguous() for key, tensor in potential.state_dict().items()}
    for which in WEIGHTS:
        write_weights(run.weights_path(which), state, {"origin": origin})
    config = {"name": name, "model": resolved, "training": {"precision": precision}, **(settings or {})}
    (path / "config.yaml").write_text(f"# {origin}\n" + plain_yaml(config))
    run.write_info(
        name=name,
        status="imported",
        origin=origin,
        model=resolved,
        precision=precision,
        versions=versions(),
        **{key: resolved[key] for key in ("species", "cutoff") if key in resolved},
        **(facts or {}),
    )
    return run


def versions() -> dict[str, str]:
    """Versions that matter for repeating a run."""
    found = {"forgefield": __version__, "python": platform.python_version()}
    for package in ("torch", "lightning", "e3nn", "ase", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found

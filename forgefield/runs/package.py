"""A trained model in one file (`.ff`), which is used like a run."""

from __future__ import annotations

import os
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgefield.config.checking import stored_config
from forgefield.config.sources import Sources
from forgefield.config.template import plain_yaml
from forgefield.config.trust import Trust, refuse_interpolations
from forgefield.errors import ForgefieldError
from forgefield.formats import Format
from forgefield.results import Metrics
from forgefield.runs.record import RUN_JSON, RunInfo
from forgefield.runs.run import PACKAGE_SUFFIX, UNCERTAINTY, WEIGHTS, Run
from forgefield.settings import Config
from forgefield.weights import Weights, digest, read_weights, write_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PACKAGE = Format("a packaged model")
"""The format of the note in a package: `info`, `settings`, `weights`, `licence`, `created`, `errors` by test set, and
`uncertainty`, the description of the uncertainties if the package has any."""
UNCERTAINTY_TENSORS = "uncertainty:"
"""Beginning of the names of tensors in a package that belong to the uncertainties, not to the model."""
PACKAGE_KEY = "package"


class PackagedRun(Run):
    """A trained model in one file, which can be used wherever a run can: to predict, to test, in ASE, or to train further.

    The file is a safetensors file; everything else a run needs is in its header. Nothing in it is executable.
    """

    @cached_property
    def _weights(self) -> Weights:
        weights = read_weights(self.path)
        if not isinstance(weights.about.get(PACKAGE_KEY), dict):
            raise ForgefieldError(
                f"{self.path} is not a packaged model: it has weights but no description of the model. "
                f"`forgefield export RUN -o model{PACKAGE_SUFFIX}` writes a package."
            )
        return weights

    @cached_property
    def _model_weights(self) -> Weights:
        """The weights without the tensors of the uncertainties; their digest is that of the run that was exported."""
        weights = self._weights
        state = {name: tensor for name, tensor in weights.state.items() if not name.startswith(UNCERTAINTY_TENSORS)}
        if len(state) == len(weights.state):
            return weights
        return Weights(state, weights.about, digest(state))

    @cached_property
    def note(self) -> dict[str, Any]:
        """What the package says about the model: `info`, `settings`, `weights`, `licence`, `created`, `errors`."""
        note = PACKAGE.upgrade(self._weights.about[PACKAGE_KEY], self.path)
        for key in ("info", "settings"):
            if not isinstance(note.get(key), dict):
                raise ForgefieldError(f"{self.path} is damaged: '{key}' must be a mapping.")
        return note

    @property
    def exists(self) -> bool:
        return self.path.is_file()

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def settings(self) -> dict[str, Any]:
        settings = self.note["settings"]
        refuse_interpolations(settings, self.path)
        return dict(settings)

    @property
    def config(self) -> Config:
        return stored_config(self.settings, Sources(main=self.path))

    @property
    def trust(self) -> Trust:
        return Trust(f"package {self.path}", self.trust_code, never_from=self.path.parent)

    @property
    def info(self) -> dict[str, Any]:
        return RunInfo(self.path, RUN_JSON.upgrade(dict(self.note["info"]), self.path))

    def metrics(self) -> Metrics:
        return Metrics()

    def plot(self) -> Figure:
        raise ForgefieldError(f"{self.path} is a packaged model, which has no learning curves; the run has them.")

    def _repr_html_(self) -> str:
        return f"<code>{escape(repr(self))}</code>"

    def write_info(self, **changes: object) -> None:
        raise ForgefieldError(f"{self.path} is a packaged model, which is not changed; unpack it to train it further.")

    def weights_path(self, which: str) -> Path:
        return self.path

    def read_weights(self, which: str) -> Weights:
        """The weights of the package. It has one set, which `best` always means; `last` only if it was packaged as such."""
        if which == "last" != self.note["weights"]:
            raise ForgefieldError(f"{self.path} contains the best weights of its run, not the last ones; omit --which.")
        return self._model_weights

    def read_uncertainty(self, head: str | None = None) -> Weights | None:
        note = self.note.get("uncertainty")
        if not isinstance(note, dict) or head is not None:
            return None
        state = {
            name.removeprefix(UNCERTAINTY_TENSORS): tensor
            for name, tensor in self._weights.state.items()
            if name.startswith(UNCERTAINTY_TENSORS)
        }
        return Weights(state, {"uncertainty": note}, digest(state))

    def writable(self, out: str | os.PathLike[str] = "runs") -> Run:
        """A run folder with the content of the package, in the folder `out`; an earlier one with equal weights is reused."""
        run, sha256 = Run(Path(out) / self.name, trust_code=self.trust_code), self._model_weights.sha256
        if not run.path.exists():
            run.checkpoints.mkdir(parents=True)
            for which in WEIGHTS:
                write_weights(run.weights_path(which), self._model_weights.state, {"origin": str(self.path)})
            if (uncertainty := self.read_uncertainty()) is not None:
                write_weights(run.path / UNCERTAINTY, uncertainty.state, uncertainty.about)
            (run.path / "config.yaml").write_text(f"# unpacked from {self.path}\n" + plain_yaml(self.settings))
            run.write_info(**{**self.info, "name": self.name, "status": "imported"})
        elif not run.exists or run.read_weights("best").sha256 != sha256:
            raise ForgefieldError(
                f"{run.path} exists and is not the model in {self.path}, so the results cannot be stored there; rename one."
            )
        return run

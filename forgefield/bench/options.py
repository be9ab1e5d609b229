"""What `forgefield bench` is asked to measure, checked before any work is done."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError

STEPS, WARMUP = 20, 5
ENGINES = ("eager", "compile", "graphs", "script", "auto")
DERIVATIVES = ("double", "tangent", "kernels", "auto")
PEERS = ("nequip", "allegro", "mace", "deepmd")
FIGURE_SUFFIXES = (".png", ".svg", ".pdf")
JOBS = ("measure", "work", "plan")
"""What a child process can be asked to do: time training steps, count the work of a step, plan memory."""


@dataclass(frozen=True)
class BenchOptions:
    """The options of `forgefield bench`; the messages of errors use the names of the command line."""

    engines: Sequence[str] | None = None
    """Engines to measure; default: all that run on this machine."""
    precisions: Sequence[str] | None = None
    """Precisions to measure; default: the configured one."""
    derivatives: Sequence[str] | None = None
    """Forms of the force derivative to measure; default: the configured one."""
    quick: bool = False
    """Measure only the configured engine in one process."""
    peers: bool = False
    """Also measure NequIP, Allegro, MACE and DeePMD-kit, where they are installed."""
    peer_names: Sequence[str] | None = None
    """Only these peers; default: all."""
    peer_pythons: Sequence[str] = ()
    """Python interpreters of other environments in which to look for peers."""
    plan: bool = False
    """Measure memory instead of time."""
    ranks: Sequence[int] | None = None
    """Numbers of processes to measure; default: 1, 2, 4, ... up to the number of GPUs or cores."""
    steps: int = STEPS
    """Steps to time."""
    warmup: int = WARMUP
    """Steps before them."""
    json: Path | None = None
    """File for all numbers."""
    figure: Path | None = None
    """File for a figure of the engines' times."""
    trust_code: bool = False
    """Whether to import code that a run names (`model.from`)."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ForgefieldError(f"--steps is {self.steps}; at least one step must be timed.")
        if self.warmup < 0:
            raise ForgefieldError(f"--warmup is {self.warmup}; it should be 0 or more.")
        _require_known("--engines", self.engines, ENGINES)
        _require_known("--derivatives", self.derivatives, DERIVATIVES)
        _require_known("--peer-names", self.peer_names, PEERS)
        for option, path in (("--json", self.json), ("--figure", self.figure)):
            if path is not None and not path.absolute().parent.is_dir():
                raise ForgefieldError(f"{option} {path}: the folder {path.absolute().parent} does not exist.")
        if self.figure is not None and self.figure.suffix not in FIGURE_SUFFIXES:
            raise ForgefieldError(f"--figure {self.figure}: the name should end in {', '.join(FIGURE_SUFFIXES)}.")
        for python in self.peer_pythons:
            if shutil.which(python) is None:
                raise ForgefieldError(f"--peer-python {python}: there is no such program.")
        self._require_compatible()

    def _require_compatible(self) -> None:
        """Refuse options that contradict each other."""
        if self.plan and (options := self.requested()):
            raise ForgefieldError(f"--plan measures memory, not time: leave out {options[0][0]}.")
        if self.quick and self.engines:
            raise ForgefieldError("--quick measures the configured engine, --engines others: use one of them.")
        for option, value in (("--peer-python", self.peer_pythons), ("--peer-names", self.peer_names)):
            if value and not self.peers:
                raise ForgefieldError(f"{option} needs --peers, which measures other programs.")
        if self.figure is not None and not self.measures_engines:
            raise ForgefieldError(
                "--figure shows engines, and only numbers of processes are measured: add --engines, or leave it out."
            )

    def requested(self) -> list[tuple[str, str]]:
        """The options in use that select what is timed, each with its value as on the command line."""
        values = {
            "--engines": ",".join(self.engines or ()),
            "--precisions": ",".join(self.precisions or ()),
            "--derivatives": ",".join(self.derivatives or ()),
            "--peers": self.peers,
            "--ranks": ",".join(map(str, self.ranks or ())),
            "--figure": self.figure,
        }
        return [(option, "" if value is True else str(value)) for option, value in values.items() if value]

    @property
    def _selects_engines(self) -> bool:
        return bool(self.engines or self.precisions or self.derivatives or self.quick or self.peers)

    @property
    def measures_engines(self) -> bool:
        """Engines are measured unless only numbers of processes were requested."""
        return self.ranks is None or self._selects_engines

    @property
    def measures_ranks(self) -> bool:
        """Numbers of processes are measured if requested, or if nothing else was."""
        return self.ranks is not None or not self._selects_engines


@dataclass(frozen=True)
class Job:
    """What a child process does. kind: one of `JOBS`. result: file for its result. precisions: those whose work is counted.
    The other fields are those of `BenchOptions`."""

    kind: str
    result: Path
    steps: int = STEPS
    warmup: int = WARMUP
    precisions: Sequence[str] = ()
    trust_code: bool = False


def _require_known(option: str, names: Sequence[str] | None, known: Sequence[str]) -> None:
    for name in names or ():
        if name not in known:
            raise ForgefieldError(f"{option}: '{name}' is not one of {', '.join(known)}.{did_you_mean(name, known)}")

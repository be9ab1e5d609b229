"""Options of `forgefield bench`, checked before anything is measured, and the cores and GPUs of this machine."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from forgefield.config.nearest import did_you_mean
from forgefield.config.option import declared_limits, limits_of, option
from forgefield.errors import ForgefieldError
from forgefield.processes import usable_cores
from forgefield.training.options import TrainingOptions

if TYPE_CHECKING:
    from forgefield.settings import Config

STEPS, WARMUP = 20, 5
ENGINES = declared_limits(TrainingOptions, "engine").choices
DERIVATIVES = declared_limits(TrainingOptions, "derivative").choices
PEERS = ("nequip", "allegro", "mace", "deepmd")
FIGURE_SUFFIXES = (".png", ".svg", ".pdf")
JOBS = ("measure", "work", "plan")
"""Jobs of a child process: time training steps, count the work of a step, plan memory."""


@dataclass(frozen=True)
class BenchOptions:
    """The options of `forgefield bench`; the messages of errors use the names of the command line."""

    engines: Sequence[str] | None = option(None, choices=ENGINES)
    """Engines to measure. Default: all that run on this machine."""
    precisions: Sequence[str] | None = None
    """Precisions to measure, such as float32,tf32. Default: the configured one."""
    derivatives: Sequence[str] | None = option(None, choices=DERIVATIVES)
    """Forms of the force derivative to measure. Default: the configured one."""
    quick: bool = False
    """Measure only the configured engine, in one process."""
    peers: bool = False
    """Also measure NequIP, Allegro, MACE and DeePMD-kit, where installed."""
    peer_names: Sequence[str] | None = option(None, choices=PEERS)
    """Peers to measure. Default: all that are installed."""
    peer_pythons: Sequence[str] = ()
    """Interpreters of other Python environments in which to look for peers."""
    plan: bool = False
    """Estimate the memory of the configured batch, and which batch would fit, instead of measuring times."""
    ranks: Sequence[int] | None = None
    """Numbers of processes to start on this machine. Default: 1, 2, 4, ... up to the number of GPUs, or of cores if there is no
    GPU."""
    steps: int = option(STEPS, at_least=1)
    """Number of timed steps."""
    warmup: int = option(WARMUP, at_least=0)
    """Number of steps before the timed ones."""
    json: Path | None = None
    """File for all numbers."""
    figure: Path | None = None
    """File for a figure of the engines' times (.png, .svg, .pdf)."""
    trust_code: bool = False
    """Whether to import code that a run names (`model.from`)."""

    def __post_init__(self) -> None:
        for declared in fields(self):
            limits, value, flag = limits_of(declared), vars(self)[declared.name], f"--{declared.name.replace('_', '-')}"
            if limits.has_bounds and not limits.allows(value):
                raise ForgefieldError(f"{flag} must be {limits.describe()}, not {value}.")
            for name in (value or ()) if limits.choices else ():
                if name not in limits.choices:
                    raise ForgefieldError(
                        f"{flag}: '{name}' is not one of {', '.join(limits.choices)}.{did_you_mean(name, limits.choices)}"
                    )
        for flag, path in (("--json", self.json), ("--figure", self.figure)):
            if path is not None and not path.absolute().parent.is_dir():
                raise ForgefieldError(f"{flag} {path}: the folder {path.absolute().parent} does not exist.")
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
        for flag, value in (("--peer-python", self.peer_pythons), ("--peer-names", self.peer_names)):
            if value and not self.peers:
                raise ForgefieldError(f"{flag} needs --peers, which measures other programs.")
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
        return [(flag, "" if value is True else str(value)) for flag, value in values.items() if value]

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


# ---- this machine


def count_processes(n: int) -> str:
    return f"{n} process{'es' if n > 1 else ''}"


def process_slots(config: Config) -> tuple[int, str]:
    """How many processes can run here without sharing a GPU or a core, and which of the two limits them."""
    import torch

    if (config.trainer.get("accelerator") or "auto") == "cpu" or not torch.accelerator.is_available():
        return usable_cores(), "core"
    selected = gpu_indices(config)
    return (len(selected) if selected is not None else torch.accelerator.device_count()), "GPU"


def gpu_indices(config: Config) -> list[int] | None:
    """The GPUs that the config lists by index; None where it does not."""
    devices = config.trainer.get("devices")
    if isinstance(devices, str) and "," in devices:
        devices = [int(word) for word in devices.split(",") if word.strip().isdecimal()]
    return list(devices) if isinstance(devices, list) else None


def on_devices(config: Config, n: int, kind: str) -> Config:
    """The config for n processes on this machine, instead of its number of devices and nodes."""
    changed, selected = copy.deepcopy(config), gpu_indices(config)
    changed.trainer.pop("num_nodes", None)
    changed.trainer["devices"] = selected[:n] if selected is not None and kind == "GPU" else n
    return changed


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to `limit`."""
    return [2**i for i in range(limit.bit_length())]


def sharing_warnings(n: int, n_slots: int, kind: str) -> list[str]:
    """A warning where n processes have to share GPUs or cores."""
    if n <= n_slots:
        return []
    if kind == "GPU":
        return [
            f"Warning: {count_processes(n)} were requested and there {'is 1 GPU' if n_slots == 1 else f'are {n_slots} GPUs'}. "
            "Processes that share a GPU communicate through gloo, which helps only where steps are too small to keep it busy."
        ]
    return [
        f"Warning: {count_processes(n)} were requested and there {'is 1 core' if n_slots == 1 else f'are {n_slots} cores'}. "
        "Processes that share a core take turns, so no speed-up can be expected from more of them."
    ]

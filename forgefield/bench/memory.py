"""How much memory a training will need, extrapolated from real steps on a few small batches.

The memory of a step is a constant (weights, gradients, optimiser state, workspaces) plus terms proportional to the numbers of
atoms and edges. The three coefficients are fitted to the peaks of steps on one, two and four frames. On a GPU the peak is that
of torch's allocator; on a CPU it is the largest sum of all live tensors, from the profiler's record of every allocation.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from forgefield.bench.step import BareStep, bare_step
from forgefield.data.batch import Batch, is_memory_error
from forgefield.data.padding import SizePlan, sizes
from forgefield.data.sampling.loader import FrameLoader
from forgefield.errors import ForgefieldError
from forgefield.settings import Config
from forgefield.training.engines.choose import ENGINES, Choice, EngineSetup, build, requested_choice
from forgefield.training.engines.engine import Engine

SMALL_BATCHES = (1, 2, 4)
"""Numbers of frames in the measured batches."""
FILLED = 0.9
"""Fraction of the memory that a training may use; allocators need some room."""


@dataclass(frozen=True)
class Peak:
    """Peak memory of a step on a batch of this size."""

    frames: int
    atoms: int
    edges: int
    bytes: int


@dataclass(frozen=True)
class MemoryModel:
    """bytes = fixed + per_atom * atoms + per_edge * edges."""

    fixed: float
    per_atom: float
    per_edge: float

    def bytes(self, atoms: float, edges: float) -> float:
        return self.fixed + self.per_atom * atoms + self.per_edge * edges


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that a training needs and has.

    model: fitted to `measured`. largest: the largest batch of the first epochs, (frames, atoms, edges). needed: its memory in
    bytes. available: bytes on the device that other programs do not use. fits: frames, atoms and edges of the batch that uses
    the fraction `FILLED` of them. setting: how `data.batch` counts. engine, device: what was measured.
    """

    measured: list[Peak]
    model: MemoryModel
    largest: tuple[int, int, int]
    needed: float
    available: int
    fits: dict[str, int]
    setting: str
    engine: str
    device: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_memory(config: Config, notify: Callable[[str], None] = lambda text: None) -> MemoryPlan:
    """Measure small batches of the config's data and extrapolate to its configured batch. notify: called with messages."""
    step = bare_step(config)
    choice = planned_choice(config, step.device)
    engine = _engine(step, choice, config, notify)
    loader = step.batches.train_dataloader()
    rows = np.random.default_rng(config.seed).permutation(len(step.data.train))
    peaks = []
    for n in SMALL_BATCHES:
        batch = step.batch(np.resize(rows, n))
        peaks.append(peak_of_step(step, engine, batch))
        del batch
    model = fit_memory(peaks)
    atoms_per_frame, edges_per_atom = _means(step, peaks)
    batches = batch_sizes(loader, edges_per_atom)
    largest = max(batches, key=lambda size: model.bytes(size[1], size[2]))
    available = available_bytes(step.device)
    return MemoryPlan(
        measured=peaks,
        model=model,
        largest=largest,
        needed=model.bytes(largest[1], largest[2]),
        available=available,
        fits=largest_batch(model, FILLED * available, atoms_per_frame, edges_per_atom),
        setting=loader.budget.kind,
        engine=str(choice),
        device=str(step.device),
    )


def planned_choice(config: Config, device: torch.device) -> Choice:
    """The engine to measure: the configured one; for `graphs` the one whose step is captured; for `auto` eager."""
    name = config.training.engine or "eager"
    if name not in (*ENGINES, "auto"):
        raise ForgefieldError(f"training.engine is '{name}'; choose one of {', '.join((*ENGINES, 'auto'))}.")
    choice = requested_choice(config.training)
    if choice is None:
        derivative = config.training.derivative
        return Choice("eager", "double" if derivative == "auto" else derivative)
    if choice.name == "graphs":
        return Choice("compile" if choice.captured == "compiled" else "eager", choice.derivative)
    return choice


def _engine(step: BareStep, choice: Choice, config: Config, notify: Callable[[str], None]) -> Engine:
    setup = EngineSetup(
        function=step.function,
        options=config.training,
        world_size=1,
        steps=None,
        plan=lambda: SizePlan(()),
        tolerance=0.0,
        notify=notify,
    )
    return build(choice, setup, step.device)


# ---- one step


def peak_of_step(step: BareStep, engine: Engine, batch: Batch) -> Peak:
    """The peak of the second of two steps; the first creates what persists, such as the optimiser's state."""
    try:
        step.run(engine, batch)
        measure = _peak_on_gpu if step.device.type == "cuda" else _peak_on_cpu
        return Peak(*sizes(batch), measure(step, engine, batch))
    except Exception as error:
        if not is_memory_error(error):
            raise
        frames, atoms, edges = sizes(batch)
        raise ForgefieldError(
            f"{frames} frame{'s' if frames > 1 else ''} of the training data ({atoms} atoms, {edges} edges) already exceed "
            "the memory; use a smaller model, a smaller data.cutoff, or training.memory.recompute=true."
        ) from error


def _peak_on_gpu(step: BareStep, engine: Engine, batch: Batch) -> int:
    torch.cuda.synchronize(step.device)
    torch.cuda.reset_peak_memory_stats(step.device)
    step.run(engine, batch)
    torch.cuda.synchronize(step.device)
    return torch.cuda.max_memory_allocated(step.device)


def _peak_on_cpu(step: BareStep, engine: Engine, batch: Batch) -> int:
    persistent = _storage_bytes([*step.persistent_tensors(), *batch.values()])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step.run(engine, batch)
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    in_use = np.cumsum([0, *(event.nbytes() for event in events)])
    return persistent + int(in_use.max())


def _storage_bytes(tensors: list[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


# ---- from small batches to large ones


def fit_memory(peaks: list[Peak]) -> MemoryModel:
    """Non-negative least squares of relative errors.

    Where every atom has the same number of edges, everything that grows is attributed to edges.
    """
    columns = np.array([[1.0, peak.atoms, peak.edges] for peak in peaks])
    needed = np.array([peak.bytes for peak in peaks], dtype=np.float64)
    scale = columns.max(axis=0).clip(min=1.0)
    ratios = columns[:, 2] / columns[:, 1]
    if ratios.min() > 0.99 * ratios.max() > 0:  # the two cannot be distinguished
        columns[:, 1] = 0.0
    solution, _ = nnls(columns / scale / needed[:, None], np.ones(len(needed)))
    return MemoryModel(*(float(value) for value in solution / scale))


def largest_batch(model: MemoryModel, room: float, atoms_per_frame: float, edges_per_atom: float) -> dict[str, int]:
    """Frames, atoms and edges of the batch of average frames that needs `room` bytes; zero if not even one frame fits."""
    per_atom = model.per_atom + model.per_edge * edges_per_atom
    atoms = max(0.0, room - model.fixed) / max(per_atom, 1e-9)
    return {"frames": int(atoms / atoms_per_frame), "atoms": int(atoms), "edges": int(atoms * edges_per_atom)}


def batch_sizes(loader: FrameLoader, edges_per_atom: float) -> list[tuple[int, int, int]]:
    """Frames, atoms and edges of the coming batches; edges are estimated where neighbour lists are built on the device."""
    planned = loader.batch_sizes()
    if len(planned):
        return [(int(frames), int(atoms), int(edges)) for frames, atoms, edges in planned]
    numbers = [(len(batch["n_atoms"]), len(batch["positions"])) for batch in loader]
    return [(frames, atoms, round(atoms * edges_per_atom)) for frames, atoms in numbers]


def _means(step: BareStep, peaks: list[Peak]) -> tuple[float, float]:
    """Mean numbers of atoms per frame and of edges per atom, over the training data if its edges have been counted."""
    data = step.data.train
    atoms = float(data.n_atoms.sum())
    if data.n_edges is not None:
        return atoms / len(data), float(data.n_edges.sum()) / atoms
    return atoms / len(data), sum(peak.edges for peak in peaks) / sum(peak.atoms for peak in peaks)


# ---- available memory


def available_bytes(device: torch.device) -> int:
    """Memory that this process can use: free memory and memory it has already reserved, in bytes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    free = _free_on_host()
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    return free if limit is None else min(free, limit - (used or 0))


def _free_on_host() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        values = dict(line.split(":") for line in meminfo.read_text().splitlines() if ":" in line)
        return 1024 * int(values["MemAvailable"].split()[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None

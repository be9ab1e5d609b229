"""From the settings to what a loader needs: the size of a batch, the order of frames, and the threads that prepare batches."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from forgefield.data.options import DataOptions
from forgefield.data.sampling.by_source import SourceBatches
from forgefield.data.sampling.order import EpochOrder, EveryFrameOnce, WeightedDraws, system_probabilities
from forgefield.data.sampling.plan import KINDS, Budget
from forgefield.data.store.table import FrameTable, Systems
from forgefield.errors import ForgefieldError

DEFAULT_FRAMES = 8
"""Frames of a batch where neither `data.batch` nor the data is known."""
ATOMS_PER_BATCH = 128
MOST_FRAMES = 32
BATCHES_PER_EPOCH = 4
"""Without `data.batch`, a batch has about 128 atoms, at most 32 frames, and an epoch has at least 4 batches."""
MORE_IN_EVALUATION = 2
"""Factor by which batches are larger than in training: without second derivatives they need the same memory."""

Order = Callable[[np.ndarray, np.ndarray], EpochOrder]
"""Makes the order of an epoch from the rows of a table that take part, and what each of them costs."""


def default_frames(mean_atoms: float, n_train: int) -> int:
    """Frames of a batch without `data.batch`, on each process.

    mean_atoms: mean number of atoms of a frame. n_train: number of training frames.
    """
    return max(1, min(round(ATOMS_PER_BATCH / mean_atoms), MOST_FRAMES, math.ceil(n_train / BATCHES_PER_EPOCH)))


def sized(options: DataOptions, frames: int) -> DataOptions:
    """`options` with this number of frames in a batch, unless `data.batch` gives a size."""
    batch = options.batch
    if any(getattr(batch, kind) is not None for kind in KINDS) or _frames_by_source(options) is not None:
        return options
    return replace(options, batch=replace(batch, frames=frames))


def training_budget(options: DataOptions) -> Budget:
    """The budget of `data.batch`."""
    sizes = _frames_by_source(options)
    return _budget(options.batch, "data.batch") if sizes is None else Budget("frames", max(sizes))


def _frames_by_source(options: DataOptions) -> list[int] | None:
    """Number of frames of a batch of each source, if `data.batch.by_source` sets them."""
    by_source = options.batch.by_source
    return None if isinstance(by_source, bool) else list(by_source)


def evaluation_budget(options: DataOptions) -> Budget:
    """The budget of `data.eval_batch`, by default twice that of `data.batch`. Frames are never skipped."""
    eval_batch, sizes = options.eval_batch, _frames_by_source(options)
    if eval_batch is None:
        budget = training_budget(options) if sizes is None else Budget("frames", min(sizes))
        budget = replace(budget, size=MORE_IN_EVALUATION * budget.size)
    elif isinstance(eval_batch, Mapping):
        if eval_batch.get("oversized", "alone") != "alone":
            raise ForgefieldError(
                f"data.eval_batch.oversized={eval_batch['oversized']}: no frame is left out of validation and test; "
                "leave it out"
            )
        budget = _budget(eval_batch, "data.eval_batch")
    else:
        budget = _budget({"frames": eval_batch}, "data.eval_batch")
    return Budget(budget.kind, budget.size, "alone", budget.setting, budget.bound)


def _budget(batch: object, setting: str) -> Budget:
    names = (*KINDS, "oversized", "bound")
    values = dict(batch) if isinstance(batch, Mapping) else {name: getattr(batch, name) for name in names}
    for name in ("by_source", "points"):  # not what a budget of frames counts
        values.pop(name, None)
    unknown = set(values) - set(names)
    if unknown:
        raise ForgefieldError(f"{setting}.{sorted(unknown)[0]} is not known; a batch is counted in {', '.join(KINDS)}")
    oversized, bound = values.pop("oversized", None) or "error", values.pop("bound", None) or "upper"
    named = {kind: size for kind, size in values.items() if size is not None}
    if len(named) > 1:
        raise ForgefieldError(
            f"{setting} gives {' and '.join(named)}; a batch is counted in one of them (set the others to null)"
        )
    kind, size = next(iter(named.items())) if named else ("frames", DEFAULT_FRAMES)
    return Budget(kind, size, oversized, setting, bound)


def training_order(options: DataOptions, table: FrameTable, seed: int, *, keep_order: bool = False) -> Order:
    """The order of the chosen rows of `table` in an epoch, from `data.shuffle`, `data.sampling` and `data.batch.by_source`.

    keep_order: the order of the data, each row once, the same in every epoch; batches of one source stay so.
    """
    rule, draws, branches, epochs = _sampling(options.sampling)
    weighted = (
        rule is not None
        or branches is not None
        or epochs is not None
        or any(part.share is not None for part in table.parts)
    )
    by_source = options.batch.by_source is not False
    if weighted and not options.shuffle:
        raise ForgefieldError("data.shuffle=false and weighted sampling contradict each other: draws are random")
    if by_source and draws is not None:
        raise ForgefieldError(
            "data.sampling.frames counts frames, but with data.batch.by_source whole batches are drawn; leave it out"
        )
    weighted, shuffle = weighted and not keep_order, bool(options.shuffle) and not keep_order
    if not weighted and not by_source:
        return lambda rows, costs: EveryFrameOnce(len(rows), seed, shuffle)
    systems, budget = table.systems, training_budget(options)

    def drawn(rows: np.ndarray, costs: np.ndarray) -> EpochOrder:
        of_row = systems.of_frame[rows]
        sizes = np.bincount(of_row, minlength=len(systems.names))
        chances = _chances(rule, sizes, systems, _by_epochs(branches, epochs, sizes, systems))
        number = len(rows) if draws is None else draws
        return WeightedDraws(of_row, chances, _draws(number, epochs, sizes, systems), seed, systems.names)

    def chances_of(n_batches: np.ndarray) -> np.ndarray:
        return _chances(rule, n_batches, systems, _by_epochs(branches, epochs, n_batches, systems))

    def in_batches(rows: np.ndarray, costs: np.ndarray) -> EpochOrder:
        return SourceBatches(
            systems.of_frame[rows],
            costs,
            budget,
            sizes=_frames_by_source(options),
            seed=seed,
            shuffle=shuffle,
            names=systems.names,
            where=lambda position: table.where(int(rows[position])),
            probabilities=chances_of if weighted else None,
            draws=lambda n_batches: _draws(int(n_batches.sum()), epochs, n_batches, systems),
        )

    return in_batches if by_source else drawn


def _by_epochs(branches: object, epochs: Mapping[str, Any] | None, sizes: np.ndarray, systems: Systems) -> object:
    """Probabilities of branches that are drawn so often, or as they are set. sizes: (n_systems,) what there is to draw."""
    if epochs is None:
        return branches
    return {name: float(number) * float(sizes[_of_branch(systems, name)].sum()) for name, number in epochs.items()}


def _draws(number: int, epochs: Mapping[str, Any] | None, sizes: np.ndarray, systems: Systems) -> int:
    """Draws of an epoch: `number`, or all of the epochs of every branch."""
    if epochs is None:
        return number
    return math.ceil(
        sum(float(value) * float(sizes[_of_branch(systems, name)].sum()) for name, value in epochs.items())
    )


def _of_branch(systems: Systems, name: str) -> np.ndarray:
    """(n_systems,) bool."""
    return np.array([branch == name for branch in systems.branches], dtype=bool)


def _chances(rule: str | Sequence[float] | None, sizes: np.ndarray, systems: Systems, branches: object) -> np.ndarray:
    """Probability of each system, (n_systems,); the probability of a branch of the model, if set, is divided by `rule`."""
    rule = "size" if rule is None else rule
    if branches is None:
        return system_probabilities(rule, sizes, systems.shares)
    names = [name for name in dict.fromkeys(systems.branches) if name is not None]
    if branches == "auto":
        branches = {name: float(systems.branches.count(name)) for name in names}
    if not isinstance(branches, Mapping) or set(branches) != set(names) or rule not in ("size", "uniform"):
        raise ForgefieldError(
            f"data.sampling.branches must be auto or a probability for each of the branches "
            f"{', '.join(names) or 'that sources name'}, with the rule size or uniform; it is {branches!r:.80}"
        )
    chances = np.zeros(len(sizes))
    for name, chance in branches.items():
        if isinstance(chance, bool) or not isinstance(chance, (int, float)) or not 0 <= chance < np.inf:
            raise ForgefieldError(f"data.sampling.branches.{name} must be a number of at least 0, not {chance!r}")
        inside = _of_branch(systems, name)
        chances[inside] = chance * system_probabilities(rule, sizes[inside])
    return chances


def _sampling(sampling: object) -> tuple[Any, int | None, Any, Mapping[str, Any] | None]:
    """Rule, number of draws of an epoch, probabilities of branches, and how often an epoch has the data of each branch."""
    if not isinstance(sampling, Mapping):
        return sampling, None, None, None
    unknown = set(sampling) - {"rule", "frames", "branches", "epochs"}
    if unknown:
        raise ForgefieldError(
            f"data.sampling.{sorted(unknown)[0]} is not known; it takes rule, frames, branches and epochs"
        )
    epochs = sampling.get("epochs")
    if epochs is not None:
        if not isinstance(epochs, Mapping) or not epochs or not all(_is_positive(value) for value in epochs.values()):
            raise ForgefieldError(f"data.sampling.epochs must be a number above 0 for each branch, not {epochs!r:.80}")
        for key in ("branches", "frames"):
            if sampling.get(key) is not None:
                raise ForgefieldError(f"data.sampling.epochs and data.sampling.{key} exclude each other; keep one")
    draws = sampling.get("frames")
    if draws is not None and (isinstance(draws, bool) or not isinstance(draws, int) or draws < 1):
        raise ForgefieldError(f"data.sampling.frames must be a number of frames, at least 1, not {draws!r}")
    return sampling.get("rule") or "size", draws, sampling.get("branches"), epochs


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < np.inf


def batch_threads(options: DataOptions, on_gpu: bool) -> int:
    """Threads that prepare batches: `data.workers`, else NUM_WORKERS, else what pays.

    On a CPU the threads of the arithmetic need the cores themselves; with a GPU one thread keeps up, and more of them are in
    the way of the one that feeds the device.
    """
    if options.workers is not None:
        workers, setting = options.workers, "data.workers"
    elif text := os.environ.get("NUM_WORKERS"):
        setting = "NUM_WORKERS"
        if not text.strip().isdecimal():
            raise ForgefieldError(f"NUM_WORKERS must be a number of threads, not {text!r} (or leave it unset)")
        workers = int(text)
    else:
        return 1 if on_gpu or options.prefetch is not None else 0
    if workers < 0:
        raise ForgefieldError(f"{setting} must be 0 or more, not {workers}")
    return workers

"""Every setting of a Forgefield config, its type, its default and its meaning, in one place.

A config file has the sections `data`, `model`, `task`, `training`, `trainer`, `callbacks` and a few plain keys. The
docstring under each field is its documentation: `forgefield init` writes it into the configs it makes.
`model` is checked against the options of the model it names, `trainer` against the signature of `lightning.Trainer`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forgefield.config.option import option
from forgefield.config.point_options import PointsOptions, PointTaskOptions
from forgefield.errors import ForgefieldError

LARGEST_SEED = 2**32 - 1
SEED = f"a whole number from 0 to {LARGEST_SEED}"
LOSSES = ("mse", "mae", "rmse", "huber")
FEWEST_KNOTS, MOST_KNOTS = 256, 2**15 - 1
"""Intervals of a table: with fewer it would be what limits the precision, and kernels number them by 16 bits."""


@dataclass
class BatchOptions:
    """How much one batch holds, on each process; one of the three. Nothing given: 8 frames."""

    frames: int | None = option(None, above=0)
    """Frames per batch."""
    atoms: int | None = option(None, above=0)
    """Atoms per batch at most: as many frames as fit, so that batches cost alike where frames differ in size."""
    edges: int | None = option(None, above=0)
    """Edges per batch at most: the same, by what costs time and memory most directly."""
    points: int | None = option(None, above=0)
    """Grid points per batch, where samples are points (data.points). Nothing given: 1000."""
    oversized: str = option("error", choices=("error", "alone", "skip"))
    """A frame that exceeds atoms or edges by itself: error, alone (a batch of its own) or skip (never trained on)."""
    bound: str = option("upper", choices=("upper", "lower"))
    """What the number of atoms or edges is: upper (as many frames as fit) or lower (as few frames as reach it)."""
    by_source: bool | list[int] = False
    """true: a batch holds frames of one source only. A list: so many frames of each source, in place of `frames`."""


@dataclass
class FieldOptions:
    """A further value of frames or atoms: something to learn (a band gap) or something a model is given (a charge)."""

    key: str | None = None
    """Its name in the source. Default: the name of the field."""
    per: str = "frame"
    """What has one value: frame or atom."""
    shape: list[int] = field(default_factory=list)
    """Shape of one value: [] for a number, [3] for a vector."""
    species: list[str] | None = None
    """Per atom only: the species whose atoms have a value. The source may leave the other atoms out."""
    factor: float = 1.0
    """Values are multiplied by it."""
    unit: str = ""
    """Their unit after that, in words, for display."""
    cumulative: bool = False
    """Running sums of the source's values along their last axis are taken: of a density of states the number of states."""


@dataclass
class LabelOptions:
    """Name of each label in the source. Left empty it is found by its usual names; `none`: there is no such label."""

    energy: str | None = None
    forces: str | None = None
    stress: str | None = None
    virial: str | None = None
    weight: str | None = None
    """Per-frame weight in the loss; `config_weight` and `weight` are found by themselves."""
    fields: dict[str, Any] | None = None
    """Further values to carry, by name: {band_gap: {key: gap}, fparam: {shape: [2]}, charge: atom}; each has key, per (frame
    or atom), shape, species, factor, cumulative and unit. Default: those that a store holds."""


@dataclass
class UnitOptions:
    """Units of the labels and positions in the source. Inside, everything is eV and A."""

    energy: str = "eV"
    """Of total energies of frames, or of energies per atom: `eV/atom`, `kcal/mol/atom`."""
    length: str = "A"
    forces: str | None = None
    """Default: energy / length."""
    stress: str | None = None
    """Default: energy / length^3. `GPa` and `kbar` are common."""


@dataclass
class DataOptions:
    train: str | list[Any] | dict[str, Any] | None = None
    """File, folder, store, glob, or a list of them; or a list of {path: ..., weight: (in the loss), share: (of the draws),
    branch: (of the model)}."""
    val: float | str | list[Any] | dict[str, Any] | None = 0.1
    """A share of train (0.1), a number of its frames (50), a file (list, glob), or {indices: file-or-list}."""
    test: float | str | list[Any] | dict[str, Any] | None = None
    """As `val`, or several sets by name: {300K: a.xyz, 600K: b.xyz}. Errors on them are measured at the end of training."""
    indices: str | list[int] | None = None
    """Use only these frames of `train` (list, file of integers, or 'start:stop'), before val and test are split off."""
    cutoff: float | None = option(5.0, above=0, unit="A")
    """Radius of the neighbour list, A. With `model.from` it is that of the model, and left out (null)."""
    adaptive_cutoff: float | None = option(None, above=0, unit="A")
    """Where an atom has no neighbour within `cutoff` its radius grows smoothly up to this one, A. Default: it does not."""
    max_neighbours: int | None = option(None, above=0)
    """Only so many nearest neighbours of each atom: cheaper, but the energy jumps when neighbours change ranks."""
    batch: BatchOptions = field(default_factory=BatchOptions)
    """How much makes a batch: {frames: 8}, {atoms: 4096} or {edges: 400000}."""
    eval_batch: int | dict[str, int] | None = None
    """The same for validation and test: a number of frames, or {atoms: ...}. No result depends on it, but for
    trainer.limit_val_batches, which counts batches. Default: twice a batch of the training, which takes as much memory."""
    sampling: str | list[float] | dict[str, Any] | None = None
    """Default: every frame once an epoch. uniform or size: sources are drawn alike or by size; a list of weights; DeePMD-kit's
    blocks ('prob_sys_size;0:2:0.5;2:5:0.5'); or {rule: uniform, frames: 10000}, the draws of an epoch; or {branches: {a: 0.7,
    b: 0.3}}, how often branches of the model are drawn (auto: by their numbers of sources)."""
    devset: int | None = option(None, above=0)
    """Train on so many representative frames of `train` only, to try things out."""
    species: list[str] | None = None
    """Chemical species the model knows, in order. Default: those in the data, by atomic number."""
    labels: LabelOptions = field(default_factory=LabelOptions)
    units: UnitOptions = field(default_factory=UnitOptions)
    split_seed: int | None = option(None, at_least=0, at_most=LARGEST_SEED, expected=SEED)
    """Seed of the random split. Default: `seed`."""
    shuffle: bool = True
    """A fresh permutation of all training frames every epoch."""
    neighbours: str = option("auto", choices=("auto", "vesin", "matscipy", "device"))
    """Neighbour lists by vesin or matscipy, or device: made where the model runs, batch by batch; auto: what is fastest."""
    lazy: bool | str | None = option("auto", choices=("auto", True, False))
    """Leave the data on disk: auto (stores yes, files no), true (files are converted once, into a cache), false."""
    workers: int | None = option(None, at_least=0, expected="zero or more")
    """Threads that prepare batches ahead. Default: NUM_WORKERS, else 1 with a GPU and 0 without."""
    prefetch: int | None = option(None, at_least=1, expected="one or more (data.workers=0 prepares nothing ahead)")
    """How many batches are prepared ahead. Default: two for each worker."""
    reference_energies: str | dict[str, float] = "auto"
    """Energy of an isolated atom per species: {H: -13.6, ...}, `isolated` (from single-atom frames), `fit` (least
    squares), `none` (zero), or `auto`: isolated where every species has such a frame, else fit."""
    max_force: float = option(300.0, above=0, unit="eV/A")
    """A force component above this, eV/A, stops the run: usually a unit or a parsing error."""
    max_energy_deviation: float = option(20.0, above=0, unit="eV/atom")
    """A frame whose energy is further than this, eV/atom, from the fit by composition stops the run."""
    cache: bool = True
    """Keep statistics on disk, keyed by a hash of all they depend on."""
    points: PointsOptions | None = None
    """Given where samples are points of grids with an LDOS, not frames; train, val and test then name snapshots."""
    fast: bool | None = None
    """Points only: true (default), whole batches are taken from tensors; false, point by point, as from a plain data set."""


@dataclass
class ScheduleOptions:
    """How the weight of a target changes from `weight` to `to`."""

    kind: str = option("linear", choices=("linear", "cosine", "sigmoid", "step", "lr"))
    """linear, cosine, sigmoid; step: at given places; lr: with the learning rate, as in DeePMD-kit."""
    to: float | list[float] | None = None
    """The last value; for kind step a list, one value for each place."""
    unit: str | None = option(None, choices=("step", "epoch"))
    """What places are counted in: step (of the optimiser; the default) or epoch."""
    begin: int | None = option(None, at_least=0, expected="a whole number from 0")
    """Where the change begins. Default: at once."""
    end: int | None = None
    """Where the last value is reached. Default: at the last step (epoch) of the training."""
    slope: float | None = option(None, above=0, below=math.inf)
    """Sigmoid only: how steep, for the whole schedule as unit. Default: 14.5."""
    centre: float | None = option(None, at_least=0, at_most=1, expected="a number from 0 to 1")
    """Sigmoid only: where in the schedule it is half way. Default: 0.5."""
    at: list[int] | None = None
    """Kind step only: the places, ascending."""


@dataclass
class TargetOptions:
    weight: float = option(1.0, at_least=0, below=math.inf, expected="zero or positive, and finite")
    """Weight of this target in the loss."""
    loss: str = option("mse", choices=LOSSES, open_choices="an import path")
    """mse, mae, rmse (root of the mean square of a value's components), huber, or the import path of a function (prediction,
    target) -> error of the same shape."""
    huber_delta: float = option(0.01, above=0, below=math.inf)
    """Where Huber turns from quadratic to linear, in eV, eV/A or eV/A^3."""
    per_atom: bool | str = option(True, choices=(True, False, "root"))
    """Energy and virial only: true, errors are those per atom; false, of the whole; root, divided by the root of the number of
    atoms, so that squares are what DeePMD-kit minimises."""
    species_weights: dict[str, float] | None = None
    """Forces only: weight of the atoms of each species; species not named have 1."""
    direct: bool = False
    """Forces only: a head of the model gives them, in place of the derivative of the energy. Faster, and not conservative."""
    net_zero: bool | None = None
    """Direct forces only: whether their sum over a frame is taken off. Default: true."""
    schedule: ScheduleOptions | None = None
    """How the weight changes: {kind: linear, to: 0.1}. Default: it does not."""


@dataclass
class FieldTargetOptions:
    """A target that is a field of the data (`data.labels.fields`), such as a band gap."""

    weight: float = option(1.0, at_least=0, below=math.inf, expected="zero or positive, and finite")
    """Weight of this target in the loss."""
    loss: str | None = option(None, choices=LOSSES, open_choices="an import path")
    """mse, mae, rmse, huber, or the import path of a function (prediction, target) -> error of the same shape. Errors are in
    units of the scale of `normalise`. Default: mse; for classes their cross-entropy, and nothing else."""
    classes: int | str | list[float] | None = None
    """The label says which class: how many there are (labels 0, 1, ...), the list of their labels, or auto: those that occur in
    the training data. Default: the label is a number to be learnt."""
    huber_delta: float = option(1.0, above=0, below=math.inf)
    """Where Huber turns from quadratic to linear, in units of the scale."""
    kind: str | None = option(None, choices=("values", "vector", "symmetric", "tensor"))
    """How the value turns with the structure: values, numbers that do not (the default); vector (shape [3]); symmetric or
    tensor (shape [3, 3])."""
    reduce: str | None = option(None, choices=("sum", "mean", "max", "attention"))
    """Of a value per frame: mean (intensive, such as a band gap; the default) or sum (extensive) of contributions of its
    atoms; or, of numbers, max or attention: the head's last layer reads the largest of each feature over the atoms, or their
    mean with learnt weights (both intensive)."""
    per_atom: bool | str | None = option(None, choices=(True, False, "root"))
    """With reduce: sum, what the loss compares: true (default), values per atom; false, of the whole; root, divided by the root
    of the number of atoms."""
    normalise: str | dict[str, Any] | None = "auto"
    """What the network's output means: mean + scale times it. auto: from the training data, by composition where extensive, by
    species where per atom; {mean: 1.0, scale: 0.5}; none: 0 and 1. It is part of the model."""
    schedule: ScheduleOptions | None = None
    """How the weight changes: {kind: linear, to: 0.1}. Default: it does not."""


@dataclass
class DenoiseOptions:
    """Positions are moved at random, and the model learns by how much: a target that needs no label."""

    sigma: float = option(0.1, above=0, below=math.inf, unit="A", expected="a positive length in A")
    """Standard deviation of the moves along each direction, A."""
    share: float | None = option(None, above=0, at_most=1, expected="a share of the frames, above 0 and at most 1")
    """Share of the frames of an epoch whose atoms are moved. Default: all; half of them where there are other targets."""
    keep_labels: bool = False
    """Whether moved frames keep their other labels, which are those of the structure before. Without, they train this alone."""
    weight: float = option(1.0, at_least=0, below=math.inf, expected="zero or positive, and finite")
    """Weight of this target in the loss."""
    loss: str | None = option(None, choices=LOSSES, open_choices="an import path")
    """mse (the default), mae, huber, or an import path. Errors are in units of sigma."""
    huber_delta: float = option(1.0, above=0, below=math.inf)
    """Where Huber turns from quadratic to linear, in units of sigma."""
    schedule: ScheduleOptions | None = None
    """How the weight changes: {kind: linear, to: 0.1}. Default: it does not."""


@dataclass
class BranchTaskOptions:
    """What one branch of the model is trained on."""

    energy: TargetOptions | None = None
    forces: TargetOptions | None = None
    stress: TargetOptions | None = None
    virial: TargetOptions | None = None


@dataclass
class TaskOptions:
    """What is trained: a target that is given (`forces: {}`) is on, one that is left out or null is off. A field of the data is
    a target by its own name: `band_gap: {loss: mae}`."""

    energy: TargetOptions | None = None
    """Errors in eV (per atom: eV/atom)."""
    forces: TargetOptions | None = None
    """Errors in eV/A."""
    stress: TargetOptions | None = None
    """Errors in eV/A^3."""
    virial: TargetOptions | None = None
    """The stress times minus the volume, errors in eV (per atom: eV/atom)."""
    denoise: DenoiseOptions | None = None
    """Moves of atoms that were made at random, errors in A: {sigma: 0.1}."""
    fields: dict[str, FieldTargetOptions] = field(default_factory=dict)
    """Fields of the data that are targets; written beside the others, by their names."""
    branches: dict[str, BranchTaskOptions] = field(default_factory=dict)
    """Where the model has branches, targets of each by its name, in place of those above."""
    points: PointTaskOptions | None = None
    """Where samples are points: all of the task; written without this name."""


@dataclass
class CheckpointOptions:
    every_epochs: int | None = option(1, above=0)
    """Save after every so many epochs."""
    every_steps: int | None = option(None, above=0)
    """Save after every so many optimiser steps, also inside an epoch."""
    keep: int = option(2, above=0)
    """How many of the newest checkpoints stay on disk."""
    requeue_exit: int = 75
    """Exit code of a training that a batch system stopped (SIGTERM, SIGUSR1) and that is to be started again."""


@dataclass
class EarlyStoppingOptions:
    patience: int = option(50, above=0)
    """Stop when the monitored value has not improved for so many validations."""
    min_delta: float = 0.0
    """What counts as an improvement."""
    monitor: str | None = None
    """Default: `training.monitor`."""


@dataclass
class SwaOptions:
    """Stochastic weight averaging: the plain mean of the weights over the last part of a training."""

    start: float = option(0.75, above=0, expected="a share of the training, or a number of steps")
    """Where it begins: a share of the training, or from 1 on a number of optimiser steps."""
    every: int | None = option(None, at_least=1, expected="a number of steps, 1 or more")
    """Steps between two weights that are taken into the mean. Default: the steps of an epoch."""


@dataclass
class CompileOptions:
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of torch's Inductor by their names, such as {max_autotune: true}."""


@dataclass
class GraphsOptions:
    sizes: int = option(4, above=0)
    """Batches are filled up to at most so many different sizes."""
    compiled: bool = True
    """Capture the compiled step; false: the eager one, which starts at once and is slower. For grid points in tf32 and
    bf16-mixed true means own kernels where they run, or the written step, not compiled, where that is measured to be faster."""


@dataclass
class KernelOptions:
    radial: str = option("table", choices=("table", "exact"))
    """Where kernels take radial weights from: a table of cubic polynomials, made anew in every step and as precise as float32
    is, or exact, the network's value for every pair of atoms; float64 trainings are always exact."""
    knots: int = option(1024, at_least=FEWEST_KNOTS, at_most=MOST_KNOTS)
    """Intervals of the table. `forgefield check` says how far it is from the network."""
    storage: str = option("float32", choices=("float32", "bfloat16"))
    """What a training step stores the table, features as neighbours read them and rows of edges in: float32, or bfloat16, which
    is half the memory and rounds gradients to about 3e-3; arithmetic and validation are float32. Not with float64."""
    edges: bool = True
    """Allegro's sums over the edges of atoms and its couplings go through kernels on an NVIDIA GPU with Triton, with every
    engine; false: through plain operations."""


@dataclass
class MemoryOptions:
    parts: int = option(1, above=0)
    """Compute every batch in so many parts, one after another: the same gradients with that much less memory."""
    split: bool = False
    """A batch that does not fit is computed in parts; without, the training stops and says what to do."""


@dataclass
class LoraOptions:
    """Train changes of low rank of weight matrices instead of the matrices, which are frozen; with `model.from`."""

    rank: int = option(4, above=0)
    """Of the changes."""
    alpha: float | None = option(None, above=0)
    """A change is multiplied by alpha / rank. Default: by one."""
    targets: list[str] | None = None
    """Patterns of names of the matrices. Default: all of the encoder, model.*."""


@dataclass
class TrainingOptions:
    lr: float = option(0.01, above=0)
    """Learning rate."""
    scale_lr: str = "none"
    """What several processes do to every learning rate: none, sqrt (times the root of their number) or linear."""
    optimizer: str | dict[str, Any] = "adam"
    """Name of a torch optimiser, an import path, or {name: adamw, weight_decay: 1e-3, ...}."""
    scheduler: str | dict[str, Any] | None = None
    """Name of a torch learning-rate scheduler or {name: ReduceLROnPlateau, patience: 20, ..., interval: epoch|step}; or by step
    and as long as the run, as in DeePMD-kit: {name: exp|cosine_to|wsd, stop_lr: 1e-6, warmup_steps: 1000, ...}."""
    engine: str | None = option("auto", choices=("auto", "eager", "compile", "graphs", "script"))
    """How a step is executed: eager, compile, graphs (CUDA graphs), script; auto measures and takes the fastest."""
    derivative: str = option("auto", choices=("auto", "double", "tangent", "kernels"))
    """How a loss of forces is differentiated: double (backward twice), tangent (forward once, backward once) or kernels,
    which is tangent through generated GPU kernels (NequIP); auto takes kernels with the graphs engine where they can run,
    else double."""
    kernels: KernelOptions = field(default_factory=KernelOptions)
    """Settings of the kernels."""
    compile: CompileOptions = field(default_factory=CompileOptions)
    """Settings of the compile engine."""
    graphs: GraphsOptions = field(default_factory=GraphsOptions)
    """Settings of the graphs engine."""
    precision: str | dict[str, Any] = "float32"
    """Arithmetic inside the network: float64, float32, tf32, bf16-mixed or fp16-mixed; geometry and energy sums are always
    float64. A schedule: {start: tf32, finish: float32, finish_epochs: 10}."""
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    """What to do where memory is short."""
    block: int | None = option(None, above=0)
    """Points only: optimiser steps made in one go, as one CUDA graph with the graphs engine. Signals are looked at and
    checkpoints written between blocks. Default: 64 where steps are short, else 16."""
    ema: float | None = option(0.99, above=0, below=1, expected="a number between 0 and 1, or null for no average")
    """Decay of the exponential moving average of the weights; the average is validated, tested and deployed."""
    swa: SwaOptions | None = None
    """In place of `ema` (then null): the mean of the weights over the last part: {start: 0.75}; validated and deployed."""
    clip_norm: float | None = option(None, above=0)
    """Largest norm of the whole gradient."""
    accumulate: int = option(1, above=0)
    """Batches per optimiser step."""
    weighting: str | dict[str, Any] | None = None
    """Weights of targets that find themselves: softadapt (what falls slowest weighs most), uncertainty (learnt variances), or
    {name: softadapt, every: 50, beta: 1.0}, {name: uncertainty, lr: 1.0}. Reported losses have the task's own weights."""
    freeze: list[str] | None = None
    """Parameters that are not trained, by patterns of their names: [model.*] is the encoder, [heads.of_gap.*] a head."""
    lr_groups: dict[str, float] | None = None
    """Learning rates by part, as factors of `lr`: {model.*: 0.1}; the first pattern that matches counts."""
    lora: LoraOptions | None = None
    """Changes of low rank of frozen matrices: {rank: 4, targets: [model.*]}. They are part of the matrices in all that a run
    writes for use."""
    monitor: str = "val/loss"
    """What picks the best model, feeds ReduceLROnPlateau and early stopping."""
    early_stopping: EarlyStoppingOptions | None = None
    """Stop before the end when nothing improves: {patience: 50}. Default: never."""
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    """When the state of the run is saved."""
    tensorboard: int = option(1, choices=(0, 1, 2))
    """0 none, 1 losses and learning rate, 2 also weights and gradients as histograms."""


@dataclass
class Config:
    """A config: its sections, and the settings at its top."""

    name: str | None = None
    """Name of the run, also its folder. Default: name of the config file."""
    out: str = "runs"
    """Folder that holds runs."""
    seed: int = option(0, at_least=0, at_most=LARGEST_SEED, expected=SEED)
    """Fixes everything random: initial weights, split, order of the frames."""
    data: DataOptions = field(default_factory=DataOptions)
    """Frames to learn from, and how they are split, read and batched."""
    model: dict[str, Any] = field(default_factory=lambda: {"name": "nequip", "preset": "S"})
    """The network: a built-in name or an import path, and its options; presets S, M, L, XL fill those not given. Or {from: RUN,
    which: best, shifts: keep}: the model of a run, trained further; shifts fit: energy shifts are fitted to the new data."""
    task: TaskOptions | None = None
    """What is trained. Default (null): energy, and forces where the data has them."""
    training: TrainingOptions = field(default_factory=TrainingOptions)
    """How it is trained."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Anything `lightning.Trainer` takes."""
    callbacks: list[Any] = field(default_factory=list)
    """Lightning callbacks: gradient_check, training_helper and others of ours by name, own ones by import path; with arguments:
    {name: gradient_check, policy: skip}."""
    tune: dict[str, Any] | None = None
    """What `forgefield tune` varies: {trials: 50, monitor: val/loss, space: {training.lr: {log: [1e-5, 1e-2]}}}; a training
    does not look at it."""

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        if self.name is None:
            raise ForgefieldError("'name' is missing: a run needs a name, which is also that of its folder.")
        return Path(self.out) / self.name

    @property
    def cutoff(self) -> float:
        """Radius of the neighbour list, A, where the config has one: that of `model.from` is filled in before it is used."""
        if self.data.cutoff is None:
            raise ForgefieldError("'data.cutoff' is missing: give the radius of the neighbour list in A.")
        return self.data.cutoff

    @property
    def points(self) -> PointsOptions:
        """The section `data.points` of a config whose samples are grid points."""
        if self.data.points is None:
            raise ForgefieldError("'data.points' is missing: the samples of this config are not grid points.")
        return self.data.points

"""The Python side of `pair_style forgefield`: functions that the plugin (`plugin/pair_forgefield.cpp`) calls.

The plugin calls through C function pointers. A function must not raise an exception into C: errors become a message in a buffer
that the caller provides and a return value that signals failure, and the plugin stops LAMMPS on all processes.
"""

from __future__ import annotations

import ctypes
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.inference.ase import load_for_evaluation
from forgefield.inference.lammps.evaluator import Evaluator, Share, species_of_types
from forgefield.inference.uncertainty import load_uncertainty
from forgefield.kinds import FRAMES
from forgefield.parallel.launch import detect_launch
from forgefield.runs import Run

Exchanger = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class Opened(ctypes.Structure):
    """`Opened` of the plugin."""

    _fields_ = [
        ("cutoff", ctypes.c_double),
        ("width", ctypes.c_int64),
        ("several_ranks", ctypes.c_int64),
        ("uncertain", ctypes.c_int64),
    ]


class Step(ctypes.Structure):
    """`Step` of the plugin: one evaluation."""

    _fields_ = [
        ("n_local", ctypes.c_int64),
        ("n_atoms", ctypes.c_int64),
        ("n_edges", ctypes.c_int64),
        ("n_ranks", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("destination", ctypes.c_void_p),
        ("vectors", ctypes.c_void_p),
        ("energies", ctypes.c_void_p),
        ("slopes", ctypes.c_void_p),
        ("uncertainties", ctypes.c_void_p),
        ("pair", ctypes.c_void_p),
        ("forward", Exchanger),
        ("reverse", Exchanger),
    ]


_Message = (ctypes.c_void_p, ctypes.c_int)
_Open = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p), ctypes.c_int, ctypes.POINTER(Opened), *_Message
)
_Assign = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p), *_Message)
_Compute = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.POINTER(Step), *_Message)
_Close = ctypes.CFUNCTYPE(None, ctypes.c_int64)


class Callbacks(ctypes.Structure):
    """`Callbacks` of the plugin."""

    _fields_ = [("open", _Open), ("assign", _Assign), ("compute", _Compute), ("close", _Close)]


@dataclass
class PairOptions:
    """Keywords after the run in `pair_style forgefield RUN keyword value ...`."""

    which: str = "best"
    """Weights of the run: best or last."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: a GPU for each process of a node, if there is one."""
    dtype: str | None = None
    """Arithmetic inside the network, float32 or float64. Default: as trained."""
    head: str | None = None
    """Branch of a model that has several."""
    trust_code: bool = False
    """yes: import code that the run refers to, such as a user-defined model."""
    uncertainty: bool = False
    """yes: compute the uncertainty of the energy of each atom, for `fix pair`."""


def parse_options(words: Sequence[str]) -> tuple[str, PairOptions]:
    """Run and options of the words after `pair_style forgefield`."""
    if not words:
        raise ForgefieldError("name the run: pair_style forgefield RUN.")
    names = [field.name for field in fields(PairOptions)]
    values: dict[str, Any] = {}
    if len(words) % 2 == 0:
        raise ForgefieldError(
            f"'{words[-1]}' has no value; options are pairs of a keyword ({', '.join(names)}) and a value."
        )
    for name, value in zip(words[1::2], words[2::2]):
        if name not in names:
            raise ForgefieldError(
                f"'{name}' is not an option; options are {', '.join(names)}.{did_you_mean(name, names)}"
            )
        values[name] = value
    for name in {"trust_code", "uncertainty"} & values.keys():
        if values[name] not in ("yes", "no"):
            raise ForgefieldError(f"{name} is '{values[name]}'; it should be yes or no.")
        values[name] = values[name] == "yes"
    if values.get("which", "best") not in ("best", "last"):
        raise ForgefieldError(f"which is '{values['which']}'; it should be best or last.")
    if values.get("dtype", "float32") not in ("float32", "float64"):
        raise ForgefieldError(f"dtype is '{values['dtype']}'; it should be float32 or float64.")
    return words[0], PairOptions(**values)


class PairModel:
    """A model that LAMMPS evaluates."""

    def __init__(self, run_name: str, options: PairOptions) -> None:
        run = Run.open(run_name, trust_code=options.trust_code)
        if run.kind is not FRAMES:
            raise ForgefieldError(f"run {run.name} is not a potential: it was trained on grid points.")
        run.require_single_model("used by this pair style")
        self.device = choose_device(options.device)
        potential = load_for_evaluation(run, options.which, self.device, options.dtype, options.head)
        uncertainty = load_uncertainty(run, options.which, options.head) if options.uncertainty else None
        self.evaluator = Evaluator(potential, uncertainty)
        self.species_of_type: Tensor | None = None

    def assign(self, symbols: Sequence[str]) -> None:
        """symbols: chemical symbol of each atom type, or its name in the model."""
        species = species_of_types(self.evaluator.species, symbols, self.evaluator.type_names)
        self.species_of_type = torch.tensor([-1, *species])

    def compute(self, step: Step) -> None:
        """Set energies and slopes of a step."""
        assert self.species_of_type is not None
        n_atoms, n_edges = step.n_atoms, step.n_edges
        types = _array(step.types, (n_atoms,), np.int64)
        share = Share(
            n_local=step.n_local,
            species=self.species_of_type[torch.from_numpy(types)].to(self.device),
            source=torch.from_numpy(_array(step.source, (n_edges,), np.int64)).to(self.device),
            destination=torch.from_numpy(_array(step.destination, (n_edges,), np.int64)).to(self.device),
            vectors=torch.from_numpy(_array(step.vectors, (n_edges, 3), np.float64)).to(self.device),
        )
        found = self.evaluator.evaluate(share, LammpsExchange(step) if step.n_ranks > 1 else None)
        _array(step.energies, (step.n_local,), np.float64)[:] = found.energies.cpu().numpy()
        _array(step.slopes, (n_edges, 3), np.float64)[:] = found.slopes.cpu().numpy()
        if found.uncertainties is not None:
            _array(step.uncertainties, (step.n_local,), np.float64)[:] = found.uncertainties.cpu().numpy()


class LammpsExchange:
    """Exchange through LAMMPS's communication, which sends float64 on the host."""

    def __init__(self, step: Step) -> None:
        self.step = step

    def forward(self, rows: Tensor, n_atoms: int) -> Tensor:
        buffer = torch.zeros(n_atoms, rows.shape[1], dtype=torch.float64)
        buffer[: rows.shape[0]] = rows.detach()
        self._call(self.step.forward, buffer)
        return buffer.to(rows.device, rows.dtype)

    def reverse(self, rows: Tensor, n_local: int) -> Tensor:
        buffer = rows.detach().to("cpu", torch.float64, copy=True).contiguous()
        self._call(self.step.reverse, buffer)
        return buffer[:n_local].to(rows.device, rows.dtype)

    def _call(self, function: Callable[..., int], buffer: Tensor) -> None:
        if function(self.step.pair, buffer.data_ptr(), buffer.shape[1]):
            raise ForgefieldError("the communication of LAMMPS failed.")  # LAMMPS then reports its own error


def choose_device(requested: str) -> torch.device:
    """The device of this process. Without a GPU, processes of a node share its cores."""
    launch = detect_launch(os.environ)
    if requested == "auto":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        requested = f"cuda:{launch.local_rank % count}" if count else "cpu"
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        raise ForgefieldError(f"device is '{requested}'; it should be cpu, cuda, cuda:N or auto.") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ForgefieldError(f"device is {requested}, but this machine has {torch.cuda.device_count()} CUDA devices.")
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(1, launch.local_size)))
    return device


def _array(address: int | None, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Memory of the plugin as an array; without an address, or of size zero, an empty one."""
    if not address or 0 in shape:
        return np.zeros(shape, dtype=dtype)
    kind = ctypes.c_int64 if dtype is np.int64 else ctypes.c_double
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(kind)), shape)


# ---- the functions that the plugin calls

_models: dict[int, PairModel] = {}


def _report(error: BaseException, buffer: int, size: int) -> int:
    """Write an error to the plugin's buffer; returns -1."""
    text = str(error) if isinstance(error, ForgefieldError) else "".join(traceback.format_exception(error)).rstrip()
    content = text.encode()[: size - 1] + b"\0"
    ctypes.memmove(buffer, content, len(content))
    return -1


@_Open
def _open(n_words: int, words: Any, rank: int, opened: Any, message: int, size: int) -> int:
    try:
        model = PairModel(*parse_options([words[i].decode() for i in range(n_words)]))
        evaluator = model.evaluator
        width, uncertain = max(evaluator.widths, default=0), evaluator.uncertainty is not None
        opened[0] = Opened(evaluator.cutoff, width, evaluator.can_be_divided, uncertain)
        number = max(_models, default=0) + 1
        _models[number] = model
        return number
    except BaseException as error:
        return _report(error, message, size)


@_Assign
def _assign(model: int, n_types: int, symbols: Any, message: int, size: int) -> int:
    try:
        _models[model].assign([symbols[i].decode() for i in range(n_types)])
        return 0
    except BaseException as error:
        return _report(error, message, size)


@_Compute
def _compute(model: int, step: Any, message: int, size: int) -> int:
    try:
        _models[model].compute(step[0])
        return 0
    except BaseException as error:
        return _report(error, message, size)


@_Close
def _close(model: int) -> None:
    _models.pop(model, None)


_CALLBACKS = Callbacks(_open, _assign, _compute, _close)


def connect(address: int) -> None:
    """Set the function pointers of a loaded plugin. address: of its `Callbacks`."""
    ctypes.memmove(address, ctypes.byref(_CALLBACKS), ctypes.sizeof(_CALLBACKS))

"""Pickles from unknown sources, read without executing anything they name.

A pickle is a program: it may name any function to be called. `safe_loads` makes only plain containers, dates, numpy arrays and
torch tensors, each with a function of this file; any other name is refused and named in the message. Arrays and tensors become
numpy arrays of numbers or text, never of objects.
"""

from __future__ import annotations

import collections
import datetime
import io
import math
import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

_PLAIN_DTYPE = re.compile(r"[<>=|]?([biufc?]\d*|[SU]\d+)")
_NEWER_NUMPY = {"numpy._core.": "numpy.core."}
_LONGEST = 2**31
"""Sizes and strides of tensors are below this."""
_UNFOLDED = 10**6, 10
"""What is named in several places counts in each; all together may be this many values, and this many a byte of pickle."""


Container = dict[Any, Any] | list[Any] | tuple[Any, ...] | set[Any] | frozenset[Any]


class RefusedPickle(Exception):
    """The pickle names something that is not allowed, or is not what it should be."""


def safe_loads(data: bytes, *, objects: Mapping[str, Any] | None = None) -> Any:
    """The object in `data`: dicts, lists, tuples, numbers, text, dates and numpy arrays.

    objects: by module and name, what else the pickle may name: subclasses of `Inert`, and makers of plain values.
    """
    try:
        unpickler = _PlainUnpickler(io.BytesIO(data), objects or {})
        return _Settling(_UNFOLDED[0] + _UNFOLDED[1] * len(data)).settled(unpickler.load())
    except RefusedPickle:
        raise
    except Exception as error:  # a damaged stream fails in any way it likes
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        raise RefusedPickle(f"it is damaged or not a pickle ({reason})") from error


class Inert:
    """An object of another program's class that is not executed: its state, replaced by `plain()` once everything is read.

    Every class that a reader knows is a subclass. It does nothing else with what the pickle gives it.
    """

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: object) -> Inert:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *args: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        self.state = state

    def plain(self) -> Any:
        """The same as plain data, in which there may be other inert objects."""
        raise NotImplementedError

    @property
    def values(self) -> dict[Any, Any]:
        """The state, which must be a dictionary."""
        if not isinstance(self.state, dict):
            raise RefusedPickle(f"it holds an object of type {type(self).__name__} without values")
        return self.state


class _PlainUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, objects: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._objects = objects

    def find_class(self, module: str, name: str) -> Any:
        for newer, older in _NEWER_NUMPY.items():
            module = module.replace(newer, older, 1) if module.startswith(newer) else module
        origin = f"{module}.{name}"
        if origin in self._objects:
            return self._objects[origin]
        maker = _ALLOWED.get(origin)
        if maker is None:
            raise RefusedPickle(f"it names {origin}, which could run code or is not plain data")
        return Maker(maker)

    def persistent_load(self, pid: object) -> Any:
        raise RefusedPickle("it refers to objects outside of itself")


class Maker:
    """A function the pickle may call, and do nothing else with: its attributes cannot be set."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: object) -> Any:
        return self._function(*args)

    def __setstate__(self, state: object) -> None:
        raise RefusedPickle("it tries to change a function")


class _Dtype:
    """A numpy data type as pickles describe it: a code first, the byte order in its state."""

    __slots__ = ("dtype",)

    def __init__(self, code: object, *_: object) -> None:
        if not isinstance(code, str) or not _PLAIN_DTYPE.fullmatch(code):
            raise RefusedPickle(f"it holds an array of {code!r}; only numbers and text are read")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order, names = state[1], state[2:5]
        if order not in ("<", ">", "|", "=") or any(item is not None for item in names):
            raise RefusedPickle("it holds a structured array; only arrays of numbers and text are read")
        if order in "<>":
            self.dtype = self.dtype.newbyteorder(order)


class _Array:
    """An array whose numbers come later in the stream."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: np.ndarray | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        self.array = _from_buffer(data, dtype, shape, "F" if fortran else "C")


class _Storage:
    """The numbers of a torch tensor, in a row."""

    __slots__ = ("values",)

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __setstate__(self, state: object) -> None:
        raise RefusedPickle("it tries to change the numbers of a tensor")


def _from_buffer(data: object, dtype: object, shape: Sequence[int], order: object = "C", *_: object) -> np.ndarray:
    if not isinstance(dtype, _Dtype) or not isinstance(data, (bytes, bytearray, str)) or order not in ("C", "F"):
        raise RefusedPickle("it holds an array that is not one of numbers or text")
    raw = data.encode("latin1") if isinstance(data, str) else data  # written by Python 2
    return np.frombuffer(raw, dtype.dtype).reshape(shape, order=order).astype(dtype.dtype.newbyteorder("="), copy=False)


def _scalar(dtype: object, data: object = b"") -> Any:
    return _from_buffer(data, dtype, ())[()]


def _encode(text: object, codec: object) -> bytes:
    """Bytes, as old protocols write them."""
    if codec != "latin1" or not isinstance(text, str):
        raise RefusedPickle(f"it holds bytes encoded by {codec!r}")
    return text.encode("latin1")


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _load_from_bytes(data: object) -> _Storage:
    """What `torch.storage._load_from_bytes` gives, but through torch's own reader of weights only."""
    import torch

    if not isinstance(data, bytes) or data.startswith(b"PK"):  # torch never writes a zip file into a pickle
        raise RefusedPickle("it holds a torch file that is not one of those that pickles of tensors hold")
    try:
        storage = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0][:120]
        raise RefusedPickle(f"it holds a torch file that is not plain numbers ({reason})") from error
    if not isinstance(storage, torch.storage.TypedStorage):
        raise RefusedPickle("it holds a torch file that is not the storage of a tensor")
    values = torch.tensor([], dtype=storage.dtype).set_(storage._untyped_storage).numpy()
    if values.nbytes > len(data):
        raise RefusedPickle("it holds a torch file that says it has more numbers than it has")
    return _Storage(values)


def _rebuild_tensor(storage: object, offset: object, size: object, stride: object, *_: object) -> np.ndarray:
    if not isinstance(storage, _Storage):
        raise RefusedPickle("it holds a tensor without numbers")
    if not isinstance(size, tuple) or not isinstance(stride, tuple) or len(size) != len(stride):
        raise RefusedPickle("it holds a tensor of impossible shape")
    if any(type(n) is not int or not 0 <= n < _LONGEST for n in (offset, *size, *stride)):
        raise RefusedPickle("it holds a tensor of impossible shape")
    values = storage.values
    if values.ndim != 1 or not values.flags.c_contiguous:
        raise RefusedPickle("it holds a tensor whose numbers are not in a row")
    if 0 in size:
        return np.empty(size, values.dtype)
    if offset + sum((n - 1) * step for n, step in zip(size, stride)) >= values.size:
        raise RefusedPickle("it holds a tensor that reaches beyond its numbers")
    if math.prod(size) > values.size:
        raise RefusedPickle("it holds a tensor that repeats its numbers (an expanded one; store it by .contiguous())")
    steps = tuple(step * values.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(values[offset:], size, steps).copy()


class _Settling:
    """Puts arrays in the place of what stood for them. What is named in several places is settled once, and shared.

    limit: how many values there may be when each is counted wherever it is named. Whoever walks over the result, or makes
    an array of it, meets all of them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._done: dict[int, tuple[Any, int] | None] = {}
        """id -> the settled value and how many values it unfolds to; None while its own items are looked at."""
        self._plain: dict[int, Any] = {}
        """id of an inert object -> its plain data, kept so that ids stay unique."""

    def settled(self, value: object) -> Any:
        return self._settle(value)[0]

    def _settle(self, value: object) -> tuple[Any, int]:
        if isinstance(value, Inert):
            if id(value) not in self._plain:
                self._plain[id(value)] = value.plain()
            return self._settle(self._plain[id(value)])
        if not isinstance(value, (dict, list, tuple, set, frozenset)):
            return _single(value), 1
        if id(value) not in self._done:
            self._done[id(value)] = None
            self._done[id(value)] = self._container(value)
        settled = self._done[id(value)]
        if settled is None:
            raise RefusedPickle("it holds a container that contains itself")
        return settled

    def _container(self, value: Container) -> tuple[Any, int]:
        """`value` stays alive in the whole it belongs to, so that its id stays its own."""
        flat: Iterable[object] = (
            [part for pair in dict.items(value) for part in pair] if isinstance(value, dict) else value
        )
        parts, count = [], 1
        for item in flat:
            part, n = self._settle(item)
            parts.append(part)
            count += n
            if count > self._limit:
                raise RefusedPickle("it names the same values so often that they unfold to more than it could hold")
        if isinstance(value, dict):
            return dict(zip(parts[::2], parts[1::2])), count
        return type(value)(parts), count


def _single(value: object) -> Any:
    if isinstance(value, _Array):
        if value.array is None:
            raise RefusedPickle("it holds an array without numbers")
        return value.array
    if isinstance(value, _Dtype):
        return str(value.dtype)
    if isinstance(value, (_Storage, Maker)):
        raise RefusedPickle("it holds functions or loose storages of tensors as values")
    return value


_ALLOWED: dict[str, Callable[..., Any]] = {
    "_codecs.encode": _encode,
    "collections.OrderedDict": collections.OrderedDict,
    "datetime.datetime": datetime.datetime,
    "datetime.date": datetime.date,
    "numpy.dtype": _Dtype,
    "numpy.ndarray": _reconstruct,
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": _from_buffer,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch.storage._load_from_bytes": _load_from_bytes,
}
NUMBERS: dict[str, Callable[..., Any]] = {"numpy.core.multiarray.scalar": _scalar, "numpy.dtype": _Dtype}
"""What numbers of numpy consist of."""

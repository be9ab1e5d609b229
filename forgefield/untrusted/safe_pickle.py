"""Pickles and torch files from unknown sources, read without executing anything they name.

A pickle is a program: it may name any function to be called. `safe_loads` makes only plain containers, dates, numpy arrays and
torch tensors, each with a function of this file; any other name is refused and named in the message. Arrays and tensors become
numpy arrays of numbers or text, never of objects.

`read_torch_file` reads checkpoints, zip archives of one pickle and raw tensor bytes. It makes plain containers and tensors;
every other class becomes an inert `Foreign` object that keeps no data. `read_torch_records` also keeps the data of such
objects, as inert `Record`s.
"""

from __future__ import annotations

import collections
import datetime
import io
import math
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.untrusted.archives import open_archive

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


_NUMBERS = {"numpy.core.multiarray.scalar": _scalar, "numpy.dtype": _Dtype}
"""What numbers of numpy consist of."""
_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}


class Foreign:
    """Stands for an object of a class that is not allowed; swallows whatever the pickle does to it."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def __call__(self, *args: object, **kwargs: object) -> Foreign:
        return self

    def __setstate__(self, state: object) -> None: ...
    def __setitem__(self, key: object, value: object) -> None: ...
    def append(self, value: object) -> None: ...
    def extend(self, values: object) -> None: ...
    def add(self, value: object) -> None: ...


class Record:
    """The data of an object of another program: the name of its class, the arguments of its constructor, and its state.

    Every class or function that a pickle names is a subclass, and calling it makes a record; nothing is executed. One that is
    stored as a value, such as an activation function, is that subclass itself.
    """

    origin: ClassVar[str] = ""
    """Module and name of the class or function."""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: object, **kwargs: object) -> Record:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __call__(self, *args: object, **kwargs: object) -> Record:
        return Record(self, *args)

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None: ...
    def append(self, value: object) -> None: ...
    def extend(self, values: object) -> None: ...
    def add(self, value: object) -> None: ...


def read_torch_file(path: str | os.PathLike[str]) -> Any:
    """The object in a file of `torch.save` (zip format): dicts, lists, numbers, strings, tensors on the CPU."""
    return _read(Path(path), _TorchUnpickler)


def read_torch_records(path: str | os.PathLike[str]) -> Any:
    """As `read_torch_file`, with a `Record` in place of each object of a class that is not allowed."""
    return _read(Path(path), _RecordUnpickler)


def read_torchscript_records(path: str | os.PathLike[str]) -> Any:
    """The attributes of a TorchScript model (`torch.jit.save`) as `Record`s and tensors. Its code is not read."""
    return _read(Path(path), _RecordUnpickler, is_script=True)


def _read(path: Path, unpickler: type[_TorchUnpickler], *, is_script: bool = False) -> Any:
    if not path.is_file():
        raise ForgefieldError(f"{path} does not exist.")
    with open_archive(
        path, str(path), "a torch checkpoint", "save it with torch.save, which does not compress"
    ) as archive:
        return _read_archive(archive, unpickler, is_script)


def _read_archive(archive: zipfile.ZipFile, unpickler: type[_TorchUnpickler], is_script: bool) -> Any:
    names = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(names) != 1:
        raise ValueError(
            "it holds no single data.pkl; a packaged or compiled model cannot be read, give the checkpoint"
        )
    root = names[0].split("/")[0]
    if (f"{root}/constants.pkl" in archive.namelist()) != is_script:
        raise ValueError(
            "it is not a TorchScript model"
            if is_script
            else "it is a TorchScript model, give the checkpoint it was made from"
        )
    if f"{root}/byteorder" in archive.namelist() and archive.read(f"{root}/byteorder") != b"little":
        raise ValueError("its numbers are stored big-endian")
    return unpickler(io.BytesIO(archive.read(names[0])), archive, root).load()


class _TorchUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(file)
        self._archive, self._root = archive, root
        self._storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module in ("torch", "torch.storage") and name in _DTYPES:
            return _DTYPES[name]
        allowed = {"_rebuild_tensor_v2": _rebuild_torch_tensor, "_rebuild_parameter": _rebuild_parameter}
        if module == "torch._utils" and name in allowed:
            return allowed[name]
        return Foreign

    def persistent_load(self, pid: tuple[Any, ...]) -> Tensor:
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"unknown stored object {kind!r}")
        if key not in self._storages:
            data = bytearray(self._archive.read(f"{self._root}/data/{key}"))
            values = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            if values.numel() != count:
                raise pickle.UnpicklingError(f"tensor {key} has {values.numel()} numbers instead of {count}")
            self._storages[key] = values
        return self._storages[key]


class _RecordUnpickler(_TorchUnpickler):
    def __init__(self, file: io.BytesIO, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(file, archive, root)
        self._classes: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        allowed = super().find_class(module, name)
        if allowed is not Foreign:
            return allowed
        origin = f"{module}.{name}".replace("numpy._core.", "numpy.core.", 1)
        if origin in _NUMBERS:
            return _NUMBERS[origin]
        if origin in ("builtins.set", "__builtin__.set"):
            return set
        if origin not in self._classes:
            self._classes[origin] = type(name.rpartition(".")[2], (Record,), {"origin": origin})
        return self._classes[origin]


def _rebuild_torch_tensor(
    storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object
) -> Tensor:
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if min((offset, *size, *stride)) < 0 or (all(size) and last >= storage.numel()):
        raise pickle.UnpicklingError("a tensor reaches beyond its storage")
    if math.prod(size) > storage.numel():
        raise pickle.UnpicklingError("a tensor repeats its numbers; store it with .contiguous()")
    return torch.as_strided(storage, size, stride, offset) if all(size) else storage.new_empty(size)


def _rebuild_parameter(data: Tensor, *_: object) -> Tensor:
    return data

"""Files of torch from unknown sources, read without executing anything they name.

Checkpoints, TorchScript models and packages (`torch.package`) are zip archives of pickles and raw bytes of tensors.
`read_torch_file` makes plain containers and tensors; every other class becomes an inert `Foreign` object that keeps no data.
The other readers also keep the data of such objects, as inert `Record`s.
"""

from __future__ import annotations

import collections
import io
import math
import os
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.untrusted.archives import open_archive
from forgefield.untrusted.safe_pickle import NUMBERS

LONGEST_TEXT = 2**24
"""Texts in a package may have this many bytes."""
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


class TorchPackage:
    """A package of `torch.package`, such as NequIP's: texts and pickled objects by name. Its code is not read."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        roots = {name.split("/")[0] for name in archive.namelist() if name.endswith("/.data/version")}
        if len(roots) != 1:
            raise ValueError("it is not a package of torch")
        self._root = roots.pop()
        _require_little_endian(archive, self._root)

    def text(self, name: str) -> str:
        """The text file `name`, such as `model/config.yaml`."""
        if self._archive.getinfo(f"{self._root}/{name}").file_size > LONGEST_TEXT:
            raise ValueError(f"its {name} is longer than any text that it should have")
        return self._archive.read(f"{self._root}/{name}").decode()

    def records(self, name: str) -> Any:
        """The object in the pickle `name`, with a `Record` in place of each object of a class that is not allowed."""
        content = io.BytesIO(self._archive.read(f"{self._root}/{name}"))
        return _RecordUnpickler(content, self._archive, f"{self._root}/.data/{{}}.storage").load()


@contextmanager
def open_torch_package(path: Path) -> Iterator[TorchPackage]:
    """A package of `torch.package`, opened for reading."""
    with _open(path, "a package of torch") as archive:
        yield TorchPackage(archive)


def _read(path: Path, unpickler: type[_TorchUnpickler], *, is_script: bool = False) -> Any:
    with _open(path, "a torch checkpoint") as archive:
        return _read_archive(archive, unpickler, is_script)


@contextmanager
def _open(path: Path, kind: str) -> Iterator[zipfile.ZipFile]:
    if not path.is_file():
        raise ForgefieldError(f"{path} does not exist.")
    with open_archive(path, str(path), kind, "save it with torch.save, which does not compress") as archive:
        yield archive


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
    _require_little_endian(archive, root)
    return unpickler(io.BytesIO(archive.read(names[0])), archive, f"{root}/data/{{}}").load()


def _require_little_endian(archive: zipfile.ZipFile, root: str) -> None:
    if f"{root}/byteorder" in archive.namelist() and archive.read(f"{root}/byteorder") != b"little":
        raise ValueError("its numbers are stored big-endian")


class _TorchUnpickler(pickle.Unpickler):
    """storage: name of the archive's member with the numbers of a tensor, with {} for its key."""

    def __init__(self, file: io.BytesIO, archive: zipfile.ZipFile, storage: str) -> None:
        super().__init__(file)
        self._archive, self._storage = archive, storage
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
            data = bytearray(self._archive.read(self._storage.format(key)))
            values = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            if values.numel() != count:
                raise pickle.UnpicklingError(f"tensor {key} has {values.numel()} numbers instead of {count}")
            self._storages[key] = values
        return self._storages[key]


class _RecordUnpickler(_TorchUnpickler):
    def __init__(self, file: io.BytesIO, archive: zipfile.ZipFile, storage: str) -> None:
        super().__init__(file, archive, storage)
        self._classes: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        allowed = super().find_class(module, name)
        if allowed is not Foreign:
            return allowed
        origin = f"{module}.{name}".replace("numpy._core.", "numpy.core.", 1)
        if origin in NUMBERS:
            return NUMBERS[origin]
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

"""Reads what `torch.save` wrote without executing anything in it.

A checkpoint is a zip of one pickle and raw tensor bytes. The pickle may name any function to be called on loading; here
only plain containers and tensors are made, every other class becomes an inert `Foreign` object that keeps no data.
"""

from __future__ import annotations

import collections
import io
import math
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.untrusted.archives import open_archive

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


def read_torch_file(path: str | os.PathLike[str]) -> Any:
    """The object in a file of `torch.save` (zip format): dicts, lists, numbers, strings, tensors on the CPU."""
    if not Path(path).is_file():
        raise ForgefieldError(f"{path} does not exist.")
    with open_archive(
        Path(path), str(path), "a torch checkpoint", "save it with torch.save, which does not compress"
    ) as archive:
        return _read_archive(archive)


def _read_archive(archive: zipfile.ZipFile) -> Any:
    names = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(names) != 1:
        raise ValueError(
            "it holds no single data.pkl; a packaged or compiled model cannot be read, give the checkpoint"
        )
    root = names[0].split("/")[0]
    if f"{root}/constants.pkl" in archive.namelist():
        raise ValueError("it is a TorchScript model, give the checkpoint it was made from")
    if f"{root}/byteorder" in archive.namelist() and archive.read(f"{root}/byteorder") != b"little":
        raise ValueError("its numbers are stored big-endian")
    return _Reader(io.BytesIO(archive.read(names[0])), archive, root).load()


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(file)
        self._archive, self._root = archive, root
        self._storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module in ("torch", "torch.storage") and name in _DTYPES:
            return _DTYPES[name]
        allowed = {"_rebuild_tensor_v2": _rebuild_tensor, "_rebuild_parameter": _rebuild_parameter}
        if module == "torch._utils" and name in allowed:
            return allowed[name]
        return Foreign

    def persistent_load(self, pid: Any) -> Tensor:
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


def _rebuild_tensor(storage: Tensor, offset: int, size: tuple, stride: tuple, *_: object) -> Tensor:
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if min((offset, *size, *stride)) < 0 or (all(size) and last >= storage.numel()):
        raise pickle.UnpicklingError("a tensor reaches beyond its storage")
    if math.prod(size) > storage.numel():
        raise pickle.UnpicklingError("a tensor repeats its numbers; store it with .contiguous()")
    return torch.as_strided(storage, size, stride, offset) if all(size) else storage.new_empty(size)


def _rebuild_parameter(data: Tensor, *_: object) -> Tensor:
    return data

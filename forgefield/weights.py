"""Files of trained weights: safetensors with a checksum of the tensors in their metadata, verified whenever they are read.

The checksum is also the identity of the weights: results that were computed with them store it. PyTorch is imported when
tensors are used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgefield.errors import ForgefieldError
from forgefield.files import read_bytes, write_atomically
from forgefield.formats import VERSION, Format

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS_FILE = Format("a file of weights")
"""The format of weight files; the version is part of the metadata."""
_ABOUT, _CHECKSUM = "about", "sha256"
_LARGEST_HEADER = 100_000_000
"""Bytes; the limit of safetensors itself."""


@dataclass(frozen=True)
class Weights:
    """state: the tensors. about: metadata. sha256: digest of the tensors."""

    state: dict[str, Tensor]
    about: dict[str, Any]
    sha256: str


def digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and values of all tensors, independent of their order."""
    import torch

    total = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def contiguous(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as files of weights store them."""
    return {name: tensor.contiguous() for name, tensor in state.items()}


def write_weights(path: Path, state: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and metadata atomically."""
    from safetensors.torch import save

    # One metadata entry: with several, safetensors writes them in random order, and equal runs would differ in bytes.
    metadata = {_ABOUT: json.dumps({VERSION: WEIGHTS_FILE.version, **about, _CHECKSUM: digest(state)})}
    write_atomically(path, save(dict(state), metadata=metadata))


def read_weights(path: Path) -> Weights:
    """Read and verify a file of weights. Files of earlier versions have no checksum and are not verified."""
    from safetensors.torch import load

    content = read_bytes(path)
    try:
        state, about = load(content), _about(content)
    except Exception as error:
        raise ForgefieldError(f"{path} is damaged: {str(error).splitlines()[0]}. {_REMEDY}") from error
    about = WEIGHTS_FILE.upgrade(about, path)
    sha256, stored = digest(state), about.get(_CHECKSUM)
    if stored is not None and stored != sha256:
        raise ForgefieldError(
            f"{path} is damaged: its tensors do not match the checksum they were written with. {_REMEDY}"
        )
    return Weights(state, about, sha256)


def stored_checksum(path: Path) -> str | None:
    """The checksum in the header of a file, without reading or verifying the tensors; None for a file without one."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            header = file.read(min(int.from_bytes(start, "little"), _LARGEST_HEADER))
        checksum = _about(start + header).get(_CHECKSUM)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return None
    return checksum if isinstance(checksum, str) else None


_REMEDY = "Restore the file from a backup, or use the other weights of the run (--which last or --which best)."


def _about(content: bytes) -> dict[str, Any]:
    """The metadata in the header; empty if there are none."""
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    about = json.loads(metadata.get(_ABOUT, "{}"))
    return about if isinstance(about, dict) else {}

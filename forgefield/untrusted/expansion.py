"""How large compressed data may become: a small file cannot ask for unlimited memory.

The size that a file declares for its content is compared with the bytes it takes on disk before anything is unpacked.
"""

from __future__ import annotations

from forgefield.errors import ForgefieldError

FREE_BYTES = 256 * 2**20
"""Content up to this size is unpacked however small the file is."""
LARGEST_RATIO = 100
"""Larger content may be this many times the size of the file. Compressed coordinates and forces stay below 10."""
FRAME_BYTES = 400
"""What a frame takes in memory in addition to its numbers, about."""


def check_expansion(declared: int, stored: int, name: str, remedy: str) -> None:
    """Refuse content of `declared` bytes that comes out of `stored` bytes on disk, where that is out of proportion.

    name: the file, for messages. remedy: how to write the same data so that it is accepted.
    """
    if declared > max(FREE_BYTES, LARGEST_RATIO * stored):
        raise ForgefieldError(
            f"{name}: its content would take {declared / 2**20:.0f} MiB of memory, more than {LARGEST_RATIO} times the "
            f"{_size(stored)} it has on disk; {remedy}"
        )


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB" if n_bytes >= 2**20 else f"{n_bytes} bytes"

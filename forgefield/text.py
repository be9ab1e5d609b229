"""Numbers in messages."""

from __future__ import annotations


def counted(n: int, noun: str) -> str:
    """`1 frame`, `2 frames`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def size_text(n_bytes: int) -> str:
    """`812 B`, `1.4 MB`, `3.2 GB`."""
    size = float(n_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"

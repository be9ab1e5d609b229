"""Importing everything that a command needs: half a million objects that live until the process ends."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def for_good() -> Iterator[None]:
    """Import modules inside; the garbage collector is off meanwhile, and afterwards ignores the imported objects.

    A short training takes two thirds of the time. Nothing happens if all modules are imported already. In a program that calls
    the command the objects are not frozen, since its own would never be collected either.
    """
    modules, was_on = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
        if len(sys.modules) > modules and _is_the_program():
            gc.freeze()
    finally:
        if was_on:
            gc.enable()


def _is_the_program() -> bool:
    """Whether this process is `forgefield` or `python -m forgefield`."""
    called = Path(sys.argv[0])
    return called.stem == "forgefield" or (called.name, called.parent.name) == ("__main__.py", "forgefield")

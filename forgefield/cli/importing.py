"""Imports of everything that a command needs: half a million objects that stay until the process ends."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def for_good() -> Iterator[None]:
    """The garbage collector does not run while modules are imported here, and never looks at what they have made.

    A short training takes two thirds of the time. Where all modules are there already, nothing happens. A program that calls
    the command keeps what it has made to itself: it would never be collected either.
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

"""Turns written kernels into Triton functions, each once a process; Triton itself keeps what it compiles on disk."""

from __future__ import annotations

import hashlib
import linecache
import types
from functools import lru_cache
from typing import Any

from forgefield.kernels.convolution.form import Form
from forgefield.kernels.convolution.source import Kind, write_kernel
from forgefield.kernels.core.switches import has_triton as has_triton  # asked for here, too


@lru_cache(maxsize=512)
def kernel(form: Form, kind: Kind) -> Any:
    """The Triton function for this form; compiled when it is first launched."""
    return getattr(module_from(write_kernel(form, kind)), kind.name)


def module_from(source: str) -> types.ModuleType:
    """A module made of text. Triton reads the source of what it compiles, so the text is kept where Python looks for it."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    name = f"forgefield_kernel_{digest}"
    module = types.ModuleType(name)
    module.__file__ = f"<{name}>"
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(keepends=True), module.__file__)
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module

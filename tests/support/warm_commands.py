"""A folder for PATH and JUPYTER_PATH, where `forgefield` and the kernels of notebooks start as warm processes do.

For tests in which other programs start these commands: a shell, torchrun, Jupyter.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

from tests.support.warm import start_from

COMMAND = '''#!{python} -ISs
"""Has `python -m MODULE ...` run by a warm process, and ends as that does."""

import json
import os
import signal
import socket
import sys

MODULE = {module!r}
if {real!r} and any(name in os.environ for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK")):
    os.execv({real!r}, sys.argv)  # the library of MPI needs the files that mpirun has opened for it
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
socket.send_fds(connection, [b"+"], [1, 2])
request = {{"words": [MODULE, *sys.argv[1:]], "folder": os.getcwd(), "environ": dict(os.environ)}}
connection.sendall(json.dumps(request).encode() + b"\\n")
with connection.makefile() as lines:
    process = int(lines.readline())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os.kill(process, number))
    code = int(lines.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
'''


@contextmanager
def warm_commands(folder: Path) -> Iterator[Path]:
    """Fill this new folder, and serve its commands inside the context. Returns the folder."""
    folder.mkdir()
    address = folder / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        Thread(target=_serve, args=[listener], daemon=True).start()
        _write_command(folder / "forgefield", "forgefield", address, real=Path(sys.executable).with_name("forgefield"))
        _write_command(folder / "kernel", "ipykernel_launcher", address)
        spec = folder / "kernels" / "python3" / "kernel.json"
        spec.parent.mkdir(parents=True)
        argv = [str(folder / "kernel"), "-f", "{connection_file}"]
        spec.write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
        yield folder


def _write_command(path: Path, module: str, address: Path, real: Path | None = None) -> None:
    values = {"python": sys.executable, "module": module, "address": str(address), "real": str(real or "")}
    path.write_text(COMMAND.format(**values))
    path.chmod(0o755)


def _serve(listener: socket.socket) -> None:
    with suppress(OSError):  # closed
        while True:
            connection, _ = listener.accept()
            with connection:
                start_from(connection)

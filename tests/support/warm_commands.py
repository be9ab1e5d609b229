"""A folder for PATH and JUPYTER_PATH, where `forgefield`, `torchrun` and the kernels of notebooks start as warm processes do.

For tests in which other programs start these commands: a shell, mpirun, Jupyter.
"""

from __future__ import annotations

import atexit
import json
import shutil
import socket
import sys
import tempfile
from functools import cache
from pathlib import Path
from threading import Thread

from tests.support.warm import start_from

MODULES = {
    "forgefield": "forgefield",
    "torchrun": "torch.distributed.run",
    "kernel": "ipykernel_launcher",
    "train-many": "tests.support.train_many",
}
"""What the commands run, by name."""
COMMAND = '''#!{python} -ISs
"""Has `python -m MODULE ...` run by a warm process, and ends as that does."""

import json
import os
import signal
import socket
import sys

connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
extra = [int(os.environ["PMI_FD"])] if "PMI_FD" in os.environ else []  # how MPICH talks to its mpirun
socket.send_fds(connection, [b"+"], [1, 2, *extra])
words = [{module!r}, *sys.argv[1:]]
request = {{"words": words, "folder": os.getcwd(), "environ": dict(os.environ), "numbers": extra}}
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


@cache
def warm_commands() -> Path:
    """The folder, which is removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen()
    Thread(target=_serve, args=[listener], daemon=True).start()
    for name, module in MODULES.items():
        command = folder / name
        command.write_text(COMMAND.format(python=sys.executable, module=module, address=str(folder / "socket")))
        command.chmod(0o755)
    spec = folder / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    argv = [str(folder / "kernel"), "-f", "{connection_file}"]
    spec.write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
    return folder


def _serve(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            start_from(connection)

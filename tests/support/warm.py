"""Real processes that start in a fraction of a second: forked from one that has imported what is slow to import.

Each has its own number, memory, environment, folder and signals, and ends as any other: by return, error, signal or kill -9.
For tests of what a process does. Tests of how a process is started (launchers, commands) start theirs from nothing.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from forgefield.cli.importing import for_good
from forgefield.parallel.spawn import free_port

ROOT = Path(__file__).parents[2]


class Warm:
    """A process that runs `python -m MODULE WORDS`. out, err: files for what it prints, by default temporary ones."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environ: Mapping[str, str],
        out: IO[str] | None = None,
        err: IO[str] | None = None,
    ) -> None:
        self.words = list(words)
        self.returncode: int | None = None
        self.out = tempfile.TemporaryFile("w+") if out is None else out  # noqa: SIM115
        self.err = tempfile.TemporaryFile("w+") if err is None else err  # noqa: SIM115
        self._answers, theirs = socket.socketpair()
        request = {"words": self.words, "folder": str(folder), "environ": dict(environ)}
        with theirs:
            socket.send_fds(_server(), [b"+"], [theirs.fileno(), self.out.fileno(), self.err.fileno()])
        self._answers.sendall(json.dumps(request).encode() + b"\n")
        self.pid = self._number()

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        if self.returncode is None and select.select([self._answers], [], [], 0)[0]:
            self.returncode = self._number()
        return self.returncode

    def wait(self, timeout: float = 200) -> int:
        """Its exit code, negative for a signal. After `timeout` seconds it is killed, and that is an error."""
        if self.returncode is None:
            self._answers.settimeout(max(timeout, 0.01))
            try:
                self.returncode = self._number()
            except TimeoutError:
                os.kill(self.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(self.words, timeout) from None
            finally:
                self._answers.close()
        return self.returncode

    def printed(self) -> tuple[str, str]:
        """What it has printed so far as output and as errors."""
        for file in (self.out, self.err):
            file.seek(0)
        return self.out.read(), self.err.read()

    def _number(self) -> int:
        line = b""
        while not line.endswith(b"\n"):
            if not (byte := self._answers.recv(1)):
                raise EOFError("the process that forks has ended")
            line += byte
        return int(line)


LAUNCHERS = {"forgefield": {"FORGEFIELD_LAUNCHER": "forgefield"}, "torchrun": {"TORCHELASTIC_RUN_ID": "warm"}}
"""What tells a process by whom it was started."""


def run_warm(
    *words: str, folder: Path, environ: Mapping[str, str], timeout: float = 200
) -> subprocess.CompletedProcess[str]:
    """Run `python -P -m WORDS` in `folder` with exactly the variables `environ`."""
    return _run(words, [(folder, environ)], timeout)


def run_warm_ranks(
    n: int,
    *words: str,
    folder: Path | Sequence[Path],
    environ: Mapping[str, str],
    launcher: str = "forgefield",
    timeout: float = 200,
) -> subprocess.CompletedProcess[str]:
    """Run `python -P -m WORDS` as n ranks that nobody looks after: they are told their places, and have to end themselves.

    folder: of all ranks, or of each. The exit code is that of the lowest rank that failed, and 0 if none did.
    """
    common = {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(free_port()), **LAUNCHERS[launcher]}
    folders = [folder] * n if isinstance(folder, Path) else folder
    places = [
        (place, {**environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank, place in enumerate(folders)
    ]
    return _run(words, places, timeout)


def _run(
    words: Sequence[str], places: Sequence[tuple[Path, Mapping[str, str]]], timeout: float
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        processes = [Warm(words, folder, environ, out, err) for folder, environ in places]
        end = time.monotonic() + timeout
        codes = [process.wait(end - time.monotonic()) for process in processes]
        return subprocess.CompletedProcess(list(words), next(filter(None, codes), 0), *processes[0].printed())


def start_from(connection: socket.socket) -> None:
    """Start the process for which another program asks. It has sent its open files; the rest of what `Warm` sends follows."""
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    socket.send_fds(_server(), [b"+"], [connection.fileno(), *files])
    for file in files:
        os.close(file)


@cache
def _server() -> socket.socket:
    """The process that forks, started when it is first needed; it ends when this one does."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-P", "-m", "tests.support.warm", str(theirs.fileno())]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, env=environ, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _requests(channel: socket.socket) -> dict[str, Any]:
    """Fork for each request. Returns only in the process that is to do what one asks for."""
    while True:
        _, files, _, _ = socket.recv_fds(channel, 1, 4)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # so that their time is counted with that of this process
        if not files:
            os._exit(0)
        if os.fork() == 0:
            channel.close()
            return _request(*files)
        for file in files:
            os.close(file)


def _request(answers: int, *files: int) -> dict[str, Any]:
    """Fork once more and tell how the new process ends. Returns only in the new one.

    files: its output, its errors, and those that it is to find under certain numbers.
    """
    connection = socket.socket(fileno=answers)
    with connection.makefile() as lines:
        request: dict[str, Any] = json.loads(lines.readline())
    pid = os.fork()
    if pid > 0:
        connection.sendall(f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    connection.close()
    os.setsid()
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in files]  # away from the numbers they are to get
    os.closerange(3, 1000)
    for copy, number in zip(copies, [1, 2, *request.get("numbers", [])], strict=True):
        os.dup2(copy, number, inheritable=True)
        os.close(copy)
    return request


def _become(request: dict[str, Any]) -> None:
    """What a new Python process would do with its command."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with Ctrl-C ignored
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    module, *words = request["words"]
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    with for_good():
        import forgefield.api
        import forgefield.cli.train
        import forgefield.models.nequip.model  # noqa: F401

    gc.freeze()  # as in a command: what was imported stays, and a collection would copy all of it in every process
    _become(_requests(socket.socket(fileno=int(sys.argv[1]))))

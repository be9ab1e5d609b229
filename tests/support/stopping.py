"""Runs a module that gets a signal at a chosen place: `python -m tests.support.stopping MODULE WORDS`.

$STOP_IN=MODULE:FUNCTION names the place (`:Class.method` works, too), $STOP_BY the signal, $STOP_HOW what goes on there when it
comes: `python` (a wait that Python can interrupt), `native` (a computation in C that it cannot), or `compiler`: processes of a
compiler, of which the direct child is ended as well by Ctrl-C, as in a terminal. Their numbers go to the file `compilers`.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def _stop(*args, **options):
    number = signal.Signals[os.environ["STOP_BY"]]
    how = os.environ.get("STOP_HOW", "python")
    if how == "compiler":
        return _compile(number)
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    if how == "python":
        time.sleep(600)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
    return None


def _compile(number: signal.Signals) -> None:
    compiler = subprocess.Popen(["sh", "-c", "sleep 600 & echo $! > compilers; wait"])

    def interrupt() -> None:
        while not Path("compilers").exists() or not Path("compilers").read_text():
            time.sleep(0.02)
        with open("compilers", "a") as file:
            file.write(f"{compiler.pid}\n")
        if number == signal.SIGINT:
            compiler.kill()
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt).start()
    if compiler.wait() != 0:
        raise RuntimeError("the compiler failed")


if __name__ == "__main__":
    sys.argv.pop(0)
    if place := os.environ.get("STOP_IN"):
        from forgefield import processes
        from forgefield.training.engines import choose
        from forgefield.training.run import signals

        processes.STUCK_AFTER_S = signals.STUCK_AFTER_S = 1.0
        choose.WORTH_MEASURING_S = 0.0  # so that even a tiny training is worth compiling
        module, _, name = place.partition(":")
        owner = importlib.import_module(module)
        *classes, name = name.split(".")
        for cls in classes:
            owner = getattr(owner, cls)
        setattr(owner, name, _stop)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

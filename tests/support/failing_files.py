"""Runs a module in which a chosen file is not written: `python -m tests.support.failing_files MODULE WORDS`.

Every file gets its name by `os.replace`. $FAIL_BEFORE=NAME or NAME:n chooses the (n-th) rename to NAME. Right before it,
$FAIL_HOW=kill ends the process by kill -9; with `full` no file gets its name from then on, as on a full disk.
"""

from __future__ import annotations

import errno
import os
import runpy
import signal
import sys

_seen = 0
_is_full = False
_replace = os.replace


def _failing_replace(source, target, **options):
    global _seen, _is_full
    name, _, number = os.environ.get("FAIL_BEFORE", "").partition(":")
    _seen += os.path.basename(target) == name
    if _seen == int(number or 1) or _is_full:
        if os.environ["FAIL_HOW"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        _is_full = True
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return _replace(source, target, **options)


if __name__ == "__main__":
    os.replace = _failing_replace
    sys.argv.pop(0)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

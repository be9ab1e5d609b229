"""`python -m forgefield` is the same as `forgefield`."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once. In the middle of an import, KeyboardInterrupt may come out as any other error, with a long traceback."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def run() -> int:
    """Run the command line and return its exit code; an interrupt from the keyboard is 130, whenever it comes."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, _leave)
    from forgefield.cli import main

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main()
    finally:
        if interruptible:
            signal.signal(signal.SIGINT, _leave)
        eval(
            "0"
        )  # CPython ends by the signal where it has seen a KeyboardInterrupt, handled or not; this clears that note


# `python -m` puts the current folder first on the search path; in a folder of somebody else, a file called torch.py would be
# imported in place of torch. Modules that a config names are found in the current folder all the same (config/components.py).
_here = Path(__file__).parents[1]
if sys.path and not getattr(sys.flags, "safe_path", False) and sys.path[0] in ("", os.getcwd()) and _here != Path.cwd():
    del sys.path[0]

if __name__ == "__main__":
    sys.exit(run())

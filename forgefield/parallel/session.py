"""The group this process belongs to: joined once, kept until the process ends, left in good order."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import NoReturn

from forgefield.errors import ForgefieldError
from forgefield.parallel.failures import abort_all_on_error, announce_failure, exit_immediately, on_loss
from forgefield.parallel.launch import detect_launch
from forgefield.parallel.ranks import Ranks
from forgefield.parallel.rendezvous import connect
from forgefield.processes import Terminated, stop_with_parent

ORPHAN_GRACE_S = 20.0
"""How long a rank whose launcher was killed may take to save and stop."""
_joined: Ranks | None = None


def current_ranks() -> Ranks:
    """The group, found by the variables that the launcher has set. The first call meets the other processes."""
    global _joined
    if _joined is None:
        launch = detect_launch(os.environ)
        if launch.launcher in ("torchrun", "forgefield"):  # their processes are children of one that looks after them
            stop_with_parent(grace=ORPHAN_GRACE_S)
        _joined = connect(launch, on_loss=on_loss)
        if _joined.world_size > 1:
            atexit.register(_leave)
            sys.excepthook = partial(_end_of_script, _joined)
    return _joined


def run_on_all_ranks(command: Callable[[Ranks], int]) -> int:
    """Run a command on all ranks: its exit code, or the end of all of them with the message of the one that failed."""
    ranks = current_ranks()
    if ranks.world_size == 1:
        return command(ranks)
    try:
        with abort_all_on_error(ranks):
            code = command(ranks)
            ranks.barrier()  # some launchers end a job soon after its first process has ended
        _end_of_command(code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        exit_immediately(130)
    except Terminated as stopped:
        print(f"stopped by {stopped}", file=sys.stderr)
        exit_immediately(stopped.exit_code)
    except ForgefieldError as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        exit_immediately(2)
    except BaseException:
        traceback.print_exc()
        exit_immediately(1)


def _end_of_command(code: int) -> NoReturn:
    """What an ordinary end does in Python, then out: torch's communication threads now and then abort a process that is taken
    down piece by piece."""
    atexit._run_exitfuncs()
    exit_immediately(code)


def _end_of_script(ranks: Ranks, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An error in a script of the user's own, outside of any call of ours: the other ranks must not wait for this one."""
    if ranks.error_text is None:
        announce_failure(ranks, error)
    if ranks.is_rank_zero and ranks.failed_first:
        sys.__excepthook__(kind, error, trace)
    exit_immediately(1)


def _leave() -> None:
    global _joined
    ranks, _joined = _joined, None
    if ranks is not None and ranks.watch is not None and ranks.watch.loss is None and ranks.error_text is None:
        ranks.leave()

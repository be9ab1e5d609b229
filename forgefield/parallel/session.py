"""The group of ranks this process belongs to: joined once, kept until the process ends, and left when one of them fails.

A rank that dies leaves the others waiting for a message that never comes. The watch notifies them, and all ranks exit within
seconds, with the error message of the rank that failed first. Nothing is saved: the checkpoints on disk are complete, and the
same command resumes from the newest.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import NoReturn

from forgefield.errors import ForgefieldError
from forgefield.parallel.launch import detect_launch
from forgefield.parallel.ranks import Ranks
from forgefield.parallel.rendezvous import connect
from forgefield.parallel.watch_thread import Loss, LossKind
from forgefield.processes import Terminated, stop_with_parent

NOTICE_DELAY = 1.0
"""Seconds within which the notice of a lost rank arrives; an error that comes first may be a consequence of the loss."""
GRACE = 3.0
"""Seconds that a rank has to exit by itself after another one is lost."""


def on_loss(ranks: Ranks, loss: Loss) -> None:
    """Called on every remaining rank: one of them prints what happened, and each ensures that its process exits."""
    # Rank 0 prints for all ranks. Its own error is printed where it was raised; if it died without one, rank 1 reports that.
    if ranks.rank == (0 if loss.rank > 0 else 1) and (loss.rank > 0 or loss.text is None):
        if loss.kind is LossKind.STOPPED:
            print(loss.text, flush=True)
        else:
            if loss.kind is LossKind.ERROR:  # all ranks meet a wrong setting at about the same time
                _wait_until(lambda: ranks.error_text is not None, NOTICE_DELAY / 2)
            same_on_all_ranks = loss.kind is LossKind.ERROR and loss.text == ranks.error_text
            text = f"error: {loss.text}" if same_on_all_ranks else describe_loss(ranks, loss)
            print(text, file=sys.stderr, flush=True)
    _exit_soon(loss.exit_code)


def _exit_soon(code: int) -> None:
    last_resort = threading.Timer(GRACE, os._exit, args=(code,))
    last_resort.daemon = True
    last_resort.start()


def describe_loss(ranks: Ranks, loss: Loss) -> str:
    where = f"rank {loss.rank} on {loss.host}"
    if loss.text is None:
        return (
            f"error: {where} exited without an error message (killed, or out of memory?); all {ranks.world_size} processes "
            "stop. The checkpoints are complete: run the same command to resume."
        )
    if loss.kind is LossKind.ERROR:
        return f"error: {loss.text} ({where})"
    return f"{loss.text.rstrip()}\nerror: {where} failed with the error above; all {ranks.world_size} processes stop."


def announce_failure(ranks: Ranks, error: BaseException) -> None:
    """Notify all ranks that this one is about to exit, unless another one is already lost. Once per process.

    The exit code of all ranks is then 2 for an error that the user can correct, as in one process, and 1 for any other.
    """
    if ranks.watch is None or ranks.error_text is not None:
        return
    watch = ranks.watch
    expected = isinstance(error, ForgefieldError)
    text = str(error) if expected else "".join(traceback.format_exception(error))
    if not expected:
        _wait_until(lambda: watch.loss is not None, NOTICE_DELAY)
    ranks.failed_first = watch.loss is None
    ranks.error_text, ranks.error_code = text, 2 if expected else 1
    if ranks.failed_first:
        watch.fail(text, LossKind.ERROR if expected else LossKind.EXCEPTION, ranks.error_code)


def stop_all_ranks(ranks: Ranks, message: str, code: int) -> None:
    """Stop all ranks at once, wherever they are; nothing is saved. With several ranks this does not return.

    message: printed by rank 0 if this is another rank. code: exit code.
    """
    if ranks.watch is None:
        return
    if ranks.error_text is None and ranks.watch.loss is None:
        ranks.error_text, ranks.error_code = message, code
        ranks.watch.fail(message, LossKind.STOPPED, code)
    time.sleep(NOTICE_DELAY)  # rank 0 is printing; once this process is gone, a launcher may kill it
    exit_immediately(code)


@contextmanager
def abort_all_on_error(ranks: Ranks) -> Iterator[None]:
    """Inside the block an exception on one rank stops all ranks. It is raised on rank 0 if it happened there first; every other
    rank exits here without a message, because rank 0 prints for all."""
    if ranks.watch is None:
        yield
        return
    try:
        yield
    except Terminated as stopped:
        stop_all_ranks(ranks, f"stopped by {stopped}", stopped.exit_code)
        raise
    except BaseException as error:
        announce_failure(ranks, error)
        if ranks.failed_first and ranks.is_rank_zero:
            raise
        time.sleep(NOTICE_DELAY)  # rank 0 is printing; once this process is gone, a launcher may kill it
        loss = ranks.watch.loss
        exit_immediately(loss.exit_code if loss is not None else ranks.error_code)


def exit_immediately(code: int) -> NoReturn:
    """Exit without waiting for threads or handlers, which may be waiting for a lost rank."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(0.02)


ORPHAN_GRACE_S = 20.0
"""Seconds that a rank whose launcher was killed has to save and stop."""
_joined: Ranks | None = None


def current_ranks() -> Ranks:
    """The group of this process, from the variables that the launcher has set. The first call connects the processes."""
    global _joined
    if _joined is None:
        launch = detect_launch(os.environ)
        if launch.launcher in ("torchrun", "forgefield"):  # the parent process supervises the ranks
            stop_with_parent(grace=ORPHAN_GRACE_S)
        _joined = connect(launch, on_loss=on_loss)
        if _joined.world_size > 1:
            atexit.register(_leave)
            sys.excepthook = partial(_on_uncaught_exception, _joined)
    return _joined


def run_on_all_ranks(command: Callable[[Ranks], int]) -> int:
    """The exit code of a command that runs on all ranks. If one fails, all of them exit with its message."""
    ranks = current_ranks()
    if ranks.world_size == 1:
        return command(ranks)
    try:
        with abort_all_on_error(ranks):
            code = command(ranks)
            ranks.barrier()  # some launchers end a job soon after its first process has exited
        _exit_after_command(code)
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


def _exit_after_command(code: int) -> NoReturn:
    """Run the exit handlers, then exit immediately: the communication threads of torch occasionally abort a process during the
    regular shutdown of the interpreter."""
    atexit._run_exitfuncs()
    exit_immediately(code)


def _on_uncaught_exception(
    ranks: Ranks, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """For errors in a user's script outside of Forgefield: the other ranks must not wait for this one."""
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
